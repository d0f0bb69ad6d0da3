"""plan_decode: every block of every request exactly once, in order, evenly spread over parts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapmla_rt.config import (
    INVARIANT_SPLIT_TOKENS,
    MAX_CACHE_SEQLEN,
    MAX_NUM_HEADS_Q,
    PLAN_FIELDS,
)
from snapmla_rt.errors import ArgumentError
from snapmla_rt.plan import BEGIN_REQ, END_REQ, DecodePlan, PlanConfig
from snapmla_rt.reference.mla_decode import splits_of
from snapmla_rt.reference.plan_decode import plan_decode

# Nothing, one token, both sides of a block of 64 and of 128, of the invariant cut, and the limit.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 131072, MAX_CACHE_SEQLEN)


def seqlens_lists(max_batch: int = 40) -> st.SearchStrategy[list[int]]:
    one = st.one_of(st.sampled_from(EDGES), st.integers(0, 300), st.integers(0, MAX_CACHE_SEQLEN))
    ragged = st.lists(one, min_size=1, max_size=max_batch)
    equal = st.tuples(one, st.integers(1, max_batch)).map(lambda pair: [pair[0]] * pair[1])
    return st.one_of(ragged, equal)


@st.composite
def plan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Everything plan_decode takes beside the lengths; the three modes equally often."""
    cut = draw(
        st.sampled_from(["balanced", "num_splits", "batch_invariant"]).flatmap(
            lambda mode: {
                "balanced": st.just({}),
                "num_splits": st.integers(1, 200).map(lambda n: {"num_splits": n}),
                "batch_invariant": st.sampled_from([True, 128, 4096]).map(
                    lambda n: {"batch_invariant": n}
                ),
            }[mode]
        )
    )
    return {
        "num_heads_q": draw(st.sampled_from([1, 16, 20, 64, 65, MAX_NUM_HEADS_Q])),
        "seq_len_q": draw(st.sampled_from([1, 2, 8])),
        "num_sms": draw(st.one_of(st.sampled_from([1, 2, 78, 132, 200]), st.integers(1, 200))),
        "block_n": draw(st.sampled_from([64, 128])),
        **cut,
    }


def part_costs(plan: DecodePlan, seqlens: np.ndarray) -> list[int]:
    """Blocks and fixed costs that each part works through."""
    costs = []
    for part in plan.parts:
        alone = DecodePlan(plan.config, plan.batch, part[None], plan.num_splits)
        work = splits_of(alone, seqlens)
        costs.append(sum(end - begin + plan.config.overhead_blocks for _, _, begin, end in work))
    return costs


