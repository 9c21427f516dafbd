"""DescribeClientQuotas and AlterClientQuotas (48, 49), with valid and invalid requests.

The scenarios come from Kafka's ``ClientQuotasRequestTest``. ``tests/oracle/traces_admin.py``
compares the responses for its entities and filters with Apache Kafka's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fencepost.cluster.controller import quotas
from tests.support.cluster import Cluster, unique

Names = Mapping[str, str | None]
EXACT, DEFAULT, ANY = 0, 1, 2


def entry(entity: Names, **values: float | None) -> dict[str, Any]:
    """Return an alteration of an entity's quotas; ``None`` removes a quota."""
    return {
        "entity": [{"entity_type": k, "entity_name": name} for k, name in entity.items()],
        "ops": [
            {"key": key, "value": value or 0.0, "remove": value is None}
            for key, value in values.items()
        ],
    }


def alter(
    client: Cluster, *entries: dict[str, Any], version: int = 1, validate_only: bool = False
) -> list[str]:
    answer = client.call(
        "alter_client_quotas", version, entries=list(entries), validate_only=validate_only
    )
    return [row["error_code"] for row in answer["entries"]]


def told(
    client: Cluster, *components: tuple[str, int, str | None], strict: bool = True
) -> dict[frozenset[tuple[str, str | None]], dict[str, float]]:
    answer = client.call(
        "describe_client_quotas",
        1,
        components=[{"entity_type": k, "match_type": how, "match": n} for k, how, n in components],
        strict=strict,
    )
    assert answer["error_code"] == "none"
    return {
        frozenset((part["entity_type"], part["entity_name"]) for part in row["entity"]): {
            value["key"]: value["value"] for value in row["values"]
        }
        for row in answer["entries"]
    }


@pytest.fixture
def user(client: Cluster) -> Iterator[str]:
    name = unique("user")
    yield name
    keys = told(client, ("user", EXACT, name)).get(frozenset({("user", name)}), {})
    alter(client, entry({"user": name}, **dict.fromkeys(keys)))


@pytest.mark.parametrize("version", [0, 1])
def test_client_quotas_are_set_changed_and_removed(client, user, version):
    alice = {"user": user}

    def now() -> dict[str, float]:
        return told(client, ("user", EXACT, user)).get(frozenset(alice.items()), {})

    for change, after in (
        (
            {"producer_byte_rate": 10_000.0, "consumer_byte_rate": 20_000.0},
            {"producer_byte_rate": 10_000, "consumer_byte_rate": 20_000},
        ),
        (
            {"producer_byte_rate": 15_000.0},
            {"producer_byte_rate": 15_000, "consumer_byte_rate": 20_000},
        ),
        ({"producer_byte_rate": None}, {"consumer_byte_rate": 20_000}),
        ({"request_percentage": None}, {"consumer_byte_rate": 20_000}),
        ({"controller_mutation_rate": 0.5, "consumer_byte_rate": None}, None),
    ):
        before = now()
        assert alter(client, entry(alice, **change), version=version, validate_only=True) == [
            "none"
        ]
        assert now() == before
        assert alter(client, entry(alice, **change), version=version) == ["none"]
        assert now() == (after or {"controller_mutation_rate": 0.5})


