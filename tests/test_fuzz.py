"""The fuzz harness: its cases are what they say, it finds planted faults and shrinks them."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import fuzz_cases
from fuzz import fuzz, parallel_cases, serial_cases
from fuzz_cases import KERNELS, Case, hostile_rows, make_case
from fuzz_runner import Outputs, answer, differing_bytes, fails, shrink


class Faithful:
    """Gives the reference's answer, computed again from the inputs."""

    def run(self, case: Case) -> Outputs:
        again = Case(case.kernel, case.seed, case.inputs, case.options)
        return {name: array.copy() for name, array in answer(again).expected.items()}


class Faulty(Faithful):
    """Wrong in one bit wherever the input holds a value of magnitude in [3, 3.5)."""

    def run(self, case: Case) -> Outputs:
        outputs = super().run(case)
        name = {"quantize_q": "q", "append_kv": "tokens"}[case.kernel]
        wide = np.abs(case.inputs[name].astype(np.float32))
        if ((wide >= 3) & (wide < 3.5)).any():
            first = next(iter(outputs.values()))
            first.view(np.uint8).reshape(-1)[5] ^= 1
        return outputs


@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_depend_on_their_seed_alone(kernel: str) -> None:
    one, again, other = make_case(kernel, 5, 33), make_case(kernel, 5, 33), make_case(kernel, 6, 33)
    for name, array in one.inputs.items():
        assert array.tobytes() == again.inputs[name].tobytes()
    assert differing_bytes(one.expected, again.expected) == 0
    assert {k: v.tobytes() for k, v in one.inputs.items()} != {
        k: v.tobytes() for k, v in other.inputs.items()
    }


def test_rows_are_hostile() -> None:
    """What the issue asks for is really in the data: every code, NaN, -0, ties, both extremes."""
    x = hostile_rows(np.random.default_rng(0), 20_000, np.float32)
    bits = x.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    finite = (magnitude < 0x7F800000).all(axis=1)
    assert 0.02 < 1 - finite.mean() < 0.2
    zero_latent = (magnitude[:, :512] == 0).all(axis=1)
    assert (zero_latent & (magnitude[:, 512:] > 0).any(axis=1)).sum() > 100
    assert (bits[:, :512] == 0x80000000).any() and (magnitude == 1).any()
    assert magnitude[finite].max() > 0x7F000000  # beyond 2^127
    case = make_case("quantize_q", 3, 8192)
    codes = case.expected["q_nope"].view(np.uint8)
    assert np.unique(codes).size == 255  # all but 0xff: NaN is always 0x7f
    scale = case.expected["q_scale"].view(np.uint32)
    assert np.unique(scale >> 23).size > 100  # exponents of scales
    assert (scale == 0x0F800000).any()  # the floor, 2^-96


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_reference_agrees_with_itself(kernel: str) -> None:
    cases = serial_cases(kernel, 11, size=40)
    result = fuzz(kernel, cases, Faithful(), seed=11, tokens=200)
    assert (result.differing_bytes, result.failure) == (0, "") and result.tokens >= 200


@pytest.mark.parametrize("kernel", ["quantize_q", "append_kv"])
def test_a_planted_fault_is_found_and_shrunk(kernel: str) -> None:
    result = fuzz(kernel, serial_cases(kernel, 1, size=60), Faulty(), seed=1, tokens=5000)
    assert result.differing_bytes == 1
    assert f"{kernel} seed " in result.failure and "smallest" in result.failure
    case = next(c for c in serial_cases(kernel, 1, size=60) if fails(c, Faulty()))
    small = shrink(case, Faulty())
    assert small.num_tokens == 1
    name = "q" if kernel == "quantize_q" else "tokens"
    values = small.inputs[name].reshape(-1).astype(np.float32)
    assert np.count_nonzero(values) == 1 and 3 <= np.abs(values[values != 0])[0] < 3.5


def test_worker_processes_give_the_same_cases() -> None:
    cases = parallel_cases("fetch_dequant", 40, workers=1)
    try:
        for seed in (40, 41, 42):
            got, want = next(cases), make_case("fetch_dequant", seed)
            assert got.seed == seed and got.options == want.options
            for name, array in want.inputs.items():
                assert got.inputs[name].tobytes() == array.tobytes()
            assert differing_bytes(got.expected, want.expected) == 0
    finally:
        cases.close()  # type: ignore[attr-defined]


def test_half_way_points_are_half_way() -> None:
    middle = fuzz_cases._half_way()
    below = np.nextafter(middle, np.float32(0)).astype(ml_dtypes.float8_e4m3fn)
    above = np.nextafter(middle, np.float32(np.inf) * np.sign(middle))
    assert middle.size == 2 * 126
    assert (below != above.astype(ml_dtypes.float8_e4m3fn)).all()
