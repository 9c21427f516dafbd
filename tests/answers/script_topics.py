"""Requests about topics, partitions and configs."""

from __future__ import annotations

import uuid
from typing import Any, Final

from tests.answers.asking import FIRST, OTHER, STRANGER, Asker, settled
from tests.oracle import traces_data
from tests.support.raw import Answer

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
WAIT: Final = {"timeout": 10_000}
NO_ID: Final = uuid.UUID(int=0)
UNKNOWN_ID: Final = uuid.UUID(int=255)
FEW: Final = 100
"""Requests for more partitions than this number have ``validate_only``."""

ON_FIRST: Final = [{"partition_index": 0, "broker_ids": [1]}]


def new_topic(name: str, partitions: int = 1, replicas: int = 1, **more: Any) -> dict[str, Any]:
    """Return a row of CreateTopics."""
    return {"name": name, "num_partitions": partitions, "replication_factor": replicas, **more}


def placed(name: str, *replicas: list[int], **more: Any) -> dict[str, Any]:
    """Return a row of CreateTopics with the replicas of each partition."""
    rows = [{"partition_index": i, "broker_ids": ids} for i, ids in enumerate(replicas)]
    return {**new_topic(name, -1, -1), "assignments": rows, **more}


def configured(name: str, **configs: str | None) -> dict[str, Any]:
    """Return a row of CreateTopics with configs; ``_`` in their names stands for a dot."""
    rows = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    return new_topic(name, configs=rows)


def creating(ask: Asker) -> None:
    """CreateTopics: valid requests, and each refusal."""
    traces_data.creating_topics(ask)
    for row in (
        *(new_topic(name) for name in ("", ".", "..", "a/b", "x" * 249, "x" * 250, "ü")),
        *(new_topic("c-numbers", count, 1) for count in (0, -1, -2, 10_001, 2**31 - 1)),
        *(new_topic("c-replicas", 1, count) for count in (0, -2, 2, 5, 2**15 - 1)),
        new_topic("c-made-v7"),
        new_topic("c-made-v7"),
        new_topic("__cluster_metadata"),
        new_topic("c.collides"),
        new_topic("c_collides"),
        configured("c-configs", retention_ms="77777", cleanup_policy="compact,delete"),
        configured("c-bad-value", retention_ms="much"),
        configured("c-low-value", retention_bytes="-2"),
        configured("c-no-value", retention_ms=None),
        configured("c-unknown-key", no_such_key="1"),
        configured("c-bad-policy", cleanup_policy="shred"),
        configured("c-remote", remote_storage_enable="true"),
        configured("c-sync", min_insync_replicas="0"),
        placed("c-placed", [1], [1]),
        placed("c-unknown-broker", [99]),
        placed("c-some-unknown", [1, 99]),
        placed("c-twice", [1, 1]),
        placed("c-nowhere", []),
        placed("c-uneven", [1, 2], [1]),
        placed("c-both", [1, 2], [2, 1]),
        placed("c-negative", [-1]),
        {**placed("c-counted", [1]), "num_partitions": 1},
        {**placed("c-factored", [1]), "replication_factor": 1},
        new_topic("c-gap", -1, -1, assignments=[{"partition_index": 1, "broker_ids": [1]}]),
        new_topic("c-doubled", -1, -1, assignments=ON_FIRST * 2),
    ):
        ask("create_topics", 7, **WAIT, topics=[row], validate_only=True)
        if row["num_partitions"] <= FEW:
            ask("create_topics", 7, **WAIT, topics=[row])
    same = new_topic("c-named-twice")
    ask("create_topics", 7, **WAIT, topics=[same, same, new_topic("c-named-once")])
    ask("create_topics", 7, **WAIT, topics=[])
    ask("create_topics", 7, timeout=0, topics=[placed("c-no-time", [1])])
    for version in (2, 5, 7):
        ask.refused("create_topics", version, **WAIT, topics=[new_topic("c-refused")])
        ask.refused("create_topics", version, **WAIT, topics=[new_topic("c-made-v7"), same])
    settled(ask)
    for version in (4, 9, 10, 12, 13):
        for names in (("c-placed", "c-both"), ("c-refused", "a/b")):
            topics = [{"name": name} for name in names]
            ask("metadata", version, topics=topics, allow_auto_topic_creation=False)
    ask("describe_topic_partitions", 0, topics=[{"name": "c-placed"}, {"name": "c-none"}])
    ask.refused("describe_topic_partitions", 0, topics=[{"name": "c-placed"}])
    ask.refused("metadata", 12, topics=[{"name": "c-placed"}])


