"""Transactions on real partitions: the turn from Prepare to Complete, and restarts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    NotCoordinatorError,
    TransactionCoordinatorBusyError,
)
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.services.verification import verification_error
from fencepost.groups.commands import OffsetToCommit, TxnCommitOffsets
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.errors import InvalidProducerEpochError, InvalidTxnStateError, StorageError
from fencepost.logcore.machine import DomainError, EndMarker, ProducerStamp
from fencepost.logcore.reading import Isolation
from fencepost.protocol.steps import finish
from fencepost.txn.commands import (
    NO_PRODUCER_ID,
    AddPartitions,
    DescribeTransaction,
    DescribeTransactionResult,
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
    ListTransactions,
)
from fencepost.txn.epochs import LAST_CLIENT_EPOCH
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    ProducerFencedError,
    ProducerIdsUnavailableError,
    TransactionAbortableError,
)
from fencepost.txn.ids import ProducerIdBlock
from fencepost.txn.limits import TxnLimits
from fencepost.txn.records import encode
from fencepost.txn.state import TV2, TransactionMetadata, TransactionState
from tests.support.faults import Killed, MortalDisk
from tests.support.metadata_changes import delete_topic
from tests.support.partitions import append_batch, fetch_bytes
from tests.support.waits import until_async
from tests.unit.coordinator.services.coordinators import Services, loading, reload
from tests.unit.coordinator.services.test_groups import commit, committed

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")

ID = "my-transactions"


class Producer:
    """A transactional producer without a connection."""

    def __init__(self, services: Services, transactional_id: str = ID) -> None:
        self.services = services
        self.id = transactional_id
        self.pid = self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    async def init(self, timeout_ms: int = 60_000) -> Producer:
        finish(self.services.txns.open_in_steps())
        result = await self.services.txns.submit(self.id, InitProducerId(self.id, timeout_ms))
        assert isinstance(result, InitProducerIdResult)
        self.pid, self.epoch = result.producer_id, result.producer_epoch
        self.sequences.clear()
        return self

    async def add(self, *partitions: tuple[str, int]) -> None:
        command = AddPartitions(self.id, self.pid, self.epoch, partitions)
        await self.services.txns.submit(self.id, command)

    def write(self, value: str, topic: str = "t", index: int = 0) -> None:
        key = topic, index
        sequence = self.sequences.get(key, 0)
        batch = encode_batch(
            [LogRecord(0, self.services.clock.now_ms(), None, value.encode())],
            producer_id=self.pid,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        append_batch(
            self.services.logs.partition(topic, index),
            batch,
            now_ms=self.services.clock.now_ms(),
            transaction_verified=True,
        )
        self.sequences[key] = sequence + 1

    async def end(self, *, commit: bool, version: int = 0) -> None:
        command = EndTxn(self.id, self.pid, self.epoch, commit, version)
        future = self.services.txns.submit(self.id, command)
        assert future.done(), "EndTxn is one turn"
        result = await future
        if version == 2:
            assert isinstance(result, EndTxnResult)
            self.pid, self.epoch = result.producer_id, result.producer_epoch
            self.sequences.clear()


def stable(services: Services, topic: str = "t", index: int = 0) -> int:
    return services.logs.partition(topic, index).last_stable_offset


def end(services: Services, topic: str = "t", index: int = 0) -> int:
    return services.logs.partition(topic, index).log_end_offset


async def state(services: Services, transactional_id: str = ID) -> str:
    command = DescribeTransaction(transactional_id)
    result = await services.txns.submit(transactional_id, command)
    assert isinstance(result, DescribeTransactionResult)
    return result.state


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    services = await Services(tmp_path).start()
    services.topic("t", 3)
    finish(services.groups.open_in_steps())
    yield services
    await services.stop()


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("commits", [True, False])
async def test_end_txn_completes_in_one_turn(
    services: Services, version: int, commits: bool
) -> None:
    producer = await Producer(services).init()
    for _ in range(3):
        await producer.add(("t", 0), ("t", 1))
        producer.write("a")
        producer.write("b", index=1)
        assert stable(services) == end(services) - 1
        await producer.end(commit=commits, version=version)
        assert stable(services) == end(services)
        assert stable(services, index=1) == end(services, index=1)
    assert await state(services) == ("CompleteCommit" if commits else "CompleteAbort")
    fetched = fetch_bytes(services.logs.partition("t", 0), 0, 10_000, Isolation.READ_COMMITTED)
    assert fetched.aborted is not None
    assert len(fetched.aborted) == (0 if commits else 3)


async def test_transactional_offsets_are_committed_with_the_transaction(services: Services) -> None:
    producer = await Producer(services).init()
    await services.groups.submit("g", commit("g", 1))
    index = services.groups.partition_for("g")
    for offset, commits, expected in [(5, True, 5), (9, False, 5), (9, True, 9)]:
        await producer.add((CONSUMER_OFFSETS, index))
        stamp = ProducerStamp(producer.pid, producer.epoch)
        offsets = (OffsetToCommit("t", 0, offset),)
        await services.groups.submit("g", TxnCommitOffsets("g", -1, "", None, offsets, stamp))
        await producer.end(commit=commits)
        assert await committed(services, "g", stable=True) == expected


async def test_new_producer_fences_the_former_and_aborts_its_transaction(
    services: Services,
) -> None:
    old = await Producer(services).init()
    await old.add(("t", 0))
    old.write("lost")
    new = Producer(services)
    await new.init()
    assert new.pid == old.pid
    assert new.epoch > old.epoch
    assert stable(services) == end(services), "the open transaction was aborted first"
    with pytest.raises(ProducerFencedError):
        await old.end(commit=True)
    with pytest.raises(InvalidProducerEpochError):
        old.write("zombie")


async def new_producer(services: Services) -> InitProducerIdResult:
    result = await services.txns.new_producer()
    assert isinstance(result, InitProducerIdResult)
    return result


async def test_producers_without_transactional_id_get_distinct_producer_ids(
    services: Services,
) -> None:
    given = [await new_producer(services) for _ in range(1_500)]
    assert len({identity.producer_id for identity in given}) == 1_500
    assert {identity.producer_epoch for identity in given} == {0}


async def test_producer_ids_are_not_reused_after_a_kill(services: Services, tmp_path: Path) -> None:
    before = {(await new_producer(services)).producer_id for _ in range(3)}
    before.add((await Producer(services).init()).pid)
    await services.kill()
    again = await Services(tmp_path).start()
    assert (await new_producer(again)).producer_id not in before
    await again.stop()


async def test_producer_ids_are_not_allocated_within_a_turn(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn only writes to the shard's log, so ids are allocated before or after the turn."""
    finish(services.txns.open_in_steps())
    shards = services.txns._shards.shards
    allocate = services.txns.allocate
    reserved: list[bool] = []

    async def watched() -> ProducerIdBlock:
        reserved.append(any(shard._in_turn for shard in shards))
        return await allocate()

    monkeypatch.setattr(services.txns, "allocate", watched)
    producers = [await Producer(services, f"id-{number}").init() for number in range(1_200)]
    assert len({producer.pid for producer in producers}) == 1_200
    assert reserved == [False, False]


