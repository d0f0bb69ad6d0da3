"""append_kv: the right bytes in the right slots, and not one byte anywhere else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from hypothesis import given
from hypothesis import strategies as st
from poison import poisoned_cache
from strategies import cast_finite, float_dtypes, token_arrays

from snapmla_rt.config import RECORD_BYTES, RECORD_ROPE_OFFSET, RECORD_SCALE_OFFSET
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.fetch_dequant import fetch_dequant
from snapmla_rt.reference.quantize_q import quantize_q_parts

ROUNDINGS = st.sampled_from(["exact", "pow2"])
NUM_BLOCKS = 3


def record_cache(num_blocks: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """One buffer of 41,216-byte records, poisoned, and its three planes as strided views."""
    buffer = np.full((num_blocks, RECORD_BYTES), 0xFF, np.uint8)
    ckv = buffer[:, :RECORD_ROPE_OFFSET].reshape(num_blocks, 64, 512)
    rope = buffer[:, RECORD_ROPE_OFFSET:RECORD_SCALE_OFFSET].view(ml_dtypes.bfloat16)
    scale = buffer[:, RECORD_SCALE_OFFSET:].view(np.float32)
    views = (ckv.view(ml_dtypes.float8_e4m3fn), scale, rope.reshape(num_blocks, 64, 64))
    assert all(np.shares_memory(view, buffer) for view in views)
    return buffer, views


def cache_bits(cache: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}") for a in cache]


@given(data=st.data(), n=st.integers(0, 9), dtype=float_dtypes(), mode=ROUNDINGS)
def test_writes_its_slots_only(data: st.DataObject, n: int, dtype: np.dtype, mode: str) -> None:
    """Any slots: negative, repeated, at block edges; both layouts, both integer types."""
    slot = st.one_of(
        st.sampled_from([-1, -(2**31), 0, 63, 64, 64 * NUM_BLOCKS - 1]),
        st.integers(0, 64 * NUM_BLOCKS - 1),
    )
    slots = np.array([data.draw(slot) for _ in range(n)], data.draw(st.sampled_from("il")))
    kv_c = cast_finite(data.draw(token_arrays(n, 512)), dtype)
    k_pe = cast_finite(data.draw(token_arrays(n, 64)), dtype)
    want = poisoned_cache(NUM_BLOCKS)
    codes, rope, scale = quantize_q_parts(kv_c, k_pe, scale_rounding=mode)
    for i, s in enumerate(slots):  # one token after the other: the last of a slot stays
        if s >= 0:
            block, offset = divmod(int(s), 64)
            for plane, value in zip(want, (codes[i], scale[i], rope[i]), strict=True):
                plane.view(f"u{plane.dtype.itemsize}")[block, offset] = value.view(
                    f"u{value.dtype.itemsize}"
                )
    separate = poisoned_cache(NUM_BLOCKS)
    _, record = record_cache(NUM_BLOCKS)
    for view, bad in zip(record, separate, strict=True):
        view.view(f"u{view.dtype.itemsize}")[:] = bad.view(f"u{bad.dtype.itemsize}")
    for cache in (separate, record):
        append_kv(kv_c, k_pe, *cache, slots, scale_rounding=mode)
        for name, got, expected in zip("csr", cache_bits(cache), cache_bits(want), strict=True):
            assert_same_bytes(name, got, expected)


@given(mode=ROUNDINGS, repeats=st.integers(2, 5), x=token_arrays(5, 576))
def test_duplicate_slots_never_tear(mode: str, repeats: int, x: np.ndarray) -> None:
    cache = poisoned_cache(1)
    alone = poisoned_cache(1)
    tokens = x[:repeats]
    append_kv(tokens[:, :512], tokens[:, 512:], *cache, np.full(repeats, 7), scale_rounding=mode)
    last = tokens[-1:]
    append_kv(last[:, :512], last[:, 512:], *alone, np.array([7]), scale_rounding=mode)
    for name, got, expected in zip("csr", cache_bits(cache), cache_bits(alone), strict=True):
        assert_same_bytes(name, got, expected)


def test_uint8_and_uint16_caches() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 576)).astype(np.float32)
    typed, raw = poisoned_cache(1), poisoned_cache(1)
    slots = np.arange(4)
    append_kv(x[:, :512], x[:, 512:], *typed, slots)
    append_kv(x[:, :512], x[:, 512:], raw[0].view(np.uint8), raw[1], raw[2].view(np.uint16), slots)
    for got, expected in zip(cache_bits(raw), cache_bits(typed), strict=True):
        assert_same_bytes("cache", got, expected)


def test_nan_token_is_alone() -> None:
    x = np.random.default_rng(4).standard_normal((3, 576)).astype(np.float32)
    x[1, 575] = np.inf
    cache = poisoned_cache(1)
    append_kv(x[:, :512], x[:, 512:], *cache, np.array([5, 6, 7]))
    kv_c, k_pe = fetch_dequant(*cache, np.array([5, 6, 7]))
    nan = np.isnan(kv_c.astype(np.float32)).all(1), np.isnan(k_pe.astype(np.float32)).all(1)
    assert nan[0].tolist() == nan[1].tolist() == [False, True, False]
    assert np.isfinite(kv_c[[0, 2]].astype(np.float32)).all()


@pytest.mark.parametrize("bad", [64, 2**40, 2**31])
def test_slot_beyond_the_cache_writes_nothing(bad: int) -> None:
    cache, before = poisoned_cache(1), poisoned_cache(1)
    x = np.ones((3, 576), np.float32)
    with pytest.raises(ArgumentError, match=rf"slot_mapping: .*slot {bad} at index 2"):
        append_kv(x[:, :512], x[:, 512:], *cache, np.array([0, 1, bad]))
    for got, expected in zip(cache_bits(cache), cache_bits(before), strict=True):
        assert_same_bytes("cache", got, expected)


def _bad_calls() -> dict[str, tuple[str, dict[str, object]]]:
    f32 = np.float32
    frozen = poisoned_cache(1)[1]
    frozen.setflags(write=False)
    return {
        "kv_c width": ("kv_c", {"kv_c": np.zeros((2, 511), f32)}),
        "kv_c rank": ("kv_c", {"kv_c": np.zeros((2, 1, 512), f32)}),
        "k_pe rows": ("k_pe", {"k_pe": np.zeros((3, 64), f32)}),
        "k_pe dtype": ("k_pe", {"k_pe": np.zeros((2, 64), np.int8)}),
        "slots rows": ("slot_mapping", {"slot_mapping": np.zeros(3, int)}),
        "slots dtype": ("slot_mapping", {"slot_mapping": np.zeros(2, np.float32)}),
        "slots rank": ("slot_mapping", {"slot_mapping": np.zeros((1, 2), int)}),
        "block size": ("ckv_cache", {"ckv_cache": np.zeros((1, 16, 512), np.uint8)}),
        "argument order": ("k_scale_cache", {"k_scale_cache": np.zeros((1, 64, 64), np.uint16)}),
        "scale dtype": ("k_scale_cache", {"k_scale_cache": np.zeros((1, 64), np.float64)}),
        "rope blocks": ("k_rope_cache", {"k_rope_cache": np.zeros((2, 64, 64), np.uint16)}),
        "read-only": ("k_scale_cache", {"k_scale_cache": frozen}),
        "list": ("ckv_cache", {"ckv_cache": [1, 2]}),
        "rounding": ("scale_rounding", {"scale_rounding": "nearest"}),
    }


@pytest.mark.parametrize("case", _bad_calls())
def test_bad_input_is_named(case: str) -> None:
    name, change = _bad_calls()[case]
    cache = poisoned_cache(1)
    arguments = {
        "kv_c": np.zeros((2, 512), np.float32),
        "k_pe": np.zeros((2, 64), np.float32),
        "ckv_cache": cache[0],
        "k_scale_cache": cache[1],
        "k_rope_cache": cache[2],
        "slot_mapping": np.arange(2),
    }
    append_kv(**arguments)  # the unchanged call is good
    with pytest.raises(ArgumentError) as error:
        append_kv(**{**arguments, **change})
    assert error.value.name == name
