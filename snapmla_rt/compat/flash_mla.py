"""The calls of FlashMLA, by this package's kernels.

    from snapmla_rt.compat import flash_mla          # instead of: import flash_mla

`get_mla_metadata` in its three forms and `flash_mla_with_kvcache`, for FP8 caches: this package's
own (one scale a token, RoPE in bf16), where a bf16 query is quantised inside, and the one of vLLM's
fork (576 e4m3 codes a token, one scale for everything). What is not supported (bf16 caches, sparse
attention, attention sinks, prefill kernels) says so and names what to use instead; `supports` tells
beforehand.

What differs from the original is in README, "Coming from FlashMLA / FluentLLM".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import api
from ..api_widen import widen_per_tensor
from ..config import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    HEAD_DIM_QK,
    HEAD_DIM_V,
    KV_LORA_RANK,
    MAX_NUM_HEADS_Q,
    QK_ROPE_HEAD_DIM,
    TILE_M,
)
from ..decode_launch import workspace_layout
from ..errors import ArgumentError
from ..plan import DecodePlan, PlanConfig
from ..tensor import E4M3, INPUT_FLOATS, TensorView, view
from ._arrays import (
    Piece,
    as_dtype,
    describe,
    one_head,
    piece_bytes,
    record_planes,
    refuse,
    refuse_grad,
    repeated_line,
    take,
)
from ._metadata import SPARSE_HINT, FlashMLASchedMeta, make_metadata, plan_of, plan_of_object

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "get_mla_metadata",
    "get_workspace_size",
    "supports",
]

_mla_decode: Any = api.mla_decode  # called with its eight arrays as one sequence
_FP8_BITS = (*E4M3, "int8")
_SPARSE_TOKEN_BYTES = (656, 584)  # of FlashMLA's two sparse cache formats
_BF16_CACHE_HINT = (
    "an FP8 cache: bf16 caches are not supported. Fill an FP8 cache with "
    "compat.flash_mla_fp8.quantize_and_cache_k (or snapmla_rt.api.append_kv), or keep FlashMLA's "
    "bf16 kernel"
)
_NAMES = {
    "ckv_cache": "k_cache",
    "k_scale_cache": "k_cache",
    "k_rope_cache": "k_cache",
    "q_nope": "q",
    "q_rope": "q",
    "q_scale": "q",
    "num_heads_q": "q",
    "seq_len_q": "q",
    "plan": "tile_scheduler_metadata",
}


def renamed_error(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The error under the name that the face's argument has."""
    return ArgumentError(names.get(error.name, error.name), error.expected, error.got)


def check_head_dim_v(head_dim_v: Any) -> None:
    if head_dim_v != HEAD_DIM_V:
        raise ArgumentError("head_dim_v", str(HEAD_DIM_V), head_dim_v)


# --- Metadata ------------------------------------------------------------------------------------


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: Any = None,
    num_heads_k: Any = 1,
    num_heads_q: Any = None,
    is_fp8_kvcache: bool = False,
    topk: Any = None,
) -> tuple[Any, Any]:
    """The schedule of a step, in the form that the arguments ask for.

    get_mla_metadata(): (FlashMLASchedMeta(), None), an object filled at its first use.
    get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv, ...): (tile_scheduler_metadata int32
    [num_sm_parts, 8], num_splits int32 [b + 1]), for cache_seqlens int32 [b]. num_splits is
    cumulative: [0] is 0, row i owns splits [i] to [i + 1], the last is the number of all splits.
    num_sm_parts does not depend on b, so `.copy_()` into a buffer made once works for any batch:
    all of tile_scheduler_metadata, and num_splits into the first b + 1 entries. num_heads_k: 1.
    num_heads_q and is_fp8_kvcache change nothing here. Raises ArgumentError (topk: sparse).
    """
    if cache_seqlens is None and num_q_tokens_per_head_k is None:
        refuse("topk", topk, SPARSE_HINT)
        return FlashMLASchedMeta(), None
    return make_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, topk)


def _plan(
    metadata: Any,
    num_splits: Any,
    cache_seqlens: Any,
    shape: tuple[int, int, int],
    causal: bool,
) -> DecodePlan:
    batch, seq_len_q, heads = shape
    if isinstance(metadata, FlashMLASchedMeta):
        if num_splits is not None:
            expected = "None beside a FlashMLASchedMeta"
            raise ArgumentError("num_splits", expected, describe(num_splits))
        return plan_of_object(metadata, cache_seqlens, seq_len_q, heads, causal)
    return plan_of(metadata, num_splits, batch, seq_len_q, heads)


# --- Caches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cache:
    """A cache told apart: planes (ckv, k_scale, k_rope), or one array of 576 codes a token."""

    planes: tuple[Any, Any, Any] | None = None
    codes: Any = None


