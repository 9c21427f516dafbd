"""The ``history`` subcommands: events of a group, transactional id, topic or cluster by time."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from fencepost.cli.output import emit, read_time, table_options, text_of, utc
from fencepost.cli.printing import print_json, print_lines, terminal_width
from fencepost.cli.share_history import share_change
from fencepost.client.queries.poll_pauses import client_of, why_with_pause, with_poll_pauses
from fencepost.coordinator.history.entries import GROUP, TRANSACTION, Entry
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.printable import printable

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

P = ParamSpec("P")
R = TypeVar("R")

COLUMNS = ("time", "what", "change", "why", "trigger", "who", "client", "host")
_WIDTHS = dict(zip(("subject", *COLUMNS), (24, 24, 26, 22, 40, 25, 24, 16, 15), strict=True))
"""Column widths of lines printed one by one, when the widths of later lines are not known."""

_UUID = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
SHORT_ID = 8
"""The number of characters that are shown of a member id's unique part; JSON and ``--wide`` show
the whole id."""

_WHO = ("member", "leader")
_EPOCHS = ("former_producer_epoch", "fenced_epoch", "given_producer_epoch")


def history_options(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--from`` (or ``--since``), ``--until``, ``--follow`` and the options of a table."""
    function = click.option(
        "--until",
        "end_ms",
        metavar="TIME",
        callback=read_time,
        help="Only earlier entries: a time as for --since.",
    )(table_options(function))
    function = click.option(
        "--from",
        "--since",
        "begin",
        default="earliest",
        show_default=True,
        metavar="WHERE",
        help="earliest, latest, or a time: 02:13, -10m, yesterday, 2026-01-31T12:00 (UTC).",
    )(function)
    function = click.option(
        "--wide",
        is_flag=True,
        help=("Show all columns and whole ids even if they do not fit the width of the terminal."),
    )(function)
    return click.option("--follow", "-f", is_flag=True, help="Wait for new entries, until Ctrl-C.")(
        function
    )


def show(
    session: ClusterSession,
    scope: str,
    *subjects: str,
    begin: str,
    form: str,
    follow: bool,
    end_ms: int | None,
    wide: bool,
    keep: Callable[[Entry], bool] | None = None,
) -> None:
    """Print the entries of ``subjects``, oldest first; with ``follow``, also new entries.

    Without subjects, all entries of the scope are printed; with ``keep``, only those for which it
    returns true.

    It is no error if an existing group or transactional id has no entries, as on a broker that
    keeps no history.
    """
    from fencepost.client.queries.entries import entries_of
    from fencepost.client.queries.times import TimeError, milliseconds
    from fencepost.client.queries.where import PLACES, OffsetPosition

    if end_ms is not None and follow:
        raise click.UsageError("--follow has no end")
    where, begin_ms = PLACES.get(begin), None
    if where is None:
        try:
            begin_ms = milliseconds(begin)
        except TimeError as error:
            raise click.BadParameter(str(error), param_hint="--since") from error
        where = OffsetPosition(time=begin_ms)
    # Unless there is exactly one subject, each line must name its subject.
    columns = COLUMNS if len(subjects) == 1 else (COLUMNS[0], "subject", *COLUMNS[1:])
    selected = [(scope, subject) for subject in subjects] or None
    entries = (
        entry
        for entry in entries_of(session, where, subjects=selected, follow=follow)
        if entry.scope == scope
    )
    if begin_ms is not None:
        # The search by time finds a whole batch, which may begin with earlier events.
        entries = (entry for entry in entries if entry.at_ms >= begin_ms)
    if end_ms is not None:
        entries = (entry for entry in entries if entry.at_ms < end_ms)
    width = None if wide or form == "json" else terminal_width()
    if not follow:
        shown = with_poll_pauses(list(entries))
        if not shown:
            _require_known(session, scope, *subjects)
        rows = [row_of(entry) for entry in shown if keep is None or keep(entry)]
        if width is None or not rows:
            emit(rows, columns, form, "no entries")
        else:
            for row in rows:
                print_lines(*wrap_entry(row, columns, width))
        _note_waiting_brokers(session)
        return
    with contextlib.suppress(KeyboardInterrupt):
        if form == "table" and width is None:
            print_lines(_line({name: name.upper() for name in columns}, columns))
        for entry in filter(keep, entries):
            row = row_of(entry)
            if form == "json":
                print_json(row)
            elif width is None:
                print_lines(_line(row, columns))
            else:
                print_lines(*wrap_entry(row, columns, width))


def _note_waiting_brokers(session: ClusterSession) -> None:
    """Print a note if brokers lead no partition of the history, and so cannot write to it.

    A broker that restarts is in this state until a preferred election. Brokers that are no
    partition's preferred leader, such as those added later, are not mentioned.
    """
    topic = session.client.metadata().topics.get(HISTORY_TOPIC)
    if topic is None:
        return
    leaders = {partition.leader for partition in topic.partitions.values()}
    preferred = {
        partition.replicas[0] for partition in topic.partitions.values() if partition.replicas
    }
    if waiting := sorted(preferred - leaders):
        print_lines(
            f"note: brokers that lead no partition of {HISTORY_TOPIC}, so that their latest entries"
            f" may be missing: {', '.join(map(str, waiting))};"
            f" `fencepost topics elect {HISTORY_TOPIC} --execute` makes them lead again",
            err=True,
        )


def _require_known(session: ClusterSession, scope: str, *subjects: str) -> None:
    """Raise an error for a group or transactional id that no coordinator knows."""
    if scope == GROUP:
        from fencepost.client.queries.group_view import existing

        existing(session, *subjects)
    elif scope == TRANSACTION:
        from fencepost.client.queries.open_transactions import transaction

        transaction(session, *subjects)


