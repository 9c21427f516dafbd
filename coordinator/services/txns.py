"""The transaction coordinator of this broker: ``fencepost.txn.machine`` on ``__transaction_state``.

If this broker leads all partitions of a transaction, EndTxn usually takes one turn. The Prepare
record, every marker and the Complete record are appended before the response is sent, so that the
next transaction does not get CONCURRENT_TRANSACTIONS. A crash in between leaves Prepare in the log,
and loading continues from there.

Source: ``TransactionCoordinator``, ``TransactionStateManager``, ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import structlog

from fencepost.coordinator.metadata.epoch_checks import RESET_IDS
from fencepost.coordinator.metadata.metadata import TRANSACTION_VERSION, InternalTopic
from fencepost.coordinator.metadata.names import TRANSACTION_STATE
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.errors import CoordinatorNotAvailableError, ShardError
from fencepost.coordinator.runtime.late_imports import TXN_MODULES
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import Remember, ShardRuntime
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.services.base import ShardedCoordinator
from fencepost.coordinator.services.marker_writer import (
    CompleteOffsets,
    MarkerWriter,
    OtherBrokers,
)
from fencepost.coordinator.services.verification import (
    FIRST_ADDING_PARTITIONS,
    VerificationState,
    VerifyRemotely,
    completes_after,
    remote_verdicts,
    retry_of_concurrent,
    verification_error,
    verification_state,
)
from fencepost.coordinator.storage.appends import RequestState, Verdicts
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import DomainError, InvariantViolation, Machine
from fencepost.logcore.partition import Partition
from fencepost.logcore.tracebacks import without_traceback
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    DescribeTransaction,
    ExpireTransactionalIds,
    InitProducerIdResult,
    ListTransactions,
    ListTransactionsResult,
    ReserveProducerIds,
    TopicPartition,
    WriteMarkers,
)
from fencepost.txn.errors import (
    ProducerIdsUnavailableError,
)
from fencepost.txn.ids import BlockProducerIds, ProducerIdBlock, needs_producer_id
from fencepost.txn.limits import TxnLimits

if TYPE_CHECKING:
    from fencepost.txn.machine import TxnMachine
    from fencepost.txn.marker_queues import NoDestination


RETRY_IDS_MS: Final = 50
"""The delay before the controller is asked again after it returned no producer ids (kafka:
``RETRY_BACKOFF_MS`` of ``RPCProducerIdManager``)."""

WAIT_FOR_IDS_MS: Final = 1_000
"""The time after which a request without a producer id gets COORDINATOR_LOAD_IN_PROGRESS."""

AllocateProducerIds = Callable[[], Awaitable[ProducerIdBlock]]
"""Returns a block for this broker alone; raises ProducerIdsUnavailableError, or
ProducerIdsExhaustedError if this process is the controller."""

_log = structlog.get_logger(__name__)


class TxnCoordinator(ShardedCoordinator["TxnMachine"]):
    """Coordinates this broker's transactions and hands out producer ids (``services.txns``).

    ``complete_offsets`` makes the group coordinator commit or drop a transaction's offsets.
    """

    MODULES = TXN_MODULES

    def __init__(
        self,
        storage: Storage,
        remember: Remember,
        internal_topic: InternalTopic,
        allocate: AllocateProducerIds,
        *,
        complete_offsets: CompleteOffsets,
    ) -> None:
        super().__init__(
            storage,
            remember,
            internal_topic,
            TRANSACTION_STATE,
            upkeep=ExpireTransactionalIds(),
            interval="transaction.remove.expired.transaction.cleanup.interval.ms",
            commit_timeout="request.timeout.ms",
            all_in_sync=True,
        )
        self._commits, self._logs = storage.commits, storage.logs
        self._ids = BlockProducerIds()
        self._memory = self._budget("fencepost.transactional.ids.max.bytes")
        self._reservation: asyncio.Task[None] | None = None
        self.commits = 0
        """The number of commits that were decided, or resumed after loading, by this process."""
        self.aborts = 0
        """The number of aborts, by clients or timeouts, counted as :attr:`commits` are."""
        self.markers = MarkerWriter(
            storage,
            self._shards.timers,
            complete_offsets,
            leader_of=self.leader_of,
            epoch_of=self.coordinator_epoch,
        )
        """Writes the markers of ended transactions to all partitions."""
        self.verify_remotely: VerifyRemotely | None = None
        """Asks coordinators on other brokers; None on a standalone broker."""
        self.allocate = allocate
        """Asks the active controller, which may be this process, for a block of producer ids."""

    async def stop(self) -> None:
        """Close every shard; delayed requests get NOT_COORDINATOR."""
        if self._reservation is not None:
            if self.verify_remotely is not None:
                self._reservation.cancel()  # the controller may never answer
            await asyncio.wait({self._reservation})
        self.markers.close()
        await self._shards.close()

    # --- elections -------------------------------------------------------------------------------

    def elected(self, index: int, leader_epoch: int) -> None:
        """See :class:`ShardedCoordinator`."""
        super().elected(index, leader_epoch)
        self._give_up_markers(index)

    def resigned(self, index: int, leader_epoch: int | None) -> None:
        """See :class:`ShardedCoordinator`; the next coordinator writes the shard's markers."""
        super().resigned(index, leader_epoch)
        self._give_up_markers(index)

    def _give_up_markers(self, index: int) -> None:
        """Drop the markers of an inactive shard: the broker that loads it writes them again."""
        if self.coordinator_epoch(index) is None:
            self.markers.unload(index)

    def coordinator_epoch(self, index: int) -> int | None:
        """Return the epoch in which this broker serves a partition of the topic, or None."""
        try:
            shard = self._shards.shard_at(index)
        except ShardError:
            return None
        return shard.coordinator_epoch if shard.state is ShardState.ACTIVE else None

    def leader_of(self, partition: TopicPartition) -> int | NoDestination:
        """Return the leader, which must get the marker (kafka: ``getPartitionLeaderEndpoint``)."""
        from fencepost.txn.marker_queues import NoDestination  # noqa: PLC0415 - see MarkerWriter.queues

        registration = self._replicas.registration(*partition)
        if registration is None:
            return NoDestination.NO_PARTITION
        leader = registration.leader
        is_known = leader == self._replicas.node_id or leader in self._metadata.image.brokers
        return leader if is_known else NoDestination.NO_LEADER

    def join_others(
        self,
        others: OtherBrokers,
        verify_remotely: VerifyRemotely,
        allocate: AllocateProducerIds,
    ) -> None:
        """Begin to use the other brokers and the controller of a cluster.

        ``others`` write the markers of the partitions that they lead, ``verify_remotely`` asks a
        transaction coordinator on another broker, and ``allocate`` asks the controller for producer
        ids.
        """
        self.markers.join(others)
        self.verify_remotely, self.allocate = verify_remotely, allocate

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self, key: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """See :class:`ShardedCoordinator`; a command that needs a producer id waits for one."""
        if not needs_producer_id(command):
            return super().submit(key, command, origin)
        return self._with_ids(partial(super().submit, key, command, origin))

    def new_producer(self) -> asyncio.Future[object]:
        """Return a producer id and epoch without a transactional id; nothing is stored.

        The result is an :class:`InitProducerIdResult`, or ProducerIdsUnavailableError.
        """
        return self._with_ids(self._new_producer)

    def _new_producer(self) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(InitProducerIdResult(self._ids.next_id(), 0))
        except ProducerIdsUnavailableError as error:
            future.set_exception(without_traceback(error))
        return future

    async def list_transactions(self, command: ListTransactions) -> ListTransactionsResult:
        """Merge the transactions of all shards that are served here.

        Raises CoordinatorLoadInProgressError while any shard is loading.
        """
        results = await self._everywhere(command, ListTransactionsResult)
        unknown = dict.fromkeys(state for result in results for state in result.unknown_states)
        listed = chain.from_iterable(result.transactions for result in results)
        return ListTransactionsResult(listed, tuple(unknown))

    # --- verification ----------------------------------------------------------------------------

    def verify(
        self,
        api: str,
        version: int,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        origin: Origin | None = None,
        request_state: RequestState | None = None,
    ) -> Verdicts | asyncio.Future[None]:
        """Verify that partitions are in the producer's transaction before it writes to them.

        ``api`` is ``"Produce"`` or ``"TxnOffsetCommit"``; its version decides whether partitions
        are added (TV2) or only verified. The returned verdicts are valid in the same turn of the
        event loop, in which the transaction cannot end before the append. The API's clients
        understand the returned errors (KIP-890, ``AddPartitionsToTxnManager``).

        If a future is returned, call again with the same ``request_state`` once it is done. The
        coordinator may be on another broker, or it may be completing the previous transaction. Or
        the record that adds the partitions to the transaction is not committed yet: if that record
        were lost, the appended batches would belong to no transaction.
        """
        adds = version >= FIRST_ADDING_PARTITIONS[api]
        if not adds and not self._config.bool("transaction.partition.verification.enable"):
            return dict.fromkeys(partitions)
        command = AddPartitions(
            transactional_id,
            producer_id,
            producer_epoch,
            tuple(partitions),
            verify_only=not adds,
            client_transaction_version=2 if adds else 0,
        )
        verification = verification_state({} if request_state is None else request_state)

        def client_error(error: DomainError | None) -> DomainError | None:
            return verification_error(error, api, version)

        ask = self.verify_remotely
        if ask is not None and self.coordinator_of(transactional_id) != self._replicas.node_id:
            verdicts = remote_verdicts(verification, command, self._logs, ask, client_error)
        else:
            verdicts = self._local_verdicts(command, verification, origin, client_error)
        if adds and request_state is not None and not isinstance(verdicts, asyncio.Future):
            backoff_ms = self._config.int("add.partitions.to.txn.retry.backoff.ms")
            most_ms = self._config.int("add.partitions.to.txn.retry.backoff.max.ms")
            verdicts = retry_of_concurrent(verification, verdicts, backoff_ms, most_ms) or verdicts
        return verdicts

    def _local_verdicts(
        self,
        command: AddPartitions,
        verification: VerificationState,
        origin: Origin | None,
        client_error: Callable[[DomainError | None], DomainError | None],
    ) -> Verdicts | asyncio.Future[None]:
        """Return the verdicts of this broker's shard, or a future for the commit of its record."""
        name, partitions = command.transactional_id, command.partitions
        future = self._shards.submit(name, command, origin, reply_before_flush=True)
        if not future.done():
            raise InvariantViolation("AddPartitions was not answered in its own turn")
        error = future.exception()  # always retrieved, or the event loop would log it
        held = self._until_committed(name, verification)
        if held is not None:
            if not isinstance(held, DomainError):
                return held
            error = held
        if error is None:
            result = future.result()
            if not isinstance(result, AddPartitionsResult):
                raise InvariantViolation(f"AddPartitions was answered {result!r}")
            missing = result.errors
        elif isinstance(error, DomainError):
            missing = dict.fromkeys(partitions, error)
        else:
            raise error
        return {partition: client_error(missing.get(partition)) for partition in partitions}

    def _until_committed(
        self, transactional_id: str, verification: VerificationState
    ) -> asyncio.Future[None] | DomainError | None:
        """Return a future for the commit of the id's last record; None if it is committed.

        Later records of other ids do not count: in a busy log they would delay the caller forever.
        If the followers do not replicate the record within ``request.timeout.ms``, the result is
        CoordinatorNotAvailableError.
        """
        try:
            shard = self._shards.shard_for(transactional_id)
        except ShardError:
            return None
        offset = shard.machine.last_offset(transactional_id)
        if offset is None or offset < shard.partition.high_watermark:
            return None
        held = self._commits.committed((shard.partition,))
        if held is None or not shard.partition.marks.is_replicated:
            return held
        now, timeout_ms = asyncio.get_running_loop().time(), self._config.int("request.timeout.ms")
        if verification.waits_until is None:
            verification.waits_until = now + timeout_ms / 1000
        if now >= verification.waits_until:
            held.cancel()
            return CoordinatorNotAvailableError(f"{shard.name}: not replicated in time")
        return completes_after((verification.waits_until - now) * 1000, held)

    def coordinator_of(self, transactional_id: str) -> int | None:
        """Return the broker that coordinates an id; None if no broker does at the moment."""
        try:
            index = self.partition_for(transactional_id)
        except ShardError:
            return None
        image = self._metadata.image
        leader = image.topics[TRANSACTION_STATE].partitions[index].leader
        return leader if leader in image.brokers else None

    # --- internals -------------------------------------------------------------------------------

    def _run_effect(
        self,
        shard: ShardRuntime[Machine],
        effect: object,
        _now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        if isinstance(effect, WriteMarkers):
            if effect.commit:
                self.commits += 1
            else:
                self.aborts += 1
            index = shard.partition.index
            self.markers.write(effect, index, shard.report, first_attempt_done)
        elif isinstance(effect, ReserveProducerIds):
            self._reserve()
            first_attempt_done()
        else:
            raise InvariantViolation(f"not an effect of transactions: {effect!r}")

    def _with_ids(self, ask: Callable[[], asyncio.Future[object]]) -> asyncio.Future[object]:
        """Call ``ask`` once a producer id is available, and return its answer.

        An id is available at once, except right after the broker starts. If none can be reserved,
        ``ask`` is called nevertheless: commands that turn out to need an id are refused, and the
        other commands succeed.
        """
        if self._ids.remaining:
            answer = ask()
            if self._ids.is_low:
                self._reserve()
        else:
            answer = asyncio.get_running_loop().create_future()
            spawn(self._ask_later(ask, answer), "wait for producer ids")
        return answer

    async def _ask_later(
        self, ask: Callable[[], asyncio.Future[object]], answer: asyncio.Future[object]
    ) -> None:
        if not self._ids.remaining:
            limit_s = None if self.verify_remotely is None else WAIT_FOR_IDS_MS / 1000
            await asyncio.wait({self._reserve()}, timeout=limit_s)
        try:
            result = await ask()
        except Exception as error:  # noqa: BLE001 - the caller gets the error
            if not answer.done():  # the connection of the request may be closed
                answer.set_exception(without_traceback(error))
        else:
            if not answer.done():
                answer.set_result(result)

    def _reserve(self) -> asyncio.Task[None]:
        """Reserve a block of producer ids, unless a reservation is in progress."""
        if self._reservation is None or self._reservation.done():
            self._reservation = spawn(self._reserve_block(), "reserve producer ids")
        return self._reservation

    async def _reserve_block(self) -> None:
        from fencepost.cluster.controller.errors import ProducerIdsExhaustedError  # noqa: PLC0415 - not needed when the broker starts

        try:
            self._ids.add(await self.allocate())
        except ProducerIdsUnavailableError as error:
            _log.warning("no producer ids", cause=str(error))
        except ProducerIdsExhaustedError as error:
            _log.error("no producer ids", cause=str(error), remedy=RESET_IDS)
        else:
            return
        await asyncio.sleep(RETRY_IDS_MS / 1000)  # no request asks again before this delay

    def _reads_only(self, command: object) -> bool:
        if isinstance(command, AddPartitions):
            return command.verify_only
        return isinstance(command, DescribeTransaction | ListTransactions)

    def _build(self, _partition: Partition, coordinator_epoch: int) -> TxnMachine:
        # Imported late, so that a broker without transactions starts faster.
        from fencepost.txn.machine import TxnMachine  # noqa: PLC0415

        config = self._config
        limits = TxnLimits(
            max_transaction_timeout_ms=config.int("transaction.max.timeout.ms"),
            transactional_id_expiration_ms=config.int("transactional.id.expiration.ms"),
            two_phase_commit_enable=config.bool("transaction.two.phase.commit.enable"),
        )
        metadata, memory = self._metadata, Account(self._memory)
        machine = TxnMachine(
            limits,
            self._ids,
            coordinator_epoch,
            lambda: metadata.feature_level(TRANSACTION_VERSION),
            memory,
        )
        self._release_with(machine, memory)
        return machine
