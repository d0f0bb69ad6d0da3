"""What the benchmarks of the data movement share: data, rows of results, the command line.

`python tools/bench_data.py --tune` compares the kernels' compile-time options, see tune_data.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from bench import METHOD, ROOT, Bench, machine, update_rows

from snapmla_rt import api, data_launch, kernels
from snapmla_rt.config import BLOCK_SIZE, BYTES_PER_TOKEN
from snapmla_rt.data_launch import latent_part, rope_part
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import Variant
from snapmla_rt.tensor import TensorView

RESULTS = ROOT / "tools" / "results" / "data_movement_h200.json"
COPY_BYTES = 4 << 30
FULL_TOKENS, FULL_ROWS = 65536, 128 * 128  # from here on a call is held against a copy of its size
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


@dataclass(frozen=True)
class Job:
    """A call to time: `enqueue(i)`, which takes turns over `copies` sets of arrays, the bytes it
    moves, and the arrays that it writes at call 0."""

    nbytes: int
    copies: int
    enqueue: Callable[[int], Any]
    written: tuple[TensorView, ...]


def unchecked(bench: Bench) -> dict[str, Any]:
    """How a benchmark calls the API."""
    return {"stream": bench.stream, "backend": "cuda", "checked": False}


def append_job(
    bench: Bench, cache: Cache, tokens: int, *, cold: bool = True, one_per_block: bool = False
) -> Job:
    """append_kv of bf16 rows."""
    nbytes = token_bytes(tokens)
    copies = bench.copies_for_cold(nbytes) if cold else 1
    rows = bf16_rows(bench, (tokens, 576), copies)
    slots = cache.slots(tokens, copies, one_per_block)
    options = unchecked(bench)

    def enqueue(i: int) -> None:
        at = i % copies
        kv_c, k_pe = latent_part(rows[at]), rope_part(rows[at])
        api.append_kv(kv_c, k_pe, *cache.planes, slots[at], **options)

    return Job(nbytes, copies, enqueue, cache.planes)


def fetched(bench: Bench, tokens: int, copies: int, concatenate: bool = False) -> list[Any]:
    """Results of fetch_dequant."""
    if concatenate:
        return [bench.array((tokens, 576), "bfloat16") for _ in range(copies)]
    shapes = ((tokens, 512), (tokens, 64))
    return [tuple(bench.array(s, "bfloat16") for s in shapes) for _ in range(copies)]


def fetch_job(bench: Bench, cache: Cache, tokens: int, *, concatenate: bool = False) -> Job:
    """fetch_dequant by slots."""
    nbytes = tokens * (BYTES_PER_TOKEN + 8 + INPUT_BYTES)
    copies = bench.copies_for_cold(nbytes)
    slots = cache.slots(tokens, copies, one_per_block=False)
    out = fetched(bench, tokens, copies, concatenate)
    options = unchecked(bench)

    def enqueue(i: int) -> None:
        at = i % copies
        api.fetch_dequant(*cache.planes, slots[at], out=out[at], concatenate=concatenate, **options)

    return Job(nbytes, copies, enqueue, (out[0],) if concatenate else out[0])


def quantised(bench: Bench, batch: int, heads: int, copies: int) -> list[Any]:
    """Results of quantize_q and prepare, one query token a request."""
    kinds = (((512,), "uint8"), ((64,), "bfloat16"), ((), "float32"))
    return [
        tuple(bench.array((batch, 1, heads, *width), kind) for width, kind in kinds)
        for _ in range(copies)
    ]


def quantize_job(bench: Bench, batch: int, heads: int, *, cold: bool = True) -> Job:
    """quantize_q of bf16 queries."""
    nbytes = batch * heads * (INPUT_BYTES + BYTES_PER_TOKEN)
    copies = bench.copies_for_cold(nbytes) if cold else 1
    q = bf16_rows(bench, (batch, 1, heads, 576), copies)
    out = quantised(bench, batch, heads, copies)

    def enqueue(i: int) -> None:
        at = i % copies
        api.quantize_q(q[at], out=out[at], stream=bench.stream, backend="cuda")

    return Job(nbytes, copies, enqueue, out[0])


# What tells one row of the result file from another.
IDENTITY = ("kernel", "tokens", "heads", "layout", "cache", "form", "out")


class Report:
    """Rows of a benchmark: prints each and puts it into the result file, if there is one."""

    def __init__(self, bench: Bench, out: Path | None = None) -> None:
        self.bench, self.out = bench, out
        self.rows: list[dict[str, Any]] = []
        self._same_size: dict[int, float] = {}
        self.floors = bench.floors()
        self.machine = machine(bench.device_index)
        self.copy_gbps = bench.copy_gbps(COPY_BYTES)
        print(f"copy of 4 GiB: {self.copy_gbps:.0f} GB/s read plus written; {self.floors}")

    def measure(
        self, kernel: str, tokens: int, nbytes: int, enqueue: Callable[[int], Any], **facts: Any
    ) -> None:
        """Time a call that reads and writes nbytes in all.

        A row that fills the GPU is also compared with a copy of as many bytes. That frees the
        bench's arrays, so the call must not be used afterwards.
        """
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
            **self.machine,
        }
        if tokens >= FULL_TOKENS or tokens * facts.get("heads", 0) >= FULL_ROWS:
            same = self.same_size_copy_gbps(nbytes)
            row["same_size_copy_gbps"] = round(same)
            row["share_of_same_size_copy"] = round(gbps / same, 3)
            facts["of_same_size_copy"] = row["share_of_same_size_copy"]
        self.rows.append(row)
        if self.out is not None:
            update_rows(self.out, self.rows, IDENTITY)
        notes = ", ".join(f"{k}={v}" for k, v in facts.items())
        print(
            f"{kernel:<22} {tokens:>7} tokens {timing.us:8.2f} us ({timing.low:.2f} to "
            f"{timing.high:.2f}), queued {timing.us_queued:8.2f} us, {gbps:6.0f} GB/s, share "
            f"{row['share_of_copy']:.3f} (queued {row['share_of_copy_queued']:.3f})  {notes}",
            flush=True,
        )

    def measure_job(self, kernel: str, tokens: int, job: Job, **facts: Any) -> None:
        """Time a job and free its arrays."""
        state = self.bench.state(job.nbytes, job.copies)
        self.measure(kernel, tokens, job.nbytes, job.enqueue, **facts, cache=state)
        self.bench.free()

    def same_size_copy_gbps(self, nbytes: int) -> float:
        """Device copy bandwidth of copies that move nbytes in all, measured once."""
        if nbytes not in self._same_size:
            self._same_size[nbytes] = self.bench.copy_gbps(nbytes)
        return self._same_size[nbytes]


_TABLE = kernels.TABLE
_long_ctas = data_launch.long_ctas


def retune(kernel: str, per_warp: int | None, options: Mapping[str, int]) -> None:
    """Replace a kernel's options for this process, to try others.

    per_warp: rows a warp of quantize_q or append_kv takes (None: so many that all run at once).
    options: defines, such as MIN_CTAS, RING_ROWS and, of fetch_dequant, ROWS_PER_WARP. append_kv of
    few tokens (scan) keeps its own.
    """
    specs = []
    for spec in _TABLE.specs:
        if spec.name == kernel:
            tuned = tuple(_retuned(variant, options) for variant in spec.variants)
            spec = dataclasses.replace(spec, variants=tuned, max_registers=255)
        specs.append(spec)
    kernels.TABLE = dataclasses.replace(_TABLE, specs=tuple(specs))
    kernels.LOADER = KernelLoader(kernels.TABLE)
    data_launch.ctas_at_once.cache_clear()

    def num_ctas(num_rows: int, at_once: int) -> int:
        if per_warp is None:
            return _long_ctas(num_rows, at_once)
        return data_launch.ctas_for(num_rows, per_warp)

    data_launch.long_ctas = num_ctas


def _retuned(variant: Variant, options: Mapping[str, int]) -> Variant:
    defines = dict(variant.defines)
    if defines.get("CLAIM") == 0:
        return variant
    own = tuple({**defines, **options}.items())
    return dataclasses.replace(variant, defines=own, max_registers=255)


def run(kernels_: Sequence[str], body: Callable[[Report, Any], None]) -> int:
    """The command line of a benchmark of `kernels_`, of which --set concerns the first:
    `body(report, args)` measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, help=f"default {RESULTS}")
    parser.add_argument("--quick", action="store_true", help="the rows that the issue names only")
    parser.add_argument("--per-warp", type=int, help="of quantize_q and append_kv: rows")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a define")
    args = parser.parse_args()
    if args.per_warp is not None or args.set:
        pairs = [text.split("=") for text in args.set]
        retune(kernels_[0], args.per_warp, {name: int(value) for name, value in pairs})
    body(Report(Bench(args.device), args.out), args)
    return 0


def token_bytes(num_tokens: int) -> int:
    """Bytes that an append reads (bf16 rows, int64 slots) and writes."""
    return num_tokens * (INPUT_BYTES + 8 + BYTES_PER_TOKEN)


if __name__ == "__main__":
    if "--tune" not in sys.argv[1:]:
        sys.exit(f"{__doc__}\nThe benchmarks themselves: bench_append_kv.py and the like.")
    import tune_data

    sys.exit(tune_data.main())
