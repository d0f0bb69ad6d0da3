"""What the benchmarks of the decode stages share: a large paged cache, the launches of a call, a
whole step as a graph, and the yardsticks of the same run. No torch needed but for cuBLAS."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
from bench import Bench

from snapmla_rt import api
from snapmla_rt.array import DeviceArray, to_device
from snapmla_rt.config import BLOCK_SIZE, BYTES_PER_TOKEN, FP8_MAX
from snapmla_rt.decode_call import INPUTS, Numbers, PreparedCall, Target, prepare_call
from snapmla_rt.driver import memory
from snapmla_rt.driver.graph import Graph
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import KernelSpec, KernelTable, Variant
from snapmla_rt.plan import DecodePlan
from snapmla_rt.tensor import TensorView

POOL_TOKENS = 2_097_152
SOFTMAX_SCALE = 576**-0.5
SCALE = 1 / 80  # of every token and query: N(0, 1) then spans most of e4m3
PATTERN_BLOCKS = 1024  # blocks of random data; the pool repeats them

CHUNK_BYTES, STAGES = 16384, 6
_TABLE = KernelTable(
    specs=(
        KernelSpec(
            "bulk_read",
            "bench_read.cu",
            (("data", "ptr<const void>"), ("num_chunks", "i64")),
            threads=32,
            variants=(Variant("", (), STAGES * CHUNK_BYTES),),
        ),
    ),
    source_root=Path(__file__).resolve().parent,
)


@dataclass(frozen=True)
class Case:
    """One measured shape; plan: keyword arguments of plan_decode."""

    h: int
    s_q: int
    b: int
    context: int
    plan: tuple[tuple[str, Any], ...] = ()

    @property
    def flops(self) -> float:
        return 2.0 * self.b * self.h * self.s_q * self.context * (576 + 512)

    @property
    def kv_bytes(self) -> int:
        """What a call must read: every cached token once."""
        return self.b * self.context * BYTES_PER_TOKEN

    def __str__(self) -> str:
        text = f"h={self.h:<3} s_q={self.s_q} {self.b:>3} x {self.context:<6}"
        return text + "".join(f" {name}={value}" for name, value in self.plan)


class Pool:
    """A cache of shuffled blocks, and tables that rotate over all of it."""

    def __init__(
        self, bench: Bench, num_tokens: int = POOL_TOKENS, layout: str = "separate"
    ) -> None:
        from snapmla_rt.device_storage import DeviceKVCacheStorage

        self.bench = bench
        self.num_blocks = num_tokens // BLOCK_SIZE
        self.storage = DeviceKVCacheStorage(
            self.num_blocks, layout, device_index=bench.device_index
        )
        planes = (self.storage.ckv_cache, self.storage.k_scale_cache, self.storage.k_rope_cache)
        self.planes: list[TensorView] = [plane.view() for plane in planes]
        self._fill()
        self._order = np.random.default_rng(1).permutation(self.num_blocks).astype(np.int32)

    def _fill(self) -> None:
        """N(0, 1) tokens in PATTERN_BLOCKS blocks, repeated through the pool."""
        rng = np.random.default_rng(0)
        count = min(PATTERN_BLOCKS, self.num_blocks)
        tokens = rng.standard_normal((count * BLOCK_SIZE, 576), np.float32)
        shape = (count, BLOCK_SIZE)
        ckv = (
            np.clip(tokens[:, :512] / SCALE, -FP8_MAX, FP8_MAX)
            .astype(ml_dtypes.float8_e4m3fn)
            .reshape(*shape, 512)
        )
        rope = (tokens[:, 512:] / SCALE).astype(ml_dtypes.bfloat16).reshape(*shape, 64)
        scale = np.full(shape, SCALE, np.float32)
        for plane, host in zip(self.planes, (ckv, scale, rope), strict=True):
            self._write(plane, host)

    def _write(self, plane: TensorView, host: np.ndarray) -> None:
        index, stride = self.bench.device_index, plane.strides[0]
        block_bytes = host.nbytes // len(host)
        source = np.ascontiguousarray(host)
        address = source.__array_interface__["data"][0]
        if stride == block_bytes:
            memory.copy_to_device(plane.ptr, address, source.nbytes, index, 0)
            done = len(host)
            while done < self.num_blocks:
                more = min(done, self.num_blocks - done)
                memory.copy_on_device(plane.ptr + done * stride, plane.ptr, more * stride, index, 0)
                done += more
        else:  # planes of one buffer of records, strided copies
            staged = to_device(source, index)
            copy_strided(staged, plane, block_bytes, index)
        memory.synchronize(0, index)

    def tables(self, case: Case) -> list[np.ndarray]:
        """Block tables [b, n] over disjoint parts of the pool; at least one."""
        width = -(-case.context // BLOCK_SIZE)
        need = case.b * width
        if need > self.num_blocks:
            raise ValueError(f"{case}: needs a pool of {need * BLOCK_SIZE} tokens")
        count = min(self.num_blocks // need, 24)
        return [self._order[i * need : (i + 1) * need].reshape(case.b, width) for i in range(count)]


def copy_strided(source: DeviceArray, plane: TensorView, block_bytes: int, index: int) -> None:
    """Blocks of a contiguous device array into a plane of records, again and again to its end."""
    from snapmla_rt.driver.check import bindings, call
    from snapmla_rt.driver.device import device_context

    driver = bindings()
    count, done = source.nbytes // block_bytes, 0
    with device_context(index):
        while done < plane.shape[0]:
            part = min(count, plane.shape[0] - done)
            copy = driver.CUDA_MEMCPY2D()
            copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            copy.srcDevice, copy.srcPitch = source.ptr, block_bytes
            copy.dstDevice = plane.ptr + done * plane.strides[0]
            copy.dstPitch = plane.strides[0]
            copy.WidthInBytes, copy.Height = block_bytes, part
            call("cuMemcpy2DAsync", copy, 0)
            done += part


class Call:
    """A case ready to be enqueued: one set of launches for each table of the rotation."""

    def __init__(self, pool: Pool, case: Case) -> None:
        self.case, self.pool = case, pool
        index, self.stream = pool.bench.device_index, pool.bench.stream
        self.query = make_query(case, index)
        lengths = np.full(case.b, case.context, np.int32)
        self.lengths = to_device(lengths, index).view()
        self.plan: DecodePlan = api.plan_decode(
            self.lengths, case.h, case.s_q, stream=self.stream, **dict(case.plan)
        )
        self.tables = [to_device(table, index).view() for table in pool.tables(case)]
        out = DeviceArray((case.b, case.s_q, case.h, 512), "bfloat16", index)
        lse = DeviceArray((case.b, case.h, case.s_q), "float32", index)
        size = api.decode_workspace_size(self.plan, case.b, self.tables[0].shape[1] * BLOCK_SIZE)
        workspace = DeviceArray((size,), "uint8", index)
        self.target = Target(out, lse, workspace, True, self.stream)
        self.calls = [self._prepare(table) for table in self.tables]

    def _prepare(self, table: TensorView) -> PreparedCall:
        views = (*self.query, *self.pool.planes, table, self.lengths)
        named = dict(zip(INPUTS, views, strict=True))
        scalars = Numbers(SOFTMAX_SCALE, True)
        return prepare_call(named, self.plan, scalars, self.target, self.stream)

    def enqueue(self, i: int) -> None:
        for launch in self.calls[i % len(self.calls)].launches:
            launch()

    def enqueue_decode(self, i: int) -> None:
        self.calls[i % len(self.calls)].launches[0]()

    @property
    def has_combine(self) -> bool:
        return len(self.calls[0].launches) > 1

    @property
    def variant(self) -> str:
        from snapmla_rt.decode_select import decode_variant

        return decode_variant(self.case.h * self.case.s_q, self.plan.config.block_n)

    def check(self) -> None:
        """Every value of a call is finite and of the size that N(0, 1) data give."""
        from snapmla_rt.array import to_host

        self.enqueue(0)
        out = to_host(self.target.out.view(), self.stream).astype(np.float32)
        lse = to_host(self.target.lse.view(), self.stream)
        if not (np.isfinite(out).all() and np.isfinite(lse).all()):
            raise RuntimeError(f"{self.case}: the result is not finite")
        if np.abs(lse - np.log(self.case.context)).max() > 4 or not 0 < np.abs(out).mean() < 1:
            raise RuntimeError(f"{self.case}: the result cannot be right")


def make_query(case: Case, index: int) -> tuple[TensorView, TensorView, TensorView]:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((case.b, case.s_q, case.h, 576), np.float32) / SCALE
    nope = np.clip(q[..., :512], -FP8_MAX, FP8_MAX).astype(ml_dtypes.float8_e4m3fn)
    rope = q[..., 512:].astype(ml_dtypes.bfloat16)
    scale = np.full(q.shape[:3], SCALE, np.float32)
    views = [to_device(np.ascontiguousarray(part), index).view() for part in (nope, rope, scale)]
    return views[0], views[1], views[2]


class WholeStep:
    """Preparation (append and query quantisation), decode and combine of a layer, `layers` of them
    one behind the other in one graph. prepares: False leaves the preparation out."""

    def __init__(self, call: Call, layers: int = 1, prepares: bool = True) -> None:
        case, pool = call.case, call.pool
        index = pool.bench.device_index
        rng = np.random.default_rng(3)
        bf16 = ml_dtypes.bfloat16
        shape = (case.b, case.s_q, case.h, 576)
        q = to_device(rng.standard_normal(shape, np.float32).astype(bf16), index).view()
        new = case.b * case.s_q
        kv_c = to_device(rng.standard_normal((new, 512), np.float32).astype(bf16), index).view()
        k_pe = to_device(rng.standard_normal((new, 64), np.float32).astype(bf16), index).view()
        self.keep: list[Any] = [call, q, kv_c, k_pe]
        self.graphs: list[Graph] = []
        self.stream = call.stream
        steps = []  # (arrays of the preparation, launches of decode and combine) by table
        for prepared, table in zip(call.calls, pool.tables(case), strict=True):
            positions = case.context - case.s_q + np.arange(case.s_q)
            blocks = table[:, positions // BLOCK_SIZE].astype(np.int64)
            slots = to_device((blocks * BLOCK_SIZE + positions % BLOCK_SIZE).reshape(-1), index)
            self.keep.append(slots)
            steps.append(((q, kv_c, k_pe, *pool.planes, slots.view()), prepared.launches))
        self._prepare(call, steps[0][0])  # compiled and loaded before the capture
        for first in range(0, max(len(steps) // layers, 1) * layers, layers):
            graph = Graph(index)
            with graph.capture(call.stream):
                for layer in range(layers):
                    arrays, launches = steps[(first + layer) % len(steps)]
                    if prepares:
                        self._prepare(call, arrays)
                    for launch in launches:
                        launch()
            self.graphs.append(graph)

    def _prepare(self, call: Call, arrays: tuple[Any, ...]) -> None:
        prepare: Any = api.prepare  # called with its arrays as one sequence
        prepare(*arrays, out=call.query, stream=call.stream, pdl=True)

    def enqueue(self, i: int) -> None:
        self.graphs[i % len(self.graphs)].launch(self.stream)


# --- Yardsticks ----------------------------------------------------------------------------------


class Yardsticks:
    """Bulk reads of as many bytes as a call reads, rotating over the pool like the call does."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.bench = pool, pool.bench
        self._kernel = KernelLoader(_TABLE).kernel("bulk_read", "", self.bench.device_index)
        self._found: dict[int, float] = {}

    def read_gbps(self, nbytes: int) -> float:
        """GB/s of reading nbytes (rounded down to 16 KiB), cold where the pool allows."""
        chunks = max(nbytes // CHUNK_BYTES, 1)
        size = chunks * CHUNK_BYTES
        found = self._found.get(size)
        if found is None:
            whole = self.pool.num_blocks * BLOCK_SIZE * BYTES_PER_TOKEN
            if size > whole:
                raise ValueError(f"nbytes: expected at most the pool's {whole}, got {nbytes}")
            base = min(plane.ptr for plane in self.pool.planes)
            windows = max(min(whole // size, 24), 1)
            grid = (2 * self.bench.info.num_sms, 1, 1)
            calls = [
                self._kernel.prepare(grid, self.bench.stream, base + i * size, chunks)
                for i in range(windows)
            ]

            def enqueue(i: int) -> None:
                launch = calls[i % windows]
                assert launch is not None
                launch()

            found = self._found[size] = size / self.bench.time(enqueue).us / 1e3
        return found


def cublas_fp8_tflops(bench: Bench, fast_accum: bool, size: int = 8192) -> float | None:
    """torch._scaled_mm of size^3 in burst, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    stream = torch.cuda.ExternalStream(bench.stream, device=f"cuda:{bench.device_index}")
    with torch.cuda.stream(stream):
        shape, device = (size, size), f"cuda:{bench.device_index}"
        a = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(shape, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)

        def enqueue(i: int) -> None:
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast_accum)

        timing = bench.time(enqueue)
    return 2 * size**3 / timing.us / 1e6


def sustained_us(bench: Bench, enqueue: Callable[[int], Any], seconds: float = 1.5) -> float:
    """Microseconds of a call in loops of 32 calls and a wait, for `seconds`, after a warm-up third
    of it in which clock and power settle."""
    count, start, measured = 0, time.perf_counter(), 0.0
    while True:
        for i in range(32):
            enqueue(i)
        bench.synchronize()
        now = time.perf_counter()
        if not measured and now - start > seconds / 3:
            measured, count = now, 0
            continue
        count += 32
        if measured and now - measured > seconds:
            return 1e6 * (now - measured) / count
