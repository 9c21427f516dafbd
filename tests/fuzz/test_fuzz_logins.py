"""Arbitrary bytes before a login get a response or a close, nothing else, and little memory.

A *script* is the messages of one connection in memory. It is drawn from the seed and the script's
number, so a failing script can be repeated. ``--inputs 1000000 --seed 7 -o timeout=0`` runs more
scripts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jwt
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.security.key_set import KeySet
from fencepost.coordinator.security.logins import ListenerLogins, Logins
from fencepost.coordinator.security.mechanism import Mechanism
from fencepost.coordinator.security.oauth_login import OAUTHBEARER, OauthLogin
from fencepost.coordinator.security.password_checks import PasswordChecks
from fencepost.coordinator.security.plain_login import PLAIN, PlainLogin
from fencepost.coordinator.security.principal import ANONYMOUS
from fencepost.coordinator.security.scram_login import MAX_TOKEN_BYTES
from fencepost.coordinator.security.tokens import RequiredClaims, SignedTokens, UnsecuredTokens
from fencepost.coordinator.server.server import Server
from fencepost.protocol import scram
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.scram import SCRAM_MECHANISMS, ScramMechanism
from fencepost.protocol.writer import uvarint
from tests.fuzz.in_memory import Link
from tests.support.clock import ManualClock
from tests.support.stalls import watched_loop
from tests.unit.coordinator.logging_in import scram_mechanisms, users_in
from tests.unit.coordinator.services.coordinators import Services

SCRIPTS = 1_000
"""How many scripts run without ``--inputs``."""
AT_A_TIME = 50
MAX_HELD_BYTES = 131_072
"""The memory limit of one connection before its login."""
MAX_ANSWERED_BYTES = 8_192
"""The maximum size of responses before a login: ApiVersions, the mechanisms, one exchange."""

NOW_MS = 1_700_000_000_000
USER, PASSWORD = "alice", "the right one, which nobody guesses"
ISSUER, STRANGER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

_HEADER = struct.Struct(">hhih")


# --- requests before a login ---


def frame(key: int, version: int, body: bytes, client_id: bytes | None = b"fuzz") -> bytes:
    """Return a request without its length."""
    size = -1 if client_id is None else len(client_id)
    return _HEADER.pack(key, version, 7, size) + (client_id or b"") + body


def versions(rng: random.Random) -> bytes:
    version = rng.choice((0, 1, 2, 3, 4, 4, 5, 99, -1))
    if version < 3:
        return frame(ApiKey.API_VERSIONS, version, b"")
    names = (compact(rng.choice((b"x", b"", b"a b", b"\n", b"z" * 3000))) for _ in range(2))
    return frame(ApiKey.API_VERSIONS, version, b"\0" + b"".join(names) + b"\0")


def compact(data: bytes) -> bytes:
    return uvarint(len(data) + 1) + data


def handshake(rng: random.Random, mechanism: str, version: int) -> bytes:
    if rng.random() < 0.05:
        version = rng.choice((2, -1, 100))
    name = mechanism.encode()
    return frame(ApiKey.SASL_HANDSHAKE, version, struct.pack(">h", len(name)) + name)


def authenticate(rng: random.Random, token: bytes) -> bytes:
    version = rng.choice((0, 1, 2))
    body = b"\0" + compact(token) + b"\0" if version == 2 else struct.pack(">i", len(token)) + token
    return frame(ApiKey.SASL_AUTHENTICATE, version, body)


def other(rng: random.Random) -> bytes:
    """Return a request of another API, at any version."""
    api = rng.choice(list(APIS.values()))
    return frame(
        api.key, rng.randint(api.min_version, api.max_version), rng.randbytes(rng.randrange(30))
    )


def bent(data: bytes, rng: random.Random) -> bytes:
    """Return the data with a few random changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 6))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 40))
            case 3:
                del found[at : at + rng.randint(1, 20)]
            case 4:
                found[at : at + 4] = rng.choice(
                    (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", bytes(4), b"\xff" * 6)
                )
            case 5:
                found[at:at] = found[: rng.randint(1, 100)]
            case _:
                found[at:at] = rng.choice(
                    (b"\0", b",", b"=", b"\x01", b"\n", b"\xed\xa0\x80")
                ) * rng.choice((1, 3, 3000))
    return bytes(found)


def framed(data: bytes, rng: random.Random) -> bytes:
    """Return the data after a length, which is sometimes wrong."""
    size = len(data)
    if rng.random() < 0.03:
        size = rng.choice(
            (0, 1, size - 1, size + 1, 65_536, 65_537, 1 << 20, 2**31 - 1, -1, -(2**31))
        )
    return struct.pack(">i", size) + data


@lru_cache(4096)
def salted(mechanism: ScramMechanism, password: str, salt: bytes, iterations: int) -> bytes:
    return scram.salted_password(mechanism, password, salt, iterations)


class Script:
    """One connection of a client that lacks the password, or that alters its messages."""

    def __init__(self, link: Link, rng: random.Random) -> None:
        self.link, self.rng = link, rng
        self.knows = False
        """Whether the script has used the user's password or a valid token."""
        self._is_bare = False

    async def play(self) -> None:
        """Send all messages and close."""
        rng = self.rng
        part = rng.choice(
            (self._login, self._login, self._login, self._login, self._jumble, self._noise)
        )
        await part()
        if self.link.connection.session.principal == ANONYMOUS:
            # For each complete frame the broker must respond or close the connection.
            await self.link.heard(len(self.link.sent))
        self.link.leave()

    def _say(self, data: bytes) -> None:
        if self.rng.random() < 0.07:
            data = bent(data, self.rng)
        self.link.send(framed(data, self.rng))

    async def _ask(self, data: bytes) -> bytes | None:
        """Send a request and return the response, or None if no response will come."""
        count = len(self.link.sent)
        self._say(data)
        if len(self.link.sent) == count or not await self.link.heard(len(self.link.sent)):
            return None
        return self.link.answers[-1]

    async def _noise(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 4)):
            data = rng.randbytes(rng.choice((1, 5, 30, 300, 5_000, 65_536, 70_000)))
            self.link.send(framed(data, rng) if rng.random() < 0.7 else data)

    async def _jumble(self) -> None:
        """Send requests of all kinds in random order, without waiting for responses."""
        rng = self.rng
        for _ in range(rng.randint(1, 12)):
            match rng.randrange(5):
                case 0:
                    data = versions(rng)
                case 1:
                    data = handshake(rng, self._mechanism(), rng.randrange(2))
                case 2:
                    data = authenticate(rng, self._token())
                case 3:
                    data = self._token()
                case _:
                    data = other(rng)
            for _ in range(rng.choice((1, 1, 1, 2, 20))):
                self._say(data)

    def _mechanism(self) -> str:
        names = (PLAIN, *SCRAM_MECHANISMS, OAUTHBEARER, "GSSAPI", "", "x" * 32_000, "plain\n")
        return self.rng.choices(names, (6, 6, 6, 6, 1, 1, 1, 1))[0]

    def _token(self) -> bytes:
        rng = self.rng
        makers = self._plain, self._bearer, self._scram_first, lambda: rng.randbytes(20)
        return rng.choice(makers)()

    async def _login(self) -> None:
        """Run a whole login with random alterations."""
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 2))):
            await self._ask(versions(rng))
        mechanism, version = self._mechanism(), rng.randrange(2)
        self._is_bare = version == 0
        if rng.random() < 0.97:
            await self._ask(handshake(rng, mechanism, version))
        if mechanism in SCRAM_MECHANISMS:
            await self._scram(SCRAM_MECHANISMS[mechanism])
        else:
            await self._show(self._bearer() if mechanism == OAUTHBEARER else self._plain())
            if rng.random() < 0.5:
                await self._show(rng.choice((b"\x01", b"", b"\x01\x01", self._bearer())))
        if rng.random() < 0.1:
            self._say(other(rng))

    async def _show(self, token: bytes) -> bytes | None:
        rng = self.rng
        if rng.random() < 0.15:
            token = bent(token, rng)
        is_bare = self._is_bare if rng.random() < 0.95 else not self._is_bare
        return await self._ask(token if is_bare else authenticate(rng, token))

    def _name(self) -> str:
        return self.rng.choice(
            (
                USER,
                USER,
                "bob",
                "nobody",
                "",
                "a" * 30_000,
                "*",
                "User:alice",
                "a,b=c",
                "é\n\x1b[31m",
            )
        )

    def _password(self) -> str:
        if self.rng.random() < 0.1:
            self.knows = True
            return PASSWORD
        return self.rng.choice(("wrong", PASSWORD[:-1], PASSWORD.upper(), "", " " + PASSWORD))

    def _plain(self) -> bytes:
        rng = self.rng
        name = self._name()
        parts = [rng.choice(("", "", name, "root")), name, self._password()]
        if rng.random() < 0.1:
            parts.append(rng.choice(("", "more")))
        return "\0".join(parts).encode()

    def _scram_first(self) -> bytes:
        return scram.ClientFirst.of(self._name(), "n" * self.rng.choice((1, 20, 20_000))).encode()

    async def _scram(self, mechanism: ScramMechanism) -> None:
        rng = self.rng
        password = self._password()
        name = USER if self.knows else self._name()
        first = scram.ClientFirst.of(
            name, rng.choice(("nonce", "n" * 9_000)), rng.choice(({}, {"tokenauth": "true"}))
        )
        told = await self._show(first.encode())
        if told is None:
            return
        try:
            answer = scram.ServerFirst.parse(told[told.find(b"r=") :].split(b"\0")[0])
        except scram.ScramError:
            return
        final = scram.ClientFinal.of(rng.choice((answer.nonce, answer.nonce, first.nonce, "other")))
        hashed = salted(mechanism, password, answer.salt, answer.iterations)
        proof = scram.client_proof(mechanism, hashed, scram.signed_text(first, answer, final))
        proof = rng.choice((proof, proof, proof, bytes(len(proof)), b"", proof * 2))
        await self._show(scram.ClientFinal.of(final.nonce, proof).encode())

    def _bearer(self) -> bytes:
        rng = self.rng
        tokens: list[Callable[[random.Random], str]] = [forged, forged, unsigned, odd]
        if rng.random() < 0.1:
            self.knows = True
            token = right()
            if rng.random() < 0.5:
                token = bent(token.encode(), rng).decode(errors="replace")
        else:
            token = rng.choice(tokens)(rng)
        wanted = rng.choice(("", "", f"a={self._name()}"))
        more = rng.choice(("", "", "scope=x\x01", "x=y\x01" * 2_000))
        scheme = rng.choice(("Bearer", "Bearer", "bearer", "Basic", ""))
        return f"n,{wanted},\x01auth={scheme} {token}\x01{more}\x01".encode(errors="replace")


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


