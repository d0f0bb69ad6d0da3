"""quantize_q, append_kv, prepare, fetch_dequant on the GPU against the reference, byte for byte."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison_block_table
from strategies import cast_finite, float_dtypes, shuffled_block_table, slots_of, token_arrays

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from fuzz import fuzz, serial_cases
from fuzz_cases import FILLER, KERNELS, cache_planes, make_case
from fuzz_runner import GpuRunner, describe, differing_bytes, fewer_ctas

from snapmla_rt import api, data_kernels, data_launch
from snapmla_rt.array import DeviceArray, to_device, to_host
from snapmla_rt.config import APPEND_SCAN_MAX, RECORD_BYTES
from snapmla_rt.data_launch import latent_part, rope_part
from snapmla_rt.driver.graph import Graph
from snapmla_rt.driver.memory import DeviceBuffer, Stream, fill, synchronize
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.append_kv import append_kv as reference_append
from snapmla_rt.reference.fetch_dequant import fetch_dequant as reference_fetch
from snapmla_rt.reference.fetch_dequant import fetch_dequant_ranges as reference_ranges
from snapmla_rt.reference.quantize_q import quantize_q as reference_quantize
from snapmla_rt.tensor import TensorView

RUNNER = GpuRunner()


def on_gpu(array: np.ndarray) -> TensorView:
    return to_device(array).view()


def rows(*shape: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


class GpuCache:
    """A cache of FILLER bytes on the GPU and its twin on the host."""

    def __init__(self, num_blocks: int, layout: str = "separate") -> None:
        self.host_raw = np.full(num_blocks * RECORD_BYTES, FILLER, np.uint8)
        self.host: tuple[Any, Any, Any] = cache_planes(self.host_raw, layout)
        self._raw = on_gpu(self.host_raw)
        self.planes: tuple[Any, Any, Any] = RUNNER.planes(self._raw, layout)

    def check(self) -> None:
        assert_same_bytes("cache", to_host(self._raw), self.host_raw)


def split(tokens: TensorView) -> tuple[TensorView, TensorView]:
    return latent_part(tokens), rope_part(tokens)


def host_split(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return tokens[..., :512], tokens[..., 512:]


# --- Fuzzing -----------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    kernel=st.sampled_from(KERNELS),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 128, 129, 2048, 2049]),
)
def test_hostile_cases(kernel: str, seed: int, size: int) -> None:
    case = make_case(kernel, seed, size)
    got = RUNNER.run(case)
    assert differing_bytes(got, case.expected) == 0, describe(case, got)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_few_seconds_of_fuzzing(kernel: str) -> None:
    result = fuzz(kernel, serial_cases(kernel, 5_000_000), RUNNER, seed=5_000_000, seconds=4)
    assert result.differing_bytes == 0, result.failure
    assert result.tokens > 10_000


@settings(max_examples=60)
@given(data=st.data(), n=st.integers(1, 9), dtype=float_dtypes(), pow2=st.booleans())
def test_patterns_from_hypothesis(data: st.DataObject, n: int, dtype: np.dtype, pow2: bool) -> None:
    """Shrinkable examples: patterns and magnitudes by name, slots one by one."""
    parts = [data.draw(token_arrays(n, width)) for width in (512, 64)]
    tokens = cast_finite(np.concatenate(parts, axis=1), dtype)
    slots = np.array([data.draw(st.integers(-2, 130)) for _ in range(n)])
    mode = "pow2" if pow2 else "exact"
    cache = GpuCache(2)
    device_tokens = on_gpu(tokens)
    api.append_kv(*split(device_tokens), *cache.planes, on_gpu(slots), scale_rounding=mode)
    inside = np.where(slots < 128, slots, -1)  # beyond the cache: skipped
    reference_append(*host_split(tokens), *cache.host, inside, scale_rounding=mode)
    cache.check()


# --- Shapes and strides ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_strided_queries(dtype: Any) -> None:
    """A slice of a wider row, a transposed batch, and rows no 16-byte load can reach."""
    want = {}
    for name, width, at in (("wide", 640, 0), ("odd", 577, 1), ("padded", 600, 8)):
        big = rows(3, 2, 5, width, dtype=dtype)
        view = on_gpu(big)
        q = TensorView(
            view.ptr + at * view.itemsize,
            (2, 3, 5, 576),
            (view.strides[1], view.strides[0], view.strides[2], view.itemsize),
            view.dtype,
            "cuda",
            0,
            view.owner,
        )
        host = np.ascontiguousarray(big[..., at : at + 576].transpose(1, 0, 2, 3))
        want[name] = reference_quantize(host)
        for got, expected in zip(api.quantize_q(q), want[name], strict=True):
            assert_same_bytes(name, to_host_like(got, expected), expected)


def to_host_like(array: Any, like: np.ndarray) -> np.ndarray:
    return array.numpy().view(like.dtype)


def test_split_queries_and_prepare_agree() -> None:
    q, tokens = rows(5, 2, 3, 576), rows(5, 576, seed=1)
    slots = np.array([3, -1, 64, 3, 127])
    want = reference_quantize(q)
    parts = api.quantize_q_parts(on_gpu(q[..., :512]), on_gpu(q[..., 512:]))
    for layout in ("separate", "record"):
        cache = GpuCache(2, layout)
        query = api.prepare(on_gpu(q), *split(on_gpu(tokens)), *cache.planes, on_gpu(slots))
        reference_append(*host_split(tokens), *cache.host, slots)
        cache.check()
        for form in (parts, query):
            for got, expected in zip(form, want, strict=True):
                assert_same_bytes(layout, to_host_like(got, expected), expected)


def test_prepare_beyond_one_launch() -> None:
    """Other types than the query's, and more tokens than one launch takes: two launches."""
    for n, dtype in ((4, np.float32), (APPEND_SCAN_MAX + 1, ml_dtypes.bfloat16)):
        q, tokens = rows(2, 1, 4, 576), rows(n, 576, dtype=dtype)
        cache, slots = GpuCache(-(-n // 64)), np.arange(n)[::-1].copy()
        query = api.prepare(on_gpu(q), *split(on_gpu(tokens)), *cache.planes, on_gpu(slots))
        reference_append(*host_split(tokens), *cache.host, slots)
        cache.check()
        assert_same_bytes("q_scale", query[2].numpy(), reference_quantize(q)[2])


@pytest.mark.parametrize("num_rows", [65535, 65536, 65537])
def test_no_launch_limit(num_rows: int) -> None:
    q = rows(num_rows, 1, 1, 576)
    for got, expected in zip(api.quantize_q(on_gpu(q)), reference_quantize(q), strict=True):
        assert_same_bytes("q", to_host_like(got, expected), expected)


def test_block_offsets_beyond_32_bits() -> None:
    """A packed cache: block stride 1,040,000 bytes, blocks whose offsets pass 2^31 and 2^32."""
    stride, num_blocks = 1_040_000, 4200
    buffer = DeviceBuffer(stride * num_blocks, 0)
    fill(buffer.ptr, FILLER, buffer.nbytes, 0, 0)
    found: list[TensorView] = []
    for shape, dtype, inner, offset in (
        ((num_blocks, 64, 512), "uint8", (512, 1), 0),
        ((num_blocks, 64), "float32", (4,), 40960),
        ((num_blocks, 64, 64), "uint16", (128, 2), 32768),
    ):
        found.append(
            TensorView(buffer.ptr + offset, shape, (stride, *inner), dtype, "cuda", 0, buffer)
        )
    planes = (found[0], found[1], found[2])
    slots = np.array([0, 2064 * 64, 2065 * 64, 2143 * 64 + 5, 4129 * 64, 4199 * 64 + 63])
    tokens = rows(len(slots), 576)
    api.append_kv(*split(on_gpu(tokens)), *planes, on_gpu(slots))
    kv_c, k_pe = api.fetch_dequant(*planes, on_gpu(slots))
    small: tuple[Any, Any, Any] = cache_planes(np.zeros(RECORD_BYTES, np.uint8), "separate")
    order = np.arange(len(slots))
    reference_append(*host_split(tokens), *small, order)
    want = reference_fetch(*small, order)
    assert_same_bytes("kv_c", to_host_like(kv_c, want[0]), want[0])
    assert_same_bytes("k_pe", to_host_like(k_pe, want[1]), want[1])


def test_fetch_of_more_than_2_31_elements() -> None:
    """3.8 million rows, 4.4 GB: the last rows are where a 32-bit offset would have wrapped."""
    n = 3_800_000
    cache = GpuCache(4)
    slots = np.random.default_rng(0).integers(0, 256, n)
    tokens = rows(256, 576)
    reference_append(*host_split(tokens), *cache.host, np.arange(256))
    api.append_kv(*split(on_gpu(tokens)), *cache.planes, on_gpu(np.arange(256)))
    kv_c, k_pe = api.fetch_dequant(*cache.planes, on_gpu(slots))
    for first in (0, 2**31 // 576 - 8, 2**31 // 512 - 8 if 2**31 // 512 < n else n - 16, n - 16):
        want = reference_fetch(*cache.host, slots[first : first + 16])
        for array, expected in ((kv_c, want[0]), (k_pe, want[1])):
            got = to_host(tail(array, first, len(expected)))
            assert_same_bytes(f"rows {first}", got.view(expected.dtype), expected)


def tail(array: DeviceArray, first: int, count: int) -> TensorView:
    whole = array.view()
    at = whole.ptr + first * whole.strides[0]
    shape = (count, *whole.shape[1:])
    return TensorView(at, shape, whole.strides, whole.dtype, "cuda", 0, array)


# --- Slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 300, APPEND_SCAN_MAX, APPEND_SCAN_MAX + 1, 20_000])
@pytest.mark.parametrize("num_slots", [1, 3, 64, 5000])
def test_duplicate_slots_never_tear(n: int, num_slots: int) -> None:
    """Many tokens in few slots, again and again over what the launch before left behind."""
    num_blocks = -(-num_slots // 64)
    cache = GpuCache(num_blocks)
    rng = np.random.default_rng(n)
    pool = rows(n, 576)
    tokens = on_gpu(pool)
    for _ in range(6):
        slots = rng.integers(-1, num_slots, n)
        api.append_kv(*split(tokens), *cache.planes, on_gpu(slots))
        reference_append(*host_split(pool), *cache.host, slots)
        cache.check()


def wave(kernel: str, variant: str) -> int:
    """Rows of one wave in which every warp has one."""
    return data_kernels.WARPS * data_launch.ctas_at_once(kernel, variant, 0)


@pytest.mark.parametrize(
    ("rows_each", "extra"),
    [(n, extra) for n in (1, 2, 5) for extra in (-8, -1, 0, 1, 9)]
    + [(data_kernels.CTA_ROWS // data_kernels.WARPS, 1)],  # the next round of CTAs
)
def test_sizes_around_whole_rounds(rows_each: int, extra: int) -> None:
    """All warps with as many rows, a row or a CTA more or less: where the loop over rows ends."""
    n = rows_each * wave("append_kv", "bfloat16_claim") + extra
    rng = np.random.default_rng(n)
    cache = GpuCache(-(-n // 64))
    pool = rows(257, 576, seed=n)
    tokens = np.ascontiguousarray(pool[rng.integers(0, 257, n)])
    slots = rng.permutation(n).astype(np.int32 if extra % 2 else np.int64)
    api.append_kv(*split(on_gpu(tokens)), *cache.planes, on_gpu(slots))
    reference_append(*host_split(tokens), *cache.host, slots)
    cache.check()
    m = rows_each * wave("fetch_dequant", "slots") + extra
    asked = rng.integers(-1, n, m)
    want = reference_fetch(*cache.host, asked)
    for got, expected in zip(api.fetch_dequant(*cache.planes, on_gpu(asked)), want, strict=True):
        assert_same_bytes("rows", to_host_like(got, expected), expected)


@pytest.mark.parametrize("extra", [-9, -1, 0, 1, 8])
@pytest.mark.parametrize("rows_each", [1, 3, 4, 5])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_queries_around_whole_rounds(dtype: Any, rows_each: int, extra: int) -> None:
    variant = "bfloat16" if dtype is ml_dtypes.bfloat16 else "float32"
    n = rows_each * wave("quantize_q", variant) + extra
    pool = rows(129, 576, seed=n, dtype=dtype)
    which = np.random.default_rng(n).integers(0, 129, n)
    q = np.ascontiguousarray(pool[which]).reshape(n, 1, 1, 576)
    want = [part.reshape(129, -1)[which] for part in reference_quantize(pool[:, None, None])]
    for got, expected in zip(api.quantize_q(on_gpu(q)), want, strict=True):
        found = got.numpy().view(expected.dtype).reshape(expected.shape)
        assert_same_bytes("q", found, expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("gap", ["neighbour", "warp", "cta", "half", "ends"])
def test_duplicates_far_apart(dtype: Any, gap: str) -> None:
    """Two and three tokens of a slot, claimed and written by one lane, warp or CTA or by several,
    at one time or at several: the last one stays."""
    name = np.dtype(dtype).name
    n = 3 * wave("append_kv", f"{name}_claim") + 5
    step = {"neighbour": 1, "warp": 8, "cta": 24, "half": n // 2, "ends": n - 1}[gap]
    pool = rows(509, 576, seed=step, dtype=dtype)
    tokens = np.ascontiguousarray(pool[np.arange(n) % 509])
    slots = np.random.default_rng(step).permutation(n)
    for first in range(0, n - step, max(n // 40, 1)):
        slots[first + step] = slots[first]
        if first + 2 * step < n:
            slots[first + 2 * step] = slots[first]
    device, where = on_gpu(tokens), on_gpu(slots)
    cache = GpuCache(-(-n // 64))
    for _ in range(3):  # the second time over claims that look alike
        api.append_kv(*split(device), *cache.planes, where)
    reference_append(*host_split(tokens), *cache.host, slots)
    cache.check()


@pytest.fixture
def few_ctas() -> Iterator[None]:
    """32 CTAs instead of hundreds: of a few thousand tokens each warp then has many, as it has of
    the longest appends otherwise, where CTAs learn in time whether slots are shared."""
    with fewer_ctas(32):
        yield


def mapping(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """n slots: a permutation; one slot twice; many slots several times; most tokens skipped."""
    slots = rng.permutation(n)
    if kind == "one pair":
        first, second = rng.choice(n, 2, replace=False)
        slots[first] = slots[second]
    elif kind == "many":
        slots = rng.integers(-2, n // 3, n)
    elif kind == "skipped":
        slots[rng.random(n) < 0.9] = -1
    return slots


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("n", [2049, 3000, 8192])  # 8, 12 and 32 tokens a warp
def test_lists_and_early_ends_take_turns(few_ctas: None, n: int, dtype: Any) -> None:
    """Launches with shared slots between launches without, where CTAs end early, over one
    workspace: what one leaves is right for the next."""
    pool = rows(n, 576, dtype=dtype)
    device, cache, rng = on_gpu(pool), GpuCache(-(-n // 64)), np.random.default_rng(n)
    kinds = ("permutation", "one pair", "permutation", "permutation", "many", "skipped", "many")
    for kind in kinds * 3:
        slots = mapping(kind, n, rng)
        api.append_kv(*split(device), *cache.planes, on_gpu(slots))
        reference_append(*host_split(pool), *cache.host, slots)
        cache.check()


def test_early_ends_in_a_graph_and_a_chain(few_ctas: None) -> None:
    """Replays of one captured launch over a mapping that changes in place, and launches that start
    before their predecessors have ended."""
    n, rng, stream = 4096, np.random.default_rng(1), Stream(0)
    pool = rows(n, 576)
    cache, tokens, where = GpuCache(n // 64), on_gpu(pool), on_gpu(rng.permutation(n))
    options: dict[str, Any] = {"stream": stream, "checked": False, "pdl": True}

    def step() -> None:
        for _ in range(3):
            api.append_kv(*split(tokens), *cache.planes, where, **options)

    step()
    stream.synchronize()
    graph = Graph(0)
    with graph.capture(stream.handle):
        step()
    for kind in ("permutation", "many", "permutation", "one pair", "skipped", "one pair") * 3:
        slots = mapping(kind, n, rng)
        replace(where, slots)
        graph.launch(stream.handle)
        step()
        stream.synchronize()
        reference_append(*host_split(pool), *cache.host, slots)
        cache.check()


def test_an_append_of_full_size_with_shared_slots() -> None:
    """65,536 tokens with all CTAs of the GPU: a list, no list, a list."""
    n, rng = 65536, np.random.default_rng(2)
    pool = rows(509, 576)
    tokens = np.ascontiguousarray(pool[rng.integers(0, 509, n)])
    device, cache = on_gpu(tokens), GpuCache(n // 64)
    for kind in ("one pair", "permutation", "many", "one pair", "permutation"):
        slots = mapping(kind, n, rng)
        api.append_kv(*split(device), *cache.planes, on_gpu(slots))
        reference_append(*host_split(tokens), *cache.host, slots)
        cache.check()


@pytest.mark.parametrize("n", [APPEND_SCAN_MAX + 1, 9001])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_many_tokens_at_odd_addresses(n: int, dtype: Any) -> None:
    """Rows that no wide access reaches, and skipped tokens between those that are written."""
    wide = rows(n, 577, dtype=dtype)
    view = on_gpu(wide)
    at = view.ptr + view.itemsize
    odd = TensorView(at, (n, 576), view.strides, view.dtype, "cuda", 0, view.owner)
    slots = np.random.default_rng(n).permutation(n)
    slots[::3] = -1
    slots[n // 2 :: 7] = -5
    cache = GpuCache(-(-n // 64))
    api.append_kv(*split(odd), *cache.planes, on_gpu(slots))
    reference_append(*host_split(np.ascontiguousarray(wide[:, 1:])), *cache.host, slots)
    cache.check()
    out_wide = on_gpu(np.zeros((n, 577), np.uint16))
    place = out_wide.ptr + 2
    out = TensorView(place, (n, 576), out_wide.strides, "bfloat16", "cuda", 0, out_wide.owner)
    api.fetch_dequant(*cache.planes, on_gpu(slots), out=out, concatenate=True)
    want = np.concatenate(reference_fetch(*cache.host, slots), axis=1).view(np.uint16)
    got = to_host(out_wide)
    assert not got[:, 0].any()
    assert_same_bytes("rows", np.ascontiguousarray(got[:, 1:]), np.ascontiguousarray(want))


@pytest.mark.parametrize("lengths", ["ones", "empties", "one long", "mixed"])
def test_ranges_within_one_warp(lengths: str) -> None:
    """Many requests, some of them empty, among the rows of a single warp, and the reverse."""
    rng = np.random.default_rng(5)
    n = 2 * wave("fetch_dequant", "ranges") + 3
    counts = {
        "ones": np.ones(n, np.int64),
        "empties": (np.arange(3 * n) % 3 == 2).astype(np.int64),
        "one long": np.array([n]),
        "mixed": rng.integers(0, 70, n // 30),
    }[lengths]
    starts = rng.integers(0, 60, len(counts)).astype(np.int32)
    width = -(-int((starts + counts).max()) // 64)
    num_blocks = 16
    table = rng.integers(0, num_blocks, (len(counts), width)).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    cache = GpuCache(num_blocks)
    tokens, order = rows(num_blocks * 64, 576), np.arange(num_blocks * 64)
    api.append_kv(*split(on_gpu(tokens)), *cache.planes, on_gpu(order))
    reference_append(*host_split(tokens), *cache.host, order)
    args = (on_gpu(table), on_gpu(starts), on_gpu(ends))
    got = api.fetch_dequant_ranges(*cache.planes, *args, num_tokens=int(ends[-1]))
    want = reference_ranges(*cache.host, table, starts, ends)
    for part, expected in zip(got, want, strict=True):
        assert_same_bytes("rows", to_host_like(part, expected), expected)


@pytest.mark.parametrize("n", [5, APPEND_SCAN_MAX + 5])
def test_slots_beyond_the_cache(n: int) -> None:
    cache = GpuCache(1)
    tokens = rows(n, 576)
    slots = np.full(n, -1)
    slots[:5] = [0, 64, 2**31, 2**40, -(2**40)]
    device = on_gpu(tokens)
    with pytest.raises(ArgumentError, match=r"slot_mapping: .*slot 64 at index 1"):
        api.append_kv(*split(device), *cache.planes, on_gpu(slots), checked=True)
    cache.check()
    api.append_kv(*split(device), *cache.planes, on_gpu(slots), checked=False)
    reference_append(*host_split(tokens[:1]), *cache.host, slots[:1])
    cache.check()
    with pytest.raises(ArgumentError, match=r"slots: .*slot 64 at index 1"):
        api.fetch_dequant(*cache.planes, on_gpu(slots), checked=True)
    got, _ = api.fetch_dequant(*cache.planes, on_gpu(slots), checked=False)
    want, _ = reference_fetch(*cache.host, np.where(slots >= 64, -1, slots))
    assert_same_bytes("kv_c", to_host_like(got, want), want)


def test_ranges_never_read_unused_table_entries() -> None:
    seqlens = np.array([0, 1, 63, 64, 65, 130], np.int32)
    table, num_blocks = shuffled_block_table(seqlens, np.random.default_rng(2))
    starts = np.array([0, 0, 5, 64, 64, 1], np.int32)
    ends = np.concatenate([[0], np.cumsum(seqlens - starts)]).astype(np.int32)
    cache = GpuCache(num_blocks)
    tokens = rows(num_blocks * 64, 576)
    api.append_kv(*split(on_gpu(tokens)), *cache.planes, on_gpu(np.arange(num_blocks * 64)))
    reference_append(*host_split(tokens), *cache.host, np.arange(num_blocks * 64))
    bad = poison_block_table(table, seqlens)
    args = (on_gpu(bad), on_gpu(starts), on_gpu(ends))
    got = api.fetch_dequant_ranges(*cache.planes, *args, num_tokens=int(ends[-1]) + 3)
    want = reference_ranges(*cache.host, bad, starts, ends)
    listed = [slots_of(r, int(n))[s:] for r, n, s in zip(table, seqlens, starts, strict=True)]
    assert_same_bytes(
        "both forms", reference_fetch(*cache.host, np.concatenate(listed))[0], want[0]
    )
    for part, expected in zip(got, want, strict=True):
        rows_got = to_host_like(part, expected)
        assert_same_bytes("rows", rows_got[: ends[-1]], expected)
        assert not rows_got[ends[-1] :].view(np.uint16).any()  # beyond cu_seqlens[-1]: zeros


# --- Streams, graphs, dependent launches -------------------------------------------------------


@pytest.mark.parametrize("n", [40, APPEND_SCAN_MAX + 100])
def test_captured_in_a_graph(n: int) -> None:
    """After one call outside, everything is captured; replays follow data changed in place."""
    stream = Stream(0)
    cache = GpuCache(-(-n // 64))
    host_tokens, host_q = rows(n, 576), rows(4, 1, 16, 576)
    slots = np.random.default_rng(0).permutation(n)
    slots[n // 2] = slots[0]  # a repeated slot, which a replay meets with its own old claims
    tokens, q, where = on_gpu(host_tokens), on_gpu(host_q), on_gpu(slots)
    kv_out = DeviceArray((n, 576), "bfloat16")
    q_out = tuple(
        DeviceArray((4, 1, 16, *tail_), dtype)
        for tail_, dtype in (((512,), "uint8"), ((64,), "bfloat16"), ((), "float32"))
    )

    def step() -> None:
        options: dict[str, Any] = {"stream": stream, "checked": False}
        api.append_kv(*split(tokens), *cache.planes, where, **options)
        api.quantize_q(q, out=q_out, stream=stream)
        api.fetch_dequant(*cache.planes, where, out=kv_out, concatenate=True, **options)

    step()
    stream.synchronize()
    graph = Graph(0)
    with graph.capture(stream.handle):
        step()
    for seed in (1, 2, 3):
        host_tokens[...] = rows(n, 576, seed=seed)
        replace(tokens, host_tokens)
        graph.launch(stream.handle)
        stream.synchronize()
        reference_append(*host_split(host_tokens), *cache.host, slots)
        cache.check()
        want = reference_fetch(*cache.host, slots)
        got = kv_out.numpy().view(want[0].dtype)
        assert_same_bytes("kv_c", np.ascontiguousarray(got[:, :512]), want[0])
        assert_same_bytes("k_pe", np.ascontiguousarray(got[:, 512:]), want[1])
    want_q = reference_quantize(host_q)
    for array, expected in zip(q_out, want_q, strict=True):
        assert_same_bytes("q", to_host_like(array, expected), expected)


def replace(target: TensorView, array: np.ndarray) -> None:
    from snapmla_rt.driver.memory import copy_to_device

    copy_to_device(target.ptr, array.__array_interface__["data"][0], array.nbytes, 0, 0)
    synchronize(0, 0)


def test_checked_mode_refuses_a_capture() -> None:
    stream, cache, tokens, slots = (
        Stream(0),
        GpuCache(1),
        on_gpu(rows(2, 576)),
        on_gpu(np.arange(2)),
    )
    with pytest.raises(ArgumentError, match="checked"), Graph(0).capture(stream.handle):
        api.append_kv(*split(tokens), *cache.planes, slots, stream=stream, checked=True)


@pytest.mark.parametrize("n", [64, APPEND_SCAN_MAX + 64])
def test_dependent_launches_see_their_predecessor(n: int) -> None:
    """A chain append, fetch, append, ... that starts each kernel early: none reads too soon."""
    stream = Stream(0)
    cache = GpuCache(-(-n // 64))
    slots = on_gpu(np.arange(n))
    first = on_gpu(rows(n, 576))
    ping, pong = DeviceArray((n, 576), "bfloat16"), DeviceArray((n, 576), "bfloat16")
    options: dict[str, Any] = {"stream": stream, "checked": False, "pdl": True}
    source = first
    host_source = rows(n, 576)
    for i in range(20):
        target = (ping, pong)[i % 2]
        api.append_kv(*split(source), *cache.planes, slots, **options)
        api.fetch_dequant(*cache.planes, slots, out=target, concatenate=True, **options)
        source = target.view()
        reference_append(*host_split(host_source), *cache.host, np.arange(n))
        host_source = np.concatenate(reference_fetch(*cache.host, np.arange(n)), axis=1)
    stream.synchronize()
    cache.check()
    assert_same_bytes("rows", pong.numpy().view(host_source.dtype), host_source)


def test_two_streams_have_their_own_workspace() -> None:
    n = 3 * APPEND_SCAN_MAX
    streams = [Stream(0), Stream(0)]
    caches = [GpuCache(-(-n // 64)) for _ in streams]
    pools = [rows(n, 576, seed=i) for i in range(2)]
    tokens = [on_gpu(pool) for pool in pools]
    rng = np.random.default_rng(4)
    for _ in range(8):
        mappings = [rng.integers(0, n, n) for _ in streams]
        where = [on_gpu(m) for m in mappings]
        for stream, cache, t, w in zip(streams, caches, tokens, where, strict=True):
            api.append_kv(*split(t), *cache.planes, w, stream=stream)
        for stream, cache, pool, m in zip(streams, caches, pools, mappings, strict=True):
            stream.synchronize()
            reference_append(*host_split(pool), *cache.host, m)
            cache.check()


# --- Other libraries' arrays -------------------------------------------------------------------


def test_numpy_arrays_are_copied() -> None:
    q, tokens, slots = rows(2, 1, 3, 576), rows(3, 576), np.array([5, -1, 7])
    raw = np.full(RECORD_BYTES, FILLER, np.uint8)
    planes: tuple[Any, Any, Any] = cache_planes(raw, "record")
    want: tuple[Any, Any, Any] = cache_planes(raw.copy(), "record")
    query = api.prepare(q, *host_split(tokens), *planes, slots, backend="cuda")
    reference_append(*host_split(tokens), *want, slots)
    got = api.fetch_dequant(*planes, slots, backend="cuda")
    for a, b in zip((*query, *got), (*reference_quantize(q), *reference_fetch(*want, slots)),
                    strict=True):  # fmt: skip
        assert_same_bytes("result", a, b)
    for plane, expected in zip(planes, want, strict=True):
        assert_same_bytes("plane", np.ascontiguousarray(plane), np.ascontiguousarray(expected))


def test_reference_backend_takes_gpu_arrays() -> None:
    for layout in ("separate", "record"):
        cache = GpuCache(2, layout)
        tokens, slots = rows(3, 576), np.array([5, 70, 5])
        args = (*split(on_gpu(tokens)), *cache.planes, on_gpu(slots))
        api.append_kv(*args, backend="reference")
        reference_append(*host_split(tokens), *cache.host, slots)
        cache.check()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    device = torch.device("cuda", 0)
    tokens, q = rows(5, 576), rows(5, 1, 4, 576, seed=3)
    slots = np.array([0, 9, -1, 64, 127])
    as_bf16 = lambda x: torch.from_numpy(x.view(np.int16)).to(device).view(torch.bfloat16)  # noqa: E731
    kv = as_bf16(tokens)
    cache = (
        torch.zeros(2, 64, 512, dtype=torch.float8_e4m3fn, device=device),
        torch.zeros(2, 64, device=device),
        torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=device),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        query = api.prepare(
            as_bf16(q), kv[:, :512], kv[:, 512:], *cache, torch.from_numpy(slots).to(device)
        )
        got = api.fetch_dequant(*cache, torch.from_numpy(slots).to(device))
    torch.cuda.synchronize()
    host: tuple[Any, Any, Any] = cache_planes(np.zeros(2 * RECORD_BYTES, np.uint8), "separate")
    reference_append(*host_split(tokens), *host, slots)
    want = (*reference_quantize(q), *reference_fetch(*host, slots))
    assert query[0].dtype == torch.float8_e4m3fn and got[0].dtype == torch.bfloat16
    for tensor, expected in zip((*query, *got), want, strict=True):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[expected.itemsize]
        array = tensor.contiguous().view(kind).cpu().numpy()
        assert_same_bytes("torch", array.view(expected.dtype), expected)
    for tensor, expected in zip(cache, host, strict=True):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[expected.itemsize]
        array = tensor.view(kind).cpu().numpy()
        assert_same_bytes("cache", array.view(expected.dtype), expected)
    with pytest.raises(ArgumentError, match="k_pe"):
        api.append_kv(kv[:, :512], tokens[:, 512:], *cache, torch.from_numpy(slots).to(device))


def test_empty_calls_enqueue_nothing() -> None:
    cache = GpuCache(1)
    none = on_gpu(np.empty(0, np.int64))
    empty = on_gpu(rows(0, 576))
    api.append_kv(*split(empty), *cache.planes, none)
    kv_c, k_pe = api.fetch_dequant(*cache.planes, none)
    q = api.quantize_q(on_gpu(rows(0, 1, 16, 576)))
    assert (kv_c.shape, k_pe.shape, q[0].shape) == ((0, 512), (0, 64), (0, 1, 16, 512))
    cache.check()