def row_of(entry: Entry) -> dict[str, Any]:
    """Return the fields to print of an entry; JSON has all, including ``detail``."""
    detail = dict(entry.detail)
    client, host = client_of(entry)
    return {
        "time": utc(entry.at_ms),
        "what": entry.what,
        "change": _change(detail),
        "why": why_with_pause(entry, detail.get("poll_pause_ms")),
        "trigger": entry.trigger,
        "who": _first_value(detail, _WHO) or _awaited(detail) or _producer(detail),
        "client": client,
        "host": host,
        "subject": entry.subject,
        "shard": entry.shard,
        "detail": detail,
    }


def _change(detail: Mapping[str, Any]) -> str | None:
    """Return old → new: generations or epochs of a group, producer epochs, leaders, replicas."""
    moved = _replica_change(detail)
    if moved is not None:
        return moved
    if "topic_id" in detail and "partition" in detail:
        return share_change(detail)
    if "controller" in detail:
        former = f"{detail['former']} → " if detail.get("former") is not None else ""
        return f"controller {former}{detail['controller']}, epoch {detail['epoch']}"
    if detail.get("old_epoch") is not None and detail.get("epoch") is not None:
        return f"epoch {detail['old_epoch']} → {detail['epoch']}"
    old = detail.get("old_generation")
    if old is not None:
        new = detail.get("new_generation")
        return f"generation {old}" if new is None else f"generation {old} → {new}"
    new = detail.get("producer_epoch")
    old = next((detail[name] for name in _EPOCHS if detail.get(name) is not None), None)
    if old is None or new is None:
        return None
    if old < 0:
        return f"epoch {new}"
    before, after = detail.get("former_producer_id"), detail.get("producer_id")
    if before is not None and before != after:
        return f"producer {before}:{old} → {after}:{new}"
    # A refused request changes no epoch: its own epoch differs from the current one.
    arrow = "≠" if "given_producer_epoch" in detail else "→"
    return f"epoch {old} {arrow} {new}"


def _replica_change(detail: Mapping[str, Any]) -> str | None:
    """Return a change of a partition's leader, ISR, replicas or log end offset."""
    if "from" in detail and "to" in detail:
        if "leader_epoch" not in detail:
            return f"level {detail['from']} → {detail['to']}"  # of a feature
        before, after = (detail[side] if detail[side] >= 0 else "none" for side in ("from", "to"))
        return f"leader {before} → {after}"
    if detail.get("joined") or detail.get("left"):
        return f"ISR {_describe_change(detail, 'isr', 'joined', 'left')}"
    if "adding" in detail and "removing" in detail:
        return f"replicas {_describe_change(detail, 'replicas', 'adding', 'removing')}"
    if "offset" in detail and "log_end_offset" in detail:
        return f"end {detail['log_end_offset']} → {detail['offset']}"
    return None


def _describe_change(detail: Mapping[str, Any], whole: str, coming: str, going: str) -> str:
    signs = [f"+{broker_id}" for broker_id in detail.get(coming, ())]
    signs += [f"−{broker_id}" for broker_id in detail.get(going, ())]
    held = ",".join(str(broker_id) for broker_id in detail.get(whole, ())) or "none"
    return f"{held} ({' '.join(signs)})" if signs else held


def _awaited(detail: Mapping[str, Any]) -> str | None:
    """Return the members that a rebalance waits for."""
    names, missing = detail.get("awaited") or (), detail.get("missing", 0)
    texts = [*names, *([f"{missing - len(names)} more"] if missing > len(names) else ())]
    return ", ".join(texts) or None


def _producer(detail: Mapping[str, Any]) -> str | None:
    producer_id = detail.get("given_producer_id")
    if producer_id is None:
        producer_id = detail.get("producer_id")
    return None if producer_id is None else f"producer {producer_id}"


def _first_value(detail: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((str(detail[name]) for name in names if detail.get(name)), None)


def wrap_entry(row: Mapping[str, Any], columns: Sequence[str], width: int) -> list[str]:
    """Return an entry in lines of at most ``width``: the time, and beside it the columns' texts.

    No text is repeated, and member ids are shortened.
    """
    client = "@".join(filter(None, (row["client"], row["host"])))
    head = f"{row['subject']} {row['what']}" if "subject" in columns else str(row["what"])
    shown = head
    parts = []
    for text in (row["change"], row["why"], row["who"], client, row["trigger"]):
        # The cause may be part of the trigger, and a member id begins with its client id.
        if text and str(text) not in shown:
            parts.append(str(text))
            shown += f" {text}"
    ids = [str(row["detail"].get(name)) for name in _WHO if row["detail"].get(name)]
    text = printable(_shortened(": ".join(filter(None, (head, "; ".join(parts)))), ids))
    return textwrap.wrap(
        f"{row['time']}  {text}",
        width,
        subsequent_indent=" " * min(len(row["time"]) + 2, width // 2),
    )


def _shortened(text: str, ids: Sequence[str]) -> str:
    """Return ``text`` with the unique parts of member ids shortened."""
    text = _UUID.sub(r"\1…", text)
    for identifier in ids:
        if len(identifier) > SHORT_ID and not _UUID.search(identifier):
            text = text.replace(identifier, f"{identifier[:SHORT_ID]}…")
    return text


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    cells = (text_of(row[name]).ljust(_WIDTHS[name]) for name in columns)
    return "  ".join(cells).rstrip()