@pytest.mark.parametrize(
    ("entity", "values"),
    [
        ({"user": ""}, {"request_percentage": 12.34}),
        ({"client-id": ""}, {"request_percentage": 12.34}),
        ({"": "name"}, {"request_percentage": 12.34}),
        ({"x" * 30_000: "name"}, {"request_percentage": None}),
        ({}, {"producer_byte_rate": 10_000.0}),
        ({"user": "u"}, {"bad": 1.0}),
        ({"user": "u"}, {"producer_byte_rate": 10_000.5}),
        ({"user": "u"}, {"producer_byte_rate": 0.0}),
        ({"user": "u"}, {"request_percentage": -1.0}),
        ({"user": "u"}, {"producer_byte_rate": 1e30}),
        ({"user": "u"}, {"controller_mutation_rate": float("nan")}),
        ({"user": "u"}, {"request_percentage": float("inf")}),
        ({"user": "u"}, {"connection_creation_rate": 1.0}),
        ({"user": "u", "ip": "1.2.3.4"}, {"request_percentage": 12.34}),
        ({"client-id": "c", "ip": "1.2.3.4"}, {"request_percentage": 12.34}),
        ({"ip": "not a valid host because it has spaces"}, {"connection_creation_rate": 50.0}),
        ({"ip": "RFC2606.invalid"}, {"connection_creation_rate": 50.0}),
        ({"ip": "1.2.3.4"}, {"producer_byte_rate": 50.0}),
        ({"ip": "1.2.3.4"}, {"connection_creation_rate": 0.5}),
        ({"ip": "1.2.3.4"}, {"connection_creation_rate": 2.0**31}),
    ],
)
def test_invalid_quota_alteration_is_refused_and_changes_nothing(client, entity, values):
    before = told(client, strict=False)
    for validate_only in (True, False):
        assert alter(client, entry(entity, **values), validate_only=validate_only) == [
            "invalid_request"
        ]
    assert told(client, strict=False) == before


def test_invalid_quota_entity_does_not_prevent_altering_others(client, user):
    good = entry({"user": user}, producer_byte_rate=1e6)
    bad = entry({"user": "u"}, producer_byte_rate=0.5)
    assert sorted(alter(client, bad, good)) == ["invalid_request", "none"]
    assert told(client, ("user", EXACT, user)) == {
        frozenset({("user", user)}): {"producer_byte_rate": 1e6}
    }


def test_quota_or_entity_named_twice_is_refused(client, user):
    alteration = entry({"user": user}, producer_byte_rate=1.0)
    assert alter(client, alteration, alteration) == ["invalid_request"]
    assert alter(client, alteration | {"ops": alteration["ops"] * 2}) == ["invalid_request"]
    both = {"user": user, "client-id": "c"}
    assert alter(
        client,
        entry(both, producer_byte_rate=1.0),
        entry(dict(reversed(both.items())), producer_byte_rate=2.0),
    ) == ["invalid_request"]
    assert told(client, ("user", EXACT, user), strict=False) == {}
    # If an entity type occurs twice, the last name wins.
    assert alter(
        client, {**alteration, "entity": [*entry({"user": "x"})["entity"], *alteration["entity"]]}
    ) == ["none"]
    assert list(told(client, ("user", EXACT, user))) == [frozenset({("user", user)})]
    many = {f"kind-{number}": "x" for number in range(5)}
    assert alter(client, entry(many), entry(many)) == ["invalid_request"] * 2


MATCHED: list[tuple[dict[str, str | None], float]] = [
    ({"user": "user-1", "client-id": "client-id-1"}, 50.5),
    ({"user": "user-2", "client-id": "client-id-1"}, 51.51),
    ({"user": "user-3", "client-id": "client-id-2"}, 52.52),
    ({"user": None, "client-id": "client-id-1"}, 53.53),
    ({"user": "user-1", "client-id": None}, 54.54),
    ({"user": "user-3", "client-id": None}, 55.55),
    ({"user": "user-1"}, 56.56),
    ({"user": "user-2"}, 57.57),
    ({"user": "user-3"}, 58.58),
    ({"user": None}, 59.59),
    ({"client-id": "client-id-2"}, 60.6),
    ({"ip": "1.2.3.4"}, 10.0),
    ({"ip": "2.3.4.5"}, 20.0),
]


@pytest.fixture
def matched(client: Cluster) -> Iterator[None]:
    def change(*, remove: bool) -> None:
        key = {True: "connection_creation_rate", False: "request_percentage"}
        entries = [
            entry(entity, **{key["ip" in entity]: None if remove else value})
            for entity, value in MATCHED
        ]
        assert alter(client, *entries) == ["none"] * len(MATCHED)

    change(remove=False)
    yield
    change(remove=True)
    assert told(client, strict=False) == {}


