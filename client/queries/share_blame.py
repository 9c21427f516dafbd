"""The record that keeps the start offset of a share partition from moving, and its owner.

The record's state comes from the partition's leader, and its earlier events come from the event
history. Apache Kafka reports neither; its brokers report only the start offset and the lag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.group_view import offset_rows
from fencepost.client.queries.poll_pauses import reported_pause, why_with_pause
from fencepost.client.queries.share_partitions import NOT_FETCHED, InFlight, in_flight
from fencepost.client.queries.share_records import is_about_partition, is_about_record
from fencepost.coordinator.history.entries import GROUP, POLL_PAUSE_REPORTED, Entry

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView, MemberView
    from fencepost.client.queries.session import ClusterSession

Row = dict[str, Any]

LOADED = "share-partition-loaded"
UNFETCHED = "a fetch by a member"
NO_MEMBER = "a member that fetches; the group has none"
ENDS = {
    "ACQUIRED": "its owner acknowledges it, or the lock ends",
    "ARCHIVING": "the dead-letter queue has it, or fails",
}
"""The event that ends each state; a state that is not listed ends with a fetch."""


def examine(session: ClusterSession, group: GroupView) -> tuple[list[Row], list[Row]]:
    """Return the offset rows of a share group, and rows about records that hold them back.

    An offset row has the counts of in-flight records, or in ``in_flight_error`` the reason why they
    are unknown. In a row about a record, ``state`` is None if no record holds back the start
    offset. Raises ApiError.
    """
    offsets: list[Row] = offset_rows(session, [group])
    places = [(str(row["topic"]), int(row["partition"])) for row in offsets]
    views = in_flight(session, group.group, places)
    reports = [views[place] for place in places]
    members = {member.member_id: member for member in group.members}
    viewed = [_with_view(row, report) for row, report in zip(offsets, reports, strict=True)]
    return viewed, [_row(row, report, members) for row, report in zip(viewed, reports, strict=True)]


def _with_view(row: Mapping[str, Any], report: InFlight) -> Row:
    """Return an offset row with the columns that the leader reports.

    The start offset is persisted once a record is completed; until then only the leader has it.
    """
    view = report.view
    columns = {}
    if row["lag"] is None and view:
        lag = view["high_watermark"] - view["start_offset"] - view["complete"]
        columns = {"committed": view["start_offset"], "lag": lag, "lag_at_most": lag}
        columns["unknown"] = False
    return {
        **row,
        **columns,
        "acquired": view.get("acquired"),
        "available": view.get("available"),
        "lock_end_ms": view.get("first_lock_end_ms"),
        "deliveries": view.get("max_delivery_count"),
        "in_flight_error": report.reason,
    }


def blame(session: ClusterSession, group: GroupView) -> list[Row]:
    """Return one row per partition of a share group, with earlier events. Raises ApiError."""
    _, rows = examine(session, group)
    if any(row["state"] is not None for row in rows):
        add_past(rows, entries_of(session, subjects=[(GROUP, group.group)]))
    return rows


def _row(offsets: Mapping[str, Any], report: InFlight, members: Mapping[str, MemberView]) -> Row:
    first_open = report.view.get("first_open") or {}
    state = first_open.get("state")
    member = first_open.get("member")
    client = members.get(member or "")
    lock_end_ms = first_open.get("lock_end_ms")
    row: Row = {
        "topic": offsets["topic"],
        "partition": offsets["partition"],
        "start_offset": report.view.get("start_offset", offsets["committed"]),
        "lag": offsets["lag"],
        "first": first_open.get("first"),
        "last": first_open.get("last"),
        "state": state,
        "deliveries": first_open.get("delivery_count"),
        "delivery_limit": report.view.get("delivery_count_limit"),
        "member": member,
        "client": client.client_id if client else first_open.get("client_id"),
        "host": client.host if client else first_open.get("client_host"),
        "is_member": None if member is None else client is not None,
        "since_ms": None,
        "lock_end_ms": lock_end_ms,
        "ends": None,
        "why": None,
        "why_ms": None,
        "poll_pause_ms": None,
        "in_flight_error": report.reason,
    }
    if lock_end_ms is not None:
        row["since_ms"] = lock_end_ms - report.view["lock_duration_ms"]
    if state is None and offsets["lag"] and report.reason in (None, NOT_FETCHED):
        row["state"] = "NOT_FETCHED" if report.reason else "NOT_READ"
        row["first"] = report.view.get("end_offset", offsets["committed"])
    if row["state"] is not None:
        fetches = UNFETCHED if members else NO_MEMBER
        row["ends"] = ENDS.get(row["state"], fetches)
        if first_open.get("is_in_transition"):
            row["ends"] = "the share coordinator writes its new state"
    return row


def add_past(rows: list[Row], entries: Iterable[Entry]) -> None:
    """Add the last entry about each record: why it was delivered again, and since when.

    If the record's last owner was absent, the cause includes the pause between two polls that the
    owner's client has reported. Loads of the share partition are skipped: the entry before a load
    gives a better reason.
    """
    in_flight_rows = [row for row in rows if row["state"] is not None and row["first"] is not None]
    last: dict[int, Entry] = {}
    pauses: list[Entry] = []
    for entry in entries:
        if entry.what == POLL_PAUSE_REPORTED:
            pauses.append(entry)
        if entry.what == LOADED:
            continue
        for number, row in enumerate(in_flight_rows):
            detail = entry.detail
            if is_about_partition(detail, row["topic"], row["partition"]) and is_about_record(
                entry.what, detail, row["first"]
            ):
                last[number] = entry
    for number, entry in last.items():
        row = in_flight_rows[number]
        row["poll_pause_ms"] = reported_pause(entry, pauses)
        row["why"], row["why_ms"] = why_with_pause(entry, row["poll_pause_ms"]), entry.at_ms
        if row["since_ms"] is None:
            row["since_ms"] = entry.at_ms
