"""What the transaction coordinator refuses. No class here knows a wire number.

Each docstring names Kafka's error code in capitals; ``coordinator/error_codes.py`` holds the map.
"""

from __future__ import annotations

from fencepost.logcore.machine import DomainError


class TxnError(DomainError):
    """Base of everything the transaction coordinator refuses."""


class InvalidTxnRequestError(TxnError):
    """A field has a value no client may send: an empty id, half an identity (INVALID_REQUEST)."""


class InvalidTransactionTimeoutError(TxnError):
    """The timeout is not positive, or above the broker's maximum (INVALID_TRANSACTION_TIMEOUT)."""


class TwoPhaseCommitDisabledError(TxnError):
    """Two-phase commit is off on this broker (TRANSACTIONAL_ID_AUTHORIZATION_FAILED)."""


class KeepPreparedUnsupportedError(TxnError):
    """Two-phase commit is off, so nothing can be kept (UNSUPPORTED_VERSION)."""


class ConcurrentTransactionsError(TxnError):
    """A transaction of this id is being completed; retry (CONCURRENT_TRANSACTIONS)."""


class ProducerFencedError(TxnError):
    """A newer producer, or the coordinator itself, took the id over (PRODUCER_FENCED)."""


class InvalidProducerIdMappingError(TxnError):
    """The id is unknown or belongs to another producer id (INVALID_PRODUCER_ID_MAPPING)."""


class InvalidTransactionStateError(TxnError):
    """The request does not fit the state of the transaction (INVALID_TXN_STATE)."""


class TransactionAbortableError(TxnError):
    """The partition is not in the transaction, which has to be aborted (TRANSACTION_ABORTABLE)."""


class TransactionalIdNotFoundError(TxnError):
    """Nothing is known of this id (TRANSACTIONAL_ID_NOT_FOUND)."""


class ProducerIdsUnavailableError(TxnError):
    """No producer id can be given out just now; retry (COORDINATOR_LOAD_IN_PROGRESS)."""


class TooManyTransactionalIdsError(TxnError):
    """There is no room for one more id; none was created (POLICY_VIOLATION)."""


class TooManyPartitionsError(TxnError):
    """The transaction would span more partitions than it may (POLICY_VIOLATION)."""


class CoordinatorUnloadedError(TxnError):
    """The shard stopped serving while the request waited; look it up again (NOT_COORDINATOR)."""