@pytest.mark.usefixtures("matched")
def test_strict_quota_filter_matches_exactly_one_entity(client):
    for entity, value in MATCHED:
        filters = [(k, DEFAULT if name is None else EXACT, name) for k, name in entity.items()]
        (found,) = told(client, *filters).items()
        assert found[0] == frozenset(entity.items())
        assert list(found[1].values()) == [value]
    for filters in (
        [("user", EXACT, "user-1"), ("client-id", EXACT, "client-id-2")],
        [("user", EXACT, "user-2"), ("client-id", DEFAULT, None)],
        [("user", EXACT, "user-4")],
        [("client-id", EXACT, "client-id-1")],
        [("client-id", DEFAULT, None)],
        [("ip", DEFAULT, None)],
    ):
        assert told(client, *filters) == {}


@pytest.mark.usefixtures("matched")
@pytest.mark.parametrize(
    ("components", "strict", "count"),
    [
        ([("user", EXACT, "user-1")], False, 3),
        ([("user", EXACT, "unknown")], False, 0),
        ([("client-id", EXACT, "client-id-2")], False, 2),
        ([("user", DEFAULT, None)], False, 2),
        ([("user", EXACT, "user-2")], True, 1),
        ([("client-id", EXACT, "client-id-1")], True, 0),
        ([("user", ANY, None)], True, 4),
        ([("user", ANY, None)], False, 10),
        ([("client-id", ANY, None)], True, 1),
        ([("client-id", ANY, None)], False, 7),
        ([("ip", ANY, None)], False, 2),
        ([("user", ANY, None), ("client-id", ANY, None)], False, 6),
        ([], False, 13),
        ([], True, 0),
    ],
)
def test_quota_filter_returns_all_matching_entities(client, components, strict, count):
    assert len(told(client, *components, strict=strict)) == count


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    ("components", "code"),
    [
        ([("ip", ANY, None), ("user", ANY, None)], "invalid_request"),
        ([("user", ANY, None), ("ip", ANY, None)], "invalid_request"),
        ([("user", ANY, None), ("user", ANY, None)], "invalid_request"),
        ([("user", EXACT, None)], "invalid_request"),
        ([("user", ANY, "a")], "invalid_request"),
        ([("user", 3, None)], "invalid_request"),
        ([("", ANY, None)], "invalid_request"),
        ([("group", ANY, None)], "unsupported_version"),
        ([("user", ANY, None), ("client-id", ANY, None), ("x", ANY, None)], "unsupported_version"),
        ([("user", ANY, None), ("client-id", ANY, None)] * 2, "invalid_request"),
    ],
)
def test_invalid_quota_filter_is_refused(client, version, components, code):
    answer = client.call(
        "describe_client_quotas",
        version,
        components=[{"entity_type": k, "match_type": how, "match": n} for k, how, n in components],
        strict=False,
    )
    assert (answer["error_code"], answer["entries"]) == (code, None)


def test_quota_entity_name_may_have_any_characters(client):
    for name in ("user with spaces", "<default>", "ü/é=,\n", "x" * 20_000):
        alter(client, entry({"user": name}, producer_byte_rate=20_000.0))
        assert told(client, ("user", EXACT, name)) == {
            frozenset({("user", name)}): {"producer_byte_rate": 20_000}
        }
        assert told(client, ("user", DEFAULT, None)) == {}
        alter(client, entry({"user": name}, producer_byte_rate=None))


def test_quota_changes_above_the_request_or_total_limit_are_refused(client, monkeypatch):
    monkeypatch.setattr(quotas, "MAX_CHANGES", 2)
    entries = [entry({"user": f"u{number}"}, producer_byte_rate=1e6) for number in range(3)]
    assert alter(client, *entries) == ["policy_violation"] * 3
    assert told(client, strict=False) == {}
    assert alter(client, *entries[:2]) == ["none"] * 2
    monkeypatch.setattr(quotas, "MAX_QUOTAS", 2)
    assert alter(client, *entries) == ["none", "none", "policy_violation"]
    gone = [entry({"user": f"u{number}"}, producer_byte_rate=None) for number in range(2)]
    assert alter(client, *gone) == ["none"] * 2
