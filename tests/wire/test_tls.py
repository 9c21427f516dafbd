"""Encrypted listeners, tested by clients with Python's own TLS and with librdkafka.

docs/security-tests.md has the test for each case of Apache Kafka's SslTransportLayerTest.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from fencepost import Broker
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.records import RegisterBrokerRecord
from fencepost.coordinator.config import logs
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.metrics import own
from fencepost.coordinator.runtime.rate_limited_log import LINES_PER_SECOND
from fencepost.coordinator.security.tls import ListenerTls
from fencepost.coordinator.server import tls_stream
from fencepost.coordinator.server.connection import Connection
from fencepost.tools.ports import hold_port
from tests.support.certificates import (
    KEY_PASSWORD,
    Authority,
    replace,
    subject,
    trust_settings,
    trusted_by_librdkafka,
    trusting,
)
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.metadata_changes import decide, set_broker_configs
from tests.support.raw import ConnectionLostError, RawClient, encode
from tests.support.stalls import MAX_STALL_MS, slowness
from tests.support.waits import until, until_true
from tests.wire.clients import confluent_consumer, confluent_producer

T = TypeVar("T")

LISTEN = {"listeners": "SSL://127.0.0.1:0"}
BIG = 5_000_000
"""A number of bytes that no socket accepts in one write."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def said() -> Iterator[list[EventDict]]:
    """Yield the list of log events from INFO on."""
    logs.configure_quietly()
    level = logs.level()
    logs.set_level("INFO")
    with capture_logs() as found:
        yield found
    logs.set_level(level)


class Served:
    """A broker in this process, on a separate event loop."""

    def __init__(self, broker: Broker, thread: BrokerThread) -> None:
        self.broker, self.bootstrap, self._thread = broker, thread.bootstrap, thread

    def look(self, at: Callable[[Broker], T]) -> T:
        """Call ``at`` with the broker on its loop; return the result."""

        async def asked() -> T:
            return at(self.broker)

        return self._thread.call(asked)

    def call(self, work: Callable[[], Any]) -> Any:
        return self._thread.call(work)

    @property
    def failures(self) -> int:
        """The number of failed handshakes."""
        return self.look(
            lambda broker: sum(t.handshake_failures for t in broker.server.tls.values())
        )

    @property
    def connections(self) -> list[Connection]:
        return self.look(lambda broker: list(broker.server.connections))

    @property
    def principals(self) -> set[str]:
        """The principals of all connections."""
        return {str(connection.session.principal) for connection in self.connections}

    def on(self, listener: str) -> str:
        """Return the address of a listener."""
        host, port = self.look(lambda broker: broker.server.addresses[listener])
        return f"{host}:{port}"


@contextmanager
def serving(home: Path, settings: Mapping[str, object]) -> Iterator[Served]:
    broker = Broker(home / "data", config={**LISTEN, **settings})
    with BrokerThread(lambda: broker) as thread:
        yield Served(broker, thread)


def versions(bootstrap: str, tls: ssl.SSLContext | None) -> object:
    """Send ApiVersions on a new connection; return its error."""
    with RawClient(bootstrap, tls=tls) as client:
        return client.call("api_versions", 2)["error_code"]


def is_refused(bootstrap: str, tls: ssl.SSLContext | None) -> bool:
    """Return whether a client gets no response: in TLS 1.3 its handshake succeeds anyway."""
    try:
        versions(bootstrap, tls)
    except (OSError, ConnectionLostError):
        return True
    return False


# --- accepted and refused clients ----------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_tls_versions_work_without_client_certificate(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    context = trusting(authority)
    context.minimum_version = context.maximum_version = version
    with (
        serving(tmp_path, authority.server().keystore) as served,
        RawClient(served.bootstrap, tls=context) as client,
    ):
        assert client.call("api_versions", 2)["error_code"] == "none"
        assert served.principals == {"User:ANONYMOUS"}


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_version_below_1_2_is_refused(tmp_path: Path, authority: Authority) -> None:
    older = trusting(authority)
    older.set_ciphers("DEFAULT@SECLEVEL=0")
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_1
    with serving(tmp_path, authority.server().keystore) as served:
        with pytest.raises(ssl.SSLError, match="TLSV1_ALERT_PROTOCOL_VERSION"):
            versions(served.bootstrap, older)
        assert served.failures == 1


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_tls_version_that_is_not_enabled_is_refused(
    tmp_path: Path, authority: Authority, version: str
) -> None:
    context = trusting(authority)
    wanted = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
    settings = {**authority.server().keystore, "ssl.enabled.protocols": version}
    with serving(tmp_path, settings) as served:
        assert versions(served.bootstrap, context) == "none"
        context.minimum_version = context.maximum_version = wanted.pop(version) and max(
            wanted.values()
        )
        assert is_refused(served.bootstrap, context)


def test_cipher_suite_that_is_not_enabled_is_refused(tmp_path: Path, authority: Authority) -> None:
    suite = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
    settings = {**authority.server().keystore, "ssl.cipher.suites": suite}
    context = trusting(authority)
    with serving(tmp_path, settings) as served:
        with RawClient(served.bootstrap, tls=context) as client:
            assert client.call("api_versions", 2)["error_code"] == "none"
            chosen = client._socket.cipher()  # type: ignore[attr-defined]
            assert chosen[:2] == ("ECDHE-ECDSA-AES256-GCM-SHA384", "TLSv1.2")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        assert is_refused(served.bootstrap, context)


