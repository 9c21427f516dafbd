"""Users, quotas and ACLs in znodes that Apache Kafka 3.9.2 wrote, and in invalid znodes."""

from __future__ import annotations

import json
import random
import uuid
from typing import Any

import pytest

from fencepost.cluster.acl import Operation, PatternType, Permission, ResourceType
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    ClientQuotaRecord,
    EntityData,
    UserScramCredentialRecord,
)
from fencepost.coordinator.zookeeper import access_znodes as formats
from fencepost.coordinator.zookeeper.access_znodes import SecurityChange
from fencepost.coordinator.zookeeper.errors import NotOurFormatError

TOPIC = "/kafka-acl/Topic/orders"
RULES = (
    '{"acls":[{"principal":"User:a","permissionType":"Allow","host":"*","operation":"Read"},'
    '{"principal":"User:b","permissionType":"Deny","host":"10.0.0.1","operation":"All"},'
    '{"principal":"User:ä","permissionType":"Allow","host":"*","operation":"DescribeConfigs"}],'
    '"version":1}'
).encode()


def rule(
    principal: str = "User:a",
    host: str = "*",
    operation: Operation = Operation.READ,
    permission: Permission = Permission.ALLOW,
) -> tuple[object, ...]:
    return principal, host, int(operation), int(permission)


NOBODY = rule("User:*", operation=Operation.ALL, permission=Permission.DENY)
"""An ACL that denies every operation to every user."""


def read(data: bytes | None, path: str = TOPIC) -> list[tuple[object, ...]]:
    found = []
    for record in formats.records_of(path, data):
        assert isinstance(record, AccessControlEntryRecord)
        found.append((record.principal, record.host, record.operation, record.permission_type))
    return found


def written(path: str, data: bytes) -> bytes | None:
    return formats.changed(
        path, None, [SecurityChange(record) for record in formats.records_of(path, data)]
    )


def test_acl_znode_is_read_and_rewritten_byte_for_byte():
    assert read(RULES) == [
        rule(),
        rule("User:b", "10.0.0.1", Operation.ALL, Permission.DENY),
        rule("User:ä", operation=Operation.DESCRIBE_CONFIGS),
    ]
    assert written(TOPIC, RULES) == RULES
    first = formats.records_of(TOPIC, RULES)[0]
    assert first == formats.records_of(TOPIC, RULES)[0], "with the same id after every start"
    assert isinstance(first, AccessControlEntryRecord)
    assert (first.resource_type, first.resource_name, first.pattern_type) == (
        ResourceType.TOPIC,
        "orders",
        PatternType.LITERAL,
    )


@pytest.mark.parametrize(
    ("path", "where", "note"),
    [
        (TOPIC, "/kafka-acl-changes/acl_changes_", b"TOPIC:orders"),
        (
            "/kafka-acl/TransactionalId/a:b",
            "/kafka-acl-changes/acl_changes_",
            b"TRANSACTIONAL_ID:a:b",
        ),
        (
            "/kafka-acl-extended/prefixed/Group/g",
            "/kafka-acl-extended-changes/acl_changes_",
            b'{"version":1,"resourceType":"GROUP","name":"g","patternType":"PREFIXED"}',
        ),
    ],
)
def test_acl_change_notification_names_the_changed_resource(path: str, where: str, note: bytes):
    assert formats.notification_of(path) == (where, note)
    assert formats.path_of_notification(where.rpartition("/")[0], "/n", note) == path


def test_acl_change_notification_of_older_release_is_read():
    assert formats.path_of_notification("/kafka-acl-changes", "/n", b"TransactionalId:x") == (
        "/kafka-acl/TransactionalId/x"
    )


@pytest.mark.parametrize("note", [b"", b"\xff", b"{}", b"Nothing:x", b"[1]", b"ANY:x"])
@pytest.mark.parametrize("folder", ["/kafka-acl-changes", "/kafka-acl-extended-changes"])
def test_malformed_acl_change_notification_is_refused(folder: str, note: bytes):
    with pytest.raises(NotOurFormatError):
        formats.path_of_notification(folder, "/n", note)


