"""Request sequences of a cluster administrator: directories, quorum, replicas, ACLs, quotas."""

from __future__ import annotations

import itertools
from typing import Any

from tests.oracle.tracer import Tracer
from tests.support.raw import Answer
from tests.support.waits import until

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
PREFERRED, UNCLEAN = 0, 1


def log_dirs(t: Tracer) -> None:
    t.cluster.create_topic("dirs", 3)
    t.cluster.create_topic("dirs-empty", 2)
    for partition in (0, 2):
        t.cluster.produce("dirs", [b"a", b"b"], partition=partition)
    for version in range(1, 6):
        for topics in (
            [{"topic": "dirs", "partitions": [0, 1, 2]}],
            [{"topic": "dirs", "partitions": [2, 9, -1, 2]}],
            [
                {"topic": "dirs-empty", "partitions": [1]},
                {"topic": "dirs", "partitions": [0]},
                {"topic": "dirs-empty", "partitions": [0, 1]},
            ],
            [{"topic": "no-such-topic", "partitions": [0]}, {"topic": "", "partitions": [0]}],
            [{"topic": "__cluster_metadata", "partitions": [0]}],
            [{"topic": "dirs", "partitions": []}],
            [],
        ):
            answer = t("describe_log_dirs", version, topics=topics)
        everything = t.quietly("describe_log_dirs", version, topics=None)
        t.note(
            "all of them",
            {
                "topics": [
                    topic
                    for topic in everything["results"][0]["topics"]
                    if topic["name"].startswith("dirs")
                ],
                "is there more": len(everything["results"][0]["topics"])
                > len(answer["results"][0]["topics"]),
            },
        )
        for result in everything["results"]:
            if version >= 4:
                t.note("sizes", 0 < result["usable_bytes"] <= result["total_bytes"])


def moving_log_dirs(t: Tracer) -> None:
    t.cluster.create_topic("moved", 2)
    (here,) = t.quietly("describe_log_dirs", 4, topics=[])["results"]

    def move(version: int, *dirs: tuple[str, str, list[int]]) -> None:
        t(
            "alter_replica_log_dirs",
            version,
            dirs=[
                {"path": path, "topics": [{"name": topic, "partitions": parts}]}
                for path, topic, parts in dirs
            ],
        )

    path = here["log_dir"]
    for version in (1, 2):
        move(version, (path, "moved", [0, 1]))
        move(version, (path, "moved", [0, 0, 7]))
        move(version, (path, "no-such-topic", [0]))
        move(version, (path, "", [0]))
        for other in ("/no/such/directory", "relative", "", path + "/", path + "/moved-0"):
            move(version, (other, "moved", [0, 7]))
        move(version, ("/no/such/directory", "moved", [0]), (path, "moved", [0, 1]))
        move(version, (path, "moved", [0]), ("/no/such/directory", "moved", [0]))
        move(version, (path, "moved", []))
        move(version)


def quorum(t: Tracer) -> None:
    own = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
    other = {"topic_name": "no-such-topic", "partitions": [{"partition_index": 0}]}
    for version in range(3):
        answer = t.quietly("describe_quorum", version, topics=[own])
        (part,) = answer["topics"][0]["partitions"]
        (voter,) = part["current_voters"]
        t.note("high watermark", 0 < part["high_watermark"] <= voter["log_end_offset"])
        t.note("epoch", part["leader_epoch"] > 0)
        for name in ("high_watermark", "leader_epoch"):
            del part[name]
        del voter["log_end_offset"]
        for name in ("last_fetch_timestamp", "last_caught_up_timestamp"):
            if name in voter:
                t.note(name, voter.pop(name) > 0)
        for node in answer.get("nodes", ()):
            t.note("listeners of the node", len(node.pop("listeners")))
        t.note("the rest", answer)
        for topics in (
            [other],
            [own, other],
            [own, own],
            [{**own, "partitions": [{"partition_index": 1}]}],
            [{**own, "partitions": [{"partition_index": 0}, {"partition_index": 1}]}],
            [{**own, "partitions": []}],
            [],
        ):
            t("describe_quorum", version, topics=topics)


