"""Packet ids after the MQTT broker has lost the session, or only seems to have lost it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fencepost.pipelines.mqtt.bridge import Bridge, BridgeOptions
from fencepost.pipelines.mqtt.ledger import Ledger, digest
from fencepost.pipelines.mqtt.routes import Mapped, Route
from fencepost.pipelines.mqtt.session import Address
from fencepost.pipelines.producers import open_producer, send_all
from fencepost.pipelines.records import Output
from fencepost.pipelines.serde import BYTES
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.mosquitto import Mosquitto
from tests.support.waits import until_async

VERSIONS = [pytest.param(4, id="v311"), pytest.param(5, id="v5")]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    started = Mosquitto(tmp_path / "mqtt").start()
    yield started
    started.kill()


class Gateway:
    """One bridge in this process, its Kafka topic, and a publisher of MQTT messages."""

    def __init__(self, bootstrap: str, cluster: Cluster, broker: Mosquitto, version: int) -> None:
        self.bootstrap, self.cluster, self.broker, self.version = (
            bootstrap,
            cluster,
            broker,
            version,
        )
        self.topic = cluster.create_topic(unique("readings"))
        self.client_id = unique("gateway")
        self.port = broker.port
        """The port to which bridges connect: the broker's, or a proxy's."""

    def bridge(self, qos: int = 2, **more: Any) -> Bridge:
        """Return a bridge; ``more`` has options, and fields of the address."""
        return self.mapped_bridge(Mapped((Route("a/#", self.topic, qos=qos),)), **more)

    def mapped_bridge(
        self, mapped: Mapped, *, options: BridgeOptions | None = None, **address: Any
    ) -> Bridge:
        whole = {"client_id": self.client_id, "version": self.version, **address}
        return Bridge(self.bootstrap, Address("127.0.0.1", self.port, **whole), mapped, options)

    @contextlib.asynccontextmanager
    async def running(self, bridge: Bridge) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(bridge.run(handle_signals=False))

        async def connected() -> bool:
            if task.done():
                task.result()
            return bridge.is_connected

        try:
            await until_async(connected, "the bridge at work")
            yield task
        finally:
            bridge.stop()
            await asyncio.wait_for(task, 60)

    def client(self, client_id: str, *, persistent: bool = False) -> paho.Client:
        """Return a connected raw MQTT client, whose loop the caller stops."""
        version = paho.MQTTv5 if self.version == 5 else paho.MQTTv311
        options: dict[str, Any] = {} if self.version == 5 else {"clean_session": not persistent}
        client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, client_id, protocol=version, **options
        )
        arguments: dict[str, Any] = {}
        if self.version == 5:
            properties = Properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = 3_600 if persistent else 0
            arguments = {"clean_start": not persistent, "properties": properties}
        client.connect("127.0.0.1", self.broker.port, **arguments)
        client.loop_start()
        return client

    async def publish(
        self,
        *payloads: bytes,
        qos: int = 2,
        topic: str = "a/b",
        retain: bool = False,
        **attributes: Any,
    ) -> None:
        """Publish and wait; ``attributes`` are MQTT 5 properties, with paho's names."""
        client = self.client(unique("sensor"))
        properties = Properties(PacketTypes.PUBLISH) if attributes else None
        for name, value in attributes.items():
            setattr(properties, name, value)
        try:
            for payload in payloads:
                sent = client.publish(topic, payload, qos, retain, properties)
                await until_async(self._published(sent), "published")
        finally:
            client.disconnect()
            client.loop_stop()

    @staticmethod
    def _published(sent: paho.MQTTMessageInfo) -> Callable[[], Any]:
        async def probe() -> bool:
            return sent.is_published()

        return probe

    async def written(self, *wanted: bytes) -> None:
        """Wait until exactly these values have been written."""

        async def probe() -> bool:
            return len(await self.values()) >= len(wanted)

        await until_async(probe, f"{wanted} written")
        assert await self.values() == list(wanted)

    async def values(self) -> list[bytes | None]:
        return await asyncio.to_thread(
            self.cluster.values, self.topic, partition=0, isolation=READ_COMMITTED
        )

    async def remember(self, packets: dict[int, bytes], *, connecting: bool) -> None:
        """Write the ledger as a bridge does that has received ``packets``."""
        bridge = self.bridge()
        await bridge._create_ledger()
        ledger = Ledger()
        for packet_id, mark in packets.items():
            ledger.receive(packet_id, mark)
        ledger.is_connecting = connecting
        producer = await open_producer(self.bootstrap, f"mqtt-bridge.{self.client_id}", 30_000, {})
        await producer.begin_transaction()
        slots = [
            Output(bridge.ledger_topic, value, key, 0) for key, value in ledger.snapshot(whole=True)
        ]
        await send_all(producer, slots, BYTES, BYTES)
        await producer.commit_transaction()
        await producer.stop()

    async def leave_session(self, *, with_message: bytes | None = None) -> None:
        """Leave a session as a killed bridge does, without messages or with a message in flight."""
        client = self.client(self.client_id, persistent=True)
        arrived: list[int] = []
        client.manual_ack_set(True)
        client._send_pubrec = lambda mid: arrived.append(mid) or paho.MQTT_ERR_SUCCESS
        subscribed: list[int] = []
        client.on_subscribe = lambda *_: subscribed.append(1)

        async def is_connected() -> bool:
            return client.is_connected()

        async def is_subscribed() -> bool:
            return bool(subscribed)

        async def has_arrived() -> bool:
            return bool(arrived)

        await until_async(is_connected, "connected")
        if with_message is not None:
            client.subscribe("a/#", 2)
            await until_async(is_subscribed, "subscribed")
            await self.publish(with_message)
            await until_async(has_arrived, "a message that is not acknowledged")
            assert arrived == [1]
        client.loop_stop()
        sock = client.socket()
        assert sock is not None
        sock.close()  # without a DISCONNECT, as after a kill


