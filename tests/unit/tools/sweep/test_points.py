"""Crash points, and verdicts on units of work."""

from __future__ import annotations

import pytest

from fencepost.logcore.batch import LogRecord
from fencepost.tools.sweep.judge import Attempt, Labels, torn_units
from fencepost.tools.sweep.points import (
    ANSWER,
    CountedEvent,
    CountedFileSystem,
    EventCounter,
    KillMoment,
    KillPoint,
    points_of,
    spread,
)

LABELS = Labels("unit", "size")


class Death(Exception):  # noqa: N818 - stands for SIGKILL
    """Raised to end the test's broker."""


def die(event: CountedEvent) -> None:
    raise Death(event.what)


def work(counter: EventCounter, root: str) -> None:
    """Run two operations, an acknowledgement, an operation, and two acknowledgements."""
    fs = CountedFileSystem(root, counter)
    handle = fs.open(f"{root}/t-0/a.log", create=True)
    try:
        fs.write(handle, (b"abcd",), 0)
        counter.answer()
        fs.sync(handle)
        counter.answer()
        counter.answer()
    finally:
        fs.close(handle)


def test_kill_points_are_around_each_operation_and_at_its_first_response(tmp_path):
    root = str(tmp_path)
    (tmp_path / "t-0").mkdir()
    counter = EventCounter(None, die)
    work(counter, root)
    assert counter.events == []
    counter.arm()
    work(counter, root)
    assert [event.what for event in counter.events] == [
        "create t-0/a.log",
        "write t-0/a.log",
        ANSWER,
        "sync t-0/a.log",
        ANSWER,
    ]
    assert [str(point) for point in points_of(counter.events)] == [
        *("before 1", "after 1", "before 2", "torn 2", "after 2", "answer 1"),
        *("before 3", "after 3", "answer 2"),
    ]
    counter.disarm()
    work(counter, root)
    assert len(counter.events) == 5


def test_every_response_is_a_kill_point_if_requested(tmp_path):
    (tmp_path / "t-0").mkdir()
    counter = EventCounter(None, die, every_answer=True)
    counter.arm()
    counter.answer()
    work(counter, str(tmp_path))
    assert [event.is_answer for event in counter.events] == [
        *(True, False, False, True, False, True, True)
    ]
    last = EventCounter(KillPoint(KillMoment.ANSWER, 4), die, every_answer=True)
    last.arm()
    last.answer()
    (tmp_path / "t-0" / "a.log").unlink()
    with pytest.raises(Death, match=ANSWER):
        work(last, str(tmp_path))


@pytest.mark.parametrize(
    ("where", "number", "left"),
    [
        (KillMoment.BEFORE, 1, None),
        (KillMoment.AFTER, 1, b""),
        (KillMoment.BEFORE, 2, b""),
        (KillMoment.TORN, 2, b"ab"),
        (KillMoment.AFTER, 2, b"abcd"),
        (KillMoment.ANSWER, 2, b"abcd"),
    ],
)
def test_kill_leaves_exactly_the_operations_before_it(tmp_path, where, number, left):
    (tmp_path / "t-0").mkdir()
    counter = EventCounter(KillPoint(where, number), die)
    counter.arm()
    with pytest.raises(Death):
        work(counter, str(tmp_path))
    file = tmp_path / "t-0" / "a.log"
    assert (file.read_bytes() if file.exists() else None) == left


def test_kill_point_that_is_not_reached_does_nothing(tmp_path):
    (tmp_path / "t-0").mkdir()
    counter = EventCounter(KillPoint(KillMoment.BEFORE, 4), die)
    counter.arm()
    work(counter, str(tmp_path))


def test_event_kind_omits_partition_and_file_name():
    assert (
        CountedEvent("write __transaction_state-2/00000.log").kind
        == "write __transaction_state .log"
    )
    assert CountedEvent("mkdir t-0").kind == "mkdir t"
    assert CountedEvent("sync .").kind == "sync ."
    assert CountedEvent(ANSWER).kind == "answer"


def test_selected_kill_points_are_spread_from_first_to_last():
    points = [KillPoint(KillMoment.BEFORE, number) for number in range(1, 101)]
    assert [point.number for point in spread(points, 4)] == [1, 34, 67, 100]
    assert spread(points, 100) == spread(points, 1000) == points
    assert [point.number for point in spread(points, 1)] == [51]


def attempt(
    *values: bytes,
    committed: bool | None = True,
    place: int = 0,
    producer: tuple[int, int] = (7, 0),
    size: bytes | None = None,
) -> Attempt:
    headers = (("unit", b"u"), *((("size", size),) if size is not None else ()))
    records = [LogRecord(n, 0, None, value, headers) for n, value in enumerate(values)]
    return Attempt(("t", place), producer, records, committed)


@pytest.mark.parametrize(
    ("attempts", "complaint"),
    [
        ([attempt(b"a", b"b")], None),
        ([attempt(b"a"), attempt(b"b", place=1)], None),
        ([attempt(b"a", committed=False), attempt(b"b", place=1, committed=False)], None),
        ([attempt(b"a", committed=False), attempt(b"a")], None),
        ([attempt(b"a", size=b"2"), attempt(b"b", place=1, size=b"2")], None),
        ([attempt(b"a"), attempt(b"b", place=1, committed=False)], "torn"),
        ([attempt(b"a"), attempt(b"b", place=1, committed=None)], "torn"),
        ([attempt(b"a", size=b"2")], "torn: 1 of 2 records"),
        ([attempt(b"a"), attempt(b"a")], "twice"),
        ([attempt(b"a"), attempt(b"a", place=1, producer=(7, 1))], "twice"),
        ([attempt(b"a", b"a", size=b"1", producer=(-1, -1))], "torn: 2 of 1 records"),
    ],
)
def test_torn_or_duplicated_unit_is_reported(attempts, complaint):
    found = torn_units(attempts, LABELS)
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]


def test_records_without_a_label_belong_to_no_unit():
    record = LogRecord(0, 0, None, b"a", ())
    plain = Attempt(("t", 0), (7, 0), [record], committed=True)
    other = Attempt(("t", 0), (7, 0), [record], committed=False)
    assert torn_units([plain, other], LABELS) == []
