"""The guarantees of each QoS level, and a bridge that cannot keep up."""

from __future__ import annotations

import asyncio

import pytest

from fencepost.pipelines.mqtt.bridge import (
    LEDGER_CONFIGS,
    MIN_RECORD_BYTES,
    PART,
    BridgeOptions,
    ledger_topic,
    record_bytes,
)
from fencepost.pipelines.mqtt.routes import Mapped, MessageId, Route, RouteError
from fencepost.pipelines.records import REASON, Output
from tests.mqtt.test_sessions import Gateway, broker, gateway
from tests.support.cluster import Cluster, unique
from tests.support.mosquitto import Mosquitto
from tests.support.quick import only
from tests.wire.clients import aio_consumer

__all__ = ["broker", "gateway"]


@pytest.mark.container
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_messages_become_records_in_order(gateway: Gateway, qos: int) -> None:
    wanted = [b"%d" % number for number in range(30)]
    bridge = gateway.bridge(qos)
    async with gateway.running(bridge):
        await gateway.publish(*wanted, qos=qos)
        await gateway.written(*wanted)
    assert bridge.counters.received == 30
    assert bridge.counters.duplicates == 0


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_only_qos_0_messages_are_lost_while_the_bridge_is_down(
    gateway: Gateway, qos: int
) -> None:
    async with gateway.running(gateway.bridge(qos)):
        await gateway.publish(b"before", qos=qos)
        await gateway.written(b"before")
    await gateway.publish(b"meanwhile", qos=qos)
    async with gateway.running(gateway.bridge(qos)):
        await gateway.publish(b"after", qos=qos)
        kept = [b"meanwhile"] if qos else []
        await gateway.written(b"before", *kept, b"after")


@pytest.mark.parametrize("max_queued", only((1, 7), 7))
async def test_full_queue_pauses_the_socket_and_loses_no_message(
    gateway: Gateway, max_queued: int
) -> None:
    wanted = [b"%d" % number for number in range(100)]
    async with gateway.running(gateway.bridge()):
        pass  # creates the session and the subscription
    await gateway.publish(*wanted)
    bridge = gateway.bridge(max_queued=max_queued)
    async with gateway.running(bridge):
        await gateway.written(*wanted)
        assert bridge.session is not None
        assert bridge.session.pauses
        assert bridge.counters.restarts == 0


async def test_queued_bytes_limit_pauses_the_socket(gateway: Gateway) -> None:
    wanted = [b"%d" % number + b"x" * 100_000 for number in range(30)]
    async with gateway.running(gateway.bridge()):
        pass
    await gateway.publish(*wanted)
    options = BridgeOptions(max_bytes=150_000)
    bridge = gateway.bridge(options=options, max_queued_bytes=200_000)
    async with gateway.running(bridge):
        await gateway.written(*wanted)
        assert bridge.session is not None
        assert bridge.session.pauses
        assert bridge.counters.transactions >= len(wanted)  # each has room for one message only
    assert bridge.counters.restarts == 0


