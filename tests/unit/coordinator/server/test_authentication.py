"""The authentication of a connection, frame by frame (SaslServerAuthenticatorTest).

`docs/security-tests.md` has the test for each case of Apache Kafka's tests.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.mechanism import Identity, Mechanism
from fencepost.coordinator.security.principal import USER, ClientSession, Principal
from fencepost.coordinator.security.scram_login import OTHER_USER
from fencepost.protocol.scram import SCRAM_SHA_256, SCRAM_SHA_512, ScramMechanism
from tests.support.clock import ManualClock
from tests.support.raw import encode
from tests.unit.coordinator.logging_in import Desk, ScramClient, give, scram_mechanisms, users_in

NAMES = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
BOTH = pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512], ids=NAMES)
USUAL = "Authentication failed during authentication due to invalid credentials with SASL mechanism"


@pytest.fixture
def enabled(tmp_path: Path) -> Mapping[str, Mechanism]:
    return scram_mechanisms(users_in(tmp_path, alice="right", bob="right"))


class TokenExchange:
    """An exchange whose token has a user name and, optionally, the time when the login expires."""

    def __init__(self) -> None:
        self.identity: Identity | None = None

    def step(self, token: bytes) -> Work[bytes]:
        yield from ()
        name, _, ends = token.decode().partition(" ")
        self.identity = Identity(Principal(USER, name), int(ends) if ends else None)
        return b""


class Tokens:
    """A mechanism whose credentials expire."""

    name = "TOKEN"

    def begin(self, host: str = "") -> TokenExchange:
        return TokenExchange()


# --- from the first frame to the login ---


@BOTH
@pytest.mark.parametrize("version", [0, 1, 2])
def test_scram_login_succeeds_with_every_mechanism_and_version(
    enabled: Mapping[str, Mechanism], mechanism: ScramMechanism, version: int
) -> None:
    desk = Desk(enabled)
    assert desk.ask("api_versions", 3, client_software_name="x", client_software_version="1")
    assert desk.handshake(mechanism.name) == {"error_code": "none", "mechanisms": NAMES}
    client = ScramClient("alice", "right", mechanism)
    told = desk.scram(client, version)
    assert told is not None
    assert told["error_code"] == "none"
    assert told["auth_bytes"] == b"v=" + _base64(client.signature)
    assert told.get("session_lifetime", 0) == 0
    result = desk.login.result
    assert result is not None
    assert result.identity == Identity(Principal(USER, "alice"))
    assert (result.mechanism, result.lifetime_ms) == (mechanism.name, None)


def _base64(data: bytes) -> bytes:
    import base64

    return base64.b64encode(data)


@pytest.mark.parametrize("first", [[], ["api_versions"]])
def test_bare_tokens_are_accepted_after_handshake_v0(
    enabled: Mapping[str, Mechanism], first: list[str]
) -> None:
    desk = Desk(enabled)
    for api in first:
        assert desk.ask(api, 0)
    assert desk.handshake("SCRAM-SHA-256", 0)["error_code"] == "none"
    client = ScramClient("alice", "right", SCRAM_SHA_256)
    token = desk.frame(client.first.encode())
    assert token is not None
    assert desk.frame(client.final(token)) == b"v=" + _base64(client.signature)
    assert desk.login.result is not None


def test_failed_bare_token_closes_connection_without_response(
    enabled: Mapping[str, Mechanism],
) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256", 0)
    client = ScramClient("alice", "wrong", SCRAM_SHA_256)
    token = desk.frame(client.first.encode())
    assert token is not None
    assert desk.frame(client.final(token)) is None
    assert desk.ended == "the password is wrong"


@pytest.mark.parametrize("frame", [b"", b"\x60\x00\x01", bytes(10), b"GET / HTTP/1.1\r\n\r\n"])
def test_malformed_first_frame_closes_connection(
    enabled: Mapping[str, Mechanism], frame: bytes
) -> None:
    desk = Desk(enabled)
    assert desk.frame(frame) is None
    assert desk.ended


@pytest.mark.parametrize(
    ("api", "version", "body"),
    [
        ("metadata", 1, {"topics": []}),
        ("list_groups", 0, {}),
        ("sasl_authenticate", 2, {"auth_bytes": b"x"}),
    ],
)
@pytest.mark.parametrize("after_versions", [False, True])
def test_other_request_before_handshake_closes_connection(
    enabled: Mapping[str, Mechanism],
    api: str,
    version: int,
    body: dict[str, object],
    *,
    after_versions: bool,
) -> None:
    desk = Desk(enabled)
    if after_versions:
        desk.ask("api_versions", 0)
    assert desk.ask(api, version, **body) is None
    assert "before the handshake" in desk.ended


def test_second_api_versions_request_closes_connection(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    assert desk.ask("api_versions", 0)
    assert desk.ask("api_versions", 0) is None
    assert desk.ended == "ApiVersions a second time"


def test_api_versions_may_be_repeated_after_an_error(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    unsupported = struct.pack(">hhih", 18, 99, 3, -1)
    for _ in range(3):
        found = desk.frame(unsupported)
        assert found is not None
        assert found[4:6] == struct.pack(">h", 35)
    told = desk.ask("api_versions", 3, client_software_name="a b", client_software_version="1")
    assert told is not None
    assert told["error_code"] == "invalid_request"
    assert desk.ask("api_versions", 4, client_software_name="x", client_software_version="1")
    assert desk.frame(unsupported) is None
    assert desk.ended


def test_handshake_of_unknown_version_closes_connection(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    assert desk.frame(struct.pack(">hhih", 17, 10, 3, -1) + b"\0\0") is None
    assert desk.ended


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", ["PLAIN", "GSSAPI", "scram-sha-256", "", "x" * 1000])
def test_handshake_for_disabled_mechanism_is_answered_and_ends_login(
    enabled: Mapping[str, Mechanism], name: str, version: int
) -> None:
    desk = Desk(enabled)
    told = desk.handshake(name, version)
    assert told == {"error_code": "unsupported_sasl_mechanism", "mechanisms": NAMES}
    assert desk.ended
    assert len(desk.ended) < 200


# --- tokens ---


@pytest.mark.parametrize(
    ("api", "version", "body", "code"),
    [
        ("api_versions", 0, {}, "illegal_sasl_state"),
        ("sasl_handshake", 1, {"mechanism": "SCRAM-SHA-256"}, "illegal_sasl_state"),
        ("list_groups", 0, {}, "illegal_sasl_state"),
        ("metadata", 1, {"topics": []}, None),
    ],
)
def test_other_request_during_login_is_illegal_sasl_state(
    enabled: Mapping[str, Mechanism],
    api: str,
    version: int,
    body: dict[str, object],
    code: str | None,
) -> None:
    """Metadata has no top-level error: Kafka returns an error per topic, this broker closes."""
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    told = desk.ask(api, version, **body)
    assert (told and told["error_code"]) == code
    assert "during the login" in desk.ended


def test_sasl_authenticate_of_unknown_version_closes_connection(
    enabled: Mapping[str, Mechanism],
) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    assert desk.frame(struct.pack(">hhih", 36, 99, 3, -1) + bytes(4)) is None
    assert desk.ended


def test_bare_token_after_handshake_v1_closes_connection(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    assert desk.frame(b"n,,n=alice,r=nonce") is None
    assert desk.ended


def test_truncated_sasl_authenticate_closes_connection(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    whole = encode("sasl_authenticate", 2, 1, "c", {"auth_bytes": b"n,,n=alice,r=nonce"})
    assert desk.frame(whole[:-3]) is None
    assert desk.ended.startswith("not a Kafka request")


# --- SCRAM (ScramSaslServerTest) ---


@BOTH
@pytest.mark.parametrize(
    ("user", "password"),
    [("alice", "wrong"), ("alice", ""), ("nobody", "right"), ("Alice", "right")],
)
def test_unknown_user_and_wrong_password_get_the_same_response(
    enabled: Mapping[str, Mechanism], mechanism: ScramMechanism, user: str, password: str
) -> None:
    desk = Desk(enabled)
    desk.handshake(mechanism.name)
    client = ScramClient(user, password, mechanism)
    first = desk.token(client.first.encode())
    assert first is not None
    assert first["error_code"] == "none"
    told = desk.token(client.final(first["auth_bytes"]))
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"
    assert told["error_message"] == f"{USUAL} {mechanism.name}"
    assert told["auth_bytes"] == b""
    assert desk.login.result is None


def test_user_with_credential_of_another_mechanism_is_refused(tmp_path: Path) -> None:
    users = users_in(tmp_path)
    give(users, "alice", "right", SCRAM_SHA_256)
    desk = Desk(scram_mechanisms(users))
    desk.handshake("SCRAM-SHA-512")
    told = desk.scram(ScramClient("alice", "right", SCRAM_SHA_512))
    assert told is not None
    assert told["error_message"] == f"{USUAL} SCRAM-SHA-512"
    assert desk.ended == "the user has no credential of SCRAM-SHA-512"


@pytest.mark.parametrize("name", ["a,b", "a=b", "=2C", "a b", "semi;colon", "User:x", '"q"'])
def test_user_names_with_special_characters_can_log_in(tmp_path: Path, name: str) -> None:
    desk = Desk(scram_mechanisms(users_in(tmp_path, **{name: "p,=w"})))
    desk.handshake("SCRAM-SHA-256")
    desk.scram(ScramClient(name, "p,=w", SCRAM_SHA_256))
    assert desk.login.result is not None
    assert desk.login.result.identity.principal == Principal(USER, name)


@pytest.mark.parametrize(
    "bend", [lambda nonce: "", lambda nonce: nonce[:-1], lambda nonce: "x" + nonce]
)
def test_final_scram_message_with_another_nonce_is_refused(
    enabled: Mapping[str, Mechanism], bend: object
) -> None:
    """CVE-2024-56128: the client's proof is valid for its own messages."""
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    client = ScramClient("alice", "right", SCRAM_SHA_256)
    first = desk.token(client.first.encode())
    assert first is not None
    sent = first["auth_bytes"].decode()
    nonce = bend(sent[2 : sent.index(",")])  # type: ignore[operator]
    told = desk.token(client.final(first["auth_bytes"], nonce))
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"
    assert desk.login.result is None


