"""Kernel table rows of the decode stages: plan_decode, mla_decode, mla_combine."""

from __future__ import annotations

from .jit.spec import KernelSpec, Variant

DECODE_THREADS = 512

# (rows, block_n) of a variant of mla_decode -> sizeof(Storage); the kernel asserts that it is this.
DECODE_SMEM = {(16, 64): 226304, (32, 64): 226304, (64, 64): 224256, (64, 128): 232448}
# Spill bytes that a variant may have, the worst over the NVRTC versions. In blocks of 64 tokens all
# of them lie between splits; what those of 128 cost is in tools/results/decode_log.md.
_DECODE_SPILLS = {(16, 64): 40, (32, 64): 60, (64, 64): 24, (64, 128): 336}


def decode_variant_name(
    rows: int,
    block_n: int = 64,
    *,
    debug: bool = False,
    trace: bool = False,
    profile: bool = False,
) -> str:
    """Name of the mla_decode variant for this many query rows of a tile and block length."""
    wide = "" if block_n == 64 else f"_n{block_n}"
    return f"rows{rows}{wide}" + "_debug" * debug + "_trace" * trace + "_profile" * profile


def _decode_variant(
    shape: tuple[int, int], debug: bool = False, trace: bool = False, profile: bool = False
) -> Variant:
    rows, block_n = shape
    defines: list[tuple[str, int | str]] = [
        ("ROWS", rows),
        ("BLOCK_N", block_n),
        ("SMEM_BYTES", DECODE_SMEM[shape]),
    ]
    if debug:
        defines.append(("SNAPMLA_DEBUG", 1))
    if trace:
        defines.append(("SNAPMLA_TRACE", 1))
    if profile:
        defines.append(("SNAPMLA_PROFILE", 1))
    # Looking inside costs registers; only the kernels that serve are held to their budget.
    inside = debug or trace or profile
    return Variant(
        decode_variant_name(rows, block_n, debug=debug, trace=trace, profile=profile),
        tuple(defines),
        DECODE_SMEM[shape],
        max_spill_bytes=1 << 20 if inside else _DECODE_SPILLS[shape],
        allow_serialized=debug or trace,
        on_demand=inside or block_n != 64,
    )


MLA_DECODE = KernelSpec(
    name="mla_decode",
    source="mla_decode.cu",
    params=(
        ("ckv_map", "tensor_map"),
        ("rope_map", "tensor_map"),
        ("q_nope_map", "tensor_map"),
        ("q_rope_map", "tensor_map"),
        ("k_scale_map", "tensor_map"),
        ("q_scale", "ptr<const float>"),
        ("block_table", "ptr<const int>"),
        ("block_table_stride", "i64"),
        ("cache_seqlens", "ptr<const int>"),
        ("parts", "ptr<const int>"),
        ("num_splits", "ptr<const int>"),
        ("out", "ptr<void>"),
        ("lse", "ptr<float>"),
        ("o_accum", "ptr<float>"),
        ("lse_accum", "ptr<float>"),
        ("trace", "ptr<float>"),
        ("logit_factor", "f32"),
        ("num_rows", "i32"),
        ("num_heads_q", "i32"),
        ("seq_len_q", "i32"),
        ("causal", "i32"),
        ("num_blocks", "i32"),
        ("k_scale_step", "i32"),
        ("fixed_splits", "i32"),
        ("split_blocks", "i32"),
        ("trace_req", "i32"),
        ("trace_block", "i32"),
    ),
    threads=DECODE_THREADS,
    variants=(
        *(_decode_variant(shape) for shape in DECODE_SMEM),
        *(_decode_variant(shape, debug=True) for shape in DECODE_SMEM),
        *(_decode_variant(shape, debug=True, trace=True) for shape in DECODE_SMEM),
        *(_decode_variant(shape, profile=True) for shape in DECODE_SMEM),
    ),
    max_registers=128,
)

PLAN_DECODE = KernelSpec(
    name="plan_decode",
    source="plan_decode.cu",
    params=(
        ("cache_seqlens", "ptr<const int>"),
        ("parts", "ptr<int>"),
        ("num_splits", "ptr<int>"),
        ("batch", "i32"),
        ("num_parts", "i32"),
        ("block_n", "i32"),
        ("overhead_blocks", "i32"),
        ("remainder_blocks", "i32"),
        ("fixed_splits", "i32"),
        ("split_blocks", "i32"),
    ),
    threads=32,
)

COMBINE_THREADS = 128
COMBINE_SMEM = 4 * 136 * 32 * 4  # a warp: 136 splits of 32 dims, or 8 of 512
COMBINE_CTAS_PER_SM = 3  # what fits beside that

MLA_COMBINE = KernelSpec(
    name="mla_combine",
    source="mla_combine.cu",
    params=(
        ("o_accum", "ptr<const float>"),
        ("lse_accum", "ptr<const float>"),
        ("num_splits", "ptr<const int>"),
        ("out", "ptr<void>"),
        ("lse", "ptr<float>"),
        ("batch", "i32"),
        ("num_rows", "i32"),
        ("num_heads_q", "i32"),
        ("seq_len_q", "i32"),
    ),
    threads=COMBINE_THREADS,
    variants=(
        Variant(
            "",
            (("SMEM_BYTES", COMBINE_SMEM), ("CTAS_PER_SM", COMBINE_CTAS_PER_SM)),
            COMBINE_SMEM,
        ),
    ),
    max_registers=128,
)

DECODE_SPECS = (PLAN_DECODE, MLA_DECODE, MLA_COMBINE)
