"""Topics, partitions, settings and records, changed by admin clients."""

from __future__ import annotations

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import TopicPartition
from kafka.admin import (
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ACLResourcePatternType,
    ResourcePatternFilter,
)
from kafka.admin import NewTopic as KafkaPythonTopic
from kafka.admin import ResourceType as ACLResourceType
from kafka.errors import InvalidReplicationAssignmentError, SecurityDisabledError

from tests.support.cluster import EARLIEST, READ_COMMITTED, Cluster, unique
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, drain, kp_admin


@pytest.fixture
def admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def error_code(raised: pytest.ExceptionInfo[confluent_kafka.KafkaException]) -> int:
    code: int = raised.value.args[0].code()
    return code


def test_recreated_topic_has_a_new_topic_id_and_no_records(
    admin: AdminClient, cluster: Cluster
) -> None:
    name = unique("topic")
    admin.create_topics([NewTopic(name, 3, 1)])[name].result(60)
    until(lambda: cluster.leaders(name) == 3, "leaders")
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        admin.create_topics([NewTopic(name, 3, 1)])[name].result(60)
    assert error_code(raised) == confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS
    first_id = cluster.topic_id(name)

    admin.delete_topics([name])[name].result(60)

    def gone() -> bool:
        answer = cluster.call("metadata", 9, topics=[{"name": name}])
        return answer["topics"][0]["error_code"] == "unknown_topic_or_partition"

    until(gone, "the topic is gone")
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        admin.delete_topics([name])[name].result(60)
    assert error_code(raised) == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
    # A recreated topic has none of the records of the deleted topic.
    cluster.create_topic(name, 1)
    assert cluster.topic_id(name) != first_id
    assert cluster.offset(name) == 0


@pytest.mark.parametrize(
    ("topic", "partitions", "replication", "config", "code"),
    [
        ("with space", 1, 1, {}, "TOPIC_EXCEPTION"),
        ("..", 1, 1, {}, "TOPIC_EXCEPTION"),
        ("a" * 250, 1, 1, {}, "TOPIC_EXCEPTION"),
        ("no-partitions", 0, 1, {}, "INVALID_PARTITIONS"),
        ("too-replicated", 1, 3, {}, "INVALID_REPLICATION_FACTOR"),
        ("bad-config", 1, 1, {"retention.ms": "soon"}, "INVALID_CONFIG"),
        ("no-config", 1, 1, {"no.such.key": "1"}, "INVALID_CONFIG"),
        ("bad-policy", 1, 1, {"cleanup.policy": "burn"}, "INVALID_CONFIG"),
    ],
)
def test_invalid_topic_is_refused_by_create_topics(
    admin: AdminClient,
    topic: str,
    partitions: int,
    replication: int,
    config: dict[str, str],
    code: str,
) -> None:
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        admin.create_topics([NewTopic(topic, partitions, replication, config=config)])[
            topic
        ].result(60)
    assert error_code(raised) == getattr(confluent_kafka.KafkaError, code)


def test_validate_only_create_topics_creates_no_topic(admin: AdminClient, cluster: Cluster) -> None:
    name = unique("dry")
    admin.create_topics([NewTopic(name, 1, 1)], validate_only=True)[name].result(60)
    answer = cluster.call("metadata", 9, topics=[{"name": name}])
    assert answer["topics"][0]["error_code"] == "unknown_topic_or_partition"


def test_request_for_too_many_partitions_creates_no_topic(cluster: Cluster) -> None:
    def codes(*counts: int) -> list[str]:
        topics = [
            {"name": unique("many"), "num_partitions": count, "replication_factor": 1}
            for count in counts
        ]
        answer = cluster.call("create_topics", 5, topics=topics, timeout=10_000, validate_only=True)
        return [topic["error_code"] for topic in answer["topics"]]

    assert codes(4_000, 5_000) == ["none", "none"]
    assert codes(4_000, 6_001) == ["policy_violation", "policy_violation"]


