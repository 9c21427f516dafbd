"""Users and what their passwords became: credentials of SCRAM, kept in the metadata log.

Nobody can tell by what is answered whether there is a user: :meth:`Users.stand_in` has for every
name what a login with it would be told, always the same.

Source: ``ScramControlManager``, ``ScramImage``, ``UserScramCredentialRecord``; RFC 5802, 5.1.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.records import SCRAM, SECRET
from fencepost.coordinator.wire.scram import (
    MIN_ITERATIONS,
    SCRAM_MECHANISMS,
    ScramMechanism,
    server_key,
    stored_key,
)

MAX_ITERATIONS: Final = 16_384
"""How often a password has been hashed, at most: every login costs the client as much."""

MAX_CREDENTIALS: Final = 20_000
"""Credentials of all users; each takes about a kilobyte."""

MAX_SALT_BYTES: Final = 1_024
"""Bytes of a salt; everybody who asks is told it."""

MECHANISM_BY_NUMBER: Final = {one.number: one for one in SCRAM_MECHANISMS.values()}

Key = tuple[str, int]
"""A user's name and a mechanism's number."""

Profile = tuple[int, int]
"""A mechanism's number and iterations: what a check of a password costs."""

_SALT_CHARACTERS: Final = 25
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_SECRET_NAME: Final = "salts of unknown users"  # noqa: S105 - the name of a record


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """What is kept of a password."""

    mechanism: ScramMechanism
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    @classmethod
    def of(
        cls, mechanism: ScramMechanism, salt: bytes, iterations: int, salted: bytes
    ) -> Credential:
        """That of a password that was hashed already."""
        keys = stored_key(mechanism, salted), server_key(mechanism, salted)
        return cls(mechanism, salt, *keys, iterations)


def new_salt() -> bytes:
    """A salt as Kafka's tools make them: 25 digits to the base of 36."""
    return _salt(secrets.token_bytes(32))


def _salt(seed: bytes) -> bytes:
    rest = int.from_bytes(seed)
    digits = []
    for _ in range(_SALT_CHARACTERS):
        rest, digit = divmod(rest, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits).encode()


class Users:
    """All users, as the metadata log has them at the moment."""

    def __init__(self, metadata: MetadataLog) -> None:
        self._metadata = metadata
        self._profiles: frozenset[Profile] | None = None
        metadata.listen_to_table(SCRAM, self._changed)

    def _changed(self) -> None:
        self._profiles = None

    # --- looking ---

    def credential(self, user: str, mechanism: ScramMechanism) -> Credential | None:
        """What is kept of a user's password by one mechanism."""
        found = self._metadata.table(SCRAM).get(_name(user, mechanism.number))
        return None if found is None else _credential(found)

    def any_credential(self, user: str) -> Credential | None:
        """The same by the first mechanism that the user has one of."""
        for mechanism in SCRAM_MECHANISMS.values():
            found = self.credential(user, mechanism)
            if found is not None:
                return found
        return None

    def listed(self) -> Iterator[tuple[str, int, int]]:
        """(user, number of a mechanism, iterations) of all; do not change users meanwhile."""
        for value in self._metadata.table(SCRAM).values():
            yield value["Name"], value["Mechanism"], value["Iterations"]

    def iterations(self, user: str) -> list[Profile]:
        """The mechanisms that a user may log in by, with their iterations."""
        found = ((one, self.credential(user, one)) for one in SCRAM_MECHANISMS.values())
        return [(one.number, has.iterations) for one, has in found if has is not None]

    # --- for users that there are not ---

    def stand_in(self, user: str, mechanism: ScramMechanism | None = None) -> Credential:
        """A credential that nobody has the password of, in place of one that is not there.

        It is as costly as one of those that there are. Without ``mechanism`` it is of any.
        """
        costs = self._costs() if mechanism is None else self._costs_of(mechanism.number)
        # What follows is of a few bytes each, however long the name.
        seed = hmac.digest(self._secret, user.encode(), "sha512")
        # Whichever a name fits best stays the same when others come and go.
        number, iterations = max(costs, key=lambda cost: _mac(seed, "cost", *cost))
        one = MECHANISM_BY_NUMBER[number]
        stored, server = (
            _mac(seed, kind, number)[: one.key_bytes] for kind in ("stored", "server")
        )
        return Credential(one, _salt(_mac(seed, "salt", number)), stored, server, iterations)

    def _costs(self) -> frozenset[Profile]:
        if self._profiles is None:
            found = frozenset((number, count) for _, number, count in self.listed())
            self._profiles = found or frozenset({(1, MIN_ITERATIONS)})
        return self._profiles

    def _costs_of(self, number: int) -> frozenset[Profile]:
        found = frozenset(one for one in self._costs() if one[0] == number)
        return found or frozenset({(number, MIN_ITERATIONS)})

    def prepare(self) -> None:
        """Have a secret for :meth:`stand_in`; the same after every start."""
        if not self._metadata.table(SECRET):
            self._metadata.change_table(SECRET, {_SECRET_NAME: {"Secret": os.urandom(32)}})

    @property
    def _secret(self) -> bytes:
        secret: bytes = self._metadata.table(SECRET)[_SECRET_NAME]["Secret"]
        return secret

    # --- changing ---

    @property
    def room(self) -> int:
        """How many more credentials there may be."""
        return MAX_CREDENTIALS - len(self._metadata.table(SCRAM))

    def change(self, changes: Mapping[Key, Credential | None]) -> None:
        """Let users have these credentials, None for no longer; the caller has checked them."""
        if not changes:
            return
        self._metadata.change_table(
            SCRAM,
            {
                _name(*key): None if one is None else _fields(key[0], one)
                for key, one in changes.items()
            },
        )


def _mac(seed: bytes, *words: object) -> bytes:
    return hmac.digest(seed, " ".join(map(str, words)).encode(), "sha512")


def _name(user: str, number: int) -> str:
    return f"{number}:{user}"


def _fields(user: str, one: Credential) -> dict[str, Any]:
    return {
        "Name": user,
        "Mechanism": one.mechanism.number,
        "Salt": one.salt,
        "StoredKey": one.stored_key,
        "ServerKey": one.server_key,
        "Iterations": one.iterations,
    }


def _credential(value: Mapping[str, Any]) -> Credential:
    mechanism = MECHANISM_BY_NUMBER[value["Mechanism"]]
    keys = value["StoredKey"], value["ServerKey"]
    return Credential(mechanism, value["Salt"], *keys, value["Iterations"])
