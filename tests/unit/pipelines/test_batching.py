"""A transaction closes at its limits of records, bytes or time; no record is lost or reordered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.pipelines.batching import Batcher, Limits


def batcher(**limits: int) -> Batcher[bytes]:
    return Batcher(Limits(**limits), len)


def test_batch_is_full_at_the_record_limit() -> None:
    waiting = batcher(max_records=3, max_ms=1_000)
    waiting.add([b"a", b"b"], 0)
    assert not waiting.is_full(0)
    assert waiting.room == 1
    waiting.add([b"c"], 0)
    assert waiting.is_full(0)
    assert waiting.take(0) == [b"a", b"b", b"c"]
    assert not waiting.is_full(10_000)


def test_batch_is_full_at_the_byte_limit() -> None:
    waiting = batcher(max_bytes=10, max_ms=1_000)
    waiting.add([b"x" * 9], 0)
    assert not waiting.is_full(0)
    waiting.add([b"y"], 0)
    assert waiting.is_full(0)
    assert waiting.take(0) == [b"x" * 9, b"y"]


def test_record_beyond_the_byte_limit_waits_for_the_next_batch() -> None:
    waiting = batcher(max_bytes=10, max_ms=1_000)
    waiting.add([b"x" * 9, b"yy"], 5)
    assert waiting.take(7) == [b"x" * 9]
    assert waiting.left_ms(7) == 1_000  # the remaining records' time limit starts now
    assert waiting.take(7) == [b"yy"]


def test_record_larger_than_the_byte_limit_is_a_batch_of_its_own() -> None:
    waiting = batcher(max_bytes=10, max_ms=1_000)
    waiting.add([b"x" * 11, b"y"], 0)
    assert waiting.is_full(0)
    assert waiting.take(0) == [b"x" * 11]
    assert waiting.take(0) == [b"y"]


def test_batch_is_full_at_the_time_limit_of_its_first_record() -> None:
    waiting = batcher(max_ms=50)
    waiting.add([b"a"], 100)
    waiting.add([b"b"], 140)  # later records do not extend the time limit
    assert not waiting.is_full(149)
    assert waiting.is_full(150)


def test_clear_resets_the_byte_count() -> None:
    waiting = batcher(max_bytes=10, max_ms=1_000)
    waiting.add([b"x" * 10], 0)
    waiting.clear()
    waiting.add([b"y"], 0)
    assert not waiting.is_full(0)


@pytest.mark.parametrize("wrong", [{"max_records": 0}, {"max_bytes": 0}, {"max_ms": -1}])
def test_limits_that_allow_no_record_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must allow one record"):
        Limits(**wrong)


@given(
    st.lists(st.binary(max_size=30), max_size=60),
    st.integers(1, 10),
    st.integers(1, 60),
)
def test_every_item_is_taken_once_and_in_order(items: list[bytes], most: int, size: int) -> None:
    waiting = batcher(max_records=most, max_bytes=size, max_ms=0)
    waiting.add(items, 0)
    found: list[bytes] = []
    while taken := waiting.take(0):
        assert len(taken) <= most
        assert len(taken) == 1 or sum(map(len, taken)) <= size
        found += taken
    assert found == items
    assert waiting._bytes == 0
