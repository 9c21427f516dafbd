"""Messages whose Kafka topic is missing or invalid go to a dead-letter topic, or end the bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.pipelines.failures import MissingTopicError
from fencepost.pipelines.mqtt.bridge import Bridge, BridgeOptions, ledger_topic
from fencepost.pipelines.mqtt.routes import Mapped, Route
from fencepost.pipelines.records import REASON
from tests.mqtt.test_sessions import Gateway, broker
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.mosquitto import Mosquitto
from tests.support.own_broker import own_broker
from tests.support.waits import until_async
from tests.wire.clients import aio_consumer

pytestmark = pytest.mark.slow

__all__ = ["broker"]

WAIT_MS = 300


@pytest.fixture(scope="module", params=["auto-create", "no auto-create"])
def asked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Cluster]]:
    settings = {"auto.create.topics.enable": str(request.param == "auto-create").lower()}
    home: Path = tmp_path_factory.mktemp("topics")
    with own_broker(request, home, settings) as kafka, Cluster(kafka.bootstrap) as cluster:
        yield kafka.bootstrap, cluster


@pytest.fixture
def gateway(asked: tuple[str, Cluster], broker: Mosquitto) -> Gateway:
    return Gateway(*asked, broker, 5)


def bridge(gateway: Gateway, stem: str, **options: Any) -> Bridge:
    """Return a bridge that routes ``b/NAME`` to topic ``STEM.NAME``."""
    routes = (Route("a/#", gateway.topic), Route("b/+", stem + ".{1}"))
    return gateway.mapped_bridge(Mapped(routes), options=BridgeOptions(**options))


async def at_work(made: Bridge) -> asyncio.Task[None]:
    """Run the bridge in a task, and wait until it is connected; the test awaits the task."""
    running = asyncio.create_task(made.run(handle_signals=False))

    async def is_connected() -> bool:
        return made.is_connected

    await until_async(is_connected, "the bridge at work")
    return running


async def reasons(gateway: Gateway, dead: str, count: int) -> list[bytes]:
    async with aio_consumer(gateway.bootstrap, dead, auto_offset_reset="earliest") as consumer:
        letters = [await asyncio.wait_for(consumer.getone(), 60) for _ in range(count)]
    return [dict(letter.headers)[REASON] for letter in letters]


async def test_messages_without_a_topic_become_dead_letters(
    gateway: Gateway, request: pytest.FixtureRequest
) -> None:
    cluster, stem = gateway.cluster, unique("stem")
    there = cluster.create_topic(f"{stem}.x.y")
    dead = cluster.create_topic(unique("dead"))
    working = bridge(gateway, stem, dead_letter=dead, topic_wait_ms=WAIT_MS)
    async with gateway.running(working):
        await gateway.publish(b"1")
        await gateway.publish(b"collides", topic="b/x_y")
        await gateway.publish(b"2")
        await gateway.publish(b"there", topic="b/x.y")
        await gateway.publish(b"long", topic="b/" + "x" * 250)
        await gateway.publish(b"new", b"new", topic="b/new")
        await gateway.publish(b"3")
        await gateway.written(b"1", b"2", b"3")
    assert cluster.values(there, isolation=READ_COMMITTED) == [b"there"]
    is_created = request.node.callspec.params["asked"] == "auto-create"
    letters = cluster.values(dead, isolation=READ_COMMITTED)
    assert letters == [b"collides", b"long", *([] if is_created else [b"new", b"new"])]
    told = await reasons(gateway, dead, len(letters))
    assert b"collides with existing topic: " + there.encode() in told[0]
    assert b"longer than 249" in told[1]
    if is_created:
        assert cluster.values(f"{stem}.new", isolation=READ_COMMITTED) == [b"new"] * 2
    else:
        assert b"does not exist: no broker creates it" in told[2]
    assert working.counters.unwritable == len(letters) - 1
    assert working.counters.unrouted == 1
    assert working.counters.restarts == 0


async def test_bridge_without_dead_letter_topic_ends_and_message_is_resent(
    gateway: Gateway,
) -> None:
    cluster, stem = gateway.cluster, unique("stem")
    cluster.create_topic(f"{stem}.x.y")
    ending = await at_work(bridge(gateway, stem))
    await gateway.publish(b"1")
    await gateway.written(b"1")
    await gateway.publish(b"bad", topic="b/x_y")
    with pytest.raises(MissingTopicError, match=r"'b/x_y': topic '.*' cannot exist: .* collides"):
        await asyncio.wait_for(ending, 60)
    dead = cluster.create_topic(unique("dead"))
    async with gateway.running(bridge(gateway, stem, dead_letter=dead)):
        await gateway.publish(b"2")
        await gateway.written(b"1", b"2")
    assert cluster.values(dead, isolation=READ_COMMITTED) == [b"bad"]


async def test_missing_dead_letter_topic_ends_the_bridge(gateway: Gateway) -> None:
    stem = unique("stem")
    there = gateway.cluster.create_topic(f"{stem}.x.y")
    options = {"dead_letter": there.replace(".", "_"), "topic_wait_ms": WAIT_MS}
    ending = await at_work(bridge(gateway, stem, **options))
    await gateway.publish(b"bad", topic="b/x_y")
    with pytest.raises(MissingTopicError, match="dead letters cannot be written"):
        await asyncio.wait_for(ending, 60)
    with pytest.raises(ValueError, match="dead_letter: the topic name 'a b'"):
        BridgeOptions(dead_letter="a b")


async def test_message_to_a_deleted_topic_becomes_a_dead_letter(
    gateway: Gateway, request: pytest.FixtureRequest
) -> None:
    cluster, stem = gateway.cluster, unique("stem")
    gone = cluster.create_topic(f"{stem}.gone")
    dead = cluster.create_topic(unique("dead"))
    working = bridge(gateway, stem, dead_letter=dead, topic_wait_ms=WAIT_MS)
    async with gateway.running(working):
        await gateway.publish(b"1", topic="b/gone")

        async def is_written() -> bool:
            return await asyncio.to_thread(cluster.values, gone) == [b"1"]

        await until_async(is_written, "the first message")
        await asyncio.to_thread(cluster.call, "delete_topics", 5, topic_names=[gone], timeout=9_000)
        await gateway.publish(b"2", topic="b/gone")
        await gateway.publish(b"behind")
        await gateway.written(b"behind")
    if request.node.callspec.params["asked"] == "auto-create":
        dead = gone  # the topic was created again
    assert cluster.values(dead, isolation=READ_COMMITTED) == [b"2"]


async def test_colliding_ledger_topic_name_ends_the_bridge(gateway: Gateway) -> None:
    gateway.client_id = unique("a.b")
    gateway.cluster.create_topic(ledger_topic(gateway.client_id).replace(".b", "_b"))
    with pytest.raises(MissingTopicError, match="choose another client id"):
        await asyncio.wait_for(gateway.bridge().run(handle_signals=False), 60)
