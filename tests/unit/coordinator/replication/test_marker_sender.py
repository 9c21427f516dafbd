"""Markers that a real coordinator sends to a simulated broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from fencepost.coordinator.replication.marker_sender import MarkerSender
from fencepost.coordinator.replication.peers import Peers
from fencepost.coordinator.replication.verifier import RemoteVerifier
from fencepost.coordinator.services.marker_writer import MAX_RETRY_MS
from fencepost.logcore.errors import InvalidProducerEpochError
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.schema import Entity
from fencepost.protocol.steps import finish
from fencepost.txn.commands import EndTxn, TopicPartition
from fencepost.txn.ids import ProducerIdBlock
from fencepost.txn.marker_queues import NoDestination
from tests.support.waits import until_async, until_true
from tests.unit.coordinator.replication.other_broker import Scripted, image_of
from tests.unit.coordinator.services.coordinators import Services, allocate_producer_ids, reload
from tests.unit.coordinator.services.test_txns import ID, Producer, end, stable, state

HERE, THERE = 1, 7

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")


class Pair(Scripted):
    """A real broker, and a simulated broker that answers WriteTxnMarkers with ``codes``."""

    api, oldest = ApiKey.WRITE_TXN_MARKERS, 1

    def __init__(self, services: Services) -> None:
        super().__init__(newest=2)
        self.services = services
        self.leaders: dict[TopicPartition, int | NoDestination] = {("t", 1): THERE, ("t", 2): THERE}

    async def start(self) -> None:
        await self.other.start()
        services, txns = self.services, self.services.txns
        image = image_of(b7=self.other.port)
        self.peers = Peers(services.config, lambda: image, node_id=HERE)
        self.writer = txns.markers
        self.writer._leader_of = lambda partition: self.leaders.get(partition, HERE)
        self.verifier = RemoteVerifier(services.storage, self.peers, txns.coordinator_of)
        txns.join_others(MarkerSender(self.peers), self.verifier.ask, self._allocate)

    async def stop(self) -> None:
        self.verifier.close()
        self.peers.close()
        await self.other.stop()

    async def _allocate(self) -> ProducerIdBlock:
        return ProducerIdBlock(*allocate_producer_ids(self.services.storage))

    def made(self, make: ResponseFactory, body: Entity, code: ErrorCode) -> Entity:
        return make.message(
            markers=[
                make.WritableTxnMarkerResult(
                    producer_id=marker.producer_id,
                    topics=[
                        make.WritableTxnMarkerTopicResult(
                            name=topic.name,
                            partitions=[
                                make.WritableTxnMarkerPartitionResult(
                                    partition_index=index, error_code=code
                                )
                                for index in topic.partition_indexes
                            ],
                        )
                        for topic in marker.topics
                    ],
                )
                for marker in body.markers
            ]
        )

    async def commit(self, version: int = 2) -> Producer:
        """Commit a transaction with a local and a remote partition; return its producer."""
        producer = await Producer(self.services).init()
        await producer.add(("t", 0), ("t", 1))
        producer.write("a")
        await self.services.txns.submit(ID, EndTxn(ID, producer.pid, producer.epoch, True, version))
        return producer

    async def completes(self) -> None:
        async def is_complete() -> bool:
            self.retry()
            return await state(self.services) == "CompleteCommit"

        await until_async(is_complete, "the transaction is complete")

    def retry(self) -> None:
        """Advance the clock past the retry backoff of markers."""
        self.services.clock.advance(MAX_RETRY_MS)  # type: ignore[attr-defined]
        self.services.txns._shards.timers.run_due()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    few = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
    services = await Services(tmp_path, few).start()
    services.topic("t", 3)
    finish(services.groups.open_in_steps())
    pair = Pair(services)
    await pair.start()
    yield pair
    await pair.stop()
    await services.stop()


@pytest.mark.parametrize("version", [0, 2])
async def test_transaction_over_two_brokers_completes_with_one_remote_marker(
    pair: Pair, version: int
) -> None:
    producer = await pair.commit(version)
    await pair.completes()
    (body,) = pair.bodies
    (marker,) = body.markers
    assert (marker.producer_id, marker.transaction_result) == (producer.pid, True)
    assert marker.producer_epoch == producer.epoch + (version == 2)
    assert marker.transaction_version == version
    assert marker.coordinator_epoch == 0
    assert [(topic.name, topic.partition_indexes) for topic in marker.topics] == [("t", (1,))]
    assert stable(pair.services) == end(pair.services) == 2
    apis = [(request.api, request.client_id) for request in pair.other.asked]
    name = "broker-1-txn-marker-sender"
    assert apis == [(ApiKey.API_VERSIONS, name), (ApiKey.WRITE_TXN_MARKERS, name)]


async def test_kafka_20322_marker_for_an_older_broker_is_sent_in_its_version(pair: Pair) -> None:
    """During an upgrade the partition's leader may be too old for WriteTxnMarkers v2."""
    pair.newest = 1
    await pair.commit()
    await pair.completes()
    assert [request.version for request in pair.other.asked][1:] == [1]
    assert stable(pair.services) == end(pair.services) == 2


