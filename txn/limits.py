"""The limits of the transaction coordinator: name, unit, default, reason.

Each instance serves one shard, so "per shard" limits multiply by the partitions of
``__transaction_state``.
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass

TWO_PHASE_COMMIT_TIMEOUT_MS = 2**31 - 1
"""The stored timeout of a two-phase transaction, which never times out (KIP-939)."""


@dataclass(frozen=True, slots=True)
class TxnLimits:
    """The limits of one shard."""

    max_transaction_timeout_ms: int = 900_000
    """``transaction.max.timeout.ms``. An open transaction holds back every read_committed consumer,
    and the compaction of its partitions, so no producer may keep a transaction open for longer."""

    transactional_id_expiration_ms: int = 604_800_000
    """``transactional.id.expiration.ms``. An id without a new record for a week counts as
    abandoned; without expiry, ids that contain host names or dates would fill the log."""

    two_phase_commit_enable: bool = False
    """``transaction.two.phase.commit.enable``. A two-phase transaction has no timeout, so it may
    hold back consumers for ever: an operator must enable it."""

    max_partitions_per_transaction: int = 10_000
    """The maximum number of partitions in a transaction. Each addition writes the whole set in one
    record, which must fit a batch of 1 MiB: 10,000 partitions with topic names of 30 characters
    take about 0.4 MiB."""

    max_parked_requests: int = 1_000
    """The maximum number of InitProducerId requests that wait for markers in a shard. Further
    requests are answered CONCURRENT_TRANSACTIONS at once, and the client retries, as with Kafka."""

    max_park_ms: int = 5_000
    """The time, in milliseconds, after which a waiting InitProducerId is answered
    CONCURRENT_TRANSACTIONS. Markers take one turn of the event loop unless a partition is offline.
    While the request waits, its connection serves no other request. Clients give up after 30 s."""

    max_sweep: int = 100
    """The maximum number of ids that one decision of an expiry sweep expires. The decision writes
    one batch, and one log line per id, in a single turn of the event loop, during which no other
    request is served."""

    max_sweep_looks: int = 5_000
    """The maximum number of ids that one decision of an expiry sweep examines, in about 2 ms."""

    retry_backoff_ms: int = 1_000
    """The pause before a timed-out transaction is aborted again, if no producer id was reserved the
    first time. It is longer than a reservation takes, and short compared with any timeout."""