@pytest.mark.parametrize("user", ["alice", "nobody"])
def test_foreign_authorization_id_gets_the_same_response_for_any_user(
    enabled: Mapping[str, Mechanism], user: str
) -> None:
    """With another user's authorization id, the response does not reveal whether a user exists."""
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    told = desk.token(f"n,a=bob,n={user},r=nonce".encode())
    assert told is not None
    assert told["error_message"] == OTHER_USER


def test_authorization_id_equal_to_user_name_is_accepted(enabled: Mapping[str, Mechanism]) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    told = desk.token(b"n,a=alice,n=alice,r=nonce")
    assert told is not None
    assert told["error_code"] == "none"


def test_scram_login_with_delegation_token_is_refused(enabled: Mapping[str, Mechanism]) -> None:
    """With `tokenauth=true` the name belongs to a delegation token, never to a user."""
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    client = ScramClient("alice", "right", SCRAM_SHA_256)
    client.first = type(client.first).of("alice", "nonce", {"tokenauth": "true"})
    told = desk.scram(client)
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"


def test_scram_credential_with_too_few_iterations_is_refused(tmp_path: Path) -> None:
    users = users_in(tmp_path)
    give(users, "weak", "right", SCRAM_SHA_256, iterations=4095)
    desk = Desk(scram_mechanisms(users))
    desk.handshake("SCRAM-SHA-256")
    told = desk.scram(ScramClient("weak", "right", SCRAM_SHA_256))
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"


