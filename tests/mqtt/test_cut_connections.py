"""QoS 2 without message ids, cut at every packet: packet ids alone give exactly-once.

The proxy drops one packet, or forwards it and closes the connection right after it. To the MQTT
broker this looks like a kill of the bridge at that instant; the bridge reconnects. Tests that kill
the MQTT broker itself also control which state the broker has saved.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.pipelines.failures import FencedTooOftenError, RetryPolicy
from fencepost.pipelines.mqtt.bridge import BridgeOptions
from tests.mqtt.test_sessions import VERSIONS, Gateway
from tests.support.cluster import Cluster
from tests.support.mosquitto import Mosquitto
from tests.support.mqtt_proxy import Cut, MqttProxy
from tests.support.waits import until_async

pytestmark = pytest.mark.slow

WINDOW = 5
"""Mosquitto's max_inflight_messages."""

COUNT = 30
WANTED = [b"%d" % (number // 3) for number in range(COUNT)]
"""Consecutive messages have the same content, so that digests cannot distinguish them."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    started = Mosquitto(tmp_path / "mqtt", max_inflight_messages=WINDOW).start()
    yield started
    started.kill()


@pytest.fixture
def proxy(broker: Mosquitto) -> Iterator[MqttProxy]:
    with MqttProxy(broker.port) as between:
        yield between


@pytest.fixture(params=VERSIONS)
def gateway(
    request: pytest.FixtureRequest,
    bootstrap: str,
    cluster: Cluster,
    broker: Mosquitto,
    proxy: MqttProxy,
) -> Gateway:
    made = Gateway(bootstrap, cluster, broker, request.param)
    made.port = proxy.port
    return made


async def reached(cut: Cut) -> None:
    async def probe() -> bool:
        return cut.done.is_set()

    await until_async(probe, f"{cut.action} {cut.kind} {cut.nth}")


async def queued(gateway: Gateway) -> None:
    """Queue ``WANTED`` in the session of a bridge that is not running."""
    async with gateway.running(gateway.bridge()):
        pass
    await gateway.publish(*WANTED)


async def written_once(gateway: Gateway) -> None:
    """Check that each message arrives once; an additional last message marks the end."""
    await gateway.publish(b"last")
    await gateway.written(*WANTED, b"last")


POINTS = [
    pytest.param(kind, to_broker, action, id=f"{action}-{kind.lower()}")
    for kind, to_broker in (
        ("CONNECT", True),
        ("CONNACK", False),
        ("SUBSCRIBE", True),
        ("SUBACK", False),
        ("PUBLISH", False),
        ("PUBREC", True),
        ("PUBREL", False),
        ("PUBCOMP", True),
    )
    for action in ("before", "after")
]


@pytest.mark.parametrize(("kind", "to_broker", "action"), POINTS)
async def test_connection_cut_at_any_packet_writes_each_message_once(
    gateway: Gateway, proxy: MqttProxy, kind: str, to_broker: bool, action: str
) -> None:
    """Cut the first connection, and then the connection that repeats the unfinished packets."""
    await queued(gateway)
    nth = 3 if kind.startswith("PUB") else 1
    cut = proxy.cut(kind, nth, action=action, to_broker=to_broker, times=2)
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await reached(cut)
        await written_once(gateway)
    assert bridge.counters.forgotten == bridge.counters.sessions_lost == 0


@pytest.mark.parametrize("stop", [False, True], ids=["killed", "stopped"])
async def test_more_in_flight_messages_than_the_window_are_written_once(
    gateway: Gateway, proxy: MqttProxy, stop: bool
) -> None:
    """When Mosquitto restarts, it resends released messages that exceed its in-flight window."""
    await queued(gateway)
    held = proxy.cut("PUBCOMP", WINDOW + 1, action="hold", to_broker=True)
    # The linger puts all messages in flight into one transaction. With MQTT 3.1.1, Mosquitto sends
    # 5 messages and their PUBRELs, then 25 messages and their PUBRELs; the proxy holds the first of
    # 25 PUBCOMPs. With MQTT 5, all 30 messages are in flight at once.
    bridge = gateway.bridge(options=BridgeOptions(linger_ms=250))
    async with gateway.running(bridge):
        await reached(held)
        assert proxy.count("PUBREL") > 2 * WINDOW
        if stop:
            gateway.broker.stop()
        else:
            await asyncio.to_thread(gateway.broker.save)
            gateway.broker.kill()
        gateway.broker.start()
        await written_once(gateway)
    assert bridge.counters.repeated


def connect_packet(client_id: str, version: int) -> bytes:
    """Return a CONNECT that keeps the session."""
    properties = b"\x05\x11\xff\xff\xff\xff" if version == 5 else b""
    name = client_id.encode()
    fields = (
        *(b"\x00\x04MQTT", bytes([version, 0]), b"\x00\x3c", properties),
        *(struct.pack(">H", len(name)), name),
    )
    body = b"".join(fields)
    return bytes([0x10, len(body)]) + body


async def test_message_republished_by_mosquitto_is_recognized(
    gateway: Gateway, proxy: MqttProxy
) -> None:
    """Mosquitto forgets released messages if a connection is dead when it reads the CONNECT."""
    await queued(gateway)
    held = proxy.cut("PUBCOMP", 1, action="hold", to_broker=True)
    async with gateway.running(gateway.bridge(options=BridgeOptions(linger_ms=250))):
        await reached(held)
    proxy.disconnect()
    broker = gateway.broker.child
    assert broker is not None
    seen = len(broker.lines)
    with socket.create_connection(("127.0.0.1", gateway.broker.port)) as dying:
        address = f"New connection from 127.0.0.1:{dying.getsockname()[1]} "
        await asyncio.to_thread(broker.wait_for_line, address, deadline_s=60, since=seen)
        os.kill(broker.pid, signal.SIGSTOP)
        dying.sendall(connect_packet(gateway.client_id, gateway.version))
        dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.kill(broker.pid, signal.SIGCONT)
    await asyncio.to_thread(
        broker.wait_for_line, f"as {gateway.client_id} ", deadline_s=60, since=seen
    )
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await written_once(gateway)
    assert bridge.counters.repeated >= WINDOW


async def test_new_message_with_a_reused_packet_id_is_written(
    gateway: Gateway, proxy: MqttProxy
) -> None:
    """Mosquitto restarts with an older state, and continues with the packet ids of that state."""
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await asyncio.to_thread(gateway.broker.save)
        held = proxy.cut("PUBREC", 1, action="hold", to_broker=True)
        await gateway.publish(b"21.5", b"21.5")
        await reached(held)
        await gateway.written(b"21.5", b"21.5")
        gateway.broker.kill()
        gateway.broker.start()

        async def settled() -> bool:
            return bool(bridge.counters.forgotten)

        await until_async(settled, "the broker has shown what it forgot")
        await gateway.publish(b"21.5", b"21.5")
        await gateway.written(*[b"21.5"] * 4)
    assert bridge.counters.forgotten == 2


async def test_queued_messages_are_duplicated_after_a_mosquitto_restore(
    gateway: Gateway, proxy: MqttProxy
) -> None:
    """A known limit: Mosquitto resends queued messages as new messages, unlike those in flight."""
    await queued(gateway)
    held = proxy.cut("PUBREC", 1, action="hold", to_broker=True)
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        await reached(held)
        await asyncio.to_thread(gateway.broker.save)
        under_way = proxy.count("PUBLISH")
        proxy.disconnect()
        await written_once(gateway)

        async def released() -> bool:
            return not bridge.ledger.open

        await until_async(released, "everything released")
        gateway.broker.kill()
        gateway.broker.start()
        await gateway.publish(b"more")
        await gateway.written(*WANTED, b"last", *WANTED[under_way:], b"more")
    assert under_way == (COUNT if gateway.version == 5 else WINDOW)
    assert bridge.counters.repeated == under_way


async def test_idle_disconnections_do_not_count_as_failures(
    gateway: Gateway, proxy: MqttProxy
) -> None:
    retry = RetryPolicy(give_up_ms=1)
    bridge = gateway.bridge(options=BridgeOptions(retry=retry))
    async with gateway.running(bridge):
        for times in range(1, 4):
            proxy.disconnect()

            async def connected_again(times: int = times) -> bool:
                return bridge.counters.restarts == times and not bridge._patience._failures

            await until_async(connected_again, "at work again")
        await gateway.publish(b"1")
        await gateway.written(b"1")


async def test_two_bridges_with_one_client_id_duplicate_no_message(gateway: Gateway) -> None:
    """The bridges fence each other, in Kafka and in MQTT, until one of them gives up."""
    await queued(gateway)
    bridges = [gateway.bridge(), gateway.bridge()]
    tasks = [asyncio.create_task(bridge.run(handle_signals=False)) for bridge in bridges]

    async def fought() -> bool:
        return any(task.done() for task in tasks) or all(b.counters.restarts for b in bridges)

    await until_async(fought, "both were fenced")
    await gateway.publish(b"last")
    for bridge in bridges[1:]:
        bridge.stop()
    await gateway.written(*WANTED, b"last")
    bridges[0].stop()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert outcome is None or isinstance(outcome, FencedTooOftenError)
