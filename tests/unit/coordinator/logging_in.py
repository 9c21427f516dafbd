"""Helpers for login tests: users in a real metadata log, and clients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fencepost.cluster.records import UserScramCredentialRecord
from fencepost.coordinator.metadata.server_secret import server_secret
from fencepost.coordinator.security.logins import ListenerLogins
from fencepost.coordinator.security.mechanism import Mechanism
from fencepost.coordinator.security.principal import ClientSession
from fencepost.coordinator.security.scram_login import ScramLogin
from fencepost.coordinator.security.users import ScramUsers, derive_keys
from fencepost.coordinator.server.authentication import Answer, Authenticator, LoginRefused
from fencepost.coordinator.storage.storage import Storage
from fencepost.protocol import scram
from fencepost.protocol.codec import Request
from fencepost.protocol.messages import response_factory
from fencepost.protocol.schema import Entity
from fencepost.protocol.scram import (
    SCRAM_MECHANISMS,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ScramMechanism,
)
from fencepost.protocol.steps import finish
from tests.support.clock import ManualClock
from tests.support.raw import Answer as Told
from tests.support.raw import decode, encode
from tests.unit.coordinator.services.coordinators import storage


def users_of(store: Storage) -> ScramUsers:
    users = ScramUsers(store.metadata, partial(server_secret, store.fs, store.directory))
    users.prepare()
    return users


def users_in(directory: Path, **passwords: str) -> ScramUsers:
    """Create users with these passwords, with credentials for both SCRAM mechanisms."""
    users = users_of(storage(directory))
    for name, password in passwords.items():
        for mechanism in (SCRAM_SHA_256, SCRAM_SHA_512):
            give(users, name, password, mechanism)
    return users


def give(
    users: ScramUsers, name: str, password: str, mechanism: ScramMechanism, iterations: int = 4096
) -> None:
    salted = scram.salted_password(mechanism, password, b"salt of a user", iterations)
    number = mechanism.number
    stored, server = derive_keys(number, salted)
    users._metadata.append(
        [UserScramCredentialRecord(name, number, b"salt of a user", stored, server, iterations)]
    )


class ScramClient:
    """The client's side of a SCRAM exchange; a test may alter its tokens."""

    def __init__(self, user: str, password: str, mechanism: ScramMechanism) -> None:
        self.first = scram.ClientFirst.of(user, scram.new_nonce())
        self._password, self._mechanism = password, mechanism
        self.signature = b""

    def final(self, token: bytes, nonce: str | None = None) -> bytes:
        answer = scram.ServerFirst.parse(token)
        nonce = answer.nonce if nonce is None else nonce
        salted = scram.salted_password(
            self._mechanism, self._password, answer.salt, answer.iterations
        )
        signed = scram.signed_text(self.first, answer, scram.ClientFinal.of(nonce))
        proof = scram.client_proof(self._mechanism, salted, signed)
        key = scram.server_key(self._mechanism, salted)
        self.signature = scram.server_signature(self._mechanism, key, signed)
        return scram.ClientFinal.of(nonce, proof).encode()


class Desk:
    """The broker's side of a connection's authentication, with frames instead of a socket."""

    def __init__(
        self,
        mechanisms: Mapping[str, Mechanism],
        *,
        clock: ManualClock | None = None,
        previous: ClientSession | None = None,
        max_reauth_ms: Mapping[str, int] | None = None,
    ) -> None:
        self.clock = ManualClock() if clock is None else clock
        rules = ListenerLogins("SASL", mechanisms, max_reauth_ms=max_reauth_ms)
        self.login = Authenticator(rules, self._versions, self.clock.now_ms, previous)
        self.versions: list[tuple[str, str]] = []
        self.ended = ""
        """The reason why the connection was closed."""

    def _versions(self, request: Request) -> Entity:
        make = response_factory(request.api_key, request.api_version)
        name = getattr(request.body, "client_software_name", "none")
        if " " in name:
            return make.error(42)
        self.versions.append((name, str(request.api_version)))
        return make.message(error_code=0, api_keys=())

    def frame(self, frame: bytes) -> bytes | None:
        """Return the response to a frame, without the length field, or None without a response."""
        assert not self.ended, "the connection is closed"
        try:
            answer: Answer = finish(self.login.response_to(frame))
        except LoginRefused as error:
            self.ended = str(error)
            answer = error.answer
        if not answer:
            return None
        data = b"".join(bytes(piece) for piece in answer if not hasattr(piece, "read"))
        assert int.from_bytes(data[:4]) == len(data) - 4
        return data[4:]

    def ask(self, api: str, version: int, **body: Any) -> Told | None:
        """Return the response to a request, or None without a response."""
        found = self.frame(encode(api, version, 7, "client", body))
        if found is None:
            return None
        number, told = decode(api, version, found)
        assert number == 7
        return told

    def handshake(self, mechanism: str, version: int = 1) -> Told:
        told = self.ask("sasl_handshake", version, mechanism=mechanism)
        assert told is not None
        return told

    def token(self, token: bytes, version: int = 2) -> Told | None:
        return self.ask("sasl_authenticate", version, auth_bytes=token)

    def scram(self, client: ScramClient, version: int = 2) -> Told | None:
        """Run the whole exchange that follows the handshake."""
        told = self.token(client.first.encode(), version)
        assert told is not None
        if told["error_code"] != "none":
            return told
        return self.token(client.final(told["auth_bytes"]), version)


def scram_mechanisms(users: ScramUsers) -> dict[str, Mechanism]:
    return {name: ScramLogin(mechanism, users) for name, mechanism in SCRAM_MECHANISMS.items()}