@pytest.mark.parametrize("token", [b"", b"n,,", b"\0", b"p=tls-unique,,n=alice,r=n", b"\xff" * 50])
def test_malformed_first_scram_message_is_refused(
    enabled: Mapping[str, Mechanism], token: bytes
) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    told = desk.token(token)
    assert told is not None
    assert told["error_message"] == f"{USUAL} SCRAM-SHA-256"


@pytest.mark.parametrize(
    "bend",
    [
        lambda token: b"",
        lambda token: token.replace(b"c=biws", b"c=eSws"),
        lambda token: token[:-4] + b"AAA=",
        lambda token: token.split(b",p=")[0] + b",p=",
    ],
)
def test_malformed_final_scram_message_is_refused(
    enabled: Mapping[str, Mechanism], bend: object
) -> None:
    desk = Desk(enabled)
    desk.handshake("SCRAM-SHA-256")
    client = ScramClient("alice", "right", SCRAM_SHA_256)
    first = desk.token(client.first.encode())
    assert first is not None
    told = desk.token(bend(client.final(first["auth_bytes"])))  # type: ignore[operator]
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"


# --- session lifetime and re-authentication (KIP-368) ---


@pytest.mark.parametrize(
    ("ends_in_ms", "most_ms", "lifetime_ms"),
    [
        (None, None, None),
        (None, 60_000, 60_000),
        (50_000, None, 50_000),
        (50_000, 60_000, 50_000),
        (70_000, 60_000, 60_000),
        (-1, 60_000, 0),
        (10**14, None, 10**14),
        (None, 10**14, 10**14),
    ],
)
def test_session_lifetime_is_the_smaller_of_credential_expiry_and_max_reauth(
    ends_in_ms: int | None, most_ms: int | None, lifetime_ms: int | None
) -> None:
    bounds = {} if most_ms is None else {"TOKEN": most_ms}
    desk = Desk({"TOKEN": Tokens()}, max_reauth_ms=bounds)
    desk.handshake("TOKEN")
    ends = "" if ends_in_ms is None else f" {desk.clock.now_ms() + ends_in_ms}"
    told = desk.token(f"alice{ends}".encode())
    assert told is not None
    assert told["session_lifetime"] == (lifetime_ms or 0)
    assert desk.login.result is not None
    assert desk.login.result.lifetime_ms == lifetime_ms


