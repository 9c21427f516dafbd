"""Brokers of a cluster and their controller, all in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost.client.client import AsyncWireClient
from fencepost.cluster.lifecycle import BrokerState
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.cluster_broker import ClusterBroker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.checkpoints import clean_shutdown_epoch
from fencepost.protocol.schema import Entity
from tests.support import member as members
from tests.support.waits import until_async, until_true
from tests.wire.command_line import cli

QUICK = {"broker.heartbeat.interval.ms": "100", "broker.session.timeout.ms": "600"}


def controller(path: Path, port: int = 0, **more: str) -> Broker:
    return Broker(
        path,
        config={
            **QUICK,
            "process.roles": "controller",
            "node.id": "3",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"CONTROLLER://127.0.0.1:{port}",
            **more,
        },
    )


def member(path: Path, at: tuple[str, int], node_id: int = 101, **more: str) -> Broker:
    return Broker(
        path / str(node_id),
        config={
            **QUICK,
            "process.roles": "broker",
            "node.id": str(node_id),
            "controller.quorum.bootstrap.servers": f"{at[0]}:{at[1]}",
            "controller.listener.names": "CONTROLLER",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "2",
            **more,
        },
    )


@asynccontextmanager
async def cluster(path: Path, *node_ids: int) -> AsyncIterator[tuple[Broker, list[Broker]]]:
    """Yield a controller and its registered brokers."""
    async with controller(path / "controller") as decides:
        brokers = [member(path, decides.address, node_id) for node_id in node_ids]
        try:
            await asyncio.gather(*(broker.start() for broker in brokers))
            yield decides, brokers
        finally:
            for broker in brokers:
                await broker.stop()


def of(broker: Broker) -> ClusterBroker:
    assert broker._member is not None
    return broker._member


def fenced(decides: Broker) -> Mapping[int, bool]:
    """Return broker id → whether the controller has fenced the broker."""
    return {
        broker.broker_id: broker.fenced
        for broker in decides.services.metadata.image.brokers.values()
    }


async def create(broker: Broker, name: str, *replicas: list[int]) -> None:
    """Create a topic by a request to this broker, which forwards the request."""

    def body(make: Any) -> Entity:
        rows = [
            make.CreatableReplicaAssignment(partition_index=index, broker_ids=ids)
            for index, ids in enumerate(replicas)
        ]
        topic = make.CreatableTopic(
            name=name, num_partitions=-1, replication_factor=-1, assignments=rows
        )
        return make.message(topics=[topic], timeout_ms=5_000)

    async with AsyncWireClient(broker.bootstrap) as client:
        answer = await client.call("CreateTopics", entity=body)
    assert [topic.error_code for topic in answer.topics] == [0], answer


def leads(broker: Broker, name: str, index: int = 0) -> Callable[[], int | None]:
    """Return a function that returns the leader according to this broker's metadata."""

    def look() -> int | None:
        topic = broker.services.metadata.topic(name)
        return None if topic is None else topic.partitions[index].leader

    return look


def run(work: Any) -> None:
    asyncio.run(work())


def test_brokers_register_and_topic_created_through_one_reaches_the_other(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101, 102) as (decides, (one, other)):
            assert fenced(decides) == {101: False, 102: False}
            assert one.services.cluster_id == decides.services.cluster_id
            await create(one, "t", [101, 102], [102, 101])
            await until_true(lambda: leads(other, "t", 1)() == 102, "the topic elsewhere")
            async with AsyncWireClient(other.bootstrap) as client:
                metadata = await client.metadata()
                assert {node: at.address for node, at in metadata.brokers.items()} == {
                    101: one.address,
                    102: other.address,
                }
                assert metadata.leader("t", 0) == 101

    run(work)


def test_find_coordinator_creates_the_offsets_topic_through_the_controller(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101, 102) as (_, (one, other)):
            places = set()
            for broker in (one, other):
                async with AsyncWireClient(broker.bootstrap) as client:
                    answer = await client.call(
                        "FindCoordinator",
                        2,
                        entity=lambda make: make.message(key="g", key_type=0),
                    )
                    places.add((answer.node_id, answer.host, answer.port))
            assert len(places) == 1
            assert places & {(101, *one.address), (102, *other.address)}

    run(work)


def test_controlled_shutdown_moves_leadership_before_the_broker_stops(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101, 102) as (decides, (one, other)):
            await create(one, "t", [101, 102])
            await until_true(lambda: leads(one, "t")() == 101, "the topic")
            epoch = of(one).membership.broker_epoch
            await one.stop()
            assert leads(other, "t")() == 102
            assert fenced(decides) == {101: True, 102: False}
            assert clean_shutdown_epoch(one.fs, str(one.data_dir)) == epoch
            identity = (one.data_dir / "meta.properties").read_text()
            await one.start()
            assert (one.data_dir / "meta.properties").read_text() == identity
            assert of(one).membership.broker_epoch > epoch

    run(work)