@pytest.mark.parametrize(
    ("auth", "certificate", "principal"),
    [
        ("required", "valid", "alice"),
        ("required", "untrusted", None),
        ("required", "expired", None),
        ("required", "absent", None),
        ("requested", "valid", "alice"),
        ("requested", "untrusted", None),
        ("requested", "absent", "ANONYMOUS"),
        ("none", "valid", "ANONYMOUS"),
        ("none", "untrusted", "ANONYMOUS"),
        ("none", "absent", "ANONYMOUS"),
    ],
)
def test_client_certificate_is_checked_as_ssl_client_auth_requires(
    tmp_path: Path, authority: Authority, auth: str, certificate: str, principal: str | None
) -> None:
    context = trusting(authority)
    if certificate != "absent":
        signer = Authority(tmp_path, "stranger") if certificate == "untrusted" else authority
        valid = (-3, -1) if certificate == "expired" else (-1, 1)
        context = signer.client("alice", valid=valid).context(trusted=authority)
    settings = {
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": auth,
        "ssl.principal.mapping.rules": "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/",
    }
    with serving(tmp_path, settings) as served:
        if principal is None:
            assert is_refused(served.bootstrap, context)
            assert served.failures == 1
            until(lambda: not served.connections, "nothing is left of it")
            return
        with RawClient(served.bootstrap, tls=context) as client:
            assert client.call("api_versions", 2)["error_code"] == "none"
            assert served.principals == {f"User:{principal}"}
            assert served.failures == 0


def test_certificate_without_matching_principal_rule_is_refused(
    tmp_path: Path, authority: Authority
) -> None:
    settings = {
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": "required",
        "ssl.principal.mapping.rules": "RULE:^CN=(a.*?),.*$/$1/",
    }
    with serving(tmp_path, settings) as served:
        assert versions(served.bootstrap, authority.client("alice").context()) == "none"
        assert is_refused(served.bootstrap, authority.client("bob").context())
        assert served.failures == 1


def test_listener_setting_overrides_the_broker_setting(
    tmp_path: Path, authority: Authority
) -> None:
    """testListenerConfigOverride: a listener's key overrides the broker's."""
    other = Authority(tmp_path, "other")
    settings = {
        "listeners": "SSL://127.0.0.1:0,OPEN://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
        "listener.security.protocol.map": "OPEN:SSL",
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": "required",
        "listener.name.open.ssl.client.auth": "none",
        "listener.name.open.ssl.keystore.location": str(other.server("elsewhere").file),
    }
    with serving(tmp_path, settings) as served:
        assert is_refused(served.on("SSL"), trusting(authority))
        assert versions(served.on("SSL"), authority.client("alice").context()) == "none"
        assert versions(served.on("OPEN"), trusting(other)) == "none"
        assert versions(served.on("PLAINTEXT"), None) == "none"
        with RawClient(served.on("OPEN"), tls=trusting(other)) as client:
            (told,) = client.call("metadata", 12, topics=[])["brokers"]
            assert f"{told['host']}:{told['port']}" == served.on("OPEN"), "its own address"


def test_keys_of_every_kind_are_loaded(tmp_path: Path, authority: Authority) -> None:
    """testPemFiles, testECKeyPair: with a password and without, files and text, EC and RSA."""
    hidden = authority.server("hidden", password=KEY_PASSWORD)
    inline = authority.server("inline")
    settings = {
        "listeners": "HIDDEN://127.0.0.1:0,INLINE://127.0.0.1:0,RSA://127.0.0.1:0",
        "listener.security.protocol.map": "HIDDEN:SSL,INLINE:SSL,RSA:SSL",
        **{f"listener.name.hidden.{key}": value for key, value in hidden.keystore.items()},
        "listener.name.inline.ssl.keystore.key": inline.key,
        "listener.name.inline.ssl.keystore.certificate.chain": inline.chain,
        "listener.name.rsa.ssl.keystore.location": str(authority.issue("rsa")),
    }
    with serving(tmp_path, settings) as served:
        for name in ("HIDDEN", "INLINE", "RSA"):
            assert versions(served.on(name), trusting(authority)) == "none"


@pytest.mark.slow
def test_sasl_ssl_principal_comes_from_the_login(tmp_path: Path, authority: Authority) -> None:
    """SASL_SSL: the principal comes from the login; only the listener's ssl.client.auth counts."""
    settings = {
        "listeners": "OPEN://127.0.0.1:0,BOTH://127.0.0.1:0",
        "listener.security.protocol.map": "OPEN:SASL_SSL,BOTH:SASL_SSL",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": "required",
        "listener.name.both.ssl.client.auth": "required",
    }
    login = {
        "sasl.mechanisms": "SCRAM-SHA-256",
        "sasl.username": "bob",
        "sasl.password": "secret",
    }
    broker = Broker(
        tmp_path / "data",
        config=settings,
        add_scram=["SCRAM-SHA-256=[name=bob,password=secret]"],
    )
    with BrokerThread(lambda: broker) as thread:
        served = Served(broker, thread)
        for name, shown in (
            ("OPEN", trusted_by_librdkafka(authority)),
            ("BOTH", authority.client("alice").librdkafka()),
        ):
            conf = {**shown, **login, "security.protocol": "sasl_ssl"}
            with confluent_producer(served.on(name), **conf) as producer:
                producer.produce("t", b"v")
                assert producer.flush(30) == 0
                until(lambda: "User:bob" in served.principals, "who has logged in")
                assert not any("alice" in principal for principal in served.principals)
        assert is_refused(served.on("BOTH"), trusting(authority))
        assert served.failures == 1