@pytest.mark.parametrize("code", [ErrorCode.not_leader_or_follower, None])
async def test_marker_is_sent_again_after_error_or_lost_connection(
    pair: Pair, code: ErrorCode | None
) -> None:
    """The leader does not know of its election yet, or (code None) closes the connection."""
    pair.codes = [code, code]
    await pair.commit()
    await pair.completes()
    assert len(pair.bodies) == 3


async def test_end_txn_response_does_not_wait_for_remote_markers(pair: Pair) -> None:
    pair.may_answer.clear()
    await pair.commit()
    assert await state(pair.services) == "PrepareCommit"
    pair.may_answer.set()
    await pair.completes()


async def test_marker_is_written_locally_if_leadership_moves_here_during_send(pair: Pair) -> None:
    """The former leader may be down when this broker becomes the leader of its partitions."""
    pair.may_answer.clear()
    await pair.commit()
    await until_true(lambda: bool(pair.bodies), "the markers are sent")
    pair.leaders.clear()
    pair.writer.leaders_changed()
    await pair.completes()
    assert end(pair.services, index=1) == 1


async def test_marker_is_sent_to_new_leader_after_local_write_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This broker led all partitions when the transaction ended, and then lost a partition."""
    pair.leaders.clear()
    write_one = pair.writer.write_one

    def refuse(partition: TopicPartition, marker: object) -> bool:
        if partition == ("t", 1):
            raise InvalidProducerEpochError("not now")
        return write_one(partition, marker)  # type: ignore[arg-type]

    monkeypatch.setattr(pair.writer, "write_one", refuse)
    monkeypatch.setattr(pair.writer, "_is_open", lambda *_: True)
    await pair.commit()
    assert await state(pair.services) == "PrepareCommit"
    pair.leaders[("t", 1)] = THERE
    await pair.completes()
    assert len(pair.bodies) == 1


async def test_fenced_coordinator_gives_up_its_markers(pair: Pair) -> None:
    pair.codes = [ErrorCode.transaction_coordinator_fenced]
    await pair.commit()
    await until_true(lambda: not len(pair.writer.queues), "the markers are given up")
    assert await state(pair.services) == "PrepareCommit"


@pytest.mark.parametrize("comes_back", [True, False])
async def test_markers_are_dropped_on_resignation_and_resent_with_new_epoch(
    pair: Pair, comes_back: bool
) -> None:
    pair.may_answer.clear()
    await pair.commit()
    await until_true(lambda: bool(pair.bodies), "the markers are sent")
    txns = pair.services.txns
    index = txns.partition_for(ID)
    if not comes_back:
        txns.resigned(index, 1)
        pair.may_answer.set()
        await until_true(lambda: not pair.writer._sends, "the answer is here")
        assert len(pair.writer.queues) == 0
        return
    await reload(txns._shards, index)
    pair.may_answer.set()
    await pair.completes()
    epochs = [marker.coordinator_epoch for body in pair.bodies for marker in body.markers]
    assert epochs[-1] == 2
    assert epochs == sorted(epochs)
