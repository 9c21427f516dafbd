"""Users, PLAIN, the configuration of logins, and log lines about logins."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.cluster.record_codec import decode, encode
from fencepost.cluster.records import UserScramCredentialRecord
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listeners import client_listeners, sends_plaintext_passwords
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.metadata.server_secret import SECRET_FILE
from fencepost.coordinator.runtime.rate_limited_log import LINES_PER_SECOND
from fencepost.coordinator.security import password_checks
from fencepost.coordinator.security.added_users import (
    AddedUserError,
    parse_added_user,
)
from fencepost.coordinator.security.logins import (
    ListenerLogins,
    LoginFailure,
    Logins,
    check_logins,
    configured_passwords,
    listener_logins,
)
from fencepost.coordinator.security.mechanism import AuthenticationFailed, TooManyLoginsError
from fencepost.coordinator.security.password_checks import PasswordChecks
from fencepost.coordinator.security.plain_login import PlainExchange, PlainLogin
from fencepost.coordinator.security.principal import USER, Principal
from fencepost.coordinator.security.scram_login import MAX_TOKEN_BYTES
from fencepost.coordinator.security.users import new_salt
from fencepost.logcore.errors import CorruptRecordError
from fencepost.protocol.scram import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ScramMechanism,
    salted_password,
    stored_key,
)
from tests.support.clock import ManualClock
from tests.unit.coordinator.logging_in import give, users_in, users_of
from tests.unit.coordinator.services.coordinators import storage

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"


# --- PLAIN (PlainSaslServerTest) ---


class Plain:
    """PLAIN with two SCRAM users and two users from the configuration."""

    def __init__(self, directory: Path) -> None:
        self.checks = PasswordChecks()
        users = users_in(directory, alice="right")
        give(users, "bob", "right", SCRAM_SHA_512, iterations=8192)
        self.login = PlainLogin(users, self.checks, {"carol": "of the file", "alice": "second"})

    async def tell(self, token: bytes) -> PlainExchange:
        exchange = self.login.begin()
        for wait in exchange.step(token):
            if wait is not None:
                await asyncio.wait({wait})
        return exchange


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Plain]:
    made = Plain(tmp_path)
    yield made
    made.checks.close()


@pytest.mark.parametrize(
    ("token", "user"),
    [
        (b"\0alice\0right", "alice"),
        (b"alice\0alice\0right", "alice"),
        (b"\0alice\0second", "alice"),
        (b"\0bob\0right", "bob"),
        (b"\0carol\0of the file", "carol"),
    ],
)
async def test_plain_login_with_right_password_authenticates_user(
    plain: Plain, token: bytes, user: str
) -> None:
    exchange = await plain.tell(token)
    assert exchange.identity is not None
    assert exchange.identity.principal == Principal(USER, user)


WRONG = "Authentication failed: Invalid username or password"
OTHER = (
    "Authentication failed: Client requested an authorization id that is different from username"
)


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (b"\0alice\0wrong", WRONG),
        (b"\0carol\0wrong", WRONG),
        (b"\0carol\0right", WRONG),
        (b"\0nobody\0right", WRONG),
        (b"bob\0alice\0right", OTHER),
        (b"bob\0alice\0wrong", WRONG),
        (b"\0\0right", "Authentication failed: username not specified"),
        (b"\0alice\0", "Authentication failed: password not specified"),
        (b"alice\0right", "Invalid SASL/PLAIN response: expected 3 tokens, got 2"),
        (b"", "Invalid SASL/PLAIN response: expected 3 tokens, got 1"),
        (b"\0alice\0right\0", "Invalid SASL/PLAIN response: expected 3 tokens, got 4"),
        (b"\0a\0b\0c\0d\0e", "Invalid SASL/PLAIN response: expected 3 tokens, got 4"),
        (b"\0\xff\0\xff", WRONG),
    ],
)
async def test_failed_plain_login_returns_javas_message_without_secrets(
    plain: Plain, token: bytes, told: str
) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        await plain.tell(token)
    assert caught.value.client_message == told
    for secret in ("right", "wrong"):
        assert secret not in str(caught.value).replace("is wrong", "")


async def test_plain_login_costs_one_password_check_for_any_user_name(
    plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Response times do not reveal which users exist, and which have SCRAM credentials."""
    asked: list[tuple[str, int]] = []

    def counted(mechanism: ScramMechanism, password: str, salt: bytes, iterations: int) -> bytes:
        asked.append((mechanism.name, iterations))
        return salted_password(mechanism, password, salt, iterations)

    monkeypatch.setattr(password_checks, "salted_password", counted)
    for name in ("alice", "bob", "carol", "nobody"):
        with pytest.raises(AuthenticationFailed):
            await plain.tell(f"\0{name}\0no".encode())
    assert len(asked) == 4
    costs = {(name, count) for name, count in asked}
    assert costs <= {("SCRAM-SHA-256", 4096), ("SCRAM-SHA-512", 4096), ("SCRAM-SHA-512", 8192)}


