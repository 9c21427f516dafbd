"""What each level of QoS promises, and what a bridge does that cannot keep up."""

from __future__ import annotations

import asyncio

import pytest

from pipelines.mqtt.bridge import ledger_topic
from pipelines.mqtt.routes import Mapped, Route
from tests.mqtt.test_sessions import Gateway, broker, gateway

__all__ = ["broker", "gateway"]


@pytest.mark.container
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_messages_become_records_in_their_order(gateway: Gateway, qos: int) -> None:
    wanted = [b"%d" % number for number in range(30)]
    bridge = gateway.bridge(qos)
    async with gateway.running(bridge):
        await gateway.publish(*wanted, qos=qos)
        await gateway.written(*wanted)
    assert bridge.counters.received == 30
    assert bridge.counters.duplicates == 0


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_only_qos_0_is_lost_while_the_bridge_is_away(gateway: Gateway, qos: int) -> None:
    async with gateway.running(gateway.bridge(qos)):
        await gateway.publish(b"before", qos=qos)
        await gateway.written(b"before")
    await gateway.publish(b"meanwhile", qos=qos)
    async with gateway.running(gateway.bridge(qos)):
        await gateway.publish(b"after", qos=qos)
        kept = [b"meanwhile"] if qos else []
        await gateway.written(b"before", *kept, b"after")


@pytest.mark.parametrize("max_queued", [1, 7])
async def test_a_full_queue_pauses_the_socket_and_loses_nothing(
    gateway: Gateway, max_queued: int
) -> None:
    wanted = [b"%d" % number for number in range(100)]
    async with gateway.running(gateway.bridge()):
        pass  # the session is there, and subscribed
    await gateway.publish(*wanted)
    bridge = gateway.bridge(max_queued=max_queued)
    async with gateway.running(bridge):
        await gateway.written(*wanted)
        assert bridge.session is not None
        assert bridge.session.pauses
        assert bridge.counters.restarts == 0


async def test_messages_wait_in_the_broker_until_they_are_committed(gateway: Gateway) -> None:
    """A stopped bridge has acknowledged nothing that it has not written."""
    wanted = [b"%d" % number for number in range(200)]
    async with gateway.running(gateway.bridge()):
        publishing = asyncio.create_task(gateway.publish(*wanted))
        await asyncio.wait([publishing], timeout=0.05)
    async with gateway.running(gateway.bridge()):
        await publishing
        await gateway.written(*wanted)


async def test_routes_that_cover_each_other_are_one_subscription(gateway: Gateway) -> None:
    """Also in a session that a bridge with the narrower route alone has left."""
    narrow, wide = Route("a/b", gateway.topic), Route("a/#", gateway.topic)
    async with gateway.running(gateway.mapped_bridge(Mapped((narrow,)))):
        await gateway.publish(b"1")
    async with gateway.running(gateway.mapped_bridge(Mapped((narrow, wide)))):
        await gateway.publish(b"2", b"3")
        await gateway.publish(b"4", topic="a/c")
        await gateway.written(b"1", b"2", b"3", b"4")


async def test_a_retained_message_and_a_second_connection(gateway: Gateway) -> None:
    """MQTT 5 can ask for it with new subscriptions only; 3.1.1 sends it again, flagged."""
    await gateway.publish(b"kept", retain=True)
    for number in range(2):
        async with gateway.running(gateway.bridge()):
            await gateway.publish(b"%d" % number)
            again = [b"kept"] if number and gateway.version != 5 else []
            await gateway.written(b"kept", b"0", *again, *[b"1"][:number])


def test_no_two_client_ids_share_a_ledger() -> None:
    ids = ["a", "a b", "a_b", "a/b", "x" * 200, "x" * 201, "x" * 202, "x" * 65_535]
    topics = [ledger_topic(one) for one in ids]
    assert topics[0] == "mqtt-ledger.a"
    assert topics[4] == "mqtt-ledger." + "x" * 200
    assert len(set(topics)) == len(ids)
    assert max(map(len, topics)) <= 249
