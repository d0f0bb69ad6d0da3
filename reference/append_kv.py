"""Stage append_kv: new tokens quantised and written straight into their paged slots.

Mirror: ``cuda_src/append_kv.cu``; the steps [Q1] to [Q4] are in ``quantize.py``. Source of the
stage: SnapMLA, section 3.3.1 (Fused-K-Append).

    [A1] a token whose slot is negative is skipped
    [A2] of several tokens with one slot the last (highest index) is written, whole
    [A3] latent codes, scale and pre-scaled RoPE go to block slot / 64, offset slot % 64
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import BLOCK_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM, check_scale_rounding
from snapmla_rt.errors import ArgumentError

from .layout import CacheViews, cache_views, slot_array
from .quantize import f32_input, quantize_rows

__all__ = ["append_kv"]

_ROWS = 1 << 12  # tokens gathered and quantised at once: bounds the temporary memory


def append_kv(
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    ckv_cache: Any,
    k_scale_cache: Any,
    k_rope_cache: Any,
    slot_mapping: ArrayLike,
    *,
    scale_rounding: str = "exact",
) -> None:
    """Quantise n tokens and write them into the cache, in place.

    kv_c: latents [n, 512], k_pe: rotated keys [n, 64]; bf16 (or uint16 bits), float16 or float32.
    ckv_cache: e4m3 or uint8 [num_blocks, 64, 512]; k_scale_cache: float32 [num_blocks, 64];
    k_rope_cache: bf16 or uint16 [num_blocks, 64, 64] (holds RoPE / scale); any strides.
    slot_mapping: int32 or int64 [n], slot = block * 64 + offset; negative: the token is skipped.
    Of tokens that share a slot the last one is written.
    scale_rounding: "exact" or "pow2", what each costs is in `quantize_q_parts`.
    A NaN or infinity in a token's 576 values makes that token NaN in the cache, and no other.
    Raises ArgumentError, before anything is written, for a wrong shape or dtype, a read-only cache
    or a slot beyond the cache (the message names the slot and its index).
    """
    check_scale_rounding(scale_rounding)
    latent = f32_input("kv_c", kv_c, KV_LORA_RANK)
    rope = f32_input("k_pe", k_pe, QK_ROPE_HEAD_DIM)
    if latent.ndim != 2:
        raise ArgumentError("kv_c", f"shape [n, {KV_LORA_RANK}]", list(latent.shape))
    if rope.shape != (latent.shape[0], QK_ROPE_HEAD_DIM):
        expected = f"shape [{latent.shape[0]}, {QK_ROPE_HEAD_DIM}]"
        raise ArgumentError("k_pe", expected, list(rope.shape))
    cache = cache_views(ckv_cache, k_scale_cache, k_rope_cache)
    for name, view in (
        ("ckv_cache", cache.codes), ("k_scale_cache", cache.scale), ("k_rope_cache", cache.rope)
    ):  # fmt: skip
        if not view.flags.writeable:
            raise ArgumentError(name, "a writable array", "a read-only one")
    slots = slot_array("slot_mapping", slot_mapping, cache.num_slots)
    if slots.shape[0] != latent.shape[0]:
        raise ArgumentError("slot_mapping", f"shape [{latent.shape[0]}]", list(slots.shape))
    tokens = last_tokens(slots)
    for start in range(0, tokens.size, _ROWS):
        part = tokens[start : start + _ROWS]
        quantized = quantize_rows(latent[part], rope[part], scale_rounding=scale_rounding)
        _write(cache, slots[part], *quantized)


def last_tokens(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the tokens to write: [A1] slot not negative, [A2] the last one of its slot."""
    reverse = slots[::-1]
    unique, first = np.unique(reverse, return_index=True)
    tokens: NDArray[np.int64] = slots.size - 1 - first[unique >= 0]
    return np.sort(tokens)


def _write(cache: CacheViews, slots: Any, codes: Any, rope_bits: Any, scale: Any) -> None:
    """[A3] one quantised token per distinct slot."""
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache.codes[block, offset] = codes
    cache.rope[block, offset] = rope_bits
    cache.scale[block, offset] = scale.view(np.uint32)
