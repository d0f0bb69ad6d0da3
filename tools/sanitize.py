"""Run small cases of every kernel under compute-sanitizer.

    python tools/sanitize.py                                  # memcheck, racecheck, synccheck
    python tools/sanitize.py --tool memcheck --out tools/results/sanitizer_h200.json

Each tool runs a child process over the same cases, in two parts (--part): all decode variants,
splits, empty requests, both layouts and the schedule; preparation, appends, fetches and block
copies. Their bytes are compared with the reference as well. racecheck runs the decode's debug build
(SNAPMLA_DEBUG=1), in which every lane arrives at a barrier: it does not follow an arrival that one
lane makes for its warp behind __syncwarp, as the release build has them. Exit
code 1 where a tool reports an error or a byte differs, 2 where compute-sanitizer is not installed.
It is looked for on the PATH, in $CUDA_HOME, /usr/local/cuda and in site-packages (pip install
nvidia-cuda-sanitizer-api).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench import earlier_rows, machine, write_json

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
DEFAULT = TOOLS[:3]
PARTS = ("data", "decode")
SUMMARY = re.compile(r"(ERROR SUMMARY: \d+ error|RACECHECK SUMMARY: \d+ hazard)\w*.*")


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, or None."""
    places = [shutil.which("compute-sanitizer")]
    for root in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"):
        if root:
            places += [f"{root}/bin/compute-sanitizer"]
            places += [f"{root}/compute-sanitizer/compute-sanitizer"]
    for folder in sys.path:
        if folder.endswith("-packages"):
            places += [str(path) for path in Path(folder).glob("nvidia/**/compute-sanitizer")]
    return next((path for path in places if path and os.access(path, os.X_OK)), None)


def small_specs() -> Iterator[Any]:
    """Few tokens, every path: one and many blocks, a full ring, splits, row tiles, empty rows."""
    from decode_cases import DecodeSpec

    yield DecodeSpec(1, 16, 1, (130, 0, 1), pattern="loud_tokens")
    yield DecodeSpec(2, 5, 2, (70,), layout="record", pattern="rising")
    yield DecodeSpec(3, 32, 1, (400,), num_splits=3, pattern="loud_tokens")
    yield DecodeSpec(4, 64, 1, (200, 64), layout="strided", batch_invariant=128)
    yield DecodeSpec(5, 48, 2, (65, 3), num_splits=2, layout="record")
    yield DecodeSpec(6, 128, 1, (129,), causal=False)
    yield DecodeSpec(7, 3, 4, (2, 500), pattern="nan_tokens")


def child(part: str) -> int:
    """The cases of a part in this process; prints one line a case."""
    wrong = {"decode": _decode_cases, "data": _data_cases}[part]()
    return 1 if wrong else 0


def _data_cases() -> int:
    """Preparation, appends (both ways to find duplicates), fetches and block copies."""
    from fuzz_cases import KERNELS, make_case
    from fuzz_runner import GpuRunner, differing_bytes

    runner, wrong = GpuRunner(), _prepare_case() + _copy_case() + _dropin_case()
    for kernel in KERNELS:
        for seed, tokens in enumerate((1, 33, 200, 7, 64, 2100, 2100)):
            case = make_case(kernel, seed, tokens)
            differing = differing_bytes(runner.run(case), case.expected)
            print(f"{kernel} {tokens} tokens, seed {seed}: {differing} bytes differ", flush=True)
            wrong += differing
    return wrong


def _dropin_case() -> int:
    """merge_states and widen_per_tensor, against their references."""
    import numpy as np
    from decode_gpu import filled, put

    from snapmla_rt import api
    from snapmla_rt.api_widen import widen_per_tensor
    from snapmla_rt.array import to_host
    from snapmla_rt.reference.merge_states import merge_states
    from snapmla_rt.reference.widen_per_tensor import widen_per_tensor as reference_widen

    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((3, 2, 5, 264)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((3, 5, 2)).astype(np.float32) for _ in range(2)]
    lses[0][0], lses[1][1] = np.inf, -np.inf
    given = (outs[0], lses[0], outs[1], lses[1])
    merge: Any = api.merge_states
    merged = merge(*(put(array) for array in given))
    wrong = sum(
        int((part.numpy() != want).sum())
        for part, want in zip(merged, merge_states(*given), strict=True)
    )
    codes = rng.integers(0, 127, (5, 64, 576), dtype=np.uint8)
    table = np.array([[4, 1], [2147480000, -1], [0, 7]], np.int32)
    lengths, scale = np.array([65, 0, 128], np.int32), np.array([0.5], np.float32)
    rope, line = np.zeros((5, 64, 64), np.uint16), np.zeros(64, np.float32)
    reference_widen(codes, table, lengths, scale, rope, line)
    places = filled((5, 64, 64), "bfloat16", 0), filled((64,), "float32", 0)
    widen: Any = widen_per_tensor
    widen(*(put(a) for a in (codes, table, lengths, scale)), *places)
    wrong += int((to_host(places[0]).view(np.uint16) != rope).sum())
    wrong += int((to_host(places[1]) != line).sum())
    print(f"merge_states, widen_per_tensor: {wrong or 'no'} values differ", flush=True)
    return wrong


