"""Requests about ACLs, SCRAM credentials and client quotas."""

from __future__ import annotations

from typing import Any, Final

from tests.answers.asking import OTHER, STRANGER, Asker, settled
from tests.oracle import traces_admin
from tests.oracle.traces_admin import ACL

TOPIC, GROUP, CLUSTER, TRANSACTION, USER = 2, 3, 4, 5, 7
LITERAL, PREFIXED, MATCH, ANY = 3, 4, 2, 1
ALLOW, DENY = 3, 2


def quotas(ask: Asker) -> None:
    """Client quotas."""
    traces_admin.quotas(ask)
    traces_admin.quotas_that_are_kept(ask)
    traces_admin.quotas_that_are_refused(ask)
    entity = [{"entity_type": "user", "entity_name": "q"}]
    ops = [{"key": "producer_byte_rate", "value": 1e9, "remove": False}]
    for version in (0, 1):
        for only in (True, False):
            entries = [{"entity": entity, "ops": ops}]
            ask.refused("alter_client_quotas", version, entries=entries, validate_only=only)
        ask.refused("alter_client_quotas", version, entries=[])
        ask.refused("describe_client_quotas", version, components=[], strict=False)


def credentials(ask: Asker) -> None:
    """SCRAM credentials."""
    traces_admin.credentials_that_are_refused(ask)

    def altered(deletions: list[tuple[str, int]], upsertions: list[tuple[str, int, int]]) -> Any:
        return {
            "deletions": [{"name": name, "mechanism": kind} for name, kind in deletions],
            "upsertions": [
                {
                    "name": name,
                    "mechanism": kind,
                    "iterations": count,
                    "salt": b"salt",
                    "salted_password": b"p" * 32 * kind,
                }
                for name, kind, count in upsertions
            ],
        }

    def changed(deletions: list[tuple[str, int]], *upsertions: tuple[str, int, int]) -> None:
        ask("alter_user_scram_credentials", 0, **altered(deletions, list(upsertions)))

    def heard(of: tuple[str, ...] = (), **counts: int) -> None:
        """Wait until these users have these numbers of credentials."""

        def is_heard(answer: Any) -> bool:
            found = {
                result["user"]: len(result["credential_infos"]) for result in answer["results"]
            }
            return {k: v for k, v in found.items() if v} == counts

        asked = {"users": [{"name": name} for name in of] or None}
        ask.asked("describe_user_scram_credentials", 0, asked, when=is_heard)

    heard()
    changed([], ("s1", 1, 4096), ("s2", 2, 8192), ("s3", 1, 4095))
    heard(("s1", "s2", "s3"), s1=1, s2=1)
    twice = [{"name": name} for name in ("s1", "s2", "s1")]
    ask("describe_user_scram_credentials", 0, users=twice)
    changed([], ("s1", 2, 8192), ("s2", 1, 4096))
    changed([("s-none", 1), ("s1", 2), ("s3", 2)])
    heard(s1=1, s2=2)
    heard(("s1", "s2", "s3", ""), s1=1, s2=2)
    changed([("s2", 1), ("s2", 2)])
    changed([("s2", 1)], ("s4", 1, 4096))
    heard(s1=1, s2=1, s4=1)
    changed([("s2", 1), ("s1", 1)], ("s4", 1, 4096))
    changed([("s1", 1)])
    heard(s2=1, s4=1)
    changed([("s4", 1), ("s2", 2)])
    heard()
    ask.refused("alter_user_scram_credentials", 0, **altered([("s1", 1)], [("s1", 1, 4096)]))
    ask.refused("alter_user_scram_credentials", 0, **altered([("", 1)], [("s1", 9, 1)]))
    ask.refused("alter_user_scram_credentials", 0, **altered([], []))
    for users in (None, [{"name": "s1"}]):
        ask.refused("describe_user_scram_credentials", 0, users=users)


def acl(name: str, **changes: Any) -> dict[str, Any]:
    """Return a row of CreateAcls."""
    return {**ACL, "resource_name": name, **changes}


ACL_FILTER: Final = {
    "resource_type_filter": TOPIC,
    "pattern_type_filter": LITERAL,
    "operation": ANY,
    "permission_type": ANY,
}


def acl_filter(name: str | None, **changes: Any) -> dict[str, Any]:
    """Return a filter of DescribeAcls and DeleteAcls."""
    return {**ACL_FILTER, "resource_name_filter": name, **changes}


