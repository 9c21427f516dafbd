"""Steps of a reassignment of a partition's replicas.

Source: ``PartitionReassignmentReplicas``, ``PartitionReassignmentRevert``; KIP-455.
"""

from __future__ import annotations

from fencepost.cluster.controller.errors import InvalidReplicaAssignmentError
from fencepost.cluster.image import PartitionRegistration
from fencepost.logcore.values import dataclass

Replicas = tuple[int, ...]


def is_in_progress(partition: PartitionRegistration) -> bool:
    """Whether a reassignment adds or removes replicas of the partition."""
    return bool(partition.adding_replicas or partition.removing_replicas)


@dataclass(frozen=True, slots=True)
class PartitionReassignmentReplicas:
    """A partition's replicas during a reassignment: the target, then the replicas to remove."""

    replicas: Replicas
    adding: Replicas
    removing: Replicas


def towards(partition: PartitionRegistration, target: Replicas) -> PartitionReassignmentReplicas:
    """Return the first step to another assignment, also while a reassignment is in progress.

    A replica that is still being added stays in ``adding``, so cancelling restores the assignment
    from before the first reassignment (KIP-455). Kafka's controller does not restore that one.
    """
    before = set(partition.replicas) - set(partition.adding_replicas)
    adding = tuple(sorted(set(target) - before))
    removing = tuple(sorted(set(partition.replicas) - set(target)))
    return PartitionReassignmentReplicas((*target, *removing), adding, removing)


def completed(
    replicas: Replicas, adding: Replicas, removing: Replicas, isr: Replicas
) -> tuple[Replicas, Replicas] | None:
    """Return the replicas and the ISR of a completed reassignment; None if it is not complete.

    Every replica that stays must be in the ISR (KAFKA-15665): otherwise records that only the
    removed replicas have would be lost.
    """
    if not adding and not removing:
        return None
    staying = tuple(replica for replica in replicas if replica not in removing)
    in_sync = tuple(broker_id for broker_id in isr if broker_id not in removing)
    if not staying or not in_sync or not set(staying) <= set(in_sync):
        return None
    return staying, in_sync


@dataclass(frozen=True, slots=True)
class PartitionReassignmentRevert:
    """The state that a cancelled reassignment restores."""

    replicas: Replicas
    isr: Replicas
    """Empty if none of the previous replicas is in sync."""


def reverted(partition: PartitionRegistration) -> PartitionReassignmentRevert:
    """Return the assignment without the replicas that are being added.

    Raises InvalidReplicaAssignmentError if no replica would remain.
    """
    adding = set(partition.adding_replicas)
    replicas = tuple(replica for replica in partition.replicas if replica not in adding)
    if not replicas:
        raise InvalidReplicaAssignmentError(
            "Invalid replica assignment: addingReplicas contains all replicas."
        )
    return PartitionReassignmentRevert(
        replicas, tuple(broker_id for broker_id in partition.isr if broker_id not in adding)
    )
