"""Pauses between a consumer's calls of poll, as consumers report them in their metrics (KIP-714).

A client pushes its metrics after the pause. The report therefore follows the event that the pause
caused, and by then the client may have another member id.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fencepost.client.queries.telemetry import KEY
from fencepost.coordinator.history.entries import POLL_PAUSE_REPORTED, Entry
from fencepost.protocol.api import ApiKey

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView, MemberView
    from fencepost.client.queries.session import ClusterSession

Row = dict[str, Any]

WINDOW_MS: Final = 60_000
"""How long a Java client reports the longest time between two polls."""

# Entries arrive as JSON; a client knows their texts, not the state machines that write them.
_DEPARTURES = frozenset({"member-left", "member-expired", "member-fenced"})
_ABSENCES = ("acquisition lock expired", "its owner's connection closed")
"""The causes that make records of a share group available although their owner did nothing."""


def with_poll_pauses(entries: Sequence[Entry]) -> list[Entry]:
    """Add ``poll_pause_ms`` to the events that a reported pause explains.

    A pause can explain the departure of a member. It can also explain why records of a share group
    became available again: their owner's acquisition lock expired, or its connection closed.
    """
    pauses = [entry for entry in entries if entry.what == POLL_PAUSE_REPORTED]
    return [
        replace(entry, detail={**entry.detail, "poll_pause_ms": pause_ms})
        if (pause_ms := reported_pause(entry, pauses)) is not None
        else entry
        for entry in entries
    ]


def reported_pause(event: Entry, pauses: Iterable[Entry]) -> int | None:
    """Return the pause, in ms, that the client of an absent member reported after ``event``."""
    if not _is_absence(event):
        return None
    for pause in pauses:
        pause_ms = int(pause.detail["pause_ms"])
        is_same = event.detail.get("member") == pause.detail["member"] or client_of(
            event
        ) == client_of(pause)
        if is_same and 0 <= pause.at_ms - event.at_ms <= pause_ms + WINDOW_MS:
            return pause_ms
    return None


def why_with_pause(entry: Entry, pause_ms: int | None) -> str | None:
    """Return an entry's cause, and the pause if there is one."""
    pause = None if pause_ms is None else f"its client had not called poll for {seconds(pause_ms)}"
    return "; ".join(filter(None, (entry.why, pause))) or None


def seconds(pause_ms: float) -> str:
    """Return a pause as text: ``20.0 s``."""
    return f"{pause_ms / 1000:.1f} s"


def client_of(entry: Entry) -> tuple[str | None, str | None]:
    """Return the client id and the host of the client that an entry is about."""
    host = entry.detail.get("client_host") or entry.client_host
    # Groups store addresses as Java prints them, with a leading slash.
    plain = None if host is None else host.removeprefix("/")
    return entry.detail.get("client_id") or entry.client_id, plain


def _is_absence(event: Entry) -> bool:
    return event.what in _DEPARTURES or str(event.why).startswith(_ABSENCES)


# --- the present members ---


def with_member_pauses(
    session: ClusterSession, groups: Sequence[GroupView], rows: list[Row]
) -> list[Row]:
    """Add ``poll_pause_ms`` and ``poll_pause_reported_ms`` to rows of members.

    Both are None if no broker that answers has a pause of the member's client, or if the brokers
    keep no metrics of clients.
    """
    reported = _reported_pauses(session, [group.group for group in groups])
    pauses: dict[tuple[str, str], Row] = {}
    for group in groups:
        for pause in reported[group.group]:
            if (member := _member_of(pause, group.members)) is not None:
                pauses[group.group, member.member_id] = pause
    return [
        {
            **row,
            "poll_pause_ms": pause.get("pause_ms"),
            "poll_pause_reported_ms": pause.get("reported_ms"),
        }
        for row in rows
        for pause in (pauses.get((row["group"], row["member"]), {}),)
    ]


def _member_of(pause: Mapping[str, Any], members: Sequence[MemberView]) -> MemberView | None:
    """Return the member whose client reported a pause.

    A client that has rejoined since its last push is found by its client id and host, unless
    several members have the same.
    """
    found = [member for member in members if member.member_id == pause["member"]]
    client = pause["client_id"], pause["client_host"]
    found = found or [member for member in members if (member.client_id, member.host) == client]
    return found[0] if len(found) == 1 else None


def _reported_pauses(session: ClusterSession, groups: Sequence[str]) -> dict[str, list[Row]]:
    """Return the pauses that all brokers know, by group; the earliest report first."""
    from fencepost.client.queries.settings import describe_request
    from fencepost.protocol.errors import WireError

    pauses: dict[str, list[Row]] = defaultdict(list)
    if not groups or ApiKey.PUSH_TELEMETRY not in session.client.versions():
        return pauses
    resources = [("group", group) for group in dict.fromkeys(groups)]
    for node in sorted(session.client.metadata().brokers):
        build = partial(describe_request, resources=resources, keys=[KEY])
        try:
            answer = session.client.call("DescribeConfigs", check=False, to_node=node, entity=build)
        except WireError:  # a frozen broker, for example: the group can be described without it
            continue
        for result in answer.results:
            for entry in result.configs:
                if entry.name == KEY:
                    pauses[result.resource_name] += json.loads(entry.value or "[]")
    for rows in pauses.values():
        rows.sort(key=lambda row: row["reported_ms"])
    return pauses