@pytest.fixture(params=VERSIONS)
def gateway(
    request: pytest.FixtureRequest, bootstrap: str, cluster: Cluster, broker: Mosquitto
) -> Gateway:
    return Gateway(bootstrap, cluster, broker, request.param)


async def test_lost_session_forgets_its_packet_ids(gateway: Gateway) -> None:
    await gateway.remember({1: digest("a/b", b"21.5")}, connecting=False)
    async with gateway.running(gateway.bridge()):
        await gateway.publish(b"21.5")
        await gateway.written(b"21.5")


async def test_session_lost_by_a_killed_predecessor_is_noticed(gateway: Gateway) -> None:
    """The predecessor began a session by CONNECT, and was killed before it wrote the ledger."""
    await gateway.remember({1: digest("a/b", b"21.5")}, connecting=True)
    await gateway.leave_session()
    async with gateway.running(gateway.bridge()):
        await gateway.publish(b"21.5")
        await gateway.written(b"21.5")


async def test_kept_session_of_a_killed_predecessor_keeps_its_packet_ids(gateway: Gateway) -> None:
    """The predecessor was killed while it connected, and the MQTT broker has kept the session."""
    await gateway.remember({1: digest("a/b", b"21.5")}, connecting=True)
    await gateway.leave_session(with_message=b"21.5")
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await gateway.publish(b"22.0")
        await gateway.written(b"22.0")
    assert bridge.counters.duplicates == 1


async def test_saved_session_survives_a_broker_kill(gateway: Gateway) -> None:
    await gateway.remember({1: digest("a/b", b"21.5")}, connecting=True)
    await gateway.leave_session(with_message=b"21.5")
    await asyncio.to_thread(gateway.broker.save)
    gateway.broker.kill()
    gateway.broker.start()
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await gateway.publish(b"22.0")
        await gateway.written(b"22.0")
    assert bridge.counters.duplicates == 1
