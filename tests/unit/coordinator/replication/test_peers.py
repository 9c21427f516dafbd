"""Connections to other brokers: addresses, credentials, API versions, reconnect backoff."""

from __future__ import annotations

import asyncio
import time

import pytest

from fencepost.client.channel import (
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.replication import peers as peers_module
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request
from fencepost.protocol.errors import UnsupportedVersion
from fencepost.protocol.messages import request_factory, response_factory
from fencepost.protocol.schema import Entity
from tests.support.certificates import Authority
from tests.support.secured import SecuredFencepost, add_users
from tests.unit.coordinator.replication.other_broker import OtherBroker, image_of, versions


async def answer(request: Request) -> Entity | None:
    """Answer ApiVersions, and ListOffsets with the request's version as the throttle time."""
    if request.api_key == ApiKey.API_VERSIONS:
        return versions(request, LIST_OFFSETS=(1, 8))
    make = response_factory(request.api_key, request.api_version)
    return make.message(throttle_time_ms=request.api_version, topics=())


def listing(version: int) -> Entity:
    return request_factory(ApiKey.LIST_OFFSETS, version).message(
        replica_id=1, isolation_level=0, topics=()
    )


@pytest.fixture
async def other():
    broker = OtherBroker(answer)
    await broker.start()
    yield broker
    await broker.stop()


def peers_of(image, config=None) -> Peers:
    settings = {"request.timeout.ms": 2_000, "replica.socket.timeout.ms": 2_000, **(config or {})}
    return Peers(BrokerConfig(settings), lambda: image, node_id=5)


async def test_fetcher_connection_sends_no_api_versions_request(other):
    """As in Java brokers, the first frame is a Fetch; the client id identifies the broker."""
    peers = peers_of(image_of(b7=other.port))
    first, second = peers.channel(7, Purpose.FETCHER), peers.channel(7, Purpose.FETCHER, 1)
    assert (await first.request(listing(11))).throttle_time.total_seconds() == 0.011
    await second.request(listing(11))
    await first.request(listing(9))
    assert first is peers.channel(7, Purpose.FETCHER)
    assert other.asked == [
        (ApiKey.LIST_OFFSETS, 11, "broker-5-fetcher-0"),
        (ApiKey.LIST_OFFSETS, 11, "broker-5-fetcher-1"),
        (ApiKey.LIST_OFFSETS, 9, "broker-5-fetcher-0"),
    ]
    assert other.connections == 2
    peers.close()


async def test_other_connections_negotiate_version_with_one_api_versions_request(other):
    peers = peers_of(image_of(b7=other.port))
    sender = peers.channel(7, Purpose.TXN_MARKER_SENDER)
    got = await sender.newest(ApiKey.LIST_OFFSETS, lambda make: listing(make.version))
    assert got.throttle_time.total_seconds() == 0.008
    got = await sender.newest(ApiKey.LIST_OFFSETS, lambda make: listing(make.version), at_most=6)
    assert got.throttle_time.total_seconds() == 0.006
    with pytest.raises(UnsupportedVersion):
        await sender.newest(ApiKey.FETCH, lambda make: make.message())
    asked = [(request.api, request.client_id) for request in other.asked]
    assert asked[0] == (ApiKey.API_VERSIONS, "broker-5-txn-marker-sender")
    assert [api for api, _ in asked].count(ApiKey.API_VERSIONS) == 1
    await peers.channel(7, Purpose.ADD_PARTITIONS).newest(
        ApiKey.LIST_OFFSETS, lambda make: listing(make.version)
    )
    assert other.asked[-1].client_id == "AddPartitionsManager-client-5"
    peers.close()


async def test_unknown_broker_or_listener_is_unreachable(other):
    for image in (image_of(b8=other.port), image_of(listener="OUTSIDE", b7=other.port)):
        peers = peers_of(image)
        assert peers.address(7) is None
        with pytest.raises(BrokerUnreachable, match="broker 7 has no listener PLAINTEXT"):
            await peers.channel(7, Purpose.FETCHER).request(listing(11))
    assert other.connections == 0


async def test_inter_broker_listener_name_selects_address_of_broker(other):
    config = {
        "inter.broker.listener.name": "inside",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT",
    }
    peers = peers_of(image_of(listener="INSIDE", b7=other.port), config)
    assert peers.address(7) == ("127.0.0.1", other.port)
    with pytest.raises(ConfigError, match=r"listener\.security\.protocol\.map has no such"):
        peers_of(image_of(), {"inter.broker.listener.name": "inside"})
    peers.close()


async def test_channel_connects_to_new_address_of_moved_broker(other):
    images = [image_of(b7=other.port)]
    peers = Peers(BrokerConfig(), lambda: images[-1], node_id=5)
    channel = peers.channel(7, Purpose.FETCHER)
    await channel.request(listing(11))
    there = OtherBroker(answer)
    await there.start()
    images.append(image_of(b7=there.port))
    await channel.request(listing(11))
    assert (len(other.asked), len(there.asked)) == (1, 1)
    await there.stop()
    peers.close()


async def test_channel_reconnects_after_lost_connection(other):
    peers = peers_of(image_of(b7=other.port))
    channel = peers.channel(7, Purpose.FETCHER)
    await channel.request(listing(11))
    other.answer = none
    with pytest.raises(ConnectionLostError, match="closed by broker"):
        await channel.request(listing(11))
    other.answer = answer
    await channel.request(listing(11))
    assert other.connections == 2
    peers.close()


async def none(_request: Request) -> Entity | None:
    return None


async def test_reconnect_backoff_grows_to_its_maximum(monkeypatch):
    held = OtherBroker(answer)
    await held.start()
    await held.stop()
    peers = peers_of(image_of(b7=held.port))
    channel = peers.channel(7, Purpose.FETCHER)
    paused: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr(peers_module.asyncio, "sleep", noted)
    for _ in range(8):
        with pytest.raises(BrokerUnreachable):
            await channel.request(listing(11))
    rounded = [round(pause_s, 1) for pause_s in paused]
    assert rounded[:5] == [0.1, 0.1, 0.2, 0.4, 0.8] or rounded[:5] == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert max(paused) <= 1.0
    peers.close()


async def test_request_to_silent_broker_times_out(other):
    async def silent(_request: Request) -> Entity | None:
        await asyncio.Event().wait()
        return None

    other.answer = silent
    peers = peers_of(image_of(b7=other.port))
    began = time.monotonic()
    with pytest.raises(ConnectionLostError, match="no answer in time"):
        await peers.channel(7, Purpose.FETCHER).request(listing(11), timeout_ms=50)
    assert time.monotonic() - began < 30
    peers.close()


async def test_cancelled_request_keeps_connection_and_close_leaves_no_tasks(other):
    release = asyncio.Event()

    async def late(request: Request) -> Entity | None:
        if request.api_version == 9:
            await release.wait()
        return await answer(request)

    other.answer = late
    before = asyncio.all_tasks()
    peers = peers_of(image_of(b7=other.port))
    channel = peers.channel(7, Purpose.FETCHER)
    await channel.request(listing(11))
    waiting = asyncio.ensure_future(channel.request(listing(9)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert (await channel.request(listing(8))).throttle_time.total_seconds() == 0.008
    assert other.connections == 1
    waiting = asyncio.ensure_future(channel.request(listing(9)))
    release.clear()
    await asyncio.sleep(0)
    peers.close()
    with pytest.raises(ConnectionLostError, match="closed by us"):
        await waiting
    with pytest.raises(BrokerUnreachable, match="the broker stops"):
        await channel.request(listing(11))
    release.set()
    await other.stop()
    for _ in range(100):
        if asyncio.all_tasks() <= before:
            break
        await asyncio.sleep(0.01)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize(
    ("listener", "settings", "refusal"),
    [
        ("TLS", {}, None),
        ("MUTUAL", {}, None),
        ("SAFE", {"mechanism": "PLAIN"}, None),
        ("SAFE", {"mechanism": "SCRAM-SHA-256"}, None),
        ("LOGIN", {"mechanism": "SCRAM-SHA-512"}, None),
        ("SAFE", {"mechanism": "PLAIN", "password": "wrong"}, "cannot log in"),
    ],
)
async def test_channel_authenticates_with_settings_of_its_listener(
    secured, listener, settings, refusal
):
    """The client settings are those of the broker's own listener with the same name."""
    broker, authority = secured
    protocol = {"TLS": "SSL", "MUTUAL": "SSL", "SAFE": "SASL_SSL", "LOGIN": "SASL_PLAINTEXT"}
    mechanism = settings.get("mechanism", "PLAIN")
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    password = settings.get("password", "admin's")
    prefix = f"listener.name.{listener.lower()}"
    config = {
        "inter.broker.listener.name": listener,
        "listener.security.protocol.map": f"{listener}:{protocol[listener]}",
        "sasl.mechanism.inter.broker.protocol": mechanism,
        f"{prefix}.{mechanism.lower()}.sasl.jaas.config": (
            f"org.apache.kafka.common.security.{module} required"
            f' username="admin" password="{password}";'
        ),
        f"{prefix}.ssl.truststore.location": str(authority.truststore),
        f"{prefix}.ssl.keystore.location": str(authority.client("broker-5").file),
    }
    port = int(broker.listeners[listener].rpartition(":")[2])
    peers = peers_of(image_of(listener=listener, b7=port), config)
    for purpose in (Purpose.FETCHER, Purpose.ADD_PARTITIONS):
        channel = peers.channel(7, purpose)
        if refusal is None:
            assert (await channel.request(listing(8))).topics == ()
        else:
            with pytest.raises(AuthenticationError, match=refusal):
                await channel.request(listing(8))
    peers.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory):
    broker = SecuredFencepost(tmp_path_factory.mktemp("secured")).start()
    add_users(broker)
    authority: Authority = broker.authority
    yield broker, authority
    broker.stop()
