"""Kernel table rows of the drop-in faces: merge_states, widen_per_tensor."""

from __future__ import annotations

from .jit.spec import Fields, KernelSpec, Struct

THREADS = 256
MERGE_ROWS = THREADS // 32  # rows of a CTA: one a warp
WIDEN_QUERY_ROWS = THREADS // 4  # four lanes take the 64 RoPE codes of a row
# CTAs for the cache blocks of all requests together: eight an SM of the largest Hopper, four deep.
WIDEN_CTAS = 4 * 8 * 132

STATE_FIELDS: Fields = (
    ("out", "ptr<void>"),
    ("lse", "ptr<float>"),
    ("out_stride_b", "i64"),
    ("out_stride_s", "i64"),
    ("out_stride_h", "i64"),
    ("lse_stride_b", "i64"),
    ("lse_stride_s", "i64"),
    ("lse_stride_h", "i64"),
    ("is_f32", "i32"),
)

MERGE_STATES = KernelSpec(
    name="merge_states",
    source="merge_states.cu",
    params=(
        ("a", Struct("state", STATE_FIELDS)),
        ("b", Struct("state", STATE_FIELDS)),
        ("merged", Struct("state", STATE_FIELDS)),
        ("num_rows", "u32"),
        ("num_heads", "u32"),
        ("seq_len_q", "u32"),
        ("width", "u32"),
        ("to_log2", "f32"),
        ("from_log2", "f32"),
    ),
    threads=THREADS,
    max_registers=64,
)

WIDEN_PER_TENSOR = KernelSpec(
    name="widen_per_tensor",
    source="widen_per_tensor.cu",
    params=(
        ("k_cache", "ptr<const void>"),
        ("k_rope", "ptr<void>"),
        ("k_scale", "ptr<float>"),
        ("descale_k", "ptr<const float>"),
        ("block_table", "ptr<const int>"),
        ("cache_seqlens", "ptr<const int>"),
        ("q", "ptr<const void>"),
        ("q_rope", "ptr<void>"),
        ("q_scale", "ptr<float>"),
        ("descale_q", "ptr<const float>"),
        ("k_block_stride", "i64"),
        ("k_token_stride", "i64"),
        ("block_table_stride", "i64"),
        ("q_stride_b", "i64"),
        ("q_stride_s", "i64"),
        ("q_stride_h", "i64"),
        ("num_blocks", "u32"),
        ("max_blocks", "u32"),
        ("ctas_per_request", "u32"),
        ("block_ctas", "u32"),
        ("num_rows", "u32"),
        ("num_heads", "u32"),
        ("seq_len_q", "u32"),
    ),
    threads=THREADS,
    max_registers=64,
)

DROPIN_SPECS = (MERGE_STATES, WIDEN_PER_TENSOR)
