"""Replicas, leaders and health of partitions; brokers and the controller quorum; elections.

Source: DescribeTopicPartitions (KIP-966), Metadata, DescribeCluster (KIP-700, KIP-919),
DescribeQuorum (KIP-595), ElectLeaders (KIP-183, KIP-460).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError, BrokerUnreachable
from fencepost.client.queries.lag import PartitionOffsets, bounds_of
from fencepost.client.queries.session import check
from fencepost.client.requests import Partition
from fencepost.protocol.api import ApiKey

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

NO_LEADER = -1
"""The leader id of a partition without a leader."""

PARTITIONS_PER_ANSWER = 2_000
PREFERRED, UNCLEAN = 0, 1
"""Election types of ElectLeaders."""

METADATA_TOPIC = "__cluster_metadata"


class PartitionDescription(NamedTuple):
    """One partition. ``elr`` is None if the brokers do not report it: before Kafka 4.0."""

    topic: str
    partition: int
    leader: int
    epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...] | None
    last_known_elr: tuple[int, ...] | None
    offline: tuple[int, ...]

    @property
    def preferred(self) -> int:
        """The preferred leader: the first replica of the assignment."""
        return self.replicas[0] if self.replicas else NO_LEADER

    @property
    def live(self) -> tuple[int, ...]:
        """Replicas on brokers that are up."""
        return tuple(replica for replica in self.replicas if replica not in self.offline)


def partition_states(
    session: ClusterSession, topics: Iterable[str] | None = None
) -> list[PartitionDescription]:
    """Return the partitions of ``topics``, or all, by topic and index. Raises ApiError."""
    topic_rows = session.topics(topics)
    versions = session.client.versions()
    states = {}
    if ApiKey.DESCRIBE_TOPIC_PARTITIONS in versions:
        states = _eligible(session, [topic.name for topic in topic_rows])
    descriptions = []
    for topic in topic_rows:
        for index, row in sorted(topic.partitions.items()):
            elr, last_known = states.get((topic.name, index), (None, None))
            descriptions.append(
                PartitionDescription(
                    topic.name,
                    index,
                    row.leader,
                    row.leader_epoch,
                    row.replicas,
                    row.in_sync,
                    elr,
                    last_known,
                    row.offline,
                )
            )
    return descriptions


def states_and_offsets(
    session: ClusterSession, topics: Collection[str]
) -> tuple[list[PartitionDescription], dict[Partition, PartitionOffsets]]:
    """Return the partitions of ``topics``, and the offsets that their leaders report.

    Until a dead broker is fenced, the other brokers still report it as leader. If a leader does not
    answer, look the leaders up again, and return no offsets for partitions that it still leads.
    Raises ApiError.
    """
    offsets: dict[Partition, PartitionOffsets] = {}
    unreachable = {NO_LEADER}
    while True:
        states = partition_states(session, topics)
        unasked: dict[int, list[Partition]] = defaultdict(list)
        for state in states:
            place = state.topic, state.partition
            if place not in offsets and state.leader not in unreachable:
                unasked[state.leader].append(place)
        if not unasked:
            return states, offsets
        for leader, places in unasked.items():
            try:
                offsets |= bounds_of(session, places)
            except BrokerUnreachable:
                unreachable.add(leader)


_Eligible = tuple[tuple[int, ...], tuple[int, ...]]


def _eligible(session: ClusterSession, topics: Sequence[str]) -> dict[Partition, _Eligible]:
    """Return the eligible leader replicas of each partition, and the last known ones."""
    eligible: dict[Partition, _Eligible] = {}
    cursor: Any = None
    while topics:
        answer = session.client.call(
            "DescribeTopicPartitions",
            check=False,
            entity=partial(_describe_partitions, topics=topics, cursor=cursor),
        )
        for topic in answer.topics:
            if topic.error_code:
                continue
            for row in topic.partitions:
                eligible[topic.name, row.partition_index] = (
                    tuple(row.eligible_leader_replicas or ()),
                    tuple(row.last_known_elr or ()),
                )
        cursor = answer.next_cursor
        if cursor is None:
            break
    return eligible


def _describe_partitions(make: Any, topics: Sequence[str], cursor: Any) -> Any:
    return make.message(
        topics=[make.TopicRequest(name=name) for name in topics],
        response_partition_limit=PARTITIONS_PER_ANSWER,
        cursor=cursor
        and make.Cursor(topic_name=cursor.topic_name, partition_index=cursor.partition_index),
    )


# --- brokers ---


class BrokerDescription(NamedTuple):
    """One broker. ``fenced`` is None if not reported: before Kafka 4.0, or for lack of rights."""

    broker: int
    host: str
    port: int
    rack: str | None
    fenced: bool | None


def brokers(session: ClusterSession) -> list[BrokerDescription]:
    """Return all registered brokers, including fenced ones if the cluster reports them.

    Raises ApiError.
    """
    highest = session.client.versions().get(ApiKey.DESCRIBE_CLUSTER, (0, -1))[1]
    if highest < 2:
        return _brokers_of_metadata(session)
    answer = session.client.call(
        "DescribeCluster",
        check=False,
        entity=lambda f: f.message(
            include_cluster_authorized_operations=False,
            endpoint_type=1,
            include_fenced_brokers=True,
        ),
    )
    if answer.error_code is ErrorCode.cluster_authorization_failed:
        return _brokers_of_metadata(session)
    check(answer.error_code, "DescribeCluster", None, answer.error_message)
    return [
        BrokerDescription(broker.broker_id, broker.host, broker.port, broker.rack, broker.is_fenced)
        for broker in sorted(answer.brokers, key=lambda broker: int(broker.broker_id))
    ]


def _brokers_of_metadata(session: ClusterSession) -> list[BrokerDescription]:
    addresses = session.client.metadata(refresh=True).brokers
    return [
        BrokerDescription(node, address.host, address.port, address.rack, fenced=None)
        for node, address in sorted(addresses.items())
    ]


class QuorumDescription(NamedTuple):
    """The controller quorum: the active controller, its epoch, and the log end of each node."""

    controller: int
    epoch: int
    high_watermark: int
    voters: frozenset[int]
    log_ends: Mapping[int, int]


def is_elected_of_brokers(session: ClusterSession) -> bool:
    """Return whether the brokers elect the controller on ZooKeeper, so that there is no quorum."""
    return ApiKey.DESCRIBE_QUORUM not in session.client.versions()


def quorum(session: ClusterSession) -> QuorumDescription | None:
    """Return the controller quorum; None if there is none, or this user may not describe it."""
    if is_elected_of_brokers(session):
        return None
    answer = session.client.call(
        "DescribeQuorum",
        check=False,
        entity=lambda f: f.message(
            topics=[
                f.TopicData(
                    topic_name=METADATA_TOPIC, partitions=[f.PartitionData(partition_index=0)]
                )
            ]
        ),
    )
    if answer.error_code or not answer.topics or answer.topics[0].partitions[0].error_code:
        return None
    row = answer.topics[0].partitions[0]
    return QuorumDescription(
        row.leader_id,
        row.leader_epoch,
        row.high_watermark,
        frozenset(voter.replica_id for voter in row.current_voters),
        {
            replica.replica_id: replica.log_end_offset
            for replica in (*row.current_voters, *row.observers)
        },
    )


def active_controller(session: ClusterSession, description: QuorumDescription | None) -> int | None:
    """Return the id of the active controller; None if this user may not describe the quorum.

    With a quorum, the controller id in Metadata is a random broker that forwards requests.
    """
    if description is not None:
        return description.controller
    return session.controller if is_elected_of_brokers(session) else None


# --- health ---


def problems(state: PartitionDescription, min_isr: int, adding: Collection[int] = ()) -> list[str]:
    """Return the problems of a partition, the worst first, in Kafka's words.

    Replicas that a reassignment is ``adding`` do not count as missing.
    """
    names = []
    if state.leader == NO_LEADER:
        names.append("offline")
    if len(state.isr) < min(min_isr, len(state.replicas)):
        names.append("under min ISR")
    if len(state.isr) < len(set(state.replicas) - set(adding)):
        names.append("under replicated")
    return names


def restart_problem(
    state: PartitionDescription, broker: int, min_isr: int, down: Collection[int]
) -> str | None:
    """Return why a partition is unavailable while ``broker`` restarts; None if it is available.

    ``down`` are brokers that cannot lead. The result is None for every partition without a replica
    on ``broker``, even an offline one: the restart does not affect it.
    """
    if broker not in state.replicas:
        return None
    if len(state.replicas) == 1:
        return "no other replica"
    if state.leader == NO_LEADER:
        return "offline"
    left = set(state.isr) - {broker, *down, *state.offline}
    if not left:
        return "no other replica is in sync"
    if len(left) < min(min_isr, len(state.replicas)):
        return "under min ISR without it"
    return None


def quorum_without(quorum: QuorumDescription, broker: int) -> str | None:
    """Return why the controllers lack a majority while ``broker`` restarts; None if they have one.

    A voter counts if it has reported its log end, and has every committed record.
    """
    if broker not in quorum.voters:
        return None
    current = {
        voter for voter in quorum.voters if quorum.log_ends.get(voter, -1) >= quorum.high_watermark
    }
    needed = len(quorum.voters) // 2 + 1
    if len(current - {broker}) >= needed:
        return None
    if quorum.voters == {broker}:
        return f"broker {broker} is the only controller"
    return f"{len(current - {broker})} controllers would be left, and {needed} are a majority"


# --- elections ---


def elect(
    session: ClusterSession, kind: int, partitions: Collection[Partition]
) -> dict[Partition, tuple[ErrorCode, str | None]]:
    """Elect leaders; return the result for each partition. Raises ApiError if the request fails."""
    indexes: dict[str, list[int]] = {}
    for topic, index in partitions:
        indexes.setdefault(topic, []).append(index)
    answer = session.client.call(
        "ElectLeaders",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            election_type=kind,
            topic_partitions=[
                f.TopicPartitions(topic=topic, partitions=topic_indexes)
                for topic, topic_indexes in indexes.items()
            ],
            timeout=session.timeout_ms,
        ),
    )
    check(getattr(answer, "error_code", 0), "ElectLeaders")
    results = {
        (topic.topic, row.partition_id): (ErrorCode(row.error_code), row.error_message)
        for topic in answer.replica_election_results
        for row in topic.partition_result
    }
    missing = [partition for partition in partitions if partition not in results]
    if missing:
        topic, index = missing[0]
        raise ApiError(ErrorCode.unknown_topic_or_partition, "ElectLeaders", f"{topic}-{index}")
    return results


def unregister(session: ClusterSession, broker: int) -> None:
    """Unregister a broker. Raises ApiError."""
    answer = session.client.call(
        "UnregisterBroker",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(broker_id=broker),
    )
    check(answer.error_code, "UnregisterBroker", None, answer.error_message)
