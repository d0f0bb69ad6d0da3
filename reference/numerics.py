"""Exact arithmetic of the single Hopper (sm_90a) instructions the kernels use, in NumPy.

Every function is vectorised and equals the hardware in every bit: NaN, infinities, subnormals and
-0 included. The rules were measured on an H200 (design/numerics.md, sections 3 and 4) and are
checked against recorded hardware outputs by tests/reference/test_numerics.py.

A NaN that arithmetic produces is always the hardware's one NaN, 0x7fffffff (+NaN, all mantissa
bits set). Inputs are float32 arrays (or Python numbers) of any shape that broadcast together;
anything else raises ArgumentError, since a silent conversion would round where the GPU does not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from snapmla_rt.config import FP8_MAX, LOG2_COEFFS_BITS, SQRT_HALF_BITS
from snapmla_rt.errors import ArgumentError

F32 = NDArray[np.float32]

NAN_BITS = 0x7FFFFFFF  # the only NaN that FADD, FMUL, FFMA, MUFU and the tensor core return
E4M3_NAN = 0x7F
BF16_NAN = 0x7FFF

# Working sets of this many elements stay in the cache, which is worth a factor of two.
_CHUNK = 1 << 15


def as_f32(name: str, x: ArrayLike) -> F32:
    """`x` as a float32 array; Python numbers are rounded once, other dtypes are refused."""
    if isinstance(x, (bool, int, float)):
        return np.asarray(x, dtype=np.float32)
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise ArgumentError(name, "dtype float32", array.dtype)
    return array


def as_codes(name: str, x: ArrayLike, unsigned: Any, storage: Any) -> NDArray[Any]:
    """The bit patterns of `x`, whose dtype is `unsigned` already or the ml_dtypes one `storage`."""
    array = np.asarray(x)
    if array.dtype == np.dtype(storage):
        return array.view(unsigned)
    if array.dtype != np.dtype(unsigned):
        expected = f"dtype {np.dtype(storage).name} or its bits as {np.dtype(unsigned).name}"
        raise ArgumentError(name, expected, array.dtype)
    return array


def as_e4m3_codes(name: str, x: ArrayLike) -> NDArray[np.uint8]:
    """e4m3 codes of `x` (uint8 or ml_dtypes.float8_e4m3fn), without copying."""
    return as_codes(name, x, np.uint8, ml_dtypes.float8_e4m3fn)


def as_bf16_bits(name: str, x: ArrayLike) -> NDArray[np.uint16]:
    """bf16 bit patterns of `x` (uint16 or ml_dtypes.bfloat16), without copying."""
    return as_codes(name, x, np.uint16, ml_dtypes.bfloat16)


def bits_of(x: F32) -> NDArray[np.uint32]:
    """The bit patterns of a float32 array (a view)."""
    return x.view(np.uint32)


def from_bits(bits: ArrayLike) -> F32:
    """The float32 values of uint32 bit patterns."""
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def canonical_nan(x: ArrayLike) -> F32:
    """`x` with every NaN, of any sign and payload, replaced by the hardware's 0x7fffffff."""
    x = as_f32("x", x)
    return _with_nan(x.copy())


def _with_nan(x: F32) -> F32:
    """Canonicalise NaN in an array that this module owns."""
    nan = np.isnan(x)
    if nan.any():
        x = np.where(nan, from_bits(NAN_BITS), x)
    return x


# --- Conversions -------------------------------------------------------------------------------


@np.errstate(all="ignore")
def e4m3_from_f32(x: ArrayLike) -> NDArray[np.uint8]:
    """float32 to e4m3 codes (uint8): cvt.rn.satfinite.e4m3x2.f32.

    Round to nearest even, subnormals included; |x| > 448 and infinities saturate to +-448
    (0x7e, 0xfe); NaN of any sign gives 0x7f; -0 and negatives that round to zero give 0x80.
    """
    x = as_f32("x", x)
    limit = np.float32(FP8_MAX)
    # ml_dtypes rounds as the hardware does, but turns |x| > 464 into NaN: hence the clip.
    codes = np.clip(x, -limit, limit).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(E4M3_NAN), codes)