def test_create_partitions_adds_partitions_and_refuses_fewer(
    admin: AdminClient, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("grow"), 1)
    admin.create_partitions([NewPartitions(name, 3)])[name].result(60)
    until(lambda: cluster.leaders(name) == 3, "the new partitions")
    assert cluster.produce(name, [b"v"], partition=2)["error_code"] == "none"
    for count in (3, 2):
        with pytest.raises(confluent_kafka.KafkaException) as raised:
            admin.create_partitions([NewPartitions(name, count)])[name].result(60)
        assert error_code(raised) == confluent_kafka.KafkaError.INVALID_PARTITIONS


def test_topic_configs_are_described_altered_and_take_effect(
    admin: AdminClient, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("conf"), configs={"retention.ms": "123456"})
    resource = ConfigResource(ResourceType.TOPIC, name)

    def settings() -> dict[str, ConfigEntry]:
        found: dict[str, ConfigEntry] = admin.describe_configs([resource])[resource].result(60)
        return found

    before = settings()
    assert before["retention.ms"].value == "123456"
    assert not before["retention.ms"].is_default
    assert before["segment.bytes"].value == "1073741824"
    assert before["segment.bytes"].is_default
    assert before["cleanup.policy"].value == "delete"

    change = ConfigResource(
        ResourceType.TOPIC,
        name,
        incremental_configs=[
            ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE),
            ConfigEntry("max.message.bytes", "2000", incremental_operation=AlterConfigOpType.SET),
            ConfigEntry(
                "cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND
            ),
        ],
    )
    admin.incremental_alter_configs([change])[change].result(60)
    until(lambda: settings()["max.message.bytes"].value == "2000", "the change")
    after = settings()
    assert after["retention.ms"].value == SETTINGS["log.retention.ms"]
    assert set(after["cleanup.policy"].value.split(",")) == {"delete", "compact"}
    until(
        lambda: cluster.produce(name, [bytes(3000)])["error_code"] == "message_too_large",
        "the smaller limit is in force",
    )


@pytest.mark.parametrize(("key", "value"), [("retention.ms", "soon"), ("no.such.key", "1")])
def test_invalid_topic_config_is_refused_by_incremental_alter_configs(
    admin: AdminClient, cluster: Cluster, key: str, value: str
) -> None:
    name = cluster.create_topic(unique("conf"))
    change = ConfigResource(
        ResourceType.TOPIC,
        name,
        incremental_configs=[ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)],
    )
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        admin.incremental_alter_configs([change])[change].result(60)
    assert error_code(raised) == confluent_kafka.KafkaError.INVALID_CONFIG


def test_broker_configs_are_described_with_their_values(
    admin: AdminClient, cluster: Cluster
) -> None:
    node = str(cluster.call("metadata", 9, topics=[])["brokers"][0]["node_id"])
    resource = ConfigResource(ResourceType.BROKER, node)
    found = admin.describe_configs([resource])[resource].result(60)
    assert found["group.initial.rebalance.delay.ms"].value == "0"
    assert found["offsets.topic.num.partitions"].value == "4"
    assert found["transaction.max.timeout.ms"].value == "900000"


def test_records_are_deleted_up_to_an_offset(admin: AdminClient, cluster: Cluster) -> None:
    name = cluster.create_topic(unique("trim"))
    for i in range(10):
        cluster.produce(name, [b"%d" % i])
    where = confluent_kafka.TopicPartition(name, 0, 4)
    admin.delete_records([where])[where].result(60)
    assert cluster.offset(name, at=EARLIEST) == 4
    assert cluster.fetch(name, offset=3)["error_code"] == "offset_out_of_range"
    assert cluster.values(name) == [b"%d" % i for i in range(4, 10)]
    beyond = confluent_kafka.TopicPartition(name, 0, 11)
    with pytest.raises(confluent_kafka.KafkaException) as raised:
        admin.delete_records([beyond])[beyond].result(60)
    assert error_code(raised) == confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE
    everything = confluent_kafka.TopicPartition(name, 0, confluent_kafka.OFFSET_END)
    admin.delete_records([everything])[everything].result(60)
    assert cluster.offset(name, at=EARLIEST) == cluster.offset(name) == 10
    # A consumer below the log start offset continues with the remaining records.
    cluster.produce(name, [b"next"])
    with confluent_consumer(cluster_bootstrap(cluster)) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(name, 0, 2)])
        assert drain(consumer, 1)[0].value() == b"next"