def _cache(k_cache: Any) -> _Cache:
    """Which cache this is. Raises ArgumentError for one that is not supported, with the way out."""
    if hasattr(k_cache, "ckv_cache"):  # kv_cache.KVCacheStorage
        k_cache = (k_cache.ckv_cache, k_cache.k_scale_cache, k_cache.k_rope_cache)
    if isinstance(k_cache, (tuple, list)):
        return _Cache(planes=_three_planes(k_cache))
    whole = view(k_cache, "k_cache")
    width = whole.shape[-1] if whole.ndim else 0
    if whole.dtype in INPUT_FLOATS or whole.dtype == "uint16":
        raise ArgumentError("k_cache", _BF16_CACHE_HINT, describe(k_cache))
    if width in _SPARSE_TOKEN_BYTES:
        expected = (
            f"a dense FP8 cache: {width} bytes a token is a sparse format, not supported here"
        )
        raise ArgumentError("k_cache", expected, describe(k_cache))
    if whole.dtype not in _FP8_BITS:
        raise ArgumentError("k_cache", f"dtype {' or '.join(E4M3)}", whole.dtype)
    if whole.dtype == "int8" or width == BYTES_PER_TOKEN:
        k_cache = as_dtype(k_cache, "uint8")
    if width == BYTES_PER_TOKEN:
        one_head(k_cache, "k_cache", BYTES_PER_TOKEN)
        return _Cache(planes=record_planes(k_cache))
    return _Cache(codes=one_head(k_cache, "k_cache", HEAD_DIM_QK))


def _three_planes(given: Any) -> tuple[Any, Any, Any]:
    if len(given) != 3:
        raise ArgumentError("k_cache", "three arrays (latent, scale, RoPE)", len(given))
    return (
        one_head(given[0], "k_cache[0]", KV_LORA_RANK),
        one_head(given[1], "k_cache[1]", None),
        one_head(given[2], "k_cache[2]", QK_ROPE_HEAD_DIM),
    )


def _query(q: Any) -> tuple[TensorView, tuple[int, int, int]]:
    """(view, (b, s_q, h)) of a query [b, s_q, h, 576]."""
    found = view(q, "q")
    if found.ndim != 4 or found.shape[-1] != HEAD_DIM_QK:
        raise ArgumentError("q", f"shape [b, s_q, h_q, {HEAD_DIM_QK}]", list(found.shape))
    batch, seq_len_q, heads, _ = found.shape
    if not 1 <= heads <= MAX_NUM_HEADS_Q:
        raise ArgumentError("q", f"1 to {MAX_NUM_HEADS_Q} heads (any number)", heads)
    return found, (batch, seq_len_q, heads)


# --- Decode --------------------------------------------------------------------------------------


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    descale_q: Any = None,
    descale_k: Any = None,
    *,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> tuple[Any, Any]:
    """Decode attention over a paged FP8 cache in pages of 64 tokens.

    k_cache, one of:
    - (latent e4m3 or uint8 [pages, 64, 1, 512], scale float32 [pages, 64, 1, 1], RoPE bf16
      [pages, 64, 1, 64], divided by the scale): this package's cache, also as a KVCacheStorage;
    - uint8 [pages, 64, 1, 644]: the same with each page one record of 41,216 bytes ("record");
    - e4m3 or uint8 [pages, 64, 1, 576] with descale_k float32 [1]: vLLM's FP8 cache, one scale for
      everything, RoPE quantised too. Costs a launch more, 192 bytes of traffic a visible token, and
      8,192 bytes of memory a page of the whole cache, new at each call or from `workspace`.
    q: bf16 or float16 [b, s_q, h_q, 576], any h_q to 128, quantised inside with one scale per token
    and head; with the last kind of cache also e4m3 with descale_q float32 [1].
    block_table int32 [b, n]: entries past a length are not read. cache_seqlens int32 [b], the s_q
    new tokens included. tile_scheduler_metadata, num_splits: of get_mla_metadata, either form.
    head_dim_v: 512: the values are the latent. softmax_scale: default 576^-0.5. causal: query i of
    s_q sees the first cache_seqlens - s_q + i + 1 tokens. is_fp8_kvcache: ignored, k_cache tells.
    descale_q and descale_k are at least 2^-96 (not checked: they are on the GPU).

    Returns (out [b, s_q, h_q, 512] in q's type, bf16 for an e4m3 query; lse float32 [b, h_q, s_q],
    a natural logarithm). A float16 result is the bf16 one converted: a copy; beyond 65,504: inf. A
    query that sees no token has out 0 and lse +inf; one that sees a NaN token is NaN in both. out
    (bf16, returned as it is), lse, workspace: memory to use instead of new one; get_workspace_size
    says how much. Raises ArgumentError before anything of the caller's is written, also for what is
    not supported: bf16 caches, indices, attn_sink, extra caches, topk_length.
    """
    _refuse_unsupported(
        {
            "indices": indices,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        },
        attn_sink,
    )
    check_head_dim_v(head_dim_v)
    refuse_grad("q", q)
    q_view, shape = _query(q)
    cache = _cache(k_cache)
    _check_scales(q_view, cache, descale_q, descale_k)
    if softmax_scale is None:
        softmax_scale = HEAD_DIM_QK**-0.5
    try:
        plan = _plan(tile_scheduler_metadata, num_splits, cache_seqlens, shape, causal)
        lengths = (block_table, cache_seqlens)
        arrays, rest = _arrays(q, q_view, cache, lengths, (descale_q, descale_k), workspace)
        result, found_lse = _mla_decode(
            *(*arrays, *lengths),
            plan,
            softmax_scale,
            causal=causal,
            out=out,
            lse=lse,
            workspace=rest,
        )
    except ArgumentError as error:
        raise renamed_error(error, _NAMES) from None
    if q_view.dtype == "float16" and out is None:
        result = _as_float16(result)
    return result, found_lse


