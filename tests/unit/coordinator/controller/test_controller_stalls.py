"""No request to a controller and no background task blocks its loop for long.

The cluster has many partitions, and simulated brokers that only send requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fencepost.cluster.controller.brokers import MAX_CHANGES
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata import log as metadata_log
from tests.support.controllers import Pretender
from tests.support.raw import errors_in
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.unit.coordinator.controller.conftest import CONFIG

pytestmark = pytest.mark.slow

TOPICS, PARTITIONS = 4, 2_500
FIRST, SECOND = 1, 2


class Many:
    """A controller on this loop, and two brokers with 10,000 partitions, all led by broker 1."""

    def __init__(self, decides: Broker) -> None:
        self.decides, self.services = decides, decides.services
        self.first, self.second = (
            Pretender(decides.bootstrap, broker_id, self.services.cluster_id)
            for broker_id in (FIRST, SECOND)
        )

    async def begin(self) -> None:
        for broker in (self.first, self.second):
            await asyncio.to_thread(broker.join)
        for number in range(TOPICS):
            await asyncio.to_thread(self.first.topic, f"t{number}", *[(FIRST, SECOND)] * PARTITIONS)

    def led_by(self, broker_id: int) -> int:
        topics = self.services.metadata.topics.values()
        return sum(
            partition.leader == broker_id for topic in topics for partition in topic.partitions
        )

    def end_session(self) -> None:
        """End the first broker's session."""
        active = self.services.active_controller
        active.machine.heartbeats.expire_session(FIRST)
        active._arm()

    def is_fenced(self) -> bool:
        return self.services.metadata.image.brokers[FIRST].fenced


@asynccontextmanager
async def many(path: Path) -> AsyncIterator[Many]:
    listeners = {"listeners": "CONTROLLER://127.0.0.1:0"}
    session = {"broker.session.timeout.ms": "600000"}
    async with Broker(path, config={**CONFIG, **listeners, **session}) as decides:
        made = Many(decides)
        await made.begin()
        yield made
        for broker in (made.first, made.second):
            broker.close()


async def test_broker_with_many_partitions_leaves_and_returns_without_blocking_the_loop(
    tmp_path: Path,
) -> None:
    assert MAX_CHANGES < TOPICS * PARTITIONS
    async with many(tmp_path) as cluster:
        with watched_loop() as watch:
            cluster.end_session()
            await until_true(cluster.is_fenced, "the end of its session")
        assert cluster.led_by(SECOND) == TOPICS * PARTITIONS
        watch.check()
        with watched_loop() as watch:
            await asyncio.to_thread(cluster.second.heartbeat, want_shut_down=True)
        assert cluster.led_by(SECOND) == 0
        watch.check()
        with watched_loop() as watch:
            await asyncio.to_thread(cluster.second.heartbeat, want_shut_down=True)
            await asyncio.to_thread(cluster.first.join)
        watch.check()


@pytest.mark.parametrize("how", ["unregistered", "anew", "without its directory"])
async def test_moving_many_leaders_off_a_lost_broker_does_not_block_the_loop(
    tmp_path: Path, how: str
) -> None:
    async with many(tmp_path) as cluster:
        with watched_loop() as watch:
            broker = cluster.first
            if how == "unregistered":
                call = broker.controller.call
                await asyncio.to_thread(call, "unregister_broker", 0, broker_id=FIRST)
            elif how == "anew":
                cluster.services.active_controller.machine.heartbeats.expire_session(FIRST)
                broker.incarnation_id = broker.directory_id
                await asyncio.to_thread(broker.register)
            else:
                lost = [broker.directory_id]
                await asyncio.to_thread(broker.heartbeat, offline_log_dirs=lost)
        assert cluster.led_by(SECOND) == TOPICS * PARTITIONS
        watch.check()


async def test_electing_many_leaders_on_broker_return_does_not_block_the_loop(
    tmp_path: Path,
) -> None:
    """No other replica can lead, so all elections run when the broker returns."""
    async with many(tmp_path) as cluster:
        await asyncio.to_thread(cluster.second.heartbeat, want_fence=True)
        cluster.end_session()
        await until_true(cluster.is_fenced, "the end of its session")
        assert cluster.led_by(-1) == TOPICS * PARTITIONS
        with watched_loop() as watch:
            await asyncio.to_thread(cluster.first.heartbeat)
            everything = TOPICS * PARTITIONS
            await until_true(lambda: cluster.led_by(FIRST) == everything, "leaders")
        watch.check()