def reassigning(t: Tracer) -> None:
    t.cluster.create_topic("replicas", 2)

    def listed(**body: Any) -> Answer:
        return t("list_partition_reassignments", 0, timeout=5000, **body)

    listed(topics=None)
    listed(topics=[])
    for name in ("replicas", "no-such-topic", ""):
        listed(topics=[{"name": name, "partition_indexes": [0, 9, -1]}])
    for version in (0, 1):
        for name, parts in (
            ("replicas", {0: [1], 1: [1]}),
            ("replicas", {0: [2], 1: [1, 2], 9: [1]}),
            ("replicas", {0: [], 1: [1, 1]}),
            ("replicas", {0: [-1], 1: [1, -1]}),
            ("replicas", {0: None, 1: [1], 9: None}),
            ("no-such-topic", {0: [1], 1: None}),
            ("__cluster_metadata", {0: [1]}),
            ("", {0: [1]}),
            ("replicas", {}),
        ):
            for allow in (True, False):
                topics = [
                    {
                        "name": name,
                        "partitions": [
                            {"partition_index": index, "replicas": replicas}
                            for index, replicas in parts.items()
                        ],
                    }
                ]
                t(
                    "alter_partition_reassignments",
                    version,
                    timeout=5000,
                    allow_replication_factor_change=allow,
                    topics=topics,
                )
        t("alter_partition_reassignments", version, timeout=5000, topics=[])
        twice = {"name": "replicas", "partitions": [{"partition_index": 0, "replicas": [1]}] * 2}
        t("alter_partition_reassignments", version, timeout=5000, topics=[twice, twice])
    listed(topics=None)


def electing(t: Tracer) -> None:
    t.cluster.create_topic("elected", 2)
    for version in range(3):
        for kind in (PREFERRED, UNCLEAN, 2, -1):
            for topics in (
                [{"topic": "elected", "partitions": [0, 1]}],
                [{"topic": "elected", "partitions": [0, 0, 9, -1]}],
                [{"topic": "no-such-topic", "partitions": [0]}, {"topic": "", "partitions": [0]}],
                [{"topic": "elected", "partitions": []}],
                [{"topic": "elected", "partitions": [0]}, {"topic": "elected", "partitions": [1]}],
                [{"topic": "__cluster_metadata", "partitions": [0]}],
                [],
            ):
                t(
                    "elect_leaders",
                    version,
                    timeout=5000,
                    election_type=kind,
                    topic_partitions=topics,
                )
            answer = t.quietly(
                "elect_leaders", version, timeout=5000, election_type=kind, topic_partitions=None
            )
            answer["replica_election_results"] = [
                result
                for result in answer["replica_election_results"]
                if result["topic"] == "elected"
            ]
            t.note(f"elect_leaders v{version} of all, {kind}", answer)


def config_resources(t: Tracer) -> None:
    t.cluster.create_topic("resource")
    for name in ("resource-group", "resource-none"):
        for value in ("50000", None):
            if name == "resource-group" and value is None:
                continue
            t.quietly(
                "incremental_alter_configs",
                1,
                resources=[
                    {
                        "resource_type": GROUP,
                        "resource_name": name,
                        "configs": [
                            {
                                "name": "consumer.session.timeout.ms",
                                "config_operation": 0 if value else 1,
                                "value": value,
                            }
                        ],
                    }
                ],
            )

    def listed(version: int, *kinds: int) -> None:
        answer = t.quietly("list_config_resources", version, resource_types=list(kinds))
        for resource in answer.get("config_resources", ()):
            resource.setdefault("resource_type", METRICS)
        answer["config_resources"] = [
            resource
            for resource in answer["config_resources"]
            if resource["resource_type"] in {BROKER, LOGGER}
            or resource["resource_name"].startswith("resour")
        ]
        t.note(f"list_config_resources v{version} {kinds}", answer)

    listed(0)
    for kinds in (
        (),
        (TOPIC,),
        (BROKER,),
        (LOGGER,),
        (METRICS,),
        (GROUP,),
        (TOPIC, GROUP),
        (BROKER, BROKER),
        (0,),
        (1,),
        (3,),
        (64,),
        (TOPIC, 1),
        (-1,),
    ):
        listed(1, *kinds)


def unregistering(t: Tracer) -> None:
    for broker in (2, 0, -1, 2**31 - 1):
        t("unregister_broker", 0, broker_id=broker)


ACL = {
    "resource_type": 2,
    "resource_name": "t",
    "resource_pattern_type": 3,
    "principal": "User:a",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}
ANY_ACL = {
    "resource_type_filter": 1,
    "pattern_type_filter": 1,
    "operation": 1,
    "permission_type": 1,
}


