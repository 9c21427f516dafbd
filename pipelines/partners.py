"""The other party of a two-phase commit: a database that decides each transaction.

The decision is in one place, the database. A Kafka transaction is prepared once all of its records
and offsets are acknowledged; it then has no timeout. It commits if, and only if, the database has
durably stored its identity, in the same transaction as the rows of the handler. Only an
administrator can abort it against that decision; see :class:`~.failures.MixedOutcomeError`.

Sources: KIP-939, ``KafkaProducer.completeTransaction`` (which compares the stored identity).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar

C_co = TypeVar("C_co", covariant=True)


class LockedError(Exception):
    """A former owner of the transactional id is about to decide, or has a prepared transaction."""


class TransactionKey(NamedTuple):
    """A transactional id. Clusters that share a database may use the same one."""

    cluster_id: str
    transactional_id: str


class TransactionIdentity(NamedTuple):
    """A producer id and epoch. With transaction version 2 they identify one transaction."""

    producer_id: int
    epoch: int


class Decision(NamedTuple):
    """The last transaction of a transactional id that the database decided."""

    identity: TransactionIdentity
    decided_at: datetime | None
    """By the database's clock; None if the database does not store the time."""


class Partner(Protocol[C_co]):
    """A database that takes part in the transactions of one worker.

    A method raises PartnerUnavailableError if the database cannot be reached; the outcome of the
    call may then be unknown.
    """

    async def open(self) -> None:
        """Connect. Every claim connects again, so that a broken connection is replaced."""

    async def close(self) -> None:
        """Close the connection; an undecided transaction is rolled back."""

    async def prepared(self, key: TransactionKey) -> Sequence[TransactionIdentity]:
        """Return the decided transactions whose rows are prepared, and not visible yet."""

    def take_over(self, key: TransactionKey) -> AbstractAsyncContextManager[Decision | None]:
        """Fence former owners of the id, and yield the transaction that was decided last.

        Within the block no transaction of the id can be decided. After the block former owners
        cannot decide either, unless the block has raised an exception. Raises LockedError while a
        former owner holds the row.
        """

    def transaction(
        self, key: TransactionKey, identity: TransactionIdentity
    ) -> AbstractAsyncContextManager[C_co]:
        """Run a transaction; roll it back at the end of the block unless it was decided."""

    async def decide(self) -> None:
        """Store the identity of the open transaction durably, with its rows.

        Raises PartnerFencedError if another owner has taken over the id. Nothing was stored if this
        error, a PipelineError or RetryBatch is raised. After any other error, such as InDoubtError,
        and after a cancellation, the outcome is unknown.
        """

    async def finish(self, key: TransactionKey, identity: TransactionIdentity) -> None:
        """Make the rows of a decided transaction visible, if they are not yet."""

    async def roll_back(self, key: TransactionKey, identity: TransactionIdentity) -> None:
        """Roll back a prepared transaction that Kafka has aborted."""