async def test_waiting_password_checks_are_limited_per_host_and_in_total(plain: Plain) -> None:
    """A flood of logins exceeds the limits, while admitted logins complete."""
    credential = plain.login.users.stand_in("x")

    def begin(host: str) -> asyncio.Future[bytes]:
        return plain.checks.begin(credential, "no", host)

    of_one = password_checks.MAX_WAITING_PER_HOST
    waiting = [begin("198.51.100.1") for _ in range(of_one)]
    with pytest.raises(TooManyLoginsError, match="MAX_WAITING_PER_HOST"):
        begin("198.51.100.1")
    waiting += [begin(f"203.0.113.{n}") for n in range(password_checks.MAX_WAITING - of_one)]
    with pytest.raises(TooManyLoginsError, match="MAX_WAITING"):
        begin("192.0.2.1")
    waiting[-1].cancel()
    await asyncio.wait({waiting[0]})
    assert plain.checks.waiting < password_checks.MAX_WAITING
    for future in waiting:
        future.cancel()
    await asyncio.sleep(0)
    assert begin("198.51.100.1").cancel()
    exchange = await plain.tell(b"\0alice\0right")
    assert exchange.identity is not None


async def test_password_check_does_not_block_the_event_loop(plain: Plain) -> None:
    began = plain.checks.begin(plain.login.users.stand_in("x"), "no")
    assert not began.done()
    assert len(await began) in {32, 64}


# --- users ---


def test_scram_credentials_and_stand_ins_survive_restart(tmp_path: Path) -> None:
    first = storage(tmp_path)
    users = users_of(first)
    give(users, "alice", "right", SCRAM_SHA_512)
    stranger = users.stand_in("nobody")
    first.logs.close()
    second = storage(tmp_path)
    users = users_of(second)
    found = users.credential("alice", SCRAM_SHA_512)
    assert found is not None
    salted = salted_password(SCRAM_SHA_512, "right", found.salt, found.iterations)
    assert found.stored_key == stored_key(SCRAM_SHA_512, salted)
    assert users.credential("alice", SCRAM_SHA_256) is None
    assert users.stand_in("nobody") == stranger, "a restart would tell who is there"
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) & 0o077 == 0
    second.logs.close()


def test_scram_credential_is_stored_as_kafkas_record_without_password(tmp_path: Path) -> None:
    users = users_in(tmp_path)
    give(users, "alice", "right", SCRAM_SHA_256)
    ((key, kept),) = users._metadata.image.scram.items()
    assert key == ("alice", 1) == (kept.name, kept.mechanism)
    assert b"right" not in encode(kept)


def test_corrupt_scram_record_error_does_not_reveal_its_content() -> None:
    record = UserScramCredentialRecord("alice", 1, b"salt", b"geheim", b"geheim", 4096)
    for odd in (encode(record)[:2] + b"\x63" + encode(record)[3:], encode(record)[:-1]):
        with pytest.raises(CorruptRecordError) as caught:
            decode(odd)
        assert "geheim" not in str(caught.value)


def test_stand_in_credential_is_indistinguishable_from_a_real_one(tmp_path: Path) -> None:
    """An unknown user gets a constant, equally costly credential that no password matches."""
    users = users_in(tmp_path)
    assert users.stand_in("x", SCRAM_SHA_256).iterations == 4096
    give(users, "alice", "right", SCRAM_SHA_256, iterations=9_000)
    give(users, "bob", "right", SCRAM_SHA_512, iterations=16_384)
    for name in ("x", "y", "z"):
        found = users.stand_in(name, SCRAM_SHA_256)
        assert found.iterations == 9_000
        assert found == users.stand_in(name, SCRAM_SHA_256)
        assert len(found.salt) == len(new_salt()) == 25
        assert len(found.stored_key) == 32
    costs = {users.stand_in(f"user {number}").iterations for number in range(50)}
    assert costs == {9_000, 16_384}
    salts = {users.stand_in(f"user {number}", SCRAM_SHA_256).salt for number in range(50)}
    assert len(salts) == 50


# --- users on the command line (ScramParserTest) ---