@pytest.mark.parametrize(
    "data",
    [
        b"no JSON",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b"{}",
        b'{"version":2,"acls":[]}',
        b'{"version":1}',
        b'{"version":1,"acls":{}}',
    ],
)
def test_unreadable_acl_znode_denies_all_operations_to_everyone(data: bytes):
    assert read(data) == [NOBODY]
    with pytest.raises(NotOurFormatError):
        formats.changed(TOPIC, data, [])


ENTRY = {"principal": "User:a", "permissionType": "Allow", "host": "*", "operation": "Read"}


def without(key: str, **others: object) -> dict[str, object]:
    return {name: value for name, value in (ENTRY | others).items() if name != key}


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        (7, [NOBODY]),
        (ENTRY | {"operation": "New"}, []),
        (ENTRY | {"operation": "Any"}, []),
        (ENTRY | {"principal": "a"}, []),
        (without("host"), []),
        (
            ENTRY | {"operation": "New", "permissionType": "Deny"},
            [rule(operation=Operation.ALL, permission=Permission.DENY)],
        ),
        (
            without("principal", permissionType="Deny"),
            [rule("User:*", permission=Permission.DENY)],
        ),
        (
            without("permissionType"),
            [rule(operation=Operation.ALL, permission=Permission.DENY)],
        ),
        (ENTRY | {"permissionType": "DENY"}, [rule(permission=Permission.DENY)]),
    ],
)
def test_malformed_acl_entry_allows_nothing_and_denies_all_it_could(
    entry: Any, meant: list[object]
):
    data = json.dumps({"version": 1, "acls": [ENTRY, entry]}).encode()
    assert read(data) == [rule(), *meant]
    kept = formats.changed(TOPIC, data, [])
    assert kept is not None
    assert entry in json.loads(kept)["acls"], "who changes others leaves it"


def test_deny_acl_of_a_malformed_entry_can_be_deleted():
    bad = ENTRY | {"operation": "New", "permissionType": "Deny"}
    data = json.dumps({"version": 1, "acls": [ENTRY, bad]}).encode()
    denial = formats.records_of(TOPIC, data)[1]
    left = formats.changed(TOPIC, data, [SecurityChange(denial, is_removed=True)])
    assert left is not None
    assert json.loads(left) == {"version": 1, "acls": [ENTRY]}


@pytest.mark.parametrize("path", ["/kafka-acl/TOPIC/x", "/kafka-acl/New/x"])
def test_acls_of_unknown_resource_types_are_ignored(path: str):
    assert formats.records_of(path, RULES) == []


def test_acl_znode_equals_a_set_after_random_changes():
    """Changes are applied in random order, and the znode is compared with a model."""
    for seed in range(50):
        chance = random.Random(seed)
        data: bytes | None = None
        model: set[tuple[object, ...]] = set()
        for _ in range(40):
            facts = rule(f"User:{chance.randrange(4)}", permission=chance.choice([*Permission][2:]))
            record = AccessControlEntryRecord(
                uuid.uuid4(), int(ResourceType.TOPIC), "orders", 3, *facts
            )
            removes = chance.random() < 0.5
            data = formats.changed(TOPIC, data, [SecurityChange(record, removes)])
            (model.discard if removes else model.add)(facts)
            assert set(read(data)) == model, seed
            assert (data is None) == (not model)


# --- users and quotas ---

USER = "/config/users/alice"
CREDENTIAL = (
    "salt=MTY=,stored_key=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=,"
    "server_key=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=,iterations=4096"
)


def settings(**values: str) -> bytes:
    return json.dumps({"version": 1, "config": values}).encode()


def test_scram_user_znode_is_read_and_rewritten_byte_for_byte():
    data = f'{{"version":1,"config":{{"SCRAM-SHA-256":"{CREDENTIAL}"}}}}'.encode()
    assert formats.records_of(USER, data) == [
        UserScramCredentialRecord("alice", 1, b"16", bytes(32), bytes(32), 4096)
    ]
    assert written(USER, data) == data


@pytest.mark.parametrize(
    "text",
    [
        "",
        "salt=x",
        CREDENTIAL.replace("iterations=4096", "iterations=4095"),
        CREDENTIAL.replace("iterations=4096", "iterations=99999999999"),
        CREDENTIAL.replace("AAAA=,server", "=,server"),
        CREDENTIAL.replace("MTY=", "?"),
    ],
)
def test_malformed_scram_credential_is_ignored(text: str):
    data = settings(**{"SCRAM-SHA-256": text, "producer_byte_rate": "5"})
    entity = (EntityData("user", "alice"),)
    assert formats.records_of(USER, data) == [
        ClientQuotaRecord(entity, "producer_byte_rate", 5.0, remove=False)
    ]


