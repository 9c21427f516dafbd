"""Requests for the controller have the same response whether Fencepost or Kafka forwards them.

The same requests are sent to both brokers and to the controller itself, as a super user, as a user
without rights, and as a user with a quota. The controller is Apache Kafka's, or Fencepost's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.oracle.authorised_brokers import GUARDED, Member
from tests.support.cluster import Cluster, unique
from tests.support.mixed import JAVA, PYTHON
from tests.support.pair import BOTH, KAFKAS, OURS, Pair
from tests.support.raw import Answer
from tests.support.waits import until

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

GUARD: Final = {
    key: value
    for key, value in GUARDED.items()
    if key.startswith(("authorizer", "super", "sasl", "listener"))
}
TOPIC, BROKER = 2, 4
ANY, MATCH, LITERAL, ALLOW = 1, 2, 3, 3
READ, CREATE, CLUSTER = 3, 5, 4
SET, DELETE = 0, 1
SCRAM_256: Final = 1
UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

WAIT: Final = {"timeout": 10_000}
Case = tuple[str, int, dict[str, Any]]


@pytest.fixture(scope="module", params=[JAVA, PYTHON])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Yield the two brokers under Apache Kafka's controller, and then under Fencepost's."""
    brokers = Pair(
        tmp_path_factory.mktemp("pair"),
        GUARD,
        controllers=request.param,
        has_logins=True,
    )
    try:
        yield brokers.start()
    finally:
        brokers.stop()


def new_topic(name: str, partitions: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "num_partitions": partitions, "replication_factor": 1, **more}


def setting(kind: int, name: str, key: str, value: str | None, how: int = SET) -> dict[str, Any]:
    config = {"name": key, "config_operation": how, "value": value}
    return {"resource_type": kind, "resource_name": name, "configs": [config]}


def quota(name: str, key: str, value: float) -> dict[str, Any]:
    return {
        "entity": [{"entity_type": "user", "entity_name": name}],
        "ops": [{"key": key, "value": value, "remove": False}],
    }


def rule(name: str, user: str, operation: int = READ, kind: int = TOPIC) -> dict[str, Any]:
    return {
        "resource_type": kind,
        "resource_name": name,
        "resource_pattern_type": LITERAL,
        "principal": f"User:{user}",
        "host": "*",
        "operation": operation,
        "permission_type": ALLOW,
    }


def cases(name: str) -> Iterator[Case]:
    """Yield all requests to the controller in order, because each builds on earlier ones."""
    yield from topics_come(name)
    yield from settings_change(name)
    yield from clients_change(name)
    yield from partitions_move(name)
    for _ in range(2):
        yield "delete_topics", 6, {**WAIT, "topics": [{"name": name, "topic_id": None}]}


def topics_come(name: str) -> Iterator[Case]:
    more, wait = f"{name}-more", WAIT
    there = [{"partition_index": 0, "broker_ids": [OURS]}]
    yield (
        "create_topics",
        7,
        {
            **wait,
            "topics": [
                new_topic(name, 2, configs=[{"name": "retention.ms", "value": "77777"}]),
                new_topic(f"{name}/bad"),
                {**new_topic(f"{name}-many"), "replication_factor": 5},
                new_topic(f"{name}-odd", configs=[{"name": "no.such.key", "value": "1"}]),
                {
                    **new_topic(more, -1, assignments=there),
                    "replication_factor": -1,
                },
            ],
        },
    )
    yield "create_topics", 7, {**wait, "topics": [new_topic(name)]}
    yield "create_topics", 5, {**wait, "topics": [new_topic(f"{name}-x")], "validate_only": True}
    grown = [{"name": name, "count": 3, "assignments": None}]
    fewer = [{"name": more, "count": 1, "assignments": None}]
    nobody = [{"name": f"{name}-none", "count": 3, "assignments": None}]
    yield "create_partitions", 3, {**wait, "topics": [*grown, *fewer, *nobody]}


def settings_change(name: str) -> Iterator[Case]:
    more = f"{name}-more"
    yield (
        "incremental_alter_configs",
        1,
        {
            "resources": [
                setting(TOPIC, name, "segment.bytes", "2000000"),
                setting(TOPIC, more, "segment.bytes", "many"),
                setting(TOPIC, f"{name}-none", "segment.bytes", "2000000"),
                setting(BROKER, "", "message.max.bytes", None, DELETE),
            ]
        },
    )
    yield (
        "incremental_alter_configs",
        1,
        {"resources": [setting(TOPIC, name, "retention.ms", None, DELETE)]},
    )
    old = {
        "resource_type": TOPIC,
        "resource_name": name,
        "configs": [{"name": "retention.ms", "value": "5"}],
    }
    yield "alter_configs", 2, {"resources": [old], "validate_only": True}
    yield "alter_configs", 2, {"resources": [old]}


def clients_change(name: str) -> Iterator[Case]:
    """Yield requests that change quotas, credentials and rules."""
    more = f"{name}-more"
    entries = [quota(name, "producer_byte_rate", 1e9), quota(name, "no_such_key", 1)]
    yield "alter_client_quotas", 1, {"entries": entries}
    yield "alter_client_quotas", 1, {"entries": entries[:1], "validate_only": True}
    upserted = {"name": name, "mechanism": SCRAM_256, "salt": b"salt", "salted_password": b"p" * 32}
    yield (
        "alter_user_scram_credentials",
        0,
        {
            "deletions": [{"name": f"{name}-none", "mechanism": SCRAM_256}],
            "upsertions": [
                {**upserted, "iterations": 4096},
                {**upserted, "name": more, "iterations": 7},
            ],
        },
    )
    yield "create_acls", 3, {"creations": [rule(name, name), rule("", name)]}
    filtered = {
        "resource_type_filter": TOPIC,
        "resource_name_filter": name,
        "pattern_type_filter": LITERAL,
        "operation": ANY,
        "permission_type": ANY,
    }
    yield "delete_acls", 3, {"filters": [filtered, filtered]}


