"""Errors of shards that cannot serve a request, without numeric codes (see ``error_codes.py``).

The module is separate so that the error map imports nothing else of the runtime.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class ShardError(DomainError):
    """Base of the errors of a shard that this broker does not serve now."""


class CoordinatorLoadInProgressError(ShardError):
    """The shard is still reading its log; retry (COORDINATOR_LOAD_IN_PROGRESS)."""


class NotCoordinatorError(ShardError):
    """This broker does not serve the shard; find the coordinator again (NOT_COORDINATOR)."""


class CoordinatorNotAvailableError(ShardError):
    """The topic is missing, or its replicas are too few or too slow (COORDINATOR_NOT_AVAILABLE)."""


class VerificationLostError(ShardError):
    """The verification of a transaction got no response (NETWORK_EXCEPTION)."""


class TransactionCoordinatorBusyError(ShardError):
    """A transaction cannot be verified now; resend the batch (NOT_ENOUGH_REPLICAS)."""
