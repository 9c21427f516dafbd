"""OAUTHBEARER: messages, unsecured tokens, signed tokens, and the issuer's keys."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.config.listeners import check_closed
from fencepost.coordinator.security import key_set
from fencepost.coordinator.security.key_set import KeySet, KeySetError, fetch_keys
from fencepost.coordinator.security.logins import check_logins
from fencepost.coordinator.security.mechanism import AuthenticationFailed
from fencepost.coordinator.security.oauth_login import (
    MAX_MESSAGE_BYTES,
    OauthExchange,
    OauthLogin,
)
from fencepost.coordinator.security.tokens import RequiredClaims, SignedTokens, UnsecuredTokens
from tests.support.clock import ManualClock

NOW_MS = 1_700_000_000_000
NOW = NOW_MS // 1000
LISTENER = "SASL_PLAINTEXT"
JWKS = "sasl.oauthbearer.jwks.endpoint.url"
MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"

RSA_KEY = rsa.generate_private_key(65_537, 2_048)
OTHER_KEY = rsa.generate_private_key(65_537, 2_048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


def unsecured(*, header: object = None, **claims: object) -> str:
    body = {"sub": "alice", "exp": NOW + 60, **claims}
    kept = {name: value for name, value in body.items() if value is not None}
    return f"{encoded({'alg': 'none'} if header is None else header)}.{encoded(kept)}."


def first(token: str, authzid: str = "", extensions: str = "") -> bytes:
    wanted = f"a={authzid}" if authzid else ""
    return f"n,{wanted},\x01auth=Bearer {token}\x01{extensions}\x01".encode()


async def taken(exchange: OauthExchange, token: bytes) -> bytes:
    """Run a step of the exchange, including its waits."""
    steps = exchange.step(token)
    try:
        while True:
            if (wait := next(steps)) is not None:
                async with asyncio.timeout(20):
                    await asyncio.wait({wait})
    except StopIteration as end:
        answer: bytes = end.value
        return answer


def believing(**claims: Any) -> OauthExchange:
    return OauthLogin(UnsecuredTokens(RequiredClaims(**claims)), lambda: NOW_MS).begin()


# --- messages (OAuthBearerSaslServerTest, OAuthBearerClientInitialResponseTest) ---


@pytest.mark.parametrize(
    "message",
    [
        first(unsecured()),
        first(unsecured(), authzid="alice"),
        first(unsecured(), extensions="first=one\x01Second=two words\x01"),
        first(unsecured()).replace(b"Bearer", b"bEARER"),
        first(unsecured()).replace(b"Bearer ", b"Bearer   "),
    ],
)
async def test_valid_oauth_message_authenticates_token_subject(message: bytes) -> None:
    exchange = believing()
    assert await taken(exchange, message) == b""
    assert exchange.identity is not None
    assert str(exchange.identity.principal) == "User:alice"
    assert exchange.identity.expires_at_ms == (NOW + 60) * 1000


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x01",
        b"n,,",
        first(unsecured())[:-1],
        first(unsecured()) + b"x",
        first(unsecured()).replace(b"n,", b"y,"),
        first(unsecured()).replace(b"n,", b"p=tls-unique,"),
        first(unsecured()).replace(b"auth=", b"oath="),
        first(unsecured()).replace(b"auth=Bearer ", b"auth="),
        first(unsecured()).replace(b"Bearer", b"Basic"),
        first("two words"),
        first(""),
        first(unsecured(), authzid="al=ice"),
        first(unsecured(), extensions="fir1st=one\x01"),
        first(unsecured(), extensions="first=\x02\x01"),
        b"\xff" * 100,
    ],
)
async def test_malformed_oauth_message_fails_without_identity(message: bytes) -> None:
    exchange = believing()
    with pytest.raises(AuthenticationFailed) as failed:
        await taken(exchange, message)
    assert (failed.value.client_message, exchange.identity) == (None, None)


async def test_authorization_id_other_than_token_subject_is_refused() -> None:
    with pytest.raises(AuthenticationFailed, match="another user") as failed:
        await taken(believing(), first(unsecured(), authzid="bob"))
    assert failed.value.client_message == (
        "Authentication failed: Client requested an authorization id (bob) that is different from"
        " the token's principal name (alice)"
    )


async def test_insufficient_scope_is_returned_and_fails_after_client_acknowledges() -> None:
    exchange = believing(required_scope=("write", "read"))
    told = '{"status":"insufficient_scope", "scope":"write read"}'
    assert await taken(exchange, first(unsecured(scope="read"))) == told.encode()
    with pytest.raises(AuthenticationFailed) as failed:
        await taken(exchange, b"\x01")
    assert (failed.value.client_message, str(failed.value)) == (told, "the token: no scope 'write'")


async def test_valid_token_is_accepted_after_an_expired_one() -> None:
    exchange = believing()
    assert await taken(exchange, first(unsecured(exp=NOW))) == b'{"status":"invalid_token"}'
    assert await taken(exchange, first(unsecured())) == b""


async def test_oauth_message_above_the_limit_is_refused() -> None:
    size = MAX_MESSAGE_BYTES - len(first(unsecured(), extensions="x=\x01"))
    longest = first(unsecured(), extensions=f"x={'y' * size}\x01")
    assert len(longest) == MAX_MESSAGE_BYTES
    assert await taken(believing(), longest) == b""
    with pytest.raises(AuthenticationFailed, match="the limit is"):
        await taken(believing(), first(unsecured(), extensions=f"x={'y' * (size + 1)}\x01"))


# --- unsecured tokens (OAuthBearerUnsecuredValidatorCallbackHandlerTest) ---


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        (unsecured(exp=None), "no time in the claim exp"),
        (unsecured(exp="soon"), "no time in the claim exp"),
        (unsecured(exp=True), "no time in the claim exp"),
        (unsecured(exp=10**300), "no time that can be"),
        (unsecured(exp=10**400), "no time that can be"),
        (unsecured(exp=float("nan")), "no time that can be"),
        (unsecured(exp=NOW - 2), "expired"),
        (unsecured(iat=NOW + 3), "issued in the future"),
        (unsecured(nbf=NOW + 3), "not yet"),
        (unsecured(iat=NOW + 1, exp=NOW + 1), "ends before it begins"),
        (unsecured(sub=None), "no user in the claim sub"),
        (unsecured(sub=" "), "no user in the claim sub"),
        (unsecured(sub=["alice"]), "no user in the claim sub"),
        (unsecured(sub="half \ud800"), "no user in the claim sub"),
        (unsecured(header={"alg": "HS256"}), "algorithm is not none"),
        (unsecured(header={}), "algorithm is not none"),
        (unsecured(header=["none"]), "not a token"),
        (unsecured() + "c2lnbmVk", "signed"),
        (unsecured() + ".", "not a token"),
        ("a", "not a token"),
        ("e30", "not a token"),
        (f"{encoded({'alg': 'none'})}.{'W' * 4000}.", "not a token"),
    ],
)
async def test_invalid_unsecured_token_is_refused_with_its_cause(token: str, cause: str) -> None:
    exchange = believing(skew_ms=1_999)
    assert await taken(exchange, first(token)) == b'{"status":"invalid_token"}'
    with pytest.raises(AuthenticationFailed, match=cause):
        await taken(exchange, b"\x01")


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": NOW - 1.5},
        {"iat": NOW + 1},
        {"iat": None},
        {"scope": "write  read"},
        {"scope": ["read", 7, "write"]},
    ],
)
async def test_unsecured_token_within_clock_skew_and_scope_is_accepted(
    claims: dict[str, object],
) -> None:
    scope = ("read", "write") if "scope" in claims else ()
    exchange = believing(skew_ms=1_999, required_scope=scope)
    assert await taken(exchange, first(unsecured(**claims))) == b""


# --- signed tokens (BrokerJwtValidatorTest) ---


def public(key: Any, name: str, **more: str) -> dict[str, Any]:
    algorithm = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return found | {"kid": name} | more


KEYS = [
    public(RSA_KEY, "one"),
    public(EC_KEY, "two"),
    public(OTHER_KEY, "for secrets", use="enc"),
    {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"},
]


class Issuer:
    """A token issuer that serves a key set, or another body, over HTTP."""

    def __init__(self) -> None:
        self.body: bytes = json.dumps({"keys": KEYS}).encode()
        self.status = 200
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.may_answer.wait(20)
                self.send_response(issuer.status)
                self.send_header("Content-Length", str(len(issuer.body)))
                self.send_header("Location", issuer.url)
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    yield made
    made.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


def signed(key: Any = RSA_KEY, *, name: str | None = "one", how: str = "", **claims: Any) -> str:
    how = how or ("ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256")
    body = {"sub": "alice", "iat": NOW - 5, "exp": NOW + 60, **claims}
    kept = {claim: value for claim, value in body.items() if value is not None}
    return jwt.encode(kept, key, how, headers={} if name is None else {"kid": name})


def key_set_of(url: str, clock: ManualClock) -> KeySet:
    return KeySet(url, clock, refresh_ms=3_600_000, backoff_ms=100, max_backoff_ms=400)


def looking(url: str, clock: ManualClock, **more: Any) -> Callable[[], OauthExchange]:
    claims = RequiredClaims(skew_ms=30_000, needs_issued_at=True)
    tokens = SignedTokens(key_set_of(url, clock), claims, **more)
    return OauthLogin(tokens, clock.now_ms).begin


@pytest.mark.parametrize("how", ["RS256", "RS512", "PS256"])
async def test_signed_token_of_issuer_is_accepted_with_one_key_fetch(
    issuer: Issuer, clock: ManualClock, how: str
) -> None:
    begin = looking(issuer.url, clock)
    for token in (signed(how=how), signed(EC_KEY, name="two"), signed(iat=NOW - 60, exp=NOW - 29)):
        exchange = begin()
        assert await taken(exchange, first(token)) == b""
        assert exchange.identity is not None
        assert exchange.identity.principal.name == "alice"
    assert issuer.asked == 1


@pytest.mark.parametrize(
    "token",
    [
        signed(OTHER_KEY),
        signed(iat=NOW - 60, exp=NOW - 31),
        signed(exp=None),
        signed(iat=None),
        signed(iat=NOW + 31),
        signed(sub=None),
        signed(aud="somebody else"),
        signed(iss="another issuer"),
        signed(EC_KEY, name=None),
        signed()[:-4] + "AAAA",
        signed() + ".x",
        signed().rpartition(".")[0] + ".",
        unsecured(iat=NOW - 5),
        unsecured(header={"alg": ["RS256"], "kid": "one"}),
        unsecured(header={"alg": {}}),
    ],
)
async def test_invalid_signed_token_is_refused(
    issuer: Issuer, clock: ManualClock, token: str
) -> None:
    exchange = looking(issuer.url, clock, issuer="https://issuer", audience=("us", "them"))()
    try:
        assert await taken(exchange, first(token)) == b'{"status":"invalid_token"}'
    except AuthenticationFailed as failed:
        assert str(failed) == "no such key"  # noqa: PT017 - one of two possible errors
    assert exchange.identity is None
    good = signed(iss="https://issuer", aud=["them"])
    exchange = looking(issuer.url, clock, issuer="https://issuer", audience=("us", "them"))()
    assert await taken(exchange, first(good)) == b""


@pytest.mark.parametrize(
    "token",
    [
        signed(name="three"),
        signed(OTHER_KEY, name="for secrets"),
        jwt.encode({"sub": "alice"}, "secret" * 8, "HS256", headers={"kid": "shared"}),
        jwt.encode({"sub": "alice"}, "secret" * 8, "HS256", headers={"kid": "one"}),
        signed(EC_KEY, name="one"),
    ],
)
async def test_token_with_unsuitable_key_or_algorithm_is_refused(
    issuer: Issuer, clock: ManualClock, token: str
) -> None:
    with pytest.raises(AuthenticationFailed, match="no such key"):
        await taken(looking(issuer.url, clock)(), first(token))


# --- keys (RefreshingHttpsJwksTest) ---


async def test_unknown_key_is_fetched_at_most_once_a_minute(
    issuer: Issuer, clock: ManualClock
) -> None:
    begin = looking(issuer.url, clock)
    for _ in range(3):
        with pytest.raises(AuthenticationFailed):
            await taken(begin(), first(signed(OTHER_KEY, name="new")))
    assert issuer.asked == 1
    issuer.body = json.dumps({"keys": [*KEYS, public(OTHER_KEY, "new")]}).encode()
    with pytest.raises(AuthenticationFailed):
        await taken(begin(), first(signed(OTHER_KEY, name="new")))
    clock.advance(key_set.UNKNOWN_KEY_MS)
    fresh = signed(OTHER_KEY, name="new", exp=NOW + 1_000)
    assert await taken(begin(), first(fresh)) == b""
    assert issuer.asked == 2


async def test_concurrent_logins_share_one_key_fetch_despite_a_cancelled_one(
    issuer: Issuer, clock: ManualClock
) -> None:
    begin = looking(issuer.url, clock)
    issuer.may_answer.clear()
    tasks = [asyncio.ensure_future(taken(begin(), first(signed()))) for _ in range(20)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    issuer.may_answer.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1:] == [b""] * 19
    assert issuer.asked == 1


async def test_failed_key_fetch_is_retried_with_exponential_backoff(
    issuer: Issuer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer.status = 500
    begin = looking(issuer.url, clock)
    asked = []
    for pause in (0, 99, 1, 199, 1, 399, 1, 399, 1):
        clock.advance(pause)
        with pytest.raises(AuthenticationFailed, match="are not available"):
            await taken(begin(), first(signed()))
        asked.append(issuer.asked)
    assert asked == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    issuer.status = 200
    clock.advance(400)
    assert await taken(begin(), first(signed())) == b""
    # Known keys stay in use while requests to the issuer fail or a refresh is in progress.
    issuer.status = 500
    clock.advance(3_600_000)
    later = signed(exp=NOW + 10_000)
    assert await taken(begin(), first(later)) == b""


async def test_logins_waiting_for_key_fetch_are_limited(
    issuer: Issuer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_set, "MAX_WAITING", 2)
    begin = looking(issuer.url, clock)
    issuer.may_answer.clear()
    tasks = [asyncio.ensure_future(taken(begin(), first(signed()))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(AuthenticationFailed, match="MAX_WAITING"):
        await taken(begin(), first(signed()))
    issuer.may_answer.set()
    assert await asyncio.gather(*tasks) == [b"", b""]


def test_keys_are_read_from_a_file_url(tmp_path: Path) -> None:
    path = tmp_path / "the keys.json"
    path.write_text(json.dumps({"keys": KEYS}))
    assert [key["kid"] for key in fetch_keys(path.as_uri())] == [key["kid"] for key in KEYS]


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        (b"", 200, "not a JSON Web Key Set"),
        (b"[]", 200, "not a JSON Web Key Set"),
        (b'{"keys": 7}', 200, "not a JSON Web Key Set"),
        (b"[" * 100_000, 200, "not a JSON Web Key Set"),
        (b" " * (key_set.MAX_BYTES + 1), 200, "longer than"),
        (b"secret", 404, "status 404"),
        (b"", 302, "status 302"),
    ],
)
def test_invalid_key_set_response_is_an_error_with_its_cause(
    issuer: Issuer, body: bytes, status: int, cause: str
) -> None:
    issuer.body, issuer.status = body, status
    with pytest.raises(KeySetError, match=cause):
        fetch_keys(issuer.url)


def test_key_set_of_exactly_the_limit_is_accepted(issuer: Issuer) -> None:
    whole = json.dumps({"keys": KEYS}).encode()
    issuer.body = whole.ljust(key_set.MAX_BYTES)
    assert len(fetch_keys(issuer.url)) == len(KEYS)


def test_unreachable_issuer_is_a_key_set_error(tmp_path: Path) -> None:
    for url in ((tmp_path / "none").as_uri(), "http://127.0.0.1:1/keys"):
        with pytest.raises(KeySetError):
            fetch_keys(url)


# --- configuration ---


def configured(**options: str) -> BrokerConfig:
    return BrokerConfig({"sasl.enabled.mechanisms": "OAUTHBEARER", **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "to verify the signatures of tokens"),
        ({"sasl.jaas.config": f"{MODULE} required;"}, "to verify the signatures of tokens"),
        ({JWKS: "ftp://issuer/keys"}, "it must be a URL of https, http, file"),
        (
            {"sasl.jaas.config": f'{MODULE} required unsecuredValidatorAllowableClockSkewMs="-1";'},
            "milliseconds, 0 or more",
        ),
    ],
)
def test_invalid_oauth_settings_are_a_config_error(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_logins(configured(**options), LISTENER)


@pytest.mark.parametrize("claim", ["issuer", "audience"])
def test_broker_starts_without_expected_claim_only_if_that_is_allowed(claim: str) -> None:
    other = {"issuer": "audience", "audience": "issuer"}[claim]
    options = {JWKS: "https://issuer/keys", f"sasl.oauthbearer.expected.{other}": "x"}
    with pytest.raises(ConfigError, match=rf"^sasl\.oauthbearer\.expected\.{claim}: "):
        check_logins(configured(**options), LISTENER)
    allow = f"sasl.oauthbearer.allow.unverified.{claim}"
    check_logins(configured(**options, **{allow: "true"}), LISTENER)
    listener = f"listener.name.{LISTENER.lower()}.oauthbearer.{allow}"
    check_logins(configured(**options, **{listener: "true"}), LISTENER)


def test_unsecured_tokens_on_public_address_are_a_config_error() -> None:
    everywhere = "0.0.0.0"
    listener = ListenerConfig(
        LISTENER, everywhere, 9092, SecurityProtocol(LISTENER), ("OAUTHBEARER",)
    )
    unsecured_login = f'{MODULE} required unsecuredLoginStringClaim_sub="x";'
    with pytest.raises(ConfigError, match="does not authenticate clients"):
        check_closed(configured(**{"sasl.jaas.config": unsecured_login}), [listener])
    check_closed(configured(**{JWKS: "https://issuer/keys"}), [listener])