def _copy_case() -> int:
    """Block copies of the device storage in both layouts."""
    from snapmla_rt.device_storage import DeviceKVCacheStorage

    wrong = 0
    for layout in ("separate", "record"):
        storage = DeviceKVCacheStorage(6, layout)
        storage.poison_blocks([1, 2, 3, 4, 5])
        before = storage.block_bytes(2)
        storage.copy_blocks([(2, 4), (2, 5)])
        storage.synchronize()
        wrong += sum(storage.block_bytes(block) != before for block in (4, 5))
    print(f"copy_blocks: {wrong or 'no'} blocks differ", flush=True)
    return wrong


def _decode_cases() -> int:
    from decode_cases import solve
    from decode_gpu import report, run

    wrong = 0
    for spec in small_specs():
        one = solve(spec)
        start = time.monotonic()
        text = report(run(one.case()), (one.out, one.lse))
        wrong += text is not None
        print(f"{spec}: {text or 'same bytes'} ({time.monotonic() - start:.1f} s)", flush=True)
    return wrong


def _prepare_case() -> int:
    """append_kv and quantize_q in one launch, against the reference."""
    import ml_dtypes
    import numpy as np
    from decode_gpu import filled, put
    from poison import poisoned_cache

    from snapmla_rt import api
    from snapmla_rt.array import to_host
    from snapmla_rt.reference.append_kv import append_kv
    from snapmla_rt.reference.quantize_q import quantize_q

    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 1, 20, 576), np.float32)
    kv = rng.standard_normal((3, 576), np.float32)
    slots = np.array([5, -1, 130], np.int64)
    host = poisoned_cache(3)
    planes = [put(plane) for plane in host]
    out = (
        filled((3, 1, 20, 512), "float8_e4m3fn", 0),
        filled((3, 1, 20, 64), "bfloat16", 0),
        filled((3, 1, 20), "float32", 0),
    )
    prepare: Any = api.prepare
    arrays = (q, np.ascontiguousarray(kv[:, :512]), np.ascontiguousarray(kv[:, 512:]))
    prepare(*(put(array) for array in arrays), *planes, put(slots), out=out)
    append_kv(kv[:, :512], kv[:, 512:], *host, slots)
    wrong = 0
    for got, want in zip([*out, *planes], [*quantize_q(q), *host], strict=True):
        bits = np.dtype(f"u{want.dtype.itemsize}")
        wrong += int((to_host(got).view(bits) != np.asarray(want).view(bits)).sum())
    assert want.dtype == ml_dtypes.bfloat16
    print(f"prepare: {wrong or 'no'} values differ", flush=True)
    return wrong


def _injection(sanitizer: str) -> list[str]:
    """Where the libraries of an installation from a wheel lie, which is not beside the program."""
    library = Path(sanitizer).resolve().parent.parent / "lib"
    found = (library / "libTreeLauncherTargetInjection.so").is_file()
    return ["--injection-path", str(library)] if found else []


def run_tool(sanitizer: str, tool: str, part: str, timeout: float) -> dict[str, Any]:
    """One tool over the cases of a part."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "77", "--print-limit", "20"]
    if tool == "racecheck":
        command += ["--racecheck-report", "analysis"]
    command += _injection(sanitizer)
    command += [sys.executable, str(Path(__file__).resolve()), "--child", "--part", part]
    env = dict(os.environ, SNAPMLA_JIT="lazy")
    if (tool, part) == ("racecheck", "decode"):
        env["SNAPMLA_DEBUG"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=timeout)
        text, code = (done.stdout + done.stderr).decode(errors="replace"), done.returncode
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace") + f"\nover {timeout:.0f} s"
        code = 124
    summaries = [found.group(0) for found in SUMMARY.finditer(text)]
    seconds = round(time.monotonic() - start, 1)
    print(f"{part}, {tool}: exit {code}, {summaries or 'no summary'}, {seconds} s", flush=True)
    if code != 0:
        print(text[-6000:], flush=True)
    return {"part": part, "tool": tool, "exit_code": code, "summary": summaries, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, default=[])
    parser.add_argument("--part", action="append", choices=PARTS, default=[])
    parser.add_argument("--timeout", type=float, default=300, help="seconds a tool")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.part[0])
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not installed (see --help for where it is looked for)")
        return 2
    rows = [
        run_tool(sanitizer, tool, part, args.timeout)
        for part in args.part or PARTS
        for tool in args.tool or DEFAULT
    ]
    if args.out is not None:
        result: dict[str, Any] = machine(0)
        result |= {"commit": args.commit} if args.commit else {}
        again = {(row["part"], row["tool"]) for row in rows}
        kept = earlier_rows(args.out, "tools", lambda row: (row["part"], row["tool"]) in again)
        now = [{**row, "commit": result["commit"]} for row in rows]
        write_json(args.out, result | {"tools": kept + now})
    return 1 if any(row["exit_code"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
