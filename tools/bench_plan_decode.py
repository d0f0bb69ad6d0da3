"""Measure plan_decode, once a decode step: burst method, beside the peers' metadata kernels.

python tools/bench_plan_decode.py [--out tools/results/plan_decode_h200.json]
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

from snapmla_rt import api
from snapmla_rt.array import to_device

# us of FlashMLA's and vLLM FP8's get_mla_metadata on an H200 (context 8192), by batch.
PEERS = {1: (16.1, 11.9), 8: (16.6, 13.2), 32: (18.7, 14.4), 128: (22.2, 18.5), 512: (41.0, 35.5)}
MODES: tuple[dict[str, Any], ...] = ({}, {"num_splits": 4}, {"batch_invariant": True})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default="")
    args = parser.parse_args(argv)
    bench, rows = Bench(), []
    for batch, (flash_mla, vllm) in PEERS.items():
        for mode in MODES:
            lengths = to_device(np.full(batch, 8192, np.int32), 0).view()
            options: dict[str, Any] = {"stream": bench.stream, **mode}
            plan = api.plan_decode(lengths, 128, 1, **options)

            def enqueue(
                i: int, lengths: Any = lengths, plan: Any = plan, options: Any = options
            ) -> None:
                api.plan_decode(lengths, 128, 1, out=plan, **options)

            timing = bench.time(enqueue)
            row = {"b": batch, "mode": mode, "us": round(timing.us, 2)}
            row |= {"us_queued": round(timing.us_queued, 2)}
            row |= {"flash_mla_us": flash_mla, "vllm_fp8_us": vllm}
            rows.append(row)
            print(
                f"b={batch:<4} {mode!s:<26} {timing.us:6.1f} us (queued {timing.us_queued:.1f}); "
                f"FlashMLA {flash_mla}, vLLM FP8 {vllm}",
                flush=True,
            )
    if args.out is not None:
        result: dict[str, Any] = {**machine(0), **bench.floors(), "rows": rows}
        result |= {"commit": args.commit} if args.commit else {}
        write_json(args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
