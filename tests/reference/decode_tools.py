"""What the tests of the decode stages share: caches with hostile surroundings, and derived bounds.

The bounds follow from the rules of the tensor core (design/numerics.md, sections 1 and 2) and from
the unit roundoff of each operation; none is fitted to what the reference happens to give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from poison import poison_block_table, poisoned_cache
from strategies import shuffled_block_table, slots_of

from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.attention_fp64 import dequantise, dequantise_cache, e4m3_table
from snapmla_rt.reference.mla_decode import Splits, mla_decode, mla_decode_splits
from snapmla_rt.reference.numerics import f32_from_bf16
from snapmla_rt.reference.plan_decode import plan_decode
from snapmla_rt.reference.quantize_q import quantize_q
from snapmla_rt.reference.tensor_core import compiled_available

SOFTMAX_SCALE = 192**-0.5  # DeepSeek's
# Ids that other engines leave in unused entries: an id far beyond any cache, padding, INT_MIN.
TAIL_IDS = (2147480000, -1, -(2**31))

U24 = 2.0**-24  # unit roundoff of float32, round to nearest
EXP2_REL = 1.5e-7  # MUFU.EX2: at most 1.44e-7 over the ranges tried (numerics.md, section 3)
LOG2_ABS = 2.0**-23  # log2_soft beside its last rounding
FTZ = 2.0**-126  # exp2 results below this are +0
BF16_REL = 2.0**-8  # unit roundoff of bf16 (8 significant bits), normal results
LN2 = float(np.log(2.0))

F64 = NDArray[np.float64]

# Without a C compiler the same rules run in NumPy, 50 times slower: the same tests on less data.
COMPILED = compiled_available()


def examples(count: int) -> int:
    """Hypothesis examples of a test: fewer without the compiled tensor core."""
    return count if COMPILED else max(count // 5, 5)


@dataclass(frozen=True)
class Cached:
    """Quantised queries and a paged cache in which everything unused is NaN or absurd."""

    query: tuple[Any, Any, Any]  # q_nope, q_rope, q_scale
    paged: tuple[Any, Any, Any]  # ckv_cache, k_scale_cache, k_rope_cache
    block_table: NDArray[np.int32]
    cache_seqlens: NDArray[np.int32]

    def heads(self, part: slice) -> Cached:
        return replace(self, query=tuple(x[:, :, part] for x in self.query))  # type: ignore[arg-type]

    def queries(self, part: slice) -> Cached:
        return replace(self, query=tuple(x[:, part] for x in self.query))  # type: ignore[arg-type]

    def requests(self, index: list[int]) -> Cached:
        return replace(
            self,
            query=tuple(x[index] for x in self.query),  # type: ignore[arg-type]
            block_table=self.block_table[index],
            cache_seqlens=self.cache_seqlens[index],
        )


def cached(
    q: NDArray[np.float32],
    kv: list[NDArray[np.float32]],
    *,
    seed: int = 0,
    scale_rounding: str = "exact",
) -> Cached:
    """Quantise q [b, s_q, h, 576] and write kv (b arrays [n, 576]) into a shuffled, poisoned cache
    with unused table columns at the end."""
    seqlens = np.array([len(tokens) for tokens in kv], np.int32)
    table, num_blocks = shuffled_block_table(seqlens, np.random.default_rng(seed))
    paged = poisoned_cache(num_blocks)
    for row, tokens in zip(table, kv, strict=True):
        slots = slots_of(row, len(tokens))
        append_kv(tokens[:, :512], tokens[:, 512:], *paged, slots, scale_rounding=scale_rounding)
    tail = np.resize(np.array(TAIL_IDS, np.int32), (len(kv), len(TAIL_IDS)))
    table = np.concatenate([poison_block_table(table, seqlens), tail], axis=1)
    return Cached(quantize_q(q, scale_rounding=scale_rounding), paged, table, seqlens)


def _plan(c: Cached, plan_kwargs: dict[str, Any]) -> Any:
    _, seq_len_q, num_heads = c.query[2].shape
    return plan_decode(c.cache_seqlens, num_heads, seq_len_q, **plan_kwargs)


def decode(
    c: Cached,
    softmax_scale: float = SOFTMAX_SCALE,
    *,
    causal: bool = True,
    trace: bool = False,
    **plan_kwargs: Any,
) -> Any:
    """mla_decode with a plan of its own."""
    return mla_decode(
        *c.query, *c.paged, c.block_table, c.cache_seqlens, _plan(c, plan_kwargs), softmax_scale,
        causal=causal, trace=trace,
    )  # fmt: skip


def decode_splits(
    c: Cached, softmax_scale: float = SOFTMAX_SCALE, *, causal: bool = True, **plan_kwargs: Any
) -> Splits:
    """The splits' float32 partial results, before bf16 rounding and combination."""
    return mla_decode_splits(
        c.query, c.paged, c.block_table, c.cache_seqlens, _plan(c, plan_kwargs), softmax_scale,
        causal=causal,
    )  # fmt: skip