def created_by_metadata(ask: Asker) -> None:
    """Topics that a Metadata request creates."""
    for name in ("auto-made", "auto/bad", ""):
        for allow in (False, True):
            ask("metadata", 9, topics=[{"name": name}], allow_auto_topic_creation=allow)
    settled(ask)
    (made,) = ask.quietly("metadata", 9, topics=[{"name": "auto-made"}])["topics"]
    ask.note("partitions of auto-made", len(made["partitions"]))
    refused = {"topics": [{"name": "auto-refused"}], "allow_auto_topic_creation": True}
    ask.refused("metadata", 9, **refused)


def growing(ask: Asker) -> None:
    """CreatePartitions: valid requests, and each refusal."""
    for version in range(4):
        ask.cluster.create_topic(f"g-{version}", 2)
    settled(ask)

    def grown(version: int, *rows: dict[str, Any], only: bool = False) -> None:
        ask("create_partitions", version, **WAIT, topics=list(rows), validate_only=only)

    def row(name: str, count: int, *replicas: list[int]) -> dict[str, Any]:
        assigned = [{"broker_ids": ids} for ids in replicas] or None
        return {"name": name, "count": count, "assignments": assigned}

    for version in range(4):
        name = f"g-{version}"
        for count in (2, 1, 0, -1, 10_003, 2**31 - 1):
            grown(version, row(name, count), only=count > FEW)
        for case in (
            row("g-none", 3),
            row("", 3),
            row("a/b", 3),
            row(name, 3, [99]),
            row(name, 3, [1, 1]),
            row(name, 3, [1, 2]),
            row(name, 3, []),
            row(name, 3, [-1]),
            row(name, 3, [1], [1]),
            row(name, 4, [1]),
            row(name, 2, [1]),
            {**row(name, 3), "assignments": []},
        ):
            grown(version, case)
        for only in (True, False):
            grown(version, row(name, 3, [1]), only=only)
        grown(version, row(name, 4, [1]), row(name, 5, [1]), row("g-none", 1))
        grown(version)
        ask.refused("create_partitions", version, **WAIT, topics=[row(name, 9), row("g-none", 9)])
        settled(ask)
        ask("metadata", 9, topics=[{"name": name}])


def deleting(ask: Asker) -> None:
    """DeleteTopics by name and by id."""
    for version in range(1, 6):
        name = ask.cluster.create_topic(f"d-{version}")
        ask.refused("delete_topics", version, **WAIT, topic_names=[name, "d-none"])
        for _ in range(2):
            ask("delete_topics", version, **WAIT, topic_names=[name, "d-none", "", "a/b"])
        ask("delete_topics", version, **WAIT, topic_names=[])
    found = {}
    for name in ("d-id", "d-named", "d-both", "d-twice", "d-kept"):
        ask.cluster.create_topic(name)
        found[name] = ask.cluster.topic_id(name)

    def deleted(*rows: tuple[str | None, uuid.UUID], who: bool = True) -> None:
        topics = [{"name": name, "topic_id": topic_id} for name, topic_id in rows]
        (ask if who else ask.refused)("delete_topics", 6, **WAIT, topics=topics)

    deleted((None, found["d-kept"]), ("d-kept", NO_ID), (None, UNKNOWN_ID), who=False)
    deleted((None, found["d-id"]), ("d-named", NO_ID), ("d-none", NO_ID), (None, UNKNOWN_ID))
    deleted(("d-both", found["d-both"]))
    deleted((None, NO_ID))
    deleted(("d-twice", NO_ID), ("d-twice", NO_ID))
    deleted(("d-twice", NO_ID), (None, found["d-twice"]))
    deleted()
    settled(ask)
    listed = [{"name": name} for name in found]
    ask("metadata", 9, topics=listed, allow_auto_topic_creation=False)
    by_id = [{"name": None, "topic_id": topic_id} for topic_id in found.values()]
    ask("metadata", 12, topics=by_id, allow_auto_topic_creation=False)


