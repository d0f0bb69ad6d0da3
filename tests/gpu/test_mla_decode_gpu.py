"""mla_decode on a GPU equals the reference in every byte of out and lse.

Expected results come from worker processes (decode_cases.solved), since the reference takes a good
part of a second a case.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_cases import (
    EDGES,
    HEADS,
    LAYOUTS,
    PATTERNS,
    PLAN_LENGTHS,
    SOFTMAX_SCALE,
    DecodeCase,
    DecodeSpec,
    build,
    draw,
    planes_of,
    solve,
    solved,
    worker_pool,
)
from decode_gpu import OnGpu, put, report, run

from snapmla_rt.config import RECORD_BYTES
from snapmla_rt.decode_select import VARIANTS
from snapmla_rt.driver import memory
from snapmla_rt.tensor import TensorView

BLOCKS = tuple(VARIANTS)  # block_n that a kernel has
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with worker_pool() as workers:
        yield workers


def check_all(pool: ProcessPoolExecutor, specs: list[DecodeSpec]) -> None:
    """Every case has the reference's bytes; the first few that do not are shown."""
    wrong = []
    for one in solved(pool, specs):
        text = report(run(one.case()), (one.out, one.lse))
        if text:
            wrong.append(f"{one.spec}\n{text}")
    assert not wrong, f"{len(wrong)} of {len(specs)} cases differ\n" + "\n\n".join(wrong[:5])


# --- Bytes ---------------------------------------------------------------------------------------

MODES: tuple[dict[str, Any], ...] = (
    {},
    *({"num_splits": n} for n in range(1, 9)),
    {"batch_invariant": 128},
)


def grid_specs(block_n: int = 64) -> list[DecodeSpec]:
    """All of heads x seq_len_q x (no cuts, 1..8 splits, cuts at fixed tokens); edge lengths and
    layouts take turns, so that each meets every kind of cut and every seq_len_q."""
    specs = []
    for i, heads in enumerate(HEADS):
        for j, seq_len_q in enumerate((1, 2, 4)):
            for k, mode in enumerate(MODES):
                turn = i + j + k
                lengths = EDGES[turn % 3 :: 3]
                if heads * seq_len_q >= 256:
                    lengths = lengths[turn % 2 :: 2]  # the reference's cost is rows x tokens
                specs.append(
                    DecodeSpec(
                        seed=1000 * i + 10 * j + k,
                        num_heads_q=heads,
                        seq_len_q=seq_len_q,
                        lengths=lengths,
                        pattern="loud_tokens",
                        magnitude=(1.0, 10.0)[turn % 2],
                        layout=LAYOUTS[(i + k) % 3],
                        causal=turn % 4 != 3,
                        block_n=block_n,
                        **mode,
                    )
                )
    return specs


@pytest.mark.parametrize("block_n", VARIANTS)
def test_fixed_grid(pool: ProcessPoolExecutor, block_n: int) -> None:
    check_all(pool, grid_specs(block_n))


def test_drawn_cases(pool: ProcessPoolExecutor) -> None:
    """The same draw as tools/fuzz_decode.py, the first seeds of it."""
    check_all(pool, [draw(seed, tuple(VARIANTS)) for seed in range(160)])


MAGNITUDE_ENDS = ((1.0, 1.0), (10.0, 10.0), (3e38, 1.0), (1e-45, 3e38), (3e38, 3e38), (1e30, 1e-38))


def test_hostile_patterns(pool: ProcessPoolExecutor) -> None:
    """Every pattern of data at both ends of float32, with the softmax scales of real models and
    the ends of what is accepted."""
    specs = []
    for i, pattern in enumerate(PATTERNS):
        for j, (magnitude, query) in enumerate(MAGNITUDE_ENDS):
            specs.append(
                DecodeSpec(
                    seed=77 * i + j,
                    num_heads_q=(5, 16, 33, 64)[(i + j) % 4],
                    seq_len_q=1 + (i + j) % 2,
                    lengths=(200, 64, 129, 3),
                    pattern=pattern,
                    magnitude=magnitude,
                    query_magnitude=query,
                    layout=LAYOUTS[j % 3],
                    softmax_scale=(SOFTMAX_SCALE, 1.0, 1e-38, 1e30)[j % 4],
                    num_splits=(None, 2, 1)[i % 3],
                    block_n=BLOCKS[(i + j) % len(BLOCKS)],
                )
            )
    check_all(pool, specs)