CLAIMS: dict[str, Any] = {"sub": USER, "iat": NOW_MS // 1000 - 5, "exp": NOW_MS // 1000 + 600}


@cache
def right() -> str:
    return jwt.encode(CLAIMS, ISSUER, "ES256", headers={"kid": "one"})


@cache
def other_signature() -> str:
    return jwt.encode(CLAIMS, STRANGER, "ES256", headers={"kid": "one"}).rpartition(".")[2]


def claims(rng: random.Random) -> dict[str, Any]:
    """Return the claims of a token, some with odd values."""
    strange: tuple[Any, ...] = (
        None,
        -1,
        0,
        1e308,
        10**4000,
        2**63,
        True,
        "x",
        [],
        {},
        "\ud800",
        "\n",
        "",
        [[]],
    )
    found = dict(CLAIMS)
    for name in rng.sample(["sub", "iat", "exp", "nbf", "scope", "aud", "iss"], rng.randint(0, 2)):
        found[name] = rng.choice(strange)
    return found


def forged(rng: random.Random) -> str:
    """Return a token with another issuer's signature, no signature, or another user's claims."""
    header: dict[str, Any] = {
        "alg": rng.choice(("ES256", "ES256", "none", "HS256", "RS256", "", None, [], {}, 7)),
        "kid": rng.choice(("one", "one", "two", None, [], 1)),
        "typ": "JWT",
    }
    if rng.random() < 0.2:
        header[rng.choice(("crit", "b64", "jwk", "x5u", "zip"))] = rng.choice(
            ([], ["b64"], False, "x", {})
        )
    signatures = (other_signature(), right().rpartition(".")[2], "", "AAAA", "A" * 10_000)
    return f"{part(header)}.{part(claims(rng))}.{rng.choice(signatures)}"


def unsigned(rng: random.Random) -> str:
    return f"{part({'alg': 'none'})}.{part(claims(rng))}."


def odd(rng: random.Random) -> str:
    deep = rng.choice((10, 300, 900, 960, 975, 990, 1_000, 20_000))
    texts = ("[" * deep, '{"alg":' * deep, '{"exp":' + "9" * deep + "}", "nul", "")
    encoded = [
        base64.urlsafe_b64encode(rng.choice(texts).encode()).decode().rstrip("=") for _ in "..."
    ]
    encoded[0] = rng.choice(
        (encoded[0], part({"alg": "ES256", "kid": "one"}), part({"alg": "none"}))
    )
    return ".".join(encoded[: rng.randint(1, 3)])


# --- the broker ---


def mechanisms(home: Path, checks: PasswordChecks, clock: ManualClock) -> dict[str, Mechanism]:
    users = users_in(home, **{USER: PASSWORD, "bob": PASSWORD[::-1]})
    keys = home / "keys"
    public = ECAlgorithm.to_jwk(ISSUER.public_key(), as_dict=True)
    keys.write_text(json.dumps({"keys": [public | {"kid": "one"}]}))
    found = KeySet(keys.as_uri(), clock, refresh_ms=3_600_000, backoff_ms=100, max_backoff_ms=400)
    signed = SignedTokens(found, RequiredClaims(skew_ms=30_000, needs_issued_at=True))
    return {
        PLAIN: PlainLogin(users, checks, {"carol": PASSWORD}),
        **scram_mechanisms(users),
        OAUTHBEARER: OauthLogin(signed, clock.now_ms),
    }


LISTENERS = {
    name: ListenerConfig(name, protocol=SecurityProtocol.SASL_PLAINTEXT)
    for name in ("STRICT", "SLOW", "OPEN")
}
"""The listeners; SLOW delays the response to a failed login, and OPEN accepts unsigned tokens."""


@asynccontextmanager
async def serving(home: Path) -> AsyncIterator[Server]:
    clock = ManualClock(NOW_MS)
    services = Services(home / "data", clock=clock)
    checks = PasswordChecks()
    strict = mechanisms(home, checks, clock)
    has_open = {**strict, OAUTHBEARER: OauthLogin(UnsecuredTokens(), clock.now_ms)}
    logins = Logins(
        [
            ListenerLogins("STRICT", strict, failure_delay_ms=0),
            ListenerLogins("SLOW", strict, failure_delay_ms=1),
            ListenerLogins("OPEN", has_open, failure_delay_ms=0),
        ],
        clock=clock,
    )
    server = Server(services, logins=logins)
    for listener in LISTENERS.values():
        await server.start(listener)
    try:
        yield server
    finally:
        checks.close()
        await server.stop()
        await services.stop()


@contextmanager
def failures() -> Iterator[list[Any]]:
    """Yield a list of errors that the broker logs or that reach the loop's exception handler."""
    found: list[Any] = []

    def look(_logger: object, level: str, event: Any) -> Any:
        if level in {"error", "critical"} or "exc_info" in event:
            found.append(dict(event) | {"error": repr(sys.exc_info()[1])[:300]})
        raise structlog.DropEvent

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: found.append(context))
    before = structlog.get_config()["processors"]
    kept = before.copy()
    before[:] = [look]  # in place, because existing loggers have this list
    try:
        yield found
    finally:
        before[:] = kept


