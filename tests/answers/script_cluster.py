"""Requests about replicas, features, producer ids, log directories, brokers and the quorum."""

from __future__ import annotations

from typing import Any, Final

from tests.answers.asking import CLOSED, OTHER, STRANGER, Asker, settled
from tests.answers.script_topics import UNKNOWN_ID, WAIT, placed
from tests.oracle.traces_features import SAFE, UNSAFE, UPDATES, UPGRADE, to
from tests.support.waits import until

PREFERRED, UNCLEAN = 0, 1


def in_sync(ask: Asker, topic: str, replicas: list[int]) -> None:
    """Wait until every broker sees these replicas of all partitions, and all are in sync."""

    def is_so() -> bool:
        return all(
            part["replica_nodes"] == replicas and {*part["isr_nodes"]} == {*replicas}
            for at in ask.brokers
            for part in ask.topic(at, topic)["partitions"]
        )

    until(is_so, f"{topic} is on {replicas}")


def reassignments(ask: Asker) -> None:
    """AlterPartitionReassignments and ListPartitionReassignments."""
    ask.cluster.create_topic("moved", 2)
    settled(ask)

    def altered(name: str, *rows: tuple[int, list[int] | None], version: int = 1) -> Any:
        parts = [{"partition_index": index, "replicas": ids} for index, ids in rows]
        return {**WAIT, "topics": [{"name": name, "partitions": parts}]}

    def listed(name: str | None) -> None:
        topics = None if name is None else [{"name": name, "partition_indexes": [0, 1, 9, -1]}]
        ask("list_partition_reassignments", 0, **WAIT, topics=topics)

    for version in (0, 1):
        for body in (
            altered("moved", (0, [1]), (1, [1])),
            altered("moved", (0, [99]), (1, [1, 99])),
            altered("moved", (0, []), (1, [1, 1])),
            altered("moved", (0, [-1]), (9, [1])),
            altered("moved", (0, None), (9, None)),
            altered("none", (0, [1]), (1, None)),
            altered("__cluster_metadata", (0, [1])),
            altered("", (0, [1])),
            altered("moved"),
            {**WAIT, "topics": []},
            {**WAIT, "topics": altered("moved", (0, [1]))["topics"] * 2},
            altered("moved", (0, [1]), (0, [1])),
        ):
            for allow in (True, False):
                ask(
                    "alter_partition_reassignments",
                    version,
                    **body,
                    allow_replication_factor_change=allow,
                )
        ask.refused("alter_partition_reassignments", version, **altered("moved", (0, [1])))
    grown = altered("moved", (0, [1, 2]), (1, [1, 2]))
    ask("alter_partition_reassignments", 1, **grown, allow_replication_factor_change=False)
    for replicas in ([1, 2], [2, 1], [1]):
        body = altered("moved", (0, replicas), (1, replicas))
        ask("alter_partition_reassignments", 1, **body, allow_replication_factor_change=True)
        if OTHER in ask.places:
            in_sync(ask, "moved", replicas)
        listed("moved")
        listed(None)
        ask("metadata", 9, topics=[{"name": "moved"}])
    for name in ("none", ""):
        listed(name)
    ask("list_partition_reassignments", 0, **WAIT, topics=[])
    ask.refused("list_partition_reassignments", 0, **WAIT, topics=None)
    asked = altered("moved", (0, [1]))
    if OTHER in ask.places:
        ask.asked("alter_partition_reassignments", 1, asked, at=OTHER)
        ask.asked("alter_partition_reassignments", 1, asked, who=STRANGER, at=OTHER)
        ask.asked("list_partition_reassignments", 0, {**WAIT, "topics": None}, at=OTHER)


