"""The rights that each administrative API requires; an error response reveals nothing else.

Source: ``AuthorizerIntegrationTest``.
"""

from __future__ import annotations

import ast
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.cluster.acl import Operation as Op
from fencepost.coordinator import handlers
from fencepost.coordinator.handlers import authorized
from fencepost.protocol.api import APIS
from tests.support.cluster import Cluster, unique
from tests.support.guarded import Guarded, cluster, group, rule, topic
from tests.support.raw import errors_in
from tests.unit.coordinator.handlers.test_rights_matrix import (
    DENIALS,
    C,
    Case,
    G,
    Named,
    T,
    _ask,
    _without_names,
)

NODE = 1


def _resource(kind: int, name: Callable[[Named], str], **more: Any) -> Callable[[Named], dict]:
    return lambda n: {
        "resources": [{"resource_type": kind, "resource_name": name(n), **more}],
    }


def _configs(operation: Op, apis: dict[tuple[str, int], dict]) -> Iterator[Case]:
    """Yield cases for each kind of resource, for APIs that describe or alter settings."""
    kinds = {
        "topic": (2, lambda n: n.topic, lambda n: [(topic(operation, n.topic), [T])]),
        "broker": (4, lambda n: str(NODE), lambda n: [(cluster(operation), [C])]),
        "brokers": (4, lambda n: "", lambda n: [(cluster(operation), [C])]),
        "logger": (8, lambda n: str(NODE), lambda n: [(cluster(operation), [C])]),
        "metrics": (16, lambda n: "m", lambda n: [(cluster(operation), [C])]),
        "group": (32, lambda n: n.group, lambda n: [(group(operation, n.group), [G])]),
    }
    for (api, version), more in apis.items():
        for label, (kind, name, needs) in kinds.items():
            if (api, label) != ("alter_configs", "logger"):
                yield Case(api, version, _resource(kind, name, **more), needs, label)


def _on_cluster(
    api: str, version: int, operation: Op, body: Callable[[Named], dict], errors: list[str], name=""
) -> Case:
    return Case(api, version, body, lambda _: [(cluster(operation), errors)], name)


def _nothing(_: Named) -> dict:
    return {}


ACL = {
    "resource_type": 2, "resource_pattern_type": 3, "resource_name": "", "principal": "User:a",
    "host": "*", "operation": 3, "permission_type": 3,
}  # fmt: skip
FILTER = {
    "resource_type_filter": 5, "pattern_type_filter": 1, "operation": 1, "permission_type": 1
}  # fmt: skip


def _new(n: Named) -> dict:
    """Return a CreateTopics request with validate_only for a topic that may already exist."""
    creation = {"name": n.topic, "num_partitions": 1, "replication_factor": 1}
    return {"topics": [creation], "validate_only": True}


