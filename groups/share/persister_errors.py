"""The meaning of the share coordinator's errors for a share partition and its clients."""

from __future__ import annotations

from typing import Final

from fencepost.groups.share import errors
from fencepost.logcore.machine import DomainError

FENCING_ERRORS: Final = (
    errors.FencedStateEpochError,
    errors.FencedShareLeaderEpochError,
    errors.SharePartitionFencedError,
    errors.UnknownSharePartitionError,
    errors.ShareGroupGoneError,
)
"""Errors of the share coordinator after which the share partition must be dropped and read again:
``SharePartitionManager.fencedSharePartitionHandler``."""


def reading_failed(error: DomainError) -> DomainError:
    """Return the error of a fetch whose share partition could not be read.

    Clients accept few errors in a ShareFetch response, and no error of coordinators: Kafka's answer
    COORDINATOR_NOT_AVAILABLE raises IllegalStateException in Java's consumer.
    """
    if isinstance(error, errors.FencedStateEpochError | errors.FencedShareLeaderEpochError):
        return errors.SharePartitionFencedError(str(error))
    if isinstance(error, errors.UnknownSharePartitionError):
        return error
    return errors.SharePartitionFailedError(str(error))


def writing_failed(error: DomainError) -> DomainError:
    """Return the error of an acknowledgement whose state could not be written.

    Source: ``SharePartition.fetchPersisterError``.
    """
    if isinstance(error, errors.FencedStateEpochError | errors.FencedShareLeaderEpochError):
        return errors.SharePartitionFencedError(str(error))
    if isinstance(error, errors.ShareCoordinatorUnloadedError):
        return errors.ShareCoordinatorUnavailableError(str(error))
    reported_as_is = (
        errors.SharePartitionFencedError,
        errors.ShareCoordinatorUnavailableError,
        errors.UnknownSharePartitionError,
        errors.ShareGroupGoneError,
    )
    return (
        error if isinstance(error, reported_as_is) else errors.SharePartitionFailedError(str(error))
    )
