"""Consume, transform, produce: every input record counts exactly once in the output.

A worker has one consumer, in a group, and one transactional producer. A transaction holds the
outputs of one batch and the group's offsets after it. The offsets are sent with the member's
generation (KIP-447), so that a worker that lost its partitions cannot commit. Before the new owner
reads the partitions, it waits until no open transaction can change their offsets. Works on
Fencepost and on Apache Kafka 2.5 or newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import structlog
from aiokafka import (
    AIOKafkaConsumer,
    AIOKafkaProducer,
    ConsumerRebalanceListener,
    ConsumerRecord,
    TopicPartition,
)
from aiokafka.errors import (
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)

from fencepost.pipelines.batching import Batcher, Limits, record_bytes
from fencepost.pipelines.failures import (
    Action,
    DataLostError,
    MissingTopicError,
    Patience,
    RebalancedError,
    RetryPolicy,
    StoppedError,
    classify,
    explained,
    is_fence,
)
from fencepost.pipelines.handler import DeadLetter, Handler, HandlerCall
from fencepost.pipelines.metrics import Metrics
from fencepost.pipelines.offsets import NO_OFFSET, GroupOffsetClient, MemberIdentity
from fencepost.pipelines.producers import (
    abort_open,
    close_consumer,
    close_producer,
    open_producer,
    send_all,
)
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.security import PLAINTEXT, Security, aiokafka_options, check_login, watched
from fencepost.pipelines.serde import BYTES, Serde
from fencepost.pipelines.stopping import STOP_MS, StopRequest, stop_on_signals
from fencepost.pipelines.topics import TOPIC_WAIT_MS, Topics

_log = structlog.get_logger()

POLL_MS = 200
"""The longest wait for records, and so the longest delay of a stop."""

REFRESH_MS = 1_000
"""How often a worker without partitions refreshes its metadata."""

FIRST_CHECK_MS, LAST_CHECK_MS = 1_000, 30_000
"""The first and the longest pause between two checks of the login; the pauses double. A worker
without a connection makes these checks, because the brokers may refuse its login."""

Restore = Callable[[frozenset[TopicPartition]], Awaitable[None] | None]
Hook = Callable[[Batch], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings with defaults.

    ``restore`` is called with the assigned partitions whenever processing restarts (after a
    rebalance, after any failure): the handler must then read back the state it keeps in memory.
    ``before_commit`` is called when a transaction's records are on the broker but not committed;
    ``after_commit`` once they are. After a revocation of partitions a transaction in progress may
    continue for ``revoke_ms``, after a stop for ``stop_ms``; then it is aborted. ``topic_wait_ms``
    is the wait for a missing topic. ``security`` applies to every client of the pipeline:
    ``Security.of({"security.protocol": "SASL_SSL", …})``.
    """

    limits: Limits = field(default_factory=Limits)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    key_serde: Serde = BYTES
    value_serde: Serde = BYTES
    output_key_serde: Serde | None = None
    output_value_serde: Serde | None = None
    dead_letter: DeadLetter | None = None
    restore: Restore | None = None
    before_commit: Hook | None = None
    after_commit: Hook | None = None
    auto_offset_reset: str = "earliest"
    group_instance_id: str | None = None
    session_timeout_ms: int = 10_000
    transaction_timeout_ms: int = 30_000
    revoke_ms: int = 3_000
    stop_ms: int = STOP_MS
    abort_ms: int = 10_000
    topic_wait_ms: int = TOPIC_WAIT_MS
    progress: Callable[[Metrics], object] | None = None
    progress_ms: int = 5_000
    security: Security = PLAINTEXT
    consumer: Mapping[str, Any] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)


async def _await_result(result: Awaitable[None] | None) -> None:
    if inspect.isawaitable(result):
        await result


