"""TLS and logins between the bridge and the MQTT broker: refused and renewed credentials."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.security import Security, SecurityError
from fencepost.pipelines.failures import GaveUpError, RetryPolicy
from fencepost.pipelines.mqtt.bridge import Bridge, BridgeOptions
from fencepost.pipelines.mqtt.session import Address, LoginRefusedError
from tests.mqtt.test_command_line import Process
from tests.mqtt.test_sessions import Gateway
from tests.support.certificates import Authority, replace
from tests.support.cluster import Cluster
from tests.support.mosquitto import Mosquitto, password_file
from tests.support.waits import until_async

USER, PASSWORD = "gateway", "hunter2 =;\"'"
VERSION = 5


class Secured(Gateway):
    """Publishers connect without TLS; the bridge connects to the listener with TLS."""

    def __init__(self, bootstrap: str, cluster: Cluster, home: Path, version: int, **how: Any):
        self.authority = Authority(home / "certificates")
        self.passwords = password_file(home / "passwords", **{USER: PASSWORD})
        self.keystore = self.authority.issue("mqtt", expires=how.pop("expires", None))
        by_certificate = how.pop("by_certificate", False)
        lines = [
            f"cafile {self.authority.truststore}",
            f"certfile {self.keystore}",
            f"keyfile {self.keystore}",
            "allow_anonymous false",
            *(
                ("require_certificate true", "use_identity_as_username true")
                if by_certificate
                else (f"password_file {self.passwords}",)
            ),
        ]
        broker = Mosquitto(home / "mqtt", secured="\n".join(lines)).start()
        super().__init__(bootstrap, cluster, broker, version)
        self.port = broker.secured_port

    def settings(self, **more: str) -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.truststore.location": str(self.authority.truststore),
            **more,
        }

    def secured(self, options: BridgeOptions | None = None, **more: str) -> Bridge:
        return self.bridge(options=options, security=Security.of(self.settings(**more)))

    async def refused(self, bridge: Bridge, told: str) -> None:
        """Check that the bridge ends at once with this message, which contains no secret."""
        with pytest.raises(LoginRefusedError, match=told) as error:
            await asyncio.wait_for(bridge.run(handle_signals=False), 60)
        assert bridge.counters.restarts == 0
        assert PASSWORD not in str(error.value)
        assert f"127.0.0.1:{self.port}" in str(error.value)

    def logins(self) -> int:
        """Return how many clients the MQTT broker has refused."""
        assert self.broker.child is not None
        return sum("not authorised" in line for line in self.broker.child.lines)


@pytest.fixture(params=[4, VERSION], ids=["v311", "v5"])
def gateway(
    request: pytest.FixtureRequest, bootstrap: str, cluster: Cluster, tmp_path: Path
) -> Iterator[Secured]:
    found = Secured(bootstrap, cluster, tmp_path, request.param)
    yield found
    found.broker.kill()


async def test_messages_are_written_through_tls_and_login(gateway: Secured) -> None:
    # The messages need several TLS records, and with a short queue the bridge pauses its socket.
    wanted = [b"%d" % number + b"x" * 1_500 for number in range(60)]
    address = {"security": Security.of(gateway.settings()), "max_queued": 7}
    bridge = gateway.bridge(**address)
    async with gateway.running(bridge):
        await gateway.publish(b"first")
        await gateway.written(b"first")
    await gateway.publish(*wanted)
    async with gateway.running(gateway.bridge(**address)):
        await gateway.written(b"first", *wanted)
    assert bridge.counters.restarts == 0


async def test_refused_mqtt_connection_ends_the_bridge_with_the_reason(gateway: Secured) -> None:
    others = Authority(gateway.keystore.parent / "others")
    wrong = gateway.secured(**{"sasl.password": "wrong"})
    await gateway.refused(wrong, rf"refuses the login \(user '{USER}'\)")
    nobody = gateway.bridge(
        security=Security.of(
            {
                "security.protocol": "SSL",
                "ssl.truststore.location": str(gateway.authority.truststore),
            }
        )
    )
    await gateway.refused(nobody, r"refuses the login \(no user name was given\)")
    stranger = gateway.secured(**{"ssl.truststore.location": str(others.truststore)})
    await gateway.refused(stranger, "not signed by an authority")
    # The bridge retries for a while, because a broker that closes connections may be restarting.
    gateway.port = gateway.broker.port
    in_the_clear = gateway.secured(BridgeOptions(retry=RetryPolicy(give_up_ms=100)))
    with pytest.raises(GaveUpError, match="during the TLS handshake: does that port speak TLS"):
        await asyncio.wait_for(in_the_clear.run(handle_signals=False), 60)


def test_sasl_mechanism_other_than_plain_is_refused() -> None:
    security = Security.of(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }
    )
    with pytest.raises(SecurityError, match="so PLAIN"):
        Address("127.0.0.1", security=security)
    assert PASSWORD not in repr(Address("127.0.0.1", password=PASSWORD))


async def test_expired_broker_certificate_ends_the_bridge(
    bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    gateway = Secured(bootstrap, cluster, tmp_path, VERSION, expires=past)
    try:
        await gateway.refused(gateway.secured(), "certificate has expired")
        replace(gateway.keystore, gateway.authority.issue("renewed").read_bytes())
        gateway.broker.stop()
        gateway.broker.start()
        async with gateway.running(gateway.secured()):
            await gateway.publish(b"1")
            await gateway.written(b"1")
    finally:
        gateway.broker.kill()


async def test_client_certificate_is_the_mqtt_login(
    bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    gateway = Secured(bootstrap, cluster, tmp_path, VERSION, by_certificate=True)
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    store = gateway.authority.issue("bridge", is_client=True, expires=past)
    settings = {
        "security.protocol": "SSL",
        "ssl.truststore.location": str(gateway.authority.truststore),
    }
    try:
        without = gateway.bridge(security=Security.of(settings))
        await gateway.refused(without, "requires one .*ssl.keystore.location")
        security = Security.of({**settings, "ssl.keystore.location": str(store)})
        await gateway.refused(
            gateway.bridge(security=security), "refuses this client's certificate"
        )
        renewed = gateway.authority.issue("renewed", is_client=True)
        replace(store, renewed.read_bytes())
        bridge = gateway.bridge(security=security)
        async with gateway.running(bridge):
            await gateway.publish(b"1")
            await gateway.written(b"1")
            # The certificate file is replaced while the bridge runs, and the broker restarts.
            replace(store, gateway.authority.issue("later", is_client=True).read_bytes())
            gateway.broker.stop()
            gateway.broker.start()
            await gateway.publish(b"2")
            await gateway.written(b"1", b"2")
            assert gateway.broker.child is not None
            assert any("u'later'" in line for line in gateway.broker.child.lines)
    finally:
        gateway.broker.kill()


@pytest.mark.slow
async def test_bridge_logs_in_with_a_renewed_mqtt_password(
    bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    gateway = Secured(bootstrap, cluster, tmp_path, VERSION)
    told = gateway.settings()

    def renewed() -> tuple[Address, Security]:
        address = Address(
            "127.0.0.1",
            gateway.port,
            gateway.client_id,
            VERSION,
            security=Security.of(told),
        )
        return address, BridgeOptions().security

    retry = RetryPolicy(backoff_ms=100, max_backoff_ms=100, give_up_ms=60_000)
    options = BridgeOptions(renewed=renewed, retry=retry)
    bridge = gateway.bridge(options=options, security=Security.of(told))
    try:
        async with gateway.running(bridge):
            await gateway.publish(b"1")
            await gateway.written(b"1")
            password_file(gateway.passwords, **{USER: "another"})
            gateway.broker.stop()
            gateway.broker.start()

            async def refused_thrice() -> bool:
                return gateway.logins() >= 3

            began = asyncio.get_running_loop().time()
            await until_async(refused_thrice, "logins are refused")
            assert asyncio.get_running_loop().time() - began > 0.1 + 0.2
            told["sasl.password"] = "another"
            await gateway.publish(b"2")
            await gateway.written(b"1", b"2")
        assert bridge.counters.restarts >= 3
    finally:
        gateway.broker.kill()


@pytest.mark.slow
async def test_login_refused_for_too_long_ends_the_bridge(
    bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    gateway = Secured(bootstrap, cluster, tmp_path, VERSION)
    retry = RetryPolicy(backoff_ms=50, give_up_ms=500)
    bridge = gateway.secured(BridgeOptions(retry=retry))
    try:
        running = asyncio.create_task(bridge.run(handle_signals=False))

        async def connected() -> bool:
            return bridge.is_connected

        await until_async(connected, "the bridge at work")
        password_file(gateway.passwords, **{USER: "another"})
        gateway.broker.stop()
        gateway.broker.start()
        with pytest.raises(GaveUpError, match="refuses the login"):
            await asyncio.wait_for(running, 60)
        assert gateway.logins() <= 6
    finally:
        gateway.broker.kill()


@pytest.mark.slow
async def test_command_reads_mqtt_and_kafka_properties_files(
    bootstrap: str, cluster: Cluster, tmp_path: Path
) -> None:
    gateway = Secured(bootstrap, cluster, tmp_path, VERSION)
    theirs, ours = tmp_path / "mqtt.properties", tmp_path / "kafka.properties"
    theirs.write_text("".join(f"{key}={value}\n" for key, value in gateway.settings().items()))
    theirs.chmod(0o644)
    ours.write_text(f"bootstrap.servers={bootstrap}\n")
    arguments = ("--mqtt-config", str(theirs), "--command-config", str(ours))
    process = Process(gateway, "--route", f"a/#={gateway.topic}", *arguments)
    try:
        await process.says("others can read a file that holds a secret")
        await process.says("bridge at work")
        await gateway.publish(b"1")
        await gateway.written(b"1")
        assert await asyncio.to_thread(process.child.terminate) == 0
        assert PASSWORD not in "".join(process.child.lines)
        theirs.write_text("security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-256\n")
        process = Process(gateway, "--route", f"a/#={gateway.topic}", *arguments)
        await process.says("needs username and password")
        assert await asyncio.to_thread(process.child.wait, 60) == 2
    finally:
        process.child.kill()
        gateway.broker.kill()
