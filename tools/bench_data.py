"""What the benchmarks of the data movement share: data, rows of results, the command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench import METHOD, ROOT, Bench, machine, update_rows

from snapmla_rt import data_kernels, kernels
from snapmla_rt.config import BLOCK_SIZE, BYTES_PER_TOKEN
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import KernelTable
from snapmla_rt.tensor import TensorView

RESULTS = ROOT / "tools" / "results" / "data_movement_h200.json"
COPY_BYTES = 4 << 30
INPUT_BYTES = 2 * 576  # a bf16 row


class Cache:
    """A pool of blocks on the GPU and slots of tokens in it, blocks shuffled."""

    def __init__(self, bench: Bench, num_blocks: int, layout: str = "separate") -> None:
        from snapmla_rt.device_storage import DeviceKVCacheStorage

        self.storage = DeviceKVCacheStorage(num_blocks, layout, device_index=bench.device_index)
        planes = (self.storage.ckv_cache, self.storage.k_scale_cache, self.storage.k_rope_cache)
        first, second, third = (plane.view() for plane in planes)
        self.planes: tuple[Any, Any, Any] = (first, second, third)
        self.num_blocks = num_blocks
        self._bench = bench

    def slots(self, num_tokens: int, copies: int, one_per_block: bool) -> list[TensorView]:
        """int64 slot arrays of `copies` calls: whole shuffled blocks, or a token of a block each
        (a decode step: every request appends to a block of its own)."""
        rng = np.random.default_rng(1)
        result = []
        for _ in range(copies):
            if one_per_block:
                block = rng.permutation(self.num_blocks)[:num_tokens]
                slots = block * BLOCK_SIZE + rng.integers(0, BLOCK_SIZE, num_tokens)
            else:
                order = rng.permutation(self.num_blocks)[: -(-num_tokens // BLOCK_SIZE)]
                slots = (order[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
            slots = np.ascontiguousarray(slots[:num_tokens], np.int64)
            result.append(self._bench.array((num_tokens,), "int64", slots))
        return result


def bf16_rows(bench: Bench, shape: Sequence[int], copies: int) -> list[TensorView]:
    """N(0, 1) bf16 arrays; one is drawn, the others hold the same bytes elsewhere."""
    from snapmla_rt.driver.memory import copy_on_device

    data = np.random.default_rng(0).standard_normal(shape, np.float32)
    bits = (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    arrays = [bench.array(shape, "bfloat16", bits)]
    for _ in range(copies - 1):
        arrays.append(bench.array(shape, "bfloat16"))
        copy_on_device(arrays[-1].ptr, arrays[0].ptr, bits.nbytes, bench.device_index, 0)
    return arrays


class Report:
    """Rows of one kernel: prints them and puts them into the result file."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.rows: list[dict[str, Any]] = []
        self.floors = bench.floors()
        self.copy_gbps = bench.copy_gbps(COPY_BYTES)
        print(f"copy of 4 GiB: {self.copy_gbps:.0f} GB/s read plus written; {self.floors}")

    def measure(
        self, kernel: str, tokens: int, nbytes: int, enqueue: Callable[[int], Any], **facts: Any
    ) -> None:
        """Time a call that reads and writes nbytes in all."""
        timing = self.bench.time(enqueue)
        gbps = nbytes / timing.us / 1e3
        queued = nbytes / timing.us_queued / 1e3
        row = {
            "kernel": kernel,
            "tokens": tokens,
            "us": round(timing.us, 2),
            "us_low": round(timing.low, 2),
            "us_high": round(timing.high, 2),
            "us_queued": round(timing.us_queued, 2),
            "bytes": nbytes,
            "gbps": round(gbps),
            "gbps_queued": round(queued),
            "share_of_copy": round(gbps / self.copy_gbps, 3),
            "share_of_copy_queued": round(queued / self.copy_gbps, 3),
            "copy_gbps": round(self.copy_gbps),
            "method": METHOD,
            **facts,
            **self.floors,
            **machine(self.bench.device_index),
        }
        self.rows.append(row)
        notes = ", ".join(f"{k}={v}" for k, v in facts.items())
        print(
            f"{kernel:<22} {tokens:>7} tokens {timing.us:8.2f} us ({timing.low:.2f} to "
            f"{timing.high:.2f}), queued {timing.us_queued:8.2f} us, {gbps:6.0f} GB/s, share "
            f"{row['share_of_copy']:.3f} (queued {row['share_of_copy_queued']:.3f})  {notes}",
            flush=True,
        )


def retune(kernel: str, per_warp: int | None, min_ctas: int | None) -> None:
    """Replace a kernel's work per warp and CTAs per SM for this process, to try others."""
    names = {
        "quantize_q": ("ROWS_PER_WARP", "ROWS_PER_WARP"),
        "append_kv": ("TOKENS_PER_WARP", "APPEND_TOKENS_PER_WARP"),
        "fetch_dequant": ("TOKENS_PER_WARP", "FETCH_TOKENS_PER_WARP"),
    }
    define, constant = names[kernel]
    specs = []
    for spec in kernels.TABLE.specs:
        if spec.name == kernel:
            variants = []
            for variant in spec.variants:
                values: dict[str, int | str] = dict(variant.defines)
                if per_warp is not None and values.get(define):
                    values[define] = per_warp
                if min_ctas is not None:
                    values["MIN_CTAS"] = min_ctas
                own = dataclasses.replace(variant, defines=tuple(values.items()), max_registers=255)
                variants.append(own)
            spec = dataclasses.replace(spec, variants=tuple(variants), max_registers=255)
        specs.append(spec)
    if per_warp is not None:
        setattr(data_kernels, constant, per_warp)
    table: KernelTable = dataclasses.replace(kernels.TABLE, specs=tuple(specs))
    kernels.LOADER = KernelLoader(table)


def run(kernels_: Sequence[str], body: Callable[[Report, Any], None]) -> int:
    """The command line of a benchmark: `body(report, args)` measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--quick", action="store_true", help="the rows that the issue names only")
    parser.add_argument("--per-warp", type=int, help="rows or tokens a warp, to try others")
    parser.add_argument("--min-ctas", type=int, help="CTAs an SM to compile for, to try others")
    args = parser.parse_args()
    if args.per_warp is not None or args.min_ctas is not None:
        retune(kernels_[0], args.per_warp, args.min_ctas)
    report = Report(Bench(args.device))
    body(report, args)
    if args.out:
        update_rows(args.out, report.rows, kernels_)
    return 0


def token_bytes(num_tokens: int) -> int:
    """Bytes that an append reads (bf16 rows, int64 slots) and writes."""
    return num_tokens * (INPUT_BYTES + 8 + BYTES_PER_TOKEN)