async def test_timeout_at_last_epoch_aborts_once_a_producer_id_is_allocated(
    services: Services,
) -> None:
    """Fencing at the last epoch needs a new producer id, and a restarted broker has none yet."""
    finish(services.txns.open_in_steps())
    at_last_epoch = TransactionMetadata(
        producer_id=1_000_000,
        previous_producer_id=NO_PRODUCER_ID,
        next_producer_id=NO_PRODUCER_ID,
        producer_epoch=LAST_CLIENT_EPOCH,
        timeout_ms=1_000,
        state=TransactionState.ONGOING,
        partitions=frozenset({("t", 0)}),
        start_ms=0,
        last_update_ms=0,
        client_transaction_version=TV2,
    )
    index = services.txns.partition_for(ID)
    partition = services.logs.partition(TRANSACTION_STATE, index)
    partition.append_records([encode(ID, at_last_epoch, TV2)], now_ms=0)
    await reload(services.txns._shards, index)
    services.txns._shards.timers.run_due()
    assert await state(services) == "Ongoing"

    async def reserved() -> bool:
        return services.txns._ids.remaining > 0

    await until_async(reserved, "a reservation")
    services.clock.advance(TxnLimits().retry_backoff_ms)  # type: ignore[attr-defined]
    services.txns._shards.timers.run_due()
    assert await state(services) == "CompleteAbort"


def refuse(*_: object, **__: object) -> object:
    raise StorageError("the disk is gone")


