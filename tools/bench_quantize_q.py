"""Time quantize_q: `python tools/bench_quantize_q.py [--out] [--quick]` on a Hopper GPU.

Bytes: 576 bf16 values read, 644 bytes written, per token and head.
"""

from __future__ import annotations

import sys
from typing import Any

from bench_data import Report, quantize_job, run

CASES = ((128, 128), (64, 128), (128, 16), (128, 64), (16, 128), (1, 128), (1, 16))
NAMED = ((128, 128), (128, 16), (1, 128))


def measure(report: Report, batch: int, heads: int, cold: bool) -> None:
    job = quantize_job(report.bench, batch, heads, cold=cold)
    report.measure_job("quantize_q", batch, job, heads=heads)


def body(report: Report, args: Any) -> None:
    for batch, heads in NAMED if args.quick else CASES:
        for cold in (True, False):
            measure(report, batch, heads, cold)


if __name__ == "__main__":
    sys.exit(run(("quantize_q",), body))