def again(enabled: Mapping[str, Mechanism], user: str, mechanism: str = "SCRAM-SHA-256") -> Desk:
    session = ClientSession("127.0.0.1", "SASL", Principal(USER, user), mechanism, 1)
    return Desk(enabled, clock=ManualClock(), previous=session)


def test_same_user_can_reauthenticate(enabled: Mapping[str, Mechanism]) -> None:
    desk = again(enabled, "alice")
    desk.handshake("SCRAM-SHA-256")
    desk.scram(ScramClient("alice", "right", SCRAM_SHA_256))
    assert desk.login.result is not None


def test_reauthentication_as_another_user_is_refused(enabled: Mapping[str, Mechanism]) -> None:
    desk = again(enabled, "alice")
    desk.handshake("SCRAM-SHA-256")
    told = desk.scram(ScramClient("bob", "right", SCRAM_SHA_256))
    assert told is not None
    assert told["error_code"] == "sasl_authentication_failed"
    assert told["error_message"] == (
        "Cannot change principals during re-authentication from User.alice: User.bob"
    )
    assert desk.login.result is None


def test_reauthentication_as_another_user_with_bare_tokens_is_refused(
    enabled: Mapping[str, Mechanism],
) -> None:
    desk = again(enabled, "alice")
    desk.handshake("SCRAM-SHA-256", 0)
    client = ScramClient("bob", "right", SCRAM_SHA_256)
    token = desk.frame(client.first.encode())
    assert token is not None
    assert desk.frame(client.final(token)) is None
    assert desk.login.result is None
    assert desk.ended


def test_reauthentication_with_another_mechanism_closes_connection(
    enabled: Mapping[str, Mechanism],
) -> None:
    """The handshake gets a response; the broker closes the connection after the next request."""
    desk = again(enabled, "alice", "SCRAM-SHA-512")
    assert desk.handshake("SCRAM-SHA-256")["error_code"] == "none"
    assert desk.token(b"n,,n=alice,r=nonce") is None
    assert desk.ended == "the mechanism differs from that of the previous login"


def test_reauthentication_with_disabled_mechanism_closes_connection(
    enabled: Mapping[str, Mechanism],
) -> None:
    """During re-authentication, the broker closes the connection without a response."""
    desk = again(enabled, "alice")
    assert desk.ask("sasl_handshake", 1, mechanism="NONE") is None
    assert desk.ended


def test_wrong_password_on_reauthentication_is_reported_as_such(
    enabled: Mapping[str, Mechanism],
) -> None:
    desk = again(enabled, "alice")
    desk.handshake("SCRAM-SHA-256")
    told = desk.scram(ScramClient("alice", "wrong", SCRAM_SHA_256))
    assert told is not None
    assert "during re-authentication" in told["error_message"]