@lru_cache(maxsize=1)
def _e4m3_values() -> F32:
    """The 256 values of the e4m3 codes, NaN canonical."""
    code = np.arange(256)
    field, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(field > 0, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(field, 1) - 10)
    table = np.copysign(magnitude, np.where(code >> 7, -1.0, 1.0)).astype(np.float32)
    table[[0x7F, 0xFF]] = from_bits(NAN_BITS)
    table.setflags(write=False)
    return table


def f32_from_e4m3(codes: ArrayLike) -> F32:
    """e4m3 codes (uint8 or ml_dtypes.float8_e4m3fn) to float32; exact, NaN codes 0x7fffffff."""
    return _e4m3_values()[as_e4m3_codes("codes", codes)]


def bf16_from_f32(x: ArrayLike) -> NDArray[np.uint16]:
    """float32 to bf16 bits (uint16): cvt.rn.bf16.f32.

    Round to nearest even, overflow to infinity, subnormals and -0 kept; every NaN gives 0x7fff.
    """
    x = as_f32("x", x)
    bits = bits_of(np.ascontiguousarray(x)).reshape(x.shape)
    # Adding 0x7fff, plus one where the kept part is odd, carries exactly when RNE rounds up. Only
    # NaN patterns can wrap around, and they are replaced.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(BF16_NAN), rounded)


def f32_from_bf16(bits: ArrayLike) -> F32:
    """bf16 bits (uint16 or ml_dtypes.bfloat16) to float32; exact, every NaN 0x7fffffff."""
    wide = as_bf16_bits("bits", bits).astype(np.uint32) << np.uint32(16)
    return _with_nan(np.asarray(wide, dtype=np.uint32).view(np.float32))


# --- Arithmetic --------------------------------------------------------------------------------


@np.errstate(all="ignore")
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> F32:
    """a * b + c with one rounding to nearest even: fma.rn.f32, subnormals kept, NaN canonical."""
    a, b, c = as_f32("a", a), as_f32("b", b), as_f32("c", c)
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    if np.prod(shape, dtype=np.int64) <= _CHUNK:
        return _fma(a, b, c)
    a, b, c = (np.broadcast_to(v, shape) for v in (a, b, c))
    out = np.empty(shape, np.float32)
    rows = _CHUNK * shape[0] // out.size
    for start in range(0, shape[0], max(1, rows)):
        if rows > 1:
            part = slice(start, start + rows)
            out[part] = _fma(a[part], b[part], c[part])
        else:
            out[start] = fma(a[start], b[start], c[start])
    return out