@pytest.mark.parametrize(
    ("entity", "path"),
    [
        ({"user": "a b*~+ä"}, "users/a%20b%2A%7E%2B%C3%A4"),
        ({"user": None}, "users/<default>"),
        ({"user": "<default>"}, "users/%3Cdefault%3E"),
        ({"client-id": "a/b"}, "clients/a%2Fb"),
        ({"client-id": None, "user": None}, "users/<default>/clients/<default>"),
        ({"client-id": "c", "user": "clients"}, "users/clients/clients/c"),
        ({"ip": "10.0.0.1"}, "ips/10.0.0.1"),
        ({"ip": None}, "ips/<default>"),
    ],
)
def test_quota_entity_maps_to_its_own_config_path(entity: dict[str, str | None], path: str):
    named = tuple(EntityData(kind, name) for kind, name in sorted(entity.items()))
    key = "connection_creation_rate" if "ip" in entity else "producer_byte_rate"
    record = ClientQuotaRecord(named, key, 7.0, remove=False)
    assert formats.path_of(record) == f"/config/{path}"
    data = formats.changed(f"/config/{path}", None, [SecurityChange(record)])
    assert data == f'{{"version":1,"config":{{"{key}":"7"}}}}'.encode()
    assert formats.records_of(f"/config/{path}", data) == [record]
    prefix, note = formats.notification_of(f"/config/{path}")
    assert prefix == "/config/changes/config_change_"
    assert note == f'{{"version":2,"entity_path":"{path}"}}'.encode()


@pytest.mark.parametrize("path", ["/config/users/a/clients/", "/config/users/a/b", "/config/x/y"])
def test_config_path_without_an_entity_is_ignored(path: str):
    assert formats.records_of(path, settings(producer_byte_rate="5")) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (200.0, "200.0"),
        (12.5, "12.5"),
        (9999999.0, "9999999.0"),
        (1e7, "1.0E7"),
        (12345678.9, "1.23456789E7"),
        (1.5e300, "1.5E300"),
        (0.001, "0.001"),
        (0.0001, "1.0E-4"),
        (0.00012, "1.2E-4"),
    ],
)
def test_quota_value_is_formatted_as_in_java(value: float, text: str):
    assert formats.quota_text("request_percentage", value) == text
    assert float(text) == value


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan", "inf", "1.5", "1e400"])
def test_invalid_quota_value_is_ignored(text: str):
    assert formats.records_of(USER, settings(producer_byte_rate=text)) == []


def test_quota_removal_keeps_other_configs_of_the_entity():
    data = settings(new="x", producer_byte_rate="5")
    quota = ClientQuotaRecord(
        (EntityData("user", "alice"),), "producer_byte_rate", 0.0, remove=True
    )
    left = formats.changed(USER, data, [SecurityChange(quota, is_removed=True)])
    assert left == b'{"version":1,"config":{"new":"x"}}'
    assert (
        formats.changed(USER, settings(producer_byte_rate="5"), [SecurityChange(quota, True)])
        is None
    )


@pytest.mark.parametrize("name", ["a/b", ".", "..", "a\0b", "a\x85", "\ud800", "x" * 10_000])
def test_name_that_is_invalid_in_a_znode_path_is_refused(name: str):
    record = AccessControlEntryRecord(uuid.uuid4(), 2, name, 3, "User:a", "*", 3, 3)
    assert formats.reason_against(record)
    if name in {".", ".."} or len(name) > 1000:
        user = UserScramCredentialRecord(name, 1, b"", b"", b"", 4096)
        assert formats.reason_against(user)
        both = (EntityData("client-id", "c"), EntityData("user", name))
        assert formats.reason_against(ClientQuotaRecord(both, "producer_byte_rate", 1.0, False))


def test_ipv6_quota_entity_is_refused():
    entity = (EntityData("ip", "::1"),)
    record = ClientQuotaRecord(entity, "connection_creation_rate", 1.0, remove=False)
    assert "IPv6" in (formats.reason_against(record) or "")
