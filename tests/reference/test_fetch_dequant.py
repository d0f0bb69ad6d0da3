"""fetch_dequant: every code and scale, both ways of naming tokens, and nothing else read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from hypothesis import given
from hypothesis import strategies as st
from poison import poison_block_table, poison_unused_slots, poisoned_cache
from strategies import lengths, seeds, shuffled_block_table, slots_of, token_arrays

from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.fetch_dequant import fetch_dequant, fetch_dequant_ranges
from snapmla_rt.reference.quantize_q import quantize_q_parts


def random_cache(num_blocks: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Any codes, any scale bits, any RoPE bits: NaN, infinities and subnormals included."""
    rng = np.random.default_rng(seed)
    ckv = rng.integers(0, 256, (num_blocks, 64, 512), np.uint8)
    scale = rng.integers(0, 2**32, (num_blocks, 64), np.uint32).view(np.float32)
    rope = rng.integers(0, 2**16, (num_blocks, 64, 64), np.uint16)
    return ckv, scale, rope


def expected_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits of float32 values: ml_dtypes rounds like the hardware; NaN is always 0x7fff."""
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


@given(seed=seeds(), n=lengths(200))
def test_equals_product_rounded(seed: int, n: int) -> None:
    """One fp32 product per value, checked by rounding the exact float64 product twice: 8 + 24 bits
    fit in float64, so the first rounding is the fp32 one."""
    ckv, scale, rope = random_cache(4, seed)
    slots = np.random.default_rng(seed).integers(0, 256, n)
    kv_c, k_pe = fetch_dequant(ckv, scale, rope, slots)
    assert (kv_c.shape, k_pe.shape) == ((n, 512), (n, 64))
    block, offset = slots // 64, slots % 64
    with np.errstate(all="ignore"):
        s = scale[block, offset].astype(np.float64)[:, None]
        for got, plane in ((kv_c, ckv.view(ml_dtypes.float8_e4m3fn)), (k_pe, rope)):
            wide = plane.view(ml_dtypes.bfloat16) if plane.dtype == np.uint16 else plane
            product = wide[block, offset].astype(np.float64) * s
            assert_same_bytes(
                "rows", got.view(np.uint16), expected_bf16(product.astype(np.float32))
            )


def test_every_code_times_every_scale_exponent() -> None:
    ckv = np.zeros((4, 64, 512), np.uint8)
    ckv[:] = np.arange(512) % 256
    exponent = np.arange(256, dtype=np.uint32).reshape(4, 64)
    mantissa = np.random.default_rng(1).integers(0, 2**23, (4, 64), np.uint32)
    scale = ((exponent << 23) | mantissa).view(np.float32)
    rope = np.zeros((4, 64, 64), np.uint16)
    kv_c, _ = fetch_dequant(ckv, scale, rope, np.arange(256))
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    with np.errstate(all="ignore"):
        product = (np.tile(values, 2) * scale.reshape(256, 1).astype(np.float64)).astype(np.float32)
    assert_same_bytes("kv_c", kv_c.view(np.uint16), expected_bf16(product))


@given(data=st.data(), mode=st.sampled_from(["exact", "pow2"]))
def test_fetch_of_appended_tokens(data: st.DataObject, mode: str) -> None:
    """What went in comes out: codes times scale, and RoPE times scale, in any slot order."""
    n = data.draw(lengths(65))
    x = data.draw(token_arrays(n, 576, max_magnitude=1e30))
    slots = np.random.default_rng(n).permutation(192)[:n]
    cache = poisoned_cache(3)
    append_kv(x[:, :512], x[:, 512:], *cache, slots, scale_rounding=mode)
    kv_c, k_pe = fetch_dequant(*cache, slots)
    codes, rope, scale = quantize_q_parts(x[:, :512], x[:, 512:], scale_rounding=mode)
    for got, part in ((kv_c, codes), (k_pe, rope)):
        want = part.astype(np.float32) * scale[:, None]
        assert_same_bytes("rows", got.view(np.uint16), expected_bf16(want))


@given(data=st.data(), seed=seeds())
def test_ranges_equal_slots(data: st.DataObject, seed: int) -> None:
    """Ragged ranges, shuffled blocks, absurd ids past the end, NaN in every slot not asked for."""
    batch = data.draw(st.integers(1, 4))
    seqlens = np.array([data.draw(lengths(130)) for _ in range(batch)], np.int32)
    starts = np.array([data.draw(st.integers(0, int(n))) for n in seqlens], np.int32)
    table, num_blocks = shuffled_block_table(seqlens, np.random.default_rng(seed))
    cache = random_cache(num_blocks, seed)
    slots = np.concatenate(
        [slots_of(row, int(n))[s:] for row, n, s in zip(table, seqlens, starts, strict=True)]
    )
    cu_seqlens = np.concatenate([[0], np.cumsum(seqlens - starts)]).astype(np.int32)
    want = fetch_dequant(*cache, slots)
    poison_unused_slots(*cache, slots)
    got = fetch_dequant_ranges(*cache, poison_block_table(table, seqlens), starts, cu_seqlens)
    for name, a, b in zip(("kv_c", "k_pe"), got, want, strict=True):
        assert_same_bytes(name, a, b)


def test_negative_slots_give_zeros() -> None:
    cache = poisoned_cache(1)
    kv_c, k_pe = fetch_dequant(*cache, np.array([-1, 0, -(2**31)]))
    for rows in (kv_c.view(np.uint16), k_pe.view(np.uint16)):
        assert (rows[[0, 2]] == 0).all() and (rows[1] == 0x7FFF).all()
    empty = fetch_dequant(*poisoned_cache(0), np.array([-1]))
    assert (empty[0].view(np.uint16) == 0).all() and empty[1].shape == (1, 64)


def _ranges(**change: object) -> None:
    arguments = {"block_table": [[0, 1]], "starts": [0], "cu_seqlens": [0, 65], **change}
    arrays = {k: np.asarray(v, None if k in change else np.int32) for k, v in arguments.items()}
    fetch_dequant_ranges(*random_cache(2, 0), **arrays)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"block_table": np.array([[0, 2]])}, "block_table"),
        ({"block_table": np.array([[0, -1]])}, "block_table"),
        ({"block_table": np.array([0, 1])}, "block_table"),
        ({"block_table": np.array([[0.0, 1.0]])}, "block_table"),
        ({"starts": np.array([64])}, "starts"),
        ({"starts": np.array([-1])}, "starts"),
        ({"starts": np.array([0, 0])}, "starts"),
        ({"cu_seqlens": np.array([0, 129])}, "starts"),
        ({"cu_seqlens": np.array([1, 65])}, "cu_seqlens"),
        ({"cu_seqlens": np.array([0])}, "cu_seqlens"),
    ],
)
def test_bad_ranges_are_named(change: dict[str, object], name: str) -> None:
    _ranges()
    with pytest.raises(ArgumentError) as error:
        _ranges(**change)
    assert error.value.name == name


def test_bad_slots_are_named() -> None:
    cache = random_cache(1, 0)
    with pytest.raises(ArgumentError, match=r"slots: .*slot 64 at index 1"):
        fetch_dequant(*cache, np.array([0, 64]))
    with pytest.raises(ArgumentError, match="slots"):
        fetch_dequant(*cache, np.array([0.5]))