@pytest.mark.slow
def test_blocked_event_loop_does_not_get_the_broker_fenced(tmp_path: Path) -> None:
    """A turn that is longer than the session timeout delays no heartbeat and loses no metadata."""

    async def work(at: tuple[str, int], seen: Callable[[], Mapping[int, bool]]) -> None:
        async with member(tmp_path, at):
            until = time.monotonic() + 2 * 0.6
            while time.monotonic() < until:
                assert seen() == {101: False}

    decides: list[Broker] = []

    def made() -> Broker:
        decides.append(controller(tmp_path / "controller"))
        return decides[0]

    with BrokerThread(made) as thread:
        asyncio.run(work(thread.address, lambda: fenced(decides[0])))


def test_unregistered_broker_reports_a_fatal_error(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101) as (_, (broker,)):
            lost: list[BrokerError] = []
            broker.on_lost = lost.append
            async with AsyncWireClient(broker.bootstrap) as client:
                answer = await client.call(
                    "UnregisterBroker", entity=lambda make: make.message(broker_id=101)
                )
            assert answer.error_code == 0
            await until_true(lambda: bool(lost), "the loss")
            assert "another broker has registered" in str(lost[0])
            assert of(broker).membership.state is BrokerState.SHUTTING_DOWN

    run(work)