def _fma(a: F32, b: F32, c: F32) -> F32:
    """fma on one chunk.

    The product of two float32 is exact in float64 (48 bits, exponents -298..256). TwoSum gives
    the sum and its exact rounding error; where the error is not zero and the sum's last bit is
    even, one step towards the error makes it odd. A value rounded to odd with 53 >= 24 + 2 bits
    rounds to float32 as the exact sum does, subnormals (which keep fewer bits) included.
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = np.asarray((product - (total - back)) + (addend - back))
    # Infinite or NaN totals have a NaN error and stay as they are.
    inexact = (error != 0) & np.isfinite(total)
    if inexact.any():
        word = np.array(total).view(np.int64)
        # The bit pattern grows with the magnitude: away from zero if the error has total's sign.
        step = np.where((error > 0) == (total > 0), 1, -1)
        word += np.where(inexact & ((word & 1) == 0), step, 0)
        total = word.view(np.float64)
    return _with_nan(np.asarray(total, dtype=np.float32))


@np.errstate(all="ignore")
def rcp_rn(x: ArrayLike) -> F32:
    """1 / x rounded to nearest even: rcp.rn.f32, subnormals kept, NaN canonical."""
    return _with_nan(np.asarray(np.float32(1.0) / as_f32("x", x)))


@np.errstate(all="ignore")
def sub_ru(a: ArrayLike, b: ArrayLike) -> F32:
    """a - b rounded toward +infinity: sub.rp.f32, NaN canonical.

    A negative difference beyond the range gives -FLT_MAX, a positive one +inf; x - x gives +0.
    """
    a64, b64 = as_f32("a", a).astype(np.float64), -as_f32("b", b).astype(np.float64)
    total = a64 + b64
    back = total - a64
    error = (a64 - (total - back)) + (b64 - back)
    nearest = np.asarray(total, dtype=np.float32)
    # total and error are the exact difference; float32 `nearest` lies below it in these cases.
    below = (total > nearest) | ((total == nearest) & (error > 0))
    up = np.nextafter(nearest, np.float32(np.inf))
    return _with_nan(np.where(below, up, nearest))


# --- exp2: the recovered MUFU.EX2 --------------------------------------------------------------

# (C0, C1, C2) of the 64 segments of the fraction: 25, 16 and 10 fraction bits.
_EX2_SEGMENTS = (
    (3, 22713, 494), (365386, 22960, 501), (734750, 23210, 506), (1108133, 23463, 511),
    (1485586, 23718, 518), (1867145, 23977, 521), (2252860, 24238, 527), (2642777, 24502, 532),
    (3036940, 24768, 541), (3435393, 25038, 546), (3838184, 25311, 551), (4245365, 25586, 559),
    (4656977, 25865, 564), (5073072, 26147, 568), (5493699, 26431, 577), (5918905, 26719, 583),
    (6348741, 27010, 589), (6783258, 27304, 596), (7222505, 27602, 600), (7666538, 27902, 609),
    (8115404, 28206, 615), (8569160, 28513, 622), (9027854, 28824, 627), (9491545, 29138, 633),
    (9960285, 29455, 641), (10434129, 29776, 647), (10913133, 30100, 655), (11397354, 30428, 661),
    (11886846, 30759, 670), (12381669, 31094, 677), (12881882, 31432, 686), (13387539, 31775, 691),
    (13898703, 32121, 699), (14415435, 32471, 705), (14937793, 32824, 715), (15465837, 33182, 721),
    (15999633, 33543, 730), (16539242, 33908, 739), (17084727, 34277, 748), (17636150, 34651, 753),
    (18193579, 35028, 763), (18757078, 35409, 773), (19326714, 35795, 779), (19902551, 36185, 787),
    (20484659, 36579, 796), (21073106, 36977, 806), (21667961, 37380, 813), (22269293, 37787, 822),
    (22877175, 38198, 833), (23491674, 38614, 842), (24112865, 39035, 849), (24740822, 39460, 858),
    (25375616, 39889, 870), (26017322, 40324, 877), (26666015, 40763, 887), (27321773, 41207, 896),
    (27984672, 41655, 909), (28654788, 42109, 917), (29332202, 42568, 925), (30016992, 43031, 938),
    (30709240, 43500, 946), (31409026, 43973, 959), (32116431, 44452, 969), (32831540, 44936, 980),
)  # fmt: skip
_EX2_BIAS = 6114  # added at 38 fraction bits, before the 15 lowest bits are dropped


@lru_cache(maxsize=1)
def _ex2_square() -> NDArray[np.int64]:
    """SQ(x) for the 2^17 low parts x: x*x >> 19 without the partial products below 2^19.

    Bits i and j contribute 2^(i+j+1) where i < j (the two equal products folded into one), 2^(2i)
    where i = j; the squarer has no columns below weight 2^19, so their carries are missing too.
    """
    x = np.arange(1 << 17, dtype=np.int64)
    total = np.zeros_like(x)
    for i in range(17):
        bit_i = (x >> i) & 1
        if 2 * i >= 19:
            total += bit_i << (2 * i)
        for j in range(max(i + 1, 18 - i), 17):
            total += (bit_i & (x >> j)) << (i + j + 1)
    return total >> 19


@lru_cache(maxsize=1)
def _ex2_tables() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per segment: C0 * 2^13 + bias, C1, C2."""
    c0, c1, c2 = np.array(_EX2_SEGMENTS, dtype=np.int64).T
    return c0 * 8192 + _EX2_BIAS, c1.copy(), c2.copy()


