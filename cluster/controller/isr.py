"""ISR changes by leaders, and the log directories of replicas as brokers report them.

Source: ``ReplicationControlManager.alterPartition``/``validateAlterPartitionData``/
``handleAssignReplicasToDirs``; KIP-497, KIP-841, KIP-858, KIP-903.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from uuid import UUID

from fencepost.cluster.controller.errors import (
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    NotAReplicaError,
    NotControllerError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.outcome import ControllerResult, PartitionChange, events_of
from fencepost.cluster.controller.partition_change import RECOVERED, RECOVERING, Election
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import (
    LOST,
    MIGRATING,
    NO_LEADER,
    PartitionRegistration,
    TopicImage,
)
from fencepost.cluster.records import MetadataRecord
from fencepost.logcore.errors import FencedLeaderEpochError
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

TopicIdPartition = tuple[UUID, int]
"""A partition: its topic's id, and its index."""


@dataclass(frozen=True, slots=True)
class ProposedIsr:
    """A leader's proposed ISR (kafka: ``AlterPartitionRequest.PartitionData``)."""

    topic_id: UUID
    index: int
    leader_epoch: int
    partition_epoch: int
    """The partition epoch that the leader knows; the request is refused if it has changed."""
    new_isr: tuple[tuple[int, int], ...]
    """Members and their broker epochs; an epoch of -1 is not checked."""
    leader_recovery_state: int = RECOVERED


def alter_partition(
    view: ControllerView, broker_id: int, broker_epoch: int, items: Sequence[ProposedIsr]
) -> ControllerResult[list[PartitionRegistration | DomainError]]:
    """Change the ISR of each partition; the answers are in the order of the items.

    Raises StaleBrokerEpochError. A NewLeaderElectedError among the answers means that the change
    was made and completed a reassignment that removes the sender.
    """
    view.registered(broker_id, broker_epoch)
    answers: list[PartitionRegistration | DomainError] = []
    changes: list[PartitionChange] = []
    for item in items:
        try:
            topic = _validate(view, broker_id, item)
        except DomainError as error:
            answers.append(without_traceback(error))
            continue
        change = view.change(topic, item.index)
        if view.allows_unclean_election(topic.name):
            change.election = Election.UNCLEAN
        # The leader learns the new ISR from the response, not from a new leader epoch.
        change.raises_leader_epoch, change.is_alter_partition = False, change.raises_leader_epoch
        change.isr = tuple(replica for replica, _ in item.new_isr)
        change.leader_recovery_state = item.leader_recovery_state
        altered = view.changed(topic, change, f"AlterPartition of the leader, broker {broker_id}")
        changes += altered
        after = altered[0].after if altered else change.partition
        answers.append(
            after
            if after.leader == broker_id
            else NewLeaderElectedError(f"broker {after.leader} leads since the reassignment ended")
        )
    return ControllerResult(
        answers, tuple(change.record for change in changes), events=tuple(events_of(changes))
    )


def _validate(view: ControllerView, broker_id: int, item: ProposedIsr) -> TopicImage:
    """Return the topic of a valid change; the order of the checks is Kafka's."""
    topic = view.image.topics_by_id.get(item.topic_id)
    if topic is None:
        raise UnknownTopicIdError(f"there is no topic {item.topic_id}")
    partition = view.image.partition(item.topic_id, item.index)
    if partition is None:
        raise UnknownTopicOrPartitionError(f"there is no partition {topic.name}-{item.index}")
    if (
        item.leader_epoch > partition.leader_epoch
        or item.partition_epoch > partition.partition_epoch
    ):
        # The sender has newer metadata than this controller, which therefore is no longer active.
        raise NotControllerError("this controller is behind the partition's leader")
    if item.leader_epoch < partition.leader_epoch:
        raise FencedLeaderEpochError(
            f"the leader epoch is {partition.leader_epoch}, not {item.leader_epoch}"
        )
    if broker_id != partition.leader:
        raise InvalidRequestError(f"broker {partition.leader} leads, not {broker_id}")
    if item.partition_epoch < partition.partition_epoch:
        raise InvalidUpdateVersionError(
            f"the partition epoch is {partition.partition_epoch}, not {item.partition_epoch}"
        )
    _check_isr(partition, item)
    reasons = [f"{replica} ({reason})" for replica, reason in _ineligible(view, item)]
    if reasons:
        raise IneligibleReplicaError(f"ineligible replicas: {', '.join(reasons)}")
    return topic


