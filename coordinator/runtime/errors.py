"""Why a shard can not serve a request. No class here knows a wire number (``errors.py`` does).

Apart from the runtime, so that the error map needs none of its imports.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ShardError(DomainError):
    """Base of everything that says "not here, not now"."""


class CoordinatorLoadInProgressError(ShardError):
    """The shard is still reading its log; retry (COORDINATOR_LOAD_IN_PROGRESS)."""


class NotCoordinatorError(ShardError):
    """This broker does not serve the shard; look it up again (NOT_COORDINATOR)."""


class CoordinatorNotAvailableError(ShardError):
    """The coordinator is not started, or its topic can not be made (COORDINATOR_NOT_AVAILABLE)."""


class VerificationLostError(ShardError):
    """Nobody has answered whether a partition is in a transaction (NETWORK_EXCEPTION)."""


class TransactionCoordinatorBusyError(ShardError):
    """A transaction can't be verified now; send the batch again (NOT_ENOUGH_REPLICAS)."""
