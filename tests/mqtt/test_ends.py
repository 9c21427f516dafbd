"""SIGTERM and SIGINT in every state of the bridge: it ends in time, with status 0 and no loss."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mqtt.test_command_line import Process
from tests.mqtt.test_sessions import Gateway, broker
from tests.support.cluster import Cluster
from tests.support.mosquitto import Mosquitto
from tests.support.mqtt_proxy import MqttProxy
from tests.support.own_broker import OwnBroker, behind_proxy, own_broker
from tests.support.proxy import LosingProxy
from tests.wire.test_pipeline_ends import END_S

pytestmark = pytest.mark.slow

__all__ = ["broker"]

SIGNALS = signal.SIGTERM, signal.SIGINT

BEFORE_WORK = {"Metadata": 3, "FindCoordinator": 10, "CreateTopics": 19, "InitProducerId": 22}
BEFORE_WORK |= {"Fetch": 1, "ListOffsets": 2}
AT_WORK = {"Produce": 0, "AddPartitionsToTxn": 24, "EndTxn": 26}
"""The requests that a bridge sends while it starts, and while it copies."""


@pytest.fixture(scope="module")
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OwnBroker, LosingProxy]]:
    with behind_proxy(request, tmp_path_factory.mktemp("ends")) as found:
        yield found


@pytest.fixture
def gateway(proxied: tuple[OwnBroker, LosingProxy], broker: Mosquitto) -> Iterator[Gateway]:
    started, proxy = proxied
    with Cluster(started.bootstrap) as cluster:
        yield Gateway(f"127.0.0.1:{proxy.port}", cluster, broker, 5)
        proxy.release()


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.child.kill()


async def ends(process: Process, number: int) -> None:
    began = time.monotonic()
    os.kill(process.child.pid, number)
    assert await asyncio.to_thread(process.child.wait, 60) == 0, process.child.tail()
    assert time.monotonic() - began < END_S
    assert any("bridge stopped" in line for line in process.child.lines)
    assert not any("Traceback" in line for line in process.child.lines)


async def all_is_written_once(gateway: Gateway, *wanted: bytes) -> None:
    async with gateway.running(gateway.bridge()):
        await gateway.publish(b"last")
        await gateway.written(*wanted, b"last")


def route(gateway: Gateway) -> tuple[str, str]:
    return "--route", f"a/#={gateway.topic}"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "api"), list(zip(itertools.cycle(SIGNALS), BEFORE_WORK)))
async def test_bridge_stops_in_time_while_kafka_is_silent_at_the_start(
    gateway: Gateway,
    proxied: tuple[OwnBroker, LosingProxy],
    started: list[Process],
    api: str,
    number: int,
) -> None:
    proxied[1].hold(BEFORE_WORK[api])
    process = Process(gateway, *route(gateway))
    started.append(process)
    assert await asyncio.to_thread(proxied[1].holding.wait, 60)
    await ends(process, number)
    proxied[1].release()
    await all_is_written_once(gateway)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "api"), list(zip(itertools.cycle(SIGNALS), AT_WORK)))
async def test_bridge_stops_in_time_while_kafka_is_silent_at_work(
    gateway: Gateway,
    proxied: tuple[OwnBroker, LosingProxy],
    started: list[Process],
    api: str,
    number: int,
) -> None:
    process = Process(gateway, *route(gateway))
    started.append(process)
    await process.says("bridge at work")
    await gateway.publish(b"1")
    await gateway.written(b"1")
    proxied[1].hold(AT_WORK[api])
    await gateway.publish(b"2")
    assert await asyncio.to_thread(proxied[1].holding.wait, 60)
    await ends(process, number)
    proxied[1].release()
    await all_is_written_once(gateway, b"1", b"2")


@pytest.mark.parametrize("number", SIGNALS)
async def test_bridge_stops_in_time_while_it_waits_for_a_topic(
    gateway: Gateway, started: list[Process], number: int
) -> None:
    """The MQTT broker keeps the message that waits for a topic, and all later messages."""
    process = Process(gateway, "--route", "a/no=no-such-topic", *route(gateway))
    started.append(process)
    await process.says("bridge at work")
    await gateway.publish(b"1")
    await gateway.written(b"1")
    await gateway.publish(b"2", topic="a/no")
    await process.says("waits for topics that do not exist")
    await gateway.publish(b"3")
    await ends(process, number)
    await all_is_written_once(gateway, b"1", b"2", b"3")


async def test_bridge_stops_in_time_without_a_kafka_broker(
    gateway: Gateway, started: list[Process]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gateway.bootstrap = f"127.0.0.1:{server.getsockname()[1]}"
    process = Process(gateway, *route(gateway))
    started.append(process)
    await process.says("bridge restarts")
    await ends(process, signal.SIGTERM)


async def test_bridge_stops_in_time_after_kafka_was_killed(
    request: pytest.FixtureRequest, broker: Mosquitto, started: list[Process], tmp_path: Path
) -> None:
    with own_broker(request, tmp_path / "own") as kafka, Cluster(kafka.bootstrap) as cluster:
        gateway = Gateway(kafka.bootstrap, cluster, broker, 5)
        process = Process(gateway, *route(gateway))
        started.append(process)
        await process.says("bridge at work")
        await gateway.publish(b"1")
        await gateway.written(b"1")
        await asyncio.to_thread(kafka.kill)
        await gateway.publish(b"2")
        await process.says("Unable connect|bridge restarts|not ready")
        await ends(process, signal.SIGTERM)


async def test_bridge_stops_in_time_without_an_mqtt_broker(
    gateway: Gateway, started: list[Process]
) -> None:
    gateway.broker.kill()
    process = Process(gateway, *route(gateway))
    started.append(process)
    await process.says("bridge restarts")
    await ends(process, signal.SIGINT)


@pytest.mark.parametrize("kind", ["CONNACK", "SUBACK", "PUBREL"])
async def test_bridge_stops_in_time_while_the_mqtt_broker_is_silent(
    gateway: Gateway, started: list[Process], kind: str
) -> None:
    with MqttProxy(gateway.broker.port) as proxy:
        held = proxy.cut(kind, action="hold", to_broker=False)
        process = Process(gateway, *route(gateway), port=proxy.port)
        started.append(process)
        if kind == "PUBREL":
            await process.says("bridge at work")
            await gateway.publish(b"1")
        assert await asyncio.to_thread(held.done.wait, 60)
        await ends(process, signal.SIGTERM)
    await all_is_written_once(gateway, *[b"1"][: kind == "PUBREL"])


async def test_bridge_stops_in_time_while_its_connection_is_not_accepted(
    gateway: Gateway, started: list[Process]
) -> None:
    """The listening socket's backlog is full, so the bridge's SYN is never answered."""
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for client in (first, second):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        process = Process(gateway, *route(gateway), port=server.getsockname()[1])
        started.append(process)
        await process.says("bridge connects")
        await ends(process, signal.SIGTERM)


async def test_bridge_stops_in_time_while_the_mqtt_broker_is_suspended(
    gateway: Gateway, started: list[Process]
) -> None:
    process = Process(gateway, *route(gateway))
    started.append(process)
    await process.says("bridge at work")
    await gateway.publish(b"1")
    await gateway.written(b"1")
    assert gateway.broker.child is not None
    os.kill(gateway.broker.child.pid, signal.SIGSTOP)
    try:
        await ends(process, signal.SIGTERM)
    finally:
        os.kill(gateway.broker.child.pid, signal.SIGCONT)
    await all_is_written_once(gateway, b"1")
