"""Consume, write rows, produce: Kafka and a database in one decision (KIP-939).

A worker of :class:`ExactlyOnce` whose transactions have a second party, a database. The order of a
transaction: the handler's rows, not committed; the records and the group's offsets, acknowledged;
the decision, with the rows, in the database; EndTxn in Kafka. After a crash of any party, the next
claim of the transactional id finds the transaction still open in Kafka, and ends it as the database
has decided.

Source: KIP-939.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import structlog
from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.errors import ProducerFenced
from aiokafka.producer.transaction_manager import PidAndEpoch, TransactionResult

from fencepost.client.client import ApiError, AsyncWireClient
from fencepost.client.security import PLAINTEXT, Security
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import (
    PartnerFencedError,
    PipelineError,
    RetryBatch,
    is_fence,
)
from fencepost.pipelines.handler import Outputs
from fencepost.pipelines.offsets import MemberIdentity
from fencepost.pipelines.partners import LockedError, Partner, TransactionIdentity, TransactionKey
from fencepost.pipelines.records import Batch

_log = structlog.get_logger()

C = TypeVar("C")
DatabaseHandler = Callable[[Batch, C], Awaitable[Outputs]]

INIT_PRODUCER_ID = 22
INIT_PRODUCER_VERSION, END_VERSION = 6, 5
"""InitProducerId: the version with Enable2Pc and KeepPreparedTxn. EndTxn: the version that bumps
the epoch, without which two transactions would have the same identity."""

MAX_LOCKED_TURNS = 200
"""How often a claim finds the id locked in the database before it fails; each turn waits half a
second."""


class Outcome(Enum):
    """How a claim has ended the transaction that it found open."""

    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionOwner:
    """Claims a transactional id in both parties, and ends its transactions."""

    def __init__(
        self,
        bootstrap: str,
        partner: Partner[Any],
        transactional_id: str,
        *,
        timeout_ms: int = 30_000,
        security: Security = PLAINTEXT,
    ) -> None:
        self.key = TransactionKey("", transactional_id)
        self.identity = TransactionIdentity(-1, -1)
        self._partner = partner
        self._timeout_ms = timeout_ms
        self._client = AsyncWireClient(
            bootstrap,
            client_id=f"{transactional_id}-two-phase",
            timeout_ms=timeout_ms,
            security=security,
        )

    async def close(self) -> None:
        """Close the connections to both parties."""
        await self._partner.close()
        await self._client.close()

    async def claim(self) -> Outcome | None:
        """Fence former owners in both parties, and end the transaction in doubt, if any.

        Raises TimeoutError if a former owner keeps the id locked in the database.
        """
        _, highest = (await self._client.versions()).get(INIT_PRODUCER_ID, (0, 0))
        if highest < INIT_PRODUCER_VERSION:
            raise PipelineError(
                f"the brokers serve InitProducerId up to version {highest}: two-phase commit needs"
                f" version {INIT_PRODUCER_VERSION}, and"
                " transaction.two.phase.commit.enable=true in their configuration"
            )
        await self._partner.open()
        cluster = await self._client.metadata(refresh=True)
        self.key = self.key._replace(cluster_id=cluster.cluster_id or "")
        finished = await self._finish_prepared()
        for _ in range(MAX_LOCKED_TURNS):
            with contextlib.suppress(LockedError):
                return await self._take_over() or finished
            # The lock may be held by a transaction that has been prepared since.
            finished = await self._finish_prepared() or finished
        raise TimeoutError(
            f"transactional id {self.key.transactional_id}: a former owner keeps its row locked"
        )

    async def _take_over(self) -> Outcome | None:
        async with self._partner.take_over(self.key) as decided:
            # The row is locked: from here on only this claim can decide, once the block has ended.
            # Until then a former owner may still decide the transaction that Kafka keeps open.
            ongoing = await self._init_producer()
        if ongoing is None:
            return None
        return await self._end_ongoing(ongoing, commit=ongoing == decided)

    async def _finish_prepared(self) -> Outcome | None:
        """Commit the transactions that PREPARE TRANSACTION has decided, first in Kafka."""
        outcome = None
        for decided in await self._partner.prepared(self.key):
            # None: Kafka's commit came before the crash.
            ongoing = await self._init_producer()
            if ongoing is not None:
                await self._end_ongoing(ongoing, commit=ongoing == decided)
            await self._partner.finish(self.key, decided)
            outcome = Outcome.COMMITTED
        return outcome

    async def _end_ongoing(self, ongoing: TransactionIdentity, *, commit: bool) -> Outcome:
        await self.end(commit=commit)
        outcome = Outcome.COMMITTED if commit else Outcome.ABORTED
        _log.info(
            "ended the transaction in doubt as the database has decided",
            transactional_id=self.key.transactional_id,
            outcome=outcome.value,
            producer_id=ongoing.producer_id,
            producer_epoch=ongoing.epoch,
        )
        return outcome

    async def _init_producer(self) -> TransactionIdentity | None:
        """Claim the id in Kafka; return the identity of the transaction that is still open."""
        name = self.key.transactional_id
        answer = await self._client.call(
            "InitProducerId",
            INIT_PRODUCER_VERSION,
            to_transaction=name,
            transactional_id=name,
            # Without effect: a transaction of a two-phase commit has no timeout.
            transaction_timeout=self._timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            enable2_pc=True,
            keep_prepared_txn=True,
        )
        self.identity = TransactionIdentity(answer.producer_id, answer.producer_epoch)
        if answer.ongoing_txn_producer_id < 0:
            return None
        return TransactionIdentity(
            answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch
        )

    async def end(self, *, commit: bool) -> None:
        """Send EndTxn; the identity becomes the one of the next transaction.

        Raises ApiError; BrokerUnreachable and ConnectionLostError if the outcome is unknown.
        """
        name = self.key.transactional_id
        answer = await self._client.call(
            "EndTxn",
            END_VERSION,
            to_transaction=name,
            transactional_id=name,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.epoch,
            committed=commit,
        )
        ended = TransactionIdentity(answer.producer_id, answer.producer_epoch)
        if ended.producer_id < 0 or ended == self.identity:
            raise PipelineError(
                "two-phase commit needs transaction.version 2: fencepost features set"
                " transaction.version=2 --execute"
            )
        self.identity = ended

    def adopt(self, producer: AIOKafkaProducer) -> None:
        """Let ``producer`` use the claimed identity, and end its transactions by :meth:`end`."""
        manager, sender = producer._txn_manager, producer._sender
        manager.set_pid_and_epoch(*self.identity)

        async def end_transaction(result: TransactionResult) -> None:
            await producer._message_accumulator.flush_for_commit()
            if not manager.is_empty_transaction():
                try:
                    await self.end(commit=result == TransactionResult.COMMIT)
                except ApiError as error:
                    # The only error that aiokafka's sender does not log with a traceback.
                    raise (ProducerFenced() if is_fence(error) else error) from error
                manager._pid_and_epoch = PidAndEpoch(*self.identity)
                manager._sequence_numbers.clear()
            manager.complete_transaction()

        sender._do_txn_commit = end_transaction


class TwoPhase(ExactlyOnce, Generic[C]):
    """One worker whose transactions are committed in Kafka and in a database, or in neither.

    ``handler`` is a coroutine function of a batch and the partner's open transaction; with
    ``Postgres`` that is a ``psycopg.AsyncConnection``. It must neither commit nor roll back. After
    an abort it is called again with the same records. ``transactional_id`` must stay the same over
    a worker's restarts, as only its next claim ends a transaction in doubt: these have no timeout,
    and readers wait behind them. For a worker that does not return, call :func:`resolve`.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        handler: DatabaseHandler[C],
        transactional_id: str,
        partner: Partner[C],
        options: Options | None = None,
    ) -> None:
        async def call(batch: Batch) -> Outputs:
            return await handler(batch, self._database)

        super().__init__(
            bootstrap,
            group=group,
            topics=topics,
            handler=call,
            transactional_id=transactional_id,
            options=options,
        )
        self._partner = partner
        self._database: C
        self._owner = TransactionOwner(
            bootstrap,
            partner,
            transactional_id,
            timeout_ms=self.options.transaction_timeout_ms,
            security=self.options.security,
        )
        self._may_be_decided = False
        """Whether the database may have decided a transaction that Kafka has not ended."""

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await self._owner.close()

    async def _open_producer(
        self, adopt: Callable[[AIOKafkaProducer], None] | None = None
    ) -> AIOKafkaProducer:
        await self._owner.claim()
        self._may_be_decided = False
        return await super()._open_producer(adopt or self._owner.adopt)

    async def _transact(self, records: list[ConsumerRecord], member: MemberIdentity) -> None:
        owner = self._owner
        async with self._partner.transaction(owner.key, owner.identity) as self._database:
            await super()._transact(records, member)

    async def _commit(self, producer: AIOKafkaProducer) -> None:
        decided = self._owner.identity
        self._may_be_decided = True
        try:
            await self._partner.decide()
        except Exception as error:
            refusals = PartnerFencedError | PipelineError | RetryBatch
            self._may_be_decided = not isinstance(error, refusals)
            raise
        await super()._commit(producer)
        await self._partner.finish(self._owner.key, decided)
        self._may_be_decided = False

    async def _abort(self) -> bool:
        """Abort in Kafka, unless the database may have decided to commit."""
        return not self._may_be_decided and await super()._abort()


async def resolve(
    bootstrap: str,
    partner: Partner[Any],
    transactional_id: str,
    *,
    timeout_ms: int = 30_000,
    security: Security = PLAINTEXT,
) -> Outcome | None:
    """End the transaction in doubt of a worker that does not return; None if there is none.

    It fences the worker in both parties, if it still runs.
    """
    owner = TransactionOwner(
        bootstrap, partner, transactional_id, timeout_ms=timeout_ms, security=security
    )
    try:
        return await owner.claim()
    finally:
        await owner.close()