def _check_isr(partition: PartitionRegistration, item: ProposedIsr) -> None:
    isr = [replica for replica, _ in item.new_isr]
    if not isr or len(set(isr)) != len(isr) or not set(isr) <= set(partition.replicas):
        raise InvalidRequestError(f"{isr} cannot be the ISR of replicas {list(partition.replicas)}")
    if partition.leader not in isr:
        raise InvalidRequestError(f"the ISR {isr} is without the leader")
    if item.leader_recovery_state not in (RECOVERED, RECOVERING):
        raise InvalidRequestError(f"there is no recovery state {item.leader_recovery_state}")
    if item.leader_recovery_state == RECOVERING:
        if len(isr) > 1:
            raise InvalidRequestError("a leader that recovers is alone in its ISR")
        if partition.leader_recovery_state == RECOVERED:
            raise InvalidRequestError("a leader that has recovered does not recover again")


def _ineligible(view: ControllerView, item: ProposedIsr) -> list[tuple[int, str]]:
    replicas = []
    for replica, epoch in item.new_isr:
        broker = view.image.brokers.get(replica)
        if broker is None:
            replicas.append((replica, "not registered"))
        elif broker.in_controlled_shutdown:
            replicas.append((replica, "shutting down"))
        elif broker.fenced:
            replicas.append((replica, "fenced"))
        elif epoch not in (-1, broker.epoch):
            replicas.append(
                (replica, f"broker epoch mismatch: requested={epoch} VS expected={broker.epoch}")
            )
    return replicas


def record_lost_replicas(
    view: ControllerView,
    broker_id: int,
    lost: Iterable[TopicIdPartition],
    recovered: Iterable[TopicIdPartition],
) -> ControllerResult[None]:
    """Record the lost and the recovered replicas that a broker's LeaderAndIsr response reports.

    Source: ``KafkaController.processLeaderAndIsrResponseReceived``.
    """
    changes: list[PartitionChange] = []
    for partitions, directory in ((lost, LOST), (recovered, MIGRATING)):
        for topic_id, index in partitions:
            topic = view.image.topics_by_id.get(topic_id)
            partition = view.image.partition(topic_id, index)
            if topic is None or partition is None or broker_id not in partition.replicas:
                continue
            is_lost = directory == LOST
            if is_lost == (partition.directory_of(broker_id) == LOST):
                continue
            change = view.change(topic, index, removed=broker_id if is_lost else NO_LEADER)
            change.directories = {broker_id: directory}
            if is_lost:
                change.isr = tuple(replica for replica in partition.isr if replica != broker_id)
            elif partition.leader < 0 and view.is_active(broker_id):
                change.is_acceptable = partial(_is_active_or, broker_id, change.is_acceptable)
            if view.allows_unclean_election(topic.name):
                change.election = Election.UNCLEAN
            cause = f"broker {broker_id} {'cannot read' if is_lost else 'has'} its replica"
            changes += view.changed(topic, change, cause)
    return ControllerResult(
        None, tuple(change.record for change in changes), events=tuple(events_of(changes))
    )


def _is_active_or(broker_id: int, is_active: Callable[[int], bool], candidate: int) -> bool:
    return candidate == broker_id or is_active(candidate)


@dataclass(frozen=True, slots=True)
class DirectoryAssignment:
    """The log directory of a replica (kafka: ``AssignReplicasToDirsRequest``)."""

    directory: UUID
    topic_id: UUID
    index: int


def assign_replicas_to_dirs(
    view: ControllerView, broker_id: int, broker_epoch: int, items: Sequence[DirectoryAssignment]
) -> ControllerResult[list[DomainError | None]]:
    """Record the directories of a broker's replicas; those in offline directories leave the ISR.

    Raises StaleBrokerEpochError. The answers are in the order of the items.
    """
    broker = view.registered(broker_id, broker_epoch)
    answers: list[DomainError | None] = []
    changes: list[PartitionChange] = []
    for item in items:
        topic = view.image.topics_by_id.get(item.topic_id)
        partition = view.image.partition(item.topic_id, item.index)
        if topic is None:
            answers.append(UnknownTopicIdError(f"there is no topic {item.topic_id}"))
        elif partition is None:
            answers.append(
                UnknownTopicOrPartitionError(f"there is no partition {topic.name}-{item.index}")
            )
        elif broker_id not in partition.replicas:
            answers.append(
                NotAReplicaError(f"{topic.name}-{item.index} has no replica on {broker_id}")
            )
        else:
            is_online = broker.has_online(item.directory)
            change = view.change(topic, item.index, removed=-1 if is_online else broker_id)
            change.directories = {broker_id: item.directory}
            if not is_online:
                change.isr = tuple(replica for replica in partition.isr if replica != broker_id)
            cause = f"broker {broker_id} reported the directory of its replica"
            changes += view.changed(topic, change, cause)
            answers.append(None)
    records: tuple[MetadataRecord, ...] = tuple(change.record for change in changes)
    return ControllerResult(answers, records, events=tuple(events_of(changes)))
