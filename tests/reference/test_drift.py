"""No drift: near-flat attention over values of mean 0.5 does not shrink with the context.

An e4m3 accumulator of 14 bits that holds the whole context loses 3 % at 8k tokens and 20 % at 32k
(always toward zero); here it holds one block. What remains is the same at every length: P's own
rounding, up to 8.5e-4 where the weights fill the top of e4m3's range below a maximum that is
exactly 448, and the truncation within a block, up to 1e-4.
"""

from __future__ import annotations

import numpy as np
import pytest

from snapmla_rt.reference.tensor_core import compiled_available
from tools.accuracy import Measured, flat_inputs

LIMIT = 1e-3  # mean signed relative error
SIZES = (1e-6, 1e-3, 1e-2, 0.1)  # of q: from flat to weights spread over a factor of two


def check(t: float, tokens: int, heads: int, block_n: int) -> None:
    figures = Measured(*flat_inputs(tokens, heads, t, seed=tokens), block_n=block_n).drift()
    assert abs(figures["signed"]) < LIMIT
    # and the tensor core adds little to what the rounding of P alone gives
    assert abs(figures["f32_signed"] - figures["floor_signed"]) < 1.5e-4


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("t", SIZES)
def test_8k_tokens_unsplit(t: float, block_n: int) -> None:
    check(t, 8192, 16 if compiled_available() else 2, block_n)


@pytest.mark.slow
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("t", SIZES)
@pytest.mark.parametrize(("tokens", "heads"), [(32768, 16), (131072, 4)])
def test_32k_and_128k_tokens_unsplit(t: float, tokens: int, heads: int, block_n: int) -> None:
    check(t, tokens, heads, block_n)


@pytest.mark.parametrize("block_n", [64, 128])
def test_one_value_everywhere_comes_back_at_any_length(block_n: int) -> None:
    """Every token 0.5 in all dimensions: the answer is 0.5 however many there are."""
    kv = np.full((16384, 576), 0.5, np.float32)
    kv[:, 512:] = 0.0
    q = np.full((1, 1, 576), 1e-6, np.float32)
    ends = [Measured(q, kv[:n], block_n=block_n).partial for n in (64, 1024, 16384)]
    for got in ends:
        # code and P are 448 = 7 * 64: their products and sums of a block are exact in 14 bits
        np.testing.assert_allclose(got, 0.5, rtol=300 * 2.0**-24)
