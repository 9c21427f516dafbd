"""``check_told``, which the drivers of all other tests call, detects missing events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.logcore.machine import Event
from tests.unit.groups.telling import Seen, check_told

ONE = Seen("classic", 3, {"m": ("c", "/h", 0)})
WHO = {"client_id": "c", "client_host": "/h"}
JOINED = Event("member-joined", "g", {"member": "n", **WHO})
CONSUMER = Seen("consumer", 3, {"m": ("c", "/h", 3)})
NOT_TOLD = {
    "a member that came": (ONE, replace(ONE, members={**ONE.members, "n": ("c", "/h", 0)}), []),
    "a member that went": (ONE, replace(ONE, members={}), [JOINED]),
    "a join phase": (ONE, replace(ONE, is_joining=True), []),
    "a generation": (ONE, replace(ONE, epoch=4), []),
    "a generation between two": (
        ONE,
        replace(ONE, epoch=5),
        [
            Event("generation-started", "g", {"old_generation": 3, "new_generation": 4}),
        ],
    ),
    "another kind of group": (ONE, CONSUMER, []),
    "who it was": (ONE, ONE, [Event("member-left", "g", {"member": "m"})]),
    "a group epoch": (CONSUMER, replace(CONSUMER, epoch=4), []),
    "the reason of an epoch": (
        CONSUMER,
        replace(CONSUMER, epoch=4),
        [Event("group-epoch-bumped", "g", {"old_epoch": 3, "epoch": 4, "reason": ""})],
    ),
    "a member's epoch": (CONSUMER, replace(CONSUMER, members={"m": ("c", "/h", 4)}), []),
    "a static member that is away": (
        CONSUMER,
        replace(CONSUMER, members={"m": ("c", "/h", -2)}),
        [],
    ),
}


@pytest.mark.parametrize("what", NOT_TOLD)
def test_change_without_event_is_detected(what: str) -> None:
    before, after, events = NOT_TOLD[what]
    with pytest.raises(AssertionError):
        check_told({"g": before}, {"g": after}, events)


def test_change_with_event_passes() -> None:
    check_told({"g": ONE}, {"g": ONE}, [])
    both = replace(ONE, members={**ONE.members, "n": ("c", "/h", 0)})
    check_told({"g": ONE}, {"g": both}, [JOINED])
