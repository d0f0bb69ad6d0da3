"""widen_per_tensor by the reference: exact values, what is written and what is not, arguments."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from snapmla_rt.api_widen import widen_per_tensor
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.attention_fp64 import e4m3_table
from snapmla_rt.reference.widen_per_tensor import rope_bits, visible_blocks

BF16 = ml_dtypes.bfloat16


def arguments(num_blocks: int = 6) -> dict[str, Any]:
    codes = np.resize(np.arange(256, dtype=np.uint8), (num_blocks, 64, 576))
    return {
        "k_cache": codes,
        "block_table": np.array([[4, 1, 2147480000], [-1, 7, 5]], np.int32),
        "cache_seqlens": np.array([65, 192], np.int32),
        "descale_k": np.array([0.25], np.float32),
        "k_rope": np.full((num_blocks, 64, 64), 0xA5A5, np.uint16),
        "k_scale": np.zeros(64, np.float32),
    }


def test_every_code_is_widened_exactly() -> None:
    codes = np.zeros((4, 576), np.uint8)
    codes[:, 512:] = np.arange(256, dtype=np.uint8).reshape(4, 64)
    values = rope_bits(codes).view(BF16).astype(np.float64).reshape(-1)
    table = e4m3_table()
    assert np.array_equal(values, table, equal_nan=True)
    assert np.signbit(values[0x80]) and values[0x80] == 0
    assert (rope_bits(codes).reshape(-1)[[0x7F, 0xFF]] == 0x7FFF).all()


def test_visible_blocks_alone_are_written() -> None:
    """Ids outside the cache are passed over, entries past a length not looked at."""
    a = arguments()
    widen_per_tensor(**a)
    written = [1, 4, 5]
    assert (a["k_rope"][written] == rope_bits(a["k_cache"][written])).all()
    others = np.delete(a["k_rope"], written, axis=0)
    assert (others == 0xA5A5).all() and (a["k_scale"] == 0.25).all()
    none = visible_blocks(a["block_table"], np.zeros(2, np.int32), 6)
    assert none.size == 0


def test_queries() -> None:
    a = arguments()
    q = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 640), dtype=np.uint8)[..., :576]
    q_rope, q_scale = np.zeros((2, 3, 4, 64), BF16), np.zeros((2, 3, 4), np.float32)
    widen_per_tensor(**a, query=(q, np.array([3.0], np.float32), q_rope, q_scale))
    assert (q_rope.view(np.uint16) == rope_bits(q)).all() and (q_scale == 3).all()


WRONG: dict[str, tuple[str, Any]] = {
    "page": ("k_cache", np.zeros((6, 32, 576), np.uint8)),
    "width": ("k_cache", np.zeros((6, 64, 512), np.uint8)),
    "dtype": ("k_cache", np.zeros((6, 64, 576), np.int8)),
    "token stride": ("k_cache", np.zeros((6, 64, 584), np.uint8)[..., :576]),
    "table": ("block_table", np.zeros((2, 3), np.int64)),
    "lengths": ("cache_seqlens", np.zeros(3, np.int32)),
    "scale": ("descale_k", np.zeros(2, np.float32)),
    "rope blocks": ("k_rope", np.zeros((5, 64, 64), np.uint16)),
    "rope apart": ("k_rope", np.zeros((6, 128, 64), np.uint16)[:, :64]),
    "scale line": ("k_scale", np.zeros(32, np.float32)),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_argument_is_named(what: str) -> None:
    name, value = WRONG[what]
    with pytest.raises(ArgumentError) as caught:
        widen_per_tensor(**(arguments() | {name: value}))
    assert caught.value.name == name, str(caught.value)