def test_client_refuses_certificate_of_another_host(tmp_path: Path, authority: Authority) -> None:
    elsewhere = authority.server("elsewhere", hosts=["broker.example"])
    with serving(tmp_path, elsewhere.keystore) as served:
        assert is_refused(served.bootstrap, trusting(authority))
        unchecked = trusting(authority)
        unchecked.check_hostname = False
        assert versions(served.bootstrap, unchecked) == "none"
        # The first client sent an alert when it refused the certificate: one handshake failed.
        assert served.failures == 1


# --- wrong protocols -----------------------------------------------------------------------------


def test_plaintext_and_tls_at_the_wrong_port_are_refused(
    tmp_path: Path, authority: Authority, said: list[EventDict]
) -> None:
    both = {"listeners": "SSL://127.0.0.1:0,PLAINTEXT://127.0.0.1:0"}
    with serving(tmp_path, {**authority.server().keystore, **both}) as served:
        assert is_refused(served.on("SSL"), None)
        assert served.failures == 1
        assert is_refused(served.on("PLAINTEXT"), trusting(authority))
        assert served.failures == 1
    (failed,) = (line for line in said if line["event"] == "handshake failed")
    assert (failed["listener"], failed["log_level"]) == ("SSL", "info")
    assert "a client that speaks PLAINTEXT?" in failed["reason"]
    assert any("a client that speaks TLS?" in str(line.get("reason")) for line in said)
    assert not [line for line in said if line["log_level"] == "error"]