class ExactlyOnce(ConsumerRebalanceListener):  # type: ignore[misc]
    """One worker. ``async with ExactlyOnce(...) as pipeline: await pipeline.run()``.

    ``transactional_id`` belongs to this worker and must stay the same over its restarts: the next
    start then ends a killed worker's transaction at once instead of after the transaction timeout.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        handler: Handler,
        transactional_id: str,
        options: Options | None = None,
    ) -> None:
        self.options = options = options or Options()
        self.metrics = Metrics()
        self.is_stopping = StopRequest(options.stop_ms)
        self._bootstrap = bootstrap
        self._group = group
        self._topics = list(topics)
        if not self._topics:
            raise ValueError("a pipeline needs a topic to read")
        self._cluster = Topics(bootstrap, options.security, options.topic_wait_ms)
        self._inputs: Mapping[str, Any] = {}
        """The ids of the input topics; only filled by ``run(to_end=True)``."""
        self._has_inputs = False
        self._transactional_id = transactional_id
        self._call = HandlerCall(
            handler, options.key_serde, options.value_serde, options.dead_letter
        )
        self._out_key = options.output_key_serde or options.key_serde
        self._out_value = options.output_value_serde or options.value_serde
        self._batcher: Batcher[ConsumerRecord] = Batcher(options.limits, record_bytes)
        self._patience = Patience(options.retry)
        self._offsets = GroupOffsetClient(
            bootstrap,
            group,
            timeout_ms=options.transaction_timeout_ms,
            security=options.security,
        )
        self._consumer: AIOKafkaConsumer = None
        self._producer: AIOKafkaProducer | None = None
        self._member = MemberIdentity(-1, "")
        self._settled = False
        """Whether the positions and the handler's state match the committed offsets."""
        self._owning = asyncio.Event()
        """Cleared from a revocation to the next assignment, when this member owns no partitions."""
        self._work: asyncio.Task[None] | None = None
        self._is_transacting = False
        """Whether a transaction is in progress that a stop should wait for."""
        self._ending = False
        """Whether EndTxn is in progress; it may take effect even if it is cancelled."""
        self._is_in_doubt = False
        """Whether a cancelled request may have sent offsets in the producer's current epoch."""
        self._progress_at = 0.0
        self._refreshed_at = 0.0
        self._check_at = 0.0
        self._check_ms = FIRST_CHECK_MS

    async def __aenter__(self) -> Self:
        """Connect.

        Raises GaveUpError if no broker answers for ``retry.start_ms``, AuthenticationError at once
        if a broker refuses the login, StoppedError after :meth:`stop`.
        """
        if await self.is_stopping.run_until_set(self._connect()):
            raise StoppedError("the pipeline was stopped before it had connected")
        return self

    async def _connect(self) -> None:
        retry = self.options.retry
        patience = Patience(replace(retry, give_up_ms=retry.start_ms))
        while True:
            self._consumer = self._new_consumer()
            try:
                await check_login(self._bootstrap, self.options.security)
                await self._consumer.start()
            except BaseException as error:
                await close_consumer(self._consumer, self.is_stopping.left_s)
                if classify(error) is Action.STOP:
                    raise
                await asyncio.sleep(patience.failed(error, time.monotonic() * 1000) / 1000)
            else:
                return

    def _new_consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **{
                "bootstrap_servers": self._bootstrap,
                "group_id": self._group,
                "client_id": self._transactional_id,
                "group_instance_id": self.options.group_instance_id,
                "enable_auto_commit": False,
                # Never reset silently: records deleted by retention must be noticed.
                "auto_offset_reset": "none",
                "isolation_level": "read_committed",
                "session_timeout_ms": self.options.session_timeout_ms,
                "heartbeat_interval_ms": max(100, self.options.session_timeout_ms // 10),
                "retry_backoff_ms": 50,
                **aiokafka_options(self.options.security),
                **self.options.consumer,
            }
        )

    async def __aexit__(self, *_exc: object) -> None:
        await self._cancel_work(0)
        if self._producer is not None:
            await self._abort()
        await self._give_up_producer()
        await close_consumer(self._consumer, self.is_stopping.left_s)
        await self._offsets.close()
        await self._cluster.close()
        # Another pipeline may use the handler's state next, so no call may still be running.
        await self._call.settled()

    # --- the group's calls ---

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Wait for the transaction in progress, or abort it, before the partitions move on."""
        self._owning.clear()
        self._settled = False
        self.metrics.rebalances += bool(revoked)
        await self._cancel_work(self.options.revoke_ms / 1000)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Note the member id and generation of the assignment."""
        del assigned  # self._consumer.assignment() has them
        coordinator = self._consumer._coordinator  # aiokafka's public API has no generation
        self._member = MemberIdentity(
            coordinator.generation, coordinator.member_id, self.options.group_instance_id
        )
        self._settled = False
        self._owning.set()

    async def _cancel_work(self, patience_s: float) -> None:
        work = self._work
        if work is None or work.done():
            return
        if patience_s:
            await asyncio.wait([work], timeout=patience_s)
        if not work.done() and not self._ending:
            work.cancel()
        # EndTxn is not cancelled: the coordinator may already have decided.
        await asyncio.wait([work], timeout=self._abort_s())

    def _abort_s(self) -> float:
        return self.is_stopping.left_s(self.options.abort_ms / 1000)

    # --- the loop ---

    @property
    def is_settled(self) -> bool:
        """Whether the worker owns its partitions and continues from their committed offsets."""
        return self._settled

    def stop(self) -> None:
        """Ask for a stop: a transaction in progress has ``stop_ms`` to end, no other begins."""
        self.is_stopping.set()

    async def run(self, *, to_end: bool = False, handle_signals: bool = True) -> None:
        """Work until :meth:`stop`, SIGTERM or SIGINT; with ``to_end`` until all input is read.

        Raises PipelineError, or the broker's error, if a retry is useless; with ``to_end``
        MissingTopicError for an input topic that does not exist.
        """
        with stop_on_signals(self.stop) if handle_signals else contextlib.nullcontext():
            await self.is_stopping.run_until_set(
                self._loop(to_end=to_end), lambda: self._is_transacting
            )

    async def _loop(self, *, to_end: bool) -> None:
        while not self.is_stopping.is_set():
            try:
                if not self._has_inputs:
                    await self._find_inputs(to_end=to_end)
                if await self._turn() and to_end and await self._is_at_end():
                    return
            except Exception as error:  # noqa: BLE001 - classified, and raised if unknown
                await self._recover(error)

    async def _find_inputs(self, *, to_end: bool) -> None:
        """Look up the input topics before aiokafka does, which may create missing ones."""
        if to_end:
            self._inputs = await self._cluster.required(self._topics, self._inputs)
        is_first = not self._consumer.subscription()
        if is_first and not to_end:
            missing = set(self._topics) - (await self._cluster.present(self._topics)).keys()
            if missing:
                _log.warning(await self._cluster.absence(sorted(missing)), group=self._group)
        if is_first:
            self._consumer.subscribe(self._topics, listener=self)
        self._has_inputs = True

    async def _turn(self) -> bool:
        """Restart from the committed state if necessary, or else process one batch.

        Return whether there was no record.
        """
        self._report_progress()
        self._check_rights()
        if not self._owning.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._owning.wait(), POLL_MS / 1000)
            return False
        if not self._settled:
            await self._guarded(self._settle())
            return False
        member = self._member
        records = await self._gather()
        if not self.is_settled:
            return False  # after a rebalance the records may belong to another member
        if not records:
            await self._refresh()
            await self._check_login()
            if self._has_nothing_to_do():
                self._patience.succeeded()
            return True
        await self._guarded(self._transact(records, member))
        self._patience.succeeded()
        return False

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` such that a rebalance can wait for it or cancel it."""
        self._work = asyncio.create_task(work)
        try:
            await watched(self._work, self._bootstrap, self.options.security)
            self._work.result()
        except asyncio.CancelledError:
            if self._work.cancelled():
                raise RebalancedError("the group has revoked the partitions") from None
            self._work.cancel()
            await asyncio.wait([self._work], timeout=self._abort_s())
            raise
        finally:
            self._ending = self._is_transacting = False

    async def _settle(self) -> None:
        """Restart from the committed state: producer, positions, and the handler's state."""
        await self._call.settled()
        self._batcher.clear()
        member = self._member
        if self._producer is None:
            self._producer = await self._open_producer()
        assigned = frozenset(self._consumer.assignment())
        if assigned:
            starts = await self._offsets.stable(assigned)
            unknown = [source for source, start in starts.items() if start == NO_OFFSET]
            if unknown:
                starts.update(await self._first_offsets(unknown))
            for source, start in starts.items():
                self._consumer.seek(source, start)
            if self.options.restore is not None:
                await _await_result(self.options.restore(assigned))
        if member == self._member and self._owning.is_set():
            self._settled = True

    async def _open_producer(
        self, adopt: Callable[[AIOKafkaProducer], None] | None = None
    ) -> AIOKafkaProducer:
        return await open_producer(
            self._bootstrap,
            self._transactional_id,
            self.options.transaction_timeout_ms,
            self.options.producer,
            self.options.security,
            self.is_stopping.left_s,
            adopt,
        )

    async def _refresh(self) -> None:
        """Refresh the metadata of a worker without partitions.

        If the group was joined while the broker was away, its leader assigned only the partitions
        that it knew then, and aiokafka would refresh its metadata only minutes later.
        """
        now = time.monotonic() * 1000
        if self._consumer.assignment() or now - self._refreshed_at < REFRESH_MS:
            return
        self._refreshed_at = now
        # A change makes the consumer rejoin; there is no public way to refresh.
        await self._consumer._client.force_metadata_update()

    def _check_rights(self) -> None:
        """Raise authorization errors that aiokafka reports only with records, or never."""
        self._consumer._coordinator.check_errors()
        hidden = self._consumer._client.cluster.unauthorized_topics.intersection(self._topics)
        if hidden:
            raise TopicAuthorizationFailedError(*sorted(hidden))

    async def _check_login(self) -> None:
        """Stop if the brokers no longer accept the login, which aiokafka would retry forever.

        Raises AuthenticationError and SecurityError.
        """
        now = time.monotonic() * 1000
        connections = self._consumer._client._conns.values()
        if self.options.security == PLAINTEXT or any(
            connection.connected() for connection in connections
        ):
            self._check_at, self._check_ms = now + FIRST_CHECK_MS, FIRST_CHECK_MS
        elif now >= self._check_at:
            self._check_ms = min(2 * self._check_ms, LAST_CHECK_MS)
            await check_login(self._bootstrap, self.options.security)
            self._check_at = time.monotonic() * 1000 + self._check_ms

    async def _first_offsets(self, sources: list[TopicPartition]) -> dict[TopicPartition, int]:
        ends = (
            self._consumer.beginning_offsets
            if self.options.auto_offset_reset == "earliest"
            else self._consumer.end_offsets
        )
        offsets: dict[TopicPartition, int] = await ends(sources)
        return offsets

    async def _gather(self) -> list[ConsumerRecord]:
        """Return the records of one transaction; none if no record arrives, or after a stop."""
        batcher = self._batcher
        while self._settled and not self.is_stopping.is_set():
            now = time.monotonic() * 1000
            if batcher.is_full(now):
                return batcher.take(now)
            wait = min(POLL_MS, batcher.left_ms(now)) if len(batcher) else POLL_MS
            try:
                polled = await self._consumer.getmany(
                    timeout_ms=int(wait) + 1, max_records=batcher.room
                )
            except NoOffsetForPartitionError:
                continue  # aiokafka looked for a committed offset before the seek of _settle
            except OffsetOutOfRangeError as error:
                raise DataLostError(f"deleted before they were read: {error}") from error
            now = time.monotonic() * 1000
            for records in polled.values():
                batcher.add(records, now)
            if not len(batcher):
                return []
        return []

    async def _transact(self, records: list[ConsumerRecord], member: MemberIdentity) -> None:
        """Do one transaction: handler, outputs, offsets, commit.

        ``member`` is the membership under which the records were read. A worker that has rejoined
        the group since then must not commit their offsets: another member may own the partitions by
        now.
        """
        producer = self._producer
        if producer is None:
            raise RebalancedError("no producer")
        self._is_transacting = True
        batch, outputs, letters = await self._call(records)
        outputs, letters = await self._writable(outputs, letters)
        await producer.begin_transaction()
        there = self._cluster.check_existing
        await send_all(producer, outputs, self._out_key, self._out_value, there)
        await send_all(producer, letters, BYTES, BYTES, there)
        if self.options.before_commit is not None:
            await _await_result(self.options.before_commit(batch))
        behind: dict[TopicPartition, int] = {}
        for record in records:
            behind[TopicPartition(record.topic, record.partition)] = record.offset + 1
        try:
            await self._offsets.add(producer, behind, member)
        except asyncio.CancelledError:
            self._is_in_doubt = True
            raise
        self._ending = True
        await self._commit(producer)
        self.metrics.transactions += 1
        self.metrics.records_in += len(records)
        self.metrics.records_out += len(outputs)
        self.metrics.refused += len(letters)
        if self.options.after_commit is not None:
            await _await_result(self.options.after_commit(batch))

    async def _commit(self, producer: AIOKafkaProducer) -> None:
        """Commit the transaction, whose records and offsets are acknowledged."""
        await producer.commit_transaction()

    async def _writable(
        self, outputs: list[Output], letters: list[Output]
    ) -> tuple[list[Output], list[Output]]:
        """Return outputs and dead letters, with unwritable outputs moved to the dead letters.

        Raises RecordRefusedError if no dead-letter topic is configured, MissingTopicError if the
        configured topic does not exist.
        """
        self._is_transacting = False  # the next call may wait for topics; a stop interrupts that
        refused = await self._cluster.unwritable({output.topic for output in outputs})
        for output in outputs if refused else ():
            if output.topic in refused:
                raw = self._out_key.dump(output.key), self._out_value.dump(output.value)
                letters.append(self._call.unwritable(output, *raw, refused[output.topic]))
        lost = await self._cluster.unwritable({letter.topic for letter in letters})
        if lost:
            raise MissingTopicError(f"dead letters cannot be written: {', '.join(lost.values())}")
        self._is_transacting = True
        return [output for output in outputs if output.topic not in refused], letters

    async def _recover(self, error: Exception) -> None:
        """Abort, then raise the error or restart from the committed state."""
        action = classify(error)
        self._settled = self._has_inputs = False
        self._batcher.clear()
        self._cluster.forget()
        # Offsets from a request whose answer was not awaited may arrive after the abort, and would
        # then join the next transaction of the same epoch. A new producer has a new epoch.
        if action is Action.REOPEN or self._is_in_doubt or not await self._abort():
            await self._give_up_producer()
            self.metrics.reopened += 1
        if action is Action.STOP:
            raise explained(error, self._topics, self.options.security.username)
        if isinstance(error, RebalancedError):
            return
        self.metrics.fences += is_fence(error)
        await asyncio.sleep(self._patience.failed(error, time.monotonic() * 1000) / 1000)

    async def _abort(self) -> bool:
        """Abort an open transaction. Return whether the producer can be used further."""
        producer = self._producer
        if producer is None:
            return False
        self.metrics.aborts += producer._txn_manager.is_in_transaction()
        return await abort_open(producer, self._abort_s())

    async def _give_up_producer(self) -> None:
        producer, self._producer = self._producer, None
        self._is_in_doubt = False
        if producer is not None:
            await close_producer(producer, self.is_stopping.left_s)

    # --- progress ---

    def _has_nothing_to_do(self) -> bool:
        """Return whether all records are read, according to the broker's last responses."""
        return (
            all(
                self._consumer.last_stable_offset(source) is not None
                for source in self._consumer.assignment()
            )
            and not self.lag()
        )

    async def _is_at_end(self) -> bool:
        """Return whether all committed records of the assigned partitions are read."""
        await self._cluster.required(self._topics, self._inputs)
        assigned = list(self._consumer.assignment())
        if not self._settled or not assigned:
            return False
        ends = await self._consumer.end_offsets(assigned)
        for source, end in ends.items():
            if await self._consumer.position(source) < end:
                return False
        return self._settled and not len(self._batcher)

    def _report_progress(self) -> None:
        if self.options.progress is None:
            return
        now = time.monotonic() * 1000
        if now - self._progress_at < self.options.progress_ms:
            return
        self._progress_at = now
        self.metrics.lag = self.lag()
        self.options.progress(self.metrics)

    def lag(self) -> int:
        """Return the number of unread offsets in the assigned partitions, as of the last fetch."""
        behind = 0
        for source in self._consumer.assignment():
            end = self._consumer.last_stable_offset(source)
            position = self._consumer._subscription.subscription.assignment.state_value(
                source
            )._position
            if end is not None and end >= 0 and position is not None:
                behind += max(0, end - position)
        return behind + len(self._batcher)