async def test_message_too_large_for_a_record_is_split(gateway: Gateway) -> None:
    """One message just fits; another is a byte larger, and ends a bridge without dead letters."""
    empty = Output(
        gateway.topic,
        b"",
        b"a/b",
        headers=(("mqtt.topic", b"a/b"), ("mqtt.qos", b"2"), ("mqtt.retain", b"0")),
    )
    room = MIN_RECORD_BYTES - record_bytes(empty)
    fits, over = b"f" * room, b"o" * (room + 1)
    last = b"l" * 2_500_000
    gateway.cluster.create_topic(dead := unique("dead"))
    options = BridgeOptions(dead_letter=dead, max_record_bytes=MIN_RECORD_BYTES)
    bridge = gateway.bridge(options=options)
    async with gateway.running(bridge):
        await gateway.publish(fits, over, last, b"more")
        await gateway.written(fits, b"more")
    assert bridge.counters.too_large == 2
    assert bridge.counters.restarts == 0
    async with aio_consumer(gateway.bootstrap, dead, auto_offset_reset="earliest") as consumer:
        whole: dict[bytes, bytes] = {}
        while len(whole.get(b"l", b"")) < len(last):
            letter = await asyncio.wait_for(consumer.getone(), 60)
            headers = dict(letter.headers)
            assert b"more than max_record_bytes" in headers[REASON]
            number, count = map(int, headers[PART].split(b"/"))
            name = letter.value[:1]
            assert number <= count
            whole[name] = whole.get(name, b"") + letter.value
    assert whole == {b"o": over, b"l": last}

    alone = gateway.bridge(options=BridgeOptions(max_record_bytes=MIN_RECORD_BYTES))
    ending = asyncio.create_task(alone.run(handle_signals=False))
    await gateway.publish(over)
    with pytest.raises(RouteError, match="more than max_record_bytes"):
        await asyncio.wait_for(ending, 60)


async def test_message_ids_are_distinguished_by_device_topic(gateway: Gateway) -> None:
    mapped = Mapped((Route("a/#", gateway.topic, qos=1),), MessageId.parse("json:id"))
    bridge = gateway.mapped_bridge(mapped)
    async with gateway.running(bridge):
        for device in ("a/1", "a/2"):
            await gateway.publish(b'{"id": 1}', b'{"id": 2}', b'{"id": 1}', topic=device, qos=1)
        await gateway.written(*[b'{"id": 1}', b'{"id": 2}'] * 2)
    assert bridge.counters.duplicates == 2


async def test_json_message_ids_of_different_types_are_distinct(gateway: Gateway) -> None:
    mapped = Mapped((Route("a/#", gateway.topic, qos=1),), MessageId.parse("json:id"))
    bridge = gateway.mapped_bridge(mapped)
    ids = (b"1", b'"1"', b"1.0", b"true", b'"True"', b"[1]", b'"[1]"', b"1e400", b"1e500", b'""')
    messages = [b'{"id": %s}' % message_id for message_id in ids]
    async with gateway.running(bridge):
        await gateway.publish(*messages, *messages, qos=1)
        await gateway.written(*messages)
        await gateway.publish(b"end", qos=1)
        await gateway.written(*messages, b"end")
    assert bridge.counters.duplicates == len(messages)


async def headers_of(gateway: Gateway, count: int) -> list[list[tuple[str, bytes]]]:
    reading = aio_consumer(gateway.bootstrap, gateway.topic, auto_offset_reset="earliest")
    async with reading as consumer:
        return [list((await asyncio.wait_for(consumer.getone(), 60)).headers) for _ in range(count)]


async def test_properties_of_mqtt_5_become_headers(
    bootstrap: str, cluster: Cluster, broker: Mosquitto
) -> None:
    gateway = Gateway(bootstrap, cluster, broker, 5)
    fixed = [("mqtt.topic", b"a/b"), ("mqtt.qos", b"2"), ("mqtt.retain", b"0")]
    async with gateway.running(gateway.bridge()):
        await gateway.publish(b"plain")
        await gateway.publish(
            b"{}",
            ContentType="application/json",
            ResponseTopic="answers/ä",
            CorrelationData=b"\x00\xff7",
            PayloadFormatIndicator=1,
            MessageExpiryInterval=3_600,
            UserProperty=[("unit", "°C"), ("unit", "K")],
        )
        # Only the correlation data distinguishes a request from the previous request.
        await gateway.publish(b"{}", CorrelationData=b"")
        await gateway.written(b"plain", b"{}", b"{}")
    headers = await headers_of(gateway, 3)
    assert headers[0] == fixed
    assert headers[1] == [
        *fixed,
        ("mqtt.content-type", b"application/json"),
        ("mqtt.response-topic", "answers/ä".encode()),
        ("mqtt.correlation-data", b"\x00\xff7"),
        ("mqtt.payload-format", b"1"),
        ("mqtt.message-expiry-s", b"3600"),
        ("mqtt.property.unit", "°C".encode()),
        ("mqtt.property.unit", b"K"),
    ]
    assert headers[2] == [*fixed, ("mqtt.correlation-data", b"")]


