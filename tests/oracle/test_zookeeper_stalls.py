"""No decision, write or request of a controller on ZooKeeper blocks its event loop for long.

ZooKeeper is real. The brokers that have the many partitions are registered, but do not listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.zk_controller import ZkController
from fencepost.coordinator.zookeeper.znodes import BrokerZnode
from tests.support.cluster import Cluster, unique
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.support.zookeeper import ZooKeeper

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

TOPICS, PARTITIONS = 8, 1_250
OWN, FIRST, SECOND = 0, 1, 2
PLAINTEXT = "PLAINTEXT"
NOWHERE = 1
"""A port on which nothing listens, so that requests to a broker stay in the queue."""


class Many:
    """A controller on this loop, and two brokers with 10,000 partitions, led by the first one."""

    def __init__(self, broker: Broker, session: Any) -> None:
        self.broker, self.session = broker, session

    def come(self, broker_id: int) -> None:
        end = BrokerEndpoint(PLAINTEXT, "127.0.0.1", NOWHERE, 0)
        data = znodes.broker_data(BrokerZnode(broker_id, (end,), None), 0)
        self.session.create(znodes.broker_path(broker_id), data, ephemeral=True)

    def go(self, broker_id: int) -> None:
        self.session.delete(znodes.broker_path(broker_id))

    def create(self, name: str, *replicas: int, partitions: int = PARTITIONS) -> None:
        placed = [
            {"partition_index": index, "broker_ids": list(replicas)} for index in range(partitions)
        ]
        topic = {"name": name, "num_partitions": -1, "replication_factor": -1}
        with Cluster(self.broker.bootstrap) as client:
            answer = client.call(
                "create_topics", 5, topics=[{**topic, "assignments": placed}], timeout=60_000
            )
        assert [row["error_code"] for row in answer["topics"]] == ["none"]

    @property
    def elected(self) -> ZkController | None:
        return self.broker.services.zookeeper.elected

    def written(self) -> MetadataImage | None:
        """Return the image that the active controller has written, None while it is writing."""
        elected = self.elected
        is_busy = elected is None or elected.store.durable() is not None
        return None if is_busy else elected.store.image

    def led_by(self, broker_id: int) -> int:
        image = self.written()
        topics = () if image is None else image.topics.values()
        return sum(
            partition.leader == broker_id for topic in topics for partition in topic.partitions
        )

    async def until_there_are(self, brokers: set[int]) -> None:
        def are_there() -> bool:
            image = self.written()
            return image is not None and image.brokers.keys() == brokers

        await until_true(are_there, "the brokers are known")

    async def until_led_by(self, broker_id: int) -> None:
        await until_true(
            lambda: self.led_by(broker_id) == TOPICS * PARTITIONS, "leaders", poll_s=0.2
        )


def _settings(connect: str) -> dict[str, str]:
    return {
        "broker.id": str(OWN),
        "zookeeper.connect": connect,
        "zookeeper.session.timeout.ms": "60000",
        "listeners": f"{PLAINTEXT}://127.0.0.1:0",
        "auto.leader.rebalance.enable": "false",
    }


@contextmanager
def session_of(zookeeper: ZooKeeper) -> Iterator[tuple[str, Any]]:
    connect = f"{zookeeper.connect}/{unique('stalls')}"
    session: Any = KazooClient(connect, timeout=60.0)
    session.start(60)
    try:
        yield connect, session
    finally:
        session.stop()
        session.close()


async def test_controller_with_many_partitions_does_not_block_the_loop(
    zookeeper: ZooKeeper, tmp_path: Path
) -> None:
    with session_of(zookeeper) as (connect, session):
        await asyncio.to_thread(session.ensure_path, "/")
        async with Broker(tmp_path, config=_settings(connect)) as broker:
            many = Many(broker, session)
            await asyncio.to_thread(many.come, FIRST)
            await asyncio.to_thread(many.come, SECOND)
            await many.until_there_are({OWN, FIRST, SECOND})
            for number in range(TOPICS):
                with watched_loop() as watch:
                    await asyncio.to_thread(many.create, f"t{number}", FIRST, SECOND)
                watch.check()
            with watched_loop() as watch:
                await asyncio.to_thread(many.go, FIRST)
                await many.until_led_by(SECOND)
            watch.check()
            with watched_loop() as watch:
                await asyncio.to_thread(many.come, FIRST)
                await many.until_there_are({OWN, FIRST, SECOND})
            watch.check()
            former = many.elected
            with watched_loop() as watch:
                await asyncio.to_thread(session.delete, znodes.CONTROLLER)
                await until_true(lambda: many.elected not in {None, former}, "another term")
                await many.until_led_by(SECOND)
            watch.check()


async def test_creation_of_a_large_topic_does_not_block_the_loop(
    zookeeper: ZooKeeper, tmp_path: Path
) -> None:
    with session_of(zookeeper) as (connect, session):
        await asyncio.to_thread(session.ensure_path, "/")
        async with Broker(tmp_path, config=_settings(connect)) as broker:
            many = Many(broker, session)
            await asyncio.to_thread(many.come, FIRST)
            await asyncio.to_thread(many.come, SECOND)
            await many.until_there_are({OWN, FIRST, SECOND})
            with watched_loop() as watch:
                await asyncio.to_thread(
                    many.create, "large", FIRST, SECOND, partitions=TOPICS * PARTITIONS
                )
                await many.until_led_by(FIRST)
            watch.check()
