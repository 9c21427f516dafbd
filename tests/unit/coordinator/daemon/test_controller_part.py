"""Combined nodes: a broker that is also the controller, to which other brokers connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.client import AsyncWireClient
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.logcore.checkpoints import clean_shutdown_epoch
from fencepost.logcore.fs import FileSystem
from fencepost.protocol.schema import Entity
from tests.support.cluster import Cluster
from tests.support.faults import FaultyDisk
from tests.support.waits import DEADLINE_S, until_true
from tests.unit.coordinator.daemon.test_cluster_broker import QUICK, create, leads, member, run

CONTROLLER = {"controller.listener.names": "CONTROLLER"}


def combined(path: Path, port: int = 0, *, fs: FileSystem | None = None, **more: str) -> Broker:
    return Broker(
        path / "1",
        fs=fs,
        config={
            **QUICK,
            **CONTROLLER,
            "process.roles": "broker,controller",
            "node.id": "1",
            "listeners": f"PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:{port}",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "2",
            **more,
        },
    )


def decides(broker: Broker) -> Services:
    assert broker.controller_part is not None
    return broker.controller_part.services


def door(broker: Broker) -> tuple[str, int]:
    assert broker.controller_part is not None
    return broker.controller_part.listeners.address_of()


def fenced(broker: Broker) -> dict[int, bool]:
    return {
        registered.broker_id: registered.fenced
        for registered in decides(broker).metadata.image.brokers.values()
    }


def isr(broker: Broker, name: str) -> Callable[[], set[int]]:
    def look() -> set[int]:
        topic = broker.services.metadata.topic(name)
        return set() if topic is None else set(topic.partitions[0].isr)

    return look


async def die(broker: Broker) -> None:
    """Stop the node without a message to other brokers."""
    await broker.go_silent()
    await broker.stop()


async def append(broker: Broker, name: str, value: bytes) -> int:
    """Produce with acks=all once the broker knows that it is the leader; return the offset."""

    def produce() -> int:
        with Cluster(broker.bootstrap) as client:
            while True:
                answer = client.produce(name, [value], acks=-1)
                if answer["error_code"] != "not_leader_or_follower":
                    assert answer["error_code"] == "none", answer
                    return int(answer["base_offset"])

    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(produce)


async def values(broker: Broker, name: str) -> list[bytes | None]:
    """Return all values of a partition that this broker leads."""

    def read() -> list[bytes | None]:
        with Cluster(broker.bootstrap) as client:
            return list(client.values(name))

    return await asyncio.to_thread(read)


@asynccontextmanager
async def three(path: Path) -> AsyncIterator[tuple[Broker, Broker, Broker]]:
    first = combined(path)
    others: list[Broker] = []
    try:
        await first.start()
        others += [member(path, door(first), node_id) for node_id in (2, 3)]
        await asyncio.gather(*(broker.start() for broker in others))
        yield first, others[0], others[1]
    finally:
        for broker in (*others, first):
            await broker.stop()


def test_failed_metadata_log_is_a_fatal_error_of_the_combined_node(tmp_path: Path) -> None:
    async def work() -> None:
        disk, lost = FaultyDisk(), list[BrokerError]()
        async with combined(tmp_path, fs=disk) as broker:
            broker.on_lost = lost.append
            disk.sync_fails = lambda path: METADATA_TOPIC in path

            def create_topic() -> str:
                topic = {"name": "t", "num_partitions": 1, "replication_factor": 1}
                with Cluster(broker.bootstrap) as client:
                    answer = client.call(
                        "create_topics",
                        5,
                        topics=[{**topic, "assignments": [], "configs": []}],
                        timeout=10_000,
                        validate_only=False,
                    )
                return str(answer["topics"][0]["error_code"])

            assert await asyncio.to_thread(create_topic) == "kafka_storage_error"
            await until_true(lambda: lost, "the node has to stop")
        assert str(lost[0]).startswith(f"{METADATA_TOPIC}-0 is off line: ")

    run(work)


@pytest.mark.slow
def test_combined_node_takes_over_the_leadership_of_a_failed_broker(tmp_path: Path) -> None:
    async def work() -> None:
        async with three(tmp_path) as (one, two, third):
            assert fenced(one) == {1: False, 2: False, 3: False}
            await create(third, "t", [2, 1, 3])
            await until_true(lambda: isr(one, "t")() == {1, 2, 3}, "replicas everywhere")
            assert await append(two, "t", b"a") == 0
            await die(two)
            await until_true(lambda: leads(one, "t")() == 1, "it leads what another has led")
            assert await append(one, "t", b"b") == 1
            assert await values(one, "t") == [b"a", b"b"]
            again = member(tmp_path, door(one), 2)
            async with again:
                await until_true(lambda: isr(again, "t")() == {1, 2, 3}, "it is back")

    run(work)


@pytest.mark.slow
def test_restarted_combined_node_rejoins_without_waiting_for_its_session(tmp_path: Path) -> None:
    """The broker shuts down cleanly, and does not wait for its former session when it restarts."""

    async def work() -> None:
        async with three(tmp_path) as (one, two, third):
            await create(one, "t", [1, 2, 3])
            await until_true(lambda: isr(two, "t")() == {1, 2, 3}, "replicas everywhere")
            assert await append(one, "t", b"a") == 0
            at, epoch = door(one), one.services.replicas.view.broker_epoch
            await one.stop()
            assert clean_shutdown_epoch(one.fs, str(one.data_dir)) == epoch
            assert leads(two, "t")() in {2, 3}
            leader = two if leads(two, "t")() == 2 else third
            assert await append(leader, "t", b"b") == 1
            # A broker that waited for its former session to expire would exceed the test's timeout.
            again = combined(tmp_path, at[1], **{"broker.session.timeout.ms": "600000"})
            async with again:
                await until_true(lambda: isr(leader, "t")() == {1, 2, 3}, "it follows")
                assert fenced(again) == {1: False, 2: False, 3: False}
                assert len(again.services.cluster_id) == 22
                await create(two, "u", [3])
                await until_true(lambda: leads(again, "u")() == 3, "a new topic")

    run(work)


@pytest.mark.slow
def test_killed_combined_node_recovers_its_topics(tmp_path: Path) -> None:
    """A single broker: no other broker can lead its topics while it is down."""

    async def work() -> None:
        async with combined(tmp_path) as broker:
            await create(broker, "t", [1])
            await until_true(lambda: leads(broker, "t")() == 1, "the topic")
            assert await append(broker, "t", b"a") == 0
            await die(broker)
            (broker.data_dir / ".kafka_cleanshutdown").unlink()
        async with combined(tmp_path) as again:
            await until_true(lambda: leads(again, "t")() == 1, "it leads again")
            assert await values(again, "t") == [b"a"]

    run(work)


@pytest.mark.slow
def test_standalone_broker_can_become_a_cluster_and_add_replicas(tmp_path: Path) -> None:
    """Topics, committed offsets and settings survive; then other brokers get replicas."""

    async def work() -> None:
        async with Broker(tmp_path / "1", config={"node.id": "1"}) as alone:
            await create(alone, "t", [1])
            assert await append(alone, "t", b"a") == 0
            identity = alone.services.cluster_id
        async with three(tmp_path) as (one, two, _):
            assert one.services.cluster_id == identity
            assert one.services.logs.was_clean
            assert await values(one, "t") == [b"a"]
            await reassign(two, "t", [2, 1, 3])
            await until_true(lambda: isr(one, "t")() == {1, 2, 3}, "replicas everywhere")
            assert await append(one, "t", b"b") == 1

    run(work)


async def reassign(broker: Broker, name: str, replicas: list[int]) -> None:
    def body(make: Any) -> Entity:
        row = make.ReassignablePartition(partition_index=0, replicas=replicas)
        topic = make.ReassignableTopic(name=name, partitions=[row])
        return make.message(topics=[topic], timeout=timedelta(seconds=5))

    async with AsyncWireClient(broker.bootstrap) as client:
        answer = await client.call("AlterPartitionReassignments", entity=body)
    assert answer.responses[0].partitions[0].error_code == 0, answer


def test_standalone_start_is_refused_while_other_brokers_are_registered(tmp_path: Path) -> None:
    """A standalone broker would become the leader of the other brokers' partitions."""

    async def work() -> None:
        async with combined(tmp_path) as broker, member(tmp_path, door(broker), 2):
            pass
        alone = Broker(tmp_path / "1", config={"node.id": "1"})
        with pytest.raises(MetadataError, match=r"controller of other brokers \[2\]"):
            await alone.start()
        async with combined(tmp_path) as broker:
            assert broker.services.logs.was_clean
            async with AsyncWireClient(broker.bootstrap) as client:
                await client.call("UnregisterBroker", entity=lambda make: make.message(broker_id=2))
        async with alone:
            assert alone.services.logs.was_clean

    run(work)


def test_failed_start_keeps_the_clean_shutdown_marker(tmp_path: Path) -> None:
    async def work() -> None:
        async with combined(tmp_path) as broker:
            epoch = broker.services.replicas.view.broker_epoch
        wrong = combined(tmp_path, **{"inter.broker.listener.name": "SSL"})
        with pytest.raises(ConfigError, match="must be a listener name defined in advertised"):
            await wrong.start()
        assert clean_shutdown_epoch(broker.fs, str(broker.data_dir)) == epoch

    run(work)
