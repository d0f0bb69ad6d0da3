"""Time append_kv and prepare: `python tools/bench_append_kv.py [--out] [--quick]`, Hopper GPU.

Bytes: a bf16 row of 576 values and an int64 slot read, 644 bytes written, per token; prepare: plus
what quantize_q reads and writes.
"""

from __future__ import annotations

import sys
from typing import Any

from bench_data import (
    BYTES_PER_TOKEN,
    INPUT_BYTES,
    Cache,
    Job,
    Report,
    append_job,
    bf16_rows,
    quantised,
    run,
    token_bytes,
    unchecked,
)

from snapmla_rt import api
from snapmla_rt.config import BLOCK_SIZE
from snapmla_rt.data_launch import latent_part, rope_part

SIZES = (1, 16, 128, 1024, 2048, 2049, 8192, 65536)
NAMED = (1, 128, 65536)
POOL_BLOCKS = 8192  # 524,288 tokens, 338 MB: an append of 65,536 tokens hits other blocks each time


def measure_append(report: Report, tokens: int, layout: str, cold: bool = True) -> None:
    cache = Cache(report.bench, POOL_BLOCKS, layout)
    job = append_job(report.bench, cache, tokens, cold=cold, one_per_block=tokens <= 1024)
    report.measure_job("append_kv", tokens, job, layout=layout)


def measure_prepare(report: Report, tokens: int, heads: int, cold: bool) -> None:
    bench = report.bench
    cache = Cache(bench, POOL_BLOCKS)
    planes: tuple[Any, Any, Any] = cache.planes
    nbytes = token_bytes(tokens) + tokens * heads * (INPUT_BYTES + BYTES_PER_TOKEN)
    copies = bench.copies_for_cold(nbytes) if cold else 1
    rows = bf16_rows(bench, (tokens, 576), copies)
    q = bf16_rows(bench, (tokens, 1, heads, 576), copies)
    slots = cache.slots(tokens, copies, one_per_block=True)
    out = quantised(bench, tokens, heads, copies)
    options = unchecked(bench)

    def enqueue(i: int) -> None:
        at = i % copies
        kv_c, k_pe = latent_part(rows[at]), rope_part(rows[at])
        api.prepare(
            q[at],
            kv_c,
            k_pe,
            *planes,
            slots[at],
            out=out[at],
            **options,
        )

    report.measure_job("prepare", tokens, Job(nbytes, copies, enqueue, out[0]), heads=heads)


def body(report: Report, args: Any) -> None:
    assert POOL_BLOCKS * BLOCK_SIZE >= 4 * max(SIZES)
    for tokens in NAMED if args.quick else SIZES:
        measure_append(report, tokens, "separate")
    measure_append(report, 65536, "record")
    measure_append(report, 128, "separate", cold=False)
    for tokens, heads in ((1, 128), (16, 128), (128, 16), (128, 128)):
        for cold in (True, False):
            measure_prepare(report, tokens, heads, cold)


if __name__ == "__main__":
    sys.exit(run(("append_kv", "prepare"), body))
