"""Logins over real connections: frames, real clients, delays, limits, re-authentication."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.security.logins import Logins
from fencepost.protocol.scram import SCRAM_SHA_256
from tests.support.certificates import Authority
from tests.support.clock import ManualClock
from tests.support.daemon import ROOT, Daemon
from tests.support.raw import ConnectionLostError, RawClient
from tests.support.waits import until
from tests.unit.coordinator.logging_in import ScramClient

LISTENERS = "SASL_PLAINTEXT://127.0.0.1:0,PLAINTEXT://127.0.0.1:0"
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
CONFIG = {
    "listeners": LISTENERS,
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{MODULE} required user_bob="bobs";',
    "connection.failed.authentication.delay.ms": "0",
}
USERS = ["SCRAM-SHA-256=[name=alice,password=right]", "SCRAM-SHA-512=[name=alice,password=right]"]
VERSIONS = {"client_software_name": "x", "client_software_version": "1"}


class Served:
    """A broker with a listener that requires a login and a listener without logins."""

    def __init__(self, broker: Broker) -> None:
        self.server = broker.server
        self.bootstrap = broker.bootstrap
        host, port = self.server.addresses["PLAINTEXT"]
        self.open = f"{host}:{port}"

    @property
    def logins(self) -> Logins:
        found = self.server.logins
        assert found is not None
        return found


@contextmanager
def serving(home: Path, clock: ManualClock | None = None, **config: str) -> Iterator[Served]:
    settings = {**CONFIG, **{name.replace("__", "."): value for name, value in config.items()}}
    broker = Broker(home, config=settings, add_scram=USERS, clock=clock)
    with BrokerThread(lambda: broker):
        yield Served(broker)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("sasl")) as made:
        yield made


def librdkafka(bootstrap: str, mechanism: str, user: str, password: str) -> dict[str, object]:
    return {
        "bootstrap.servers": bootstrap,
        "security.protocol": "sasl_plaintext",
        "sasl.mechanisms": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "log_level": 0,
    }


def log_in(
    client: RawClient, user: str = "alice", password: str = "right", version: int = 2
) -> dict[str, object]:
    """Log in by SCRAM-SHA-256 and return the last response."""
    told = client.call("sasl_handshake", 1, mechanism="SCRAM-SHA-256")
    assert told["error_code"] == "none"
    return scram_tokens(client, user, password, version)


def scram_tokens(client: RawClient, user: str, password: str, version: int) -> dict[str, object]:
    scram_client = ScramClient(user, password, SCRAM_SHA_256)
    token = scram_client.first.encode()
    told = client.call("sasl_authenticate", version, auth_bytes=token)
    assert told["error_code"] == "none"
    final = scram_client.final(told["auth_bytes"])
    return dict(client.call("sasl_authenticate", version, auth_bytes=final))


def is_closed(client: RawClient) -> bool:
    with pytest.raises(ConnectionLostError):
        client.receive_frame()
    return True


def is_closed_after_answer(client: RawClient) -> bool:
    while client._socket.recv(4096):
        pass
    return True


# --- real clients ---


@pytest.mark.parametrize(
    ("mechanism", "user", "password"),
    [
        ("PLAIN", "alice", "right"),
        ("PLAIN", "bob", "bobs"),
        ("SCRAM-SHA-256", "alice", "right"),
        ("SCRAM-SHA-512", "alice", "right"),
    ],
)
def test_authenticated_client_produces_and_consumes(
    served: Served, mechanism: str, user: str, password: str
) -> None:
    login = librdkafka(served.bootstrap, mechanism, user, password)
    topic = f"{mechanism}-{user}"
    producer = Producer(login)
    producer.produce(topic, b"value")
    assert producer.flush(30) == 0
    consumer = Consumer({**login, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    message = until(lambda: consumer.poll(0.5), "a record")
    assert message.value() == b"value"
    consumer.close()


@pytest.mark.parametrize(
    ("mechanism", "user"),
    [("PLAIN", "alice"), ("PLAIN", "nobody"), ("SCRAM-SHA-256", "alice"), ("SCRAM-SHA-512", "x")],
)
def test_client_with_wrong_credentials_gets_an_authentication_error(
    served: Served, mechanism: str, user: str
) -> None:
    heard: list[KafkaError] = []
    login = librdkafka(served.bootstrap, mechanism, user, "wrong")
    client = AdminClient({**login, "error_cb": heard.append})

    def refused() -> bool:
        client.poll(0.1)
        return any(error.code() == KafkaError._AUTHENTICATION for error in heard)

    until(refused, "the error of a failed login")


def test_user_created_by_an_admin_client_logs_in_until_it_is_deleted(served: Served) -> None:
    admin = AdminClient(librdkafka(served.bootstrap, "PLAIN", "alice", "right"))
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
    name = "dan,=\N{LATIN SMALL LETTER E}"
    made = admin.alter_user_scram_credentials([UserScramCredentialUpsertion(name, info, b"pw")])
    assert made[name].result(30) is None
    found = admin.describe_user_scram_credentials([name])[name].result(30)
    (kept,) = found.scram_credential_infos
    assert (kept.mechanism, kept.iterations) == (ScramMechanism.SCRAM_SHA_512, 8192)
    with RawClient(served.bootstrap) as open_one:
        open_one.call("sasl_handshake", 1, mechanism="PLAIN")
        token = f"\0{name}\0pw".encode()
        assert open_one.call("sasl_authenticate", 1, auth_bytes=token)["error_code"] == "none"
        gone = UserScramCredentialDeletion(name, ScramMechanism.SCRAM_SHA_512)
        assert admin.alter_user_scram_credentials([gone])[name].result(30) is None
        assert open_one.call("metadata", 1, topics=[])["brokers"], "an open connection lives on"
    with pytest.raises(KafkaException):
        admin.describe_user_scram_credentials([name])[name].result(30)
    with RawClient(served.bootstrap) as refused:
        refused.call("sasl_handshake", 1, mechanism="PLAIN")
        told = refused.call("sasl_authenticate", 1, auth_bytes=token)
        assert told["error_code"] == "sasl_authentication_failed"


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("client_auth", ["none", "required"])
def test_sasl_ssl_login_uses_the_user_as_the_principal(
    tmp_path: Path, mechanism: str, client_auth: str
) -> None:
    """The principal is the user that logged in, not the certificate's subject."""
    authority = Authority(tmp_path / "ca")
    settings = {
        **CONFIG,
        "listeners": "SASL_SSL://127.0.0.1:0",
        "ssl.keystore.location": str(authority.issue("broker")),
        "ssl.truststore.location": str(authority.truststore),
        "listener.name.sasl_ssl.ssl.client.auth": client_auth,
    }
    broker = Broker(tmp_path / "data", config=settings, add_scram=USERS)
    with BrokerThread(lambda: broker):
        login = librdkafka(broker.bootstrap, mechanism, "alice", "right")
        pem = str(authority.issue("somebody", is_client=True))
        login |= {
            "security.protocol": "sasl_ssl",
            "ssl.ca.location": str(authority.truststore),
            "ssl.certificate.location": pem,
            "ssl.key.location": pem,
        }
        client = AdminClient(login)
        assert client.list_topics(timeout=30).brokers

        def users() -> set[str]:
            return {
                str(connection.session.principal) for connection in list(broker.server.connections)
            }

        until(lambda: users() == {"User:alice"}, "a connection of the user's")


