"""Kernel table rows of the data movement: quantize_q, append_kv, prepare, fetch_dequant,
copy_blocks."""

from __future__ import annotations

from .jit.spec import Fields, KernelSpec, Struct, Variant

THREADS = 256
WARPS = THREADS // 32
INPUT_DTYPES = ("bfloat16", "float16", "float32")  # INPUT_DTYPE 0, 1, 2 of common/types.cuh

# Rows that a warp has on the way to shared memory while it computes, as measured on an H200: enough
# to fill the memory bandwidth at the number of CTAs an SM holds; more only delay other accesses.
QUERY_RING_ROWS = 3
APPEND_RING_ROWS = 2
# When append_kv's CTAs learn whether they may end early: append_claimed explains it.
APPEND_END = (("EARLY_END", 1), ("COUNT_ROW", 3), ("LOOK_ROWS", 2))
FLOAT32_RING_ROWS = 2  # rows of twice the size
FETCH_ROWS_PER_WARP = 4  # all on the way at once
CTA_ROWS = WARPS * 32  # the most of quantize_q and append_kv: each lane keeps what belongs to a row
COPY_CTAS_PER_BLOCK = 4
COPY_PAIRS = 64  # block copies of one launch: they travel in its parameters

CACHE_FIELDS: Fields = (
    ("ckv", "ptr<void>"),
    ("k_rope", "ptr<void>"),
    ("k_scale", "ptr<void>"),
    ("ckv_block_stride", "i64"),
    ("ckv_token_stride", "i64"),
    ("k_rope_block_stride", "i64"),
    ("k_rope_token_stride", "i64"),
    ("k_scale_block_stride", "i64"),
    ("k_scale_token_stride", "i64"),
    ("num_slots", "i64"),
    ("wide", "i32"),
)

APPEND_FIELDS: Fields = (
    ("cache", Struct("cache", CACHE_FIELDS)),
    ("kv_c", "ptr<const void>"),
    ("k_pe", "ptr<const void>"),
    ("kv_c_stride", "i64"),
    ("k_pe_stride", "i64"),
    ("slot_mapping", "ptr<const void>"),
    ("slot_stride", "i64"),
    ("claims", "ptr<unsigned int>"),
    ("counters", "ptr<unsigned int>"),
    ("deferred", "ptr<unsigned int>"),
    ("claim_base", "u32"),
    ("num_tokens", "u32"),
    ("tokens_per_cta", "u32"),
    ("longer_ctas", "u32"),
    ("slots_are_64bit", "i32"),
    ("wide", "i32"),
    ("pow2", "i32"),
)

QUERY_FIELDS: Fields = (
    ("q_nope", "ptr<const void>"),
    ("q_rope", "ptr<const void>"),
    ("out_nope", "ptr<void>"),
    ("out_rope", "ptr<void>"),
    ("out_scale", "ptr<void>"),
    ("nope_stride_b", "i64"),
    ("nope_stride_s", "i64"),
    ("nope_stride_h", "i64"),
    ("rope_stride_b", "i64"),
    ("rope_stride_s", "i64"),
    ("rope_stride_h", "i64"),
    ("rows_per_cta", "u32"),
    ("longer_ctas", "u32"),
    ("num_heads", "u32"),
    ("seq_len_q", "u32"),
    ("flat", "i32"),
    ("wide", "i32"),
    ("pow2", "i32"),
)


def _variants(
    suffix: str,
    registers: int,
    *defines: tuple[str, int],
    ring_rows: int = 0,
    wide_registers: int | None = None,
) -> tuple[Variant, ...]:
    """A variant for each input dtype; float32 rows take twice the registers and memory to hold.

    ring_rows: RING_ROWS of 2-byte types; 0 for a kernel without a ring.
    """
    variants = []
    for code, dtype in enumerate(INPUT_DTYPES):
        is_wide = dtype == "float32"
        limit = wide_registers if is_wide and wide_registers else registers
        min_ctas = 65536 // (THREADS * limit)
        own = (("INPUT_DTYPE", code), ("MIN_CTAS", min_ctas), *defines)
        own += (("RING_ROWS", FLOAT32_RING_ROWS if is_wide else ring_rows),) if ring_rows else ()
        variants.append(Variant(dtype + suffix, own, max_registers=limit))
    return tuple(variants)


QUANTIZE_Q = KernelSpec(
    name="quantize_q",
    source="quantize_q.cu",
    params=QUERY_FIELDS,
    threads=THREADS,
    variants=_variants("", 64, ring_rows=QUERY_RING_ROWS),
)

APPEND_KV = KernelSpec(
    name="append_kv",
    source="append_kv.cu",
    params=APPEND_FIELDS,
    threads=THREADS,
    variants=(
        *_variants("_scan", 64, ("CLAIM", 0)),
        *_variants(
            "_claim",
            48,
            ("CLAIM", 1),
            *APPEND_END,
            ring_rows=APPEND_RING_ROWS,
            wide_registers=64,
        ),
    ),
)

PREPARE = KernelSpec(
    name="prepare",
    source="prepare.cu",
    params=(
        ("append", Struct("append_kv", APPEND_FIELDS)),
        ("query", Struct("quantize_q", QUERY_FIELDS)),
        ("append_ctas", "u32"),
    ),
    threads=THREADS,
    variants=_variants("", 64, ("CLAIM", 0), ring_rows=QUERY_RING_ROWS),
)

_FETCH = (("ROWS_PER_WARP", FETCH_ROWS_PER_WARP), ("MIN_CTAS", 6))

FETCH_DEQUANT = KernelSpec(
    name="fetch_dequant",
    source="fetch_dequant.cu",
    params=(
        ("cache", Struct("cache", CACHE_FIELDS)),
        ("kv_c", "ptr<void>"),
        ("k_pe", "ptr<void>"),
        ("kv_c_stride", "i64"),
        ("k_pe_stride", "i64"),
        ("slots", "ptr<const void>"),
        ("slot_stride", "i64"),
        ("block_table", "ptr<const int>"),
        ("block_table_stride", "i64"),
        ("starts", "ptr<const int>"),
        ("cu_seqlens", "ptr<const int>"),
        ("rows_per_cta", "u32"),
        ("longer_ctas", "u32"),
        ("batch", "u32"),
        ("max_blocks", "u32"),
        ("slots_are_64bit", "i32"),
        ("wide_out", "i32"),
    ),
    threads=THREADS,
    variants=(
        Variant("slots", (("FROM_RANGES", 0), *_FETCH)),
        Variant("ranges", (("FROM_RANGES", 1), *_FETCH)),
    ),
    max_registers=40,
)

COPY_BLOCKS = KernelSpec(
    name="copy_blocks",
    source="copy_blocks.cu",
    params=(
        ("ckv", "ptr<void>"),
        ("k_rope", "ptr<void>"),
        ("k_scale", "ptr<void>"),
        ("ckv_block_stride", "i64"),
        ("k_rope_block_stride", "i64"),
        ("k_scale_block_stride", "i64"),
        ("ckv_bytes", "i32"),
        ("k_rope_bytes", "i32"),
        ("k_scale_bytes", "i32"),
        ("num_blocks", "i64"),
        *((f"pair_{i}", "u64") for i in range(COPY_PAIRS)),
    ),
    threads=THREADS,
    max_registers=64,
)

DATA_SPECS = (QUANTIZE_Q, APPEND_KV, PREPARE, FETCH_DEQUANT, COPY_BLOCKS)
