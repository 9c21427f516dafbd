"""A standalone broker joins controllers that start from its metadata, and leaves them again.

These tests use Fencepost's controllers, and tests/oracle/test_promote.py uses Apache Kafka's.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.client import AsyncWireClient
from fencepost.coordinator.config import properties
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.logcore.fs import OsFileSystem
from fencepost.tools import demotion
from fencepost.tools.ports import hold_port
from fencepost.tools.promotion import (
    ControllerAddress,
    PromotionError,
    PromotionRequest,
    carry_out,
    held,
    make_plan,
)
from tests.support.metadata_changes import create_topic
from tests.unit.coordinator.services.coordinators import allocate_producer_ids

FS = OsFileSystem()
NOW_MS = 1_700_000_000_000
SHARED = {
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "broker.session.timeout.ms": "600",
    "broker.heartbeat.interval.ms": "100",
    "initial.broker.registration.timeout.ms": "60000",
}


class Place:
    """The directories of a broker and its controller, and their addresses."""

    def __init__(self, path: Path) -> None:
        self.data, self.output = path / "data", path / "output"
        self._held = [hold_port(), hold_port()]
        self.listen, self.controller = (f"127.0.0.1:{port.getsockname()[1]}" for port in self._held)

    def close(self) -> None:
        for port in self._held:
            port.close()

    @property
    def metadata(self) -> Path:
        """The controller's metadata directory."""
        return self.output / "controller-100" / "metadata"

    def alone(self) -> Broker:
        return Broker(self.data, self.listen, SHARED)

    def promote(self, output: Path | None = None) -> None:
        at = self.output if output is None else output
        wanted = PromotionRequest(
            self.data, at, [ControllerAddress.of(f"100@{self.controller}")], SHARED, self.listen, {}
        )
        with held(FS, self.data):
            carry_out(FS, make_plan(FS, wanted), NOW_MS)

    def decides(self) -> Broker:
        room = self.output / "controller-100"
        return _told(room / "controller.properties", room / "metadata")

    def member(self) -> Broker:
        return _told(self.output / "broker.properties", self.data)

    def stand_alone(self) -> demotion.Demotion:
        with held(FS, self.data):
            plan = demotion.make_plan(FS, self.data, [self.metadata])
            demotion.carry_out(FS, plan, NOW_MS)
        return plan


def _told(file: Path, directory: Path) -> Broker:
    settings = properties.parse(file.read_bytes())
    assert settings.pop("log.dirs") == str(directory)
    return Broker(directory, None, settings)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def topics_of(broker: Broker) -> Mapping[str, int]:
    """Return topic → partition count from a client; check that broker 1 leads every partition."""
    async with AsyncWireClient(broker.bootstrap) as client:
        known = (await client.metadata(refresh=True)).topics
    assert all(row.leader == 1 for topic in known.values() for row in topic.partitions.values())
    return {name: len(topic.partitions) for name, topic in known.items()}


def create(broker: Broker, name: str) -> None:
    create_topic(broker.services.metadata, name, 2, {})


async def begun(place: Place) -> None:
    """Start and stop a standalone broker with one topic."""
    async with place.alone() as broker:
        create(broker, "orders")


async def created_by_client(broker: Broker, name: str) -> None:
    def ask(make: Any) -> Any:
        topic = make.CreatableTopic(
            name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        return make.message(topics=[topic], timeout=10_000)

    async with AsyncWireClient(broker.bootstrap) as client:
        await client.call("CreateTopics", entity=ask)


async def test_promoted_and_demoted_broker_keeps_its_metadata(place: Place) -> None:
    await begun(place)
    async with place.alone() as broker:
        ids = {topic.name: topic.topic_id for topic in broker.services.metadata.topics.values()}
        epoch = broker.services.metadata.topics["orders"].partitions[0].leader_epoch
        allocate_producer_ids(broker.services.storage)
    place.promote()
    async with place.decides() as decides:
        async with place.member() as member:
            assert (await topics_of(member))["orders"] == 2
            image = member.services.metadata.image
            assert {topic.name: topic.topic_id for topic in image.topics.values()} == ids
            assert image.topics["orders"].partitions[0].leader_epoch > epoch
            assert decides.services.metadata.image.next_producer_id == 1000
            await created_by_client(member, "meanwhile")
        with pytest.raises(BrokerError, match="has joined other controllers"):
            await place.alone().start()
        async with place.member() as member:
            assert set(await topics_of(member)) >= {"orders", "meanwhile"}
            epoch = member.services.metadata.topics["orders"].partitions[0].leader_epoch
        with pytest.raises(PromotionError, match="in use by a running broker"):
            place.stand_alone()
    with pytest.raises(PromotionError, match="has already joined controllers"):
        place.promote()
    place.stand_alone()
    async with place.alone() as broker:
        assert set(await topics_of(broker)) >= {"orders", "meanwhile"}
        image = broker.services.metadata.image
        assert image.topics["orders"].topic_id == ids["orders"]
        assert image.topics["orders"].partitions[0].leader_epoch > epoch
        assert image.next_producer_id == 1000
        assert [*image.brokers] == [1]
        assert not image.controllers
    shutil.rmtree(place.output)
    place.promote()
    async with place.decides(), place.member() as member:
        assert set(await topics_of(member)) >= {"orders", "meanwhile"}


async def test_broker_started_alone_after_promotion_cannot_join_controllers(place: Place) -> None:
    await begun(place)
    place.promote()
    other = place.output.rename(place.output.with_name("before"))
    async with place.alone() as broker:
        create(broker, "later")
    other.rename(place.output)
    async with place.decides():
        with pytest.raises(BrokerError, match="fencepost cluster promote"):
            await place.member().start()
    async with place.alone() as broker:
        assert {"orders", "later"} <= set(await topics_of(broker))


async def test_broker_does_not_join_controllers_with_older_metadata(
    place: Place, tmp_path: Path
) -> None:
    """The broker is promoted twice, into two directories, and then the older controller starts."""
    await begun(place)
    place.promote()
    async with place.alone():
        pass  # starting changes only the leader epochs
    place.promote(tmp_path / "newer")
    async with place.decides():
        with pytest.raises(BrokerError, match="orders is in an earlier state"):
            await place.member().start()
    async with place.alone() as broker:
        assert "orders" in await topics_of(broker)
    place.promote(tmp_path / "newest")
    shutil.rmtree(place.output)
    (tmp_path / "newest").rename(place.output)
    for name in ("broker.properties", "controller-100/controller.properties"):
        file = place.output / name
        file.write_text(file.read_text().replace("newest", "output"))
    async with place.decides(), place.member() as member:
        assert "orders" in await topics_of(member)


async def test_demotion_before_joining_changes_no_metadata(place: Place) -> None:
    await begun(place)
    place.promote()
    assert place.stand_alone().image is None
    async with place.alone() as broker:
        assert "orders" in await topics_of(broker)


async def test_promoted_broker_waits_for_controllers_that_start_later(place: Place) -> None:
    await begun(place)
    place.promote()
    member = place.member()
    starting = asyncio.create_task(member.start())
    await asyncio.sleep(0)
    async with place.decides():
        await starting
        assert "orders" in await topics_of(member)
        await member.stop()