# --- frames ---


@pytest.mark.parametrize("version", [0, 1, 2])
def test_scram_login_in_every_version_sets_the_session_principal(
    served: Served, version: int
) -> None:
    with RawClient(served.bootstrap) as client:
        assert client.call("api_versions", 3, **VERSIONS)["error_code"] == "none"
        assert log_in(client, version=version)["error_code"] == "none"
        assert client.call("metadata", 1, topics=[])["brokers"]
        session = next(
            connection.session
            for connection in served.server.connections
            if connection.peer_port == client._socket.getsockname()[1]
        )
        assert str(session.principal) == "User:alice"
        assert (session.mechanism, session.expires_at_ms) == ("SCRAM-SHA-256", None)


def test_cluster_and_node_id_are_checked_only_after_authentication(served: Served) -> None:
    meant = {"cluster_id": "another", "node_id": 99}
    with RawClient(served.bootstrap) as client:
        assert client.call("api_versions", 5, **VERSIONS, **meant)["error_code"] == "none"
        assert log_in(client, version=2)["error_code"] == "none"
        answer = client.call("api_versions", 5, **VERSIONS, **meant)
        assert answer["error_code"] == "rebootstrap_required"


def test_invalid_cluster_and_node_ids_are_refused_before_authentication(served: Served) -> None:
    with RawClient(served.bootstrap) as client:
        answer = client.call("api_versions", 5, **VERSIONS, node_id=1)
        assert (answer["error_code"], answer["api_keys"]) == ("invalid_request", [])


