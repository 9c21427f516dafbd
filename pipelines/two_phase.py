"""Consume, write rows, produce: Kafka and a database in one decision (KIP-939).

A worker of :class:`ExactlyOnce` whose transactions have a second party, a database. A transaction
has four steps. The handler writes its rows, without a commit; Kafka acknowledges the records and
the group's offsets; the database stores the decision together with the rows; EndTxn is sent to
Kafka. After a crash of any party, the next claim of the transactional id finds the transaction
still open in Kafka, and ends it as the database has decided. If an administrator has aborted it
there, prepared rows are rolled back, and committed ones are reported as a mixed outcome.

Source: KIP-939.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Generic, TypeVar

import structlog
from aiokafka import AIOKafkaProducer, ConsumerRecord
from aiokafka.errors import ProducerFenced
from aiokafka.producer.transaction_manager import PidAndEpoch, TransactionResult
from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError, AsyncWireClient
from fencepost.client.queries.open_transactions import ONGOING, UNFINISHED
from fencepost.client.queries.resolve import Abort, abort_of
from fencepost.client.queries.session import ClusterSession
from fencepost.client.security import PLAINTEXT, Security
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import (
    InDoubtError,
    MixedOutcomeError,
    NotAuthorizedError,
    PartnerFencedError,
    PipelineError,
    RetryBatch,
    is_fence,
)
from fencepost.pipelines.handler import Outputs
from fencepost.pipelines.offsets import MemberIdentity
from fencepost.pipelines.partners import (
    Decision,
    LockedError,
    Partner,
    TransactionIdentity,
    TransactionKey,
)
from fencepost.pipelines.records import Batch

_log = structlog.get_logger()

C = TypeVar("C")
DatabaseHandler = Callable[[Batch, C], Awaitable[Outputs]]

INIT_PRODUCER_ID = 22
INIT_PRODUCER_VERSION, END_VERSION = 6, 5
"""The version of InitProducerId with Enable2Pc and KeepPreparedTxn, and the version of EndTxn that
bumps the epoch. Without the bump, two transactions would have the same identity."""

COMPLETE_COMMIT = "CompleteCommit"

MAX_LOCKED_TURNS = 200
"""How often a claim finds the id locked in the database before it fails; each turn waits half a
second."""

MAX_HISTORY_TURNS, HISTORY_PAUSE_S = 10, 0.2
"""How often the brokers' history is read for the entry of an abort, and the pause in between.
Apache Kafka keeps no history."""


class Outcome(Enum):
    """How a claim has ended the transaction that it found open."""

    COMMITTED = "committed"
    ABORTED = "aborted"


class _Answer(Enum):
    """Kafka's answer to the commit of a transaction that the database has decided to commit."""

    COMMITTED = "committed, now or before"
    ABORTED = "aborted before"
    FENCED = "a later identity has taken over"


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
        self._bootstrap, self._security = bootstrap, security
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

        Raises TimeoutError if a former owner keeps the id locked in the database, and
        MixedOutcomeError if an administrator has aborted what the database had committed.
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
            # A transaction that was prepared in the meantime may hold the lock.
            finished = await self._finish_prepared() or finished
        raise TimeoutError(
            f"transactional id {self.key.transactional_id}: a former owner keeps its row locked"
        )

    async def _take_over(self) -> Outcome | None:
        outcome = None
        async with self._partner.take_over(self.key) as decided:
            if decided is not None:
                outcome = await self._follow(decided)
            # The row is locked: no former owner can decide now, nor after the block. But if the
            # block fails, one may still decide the transaction that Kafka keeps open: end it later.
            ongoing = await self._init_producer()
        if ongoing is None:
            return outcome
        return await self._end_ongoing(
            ongoing, commit=decided is not None and ongoing == decided.identity
        )

    async def _follow(self, decided: Decision) -> Outcome | None:
        """Commit in Kafka what the database has committed, if that is the id's last transaction.

        Raises MixedOutcomeError if an administrator has aborted it.
        """
        state, current = await self._described()
        # A Complete record has the next identity, whose epoch is 0 after the highest epoch.
        last = decided.identity.epoch
        if state in {"", "Empty", COMPLETE_COMMIT} or current.epoch not in {last, last + 1, 0}:
            return None
        if state == ONGOING and current != decided.identity:
            return None
        answer = await self._commit_as(decided.identity)
        if answer is _Answer.ABORTED:
            # Raise this before InitProducerId, which would hide the abort from the next claim.
            raise await self._mixed_outcome(decided)
        is_done = answer is _Answer.COMMITTED and state == ONGOING
        return self._ended(decided.identity, Outcome.COMMITTED) if is_done else None

    async def _described(self) -> tuple[str, TransactionIdentity]:
        """Return the state of the id in Kafka, "" if there is none, and its identity."""
        name = self.key.transactional_id
        answer = await self._client.call(
            "DescribeTransactions", to_transaction=name, transactional_ids=(name,)
        )
        (state,) = answer.transaction_states
        if state.error_code is ErrorCode.transactional_id_not_found:
            return "", TransactionIdentity(-1, -1)
        if state.error_code is not ErrorCode.none:
            raise ApiError(state.error_code, "DescribeTransactions", name)
        return state.transaction_state, TransactionIdentity(state.producer_id, state.producer_epoch)

    async def _finish_prepared(self) -> Outcome | None:
        """Commit the transactions that PREPARE TRANSACTION has decided, first in Kafka."""
        outcome = None
        for decided in await self._partner.prepared(self.key):
            answer = await self._commit_as(decided)
            if answer is not _Answer.COMMITTED:
                answer = await self._outcome_of(decided)
            if answer is _Answer.COMMITTED:
                await self._partner.finish(self.key, decided)
                outcome = Outcome.COMMITTED
            else:
                await self._partner.roll_back(self.key, decided)
                outcome = Outcome.ABORTED
                _log.warning(
                    "rolled back the prepared rows of a transaction that was aborted in Kafka",
                    transactional_id=self.key.transactional_id,
                    producer_id=decided.producer_id,
                    producer_epoch=decided.epoch,
                )
        return outcome

    async def _commit_as(self, decided: TransactionIdentity) -> _Answer:
        """Commit a decided transaction under its own identity, or repeat its commit.

        The coordinator's answer tells an abort from a commit as long as the identity is the last
        one that had a transaction; after that, EndTxn is answered with a fence.
        """
        try:
            await self._end_txn(decided, commit=True)
        except ApiError as error:
            if error.code is ErrorCode.invalid_txn_state:
                return _Answer.ABORTED
            if is_fence(error) or error.code is ErrorCode.invalid_producer_id_mapping:
                return _Answer.FENCED
            raise
        return _Answer.COMMITTED

    async def _outcome_of(self, decided: TransactionIdentity) -> _Answer:
        """Return the outcome of a prepared transaction whose own EndTxn was refused.

        No transaction follows a prepared one, so the state of the id belongs to the prepared one.
        That transaction may still be open: if a claim has kept it, EndTxn is fenced unless it has
        the identity that the claim received. Raises InDoubtError while the transaction is being
        ended, and PipelineError if the state does not show the outcome.
        """
        name, what = self.key.transactional_id, f"producer {decided.producer_id} epoch"
        state, _ = await self._described()
        if state in {COMPLETE_COMMIT, "CompleteAbort"}:
            return _Answer.COMMITTED if state == COMPLETE_COMMIT else _Answer.ABORTED
        if state == ONGOING and await self._init_producer() == decided:
            await self._end_ongoing(decided, commit=True)
            return _Answer.COMMITTED
        if state in UNFINISHED:
            raise InDoubtError(f"{name}: the transaction of {what} {decided.epoch} is being ended")
        raise PipelineError(
            f"{name}: rows are prepared for {what} {decided.epoch}, and the state {state or 'none'}"
            " of the id in Kafka does not show whether that transaction was committed; `fencepost"
            f" txns resolve {name} --producer-id {decided.producer_id} --epoch {decided.epoch}`"
            " may: then COMMIT PREPARED or ROLLBACK PREPARED"
        )

    async def _mixed_outcome(self, decided: Decision) -> MixedOutcomeError:
        """Return the error, which names both decisions, the earlier one first if that is known."""
        name, (producer_id, epoch) = self.key.transactional_id, decided.identity
        commit = "the database committed it"
        if decided.decided_at is not None:
            commit += f" at {_text(decided.decided_at)}"
        abort, is_first = "Kafka aborted it (the brokers' history does not say when)", False
        entry = await self._abort_in_history(decided.identity)
        if entry is not None:
            at = datetime.fromtimestamp(entry.at_ms / 1000, UTC)
            abort = f"client {entry.client} aborted it in Kafka at {_text(at)} ({entry.cause})"
            is_first = decided.decided_at is not None and at < decided.decided_at
        order = f"{abort}, and then {commit}" if is_first else f"{commit}, and then {abort}"
        return MixedOutcomeError(
            f"the transaction of {name}, producer {producer_id} epoch {epoch}, has a mixed outcome:"
            f" {order}. Its rows are committed, its records and offsets are not. No transaction"
            " begins until that is settled: see docs/two-phase-commit.md, A mixed outcome"
        )

    async def _abort_in_history(self, identity: TransactionIdentity) -> Abort | None:
        """Return the history's entry about the abort, which brokers write a moment after it."""

        def find() -> Abort | None:
            with ClusterSession(
                self._bootstrap, self._timeout_ms / 1000, security=self._security
            ) as session:
                return abort_of(session, self.key.transactional_id, identity)

        for _ in range(MAX_HISTORY_TURNS):
            entry = await asyncio.to_thread(find)
            if entry is not None:
                return entry
            await asyncio.sleep(HISTORY_PAUSE_S)
        return None

    async def _end_ongoing(self, ongoing: TransactionIdentity, *, commit: bool) -> Outcome:
        await self.end(commit=commit)
        return self._ended(ongoing, Outcome.COMMITTED if commit else Outcome.ABORTED)

    def _ended(self, identity: TransactionIdentity, outcome: Outcome) -> Outcome:
        _log.info(
            "ended the transaction in doubt as the database has decided",
            transactional_id=self.key.transactional_id,
            outcome=outcome.value,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
        )
        return outcome

    async def _init_producer(self) -> TransactionIdentity | None:
        """Claim the id in Kafka; return the identity of the transaction that is still open."""
        name = self.key.transactional_id
        try:
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
        except ApiError as error:
            if error.code is not ErrorCode.transactional_id_authorization_failed:
                raise
            user = self._security.username
            raise NotAuthorizedError(
                f"the right WRITE or TWO_PHASE_COMMIT on the transactional id {name} is missing"
                f"{f' to user {user!r}' if user else ''}: {error}"
            ) from error
        self.identity = TransactionIdentity(answer.producer_id, answer.producer_epoch)
        if answer.ongoing_txn_producer_id < 0:
            return None
        return TransactionIdentity(
            answer.ongoing_txn_producer_id, answer.ongoing_txn_producer_epoch
        )

    async def end(self, *, commit: bool) -> None:
        """Send EndTxn; the identity becomes that of the next transaction.

        Raises ApiError; BrokerUnreachable and ConnectionLostError if the outcome is unknown.
        """
        self.identity = await self._end_txn(self.identity, commit=commit)

    async def _end_txn(self, identity: TransactionIdentity, *, commit: bool) -> TransactionIdentity:
        """Send EndTxn, and return the identity of the next transaction."""
        name = self.key.transactional_id
        answer = await self._client.call(
            "EndTxn",
            END_VERSION,
            to_transaction=name,
            transactional_id=name,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            committed=commit,
        )
        ended = TransactionIdentity(answer.producer_id, answer.producer_epoch)
        if ended.producer_id < 0 or ended == identity:
            raise PipelineError(
                "two-phase commit needs transaction.version 2: fencepost features set"
                " transaction.version=2 --execute"
            )
        return ended

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


def _text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds")


class TwoPhase(ExactlyOnce, Generic[C]):
    """One worker whose transactions are committed in Kafka and in a database, or in neither.

    ``handler`` is a coroutine function of a batch and the partner's open transaction; with
    ``Postgres`` that is a ``psycopg.AsyncConnection``. It must neither commit nor roll back. After
    an abort it is called again with the same records. ``transactional_id`` must stay the same over
    a worker's restarts, because only the next claim of the id ends a transaction in doubt. Such a
    transaction has no timeout, and readers wait behind it. For a worker that does not return, call
    :func:`resolve`.
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

    If the worker still runs, it is fenced in both parties.
    """
    owner = TransactionOwner(
        bootstrap, partner, transactional_id, timeout_ms=timeout_ms, security=security
    )
    try:
        return await owner.claim()
    finally:
        await owner.close()
