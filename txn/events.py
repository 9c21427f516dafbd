"""The kinds of transaction events in the event history."""

from __future__ import annotations

from enum import StrEnum

RESOLVER_CLIENT_ID = "fencepost-resolve"
"""The client id of ``fencepost txns resolve``. The event history shows by this id that an operator
decided a transaction."""


class EventKind(StrEnum):
    """The kinds of events; the subject of each event is the transactional id."""

    EPOCH_BUMPED = "epoch-bumped"
    PRODUCER_ID_ROTATED = "producer-id-rotated"
    PRODUCER_FENCED = "producer-fenced"
    PRODUCER_REFUSED = "producer-refused"
    TIMEOUT_POSTPONED = "timeout-postponed"
    TRANSACTION_ABORTED = "transaction-aborted"
    TRANSACTION_COMMITTED = "transaction-committed"
    TRANSACTION_KEPT = "transaction-kept"
    TRANSACTION_RESUMED = "transaction-resumed"
    TRANSACTION_TIMED_OUT = "transaction-timed-out"
    TRANSACTIONAL_ID_EXPIRED = "transactional-id-expired"
    RECORDS_PASSED_OVER = "records-passed-over"
