"""The calls of FluentLLM's `flash_mla_fp8`, by this package's kernels.

    from snapmla_rt.compat import flash_mla_fp8      # instead of: import flash_mla_fp8

The pool of a layer is three arrays over N slots (slot = page * 64 + offset): the latent as uint8
[N, 1, 512], its scales float32 [N, 1, 1], the RoPE divided by the scale bf16 [N, 1, 64]. Nothing
needs to be zeroed. Page 0 is an ordinary page here, so it can be the one that padded rows write and
read; slots that several rows of one call write hold the last of them, whole.

What differs from the original is in README, "Coming from FlashMLA / FluentLLM".
"""

from __future__ import annotations

from typing import Any

from .. import api
from ..config import HEAD_DIM_QK, HEAD_DIM_V, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from ..errors import ArgumentError
from ._arrays import describe, one_head, refuse_grad, with_blocks
from ._metadata import FlashMLASchedMeta, plan_of, plan_of_object
from .flash_mla import (
    check_head_dim_v,
    decode_bytes,
    flash_mla_with_kvcache,
    get_mla_metadata,
    renamed_error,
)

__all__ = [
    "FlashMLASchedMeta",
    "dequantize_ckv_fused_indexed",
    "flash_mla_ckv_fp8_per_token",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "get_workspace_size",
    "quantize_and_cache_k",
    "quantize_ckv_per_token_head",
]

_APPEND_NAMES = {
    "kv_c": "key",
    "k_pe": "key",
    "ckv_cache": "k_lora_cache",
    "k_scale_cache": "k_lora_scale_cache",
    "k_rope_cache": "k_rope_cache",
    "slot_mapping": "indices",
}
_FETCH_NAMES = {
    "ckv_cache": "k_lora",
    "k_scale_cache": "k_scale",
    "k_rope_cache": "k_rope",
    "slots": "indices",
}
_DECODE_NAMES = {
    "ckv_cache": "k_cache_lora",
    "k_scale_cache": "k_scale",
    "k_rope_cache": "k_cache_rope",
    "plan": "tile_scheduler_metadata",
}


def quantize_ckv_per_token_head(
    q: Any, kv_lora_rank: int = KV_LORA_RANK, *, out: Any = None
) -> tuple[Any, Any, Any]:
    """Quantise queries: one scale per token and head, RoPE divided by it.

    q: bf16, float16 or float32 [b, s_q, h, 576]; kv_lora_rank: 512. Returns, in this order,
    q_nope e4m3 [b, s_q, h, 512], q_scale float32 [b, s_q, h], q_rope bf16 [b, s_q, h, 64]; `out`:
    such arrays, in this order, to fill. Rule: reference/quantize.py. Raises ArgumentError.
    """
    if kv_lora_rank != KV_LORA_RANK:
        raise ArgumentError("kv_lora_rank", str(KV_LORA_RANK), kv_lora_rank)
    refuse_grad("q", q)
    if out is not None:
        if len(out) != 3:
            raise ArgumentError("out", "three arrays (q_nope, q_scale, q_rope)", len(out))
        out = (out[0], out[2], out[1])
    q_nope, q_rope, q_scale = api.quantize_q(q, out=out)
    return q_nope, q_scale, q_rope


