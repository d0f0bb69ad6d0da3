"""Measure mla_decode (and mla_combine behind it) beside yardsticks of the same run and the peers'
recorded times; write the table and draw it.

    python tools/bench_mla_decode.py --out tools/results/mla_decode_h200.json --plots tools/results
    python tools/bench_mla_decode.py --only table --cases 64,1 128,2   # h,s_q[,b[,context]] ...
    python tools/bench_mla_decode.py --only table --quick

Method: tools/bench.py's burst (idle, spin, 5 warm-up and 40 timed calls, events around each; the
median of three medians in the table, one burst elsewhere), data N(0, 1), blocks shuffled, tables
rotating over a pool of 2,097,152 tokens, so that the cache is cold. `us` holds everything of a
call: decode and combine. share_of_read is the time of reading the same bytes with the bulk copy
engine, by `us`. Sections: table, sustained, heads (heads x query length), invariant (what fixed
cuts cost), steps (preparation + decode + combine in one graph). Rows are written as they are
measured; those of sections that --only leaves out stay in the file, with the commit they are of.
The preparation's share of a step is a median of three bursts at the shortest context; there eight
layers in one graph are measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ROOT, Bench, Timing, earlier_rows, machine, write_json
from bench_decode_data import (
    POOL_TOKENS,
    Call,
    Case,
    Pool,
    WholeStep,
    Yardsticks,
    cublas_fp8_tflops,
    sustained_us,
)

RESULTS = ROOT / "tools" / "results"
PEERS = ROOT / "tools" / "peers_h200.json"

LARGE = ((128, 8192), (32, 32768), (8, 131072))
# (h, s_q) -> what a row must reach and what it aims at: share of the read rate, or TFLOP/s.
TARGETS: dict[tuple[int, int], tuple[str, float, float]] = {
    (16, 1): ("share", 0.90, 0.97),
    (32, 1): ("share", 0.90, 0.97),
    (64, 1): ("share", 0.80, 0.97),
    (128, 1): ("tflops", 900, 1250),
    (64, 2): ("tflops", 900, 1250),
    (128, 2): ("tflops", 900, 1300),
}
SINGLE = {16: (40.0, 27.0), 64: (45.0, 32.0), 128: (55.0, 38.0)}  # b = 1 x 131072: us
SHORT = ((128, 4096), (128, 512))  # as times FlashMLA BF16: must 1.5, aim 1.91
SHORT_MUST, SHORT_AIM = 1.5, 1.91

SECTIONS = ("table", "sustained", "heads", "invariant", "steps")
STEP_CONTEXTS = (16384, 32768, 65536, 131072)
LAYERS = 8  # of the graphs that hold more than one
STEP_BATCH = 64  # requests of all ranks together, as data-parallel ranks share them
STEP_POOL_TOKENS = 16_777_216
MAX_STEP_TOKENS = 8_388_608


def table_cases() -> list[Case]:
    cases = [Case(h, s_q, b, context) for h, s_q in TARGETS for b, context in LARGE]
    cases += [Case(h, 1, 1, 131072) for h in SINGLE]
    return cases + [Case(h, 1, b, context) for b, context in SHORT for h in SINGLE]


def head_cases() -> list[Case]:
    """The paper's sensitivity: heads x query length at one batch and context."""
    return [Case(h, s_q, 32, 16384) for h in (8, 16, 32, 64, 128) for s_q in (1, 2, 4)]


