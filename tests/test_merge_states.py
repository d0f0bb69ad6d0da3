"""merge_states by the reference: float64 with derived bounds, neutral element, arguments."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from snapmla_rt import api
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.attention_fp64 import attention_fp64
from snapmla_rt.reference.merge_states import merge_states as reference
from snapmla_rt.reference.numerics import exp2_mufu

U24 = 2.0**-24  # unit roundoff of float32
EXP2_REL = 1.5e-7  # MUFU.EX2
LOG2_ABS = 2.0**-23  # log2_soft
BF16_REL = 2.0**-8  # unit roundoff of bf16
FLUSHED = 2.0**-126  # weights below this are 0
LN2 = float(np.log(2.0))
BF16 = ml_dtypes.bfloat16
NEUTRAL = (np.inf, -np.inf)


def states(
    seed: int, shape: tuple[int, int, int, int] = (2, 3, 4, 16), spread: float = 4.0, **kinds: Any
) -> Any:
    """(out_a, lse_a, out_b, lse_b) of random finite states."""
    rng = np.random.default_rng(seed)
    b, s, h, _ = shape
    outs = [rng.standard_normal(shape).astype(kinds.get(k, np.float32)) for k in ("a", "b")]
    lses = [(spread * rng.standard_normal((b, h, s))).astype(np.float32) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def per_row(x: NDArray[Any]) -> NDArray[Any]:
    return x.transpose(0, 2, 1)[..., None]


def exact(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, unit: float = 1.0) -> Any:
    """float64 (out, lse, bound of out before its own rounding, bound of lse); unit: nats of one
    unit of lse. Every operation contributes its own rounding, nothing is fitted:

    the exponent's argument is off by 2.6 u |d| (difference, product, constant), exp2 by EXP2_REL,
    together delta of a weight w; a normalised weight moves by a b delta, and total, rcp and the
    weight's product add 3 u; o adds a product and a sum. lse moves by b delta, the roundings of
    total and log2, and its own."""
    la, lb = (x.astype(np.float64) * unit for x in (lse_a, lse_b))
    top = np.maximum(la, lb)
    wa, wb = np.exp(la - top), np.exp(lb - top)
    total = wa + wb
    a, b = wa / total, wb / total
    delta = 2.6 * U24 * np.abs(la - lb) + EXP2_REL
    lse = top + np.log(total)
    lse_bound = np.minimum(a, b) * delta + U24 + LOG2_ABS * LN2 + 4 * U24 + U24 * np.abs(lse)
    oa, ob = out_a.astype(np.float64), out_b.astype(np.float64)
    a, b, delta = per_row(a), per_row(b), per_row(delta)
    size = np.abs(oa) + np.abs(ob)
    bound = (a * b * delta + FLUSHED) * size + 5.1 * U24 * (a * np.abs(oa) + b * np.abs(ob))
    return a * oa + b * ob, lse / unit, bound + 2.0**-148, lse_bound / unit


@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 10.0, 90.0, 1e4]),
    kind=st.sampled_from([np.float32, BF16]),
    base=st.sampled_from(["e", "2"]),
)
def test_within_the_derived_bound_of_float64(
    seed: int, spread: float, kind: Any, base: str
) -> None:
    given_: tuple[Any, Any, Any, Any] = states(seed, spread=spread, a=kind, b=kind)
    out, lse = reference(*given_, lse_base=base)
    want, want_lse, bound, lse_bound = exact(*given_, unit=1.0 if base == "e" else LN2)
    if kind is not np.float32:
        bound = bound + BF16_REL * (np.abs(want) + bound)
    assert out.dtype == kind and lse.dtype == np.float32
    assert (np.abs(out.astype(np.float64) - want) <= bound).all()
    assert (np.abs(lse - want_lse) <= lse_bound).all()


@given(seed=st.integers(0, 999), kinds=st.sampled_from([(np.float32, BF16), (BF16, BF16)]))
def test_the_sides_may_be_swapped(seed: int, kinds: Any) -> None:
    out_a, lse_a, out_b, lse_b = states(seed, a=kinds[0], b=kinds[1])
    lse_a[0, 0], lse_b[0, 1] = np.inf, -np.inf
    lse_a[1, 0, 0] = np.nan
    one, two = reference(out_a, lse_a, out_b, lse_b), reference(out_b, lse_b, out_a, lse_a)
    assert_same_bytes("out", one[0], two[0])
    assert_same_bytes("lse", one[1], two[1])


@pytest.mark.parametrize("empty", NEUTRAL)
@pytest.mark.parametrize("kind", [np.float32, BF16])
def test_an_empty_side_is_the_neutral_element(empty: float, kind: Any) -> None:
    """Every bit of the other side passes, whatever lies in the empty one, NaN too."""
    out, lse, junk, _ = states(3, a=kind, b=kind)
    out[0, 0, 0, :4] = [-0.0, np.inf, -np.inf, 0.0]
    lse[0, 0, 0] = -0.0
    junk[:] = np.nan
    nothing = np.full_like(lse, empty)
    for merged in (reference(out, lse, junk, nothing), reference(junk, nothing, out, lse)):
        assert_same_bytes("out", merged[0], out)
        assert_same_bytes("lse", merged[1], lse)


@pytest.mark.parametrize("empty_a", NEUTRAL)
@pytest.mark.parametrize("empty_b", NEUTRAL)
def test_nothing_and_nothing_is_nothing(empty_a: float, empty_b: float) -> None:
    out, lse, _, _ = states(4, a=BF16)
    out[:] = np.nan
    found = reference(out, np.full_like(lse, empty_a), out, np.full_like(lse, empty_b))
    assert (found[0].view(np.uint16) == 0).all() and np.isposinf(found[1]).all()


def test_nan_stays_in_its_row() -> None:
    out_a, lse_a, out_b, lse_b = states(5)
    want = reference(out_a, lse_a, out_b, lse_b)
    lse_a[1, 2, 0] = np.nan
    out_b[0, 1, 3, 5] = np.nan
    out, lse = reference(out_a, lse_a, out_b, lse_b)
    nan_row = np.isnan(out).all(axis=3)
    assert np.argwhere(nan_row).tolist() == [[1, 0, 2]] and np.isnan(lse[1, 2, 0])
    assert np.isnan(out[0, 1, 3, 5]) and np.isnan(out).sum() == 16 + 1
    assert np.isnan(lse).sum() == 1
    assert (out[~np.isnan(out)] == want[0][~np.isnan(out)]).all()


def test_far_apart_and_extreme() -> None:
    """Weights that vanish leave the louder side bit for bit; large values do not overflow."""
    out, lse, other, _ = states(6)
    found = reference(out, lse, other, lse - np.float32(200))
    assert_same_bytes("out", found[0], out + np.float32(0))
    assert_same_bytes("lse", found[1], lse)
    far = np.full_like(lse, -3e38), np.full_like(lse, 3e38)
    assert_same_bytes("out", reference(other, far[0], out, far[1])[0], out)
    largest = np.full_like(out, np.finfo(np.float32).max)
    assert np.isfinite(reference(largest, lse, largest, lse)[0]).all()
    top = np.full(out.shape, ml_dtypes.finfo(BF16).max, BF16)
    assert (reference(top, lse, top, lse)[0] == top).all()
    assert exp2_mufu(np.zeros(1, np.float32))[0] == 1  # what "unchanged" rests on


def test_two_shards_of_attention_give_the_whole() -> None:
    """Z = [2, 8] and any other split: the report that merged natural logarithms as base 2."""
    rng = np.random.default_rng(0)
    q, kv = rng.standard_normal((1, 1, 4, 576)), rng.standard_normal((10, 576))
    whole = attention_fp64(q, [kv], 0.1)
    for cut in (0, 2, 5, 10):
        parts = [attention_fp64(q, [part], 0.1) for part in (kv[:cut], kv[cut:])]
        narrow = [x.astype(np.float32) for part in parts for x in part]
        out, lse = reference(*narrow)
        _, _, bound, lse_bound = (
            exact(*narrow) if 0 < cut < 10 else (0, 0, np.zeros_like(out), np.zeros_like(lse))
        )
        slack = U24 * (np.abs(whole[0]) + 1)  # the shards were rounded to float32
        assert (np.abs(out - whole[0]) <= bound + slack).all(), cut
        assert (np.abs(lse - whole[1]) <= lse_bound + 4 * U24 * np.abs(whole[1])).all(), cut
    ln = [np.float32(np.log(z)).reshape(1, 1, 1) for z in (2.0, 8.0)]
    ones = np.ones((1, 1, 1, 8), np.float32)
    out, lse = reference(ones, ln[0], 2 * ones, ln[1])
    assert abs(float(out[0, 0, 0, 0]) - 1.8) < 1e-6 and abs(float(lse[0, 0, 0]) - np.log(10)) < 1e-6


# --- The call ------------------------------------------------------------------------------------


def test_the_call_equals_the_reference() -> None:
    for kinds in ((BF16, BF16), (np.float32, np.float32), (BF16, np.float32)):
        given_ = states(7, (2, 3, 5, 512), a=kinds[0], b=kinds[1])
        want = reference(*given_)
        for found in (api.merge_states(*given_), api.merge_states(*given_, backend="reference")):
            assert_same_bytes("out", found[0], want[0])
            assert_same_bytes("lse", found[1], want[1])
    bits = tuple(x.view(np.uint16) if x.dtype == BF16 else x for x in given_)
    assert_same_bytes("out", api.merge_states(*bits)[0], want[0])
    narrow = api.merge_states(*given_, out_dtype="bfloat16")[0]
    assert_same_bytes("out", narrow, reference(*given_, out_dtype=BF16)[0])


def test_results_can_be_given_and_overwrite_an_input() -> None:
    given_ = states(8)
    want = reference(*given_)
    out, lse = np.empty_like(want[0]), np.empty_like(want[1])
    found = api.merge_states(*given_, out=out, lse=lse)
    assert found[0] is out and found[1] is lse
    transposed = np.empty((2, 3, 4), np.float32).transpose(0, 2, 1)
    api.merge_states(*given_, lse=transposed)
    copied = [x.copy() for x in given_]
    api.merge_states(*copied, out=copied[0], lse=copied[1])
    for one in ((out, lse), (want[0], transposed.copy()), (copied[0], copied[1])):
        assert_same_bytes("out", one[0], want[0])
        assert_same_bytes("lse", np.ascontiguousarray(one[1]), want[1])


def test_without_a_batch_dimension() -> None:
    """[n, h, d] and [h, n], as engines keep decode results; lse as FlashMLA's sparse decode gives
    it, a transposed view."""
    out_a, lse_a, out_b, lse_b = states(9, (1, 7, 3, 24))
    want = reference(out_a, lse_a, out_b, lse_b)
    view_b = np.ascontiguousarray(lse_b[0].T).T
    out, lse = api.merge_states(out_a[0], lse_a[0], out_b[0], view_b)
    assert_same_bytes("out", out, want[0][0])
    assert_same_bytes("lse", lse, want[1][0])


def test_empty_arrays() -> None:
    for shape in ((0, 1, 4, 16), (2, 0, 4, 16), (2, 1, 0, 16)):
        out, lse = api.merge_states(*states(1, shape))
        assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "2-D": ("out_a", {"out_a": np.zeros((3, 16), np.float32)}),
    "width": ("out_a", {"out_a": np.zeros((2, 3, 4, 12), np.float32)}),
    "no width": ("out_a", {"out_a": np.zeros((2, 3, 4, 0), np.float32)}),
    "dtype": ("out_a", {"out_a": np.zeros((2, 3, 4, 16), np.float64)}),
    "other shape": ("out_b", {"out_b": np.zeros((2, 3, 4, 8), np.float32)}),
    "lse shape": ("lse_a", {"lse_a": np.zeros((2, 3, 4), np.float32)}),
    "lse dtype": ("lse_b", {"lse_b": np.zeros((2, 4, 3), np.float64)}),
    "out shape": ("out", {"out": np.zeros((2, 4, 3, 16), np.float32)}),
    "out dtype": ("out", {"out": np.zeros((2, 3, 4, 16), np.float16)}),
    "out type": ("out", {"out": np.zeros((2, 3, 4, 16), BF16), "out_dtype": "float32"}),
    "out read-only": ("out", {"out": np.broadcast_to(np.float32(0), (2, 3, 4, 16))}),
    "lse result": ("lse", {"lse": np.zeros((2, 3, 4), np.float32)}),
    "out_dtype": ("out_dtype", {"out_dtype": "float16"}),
    "base": ("lse_base", {"lse_base": "10"}),
    "backend": ("backend", {"backend": "gpu"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_every_wrong_argument_is_named(what: str) -> None:
    name, changes = WRONG[what]
    names = ("out_a", "lse_a", "out_b", "lse_b")
    given_: dict[str, Any] = dict(zip(names, states(1), strict=True)) | changes
    with pytest.raises(ArgumentError) as caught:
        api.merge_states(**given_)
    assert caught.value.name == name, str(caught.value)


def test_the_reference_checks_too() -> None:
    out, lse, _, _ = states(1)
    for given_ in (
        (out[0], lse, out, lse),
        (out, lse[0], out, lse),
        (out, lse, out[..., :8], lse),
        (out.astype(np.float16), lse, out, lse),
    ):
        with pytest.raises(ArgumentError):
            reference(*given_)


def test_a_nan_that_passes_keeps_its_bits() -> None:
    """[M2] unchanged: a bf16 NaN that passes into float32 is its own bits, moved up."""
    bits = np.array([0x7FC0, 0xFFC1, 0x7F81, 0x3F80, 0x8000, 0x0001, 0x7F80, 0xFF80], np.uint16)
    out_a = bits.view(ml_dtypes.bfloat16).reshape(1, 1, 1, 8)
    out_b = np.zeros((1, 1, 1, 8), np.float32)
    full, none = np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), -np.inf, np.float32)
    out, _ = reference(out_a, full, out_b, none)
    assert out.view(np.uint32).tolist() == [[[(bits.astype(np.uint32) << 16).tolist()]]]
