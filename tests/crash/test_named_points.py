"""Tests of named points: their counts, and the boundaries of frames."""

from __future__ import annotations

import pytest

from fencepost.protocol.api import ApiKey
from fencepost.tools.sweep.points import CountedEvent, KillMoment, KillPoint
from tests.crash.named_points import Heads, NamedCounter
from tests.crash.sweeps import points_of


class Death(Exception):  # noqa: N818 - stands for SIGKILL
    """Ends the test's broker."""


def die(event: CountedEvent) -> None:
    raise Death(event.what)


def happen(counter: NamedCounter, *names: str) -> None:
    for name in names:
        event = CountedEvent(name, tearable=name.startswith("write"))
        if counter.before(event):
            counter.torn(event)
        counter.after(event)


@pytest.mark.parametrize("where", [KillMoment.BEFORE, KillMoment.TORN, KillMoment.AFTER])
def test_kill_point_fires_at_the_nth_event_of_its_name(where: KillMoment) -> None:
    counter = NamedCounter(KillPoint(where, 2, "write a"), die)
    happen(counter, "write a", "write b", "write b", "mark a")
    with pytest.raises(Death, match="write a"):
        happen(counter, "write a")
    counter.reset(KillPoint(where, 2, "write a"))
    happen(counter, "write a")


def test_fetch_event_is_named_after_the_writes_since_the_last_fetch() -> None:
    counter = NamedCounter(None, die)
    happen(counter, "write a", "write a", "write a/file", "mark a")
    found = counter.message(ApiKey.FETCH, "ask Fetch of 1")
    assert [event.what for event in found] == [
        "ask Fetch of 1 | write a #1",
        "ask Fetch of 1 | write a #2",
    ]
    happen(counter, "write b")
    assert len(counter.message(ApiKey.FETCH, "ask Fetch of 1")) == 1
    assert len(counter.message(ApiKey.FETCH, "ask Fetch of 2")) == 3
    assert counter.message(ApiKey.METADATA, "answer METADATA") == []


def test_kill_points_are_the_events_common_to_all_runs() -> None:
    first = [
        CountedEvent("write a", tearable=True),
        CountedEvent("write a", tearable=True),
        CountedEvent("mark a"),
    ]
    found = points_of(
        first, [CountedEvent("mark a"), CountedEvent("write a"), CountedEvent("mark a")]
    )
    assert [(event.where, event.kind, event.number) for event in found] == [
        *(
            (where, "write a", 1)
            for where in (KillMoment.BEFORE, KillMoment.TORN, KillMoment.AFTER)
        ),
        *((where, "mark a", 1) for where in (KillMoment.BEFORE, KillMoment.AFTER)),
    ]


def test_frame_heads_are_found_for_any_fragmentation() -> None:
    frames = [bytes([n]) * size for n, size in ((1, 4), (2, 200), (3, 64), (4, 65))]
    data = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    for step in 1, 3, 70, len(data):
        heads = Heads()
        begun, ended = [], 0
        for at in range(0, len(data), step):
            some, done = heads.feed(data[at : at + step])
            begun += some
            ended += done
            assert ended <= len(begun)
        assert [head[4:] for head in begun] == [frame[:64] for frame in frames]
        assert ended == len(frames)
