"""Checks that each change that clients notice has an event with member, reason and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.share_group import ShareGroup
from fencepost.logcore.machine import Event

GONE = frozenset({"member-left", "member-expired", "member-fenced"})
CAME = frozenset({"member-joined", "member-fenced"})
OF_A_MEMBER = frozenset({"member-joined", *GONE})
NEW_KIND = frozenset({"group-created", "group-deleted", "group-upgraded", "group-downgraded"})


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a group that its clients can notice."""

    kind: str
    epoch: int
    """The generation of a classic group."""
    members: Mapping[str, tuple[str, str, int]]
    """Client id, host, and, in a consumer group, the member epoch."""
    is_joining: bool = False


def seen(groups: Mapping[str, Any]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for name, group in groups.items():
        if isinstance(group, ConsumerGroup | ShareGroup):
            members = {
                member_id: (
                    member.client_id,
                    member.client_host,
                    group.current(member_id).member_epoch,
                )
                for member_id, member in group.members.items()
            }
            found[name] = Seen(group.type_name, group.epoch, members)
        elif isinstance(group, ClassicGroup):
            members = {
                member_id: (member.client_id, member.client_host, 0)
                for member_id, member in group.members.items()
            }
            is_joining = group.state is ClassicState.PREPARING_REBALANCE
            found[name] = Seen("classic", group.generation_id, members, is_joining)
    return found


def check_told(
    before: Mapping[str, Seen], after: Mapping[str, Seen], events: Iterable[Event]
) -> None:
    """Raise AssertionError unless the events cover all changes of one decision."""
    told: dict[str, list[Event]] = {}
    for event in events:
        told.setdefault(event.subject, []).append(event)
    for name in before.keys() | after.keys():
        _check_group(before.get(name), after.get(name), told.get(name, []))
    for events_of_one in told.values():
        for event in events_of_one:
            if event.kind in OF_A_MEMBER:
                assert {"member", "client_id", "client_host"} <= event.detail.keys(), event


def _check_group(old: Seen | None, new: Seen | None, events: list[Event]) -> None:
    kinds = {event.kind for event in events}
    if old is None or new is None or old.kind != new.kind:
        has_members = any(group is not None and group.members for group in (old, new))
        assert not has_members or kinds & NEW_KIND, (old, new, events)
        return
    _check_epoch(old, new, events)
    gone, came = old.members.keys() - new.members.keys(), new.members.keys() - old.members.keys()
    named = {event.detail.get("member") for event in events if event.kind in GONE}
    assert gone <= named, (gone, events)
    named = {
        event.detail.get("successor") or event.detail.get("member")
        for event in events
        if event.kind in CAME
    }
    assert came <= named, (came, events)
    if new.is_joining and not old.is_joining:
        assert "rebalance-started" in kinds, events
    if new.kind == "consumer":
        moved = {
            (member_id, new.members[member_id][2])
            for member_id in old.members.keys() & new.members.keys()
            if old.members[member_id][2] != new.members[member_id][2]
        }
        told = {
            (event.detail.get("member"), event.detail.get("epoch"))
            for event in events
            if event.kind in {"member-reconciled", "member-left"}
        }
        away = {move for move in moved if move[1] < 0}
        assert {move[0] for move in away} <= {move[0] for move in told}, (away, events)
        assert moved - away <= told, (moved, events)


def _check_epoch(old: Seen, new: Seen, events: list[Event]) -> None:
    if old.epoch == new.epoch:
        return
    is_consumer = new.kind != "classic"
    kind = "group-epoch-bumped" if is_consumer else "generation-started"
    names = ("old_epoch", "epoch") if is_consumer else ("old_generation", "new_generation")
    steps = [tuple(event.detail[name] for name in names) for event in events if event.kind == kind]
    assert steps, (old.epoch, new.epoch, events)
    # A decision may take several steps; together they lead from the old to the new epoch.
    assert steps[0][0] == old.epoch, (old.epoch, steps)
    assert steps[-1][1] == new.epoch, (new.epoch, steps)
    assert all(step[1] == following[0] for step, following in itertools.pairwise(steps))
    if is_consumer:
        assert all(event.detail["reason"] for event in events if event.kind == kind)