def test_long_requests(pool: ProcessPoolExecutor) -> None:
    """Beyond the ring of stages and the page ids a warp holds: sinks, cliffs and rising logits."""
    specs = [
        DecodeSpec(
            seed=i,
            num_heads_q=heads,
            seq_len_q=1,
            lengths=lengths,
            pattern=pattern,
            num_splits=splits,
            block_n=block_n,
        )
        for block_n in BLOCKS
        for i, (heads, lengths, pattern, splits) in enumerate(
            (
                (16, (9000,), "attention_sink", None),
                (16, (9000,), "attention_sink", 1),
                (32, (6001, 4097), "rising", 1),
                (64, (5000,), "cliff", 3),
                (8, (20000,), "loud_tokens", None),
                (3, (30001,), "falling", 1),
            )
        )
    ]
    check_all(pool, specs)


def test_many_query_rows(pool: ProcessPoolExecutor) -> None:
    """More row tiles than SMs: every part then holds everything, and the grid is large."""
    rows = DecodeSpec(1, 16, 1024, (256,), pattern="loud_tokens")
    more = DecodeSpec(2, 128, 200, (130, 64), pattern="loud_tokens")
    odd = DecodeSpec(3, 63, 31, (500, 12), pattern="loud_tokens", num_splits=2)
    check_all(pool, [rows, more, odd])


# --- The same bytes whatever does not matter -----------------------------------------------------

PLAIN = DecodeSpec(11, 24, 2, (700, 65, 0, 1, 300), pattern="loud_tokens")


def test_two_runs_give_the_same_bytes() -> None:
    for spec in (PLAIN, replace(PLAIN, num_heads_q=128, pattern="wide"), draw(5), draw(6)):
        on_gpu = OnGpu(build(spec))
        first = on_gpu.decode()
        for _ in range(3):
            assert report(on_gpu.decode(), first) is None


