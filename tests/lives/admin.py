"""Requests of administrators: directories, replicas, brokers, rights, quotas, users; and logins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.lives.draw import Draw, Request

NODE = 1
TIMEOUT_MS = 10_000


def _parts(d: Draw) -> list[int]:
    return d.some(d.partition)


def _replicas(d: Draw) -> list[int] | None:
    return d.pick([[NODE], [NODE], [2], [], [NODE, 2], [NODE, NODE], None])


def describe_log_dirs(d: Draw) -> Request:
    def topic() -> dict[str, Any]:
        return {"topic": d.topic(), "partitions": _parts(d)}

    topics = None if d.chance(0.3) else d.some(topic)
    return Request("describe_log_dirs", d.version("describe_log_dirs"), {"topics": topics})


def alter_replica_log_dirs(d: Draw) -> Request:
    def directory() -> dict[str, Any]:
        topics = d.some(lambda: {"name": d.topic(), "partitions": _parts(d)})
        return {"path": d.pick(["/no/such/directory", ""]), "topics": topics}

    return Request(
        "alter_replica_log_dirs", d.version("alter_replica_log_dirs"), {"dirs": d.some(directory)}
    )


def describe_quorum(d: Draw) -> Request:
    def topic() -> dict[str, Any]:
        name = "__cluster_metadata" if d.chance(0.8) else d.topic()
        return {"topic_name": name, "partitions": [{"partition_index": d.pick([0, 0, 0, 1])}]}

    return Request("describe_quorum", d.version("describe_quorum"), {"topics": d.some(topic)})


def list_partition_reassignments(d: Draw) -> Request:
    def topic() -> dict[str, Any]:
        return {"name": d.topic(), "partition_indexes": _parts(d)}

    topics = None if d.chance(0.5) else d.some(topic)
    return Request("list_partition_reassignments", 0, {"timeout": TIMEOUT_MS, "topics": topics})


def alter_partition_reassignments(d: Draw) -> Request:
    def topic() -> dict[str, Any]:
        parts = d.some(lambda: {"partition_index": d.partition(), "replicas": _replicas(d)})
        return {"name": d.topic(), "partitions": parts}

    return Request(
        "alter_partition_reassignments",
        d.version("alter_partition_reassignments"),
        {
            "timeout": TIMEOUT_MS,
            "allow_replication_factor_change": d.chance(0.5),
            "topics": d.some(topic),
        },
    )


def elect_leaders(d: Draw) -> Request:
    def topic() -> dict[str, Any]:
        return {"topic": d.topic(), "partitions": _parts(d)}

    return Request(
        "elect_leaders",
        d.version("elect_leaders"),
        {
            "election_type": d.pick([0, 1, 2]),
            "topic_partitions": None if d.chance(0.3) else d.some(topic),
            "timeout": TIMEOUT_MS,
        },
    )


def list_config_resources(d: Draw) -> Request:
    kinds = d.some(lambda: d.pick([2, 4, 8, 16, 32, 1]))
    return Request(
        "list_config_resources", d.version("list_config_resources"), {"resource_types": kinds}
    )


def unregister_broker(d: Draw) -> Request:
    return Request("unregister_broker", 0, {"broker_id": d.pick([NODE, 2, -1])})


def unregister_controller(d: Draw) -> Request:
    return Request("unregister_controller", 0, {"controller_id": d.pick([NODE, 2, -1])})


def describe_acls(d: Draw) -> Request:
    return Request("describe_acls", d.version("describe_acls"), _filter(d))


def _filter(d: Draw) -> dict[str, Any]:
    return {
        "resource_type_filter": d.pick([1, 2, 3]),
        "resource_name_filter": None if d.chance(0.5) else d.topic(),
        "pattern_type_filter": d.pick([1, 3]),
        "principal_filter": None,
        "host_filter": None,
        "operation": d.pick([1, 3]),
        "permission_type": d.pick([1, 3]),
    }


def create_acls(d: Draw) -> Request:
    def acl() -> dict[str, Any]:
        return {
            "resource_type": 2,
            "resource_name": d.topic(),
            "resource_pattern_type": d.pick([3, 4]),
            "principal": "User:somebody",
            "host": "*",
            "operation": d.pick([3, 4]),
            "permission_type": 3,
        }

    return Request("create_acls", d.version("create_acls"), {"creations": d.some(acl)})


def delete_acls(d: Draw) -> Request:
    filters = d.some(lambda: _filter(d))
    return Request("delete_acls", d.version("delete_acls"), {"filters": filters})


QUOTAS = (
    "producer_byte_rate",
    "consumer_byte_rate",
    "request_percentage",
    "controller_mutation_rate",
    "connection_creation_rate",
)


def _entity_type(d: Draw) -> str:
    return d.pick(["user", "client-id", "ip", "user", "nonsense", ""])


def describe_client_quotas(d: Draw) -> Request:
    def component() -> dict[str, Any]:
        how = d.pick([0, 1, 2, 2, 3])
        match = d.group() if d.chance(0.9) is (how == 0) else None
        return {"entity_type": _entity_type(d), "match_type": how, "match": match}

    return Request(
        "describe_client_quotas",
        d.version("describe_client_quotas"),
        {"components": d.some(component), "strict": d.chance(0.5)},
    )


def alter_client_quotas(d: Draw) -> Request:
    def op() -> dict[str, Any]:
        # The entity is metered from then on, but not throttled: lives take long enough anyway.
        key = d.pick([*QUOTAS, "no-such-quota"])
        value = d.pick([1e9, 1e9, 1e9 + 0.5, 0.0, -1.0, 1e30])
        return {"key": key, "value": value, "remove": d.chance(0.3)}

    def entry() -> dict[str, Any]:
        def part() -> dict[str, Any]:
            name = None if d.chance(0.4) else d.group()
            return {"entity_type": _entity_type(d), "entity_name": name}

        return {"entity": d.some(part), "ops": d.some(op)}

    return Request(
        "alter_client_quotas",
        d.version("alter_client_quotas"),
        {"entries": d.some(entry), "validate_only": d.chance(0.3)},
    )


def describe_user_scram_credentials(d: Draw) -> Request:
    users = None if d.chance(0.3) else d.some(lambda: {"name": d.group()})
    return Request("describe_user_scram_credentials", 0, {"users": users})


def alter_user_scram_credentials(d: Draw) -> Request:
    def deletion() -> dict[str, Any]:
        return {"name": d.group(), "mechanism": d.pick([1, 2, 3])}

    def upsertion() -> dict[str, Any]:
        iterations = d.pick([4096, 4096, 4095, 16384, 16385])
        return deletion() | {
            "iterations": iterations,
            "salt": b"salt",
            "salted_password": b"password",
        }

    return Request(
        "alter_user_scram_credentials",
        0,
        {"deletions": d.some(deletion), "upsertions": d.some(upsertion)},
    )


def sasl_handshake(d: Draw) -> Request:
    mechanism = d.pick(["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER", "GSSAPI", ""])
    return Request("sasl_handshake", d.version("sasl_handshake"), {"mechanism": mechanism})


def sasl_authenticate(d: Draw) -> Request:
    token = d.pick([b"", b"\0alice\0secret", b"n,,n=alice,r=nonce", b"\xff"])
    return Request("sasl_authenticate", d.version("sasl_authenticate"), {"auth_bytes": token})


REQUESTS: list[Callable[[Draw], Request]] = [
    describe_log_dirs,
    alter_replica_log_dirs,
    describe_quorum,
    list_partition_reassignments,
    alter_partition_reassignments,
    elect_leaders,
    list_config_resources,
    unregister_broker,
    unregister_controller,
    describe_acls,
    create_acls,
    delete_acls,
    describe_client_quotas,
    alter_client_quotas,
    describe_user_scram_credentials,
    alter_user_scram_credentials,
    sasl_handshake,
    sasl_authenticate,
]