def dequantised(c: Cached) -> tuple[F64, list[F64], list[F64]]:
    """What the codes stand for: q [b, s_q, h, 576], kv and scales of each request, in float64."""
    q = dequantise(*(c.query[i] for i in (0, 2, 1)))
    kv, scales = [], []
    for row, n in zip(c.block_table, c.cache_seqlens, strict=True):
        slots = slots_of(row, int(n))
        kv.append(dequantise_cache(*c.paged, slots))
        scales.append(c.paged[1].reshape(-1)[slots].astype(np.float64))
    return q, kv, scales


def request_operands(c: Cached, req: int) -> tuple[F64, F64, F64, F64, F64, F64]:
    """q codes [rows, 512], q rope [rows, 64], q scale [rows], k codes [n, 512], k rope [n, 64],
    k scale [n] of one request as float64 values (codes and rope not multiplied by the scales)."""
    slots = slots_of(c.block_table[req], int(c.cache_seqlens[req]))
    table = e4m3_table()
    q_nope, q_rope, q_scale = (x[req].reshape(-1, *x.shape[3:]) for x in c.query)
    ckv, scale, rope = (x.reshape(-1, *x.shape[2:])[slots] for x in c.paged)
    return (
        table[q_nope.view(np.uint8)],
        f32_from_bf16(q_rope).astype(np.float64),
        q_scale.astype(np.float64),
        table[ckv.view(np.uint8)],
        f32_from_bf16(rope).astype(np.float64),
        scale.astype(np.float64),
    )


# --- the tensor core's error ---------------------------------------------------------------------


@dataclass(frozen=True)
class ChainRule:
    """One wgmma kind: a step of k products, the addend window, the result's fraction bits, the
    smallest power of two that an operand's exponent can be, and the smallest unit of a result."""

    step_k: int
    window: int
    fraction: int
    subnormal: float
    tiny: float


E4M3 = ChainRule(32, 13, 13, 2.0**-6, 0.0)
BF16 = ChainRule(16, 25, 23, 2.0**-126, 2.0**-149)


def chain_bound(rule: ChainRule, a: F64, b: F64, magnitude: F64 | None = None) -> tuple[F64, F64]:
    """Largest error of the chain sum_k a[m, k] b[n, k] started from a value of at most `magnitude`.

    One step truncates k products and C to multiples of 2^(Emax - window) and the sum to `fraction`
    bits. 2^Emax is at most the largest |a| |b| (operands raised to the subnormal exponent) or |C|,
    and |C| at most the sum of |a b| so far. Returns (error, that sum of magnitudes), [M, N].
    """
    reach = np.zeros((len(a), len(b))) if magnitude is None else magnitude
    error = np.zeros_like(reach)
    for start in range(0, a.shape[1], rule.step_k):
        x, y = np.abs(a[:, start : start + rule.step_k]), np.abs(b[:, start : start + rule.step_k])
        up_x = np.where(x > 0, np.maximum(x, rule.subnormal), 0.0)
        up_y = np.where(y > 0, np.maximum(y, rule.subnormal), 0.0)
        largest = (up_x[:, None, :] * up_y[None, :, :]).max(axis=2)
        unit = np.maximum(largest, reach) * 2.0**-rule.window
        reach = reach + x @ y.T
        error = error + (rule.step_k + 1) * unit + reach * 2.0**-rule.fraction + rule.tiny * 33
    return error, reach


def score_bound(q8: F64, q16: F64, k8: F64, k16: F64) -> tuple[F64, F64]:
    """S exactly [rows, tokens], and the largest error of the 16 e4m3 and 4 bf16 steps."""
    latent, reach = chain_bound(E4M3, q8, k8)
    rope, reach = chain_bound(BF16, q16, k16, reach)
    exact = q8 @ k8.T + q16 @ k16.T
    return exact, latent + rope + 600 * 2.0**-53 * reach  # the last: float64's own sum