def cluster_bootstrap(cluster: Cluster) -> str:
    broker = cluster.call("metadata", 9, topics=[])["brokers"][0]
    return f"{broker['host']}:{broker['port']}"


def test_describe_cluster_returns_the_broker_and_the_cluster_id(
    admin: AdminClient, bootstrap: str
) -> None:
    described = admin.describe_cluster().result(60)
    assert [f"{node.host}:{node.port}" for node in described.nodes] == [bootstrap]
    assert described.cluster_id
    assert admin.list_topics(timeout=60).cluster_id == described.cluster_id


def test_list_offsets_returns_earliest_and_latest_offsets(
    admin: AdminClient, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("list"))
    cluster.produce(name, [b"a", b"b"])
    where = confluent_kafka.TopicPartition(name, 0)
    for spec, wanted in ((OffsetSpec.earliest(), 0), (OffsetSpec.latest(), 2)):
        assert admin.list_offsets({where: spec})[where].result(60).offset == wanted
    assert cluster.offset(name, isolation=READ_COMMITTED) == 2


def test_kafka_python_creates_describes_and_deletes_topics(
    bootstrap: str, cluster: Cluster
) -> None:
    name = unique("kp")
    with kp_admin(bootstrap) as admin:
        admin.create_topics([KafkaPythonTopic(name, 2, 1)])
        until(lambda: cluster.leaders(name) == 2, "leaders")
        assert name in admin.list_topics()
        (described,) = admin.describe_topics([name])
        assert len(described["partitions"]) == 2
        admin.delete_topics([name])
        until(lambda: name not in admin.list_topics(), "gone")


def test_kafka_python_gets_log_dirs_and_errors_of_a_lone_broker(
    bootstrap: str, cluster: Cluster
) -> None:
    name = cluster.create_topic(unique("asked"), 2)
    cluster.produce(name, [b"value"])
    place = TopicPartition(name, 0)
    with kp_admin(bootstrap) as admin:
        (answer,) = admin.describe_log_dirs({name: [0, 1]})
        (directory,) = answer["log_dirs"]
        parts = directory["topics"][0]["partitions"]
        sizes = {part["partition_index"]: part["partition_size"] for part in parts}
        assert sizes[0] > sizes[1] == 0
        node = answer["broker"]
        for path, error in ((directory["log_dir"], "NoError"), ("/nowhere", "LogDirNotFoundError")):
            moved = admin.alter_replica_log_dirs({(name, 0, node): path})
            assert [returned.__name__ for returned in moved.values()] == [error]
        (quorum,) = admin.describe_metadata_quorum()["topics"]
        assert quorum["partitions"][0]["leader_id"] == node
        assert not admin.list_partition_reassignments()
        admin.elect_leaders(0, {name: [0, 1]})
        for replicas, refusal in (
            ([node], None),
            ([node, node + 1], InvalidReplicationAssignmentError),
        ):
            assert admin.alter_partition_reassignments({place: replicas}) == {place: refusal}
        rights = ResourcePatternFilter(ACLResourceType.ANY, None, ACLResourcePatternType.ANY)
        with pytest.raises(SecurityDisabledError):
            admin.describe_acls(
                ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, rights)
            )
        assert not admin.describe_user_scram_credentials()