def partitions_move(name: str) -> Iterator[Case]:
    """Yield elections, reassignments and requests about brokers."""
    more, wait = f"{name}-more", WAIT
    asked = [{"topic": name, "partitions": [0]}, {"topic": f"{name}-none", "partitions": [0]}]
    yield "elect_leaders", 2, {**wait, "election_type": 0, "topic_partitions": asked}
    parts = [{"partition_index": 0, "replicas": (99,)}, {"partition_index": 9, "replicas": (OURS,)}]
    topics = [{"name": name, "partitions": parts}]
    yield "alter_partition_reassignments", 0, {**wait, "topics": topics}
    listed = [{"name": name, "partition_indexes": [0]}]
    yield "list_partition_reassignments", 0, {**wait, "topics": listed}
    feature = {"max_version_level": 99, "upgrade_type": 1}
    for level in ("group.version", "no.such.version"):
        body = {**wait, "feature_updates": [{**feature, "feature": level}], "validate_only": True}
        yield "update_features", 1, body
    yield "unregister_broker", 0, {"broker_id": 555}
    yield "delete_topics", 5, {**wait, "topic_names": [more, f"{name}-none"]}


def told(client: Cluster, name: str) -> list[str]:
    """Return the responses to all cases, without the values that differ between runs."""
    found = []
    for api, version, body in cases(name):
        answer = client.call(api, version, **body)
        text = json.dumps(in_order(answer), default=repr, sort_keys=True).replace(name, "NAME")
        found.append(f"{api}: {UUID.sub('ID', text)}")
    return found


def require_same(wanted: list[str], found: list[str]) -> None:
    pairs = zip(wanted, found, strict=True)
    different = [f"{one}\n    {two}\n" for one, two in pairs if one != two]
    if different:
        raise AssertionError("\n".join(["", *different]))


def in_order(value: Any) -> Any:
    """Return ``value`` with its rows sorted and without the names of connections."""
    if isinstance(value, str) and value.startswith("Request Request("):
        return "Request"
    if isinstance(value, dict):
        return {key: in_order(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(in_order, value), key=repr)
    return value


def test_super_user_gets_the_same_responses_through_each_broker(pair: Pair) -> None:
    answers = {}
    for node_id in BOTH:
        with Cluster(pair.node(node_id).bootstrap) as client:
            answers[node_id] = told(client, unique("t"))
    with Cluster(pair.quorum) as client:
        direct = told(client, unique("t"))
    require_same(answers[KAFKAS], answers[OURS])
    require_same(direct, answers[OURS])


def test_user_without_rights_gets_the_same_errors_through_each_broker(pair: Pair) -> None:
    answers = {}
    for node_id in BOTH:
        with Member(pair.logins[node_id]) as client:
            client.login("u0")
            answers[node_id] = told(client, unique("t"))
    require_same(answers[KAFKAS], answers[OURS])


def test_broker_setting_is_validated_by_the_broker_that_is_asked(pair: Pair) -> None:
    """A controller of Apache Kafka does not validate settings that only brokers define."""
    codes = set()
    for node_id in BOTH:
        for name in ("", str(node_id)):
            bad = setting(BROKER, name, "message.max.bytes", "-5")
            answer = pair.call(node_id, "incremental_alter_configs", 1, resources=[bad])
            codes.add(answer["responses"][0]["error_code"])
    assert codes == {"invalid_request"}


def test_forwarded_request_has_the_rights_and_quotas_of_its_client(pair: Pair) -> None:
    """The controller applies the rights and quotas of the client that the envelope names."""
    allowed = {"creations": [rule("kafka-cluster", "u1", CREATE, CLUSTER)]}
    assert pair.call(OURS, "create_acls", 3, **allowed)["results"][0]["error_code"] == "none"

    def created(node_id: int, user: str, partitions: int = 1) -> Answer:
        with Member(pair.logins[node_id]) as client:
            client.login(user)
            topics = [new_topic(unique("t"), partitions)]
            return client.call("create_topics", 7, timeout=10_000, topics=topics)

    def code(answer: Answer) -> str:
        return str(answer["topics"][0]["error_code"])

    for node_id in BOTH:
        until(lambda node=node_id: code(created(node, "u1")) == "none", f"u1 may, at {node_id}")
        assert code(created(node_id, "u2")) == "topic_authorization_failed"
    entries = [quota("u1", "controller_mutation_rate", 0.1)]
    answer = pair.call(KAFKAS, "alter_client_quotas", 1, entries=entries)
    assert answer["entries"][0]["error_code"] == "none"
    for node_id in BOTH:

        def throttled(node_id: int = node_id) -> Answer | None:
            answer = created(node_id, "u1", 10)
            return answer if code(answer) == "throttling_quota_exceeded" else None

        answer = until(throttled, f"the quota holds at {node_id}")
        assert answer["throttle_time"] > 0, answer
        assert code(created(node_id, "u2")) == "topic_authorization_failed"
