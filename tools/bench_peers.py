"""A FlashMLA module beside ours, where one is installed; nothing where none is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench import Bench
from bench_decode_data import POOL_TOKENS, SOFTMAX_SCALE, Case


def flash_mla_rows(bench: Bench, cases: Sequence[Case], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each case measured with flash_mla's BF16 dense decode, same method and pool."""
    try:
        import flash_mla
        import torch
    except ImportError:
        return
    stream = torch.cuda.ExternalStream(bench.stream, device=f"cuda:{bench.device_index}")
    with torch.cuda.stream(stream):
        device = f"cuda:{bench.device_index}"
        pool = torch.randn((POOL_TOKENS // 64, 64, 1, 576), dtype=torch.bfloat16, device=device)
        order = torch.randperm(POOL_TOKENS // 64, device=device).int()
        for case in cases:
            width = case.context // 64
            need = case.b * width
            count = max(min(order.numel() // need, 24), 1)
            tables = [order[i * need :][:need].reshape(case.b, width) for i in range(count)]
            shape = (case.b, case.s_q, case.h, 576)
            q = torch.randn(shape, dtype=torch.bfloat16, device=device)
            lengths = torch.full((case.b,), case.context, dtype=torch.int32, device=device)
            plan = flash_mla.get_mla_metadata(lengths, case.s_q * case.h, 1)

            def enqueue(
                i: int, tables: Any = tables, q: Any = q, rest: Any = (lengths, plan)
            ) -> None:
                flash_mla.flash_mla_with_kvcache(
                    q,
                    pool,
                    tables[i % len(tables)],
                    rest[0],
                    512,
                    *rest[1],
                    softmax_scale=SOFTMAX_SCALE,
                    causal=True,
                )

            us = bench.time(enqueue, repeats).us
            row = {"h": case.h, "s_q": case.s_q, "b": case.b, "context": case.context}
            print(f"{case!s:<34} FlashMLA BF16 here {us:8.1f} us", flush=True)
            yield {**row, "us": round(us, 2), "mode": "burst", "section": "flash_mla"}
