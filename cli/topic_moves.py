"""Reassignments of replicas: planning, submitting, verifying, cancelling and throttling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click
from kio.schema.errors import ErrorCode

from fencepost.cli import group_reset
from fencepost.cli.printing import print_lines
from fencepost.client.queries import moves
from fencepost.client.queries.moves import Move, Replicas
from fencepost.client.queries.placement import spread
from fencepost.client.queries.replicas import brokers, partition_states
from fencepost.client.requests import Partition
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

COLUMNS = ("topic", "partition", "replicas", "target", "adding", "removing", "isr", "result")
WOULD_MOVE, MOVING, DONE, NOT_AS_PLANNED = "would move", "moving", "done", "not as planned"
WOULD_CANCEL, CANCELLED = "would cancel", "cancelled"
WOULD_THROTTLE, THROTTLED = "would throttle", "throttled"
GOOD = (WOULD_MOVE, MOVING, DONE, WOULD_CANCEL, CANCELLED, WOULD_THROTTLE, THROTTLED)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """The options of the command, checked for contradictions."""

    every: bool
    to_brokers: str | None
    replication_factor: int | None
    plan_file: TextIO | None
    write: TextIO | None
    write_current: TextIO | None
    throttle: int | None
    verify: bool
    cancel: bool

    def __post_init__(self) -> None:
        plans = (self.to_brokers or self.replication_factor) is not None
        if self.plan_file is not None and plans:
            raise click.UsageError("--file excludes --to-brokers and --replication-factor")
        if self.verify and self.cancel:
            raise click.UsageError("give either --verify or --cancel")
        if (self.verify or self.cancel) and (plans or self.throttle is not None):
            raise click.UsageError("--verify and --cancel take only TOPIC or --file")
        if not (plans or self.plan_file or self.verify or self.cancel or self.throttle):
            raise click.UsageError(
                "give --to-brokers, --replication-factor, --file, --throttle, --verify or --cancel"
            )

    @property
    def begins(self) -> bool:
        """Whether the options start a new reassignment."""
        if self.verify or self.cancel:
            return False
        return (self.to_brokers or self.replication_factor or self.plan_file) is not None


def run(
    session: ClusterSession, topics: Sequence[str], how: MoveOptions, *, execute: bool
) -> list[Row]:
    """Carry out the options, or without ``execute`` only plan; return a row for each partition."""
    plan = moves.read_plan(how.plan_file.read()) if how.plan_file is not None else None
    if plan is not None and topics:
        raise click.UsageError("--file names its own topics")
    chosen = None
    if how.every and (topics or plan is not None):
        raise click.UsageError("--all excludes TOPIC and --file")
    if how.every and how.begins:
        # Each broker has its own history partition, and would create a new one if it moved.
        chosen = [
            (partition.topic, partition.partition)
            for partition in partition_states(session)
            if partition.topic != HISTORY_TOPIC
        ]
    elif topics:
        chosen = group_reset.select_partitions(session, (), topics, every=False)
    if how.begins:
        return _begin(session, chosen, plan, how, execute=execute)
    ongoing = moves.ongoing(session, plan if plan is not None else chosen)
    if how.verify:
        return _verify(session, ongoing, plan, execute=execute)
    if how.cancel:
        return _cancel(session, ongoing, execute=execute)
    if execute and ongoing and how.throttle is not None:
        moves.throttle(session, ongoing, how.throttle)
    return _rows(session, ongoing, THROTTLED if execute else WOULD_THROTTLE)


# --- a plan ---


def _begin(
    session: ClusterSession,
    chosen: Sequence[Partition] | None,
    plan: Mapping[Partition, Replicas] | None,
    how: MoveOptions,
    *,
    execute: bool,
) -> list[Row]:
    if plan is None and not chosen:
        raise click.UsageError("give TOPIC, or --all")
    names = dict.fromkeys(topic for topic, _ in (plan or chosen or ()))
    states = {
        (partition.topic, partition.partition): partition
        for partition in partition_states(session, names)
    }
    if plan is None:
        current = {tp: states[tp].replicas for tp in chosen or ()}
        plan = spread(current, _racks(session, how.to_brokers), how.replication_factor)
    for tp in plan:
        if tp not in states:
            raise click.ClickException(f"{tp[0]} has no partition {tp[1]}")
    before = {tp: states[tp].replicas for tp in plan}
    _write(how.write, plan)
    _write(how.write_current, before)
    going = {tp: replicas for tp, replicas in plan.items() if replicas != before[tp]}
    rows = {tp: _plan_row(tp, before[tp], going[tp], states[tp].isr) for tp in sorted(going)}
    if execute and going:
        if how.throttle is not None:
            moves.throttle(session, _planned_moves(before, going), how.throttle)
        _set_results(rows, moves.submit(session, going), MOVING)
    return list(rows.values())


def _racks(session: ClusterSession, to_brokers: str | None) -> dict[int, str | None]:
    """Return the racks of brokers that may hold replicas: those named, else all that are up."""
    brokers_by_id = {broker.broker: broker for broker in brokers(session)}
    if to_brokers is None:
        return {node: broker.rack for node, broker in brokers_by_id.items() if not broker.fenced}
    try:
        broker_ids = sorted({int(text) for text in to_brokers.split(",")})
    except ValueError as error:
        raise click.BadParameter(
            f"{to_brokers!r} is not a list like 1,2,3", param_hint="--to-brokers"
        ) from (error)
    for node in broker_ids:
        if node not in brokers_by_id:
            have = ", ".join(str(broker_id) for broker_id in sorted(brokers_by_id))
            raise click.ClickException(f"there is no broker {node}; the brokers are {have}")
    return {node: brokers_by_id[node].rack for node in broker_ids}


def _write(file: TextIO | None, plan: Mapping[Partition, Replicas]) -> None:
    if file is not None:
        file.write(moves.plan_text(plan))


def _plan_row(tp: Partition, before: Replicas, after: Replicas, isr: Replicas) -> Row:
    return {
        "topic": tp[0],
        "partition": tp[1],
        "replicas": list(before),
        "target": list(after),
        "adding": [broker_id for broker_id in after if broker_id not in before],
        "removing": [broker_id for broker_id in before if broker_id not in after],
        "isr": list(isr),
        "result": WOULD_MOVE,
    }


def _planned_moves(
    before: Mapping[Partition, Replicas], after: Mapping[Partition, Replicas]
) -> dict[Partition, Move]:
    moves = {}
    for tp, target in after.items():
        adding = tuple(broker_id for broker_id in target if broker_id not in before[tp])
        removing = tuple(broker_id for broker_id in before[tp] if broker_id not in target)
        if adding:
            moves[tp] = Move((*before[tp], *adding), adding, removing)
    return moves


def _set_results(
    rows: Mapping[Partition, Row],
    answers: Mapping[Partition, tuple[ErrorCode, str | None]],
    good: str,
) -> None:
    for tp, (error, message) in answers.items():
        if error is ErrorCode.none:
            rows[tp]["result"] = good
        else:
            name = error.name.upper()
            rows[tp]["result"] = f"{name}: {message}" if message else name


# --- under way ---


def _rows(session: ClusterSession, ongoing: Mapping[Partition, Move], result: str) -> list[Row]:
    names = dict.fromkeys(topic for topic, _ in ongoing)
    isr = {
        (partition.topic, partition.partition): partition.isr
        for partition in partition_states(session, names)
    }
    return [
        {
            "topic": tp[0],
            "partition": tp[1],
            "replicas": list(move.replicas),
            "target": list(move.target),
            "adding": list(move.adding),
            "removing": list(move.removing),
            "isr": list(isr.get(tp, ())),
            "result": result,
        }
        for tp, move in sorted(ongoing.items())
    ]


def _verify(
    session: ClusterSession,
    ongoing: Mapping[Partition, Move],
    plan: Mapping[Partition, Replicas] | None,
    *,
    execute: bool,
) -> list[Row]:
    """Return the progress of moves and of a plan; with ``execute`` remove unneeded throttles."""
    rows = _rows(session, ongoing, MOVING)
    if plan is not None:
        names = dict.fromkeys(topic for topic, _ in plan)
        for partition in partition_states(session, names):
            tp = partition.topic, partition.partition
            if tp in plan and tp not in ongoing:
                row = _plan_row(tp, partition.replicas, plan[tp], partition.isr)
                row["result"] = DONE if partition.replicas == plan[tp] else NOT_AS_PLANNED
                rows.append(row)
        rows.sort(key=lambda row: (row["topic"], row["partition"]))
    if not moves.ongoing(session):
        nodes = [broker.broker for broker in brokers(session) if not broker.fenced]
        topics = [topic.name for topic in session.topics() if topic.name != HISTORY_TOPIC]
        held = moves.throttled(session, nodes, topics)
        if held and execute:
            moves.unthrottle(session, held)
        elif held:
            print_lines("throttles are still set; --verify --execute removes them", err=True)
    return rows


def _cancel(
    session: ClusterSession, ongoing: Mapping[Partition, Move], *, execute: bool
) -> list[Row]:
    rows = _rows(session, ongoing, WOULD_CANCEL)
    if execute and ongoing:
        by_place = {(row["topic"], row["partition"]): row for row in rows}
        _set_results(by_place, moves.submit(session, dict.fromkeys(ongoing)), CANCELLED)
    return rows