def check_plan(plan: DecodePlan, seqlens: np.ndarray) -> None:
    """Coverage, split numbers and balance of any plan."""
    config = plan.config
    blocks = [-(-int(n) // config.block_n) for n in seqlens]
    assert plan.parts.dtype == np.int32 and plan.parts.shape == (config.num_parts, PLAN_FIELDS)
    assert plan.num_splits.dtype == np.int32 and plan.num_splits.shape == (len(seqlens) + 1,)
    # Coverage: requests in order, the splits of each in order, without gap or overlap.
    expected_req, expected_block, expected_split = 0, 0, 0
    counts = [0] * len(seqlens)
    for req, split, begin, end in splits_of(plan, seqlens):
        if req != expected_req:
            assert expected_block == blocks[expected_req], "the request before is finished"
            assert req == expected_req + 1
            expected_req, expected_block, expected_split = req, 0, 0
        assert (begin, split) == (expected_block, expected_split)
        assert end > begin or blocks[req] == 0, "no empty split but for an empty request"
        expected_block, expected_split = end, split + 1
        counts[req] += 1
    assert expected_req == len(seqlens) - 1 and expected_block == blocks[-1]
    assert min(counts) >= 1
    np.testing.assert_array_equal(plan.num_splits, np.concatenate([[0], np.cumsum(counts)]))
    # Balance.
    overhead = config.overhead_blocks
    costs = part_costs(plan, seqlens)
    if config.has_fixed_cuts:
        # Splits go by the middle of their cost: what falls into an interval of total / parts can
        # stick out by half of its first and half of its last split.
        longest = max(min(config.blocks_per_split(n), n) + overhead for n in blocks)
        total = sum(blocks) + overhead * sum(counts)
        assert max(costs) <= total / config.num_parts + longest
    else:
        total = sum(blocks) + overhead * len(blocks)
        assert max(costs) <= -(-total // config.num_parts) + overhead + config.remainder_blocks
        # What is cut off a request is worth a split of its own.
        for req, split, begin, _ in splits_of(plan, seqlens):
            assert split == 0 or blocks[req] - begin > config.remainder_blocks
    # The bound that sizes the workspace.
    assert plan.num_splits[-1] <= config.max_total_splits(len(seqlens), int(max(seqlens)))


@given(seqlens=seqlens_lists(), arguments=plan_arguments())
@settings(max_examples=300)
@example([512, 576], {"num_heads_q": 16, "seq_len_q": 1, "num_splits": 8})
def test_every_block_once_in_order_and_balanced(
    seqlens: list[int], arguments: dict[str, Any]
) -> None:
    lengths = np.array(seqlens, np.int32)
    check_plan(plan_decode(lengths, **arguments), lengths)


def test_a_shorter_request_may_have_more_splits() -> None:
    """9 blocks in 8 splits make 5 splits of 2, but 8 blocks make 8: the workspace holds both."""
    plan = plan_decode([512, 576], 16, 1, num_splits=8)
    np.testing.assert_array_equal(plan.num_splits, [0, 8, 13])
    assert plan.config.max_total_splits(2, 576) == 16


@pytest.mark.parametrize("mode", [{}, {"num_splits": 7}, {"batch_invariant": True}])
@pytest.mark.parametrize("num_sms", [1, 132, 200])
def test_a_thousand_requests(mode: dict[str, Any], num_sms: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 1 << 14, 1000).astype(np.int32)
    lengths[::17] = 0
    check_plan(plan_decode(lengths, 128, 1, num_sms=num_sms, **mode), lengths)


@pytest.mark.parametrize("mode", [{}, {"num_splits": 7}, {"batch_invariant": True}])
@pytest.mark.parametrize("batch", [1, 2, 131, 132, 133, 1000])  # around one request a part
def test_all_requests_empty(mode: dict[str, Any], batch: int) -> None:
    """Empty requests still have one split each, whose output says that nothing was seen."""
    lengths = np.zeros(batch, np.int32)
    plan = plan_decode(lengths, 16, 1, **mode)
    check_plan(plan, lengths)
    np.testing.assert_array_equal(plan.num_splits, np.arange(batch + 1))


@pytest.mark.parametrize("mode", [{}, {"num_splits": 7}, {"batch_invariant": True}])
def test_no_requests(mode: dict[str, Any]) -> None:
    plan = plan_decode(np.zeros(0, np.int32), 16, 1, **mode)
    assert plan.batch == 0 and plan.num_splits.tolist() == [0]
    assert (plan.parts[:, END_REQ] < plan.parts[:, BEGIN_REQ]).all()


@given(st.integers(1, 40), st.integers(1, 1 << 16), st.integers(1, 200))
def test_requests_that_fill_the_parts_evenly_are_not_cut(
    per_part: int, seqlen: int, num_sms: int
) -> None:
    """Equal requests, a whole number a part: the slack of F keeps them whole."""
    plan = plan_decode(np.full(per_part * num_sms, seqlen, np.int32), 64, 1, num_sms=num_sms)
    np.testing.assert_array_equal(np.diff(plan.num_splits), 1)


def test_one_long_request_is_spread_over_all_parts() -> None:
    plan = plan_decode([131072], 64, 1, num_sms=132)
    lengths = [end - begin for _, _, begin, end in splits_of(plan, np.array([131072], np.int32))]
    # ceil(2051 / 132) = 16 blocks a part, which 2,048 blocks fill 128 times
    assert lengths == [16] * 128


@given(
    seqlen=st.one_of(st.sampled_from(EDGES), st.integers(0, MAX_CACHE_SEQLEN)),
    mates=st.lists(st.integers(0, MAX_CACHE_SEQLEN), max_size=8),
    num_sms=st.integers(1, 200),
    mode=st.sampled_from([{"num_splits": 5}, {"batch_invariant": True}, {"batch_invariant": 256}]),
)
def test_fixed_cuts_depend_on_the_request_alone(
    seqlen: int, mates: list[int], num_sms: int, mode: dict[str, Any]
) -> None:
    def cuts(lengths: list[int], req: int, sms: int) -> list[tuple[int, int, int]]:
        array = np.array(lengths, np.int32)
        plan = plan_decode(array, 16, 1, num_sms=sms, **mode)
        return [work[1:] for work in splits_of(plan, array) if work[0] == req]

    alone = cuts([seqlen], 0, 132)
    assert cuts([*mates, seqlen], len(mates), num_sms) == alone
    assert cuts([seqlen, *mates], 0, num_sms) == alone
    if "num_splits" in mode:
        assert len(alone) <= mode["num_splits"]
    else:
        per_split = (
            INVARIANT_SPLIT_TOKENS if mode["batch_invariant"] is True else mode["batch_invariant"]
        )
        assert all(begin * 64 % per_split == 0 for _, begin, _ in alone)


def test_num_parts_shares_the_sms_among_row_tiles() -> None:
    assert PlanConfig(64, 1).num_parts == 132  # one tile of 64 rows
    assert PlanConfig(65, 1).num_parts == 66  # two
    assert PlanConfig(128, 8).num_parts == 8  # 16 tiles
    assert PlanConfig(128, 8, num_sms=3).num_parts == 1  # never none


def test_the_same_arguments_give_the_same_plan() -> None:
    lengths = np.random.default_rng(1).integers(0, 5000, 30)
    first, second = plan_decode(lengths, 16, 2), plan_decode(lengths.astype(np.int32), 16, 2)
    np.testing.assert_array_equal(first.parts, second.parts)
    np.testing.assert_array_equal(first.num_splits, second.num_splits)
    assert first.config == second.config


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("num_heads_q", {"num_heads_q": 0}),
        ("num_heads_q", {"num_heads_q": 129}),
        ("seq_len_q", {"seq_len_q": 0}),
        ("num_sms", {"num_sms": 0}),
        ("num_splits", {"num_splits": 0}),
        ("block_n", {"block_n": 96}),
        ("batch_invariant", {"batch_invariant": 100}),
        ("batch_invariant", {"batch_invariant": -128}),
        ("batch_invariant", {"batch_invariant": True, "num_splits": 2}),
        ("cache_seqlens", {"cache_seqlens": [3, -1]}),
        ("cache_seqlens", {"cache_seqlens": [MAX_CACHE_SEQLEN + 1]}),
        ("cache_seqlens", {"cache_seqlens": [[1, 2]]}),
        ("cache_seqlens", {"cache_seqlens": 5}),
        ("cache_seqlens", {"cache_seqlens": [1.0, 2.0]}),
        ("cache_seqlens", {"cache_seqlens": [True]}),
    ],
)
def test_bad_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"cache_seqlens": [100, 200], "num_heads_q": 16, "seq_len_q": 1}
    with pytest.raises(ArgumentError) as caught:
        plan_decode(**{**arguments, **change})
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "change"),
    [("split_tokens", {"split_tokens": 100}), ("split_tokens", {"split_tokens": 128})],
)
def test_bad_plan_config_is_named(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        PlanConfig(16, 1, num_splits=2, **change)
    assert caught.value.name == name


@given(
    seqlens=seqlens_lists(12),
    num_sms=st.integers(1, 20),
    mode=st.sampled_from([{"num_splits": 3}, {"batch_invariant": 128}]),
)
def test_fixed_splits_go_to_parts_by_the_middle_of_their_cost(
    seqlens: list[int], num_sms: int, mode: dict[str, Any]
) -> None:
    """[L3] restated with exact fractions: the part whose share of the total holds the middle."""
    lengths = np.array(seqlens, np.int32)
    plan = plan_decode(lengths, 64, 1, num_sms=num_sms, **mode)
    work = splits_of(plan, lengths)
    costs = [end - begin + plan.config.overhead_blocks for _, _, begin, end in work]
    share, before, expected = Fraction(sum(costs), num_sms), 0, [0] * num_sms
    for cost in costs:
        expected[(before + Fraction(cost, 2)) // share] += cost
        before += cost
    assert part_costs(plan, lengths) == expected


@pytest.mark.parametrize(("num_heads_q", "remainder"), [(64, 0), (128, 4)])
def test_a_short_remainder_is_not_cut_off(num_heads_q: int, remainder: int) -> None:
    """The payload of 66 parts is one block short of two of 128 equal requests of two row tiles.

    With one tile the parts are twice as many and nothing has to be cut.
    """
    plan = plan_decode(np.full(128, 4096, np.int32), num_heads_q, 1)
    assert plan.config.remainder_blocks == remainder
    np.testing.assert_array_equal(np.diff(plan.num_splits), 1)
    # One request more than there are parts has to be cut as ever.
    assert np.diff(plan_decode(np.full(67, 4096, np.int32), 128, 1).num_splits).max() == 2


def test_a_remainder_does_not_bring_short_requests_together() -> None:
    seqlens = np.array([60, 10], np.int32)
    plan = plan_decode(seqlens, 128, 1)
    assert part_costs(plan, seqlens)[:3] == [1 + plan.config.overhead_blocks] * 2 + [0]
