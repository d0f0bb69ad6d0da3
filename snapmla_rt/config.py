"""Every dimension, tile and limit of the project: one constant, one home.

CUDA sees these through a header rendered in memory from this module (`jit/header.py`), the
reference imports them. Values that fix bytes of the result say why they are what they are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .errors import ArgumentError

# --- Multi-head Latent Attention geometry (DeepSeek, LongCat, Kimi, GLM) ------------------------
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
HEAD_DIM_QK = KV_LORA_RANK + QK_ROPE_HEAD_DIM
HEAD_DIM_V = KV_LORA_RANK

# --- Cache -------------------------------------------------------------------------------------
BLOCK_SIZE = 64  # tokens of a cache block (a page, elsewhere)
BYTES_PER_TOKEN = KV_LORA_RANK + 4 + 2 * QK_ROPE_HEAD_DIM  # 644: e4m3 latent, f32 scale, bf16 RoPE
# One block as a contiguous record: latent plane, RoPE plane, scale plane, in this order.
RECORD_ROPE_OFFSET = BLOCK_SIZE * KV_LORA_RANK
RECORD_SCALE_OFFSET = RECORD_ROPE_OFFSET + BLOCK_SIZE * 2 * QK_ROPE_HEAD_DIM
RECORD_BYTES = RECORD_SCALE_OFFSET + BLOCK_SIZE * 4  # 41,216

# --- Compute tiles -----------------------------------------------------------------------------
TILE_M = 64  # query rows (heads x query tokens) of a CTA
BLOCK_N_CHOICES = (64, 128)  # tokens of a softmax block: the paper's 64, or the kernel's variant
QK_STEP_FP8 = 32  # k of one e4m3 wgmma
QK_STEP_BF16 = 16  # k of one bf16 wgmma

# --- Limits ------------------------------------------------------------------------------------
MAX_NUM_HEADS_Q = 128
MAX_CACHE_SEQLEN = 1 << 20
# Up to this many tokens append_kv looks for a later token of the same slot by reading the mapping
# (each CTA reads what follows its own tokens); beyond it tokens claim their slots in a workspace.
APPEND_SCAN_MAX = 2048
APPEND_CLAIM_MAX = 1 << 20  # tokens of one launch that claim; more are several launches, in order
MAX_ROWS_PER_LAUNCH = 1 << 30  # query rows or fetched tokens of one launch: 32-bit counters

# --- Quantisation ------------------------------------------------------------------------------
FP8_MAX = 448.0  # largest finite e4m3 value
# Smallest scale. Its reciprocal weighs the row sum: 448 / SCALE_MIN summed over a 128-token block
# and 2^20 tokens stays below 2^126, so the row sum cannot overflow however tiny the latents are.
SCALE_MIN_LOG2 = -96
SCALE_MIN = 2.0**SCALE_MIN_LOG2
# The scale is at least this fraction of the largest RoPE magnitude, so the pre-scaled RoPE stays
# below 2^60 on both sides and 64 of its products below 2^126: finite, with a zero latent too.
ROPE_GUARD_LOG2 = -60
ROPE_GUARD = 2.0**ROPE_GUARD_LOG2

# --- Softmax -----------------------------------------------------------------------------------
LOG2_FP8_MAX_BITS = 0x410CEAEC  # float32 of log2(448), rounded down: 2**it <= 448
# The row's reference is raised only when a block's maximum exceeds it by this much (log2 units).
RAISE_THRESHOLD = 8.0
LOGIT_MAX = 2.0**100  # log2-domain logits of visible tokens are held within +-this
LOGIT_SAFE = 2.0**99  # a block whose maximum lies within +-this needs no holding
LN2_BITS = 0x3F317218  # float32 of ln 2
LN2: float = struct.unpack("<f", struct.pack("<I", LN2_BITS))[0]  # the same as a number
LOG2E = 1.4426950408889634  # float64
SQRT_HALF_BITS = 0x3F3504F3  # float32 of sqrt(1/2): log2_soft takes mantissas from here up
# log2(1 + f) = f * p(f) on [sqrt(1/2) - 1, sqrt(2) - 1]: float32 coefficients of p, constant first.
# Minimax in float64, rounded one after the other with the rest refitted (the first is log2(e)):
# 9.1e-9 absolute error in exact arithmetic.
LOG2_COEFFS_BITS = (
    0x3FB8AA3B,
    0xBF38AA37,
    0x3EF63A28,
    0xBEB8AEF8,
    0x3E936097,
    0xBE748392,
    0x3E5D7245,
    0xBE558182,
    0x3E00DE3A,
)
FLT_MIN_NORMAL = 2.0**-126

# --- Split-KV schedule -------------------------------------------------------------------------
PLAN_OVERHEAD_BLOCKS = 3  # fixed cost of one request in a part, in blocks of 64 tokens
PLAN_REMAINDER_BLOCKS = 4  # shorter or equal remainders are not cut off, in blocks of 64 tokens
PLAN_FIELDS = 8  # int32 fields of a part
INVARIANT_SPLIT_TOKENS = 2048  # batch_invariant=True cuts every request at these multiples

SCALE_ROUNDINGS = ("exact", "pow2")


@dataclass(frozen=True)
class DecodeConfig:
    """What fixes the bytes of one decode call, apart from its data.

    num_heads_q: 1..128; seq_len_q: query tokens a request (>= 1); softmax_scale: any positive
    finite float; block_n: tokens of one softmax block (64 as in the paper, or 128); causal:
    bottom-right mask over the seq_len_q newest tokens.
    """

    num_heads_q: int
    seq_len_q: int
    softmax_scale: float
    causal: bool = True
    block_n: int = 64

    def __post_init__(self) -> None:
        self.validate()

    @property
    def num_rows(self) -> int:
        """Query rows of one request: seq_len_q x num_heads_q, query-major."""
        return self.num_heads_q * self.seq_len_q

    @property
    def num_row_tiles(self) -> int:
        return -(-self.num_rows // TILE_M)

    def validate(self) -> None:
        if not 1 <= self.num_heads_q <= MAX_NUM_HEADS_Q:
            raise ArgumentError("num_heads_q", f"1..{MAX_NUM_HEADS_Q}", self.num_heads_q)
        if self.seq_len_q < 1:
            raise ArgumentError("seq_len_q", "at least 1", self.seq_len_q)
        scale = float(self.softmax_scale)
        if not 0.0 < scale < float("inf"):
            raise ArgumentError("softmax_scale", "a positive finite float", self.softmax_scale)
        if self.block_n not in BLOCK_N_CHOICES:
            raise ArgumentError("block_n", f"one of {BLOCK_N_CHOICES}", self.block_n)


def check_scale_rounding(scale_rounding: str) -> str:
    """`scale_rounding` if it is one of SCALE_ROUNDINGS, else ArgumentError."""
    if scale_rounding not in SCALE_ROUNDINGS:
        raise ArgumentError("scale_rounding", f"one of {SCALE_ROUNDINGS}", repr(scale_rounding))
    return scale_rounding


LSE_BASES = ("e", "2")


def check_lse_base(lse_base: str) -> str:
    """`lse_base` if it is one of LSE_BASES, else ArgumentError."""
    if lse_base not in LSE_BASES:
        raise ArgumentError("lse_base", f"one of {LSE_BASES}", repr(lse_base))
    return lse_base
