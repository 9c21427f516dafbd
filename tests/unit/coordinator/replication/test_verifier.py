"""Transactional batches whose transaction coordinator is another, simulated broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.replication.peers import Peers
from fencepost.coordinator.replication.producer_ids import ControllersProducerIds
from fencepost.coordinator.replication.verifier import RemoteVerifier
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.storage.appends import Append, Part
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import ResponseFactory, response_factory
from fencepost.protocol.schema import Entity
from fencepost.txn.errors import ProducerIdsUnavailableError
from tests.support.waits import until_true
from tests.unit.coordinator.replication.other_broker import Scripted, image_of
from tests.unit.coordinator.services.coordinators import Services

HERE, THERE = 1, 7
PID = 5_000
ORIGIN = Origin("client", "/127.0.0.1")

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")


class Pair(Scripted):
    """A broker that leads topic t, and another broker that coordinates every transaction.

    The coordinator answers with the next of ``codes``, or NONE after the last. The code None closes
    the connection.
    """

    api, oldest = ApiKey.ADD_PARTITIONS_TO_TXN, 0

    def __init__(self, services: Services) -> None:
        super().__init__(newest=5)
        self.services = services
        self.top_level = ErrorCode.none
        self.coordinator: int | None = THERE

    async def start(self) -> None:
        await self.other.start()
        services, txns = self.services, self.services.txns
        image = image_of(b7=self.other.port)
        self.peers = Peers(services.config, lambda: image, node_id=HERE)
        txns.coordinator_of = lambda _: self.coordinator  # type: ignore[method-assign]
        self.verifier = RemoteVerifier(services.storage, self.peers, txns.coordinator_of)
        txns.verify_remotely = self.verifier.ask

    async def stop(self) -> None:
        self.verifier.close()
        self.peers.close()
        await self.other.stop()

    def made(self, make: ResponseFactory, body: Entity, code: ErrorCode) -> Entity:
        return make.message(
            error_code=self.top_level,
            results_by_transaction=[
                make.AddPartitionsToTxnResult(
                    transactional_id=transaction.transactional_id,
                    topic_results=[
                        make.AddPartitionsToTxnTopicResult(
                            name=topic.name,
                            results_by_partition=[
                                make.AddPartitionsToTxnPartitionResult(
                                    partition_index=index, partition_error_code=code
                                )
                                for index in topic.partitions
                            ],
                        )
                        for topic in transaction.topics
                    ],
                )
                for transaction in body.transactions
            ],
        )

    def begin(
        self, version: int = 12, sequence: int = 0, epoch: int = 0, name: str = "id", pid: int = PID
    ) -> asyncio.Task[list[Part]]:
        """Produce a batch to partition 0."""
        data = encode_batch(
            [LogRecord(0, 0, None, b"value")],
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        append = Append([Part("t", 0, data)], version, name, ORIGIN, -1)

        async def drive() -> list[Part]:
            for wait in self.services.appends.run(append):
                if wait is not None:
                    await asyncio.wait({wait})
            return append.parts

        return asyncio.create_task(drive())

    async def produce(self, version: int = 12, **batch: int) -> ErrorCode:
        (part,) = await self.begin(version, **batch)
        return ErrorCode.none if part.error is None else error_code(part.error)

    @property
    def end(self) -> int:
        return self.services.logs.partition("t", 0).log_end_offset


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    few = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
    services = await Services(tmp_path, few).start()
    services.topic("t", 2)
    pair = Pair(services)
    await pair.start()
    yield pair
    await pair.stop()
    await services.stop()


@pytest.mark.parametrize("version", [11, 12])
async def test_coordinator_verifies_each_transaction_once(pair: Pair, version: int) -> None:
    assert await pair.produce(version) is ErrorCode.none
    assert await pair.produce(version, sequence=1) is ErrorCode.none
    (body,) = pair.bodies
    (transaction,) = body.transactions
    assert (transaction.transactional_id, transaction.producer_id, transaction.producer_epoch) == (
        "id",
        PID,
        0,
    )
    assert transaction.verify_only is (version < 12)
    assert [(topic.name, topic.partitions) for topic in transaction.topics] == [("t", (0,))]
    assert pair.end == 2
    asked = [(request.api, request.version, request.client_id) for request in pair.other.asked]
    name = "AddPartitionsManager-client-1"
    assert [request[2] for request in asked] == [name, name]
    assert asked[1][:2] == (ApiKey.ADD_PARTITIONS_TO_TXN, 5)


@pytest.mark.parametrize(
    ("code", "version", "told"),
    [
        (ErrorCode.producer_fenced, 11, ErrorCode.invalid_producer_epoch),
        (ErrorCode.invalid_producer_epoch, 12, ErrorCode.invalid_producer_epoch),
        (ErrorCode.transaction_abortable, 11, ErrorCode.transaction_abortable),
        (ErrorCode.transaction_abortable, 10, ErrorCode.invalid_txn_state),
        (ErrorCode.invalid_txn_state, 11, ErrorCode.invalid_txn_state),
        (ErrorCode.invalid_producer_id_mapping, 12, ErrorCode.invalid_producer_id_mapping),
        (ErrorCode.concurrent_transactions, 11, ErrorCode.not_enough_replicas),
        (ErrorCode.not_coordinator, 12, ErrorCode.not_enough_replicas),
        (ErrorCode.coordinator_load_in_progress, 12, ErrorCode.not_enough_replicas),
        (ErrorCode.coordinator_not_available, 11, ErrorCode.not_enough_replicas),
        (ErrorCode.operation_not_attempted, 12, ErrorCode.not_enough_replicas),
        (None, 12, ErrorCode.not_enough_replicas),
    ],
)
async def test_produce_error_follows_from_verification_error(
    pair: Pair, code: ErrorCode | None, version: int, told: ErrorCode
) -> None:
    pair.codes = [code]
    assert await pair.produce(version) is told
    assert pair.end == 0
    assert await pair.produce(version) is ErrorCode.none


async def test_cluster_authorization_failure_is_reported_as_invalid_txn_state(pair: Pair) -> None:
    pair.top_level = ErrorCode.cluster_authorization_failed
    assert await pair.produce() is ErrorCode.invalid_txn_state


async def test_batch_is_appended_unverified_if_coordinator_is_too_old(pair: Pair) -> None:
    pair.newest = 3
    assert await pair.produce(11) is ErrorCode.none


async def test_unknown_coordinator_is_a_retriable_produce_error(pair: Pair) -> None:
    pair.coordinator = None
    assert await pair.produce() is ErrorCode.not_enough_replicas
    assert pair.bodies == []


async def test_verification_is_retried_while_transaction_is_completing(pair: Pair) -> None:
    """With TV2 the leader retries CONCURRENT_TRANSACTIONS up to a limit."""
    pair.codes = [ErrorCode.concurrent_transactions] * 2
    assert await pair.produce(12) is ErrorCode.none
    assert len(pair.bodies) == 3
    pair.codes = [ErrorCode.concurrent_transactions] * 1_000
    assert await pair.produce(12, epoch=1) is ErrorCode.concurrent_transactions


@pytest.mark.parametrize("event", ["marker", "election"])
async def test_verification_from_before_marker_or_election_is_repeated(
    pair: Pair, event: str
) -> None:
    """KIP-890: the batch could begin a hanging transaction."""
    pair.may_answer.clear()
    produced = pair.begin(11)
    await until_true(lambda: len(pair.bodies) == 1, "the coordinator is asked")
    partition = pair.services.logs.partition("t", 0)
    if event == "marker":
        partition.append_marker(EndMarker(ProducerStamp(PID, 0), commit=False), 0)
    else:
        partition.marks.leader_epoch += 1
    pair.codes = [ErrorCode.none, ErrorCode.transaction_abortable]
    pair.may_answer.set()
    (part,) = await produced
    assert part.error is not None
    assert error_code(part.error) is ErrorCode.transaction_abortable
    assert len(pair.bodies) == 2


async def test_produce_does_not_wait_for_verification_of_another_producer(pair: Pair) -> None:
    pair.may_answer.clear()
    produced = pair.begin()
    await until_true(lambda: len(pair.bodies) == 1, "the coordinator is asked")
    pair.coordinator, pair.services.txns.verify_remotely = HERE, None
    (part,) = await pair.begin(pid=PID + 1, name="other")
    assert part.error is not None, "it was answered by the coordinator here"
    assert not produced.done()
    pair.may_answer.set()
    await produced


async def test_newer_verification_request_replaces_waiting_one_of_the_producer(pair: Pair) -> None:
    """One request per producer id waits; the replaced request gets a retriable or fencing error."""
    pair.may_answer.clear()
    first = pair.begin(name="first")
    await until_true(lambda: len(pair.bodies) == 1, "the connection is busy")
    second, third, fourth = (pair.begin(epoch=epoch) for epoch in (0, 0, 1))

    def told(parts: list[Part]) -> ErrorCode:
        return ErrorCode.none if parts[0].error is None else error_code(parts[0].error)

    assert told(await second) is ErrorCode.not_enough_replicas
    assert told(await third) is ErrorCode.invalid_producer_epoch
    pair.may_answer.set()
    assert told(await first) is ErrorCode.none
    assert told(await fourth) is ErrorCode.none


async def test_producer_ids_come_from_the_controller(pair: Pair) -> None:
    """A request without an available id fails before its timeout."""
    make = response_factory(ApiKey.ALLOCATE_PRODUCER_IDS, 0)
    codes = [ErrorCode.stale_broker_epoch, ErrorCode.none, ErrorCode.none]
    starts = iter((7_000, 9_000))
    asked: list[Entity] = []

    class Channel:
        def send(self, request: Callable[..., Entity]) -> asyncio.Future[Entity]:
            asked.append(request.at(0))  # type: ignore[attr-defined]
            code, answer = codes.pop(0), asyncio.get_running_loop().create_future()
            start = next(starts) if code is ErrorCode.none else -1
            answer.set_result(
                make.message(error_code=code, producer_id_start=start, producer_id_len=10)
            )
            return answer

    ids = ControllersProducerIds(Channel(), HERE, lambda: 44)  # type: ignore[arg-type]
    txns = pair.services.txns
    txns.allocate = ids.allocate
    with pytest.raises(ProducerIdsUnavailableError):
        await txns.new_producer()
    given = [(await txns.new_producer()).producer_id for _ in range(12)]  # type: ignore[attr-defined]
    assert given == [*range(7_000, 7_010), 9_000, 9_001]
    assert [(request.broker_id, request.broker_epoch) for request in asked] == [(HERE, 44)] * 3
