"""``fencepost quotas`` lists and explains the quotas of either broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.cluster import unique
from tests.support.waits import until
from tests.wire.command_line import cli


@pytest.fixture
def user(bootstrap: str) -> Iterator[str]:
    name = unique("user")
    yield name
    for row in listed(bootstrap, "--user", name):
        told = ["--user", name] + (["--client-id", row["client_id"]] if row["client_id"] else [])
        cli(bootstrap, "quotas", "remove", *told, row["quota"], "--execute")


def listed(bootstrap: str, *words: str) -> list[dict[str, Any]]:
    return rows(bootstrap, "list", *words)


def rows(bootstrap: str, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        cli(bootstrap, "quotas", *words, "--format", "json").stdout
    )
    return found


def seen(what: Callable[[], bool]) -> None:
    """Wait until ``what`` holds: Apache Kafka's broker applies a change after its response."""
    until(what, "the quotas")


def test_quota_is_set_and_removed_only_with_execute(bootstrap, user):
    words = ("quotas", "set", "--user", user, "producer_byte_rate=1000000", "request_percentage=50")
    shown = cli(bootstrap, *words)
    assert "nothing was changed" in shown.stderr
    assert listed(bootstrap, "--user", user) == []
    cli(bootstrap, *words, "--execute")
    seen(lambda: len(listed(bootstrap, "--user", user)) == 2)
    assert listed(bootstrap, "--user", user)[0] == {
        "user": user,
        "client_id": None,
        "ip": None,
        "quota": "producer_byte_rate",
        "value": 1_000_000,
    }
    assert user in cli(bootstrap, "quotas", "list").stdout
    gone = ("quotas", "remove", "--user", user, "producer_byte_rate")
    assert "1000000" in cli(bootstrap, *gone).stdout
    cli(bootstrap, *gone, "--execute")
    seen(lambda: [r["quota"] for r in listed(bootstrap, "--user", user)] == ["request_percentage"])


def test_quotas_why_names_the_effective_quota_and_its_scope(bootstrap, user):
    for words in (
        ("--user", user, "producer_byte_rate=1000000", "consumer_byte_rate=1000000"),
        ("--user", user, "--client-id", "app", "producer_byte_rate=5000000"),
    ):
        cli(bootstrap, "quotas", "set", *words, "--execute")
    seen(lambda: len(listed(bootstrap, "--user", user)) == 3)

    def why(client_id: str) -> dict[str, list[Any]]:
        found = rows(bootstrap, "why", "--user", user, "--client-id", client_id)
        return {row.pop("quota"): list(row.values()) for row in found}

    nothing = [None, None, None]
    assert why("app") == {
        "producer_byte_rate": [5_000_000, f"user {user}, client-id app", "nobody"],
        "consumer_byte_rate": [1_000_000, f"user {user}", "user"],
        "request_percentage": nothing,
        "controller_mutation_rate": nothing,
    }
    assert why("other")["producer_byte_rate"] == [1_000_000, f"user {user}", "user"]


def test_default_client_id_quota_is_set_and_removed(bootstrap, user):
    words = ("--user", user, "--client-id-default")
    cli(bootstrap, "quotas", "set", *words, "producer_byte_rate=5000000", "--execute")
    seen(lambda: len(listed(bootstrap, "--user", user)) == 1)
    (row,) = listed(bootstrap, *words)
    assert row["client_id"] == "<default>"
    cli(bootstrap, "quotas", "remove", *words, "producer_byte_rate", "--execute")
    seen(lambda: listed(bootstrap, "--user", user) == [])


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("producer_byte_rate=1",), 2, "name a user, client id or address"),
        (("--user", "a", "--user-default", "producer_byte_rate=1"), 2, "contradicts"),
        (("--user", "a", "producer_byte_rate"), 2, "QUOTA=VALUE"),
        (("--user", "a", "producer_byte_rate=many"), 1, "not a number"),
        (("--user", "a", "no_such_rate=1"), 2, "no_such_rate"),
        (("--user", "a", "producer_byte_rate=0.5"), 1, "producer_byte_rate"),
        (("--user", "a", "--ip", "10.0.0.1", "producer_byte_rate=1"), 1, "combination"),
        (("--ip", "10.0.0.1", "producer_byte_rate=1"), 1, "producer_byte_rate"),
    ],
)
def test_invalid_quota_is_refused_with_a_reason(bootstrap, words, status, told):
    assert told in cli(bootstrap, "quotas", "set", *words, status=status).stderr
