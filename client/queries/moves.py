"""Reassignments of partitions: plans in Kafka's format, progress and throttles.

Source: ``ReassignPartitionsCommand``; KIP-455, KIP-73.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.queries.session import check
from fencepost.client.queries.settings import alter, describe_configs
from fencepost.client.requests import Partition, topics

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

Replicas = tuple[int, ...]

RATES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
"""Broker settings: bytes per second for throttled replicas."""
THROTTLED = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
"""Topic settings: the throttled replicas, as ``partition:broker`` separated by commas."""


class PlanError(ValueError):
    """A text is not a valid plan."""


def read_plan(text: str) -> dict[Partition, Replicas]:
    """Parse a plan in Kafka's JSON: ``{"version": 1, "partitions": [{"topic": …}, …]}``."""
    try:
        document = json.loads(text)
        version = document.get("version", 1)
        assignment = {
            (str(row["topic"]), int(row["partition"])): tuple(
                int(broker_id) for broker_id in row["replicas"]
            )
            for row in document["partitions"]
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(
            'a plan looks like {"version": 1, "partitions":'
            ' [{"topic": "orders", "partition": 0, "replicas": [1, 2]}]}'
            f" ({type(error).__name__}: {error})"
        ) from error
    if version != 1:
        raise PlanError(f"the plan has version {version}; only version 1 is supported")
    if len(assignment) != len(document["partitions"]):
        raise PlanError("the plan names a partition twice")
    for (topic, index), replicas in assignment.items():
        if not replicas or len(set(replicas)) != len(replicas):
            raise PlanError(f"{topic}-{index} can't be on {list(replicas)}")
    return assignment


def plan_text(plan: Mapping[Partition, Replicas]) -> str:
    """Return a plan as Kafka's tool reads and writes it."""
    rows = [
        {"topic": topic, "partition": index, "replicas": list(replicas)}
        for (topic, index), replicas in sorted(plan.items())
    ]
    return json.dumps({"version": 1, "partitions": rows}) + "\n"


class Move(NamedTuple):
    """A partition that is being reassigned."""

    replicas: Replicas
    """All current replicas."""
    adding: Replicas
    removing: Replicas

    @property
    def target(self) -> Replicas:
        """The replicas after the reassignment."""
        return tuple(replica for replica in self.replicas if replica not in self.removing)


def ongoing(
    session: ClusterSession, partitions: Iterable[Partition] | None = None
) -> dict[Partition, Move]:
    """Return the ongoing reassignments of these partitions or all. Raises ApiError."""
    pairs = None if partitions is None else [(partition, partition[1]) for partition in partitions]
    if pairs == []:
        return {}

    def build(make: Any) -> Any:
        rows = None
        if pairs is not None:
            rows = topics(make.ListPartitionReassignmentsTopics, pairs, "partition_indexes")
        return make.message(timeout=session.timeout_ms, topics=rows)

    answer = session.client.call(
        "ListPartitionReassignments", to_node=session.controller, check=False, entity=build
    )
    check(answer.error_code, "ListPartitionReassignments", None, answer.error_message)
    return {
        (topic.name, row.partition_index): Move(
            tuple(row.replicas), tuple(row.adding_replicas), tuple(row.removing_replicas)
        )
        for topic in answer.topics
        for row in topic.partitions
    }


def submit(
    session: ClusterSession, assignment: Mapping[Partition, Replicas | None]
) -> dict[Partition, tuple[ErrorCode, str | None]]:
    """Submit reassignments, or with None cancel them; return the result of each.

    Raises ApiError if the whole request is refused.
    """
    answer = session.client.call(
        "AlterPartitionReassignments",
        to_node=session.controller,
        check=False,
        entity=partial(_alter_request, assignment=assignment, timeout_ms=session.timeout_ms),
    )
    check(answer.error_code, "AlterPartitionReassignments", None, answer.error_message)
    return {
        (topic.name, row.partition_index): (ErrorCode(row.error_code), row.error_message)
        for topic in answer.responses
        for row in topic.partitions
    }


def _alter_request(
    make: Any, assignment: Mapping[Partition, Replicas | None], timeout_ms: int
) -> Any:
    rows = [
        (tp, make.ReassignablePartition(partition_index=tp[1], replicas=replicas))
        for tp, replicas in sorted(assignment.items())
    ]
    return make.message(timeout=timeout_ms, topics=topics(make.ReassignableTopic, rows))


# --- throttles ---


def throttle(session: ClusterSession, moves: Mapping[Partition, Move], rate: int) -> None:
    """Limit copying for these moves to ``rate`` bytes per second and broker. Raises ApiError.

    First the brokers' rates are set, then the topics' throttled replicas: existing replicas in the
    leader's list, added replicas in the follower's.
    """
    nodes = sorted({node for move in moves.values() for node in (*move.replicas, *move.adding)})
    for node in nodes:
        put = dict.fromkeys(RATES, str(rate))
        alter(session, ("broker", str(node)), put, (), execute=True)
    settings: dict[str, tuple[list[str], list[str]]] = {}
    for (topic, index), move in sorted(moves.items()):
        there, coming = settings.setdefault(topic, ([], []))
        there += [f"{index}:{replica}" for replica in move.replicas if replica not in move.adding]
        coming += [f"{index}:{broker_id}" for broker_id in move.adding]
    for topic, sides in settings.items():
        put = {key: ",".join(side) for key, side in zip(THROTTLED, sides, strict=True)}
        alter(session, ("topic", topic), put, (), execute=True)


def throttled(
    session: ClusterSession, nodes: Iterable[int], names: Iterable[str]
) -> list[tuple[str, str]]:
    """Return the brokers and topics that have throttle settings, as ("broker", "1")."""
    resources = [("broker", str(node)) for node in nodes]
    resources += [("topic", name) for name in names]
    with_throttles = {
        (config.kind, config.resource): None
        for config in describe_configs(session, resources, [*RATES, *THROTTLED])
        if config.source == config.kind and config.value
    }
    return list(with_throttles)


def unthrottle(session: ClusterSession, resources: Iterable[tuple[str, str]]) -> None:
    """Remove the throttles of these brokers and topics. Raises ApiError."""
    for kind, name in resources:
        keys = RATES if kind == "broker" else THROTTLED
        alter(session, (kind, name), {}, keys, execute=True)