def rights(t: Tracer) -> None:
    for version in (1, 2, 3):
        t("describe_acls", version, **ANY_ACL)
        t("describe_acls", version, **ANY_ACL | {"operation": 0})
        t("describe_acls", version, **ANY_ACL | {"resource_name_filter": "", "operation": 3})
        t("create_acls", version, creations=[ACL, ACL])
        t("create_acls", version, creations=[ACL | {"operation": 1}])
        t("create_acls", version, creations=[])
        t("delete_acls", version, filters=[ANY_ACL, ANY_ACL])
        t("delete_acls", version, filters=[])


def quotas(t: Tracer) -> None:
    for version in (0, 1):
        for strict in (False, True):
            for components in (
                [],
                [{"entity_type": "user", "match_type": 0, "match": "alice"}],
                [{"entity_type": "user", "match_type": 1, "match": None}],
                [{"entity_type": "user", "match_type": 2, "match": None}],
                [{"entity_type": "client-id", "match_type": 2, "match": None}],
                [{"entity_type": "ip", "match_type": 2, "match": None}],
                [{"entity_type": "ip", "match_type": 0, "match": "not an address"}],
                [
                    {"entity_type": "ip", "match_type": 2, "match": None},
                    {"entity_type": "user", "match_type": 2, "match": None},
                ],
                [
                    {"entity_type": "user", "match_type": 0, "match": "a"},
                    {"entity_type": "client-id", "match_type": 1, "match": None},
                ],
                [{"entity_type": "user", "match_type": 2, "match": None}] * 2,
                [{"entity_type": "no-such-type", "match_type": 2, "match": None}],
                [{"entity_type": "", "match_type": 2, "match": None}],
                [{"entity_type": "user", "match_type": 3, "match": None}],
                [{"entity_type": "user", "match_type": -1, "match": None}],
                [{"entity_type": "user", "match_type": 0, "match": None}],
                [{"entity_type": "user", "match_type": 1, "match": "a"}],
                [{"entity_type": "user", "match_type": 2, "match": "a"}],
            ):
                t("describe_client_quotas", version, components=components, strict=strict)
        t("alter_client_quotas", version, entries=[])
        rate = {"key": "producer_byte_rate", "value": 1000.0, "remove": False}
        for kind in ("user", "client-id", "no-such-type", ""):
            for ops in ([], [rate | {"remove": True}], [rate]):
                entity = [{"entity_type": kind, "entity_name": "a"}]
                entries = [{"entity": entity, "ops": ops}, {"entity": [], "ops": ops}]
                t("alter_client_quotas", version, entries=entries, validate_only=True)


MATCHED = [
    ({"user": "user-1", "client-id": "client-id-1"}, 50.5),
    ({"user": "user-2", "client-id": "client-id-1"}, 51.5),
    ({"user": "user-3", "client-id": "client-id-2"}, 52.5),
    ({"user": None, "client-id": "client-id-1"}, 53.5),
    ({"user": "user-1", "client-id": None}, 54.5),
    ({"user": "user-3", "client-id": None}, 55.5),
    ({"user": "user-1"}, 56.5),
    ({"user": "user-2"}, 57.5),
    ({"user": "user-3"}, 58.5),
    ({"user": None}, 59.5),
    ({"client-id": "client-id-2"}, 60.5),
    ({"ip": "1.2.3.4"}, 10.0),
    ({"ip": "2.3.4.5"}, 20.0),
]
"""The entities of Kafka's ``ClientQuotasRequestTest``."""


