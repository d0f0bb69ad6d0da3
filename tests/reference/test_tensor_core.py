"""reference/tensor_core.py: both backends against recorded H200 outputs, and against each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference import numerics as nm
from snapmla_rt.reference import tensor_core as tc

Vectors = dict[str, np.ndarray]

HARDWARE = Path(__file__).resolve().parents[1] / "data" / "hardware"
E4M3_CATEGORIES = {
    0: "uniform", 1: "C any bits", 3: "sparse", 4: "exact cancellation", 5: "subnormal codes",
    6: "wide exponents", 7: "C near the largest exponent", 8: "all negative",
    9: "NaN codes and special C", 10: "huge C", 11: "all products zero", 12: "zero times big",
    13: "one product", 14: "two products with a gap", 15: "cancellation with C",
}  # fmt: skip
BF16_CATEGORIES = {
    0: "moderate", 1: "any finite bits", 2: "wide", 3: "sparse", 4: "cancellation",
    5: "subnormal", 6: "inf and NaN", 7: "C near the largest exponent", 8: "zero products",
    9: "one product", 10: "two with a gap", 11: "overflow", 12: "tiny", 13: "cancel with C",
    14: "all positive", 15: "RoPE-like",
}  # fmt: skip
NAN = np.uint32(0x7FFFFFFF)

needs_compiled = pytest.mark.skipif(
    not tc.compiled_available(), reason="the compiled tensor core is not built (no C compiler)"
)
both_backends = pytest.mark.parametrize(
    "backend", ["numpy", pytest.param("compiled", marks=needs_compiled)]
)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(HARDWARE / name) as data:
        return {key: data[key] for key in data.files}


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    return load("wgmma_vectors.npz")


def side_by_side(slices: np.ndarray) -> np.ndarray:
    """[..., steps, rows, k] to [..., rows, steps * k], the layout of a chain."""
    moved = np.moveaxis(slices, -3, -2)
    return moved.reshape(*moved.shape[:-2], -1)


# --- Recorded hardware ---------------------------------------------------------------------------


@both_backends
@pytest.mark.parametrize(
    ("kind", "category"),
    [("e4m3", c) for c in E4M3_CATEGORIES] + [("bf16", c) for c in BF16_CATEGORIES],
    ids=[f"e4m3-{n}" for n in E4M3_CATEGORIES.values()]
    + [f"bf16-{n}" for n in BF16_CATEGORIES.values()],
)
def test_single_steps_equal_the_hardware(
    vectors: Vectors, backend: str, kind: str, category: int
) -> None:
    step = tc.wgmma_e4m3 if kind == "e4m3" else tc.wgmma_bf16
    chosen = vectors[f"{kind}_category"] == category
    assert chosen.any()
    a, b, c, d = (vectors[f"{kind}_{name}"][chosen] for name in "abcd")
    np.testing.assert_array_equal(step(a, b, c, backend=backend), d)


def test_every_recorded_category_is_tested(vectors: Vectors) -> None:
    assert set(np.unique(vectors["e4m3_category"])) == set(E4M3_CATEGORIES)
    assert set(np.unique(vectors["bf16_category"])) == set(BF16_CATEGORIES)


@both_backends
@pytest.mark.parametrize("kind", ["e4m3", "bf16"])
@pytest.mark.parametrize("category", [0, 4, 7])
def test_chains_of_16_steps_equal_the_hardware(
    vectors: Vectors, backend: str, kind: str, category: int
) -> None:
    a, b, d, expected = (vectors[f"{kind}_chain{category}_{name}"] for name in "abcd")
    step = tc.wgmma_e4m3 if kind == "e4m3" else tc.wgmma_bf16
    for k in range(a.shape[1]):
        d = step(a[:, k], b[:, k], d, backend=backend)
    np.testing.assert_array_equal(d, expected)


@both_backends
def test_attention_like_steps_equal_the_hardware(vectors: Vectors, backend: str) -> None:
    a, b, c, d = (vectors[f"e4m3_attn_{name}"] for name in "abcd")
    np.testing.assert_array_equal(tc.wgmma_e4m3(a, b, c, backend=backend), d)


@both_backends
def test_qk_chain_equals_the_hardware(vectors: Vectors, backend: str) -> None:
    q8, k8, q16, k16 = (side_by_side(vectors[f"qk_chain_{n}"]) for n in ("a8", "b8", "ab", "bb"))
    d = tc.qk_chain(q8, q16, k8, k16, vectors["qk_chain_c"], backend=backend)
    np.testing.assert_array_equal(d, vectors["qk_chain_d"])


def exp2_degree_3(x: np.ndarray) -> np.ndarray:
    """The software exp2 `3r` of the recorded kernel: round to an integer, polynomial, add to the
    exponent field."""
    x = np.maximum(x, np.float32(-127))
    magic = np.float32(12582912.0)
    t = x + magic
    f = x - (t - magic)
    c = np.array([0x3F800000, 0x3F317AFD, 0x3E780626, 0x3D61510C], np.uint32).view(np.float32)
    p = c[3]
    for coefficient in c[2::-1]:
        p = nm.fma(p, f, coefficient)
    return (p.view(np.uint32) + (t.view(np.uint32) << np.uint32(23))).view(np.float32)


def mini_attention(
    data: Vectors, problem: int, exp2: Callable[[np.ndarray], np.ndarray], bias: int, backend: str
) -> tuple[np.ndarray, np.ndarray]:
    """The recorded kernel in its own order: per-lane row sums, promotion by fma, rcp at the end."""
    q, k, v = data["q"][problem], data["k"][problem], data["v"][problem]
    scale = np.float32(0.06011229)
    q8, q16 = side_by_side(q[:16]), side_by_side(q[16:].view(np.uint16))
    m = np.full((64, 1), -np.inf, np.float32)
    lane_sum = np.zeros((64, 4), np.float32)
    o = np.zeros((64, 64), np.float32)
    for block in range(4):
        k8, k16 = side_by_side(k[block, :16]), side_by_side(k[block, 16:].view(np.uint16))
        s = tc.qk_chain(q8, q16, k8, k16, backend=backend).view(np.float32)
        m_new = np.maximum(m, s.max(axis=1, keepdims=True))
        p = exp2(nm.fma(s, scale, nm.fma(-m_new, scale, np.float32(bias))))
        alpha = exp2((m - m_new) * scale)
        m = m_new
        # Lane c of a quad owns columns 8j + 2c and 8j + 2c + 1 and adds each kind in order of j.
        pairs = p.reshape(64, 8, 4, 2)
        total = np.zeros((64, 4, 2), np.float32)
        for j in range(8):
            total = total + pairs[:, j]
        lane_sum = nm.fma(lane_sum, alpha, total[..., 0] + total[..., 1])
        tokens = np.moveaxis(v[block], 1, 2).reshape(64, 64)
        part = tc.pv_chain(nm.e4m3_from_f32(p), tokens, backend=backend).view(np.float32)
        o = nm.fma(o, alpha, part)
    row_sum = (lane_sum[:, 0] + lane_sum[:, 1]) + (lane_sum[:, 2] + lane_sum[:, 3])
    return o * nm.rcp_rn(row_sum)[:, None], row_sum


@both_backends
@pytest.mark.parametrize("bias", [0, 8])
@pytest.mark.parametrize("form", ["mufu", "sw3"])
def test_mini_attention_equals_the_hardware(backend: str, form: str, bias: int) -> None:
    data = load("mini_attention_vectors.npz")
    exp2 = nm.exp2_mufu if form == "mufu" else exp2_degree_3
    for problem in range(3):
        o, row_sum = mini_attention(data, problem, exp2, bias, backend)
        expected_o, expected_l = (data[f"{form}_bias{bias}_{n}"][problem] for n in ("o", "l"))
        np.testing.assert_array_equal(o.view(np.uint32), expected_o)
        np.testing.assert_array_equal(row_sum.view(np.uint32), expected_l)


# --- Properties both backends have ---------------------------------------------------------------


@both_backends
def test_every_pair_of_codes(backend: str) -> None:
    """One product has 8 significant bits: exact in 14. NaN codes win, also against zeros."""
    codes = np.zeros((256, 32), np.uint8)
    codes[:, 17] = np.arange(256)
    value = nm.f32_from_e4m3(codes[:, 17])
    with np.errstate(all="ignore"):
        expected = value[:, None] * value[None, :] + np.float32(0)  # + 0 turns -0 into +0
    d = tc.wgmma_e4m3(codes, codes, 0, backend=backend)
    np.testing.assert_array_equal(d, nm.canonical_nan(expected).view(np.uint32))


@both_backends
def test_every_code_against_a_large_addend(backend: str) -> None:
    """2^8 * 1 fixes the window at 2^-5: each product is truncated toward zero to a multiple."""
    codes = np.arange(256)[(np.arange(256) & 0x7F) != 0x7F].astype(np.uint8)
    a = np.zeros((codes.size, 32), np.uint8)
    a[:, 0], a[:, 1] = 0x78, codes  # 256, code
    b = np.zeros((1, 32), np.uint8)
    b[0, :2] = 0x38  # 1.0
    value = nm.f32_from_e4m3(codes).astype(np.float64)
    unit = 2.0**-5
    expected = (256 + np.trunc(value / unit) * unit).astype(np.float32)
    d = tc.wgmma_e4m3(a, b, 0, backend=backend)[:, 0].view(np.float32)
    np.testing.assert_array_equal(d, expected)


@both_backends
def test_order_within_a_step_does_not_matter_but_the_steps_do(backend: str) -> None:
    rng = np.random.default_rng(2)
    p = rng.integers(0x20, 0x7F, (16, 64), dtype=np.uint8)
    v = rng.integers(0, 256, (64, 24), dtype=np.uint8)
    v[(v & 0x7F) == 0x7F] = 0
    order = np.concatenate([rng.permutation(32), 32 + rng.permutation(32)])
    d = tc.pv_chain(p, v, backend=backend)
    np.testing.assert_array_equal(tc.pv_chain(p[:, order], v[order], backend=backend), d)
    swapped = np.concatenate(
        [np.arange(16), np.arange(32, 48), np.arange(16, 32), np.arange(48, 64)]
    )
    assert (tc.pv_chain(p[:, swapped], v[swapped], backend=backend) != d).any()


@both_backends
def test_nan_in_one_row_of_p_and_one_dim_of_v_reaches_only_that_row_and_dim(backend: str) -> None:
    rng = np.random.default_rng(4)
    p = rng.integers(0, 0x7F, (70, 128), dtype=np.uint8)
    v = rng.integers(0, 0x7F, (128, 130), dtype=np.uint8)
    p[66, 70] = 0x7F
    v[3, 129] = 0xFF
    v[3, 128] = 0x7F
    p[:, 3] = 0  # zero probability does not protect from a NaN
    dirty = tc.pv_chain(p, v, backend=backend)
    v[3] = 0
    clean = tc.pv_chain(np.where(p == 0x7F, 0, p).astype(np.uint8), v, backend=backend)
    nan = np.zeros(dirty.shape, bool)
    nan[66] = nan[:, 128:] = True
    assert (dirty[nan] == NAN).all()
    np.testing.assert_array_equal(dirty[~nan], clean[~nan])


@both_backends
def test_nan_and_infinity_in_the_rope_part(backend: str) -> None:
    """inf * finite is infinite, inf * 0 and opposite infinities are NaN, only where they meet."""
    q8, k8 = np.full((3, 512), 0x38, np.uint8), np.full((4, 512), 0x38, np.uint8)
    q16, k16 = (np.full((n, 64), 0x3F80, np.uint16) for n in (3, 4))
    q16[1, 5] = 0xFF80  # -inf
    k16[1, 5] = 0x0000
    k16[2, 60] = 0x7F80  # +inf in another step
    k16[3, 0] = 0xFFC1  # NaN
    d = tc.qk_chain(q8, q16, k8, k16, backend=backend)
    finite, plus, minus = np.float32(576).view(np.uint32), 0x7F800000, 0xFF800000
    zeroed = np.float32(575).view(np.uint32)
    expected = [
        [finite, zeroed, plus, NAN],
        [minus, NAN, NAN, NAN],
        [finite, zeroed, plus, NAN],
    ]
    np.testing.assert_array_equal(d, np.array(expected, np.uint32))


@both_backends
def test_overflow_inside_a_chain_is_infinite_for_good(backend: str) -> None:
    """Products beyond float32 are finite inside a step; what leaves it from 2^128 on is not."""
    big = 0x7F00  # 2^127
    a, b = np.zeros((1, 64), np.uint16), np.zeros((1, 64), np.uint16)
    none8 = np.zeros((1, 32), np.uint8)
    a[0, :2], b[0, :2] = big, (0x4080, 0xC080)  # 4, -4: cancel within the step
    a[0, 2], b[0, 2] = big, 0x3F80
    d = tc.qk_chain(none8, a, none8, b, backend=backend)
    assert d[0, 0] == np.float32(2.0**127).view(np.uint32)
    b[0, 1] = 0
    a[0, 20], b[0, 20] = big, 0xC080  # the same -4 one step later comes too late
    d = tc.qk_chain(none8, a, none8, b, backend=backend)
    assert d[0, 0] == 0x7F800000


@both_backends
@pytest.mark.parametrize(
    ("addends", "expected"),
    [
        ((254, 1.5, 0.5), 1),  # 256: the 0.5 counts, so the unit is at most 2^-158 (floor <= -133)
        ((254, 1.5, 0.25, 0.25), 0),  # 255.5: 0.25 is cut, so it is at least that (floor >= -133)
        ((255, 0.5, 0.5), 1),
        ((255, 0.5, 0.25, 0.25), 0),
        ((256, -0.5), 0),
        ((256, -0.25), 1),
    ],
)
def test_floor_of_the_bf16_window(backend: str, addends: tuple[float, ...], expected: int) -> None:
    """Products below 2^-133 are cut at 2^-158; addends in units of 2^-157, results of 2^-149."""
    a, b = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    a[0, : len(addends)] = np.array(addends) * 2.0**-80
    b[0] = 2.0**-77
    bits = nm.bf16_from_f32(a)
    assert (nm.f32_from_bf16(bits) == a).all()
    d = tc.wgmma_bf16(bits, nm.bf16_from_f32(b), 0, backend=backend)
    assert d[0, 0] == expected


@both_backends
def test_accumulator_forms(backend: str) -> None:
    a = np.full((2, 32), 0x38, np.uint8)
    b = np.full((3, 32), 0x40, np.uint8)
    zero = tc.wgmma_e4m3(a, b, 0, backend=backend)
    assert (zero.view(np.float32) == 64).all()
    for c in (np.zeros((2, 3), np.uint32), np.full((2, 3), 0x80000000, np.uint32)):
        np.testing.assert_array_equal(tc.wgmma_e4m3(a, b, c, backend=backend), zero)
    c = np.full((2, 3), 1.5, np.float32)
    assert (tc.wgmma_e4m3(a, b, c, backend=backend).view(np.float32) == 65.5).all()
    assert (c == 1.5).all()  # the caller's accumulator is not changed
    storage = a.view(ml_dtypes.float8_e4m3fn), b.view(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(tc.wgmma_e4m3(*storage, 0, backend=backend), zero)


@both_backends
def test_batches_broadcast_and_views_are_read_in_place(backend: str) -> None:
    rng = np.random.default_rng(6)
    q8, k8 = random_codes(rng, (2, 1, 5, 64)), random_codes(rng, (3, 70, 64))
    q16, k16 = random_rope(rng, (2, 1, 5, 32)), random_rope(rng, (3, 70, 32))
    d = tc.qk_chain(q8, q16, k8, k16, backend=backend)
    assert d.shape == (2, 3, 5, 70)
    for i in range(2):
        for j in range(3):
            one = tc.qk_chain(q8[i, 0], q16[i, 0], k8[j], k16[j], backend=backend)
            np.testing.assert_array_equal(d[i, j], one)
    # Planes inside larger records, rows and columns with gaps, a transposed operand.
    wide8, wide16 = random_codes(rng, (70, 200)), random_rope(rng, (140, 99))
    k8, k16 = wide8[:, 3:67], wide16[::2, 1:33]
    q8, q16 = random_codes(rng, (64, 9)).T, random_rope(rng, (32, 9)).T
    d = tc.qk_chain(q8, q16, k8, k16, backend=backend)
    copies = [np.ascontiguousarray(x) for x in (q8, q16, k8, k16)]
    np.testing.assert_array_equal(d, tc.qk_chain(*copies, backend=backend))
    p, v = random_codes(rng, (5, 128))[:, ::2], random_codes(rng, (64, 300))
    for view in (v[:, 7:77], v[:, ::3], v[::-1, 5:60]):
        d = tc.pv_chain(p, view, backend=backend)
        np.testing.assert_array_equal(d, tc.pv_chain(p.copy(), view.copy(), backend=backend))
    odd = np.frombuffer(b"\0" + k16.tobytes(), np.uint8)[1:].view(np.uint16).reshape(70, 32)
    d = tc.qk_chain(*copies[:3], odd, backend=backend)
    np.testing.assert_array_equal(d, tc.qk_chain(*copies, backend=backend))


@both_backends
@pytest.mark.parametrize("shape", [(0, 64, 3), (5, 64, 0), (5, 0, 3), (0, 0, 0)])
def test_empty_operands(backend: str, shape: tuple[int, ...]) -> None:
    m, n, dims = shape
    p, v = np.zeros((2, m, n), np.uint8), np.zeros((n, dims), np.uint8)
    d = tc.pv_chain(p, v, backend=backend)
    assert d.shape == (2, m, dims) and not d.any()


# --- The two backends against each other --------------------------------------------------------


def random_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def random_rope(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return nm.bf16_from_f32(rng.standard_normal(shape).astype(np.float32))


def hostile_codes(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """e4m3 operands of one of the categories under which the rule was measured."""
    codes = random_codes(rng, shape)
    if kind == "sparse":
        codes[rng.random(shape) < 0.9] = 0
    elif kind == "subnormal":
        codes &= 0x87
    elif kind == "extremes":
        codes = rng.choice(np.array([0, 0x80, 1, 0x81, 8, 0x7E, 0xFE], np.uint8), shape)
    elif kind == "negative":
        codes |= 0x80
        codes[codes == 0xFF] = 0xFE
    elif kind == "cancel":  # neighbours are each other's negative
        codes[:, 1::2] = codes[:, ::2] ^ 0x80
    elif kind == "nan":
        codes[rng.random(shape) < 0.01] = rng.choice(np.array([0x7F, 0xFF], np.uint8))
    elif kind == "zero":
        codes &= 0x80
    return codes


def hostile_bf16(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """bf16 operands of one of the categories under which the rule was measured."""
    bits = random_rope(rng, shape)
    anything = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    if kind == "sparse":
        bits[rng.random(shape) < 0.9] = 0
    elif kind == "subnormal":
        bits = anything & np.uint16(0x807F)
    elif kind == "extremes":  # any finite bits
        bits = np.where((anything & 0x7F80) == 0x7F80, anything & 0xBFFF, anything)
    elif kind == "negative":
        bits |= np.uint16(0x8000)
    elif kind == "cancel":
        bits[:, 1::2] = bits[:, ::2] ^ np.uint16(0x8000)
    elif kind == "nan":
        special = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0, 0x8000], np.uint16)
        bits = np.where(rng.random(shape) < 0.05, rng.choice(special, shape), bits)
    elif kind == "zero":
        bits &= np.uint16(0x8000)
    elif kind == "tiny":  # products around the smallest subnormal, below the floor of Emax
        bits = (anything & np.uint16(0x807F)) | (
            rng.integers(48, 58, shape, dtype=np.uint16) << np.uint16(7)
        )
        bits[rng.random(shape) < 0.5] = 0
    elif kind == "huge":  # products around 2^128
        bits = (anything & np.uint16(0x807F)) | (
            rng.integers(184, 200, shape, dtype=np.uint16) << np.uint16(7)
        )
    return bits


def hostile_accumulator(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    anything = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    finite = np.where((anything & 0x7F800000) == 0x7F800000, anything & 0xBFFFFFFF, anything)
    if kind == "any":
        return anything
    if kind == "finite":
        return finite
    if kind == "subnormal":
        return anything & np.uint32(0x807FFFFF)
    if kind == "near":  # inside, just above and just below the window of ordinary products
        return (finite & np.uint32(0x807FFFFF)) | (
            rng.integers(105, 150, shape, dtype=np.uint32) << np.uint32(23)
        )
    if kind == "special":
        choice = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0, 0x80000000])
        return rng.choice(choice.astype(np.uint32), shape)
    if kind == "largest":
        return (finite & np.uint32(0x807FFFFF)) | np.uint32(0x7F000000)
    return np.zeros(shape, np.uint32)


KINDS = ("plain", "sparse", "subnormal", "extremes", "negative", "cancel", "nan", "zero")
ACCUMULATORS = ("any", "finite", "subnormal", "near", "special", "largest", "zero")
# Around the tile of 64, where rows and columns of a part are handled apart.
SIZES = st.sampled_from((1, 2, 17, 63, 64, 65, 130))
SEEDS = st.integers(0, 2**32 - 1)


@needs_compiled
@settings(max_examples=150)
@given(
    *(SEEDS, SIZES, SIZES, st.integers(1, 5)),
    *(st.sampled_from(KINDS), st.sampled_from(KINDS), st.sampled_from(ACCUMULATORS)),
)
def test_compiled_e4m3_equals_the_specification(
    seed: int, m: int, n: int, steps: int, a_kind: str, b_kind: str, c_kind: str
) -> None:
    rng = np.random.default_rng(seed)
    a = hostile_codes(rng, (m, 32 * steps), a_kind)
    b = hostile_codes(rng, (n, 32 * steps), b_kind)
    c = hostile_accumulator(rng, (m, n), c_kind)
    none = np.zeros((m, 0), np.uint16), np.zeros((n, 0), np.uint16)
    chain = [tc.qk_chain(a, none[0], b, none[1], c, backend=backend) for backend in tc.BACKENDS]
    np.testing.assert_array_equal(chain[1], chain[0])
    values = [tc.pv_chain(a, b.T, backend=backend) for backend in tc.BACKENDS]
    np.testing.assert_array_equal(values[1], values[0])


@needs_compiled
@settings(max_examples=150)
@given(
    *(SEEDS, SIZES, SIZES, st.integers(1, 4)),
    *(st.sampled_from((*KINDS, "tiny", "huge")), st.sampled_from((*KINDS, "tiny", "huge"))),
    st.sampled_from(ACCUMULATORS),
)
def test_compiled_bf16_equals_the_specification(
    seed: int, m: int, n: int, steps: int, a_kind: str, b_kind: str, c_kind: str
) -> None:
    rng = np.random.default_rng(seed)
    a = hostile_bf16(rng, (m, 16 * steps), a_kind)
    b = hostile_bf16(rng, (n, 16 * steps), b_kind)
    c = hostile_accumulator(rng, (m, n), c_kind)
    none = np.zeros((m, 0), np.uint8), np.zeros((n, 0), np.uint8)
    chain = [tc.qk_chain(none[0], a, none[1], b, c, backend=backend) for backend in tc.BACKENDS]
    np.testing.assert_array_equal(chain[1], chain[0])


@needs_compiled
@settings(max_examples=30)
@given(SEEDS, SIZES, SIZES, st.sampled_from(KINDS), st.integers(1, 4))
def test_mixed_chains_and_threads(seed: int, m: int, n: int, kind: str, num_threads: int) -> None:
    rng = np.random.default_rng(seed)
    args = (
        hostile_codes(rng, (m, 64), kind),
        hostile_bf16(rng, (m, 32), kind),
        hostile_codes(rng, (n, 64), kind),
        hostile_bf16(rng, (n, 32), kind),
    )
    expected = tc.qk_chain(*args, backend="numpy")
    actual = tc.qk_chain(*args, backend="compiled", num_threads=num_threads)
    np.testing.assert_array_equal(actual, expected)


def one_output(rule: tc.StepRule, a: np.ndarray, b: np.ndarray, c: int) -> int:
    """[T2] to [T6] for one output with Python integers, written apart from both backends."""
    mantissa, bias = (3, 7) if rule is tc.E4M3_RULE else (7, 127)

    def split(bits: int, mantissa: int, bias: int, sign_bit: int) -> tuple[int, int]:
        field = (bits & ((1 << sign_bit) - 1)) >> mantissa
        fraction = bits & ((1 << mantissa) - 1)
        value = fraction + (1 << mantissa) if field else fraction
        return (-value if bits >> sign_bit else value), max(field, 1) - bias

    sign_bit = 7 if rule is tc.E4M3_RULE else 15
    addends = []  # (integer, exponent of its unit, exponent that counts for Emax)
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        (p, i), (q, j) = split(x, mantissa, bias, sign_bit), split(y, mantissa, bias, sign_bit)
        addends.append((p * q, i + j - 2 * mantissa, i + j))
    value, exponent = split(c, 23, 127, 31)
    addends.append((value, exponent - 23, exponent))
    addends = [x for x in addends if x[0]]
    if not addends:
        return 0
    emax = max(max(x[2] for x in addends), rule.exponent_floor)
    unit = emax - rule.window_bits
    total = 0
    for value, exponent, _ in addends:
        shift = exponent - unit
        size = abs(value) << shift if shift >= 0 else abs(value) >> -shift
        total += size if value > 0 else -size
    if total == 0:
        return 0
    size = abs(total)
    drop = max(size.bit_length() - rule.result_bits, -149 - unit, 0)
    size >>= drop
    unit += drop
    if size == 0:  # as the hardware does: no -0 from a sum that vanishes
        return 0
    sign = 0x80000000 if total < 0 else 0
    if size.bit_length() + unit > 128:
        return sign | 0x7F800000
    while size.bit_length() < 24 and unit > -149:
        size, unit = size << 1, unit - 1
    while size.bit_length() > 24:
        size, unit = size >> 1, unit + 1
    field = unit + 150 if size >> 23 else 0
    return sign | field << 23 | (size & 0x7FFFFF)


@settings(max_examples=200)
@given(
    SEEDS, st.sampled_from((*KINDS, "tiny", "huge")), st.sampled_from(ACCUMULATORS), st.booleans()
)
@example(23, "tiny", "zero", False)  # a negative sum below the smallest subnormal
def test_specification_equals_plain_integers(seed: int, kind: str, c_kind: str, fp8: bool) -> None:
    rng = np.random.default_rng(seed)
    kind = "plain" if kind == "nan" else kind
    c_kind = "finite" if c_kind in ("any", "special") else c_kind
    rule, make, step = (
        (tc.E4M3_RULE, hostile_codes, tc.wgmma_e4m3)
        if fp8
        else (tc.BF16_RULE, hostile_bf16, tc.wgmma_bf16)
    )
    a, b = make(rng, (3, rule.step_k), kind), make(rng, (3, rule.step_k), kind)
    c = hostile_accumulator(rng, (3, 3), c_kind)
    d = step(a, b, c, backend="numpy")
    for i in range(3):
        for j in range(3):
            assert d[i, j] == one_output(rule, a[i], b[j], int(c[i, j]))


# --- Arguments -----------------------------------------------------------------------------------

Z8, Z16 = np.zeros((4, 32), np.uint8), np.zeros((4, 16), np.uint16)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: tc.wgmma_e4m3(Z8[:, :31], Z8, 0), "a: expected"),
        (lambda: tc.wgmma_e4m3(Z8.astype(np.int8), Z8, 0), "a: expected"),
        (lambda: tc.wgmma_e4m3(Z8, Z8[0], 0), "b: expected"),
        (lambda: tc.wgmma_e4m3(Z8, Z8, 1), "c: expected"),
        (lambda: tc.wgmma_e4m3(Z8, Z8, np.zeros((4, 4))), "c: expected"),
        (lambda: tc.wgmma_e4m3(Z8, Z8, np.zeros((4, 5), np.uint32)), "c: expected"),
        (lambda: tc.wgmma_bf16(Z16.astype(np.float16), Z16, 0), "a: expected"),
        (lambda: tc.wgmma_bf16(Z16, Z16, 0, backend="cuda"), "backend: expected"),
        (lambda: tc.wgmma_bf16(Z16, Z16, 0, num_threads=0), "num_threads: expected"),
        (lambda: tc.qk_chain(Z8[:, :16], Z16, Z8[:, :16], Z16), "q_codes: expected"),
        (lambda: tc.qk_chain(Z8, Z16, Z8[:, :16], Z16), "k_codes: expected"),
        (lambda: tc.qk_chain(Z8, Z16[:3], Z8, Z16), "q_rope: expected"),
        (lambda: tc.qk_chain(Z8, Z16, Z8, Z16[:3]), "k_rope: expected"),
        (lambda: tc.qk_chain(Z8, Z16[:, :8], Z8, Z16[:, :8]), "q_rope: expected"),
        (lambda: tc.pv_chain(Z8, Z8), "v_codes: expected"),
        (lambda: tc.pv_chain(Z8[:, :31], Z8), "p_codes: expected"),
        (lambda: tc.pv_chain(np.zeros((2, 4, 32), np.uint8), np.zeros((3, 32, 4), np.uint8)),
         "p_codes, v_codes: expected"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        call()


def test_the_numpy_path_serves_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tc, "_wgmma", None)
    assert not tc.compiled_available()
    assert (tc.wgmma_e4m3(Z8, Z8, 0) == 0).all()
    with pytest.raises(ArgumentError, match="not built"):
        tc.wgmma_e4m3(Z8, Z8, 0, backend="compiled")
