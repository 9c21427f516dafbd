"""Requests of administrators (directories, replicas, brokers, ACLs, quotas, users), and logins."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from tests.lives.draw import Draw, Request
from tests.support import requests
from tests.support.requests import Body

NODE = 1


def _parts(d: Draw) -> list[int]:
    return d.some(d.partition)


def _replicas(d: Draw) -> list[int] | None:
    return d.pick([[NODE], [NODE], [2], [], [NODE, 2], [NODE, NODE], None])


def describe_log_dirs(d: Draw) -> Request:
    def topic() -> Body:
        return requests.topic_partitions(d.topic(), *_parts(d))

    topics = None if d.chance(0.3) else d.some(topic)
    return Request("describe_log_dirs", d.version("describe_log_dirs"), {"topics": topics})


def alter_replica_log_dirs(d: Draw) -> Request:
    def directory() -> Body:
        topics = d.some(lambda: (d.topic(), _parts(d)))
        return requests.log_dir(d.pick(["/no/such/directory", ""]), *topics)

    version = d.version("alter_replica_log_dirs")
    return Request(
        "alter_replica_log_dirs", version, requests.alter_replica_log_dirs(*d.some(directory))
    )


def describe_quorum(d: Draw) -> Request:
    def topic() -> Body:
        name = "__cluster_metadata" if d.chance(0.8) else d.topic()
        return requests.quorum_topic(name, d.pick([0, 0, 0, 1]))

    return Request("describe_quorum", d.version("describe_quorum"), {"topics": d.some(topic)})


def list_partition_reassignments(d: Draw) -> Request:
    def topic() -> Body:
        return requests.indexes_of(d.topic(), *_parts(d))

    topics = None if d.chance(0.5) else d.some(topic)
    body = requests.list_partition_reassignments(topics=topics)
    return Request("list_partition_reassignments", 0, body)


def alter_partition_reassignments(d: Draw) -> Request:
    def topic() -> Body:
        parts = d.some(lambda: (d.partition(), _replicas(d)))
        return requests.reassigned_topic(d.topic(), *parts)

    return Request(
        "alter_partition_reassignments",
        d.version("alter_partition_reassignments"),
        requests.alter_partition_reassignments(
            allow_replication_factor_change=d.chance(0.5), topics=d.some(topic)
        ),
    )


def elect_leaders(d: Draw) -> Request:
    def topic() -> Body:
        return requests.topic_partitions(d.topic(), *_parts(d))

    return Request(
        "elect_leaders",
        d.version("elect_leaders"),
        requests.elect_leaders(
            election_type=d.pick([0, 1, 2]),
            topic_partitions=None if d.chance(0.3) else d.some(topic),
        ),
    )


def list_config_resources(d: Draw) -> Request:
    kinds = d.some(lambda: d.pick([2, 4, 8, 16, 32, 1]))
    return Request(
        "list_config_resources",
        d.version("list_config_resources"),
        requests.list_config_resources(*kinds),
    )


def unregister_broker(d: Draw) -> Request:
    return Request("unregister_broker", 0, requests.unregister_broker(d.pick([NODE, 2, -1])))


def unregister_controller(d: Draw) -> Request:
    return Request("unregister_controller", 0, {"controller_id": d.pick([NODE, 2, -1])})


def describe_acls(d: Draw) -> Request:
    return Request("describe_acls", d.version("describe_acls"), _filter(d))


def _filter(d: Draw) -> Body:
    return requests.describe_acls(
        resource_type_filter=d.pick([1, 2, 3]),
        resource_name_filter=None if d.chance(0.5) else d.topic(),
        pattern_type_filter=d.pick([1, 3]),
        operation=d.pick([1, 3]),
        permission_type=d.pick([1, 3]),
    )


def create_acls(d: Draw) -> Request:
    def acl() -> Body:
        return requests.acl(
            d.topic(),
            resource_pattern_type=d.pick([3, 4]),
            principal="User:somebody",
            operation=d.pick([3, 4]),
        )

    version = d.version("create_acls")
    return Request("create_acls", version, requests.create_acls(*d.some(acl)))


def delete_acls(d: Draw) -> Request:
    filters = d.some(lambda: _filter(d))
    return Request("delete_acls", d.version("delete_acls"), requests.delete_acls(*filters))


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
    def component() -> Body:
        how = d.pick([0, 1, 2, 2, 3])
        match = d.group() if d.chance(0.9) is (how == 0) else None
        return requests.quota_component(_entity_type(d), how, match)

    version = d.version("describe_client_quotas")
    components = d.some(component)
    return Request(
        "describe_client_quotas",
        version,
        requests.describe_client_quotas(*components, strict=d.chance(0.5)),
    )


def alter_client_quotas(d: Draw) -> Request:
    def op() -> Body:
        # The accepted quotas are too high to throttle a client; throttling would prolong the test.
        key = d.pick([*QUOTAS, "no-such-quota"])
        value = d.pick([1e9, 1e9, 1e9 + 0.5, 0.0, -1.0, 1e30])
        return requests.quota_op(key, value, remove=d.chance(0.3))

    def entry() -> Body:
        def part() -> tuple[str, str | None]:
            name = None if d.chance(0.4) else d.group()
            return _entity_type(d), name

        parts = d.some(part)
        return requests.quota_entry(parts, *d.some(op))

    version = d.version("alter_client_quotas")
    entries = d.some(entry)
    return Request(
        "alter_client_quotas",
        version,
        requests.alter_client_quotas(*entries, validate_only=d.chance(0.3)),
    )


def describe_user_scram_credentials(d: Draw) -> Request:
    users = None if d.chance(0.3) else d.some(d.group)
    return Request(
        "describe_user_scram_credentials", 0, requests.describe_user_scram_credentials(users)
    )


def alter_user_scram_credentials(d: Draw) -> Request:
    def deletion() -> Body:
        return requests.scram_deletion(d.group(), d.pick([1, 2, 3]))

    def upsertion() -> Body:
        iterations = d.pick([4096, 4096, 4095, 16384, 16385])
        return requests.scram_upsertion(d.group(), d.pick([1, 2, 3]), iterations=iterations)

    body = requests.alter_user_scram_credentials(d.some(deletion), d.some(upsertion))
    return Request("alter_user_scram_credentials", 0, body)


def sasl_handshake(d: Draw) -> Request:
    mechanism = d.pick(["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER", "GSSAPI", ""])
    version = d.version("sasl_handshake")
    return Request("sasl_handshake", version, requests.sasl_handshake(mechanism))


def sasl_authenticate(d: Draw) -> Request:
    token = d.pick([b"", b"\0alice\0secret", b"n,,n=alice,r=nonce", b"\xff"])
    version = d.version("sasl_authenticate")
    return Request("sasl_authenticate", version, requests.sasl_authenticate(token))


def get_telemetry_subscriptions(d: Draw) -> Request:
    body = {"client_instance_id": UUID(int=d.pick([0, 1, 2, 3]))}
    return Request("get_telemetry_subscriptions", 0, body)


def push_telemetry(d: Draw) -> Request:
    body = {
        "client_instance_id": UUID(int=d.pick([0, 1, 2, 3])),
        "subscription_id": d.pick([0, 1, -1]),
        "terminating": d.chance(0.2),
        "compression_type": d.pick([0, 1, 2, 3, 4, 5, -1]),
        "metrics": d.pick([b"", b"x", b"\x0a\x00"]),
    }
    return Request("push_telemetry", 0, body)


REQUESTS: list[Callable[[Draw], Request]] = [
    describe_log_dirs,
    alter_replica_log_dirs,
    describe_quorum,
    list_partition_reassignments,
    alter_partition_reassignments,
    elect_leaders,
    list_config_resources,
    get_telemetry_subscriptions,
    push_telemetry,
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
