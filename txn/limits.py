"""Every bound of the transaction coordinator: name, unit, default, reason.

Each instance serves one shard, so "per shard" bounds multiply by the partitions of
``__transaction_state``.
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass

TWO_PHASE_COMMIT_TIMEOUT_MS = 2**31 - 1
"""The stored timeout of a two-phase transaction, which never times out (KIP-939)."""


@dataclass(frozen=True, slots=True)
class TxnLimits:
    """The bounds of one shard."""

    max_transaction_timeout_ms: int = 900_000
    """``transaction.max.timeout.ms``. An open transaction holds back every read_committed reader
    and compaction of its partitions, so nobody may keep one open for longer."""

    transactional_id_expiration_ms: int = 604_800_000
    """``transactional.id.expiration.ms``. An id at rest for a week belongs to nobody; without the
    bound, ids made of host names or dates would fill the log for ever."""

    two_phase_commit_enable: bool = False
    """``transaction.two.phase.commit.enable``. A two-phase transaction has no timeout, so it may
    hold back readers without end: an operator has to want that."""

    max_partitions_per_transaction: int = 10_000
    """Partitions. The whole set is written again with every addition and must fit a record batch:
    with topic names of 30 characters this is about 0.4 MiB of the topic's 1 MiB."""

    max_parked_requests: int = 1_000
    """InitProducerId requests per shard that wait for markers. Beyond it they are answered
    CONCURRENT_TRANSACTIONS at once, and the client asks again, as it does with Kafka."""

    max_park_ms: int = 5_000
    """Milliseconds such a request waits before it is answered CONCURRENT_TRANSACTIONS after all.
    Markers take one turn unless a partition is off line; a connection serves nothing else while
    its request waits, and clients give up after 30 s."""

    max_sweep: int = 100
    """Ids forgotten by one decision of a sweep. Its records are one batch, its events as many lines
    of the log, and all that one turn of the loop, during which no other request is served."""

    max_sweep_looks: int = 5_000
    """Ids that one decision of a sweep looks at, for the same reason: about 2 ms."""

    retry_backoff_ms: int = 1_000
    """Wait before a timed-out transaction is tried again that could not be aborted for want of a
    producer id. Longer than a reservation takes, short against any timeout."""
