"""Compare compile-time options of the data movement on a GPU: `python tools/bench_data.py --tune`.

Times append_kv and fetch_dequant of 65,536 tokens and quantize_q of 128 x 128 rows over a list of
settings, one line each: microseconds of a call (one burst), GB/s, the share of a 4 GiB copy and of
a copy of the same size, and whether the written bytes are those of the first setting. About 25 s;
`--only append_kv` for one kernel.

Each kernel runs in a child process, which goes through its settings. One that fails or hangs costs
its own line: a new child goes on with the setting after it.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench as timing
from bench import Bench, Timing
from bench_data import (
    BYTES_PER_TOKEN,
    COPY_BYTES,
    INPUT_BYTES,
    Cache,
    Job,
    append_job,
    fetch_job,
    quantize_job,
    retune,
    token_bytes,
)

from snapmla_rt import kernels

TOKENS = 65536
BATCH = HEADS = 128
POOL_BLOCKS = 4096
LINE_TIMEOUT_S = 25.0

# PER_WARP: rows a warp takes; without it all CTAs run at once, each with its share. The rest are
# defines of the kernel. The first setting of each list is the one in the kernel table.
Setting = Mapping[str, int]
SETTINGS: dict[str, tuple[Setting, ...]] = {
    "append_kv": (
        {},
        {"EARLY_END": 0},
        {"COUNT_ROW": 2},
        {"COUNT_ROW": 5},
        {"LOOK_ROWS": 1},
        {"LOOK_ROWS": 4},
        {"LOOK_ROWS": 32},  # never looks: what early ends cost where there is none
        {"RING_ROWS": 1},
        {"RING_ROWS": 3},
        {"MIN_CTAS": 4},
        {"MIN_CTAS": 6},
        {"MIN_CTAS": 4, "PER_WARP": 8},
        {"PER_WARP": 4},
        {"PER_WARP": 13},  # of 65,536 tokens: one round, but CTAs for 29 of 132 SMs are missing
    ),
    "fetch_dequant": (
        {},
        {"ROWS_PER_WARP": 3},
        {"ROWS_PER_WARP": 6},
        {"ROWS_PER_WARP": 8},
        {"MIN_CTAS": 5},
    ),
    "quantize_q": (
        {},
        {"RING_ROWS": 2},
        {"RING_ROWS": 4},
        {"MIN_CTAS": 5},
        {"PER_WARP": 2},
    ),
}


class QuickBench(Bench):
    """One burst a measurement."""

    def time(self, enqueue: Callable[[int], Any], repeats: int = 1) -> Timing:
        from snapmla_rt.driver.device import device_context

        enqueue(0)
        self.synchronize()
        with device_context(self.device_index):
            us = statistics.median(self._burst(enqueue))
        return Timing(us, us, us, us)


def checksum(job: Job, bench: Bench) -> int:
    """Of all that call 0 of a job writes, over arrays of zeros."""
    from snapmla_rt.array import to_host
    from snapmla_rt.driver.memory import fill

    for view in job.written:
        nbytes = view.shape[0] * view.strides[0]
        fill(view.ptr, 0, nbytes, bench.device_index, bench.stream)
    job.enqueue(0)
    bench.synchronize()
    total = 0
    for view in job.written:
        total = zlib.crc32(to_host(view).view("u1").reshape(-1).data, total)
    return total


def make_job(kernel: str, bench: Bench) -> Job:
    if kernel == "quantize_q":
        return quantize_job(bench, BATCH, HEADS)
    cache = Cache(bench, POOL_BLOCKS)
    append = append_job(bench, cache, TOKENS)
    if kernel == "append_kv":
        return append
    append.enqueue(0)  # something to fetch
    return fetch_job(bench, cache, TOKENS)


VARIANTS = {
    "append_kv": "bfloat16_claim",
    "fetch_dequant": "slots",
    "quantize_q": "bfloat16",
}


def describe(kernel: str, index: int) -> str:
    setting = SETTINGS[kernel][index]
    text = " ".join(f"{name}={value}" for name, value in setting.items())
    return f"{kernel:<14} {text or 'as in the table':<28}"


def apply(kernel: str, index: int) -> str:
    """Compile a setting and use it from now on; what the compiler says of it."""
    options = dict(SETTINGS[kernel][index])
    retune(kernel, options.pop("PER_WARP", None), options)
    used = kernels.LOADER.compiled(kernel, VARIANTS[kernel]).resources
    spills = f" {used.spill_bytes} spilled" if used.spill_bytes else ""
    return f"{used.registers} regs{spills}"


def measure(kernel: str, skip: int, device: int) -> None:
    """A child process: the settings from number `skip` on, a line each."""
    timing.IDLE_S = 0.1  # a third of the benchmarks': the settings are compared with one another
    bench = QuickBench(device)
    big = bench.copy_gbps(COPY_BYTES)
    job_bytes = {"quantize_q": BATCH * HEADS * (INPUT_BYTES + BYTES_PER_TOKEN)}
    same = bench.copy_gbps(job_bytes.get(kernel, token_bytes(TOKENS)))
    apply(kernel, 0)
    job = make_job(kernel, bench)
    want = checksum(job, bench)
    print(f"{kernel}: 4 GiB copy {big:.0f} GB/s, copy of the same size {same:.0f} GB/s", flush=True)
    for index in range(skip, len(SETTINGS[kernel])):
        try:
            resources = apply(kernel, index)
            bytes_are = "" if checksum(job, bench) == want else "  BYTES DIFFER"
            us = bench.time(job.enqueue).us
        except Exception as error:  # of any kind: the run goes on in a new process
            print(f"{describe(kernel, index)} error: {str(error)[:120]!r}", flush=True)
            sys.exit(1)
        gbps = job.nbytes / us / 1e3
        print(
            f"{describe(kernel, index)} {us:7.2f} us {gbps:6.0f} GB/s {gbps / big:6.3f} of copy "
            f"{gbps / same:6.3f} of same size  {resources}{bytes_are}",
            flush=True,
        )


def run_child(kernel: str, skip: int, device: int) -> int:
    """Settings from `skip` on in a child process; the number of lines for settings it printed, or
    -1 where it did not even come to the first."""
    command = [sys.executable, str(Path(__file__).resolve()), "--kernel", kernel]
    command += ["--skip", str(skip), "--device", str(device)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    done = -1
    try:
        while (line := lines.get(timeout=LINE_TIMEOUT_S)) is not None:
            print(line, flush=True)
            done += line.startswith((f"{kernel} ", f"{kernel}: "))
    except queue.Empty:
        print(f"no line for {LINE_TIMEOUT_S:.0f} s: stopped", flush=True)
    child.kill()
    child.wait()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="what bench_data.py is called with")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--only", choices=list(SETTINGS), action="append", help="this kernel")
    parser.add_argument("--kernel", choices=list(SETTINGS), help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kernel:
        measure(args.kernel, args.skip, args.device)
        return 0
    for kernel in args.only or SETTINGS:
        at = 0
        while at < len(SETTINGS[kernel]):
            done = run_child(kernel, at, args.device)
            if done < 0:
                print(f"{kernel}: not measured", flush=True)
                break
            if done == 0:
                print(f"{describe(kernel, at)} error: no result", flush=True)
            at += max(done, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
