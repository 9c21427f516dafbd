"""SCRAM credentials of users, from the metadata image.

Responses do not reveal whether a user exists: :meth:`ScramUsers.stand_in` returns a credential for
every unknown name, and always the same one for the same name.

Source: ``ScramImage``, ``ScramPublisher``; RFC 5802, 5.1.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterator
from typing import Final

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import UserScramCredentialRecord
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.logcore.values import dataclass
from fencepost.protocol.scram import (
    MIN_ITERATIONS,
    SCRAM_MECHANISMS,
    ScramMechanism,
    server_key,
    stored_key,
)

MECHANISM_BY_NUMBER: Final = {
    mechanism.number: mechanism for mechanism in SCRAM_MECHANISMS.values()
}

Profile = tuple[int, int]
"""A mechanism's number and iterations, which set the cost of checking a password."""

_SALT_CHARACTERS: Final = 25
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """The stored form of a password."""

    mechanism: ScramMechanism
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int


def derive_keys(mechanism: int, salted_password: bytes) -> tuple[bytes, bytes]:
    """Return the stored key and the server key of a salted password, by a mechanism's number."""
    scram = MECHANISM_BY_NUMBER[mechanism]
    return stored_key(scram, salted_password), server_key(scram, salted_password)


def new_salt() -> bytes:
    """Return a salt as Kafka's tools make it: 25 base-36 digits."""
    return _salt(secrets.token_bytes(32))


def _salt(seed: bytes) -> bytes:
    rest = int.from_bytes(seed)
    digits = []
    for _ in range(_SALT_CHARACTERS):
        rest, digit = divmod(rest, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits).encode()


class ScramUsers:
    """All users in the current metadata.

    ``draw_secret`` returns the server's secret, which stays the same when the broker restarts.
    """

    def __init__(self, metadata: Metadata, draw_secret: Callable[[], bytes]) -> None:
        self._metadata = metadata
        self._draw_secret = draw_secret
        self._profiles: frozenset[Profile] | None = None
        metadata.subscribe(Subscriber.USERS, self._published)

    def _published(self, old: MetadataImage, new: MetadataImage) -> None:
        if old.scram is not new.scram:
            self._profiles = None

    # --- lookups ---

    def credential(self, user: str, mechanism: ScramMechanism) -> Credential | None:
        """Return a user's credential for one mechanism; None if there is none."""
        record = self._metadata.image.scram.get((user, mechanism.number))
        return None if record is None else _credential(record)

    def any_credential(self, user: str) -> Credential | None:
        """Return a user's credential for the first mechanism that has one; None without any."""
        for mechanism in SCRAM_MECHANISMS.values():
            credential = self.credential(user, mechanism)
            if credential is not None:
                return credential
        return None

    def listed(self) -> Iterator[tuple[str, int, int]]:
        """Yield (user, mechanism number, iterations) of every credential."""
        for credential in self._metadata.image.scram.values():
            yield credential.name, credential.mechanism, credential.iterations

    def iterations(self, user: str) -> list[Profile]:
        """Return the mechanisms of a user, with their iterations."""
        credentials = (
            (mechanism, self.credential(user, mechanism)) for mechanism in SCRAM_MECHANISMS.values()
        )
        return [
            (mechanism.number, has.iterations) for mechanism, has in credentials if has is not None
        ]

    # --- unknown users ---

    def stand_in(self, user: str, mechanism: ScramMechanism | None = None) -> Credential:
        """Return a credential that no password matches, for a user without one.

        Checking a password against the result costs as much as against an existing credential.
        Without ``mechanism``, the result also has the mechanism of an existing credential.
        """
        costs = self._costs() if mechanism is None else self._costs_of(mechanism.number)
        # The seed has a fixed size even for a long name, and so have all inputs below.
        seed = hmac.digest(self._secret, user.encode(), "sha512")
        # Rendezvous hashing: when the set of costs changes, most names keep their cost.
        number, iterations = max(costs, key=lambda cost: _mac(seed, "cost", *cost))
        scram_mechanism = MECHANISM_BY_NUMBER[number]
        stored, server = (
            _mac(seed, kind, number)[: scram_mechanism.key_bytes] for kind in ("stored", "server")
        )
        return Credential(
            scram_mechanism, _salt(_mac(seed, "salt", number)), stored, server, iterations
        )

    def _costs(self) -> frozenset[Profile]:
        if self._profiles is None:
            costs = frozenset((number, count) for _, number, count in self.listed())
            self._profiles = costs or frozenset({(1, MIN_ITERATIONS)})
        return self._profiles

    def _costs_of(self, number: int) -> frozenset[Profile]:
        costs = frozenset(cost for cost in self._costs() if cost[0] == number)
        return costs or frozenset({(number, MIN_ITERATIONS)})

    def prepare(self) -> None:
        """Draw the secret for :meth:`stand_in`. Raises OSError."""
        self._secret = self._draw_secret()


def _mac(seed: bytes, *words: object) -> bytes:
    return hmac.digest(seed, " ".join(map(str, words)).encode(), "sha512")


def _credential(record: UserScramCredentialRecord) -> Credential:
    mechanism = MECHANISM_BY_NUMBER[record.mechanism]
    keys = record.stored_key, record.server_key
    return Credential(mechanism, record.salt, *keys, record.iterations)
