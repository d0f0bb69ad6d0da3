"""Fuzz the data-movement kernels against the reference, byte for byte.

    python tools/fuzz.py --kernel all --tokens 20000000 --out tools/results/fuzz_h200.json
    python tools/fuzz.py --kernel append_kv --seconds 60
    python tools/fuzz.py --kernel append_kv --replay 1234        # one failing seed again

Worker processes make cases (`fuzz_cases.py`) and the reference's answers; this process runs them on
the GPU and compares. A difference stops the run: the seed and the smallest failing input that
halving finds are printed, and the exit code is 1. No torch needed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from fuzz_cases import KERNELS, Case, make_case
from fuzz_runner import GpuRunner, Runner, describe, differing_bytes, shrink

SEGMENT_BYTES = 40 << 20  # the largest case: 8,192 float32 rows with their answer, 25 MB
Packed = tuple[Case, dict[str, Any], dict[str, Any]]


@dataclass
class Result:
    """What a run over one kernel found."""

    kernel: str
    seed: int
    tokens: int = 0
    cases: int = 0
    differing_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


# --- Cases from worker processes ---------------------------------------------------------------


def _pack(job: tuple[str, int, str]) -> Packed:
    """Make a case in a worker; its arrays go into the job's file, their places come back."""
    kernel, seed, path = job
    case = make_case(kernel, seed)
    memory = np.memmap(path, np.uint8, "r+")
    at = 0
    places: list[dict[str, Any]] = []
    for arrays in (case.inputs, case.expected):
        group = {}
        for name, array in arrays.items():
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            memory[at : at + flat.size] = flat
            group[name] = (at, array.shape, array.dtype)
            at += -(-flat.size // 64) * 64
        places.append(group)
    return Case(kernel, seed, {}, case.options), places[0], places[1]


def _unpack(packed: Packed, memory: np.ndarray) -> Case:
    case, inputs, expected = packed
    for arrays, places in ((case.inputs, inputs), (case.expected, expected)):
        for name, (at, shape, dtype) in places.items():
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            arrays[name] = memory[at : at + size].view(dtype).reshape(shape)
    return case


def _scratch(nbytes: int) -> str:
    """A folder for the cases' files: in memory where that is large enough."""
    shared = "/dev/shm"
    roomy = os.path.isdir(shared) and shutil.disk_usage(shared).free > nbytes
    return tempfile.mkdtemp(prefix="fuzz-", dir=shared if roomy else None)


def parallel_cases(kernel: str, first_seed: int, workers: int) -> Iterator[Case]:
    """Cases of consecutive seeds, made by `workers` processes; endless, close it to stop.

    A case's arrays are valid until the next one is asked for.
    """
    folder = _scratch(2 * workers * SEGMENT_BYTES)
    context = multiprocessing.get_context("spawn")
    try:
        paths = [os.path.join(folder, str(i)) for i in range(2 * workers)]
        for path in paths:
            with open(path, "wb") as file:
                file.truncate(SEGMENT_BYTES)
        memory = [np.memmap(path, np.uint8, "r") for path in paths]
        with context.Pool(workers) as pool:
            seed = first_seed
            pending = []
            for path in paths:
                pending.append(pool.apply_async(_pack, ((kernel, seed, path),)))
                seed += 1
            turn = 0
            while True:
                yield _unpack(pending[turn].get(), memory[turn])
                pending[turn] = pool.apply_async(_pack, ((kernel, seed, paths[turn]),))
                seed, turn = seed + 1, (turn + 1) % len(paths)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serial_cases(kernel: str, first_seed: int, size: int | None = None) -> Iterator[Case]:
    """Cases of consecutive seeds, made here."""
    seed = first_seed
    while True:
        yield make_case(kernel, seed, size)
        seed += 1


# --- The loop ----------------------------------------------------------------------------------


def fuzz(
    kernel: str,
    cases: Iterator[Case],
    runner: Runner,
    *,
    seed: int,
    tokens: int | None = None,
    seconds: float | None = None,
    progress: bool = False,
) -> Result:
    """Run cases until so many tokens or seconds have passed or one differs."""
    result, start, said = Result(kernel, seed), time.monotonic(), 0.0
    for case in cases:
        got = runner.run(case)
        wrong = differing_bytes(got, case.expected)
        result.tokens += case.num_tokens
        result.cases += 1
        result.seconds = time.monotonic() - start
        if wrong:
            result.differing_bytes += wrong
            result.failure = explain(case, runner)
            break
        if progress and result.seconds - said > 2:
            said = result.seconds
            print(f"  {kernel}: {result.tokens:,} tokens, {said:.0f} s", end="\r", flush=True)
        if tokens is not None and result.tokens >= tokens:
            break
        if seconds is not None and result.seconds >= seconds:
            break
    return result


def explain(case: Case, runner: Runner) -> str:
    """The seed, and the smallest failing input in words."""
    whole = describe(case, runner.run(case)).splitlines()[0]
    small = shrink(case, runner)
    return f"first failure: {whole}\nsmallest:\n{describe(small, runner.run(small))}"


# --- Command line ------------------------------------------------------------------------------


def write_rows(path: Path, results: Sequence[Result], device_index: int) -> None:
    """Put the results into the JSON list at `path`, replacing rows of the same kernels."""
    from bench import machine, update_rows

    rows = [
        {
            "kernel": r.kernel,
            "tokens": r.tokens,
            "differing_bytes": r.differing_bytes,
            "seed": r.seed,
            "cases": r.cases,
            "seconds": round(r.seconds, 1),
            **machine(device_index),
        }
        for r in results
    ]
    update_rows(path, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fuzz.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernel", default="all", choices=("all", *KERNELS))
    parser.add_argument("--tokens", type=int, help="stop after so many tokens a kernel")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds a kernel")
    parser.add_argument("--seed", type=int, default=1_000_000, help="first seed")
    parser.add_argument("--replay", type=int, help="run this seed only")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON list of rows to update")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    kernels = KERNELS if args.kernel == "all" else (args.kernel,)
    if args.tokens is None and args.seconds is None:
        args.seconds = 30.0
    limits: dict[str, Any] = {
        "tokens": args.tokens,
        "seconds": args.seconds,
        "progress": sys.stdout.isatty(),
    }
    results = []
    for kernel in kernels:
        seed = args.seed if args.replay is None else args.replay
        if args.replay is not None:
            limits["tokens"] = 1
            cases = serial_cases(kernel, seed)
        else:
            cases = parallel_cases(kernel, seed, args.workers)
        result = fuzz(kernel, cases, GpuRunner(args.device), seed=seed, **limits)
        cases.close()  # type: ignore[attr-defined]
        results.append(result)
        rate = result.tokens / max(result.seconds, 1e-9)
        print(
            f"{kernel}: {result.tokens:,} tokens in {result.cases:,} cases from seed {seed}, "
            f"{result.differing_bytes} differing bytes, {result.seconds:.1f} s ({rate:,.0f} /s)",
            flush=True,
        )
        if result.failure:
            print(result.failure, flush=True)
    if args.out:
        write_rows(args.out, results, args.device)
    return 1 if any(r.differing_bytes for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