CASES = [
    Case("create_topics", 4, _new, lambda n: [(topic(Op.CREATE, n.topic), [T])]),
    Case("create_topics", 7, _new, lambda _: [(cluster(Op.CREATE), [T])], "by the cluster"),
    Case("create_partitions", 3,
         lambda n: {"topics": [{"name": n.topic, "count": 1}], "validate_only": True},
         lambda n: [(topic(Op.ALTER, n.topic), [T])]),
    Case("delete_records", 2,
         lambda n: {"topics": [
             {"name": n.topic, "partitions": [{"partition_index": 0, "offset": 0}]}]},
         lambda n: [(topic(Op.DELETE, n.topic), [T])]),
    *_configs(Op.DESCRIBE_CONFIGS, {("describe_configs", 4): {"configuration_keys": None}}),
    *_configs(Op.ALTER_CONFIGS, {
        ("alter_configs", 2): {"configs": []}, ("incremental_alter_configs", 1): {"configs": []},
    }),
    *(_on_cluster("list_config_resources", version, Op.DESCRIBE_CONFIGS, _nothing, [C])
      for version in (0, 1)),
    _on_cluster("list_config_resources", 1, Op.DESCRIBE_CONFIGS,
                lambda _: {"resource_types": [99]}, [C], "of no type"),
    _on_cluster("describe_acls", 3, Op.DESCRIBE, lambda _: FILTER, [C]),
    _on_cluster("create_acls", 3, Op.ALTER, lambda _: {"creations": [ACL, ACL]}, [C, C]),
    _on_cluster("delete_acls", 3, Op.ALTER, lambda _: {"filters": [FILTER]}, [C]),
    _on_cluster("describe_client_quotas", 1, Op.DESCRIBE_CONFIGS, _nothing, [C]),
    _on_cluster("describe_client_quotas", 1, Op.DESCRIBE_CONFIGS,
                lambda _: {"components": [{"entity_type": "x", "match_type": 2}]}, [C], "of what"),
    _on_cluster("alter_client_quotas", 1, Op.ALTER_CONFIGS,
                lambda _: {"entries": [
                    {"entity": [{"entity_type": kind, "entity_name": "a"}], "ops": []}
                    for kind in ("user", "x")]}, [C, C]),
    _on_cluster("describe_user_scram_credentials", 0, Op.DESCRIBE, _nothing, [C]),
    _on_cluster("alter_user_scram_credentials", 0, Op.ALTER,
                lambda _: {"deletions": [{"name": "a", "mechanism": 1}]}, [C]),
    *(_on_cluster("describe_log_dirs", version, Op.DESCRIBE,
                  lambda n: {"topics": [{"topic": n.topic, "partitions": [0]}]}, errors)
      for version, errors in ((2, []), (3, [C]), (5, [C]))),
    _on_cluster("alter_replica_log_dirs", 2, Op.ALTER,
                lambda n: {"dirs": [
                    {"path": "/x", "topics": [{"name": n.topic, "partitions": [0, 1]}]}]}, [C, C]),
    _on_cluster("describe_quorum", 2, Op.DESCRIBE,
                lambda _: {"topics": [{"topic_name": "__cluster_metadata",
                                       "partitions": [{"partition_index": 0}]}]}, [C]),
    _on_cluster("list_partition_reassignments", 0, Op.DESCRIBE, _nothing, [C]),
    _on_cluster("elect_leaders", 0, Op.ALTER,
                lambda n: {"topic_partitions": [{"topic": n.topic, "partitions": [0]}]}, [C]),
    _on_cluster("elect_leaders", 2, Op.ALTER,
                lambda n: {"topic_partitions": [{"topic": n.topic, "partitions": [0]}]}, [C, C]),
    _on_cluster("elect_leaders", 2, Op.ALTER, lambda _: {"topic_partitions": None}, [C], "of all"),
    _on_cluster("alter_partition_reassignments", 1, Op.ALTER,
                lambda n: {"topics": [{"name": n.topic, "partitions": [
                    {"partition_index": 0, "replicas": [NODE]}]}]}, [C, C]),
    *(_on_cluster("update_features", version, Op.ALTER,
                  lambda _: {"feature_updates": [{"feature": "x", "max_version_level": 1}]}, [C])
      for version in (0, 1, 2)),
    _on_cluster("unregister_broker", 0, Op.ALTER, lambda _: {"broker_id": 99}, [C]),
    _on_cluster("unregister_controller", 0, Op.ALTER, lambda _: {"controller_id": 99}, [C]),
]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    config = {"node.id": str(NODE), "unstable.api.versions.enable": "true"}
    with Guarded(tmp_path_factory.mktemp("data"), config) as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(guarded) -> Iterator[Cluster]:
    with guarded.admin() as client:
        yield client


def _named(admin: Cluster, *, exists: bool) -> Named:
    name = unique("t")
    if exists:
        admin.create_topic(name)
    return Named(name, unique("g"), unique("x"), 0, 0)


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: " ".join(filter(None, (f"{case.api}-v{case.version}", case.name))),
)
def test_each_permission_is_required_whether_or_not_the_topic_exists(guarded, admin, case):
    both = [_named(admin, exists=True), _named(admin, exists=False)]
    refusals = []
    for named in both:
        ((right, errors),) = case.needs(named)
        guarded.allow()
        answer = _ask(guarded, case, named)
        assert errors_in(answer) == errors
        refusals.append(_without_names(answer, named))
        guarded.rule(rule(right), rule(right, deny=True))
        assert _ask(guarded, case, named) == answer
        guarded.allow(right)
        assert not DENIALS.intersection(errors_in(_ask(guarded, case, named)))
    assert refusals[0] == refusals[1]


# --- topics --------------------------------------------------------------------------------------


def _create(client: Cluster, *names: str, version: int = 7, **fields: Any) -> list[dict]:
    topics = [{"name": name, "num_partitions": 3, "replication_factor": 1} for name in names]
    return client.call("create_topics", version, topics=topics, **fields)["topics"]