async def test_init_producer_id_fails_while_metadata_log_fails(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(services.txns.open_in_steps())
    monkeypatch.setattr(services.metadata.partition, "append_batch", refuse)
    with pytest.raises(ProducerIdsUnavailableError):
        await services.txns.new_producer()
    with pytest.raises(ProducerIdsUnavailableError):
        await Producer(services).init()
    monkeypatch.undo()
    await Producer(services).init()


async def test_failed_append_is_logged_with_its_request(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await Producer(services).init()
    shard = services.txns._shards.shards[services.txns.partition_for(ID)]
    monkeypatch.setattr(shard.partition, "append_records", refuse)
    with capture_logs() as said, pytest.raises(NotCoordinatorError):
        await producer.add(("t", 0))
    (failed,) = (line for line in said if line["event"] == "shard failed")
    assert (failed["trigger"], failed["subject"]) == ("upkeep AddPartitions", ID)


async def test_transaction_is_aborted_after_its_timeout(services: Services) -> None:
    producer = await Producer(services).init(timeout_ms=1_000)
    await producer.add(("t", 0))
    producer.write("slow")
    services.clock.advance(1_001)  # type: ignore[attr-defined]
    services.txns._shards.timers.run_due()
    assert await state(services) == "CompleteAbort"
    assert stable(services) == end(services)
    with pytest.raises(ProducerFencedError):
        await producer.end(commit=True)


async def test_transactional_id_expires(tmp_path: Path) -> None:
    config = {
        "transactional.id.expiration.ms": "1000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
    }
    services = await Services(tmp_path, config).start()
    producer = await Producer(services).init()
    for _ in range(4):
        services.clock.advance(500)  # type: ignore[attr-defined]
        services.txns._shards.timers.run_due()

    async def is_gone() -> bool:
        return not list((await services.txns.list_transactions(ListTransactions())).transactions)

    await until_async(is_gone, "the id is forgotten")
    with pytest.raises(InvalidProducerIdMappingError):
        await producer.add(("t", 0))
    await services.stop()


async def test_list_transactions_merges_all_shards(services: Services) -> None:
    assert not list((await services.txns.list_transactions(ListTransactions())).transactions)
    for number in range(20):
        await Producer(services, f"id-{number}").init()
    listed = await services.txns.list_transactions(ListTransactions(("Empty", "Nonsense")))
    assert len(list(listed.transactions)) == 20
    assert listed.unknown_states == ("Nonsense",)


# --- markers -------------------------------------------------------------------------------------


async def test_transaction_completes_without_its_deleted_topic(services: Services) -> None:
    producer = await Producer(services).init()
    services.topic("gone")
    await producer.add(("t", 0), ("gone", 0))
    producer.write("a")
    delete_topic(services.metadata, "gone")
    await producer.end(commit=True)
    assert await state(services) == "CompleteCommit"
    assert stable(services) == end(services)


async def test_marker_of_offline_partition_is_retried(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await Producer(services).init()
    await producer.add(("t", 0), ("t", 1))
    producer.write("a")
    producer.write("b", index=1)
    monkeypatch.setattr(services.logs.partition("t", 1), "append_marker", refuse)
    await producer.end(commit=True)
    assert await state(services) == "PrepareCommit"
    assert stable(services) == end(services), "the healthy partition is not held up"
    with pytest.raises(ConcurrentTransactionsError):
        await producer.add(("t", 0))
    services.clock.advance(1_000)  # type: ignore[attr-defined]
    services.txns._shards.timers.run_due()
    assert await state(services) == "PrepareCommit"
    monkeypatch.undo()
    services.clock.advance(1_000)  # type: ignore[attr-defined]
    services.txns._shards.timers.run_due()
    assert await state(services) == "CompleteCommit"
    assert stable(services, index=1) == end(services, index=1)
    assert end(services) == 2, "the other partition's marker was not repeated"
    await producer.add(("t", 0))


async def test_no_marker_is_written_to_the_transaction_state_topic(
    services: Services,
) -> None:
    """In an imported log, a transaction may include a partition of the state topic."""
    producer = await Producer(services).init()
    others = [(TRANSACTION_STATE, index) for index in range(3)]
    await producer.add(("t", 0), *others)
    producer.write("a")
    await producer.end(commit=True)
    assert await state(services) == "CompleteCommit"
    assert stable(services) == end(services) == 2
    for topic, index in others:
        read = services.logs.partition(topic, index).reader.read_all()
        assert not any(header.is_control for header, _ in read)
    assert {shard.state for shard in services.txns._shards.shards} == {ShardState.ACTIVE}


async def test_marker_of_loading_offsets_partition_is_retried(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await Producer(services).init()
    index = services.groups.partition_for("g")
    await producer.add((CONSUMER_OFFSETS, index))
    shard = services.groups._shards.shards[index]
    async with loading(shard, monkeypatch):
        await producer.end(commit=True)
        assert await state(services) == "PrepareCommit"
    services.clock.advance(1_000)  # type: ignore[attr-defined]
    services.txns._shards.timers.run_due()
    assert await state(services) == "CompleteCommit"


async def test_transaction_completes_despite_marker_of_an_administrator(services: Services) -> None:
    producer = await Producer(services).init()
    await producer.add(("t", 0))
    producer.write("a")
    services.txns.markers.write_one(
        ("t", 0), EndMarker(ProducerStamp(producer.pid, producer.epoch + 5), False, 1000)
    )
    await producer.end(commit=True)
    assert await state(services) == "CompleteCommit"


# --- crashes -------------------------------------------------------------------------------------


async def _one_transaction(services: Services, version: int, *, commits: bool) -> None:
    producer = await Producer(services).init()
    index = services.groups.partition_for("g")
    await producer.add(("t", 0), ("t", 1), (CONSUMER_OFFSETS, index))
    producer.write("a")
    producer.write("b", index=1)
    stamp = ProducerStamp(producer.pid, producer.epoch)
    offsets = (OffsetToCommit("t", 0, 7),)
    await services.groups.submit("g", TxnCommitOffsets("g", -1, "", None, offsets, stamp))
    fs = services.logs._fs
    assert isinstance(fs, MortalDisk)
    fs.dies_after(services.die_after)  # type: ignore[attr-defined]
    await producer.end(commit=commits, version=version)


@pytest.mark.slow
@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("commits", [True, False])
async def test_transaction_is_open_or_ended_in_every_log_after_a_kill(
    tmp_path: Path, version: int, commits: bool
) -> None:
    """After a restart, the transaction is either open in all logs or complete in all logs."""
    outcomes = []
    for die_after in range(20):
        directory = tmp_path / str(die_after)
        directory.mkdir()
        services = await Services(directory, fs=MortalDisk(kinds={"write"})).start()
        services.topic("t", 2)
        finish(services.groups.open_in_steps())
        services.die_after = die_after  # type: ignore[attr-defined]
        try:
            await _one_transaction(services, version, commits=commits)
            survived = True
        except Killed:
            survived = False
        await services.kill()
        again = await Services(directory, clock=services.clock).start()
        outcome = await state(again)
        outcomes.append(outcome)
        if outcome == "Ongoing":
            assert stable(again) == stable(again, index=1) == 0
            assert await committed(again, "g") == -1
            # The next producer aborts the transaction, even if the killed broker had received an
            # EndTxn.
            await Producer(again).init()
        else:
            assert outcome == ("CompleteCommit" if commits else "CompleteAbort")
            assert await committed(again, "g", stable=True) == (7 if commits else -1)
        for index in (0, 1):
            assert stable(again, index=index) == end(again, index=index)
        for shard in again.txns._shards.shards + again.groups._shards.shards:
            shard.machine.check()
        await again.stop()
        if survived:
            break
    else:
        raise AssertionError("the end of a transaction writes less than 20 times")
    # Prepare, a marker for each of three partitions, Complete: five durable steps.
    assert len(outcomes) >= 6
    assert outcomes[0] == "Ongoing"


async def test_second_restart_after_a_kill_writes_no_marker(
    services: Services, tmp_path: Path
) -> None:
    producer = await Producer(services).init()
    await producer.add(("t", 0))
    producer.write("a")
    await producer.end(commit=True)
    await services.kill()
    first = await Services(tmp_path, clock=services.clock).start()
    before = end(first)
    await first.kill()
    second = await Services(tmp_path, clock=services.clock).start()
    assert end(second) == before == 2
    await second.stop()


# --- verification --------------------------------------------------------------------------------


def ask(
    services: Services, producer: Producer, api: str, version: int, epoch: int | None = None
) -> DomainError | None:
    key = "t", 0
    epoch = producer.epoch if epoch is None else epoch
    return services.txns.verify(api, version, producer.id, producer.pid, epoch, [key])[key]


async def test_verification_below_tv2_requires_an_added_partition(services: Services) -> None:
    producer = await Producer(services).init()
    await producer.add(("t", 1))
    assert type(ask(services, producer, "Produce", 10)) is InvalidTxnStateError
    assert type(ask(services, producer, "Produce", 11)) is TransactionAbortableError
    assert type(ask(services, producer, "TxnOffsetCommit", 3)) is InvalidTxnStateError
    assert type(ask(services, producer, "TxnOffsetCommit", 4)) is TransactionAbortableError
    await producer.add(("t", 0))
    assert ask(services, producer, "Produce", 10) is None
    assert type(ask(services, producer, "Produce", 10, epoch=7)) is InvalidProducerEpochError


async def test_produce_v12_adds_the_partition_implicitly(services: Services) -> None:
    producer = await Producer(services).init()
    assert ask(services, producer, "Produce", 12) is None
    assert await state(services) == "Ongoing"
    assert ask(services, producer, "Produce", 10) is None


async def test_verification_error_after_flush_reaches_no_exception_handler(
    tmp_path: Path,
) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    services = await Services(tmp_path, {"log.flush.interval.messages": "1"}).start()
    producer = await Producer(services).init()
    epoch = producer.epoch
    newer = asyncio.ensure_future(producer.init())
    await asyncio.sleep(0)
    key = "t", 0
    asked = (producer.id, producer.pid, epoch, [key])
    disk = services.txns.verify("Produce", 12, *asked)
    assert isinstance(disk, asyncio.Future)
    await disk
    await newer
    verdicts = services.txns.verify("Produce", 12, *asked)
    assert isinstance(verdicts, dict)
    assert type(verdicts[key]) is InvalidProducerEpochError
    gc.collect()
    assert told == []
    await services.stop()


async def test_disabled_verification_still_adds_partitions_implicitly(tmp_path: Path) -> None:
    config = {"transaction.partition.verification.enable": "false"}
    services = await Services(tmp_path, config).start()
    services.topic("t")
    producer = await Producer(services).init()
    assert ask(services, producer, "Produce", 10) is None
    assert await state(services) == "Empty"
    assert ask(services, producer, "Produce", 12) is None
    assert await state(services) == "Ongoing"
    await services.stop()


async def test_verification_without_coordinator_or_known_id_fails(services: Services) -> None:
    producer = Producer(services)
    producer.pid, producer.epoch = 1, 0
    assert type(ask(services, producer, "Produce", 10)) is TransactionCoordinatorBusyError
    assert type(ask(services, producer, "TxnOffsetCommit", 3)) is NotCoordinatorError
    finish(services.txns.open_in_steps())
    assert type(ask(services, producer, "Produce", 10)) is InvalidProducerIdMappingError


Case = tuple[Callable[[], DomainError], str, int, type[DomainError]]


@pytest.mark.parametrize(
    ("error", "api", "version", "expected"),
    [
        (ConcurrentTransactionsError, "Produce", 11, TransactionCoordinatorBusyError),
        (ConcurrentTransactionsError, "Produce", 12, ConcurrentTransactionsError),
        (ConcurrentTransactionsError, "TxnOffsetCommit", 3, ConcurrentTransactionsError),
        (CoordinatorLoadInProgressError, "Produce", 12, TransactionCoordinatorBusyError),
        (CoordinatorLoadInProgressError, "TxnOffsetCommit", 5, CoordinatorLoadInProgressError),
        (ProducerFencedError, "Produce", 12, InvalidProducerEpochError),
        (ProducerFencedError, "TxnOffsetCommit", 5, InvalidProducerEpochError),
    ],
)
def test_verification_error_depends_on_api_and_version(
    error: type[DomainError], api: str, version: int, expected: type[DomainError]
) -> None:
    assert type(verification_error(error("why"), api, version)) is expected


async def test_each_coordinator_opens_fifty_empty_shards(tmp_path: Path) -> None:
    services = await Services(tmp_path).start()
    for coordinator in (services.groups, services.txns):
        finish(coordinator.open_in_steps())
        assert len(coordinator._shards.shards) == 50
    assert services.metadata.topic(TRANSACTION_STATE) is not None
    await services.stop()
