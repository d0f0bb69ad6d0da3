"""Time quantize_q: `python tools/bench_quantize_q.py [--out] [--quick]` on a Hopper GPU.

Bytes: 576 bf16 values read, 644 bytes written, per token and head.
"""

from __future__ import annotations

import sys
from typing import Any

from bench_data import BYTES_PER_TOKEN, INPUT_BYTES, Report, bf16_rows, run

from snapmla_rt import api

CASES = ((128, 128), (64, 128), (128, 16), (128, 64), (16, 128), (1, 128), (1, 16))
NAMED = ((128, 128), (128, 16), (1, 128))


def measure(report: Report, batch: int, heads: int, cold: bool) -> None:
    bench = report.bench
    rows = batch * heads
    nbytes = rows * (INPUT_BYTES + BYTES_PER_TOKEN)
    copies = bench.copies_for_cold(nbytes) if cold else 1
    q = bf16_rows(bench, (batch, 1, heads, 576), copies)
    out = [
        (
            bench.array((batch, 1, heads, 512), "uint8"),
            bench.array((batch, 1, heads, 64), "bfloat16"),
            bench.array((batch, 1, heads), "float32"),
        )
        for _ in range(copies)
    ]

    def enqueue(i: int) -> None:
        at = i % copies
        api.quantize_q(q[at], out=out[at], stream=bench.stream, backend="cuda")

    state = bench.state(nbytes, copies)
    report.measure("quantize_q", batch, nbytes, enqueue, heads=heads, cache=state)
    bench.free()


def body(report: Report, args: Any) -> None:
    for batch, heads in NAMED if args.quick else CASES:
        for cold in (True, False):
            measure(report, batch, heads, cold)


if __name__ == "__main__":
    sys.exit(run(("quantize_q",), body))
