"""mla_combine on a GPU equals the reference in every byte, whatever the mix of split counts and the
grid; requests with at most one split are left alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from compare import difference_report
from numpy.typing import NDArray

from snapmla_rt.array import to_device, to_host
from snapmla_rt.decode_select import combine_ctas
from snapmla_rt.driver.device import device_info
from snapmla_rt.kernels import kernel
from snapmla_rt.reference.mla_combine import mla_combine as reference

F32 = np.float32
INF = F32(np.inf)
# Around every change of the kernel's path; none and one; a GPU's number of SMs; several chunks.
COUNTS = (
    *(1, 2, 3, 0, 4, 5, 8, 9, 16, 17, 1, 31, 32, 33, 34, 35, 66, 68, 69, 0, 128),
    *(131, 132, 133, 136, 137, 300, 272, 273, 2),
)
GRIDS = (1, 3, 37, 396, 2000)


@dataclass(frozen=True)
class Partials:
    """Splits of a batch; `fill`: what out and lse hold before."""

    heads: int
    seq_len_q: int
    o: NDArray[np.float32]
    lse2: NDArray[np.float32]
    num_splits: NDArray[np.int32]

    @property
    def batch(self) -> int:
        return len(self.num_splits) - 1

    @property
    def rows(self) -> int:
        return self.heads * self.seq_len_q

    def fill(self) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        out = np.full((self.batch, self.rows, 512), 0x1234, np.uint16)
        return out, np.full((self.batch, self.heads, self.seq_len_q), 7, F32)

    def merged(self) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        out, lse = self.fill()
        for i in range(self.batch):
            mine = slice(self.num_splits[i], self.num_splits[i + 1])
            if mine.stop - mine.start > 1:
                out[i], rows = reference(self.o[mine], self.lse2[mine])
                lse[i] = rows.reshape(self.seq_len_q, self.heads).T
        return out, lse


def partials(seed: int, counts: tuple[int, ...], heads: int, seq_len_q: int) -> Partials:
    """Rows far apart and near, empty splits and rows, NaN splits beside -inf, values that merge to
    more than bf16 holds."""
    rng = np.random.default_rng(seed)
    num_splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    total, rows = int(num_splits[-1]), heads * seq_len_q
    o = rng.standard_normal((total, rows, 512)).astype(F32)
    o *= np.exp2(rng.integers(-3, 4, (total, rows, 1))).astype(F32)
    lse2 = (10 * rng.standard_normal((total, rows))).astype(F32)
    pick = rng.random((total, rows))
    o[pick < 0.1], lse2[pick < 0.1] = 0, -INF
    lse2[(pick > 0.1) & (pick < 0.103)] = np.nan
    o[(pick > 0.2) & (pick < 0.23)] = F32(3.39e38)
    for i, (begin, end) in enumerate(pairwise(num_splits)):
        if i % 4 == 3:
            lse2[begin:end] = 1.0  # equal weights, whose sum may pass 1
        if end > begin and i % 3 == 0:
            lse2[begin:end, i % rows] = -INF
        if end > begin and i % 5 == 1:
            lse2[begin:end, i % rows] = -INF
            lse2[(begin + end) // 2, i % rows] = np.nan
    return Partials(heads, seq_len_q, o, lse2, num_splits)


def check(given: Partials, grids: tuple[int, ...], pdl: bool = False) -> None:
    want_out, want_lse = given.merged()
    o, lse2, num_splits = (to_device(x).view() for x in (given.o, given.lse2, given.num_splits))
    addresses = (o.ptr, lse2.ptr, num_splits.ptr)
    shape = (given.batch, given.rows, given.heads, given.seq_len_q)
    combine = kernel("mla_combine", "", 0)
    for grid in grids:
        out, lse = (to_device(x).view() for x in given.fill())
        for _ in range(1 + pdl):
            combine.launch((grid, 1, 1), 0, *addresses, out.ptr, lse.ptr, *shape, pdl=pdl)
        for name, got, want in (("out", out, want_out), ("lse", lse, want_lse)):
            report = difference_report(name, to_host(got).view(want.dtype), want)
            assert report is None, f"grid {grid}: {report}"


@pytest.mark.parametrize(("heads", "seq_len_q"), [(1, 1), (3, 2), (16, 1)])
def test_every_byte_at_mixed_counts(heads: int, seq_len_q: int) -> None:
    check(partials(heads, COUNTS, heads, seq_len_q), GRIDS)


@pytest.mark.parametrize(
    "counts",
    [
        tuple(1 + i % 4 for i in range(300)),  # more requests than are looked at together
        (2,) * 131 + (0, 1) * 64 + (9,),
        (1,) * 5,
        (0,) * 200 + (2,),
    ],
    ids=["300 requests", "last of many", "nothing to merge", "one of many"],
)
def test_many_requests(counts: tuple[int, ...]) -> None:
    check(partials(7, counts, 5, 1), GRIDS)


@pytest.mark.parametrize("splits", [2, 9, 66, 132])
@pytest.mark.parametrize("heads", [16, 64])
def test_one_request_at_the_grid_that_serves(heads: int, splits: int) -> None:
    """Launched twice as a dependent, as behind mla_decode."""
    grid = combine_ctas(device_info(0).num_sms, 1, heads)
    check(partials(splits, (splits,), heads, 1), (grid,), pdl=True)