def quotas_that_are_kept(t: Tracer) -> None:
    """Set quotas and describe them with every filter; removed quotas are gone."""

    def entry(entity: dict[str, str | None], **values: float | None) -> dict[str, Any]:
        return {
            "entity": [{"entity_type": k, "entity_name": n} for k, n in entity.items()],
            "ops": [
                {"key": key, "value": value or 0.0, "remove": value is None}
                for key, value in values.items()
            ],
        }

    changes = itertools.count(1)

    def change(version: int, entries: list[dict[str, Any]], *, only: bool = False) -> None:
        t("alter_client_quotas", version, entries=entries, validate_only=only)
        # Apache Kafka's broker applies changes after the response, but in order: wait for a last
        # one.
        last = float(next(changes))
        mark = entry({"client-id": "mark"}, producer_byte_rate=last)
        t.quietly("alter_client_quotas", 1, entries=[mark], validate_only=False)
        named = [{"entity_type": "client-id", "match_type": 0, "match": "mark"}]

        def heard() -> bool:
            found = t.quietly("describe_client_quotas", 1, components=named, strict=True)
            return [v["value"] for row in found["entries"] for v in row["values"]] == [last]

        until(heard, "the broker has heard of it")

    def told(*components: tuple[str, int, str | None]) -> None:
        for strict in (False, True):
            named = [{"entity_type": k, "match_type": h, "match": n} for k, h, n in components]
            t("describe_client_quotas", 1, components=named, strict=strict)

    alice = {"user": "alice"}
    for version, values in (
        (0, {"producer_byte_rate": 10000.0, "consumer_byte_rate": 20000.0}),
        (1, {"producer_byte_rate": 15000.0}),
        (1, {"producer_byte_rate": None}),
        (1, {"request_percentage": None}),
        (1, {"producer_byte_rate": 5000.0}),
        (0, {"producer_byte_rate": 2e4, "consumer_byte_rate": None, "request_percentage": 12.3}),
        (1, {"controller_mutation_rate": 0.5, "no_such_rate": 1.0}),
        (1, {"no_such_rate": None, "request_percentage": None}),
        (1, {"producer_byte_rate": None}),
    ):
        for only in (True, False):
            change(version, [entry(alice, **values)], only=only)
            told(("user", 0, "alice"))
    rates = {True: "connection_creation_rate", False: "request_percentage"}
    entries = [entry(entity, **{rates["ip" in entity]: value}) for entity, value in MATCHED]
    change(1, entries)
    told()
    for kind, name in (("user", "user-1"), ("client-id", "client-id-2"), ("ip", "1.2.3.4")):
        for how, named in ((0, name), (0, "unknown"), (1, None), (2, None)):
            told((kind, how, named))
    for first in ((0, "user-1"), (1, None), (2, None)):
        for second in ((0, "client-id-1"), (1, None), (2, None)):
            told(("user", *first), ("client-id", *second))
    entries = [entry(entity, **{rates["ip" in entity]: None}) for entity, _ in MATCHED]
    change(1, entries)
    told()
    gone = entry({"client-id": "mark"}, producer_byte_rate=None)
    t("alter_client_quotas", 1, entries=[gone], validate_only=False)


def quotas_that_are_kept_otherwise(t: Tracer) -> None:
    """Set quotas of host names, and of an entity that is named twice."""

    def altered(entity: tuple[str, str], key: str, *values: float | None) -> None:
        named = [{"entity_type": entity[0], "entity_name": entity[1]}]
        ops = [{"key": key, "value": value or 0.0, "remove": value is None} for value in values]
        entries = [{"entity": named, "ops": [op]} for op in ops]
        t("alter_client_quotas", 1, entries=entries, validate_only=False)

    altered(("ip", "localhost"), "connection_creation_rate", None)
    altered(("user", "twice"), "request_percentage", 1e6, 2e6)
    altered(("user", "once"), "request_percentage", 1e6)
    once = [{"entity_type": "user", "match_type": 0, "match": "once"}]

    def heard() -> bool:
        return bool(t.quietly("describe_client_quotas", 1, components=once)["entries"])

    until(heard, "the broker has heard of it")
    twice = [{"entity_type": "user", "match_type": 0, "match": "twice"}]
    found = t.quietly("describe_client_quotas", 1, components=twice)
    t.note("kept", len(found["entries"]))
    for name in ("once", "twice"):
        altered(("user", name), "request_percentage", None)


def credentials(t: Tracer) -> None:
    for users in (None, [], ["alice"], ["alice", "bob", "alice"], [""]):
        asked = None if users is None else [{"name": name} for name in users]
        t("describe_user_scram_credentials", 0, users=asked)
    for mechanism in (1, 2, 0, 3, -1):
        t(
            "alter_user_scram_credentials",
            0,
            deletions=[{"name": name, "mechanism": mechanism} for name in ("alice", "")],
            upsertions=[],
        )
    t("alter_user_scram_credentials", 0, deletions=[], upsertions=[])
    password = {"iterations": 4096, "salt": b"salt", "salted_password": b"password"}
    for name, mechanism in (("alice", 7), ("", 1), ("alice", 1)):
        upsertion = {"name": name, "mechanism": mechanism, **password}
        t("alter_user_scram_credentials", 0, deletions=[], upsertions=[upsertion])
    gone = [{"name": "alice", "mechanism": 1}]
    t("alter_user_scram_credentials", 0, deletions=gone, upsertions=[])
    twice = [{"name": "alice", "mechanism": 1}, {"name": "bob", "mechanism": 2}]
    t("alter_user_scram_credentials", 0, deletions=twice + twice[:1], upsertions=[])