def test_raw_sasl_tokens_after_handshake_version_0_are_accepted(served: Served) -> None:
    with RawClient(served.bootstrap) as client:
        assert client.call("sasl_handshake", 0, mechanism="PLAIN")["error_code"] == "none"
        token = b"\0alice\0right"
        client.send_bytes(struct.pack(">i", len(token)) + token)
        assert client.receive_frame() == b""
        assert client.call("metadata", 1, topics=[])["brokers"]


def test_pipelined_login_requests_are_answered_in_order(served: Served) -> None:
    with RawClient(served.bootstrap) as client:
        client.send("api_versions", 0)
        client.send("sasl_handshake", 1, mechanism="PLAIN")
        client.send("sasl_authenticate", 1, auth_bytes=b"\0alice\0right")
        client.send("metadata", 1, topics=[])
        told = [client.receive() for _ in range(4)]
        assert [answer.get("error_code") for answer in told] == ["none", "none", "none", None]


def test_login_sent_byte_by_byte_succeeds(served: Served) -> None:
    whole: list[bytes] = []

    class Noted(RawClient):
        def send_bytes(self, data: bytes) -> None:
            whole.append(data)

    noted = Noted(served.bootstrap)
    noted.send("sasl_handshake", 1, mechanism="PLAIN")
    noted.send("sasl_authenticate", 1, auth_bytes=b"\0alice\0right")
    for byte in b"".join(whole):
        noted._socket.sendall(bytes([byte]))
    assert [noted.receive()["error_code"] for _ in range(2)] == ["none", "none"]
    noted.close()


def test_failed_login_returns_an_error_and_closes_the_connection(served: Served) -> None:
    with RawClient(served.bootstrap) as client:
        told = log_in(client, password="wrong")
        assert told["error_code"] == "sasl_authentication_failed"
        assert "invalid credentials with SASL mechanism SCRAM-SHA-256" in str(told["error_message"])
        assert is_closed(client)


def test_request_before_authentication_closes_the_connection(served: Served) -> None:
    for body in ({"topics": []}, {"topics": None}):
        with RawClient(served.bootstrap) as client:
            client.send("metadata", 1, **body)
            assert is_closed(client)


@pytest.mark.parametrize("version", [0, 1])
def test_sasl_request_on_a_plaintext_listener_is_an_illegal_sasl_state(
    served: Served, version: int
) -> None:
    """The connection stays open after ILLEGAL_SASL_STATE."""
    with RawClient(served.open) as client:
        told = client.call("sasl_handshake", version, mechanism="PLAIN")
        assert told == {"error_code": "illegal_sasl_state", "mechanisms": []}
        told = client.call("sasl_authenticate", version, auth_bytes=b"\0alice\0right")
        assert told["error_code"] == "illegal_sasl_state"
        assert client.call("metadata", 1, topics=[])["brokers"]


def test_second_login_without_session_lifetime_is_an_illegal_sasl_state(served: Served) -> None:
    with RawClient(served.bootstrap) as client:
        log_in(client)
        told = client.call("sasl_handshake", 1, mechanism="PLAIN")
        assert told["error_code"] == "illegal_sasl_state"
        assert client.call("metadata", 1, topics=[])["brokers"]


# --- limits ---


