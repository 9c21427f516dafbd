"""``fencepost groups``: list, describe, members, offsets, reset, delete, blame, plan, history."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.history_view import history_options, show
from fencepost.cli.output import (
    CommandGroup,
    counted,
    emit,
    moment,
    spelled,
    table_options,
)
from fencepost.cli.printing import print_lines
from fencepost.cli.share_history import record_filter
from fencepost.cli.watch import watch, watch_option
from fencepost.coordinator.history.entries import GROUP

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView
    from fencepost.client.queries.session import ClusterSession, OffsetAndMetadata
    from fencepost.client.requests import Partition

P = ParamSpec("P")
R = TypeVar("R")

GROUP_STATES = (
    *("PreparingRebalance", "CompletingRebalance", "Stable", "Dead", "Empty"),
    *("Assigning", "Reconciling", "NotReady"),
)
GROUP_TYPES = ("consumer", "classic", "share", "streams")
"""Kafka's ``GroupState`` and ``GroupType``, by the names that filters accept."""

BLAME_COLUMNS = (
    *("topic", "partition", "start_offset", "lag", "record", "state", "deliveries", "since"),
    *("lock_end", "member", "client", "host", "ends", "why"),
)


def change_options(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--execute``, ``--undo`` and the options of a table."""
    function = click.option(
        "--undo", metavar="FILE", help="Write the current offsets to this new file."
    )(table_options(function))
    return execute_option(function)


@click.group("groups", cls=CommandGroup)
def command() -> None:
    """Inspect consumer and share groups, and reset or delete their offsets."""


@command.command("list")
@click.option("--state", "states", multiple=True, help="Only groups in this state; repeatable.")
@click.option("--type", "types", multiple=True, help="classic, consumer, …; repeatable.")
@table_options
def list_groups(
    session: ClusterSession, states: tuple[str, ...], types: tuple[str, ...], form: str
) -> None:
    """List the groups of all brokers."""
    rows = [
        {
            "group": group.group_id,
            "state": getattr(group, "group_state", ""),
            "type": getattr(group, "group_type", ""),
            "protocol": group.protocol_type,
        }
        for group in session.groups(
            spelled(states, GROUP_STATES, "group state"), spelled(types, GROUP_TYPES, "group type")
        )
    ]
    emit(rows, ["group", "state", "type", "protocol"], form, "no groups")


@command.command("describe")
@click.argument("groups", nargs=-1, metavar="[GROUP]...")
@click.option("--all", "every", is_flag=True, help="All groups of the cluster.")
@click.option("--summary", is_flag=True, help="One row for each group, with its total lag.")
@click.option("--members", is_flag=True, help="Show the members instead of the offsets.")
@watch_option
@table_options
def describe(
    session: ClusterSession, groups: tuple[str, ...], every_s: float | None, **how: Any
) -> None:
    """Show the state and the total lag of each GROUP, and its `offsets` or `members`.

    LAG counts the records that a read_committed consumer can still receive: no transaction markers,
    aborted records or records that retention has removed. HELD_BACK counts records that an open
    transaction holds back. Without a commit LAG is unknown, unless the partition is empty; JSON has
    lag_at_most as well. For a share group COMMITTED is the start offset, ACQUIRED and AVAILABLE
    count the records in flight, LOCK_END is the end of the oldest acquisition lock, and DELIVERIES
    the highest delivery count.

    POLL_PAUSE is the last pause of ten seconds or more between two polls that a member's client has
    reported, and the time of the report. The column is missing if no client has reported one. JSON
    has poll_pause_ms and poll_pause_reported_ms.
    """
    if how["summary"] and how["members"]:
        raise click.UsageError("give either --summary or --members")
    if how["every"] == bool(groups):
        raise click.UsageError("name the groups, or give --all")
    from fencepost.cli.group_tables import describe as show_groups

    watch(lambda: show_groups(session, groups, **how), every_s)


@command.command("members")
@click.argument("group")
@table_options
def list_members(session: ClusterSession, group: str, form: str) -> None:
    """Show the members of GROUP with their partitions, and in a consumer group their targets."""
    from fencepost.cli.group_tables import MEMBER_COLUMNS, member_rows, show_members
    from fencepost.client.queries.group_view import existing

    rows = member_rows(session, [existing(session, group)])
    show_members(rows, MEMBER_COLUMNS, form, "no members")


@command.command("offsets")
@click.argument("group")
@table_options
def offsets(session: ClusterSession, group: str, form: str) -> None:
    """Show the committed offset and the lag of GROUP in each partition.

    LAG counts the records that a read_committed consumer can still receive, HELD_BACK the records
    that an open transaction holds back. Without a commit LAG is unknown, unless the partition is
    empty.
    """
    from fencepost.cli.group_tables import OFFSET_COLUMNS, note_lag_kinds, with_unknown
    from fencepost.client.queries.group_view import existing, offset_rows

    rows = offset_rows(session, [existing(session, group)])
    shown = with_unknown(rows) if form == "table" else rows
    emit(shown, OFFSET_COLUMNS, form, "no partitions")
    note_lag_kinds(rows, form)


@command.command("reset-offsets")
@click.argument("group")
@click.option("--topic", "topics", multiple=True, metavar="T[:0,1]", help="Repeatable.")
@click.option("--all-topics", is_flag=True, help="All partitions with a committed offset.")
@click.option("--to-earliest", is_flag=True, help="The oldest record.")
@click.option("--to-latest", is_flag=True, help="After the newest record.")
@click.option(
    "--to-current", is_flag=True, help="The committed offset; the end where there is none."
)
@click.option("--to-offset", type=click.IntRange(min=0), help="This offset.")
@click.option("--to-datetime", metavar="TIME", help="02:13, -2h, yesterday or ISO (UTC).")
@click.option("--by-duration", metavar="1d2h", help="This long ago, also in ISO 8601.")
@click.option("--shift-by", type=int, help="Forward by this number, or back if it is negative.")
@click.option("--from-file", metavar="FILE", help="Lines topic,partition,offset; or an undo file.")
@change_options
def reset_offsets(
    session: ClusterSession,
    group: str,
    topics: tuple[str, ...],
    *,
    all_topics: bool,
    **options: Any,
) -> None:
    """Show the new offsets of GROUP; with --execute, commit them.

    The group must have no members. The current offsets are written to the undo file first;
    --from-file restores them from it.
    """
    from fencepost.cli import group_reset

    change = {name: options.pop(name) for name in ("undo", "execute", "form")}
    target = group_reset.ResetTarget(**options)
    now = dt.datetime.now(dt.UTC)
    view = _require_idle(session, group)
    is_new = view.state == "Dead" and not change["execute"]
    before = _offsets_of(session, view)
    partitions: list[tuple[str, int]] = []
    if target.from_file is None:
        partitions = group_reset.select_partitions(session, before, topics, every=all_topics)
    elif topics or all_topics:
        raise click.UsageError("--from-file names the topics: leave out --topic and --all-topics")
    after = group_reset.targets(session, target, partitions, before, now)
    if is_new and not before:
        print_lines(f"note: there is no group {group!r}; --execute creates it", err=True)
    _change(session, view, before, after, **change)


@command.command("delete-offsets")
@click.argument("group")
@click.option("--topic", "topics", multiple=True, metavar="T[:0,1]", help="Repeatable.")
@click.option("--all-topics", is_flag=True, help="All partitions with a committed offset.")
@change_options
def delete_offsets(
    session: ClusterSession, group: str, topics: tuple[str, ...], *, all_topics: bool, **change: Any
) -> None:
    """Show the offsets of GROUP in the topics; with --execute, delete them.

    The group must not be subscribed to the topics; a share group must have no members, and loses
    its offsets in whole topics. The offsets are written to the undo file first.
    """
    from fencepost.cli import group_reset
    from fencepost.client.queries.group_view import describe_group

    view = describe_group(session, group)
    before = _offsets_of(session, view)
    places = group_reset.select_partitions(session, before, topics, every=all_topics)
    after = dict.fromkeys((tp for tp in places if tp in before), group_reset.NOTHING)
    _change(session, view, before, after, **change)


@command.command("delete")
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...")
@change_options
def delete(
    session: ClusterSession, groups: tuple[str, ...], form: str, undo: str | None, *, execute: bool
) -> None:
    """Show the offsets of each GROUP; with --execute, delete the groups with their offsets.

    If any of the groups has members, no group is deleted. With a single GROUP, --undo writes its
    offsets to a file that `reset-offsets --from-file` reads.
    """
    from fencepost.client.queries.group_view import existing
    from fencepost.client.queries.session import check

    names = list(dict.fromkeys(groups))
    if undo is not None and len(names) > 1:
        raise click.UsageError("an undo file is for one group")
    before = {}
    for group in names:
        existing(session, group)
        before[group] = _offsets_of(session, _require_idle(session, group))
    if execute:
        for group in names:
            if undo is not None:
                _write_undo(undo, group, before[group], before[group])
            answer = session.client.call("DeleteGroups", to_group=group, groups_names=(group,))
            check(answer.results[0].error_code, "DeleteGroups", group)
    rows = [
        {"group": group, "topic": tp[0], "partition": tp[1], "committed": _offset(position)}
        for group in names
        for tp, position in sorted(before[group].items())
    ]
    emit(rows, ["group", "topic", "partition", "committed"], form, "no committed offsets")
    if execute:
        print_lines(*(f"deleted {group}" for group in names), err=True)
    else:
        show_only()


@command.command("blame")
@click.argument("group")
@table_options
def show_blame(session: ClusterSession, group: str, form: str) -> None:
    """Show the record that holds back the start offset of a share GROUP, for each partition.

    DELIVERIES counts its deliveries and LOCK_END is the end of its owner's acquisition lock. SINCE
    is the time when the owner acquired or renewed it, or else of its last event in the history; WHY
    is the cause of that event, with the pause between two polls that an absent owner has reported.
    ENDS says what must happen next. Apache Kafka does not report
    in-flight records.
    """
    from fencepost.client.queries.group_view import existing
    from fencepost.client.queries.share_blame import blame
    from fencepost.client.queries.share_offsets import SHARE

    view = existing(session, group)
    if view.kind != SHARE:
        raise click.ClickException(
            f"{group} is a {view.kind} group: `fencepost groups describe {group}` shows its lag,"
            " `fencepost txns blame TOPIC` the transactions that hold it back"
        )
    rows = [_blame_row(row) for row in blame(session, view)]
    emit(rows, BLAME_COLUMNS, form, "no partitions")
    reasons = sorted({str(row["in_flight_error"]) for row in rows if row["in_flight_error"]})
    if form == "table":
        print_lines(*(f"note: {reason}" for reason in reasons), err=True)


def _blame_row(row: Mapping[str, Any]) -> dict[str, Any]:
    first, last = row["first"], row["last"]
    return {
        **row,
        "record": first if last in (None, first) else f"{first}-{last}",
        "state": row["state"] and row["state"].lower().replace("_", " "),
        "since": moment(row["since_ms"]),
        "lock_end": moment(row["lock_end_ms"]),
    }


@command.command("plan")
@click.argument("group")
@click.option(
    "--add", type=click.IntRange(0, 1_000), default=0, help="The number of members to add."
)
@click.option(
    "--remove",
    multiple=True,
    metavar="MEMBER",
    help="A member to remove, by member id or instance id.",
)
@click.option("--assignor", metavar="NAME", help="The assignor, instead of the group's.")
@table_options
def plan(session: ClusterSession, group: str, form: str, **changes: Any) -> None:
    """Show which partitions of GROUP would move with other members or another assignor.

    The command changes nothing.
    """
    from fencepost.cli.group_plan import plan as compute
    from fencepost.cli.group_plan import rebalance_warning
    from fencepost.client.queries.group_view import existing, texts

    described = existing(session, group)
    assignment_plan = compute(session, described, **changes)
    none: frozenset[tuple[str, int]] = frozenset()
    rows: list[dict[str, object]] = []
    for name in [
        *assignment_plan.now,
        *(name for name in assignment_plan.then if name not in assignment_plan.now),
    ]:
        now, then = assignment_plan.now.get(name, none), assignment_plan.then.get(name, none)
        rows.append(
            {
                "member": name,
                "now": len(now),
                "then": len(then) if name in assignment_plan.then else None,
                "gets": texts(then - now),
                "gives": texts(now - then),
                "owns": texts(then),
            }
        )
    if form == "table":
        of = counted(assignment_plan.partitions, "partition")
        print_lines(f"{assignment_plan.assignor}: {assignment_plan.moved} of {of} move")
        warning = rebalance_warning(described)
        if warning is not None:
            print_lines(f"note: {warning}", err=True)
    emit(rows, ["member", "now", "then", "gets", "gives"], form)


@command.command("history")
@click.argument("group")
@click.option("--topic", metavar="TOPIC", help="Only records of this topic, of a share group.")
@click.option("--partition", type=click.IntRange(min=0), help="Only records of this partition.")
@click.option("--offset", type=click.IntRange(min=0), help="Only the record at this offset.")
@history_options
def history(
    session: ClusterSession,
    group: str,
    topic: str | None,
    partition: int | None,
    offset: int | None,
    **options: Any,
) -> None:
    """Show what happened to GROUP, and why: members joining and leaving, rebalances and causes.

    For a share group also why records are delivered again, archived or sent to the dead-letter
    queue: released or rejected by their owner, its lock expired, its session or connection closed,
    the leader changed. Accepted records have no entry. --topic, --partition and --offset select
    one record.
    """
    show(session, GROUP, group, keep=record_filter(topic, partition, offset), **options)


def _require_idle(session: ClusterSession, group: str) -> GroupView:
    """Describe GROUP. Raises click.ClickException if it has members."""
    from fencepost.cli import group_reset
    from fencepost.client.queries.group_view import describe_group

    view = describe_group(session, group)
    if view.is_active:
        raise click.ClickException(group_reset.active_group_refusal(view))
    return view


def _offsets_of(session: ClusterSession, group: GroupView) -> dict[Partition, OffsetAndMetadata]:
    """Return the committed offsets of a group, or the start offsets of a share group."""
    from fencepost.client.queries.session import OffsetAndMetadata
    from fencepost.client.queries.share_offsets import SHARE, start_offsets

    if group.kind != SHARE:
        return session.committed(group.group)
    return {
        tp: OffsetAndMetadata(-1 if start.offset is None else start.offset)
        for tp, start in start_offsets(session, group.group).items()
    }


def _change(
    session: ClusterSession,
    group: GroupView,
    before: Mapping[Partition, OffsetAndMetadata],
    after: Mapping[Partition, OffsetAndMetadata],
    *,
    form: str,
    undo: str | None,
    execute: bool,
) -> None:
    """Show the change; with ``execute`` write the undo file first, then the offsets."""
    from fencepost.cli import group_reset
    from fencepost.client.queries.share_offsets import SHARE

    rows = [
        {
            "topic": tp[0],
            "partition": tp[1],
            "committed": _offset(before.get(tp)),
            "new": _offset(position),
        }
        for tp, position in sorted(after.items())
    ]
    if execute:
        name = undo or group_reset.undo_name(group.group, dt.datetime.now(dt.UTC))
        _write_undo(name, group.group, after, before)
        if group.kind == SHARE:
            group_reset.set_start_offsets(session, group.group, after, before)
        else:
            group_reset.commit(session, group.group, after)
    emit(rows, ["topic", "partition", "committed", "new"], form, "no offset changes")
    if not execute:
        show_only()


def _write_undo(
    name: str,
    group: str,
    partitions: Iterable[Partition],
    before: Mapping[Partition, OffsetAndMetadata],
) -> None:
    """Write the undo file of ``partitions``, and print the command that reads it."""
    from fencepost.cli import group_reset

    group_reset.write_undo(name, partitions, before)
    print_lines(f"undo: fencepost groups reset-offsets {group} --from-file {name}", err=True)


def _offset(position: OffsetAndMetadata | None) -> int | None:
    return None if position is None or position.offset < 0 else position.offset