def flash_mla_ckv_fp8_per_token(
    *,
    q_nope: Any,
    q_rope: Any,
    k_cache_lora: Any,
    k_cache_rope: Any,
    q_scale: Any,
    k_scale: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int = HEAD_DIM_V,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> tuple[Any, Any]:
    """Decode attention of one layer over the per-token FP8 cache.

    q_nope e4m3 [b, s_q, h, 512], q_scale float32 [b, s_q, h] (or [b, s_q, h, 1]), q_rope bf16
    [b, s_q, h, 64]: of quantize_ckv_per_token_head, any h to 128. k_cache_lora uint8 or e4m3
    [pages, 64, 1, 512], k_cache_rope bf16 [pages, 64, 1, 64], k_scale float32 [pages, 64, 1, 1].
    block_table int32 [b, n], of which only the pages that a length reaches are read; cache_seqlens
    int32 [b], the s_q new tokens included. tile_scheduler_metadata, num_splits: of get_mla_metadata
    for these lengths and s_q * h, or copies of them in larger buffers. softmax_scale: default
    576^-0.5. causal: query i of s_q sees the first cache_seqlens - s_q + i + 1 tokens.

    Returns (out bf16 [b, s_q, h, 512], lse float32 [b, h, s_q], a natural logarithm). A query that
    sees no token has out 0 and lse +inf. out, lse, workspace: memory to use instead of new one;
    get_workspace_size says how much. Raises ArgumentError before anything is launched.
    """
    check_head_dim_v(head_dim_v)
    refuse_grad("q_nope", q_nope)
    if len(getattr(q_scale, "shape", ())) == 4 and q_scale.shape[-1] == 1:
        q_scale = q_scale[..., 0]
    if len(getattr(q_nope, "shape", ())) != 4:
        expected = f"shape [b, s_q, h, {KV_LORA_RANK}]"
        raise ArgumentError("q_nope", expected, describe(q_nope))
    batch, seq_len_q, heads, _ = q_nope.shape
    planes = (
        one_head(k_cache_lora, "k_cache_lora", KV_LORA_RANK),
        one_head(k_scale, "k_scale", None),
        one_head(k_cache_rope, "k_cache_rope", QK_ROPE_HEAD_DIM),
    )
    if softmax_scale is None:
        softmax_scale = HEAD_DIM_QK**-0.5
    try:
        if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
            plan = plan_of_object(tile_scheduler_metadata, cache_seqlens, seq_len_q, heads, causal)
        else:
            plan = plan_of(tile_scheduler_metadata, num_splits, batch, seq_len_q, heads)
        query = (q_nope, q_rope, q_scale)
        return api.mla_decode(
            *(*query, *planes, block_table, cache_seqlens),
            plan,
            softmax_scale,
            causal=causal,
            out=out,
            lse=lse,
            workspace=workspace,
        )
    except ArgumentError as error:
        raise renamed_error(error, _DECODE_NAMES) from None


def get_workspace_size(q_nope: Any, tile_scheduler_metadata: Any) -> int:
    """Bytes of the workspace of flash_mla_ckv_fp8_per_token for queries of q_nope's shape and
    metadata of this shape: contiguous and 16-byte aligned. One serves all layers of a stream."""
    batch, seq_len_q, heads, _ = q_nope.shape
    return decode_bytes(batch, seq_len_q, heads, tile_scheduler_metadata.shape[0])


def quantize_and_cache_k(
    key: Any,
    k_lora_cache: Any,
    k_lora_scale_cache: Any,
    k_rope_cache: Any,
    indices: Any,
    head_dim_v: int = HEAD_DIM_V,
) -> None:
    """Quantise new tokens and write them into their slots, in one launch; in place.

    key: bf16, float16 or float32 [n, 1, 576], latent then RoPE. k_lora_cache uint8 or e4m3
    [N, 1, 512], k_lora_scale_cache float32 [N, 1, 1], k_rope_cache bf16 [N, 1, 64], N a multiple
    of 64. indices: int32 or int64 [n], slots; a negative one, or one beyond N, skips its token. Of
    tokens with the same slot the last is written. Rule: reference/quantize.py. Raises
    ArgumentError.
    """
    check_head_dim_v(head_dim_v)
    refuse_grad("key", key)
    shape = tuple(getattr(key, "shape", ()))
    if len(shape) != 3 or shape[1:] != (1, HEAD_DIM_QK):
        raise ArgumentError("key", f"shape [n, 1, {HEAD_DIM_QK}]", describe(key))
    planes = (
        with_blocks(k_lora_cache, "k_lora_cache", KV_LORA_RANK),
        with_blocks(k_lora_scale_cache, "k_lora_scale_cache", None),
        with_blocks(k_rope_cache, "k_rope_cache", QK_ROPE_HEAD_DIM),
    )
    try:
        tokens = (key[:, 0, :KV_LORA_RANK], key[:, 0, KV_LORA_RANK:])
        api.append_kv(*tokens, *planes, indices)
    except ArgumentError as error:
        raise renamed_error(error, _APPEND_NAMES) from None


def dequantize_ckv_fused_indexed(
    k_lora: Any, k_rope: Any, k_scale: Any, indices: Any, *, out: Any = None
) -> tuple[Any, Any]:
    """Gather tokens by slot and dequantise them to bf16, in one launch.

    k_lora e4m3 or uint8 [N, 1, 512], k_rope bf16 [N, 1, 64], k_scale float32 [N, 1, 1] (in this
    order, which is not that of storage); indices: int32 or int64 [n]. Returns k_nope bf16
    [n, 1, 512] and k_rope bf16 [n, 1, 64], both multiplied by the scale; `out`: such arrays to
    fill. A negative index, or one beyond N, gives zeros. Rule: reference/fetch_dequant.py. Raises
    ArgumentError.
    """
    planes = (
        with_blocks(k_lora, "k_lora", KV_LORA_RANK),
        with_blocks(k_scale, "k_scale", None),
        with_blocks(k_rope, "k_rope", QK_ROPE_HEAD_DIM),
    )
    rows = None if out is None else tuple(part[:, 0] for part in out)
    try:
        k_nope, k_pe = api.fetch_dequant(*planes, indices, out=rows)
    except ArgumentError as error:
        raise renamed_error(error, _FETCH_NAMES) from None
    return out if out is not None else (k_nope[:, None], k_pe[:, None])