@pytest.mark.parametrize("size", [65_537, 524_289, 104_857_600, 2**31 - 1, -1])
def test_oversized_frame_before_authentication_closes_the_connection(
    served: Served, size: int
) -> None:
    """The broker closes the connection without reading the frame."""
    with RawClient(served.bootstrap) as client:
        client.send_bytes(struct.pack(">i", size))
        assert is_closed(client)


def test_frame_of_exactly_max_receive_size_is_read_one_byte_more_is_not(tmp_path: Path) -> None:
    key = "sasl.server.max.receive.size"
    with serving(tmp_path, **{key: "4096"}) as served:
        for fill, comes in ((4096, True), (4097, False)):
            with RawClient(served.bootstrap) as client:
                client.call("sasl_handshake", 1, mechanism="PLAIN")
                head = struct.pack(">hhihi", 36, 1, 7, -1, fill - 14)
                frame = head + b"x" * (fill - len(head))
                client.send_bytes(struct.pack(">i", len(frame)) + frame)
                if comes:
                    assert b"expected 3 tokens" in client.receive_frame()
                assert is_closed(client)


def test_receive_buffer_of_an_unauthenticated_client_stays_small(served: Served) -> None:
    """The receive buffer grows only with the received bytes."""
    with RawClient(served.bootstrap) as client:
        client.call("sasl_handshake", 1, mechanism="PLAIN")
        client.send_bytes(struct.pack(">i", 65_536) + b"x" * 65_000)
        port = client._socket.getsockname()[1]
        connection = next(
            accepted for accepted in served.server.connections if accepted.peer_port == port
        )
        until(lambda: connection._frames.pending == 65_004, "the bytes")
        assert len(connection._frames._buffer) <= 131_072


def test_client_that_does_not_authenticate_in_time_is_disconnected(tmp_path: Path) -> None:
    key = "fencepost.authentication.timeout.ms"
    with serving(tmp_path, **{key: "50"}) as served:
        with RawClient(served.bootstrap) as silent, RawClient(served.bootstrap) as slow:
            slow.call("sasl_handshake", 1, mechanism="PLAIN")
            assert is_closed(silent)
            assert is_closed(slow)
        assert served.logins.failed == {
            ("SASL_PLAINTEXT", ""): 1,
            ("SASL_PLAINTEXT", "PLAIN"): 1,
        }
        with RawClient(served.bootstrap) as client:
            log_in(client)
            until(lambda: served.logins.trying == 0, "the login's end")


def test_unauthenticated_connections_per_address_are_limited(tmp_path: Path) -> None:
    key = "fencepost.unauthenticated.connections.per.ip"
    with serving(tmp_path, **{key: "3"}) as served, RawClient(served.bootstrap) as friend:
        log_in(friend)
        waiting = [RawClient(served.bootstrap) for _ in range(3)]
        until(lambda: served.logins.trying == 3, "three clients")
        with RawClient(served.bootstrap) as refused:
            assert is_closed(refused)
        assert served.logins.refused == 1
        with RawClient(served.open) as other:
            assert other.call("metadata", 1, topics=[])["brokers"]
        assert friend.call("metadata", 1, topics=[])["brokers"]
        for silent in waiting:
            silent.close()
        until(lambda: served.logins.trying == 0, "their end")
        with RawClient(served.bootstrap) as client:
            assert log_in(client)["error_code"] == "none"


# --- failures are slow (SaslAuthenticatorFailureDelayTest) ---


@pytest.mark.parametrize(
    "fail",
    [
        lambda client: client.send("sasl_handshake", 1, mechanism="NONE"),
        lambda client: client.send("metadata", 1, topics=[]),
        lambda client: client.send_bytes(struct.pack(">i", -1)),
    ],
)
def test_failed_authentication_response_is_delayed(
    tmp_path: Path, fail: Callable[[RawClient], None]
) -> None:
    """The broker delays the first byte of the response or, without a response, the close."""
    key = "connection.failed.authentication.delay.ms"
    with serving(tmp_path, **{key: "300"}) as served, RawClient(served.bootstrap) as client:
        began = time.monotonic()
        fail(client)
        heard = client._socket.recv(1)
        assert time.monotonic() - began >= 0.29
        assert heard == b"" or is_closed_after_answer(client)