def hello(context: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.MemoryBIO, bytes]:
    """Begin a handshake in memory; return the client, its input buffer and its first bytes."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(received, sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return client, received, sent.read()


def connected(served: Served) -> socket.socket:
    host, port = served.bootstrap.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 20)


def test_handshake_closed_or_reset_at_any_byte_is_dropped(
    tmp_path: Path, authority: Authority
) -> None:
    """testIOExceptionsDuringHandshake*, …RemoteCloseDuringHandshake*: closed or reset."""
    _, _, first = hello(authority.client("alice").context())
    counts = sorted({0, 1, 4, 5, 6, 50, len(first) - 1, len(first)})
    with serving(tmp_path, authority.server().keystore) as served:
        for count in counts:
            for is_reset in (False, True):
                with connected(served) as client:
                    client.sendall(first[:count])
                    if is_reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        until(lambda: served.failures == 2 * len(counts), "all are counted")
        until(lambda: not served.connections, "none is left")
        assert versions(served.bootstrap, trusting(authority)) == "none"


def test_bytewise_handshake_succeeds_and_corrupt_ones_are_dropped(
    tmp_path: Path, authority: Authority
) -> None:
    with serving(tmp_path, authority.server().keystore) as served:
        client, received, first = hello(trusting(authority))
        with connected(served) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(len(first)):
                wire.sendall(first[at : at + 1])
            received.write(wire.recv(65_536))
            client.do_handshake()
        draw = random.Random(16)
        for number in range(200):
            broken = bytearray(first)
            for _ in range(draw.randint(1, 8)):
                broken[draw.randrange(1, len(broken))] = draw.randrange(256)
            with connected(served) as wire:
                wire.sendall(broken if number % 2 else broken[:6] + os.urandom(2_000))
        until(lambda: not served.connections, "none is left")
        assert versions(served.bootstrap, trusting(authority)) == "none"


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_requests_and_responses_arrive_unchanged(
    tmp_path: Path, authority: Authority
) -> None:
    payloads = [os.urandom(900_000) for _ in range(8)] + [b"x" * 10]
    settings = {**authority.server().keystore, "listeners": LISTEN["listeners"]}
    with serving(tmp_path, settings) as served:
        trusted = trusted_by_librdkafka(authority)
        with confluent_producer(served.bootstrap, **trusted) as producer:
            for payload in payloads:
                producer.produce("big", payload)
        with confluent_consumer(served.bootstrap, group_id="g", **trusted) as consumer:
            consumer.subscribe(["big"])
            found: list[bytes] = []
            until(
                lambda: (
                    found.extend(m.value() for m in consumer.consume(10, 0.2) if not m.error())
                    or len(found) == len(payloads)
                ),
                "all records",
            )
    assert found == payloads


def test_unread_response_is_not_buffered_by_the_broker(
    tmp_path: Path, authority: Authority
) -> None:
    both = {"listeners": "SSL://127.0.0.1:0,PLAINTEXT://127.0.0.1:0"}
    with serving(tmp_path, {**authority.server().keystore, **both}) as served:
        with Cluster(served.on("PLAINTEXT")) as cluster:
            cluster.create_topic("t")
            for _ in range(8):
                cluster.produce("t", [os.urandom(BIG // 8)])
            plain = cluster.fetch("t")["records"]
        with Cluster(served.on("SSL"), tls=trusting(authority)) as client:
            answers: list[Any] = []
            reader = threading.Thread(target=lambda: answers.append(client.fetch("t")))
            may_read = hold_back(client, reader)
            (connection,) = (
                accepted for accepted in served.connections if accepted.listener.is_tls
            )
            until(lambda: served.look(lambda _: not connection._writable), "the socket is full")
            held = served.look(lambda _: connection._transport.get_write_buffer_size())
            assert held < 2_000_000, "what is in the file stays there"
            may_read.set()
            reader.join()
    assert len(plain) > BIG
    assert answers[0]["records"] == plain


FETCHES, RANDOM_ROUNDS = 10, 6


@pytest.mark.slow
def test_responses_equal_plaintext_for_any_fragmentation(
    tmp_path: Path, authority: Authority
) -> None:
    """Pipelined fetches of any size, in TLS records of any size, read in pieces with pauses."""
    draw = random.Random(5)
    both = {"listeners": "SSL://127.0.0.1:0,PLAINTEXT://127.0.0.1:0"}
    with serving(tmp_path, {**authority.server().keystore, **both}) as served:
        with Cluster(served.on("PLAINTEXT")) as cluster:
            cluster.create_topic("t")
            for _ in range(60):
                cluster.produce("t", [os.urandom(draw.choice([10, 1_000, 50_000, 800_000]))])
        for number in range(RANDOM_ROUNDS):
            asked = b"".join(some_fetch(draw, correlation_id) for correlation_id in range(FETCHES))
            context = trusting(authority)
            if number % 2:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
            plain = exchanged(served.on("PLAINTEXT"), None, asked, draw)
            assert exchanged(served.on("SSL"), context, asked, draw) == plain
            assert len(plain) == FETCHES


def some_fetch(draw: random.Random, correlation_id: int) -> bytes:
    most = draw.choice([1, 100, 5_000, 70_000, 300_000, 3_000_000])
    part = {
        "partition": 0,
        "fetch_offset": draw.randrange(60),
        "partition_max_bytes": most,
        "current_leader_epoch": -1,
    }
    limits = {"max_wait": 0, "min_bytes": 1, "max_bytes": most, "session_epoch": -1}
    body = {"replica_id": -1, "topics": [{"topic": "t", "partitions": [part]}], **limits}
    frame = encode("fetch", 11, correlation_id, "c", body)
    return len(frame).to_bytes(4, "big") + frame


def exchanged(
    address: str, context: ssl.SSLContext | None, asked: bytes, draw: random.Random
) -> list[bytes]:
    """Send requests in pieces, and receive the responses in pieces."""
    host, port = address.rsplit(":", 1)
    client = socket.socket()
    client.settimeout(20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, draw.choice([4_096, 65_536, 1 << 20]))
    client.connect((host, int(port)))
    if context is not None:
        client = context.wrap_socket(client, server_hostname="localhost")
    with client:
        at = 0
        while at < len(asked):
            size = draw.choice([1, 3, 100, 10_000])
            client.sendall(asked[at : at + size])
            at += size
        answers, taken = [], bytearray()
        while len(answers) < FETCHES:
            taken += client.recv(draw.choice([1, 7, 1_000, 16_384, 1_000_000]))
            while len(taken) >= 4 and len(taken) >= (end := 4 + int.from_bytes(taken[:4], "big")):
                answers.append(bytes(taken[4:end]))
                del taken[:end]
    return answers


def hold_back(client: Cluster, reader: threading.Thread) -> threading.Event:
    """Start a thread that sends a request at once, and reads only after the event is set."""
    may_read, receive = threading.Event(), client.receive_frame

    def late() -> bytes:
        may_read.wait(60)
        return receive()

    client.receive_frame = late  # type: ignore[method-assign]
    reader.start()
    return may_read


def test_pipelined_requests_are_answered_in_order(tmp_path: Path, authority: Authority) -> None:
    frames = [encode("api_versions", 2, number, "c", {}) for number in range(500)]
    with (
        serving(tmp_path, authority.server().keystore) as served,
        RawClient(served.bootstrap, tls=trusting(authority)) as client,
    ):
        client.send_bytes(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))
        for number in range(500):
            assert client.receive_frame()[:4] == number.to_bytes(4, "big")


def test_close_notify_is_answered_and_an_abrupt_close_accepted(
    tmp_path: Path, authority: Authority
) -> None:
    """testCloseSsl: close_notify in both directions, and a socket that closes without it."""
    context = trusting(authority)
    with serving(tmp_path, authority.server().keystore) as served:
        host, port = served.bootstrap.rsplit(":", 1)
        with context.wrap_socket(
            socket.create_connection((host, int(port)), 20), server_hostname="localhost"
        ) as client:
            client.unwrap()  # raises unless the server sends its own close_notify
        with RawClient(served.bootstrap, tls=context) as client:
            assert client.call("api_versions", 2)["error_code"] == "none"
            client._socket.shutdown(socket.SHUT_RDWR)
        until(lambda: not served.connections, "both are forgotten")
        with RawClient(served.bootstrap, tls=context) as client:
            client.send_bytes(b"\x7f\xff\xff\xff")
            with pytest.raises(ConnectionLostError):
                client.receive_frame()
        assert served.failures == 0


def test_stop_with_open_connections_logs_no_warning(
    tmp_path: Path, authority: Authority, said: list[EventDict]
) -> None:
    with serving(tmp_path, authority.server().keystore) as served:
        idle = RawClient(served.bootstrap, tls=trusting(authority))
        idle.call("api_versions", 2)
        half_open = connected(served)
        begun = connected(served)
        begun.sendall(hello(trusting(authority))[2][:40])
        until(lambda: len(served.connections) == 3, "all are there")
        failures = served.failures
    with pytest.raises(ConnectionLostError):
        idle.receive_frame()
    assert half_open.recv(1) == b""
    assert begun.recv(1) == b""
    for client in (half_open, begun):
        client.close()
    idle.close()
    assert failures == 0
    assert not [line for line in said if line["log_level"] in {"warning", "error"}]


# --- limits --------------------------------------------------------------------------------------


def test_half_open_handshakes_count_against_the_limits(
    tmp_path: Path, authority: Authority
) -> None:
    settings = {**authority.server().keystore, "max.connections.per.ip": 3}
    with serving(tmp_path, settings) as served:
        waiting = [connected(served) for _ in range(3)]
        until(lambda: len(served.connections) == 3, "they are counted")
        with connected(served) as refused, suppress(ConnectionResetError):
            assert refused.recv(1) == b""
        assert served.look(lambda broker: broker.server.refusals["max.connections.per.ip"]) == 1
        waiting.pop().close()
        until(lambda: len(served.connections) == 2, "one has gone")
        assert versions(served.bootstrap, trusting(authority)) == "none"
        for client in waiting:
            client.close()


@pytest.mark.parametrize("sent", [0, 60])
def test_handshake_without_progress_times_out(
    tmp_path: Path, authority: Authority, sent: int
) -> None:
    with serving(tmp_path, authority.server().keystore) as served:
        assert versions(served.bootstrap, trusting(authority)) == "none"

        def hurry(broker: Broker) -> None:
            handshakes = broker.server._handshakes
            assert handshakes is not None
            assert handshakes.timeout_ms == 10_000
            handshakes.timeout_ms = 100

        served.look(hurry)
        with connected(served) as client:
            client.sendall(hello(trusting(authority))[2][:sent])
            assert client.recv(1) == b""
        until(lambda: served.failures == 1, "it is counted")
        # After the handshake a client may be silent for longer.
        with RawClient(served.bootstrap, tls=trusting(authority)) as client:
            client.call("api_versions", 2)
            served.call(lambda: asyncio.sleep(0.3))
            assert client.call("api_versions", 2)["error_code"] == "none"


@pytest.mark.slow
def test_oversized_handshake_is_cut_off(tmp_path: Path, authority: Authority) -> None:
    """An endless ClientHello is cut off, but a long certificate chain is accepted."""
    endless = b"\x16\x03\x01\x40\x00" + b"\x01\x01\xff\xff" + bytes(16_380)
    record = b"\x16\x03\x01\x40\x00" + bytes(16_384)
    settings = {
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": "required",
    }
    with serving(tmp_path, settings) as served:
        with connected(served) as client, suppress(ConnectionError):
            client.sendall(endless)
            for sent in range(len(endless), 10_000_000, len(record)):
                client.sendall(record)
                most = sent
        until(lambda: served.failures == 1, "it is sent away")
        assert most < 5_000_000, "not read to its end"
        alice = authority.client("alice")
        chain = alice.chain + "".join(authority.client(f"c{n}").chain for n in range(110))
        assert tls_stream.HANDSHAKE_BYTES * 0.7 < len(chain) * 0.75 < tls_stream.HANDSHAKE_BYTES
        alice.file.write_text(alice.key + chain)
        assert versions(served.bootstrap, alice.context()) == "none"


@pytest.mark.slow
async def test_many_handshakes_at_once_do_not_block_the_event_loop(
    tmp_path: Path, authority: Authority
) -> None:
    count, hello_bytes = 300, hello(trusting(authority))[2]
    settings = {**LISTEN, **authority.server().keystore}
    async with Broker(tmp_path / "data", config=settings) as broker:
        there = [socket.create_connection(broker.address) for _ in range(count)]
        await until_true(lambda: len(broker.server.connections) == count)

        def greet() -> None:
            for client in there:
                client.sendall(hello_bytes)
            for client in there:
                assert client.recv(5)[0] == 0x16, "the server's part"
                client.close()

        greeted = asyncio.ensure_future(asyncio.to_thread(greet))
        longest_ms = 0.0
        while not greeted.done():
            since = time.thread_time()
            await asyncio.sleep(0)
            longest_ms = max(longest_ms, (time.thread_time() - since) * 1000)
        await greeted
    assert longest_ms / slowness() < MAX_STALL_MS, "of one round of the loop, all callbacks in it"


def test_alpn_offer_is_ignored(tmp_path: Path, authority: Authority) -> None:
    context = trusting(authority)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        serving(tmp_path, authority.server().keystore) as served,
        RawClient(served.bootstrap, tls=context) as client,
    ):
        assert client.call("api_versions", 2)["error_code"] == "none"
        assert client._socket.selected_alpn_protocol() is None  # type: ignore[attr-defined]


def test_renegotiation_and_compression_are_refused(tmp_path: Path, authority: Authority) -> None:
    with serving(tmp_path, authority.server().keystore) as served:
        command = ["openssl", "s_client", "-tls1_2", "-comp", "-connect", served.bootstrap]
        with subprocess.Popen(
            [*command, "-CAfile", str(authority.truststore)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            said = iter(client.stdout.readline, "")
            shaken = [line for line in iter(lambda: next(said), "---\n") if line]
            until(lambda: served.connections, "it is there")
            client.stdin.write("R\n")
            client.stdin.flush()
            rest = "".join(said)
        assert "RENEGOTIATING" in rest
        assert "no renegotiation" in rest
        assert "Compression: NONE" in "".join(shaken) + rest
        until(lambda: not served.connections, "it is gone")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_refused_client_certificate_gets_a_tls_alert(
    tmp_path: Path, authority: Authority, version: ssl.TLSVersion
) -> None:
    """testPeerNotifiedOfHandshakeFailure: with TLS 1.3 the client gets the alert when it reads."""
    settings = {
        **authority.server().keystore,
        **trust_settings(authority),
        "ssl.client.auth": "required",
    }
    stranger = Authority(tmp_path, "stranger").client("mallory").context(trusted=authority)
    nobody = trusting(authority)
    with serving(tmp_path, settings) as served:
        for context, reason in ((nobody, "REQUIRED|HANDSHAKE_FAILURE"), (stranger, "UNKNOWN_CA")):
            context.minimum_version = context.maximum_version = version
            with pytest.raises(ssl.SSLError, match=reason):
                read_on(served, context)


def read_on(served: Served, context: ssl.SSLContext) -> None:
    """Complete the handshake, and wait for unsolicited bytes from the broker."""
    with context.wrap_socket(connected(served), server_hostname="localhost") as client:
        client.recv(1)


def test_failed_handshakes_leak_no_streams(tmp_path: Path, authority: Authority) -> None:
    """python/cpython#109534: asyncio's own TLS leaked every failed handshake with its buffers."""
    count = 300
    with serving(tmp_path, authority.server().keystore) as served:
        gc.collect()
        gc.disable()
        try:
            for number in range(count):
                with connected(served) as client:
                    client.sendall(b"\x16\x03\x01\x00\x05hello" if number % 2 else b"GET / HTTP/1")
                    with suppress(ConnectionResetError):
                        client.recv(100)
            until(lambda: served.failures == count, "all have failed")
            until(lambda: not served.connections, "none is left")
            streams = [
                tracked for tracked in gc.get_objects() if isinstance(tracked, tls_stream.TlsStream)
            ]
        finally:
            gc.enable()
    assert len(streams) <= 1, "no collector was needed"


