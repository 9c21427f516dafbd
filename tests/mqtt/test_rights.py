"""The bridge on a Kafka broker with TLS, logins and ACLs: minimal and missing rights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.client import AuthenticationError
from fencepost.client.security import Security
from fencepost.pipelines.failures import NotAuthorizedError, RetryPolicy
from fencepost.pipelines.mqtt.bridge import Bridge, BridgeOptions
from fencepost.pipelines.mqtt.session import Address
from tests.mqtt.test_sessions import Gateway
from tests.support.mosquitto import Mosquitto
from tests.support.realm import Realm, Right, realm
from tests.support.waits import until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def owner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Realm]:
    with realm(request, tmp_path_factory.mktemp("realm")) as found:
        yield found


class Guarded(Gateway):
    """A bridge that runs as a user with few rights."""

    def __init__(self, owner: Realm, broker: Mosquitto) -> None:
        super().__init__(owner.bootstrap, owner.operator, broker, 5)
        self.owner = owner

    @property
    def rights(self) -> list[Right]:
        """The rights of a bridge that already has its ledger topic, as in pipelines/README.md."""
        ledger = f"mqtt-ledger.{self.client_id}"
        return [
            Right("WRITE", "TOPIC", self.topic),
            Right("WRITE", "TOPIC", ledger),
            Right("READ", "TOPIC", ledger),
            Right("WRITE", "TRANSACTIONAL_ID", f"mqtt-bridge.{self.client_id}"),
        ]

    @property
    def creation(self) -> Right:
        return Right("CREATE", "TOPIC", f"mqtt-ledger.{self.client_id}")

    def of(self, user: str, password: str | None = None, **more: Any) -> Bridge:
        options = BridgeOptions(security=self.owner.security(user, password), **more)
        return self.bridge(options=options)

    async def refused(self, bridge: Bridge, error: type[Exception], told: str) -> None:
        with pytest.raises(error, match=told):
            await asyncio.wait_for(bridge.run(handle_signals=False), 60)
        assert bridge.counters.restarts == 0


@pytest.fixture
def gateway(owner: Realm, tmp_path: Path) -> Iterator[Guarded]:
    broker = Mosquitto(tmp_path / "mqtt").start()
    yield Guarded(owner, broker)
    broker.kill()


async def test_bridge_needs_exactly_the_documented_rights(owner: Realm, gateway: Guarded) -> None:
    rights = gateway.rights
    unable = owner.new_user(*rights)
    told = f"the right CREATE on the topic '{gateway.creation.name}' is missing to user '{unable}'"
    await gateway.refused(gateway.of(unable), NotAuthorizedError, told)
    user = owner.new_user(*rights, gateway.creation)
    async with gateway.running(gateway.of(user)):
        await gateway.publish(b"1")
        await gateway.written(b"1")
    owner.revoke(user, [gateway.creation])  # the ledger topic exists now
    await gateway.publish(b"2")
    for right in rights:
        poor = owner.new_user(*(other for other in rights if other != right))
        wanted = f"the right {right.operation} on the .* is missing to user '{poor}'"
        await gateway.refused(gateway.of(poor), NotAuthorizedError, wanted)
    async with gateway.running(gateway.of(user)):
        await gateway.written(b"1", b"2")


async def test_revoked_right_ends_the_bridge_without_losing_messages(
    owner: Realm, gateway: Guarded
) -> None:
    user = owner.new_user(*gateway.rights, gateway.creation)
    lost = gateway.rights[:1]
    bridge = gateway.of(user)

    async def lose() -> None:
        async with gateway.running(bridge) as task:
            await gateway.publish(b"1")
            await gateway.written(b"1")
            owner.revoke(user, lost)
            await gateway.publish(b"2")
            await asyncio.wait([task], timeout=60)  # an earlier stop would hide the error

    with pytest.raises(NotAuthorizedError, match="the right WRITE on the topic"):
        await lose()
    owner.allow(user, lost)
    async with gateway.running(gateway.of(user)):
        await gateway.publish(b"3")
        await gateway.written(b"1", b"2", b"3")


async def test_bridge_logs_in_with_a_renewed_kafka_password(owner: Realm, gateway: Guarded) -> None:
    user = owner.new_user(*gateway.rights, gateway.creation)
    told = [owner.security(user)]

    def renewed() -> tuple[Address, Security]:
        return Address("127.0.0.1", gateway.port, gateway.client_id), told[0]

    retry = RetryPolicy(backoff_ms=100, max_backoff_ms=100)
    bridge = gateway.of(user, renewed=renewed, retry=retry)

    async def is_refused() -> bool:
        return bridge.counters.restarts >= 3

    async with gateway.running(bridge):
        await gateway.publish(b"1")
        await gateway.written(b"1")
        owner.set_password(user, "another")
        await asyncio.to_thread(owner.restart)
        gateway.cluster = owner.operator
        await gateway.publish(b"2")
        await until_async(is_refused, "refused logins")
        told[0] = owner.security(user)
        await gateway.written(b"1", b"2")


async def test_refused_kafka_login_ends_the_bridge_at_once(owner: Realm, gateway: Guarded) -> None:
    user = owner.new_user(*gateway.rights)
    wrong = gateway.of(user, "hunter2")
    await gateway.refused(wrong, AuthenticationError, f"user '{user}' cannot log in")
