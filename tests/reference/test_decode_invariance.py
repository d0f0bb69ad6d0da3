"""What the bytes of a decode may depend on, and what they may not.

A row's blocks are the same whatever the schedule, so P is too: splits only change fp32 roundings.
With fixed cuts nothing but the request itself matters: not its batch mates, the number of SMs, the
place of its pages, the layout of the cache, or the other heads and queries of the call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from decode_tools import (
    BF16_REL,
    COMPILED,
    EXP2_REL,
    LN2,
    LOG2_ABS,
    SOFTMAX_SCALE,
    TAIL_IDS,
    U24,
    Cached,
    cached,
    decode,
    decode_splits,
    dequantised,
    examples,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from poison import poisoned_cache
from strategies import DecodeCase, decode_cases, lengths, seeds, slots_of

from snapmla_rt.config import RECORD_BYTES, RECORD_ROPE_OFFSET, RECORD_SCALE_OFFSET
from snapmla_rt.reference.attention_fp64 import attention_fp64
from snapmla_rt.reference.quantize_q import quantize_q

F32 = NDArray[np.float32]
FIXED: list[dict[str, Any]] = [
    {"num_splits": 1},
    {"num_splits": 3},
    {"batch_invariant": True},
    {"batch_invariant": 128},
]


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def batch(seed: int, seqlens: list[int], heads: int = 2, seq_len_q: int = 1) -> Cached:
    q = normal(seed, len(seqlens), seq_len_q, heads, 576)
    return cached(q, [normal(seed + i + 1, n, 576) for i, n in enumerate(seqlens)], seed=seed)


def same(got: Any, expected: Any) -> None:
    """out and lse equal in every bit."""
    for name, x, y in zip(("out", "lse"), got, expected, strict=True):
        assert_same_bytes(name, x, y)


# --- split against unsplit ---


def split_bound(c: Cached, softmax_scale: float, causal: bool, blocks: int) -> tuple[Any, Any]:
    """How far two schedules of one request can be apart: (out, lse).

    Both use the same P and T. What differs is the exponent domain: each block is promoted by t and
    later r's (a rounded difference of at most 126 and one MUFU each, of which at most one a block),
    a split's weight comes from lse2 = R + log2(L), which rounds at its own magnitude, and the sums
    are grouped otherwise. The sum of |P V| is at most (1 + 2^-4) times that of the weights and
    values, but for weights that e4m3 holds as subnormals: twice is safe for them.
    """
    q, kv, _ = dequantised(c)
    _, lse = attention_fp64(q, kv, softmax_scale, causal)
    magnitude = weighted_magnitude(q, kv, softmax_scale, causal)
    finite = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    scale2 = max(float(np.abs(np.log2(c.paged[1][np.isfinite(c.paged[1])])).max(initial=0)), 1.0)
    top = finite / LN2 + scale2 + 20
    one = EXP2_REL + 126 * LN2 * U24 + 4 * U24
    relative = 2 * (blocks + 2) * one + LN2 * (4 * U24 * top + 2 * LOG2_ABS) + 4 * blocks * U24
    out = 2 * magnitude * np.moveaxis(relative, 1, 2)[..., None]
    return out, relative + 4 * U24 * finite


def weighted_magnitude(
    q: NDArray, kv: list[NDArray], softmax_scale: float, causal: bool
) -> NDArray:
    """sum of weight * |value|: the weights of attention, over absolute values."""
    batch, seq_len_q, heads, _ = q.shape
    out = np.zeros((batch, seq_len_q, heads, 512))
    for b, tokens in enumerate(kv):
        for i in range(seq_len_q):
            n = len(tokens) - seq_len_q + 1 + i if causal else len(tokens)
            if n > 0:
                s = q[b, i] @ tokens[:n].T * softmax_scale
                w = np.exp(s - s.max(axis=1, keepdims=True))
                out[b, i] = (w / w.sum(axis=1, keepdims=True)) @ np.abs(tokens[:n, :512])
    return out


@given(
    case=decode_cases(max_batch=2, max_heads=2, max_seq_len_q=3, max_length=449, max_magnitude=30),
    num_splits=st.integers(2, 8),
    block_n=st.sampled_from([64, 128]),
)
@settings(max_examples=examples(40))
def test_splits_change_only_fp32_roundings(case: DecodeCase, num_splits: int, block_n: int) -> None:
    c = cached(case.q, case.kv)
    how = {"causal": case.causal, "block_n": block_n, "softmax_scale": case.softmax_scale}
    one, one_lse = decode(c, num_splits=1, **how)
    many, many_lse = decode(c, num_splits=num_splits, **how)
    bound, lse_bound = split_bound(c, case.softmax_scale, case.causal, 449 // 64 + 1)
    a, b = one.astype(np.float64), many.astype(np.float64)
    # both round to bf16 on their own
    assert (np.abs(a - b) <= bound + BF16_REL * (np.abs(a) + np.abs(b)) + 2.0**-132).all()
    np.testing.assert_array_equal(one_lse == np.inf, many_lse == np.inf)
    seen = one_lse != np.inf
    assert (np.abs(one_lse[seen] - many_lse[seen]) <= lse_bound[seen]).all()


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_one_to_eight_splits_of_one_request(num_splits: int, block_n: int) -> None:
    """1,000 tokens, as float32 partials too: the bound without the rounding to bf16."""
    c = batch(3, [1000], heads=4)
    one = decode_splits(c, num_splits=1, block_n=block_n)
    many = decode_splits(c, num_splits=num_splits, block_n=block_n)
    blocks = -(-1000 // block_n)
    length = -(-blocks // num_splits)
    assert len(many.o_accum) == -(-blocks // length)
    lse2 = many.lse_accum.astype(np.float64)
    weights = np.exp2(lse2 - lse2.max(axis=0))
    merged = np.einsum("sr,srd->rd", weights / weights.sum(axis=0), many.o_accum)
    bound, _ = split_bound(c, SOFTMAX_SCALE, True, blocks)
    assert (np.abs(merged - one.o_accum[0]) <= bound[0, 0]).all()
    # and the balanced schedule, which cuts the request elsewhere
    a, b = (
        decode(c, block_n=block_n, **how)[0].astype(np.float64)
        for how in ({"num_sms": num_splits}, {"num_splits": 1})
    )
    assert (np.abs(a - b) <= bound + BF16_REL * (np.abs(a) + np.abs(b))).all()


def test_the_same_call_twice_gives_the_same_bytes() -> None:
    c = batch(4, [300, 0, 1, 129], heads=3, seq_len_q=2)
    same(decode(c), decode(c))


# --- batch invariance ---


@given(
    seed=seeds(),
    length=lengths(400),
    mates=st.lists(lengths(200), min_size=1, max_size=4),
    num_sms=st.integers(1, 200),
    mode=st.sampled_from(FIXED),
    block_n=st.sampled_from([64, 128]),
)
@settings(max_examples=examples(40))
def test_a_request_does_not_see_its_batch_mates(
    seed: int, length: int, mates: list[int], num_sms: int, mode: dict[str, Any], block_n: int
) -> None:
    how = {**mode, "block_n": block_n}
    c = batch(seed, [*mates, length], seq_len_q=2)
    last = len(mates)
    alone = decode(c.requests([last]), **how)
    got = decode(c, num_sms=num_sms, **how)
    same([x[last:] for x in got], alone)
    order = [last, *range(last)]
    got = decode(c.requests(order), num_sms=num_sms, **how)
    same([x[:1] for x in got], alone)


@pytest.mark.parametrize("mode", [{}, *FIXED])
def test_empty_requests_beside_others(mode: dict[str, Any]) -> None:
    """Padding rows of a batch (length 0, table full of absurd ids): zeros, +inf, and no effect."""
    c = batch(5, [0, 200, 0, 0, 65, 0], seq_len_q=2)
    out, lse = decode(c, **mode)
    for req in (0, 2, 3, 5):
        assert (out[req].view(np.uint16) == 0).all() and (lse[req] == np.inf).all()
    if mode:
        got = decode(c.requests([1, 4]), **mode)
        same([x[[1, 4]] for x in (out, lse)], got)


@given(seed=seeds(), mode=st.sampled_from([{}, *FIXED]), order=st.permutations(range(7)))
@settings(max_examples=examples(25))
def test_where_the_pages_lie_does_not_matter(
    seed: int, mode: dict[str, Any], order: list[int]
) -> None:
    """The same tokens in moved pages (shuffled, reversed, with gaps): the same bytes."""
    c = batch(seed, [130, 250], seq_len_q=2)
    used = np.concatenate([c.block_table[0, :3], c.block_table[1, :4]])
    paged = poisoned_cache(40)
    target = np.array(order) * 5 + 3  # gaps of four pages
    table = c.block_table.copy()
    for old, new in zip(used, target, strict=True):
        for cache, moved in zip(c.paged, paged, strict=True):
            moved[new] = cache[old]
    lookup = dict(zip(used.tolist(), target.tolist(), strict=True))
    for row, count in ((0, 3), (1, 4)):
        table[row, :count] = [lookup[int(page)] for page in table[row, :count]]
    same(decode(replace(c, paged=paged, block_table=table), **mode), decode(c, **mode))


def test_requests_may_share_pages() -> None:
    """A common prefix in the same blocks, as a prefix cache gives it."""
    c = batch(6, [128, 256], heads=2)
    shared = c.block_table.copy()
    shared[0, :2] = shared[1, :2]
    got = decode(replace(c, block_table=shared), num_splits=1)
    prefix = replace(c.requests([0]), block_table=shared[:1])
    same([x[:1] for x in got], decode(prefix, num_splits=1))


@pytest.mark.parametrize("mode", [{}, *FIXED])
def test_separate_planes_and_records_give_the_same_bytes(mode: dict[str, Any]) -> None:
    """One 41,216-byte record a block: the three arrays are views with that block stride."""
    c = batch(7, [200, 64], seq_len_q=2)
    num_blocks = len(c.paged[0])
    buffer = np.full(num_blocks * RECORD_BYTES, 0x7F, np.uint8)

    def plane(offset: int, dtype: Any, *shape: int) -> NDArray:
        item = np.dtype(dtype).itemsize
        strides = [RECORD_BYTES, *(item * int(np.prod(shape[i + 1 :])) for i in range(len(shape)))]
        return np.ndarray((num_blocks, *shape), dtype, buffer, offset, strides)

    records = (
        plane(0, ml_dtypes.float8_e4m3fn, 64, 512),
        plane(RECORD_SCALE_OFFSET, np.float32, 64),
        plane(RECORD_ROPE_OFFSET, ml_dtypes.bfloat16, 64, 64),
    )
    for view, cache in zip(records, c.paged, strict=True):
        view[...] = cache
    same(decode(replace(c, paged=records), **mode), decode(c, **mode))


def test_strided_inputs_and_raw_codes_are_the_same_numbers() -> None:
    """A slice of a wider q, a cache with a longer block stride, uint8 / uint16 views."""
    c = batch(8, [150], heads=4)
    expected = decode(c)
    q_nope, q_rope, q_scale = c.query
    wide = np.zeros((1, 1, 4, 640), q_nope.dtype)
    wide[..., 64:576] = q_nope
    strided = (wide[..., 64:576], np.asfortranarray(q_rope), q_scale[:, :, ::-1][:, :, ::-1])
    longer = tuple(np.zeros((len(x), 65, *x.shape[2:]), x.dtype) for x in c.paged)
    for big, cache in zip(longer, c.paged, strict=True):
        big[:, :64] = cache
    same(decode(replace(c, query=strided, paged=tuple(x[:, :64] for x in longer))), expected)
    raw = (q_nope.view(np.uint8), q_rope.view(np.uint16), q_scale)
    raw_paged = (c.paged[0].view(np.uint8), c.paged[1], c.paged[2].view(np.uint16))
    same(decode(replace(c, query=raw, paged=raw_paged)), expected)


def test_what_lies_in_unused_entries_and_slots_does_not_matter() -> None:
    c = batch(9, [1, 64, 127])
    clean_table = c.block_table.copy()
    for row, n in zip(clean_table, c.cache_seqlens, strict=True):
        row[-(-int(n) // 64) :] = 0
    zero = tuple(np.zeros_like(x) for x in c.paged)
    for row, n in zip(c.block_table, c.cache_seqlens, strict=True):
        slots = slots_of(row, int(n))
        for clean, cache in zip(zero, c.paged, strict=True):
            clean[slots // 64, slots % 64] = cache[slots // 64, slots % 64]
    assert set(TAIL_IDS) <= set(c.block_table.ravel().tolist())
    same(decode(replace(c, paged=zero, block_table=clean_table)), decode(c))
    narrow = c.block_table[:, :2]  # exactly as wide as the longest request needs
    same(decode(replace(c, block_table=narrow)), decode(c))


# --- other rows of the call ---


@pytest.mark.parametrize("heads", [1, 5, 20, 63, 64, 65, 127, 128])
def test_a_head_does_not_see_the_other_heads(heads: int) -> None:
    """1 and 128 are the limits, 63 / 64 / 65 the edge of a tile of 64 rows, 127 leaves one row of
    the second tile unused, 5 and 20 are no multiple of 8 (GLM-4.7-Flash has 20)."""
    c = batch(10, [100, 130], heads=128, seq_len_q=1)
    whole = decode(c.heads(slice(0, heads)), num_splits=2)
    picks = sorted({0, heads // 2, heads - 1})
    for head in picks:
        part = decode(c.heads(slice(head, head + 1)), num_splits=2)
        same(part, (whole[0][:, :, head : head + 1], whole[1][:, head : head + 1]))


@pytest.mark.parametrize("seq_len_q", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_a_query_does_not_see_the_other_queries(seq_len_q: int, causal: bool) -> None:
    """Row s of a call with s_q queries is the row of a call with one query and its own length."""
    c = batch(11, [70, 129, 3], heads=2, seq_len_q=seq_len_q)
    out, lse = decode(c, causal=causal, num_splits=1)
    for s in range(seq_len_q):
        behind = seq_len_q - 1 - s if causal else 0
        one = c.queries(slice(s, s + 1))
        one = replace(one, cache_seqlens=np.maximum(c.cache_seqlens - behind, 0).astype(np.int32))
        same((out[:, s : s + 1], lse[:, :, s : s + 1]), decode(one, causal=causal, num_splits=1))


@pytest.mark.parametrize("mode", [{"num_splits": 1}, {"batch_invariant": 128}])
@pytest.mark.parametrize("block_n", [64, 128])
def test_decode_at_a_position_equals_the_row_of_a_causal_call(
    mode: dict[str, Any], block_n: int
) -> None:
    """Every length 1..200: one query at a time against four at once, with no jump at any block.

    The four see one cache; a single query sees the first tokens of it. Without cuts, or with cuts
    at fixed positions, the bytes are the same, not only close.
    """
    tokens, queries = normal(12, 204, 576), normal(13, 204, 1, 576)
    edges = np.r_[4:10, 60:72, 124:136, 188:204]
    seqlens = (np.arange(4, 204) if COMPILED else edges).astype(np.int32)
    whole = cached(queries[:1, None], [tokens])
    table = np.broadcast_to(whole.block_table[0], (len(seqlens), whole.block_table.shape[1]))
    four = np.stack([queries[n - 4 : n] for n in seqlens])  # [200, 4, 1, 576]
    out, lse = decode(
        Cached(quantize_q(four), whole.paged, table, seqlens), block_n=block_n, **mode
    )
    single_lengths = np.arange(1, 204, dtype=np.int32)
    one_table = np.broadcast_to(table[0], (203, table.shape[1]))
    single = Cached(quantize_q(queries[:203, None]), whole.paged, one_table, single_lengths)
    one_out, one_lse = decode(single, block_n=block_n, **mode)
    for s in range(4):
        position = seqlens - 4 + s  # the query's own token, which it sees
        same((out[:, s], lse[:, :, s]), (one_out[position, 0], one_lse[position][:, :, 0]))


@given(seed=seeds(), pick=st.integers(0, 5))
@settings(max_examples=examples(15))
def test_a_nan_query_makes_its_row_nan_and_no_other(seed: int, pick: int) -> None:
    q = normal(seed, 1, 3, 2, 576)
    kv = [normal(seed + 1, 70, 576)]
    clean = decode(cached(q, kv))
    query, head = divmod(pick, 2)
    q[0, query, head, seed % 576] = [np.nan, np.inf, -np.inf][seed % 3]
    out, lse = decode(cached(q, kv))
    assert np.isnan(out[0, query, head].astype(np.float32)).all() and np.isnan(lse[0, head, query])
    others = np.ones((3, 2), bool)
    others[query, head] = False
    assert_same_bytes("out", out[0][others], clean[0][0][others])
    assert_same_bytes("lse", lse[0].T[others], clean[1][0].T[others])
