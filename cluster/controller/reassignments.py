"""Starting, replacing, cancelling and listing reassignments. An ISR change completes them.

Source: ``ReplicationControlManager.alterPartitionReassignments``; KIP-455, KIP-860.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.cluster.controller.errors import (
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    NoReassignmentInProgressError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.outcome import ControllerResult, PartitionChange, events_of
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.reassignment_steps import is_in_progress, reverted, towards
from fencepost.cluster.controller.topics import check_assignment
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import PartitionRegistration, TopicImage
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class ReassignablePartition:
    """Move a partition to these brokers; None cancels the reassignment in progress."""

    topic: str
    index: int
    replicas: tuple[int, ...] | None


def alter_partition_reassignments(
    view: ControllerView,
    items: Sequence[ReassignablePartition],
    *,
    allow_replication_factor_change: bool = True,
    may_wait: bool = False,
) -> ControllerResult[list[DomainError | None]]:
    """Start, replace or cancel each reassignment; the answers are in the order of the items.

    With ``may_wait``, a target broker may register later (kafka: ``/admin/reassign_partitions``).
    """
    answers: list[DomainError | None] = []
    changes: list[PartitionChange] = []
    for item in items:
        try:
            changes += _alter(view, item, allow_replication_factor_change, may_wait)
        except DomainError as error:
            answers.append(without_traceback(error))
        else:
            answers.append(None)
    records = tuple(change.record for change in changes)
    return ControllerResult(answers, records, events=tuple(events_of(changes)))


def _alter(
    view: ControllerView, item: ReassignablePartition, allow_factor_change: bool, may_wait: bool
) -> list[PartitionChange]:
    topic = view.image.topics.get(item.topic)
    if topic is None or not 0 <= item.index < len(topic.partitions):
        # The message omits the name: it may be long, and a request may name thousands of
        # partitions.
        raise UnknownTopicOrPartitionError(f"there is no partition {item.index} of this topic")
    partition = topic.partitions[item.index]
    if item.replicas is None:
        return _cancel(view, topic, item.index, partition)
    check_assignment(view, item.replicas, may_wait=may_wait)
    if not allow_factor_change:
        _check_factor(partition, item.replicas)
    step = towards(partition, item.replicas)
    change = view.change(topic, item.index)
    change.replicas, change.adding, change.removing = step.replicas, step.adding, step.removing
    return view.changed(topic, change, "AlterPartitionReassignments")


def _check_factor(partition: PartitionRegistration, target: tuple[int, ...]) -> None:
    """Raise if the replication factor would change; removed replicas do not count (KIP-860)."""
    factor = len(set(partition.replicas) - set(partition.removing_replicas))
    if len(target) != factor:
        raise InvalidReplicationFactorError(
            f"The replication factor is changed from {factor} to {len(target)}"
        )


def _cancel(
    view: ControllerView, topic: TopicImage, index: int, partition: PartitionRegistration
) -> list[PartitionChange]:
    if not is_in_progress(partition):
        raise NoReassignmentInProgressError("No partition reassignment is in progress.")
    former = reverted(partition)
    may_be_unclean = view.allows_unclean_election(topic.name)
    if not former.isr and not may_be_unclean:
        raise InvalidReplicaAssignmentError(
            f"Unable to revert partition assignment for {topic.name}:{index} because it would "
            "require an unclean leader election."
        )
    change = view.change(topic, index)
    if may_be_unclean:
        change.election = Election.UNCLEAN
    change.isr, change.replicas = former.isr, former.replicas
    change.adding = change.removing = ()
    return view.changed(topic, change, "the reassignment was cancelled")


def resume_reassignments(
    view: ControllerView, partitions: Sequence[tuple[str, int]]
) -> ControllerResult[None]:
    """Continue reassignments that another controller began (ZooKeeper).

    A reassignment whose new replicas are all in sync is completed. The replicas of any other
    reassignment are informed again, because the other controller may not have informed them.

    Source: ``KafkaController.maybeResumeReassignments``.
    """
    changes: list[PartitionChange] = []
    for name, index, partition in list_partition_reassignments(view, partitions):
        change = view.change(view.image.topics[name], index)
        change.always_writes = partition.leader >= 0
        changes += view.changed(view.image.topics[name], change, "the reassignment is resumed")
    return ControllerResult(
        None, tuple(partition.record for partition in changes), events=tuple(events_of(changes))
    )


def list_partition_reassignments(
    view: ControllerView, partitions: Sequence[tuple[str, int]] | None
) -> list[tuple[str, int, PartitionRegistration]]:
    """Return the reassignments in progress, of these partitions or of all."""
    if partitions is None:
        rows = ((topic.name, index, partition) for topic, index, partition in view.partitions())
    else:
        rows = (
            (name, index, view.image.topics[name].partitions[index])
            for name, index in partitions
            if name in view.image.topics and 0 <= index < len(view.image.topics[name].partitions)
        )
    return [row for row in rows if is_in_progress(row[2])]