def elections(ask: Asker) -> None:
    """ElectLeaders."""
    ask.cluster.create_topic("elected", 2)
    for name, replicas in (("turned", [[1, 2]]), ("turned-back", [[2, 1]])):
        ask("create_topics", 7, **WAIT, topics=[placed(name, *replicas)])
    settled(ask)
    if OTHER in ask.places:
        in_sync(ask, "turned", [1, 2])

    def elect(version: int, kind: int, *topics: tuple[str, list[int]], who: str = "") -> None:
        rows = [{"topic": name, "partitions": parts} for name, parts in topics]
        body = {**WAIT, "election_type": kind, "topic_partitions": rows}
        (ask.refused if who else ask)("elect_leaders", version, **body)

    for version in range(3):
        for kind in (PREFERRED, UNCLEAN, 2, -1):
            elect(version, kind, ("elected", [0, 1]))
            elect(version, kind, ("elected", [0, 0, 9, -1]))
            elect(version, kind, ("none", [0]), ("", [0]))
            elect(version, kind, ("elected", []))
            elect(version, kind, ("elected", [0]), ("elected", [1]))
            elect(version, kind, ("__cluster_metadata", [0]))
            elect(version, kind)
            elect(version, kind, ("elected", [0]), who=STRANGER)
    # Reverse the replicas. The leader stays, but is no longer the preferred leader.
    parts = [{"partition_index": 0, "replicas": [2, 1]}]
    topics = [{"name": "turned", "partitions": parts}]
    ask("alter_partition_reassignments", 1, **WAIT, topics=topics)
    if OTHER in ask.places:
        in_sync(ask, "turned", [2, 1])
    elect(2, UNCLEAN, ("turned", [0]))
    elect(2, PREFERRED, ("turned", [0]))
    elect(2, PREFERRED, ("turned", [0]))
    settled(ask)
    ask("metadata", 9, topics=[{"name": "turned"}])
    body = {**WAIT, "election_type": PREFERRED, "topic_partitions": [_row("turned")]}
    if OTHER in ask.places:
        ask.asked("elect_leaders", 2, body, at=OTHER)
        ask.asked("elect_leaders", 2, body, who=STRANGER, at=OTHER)


def _row(topic: str) -> dict[str, Any]:
    return {"topic": topic, "partitions": [0]}


def features(ask: Asker) -> None:
    """UpdateFeatures, and the features in ApiVersions."""

    def told() -> None:
        named = {"client_software_name": "raw", "client_software_version": "1"}
        for version in (3, 4):
            answer = ask.quietly("api_versions", version, **named)
            features = ("supported_features", "finalized_features", "finalized_features_epoch")
            ask.note(
                f"features by api_versions v{version}",
                {feature: answer[feature] for feature in features},
            )

    def update(version: int, *updates: dict[str, Any], **more: Any) -> None:
        ask("update_features", version, **WAIT, feature_updates=list(updates), **more)

    told()
    transactions, groups = "transaction.version", "group.version"
    for version in (0, 1, 2):
        for only in (True, False):
            for feature_update in (
                *UPDATES,
                to(1, UPGRADE, groups),
                to(9, UPGRADE, groups),
                to(30, UPGRADE, "metadata.version"),
                to(99, UPGRADE, "metadata.version"),
                to(1, SAFE, "metadata.version"),
                to(0, UNSAFE, "metadata.version"),
                to(9, UPGRADE, "kraft.version"),
                to(0, SAFE, "kraft.version"),
                to(9, UPGRADE, "share.version"),
                to(9, UPGRADE, "eligible.leader.replicas.version"),
            ):
                update(version, feature_update, validate_only=only)
            update(version, validate_only=only)
            update(version, to(2, UPGRADE), to(9, UPGRADE, groups), validate_only=only)
            update(version, to(2, UPGRADE), to(2, UPGRADE), validate_only=only)
        for kind in (0, 4, -1):
            update(version, to(1, kind), validate_only=True)
        body = {**WAIT, "feature_updates": [to(1, SAFE), to(1, SAFE, "no.such.feature")]}
        ask.refused("update_features", version, **body)
    for version, feature_update in (
        (1, to(1, SAFE, transactions)),
        (0, to(2, UPGRADE)),
        (2, to(0, UNSAFE)),
        (2, to(2, UPGRADE)),
        (1, to(0, SAFE, groups)),
        (1, to(1, UPGRADE, groups)),
    ):
        update(version, feature_update, validate_only=True)
        update(version, feature_update)
        settled(ask)
        told()
    if OTHER in ask.places:
        body = {**WAIT, "feature_updates": [to(1, SAFE), to(1, SAFE, "no.such.feature")]}
        ask.asked("update_features", 1, body, at=OTHER)
        ask.asked("update_features", 1, body, who=STRANGER, at=OTHER)


