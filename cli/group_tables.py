"""The tables of groups and their members, as ``groups describe`` and its siblings print them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fencepost.cli.output import EMPTY, counted, emit, moment
from fencepost.cli.printing import print_lines
from fencepost.client.queries import group_view
from fencepost.client.queries.poll_pauses import seconds, with_member_pauses
from fencepost.client.queries.share_blame import examine
from fencepost.client.queries.share_offsets import SHARE

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView
    from fencepost.client.queries.session import ClusterSession

MEMBER_COLUMNS = ("member", "instance", "client", "host", "epoch", "assigned", "target")
OFFSET_COLUMNS = (
    *("topic", "partition", "committed", "stable", "end", "lag"),
    *("held_back", "member"),
)
SHARE_COLUMNS = (
    *("topic", "partition", "committed", "lag", "acquired", "available", "lock_end"),
    "deliveries",
)
"""The columns of a share group, in which ``committed`` is the start offset."""
SHARE_MEMBER_COLUMNS = ("member", "client", "host", "epoch", "assigned")
PAUSE_COLUMN = "poll_pause"
"""The last column of a table of members, if a member has reported a pause between two polls."""
SUMMARY_COLUMNS = (
    *("group", "state", "type", "members", "partitions", "lag", "unknown", "held_back"),
)


def describe(
    session: ClusterSession,
    names: tuple[str, ...],
    form: str,
    *,
    every: bool,
    summary: bool,
    members: bool,
) -> None:
    """Print groups, their offsets or their members."""
    if every:
        views = [group_view.describe_group(session, row.group_id) for row in session.groups()]
    else:
        views = [group_view.existing(session, name) for name in dict.fromkeys(names)]
    if summary:
        rows = group_view.summary_rows(session, views)
        if form == "table":
            table = [{**row, "lag": _total_text(row)} for row in rows]
            emit(table, SUMMARY_COLUMNS, form)
        else:
            emit(rows, SUMMARY_COLUMNS, form)
        _note_missing_lags(sum(int(str(row["failed"])) for row in rows), form)
    elif members:
        _show_blocks(views, member_rows(session, views), MEMBER_COLUMNS, form)
    else:
        rows = _offset_rows(session, views)
        shares = [group for group in views if group.kind == SHARE] if form == "table" else []
        _show_blocks(views, rows, OFFSET_COLUMNS, form, member_rows(session, shares))
        note_lag_kinds(rows, form)


def member_rows(session: ClusterSession, groups: Sequence[GroupView]) -> list[dict[str, Any]]:
    """Return the members of groups, with the pauses between polls that they have reported."""
    rows = [row for group in groups for row in group_view.member_rows(group)]
    return with_member_pauses(session, groups, rows)


def show_members(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], form: str, empty: str = EMPTY
) -> None:
    """Print members; a table has a column of pauses if a member has reported one."""
    if form == "table" and any(row["poll_pause_ms"] for row in rows):
        columns = [*columns, PAUSE_COLUMN]
        rows = [{**row, PAUSE_COLUMN: _pause_text(row)} for row in rows]
    emit(rows, columns, form, empty)


def _pause_text(row: Mapping[str, Any]) -> str | None:
    pause_ms = row["poll_pause_ms"]
    return pause_ms and f"{seconds(pause_ms)}, {moment(row['poll_pause_reported_ms'])}"


def _offset_rows(session: ClusterSession, groups: list[GroupView]) -> list[dict[str, Any]]:
    """Return the offset rows of groups.

    The rows of share groups also have the counts of in-flight records.
    """
    rows = group_view.offset_rows(session, [group for group in groups if group.kind != SHARE])
    for group in groups:
        if group.kind == SHARE:
            rows += examine(session, group)[0]
    return rows


def _show_blocks(
    groups: list[GroupView],
    rows: list[dict[str, Any]],
    columns: Sequence[str],
    form: str,
    share_members: Sequence[dict[str, Any]] = (),
) -> None:
    """Print a table with a heading for each group, or one JSON array of all rows.

    The table of a share group's offsets is followed by its ``share_members``.
    """
    if form == "json":
        emit(rows, columns, form)
        return
    blocks: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        blocks[row["group"]].append(row)
    for number, group in enumerate(groups):
        head = f"{group.group}: {group.state}, {counted(len(group.members), 'member')}"
        shown = blocks[group.group]
        if "lag" in columns:
            total = group_view.totals(shown)
            head += f", lag {_total_text(total)}"
            if total["unknown"]:
                head += f" in {total['unknown']} of {counted(len(shown), 'partition')}"
            head += f", held back {total['held_back']}" if total["held_back"] else ""
            shown = with_unknown(shown)
        print_lines(*([""] if number else []), head)
        if group.kind == SHARE and columns is OFFSET_COLUMNS:
            members = [row for row in share_members if row["group"] == group.group]
            _show_share_group(shown, members)
        elif columns is MEMBER_COLUMNS:
            show_members(shown, columns, form)
        else:
            emit(shown, columns, form)


def _show_share_group(rows: Sequence[Mapping[str, Any]], members: Sequence[dict[str, Any]]) -> None:
    """Print the partitions of a share group, the reasons for missing counts, and the members."""
    emit([{**row, "lock_end": moment(row["lock_end_ms"])} for row in rows], SHARE_COLUMNS, "table")
    reasons = Counter(str(row["in_flight_error"]) for row in rows if row["in_flight_error"])
    for reason, count in reasons.items():
        print_lines(f"note: {counted(count, 'partition')} without counts: {reason}", err=True)
    if members:
        print_lines("")
        show_members(members, SHARE_MEMBER_COLUMNS, "table")


def _total_text(total: Mapping[str, object]) -> str:
    """Return a sum of lags as text; an incomplete sum is never printed as a bare number."""
    if total["progress"]:
        return "none (progress of a Spark query)"
    if not total["unknown"]:
        return str(total["lag"])
    return f"{total['lag_known']} and unknown" if total["lag_known"] else "unknown"


def with_unknown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of offsets for a table, with unknown lags marked as such."""
    return [{**row, "lag": "unknown"} if row["unknown"] else row for row in rows]


def _note_missing_lags(count: int, form: str, which: str = "") -> None:
    if count and form == "table":
        print_lines(f"note: {counted(count, 'partition')} without a lag{which}", err=True)


def note_lag_kinds(rows: list[dict[str, Any]], form: str) -> None:
    """Print notes: the reasons for missing lags, and the number of lags counted in offsets."""
    errors = [str(row["error"]) for row in rows if row["error"]]
    _note_missing_lags(len(errors), form, ": " + ", ".join(sorted(set(errors))))
    open_ends = [row for row in rows if row["unknown"] and row["lag_at_most"] is not None]
    if open_ends and form == "table":
        most = counted(sum(int(str(row["lag_at_most"])) for row in open_ends), "record")
        print_lines(
            f"note: {counted(len(open_ends), 'partition')} without a committed offset:"
            " auto.offset.reset of the members, or share.auto.offset.reset of a share group,"
            f" decides where they begin, at most {most} before the end",
            err=True,
        )
    count = sum(row["lag_is_exact"] is False for row in rows)
    if count and form == "table":
        print_lines(
            f"note: the lag of {counted(count, 'partition')} is counted in offsets: with"
            " transactions or compaction it may be fewer records",
            err=True,
        )