async def test_creating_many_partitions_on_many_brokers_does_not_block_the_loop(
    tmp_path: Path,
) -> None:
    """With 30 brokers, most of the 10,000 partitions have a unique list of replicas."""
    listeners = {"listeners": "CONTROLLER://127.0.0.1:0"}
    config = {**CONFIG, **listeners, "broker.session.timeout.ms": "600000"}
    async with Broker(tmp_path, config=config) as decides:
        cluster_id = decides.services.cluster_id
        brokers = [
            Pretender(decides.bootstrap, broker_id, cluster_id) for broker_id in range(1, 31)
        ]
        for broker in brokers:
            await asyncio.to_thread(broker.join)
        wide = {"name": "wide", "num_partitions": 10_000, "replication_factor": 3}
        assigned = [
            {
                "partition_index": index,
                "broker_ids": [1 + (index + distance) % 30 for distance in (0, 1, 7)],
            }
            for index in range(10_000)
        ]
        given = {"name": "given", "num_partitions": -1, "replication_factor": -1}
        requests = {
            "create_topics": {
                "topics": [{**wide, "assignments": [], "configs": []}],
            },
            "create_partitions": {
                "topics": [{"name": "wide", "count": 20_000, "assignments": None}],
            },
            "create_topics of given replicas": {
                "topics": [{**given, "assignments": assigned, "configs": []}],
            },
        }
        for what, body in requests.items():
            api, call = what.partition(" ")[0], brokers[0].controller.call
            with watched_loop() as watch:
                answer = await asyncio.to_thread(
                    call, api, 3, timeout=10_000, validate_only=False, **body
                )
            assert set(errors_in(answer)) == {"none"}, what
            watch.check()
        for broker in brokers:
            broker.close()
        topics = dict(decides.services.metadata.topics)
        assert {name: len(topic.partitions) for name, topic in topics.items()} == {
            "wide": 20_000,
            "given": 10_000,
        }
    async with Broker(tmp_path, config=config) as again:
        assert again.services.metadata.topics == topics


async def test_reassigning_and_cancelling_many_partitions_does_not_block_the_loop(
    tmp_path: Path,
) -> None:
    async with many(tmp_path) as cluster:
        third = Pretender(cluster.decides.bootstrap, 3, cluster.services.cluster_id)
        await asyncio.to_thread(third.join)
        for replicas in ([SECOND, FIRST], [third.broker_id], None):
            topics = [
                {
                    "name": f"t{number}",
                    "partitions": [
                        {"partition_index": index, "replicas": replicas}
                        for index in range(PARTITIONS)
                    ],
                }
                for number in range(TOPICS)
            ]
            call = cluster.first.controller.call
            name = "alter_partition_reassignments"
            with watched_loop() as watch:
                answer = await asyncio.to_thread(call, name, 1, timeout=10_000, topics=topics)
            assert set(errors_in(answer)) == {"none"}
            watch.check()
        third.close()


async def test_writing_a_snapshot_of_many_partitions_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with many(tmp_path) as cluster:
        metadata = cluster.services.metadata
        before = metadata.image
        monkeypatch.setattr(metadata_log, "COMPACT_SLACK_RECORDS", 0)
        monkeypatch.setattr(metadata_log, "COMPACT_FACTOR", 0)
        with watched_loop() as watch:
            cluster.services.active_controller.log.maybe_write_snapshot(1 << 40)
            await asyncio.to_thread(cluster.first.topic, "meanwhile", (FIRST,))
            start = metadata.partition
            await until_true(lambda: start.log_start_offset > 0, "a log that begins elsewhere")
        watch.check()
        assert start.log_start_offset == before.offset + 1
    listeners = {"listeners": "CONTROLLER://127.0.0.1:0"}
    async with Broker(tmp_path, config={**CONFIG, **listeners}) as again:
        assert len(again.services.metadata.topics) == TOPICS + 1
