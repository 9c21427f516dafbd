"""A controller's answers to AlterPartition, as the model of a broker gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from fencepost.cluster.alter_partition import AlterPartitionRequest
from fencepost.cluster.controller import isr
from fencepost.cluster.controller.errors import (
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    NotControllerError,
    StaleBrokerEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.errors import Errors
from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.isr import AlteredPartition
from fencepost.logcore.errors import FencedLeaderEpochError
from fencepost.logcore.machine import DomainError

ERRORS: Final[Mapping[type[DomainError], int]] = {
    StaleBrokerEpochError: Errors.STALE_BROKER_EPOCH,
    IneligibleReplicaError: Errors.INELIGIBLE_REPLICA,
    InvalidRequestError: Errors.INVALID_REQUEST,
    InvalidUpdateVersionError: Errors.INVALID_UPDATE_VERSION,
    NewLeaderElectedError: Errors.NEW_LEADER_ELECTED,
    NotControllerError: Errors.NOT_CONTROLLER,
    UnknownTopicIdError: Errors.UNKNOWN_TOPIC_ID,
    UnknownTopicOrPartitionError: Errors.UNKNOWN_TOPIC_OR_PARTITION,
    FencedLeaderEpochError: Errors.FENCED_LEADER_EPOCH,
}


def _altered(answer: PartitionRegistration | DomainError) -> int | AlteredPartition:
    if isinstance(answer, DomainError):
        return ERRORS[type(answer)]
    return AlteredPartition(answer.leader_epoch, answer.partition_epoch, answer.isr)


def altered(
    decide: Callable[[Callable[[Controller], ControllerResult[Any]]], Any],
    request: AlterPartitionRequest,
) -> dict[tuple[UUID, int], int | AlteredPartition]:
    """Have a controller decide on an AlterPartition; return each partition's result or error.

    Raises StaleBrokerEpochError.
    """
    items = [
        isr.ProposedIsr(
            one.topic_id,
            one.index,
            one.leader_epoch,
            one.partition_epoch,
            one.new_isr,
            one.leader_recovery_state,
        )
        for one in request.changes
    ]
    answers = decide(
        lambda machine: machine.alter_partition(request.broker_id, request.broker_epoch, items)
    )
    return {
        (one.topic_id, one.index): _altered(answer)
        for one, answer in zip(request.changes, answers, strict=True)
    }
