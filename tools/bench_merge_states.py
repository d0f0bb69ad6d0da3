"""Time merge_states: `python tools/bench_merge_states.py [--out [FILE]]` on a Hopper GPU.

Bytes: two rows and their lse read, one row and its lse written. Warm and cold (see bench.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench import ROOT, Bench, machine, write_json

from snapmla_rt import api

RESULTS = ROOT / "tools" / "results" / "merge_states_h200.json"
# (b, s_q, h, width, input type): decode steps of DeepSeek (128 heads whole, 16 a rank) and
# LongCat-like 64 heads at small and large batches; float32 partial results; a prefill's heads.
CASES = (
    *((b, 1, h, 512, "bfloat16") for h in (16, 64, 128) for b in (1, 16, 128)),
    (128, 4, 128, 512, "bfloat16"),
    (128, 1, 128, 512, "float32"),
    (1, 8192, 128, 128, "bfloat16"),
)


def measure(bench: Bench, case: tuple[int, int, int, int, str], cold: bool) -> dict[str, Any]:
    b, s_q, heads, width, dtype = case
    rows = b * s_q * heads
    size = 4 if dtype == "float32" else 2
    nbytes = rows * (3 * width * size + 3 * 4)
    copies = bench.copies_for_cold(nbytes) if cold else 1
    lse = np.zeros((b, heads, s_q), np.float32)
    zeros = np.zeros((b, s_q, heads, width), np.float32 if size == 4 else np.uint16)
    outs = [
        [bench.array(zeros.shape, dtype, zeros), bench.array(lse.shape, "float32", lse)]
        for _ in range(3 * copies)
    ]

    def enqueue(i: int) -> None:
        a, other, merged = outs[3 * (i % copies) : 3 * (i % copies) + 3]
        api.merge_states(*a, *other, out=merged[0], lse=merged[1], stream=bench.stream)

    timing = bench.time(enqueue)
    state = bench.state(nbytes, copies)
    bench.free()
    row = {"b": b, "s_q": s_q, "h": heads, "width": width, "dtype": dtype, "cache": state}
    row |= {"bytes": nbytes, "us": round(timing.us, 2), "us_queued": round(timing.us_queued, 2)}
    return row | {"gbps": round(nbytes / timing.us / 1e3, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, default=None)
    args = parser.parse_args(argv)
    bench = Bench()
    rows = []
    for case in CASES:
        for cold in (False, True):
            rows.append(measure(bench, case, cold))
            print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        result = {**machine(0), **bench.floors(), "rows": rows}
        write_json(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
