"""Leader elections on request (ElectLeaders): partitions that need one, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from kio.schema.errors import ErrorCode

from fencepost.cli import group_reset
from fencepost.client.queries.replicas import (
    NO_LEADER,
    PREFERRED,
    UNCLEAN,
    PartitionDescription,
    partition_states,
)
from fencepost.client.queries.replicas import (
    elect as ask,
)

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

COLUMNS = ("topic", "partition", "leader", "new", "replicas", "isr", "result")
WOULD, ELECTED, NOT_NEEDED = "would elect", "elected", "not needed"
NOT_IN_SYNC, NOBODY_ALIVE = "not in the ISR", "no broker is up"
GOOD = (ELECTED, NOT_NEEDED)
KINDS = {"preferred": PREFERRED, "unclean": UNCLEAN}

Row = dict[str, Any]


def plan(session: ClusterSession, topics: Sequence[str], kind: str, *, every: bool) -> list[Row]:
    """Return the partitions that need the election, with the leader that it would elect."""
    if every == bool(topics):
        raise click.UsageError("give either TOPIC or --all")
    chosen = None if every else group_reset.select_partitions(session, (), topics, every=False)
    names = None if chosen is None else dict.fromkeys(topic for topic, _ in chosen)
    rows = []
    for state in partition_states(session, names):
        if chosen is None or (state.topic, state.partition) in chosen:
            leader = _preferred(state) if kind == "preferred" else _unclean(state)
            if leader is not None:
                new, result = leader
                shown = {"topic": state.topic, "partition": state.partition}
                shown |= {"leader": state.leader, "new": new, "replicas": list(state.replicas)}
                rows.append(shown | {"isr": list(state.isr), "result": result})
    return rows


def _preferred(state: PartitionDescription) -> tuple[int, str] | None:
    if state.leader == state.preferred:
        return None
    in_sync = state.preferred in state.isr and state.preferred in state.live
    return state.preferred, WOULD if in_sync else NOT_IN_SYNC


def _unclean(state: PartitionDescription) -> tuple[int | None, str] | None:
    if state.leader != NO_LEADER:
        return None
    first = next(
        (broker_id for broker_id in (*state.isr, *state.live) if broker_id in state.live), None
    )
    return first, NOBODY_ALIVE if first is None else WOULD


def elect(session: ClusterSession, rows: Sequence[Row], kind: str) -> None:
    """Elect the leaders of ``rows``, and enter the result in each row. Raises ApiError."""
    places = {(row["topic"], row["partition"]): row for row in rows}
    if not places:
        return
    for place, (error, _) in ask(session, KINDS[kind], list(places)).items():
        if error is ErrorCode.none:
            places[place]["result"] = ELECTED
        elif error is ErrorCode.election_not_needed:
            places[place]["result"] = NOT_NEEDED
        else:
            places[place]["result"] = error.name.upper()