# --- configs ---


def described(ask: Asker, kind: int, name: str, *keys: str, at: str = FIRST) -> Answer:
    """Send DescribeConfigs for one resource."""
    row = {"resource_type": kind, "resource_name": name, "configuration_keys": list(keys) or None}
    return ask.asked("describe_configs", 4, {"resources": [row], "include_synonyms": True}, at=at)


def whole(kind: int, name: str) -> dict[str, Any]:
    """Return a row of DescribeConfigs for all keys."""
    return {"resource_type": kind, "resource_name": name, "configuration_keys": None}


def row(kind: int, name: str, *configs: tuple[str, int, str | None]) -> dict[str, Any]:
    """Return a row of IncrementalAlterConfigs."""
    rows = [{"name": key, "config_operation": how, "value": value} for key, how, value in configs]
    return {"resource_type": kind, "resource_name": name, "configs": rows}


def plain(change: dict[str, Any]) -> dict[str, Any]:
    """Return the row for AlterConfigs that corresponds to a row of IncrementalAlterConfigs."""
    rows = [{k: v for k, v in c.items() if k != "config_operation"} for c in change["configs"]]
    return {**change, "configs": rows}


RETENTION: Final = "retention.ms"
INTERVAL: Final = "interval.ms"
SIZE: Final = "message.max.bytes"
SESSION: Final = "consumer.session.timeout.ms"


def topic_configs(ask: Asker) -> None:
    """Configs of topics."""
    traces_data.describing_settings(ask)
    traces_data.changing_settings(ask)
    ask.cluster.create_topic("set-twice")
    for only in (True, False):
        for api, version in (("incremental_alter_configs", 1), ("alter_configs", 2)):
            for change in (
                row(TOPIC, "set-twice", (RETENTION, SET, "5000"), (RETENTION, SET, "6000")),
                row(TOPIC, "set-twice", (RETENTION, SET, "7000"), ("segment.bytes", SET, "x")),
                row(TOPIC, "set-twice", ("", SET, "1")),
                row(TOPIC, "set-twice", (RETENTION, SET, "")),
                row(TOPIC, "set-twice", ("cleanup.policy", SET, "compact,compact")),
                row(TOPIC, "set-twice", ("remote.storage.enable", SET, "true")),
                row(TOPIC, "set-twice", ("follower.replication.throttled.replicas", SET, "0:1")),
                row(TOPIC, "set-twice", ("follower.replication.throttled.replicas", SET, "x")),
                row(TOPIC, "__cluster_metadata", (RETENTION, SET, "5000")),
                row(TOPIC, "set-twice"),
            ):
                resource = change if version == 1 else plain(change)
                ask(api, version, resources=[resource], validate_only=only)
                ask(api, version, resources=[resource, resource], validate_only=only)
                ask.refused(api, version, resources=[resource], validate_only=only)
            ask(api, version, resources=[], validate_only=only)
    settled(ask)
    described(ask, TOPIC, "set-twice", RETENTION, "segment.bytes", "cleanup.policy")
    described(ask, TOPIC, "set-twice")
    ask.refused("describe_configs", 4, resources=[whole(TOPIC, "set-twice")])