@pytest.mark.parametrize(
    ("text", "name", "mechanism", "iterations"),
    [
        ("SCRAM-SHA-256=[name=alice,password=pw]", "alice", SCRAM_SHA_256, 4096),
        (
            ' SCRAM-SHA-512=[name="al ice",password="p=w",iterations=9000] ',
            "al ice",
            SCRAM_SHA_512,
            9000,
        ),
    ],
)
def test_added_scram_user_is_parsed_with_salted_password(
    text: str, name: str, mechanism: ScramMechanism, iterations: int
) -> None:
    found = parse_added_user(text)
    assert (found.name, found.mechanism) == (name, mechanism.number)
    assert found.iterations == iterations
    password = "p=w" if "p=w" in text else "pw"
    salted = salted_password(mechanism, password, found.salt, iterations)
    assert found.salted_password == salted


def test_added_scram_user_with_salted_password_keeps_it() -> None:
    salted = salted_password(SCRAM_SHA_256, "pw", b"salt", 4096)
    text = base64.b64encode(salted).decode()
    found = parse_added_user(f'SCRAM-SHA-256=[name=a,salt="c2FsdA==",saltedpassword="{text}"]')
    assert found.salt == b"salt"
    assert found.salted_password == salted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SCRAM-SHA-256",
        "SCRAM-SHA-1=[name=a,password=geheim]",
        "SCRAM-SHA-256=name=a,password=geheim",
        "SCRAM-SHA-256=[name=a,password=geheim",
        "SCRAM-SHA-256=[password=geheim]",
        "SCRAM-SHA-256=[name=,password=geheim]",
        "SCRAM-SHA-256=[name=a]",
        "SCRAM-SHA-256=[name=a,password=]",
        "SCRAM-SHA-256=[name=a,saltedpassword=Z2VoZWlt]",
        "SCRAM-SHA-256=[name=a,salt=geheim!,password=geheim]",
        "SCRAM-SHA-256=[name=a,password=geheim,iterations=4095]",
        "SCRAM-SHA-256=[name=a,password=geheim,iterations=16385]",
        "SCRAM-SHA-256=[name=a,password=geheim,iterations=many]",
        "SCRAM-SHA-256=[name=a,password=geheim,geheim=1]",
        "SCRAM-SHA-256=[name=a,password=gehe,im]",
    ],
)
def test_malformed_added_scram_user_is_refused_without_revealing_password(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(AddedUserError) as caught:
        parse_added_user(text)
    assert "gehe" not in str(caught.value)
    with pytest.raises(BrokerError, match="--add-scram"):
        Broker(tmp_path, add_scram=[text])


async def test_added_scram_user_does_not_replace_existing_credential(tmp_path: Path) -> None:
    """The password may have been changed since the broker first started."""
    alice = "SCRAM-SHA-256=[name=alice,password=changed]"
    async with Broker(tmp_path, add_scram=[alice]) as broker:
        before = broker.services.users.credential("alice", SCRAM_SHA_256)
    added = ["SCRAM-SHA-256=[name=alice,password=first]", "SCRAM-SHA-256=[name=b,password=first]"]
    async with Broker(tmp_path, add_scram=added) as broker:
        users = broker.services.users
        assert users.credential("alice", SCRAM_SHA_256) == before
        assert users.credential("b", SCRAM_SHA_256) is not None


async def test_metadata_directory_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    for _ in range(2):
        async with Broker(tmp_path, add_scram=["SCRAM-SHA-256=[name=a,password=b]"]):
            directory = tmp_path / "__cluster_metadata-0"
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        directory.chmod(0o755)


# --- configuration ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "GSSAPI"),
        ({"sasl.enabled.mechanisms": "PLAIN,GSSAPI"}, "GSSAPI"),
        ({"listener.name.in.sasl.enabled.mechanisms": "GSSAPI"}, "listener IN"),
        ({"sasl.enabled.mechanisms": "SCRAM-SHA-1"}, "SCRAM-SHA-256"),
        ({"sasl.enabled.mechanisms": ""}, "needs a mechanism"),
    ],
)
def test_unsupported_sasl_mechanism_is_a_config_error(
    settings: Mapping[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_logins(BrokerConfig(settings), "IN")


def test_broker_with_default_mechanism_gssapi_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GSSAPI"):
        Broker(tmp_path, config={"listeners": "SASL_PLAINTEXT://127.0.0.1:0"})


@pytest.mark.parametrize(
    ("host", "protocol", "mechanisms", "tells"),
    [
        ("0.0.0.0", "SASL_PLAINTEXT", "PLAIN", True),
        ("0.0.0.0", "SASL_PLAINTEXT", "SCRAM-SHA-256", False),
        ("0.0.0.0", "SASL_SSL", "PLAIN", False),
        ("127.0.0.1", "SASL_PLAINTEXT", "PLAIN", False),
    ],
)
def test_plain_without_tls_on_public_address_sends_plaintext_passwords(
    host: str, protocol: str, mechanisms: str, *, tells: bool
) -> None:
    settings = {"listeners": f"{protocol}://{host}:0", "sasl.enabled.mechanisms": mechanisms}
    (listener,) = client_listeners(BrokerConfig(settings)).values()
    assert sends_plaintext_passwords(listener) is tells


def test_most_specific_login_setting_takes_precedence(tmp_path: Path) -> None:
    settings = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "connections.max.reauth.ms": "1000",
        "listener.name.in.connections.max.reauth.ms": "2000",
        "listener.name.in.plain.connections.max.reauth.ms": "0",
        "listener.name.in.sasl.server.max.receive.size": "4096",
        "fencepost.authentication.timeout.ms": "7000",
    }
    config, clock = BrokerConfig(settings), ManualClock(0)
    found = listener_logins(config, "IN", users_in(tmp_path), PasswordChecks(), clock)
    assert list(found.mechanisms) == ["PLAIN", "SCRAM-SHA-256"]
    assert found.max_reauth_ms == {"SCRAM-SHA-256": 2000}
    assert (found.max_receive_bytes, found.timeout_ms, found.failure_delay_ms) == (4096, 7000, 100)


def test_jaas_config_of_listener_defines_plain_users() -> None:
    key = "listener.name.in.plain.sasl.jaas.config"
    text = f'{MODULE} required username="ignored" password="x" user_a="1" user_b.c="2 3";'
    assert configured_passwords(BrokerConfig({key: text}), "IN") == {"a": "1", "b.c": "2 3"}
    assert configured_passwords(BrokerConfig({key: text}), "OUT") == {}


@pytest.mark.parametrize(
    "text",
    [
        f'{MODULE} required user_a="geheim"',
        f'{MODULE} required user_="geheim";',
        f'{MODULE} required user_a="";',
        'org.apache.kafka.common.security.scram.ScramLoginModule required user_a="geheim";',
        'com.sun.security.auth.module.JndiLoginModule required user_a="geheim";',
    ],
)
def test_malformed_jaas_config_is_refused_without_revealing_password(text: str) -> None:
    settings = BrokerConfig({"listener.name.in.plain.sasl.jaas.config": text})
    with pytest.raises(ConfigError) as caught:
        configured_passwords(settings, "IN")
    assert "geheim" not in str(caught.value)


# --- log lines for operators ---


def logins(clock: ManualClock, most: int = 2) -> Logins:
    return Logins([ListenerLogins("IN", {})], clock=clock, max_per_ip=most)


def test_log_lines_of_failed_logins_are_rate_limited() -> None:
    clock = ManualClock()
    made = logins(clock)
    with capture_logs() as lines:
        for _ in range(1000):
            made.has_failed(LoginFailure("1.2.3.4:5", "IN", "PLAIN", "the password is wrong", "x"))
        assert len(lines) == LINES_PER_SECOND
        clock.advance(1000)
        made.has_failed(LoginFailure("1.2.3.4:5", "IN", None, "not a Kafka request"))
    assert [line["event"] for line in lines[LINES_PER_SECOND:]] == [
        "more logins failed",
        "login failed",
    ]
    assert lines[LINES_PER_SECOND]["count"] == 1000 - LINES_PER_SECOND
    assert made.failed == {("IN", "PLAIN"): 1000, ("IN", ""): 1}


@pytest.mark.parametrize("name", ["a\nlogin failed user=b", "\x1b[2J", "ü\u2028", "x" * 5000])
def test_user_name_in_login_line_is_escaped_and_truncated(name: str) -> None:
    with capture_logs() as lines:
        logins(ManualClock()).has_failed(LoginFailure("p", "IN", "PLAIN", "cause", name))
    shown = lines[0]["user"]
    assert shown.isprintable()
    assert len(shown) < 500


def test_unauthenticated_connections_per_ip_are_limited() -> None:
    made = logins(ManualClock(), most=2)
    assert [made.enter("a"), made.enter("a"), made.enter("a"), made.enter("b")] == [
        True,
        True,
        False,
        True,
    ]
    made.leave("a")
    assert made.enter("a")
    assert (made.trying, made.refused) == (3, 1)


@pytest.mark.parametrize("more_bytes", [0, 1])
async def test_plain_token_above_the_limit_is_refused(tmp_path: Path, more_bytes: int) -> None:
    checks = PasswordChecks()
    exchange = PlainLogin(users_in(tmp_path), checks, {}).begin()
    token = b"\0alice\0" + b"p" * (MAX_TOKEN_BYTES - len(b"\0alice\0") + more_bytes)
    steps = exchange.step(token)
    if more_bytes:
        with pytest.raises(AuthenticationFailed, match="the limit is"):
            next(steps)
    else:
        assert isinstance(next(steps), asyncio.Future)
    steps.close()
    checks.close()