@pytest.mark.parametrize("version", [4, 5, 7])
@pytest.mark.parametrize("is_shown", [True, False])
def test_create_topics_returns_configs_only_with_describe_configs(guarded, version, is_shown):
    name = unique("t")
    guarded.allow(
        topic(Op.CREATE, name), *[topic(Op.DESCRIBE_CONFIGS, name) for _ in range(is_shown)]
    )
    with Cluster(guarded.bootstrap) as client:
        (created,) = _create(client, name, version=version)
    assert created["error_code"] == "none"
    if version >= 5:
        assert (created["num_partitions"], created["replication_factor"]) == (
            (3, 1) if is_shown else (-1, -1)
        )
        assert bool(created["configs"]) is is_shown
        refused = 0 if is_shown else 29
        assert created["topic_config_error_code"] == refused


def test_duplicate_and_reserved_topic_names_are_reported_without_permission(guarded, admin):
    mine, others = unique("t"), unique("t")
    admin.create_topic(others)
    guarded.allow(topic(Op.CREATE, mine))
    with Cluster(guarded.bootstrap) as client:
        made = _create(client, mine, others, others, "__cluster_metadata", unique("x"))
    errors = {created["name"]: created["error_code"] for created in made}
    assert errors.pop("__cluster_metadata") == "invalid_request"
    assert errors.pop(mine) == "none"
    assert errors.pop(others) == "invalid_request", "twice"
    assert list(errors.values()) == [T]


def _delete(client: Cluster, *topics: dict) -> list[tuple]:
    asked = [{"name": None, "topic_id": None, **wanted} for wanted in topics]
    answer = client.call("delete_topics", 6, topics=asked)
    return [(response["name"], response["error_code"]) for response in answer["responses"]]


def test_delete_topics_reveals_topics_only_with_describe_permission(guarded, admin):
    there, gone = unique("t"), unique("t")
    admin.create_topic(there)
    (known,) = admin.call("metadata", 12, topics=[{"name": there}])["topics"]
    by_id, unknown_id = {"topic_id": uuid.UUID(known["topic_id"])}, {"topic_id": uuid.uuid4()}

    def outcome(*rights) -> list[tuple]:
        guarded.allow(*rights)
        with Cluster(guarded.bootstrap) as client:
            return _delete(client, {"name": there}, {"name": gone}, unknown_id) + _delete(
                client, by_id
            )

    unknown = "unknown_topic_id", "unknown_topic_or_partition"
    assert outcome() == [(there, T), (gone, T), (None, unknown[0]), (None, T)]
    rights = [topic(Op.DESCRIBE, there), topic(Op.DESCRIBE, gone)]
    assert outcome(*rights) == [(there, T), (gone, unknown[1]), (None, unknown[0]), (there, T)]
    # Errors do not reveal the name of a topic id to a client that may not describe the topic.
    guarded.allow()
    with Cluster(guarded.bootstrap) as client:
        assert _delete(client, {"name": there}, by_id) == [(there, T), (None, T)]
        assert _delete(client, {"name": there}, {"name": there}) == [(there, "invalid_request")]
    assert _delete(admin, {"name": there}, by_id) == [
        (there, "invalid_request"), (None, "invalid_request")
    ]  # fmt: skip
    guarded.rule(rule(topic(Op.DELETE, there)), rule(topic(Op.DESCRIBE, there), deny=True))
    with Cluster(guarded.bootstrap) as client:
        assert _delete(client, {"name": there}) == [(there, T)]
        assert _delete(client, by_id) == [(there, "none")], "ids are no secret"


@pytest.mark.parametrize("right", ["topic", "cluster"])
def test_topic_is_deleted_with_delete_on_the_topic_or_the_cluster(guarded, admin, right):
    name = admin.create_topic(unique("t"))
    guarded.allow(topic(Op.DELETE, name) if right == "topic" else cluster(Op.DELETE))
    with Cluster(guarded.bootstrap) as client:
        assert _delete(client, {"name": name}) == [(name, "none")]


# --- settings ------------------------------------------------------------------------------------