@np.errstate(all="ignore")
def exp2_mufu(x: ArrayLike) -> F32:
    """2 ** x as ex2.approx.ftz.f32 computes it (one MUFU.EX2), bit for bit on all 2^32 inputs.

    Integer x gives exact powers of two; results below 2^-126 are +0, from 2^128 on +inf; NaN gives
    0x7fffffff. Largest relative error 1.46e-7 (all of [1, 2), the worst octave tried).
    """
    x = as_f32("x", x)
    flat = x.reshape(-1)
    out = np.empty(flat.shape, np.float32)
    for start in range(0, flat.size, _CHUNK):
        out[start : start + _CHUNK] = _exp2_mufu(flat[start : start + _CHUNK])
    return out.reshape(x.shape)


def _exp2_mufu(x: F32) -> F32:
    """exp2_mufu on one flat chunk."""
    # Fixed point with 23 fraction bits, truncated. 512 is far outside the range of results, and
    # fmin turns NaN into 512 (replaced at the end).
    k = (np.fmin(np.abs(x), np.float32(512.0)) * np.float32(2.0**23)).astype(np.int64)
    # Negative x uses the one's complement of the fraction, unless the fraction is zero.
    fixed = np.where(x < 0, ~k + ((k & 0x7FFFFF) == 0), k)
    exponent, fraction = fixed >> 23, fixed & 0x7FFFFF
    segment, low = fraction >> 17, fraction & 0x1FFFF
    c0, c1, c2 = _ex2_tables()
    mantissa = (c0[segment] + c1[segment] * low + c2[segment] * _ex2_square()[low]) >> 15
    bits = ((exponent + 127) << 23) | mantissa
    bits = np.where(exponent >= 128, 0x7F800000, bits)
    bits = np.where(exponent < -126, 0, bits)
    bits = np.where(np.isnan(x), NAN_BITS, bits)
    return bits.astype(np.uint32).view(np.float32)


# --- log2: our own polynomial, the same operations on the GPU ------------------------------------


@np.errstate(all="ignore")
def log2_soft(x: ArrayLike) -> F32:
    """log2(x) by exponent extraction and a polynomial in fma, the same bits on CPU and GPU.

    x = 2^e * m with m in [sqrt(1/2), sqrt(2)); f = m - 1 (exact), result = fma(f, p(f), e) with
    p by Horner from config.LOG2_COEFFS_BITS. Exact at powers of two. 0 (either sign) gives -inf,
    negative x and NaN give 0x7fffffff, +inf gives +inf; subnormals are scaled by 2^24 first.
    The error beside the last rounding is measured in tests/reference/test_numerics.py.
    """
    x = as_f32("x", x)
    subnormal = np.abs(x) < np.float32(2.0**-126)
    scaled = np.where(subnormal, x * np.float32(2.0**24), x)
    bits = np.ascontiguousarray(scaled).view(np.int32).reshape(x.shape)
    exponent = (bits - np.int32(SQRT_HALF_BITS)) >> np.int32(23)
    mantissa = np.asarray(bits - (exponent << np.int32(23)), dtype=np.int32).view(np.float32)
    f = np.asarray(mantissa - np.float32(1.0))
    coefficients = from_bits(LOG2_COEFFS_BITS)
    p = np.broadcast_to(coefficients[-1], x.shape)
    for coefficient in coefficients[-2::-1]:
        p = fma(p, f, np.asarray(coefficient))
    e = (exponent - np.where(subnormal, np.int32(24), np.int32(0))).astype(np.float32)
    result = fma(f, p, e)
    result = np.where(x == 0, np.float32(-np.inf), result)
    result = np.where(x == np.inf, np.float32(np.inf), result)
    return np.where((x < 0) | np.isnan(x), from_bits(NAN_BITS), result)
