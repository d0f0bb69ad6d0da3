"""Fuzz the decode kernels against the reference, byte for byte.

    python tools/fuzz_decode.py --cases 2000 --out tools/results/decode_fuzz_h200.json
    python tools/fuzz_decode.py --replay 1234            # one seed again, and shrink it
    python tools/fuzz_decode.py --cases 500 --first-seed 100000 --seconds 60

Worker processes draw problems (tests/decode_cases.py), build them and answer them with the
reference; this process runs plan_decode, mla_decode and mla_combine on GPU 0 and compares every
byte of out, lse and the plan. The fixed grid of tests/gpu/test_mla_decode_gpu.py comes first. A
differing case is printed with its spec, shrunk to a smaller one that still differs, and counted;
the run goes on, and ends with exit code 1. No torch needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import numpy as np
from bench import machine, write_json
from decode_cases import DecodeSpec, Solved, draw, smaller, solve, solved, worker_pool

from snapmla_rt.decode_select import VARIANTS, decode_variant


@dataclass
class Tally:
    """What a run found so far."""

    cases: int = 0
    grid_cases: int = 0
    differing_cases: int = 0
    differing_bytes: int = 0
    compared_bytes: int = 0
    variants: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def compare_on_gpu(one: Solved) -> tuple[int, str]:
    """(differing bytes, report) of a solved case, its plan included."""
    from decode_gpu import OnGpu, differing_bytes, report

    from snapmla_rt.array import to_host
    from snapmla_rt.tensor import view

    case = one.case()
    on_gpu = OnGpu(case)
    plan, want = on_gpu.plan(), case.plan()
    parts = to_host(view(plan.parts, "parts")) != want.parts
    ends = to_host(view(plan.num_splits, "num_splits")) != want.num_splits
    got, expected = on_gpu.decode(plan), (one.out, one.lse)
    wrong = 4 * int(parts.sum() + ends.sum()) + differing_bytes(got, expected)
    text = f"plan: {parts.sum()} and {ends.sum()} integers differ\n" if parts.any() else ""
    return wrong, text + (report(got, expected) or "")


def shrink(spec: DecodeSpec, seconds: float) -> DecodeSpec:
    """A simpler spec that still differs: greedy, until nothing simpler does or time is up."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for trial in smaller(spec):
            if time.monotonic() > end:
                break
            if compare_on_gpu(solve(trial))[0]:
                spec, found = trial, True
                break
    return spec


def specs_of(args: argparse.Namespace) -> Iterator[DecodeSpec]:
    """The fixed grid, then drawn problems."""
    if not args.no_grid:
        from test_mla_decode_gpu import grid_specs

        for block_n in VARIANTS:
            yield from grid_specs(block_n)
    blocks = tuple(VARIANTS)
    seeds = itertools.count(args.first_seed)
    yield from (draw(seed, blocks) for seed in itertools.islice(seeds, args.cases))


def run(args: argparse.Namespace) -> Tally:
    """Compare until the cases or the time are used up."""
    tally, start = Tally(), time.monotonic()
    with worker_pool(args.workers) as pool:
        for one in solved(pool, specs_of(args)):
            drawn = one.spec == draw(one.spec.seed, tuple(VARIANTS))
            tally.cases += drawn
            tally.grid_cases += not drawn
            tally.compared_bytes += one.out.nbytes + one.lse.nbytes
            rows = one.spec.num_heads_q * one.spec.seq_len_q
            tally.variants[decode_variant(rows, one.spec.block_n)] += 1
            wrong, text = compare_on_gpu(one)
            if wrong:
                note_failure(tally, one.spec, wrong, text, args)
            if (tally.cases + tally.grid_cases) % 100 == 0:
                progress(tally, start)
            if args.seconds and time.monotonic() - start > args.seconds:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    progress(tally, start)
    return tally


def note_failure(
    tally: Tally, spec: DecodeSpec, wrong: int, text: str, args: argparse.Namespace
) -> None:
    tally.differing_cases += 1
    tally.differing_bytes += wrong
    print(f"DIFFERS in {wrong} bytes: {spec}\n{text}", flush=True)
    if len(tally.failures) < 3:
        small = shrink(spec, args.shrink_seconds)
        wrong, text = compare_on_gpu(solve(small))
        print(f"shrunk to ({wrong} bytes): {small}\n{text}", flush=True)
        tally.failures.append(repr(small))


def progress(tally: Tally, start: float) -> None:
    print(
        f"{tally.cases} drawn + {tally.grid_cases} grid cases, {tally.differing_bytes} differing "
        f"bytes in {tally.differing_cases} of them, {time.monotonic() - start:.0f} s",
        flush=True,
    )


def write_result(args: argparse.Namespace, tally: Tally, seconds: float) -> None:
    result = {
        "what": "out and lse of plan_decode + mla_decode + mla_combine against the reference",
        "cases": tally.cases,
        "grid_cases": tally.grid_cases,
        "differing_bytes": tally.differing_bytes,
        "differing_cases": tally.differing_cases,
        "compared_bytes": tally.compared_bytes,
        "variants": dict(tally.variants),
        "seed": args.first_seed,
        "failures": tally.failures,
        "seconds": round(seconds, 1),
        **machine(0),
        **({"commit": args.commit} if args.commit else {}),
    }
    write_json(args.out, result)
    print(f"wrote {args.out}")


def replay(seed: int, args: argparse.Namespace) -> int:
    spec = draw(seed, tuple(VARIANTS))
    print(json.dumps(asdict(spec), indent=1))
    tally = Tally()
    wrong, text = compare_on_gpu(solve(spec))
    if wrong:
        note_failure(tally, spec, wrong, text, args)
    print(f"{wrong} differing bytes")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", type=int, default=2000, help="drawn cases, after the fixed grid")
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--seconds", type=float, default=0, help="stop after this long (0: never)")
    p.add_argument("--no-grid", action="store_true", help="leave the fixed grid out")
    p.add_argument("--workers", type=int, default=None, help="reference processes (default: cores)")
    p.add_argument("--shrink-seconds", type=float, default=30)
    p.add_argument("--replay", type=int, default=None, metavar="SEED")
    p.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="commit to record")
    p.add_argument("--out", type=Path, default=None, help="write a result file")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.replay is not None:
        return replay(args.replay, args)
    start = time.monotonic()
    tally = run(args)
    if args.out is not None:
        write_result(args, tally, time.monotonic() - start)
    return 1 if tally.differing_bytes else 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