def _refuse_unsupported(sparse: Mapping[str, Any], attn_sink: Any) -> None:
    for name, value in sparse.items():
        refuse(name, value, SPARSE_HINT)
    refuse("attn_sink", attn_sink, _SINK_HINT)


_SINK_HINT = (
    "None: attention sinks are not supported. They can be applied afterwards: "
    "out *= exp(lse) / (exp(lse) + exp(sink))"
)


def flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Any = None,
    descale_k: Any = None,
) -> tuple[Any, Any]:
    """flash_mla_with_kvcache under the name that vLLM's fork has for e4m3 queries and caches."""
    return flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        descale_q=descale_q,
        descale_k=descale_k,
    )


def _check_scales(q: TensorView, cache: _Cache, descale_q: Any, descale_k: Any) -> None:
    fp8_query = q.dtype in E4M3
    if not fp8_query and q.dtype not in INPUT_FLOATS and q.dtype != "uint16":
        raise ArgumentError("q", "dtype bfloat16, float16 or float8_e4m3fn", q.dtype)
    if fp8_query and cache.codes is None:
        expected = "a bf16 or float16 query, which is quantised with a scale per token and head"
        raise ArgumentError("q", expected, q.dtype)
    _check_scale("descale_q", descale_q, fp8_query, "an e4m3 query")
    _check_scale("descale_k", descale_k, cache.codes is not None, "a cache of 576 codes a token")


def _check_scale(name: str, scale: Any, wanted: bool, of: str) -> None:
    if not wanted:
        refuse(name, scale, f"None without {of}")
        return
    if scale is None or tuple(getattr(scale, "shape", (0,))) != (1,):
        raise ArgumentError(name, f"float32 [1], the scale of {of}", describe(scale))


def _arrays(
    q: Any,
    q_view: TensorView,
    cache: _Cache,
    lengths: tuple[Any, Any],
    scales: tuple[Any, Any],
    workspace: Any,
) -> tuple[tuple[Any, ...], Any]:
    """(the query and cache arrays of mla_decode, what is left of the workspace)."""
    if cache.planes is not None:
        if workspace is None:
            return (*api.quantize_q(q, pdl=True), *cache.planes), None
        query, rest = take(workspace, q_view, _query_pieces(q_view))
        return (*api.quantize_q(q, out=query, pdl=True), *cache.planes), rest
    codes, num_blocks = cache.codes, cache.codes.shape[0]
    made, rest = take(workspace, q_view, [*_cache_pieces(num_blocks), *_query_pieces(q_view)])
    k_rope, k_scale = made[:2]
    fp8_query = q_view.dtype in E4M3
    widened = (q, scales[0], *made[2:]) if fp8_query else None
    widen_per_tensor(codes, *lengths, scales[1], k_rope, k_scale, query=widened, pdl=True)
    if fp8_query:
        query = [q[..., :KV_LORA_RANK], *made[2:]]
    else:
        query = list(api.quantize_q(q, out=made[2:], pdl=True))
    planes = (codes[..., :KV_LORA_RANK], repeated_line(k_scale, num_blocks), k_rope)
    return (*query, *planes), rest


def _query_pieces(q: TensorView) -> list[Piece]:
    """What the query needs beside q itself: all three parts of a quantised one; RoPE and scales
    where its codes are there."""
    lead = tuple(q.shape[:-1])
    beside: list[Piece] = [((*lead, QK_ROPE_HEAD_DIM), "bfloat16"), (lead, "float32")]
    return beside if q.dtype in E4M3 else [((*lead, KV_LORA_RANK), "float8_e4m3fn"), *beside]