def test_malformed_config_change_is_reported_before_authorization(guarded):
    guarded.allow()
    with Cluster(guarded.bootstrap) as client:
        for resource, expected in [
            ({"configs": [{"name": "a", "value": None}]}, "invalid_request"),
            ({"configs": [{"name": "a", "value": "1"}] * 2}, "invalid_request"),
            ({"configs": [{"name": "a", "value": "1"}]}, T),
        ]:
            change = {"resource_type": 2, "resource_name": "x", **resource}
            answer = client.call("incremental_alter_configs", 1, resources=[change])
            assert errors_in(answer) == [expected], resource
        for kind, name, expected in [(4, "99", C), (4, "", C), (8, "99", C), (7, "x", None)]:
            change = {"resource_type": kind, "resource_name": name, "configs": []}
            answer = client.call("incremental_alter_configs", 1, resources=[change])
            assert errors_in(answer) == [expected or "invalid_request"], kind
            if expected == C:
                assert answer["responses"][0]["error_message"] is None
        logger = {"resource_type": 8, "resource_name": str(NODE), "configs": []}
        answer = client.call("alter_configs", 2, resources=[logger])
        assert errors_in(answer) == ["invalid_request"]


# --- authorised operations -----------------------------------------------------------------------


def test_authorized_operations_of_the_cluster_follow_the_acls(guarded):
    def of_cluster() -> int:
        with Cluster(guarded.bootstrap) as client:
            asked = {"include_cluster_authorized_operations": True}
            told = client.call("describe_cluster", 0, **asked)["cluster_authorized_operations"]
            assert client.call("describe_cluster", 0)["cluster_authorized_operations"] == -(2**31)
            return told

    guarded.allow()
    assert of_cluster() == 0
    guarded.allow(cluster(Op.CREATE))
    assert of_cluster() == 0, "nothing is told to who may not describe it"
    guarded.allow(cluster(Op.ALTER))
    assert of_cluster() == 1 << Op.ALTER | 1 << Op.DESCRIBE
    guarded.allow(cluster(Op.ALL))
    assert of_cluster() == authorized.CLUSTER == 8096
    guarded.rule(rule(cluster(Op.ALL)), rule(cluster(Op.CLUSTER_ACTION), deny=True))
    assert of_cluster() == authorized.CLUSTER - (1 << Op.CLUSTER_ACTION)
    assert (authorized.TOPIC, authorized.GROUP) == (3576, 3400)


# --- every API checks rights ----------------------------------------------------------------------

ASKS = {"may", "may_on_cluster", "may_on_some", "require_on_cluster"}
"""The names of the methods by which handlers check rights."""

NEED_NO_RIGHT = {
    *("api_versions", "sasl_handshake", "sasl_authenticate"),
    "get_telemetry_subscriptions",
}
"""The APIs open to every client: clients authenticate with them, or Kafka requires no right.

PushTelemetry requires no right either; only an entry in a group's history requires READ on the
group.
"""


def asking(folder: Path) -> set[str]:
    """Return the modules whose ``run`` calls a method in :data:`ASKS`, directly or indirectly."""
    uses: dict[tuple[str, str], set[tuple[str, str]]] = {}
    asks: set[tuple[str, str]] = set()
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            name.asname or name.name: ((node.module or "").rpartition(".")[2], name.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            me = path.stem, function.name
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in ASKS:
                    asks.add(me)
                elif isinstance(node, ast.Name):
                    target = imported.get(node.id, (path.stem, node.id))
                    uses.setdefault(me, set()).add(target)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    uses.setdefault(me, set()).add((node.value.id, node.attr))
    while more := {caller for caller, used in uses.items() if used & asks} - asks:
        asks |= more
    return {module for module, function in asks if function == "run"}


def test_handler_without_an_authorization_check_is_detected(tmp_path):
    (tmp_path / "good.py").write_text("from a.b import help\ndef run(ctx):\n    help(ctx)\n")
    (tmp_path / "b.py").write_text("def help(ctx):\n    return ctx.may(1)\n")
    (tmp_path / "bad.py").write_text(
        "from a.b import help\ndef other(ctx):\n    ctx.may(1)\ndef run(ctx):\n    return 1\n"
    )
    assert asking(tmp_path) == {"good"}


def test_every_api_checks_authorization():
    folder = Path(handlers.__file__).parent
    served = {api.module for api in APIS.values() if (folder / f"{api.module}.py").exists()}
    assert served - asking(folder) - NEED_NO_RIGHT == set()
    assert NEED_NO_RIGHT & asking(folder) == set()