def broker_configs(ask: Asker) -> None:
    """Configs of all brokers, of single brokers, and of loggers."""
    keys = (SIZE, "log.retention.ms", "num.io.threads", "listeners", "node.id")
    for name in ("", "1", "2", "99", "-1", "x"):
        for change in (
            row(BROKER, name, (SIZE, SET, "1048588")),
            row(BROKER, name, (SIZE, SET, "-5")),
            row(BROKER, name, (SIZE, SET, None)),
            row(BROKER, name, ("node.id", SET, "7")),
            row(BROKER, name, ("no.such.key", SET, "7")),
            row(BROKER, name, ("log.cleanup.policy", APPEND, "compact")),
            row(BROKER, name, (SIZE, APPEND, "1")),
            row(BROKER, name, (SIZE, DELETE, None)),
            row(BROKER, name, ("log.cleanup.policy", DELETE, None)),
            row(BROKER, name, ("listener.name.clients.ssl.keystore.location", SET, "/none")),
        ):
            only = name not in {"", "1"}
            resources = [{**change}]
            ask("incremental_alter_configs", 1, resources=resources, validate_only=True)
            if not only:
                ask("incremental_alter_configs", 1, resources=resources)
                settled(ask)
                described(ask, BROKER, name, *keys)
        described(ask, BROKER, name, *keys)
        for value in ("1048600", "x", None):
            change = plain(row(BROKER, name, (SIZE, SET, value)))
            ask("alter_configs", 2, resources=[change], validate_only=True)
        change = row(BROKER, name, (SIZE, SET, "1048588"))
        ask.refused("incremental_alter_configs", 1, resources=[change])
        ask.refused("alter_configs", 2, resources=[plain(change)])
        ask.refused("describe_configs", 4, resources=[whole(BROKER, name)])
    for name in ("1", "2", "", "99", "x"):
        for change in (
            row(LOGGER, name, ("fencepost", SET, "INFO")),
            row(LOGGER, name, ("fencepost", SET, "LOUD")),
            row(LOGGER, name, ("fencepost", SET, None)),
            row(LOGGER, name, ("no.such.logger", SET, "INFO")),
            row(LOGGER, name, ("root", SET, "INFO")),
            row(LOGGER, name, ("root", DELETE, None)),
            row(LOGGER, name, ("fencepost", APPEND, "INFO")),
            row(LOGGER, name, ("fencepost", DELETE, None)),
        ):
            for only in (True, False):
                ask("incremental_alter_configs", 1, resources=[change], validate_only=only)
        ask("alter_configs", 2, resources=[plain(row(LOGGER, name, ("root", SET, "INFO")))])
        ask.refused("incremental_alter_configs", 1, resources=[row(LOGGER, name)])


def has_group_configs(ask: Asker) -> bool:
    """Return whether groups have configs in this cluster; on ZooKeeper they have none."""
    change = row(GROUP, "g-0", (SESSION, SET, "50000"))
    ask("incremental_alter_configs", 1, resources=[change])
    (found,) = ask.quietly("describe_configs", 4, resources=[whole(GROUP, "g-0")])["results"]
    return any(config["value"] == "50000" for config in found["configs"])