async def test_dead_letter_omits_properties_too_large_for_a_record(
    bootstrap: str, cluster: Cluster, broker: Mosquitto
) -> None:
    gateway = Gateway(bootstrap, cluster, broker, 5)
    options = BridgeOptions(dead_letter=gateway.topic, max_record_bytes=MIN_RECORD_BYTES)
    mapped = Mapped((Route("a/#", "x.{2}"),))
    async with gateway.running(gateway.mapped_bridge(mapped, options=options)):
        await gateway.publish(b"small", ContentType="text/plain")
        large = "é" * 30_000
        await gateway.publish(
            b"large", ContentType=large, ResponseTopic=large, CorrelationData=b"x" * 60_000
        )
        await gateway.written(b"small", b"large")
    small, letter = map(dict, await headers_of(gateway, 2))
    assert small["mqtt.content-type"] == b"text/plain"
    assert letter[REASON].startswith(b"3 properties left out; ")
    assert not {"mqtt.content-type", "mqtt.response-topic"} & set(letter)


async def test_ledger_topic_has_its_compaction_settings(gateway: Gateway) -> None:
    bridge = gateway.bridge()
    async with gateway.running(bridge):
        pass
    wanted = {"resource_type": 2, "resource_name": bridge.ledger_topic}
    keys = {"configuration_keys": list(LEDGER_CONFIGS)}
    answer = gateway.cluster.call("describe_configs", 1, resources=[{**wanted, **keys}])
    told = {config["name"]: config["value"] for config in answer["results"][0]["configs"]}
    assert told == LEDGER_CONFIGS


async def test_messages_are_acknowledged_only_after_their_commit(gateway: Gateway) -> None:
    """A stopped bridge has acknowledged only messages that it has written."""
    wanted = [b"%d" % number for number in range(200)]
    async with gateway.running(gateway.bridge()):
        publishing = asyncio.create_task(gateway.publish(*wanted))
        await asyncio.wait([publishing], timeout=0.05)
    async with gateway.running(gateway.bridge()):
        await publishing
        await gateway.written(*wanted)


async def test_overlapping_routes_deliver_each_message_once(gateway: Gateway) -> None:
    """This also holds in a session whose former bridge had only the narrower route."""
    narrow, wide = Route("a/b", gateway.topic), Route("a/#", gateway.topic)
    async with gateway.running(gateway.mapped_bridge(Mapped((narrow,)))):
        await gateway.publish(b"1")
    async with gateway.running(gateway.mapped_bridge(Mapped((narrow, wide)))):
        await gateway.publish(b"2", b"3")
        await gateway.publish(b"4", topic="a/c")
        await gateway.written(b"1", b"2", b"3", b"4")


async def test_retained_message_is_resent_to_a_new_connection_except_with_mqtt_5(
    gateway: Gateway,
) -> None:
    """The second connection gets the retained message again, but not with MQTT 5."""
    await gateway.publish(b"kept", retain=True)
    for number in range(2):
        async with gateway.running(gateway.bridge()):
            await gateway.publish(b"%d" % number)
            again = [b"kept"] if number and gateway.version != 5 else []
            await gateway.written(b"kept", b"0", *again, *[b"1"][:number])


def test_client_ids_have_distinct_ledger_topics() -> None:
    ids = ["a", "a b", "a_b", "a/b", "x" * 200, "x" * 201, "x" * 202, "x" * 65_535]
    topics = [ledger_topic(client_id) for client_id in ids]
    assert topics[0] == "mqtt-ledger.a"
    assert topics[4] == "mqtt-ledger." + "x" * 200
    assert len(set(topics)) == len(ids)
    assert max(map(len, topics)) <= 249
