"""Measure mla_combine, by itself and behind mla_decode: burst method.

`us`, `us_queued`: alone, on partial results that the caches hold. `us_behind`: what it adds to
mla_decode, decode and combine in an unbroken queue less decode in one.

python tools/bench_mla_combine.py [--out tools/results/mla_combine_h200.json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench import Bench, machine, write_json
from bench_decode_data import Call, Case, Pool

# (h, b, context, plan): one long request, a few, and a batch in which nothing is split.
CASES = (
    *(Case(h, 1, 1, 131072) for h in (16, 64, 128)),
    *(Case(h, 1, 8, 131072) for h in (16, 64, 128)),
    *(Case(h, 1, 128, 8192) for h in (16, 64, 128)),
    *(Case(64, 1, 128, 8192, (("num_splits", n),)) for n in (2, 8)),
    *(Case(128, 1, 8, 131072, (("num_splits", n),)) for n in (4, 17)),
)


def measure(bench: Bench, pool: Pool, case: Case) -> dict[str, Any]:
    call = Call(pool, case)
    call.enqueue(0)
    combine = call.calls[0].launches[-1]
    alone = bench.time(lambda i: combine())
    behind = bench.time(call.enqueue).us_queued - bench.time(call.enqueue_decode).us_queued
    num_splits = call.plan.num_splits.numpy(bench.stream)[: case.b + 1]
    counts = np.diff(num_splits)
    row: dict[str, Any] = {"h": case.h, "b": case.b, "context": case.context}
    row |= {"plan": dict(case.plan)}
    row |= {"splits": int(num_splits[-1]), "most_splits": int(counts.max())}
    row |= {"bytes_read": int(counts[counts > 1].sum()) * case.h * case.s_q * (512 + 1) * 4}
    row |= {"us": round(alone.us, 2), "us_queued": round(alone.us_queued, 2)}
    return row | {"us_behind": round(behind, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    args = parser.parse_args(argv)
    bench = Bench()
    pool, rows = Pool(bench), []
    for case in CASES:
        row = measure(bench, pool, case)
        rows.append(row)
        print(
            f"{case!s:<40} {row['splits']:5d} splits, up to {row['most_splits']:3d} a request, "
            f"{row['bytes_read'] / 1e6:5.1f} MB: {row['us']:6.2f} us alone, "
            f"{row['us_behind']:6.2f} us behind mla_decode",
            flush=True,
        )
    if args.out is not None:
        result: dict[str, Any] = {**machine(0), **bench.floors(), "rows": rows}
        result |= {"commit": args.commit} if args.commit else {}
        write_json(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