GOOD: Final = (
    acl("a-1"),
    acl("a-1", operation=4),
    acl("a-1", permission_type=DENY, host="10.0.0.1"),
    acl("a-", resource_pattern_type=PREFIXED),
    acl("*", principal="User:*"),
    acl("a-group", resource_type=GROUP),
    acl("kafka-cluster", resource_type=CLUSTER, operation=12),
    acl("a-txn", resource_type=TRANSACTION, operation=4),
    acl("a-user", resource_type=USER, operation=8),
)
BAD: Final = (
    acl(""),
    acl("a-1", principal="nobody"),
    acl("a-1", principal=""),
    acl("a-1", host=""),
    acl("a-1", operation=0),
    acl("a-1", operation=1),
    acl("a-1", operation=12),
    acl("a-1", operation=99),
    acl("a-1", permission_type=0),
    acl("a-1", permission_type=1),
    acl("a-1", permission_type=9),
    acl("a-1", resource_type=0),
    acl("a-1", resource_type=1),
    acl("a-1", resource_type=CLUSTER),
    acl("a-1", resource_type=99),
    acl("a-1", resource_pattern_type=MATCH),
    acl("a-1", resource_pattern_type=ANY),
    acl("a-1", resource_pattern_type=0),
    acl("kafka-cluster", resource_type=CLUSTER, resource_pattern_type=PREFIXED),
)
FILTERS: Final = (
    acl_filter("a-1"),
    acl_filter("a-1", operation=4),
    acl_filter("a-1", host_filter="10.0.0.1"),
    acl_filter("a-1", principal_filter="User:a"),
    acl_filter("a-1", principal_filter="User:none"),
    acl_filter("a-1", pattern_type_filter=MATCH),
    acl_filter("a-1", pattern_type_filter=ANY),
    acl_filter("a-", pattern_type_filter=PREFIXED),
    acl_filter(None, pattern_type_filter=PREFIXED),
    acl_filter(None, resource_type_filter=ANY, pattern_type_filter=ANY),
    acl_filter(None, resource_type_filter=CLUSTER),
    acl_filter(None, resource_type_filter=USER, pattern_type_filter=ANY),
    acl_filter("a-1", permission_type=DENY),
    acl_filter("a-none"),
)
BAD_FILTERS: Final = (
    acl_filter("a-1", operation=0),
    acl_filter("a-1", operation=99),
    acl_filter("a-1", permission_type=0),
    acl_filter("a-1", resource_type_filter=0),
    acl_filter("a-1", pattern_type_filter=0),
)


def acls(ask: Asker) -> None:
    """Create ACLs, find them by each filter, delete them, and provoke each error."""
    everything = acl_filter(None, resource_type_filter=ANY, pattern_type_filter=ANY)
    for version in (1, 2, 3):
        ask("create_acls", version, creations=[])
        ask("delete_acls", version, filters=[])
        ask("create_acls", version, creations=[*GOOD, GOOD[0]])

        def found(answer: Any) -> bool:
            return sum(len(resource["acls"]) for resource in answer["resources"]) >= len(GOOD)

        ask.asked("describe_acls", version, everything, when=found)
        for fields in FILTERS:
            ask("describe_acls", version, **fields)
        for fields in BAD_FILTERS:
            ask("describe_acls", version, **fields)
            ask("delete_acls", version, filters=[fields])
            ask.refused("describe_acls", version, **fields)
        for creation in BAD:
            ask("create_acls", version, creations=[creation])
        ask("create_acls", version, creations=[BAD[0], GOOD[0], BAD[1]])
        ask.refused("create_acls", version, creations=[GOOD[0], BAD[0]])
        ask.refused("create_acls", version, creations=[])
        ask.refused("delete_acls", version, filters=[acl_filter("a-1"), BAD_FILTERS[0]])
        ask.refused("delete_acls", version, filters=[])
        ask.refused("describe_acls", version, **FILTERS[0])
        ask("delete_acls", version, filters=[FILTERS[1], FILTERS[1], FILTERS[-1], BAD_FILTERS[0]])
        ask("delete_acls", version, filters=[FILTERS[5]])
        ask("delete_acls", version, filters=[everything, everything])
        ask.asked("describe_acls", version, everything, when=lambda a: not a["resources"])


def rights_that_come_and_go(ask: Asker) -> None:
    """An ACL allows a client's requests; after it is deleted, they are denied."""
    ask.cluster.create_topic("r-1")
    settled(ask)
    rule = acl("r-1", principal="User:u0", operation=8)
    listed = {"topics": [{"name": "r-1"}], "allow_auto_topic_creation": False}

    def codes(answer: Any) -> set[str]:
        return {topic["error_code"] for topic in answer["topics"]}

    ask("create_acls", 3, creations=[rule])
    ask.asked("metadata", 12, listed, who=STRANGER, when=lambda a: codes(a) == {"none"})
    ask("delete_acls", 3, filters=[acl_filter("r-1")])
    refused = {"topic_authorization_failed"}
    ask.asked("metadata", 12, listed, who=STRANGER, when=lambda a: codes(a) == refused)


def asked_elsewhere(ask: Asker) -> None:
    """Send requests about ACLs, quotas and credentials to another broker than the first."""
    if OTHER not in ask.places:
        return
    entity = [{"entity_type": "user", "entity_name": "e-quota"}]
    password = {"salt": b"salt", "salted_password": b"p" * 32}
    user = {"name": "e-user", "mechanism": 1, "iterations": 4096, **password}

    def rate(value: float | None) -> dict[str, Any]:
        op = {"key": "producer_byte_rate", "value": value or 0.0, "remove": value is None}
        return {"entries": [{"entity": entity, "ops": [op]}]}

    for api, version, body in (
        ("create_acls", 3, {"creations": [acl("e-1"), acl("")]}),
        ("delete_acls", 3, {"filters": [acl_filter("e-1")]}),
        ("alter_client_quotas", 1, rate(1e9)),
        ("alter_client_quotas", 1, rate(-1)),
        ("alter_client_quotas", 1, rate(None)),
        ("alter_user_scram_credentials", 0, {"deletions": [], "upsertions": [user]}),
        (
            "alter_user_scram_credentials",
            0,
            {"deletions": [{"name": "e-user", "mechanism": 1}], "upsertions": []},
        ),
    ):
        ask.asked(api, version, body, who=STRANGER, at=OTHER)
        ask.asked(api, version, body, at=OTHER)
        settled(ask)


SCRIPT: Final = (quotas, credentials, acls, rights_that_come_and_go, asked_elsewhere)
