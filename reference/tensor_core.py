"""The Hopper tensor core as integers: wgmma m64nNk32 e4m3 and m64nNk16 bf16, D = A * B^T + C.

Rules measured on an H200 (design/numerics.md, sections 1 and 2). One output element of one step:

[T1] Specials first: NaN operands, inf * 0 and infinities of both signs give 0x7fffffff.
[T2] Every operand is an integer significand and an exponent; subnormals are neither normalised nor
     flushed. A product is the product of the significands at the sum of the exponents.
[T3] Emax = the largest exponent among the non-zero products and a non-zero C. The exponent of a
     product is that sum: it is not renormalised when the significand reaches 2.
[T4] Each addend is truncated toward zero to a multiple of 2^(Emax - window_bits).
[T5] The truncated addends are added exactly, C among them, in no order.
[T6] The sum is truncated toward zero to result_bits significant bits (float32 subnormals kept);
     a sum that is zero or vanishes is +0; |D| >= 2^128 is infinite.

Several steps on one accumulator are this rule applied step by step in issue order.

Two backends give the same bits: "numpy" (this file, the readable specification) and "compiled"
(`_wgmma`, the same integers in C), which is used whenever it can be imported.

Operands are bit patterns: e4m3 as uint8 (or ml_dtypes.float8_e4m3fn), bf16 as uint16 (or
ml_dtypes.bfloat16), accumulators as uint32 patterns of float32 (or float32 itself). All functions
return uint32 patterns and accept leading batch dimensions, which broadcast.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import QK_STEP_BF16, QK_STEP_FP8, TILE_M
from snapmla_rt.errors import ArgumentError

from .numerics import NAN_BITS, as_bf16_bits, as_e4m3_codes

try:
    from . import _wgmma
except ImportError:  # no C compiler at installation, or a bare checkout
    _wgmma = None  # type: ignore[assignment]

U32 = NDArray[np.uint32]

BACKENDS = ("numpy", "compiled")

# Products held at once by the NumPy path: small enough for the cache, large enough for NumPy.
_NUMPY_PRODUCTS = 1 << 18
_NO_EXPONENT = -(1 << 14)  # below every exponent


@dataclass(frozen=True)
class StepRule:
    """What distinguishes the two instructions."""

    step_k: int  # k of one instruction
    product_fraction_bits: int  # a product is significand * 2^(exponent - this)
    window_bits: int  # addends keep this many bits below 2^Emax
    result_bits: int  # significant bits of D
    exponent_floor: int  # Emax is at least this


# The floor of the e4m3 step, if there is one, cannot be observed: products start at 2^-12.
E4M3_RULE = StepRule(QK_STEP_FP8, 6, 13, 14, _NO_EXPONENT)
BF16_RULE = StepRule(QK_STEP_BF16, 14, 25, 24, -133)


def compiled_available() -> bool:
    """Whether the compiled path was built and can be imported."""
    return _wgmma is not None


def _use_compiled(backend: str | None) -> bool:
    """Resolve `backend`: None takes the compiled path where there is one."""
    if backend is None:
        return compiled_available()
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"None or one of {BACKENDS}", repr(backend))
    if backend == "compiled" and not compiled_available():
        raise ArgumentError("backend", "'numpy' (the compiled path is not built)", repr(backend))
    return backend == "compiled"


# --- Arguments ---------------------------------------------------------------------------------


def _matrix(name: str, array: NDArray[Any], width: int | None = None) -> NDArray[Any]:
    """`array` if it is [..., rows, width]."""
    if array.ndim < 2 or (width is not None and array.shape[-1] != width):
        expected = f"shape [..., rows, {'columns' if width is None else width}]"
        raise ArgumentError(name, expected, array.shape)
    return array


def _accumulator(c: ArrayLike, shape: tuple[int, ...]) -> U32:
    """C as uint32 bits broadcast to `shape`; 0 is the scale-d = 0 of a first step."""
    array = np.asarray(c)
    if array.dtype == np.float32:
        array = array.view(np.uint32)
    elif isinstance(c, int) and c == 0:
        array = array.astype(np.uint32)
    if array.dtype != np.uint32:
        raise ArgumentError("c", "uint32 bits or float32", array.dtype)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ArgumentError("c", f"a shape that broadcasts to {shape}", array.shape) from None


def _batch(names: str, *arrays: NDArray[Any]) -> tuple[int, ...]:
    """The common leading shape of matrices."""
    try:
        return np.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ArgumentError(names, "leading dimensions that broadcast", shapes) from None


# --- Single steps ------------------------------------------------------------------------------


def wgmma_e4m3(
    a: ArrayLike, b: ArrayLike, c: ArrayLike, *, backend: str | None = None, num_threads: int = 1
) -> U32:
    """One m64nNk32 e4m3 step, D = A * B^T + C.

    a: [..., M, 32] codes; b: [..., N, 32] codes; c: [..., M, N] float32 bits, or 0.
    Returns [..., M, N] float32 bits, whose low 10 mantissa bits are zero in finite results.
    """
    a = _matrix("a", as_e4m3_codes("a", a), E4M3_RULE.step_k)
    b = _matrix("b", as_e4m3_codes("b", b), E4M3_RULE.step_k)
    return _step(E4M3_RULE, a, b, c, backend, num_threads)


def wgmma_bf16(
    a: ArrayLike, b: ArrayLike, c: ArrayLike, *, backend: str | None = None, num_threads: int = 1
) -> U32:
    """One m64nNk16 bf16 step, D = A * B^T + C.

    a: [..., M, 16] bits; b: [..., N, 16] bits; c: [..., M, N] float32 bits, or 0.
    Returns [..., M, N] float32 bits.
    """
    a = _matrix("a", as_bf16_bits("a", a), BF16_RULE.step_k)
    b = _matrix("b", as_bf16_bits("b", b), BF16_RULE.step_k)
    return _step(BF16_RULE, a, b, c, backend, num_threads)


def _step(
    rule: StepRule,
    a: NDArray[Any],
    b: NDArray[Any],
    c: ArrayLike,
    backend: str | None,
    num_threads: int,
) -> U32:
    shape = (*_batch("a, b", a, b), a.shape[-2], b.shape[-2])
    accumulator = _accumulator(c, shape)
    return _run([(rule, a, b)], accumulator, backend, num_threads)


# --- Chains ------------------------------------------------------------------------------------


def qk_chain(
    q_codes: ArrayLike,
    q_rope: ArrayLike,
    k_codes: ArrayLike,
    k_rope: ArrayLike,
    c: ArrayLike = 0,
    *,
    backend: str | None = None,
    num_threads: int = 1,
) -> U32:
    """Q * K^T of one tile: the e4m3 steps from accumulator `c`, then the bf16 steps, in order.

    q_codes: [..., M, 512] e4m3 codes; q_rope: [..., M, 64] bf16 bits; k_codes: [..., N, 512];
    k_rope: [..., N, 64] (any multiples of 32 and 16 that agree); c: [..., M, N] float32 bits, or 0.
    Returns [..., M, N] float32 bits.
    """
    q8 = _matrix("q_codes", as_e4m3_codes("q_codes", q_codes))
    k8 = _matrix("k_codes", as_e4m3_codes("k_codes", k_codes), q8.shape[-1])
    q16 = _matrix("q_rope", as_bf16_bits("q_rope", q_rope))
    k16 = _matrix("k_rope", as_bf16_bits("k_rope", k_rope), q16.shape[-1])
    _check_steps("q_codes", q8.shape[-1], E4M3_RULE)
    _check_steps("q_rope", q16.shape[-1], BF16_RULE)
    for name, rope, codes in (("q_rope", q16, q8), ("k_rope", k16, k8)):
        if rope.shape[-2] != codes.shape[-2]:
            raise ArgumentError(name, f"{codes.shape[-2]} rows, as the codes", rope.shape)
    batch = _batch("q_codes, k_codes, q_rope, k_rope", q8, k8, q16, k16)
    accumulator = _accumulator(c, (*batch, q8.shape[-2], k8.shape[-2]))
    chain = [(E4M3_RULE, q8, k8), (BF16_RULE, q16, k16)]
    return _run(chain, accumulator, backend, num_threads)


def pv_chain(
    p_codes: ArrayLike, v_codes: ArrayLike, *, backend: str | None = None, num_threads: int = 1
) -> U32:
    """P * V of one block: e4m3 steps of 32 tokens from a zero accumulator, in token order.

    p_codes: [..., M, N] e4m3 codes; v_codes: [..., N, D] e4m3 codes, N tokens, a multiple of 32.
    Returns [..., M, D] float32 bits.
    """
    p = _matrix("p_codes", as_e4m3_codes("p_codes", p_codes))
    v = _matrix("v_codes", as_e4m3_codes("v_codes", v_codes))
    _check_steps("p_codes", p.shape[-1], E4M3_RULE)
    if v.shape[-2] != p.shape[-1]:
        raise ArgumentError("v_codes", f"shape [..., {p.shape[-1]}, dims]", v.shape)
    shape = (*_batch("p_codes, v_codes", p, v), p.shape[-2], v.shape[-1])
    chain = [(E4M3_RULE, p, np.swapaxes(v, -1, -2))]
    return _run(chain, _accumulator(0, shape), backend, num_threads)


def _check_steps(name: str, k: int, rule: StepRule) -> None:
    if k % rule.step_k:
        raise ArgumentError(name, f"a multiple of {rule.step_k} columns", k)


# One instruction kind along the last axis of A [..., M, K] and B [..., N, K].
Link = tuple[StepRule, NDArray[Any], NDArray[Any]]


def _run(chain: list[Link], c: U32, backend: str | None, num_threads: int) -> U32:
    """The links of `chain` one after the other on accumulator c [..., M, N] (already broadcast)."""
    if num_threads < 1:
        raise ArgumentError("num_threads", "at least 1", num_threads)
    if _use_compiled(backend):
        return _compiled_chain(chain, c, num_threads)
    for rule, a, b in chain:
        c = _numpy_chain(rule, a, b, c)
    return np.array(c)


def _broadcast_batch(x: NDArray[Any], batch: tuple[int, ...]) -> NDArray[Any]:
    return np.broadcast_to(x, (*batch, *x.shape[-2:]))


# --- The compiled path ---------------------------------------------------------------------------


def _compiled_chain(chain: list[Link], c: U32, num_threads: int) -> U32:
    """`_run` in C. The columns of each matrix are shared out among the threads."""
    batch, n = c.shape[:-2], c.shape[-1]
    d = np.array(c, order="C")
    links = []
    for rule, a, b in chain:
        # Rows must be contiguous, except of values seen as [dims, tokens]: their columns are.
        if rule is BF16_RULE or b.strides[-2] != b.itemsize:
            b = _contiguous_rows(b)
        a, b = _broadcast_batch(_contiguous_rows(a), batch), _broadcast_batch(b, batch)
        links.append((rule, a, b))

    def work(job: tuple[tuple[int, ...], slice]) -> None:
        index, columns = job
        for rule, a, b in links:
            step = _wgmma.chain_e4m3 if rule is E4M3_RULE else _wgmma.chain_bf16
            step(a[index], b[index][columns], d[index][:, columns])

    parts = min(num_threads, -(-n // TILE_M))
    width = -(-n // (TILE_M * max(parts, 1))) * TILE_M
    columns = [slice(start, start + width) for start in range(0, n, max(width, 1))]
    jobs = [(index, part) for index in np.ndindex(*batch) for part in columns]
    if num_threads == 1 or len(jobs) == 1:
        for job in jobs:
            work(job)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, jobs))
    return d


def _contiguous_rows(x: NDArray[Any]) -> NDArray[Any]:
    """`x`, copied if its rows are not contiguous or not aligned to its elements."""
    aligned = x.flags.aligned and all(stride % x.itemsize == 0 for stride in x.strides)
    return x if aligned and x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


# --- The specification in NumPy ------------------------------------------------------------------


def _numpy_chain(rule: StepRule, a: NDArray[Any], b: NDArray[Any], c: U32) -> U32:
    """Steps of `rule` along the last axis of a and b, from accumulator c (already broadcast)."""
    if c.size == 0:
        return np.array(c)
    batch, (m, n) = c.shape[:-2], c.shape[-2:]
    a, b = _broadcast_batch(a, batch), _broadcast_batch(b, batch)
    out = np.empty(c.shape, np.uint32)
    columns = min(n, max(1, _NUMPY_PRODUCTS // rule.step_k))
    rows = min(m, max(1, _NUMPY_PRODUCTS // (rule.step_k * columns)))
    for index in np.ndindex(*batch):
        for row in range(0, m, rows):
            for column in range(0, n, columns):
                part = (*index, slice(row, row + rows), slice(column, column + columns))
                out[part] = _numpy_tile(rule, a[index][part[-2]], b[index][part[-1]], c[part])
    return out


def _numpy_tile(rule: StepRule, a: NDArray[Any], b: NDArray[Any], d: U32) -> U32:
    """The chain of one tile: a [M, K], b [N, K], d [M, N]."""
    for k in range(0, a.shape[-1], rule.step_k):
        part = slice(k, k + rule.step_k)
        d = _numpy_step(rule, a[:, part], b[:, part], d)
    return d


@np.errstate(all="ignore")
def _numpy_step(rule: StepRule, a: NDArray[Any], b: NDArray[Any], c: U32) -> U32:
    """[T1] to [T6] for a [M, k], b [N, k], c [M, N]."""
    # [T2] Signed significands and exponents. An addend is integer * 2^(exponent - fraction bits).
    decode = _decode_e4m3 if rule is E4M3_RULE else _decode_bf16
    a_significand, a_exponent, a_special = decode(a)
    b_significand, b_exponent, b_special = decode(b)
    product = a_significand[:, None, :] * b_significand[None, :, :]
    exponent = a_exponent[:, None, :] + b_exponent[None, :, :]
    c_significand, c_exponent, c_special = _decode_f32(c)

    # [T3] Zero addends do not take part. Where all are zero, any Emax gives a zero sum.
    top = np.where(product != 0, exponent, _NO_EXPONENT).max(axis=-1)
    top = np.maximum(top, np.where(c_significand != 0, c_exponent, _NO_EXPONENT))
    top = np.maximum(top, rule.exponent_floor)
    top = np.where(top == _NO_EXPONENT, 0, top)

    # [T4] [T5] in units of 2^(Emax - window_bits).
    product_shift = exponent - top[:, :, None] + (rule.window_bits - rule.product_fraction_bits)
    c_shift = c_exponent - top + (rule.window_bits - 23)
    total = _shift(product, product_shift).sum(axis=-1) + _shift(c_significand, c_shift)

    d = _pack(rule, total, top)
    # [T1]
    if a_special.any() or b_special.any() or c_special.any():
        specials = _specials_e4m3 if rule is E4M3_RULE else _specials_bf16
        is_special, value = specials(a, b, c)
        d = np.where(is_special, value, d)
    return d


def _shift(value: NDArray[np.int64], shift: NDArray[np.int64]) -> NDArray[np.int64]:
    """`value` * 2^shift truncated toward zero."""
    # Zero addends can have any exponent: they stay zero. Others never move left by more than 11.
    left, right = np.clip(shift, 0, 11), np.clip(-shift, 0, 63)
    return np.sign(value) * ((np.abs(value) << left) >> right)


def _pack(rule: StepRule, total: NDArray[np.int64], top: NDArray[np.int64]) -> U32:
    """[T6]: float32 bits of total * 2^(top - window_bits), truncated."""
    unit = top - rule.window_bits
    magnitude = np.abs(total)
    # |total| < 2^33, so float64 holds it and its exponent is the position of the leading bit.
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)
    drop = np.maximum(np.maximum(length - rule.result_bits, -149 - unit), 0)
    drop = np.minimum(drop, 63)
    kept = (magnitude >> drop) << drop
    # At most 24 bits and a multiple of 2^-149: exact in float64, and exact or infinite in float32.
    value = np.ldexp(np.copysign(kept.astype(np.float64), total), unit).astype(np.float32)
    # A sum that is zero or is truncated to zero has no sign.
    return np.where(kept == 0, np.float32(0.0), value).view(np.uint32)


# --- Decoding ----------------------------------------------------------------------------------

Decoded = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]


def _decode(bits: NDArray[Any], mantissa_bits: int, exponent_bits: int) -> Decoded:
    """Signed significand, exponent (bias removed) and "exponent field all ones" of a float."""
    word = bits.astype(np.int64)
    field = (word >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = word & ((1 << mantissa_bits) - 1)
    significand = np.where(field > 0, mantissa | (1 << mantissa_bits), mantissa)
    negative = (word >> (mantissa_bits + exponent_bits)) & 1
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = np.maximum(field, 1) - bias
    all_ones = field == (1 << exponent_bits) - 1
    return np.where(negative, -significand, significand), exponent, all_ones


def _decode_e4m3(codes: NDArray[np.uint8]) -> Decoded:
    significand, exponent, _ = _decode(codes, 3, 4)
    # e4m3 uses the largest exponent for numbers; only 0x7f and 0xff are NaN.
    return significand, exponent, (codes & 0x7F) == 0x7F


def _decode_bf16(bits: NDArray[np.uint16]) -> Decoded:
    return _decode(bits, 7, 8)


def _decode_f32(bits: U32) -> Decoded:
    return _decode(bits, 23, 8)


# --- [T1] Specials -------------------------------------------------------------------------------


def _specials_e4m3(
    a: NDArray[np.uint8], b: NDArray[np.uint8], c: U32
) -> tuple[NDArray[np.bool_], U32]:
    """Outputs that NaN codes or a special C decide, and their values."""
    c_magnitude = c & np.uint32(0x7FFFFFFF)
    a_nan = ((a & 0x7F) == 0x7F).any(axis=-1)
    b_nan = ((b & 0x7F) == 0x7F).any(axis=-1)
    nan = a_nan[:, None] | b_nan[None, :] | (c_magnitude > 0x7F800000)
    value = np.where(nan, np.uint32(NAN_BITS), c)
    return nan | (c_magnitude == 0x7F800000), value


def _specials_bf16(
    a: NDArray[np.uint16], b: NDArray[np.uint16], c: U32
) -> tuple[NDArray[np.bool_], U32]:
    """Outputs that NaN, inf * 0 or infinities decide, and their values."""
    # Products of finite bf16 stay finite in float64, so IEEE's own rules find the specials.
    a64 = (a.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    b64 = (b.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    product = a64[:, None, :] * b64[None, :, :]
    c32 = c.view(np.float32)
    plus = (product == np.inf).any(axis=-1) | (c32 == np.inf)
    minus = (product == -np.inf).any(axis=-1) | (c32 == -np.inf)
    nan = np.isnan(product).any(axis=-1) | np.isnan(c32) | (plus & minus)
    value = np.where(plus, np.uint32(0x7F800000), np.uint32(0xFF800000))
    return nan | plus | minus, np.where(nan, np.uint32(NAN_BITS), value)
