"""mla_decode: FP8 MLA decode attention (mirror of cuda_src/mla_decode.cu).

Per query row and per block of block_n tokens, blocks in ascending order, fp32 and round to nearest
unless said otherwise. S, u and weights are in log2 units.

[S0] c = hold(q_scale * f32(softmax_scale * log2 e)) within [2^-126, FLT_MAX].
[S1] Tokens: lk = log2(ks) in software, rk = 1 / ks. Beyond the length: codes 0, ks = 0, rk = 0.
     A token whose scale is NaN (its input was not finite): rk = 0 and its codes count as 0 in P V,
     so that only rows that see it become NaN, through their weights.
[S2] S = 16 e4m3 steps of 32 dims, then 4 bf16 steps of 16 RoPE dims, in one accumulator.
[S3] u = fma(S * ks, c, lk): log2 of the weight times the value's scale (the paper's scale fusion).
     Visible u is held within +-2^100; masked u = -inf.
[S4] M = max of u over the block; n = M - log2(448), rounded up, so that no code saturates;
     a block that shows the row no number has n = 0.
[S5] e = exp2(u - n) by MUFU.EX2, P = e4m3(e): per row and block the largest weight becomes 448.
[S6] R, the row's reference, rises lazily: where M > R + 8: r = exp2(R - M), R = M; else r = 1.
     t = exp2(n - R), 0 for a block without a number. L = L * r, O = O * r where R rose.
[S7] l = sum of e * rk by fma in token order within each lane (tokens 8 j + 2 lane, + 1; four lanes
     share a row); L = fma(l, t, L) per lane.
[S8] T = P V over the block, from 0, one e4m3 step a 32 tokens; O = fma(T, t, O).
[S9] L = (L0 + L1) + (L2 + L3); o = hold(O * rcp(L)); lse2 = R + log2(L); L = 0: o = 0, lse2 = -inf.
     One split: out = bf16(o), lse = lse2 * ln 2; else o and lse2 go to mla_combine in fp32.

Why this is the paper's algorithm: sigma_P of block k is 2^(M_k) / 448 in any common domain. The
paper keeps O and L in the newest block's domain; here they stay in the domain of R, which only
rises, and a block's scale is applied once, in fp32, when its T is promoted ([S8]). Nothing can
overflow however the logits move, no quantised P is ever rescaled, and the tensor core's 14-bit
accumulator never holds more than one block.

Limits, finite all the same: a token whose weight times scale is below 2^-116 of the row's largest
leaves the row sum (exp2 flushes it; latents of 1e9 beside an all-zero token get there), and a logit
whose S * ks passes the fp32 range is held at +-2^100 even if c would have made it small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import (
    BLOCK_SIZE,
    FLT_MIN_NORMAL,
    KV_LORA_RANK,
    LOG2_FP8_MAX_BITS,
    LOG2E,
    LOGIT_MAX,
    QK_ROPE_HEAD_DIM,
    RAISE_THRESHOLD,
    DecodeConfig,
)
from snapmla_rt.errors import ArgumentError
from snapmla_rt.plan import (
    BEGIN_BLOCK,
    BEGIN_REQ,
    BEGIN_SPLIT,
    END_BLOCK,
    END_REQ,
    DecodePlan,
)

from .layout import CacheViews, cache_views
from .mla_combine import hold, mla_combine, natural_lse
from .numerics import (
    bf16_from_f32,
    canonical_nan,
    e4m3_from_f32,
    exp2_mufu,
    fma,
    log2_soft,
    rcp_rn,
    sub_ru,
)
from .plan_decode import check_seqlens
from .tensor_core import pv_chain, qk_chain

F32 = NDArray[np.float32]

LOG2_FP8_MAX = np.uint32(LOG2_FP8_MAX_BITS).view(np.float32)
FLT_MAX = np.finfo(np.float32).max
NEG_INF = np.float32(-np.inf)
LANES = 4  # lanes that share a row of the tensor core's accumulator
# Blocks whose scores are computed at once: bounds memory, changes no byte.
BLOCK_GROUP = 16


@dataclass
class RowState:
    """Running state of the rows of one split."""

    reference: F32  # R [rows]
    row_sum: F32  # L [rows, 4 lanes]
    output: F32  # O [rows, 512]
    trace: list[dict[str, Any]] | None = field(default=None)

    @classmethod
    def start(cls, rows: int, trace: bool) -> RowState:
        return cls(
            np.full(rows, NEG_INF, np.float32),
            np.zeros((rows, LANES), np.float32),
            np.zeros((rows, KV_LORA_RANK), np.float32),
            [] if trace else None,
        )


def mla_decode(
    q_nope: ArrayLike,
    q_rope: ArrayLike,
    q_scale: ArrayLike,
    ckv_cache: ArrayLike,
    k_scale_cache: ArrayLike,
    k_rope_cache: ArrayLike,
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    plan: DecodePlan,
    softmax_scale: float,
    *,
    causal: bool = True,
    trace: bool = False,
) -> Any:
    """Decode attention over a paged FP8 cache.

    q_nope e4m3 [b, s_q, h, 512], q_rope bf16 [b, s_q, h, 64] (divided by its scale), q_scale f32
    [b, s_q, h]; ckv_cache e4m3 [blocks, 64, 512], k_scale_cache f32 [blocks, 64], k_rope_cache
    bf16 [blocks, 64, 64] (divided by the scale); block_table int32 [b, n], entries beyond the
    length are never read; cache_seqlens int32 [b]; plan from `plan_decode` with the same shapes;
    softmax_scale: positive, applied to q k; causal: query s of s_q sees the tokens before
    cache_seqlens - s_q + s + 1.

    Returns out bf16 [b, s_q, h, 512] and lse f32 [b, h, s_q] in nats (a row that sees no key:
    out 0, lse +inf), and with trace=True a third value: {(request, split): [block dicts with
    S, u, M, n, e, P, R, r, t, l, L, T, O]}, every array for all rows of the request.
    k_scale_cache must hold positive normal numbers (at least 2^-96), or NaN for a NaN token.
    """
    splits = mla_decode_splits(
        (q_nope, q_rope, q_scale),
        (ckv_cache, k_scale_cache, k_rope_cache),
        block_table,
        cache_seqlens,
        plan,
        softmax_scale,
        causal=causal,
        trace=trace,
    )
    out, lse = combine_splits(plan, splits)
    return (out, lse, splits.traces) if trace else (out, lse)


@dataclass
class Splits:
    """What the splits of a decode hand to the combine step: rows are query-major."""

    o_accum: F32  # [splits, rows, 512]
    lse_accum: F32  # [splits, rows], log2 units
    traces: dict[tuple[int, int], list[dict[str, Any]]]


def mla_decode_splits(
    query: tuple[ArrayLike, ArrayLike, ArrayLike],
    paged: tuple[ArrayLike, ArrayLike, ArrayLike],
    block_table: ArrayLike,
    cache_seqlens: ArrayLike,
    plan: DecodePlan,
    softmax_scale: float,
    *,
    causal: bool = True,
    trace: bool = False,
) -> Splits:
    """[S0]..[S9] of every split: the part of `mla_decode` before its splits are combined."""
    q = _check_query(*query)
    cache = cache_views(*paged)
    batch, seq_len_q, num_heads = q[2].shape
    if not isinstance(plan, DecodePlan):
        raise ArgumentError("plan", "a DecodePlan, as plan_decode returns", type(plan).__name__)
    config = DecodeConfig(num_heads, seq_len_q, softmax_scale, causal, plan.config.block_n)
    seqlens = check_seqlens(cache_seqlens, batch)
    table = check_block_table(block_table, seqlens, len(cache.codes))
    work = _checked_work(plan, config, seqlens)

    rows = config.num_rows
    total_splits = int(np.asarray(plan.num_splits)[batch])
    o_accum = np.zeros((total_splits, rows, KV_LORA_RANK), np.float32)
    lse_accum = np.full((total_splits, rows), NEG_INF, np.float32)
    traces: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for req, split, begin, end in work:
        q_rows = tuple(part[req].reshape(rows, *part.shape[3:]) for part in q)
        tokens = _gather(cache, table[req], int(seqlens[req]), begin, end, config.block_n)
        limit = row_limits(config, int(seqlens[req]))
        state = decode_split(q_rows, tokens, limit, config, begin * config.block_n, trace)
        index = int(plan.num_splits[req]) + split
        o_accum[index], lse_accum[index] = finish_split(state)
        if state.trace is not None:
            traces[req, split] = state.trace
    return Splits(o_accum, lse_accum, traces)


def splits_of(plan: DecodePlan, seqlens: NDArray[np.int32]) -> list[tuple[int, int, int, int]]:
    """(request, split, begin block, end block) of every split, in the order CTAs take them."""
    config, work = plan.config, []
    for part in np.asarray(plan.parts):
        for req in range(int(part[BEGIN_REQ]), int(part[END_REQ]) + 1):
            num_blocks = config.num_blocks(int(seqlens[req]))
            begin = int(part[BEGIN_BLOCK]) if req == part[BEGIN_REQ] else 0
            stop = int(part[END_BLOCK]) if req == part[END_REQ] else num_blocks
            length = config.blocks_per_split(num_blocks)
            while True:
                if config.has_fixed_cuts:
                    split, end = begin // length, min(begin + length, stop)
                else:
                    split, end = int(part[BEGIN_SPLIT]) if req == part[BEGIN_REQ] else 0, stop
                work.append((req, split, begin, end))
                begin = end
                if begin >= stop:
                    break
    return work


def row_limits(config: DecodeConfig, seqlen: int) -> NDArray[np.int64]:
    """Tokens that each row sees: [rows], query-major, at least 0."""
    query = np.arange(config.num_rows) // config.num_heads_q
    behind = config.seq_len_q - 1 - query if config.causal else np.zeros_like(query)
    return np.maximum(seqlen - behind, 0)


@dataclass
class Tokens:
    """The tokens of one split, padded to whole blocks ([S1])."""

    codes: NDArray[np.uint8]  # [blocks, block_n, 512]
    rope: NDArray[np.uint16]  # [blocks, block_n, 64]
    scale: F32  # ks [blocks, block_n]
    log2_scale: F32  # lk
    inv_scale: F32  # rk


def _gather(
    cache: CacheViews, table: NDArray[np.int32], seqlen: int, begin: int, end: int, block_n: int
) -> Tokens:
    """[S1] the tokens of blocks begin..end of a request, looked up through its block table."""
    first, last = begin * block_n, min(end * block_n, seqlen)
    count, padded = max(last - first, 0), (end - begin) * block_n
    slots = np.arange(first, first + count)
    pages, offsets = table[slots // BLOCK_SIZE], slots % BLOCK_SIZE
    codes = np.zeros((padded, KV_LORA_RANK), np.uint8)
    rope = np.zeros((padded, QK_ROPE_HEAD_DIM), np.uint16)
    scale = np.zeros(padded, np.float32)
    codes[:count] = cache.codes[pages, offsets]
    rope[:count] = cache.rope[pages, offsets]
    scale.view(np.uint32)[:count] = cache.scale[pages, offsets]
    with np.errstate(all="ignore"):
        dead = np.isnan(scale) | (np.arange(padded) >= count)
        inv_scale = np.where(dead, np.float32(0), rcp_rn(scale))
        log2_scale = log2_soft(scale)
    shape = (end - begin, block_n)
    return Tokens(
        codes.reshape(*shape, KV_LORA_RANK),
        rope.reshape(*shape, QK_ROPE_HEAD_DIM),
        scale.reshape(shape),
        log2_scale.reshape(shape),
        inv_scale.reshape(shape),
    )


def decode_split(
    q_rows: tuple[Any, ...],
    tokens: Tokens,
    limit: NDArray[np.int64],
    config: DecodeConfig,
    first_token: int,
    trace: bool = False,
) -> RowState:
    """[S0]..[S8] for all rows of a request over the blocks of one split."""
    q_codes, q_rope, q_scale = q_rows
    state = RowState.start(len(q_codes), trace)
    block_n, num_blocks = config.block_n, len(tokens.codes)
    with np.errstate(all="ignore"):
        c = logit_factor(q_scale, config.softmax_scale)
        for start in range(0, num_blocks, BLOCK_GROUP):
            group = slice(start, min(start + BLOCK_GROUP, num_blocks))
            positions = first_token + np.arange(group.start * block_n, group.stop * block_n)
            visible = positions.reshape(-1, 1, block_n) < limit[:, None]
            scores = score_blocks(q_codes, q_rope, c, tokens, group, visible)
            for local, block in enumerate(range(group.start, group.stop)):
                one = {name: value[local] for name, value in scores.items()}
                _promote(state, one, tokens, block)
    return state


def logit_factor(q_scale: F32, softmax_scale: float) -> F32:
    """[S0] c per row: q_scale * softmax_scale * log2 e, held in the normal range; NaN kept."""
    factor = min(max(float(softmax_scale) * LOG2E, FLT_MIN_NORMAL), float(FLT_MAX))
    c = q_scale * np.float32(factor)
    c = np.where(c < np.float32(FLT_MIN_NORMAL), np.float32(FLT_MIN_NORMAL), c)
    return np.where(c > FLT_MAX, FLT_MAX, c).astype(np.float32)


def score_blocks(
    q_codes: NDArray[np.uint8],
    q_rope: NDArray[np.uint16],
    c: F32,
    tokens: Tokens,
    group: slice,
    visible: NDArray[np.bool_],
) -> dict[str, Any]:
    """[S2]..[S5] and l of [S7]: all of a block that needs no other block. Arrays [blocks, rows,
    ...]; `visible` [blocks, rows, block_n]."""
    num_blocks, block_n = tokens.scale[group].shape
    rows = len(q_codes)
    codes = tokens.codes[group].reshape(-1, KV_LORA_RANK)
    rope = tokens.rope[group].reshape(-1, QK_ROPE_HEAD_DIM)
    s = qk_chain(q_codes, q_rope, codes, rope).view(np.float32)  # [S2]
    s = s.reshape(rows, num_blocks, block_n).transpose(1, 0, 2)
    scale = tokens.scale[group][:, None, :]
    log2_scale = np.broadcast_to(tokens.log2_scale[group][:, None, :], s.shape)
    u = fma(s * scale, np.broadcast_to(c[:, None], s.shape), log2_scale)  # [S3]
    u = np.where(u > LOGIT_MAX, np.float32(LOGIT_MAX), u)
    u = np.where(u < -LOGIT_MAX, np.float32(-LOGIT_MAX), u)
    u = np.where(visible, u, NEG_INF).astype(np.float32)
    top = np.fmax.reduce(u, axis=-1, initial=NEG_INF)  # [S4]
    n = np.where(np.isneginf(top), np.float32(0), sub_ru(top, LOG2_FP8_MAX)).astype(np.float32)
    e = exp2_mufu(u - n[..., None])  # [S5]
    return {
        "S": s,
        "u": u,
        "M": top,
        "n": n,
        "e": e,
        "P": e4m3_from_f32(e),
        "l": _lane_sums(e, tokens.inv_scale[group][:, None, :]),
    }


def _lane_sums(e: F32, inv_scale: F32) -> F32:
    """[S7] l of each lane: e, rk [..., rows, block_n] -> [..., rows, 4]."""
    weights = e.reshape(*e.shape[:-1], -1, LANES, 2)
    inverse = inv_scale.reshape(*inv_scale.shape[:-1], -1, LANES, 2)
    total = np.zeros((*e.shape[:-1], LANES), np.float32)
    for j in range(weights.shape[-3]):
        for pair in range(2):
            total = fma(
                weights[..., j, :, pair],
                np.broadcast_to(inverse[..., j, :, pair], total.shape),
                total,
            )
    return total


def _promote(state: RowState, block: dict[str, Any], tokens: Tokens, index: int) -> None:
    """[S6]..[S8]: take one block, in order, into R, L and O."""
    top, n = block["M"], block["n"]
    raised = top > state.reference + np.float32(RAISE_THRESHOLD)  # [S6]
    r = np.where(raised, exp2_mufu(state.reference - top), np.float32(1)).astype(np.float32)
    state.reference = np.where(raised, top, state.reference)
    t = np.where(np.isneginf(top), np.float32(0), exp2_mufu(n - state.reference))
    t = t.astype(np.float32)
    # Multiplying by r = 1 changes nothing, so the kernel may scale a row more often than needed.
    lanes = (len(t), LANES)
    t_lanes = np.broadcast_to(t[:, None], lanes)
    state.row_sum = fma(block["l"], t_lanes, state.row_sum * r[:, None])  # [S7]
    values = np.where(np.isnan(tokens.scale[index])[:, None], np.uint8(0), tokens.codes[index])
    chunk = pv_chain(block["P"], values).view(np.float32)  # [S8]
    state.output = fma(chunk, np.broadcast_to(t[:, None], chunk.shape), state.output * r[:, None])
    if state.trace is not None:
        state.trace.append(
            {
                **block,
                "r": r,
                "t": t,
                "R": state.reference.copy(),
                "L": state.row_sum.copy(),
                "T": chunk,
                "O": state.output.copy(),
            }
        )


def finish_split(state: RowState) -> tuple[F32, F32]:
    """[S9] o f32 [rows, 512] and lse2 f32 [rows] (log2 units, -inf: no visible key)."""
    lanes = state.row_sum
    with np.errstate(all="ignore"):
        total = (lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])
        o = hold(state.output * rcp_rn(total)[:, None])
        lse2 = state.reference + log2_soft(total)
    empty = total == 0
    o = np.where(empty[:, None], np.float32(0), o).astype(np.float32)
    return canonical_nan(o), canonical_nan(np.where(empty, NEG_INF, lse2).astype(np.float32))


def combine_splits(
    plan: DecodePlan, splits: Splits
) -> tuple[NDArray[ml_dtypes.bfloat16], NDArray[np.float32]]:
    """[S9] single splits are final; the others go through mla_combine. Returns what mla_decode
    does: out bf16 [b, s_q, h, 512], lse f32 [b, h, s_q]."""
    batch, config = plan.batch, plan.config
    rows = splits.o_accum.shape[1]
    out = np.zeros((batch, rows, KV_LORA_RANK), np.uint16)
    lse = np.zeros((batch, rows), np.float32)
    for req in range(batch):
        first, last = int(plan.num_splits[req]), int(plan.num_splits[req + 1])
        if last - first == 1:
            out[req] = bf16_from_f32(splits.o_accum[first])
            lse[req] = natural_lse(splits.lse_accum[first])
        else:
            out[req], lse[req] = mla_combine(
                splits.o_accum[first:last], splits.lse_accum[first:last]
            )
    shape = (batch, config.seq_len_q, config.num_heads_q)
    return (
        out.reshape(*shape, KV_LORA_RANK).view(ml_dtypes.bfloat16),
        lse.reshape(shape).transpose(0, 2, 1).copy(),
    )


def _codes(name: str, array: ArrayLike, kind: str, shape: str, ndim: int) -> NDArray[Any]:
    """`array` as its raw codes (u8 for e4m3, u16 for bf16, f32), or ArgumentError."""
    accepted = {
        "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
        "bf16": (ml_dtypes.bfloat16, np.uint16),
        "f32": (np.float32,),
    }[kind]
    value = np.asarray(array)
    if value.dtype not in [np.dtype(t) for t in accepted] or value.ndim != ndim:
        raise ArgumentError(name, f"{kind} {shape}", f"{value.dtype} {list(value.shape)}")
    return value.view(np.dtype(accepted[-1]))


def _check_query(
    q_nope: ArrayLike, q_rope: ArrayLike, q_scale: ArrayLike
) -> tuple[NDArray[np.uint8], NDArray[np.uint16], F32]:
    nope = _codes("q_nope", q_nope, "e4m3", "[b, s_q, h, 512]", 4)
    rope = _codes("q_rope", q_rope, "bf16", "[b, s_q, h, 64]", 4)
    scale = _codes("q_scale", q_scale, "f32", "[b, s_q, h]", 3)
    if nope.shape[3] != KV_LORA_RANK:
        raise ArgumentError("q_nope", "e4m3 [b, s_q, h, 512]", list(nope.shape))
    if rope.shape != (*nope.shape[:3], QK_ROPE_HEAD_DIM):
        raise ArgumentError(
            "q_rope", f"bf16 {[*nope.shape[:3], QK_ROPE_HEAD_DIM]}", list(rope.shape)
        )
    if scale.shape != nope.shape[:3]:
        raise ArgumentError("q_scale", f"f32 {list(nope.shape[:3])}", list(scale.shape))
    return nope, rope, scale


def check_block_table(
    block_table: ArrayLike, seqlens: NDArray[np.int32], num_blocks: int
) -> NDArray[np.int32]:
    """block_table int32 [b, n]; the entries that the lengths need must name existing blocks."""
    table = np.asarray(block_table)
    batch = len(seqlens)
    if table.ndim != 2 or table.dtype.kind not in "iu" or table.shape[0] != batch:
        raise ArgumentError(
            "block_table", f"int32 [{batch}, max_blocks]", f"{table.dtype} {list(table.shape)}"
        )
    for req, seqlen in enumerate(seqlens):
        needed = -(-int(seqlen) // BLOCK_SIZE)
        if needed > table.shape[1]:
            raise ArgumentError(
                "block_table",
                f"at least {needed} columns for cache_seqlens[{req}] = {seqlen}",
                table.shape[1],
            )
        used = table[req, :needed]
        wrong = np.flatnonzero((used < 0) | (used >= num_blocks))
        if wrong.size:
            at = int(wrong[0])
            raise ArgumentError(
                "block_table", f"block ids in 0..{num_blocks - 1} at [{req}, {at}]", int(used[at])
            )
    return table


def _checked_work(
    plan: DecodePlan, config: DecodeConfig, seqlens: NDArray[np.int32]
) -> list[tuple[int, int, int, int]]:
    """`splits_of` a plan that fits this call: its shapes, and every block of every request once.

    A plan made for other lengths would leave tokens out; the kernel trusts it, this does not.
    """
    batch = len(seqlens)
    shape = (plan.config.num_heads_q, plan.config.seq_len_q, plan.batch)
    expected = (config.num_heads_q, config.seq_len_q, batch)
    if shape != expected:
        raise ArgumentError("plan", f"made for (num_heads_q, seq_len_q, batch) = {expected}", shape)
    work = splits_of(plan, seqlens)
    reached, counts, in_order = [0] * batch, [0] * batch, True
    for req, split, begin, end in work:
        in_order = in_order and (begin, split) == (reached[req], counts[req])
        reached[req], counts[req] = end, counts[req] + 1
    blocks = [plan.config.num_blocks(int(n)) for n in seqlens]
    if not in_order or reached != blocks or counts != np.diff(plan.num_splits).tolist():
        raise ArgumentError("plan", "made from these cache_seqlens", "a plan of other lengths")
    return work
