"""Steps of a reassignment of a partition's replicas.

Source: ``PartitionReassignmentReplicas``, ``PartitionReassignmentRevert``; KIP-455.
"""

from __future__ import annotations

from fencepost.cluster.controller.errors import InvalidReplicaAssignmentError
from fencepost.cluster.image import PartitionRegistration
from fencepost.logcore.values import dataclass

Replicas = tuple[int, ...]


def is_in_progress(partition: PartitionRegistration) -> bool:
    """Whether replicas are on their way to or from the partition."""
    return bool(partition.adding_replicas or partition.removing_replicas)


@dataclass(frozen=True, slots=True)
class Reassignment:
    """What the partition has while it moves: the target first, then who is to go."""

    replicas: Replicas
    adding: Replicas
    removing: Replicas


def towards(partition: PartitionRegistration, target: Replicas) -> Reassignment:
    """The first step to another assignment, also where one is under way.

    A replica that is still being added stays one of those: so calling off leads back to where the
    first of the reassignments began (KIP-455), where Kafka's controller forgets that.
    """
    before = set(partition.replicas) - set(partition.adding_replicas)
    adding = tuple(sorted(set(target) - before))
    removing = tuple(sorted(set(partition.replicas) - set(target)))
    return Reassignment((*target, *removing), adding, removing)


def completed(
    replicas: Replicas, adding: Replicas, removing: Replicas, isr: Replicas
) -> tuple[Replicas, Replicas] | None:
    """The replicas and the ISR of the last step; None if it is not yet time, or none is under way.

    Every replica that stays must be in the ISR (KAFKA-15665): with fewer, records that only those
    have who go would be lost with them.
    """
    if not adding and not removing:
        return None
    staying = tuple(one for one in replicas if one not in removing)
    in_sync = tuple(one for one in isr if one not in removing)
    if not staying or not in_sync or not set(staying) <= set(in_sync):
        return None
    return staying, in_sync


@dataclass(frozen=True, slots=True)
class Revert:
    """What a reassignment that is called off goes back to."""

    replicas: Replicas
    isr: Replicas
    """Empty where none of the replicas from before is in sync."""


def reverted(partition: PartitionRegistration) -> Revert:
    """The assignment without those that are being added.

    Raises InvalidReplicaAssignmentError where nobody would stay.
    """
    adding = set(partition.adding_replicas)
    replicas = tuple(one for one in partition.replicas if one not in adding)
    if not replicas:
        raise InvalidReplicaAssignmentError(
            "Invalid replica assignment: addingReplicas contains all replicas."
        )
    return Revert(replicas, tuple(one for one in partition.isr if one not in adding))
