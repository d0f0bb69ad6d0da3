"""The paper's Algorithm 1 as written, and what its order of execution protects against.

Blocks of 64 tokens in pairs; two warpgroups, each with half of the output's channels. Per row:

    m_k     = max(m_(k-1), max of the scores)          e_j = exp(s_j - m_k)
    P'      = e * S_V                                  the value's scale fused into P
    sigma_k = max(amax(P') / 448, epsilon)             P_k = e4m3(P' / sigma_k)
    to_k    = exp(m_(k-1) - m_k) * sigma_(k-1) / sigma_k
    L_k     = L_(k-1) * to_k + sum e / sigma_k
    O_k     = O_(k-1) * to_k + P_k V_k                 out = O / L at the end

O and L live in the domain of the newest block's scale. `in_place` accumulation is Algorithm 1's:
the rescaled O is the accumulator of the tensor core, which keeps 14 significant bits of it and
truncates at every step of 32 tokens. `two_level` sums each block from zero there and adds it to O
in float32, as mla_decode does (which, besides, keeps O in a domain that only rises).

Orders of the second warpgroup (the first always takes P0 V0, then P1 V1):

    enforced   P0 V0, then P1 V1: the paper's, scales move one way
    inverted   P1 V1 first, as FlashMLA does to hide latency. O is then in block 1's domain, and P0
               must be brought in: remedy "rescale_p" multiplies the quantised P0 by to_1 and
               quantises it again (Problem 1: small ratios vanish in e4m3's subnormals, ratios
               above 1 saturate); "roll_back" takes O back by 1 / to_1, adds P0 V0 and returns by
               to_1 (Problem 2: one of the two factors overflows where the domains lie far apart)

`static` P is what kernels without per-token scales do: sigma = 1, P = e4m3(e), values scaled once
per tensor. It is here to compare with measurements of such kernels.

Float32 throughout, exp by MUFU.EX2. Source: SnapMLA, section 3.2 and the appendices on scale-aware
accumulation and on the scale hazard. epsilon: the paper says "small"; ours is 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from snapmla_rt.config import FP8_MAX, LOG2E, QK_STEP_FP8
from snapmla_rt.errors import ArgumentError

from .numerics import F32, e4m3_from_f32, exp2_mufu, f32_from_e4m3
from .tensor_core import wgmma_e4m3

__all__ = ["EPSILON", "ORDERS", "Pipeline", "PipelineResult", "ordered_pipeline"]

BLOCK = 64
EPSILON = 1e-12
ORDERS = ("enforced", "rescale_p", "roll_back")
ACCUMULATIONS = ("in_place", "two_level")

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Pipeline:
    """order: "enforced", or the inverted one with remedy "rescale_p" or "roll_back"; accumulation:
    "in_place" or "two_level"; static: P without a scale; epsilon: least sigma."""

    order: str = "enforced"
    accumulation: str = "in_place"
    static: bool = False
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ArgumentError("order", f"one of {ORDERS}", repr(self.order))
        if self.accumulation not in ACCUMULATIONS:
            raise ArgumentError("accumulation", f"one of {ACCUMULATIONS}", repr(self.accumulation))


@dataclass(frozen=True)
class PipelineResult:
    """out float32 [r, d]; lse float32 [r] in nats; prefixes: out after as many tokens, by count."""

    out: F32
    lse: F32
    prefixes: dict[int, F32]


@dataclass
class _State:
    top: F32  # m [r]
    sigma: F32  # [r]
    row_sum: F32  # L [r]
    output: F32  # O [r, d]


@dataclass(frozen=True)
class _Block:
    """One block's P and the domain it is in."""

    top: F32
    sigma: F32
    total: F32  # sum of e
    codes: U8  # P [r, 64]
    values: U8  # V [64, d]


def ordered_pipeline(
    scores: F32,
    v_codes: U8,
    v_scale: F32,
    pipeline: Pipeline = Pipeline(),
    prefixes: tuple[int, ...] = (),
) -> PipelineResult:
    """Algorithm 1 over scores float32 [r, n] in nats (softmax scale and scales of q and k applied;
    -inf: masked), values as e4m3 codes uint8 [n, d], d even, and their scales float32 [n].

    prefixes: token counts, multiples of 128, at which the output so far is kept too. Whatever
    overflows stays in the result as inf or NaN. Raises ArgumentError.
    """
    rows, count = scores.shape
    if len(v_codes) != count or v_scale.shape != (count,) or v_codes.shape[1] % 2:
        got = f"{list(v_codes.shape)}, {list(v_scale.shape)}"
        raise ArgumentError("v_codes, v_scale", f"[{count}, even], [{count}]", got)
    if any(p % (2 * BLOCK) or not 0 < p <= count for p in prefixes):
        raise ArgumentError("prefixes", f"multiples of 128 up to {count}", prefixes)
    scores, v_codes, v_scale = _padded(scores, v_codes, v_scale)
    state = _State(
        np.full(rows, -np.inf, np.float32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, v_codes.shape[1]), np.float32),
    )
    kept: dict[int, F32] = {}
    with np.errstate(all="ignore"):
        for start in range(0, len(v_codes), 2 * BLOCK):
            pair: list[_Block] = []
            for begin in (start, start + BLOCK):
                part = slice(begin, begin + BLOCK)
                tile = scores[:, part], v_codes[part], v_scale[part]
                pair.append(_softmax(pair[-1].top if pair else state.top, *tile, pipeline))
            state = _two_blocks(state, pair[0], pair[1], pipeline)
            if start + 2 * BLOCK in prefixes:
                kept[start + 2 * BLOCK] = _finish(state, v_scale, pipeline)[0]
        out, lse = _finish(state, v_scale, pipeline)
    return PipelineResult(out, lse, kept)


