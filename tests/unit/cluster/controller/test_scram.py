"""SCRAM credentials as the controller changes them (``cluster/controller/scram.py``).

Most scenarios come from Kafka's ScramControlManagerTest; others interleave requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fencepost.cluster.controller import scram
from fencepost.cluster.controller.scram import (
    MAX_ITERATIONS,
    MAX_SALT_BYTES,
    MAX_SALTED_PASSWORD_BYTES,
    ScramCredentialAlteration,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from fencepost.cluster.records import RemoveUserScramCredentialRecord, UserScramCredentialRecord
from fencepost.logcore.steps import finish
from tests.unit.cluster.controller import cluster_driver

SHA_256, SHA_512 = 1, 2
LEAST = {SHA_256: 4_096, SHA_512: 4_096}


def keys(mechanism: int, salted: bytes) -> tuple[bytes, bytes]:
    return b"stored %d " % mechanism + salted, b"server %d " % mechanism + salted


def put(
    name: str,
    mechanism: int = SHA_256,
    *,
    iterations: int = 4_096,
    salt: bytes = b"salt",
    salted: bytes = b"salted",
) -> ScramCredentialUpsertion:
    return ScramCredentialUpsertion(name, mechanism, iterations, salt, salted)


class Cluster(cluster_driver.Cluster):
    def __init__(self, *users: str) -> None:
        super().__init__(())
        self.alter_users(*map(put, users))

    def alter_users(self, *alterations: ScramCredentialAlteration) -> list[str | None]:
        errors = self.do(self.controller.alter_credentials(alterations, keys))
        return [None if error is None else str(error) for error in errors]

    def check(
        self, *asked: ScramCredentialAlteration, refuse: str | None = None
    ) -> tuple[dict[str, str], list[str]]:
        errors, accepted = finish(self.controller.check_credentials(asked, LEAST, lambda _: refuse))
        return {name: str(error) for name, error in errors.items()}, [
            alteration.name for alteration in accepted
        ]

    @property
    def users(self) -> set[tuple[str, int]]:
        return set(self.image.scram)


NOT_THERE = "Attempt to delete a user credential that does not exist"
TWICE = "A user credential cannot be altered twice in the same request"


def test_upsertion_keeps_the_keys_and_not_the_salted_password() -> None:
    outcome = Cluster().controller.alter_credentials([put("alice", SHA_512)], keys)
    stored, server = keys(SHA_512, b"salted")
    assert outcome.records == (
        UserScramCredentialRecord("alice", SHA_512, b"salt", stored, server, 4_096),
    )


def test_deletion_removes_credential_of_one_mechanism() -> None:
    cluster = Cluster("alice")
    cluster.alter_users(put("alice", SHA_512))
    outcome = cluster.controller.alter_credentials(
        [ScramCredentialDeletion("alice", SHA_256)], keys
    )
    assert outcome.records == (RemoveUserScramCredentialRecord("alice", SHA_256),)
    cluster.alter_users(ScramCredentialDeletion("alice", SHA_256))
    assert cluster.users == {("alice", SHA_512)}


@pytest.mark.parametrize(
    ("alteration", "why"),
    [
        (put(""), "Username must not be empty"),
        (ScramCredentialDeletion("", SHA_256), "Username must not be empty"),
        (put("a", 0), "Unknown SCRAM mechanism"),
        (ScramCredentialDeletion("a", 3), "Unknown SCRAM mechanism"),
        (put("a", iterations=4_095), "Too few iterations"),
        (put("a", iterations=MAX_ITERATIONS), None),
        (put("a", iterations=MAX_ITERATIONS + 1), "Too many iterations"),
        (put("a", salt=bytes(MAX_SALT_BYTES)), None),
        (put("a", salt=bytes(MAX_SALT_BYTES + 1)), "Too long a salt"),
        (put("a", salted=bytes(MAX_SALTED_PASSWORD_BYTES)), None),
        (put("a", salted=bytes(MAX_SALTED_PASSWORD_BYTES + 1)), "Too long a salted password"),
        (ScramCredentialDeletion("a", SHA_256), NOT_THERE),
        (ScramCredentialDeletion("alice", SHA_512), NOT_THERE),
        (ScramCredentialDeletion("alice", SHA_256), None),
    ],
)
def test_credential_check_returns_the_first_error(
    alteration: ScramCredentialAlteration, why: str | None
) -> None:
    expected = ({}, [alteration.name]) if why is None else ({alteration.name: why}, [])
    assert Cluster("alice").check(alteration) == expected


def test_user_name_that_the_store_cannot_keep_is_refused() -> None:
    cluster = Cluster("alice")
    assert cluster.check(put("b"), refuse="no name for a znode") == (
        {"b": "no name for a znode"},
        [],
    )
    assert cluster.check(
        ScramCredentialDeletion("alice", SHA_256), refuse="no name for a znode"
    ) == (
        {},
        ["alice"],
    )


@pytest.mark.parametrize(
    "again", [put("a", SHA_512), put("a", 0), ScramCredentialDeletion("a", SHA_256)]
)
def test_user_altered_twice_in_a_request_is_refused(again: ScramCredentialAlteration) -> None:
    cluster = Cluster("a", "b")
    assert cluster.check(put("a"), put("b"), again) == ({"a": TWICE}, ["b"])
    assert cluster.check(put("a"), again, put("a")) == ({"a": TWICE}, [])


def test_first_error_of_a_user_is_returned() -> None:
    assert Cluster().check(put("a", 0), put("a")) == ({"a": "Unknown SCRAM mechanism"}, [])


def bounded(monkeypatch: pytest.MonkeyPatch, users: Iterable[str], limit: int) -> Cluster:
    monkeypatch.setattr(scram, "MAX_CREDENTIALS", limit)
    return Cluster(*users)


def test_upsertions_above_credential_limit_are_refused_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = bounded(monkeypatch, "ab", 3)
    why = "the limit of 3 credentials (MAX_CREDENTIALS) is reached"
    asked = put("a"), put("c"), put("d"), ScramCredentialDeletion("b", SHA_256)
    assert cluster.check(*asked) == (dict.fromkeys("acd", why), ["b"])
    assert cluster.check(put("a"), put("b"), put("c")) == ({}, ["a", "b", "c"])


def test_alteration_sees_credentials_changed_after_its_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = bounded(monkeypatch, "ab", 3)
    assert cluster.check(ScramCredentialDeletion("a", SHA_256), put("b"), put("c"))[0] == {}
    cluster.alter_users(ScramCredentialDeletion("a", SHA_256), put("d"), put("e"))
    why = "the limit of 3 credentials (MAX_CREDENTIALS) is reached"
    assert cluster.alter_users(ScramCredentialDeletion("a", SHA_256), put("b"), put("c")) == [
        NOT_THERE,
        None,
        why,
    ]
    assert cluster.users == {(name, SHA_256) for name in "bde"}


def test_add_credentials_does_not_replace_existing_credential() -> None:
    cluster = Cluster("alice")
    outcome = cluster.controller.add_credentials(
        [put("alice"), put("alice", SHA_512), put("b"), put("b")], keys
    )
    assert outcome.answer == ["alice", "b"]
    assert [(record.name, record.mechanism) for record in outcome.records] == [  # type: ignore[union-attr]
        ("alice", SHA_512),
        ("b", SHA_256),
    ]