def _cache_pieces(num_blocks: int) -> list[Piece]:
    rope = (num_blocks, BLOCK_SIZE, QK_ROPE_HEAD_DIM)
    return [(rope, "bfloat16"), ((BLOCK_SIZE,), "float32")]


def _as_float16(out: Any) -> Any:
    if hasattr(out, "to"):
        return out.to(sys.modules["torch"].float16)
    if hasattr(out, "astype") and str(out.dtype) == "bfloat16":
        return out.astype("float16")
    expected = "a bf16 query: only torch and NumPy can convert the result to float16"
    raise ArgumentError("q", expected, "float16")


def decode_bytes(batch: int, seq_len_q: int, num_heads_q: int, num_parts: int) -> int:
    """Workspace of mla_decode for metadata of num_parts parts."""
    tiles = -(-num_heads_q * seq_len_q // TILE_M)
    config = PlanConfig(num_heads_q, seq_len_q, num_sms=num_parts * tiles)
    return workspace_layout(config, batch, batch + num_parts).nbytes


def get_workspace_size(q: Any, k_cache: Any, tile_scheduler_metadata: Any) -> int:
    """Bytes of the `workspace` (uint8 [n], 16-byte aligned) of flash_mla_with_kvcache for arrays of
    these shapes and types. One serves all layers of a stream; q may have the largest batch."""
    q_view, (batch, seq_len_q, heads) = _query(q)
    cache = _cache(k_cache)
    pieces = _query_pieces(q_view)
    if cache.planes is None:
        pieces = [*_cache_pieces(cache.codes.shape[0]), *pieces]
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        num_parts = max(_num_sms(q_view) // -(-heads * seq_len_q // TILE_M), 1)
    else:
        num_parts = tile_scheduler_metadata.shape[0]
    own = decode_bytes(batch, seq_len_q, heads, num_parts)
    return own + sum(piece_bytes(piece) for piece in pieces)


def _num_sms(q: TensorView) -> int:
    if q.device_type != "cuda":
        return PlanConfig(1, 1).num_sms
    from ..driver.device import device_info

    return device_info(q.device_index).num_sms


# --- What there is -------------------------------------------------------------------------------


def supports(
    *,
    kv_cache: str = "fp8_per_token",
    q_dtype: str = "bfloat16",
    num_heads_q: int = 128,
    num_heads_k: int = 1,
    page_block_size: int = BLOCK_SIZE,
    head_dim_v: int = HEAD_DIM_V,
    sparse: bool = False,
) -> tuple[bool, str]:
    """(whether flash_mla_with_kvcache can do this, the reason where it cannot).

    kv_cache: "fp8_per_token" (644 bytes a token), "fp8_per_tensor" (576) or "bfloat16". q_dtype:
    "bfloat16", "float16" or "float8_e4m3fn".
    """
    caches = ("fp8_per_token", "fp8_per_tensor")
    queries = ("bfloat16", "float16") + ("float8_e4m3fn",) * (kv_cache == caches[1])
    checks = (
        (not sparse, f"sparse: expected {SPARSE_HINT}"),
        (kv_cache != "bfloat16", f"kv_cache: expected {_BF16_CACHE_HINT}"),
        (kv_cache in (*caches, "bfloat16"), f"kv_cache: expected one of {caches}, got {kv_cache}"),
        (q_dtype in queries, f"q_dtype: expected one of {queries}, got {q_dtype}"),
        (
            1 <= num_heads_q <= MAX_NUM_HEADS_Q,
            f"num_heads_q: expected 1..{MAX_NUM_HEADS_Q}, got {num_heads_q}",
        ),
        (num_heads_k == 1, f"num_heads_k: expected 1, got {num_heads_k}"),
        (
            page_block_size == BLOCK_SIZE,
            f"page_block_size: expected {BLOCK_SIZE}, got {page_block_size}",
        ),
        (head_dim_v == HEAD_DIM_V, f"head_dim_v: expected {HEAD_DIM_V}, got {head_dim_v}"),
    )
    reason = next((text for holds, text in checks if not holds), "")
    return not reason, reason


def _missing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise ArgumentError(name, instead, "a call")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Not supported: raises ArgumentError. Expected instead: {instead}."
    return refused


_PREFILL_HINT = "FlashMLA's or FlashAttention's own prefill kernel: this package decodes only"
flash_mla_sparse_fwd = _missing("flash_mla_sparse_fwd", "FlashMLA's own sparse prefill kernel")
flash_attn_varlen_func = _missing("flash_attn_varlen_func", _PREFILL_HINT)
flash_attn_varlen_qkvpacked_func = _missing("flash_attn_varlen_qkvpacked_func", _PREFILL_HINT)
flash_attn_varlen_kvpacked_func = _missing("flash_attn_varlen_kvpacked_func", _PREFILL_HINT)