class Run:
    """Measures, prints and keeps the rows of one run; its file keeps those of other sections."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.bench = Bench(args.device)
        self.pool = Pool(self.bench, POOL_TOKENS, args.layout)
        self.yardsticks = Yardsticks(self.pool)
        self.repeats = 1 if args.quick else 3
        self.peers = json.loads(PEERS.read_text())
        self.result: dict[str, Any] = {
            "method": "burst; see tools/bench.py and tools/bench_mla_decode.py",
            **machine(args.device),
            "yardsticks": {},
            "rows": [],
        }
        if args.commit:
            self.result["commit"] = args.commit
        self.result["yardsticks"] = earlier_yardsticks(args.out, self.result) | self.bench.floors()
        self.result["rows"] += earlier_rows(
            args.out, "rows", lambda row: row["section"] in args.only
        )

    # --- rows

    def keep(self, row: dict[str, Any]) -> None:
        self.result["rows"].append({**row, "commit": self.result["commit"]})
        if self.args.out is not None:
            write_json(self.args.out, self.result)

    def wanted(self, case: Case) -> bool:
        fields = (case.h, case.s_q, case.b, case.context)
        chosen = self.args.cases
        return not chosen or any(fields[: len(c)] == c for c in chosen)

    def row(
        self, case: Case, us: float, mode: str, yardsticks: Yardsticks | None = None, **facts: Any
    ) -> dict[str, Any]:
        """The figures of a time; printed with the peers' and the target."""
        read = (yardsticks or self.yardsticks).read_gbps(case.kv_bytes)
        peer = self.peer(case, mode)
        measured = measures(case, us, read, peer.get("flash_mla_bf16_us"))
        row = {
            "h": case.h,
            "s_q": case.s_q,
            "b": case.b,
            "context": case.context,
            "us": round(us, 2),
            "tflops": round(measured["tflops"], 1),
            "kv_gbps": round(case.kv_bytes / us / 1e3),
            "share_of_read": round(measured["share"], 3),
            "read_gbps": round(read),
            "mode": mode,
            "plan": dict(case.plan),
            **facts,
        }
        for name in ("flash_mla_bf16_us", "vllm_fp8_us"):
            if name in peer:
                row[name] = peer[name]
                row["times_" + name.removesuffix("_us")] = round(peer[name] / us, 2)
        target, met = target_of(case, measured, mode)
        if target:
            row["target"], row["met"] = target, met
        self.print(case, row)
        return row

    def peer(self, case: Case, mode: str) -> dict[str, Any]:
        key = (case.h, case.s_q, case.b, case.context)
        for row in self.peers.get(mode, []):
            if (row["h"], row["s_q"], row["b"], row["context"]) == key:
                return row
        return {}

    def print(self, case: Case, row: dict[str, Any]) -> None:
        peers = "".join(
            f"  {row[name]:4.2f}x {label}"
            for name, label in (("times_flash_mla_bf16", "BF16"), ("times_vllm_fp8", "vLLM FP8"))
            if name in row
        )
        extra = f" (decode {row['decode_us']:.1f})" if "decode_us" in row else ""
        target = f"  [{row['target']}: {row['met']}]" if "target" in row else ""
        print(
            f"{case!s:<34} {row['mode']:<9} {row['us']:8.1f} us{extra:<17} {row['tflops']:7.1f} TF "
            f"{row['kv_gbps']:5d} GB/s  {row['share_of_read']:5.3f} of read{peers}{target}",
            flush=True,
        )

    # --- sections

    def measure(self, case: Case, section: str) -> None:
        call = Call(self.pool, case)
        call.check()
        repeats = self.repeats if section == "table" else 1
        timing = self.bench.time(call.enqueue, repeats)
        facts: dict[str, Any] = _spread(timing, repeats)
        facts |= {"variant": call.variant, "section": section}
        if call.has_combine:
            facts["decode_us"] = round(self.bench.time(call.enqueue_decode, 1).us, 2)
        self.keep(self.row(case, timing.us, "burst", **facts))

    def table(self) -> None:
        for case in filter(self.wanted, table_cases()):
            self.measure(case, "table")

    def heads(self) -> None:
        for case in filter(self.wanted, head_cases()):
            self.measure(case, "heads")

    def invariant(self) -> None:
        """What cuts at fixed token positions cost, beside the balanced plan of the table."""
        for h in (16, 64, 128):
            for b, context in (*LARGE, (1, 131072)):
                case = Case(h, 1, b, context, (("batch_invariant", True),))
                if self.wanted(case):
                    self.measure(case, "invariant")

    def sustained(self) -> None:
        for h, s_q in TARGETS:
            case = Case(h, s_q, 128, 8192)
            if self.wanted(case):
                call = Call(self.pool, case)
                us = sustained_us(self.bench, call.enqueue, 0.5 if self.args.quick else 1.5)
                facts = {"variant": call.variant, "section": "sustained"}
                self.keep(self.row(case, us, "sustained", **facts))

    def steps(self) -> None:
        """Whole steps per rank for DP1/TP8, DP2/TP4, DP4/TP2, DP8/TP1."""
        pool = Pool(self.bench, STEP_POOL_TOKENS, self.args.layout)
        yardsticks = Yardsticks(pool)  # some of these calls read more than the other pool holds
        for h, ranks in ((16, 1), (32, 2), (64, 4), (128, 8)):
            for context in STEP_CONTEXTS:
                batch = min(STEP_BATCH // ranks, MAX_STEP_TOKENS // context)
                case = Case(h, 1, batch, context)
                if not self.wanted(case):
                    continue
                call = Call(pool, case)
                # The quotient of two times is held to a bound at the first context only.
                repeats = self.repeats if context == STEP_CONTEXTS[0] else 1
                # Before and after: a chip that grows warm must not count as preparation.
                before = self.bench.time(call.enqueue, repeats).us
                step = WholeStep(call)
                timing = self.bench.time(step.enqueue, repeats)
                after = self.bench.time(call.enqueue, repeats).us
                alone = (before + after) / 2
                cost = timing.us / alone - 1
                facts = {
                    **_spread(timing, repeats),
                    "variant": call.variant,
                    "section": "steps",
                    "decode_and_combine_us": round(alone, 2),
                    "decode_and_combine_us_before": round(before, 2),
                    "decode_and_combine_us_after": round(after, 2),
                    "preparation_cost": round(cost, 4),
                    "preparation_us": round(timing.us - alone, 2),
                }
                if context == STEP_CONTEXTS[0]:
                    facts |= self.layers(call)
                row = self.row(case, timing.us, "step", yardsticks, **facts)
                if context == STEP_CONTEXTS[0]:
                    row["target"] = "preparation at most 4 %, aim 2 %"
                    row["met"] = _grade(-cost, -0.04, -0.02)
                print(f"{'':34} preparation and gaps: {100 * cost:.1f} % {row.get('met', '')}")
                self.keep(row)

    def layers(self, call: Call) -> dict[str, float]:
        """The same a layer where LAYERS follow each other in one graph, with and without the
        preparation: a model's step launches one graph, not one a layer."""
        found = []
        for prepares in (True, False):
            step = WholeStep(call, LAYERS, prepares)
            found.append(self.bench.time(step.enqueue, self.repeats).us / LAYERS)
        cost = found[0] / found[1] - 1
        print(
            f"{'':34} {LAYERS} layers a graph: {found[0]:.2f} us a layer, {found[1]:.2f} without "
            f"preparation: {100 * cost:.1f} %"
        )
        return {
            "layers_us": round(found[0], 2),
            "layers_decode_and_combine_us": round(found[1], 2),
            "layers_preparation_cost": round(cost, 4),
        }

    def cublas(self) -> None:
        for fast in (True, False):
            found = cublas_fp8_tflops(self.bench, fast)
            name = f"cublas_fp8_8192_{'fast' if fast else 'full'}_accum_tflops"
            self.result["yardsticks"][name] = None if found is None else round(found, 1)
            print(f"{name}: {found and round(found, 1)}", flush=True)

    def flash_mla(self) -> None:
        """FlashMLA BF16 beside it, where it is installed."""
        from bench_peers import flash_mla_rows

        for row in flash_mla_rows(self.bench, table_cases(), self.repeats):
            self.keep(row)


def earlier_yardsticks(path: Path | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The yardsticks in a result file that a run of the same commit, GPU and driver left: one that
    adds sections with --no-cublas must not lose cuBLAS's. No file, none."""
    if path is None or not path.is_file():
        return {}
    old = json.loads(path.read_text())
    same = all(old[name] == now[name] for name in ("commit", "gpu", "driver"))
    return dict(old["yardsticks"]) if same else {}


def measures(
    case: Case, us: float, read_gbps: float, flash_mla_us: float | None
) -> dict[str, float]:
    """What targets are set in: us, tflops, share of the read rate and, where FlashMLA's time is
    known, times; not rounded, so that 0.7996 does not pass for 0.8."""
    found = {
        "us": us,
        "tflops": case.flops / us / 1e6,
        "share": case.kv_bytes / us / 1e3 / read_gbps,
    }
    return found if flash_mla_us is None else {**found, "times": flash_mla_us / us}


def target_of(case: Case, measured: Mapping[str, float], mode: str) -> tuple[str, str]:
    """(what is asked, "aim", "must" or "missed") of a case of the table, by its `measures`."""
    if mode != "burst" or case.plan:
        return "", ""
    if (case.b, case.context) == (1, 131072) and case.h in SINGLE:
        must, aim = SINGLE[case.h]
        return f"{must:g} us, aim {aim:g}", _grade(-measured["us"], -must, -aim)
    if (case.b, case.context) in SHORT:
        if "times" not in measured:
            return "", ""
        asked = f"{SHORT_MUST} x FlashMLA BF16, aim {SHORT_AIM}"
        return asked, _grade(measured["times"], SHORT_MUST, SHORT_AIM)
    if (case.b, case.context) in LARGE and (case.h, case.s_q) in TARGETS:
        kind, must, aim = TARGETS[case.h, case.s_q]
        return f"{kind} {must:g}, aim {aim:g}", _grade(measured[kind], must, aim)
    return "", ""


def _grade(value: float, must: float, aim: float) -> str:
    return "aim" if value >= aim else "must" if value >= must else "missed"


def _spread(timing: Timing, repeats: int) -> dict[str, float]:
    """Lowest and highest median where there are several bursts, and the time in a queue."""
    found = {"us_queued": round(timing.us_queued, 2)}
    if repeats > 1:
        found |= {"us_low": round(timing.low, 2), "us_high": round(timing.high, 2)}
    return found


def _case(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=None, help="result file")
    p.add_argument("--plots", type=Path, default=None, help="folder for the PNGs")
    p.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    p.add_argument("--cases", nargs="+", type=_case, default=[], help="h[,s_q[,b[,context]]] ...")
    p.add_argument("--quick", action="store_true", help="one repeat")
    p.add_argument("--no-cublas", action="store_true")
    p.add_argument("--layout", choices=("separate", "record"), default="separate")
    p.add_argument("--device", type=int, default=0)
    p.add_argument("--commit", default=os.environ.get("COMMIT", ""), help="commit to record")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    start = time.monotonic()
    run = Run(args)
    if not args.no_cublas:
        run.cublas()
    sections: dict[str, Callable[[], None]] = {name: getattr(run, name) for name in SECTIONS}
    for name in args.only:
        print(f"--- {name}, at {time.monotonic() - start:.0f} s", flush=True)
        sections[name]()
    run.flash_mla()
    if args.plots is not None:
        from bench_plots import draw

        draw(run.result, args.plots)
    now = run.result["commit"]
    missed = [r for r in run.result["rows"] if r.get("met") == "missed" and r["commit"] == now]
    print(f"{len(missed)} of the targets missed, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