def quotas_that_are_refused(t: Tracer) -> None:
    """Neither broker stores any of these quotas, and neither resolves a host name."""

    def op(key: str = "producer_byte_rate", value: float = 1000.0, *, remove: bool = False) -> Any:
        return {"key": key, "value": value, "remove": remove}

    def of(**names: str | None) -> list[dict[str, Any]]:
        kinds = {"client_id": "client-id"}
        return [{"entity_type": kinds.get(k, k), "entity_name": n} for k, n in names.items()]

    alice, gone = of(user="alice"), [op(remove=True)]
    for entity, ops in (
        (alice, [op("no-such-quota")]),
        (alice, [op("no-such-quota", remove=True)]),
        (alice, [op("", remove=True)]),
        (alice, [op("connection_creation_rate")]),
        (alice, [op("connection_creation_rate", remove=True)]),
        (of(ip="10.0.0.1"), [op()]),
        (of(ip="10.0.0.1"), gone),
        (of(ip="10.0.0.1"), [op("connection_creation_rate", remove=True)]),
        (of(ip=None), [op("connection_creation_rate", 0.5)]),
        (alice, [op(value=0.0)]),
        (alice, [op(value=-1.0)]),
        (alice, [op(value=0.5)]),
        (alice, [op(value=1e30)]),
        (alice, [op("request_percentage", 0.0)]),
        (alice, [op("controller_mutation_rate", -0.5)]),
        (alice, [op(value=-1.0, remove=True)]),
        (alice, [op(remove=True), op(remove=True)]),
        (alice, [op(remove=True), op("no-such-quota", remove=True)]),
        (alice, [op(), op("no-such-quota")]),
        (of(user=""), gone),
        (of(client_id=""), []),
        (of(ip=""), gone),
        (of(user=None), gone),
        (of(client_id="b", user="a"), gone),
        (of(user="a", ip="10.0.0.1"), gone),
        (of(client_id=None, ip=None), []),
        ([*alice, *of(user="bob")], gone),
        ([*alice, *alice], gone),
        ([*alice, *of(nonsense="bob")], gone),
        ([*of(user=""), *of(nonsense="bob")], gone),
    ):
        for version in (0, 1):
            entries = [{"entity": entity, "ops": ops}]
            t("alter_client_quotas", version, entries=entries, validate_only=False)
    twice = [{"entity": alice, "ops": gone}] * 2
    t("alter_client_quotas", 1, entries=twice)
    t("alter_client_quotas", 1, entries=[*twice, {"entity": of(user="bob"), "ops": gone}])
    t("describe_client_quotas", 1, components=[], strict=False)


def credentials_that_are_refused(t: Tracer) -> None:
    """Neither broker stores any of these credentials."""

    def altered(deletions: list[tuple[str, int]], upsertions: list[tuple[str, int, int]]) -> None:
        t(
            "alter_user_scram_credentials",
            0,
            deletions=[{"name": name, "mechanism": kind} for name, kind in deletions],
            upsertions=[
                {
                    "name": name,
                    "mechanism": kind,
                    "iterations": iterations,
                    "salt": b"salt",
                    "salted_password": b"password",
                }
                for name, kind, iterations in upsertions
            ],
        )

    for iterations in (4095, 16385, 0, -1, -(2**31), 2**31 - 1):
        for kind in (1, 2, 0, 3, -1):
            altered([], [("alice", kind, iterations)])
    for first, second in (((1, 4096), (1, 4096)), ((1, 4096), (2, 16384)), ((2, 4096), (7, 1))):
        altered([], [("alice", *first), ("alice", *second)])
        altered([], [("alice", *first), ("alice", *second), ("alice", *first)])
    altered([], [("alice", 1, 4095), ("alice", 1, 4096)])
    altered([], [("alice", 7, 4096), ("alice", 1, 4096)])
    altered([], [("", 1, 4096), ("", 1, 4096)])
    altered([("alice", 1)], [("alice", 1, 4096)])
    altered([("alice", 1), ("alice", 2)], [])
    altered([("alice", 9), ("alice", 1)], [])
    altered([("", 1)], [("", 1, 4096)])


TRACES = [
    log_dirs,
    moving_log_dirs,
    quorum,
    reassigning,
    electing,
    config_resources,
    unregistering,
    rights,
    quotas,
    quotas_that_are_kept,
    quotas_that_are_kept_otherwise,
    quotas_that_are_refused,
    credentials,
    credentials_that_are_refused,
]
