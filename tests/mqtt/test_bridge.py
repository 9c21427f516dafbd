"""What each level of QoS promises, and what a bridge does that cannot keep up."""

from __future__ import annotations

import asyncio

import pytest

from tests.mqtt.test_sessions import Gateway, broker, gateway
from tests.support.waits import until_async

__all__ = ["broker", "gateway"]


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
    pauses = 0
    async with gateway.running(bridge):

        async def probe() -> bool:
            nonlocal pauses
            session = bridge.session
            pauses += session is not None and session.is_paused
            return bridge.counters.written >= len(wanted)

        await until_async(probe, "all written", poll_s=0)
        await gateway.written(*wanted)
    assert pauses


async def test_messages_wait_in_the_broker_until_they_are_committed(gateway: Gateway) -> None:
    """A stopped bridge has acknowledged nothing that it has not written."""
    wanted = [b"%d" % number for number in range(200)]
    async with gateway.running(gateway.bridge()):
        publishing = asyncio.create_task(gateway.publish(*wanted))
        await asyncio.wait([publishing], timeout=0.05)
    async with gateway.running(gateway.bridge()):
        await publishing
        await gateway.written(*wanted)