def test_unexpected_handshake_exception_closes_only_its_connection(
    tmp_path: Path, authority: Authority, said: list[EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected exception in a handshake ends only that connection, and is logged."""

    def broken(_tls: ListenerTls, _der: bytes | None) -> None:
        raise RuntimeError("a defect")

    with serving(tmp_path, authority.server().keystore) as served:
        with monkeypatch.context() as patch:
            patch.setattr(ListenerTls, "principal_of", broken)
            assert is_refused(served.bootstrap, trusting(authority))
        assert versions(served.bootstrap, trusting(authority)) == "none"
    (told,) = (line for line in said if line["log_level"] == "error")
    assert (told["event"], told["what"]) == ("background work failed", "TLS")


def test_log_lines_about_failed_handshakes_are_rate_limited(
    tmp_path: Path, authority: Authority, said: list[EventDict]
) -> None:
    count = 30 * LINES_PER_SECOND
    with serving(tmp_path, authority.server().keystore) as served:
        for _ in range(count):
            with connected(served) as client:
                client.sendall(b"nothing of TLS")
                assert client.recv(1) == b""
        assert served.failures == count
    lines = [line for line in said if line["event"] == "handshake failed"]
    more = sum(line["count"] for line in said if line["event"] == "more handshakes failed")
    assert LINES_PER_SECOND <= len(lines) < count
    assert len(lines) + more <= count


@pytest.mark.slow
def test_broker_without_tls_imports_no_tls_modules(tmp_path: Path) -> None:
    program = (
        "import sys, asyncio\n"
        "from fencepost import Broker\n"
        "async def main():\n"
        "    async with Broker(sys.argv[1]):\n"
        "        pass\n"
        "asyncio.run(main())\n"
        "print([one for one in sys.modules if one.endswith(('.tls', '.tls_stream', '.pem',"
        " '.daemon.certificates', '.certificate', '.principal_mapping'))])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# --- renewal -------------------------------------------------------------------------------------


def shown_to(served: Served, authority: Authority) -> int:
    """Return the serial number of the certificate that a new client gets."""
    with RawClient(served.bootstrap, tls=trusting(authority)) as client:
        shown = client._socket.getpeercert()  # type: ignore[attr-defined]
    return int(shown["serialNumber"], 16)


def refresh(served: Served) -> None:
    certificates = served.broker.certificates
    assert certificates is not None
    served.call(certificates.refresh)


def test_renewed_keystore_file_is_used_for_new_connections(
    tmp_path: Path, authority: Authority
) -> None:
    server = authority.server("renewed")
    with serving(tmp_path, server.keystore) as served:
        before = shown_to(served, authority)
        with RawClient(served.bootstrap, tls=trusting(authority)) as old:
            old.call("api_versions", 2)
            refresh(served)
            assert shown_to(served, authority) == before, "nothing has changed"
            authority.server("renewed")
            refresh(served)
            assert shown_to(served, authority) != before
            assert old.call("api_versions", 2)["error_code"] == "none", "it lives on"
        (tls,) = served.look(lambda broker: list(broker.server.tls.values()))
        assert (tls.reloads, tls.failed_reloads, tls.is_stale) == (1, 0, False)
        now = shown_to(served, authority)
        for content in (b"", b"half writ", authority.server("other").file.read_bytes()):
            replace(server.file, content)
            refresh(served)
            refresh(served)
            assert shown_to(served, authority) == now
            assert tls.is_stale
        assert tls.failed_reloads == 3, "each is told once"
        assert scraped(served)["fencepost_certificate_stale"] == 1
        authority.server("renewed")
        refresh(served)
        assert shown_to(served, authority) not in {before, now}
        assert not tls.is_stale
        told = scraped(served)
        assert told["fencepost_certificate_stale"] == 0
        assert 360 < (told["fencepost_certificate_not_after_seconds"] - time.time()) / 86_400 < 366
        with connected(served) as client:
            client.sendall(b"nothing of TLS")
            assert client.recv(1) == b""
        assert scraped(served)["fencepost_handshake_failures_total"] == 1


def scraped(served: Served) -> dict[str, float]:
    """Return the metrics of the only listener with TLS."""
    found = served.look(lambda broker: list(own.of_server(broker.server)))
    return {
        family.name: value
        for family, samples in found
        for labels, value in samples
        if 'listener="SSL"' in labels and isinstance(value, (int, float))
    }


def test_renewed_truststore_decides_on_new_client_certificates(
    tmp_path: Path, authority: Authority
) -> None:
    """testServerTruststoreDynamicUpdate: the broker must trust clients by the new truststore."""
    other = Authority(tmp_path, "other")
    file = tmp_path / "trusted.pem"
    file.write_text(authority.pem)
    settings = {
        **authority.server().keystore,
        "ssl.truststore.location": str(file),
        "ssl.client.auth": "required",
    }
    ours = authority.client("alice").context()
    theirs = other.client("bob").context(trusted=authority)
    with serving(tmp_path, settings) as served:
        for content, come in (
            (authority.pem, (True, False)),
            (authority.pem + other.pem, (True, True)),
            (other.pem, (False, True)),
        ):
            replace(file, content.encode())
            refresh(served)
            refused = is_refused(served.bootstrap, ours), is_refused(served.bootstrap, theirs)
            assert refused == tuple(not accepted for accepted in come)


@pytest.mark.slow
def test_sighup_reloads_the_certificate(tmp_path: Path, authority: Authority) -> None:
    server = authority.server("signal")
    daemon = Daemon(tmp_path / "data", {"listeners": "SSL://127.0.0.1:0", **server.keystore})
    daemon.start()

    def shown() -> object:
        with RawClient(daemon.bootstrap, tls=trusting(authority)) as client:
            return client._socket.getpeercert()["serialNumber"]  # type: ignore[attr-defined]

    before = shown()
    authority.server("signal")
    assert daemon.child is not None
    os.kill(daemon.child.pid, signal.SIGHUP)
    until(lambda: shown() != before, "the renewed one")
    assert '"certificate read again"' in daemon.child.tail()
    daemon.stop()


def test_certificate_close_to_its_expiry_is_logged_once_a_day(
    tmp_path: Path, authority: Authority, said: list[EventDict]
) -> None:
    settings = {
        "listeners": "SOON://127.0.0.1:0,OVER://127.0.0.1:0,FAR://127.0.0.1:0",
        "listener.security.protocol.map": "SOON:SSL,OVER:SSL,FAR:SSL",
    }
    for name, days in (("soon", 29), ("over", -1), ("far", 31)):
        file = authority.server(name, valid=(-9, days)).file
        settings[f"listener.name.{name}.ssl.keystore.location"] = str(file)

    def told() -> list[tuple[object, ...]]:
        events = {"certificate expires", "certificate has expired"}
        found = (line for line in said if line["event"] in events)
        return [(line["listener"], line["log_level"], line.get("days_left")) for line in found]

    with serving(tmp_path, settings) as served:
        assert told() == [("SOON", "warning", 28), ("OVER", "error", None)]
        refresh(served)
        assert len(told()) == 2, "not more than once a day"
        assert versions(served.on("SOON"), trusting(authority)) == "none"
        # As with Apache Kafka, each client decides whether it accepts an expired certificate.
        assert is_refused(served.on("OVER"), trusting(authority))
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        assert versions(served.on("OVER"), careless) == "none"


def test_broker_without_usable_certificate_does_not_start(
    tmp_path: Path, authority: Authority
) -> None:
    with pytest.raises(ConfigError, match=r"ssl\.keystore\.location: .* needs a certificate"):
        Broker(tmp_path, config=LISTEN)
    with (
        pytest.raises(BrokerError, match="it can't be read: No such file"),
        serving(tmp_path, {"ssl.keystore.location": str(tmp_path / "none")}),
    ):
        pytest.fail("it serves")
    with serving(tmp_path, authority.server().keystore) as served:
        assert versions(served.bootstrap, trusting(authority)) == "none"


def altered(client: Cluster, broker: str, *changes: tuple[str, str | None]) -> dict[str, Any]:
    """Set keys of a broker, or delete them (None); return the row of the response."""
    entries = [
        {"name": name, "config_operation": 1 if value is None else 0, "value": value}
        for name, value in changes
    ]
    answer = client.call(
        "incremental_alter_configs",
        1,
        resources=[{"resource_type": 4, "resource_name": broker, "configs": entries}],
    )
    (found,) = answer["responses"]
    assert isinstance(found, dict)
    return found


def test_certificate_is_renewed_by_incremental_alter_configs(
    tmp_path: Path, authority: Authority
) -> None:
    """testServerKeystoreDynamicUpdate: an unusable keystore is refused before it is stored."""
    server = authority.server("asked")
    key = "listener.name.ssl.ssl.keystore.location"
    settings = {key: str(server.file)}
    with (
        serving(tmp_path, settings) as served,
        Cluster(served.bootstrap, tls=trusting(authority)) as client,
    ):
        first = shown_to(served, authority)
        fresh = server.file.with_name("fresh.pem")
        other = authority.server("of another name").file
        fewer = authority.server("asked", hosts=["localhost"]).file.rename(tmp_path / "fewer.pem")
        replace(server.file, authority.server("asked").file.read_bytes())
        for value, reason in (
            (str(fresh), "it can't be read: No such file or directory"),
            (str(tmp_path), "it can't be read: Is a directory"),
            (str(other), "Keystore DistinguishedName does not match"),
            (str(fewer), "Keystore SubjectAltNames do not match"),
        ):
            answer = altered(client, "1", (key, value))
            assert answer["error_code"] == "invalid_request"
            assert reason in answer["error_message"]
        answer = altered(client, "1", (key.removeprefix("listener.name.ssl."), str(fresh)))
        assert answer["error_code"] == "invalid_request"
        assert "only per-listener using the listener prefix" in answer["error_message"]
        answer = altered(client, "1", ("listener.name.ssl.ssl.client.auth", "none"))
        assert "Cannot update these configs dynamically" in answer["error_message"]
        answer = altered(client, "", (key, str(server.file)))
        assert "Cannot update these configs at default cluster level" in answer["error_message"]
        for_all = ("listener.name.ssl.max.connections", "1000")
        assert altered(client, "", for_all)["error_code"] == "none"
        # Setting the same value again reloads the file.
        assert altered(client, "1", (key, str(server.file)))["error_code"] == "none"
        until(lambda: shown_to(served, authority) != first, "the renewed one")
        second = shown_to(served, authority)
        authority.server("asked").write(fresh)
        assert altered(client, "1", (key, str(fresh)))["error_code"] == "none"
        until(lambda: shown_to(served, authority) != second, "that of another file")
        third = shown_to(served, authority)
        inline = authority.server("asked")
        secret = ("listener.name.ssl.ssl.keystore.key", inline.key)
        chain = ("listener.name.ssl.ssl.keystore.certificate.chain", inline.chain)
        answer = altered(client, "1", secret, chain)
        assert "Both SSL key store location and" in answer["error_message"]
        assert "PRIVATE KEY" not in answer["error_message"]
        assert shown_to(served, authority) == third


def test_unusable_stored_config_does_not_prevent_certificate_renewal(
    tmp_path: Path, authority: Authority
) -> None:
    """Apache Kafka's controller stores any key with any value, which brokers then replay."""
    server = authority.server("asked")
    key = "listener.name.ssl.ssl.keystore.location"
    kept = {"confluent.unknown": "1", "log.cleaner.threads": "many"}
    with (
        serving(tmp_path, {key: str(server.file)}) as served,
        Cluster(served.bootstrap, tls=trusting(authority)) as client,
    ):
        before = shown_to(served, authority)
        served.look(lambda broker: set_broker_configs(broker.services.metadata, "1", kept))
        fresh = server.file.with_name("fresh.pem")
        authority.server("asked").write(fresh)
        assert altered(client, "1", (key, str(fresh)))["error_code"] == "none"
        until(lambda: shown_to(served, authority) != before, "the certificate of the fresh file")
        answer = altered(client, "1", ("listener.name.ssl.no.such.key", "1"))
        assert answer["error_code"] == "invalid_config"


def test_keystore_path_of_another_broker_is_not_checked_locally(
    tmp_path: Path, authority: Authority
) -> None:
    key = "listener.name.ssl.ssl.keystore.location"
    other = RegisterBrokerRecord(2, UUID(int=2), 7, (), ())
    with (
        serving(tmp_path, authority.server().keystore) as served,
        Cluster(served.bootstrap, tls=trusting(authority)) as client,
    ):
        served.look(
            lambda broker: decide(
                broker.services.metadata, lambda _: ControllerResult(None, (other,))
            )
        )
        assert altered(client, "2", (key, "/on/its/host.pem"))["error_code"] == "none"
        assert altered(client, "1", (key, "/on/its/host.pem"))["error_code"] == "invalid_request"


def test_alter_configs_validates_certificates_too(tmp_path: Path, authority: Authority) -> None:
    key = "listener.name.ssl.ssl.keystore.location"
    first, second = authority.server("one"), authority.server("two")
    same = authority.server("renewed", subject_name=subject("one"))

    def replaced(client: Cluster, file: Path) -> tuple[str, str]:
        entries = [{"name": key, "value": str(file)}]
        resource = {"resource_type": 4, "resource_name": "1", "configs": entries}
        (found,) = client.call("alter_configs", 1, resources=[resource])["responses"]
        return found["error_code"], found["error_message"] or ""

    with (
        serving(tmp_path, {key: str(first.file)}) as served,
        Cluster(served.bootstrap, tls=trusting(authority)) as client,
    ):
        before = shown_to(served, authority)
        code, message = replaced(client, second.file)
        assert code == "invalid_request"
        assert "DistinguishedName does not match" in message
        assert shown_to(served, authority) == before
        assert replaced(client, same.file)[0] == "none"
        until(lambda: shown_to(served, authority) != before, "the renewed one")
    with serving(tmp_path, {key: str(first.file)}) as served:
        assert shown_to(served, authority) != before, "what was set holds after a start"


def test_ipv4_and_ipv6_listeners_may_share_one_port(tmp_path: Path, authority: Authority) -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
    settings = {
        "listeners": f"SSL://127.0.0.1:{port},PLAINTEXT://[::1]:{port}",
        **authority.server().keystore,
    }
    with serving(tmp_path, settings) as served:
        assert served.on("SSL") == f"127.0.0.1:{port}"
        assert versions(served.on("SSL"), trusting(authority)) == "none"
        assert versions(f"::1:{port}", None) == "none"