def _padded(scores: F32, v_codes: U8, v_scale: F32) -> tuple[F32, U8, F32]:
    """Whole pairs of blocks; what is added is masked."""
    more = -len(v_codes) % (2 * BLOCK)
    return (
        np.pad(scores, ((0, 0), (0, more)), constant_values=-np.inf),
        np.pad(v_codes, ((0, more), (0, 0))),
        np.pad(v_scale, (0, more), constant_values=1.0),
    )


def _exp(x: F32) -> F32:
    return exp2_mufu(x * np.float32(LOG2E))


def _softmax(top: F32, scores: F32, values: U8, scale: F32, pipeline: Pipeline) -> _Block:
    """Online softmax, scale fusion and quantisation of one block."""
    new_top = np.maximum(top, scores.max(axis=1))
    # a row that has seen nothing yet: any finite maximum gives it weights of 0
    e = _exp(scores - np.where(np.isneginf(new_top), np.float32(0), new_top)[:, None])
    if pipeline.static:
        sigma, fused = np.ones(len(scores), np.float32), e
    else:
        fused = e * scale
        sigma = np.maximum(fused.max(axis=1) / np.float32(FP8_MAX), np.float32(pipeline.epsilon))
    codes = e4m3_from_f32(fused / sigma[:, None])
    return _Block(new_top, sigma, e.sum(axis=1, dtype=np.float32), codes, values)


def _ratio(top: F32, sigma: F32, to_top: F32, to_sigma: F32) -> F32:
    """The factor from one block's domain to another's; 0 from a state that has seen nothing."""
    factor = _exp(top - to_top) * (sigma / to_sigma)
    return np.where(np.isneginf(top), np.float32(0), factor).astype(np.float32)


def _two_blocks(state: _State, first: _Block, second: _Block, pipeline: Pipeline) -> _State:
    """L, and O in both warpgroups, over blocks 0 and 1 of a pair."""
    to_0 = _ratio(state.top, state.sigma, first.top, first.sigma)
    to_1 = _ratio(first.top, first.sigma, second.top, second.sigma)
    row_sum = state.row_sum * to_0 + first.total / first.sigma
    row_sum = row_sum * to_1 + second.total / second.sigma
    half = state.output.shape[1] // 2
    add = _accumulate(pipeline.accumulation)

    def forward(part: slice) -> F32:
        o = add(state.output[:, part] * to_0[:, None], first.codes, first.values[:, part])
        return add(o * to_1[:, None], second.codes, second.values[:, part])

    def inverted(part: slice) -> F32:
        straight = _ratio(state.top, state.sigma, second.top, second.sigma)
        values = first.values[:, part]
        o = state.output[:, part] * straight[:, None]
        o = add(o, second.codes, second.values[:, part])
        if pipeline.order == "rescale_p":
            again = e4m3_from_f32(f32_from_e4m3(first.codes) * to_1[:, None])
            return add(o, again, values)
        back = _ratio(second.top, second.sigma, first.top, first.sigma)
        return add(o * back[:, None], first.codes, values) * to_1[:, None]

    right = forward if pipeline.order == "enforced" else inverted
    output = np.concatenate([forward(slice(0, half)), right(slice(half, None))], axis=1)
    return _State(second.top, second.sigma, row_sum, output)


def _accumulate(accumulation: str) -> Callable[[F32, U8, U8], F32]:
    def product(p_codes: U8, values: U8, start: F32 | int) -> F32:
        total: F32 | NDArray[np.uint32] | int = start
        for k in range(0, BLOCK, QK_STEP_FP8):
            step = slice(k, k + QK_STEP_FP8)
            total = wgmma_e4m3(p_codes[:, step], values[step].T, total)
        return np.asarray(total, np.uint32).view(np.float32)

    if accumulation == "in_place":
        return lambda o, p, v: product(p, v, np.ascontiguousarray(o))
    return lambda o, p, v: (o + product(p, v, 0)).astype(np.float32)


def _finish(state: _State, v_scale: F32, pipeline: Pipeline) -> tuple[F32, F32]:
    output = state.output / state.row_sum[:, None]
    if pipeline.static:
        output = output * v_scale[0]  # one scale for the whole tensor
    lse = state.top + np.log(state.row_sum * state.sigma)
    return output.astype(np.float32), lse.astype(np.float32)
