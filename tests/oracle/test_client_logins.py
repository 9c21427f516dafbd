"""Real clients produce and consume on both brokers, with all protocols and SASL mechanisms.

In the table in docs/security-clients.md, a checked cell means that the test passes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaError as OtherError
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as OtherPartition
from kafka.errors import KafkaError
from kafka.net.sasl.oauth import AbstractTokenProvider as OtherTokenProvider

from fencepost.client.tokens import unsecured_token
from tests.support.cluster import Cluster
from tests.support.go_build import built
from tests.support.kafka import java_command, unavailable
from tests.support.secured import (
    USERS,
    Secured,
    SecuredFencepost,
    SecuredKafka,
    add_users,
    quoted,
)

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security-clients.md"
TOPIC: Final = "logins"
DEADLINE_S: Final = 30
JAVA = Path(__file__).with_name("ClientLogins.java")
_MODULES = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Way:
    """A security protocol with a SASL mechanism or a certificate."""

    title: str
    listener: str
    protocol: str
    mechanism: str = ""
    certificate: bool = False
    password: str = USERS["alice"]


WAYS: Final = (
    Way("TLS", "TLS", "SSL"),
    Way("TLS, client certificate", "MUTUAL", "SSL", certificate=True),
    *(
        Way(f"{mechanism}{how}", listener, protocol, mechanism)
        for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
        for how, listener, protocol in (
            ("", "LOGIN", "SASL_PLAINTEXT"),
            (" over TLS", "SAFE", "SASL_SSL"),
        )
    ),
)
WRONG: Final = Way("wrong password", "SAFE", "SASL_SSL", "SCRAM-SHA-512", password="wrong")


@dataclass(frozen=True)
class Door:
    """One listener of a broker, and the :class:`Way` to log in."""

    broker: Secured
    way: Way

    @property
    def bootstrap(self) -> str:
        return self.broker.listeners[self.way.listener]

    @property
    def authority(self) -> str:
        return str(self.broker.authority.truststore)

    @property
    def certificate(self) -> str:
        return str(self.broker.authority.client("alice").file) if self.way.certificate else ""

    @property
    def has_tls(self) -> bool:
        return self.way.protocol.endswith("SSL")

    @property
    def context(self) -> ssl.SSLContext | None:
        if not self.has_tls:
            return None
        context = ssl.create_default_context(cafile=self.authority)
        if self.certificate:
            context.load_cert_chain(self.certificate)
        return context


def token() -> str:
    return unsecured_token({"sub": "alice"}, 600)


# --- the clients ---


def librdkafka(door: Door) -> dict[str, str]:
    way = door.way
    found = {"bootstrap.servers": door.bootstrap, "security.protocol": way.protocol.lower()}
    if door.has_tls:
        found["ssl.ca.location"] = door.authority
    if door.certificate:
        found["ssl.certificate.location"] = found["ssl.key.location"] = door.certificate
    if way.mechanism:
        found["sasl.mechanisms"] = way.mechanism
    if way.mechanism == "OAUTHBEARER":
        found["enable.sasl.oauthbearer.unsecure.jwt"] = "true"
        found["sasl.oauthbearer.config"] = "principal=alice"
    elif way.mechanism:
        found |= {"sasl.username": "alice", "sasl.password": way.password}
    return found


def by_confluent(door: Door) -> None:
    told: list[str] = []
    settings: dict[str, Any] = {
        **librdkafka(door),
        "log_level": 0,
        "message.timeout.ms": 8_000,
        "error_cb": lambda error: told.append(error.str()),
    }
    producer = Producer(settings)
    failed: list[object] = []
    producer.produce(TOPIC, b"c", on_delivery=lambda error, _: failed.append(error))
    producer.flush(DEADLINE_S)
    assert failed, "no answer"
    assert failed[0] is None, told
    del settings["message.timeout.ms"]
    consumer = Consumer({**settings, "group.id": "c", "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    message = consumer.poll(DEADLINE_S)
    consumer.close()
    assert message is not None, told
    assert message.error() is None, told


def by_kcat(door: Door) -> None:
    options = [word for pair in librdkafka(door).items() for word in ("-X", "=".join(pair))]
    for arguments in (["-P"], ["-C", "-o", "beginning", "-c", "1"]):
        done = subprocess.run(
            ["kcat", *options, *arguments, "-X", "message.timeout.ms=8000", "-t", TOPIC, "-p", "0"],
            input="kcat\n",
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def _python(door: Door) -> dict[str, Any]:
    way = door.way
    return {
        "bootstrap_servers": door.bootstrap,
        "security_protocol": way.protocol,
        "ssl_context": door.context,
        **({"sasl_mechanism": way.mechanism} if way.mechanism else {}),
        **(
            {"sasl_plain_username": "alice", "sasl_plain_password": way.password}
            if way.mechanism and way.mechanism != "OAUTHBEARER"
            else {}
        ),
    }


def by_aiokafka(door: Door) -> None:
    class Provider(AbstractTokenProvider):
        async def token(self) -> str:
            return token()

    async def run() -> None:
        settings = _python(door)
        if door.way.mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = Provider()
        async with AIOKafkaProducer(**settings) as producer:
            await producer.send_and_wait(TOPIC, b"a", partition=0)
        async with AIOKafkaConsumer(TOPIC, auto_offset_reset="earliest", **settings) as consumer:
            await consumer.getone()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def by_kafka_python(door: Door) -> None:
    class Provider(OtherTokenProvider):
        def token(self) -> str:
            return token()

    settings = {**_python(door), "bootstrap_timeout_ms": 10_000}
    if door.way.mechanism == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = Provider()
    producer = KafkaProducer(**settings, max_block_ms=10_000)
    try:
        producer.send(TOPIC, b"k", partition=0).get(DEADLINE_S)
    finally:
        producer.close(1)
    consumer = KafkaConsumer(**settings, consumer_timeout_ms=DEADLINE_S * 1000)
    place = OtherPartition(TOPIC, 0)
    consumer.assign([place])
    consumer.seek_to_beginning(place)
    assert next(iter(consumer)).topic == TOPIC
    consumer.close()


class Lines:
    """A client in another language, which reads a command and writes a result per line."""

    def __init__(self, command: list[str], prefix: str = "") -> None:
        self._prefix = prefix
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith(self._prefix):
                told = answer.removeprefix(self._prefix).strip()
                assert told == "ok", told
                return
        raise AssertionError("the client has ended")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def java_line(door: Door) -> str:
    way = door.way
    found = {"bootstrap.servers": door.bootstrap, "security.protocol": way.protocol}
    if door.has_tls:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": door.authority}
    if door.certificate:
        found |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": door.certificate}
    if way.mechanism:
        module = {
            "PLAIN": f"{_MODULES}.plain.PlainLoginModule",
            "OAUTHBEARER": f"{_MODULES}.oauthbearer.OAuthBearerLoginModule",
        }.get(way.mechanism, f"{_MODULES}.scram.ScramLoginModule")
        options = f'username="alice" password={quoted(way.password)}'
        if way.mechanism == "OAUTHBEARER":
            options = 'unsecuredLoginStringClaim_sub="alice"'
        found |= {
            "sasl.mechanism": way.mechanism,
            "sasl.jaas.config": f"{module} required {options};",
        }
    # In a properties file a backslash is an escape.
    text = "".join(f"{key}={value}\n" for key, value in found.items()).replace("\\", "\\\\")
    return f"{TOPIC} {base64.b64encode(text.encode()).decode()}"


def go_line(door: Door) -> str:
    way = door.way
    return json.dumps(
        {
            "Bootstrap": door.bootstrap,
            "Topic": TOPIC,
            "Mechanism": way.mechanism,
            "User": "alice",
            "Password": way.password,
            "Token": token() if way.mechanism == "OAUTHBEARER" else "",
            "Authority": door.authority if door.has_tls else "",
            "Certificate": door.certificate,
        }
    )


Client = Callable[[Door], None]
CLIENTS: Final = {
    "librdkafka (confluent-kafka)": "confluent",
    "kcat": "kcat",
    "Java": "java",
    "aiokafka": "aiokafka",
    "kafka-python": "kafka_python",
    "franz-go": "go",
}


@pytest.fixture(scope="module")
def clients() -> Iterator[Mapping[str, Client]]:
    if shutil.which("kcat") is None:
        unavailable("`kcat` is not on the PATH", "a client of another language")
    binary = built(".", "franz-go")
    java = Lines(java_command(str(JAVA)), "> ")
    go = Lines([str(binary)])
    yield {
        "confluent": by_confluent,
        "kcat": by_kcat,
        "aiokafka": by_aiokafka,
        "kafka_python": by_kafka_python,
        "java": lambda door: java.ask(java_line(door)),
        "go": lambda door: go.ask(go_line(door)),
    }
    java.close()
    go.close()


@pytest.fixture(scope="module", params=["fencepost", "kafka"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    home = tmp_path_factory.mktemp(f"logins-{request.param}")
    made = SecuredFencepost(home) if request.param == "fencepost" else SecuredKafka(home)
    made.start()
    add_users(made)
    with Cluster(made.bootstrap) as cluster:
        cluster.create_topic(TOPIC)
    yield made
    made.stop()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
@pytest.mark.parametrize("client", CLIENTS.values())
def test_client_logs_in_if_it_supports_the_mechanism(
    clients: Mapping[str, Client], broker: Secured, client: str, way: Way
) -> None:
    if knows(client, way):
        clients[client](Door(broker, way))
        return
    with pytest.raises(AssertionError, match="invalid credentials"):
        clients[client](Door(broker, way))


def knows(client: str, way: Way) -> bool:
    """Return whether a client supports ``way``.

    Debian's kcat uses librdkafka before 2.6.1, which sends the nonce of SCRAM twice. Both brokers
    only accept exactly the nonce that they have sent (CVE-2024-56128).
    """
    return client != "kcat" or not way.mechanism.startswith("SCRAM")


@pytest.mark.parametrize("client", CLIENTS.values())
def test_client_reports_a_wrong_password(
    clients: Mapping[str, Client],
    broker: Secured,
    client: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two of the clients only log the failed login and retry, and report no error."""
    with pytest.raises((AssertionError, OSError, KafkaError, OtherError)) as failed:
        clients[client](Door(broker, WRONG))
    told = f"{failed.value} {caplog.text}"
    assert "invalid credentials" in told or "SaslAuthenticationFailed" in told, told


def test_documented_client_logins_are_those_tested() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0][1:] == list(CLIENTS)
    assert [row[0] for row in cells[2:]] == [way.title for way in WAYS]
    told = [["✓" if knows(client, way) else "–" for client in CLIENTS.values()] for way in WAYS]
    assert [row[1:] for row in cells[2:]] == told