def producer_ids(ask: Asker) -> None:
    """InitProducerId takes ids from a block; AllocateProducerIds is sent to the controller."""
    found = []
    for at in ask.brokers:
        for version in (0, 4, 5):
            answer = ask.asked("init_producer_id", version, {"transactional_id": None}, at=at)
            found.append(answer["producer_id"])
    ask.note("all producer ids differ", len({*found}) == len(found))
    ask.refused("init_producer_id", 4, transactional_id="p-refused", transaction_timeout=1000)
    ask.refused("init_producer_id", 4, transactional_id=None)
    for broker in (1, 99, -1):
        ask.asked("allocate_producer_ids", 0, {"broker_id": broker, "broker_epoch": -1})


def log_dirs(ask: Asker) -> None:
    """DescribeLogDirs and AlterReplicaLogDirs."""
    ask.cluster.create_topic("dirs", 2)
    for version in (1, 4, 5):
        for rows in ([], [_row("none")], [_row("dirs"), _row("dirs")]):
            ask("describe_log_dirs", version, topics=rows)
        ask.refused("describe_log_dirs", version, topics=[_row("dirs")])
    for version in (1, 2):
        for path in ("/no/such/directory", "relative", ""):
            rows = [{"path": path, "topics": [{"name": "dirs", "partitions": [0, 7]}]}]
            ask("alter_replica_log_dirs", version, dirs=rows)
            ask.refused("alter_replica_log_dirs", version, dirs=rows)
        ask("alter_replica_log_dirs", version, dirs=[])


def brokers(ask: Asker) -> None:
    """DescribeCluster, DescribeQuorum, UnregisterBroker, and voters of the quorum."""
    for version in (0, 1, 2):
        for kind in (1, 2, 3):
            for has_operations in (True, False):
                body = {
                    "endpoint_type": kind,
                    "include_cluster_authorized_operations": has_operations,
                    "include_fenced_brokers": True,
                }
                ask("describe_cluster", version, **body)
        ask.refused("describe_cluster", version, **body)
    own = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
    for version in range(3):
        answer = ask.quietly("describe_quorum", version, topics=[own])
        shape = [answer.get("error_code", CLOSED)]
        for topic in answer.get("topics", ()):
            for part in topic["partitions"]:
                shape += [part["error_code"], part["leader_id"]]
                shape += [[v["replica_id"] for v in part["current_voters"]]]
                shape += [sorted(v["replica_id"] for v in part["observers"])]
        ask.note(f"describe_quorum v{version}", shape)
        for topics in (
            [{**own, "topic_name": "none"}],
            [own, own],
            [{**own, "partitions": [{"partition_index": 1}]}],
            [{**own, "partitions": []}],
            [],
        ):
            ask("describe_quorum", version, topics=topics)
        ask.refused("describe_quorum", version, topics=[own])
    for broker in (99, -1, 2**31 - 1):
        ask("unregister_broker", 0, broker_id=broker)
    ask.refused("unregister_broker", 0, broker_id=99)
    for broker in (1, 2):
        ask.refused("unregister_broker", 0, broker_id=broker)
    voter = {"voter_id": 99, "voter_directory_id": UNKNOWN_ID}
    ask("add_raft_voter", 0, **voter, cluster_id=None, timeout=1000, listeners=[])
    ask("remove_raft_voter", 0, **voter, cluster_id=None)


def records_and_groups(ask: Asker) -> None:
    """Administration without the controller: records, groups, transactions, producers."""
    ask.cluster.create_topic("kept")
    ask.cluster.produce("kept", [b"a", b"b", b"c"])
    for name, offset in (("kept", 1), ("kept", 9), ("kept", -1), ("none", 0)):
        parts = [{"partition_index": 0, "offset": offset}]
        body = {**WAIT, "topics": [{"name": name, "partitions": parts}]}
        ask("delete_records", 2, **body)
        ask.refused("delete_records", 2, **body)
    for refused in (ask, ask.refused):
        refused("list_groups", 5)
        refused("describe_producers", 0, topics=[{"name": "kept", "partition_indexes": [0, 9]}])


SCRIPT: Final = (
    reassignments,
    elections,
    features,
    producer_ids,
    log_dirs,
    brokers,
    records_and_groups,
)