def other_configs(ask: Asker) -> None:
    """Configs of groups and client metrics, resources of no type, and all resources."""
    ask.cluster.create_topic("set-mixed")
    if has_group_configs(ask):
        traces_data.settings_of_every_kind_of_group(ask)
    for kind, name, good in (
        (METRICS, "m-1", (INTERVAL, "5000")),
        (GROUP, "g-1", (SESSION, "50000")),
    ):
        for change in (
            row(kind, name, (good[0], SET, good[1])),
            row(kind, name, (good[0], SET, "-1")),
            row(kind, name, (good[0], SET, "x")),
            row(kind, name, (good[0], SET, None)),
            row(kind, name, ("no.such.key", SET, "1")),
            row(kind, name, ("match", SET, "client_id=a.*")),
            row(kind, name, ("match", SET, "nonsense=[")),
            row(kind, name, ("metrics", SET, "org.apache.kafka")),
            row(kind, name, ("metrics", APPEND, "org.apache.other")),
            row(kind, name, ("metrics", SUBTRACT, "org.apache.other")),
            row(kind, name, (good[0], APPEND, good[1])),
            row(kind, name, (good[0], SET, good[1]), (good[0], DELETE, None)),
            row(kind, "", (good[0], SET, good[1])),
            row(kind, name),
        ):
            for only in (True, False):
                ask("incremental_alter_configs", 1, resources=[change], validate_only=only)
                ask("alter_configs", 2, resources=[plain(change)], validate_only=only)
            ask.refused("incremental_alter_configs", 1, resources=[change])
        settled(ask)
        described(ask, kind, name)
        described(ask, kind, name, good[0], "no.such.key")
        described(ask, kind, "none")
        described(ask, kind, "")
        ask.refused("describe_configs", 4, resources=[whole(kind, name)])
        ask.refused("alter_configs", 2, resources=[plain(row(kind, name))])
    for kind in (0, 1, 3, 7, 64, -1):
        change = row(kind, "x", (RETENTION, SET, "1"))
        ask("incremental_alter_configs", 1, resources=[change])
        ask("alter_configs", 2, resources=[plain(change)])
        ask.refused("incremental_alter_configs", 1, resources=[change])
        described(ask, kind, "x")
    mixed = [
        row(TOPIC, "set-mixed", (RETENTION, SET, "9000")),
        row(TOPIC, "none", (RETENTION, SET, "9000")),
        row(BROKER, "", (SIZE, SET, "1048588")),
        row(GROUP, "g-1", (SESSION, SET, "51000")),
    ]
    ask("incremental_alter_configs", 1, resources=mixed)
    ask("alter_configs", 2, resources=[plain(resource) for resource in mixed])
    ask.refused("incremental_alter_configs", 1, resources=mixed)
    settled(ask)
    ask("list_config_resources", 0)
    listed = ask.quietly("list_config_resources", 1, resource_types=[])["config_resources"]
    ask.note(
        "listed, without topics",
        [resource for resource in listed if resource["resource_type"] != TOPIC],
    )
    for kinds in ([METRICS], [GROUP], [BROKER], [LOGGER], [GROUP, METRICS], [1], [64], [-1]):
        ask("list_config_resources", 1, resource_types=kinds)
    ask.refused("list_config_resources", 1, resource_types=[GROUP])
    for name in ("m-1", "m-none"):
        ask(
            "incremental_alter_configs", 1, resources=[row(METRICS, name, (INTERVAL, DELETE, None))]
        )
    ask("incremental_alter_configs", 1, resources=[row(BROKER, "", (SIZE, DELETE, None))])


def asked_elsewhere(ask: Asker) -> None:
    """Send requests about topics and configs to another broker than the first."""
    if OTHER not in ask.places:
        return
    for api, version, body in (
        ("create_topics", 7, {**WAIT, "topics": [placed("e-1", [1]), placed("c-placed", [1])]}),
        (
            "create_partitions",
            3,
            {**WAIT, "topics": [{"name": "e-1", "count": 2, "assignments": [{"broker_ids": [1]}]}]},
        ),
        ("incremental_alter_configs", 1, {"resources": [row(TOPIC, "e-1", (RETENTION, SET, "1"))]}),
        ("incremental_alter_configs", 1, {"resources": [row(TOPIC, "e-2", (RETENTION, SET, "1"))]}),
        (
            "incremental_alter_configs",
            1,
            {"resources": [row(GROUP, "e-1", (SESSION, SET, "50000"))]},
        ),
        ("alter_configs", 2, {"resources": [plain(row(TOPIC, "e-1", (RETENTION, SET, "2")))]}),
        ("alter_configs", 2, {"resources": [plain(row(TOPIC, "e-1", (RETENTION, SET, "x")))]}),
        ("delete_topics", 5, {**WAIT, "topic_names": ["e-1", "e-2"]}),
    ):
        ask.asked(api, version, body, who=STRANGER, at=OTHER)
        ask.asked(api, version, body, at=OTHER)
        settled(ask)


SCRIPT: Final = (
    creating,
    created_by_metadata,
    growing,
    deleting,
    topic_configs,
    broker_configs,
    other_configs,
    asked_elsewhere,
)
