"""How long the host takes to enqueue a decode call: mla_decode eagerly, with the plan reused.

    python tools/bench_host.py            # needs torch

From the Python call to its return, the last kernel launched, in microseconds: the median over many
calls on an otherwise idle host, the stream kept short of full. `launches alone` is the driver's
part: the same prepared launches without the look-up. `graph` is one replay of the captured step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine, write_json

from snapmla_rt import api, api_decode

LIMIT_US = 6.0


def host_us(call: Callable[[], Any], synchronize: Callable[[], None]) -> dict[str, float]:
    """Median and 90th percentile of one call; the queue is emptied every 64 calls."""
    for _ in range(64):
        call()
    times: list[float] = []
    for _ in range(40):
        synchronize()
        for _ in range(64):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
    times.sort()
    return {
        "us": round(statistics.median(times), 2),
        "us_90": round(times[int(0.9 * len(times))], 2),
    }


def arguments(torch: Any, b: int, h: int, context: int) -> list[Any]:
    """Small tensors of a decode call, all on the GPU."""
    width, device = context // 64, "cuda"
    blocks = b * width
    e4m3 = torch.float8_e4m3fn
    return [
        torch.randn((b, 1, h, 512), device=device).to(e4m3),
        torch.randn((b, 1, h, 64), device=device).to(torch.bfloat16),
        torch.ones((b, 1, h), device=device),
        torch.randn((blocks, 64, 512), device=device).to(e4m3),
        torch.ones((blocks, 64), device=device),
        torch.randn((blocks, 64, 64), device=device).to(torch.bfloat16),
        torch.arange(blocks, dtype=torch.int32, device=device).reshape(b, width),
        torch.full((b,), context, dtype=torch.int32, device=device),
    ]


def measure(torch: Any, b: int, h: int, context: int) -> dict[str, Any]:
    given = arguments(torch, b, h, context)
    plan = api.plan_decode(given[7], h, 1)
    mla_decode: Any = api.mla_decode
    out, lse = mla_decode(*given, plan, 0.04)
    size = api.decode_workspace_size(plan, b, context)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    everything = {"out": out, "lse": lse, "workspace": room}

    def all_given() -> None:
        mla_decode(*given, plan, 0.04, **everything)

    def none_given() -> None:
        mla_decode(*given, plan, 0.04)

    def fresh_queries() -> None:
        mla_decode(*[t[:] for t in given[:3]], *given[3:], plan, 0.04, **everything)

    def plan_again() -> None:
        api.plan_decode(given[7], h, 1, out=plan)

    all_given()
    launches = list(api_decode._prepared.values())[-1]

    def launches_alone() -> None:
        for launch in launches:
            launch()

    def key_alone() -> None:
        api_decode._look_up(given, plan, 0.04, True, out, lse, room, True, None)  # type: ignore[arg-type]

    bind: Any = api.bind_mla_decode
    bound = bind(*given, plan, 0.04, **everything)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_given()
    calls = {
        "all given": all_given,
        "results and workspace allocated": none_given,
        "new query tensors": fresh_queries,
        "look-up alone": key_alone,
        "bound": bound,
        "launches alone": launches_alone,
        "plan_decode": plan_again,
        "graph": graph.replay,
    }
    found: dict[str, Any] = {"b": b, "h": h, "context": context, "launches": len(launches)}
    for name, call in calls.items():
        found[name] = host_us(call, torch.cuda.synchronize)
        print(f"b={b} h={h}: {name:<34} {found[name]['us']:6.2f} us", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""))
    args = parser.parse_args(argv)
    try:
        import torch
    except ImportError:
        print("needs torch")
        return 2
    rows = [measure(torch, 1, 16, 512), measure(torch, 8, 128, 256)]
    result = {**machine(0), "limit_us": LIMIT_US, "rows": rows}
    if args.commit:
        result["commit"] = args.commit
    if args.out is not None:
        write_json(args.out, result)
    slow = [row for row in rows if row["all given"]["us"] > LIMIT_US]
    print(f"{'over' if slow else 'within'} {LIMIT_US} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
