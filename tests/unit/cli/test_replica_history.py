"""The rows of ``fencepost topics history`` for each kind of replication event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fencepost.cli.history_view import row_of
from fencepost.cluster.follower import PartitionResponse
from fencepost.coordinator.history.entries import PARTITION, Entry, decode_value, encode_value
from fencepost.logcore.machine import Event
from tests.unit.cluster.replicas import LAG_MS, Following, Led, broker, registration


def shown(event: Event) -> tuple[str, str | None, str | None]:
    """Return the columns ``what``, ``change`` and ``why`` of an event in the history's log."""
    entry = Entry(0, PARTITION, event.subject, event.kind, "replication", detail=event.detail)
    read = decode_value(encode_value(entry))
    assert read is not None
    row = row_of(read)
    return row["what"], row["change"], row["why"]


def test_isr_shrink_and_expansion_rows_show_the_isr_and_the_reason():
    led = Led(registration([1, 2]), end=5)
    led.fetch(2, 5)
    led.append(5)
    led.wait(LAG_MS + 1)
    (event,) = led.accept(led.shrink()).events
    what, change, why = shown(event)
    assert (what, change) == ("isr-shrunk", "ISR 1 (−2)")
    assert why is not None
    assert why.startswith("broker 2 is at 5 of 10, 30001 ms behind")
    joins = led.fetch(2, 10).send
    assert joins is not None
    (event,) = led.accept(joins).events
    assert shown(event)[:2] == ("isr-expanded", "ISR 1,2 (+2)")


def test_refused_isr_change_row_shows_the_error():
    led = Led(registration(isr=[1]), end=5, high=5)
    change = led.fetch(2, 5).send
    assert change is not None
    (event,) = led.answer(change, 107).events
    assert shown(event) == ("isr-update-failed", None, "INELIGIBLE_REPLICA")


@pytest.mark.parametrize(
    ("former", "known", "change", "why"),
    [
        ({"leader": 2}, {"fenced": True}, "leader 2 → 1", "broker 2 is fenced"),
        ({"leader": 2}, {"leaving": True}, "leader 2 → 1", "broker 2 shuts down"),
        ({"leader": 2}, {}, "leader 2 → 1", "it is the preferred leader"),
        ({"leader": -1}, {}, "leader none → 1", "it had no leader"),
    ],
)
def test_became_leader_row_shows_the_former_leader_and_the_reason(
    former: Mapping[str, Any], known: Mapping[str, Any], change, why
):
    led = Led()
    led.leader.resign(replace(registration(leader_epoch=6, partition_epoch=11), **former))
    led.knows(broker(2, **known))
    (event,) = led.become(registration(leader_epoch=7, partition_epoch=12)).events
    assert shown(event) == ("became-leader", change, why)
    assert event.detail["leader_epoch"] == 7


def test_log_truncation_row_shows_both_log_ends():
    following = Following(*[4] * 20)
    (event,) = following.machine.on_answer(
        following.ask(), PartitionResponse(diverging=(4, 12)), 0
    ).events
    assert shown(event)[:2] == ("log-truncated", "end 20 → 12")


@pytest.mark.parametrize(
    ("detail", "change"),
    [
        ({"from": 1, "to": -1, "leader_epoch": 3}, "leader 1 → none"),
        ({"from": 2, "to": 1}, "level 2 → 1"),
        ({"replicas": [1, 2, 3], "adding": [3], "removing": [1]}, "replicas 1,2,3 (+3 −1)"),
        ({"replicas": [1, 2], "adding": [], "removing": []}, "replicas 1,2"),
        ({"joined": [], "left": [2], "isr": []}, "ISR none (−2)"),
    ],
)
def test_controller_event_row_shows_change_and_cause(detail, change):
    assert shown(Event("x", "t-0", {**detail, "cause": "why"}))[1:] == (change, "why")