def moved(case: DecodeCase, order: np.ndarray, num_blocks: int) -> DecodeCase:
    """The case with block i of its cache at order[i] of a cache of num_blocks, the rest NaN."""
    buffers = tuple(
        np.full(num_blocks * (b.size // len(order)), 0xFF, np.uint8) for b in case.buffers
    )
    for old, new in zip(case.buffers, buffers, strict=True):
        new.reshape(num_blocks, -1)[order] = old.reshape(len(order), -1)
    used = np.arange(case.block_table.shape[1]) * 64 < case.cache_seqlens[:, None]
    table = case.block_table.copy()
    table[used] = order[table[used]]
    paged = planes_of(buffers, case.spec.layout)
    return replace(case, buffers=buffers, paged=paged, block_table=table)


@pytest.mark.parametrize("mode", [{}, {"num_splits": 3}, {"batch_invariant": 128}])
@pytest.mark.parametrize("num_sms", [1, 3, 132])
def test_a_plan_serves_other_lengths_of_its_blocks(mode: dict[str, Any], num_sms: int) -> None:
    """Within a block the plan of a step serves the next steps too: lengths are those of the call,
    for the first request of a part (few SMs: one of many) as for the others."""
    spec = replace(PLAIN, num_heads_q=3, lengths=(700, 65, 0, 1, 300, 128), num_sms=num_sms, **mode)
    want = run(build(spec))
    for other in PLAN_LENGTHS[1:]:
        got = run(build(replace(spec, plan_lengths=other)))
        assert report(got, want) is None, other


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_blocks_lie_does_not_matter(layout: str) -> None:
    case = build(replace(PLAIN, layout=layout))
    want = run(case)
    count = case.paged[0].shape[0]
    rng = np.random.default_rng(0)
    orders = {
        "reversed": np.arange(count)[::-1].copy(),
        "shuffled": rng.permutation(count),
        "interleaved": np.argsort(np.arange(count) % 2, kind="stable"),
        "with gaps": np.arange(count) * 3 + 2,
    }
    for name, order in orders.items():
        text = report(run(moved(case, order, int(order.max()) + 2)), want)
        assert text is None, f"{name}\n{text}"


@pytest.mark.parametrize("batch_invariant", [128, True])
def test_batch_invariant_rows(batch_invariant: int | bool) -> None:
    """A request alone, in any batch, beside padding, for any number of SMs and with a wider table:
    the same bytes."""
    spec = replace(
        PLAIN, lengths=(700, 4100, 0, 1, 300, 2048, 129), batch_invariant=int(batch_invariant)
    )
    if batch_invariant is True:
        spec = replace(spec, batch_invariant=2048)
    case = build(spec)
    whole = OnGpu(case)
    want = whole.decode()
    for num_sms in (1, 2, 7, 64, 131, 132, 300):
        assert report(whole.decode(whole.plan(num_sms=num_sms)), want) is None, num_sms
    order = np.array([4, 0, 6, 2, 1])
    for picked in ([i] for i in range(len(spec.lengths))), (order,):
        for index in picked:
            part = requests(case, np.asarray(index), padding=3)
            got = run(part)
            count = len(np.atleast_1d(index))
            text = report((got[0][:count], got[1][:count]), (want[0][index], want[1][index]))
            assert text is None, f"requests {index}\n{text}"
            assert (got[0][count:] == 0).all() and np.isposinf(got[1][count:]).all()


def requests(case: DecodeCase, index: np.ndarray, padding: int) -> DecodeCase:
    """Some requests of a case and `padding` empty ones, whose table entries are absurd."""
    index = np.atleast_1d(index)
    lengths = np.concatenate([case.cache_seqlens[index], np.zeros(padding, np.int32)])
    table = case.block_table[index]
    table = np.concatenate([table, np.full((len(index), 5), 2**31 - 1, np.int32)], axis=1)
    absurd = np.full((padding, table.shape[1]), -7, np.int32)
    query = tuple(
        np.concatenate([part[index], np.full((padding, *part.shape[1:]), 0x7F, part.dtype)])
        for part in (q.view(np.dtype(f"u{q.itemsize}")) for q in case.query)
    )
    query = tuple(q.view(old.dtype) for q, old in zip(query, case.query, strict=True))
    spec = replace(case.spec, lengths=tuple(int(n) for n in lengths))
    return replace(
        case,
        spec=spec,
        query=(query[0], query[1], query[2]),
        block_table=np.concatenate([table, absurd]),
        cache_seqlens=lengths.astype(np.int32),
    )


def test_number_of_sms_and_splits_change_only_the_order() -> None:
    """Other cuts round differently, but never by more than the partial results' own rounding: the
    softmax of the splits is the softmax of the whole."""
    on_gpu = OnGpu(build(replace(PLAIN, lengths=(3000, 1000))))
    want = on_gpu.decode(on_gpu.plan(num_splits=1))
    exact = _values(want[0])
    for num_splits in range(2, 9):
        got = on_gpu.decode(on_gpu.plan(num_splits=num_splits))
        error = np.linalg.norm(_values(got[0]) - exact) / np.linalg.norm(exact)
        assert error < 2.0**-7, (num_splits, error)  # a bf16 step; P's blocks are the same
        assert np.abs(got[1] - want[1]).max() < 1e-5


def _values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# --- Batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 132, 133, 1000])
@pytest.mark.parametrize("mode", [{}, {"num_splits": 3}, {"batch_invariant": 128}])
def test_all_lengths_zero(batch: int, mode: dict[str, Any]) -> None:
    """Metadata is valid, nothing is read, out is 0 and lse +inf."""
    on_gpu = OnGpu(build(DecodeSpec(0, 9, 2, (0,) * batch, **mode)))
    out, lse = on_gpu.decode()
    assert (out == 0).all() and np.isposinf(lse).all()


@pytest.mark.parametrize("batch", [65535, 65536])
def test_huge_batches_are_written_whole(batch: int) -> None:
    """Every row of a batch beyond the limit of a grid's y and z, one row of which has tokens."""
    case = build(DecodeSpec(0, 1, 1, (70,)))
    padded = requests(case, np.array([0]), padding=batch - 1)
    out, lse = run(padded)
    want = case.expected()
    assert (out[0] == want[0].view(np.uint16)[0]).all() and (lse[0] == want[1][0]).all()
    assert (out[1:] == 0).all() and np.isposinf(lse[1:]).all()


def test_a_thousand_requests(pool: ProcessPoolExecutor) -> None:
    rng = np.random.default_rng(4)
    lengths = tuple(int(n) for n in rng.integers(0, 70, 1000))
    check_all(
        pool,
        [
            DecodeSpec(4, 8, 1, lengths, pattern="loud_tokens"),
            DecodeSpec(5, 2, 2, lengths, pattern="loud_tokens", num_splits=2, layout="record"),
        ],
    )


def test_padding_with_one_token_of_block_zero() -> None:
    """Engines pad with length 1 and block 0 as well: their rows are right, the others unchanged."""
    case = build(replace(PLAIN, lengths=(300, 65), seq_len_q=1))
    padded = requests(case, np.array([0, 1]), padding=6)
    padded.cache_seqlens[2:] = 1
    padded.block_table[2:, 0] = 0
    padded = replace(padded, spec=replace(padded.spec, lengths=tuple(padded.cache_seqlens)))
    want = padded.expected()
    assert report(run(padded), (want[0].view(np.uint16), want[1])) is None


# --- Large caches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "step"), [("separate", 32768), ("record", RECORD_BYTES), ("strided", 32768 + 4096)]
)
def test_offsets_beyond_32_bits(layout: str, step: int) -> None:
    """Blocks on both sides of 2^31 and 2^32 bytes into the latent plane, the rest NaN."""
    spec = replace(PLAIN, layout=layout, lengths=(64 * 12, 100))
    case = build(spec)
    want = run(case)
    count = case.paged[0].shape[0]
    order = np.arange(count)
    around = [2**31 // step, 2**32 // step]
    order[:8] = [at + i for at in around for i in (-1, 0, 1, 2)]
    order[8:] += 1000
    total = around[1] + 40
    on_gpu = OnGpu(case)
    sizes = [b.size // count for b in case.buffers]
    need = sum(sizes) * total
    from snapmla_rt.driver.device import device_info

    if device_info(0).total_bytes < 2 * need:
        pytest.skip(f"needs {need >> 30} GiB of GPU memory")
    from decode_gpu import filled, planes_on_gpu

    large = [filled((size * total,), "uint8", 0xFF) for size in sizes]
    for source, target, size in zip(on_gpu.buffers, large, sizes, strict=True):
        for old, new in enumerate(order):
            memory.copy_on_device(target.ptr + int(new) * size, source.ptr + old * size, size, 0, 0)
    on_gpu.buffers, on_gpu.paged = large, planes_on_gpu(large, layout)
    used = np.arange(case.block_table.shape[1]) * 64 < case.cache_seqlens[:, None]
    table = case.block_table.copy()
    table[used] = order[table[used]]
    on_gpu.block_table = put(table)
    assert report(on_gpu.decode(), want) is None


def test_a_cache_packed_with_other_layers() -> None:
    """A block stride of a megabyte, as where all layers of a block lie together: block 2,143 is
    beyond 2^31 bytes."""
    case = build(replace(PLAIN, layout="record", lengths=(64 * 6,)))
    want = run(case)
    step, count = 1_040_000, case.paged[0].shape[0]
    order = np.array([2143 - i for i in range(count)])
    from decode_gpu import filled

    on_gpu = OnGpu(case)
    large = filled((step * 2144,), "uint8", 0xFF)
    for old, new in enumerate(order):
        at = large.ptr + int(new) * step
        memory.copy_on_device(at, on_gpu.buffers[0].ptr + old * RECORD_BYTES, RECORD_BYTES, 0, 0)
    on_gpu.paged = tuple(
        TensorView(
            large.ptr + (plane.ptr - on_gpu.buffers[0].ptr),
            (2144, *plane.shape[1:]),
            (step, *plane.strides[1:]),
            plane.dtype,
            "cuda",
            0,
            owner=large.owner,
        )
        for plane in on_gpu.paged
    )
    used = np.arange(case.block_table.shape[1]) * 64 < case.cache_seqlens[:, None]
    table = case.block_table.copy()
    table[used] = order[table[used]]
    on_gpu.block_table = put(table)
    assert report(on_gpu.decode(), want) is None


# --- NaN -----------------------------------------------------------------------------------------


def test_nan_reaches_exactly_the_rows_that_see_it() -> None:
    """A NaN token makes the rows that see it NaN, in out and lse; a NaN query its own row."""
    spec = replace(PLAIN, lengths=(130, 200), seq_len_q=4, num_heads_q=3)
    case = build(spec)
    clean = run(case)
    # Token 128 of request 0 is seen by the queries 2 and 3 of 4.
    block, offset = case.block_table[0, 2], 0
    for plane, value in zip(case.paged, (0x7F, 0x7FC00000, 0x7FFF), strict=True):
        plane.view(np.dtype(f"u{plane.dtype.itemsize}"))[block, offset] = value
    case.query[2].view(np.uint32)[1, 1, 2] = 0x7FC00000
    out, lse = run(case)
    values = _values(out)
    dead = np.zeros((2, 4, 3), bool)
    dead[0, 2:], dead[1, 1, 2] = True, True
    assert np.isnan(values[dead]).all() and np.isnan(lse.transpose(0, 2, 1)[dead]).all()
    assert (out[~dead] == clean[0][~dead]).all()
    kept = lse.transpose(0, 2, 1)[~dead], clean[1].transpose(0, 2, 1)[~dead]
    assert (kept[0].view(np.uint32) == kept[1].view(np.uint32)).all()


# --- Against float64 -----------------------------------------------------------------------------


def test_lse_is_a_natural_logarithm() -> None:
    """lse against float64 on what the cache and the queries stand for. A log-sum-exp is off by at
    most what its worst logit is off: in each of the 16 e4m3 steps, 33 addends lose less than 2^-13
    of the step's largest."""
    from snapmla_rt.reference import attention_fp64 as fp64

    spec = DecodeSpec(3, 16, 1, (1000, 64, 7))
    case = build(spec)
    _, lse = run(case)
    q = fp64.dequantise(case.query[0], case.query[2], case.query[1])
    for req, length in enumerate(spec.lengths):
        tokens = np.arange(length)
        slots = case.block_table[req, tokens // 64].astype(np.int64) * 64 + tokens % 64
        kv = fp64.dequantise_cache(*case.paged, slots)
        scores = spec.softmax_scale * q[req, 0] @ kv.T
        top = scores.max(axis=1, keepdims=True)
        want = np.log(np.exp(scores - top).sum(axis=1)) + top[:, 0]
        products = np.abs(q[req, 0, :, None, :512] * kv[None, :, :512]).reshape(16, length, 16, 32)
        partial = np.cumsum(
            (q[req, 0, :, None, :512] * kv[None, :, :512]).reshape(16, length, 16, 32).sum(-1), -1
        )
        largest = np.maximum(products.max(-1), np.abs(partial))
        bound = spec.softmax_scale * 33 * 2.0**-13 * largest.sum(-1).max(axis=1) + 1e-5
        error = np.abs(lse[req, :, 0] - want)
        assert (error < bound).all() and bound.max() < 0.2, (error.max(), bound.max())


def test_solve_is_what_a_case_expects() -> None:
    """The answers that came from a worker are those of this process."""
    one = solve(draw(2))
    out, lse = one.case().expected()
    assert (one.out == out.view(np.uint16)).all()
    assert (one.lse.view(np.uint32) == lse.view(np.uint32)).all()
