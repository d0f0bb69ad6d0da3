"""Time fetch_dequant: `python tools/bench_fetch_dequant.py [--out] [--quick]` on a Hopper GPU.

Bytes: 644 bytes and an int64 slot (ranges: nothing) read, 1,152 bytes written, per token.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from bench_data import (
    BYTES_PER_TOKEN,
    INPUT_BYTES,
    Cache,
    Job,
    Report,
    fetch_job,
    fetched,
    run,
)

from snapmla_rt import api
from snapmla_rt.config import BLOCK_SIZE

SIZES = (1, 16, 128, 1024, 8192, 65536)
NAMED = (1, 128, 65536)
POOL_BLOCKS = 8192
RANGES = 16  # requests of the ranges form


def measure_slots(report: Report, tokens: int, layout: str, concatenate: bool = False) -> None:
    cache = Cache(report.bench, POOL_BLOCKS, layout)
    job = fetch_job(report.bench, cache, tokens, concatenate=concatenate)
    facts = {"layout": layout, "form": "slots", "out": "one" if concatenate else "two"}
    report.measure_job("fetch_dequant", tokens, job, **facts)


def measure_ranges(report: Report, tokens: int) -> None:
    bench = report.bench
    cache = Cache(bench, POOL_BLOCKS)
    planes: tuple[Any, Any, Any] = cache.planes
    nbytes = tokens * (BYTES_PER_TOKEN + INPUT_BYTES)
    copies = bench.copies_for_cold(nbytes)
    width = -(-tokens // RANGES // BLOCK_SIZE)
    rng = np.random.default_rng(2)
    tables = []
    for _ in range(copies):
        blocks = rng.permutation(POOL_BLOCKS)[: RANGES * width].astype(np.int32)
        tables.append(bench.array((RANGES, width), "int32", blocks))
    starts = bench.array((RANGES,), "int32", np.zeros(RANGES, np.int32))
    ends = np.linspace(0, tokens, RANGES + 1).astype(np.int32)
    cu_seqlens = bench.array((RANGES + 1,), "int32", ends)
    out = fetched(bench, tokens, copies)
    options: dict[str, Any] = {"stream": bench.stream, "backend": "cuda"}

    def enqueue(i: int) -> None:
        at = i % copies
        api.fetch_dequant_ranges(
            *planes,
            tables[at],
            starts,
            cu_seqlens,
            out=out[at],
            **options,
        )

    facts = {"layout": "separate", "form": "ranges", "out": "two"}
    report.measure_job("fetch_dequant", tokens, Job(nbytes, copies, enqueue, out[0]), **facts)


def body(report: Report, args: Any) -> None:
    for tokens in NAMED if args.quick else SIZES:
        measure_slots(report, tokens, "separate")
    measure_slots(report, 65536, "record")
    measure_slots(report, 65536, "separate", concatenate=True)
    measure_ranges(report, 65536)


if __name__ == "__main__":
    sys.exit(run(("fetch_dequant",), body))
