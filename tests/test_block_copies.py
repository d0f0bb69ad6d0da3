"""Block copies cut into launches: each runs at once what the list says in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapmla_rt.device_storage import independent_groups

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40)


@given(pairs=PAIRS, limit=st.integers(1, 8))
def test_groups_give_the_result_of_running_in_order(
    pairs: list[tuple[int, int]], limit: int
) -> None:
    groups = independent_groups(pairs, limit)
    assert [pair for group in groups for pair in group] == pairs
    in_order, at_once = list(range(7)), list(range(7))
    for source, target in pairs:
        in_order[target] = in_order[source]
    for group in groups:
        assert 1 <= len(group) <= limit
        before = list(at_once)
        targets = [t for _, t in group]
        assert len(set(targets)) == len(targets)
        for source, target in group:
            at_once[target] = before[source]
    assert at_once == in_order