def test_client_that_disconnects_during_the_failure_delay_is_removed(tmp_path: Path) -> None:
    key = "connection.failed.authentication.delay.ms"
    with serving(tmp_path, **{key: "200"}) as served:
        with RawClient(served.bootstrap) as client:
            client.send("sasl_handshake", 1, mechanism="NONE")
            until(lambda: served.logins.failed.total() == 1, "the failure")
        server = served.server
        until(lambda: not server.connections and not served.logins.trying, "no connection")


# --- re-authentication (KIP-368) ---


def test_request_after_the_session_expired_closes_the_connection(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with serving(tmp_path, clock, **{"connections.max.reauth.ms": "60000"}) as served:
        with RawClient(served.bootstrap) as client:
            told = log_in(client)
            assert told["session_lifetime"] == 60_000
            clock.advance(60_000)
            assert client.call("metadata", 1, topics=[])["brokers"]
            clock.advance(1)
            client.send("metadata", 1, topics=[])
            assert is_closed(client)
        assert served.logins.expired == 1


def test_wall_clock_jump_does_not_expire_a_session(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    with (
        serving(tmp_path, clock, **{"connections.max.reauth.ms": "60000"}) as served,
        RawClient(served.bootstrap) as client,
    ):
        log_in(client)
        clock.jump(3_600_000)
        assert client.call("metadata", 1, topics=[])["brokers"]


def test_reauthentication_renews_the_session_at_most_once_per_second(tmp_path: Path) -> None:
    """A client may log in again after its session has expired, but only once per second."""
    clock = ManualClock(1_700_000_000_000)
    with serving(tmp_path, clock, **{"connections.max.reauth.ms": "60000"}) as served:
        with RawClient(served.bootstrap) as client:
            log_in(client)
            for wait_ms in (10, 1_000, 70_000):
                clock.advance(wait_ms)
                assert log_in(client)["session_lifetime"] == 60_000
                assert client.call("metadata", 1, topics=[])["brokers"]
            clock.advance(999)
            told = client.call("sasl_handshake", 1, mechanism="SCRAM-SHA-256")
            assert told["error_code"] == "illegal_sasl_state"
            assert client.call("metadata", 1, topics=[])["brokers"]
            clock.advance(60_000)
            assert log_in(client)["error_code"] == "none"
        assert served.logins.succeeded["SASL_PLAINTEXT", "SCRAM-SHA-256"] == 5
        assert served.logins.expired == 0


def test_deleted_user_stays_authenticated_until_reauthentication(tmp_path: Path) -> None:
    """This is as in Apache Kafka. Changed ACLs, in contrast, take effect at once."""
    with (
        serving(tmp_path, **{"connections.max.reauth.ms": "60000"}) as served,
        RawClient(served.bootstrap) as client,
        RawClient(served.open) as operator,
    ):
        log_in(client)
        gone = [{"name": "alice", "mechanism": SCRAM_SHA_256.number}]
        operator.call("alter_user_scram_credentials", 0, deletions=gone, upsertions=[])
        assert client.call("metadata", 1, topics=[])["brokers"]
        with RawClient(served.bootstrap) as newcomer:
            assert log_in(newcomer)["error_code"] == "sasl_authentication_failed"
        assert log_in(client)["error_code"] == "sasl_authentication_failed"
        assert is_closed(client)


@pytest.mark.parametrize("version", [0, 1])
def test_reauthentication_with_another_user_or_mechanism_is_refused(
    tmp_path: Path, version: int
) -> None:
    with serving(tmp_path, **{"connections.max.reauth.ms": "60000"}) as served:
        with RawClient(served.bootstrap) as client:
            log_in(client)
            assert client.call("sasl_handshake", 1, mechanism="PLAIN")["error_code"] == "none"
            client.send("sasl_authenticate", version, auth_bytes=b"\0alice\0right")
            assert is_closed(client)
        with RawClient(served.bootstrap) as client:
            client.call("sasl_handshake", 1, mechanism="PLAIN")
            client.call("sasl_authenticate", version, auth_bytes=b"\0alice\0right")
            client.call("sasl_handshake", 1, mechanism="PLAIN")
            told = client.call("sasl_authenticate", version, auth_bytes=b"\0bob\0bobs")
            assert told["error_code"] == "sasl_authentication_failed"
            assert told["error_message"].startswith("Cannot change principals")
            assert is_closed(client)


def test_requests_before_a_reauthentication_are_answered_first(tmp_path: Path) -> None:
    """testServerSidePendingSendDuringReauthentication: a handshake follows pipelined requests."""
    with (
        serving(tmp_path, **{"connections.max.reauth.ms": "60000"}) as served,
        RawClient(served.bootstrap) as client,
    ):
        log_in(client)
        for _ in range(20):
            client.send("metadata", 1, topics=[])
        client.send("sasl_handshake", 1, mechanism="SCRAM-SHA-256")
        for _ in range(20):
            assert client.receive()["brokers"]
        assert client.receive()["error_code"] == "none"
        assert scram_tokens(client, "alice", "right", 2)["error_code"] == "none"


@pytest.mark.slow
def test_librdkafka_client_reauthenticates_repeatedly(tmp_path: Path) -> None:
    with serving(tmp_path, **{"connections.max.reauth.ms": "1500"}) as served:
        producer = Producer(librdkafka(served.bootstrap, "SCRAM-SHA-512", "alice", "right"))
        name = "SASL_PLAINTEXT", "SCRAM-SHA-512"

        def went_on() -> bool:
            producer.produce("t", b"x")
            assert producer.flush(10) == 0
            return served.logins.succeeded[name] >= 4

        until(went_on, "logins that begin anew")
        assert served.logins.expired == 0


# --- floods ---


def test_flood_of_failed_logins_does_not_affect_other_clients(tmp_path: Path) -> None:
    """Logged-in clients are served meanwhile, and new logins succeed."""
    with serving(tmp_path) as served, RawClient(served.bootstrap) as friend:
        log_in(friend)
        rounds = itertools.count()
        is_over = threading.Event()

        def attack() -> None:
            while not is_over.is_set() and next(rounds) < 600:
                with RawClient(served.bootstrap) as client:
                    client.send("sasl_handshake", 1, mechanism="PLAIN")
                    client.send("sasl_authenticate", 1, auth_bytes=b"\0alice\0wrong")
                    client.receive()
                    client.receive()

        threads = [threading.Thread(target=attack) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert friend.call("metadata", 1, topics=[])["brokers"]
            with RawClient(served.bootstrap) as client:
                assert log_in(client)["error_code"] == "none"
        is_over.set()
        for thread in threads:
            thread.join(60)
        until(lambda: served.logins.trying == 0, "their end")
        assert served.logins.failed["SASL_PLAINTEXT", "PLAIN"] > 0


# --- the command ---


def test_serve_adds_scram_users_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("# of the file\nSCRAM-SHA-256=[name=alice,password=right]\n")
    port = "SASL_PLAINTEXT://127.0.0.1:0"
    daemon = Daemon(
        tmp_path / "data",
        {"listeners": port, "sasl.enabled.mechanisms": "SCRAM-SHA-256"},
        command=(sys.executable, "-m", "fencepost", "serve", "--add-scram", f"@{file}"),
        env={"FENCEPOST_ADD_SCRAM": "SCRAM-SHA-256=[name=eve,password=hers]"},
    )
    daemon.start()
    for user, password in (("alice", "right"), ("eve", "hers")):
        with RawClient(daemon.bootstrap) as client:
            assert log_in(client, user, password)["error_code"] == "none"
    daemon.kill()


def test_serve_with_an_invalid_scram_user_reports_it_without_the_password(tmp_path: Path) -> None:
    wrong = "SCRAM-SHA-256=[name=alice,password=geheim,iterations=1]"
    words = ["serve", "--data-dir", str(tmp_path), "--add-scram", wrong]
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "iterations" in done.stderr
    assert "geheim" not in done.stderr