async def check(server: Server, seed: int, number: int, seen: Counter[str]) -> None:
    """Run a script and check the outcome."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choices(list(LISTENERS), (8, 1, 3))[0]
    link = Link(server, LISTENERS[name], rng)
    script = Script(link, rng)
    await script.play()
    connection = link.connection
    who = connection.session.principal
    seen["scripts"] += 1
    seen["messages"] += link.messages
    seen["answers"] += len(link.answers)
    seen["most held"] = max(seen["most held"], link.most_held)
    if who == ANONYMOUS:
        answered = sum(map(len, link.answers))
        assert connection.requests == 0, (seed, number, "served")
        assert answered <= MAX_ANSWERED_BYTES + 2 * sum(map(len, link.sent)), (
            seed,
            number,
            answered,
        )
    else:
        seen["logins"] += 1
        assert script.knows or name == "OPEN", (seed, number, who)
        assert name == "OPEN" or who.name in {USER, "bob"}, (seed, number, who)
    assert link.most_held <= MAX_HELD_BYTES, (seed, number, link.most_held)


async def test_random_bytes_before_a_login_grant_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--inputs") or SCRIPTS
    seed = request.config.getoption("--seed") or 1
    seen: Counter[str] = Counter()
    async with serving(tmp_path) as server:
        with failures() as failed, watched_loop() as watch:
            number = 0
            while number < count:
                numbers = range(number, number + AT_A_TIME)
                number += AT_A_TIME
                await asyncio.gather(*(check(server, seed, index, seen) for index in numbers))
                assert not failed, (seed, numbers, failed)
            await asyncio.sleep(0)
            assert not server.connections
            assert server.logins is not None
            assert server.logins.trying == 0
            ended = server.logins.failed
        watch.check()
        print(dict(ended), dict(seen), f"longest turn {watch.cpu.judged_ms:.1f} ms")
    assert seen["logins"] > 0


@pytest.mark.parametrize("more_bytes", [0, 1])
@pytest.mark.parametrize("what", ["name", "nonce", "extension"])
async def test_memory_between_two_login_steps_is_bounded(
    tmp_path: Path, what: str, more_bytes: int
) -> None:
    """Measure memory after the longest first message that SCRAM accepts, and a longer message."""
    size = MAX_TOKEN_BYTES - len(b"n,,n=a,r=b,x=c") + 1 + more_bytes
    name, nonce, value = (
        "n" * size if what == field else field[0] for field in ("name", "nonce", "extension")
    )
    token = scram.ClientFirst.of(name, nonce, {"x": value}).encode()
    assert len(token) == MAX_TOKEN_BYTES + more_bytes
    rng = random.Random(2)
    frames = [handshake(rng, "SCRAM-SHA-512", 1), authenticate(rng, token)]
    async with serving(tmp_path) as server:
        links = [Link(server, LISTENERS["STRICT"], rng) for _ in range(21)]
        await _begin(links[0], frames)
        tracemalloc.start()
        for link in links[1:]:
            await _begin(link, frames)
        held = tracemalloc.get_traced_memory()[0] / 20
        tracemalloc.stop()
        assert held <= MAX_HELD_BYTES
        assert all(link.is_closed == bool(more_bytes) for link in links)
        for link in links:
            link.leave()


async def _begin(link: Link, frames: list[bytes]) -> None:
    for data in frames:
        link.send(struct.pack(">i", len(data)) + data)
    await link.heard(len(frames))
    await asyncio.sleep(0)
    link.sent.clear()
    link.answers.clear()
