"""Combined state batches equal a model with one entry per offset."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fencepost.groups.share.batches import StateBatch, combine

BATCHES = st.lists(
    st.builds(
        lambda first, size, state, count: StateBatch(first, first + size, state, count),
        st.integers(0, 40),
        st.integers(0, 12),
        st.sampled_from((0, 2, 3, 4)),
        st.integers(1, 3),
    ),
    max_size=8,
)


@given(old=BATCHES, new=BATCHES, start=st.integers(-1, 50))
def test_combined_offset_has_the_higher_count_then_the_higher_state(
    old: list[StateBatch], new: list[StateBatch], start: int
) -> None:
    expected: dict[int, tuple[int, int]] = {}
    for batch in (*old, *new):
        for offset in range(max(batch.first, start), batch.last + 1):
            entry = (batch.delivery_count, batch.state)
            expected[offset] = max(entry, expected.get(offset, entry))
    combined = combine(old, new, start)
    assert {
        offset: (batch.delivery_count, batch.state)
        for batch in combined
        for offset in range(batch.first, batch.last + 1)
    } == expected
    for previous, batch in pairwise(combined):
        assert previous.last < batch.first
        assert previous.last + 1 < batch.first or previous[2:] != batch[2:], "not joined"


def test_late_write_does_not_undo_a_later_delivery() -> None:
    acknowledged, expired = StateBatch(0, 9, 2, 3), StateBatch(0, 9, 0, 2)
    assert combine([acknowledged], [expired], 0) == (acknowledged,)
    assert combine([expired], [acknowledged], 0) == (acknowledged,)


def test_offsets_below_the_start_offset_are_dropped() -> None:
    batches = [StateBatch(0, 4, 2, 1), StateBatch(5, 9, 0, 1)]
    assert combine(batches, [], 7) == (StateBatch(7, 9, 0, 1),)
