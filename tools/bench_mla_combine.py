"""Measure mla_combine alone: burst method, warm partial results as a decode leaves them.

python tools/bench_mla_combine.py [--out tools/results/mla_combine_h200.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import Bench, machine
from bench_decode_data import Call, Case, Pool

# (h, b, context, plan): one long request, a few, and a batch in which nothing is split.
CASES = (
    *(Case(h, 1, 1, 131072) for h in (16, 64, 128)),
    *(Case(h, 1, 8, 131072) for h in (16, 64, 128)),
    *(Case(h, 1, 128, 8192) for h in (16, 64, 128)),
    *(Case(64, 1, 128, 8192, (("num_splits", n),)) for n in (2, 8)),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    args = parser.parse_args(argv)
    bench = Bench()
    pool, rows = Pool(bench), []
    for case in CASES:
        call = Call(pool, case)
        call.enqueue(0)
        combine = call.calls[0].launches[-1]
        timing = bench.time(lambda i, combine=combine: combine())
        splits = int(call.plan.num_splits.numpy(bench.stream)[-1])
        merged = splits if splits > case.b else 0
        nbytes = merged * case.h * case.s_q * (512 + 1) * 4
        row = {"h": case.h, "b": case.b, "context": case.context, "plan": dict(case.plan)}
        row |= {"splits": splits, "us": round(timing.us, 2), "bytes_read": nbytes}
        row |= {"us_queued": round(timing.us_queued, 2)}
        rows.append(row)
        print(f"{case!s:<40} {splits:5d} splits {timing.us:6.2f} us", flush=True)
    if args.out is not None:
        result: dict[str, Any] = {**machine(0), **bench.floors(), "rows": rows}
        result |= {"commit": args.commit} if args.commit else {}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
