"""A single node's responses to requests about the cluster: every version, through a socket."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fencepost.cluster.controller import scram
from fencepost.cluster.controller.scram import MAX_SALT_BYTES
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.protocol.limits import MAX_ERROR_TEXT_CHARACTERS
from tests.support.cluster import Cluster, unique
from tests.support.faults import FaultyDisk
from tests.support.raw import Answer
from tests.support.waits import until
from tests.unit.coordinator.on_faulty_disk import running

NODE = 3
"""The node id of the broker."""

TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
PREFERRED, UNCLEAN = 0, 1


# --- directories ---------------------------------------------------------------------------------


def log_dir(client: Cluster, version: int = 5, topics: list[Answer] | None = None) -> Answer:
    answer = client.call("describe_log_dirs", version, topics=topics)
    assert answer.get("error_code", "none") == "none"
    (found,) = answer["results"]
    return found


def sizes(found: Answer) -> dict[str, dict[int, int]]:
    return {
        topic["name"]: {
            partition["partition_index"]: partition["partition_size"]
            for partition in topic["partitions"]
        }
        for topic in found["topics"]
    }


def on_disk(directory: str, topic: str, index: int) -> int:
    return sum(path.stat().st_size for path in Path(directory, f"{topic}-{index}").glob("*.log"))


@pytest.mark.parametrize("version", range(1, 6))
def test_describe_log_dirs_returns_partition_sizes(client, version):
    name = client.create_topic(unique("dirs"), 3, {"segment.bytes": "1048576"})
    for _ in range(3):
        client.produce(name, [bytes(90_000)], partition=1)
    found = log_dir(client, version, [{"topic": name, "partitions": [0, 1, 1, 9, -1]}])
    size = on_disk(found["log_dir"], name, 1)
    assert size > 270_000
    assert found["error_code"] == "none"
    assert sizes(found) == {name: {0: 0, 1: size}}
    for part in found["topics"][0]["partitions"]:
        assert (part["offset_lag"], part["is_future_key"]) == (0, False)
    assert sizes(log_dir(client, version))[name] == {0: 0, 1: size, 2: 0}
    for nothing in ([], [{"topic": "nowhere", "partitions": [0]}], [{"topic": name}]):
        assert log_dir(client, version, nothing)["topics"] == []
    if version >= 4:
        assert 0 < found["usable_bytes"] <= found["total_bytes"]
    if version >= 5:
        assert found["is_cordoned"] is False


def test_describe_log_dirs_merges_repeated_topics(client):
    name = client.create_topic(unique("dirs"), 4)
    asked = [{"topic": name, "partitions": parts} for parts in ([2], [], [0, 2], [3])]
    assert sizes(log_dir(client, topics=asked)) == {name: {0: 0, 2: 0, 3: 0}}


def test_describe_log_dirs_does_not_create_a_partition_directory(client):
    directory = log_dir(client)["log_dir"]
    created = client.call(
        "create_topics",
        7,
        timeout=1000,
        topics=[{"name": unique("never"), "num_partitions": 1, "replication_factor": 1}],
    )["topics"][0]["name"]
    assert sizes(log_dir(client))[created] == {0: 0}
    assert not Path(directory, f"{created}-0").exists()


def test_log_dir_is_returned_as_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Broker.in_thread(Path("data")) as broker, Cluster(broker.bootstrap) as client:
        assert log_dir(client)["log_dir"] == str(tmp_path / "data")


def test_missing_log_dir_is_described_as_a_storage_error(tmp_path):
    with Broker.in_thread(tmp_path / "data") as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("t")
        (tmp_path / "data").rename(tmp_path / "gone")
        found = log_dir(client)
        assert (found["error_code"], found["topics"]) == ("kafka_storage_error", [])
        assert (found["total_bytes"], found["usable_bytes"]) == (-1, -1)
        (tmp_path / "gone").rename(tmp_path / "data")
        assert log_dir(client)["error_code"] == "none"


def test_offline_partition_is_not_described_moved_or_elected(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        client, name = system.client, system.client.create_topic("t", 2)
        client.produce(name, [b"v"], partition=1)
        disk.fails = {"write": errno.EIO}
        assert client.produce(name, [b"v"])["error_code"] == "kafka_storage_error"
        disk.fails = {}
        until(lambda: system.broker.services.logs.is_offline(name, 0), "it is off line")
        found = log_dir(client)
        assert list(sizes(found)[name]) == [1]
        for version in (1, 2):
            assert move(client, version, (found["log_dir"], name, [0, 1])) == {
                (name, 0): "kafka_storage_error",
                (name, 1): "none",
            }
        for kind, code in ((PREFERRED, "preferred"), (UNCLEAN, "eligible")):
            _, found = elect(client, 2, kind, None)
            assert [code for _, code in found.items() if code != "election_not_needed"] == [
                f"{code}_leader{'s' * (kind == UNCLEAN)}_not_available"
            ]


def move(
    client: Cluster, version: int, *dirs: tuple[str, str, list[int]]
) -> dict[tuple[str, int], str]:
    answer = client.call(
        "alter_replica_log_dirs",
        version,
        dirs=[
            {"path": path, "topics": [{"name": topic, "partitions": parts}]}
            for path, topic, parts in dirs
        ],
    )
    return {
        (topic["topic_name"], part["partition_index"]): part["error_code"]
        for topic in answer["results"]
        for part in topic["partitions"]
    }


@pytest.mark.parametrize("version", [1, 2])
def test_alter_replica_log_dirs_to_an_unknown_directory_is_refused(client, topic, version):
    here = log_dir(client)["log_dir"]
    assert move(client, version, (here, topic, [0, 7]), (here, "nowhere", [0])) == {
        (topic, 0): "none",
        (topic, 7): "unknown_topic_or_partition",
        ("nowhere", 0): "unknown_topic_or_partition",
    }
    for other in ("/no/such/directory", f"{here}/", "", "data"):
        assert move(client, version, (other, topic, [0])) == {(topic, 0): "log_dir_not_found"}
    twice = move(client, version, (here, topic, [0]), ("/elsewhere", topic, [0]))
    assert twice == {(topic, 0): "log_dir_not_found"}
    assert move(client, version) == {}


# --- the quorum ----------------------------------------------------------------------------------


def asked(*partitions: int, topic: str = "__cluster_metadata") -> Answer:
    return {
        "topic_name": topic,
        "partitions": [{"partition_index": partition} for partition in partitions],
    }


@pytest.mark.parametrize("version", range(3))
def test_describe_quorum_returns_the_node_as_leader_and_only_voter(client, bootstrap, version):
    answer = client.call("describe_quorum", version, topics=[asked(0)])
    assert answer["error_code"] == "none"
    (part,) = answer["topics"][0]["partitions"]
    (voter,) = part["current_voters"]
    assert (part["error_code"], part["leader_id"], part["leader_epoch"]) == ("none", NODE, 1)
    assert (voter["replica_id"], part["observers"]) == (NODE, [])
    assert part["high_watermark"] == voter["log_end_offset"]
    client.create_topic(unique("later"))
    (later,) = client.call("describe_quorum", version, topics=[asked(0)])["topics"][0]["partitions"]
    assert later["high_watermark"] > part["high_watermark"]
    if version >= 1:
        assert 0 < voter["last_fetch_timestamp"] == voter["last_caught_up_timestamp"]
    if version >= 2:
        assert (answer["error_message"], part["error_message"]) == ("", "")
        (node,) = answer["nodes"]
        (listener,) = node["listeners"]
        assert node["node_id"] == NODE
        assert f"{listener['host']}:{listener['port']}" == bootstrap
        assert voter["replica_directory_id"] is None


def test_describe_quorum_returns_the_endpoint_of_the_receiving_listener(tmp_path):
    config = {
        "listeners": "INSIDE://127.0.0.1:0,OUTSIDE://127.0.0.1:0",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT",
    }

    async def addresses():
        return dict(made[0].server.addresses)

    made = []
    with BrokerThread(lambda: made.append(Broker(tmp_path, None, config)) or made[0]) as served:
        found = served.call(addresses)
        assert list(found) == ["INSIDE", "OUTSIDE"]
        for name, (host, port) in found.items():
            with Cluster(f"{host}:{port}") as client:
                (node,) = client.call("describe_quorum", 2, topics=[asked(0)])["nodes"]
                assert node["listeners"] == [{"name": name, "host": host, "port": port}]


@pytest.mark.parametrize(
    "topics",
    [
        [asked(1)],
        [asked(0, 1)],
        [asked(0, 0)],
        [asked(0), asked(0)],
        [asked(0, topic="other")],
        [asked(0), asked(0, topic="other")],
    ],
)
@pytest.mark.parametrize("version", range(3))
def test_describe_quorum_of_other_partitions_is_unknown_topic_or_partition(client, version, topics):
    answer = client.call("describe_quorum", version, topics=topics)
    assert answer["error_code"] == "none"
    found = [part for topic in answer["topics"] for part in topic["partitions"]]
    assert len(found) == sum(len(topic["partitions"]) for topic in topics)
    assert {partition["error_code"] for partition in found} == {"unknown_topic_or_partition"}
    assert client.call("describe_quorum", version, topics=[])["topics"] == []


def test_quorum_leader_epoch_increases_with_each_start(tmp_path):
    for start in (1, 2, 3):
        with Broker.in_thread(tmp_path / "data") as broker, Cluster(broker.bootstrap) as client:
            answer = client.call("describe_quorum", 0, topics=[asked(0)])
            assert answer["topics"][0]["partitions"][0]["leader_epoch"] == start


# --- replicas ------------------------------------------------------------------------------------


def reassign(
    client: Cluster, version: int, topic: str, replicas: dict[int, list[int] | None]
) -> list[str]:
    parts = [{"partition_index": index, "replicas": many} for index, many in replicas.items()]
    answer = client.call(
        "alter_partition_reassignments",
        version,
        timeout=1000,
        topics=[{"name": topic, "partitions": parts}],
    )
    assert answer["error_code"] == "none"
    (found,) = answer["responses"]
    assert [partition["partition_index"] for partition in found["partitions"]] == list(replicas)
    return [partition["error_code"] for partition in found["partitions"]]


@pytest.mark.parametrize("version", [0, 1])
def test_reassignment_to_other_replicas_is_refused_on_a_single_node(client, topic, version):
    assert reassign(client, version, topic, {0: [NODE], 9: [NODE], -1: None}) == [
        "none",
        "unknown_topic_or_partition",
        "unknown_topic_or_partition",
    ]
    for elsewhere in ([], [1], [NODE, 1], [NODE, NODE], [-1]):
        assert reassign(client, version, topic, {0: elsewhere}) == ["invalid_replica_assignment"]
    assert reassign(client, version, topic, {0: None}) == ["no_reassignment_in_progress"]
    assert reassign(client, version, "nowhere", {0: [NODE]}) == ["unknown_topic_or_partition"]
    for topics in (None, [], [{"name": topic, "partition_indexes": [0]}]):
        listed = client.call("list_partition_reassignments", 0, timeout=1000, topics=topics)
        assert (listed["error_code"], listed["topics"]) == ("none", [])


def elect(
    client: Cluster, version: int, kind: int, topics: dict[str, list[int]] | None
) -> tuple[str, dict[tuple[str, int], str]]:
    named = None
    if topics is not None:
        named = [{"topic": topic, "partitions": parts} for topic, parts in topics.items()]
    fields = {"election_type": kind} if version else {}
    answer = client.call("elect_leaders", version, timeout=1000, topic_partitions=named, **fields)
    return answer.get("error_code", "none"), {
        (topic["topic"], part["partition_id"]): part["error_code"]
        for topic in answer["replica_election_results"]
        for part in topic["partition_result"]
    }


@pytest.mark.parametrize("kind", [PREFERRED, UNCLEAN])
@pytest.mark.parametrize("version", range(3))
def test_leader_election_on_a_single_node_is_not_needed(client, topic, version, kind):
    assert elect(client, version, kind, {topic: [0, 9], "nowhere": [0]}) == (
        "none",
        {
            (topic, 0): "election_not_needed",
            (topic, 9): "unknown_topic_or_partition",
            ("nowhere", 0): "unknown_topic_or_partition",
        },
    )
    assert elect(client, version, kind, None) == ("none", {})
    if version:
        wrong = {(topic, 0): "invalid_request"}
        assert elect(client, version, 2, {topic: [0]}) == ("invalid_request", wrong)
        assert elect(client, version, 2, None) == ("invalid_request", {})


def test_error_message_for_an_unknown_partition_omits_the_topic_name(client):
    name = "x" * MAX_ERROR_TEXT_CHARACTERS
    elections = client.call(
        "elect_leaders",
        2,
        timeout=1000,
        election_type=PREFERRED,
        topic_partitions=[{"topic": name, "partitions": [7]}],
    )["replica_election_results"]
    reassignments = client.call(
        "alter_partition_reassignments",
        1,
        timeout=1000,
        topics=[{"name": name, "partitions": [{"partition_index": 7, "replicas": [NODE]}]}],
    )["responses"]
    for answer in (elections[0]["partition_result"], reassignments[0]["partitions"]):
        (part,) = answer
        assert part["error_code"] == "unknown_topic_or_partition"
        assert part["error_message"] == "there is no partition 7 of this topic"


# --- settings, brokers ---------------------------------------------------------------------------


def test_list_config_resources_returns_resources_of_the_requested_types(client, topic):
    def listed(version: int, *kinds: int) -> set[tuple[int, str]]:
        fields = {"resource_types": list(kinds)} if version else {}
        answer = client.call("list_config_resources", version, **fields)
        assert answer["error_code"] == "none"
        return {
            (resource.get("resource_type", METRICS), resource["resource_name"])
            for resource in answer["config_resources"]
        }

    assert listed(0) == set()
    assert (GROUP, "configured") not in listed(1, GROUP)
    for value, is_listed in (("50000", True), (None, False)):
        change = {"name": "consumer.session.timeout.ms", "value": value}
        change["config_operation"] = 0 if value else 1
        client.call(
            "incremental_alter_configs",
            1,
            resources=[
                {"resource_type": GROUP, "resource_name": "configured", "configs": [change]}
            ],
        )
        assert ((GROUP, "configured") in listed(1, GROUP)) is is_listed
    assert (TOPIC, topic) in listed(1, TOPIC)
    assert listed(1, BROKER, LOGGER, METRICS) == {(BROKER, "3"), (LOGGER, "3")}
    assert listed(1) == listed(1, TOPIC, BROKER, LOGGER, METRICS, GROUP)
    for kind in (0, 1, 3, 64, -1):
        answer = client.call("list_config_resources", 1, resource_types=[TOPIC, kind])
        assert (answer["error_code"], answer["config_resources"]) == ("unsupported_version", [])


def test_unregister_broker_on_a_single_node_is_refused(client):
    for broker, code in ((NODE, "invalid_request"), (4, "broker_id_not_registered")):
        assert client.call("unregister_broker", 0, broker_id=broker)["error_code"] == code
    assert client.call("describe_cluster", 0)["brokers"][0]["broker_id"] == NODE


# --- without an authorizer and passwords: describing returns none, changes are refused ------------

ACL = {"resource_type": 2, "resource_name": "t", "principal": "User:a", "host": "*"}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_acl_requests_without_an_authorizer_return_security_disabled(client, version):
    any_acl = {
        "resource_type_filter": 1,
        "pattern_type_filter": 1,
        "operation": 1,
        "permission_type": 1,
    }
    described = client.call("describe_acls", version, **any_acl)
    assert (described["error_code"], described["resources"]) == ("security_disabled", [])
    assert described["error_message"] == "No Authorizer is configured on the broker"
    acl = ACL | {"resource_pattern_type": 3, "operation": 3, "permission_type": 3}
    created = client.call("create_acls", version, creations=[acl, acl])["results"]
    deleted = client.call("delete_acls", version, filters=[any_acl] * 3)["filter_results"]
    assert [result["error_code"] for result in created] == ["security_disabled"] * 2
    assert [result["error_code"] for result in deleted] == ["security_disabled"] * 3


def test_scram_credentials_are_validated_altered_and_described(client):
    def described(users: list[str] | None) -> dict[str, str]:
        named = None if users is None else [{"name": user} for user in users]
        answer = client.call("describe_user_scram_credentials", 0, users=named)
        assert answer["error_code"] == "none"
        return {result["user"]: result["error_code"] for result in answer["results"]}

    assert described(None) == described([]) == {}
    assert described(["a", "b", "a"]) == {"a": "duplicate_resource", "b": "resource_not_found"}
    password = {"iterations": 4096, "salt": b"salt", "salted_password": b"password"}
    answer = client.call(
        "alter_user_scram_credentials",
        0,
        deletions=[{"name": "a", "mechanism": 1}, {"name": "b", "mechanism": 9}],
        upsertions=[
            {"name": "a", "mechanism": 1, **password},
            {"name": "c", "mechanism": 2, **password},
            {"name": "", "mechanism": 1, **password},
            {"name": "twice", "mechanism": 1, **password},
            {"name": "twice", "mechanism": 2, **password},
            {"name": "twice", "mechanism": 1, **password},
            {"name": "most", "mechanism": 1, **password, "iterations": 16_384},
            {"name": "more", "mechanism": 1, **password, "iterations": 16_385},
            {"name": "less", "mechanism": 1, **password, "iterations": 4_095},
            {"name": "less", "mechanism": 1, **password},
        ],
    )
    assert {result["user"]: result["error_code"] for result in answer["results"]} == {
        "a": "resource_not_found",
        "b": "unsupported_sasl_mechanism",
        "c": "none",
        "": "unacceptable_credential",
        "twice": "duplicate_resource",
        "most": "none",
        "more": "unacceptable_credential",
        "less": "unacceptable_credential",
    }
    for result in answer["results"]:
        told = result["error_message"]
        assert told is None if result["error_code"] == "none" else len(told) > 0
    assert described(None) == described([]) == {"c": "none", "most": "none"}
    answer = client.call("describe_user_scram_credentials", 0, users=None)
    assert [result["credential_infos"] for result in answer["results"]] == [
        [{"mechanism": 2, "iterations": 4096}],
        [{"mechanism": 1, "iterations": 16_384}],
    ]
    gone = [{"name": "c", "mechanism": 1}, {"name": "most", "mechanism": 1}]
    answer = client.call("alter_user_scram_credentials", 0, deletions=gone, upsertions=[])
    assert {result["user"]: result["error_code"] for result in answer["results"]} == {
        "c": "resource_not_found",
        "most": "none",
    }
    assert described(None) == {"c": "none"}


@pytest.mark.parametrize(
    ("size", "code"), [(MAX_SALT_BYTES, "none"), (MAX_SALT_BYTES + 1, "unacceptable_credential")]
)
def test_scram_salt_of_the_maximum_length_is_accepted_a_longer_one_refused(
    client, size: int, code: str
) -> None:
    upsertion = {"name": "a", "mechanism": 1, "iterations": 4096, "salted_password": b"password"}
    answer = client.call(
        "alter_user_scram_credentials",
        0,
        deletions=[],
        upsertions=[{**upsertion, "salt": bytes(size)}],
    )
    assert [result["error_code"] for result in answer["results"]] == [code]


def test_scram_credentials_above_the_maximum_are_refused(
    client, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_users = client.call("describe_user_scram_credentials", 0, users=None)["results"]
    there = sum(len(user["credential_infos"]) for user in all_users)
    monkeypatch.setattr(scram, "MAX_CREDENTIALS", there + 3)
    password = {"iterations": 4096, "salt": b"salt", "salted_password": b"password"}

    def put(*names: str) -> list[str]:
        many = [{"name": name, "mechanism": 1, **password} for name in names]
        answer = client.call("alter_user_scram_credentials", 0, deletions=[], upsertions=many)
        return [result["error_code"] for result in answer["results"]]

    assert put("new-a", "new-b", "new-c") == ["none"] * 3
    assert put("new-d") == ["policy_violation"]
    assert put("new-a", "new-b", "new-c") == ["none"] * 3