@pytest.mark.parametrize("task", ["observer", "lifecycle"])
def test_failed_observer_or_lifecycle_task_is_reported_as_a_fatal_error(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the report the broker would go on with metadata that is never updated again."""

    async def work() -> None:
        async with cluster(tmp_path, 101) as (_, (broker,)):
            lost: list[BrokerError] = []
            broker.on_lost = lost.append

            def odd(*_: object) -> None:
                raise KeyError("odd")

            membership = of(broker).membership
            if task == "observer":
                monkeypatch.setattr(membership._observing.observer, "on_fetched", odd)
            else:
                monkeypatch.setattr(membership.lifecycle, "next_request", odd)
            await until_true(lambda: bool(lost), "the loss")
            assert "odd" in str(lost[0])

    run(work)


def test_broker_config_is_validated_by_the_broker_and_stored_by_the_controller(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101) as (decides, (broker,)):

            async def alter(kind: int, name: str, key: str, value: str) -> int:
                def body(make: Any) -> Entity:
                    row = make.AlterConfigsResource(
                        resource_type=kind,
                        resource_name=name,
                        configs=[make.AlterableConfig(name=key, value=value)],
                    )
                    return make.message(resources=[row])

                async with AsyncWireClient(broker.bootstrap) as client:
                    answer = await client.call("IncrementalAlterConfigs", entity=body)
                return int(answer.responses[0].error_code)

            assert await alter(4, "101", "log.segment.bytes", "1") == ErrorCode.invalid_request
            assert await alter(4, "102", "log.retention.ms", "7") == ErrorCode.invalid_request
            assert await alter(4, "101", "log.retention.ms", "77") == 0
            assert decides.services.metadata.settings("101") == {"log.retention.ms": "77"}
            await until_true(lambda: broker.config.get("log.retention.ms") == 77, "the setting")
            assert await alter(4, "", "log.retention.ms", "88") == 0
            assert await alter(8, "101", "root", "INFO") == 0

    run(work)


def test_broker_serves_without_a_controller_and_reconnects_after_its_restart(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        decides = controller(tmp_path / "controller")
        await decides.start()
        again = controller(tmp_path / "controller", decides.address[1])
        try:
            async with member(tmp_path, decides.address) as broker:
                await create(broker, "t", [101])
                # The controller responds when the topic is durable; the broker learns of the topic
                # later.
                await until_true(lambda: leads(broker, "t")() == 101, "the topic on the broker")
                await decides.stop()
                async with AsyncWireClient(broker.bootstrap) as client:
                    assert (await client.metadata()).leader("t", 0) == 101
                await again.start()
                await until_true(lambda: fenced(again) == {101: False}, "unfenced again")
                await create(broker, "u", [101])
                await until_true(lambda: leads(broker, "u")() == 101, "a new topic")
        finally:
            await again.stop()

    run(work)


def test_data_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path / "a", 101):
            pass
        async with controller(tmp_path / "controller") as decides:
            stranger = member(tmp_path / "a", decides.address)
            with pytest.raises(BrokerError, match="those of another cluster"):
                await stranger.start()

    run(work)


def test_undefined_inter_broker_listener_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        broker = member(tmp_path, ("127.0.0.1", 1), **{"inter.broker.listener.name": "SSL"})
        with pytest.raises(Exception, match="must be a listener name defined in advertised"):
            await broker.start()

    run(work)


def test_broker_start_without_a_controller_fails_after_the_registration_timeout(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        limit = {"initial.broker.registration.timeout.ms": "300"}
        broker = member(tmp_path, ("127.0.0.1", 1), **limit)
        with pytest.raises(BrokerError, match="no controller has returned the cluster id"):
            await broker.start()

    run(work)


def test_start_waiting_for_a_controller_can_be_terminated(tmp_path: Path) -> None:
    daemon = members.Member(tmp_path, "127.0.0.1:1")
    child = daemon.launch()
    child.wait_for_line("no controller has returned the cluster id yet", deadline_s=60)
    assert child.terminate() == 0
    assert not (daemon.data_dir / "meta.properties").exists()


@pytest.mark.parametrize("password", ["right", "wrong"])
def test_broker_authenticates_to_the_controller_listener(tmp_path: Path, password: str) -> None:
    """As in Kafka, the settings of the controllers' listener have the credentials."""

    def plain(own: str) -> str:
        return (
            "org.apache.kafka.common.security.plain.PlainLoginModule required"
            f' username="broker" password="{own}" user_broker="right";'
        )

    def secured(own: str) -> dict[str, str]:
        return {
            "listener.security.protocol.map": "CONTROLLER:SASL_PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": plain(own),
            "initial.broker.registration.timeout.ms": "1000",
        }

    async def work() -> None:
        async with controller(tmp_path / "controller", **secured("right")) as decides:
            broker = member(tmp_path, decides.address, **secured(password))
            if password == "right":
                async with broker:
                    assert fenced(decides) == {101: False}
            else:
                with pytest.raises(BrokerError, match="Authentication failed"):
                    await broker.start()

    run(work)


def test_client_listener_as_controller_address_is_a_mismatched_endpoint_type(
    tmp_path: Path,
) -> None:
    """The wrong port is the most common mistake."""

    async def work() -> None:
        limit = {"initial.broker.registration.timeout.ms": "300"}
        async with cluster(tmp_path, 101) as (_, (registered,)):
            broker = member(tmp_path, registered.address, 102, **limit)
            with pytest.raises(BrokerError, match="MISMATCHED_ENDPOINT_TYPE"):
                await broker.start()

    run(work)


def test_unregistered_broker_without_an_on_lost_handler_stops(tmp_path: Path) -> None:
    async def work() -> None:
        async with cluster(tmp_path, 101) as (_, (broker,)):
            async with AsyncWireClient(broker.bootstrap) as client:
                await client.call(
                    "UnregisterBroker", entity=lambda make: make.message(broker_id=101)
                )
            await until_true(lambda: broker._services is None, "its end")

    run(work)


@pytest.mark.slow
def test_replica_history_is_written_by_leaders_and_merged_by_the_command(tmp_path: Path) -> None:
    """Each broker writes its part of the history; the command merges all parts."""

    def told(broker: Broker) -> list[dict[str, Any]]:
        done = cli(broker.bootstrap, "topics", "history", "t", "--format", "json")
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    async def work() -> None:
        async with controller(tmp_path / "controller") as decides:
            more = {"offsets.topic.replication.factor": "2"}
            one, other = (member(tmp_path, decides.address, node, **more) for node in (101, 102))
            await asyncio.gather(one.start(), other.start())
            try:
                await create(one, "t", [101, 102], [102, 101])
                await until_true(lambda: leads(one, "t", 1)() == 102, "the topic")
                await until_true(lambda: leads(other, "t", 1)() == 102, "the topic there")
                await other.stop()
                await until_true(lambda: leads(one, "t", 1)() == 101, "another leader")
                rows: list[dict[str, Any]] = []

                async def look() -> bool:
                    rows[:] = await asyncio.to_thread(told, one)
                    seen = {(row["subject"], row["what"]) for row in rows}
                    return seen >= {("t-0", "isr-shrunk"), ("t-1", "became-leader")}

                await until_async(look, "both partitions in the history")
                found = {(row["subject"], row["what"]): row for row in rows}
                lead, isr = found["t-1", "became-leader"], found["t-0", "isr-shrunk"]
                assert lead["change"] == "leader 102 → 101"
                assert isr["change"] == "ISR 101 (−102)"
                assert "broker 102" in lead["why"]
                assert "broker 102" in isr["why"]
                shown = await asyncio.to_thread(cli, one.bootstrap, "cluster", "describe")
                assert "0 offline" in shown.stdout
                await asyncio.to_thread(cli, one.bootstrap, "topics", "reassign", "--verify")

                other = member(tmp_path, decides.address, 102, **more)
                await other.start()

                def is_in_sync() -> bool:
                    topics = other.services.metadata.topics.values()
                    return all(
                        102 in partition.isr for topic in topics for partition in topic.partitions
                    )

                await until_true(is_in_sync, "a full ISR")
                await one.stop()
                await until_true(lambda: leads(other, "t")() == 102, "the other leader")

                async def look_there() -> bool:
                    rows[:] = await asyncio.to_thread(told, other)
                    return ("t-0", "leader 101 → 102") in {
                        (row["subject"], row["change"]) for row in rows
                    }

                await until_async(look_there, "what it did itself, after what the first wrote")
                assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)

                def has_its_own() -> bool:
                    parts = other.services.metadata.topics[HISTORY_TOPIC].partitions
                    return sorted(part.replicas[0] for part in parts) == [101, 102]

                await until_true(has_its_own, "a part of the history for each")
            finally:
                await one.stop()
                await other.stop()

    run(work)
