"""The errors that the transaction coordinator raises. None contains a protocol error code.

Each docstring names Kafka's error in capitals; ``coordinator/error_codes.py`` maps the classes to
codes.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class TxnError(DomainError):
    """Base of every error of the transaction coordinator."""


class InvalidTxnRequestError(TxnError):
    """A field is invalid, such as an empty id or a producer id without epoch (INVALID_REQUEST)."""


class InvalidTransactionTimeoutError(TxnError):
    """The timeout is not positive, or above the broker's maximum (INVALID_TRANSACTION_TIMEOUT)."""


class TwoPhaseCommitDisabledError(TxnError):
    """Two-phase commit is off on this broker (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class KeepPreparedUnsupportedError(TxnError):
    """Two-phase commit is off, so no transaction can be kept (UNSUPPORTED_VERSION)."""


class ConcurrentTransactionsError(TxnError):
    """A transaction of this id is being completed; retry (CONCURRENT_TRANSACTIONS)."""


class ProducerFencedError(TxnError):
    """A newer producer or the coordinator has taken over the id (PRODUCER_FENCED)."""


class InvalidProducerIdMappingError(TxnError):
    """The id is unknown or belongs to another producer id (INVALID_PRODUCER_ID_MAPPING)."""


class InvalidTransactionStateError(TxnError):
    """The request does not fit the state of the transaction (INVALID_TXN_STATE)."""


class TransactionAbortableError(TxnError):
    """The partition is not in the transaction, which must be aborted (TRANSACTION_ABORTABLE)."""


class TransactionalIdNotFoundError(TxnError):
    """The transactional id is unknown (TRANSACTIONAL_ID_NOT_FOUND)."""


class ProducerIdsUnavailableError(TxnError):
    """No producer id is available at the moment; retry (COORDINATOR_LOAD_IN_PROGRESS)."""


class TooManyTransactionalIdsError(TxnError):
    """The memory budget has no room for another id; none was created (POLICY_VIOLATION)."""


class TooManyPartitionsError(TxnError):
    """The transaction would have more partitions than allowed (POLICY_VIOLATION)."""


class CoordinatorUnloadedError(TxnError):
    """The shard stopped serving; find the coordinator again (NOT_COORDINATOR)."""
