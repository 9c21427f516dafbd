"""The handlers of topics and records, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import gzip
import shutil
import threading
import time
import uuid
from collections.abc import Iterator

import cramjam
import pytest

from fencepost.coordinator.daemon.broker import Broker
from tests.support.batches import HEADER, NOW_MS, batch, batches, seal
from tests.support.cluster import EARLIEST, READ_COMMITTED, TRANSACTION, Cluster, unique
from tests.support.cluster import GROUP as GROUP_KIND
from tests.support.raw import ConnectionLostError, RawClient, errors_in
from tests.support.waits import until

UNKNOWN = "unknown_topic_or_partition"
ALL_TOPIC_OPERATIONS, ALL_CLUSTER_OPERATIONS, NOT_ASKED = 3576, 8096, -(2**31)
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
CONFIG = {
    "node.id": "3",
    "broker.rack": "r1",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "num.partitions": "2",
    "message.max.bytes": "100000",
    "fetch.max.bytes": "50000",
}


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory) -> Iterator[str]:
    with Broker.in_thread(tmp_path_factory.mktemp("data"), config=CONFIG) as broker:
        yield broker.bootstrap


@pytest.fixture
def client(bootstrap) -> Iterator[Cluster]:
    with Cluster(bootstrap) as connected:
        yield connected


@pytest.fixture
def topic(client) -> str:
    return client.create_topic(unique("t"))


# --- Metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(14))
def test_metadata_of_one_topic_in_every_version(client, bootstrap, version):
    name = client.create_topic(unique("m"), 2)
    answer = client.call("metadata", version, topics=[{"name": name}])
    (broker,) = answer["brokers"]
    assert broker["node_id"] == 3
    assert f"{broker['host']}:{broker['port']}" == bootstrap
    if version >= 1:
        assert broker["rack"] == "r1"
        assert answer["controller_id"] == 3
    if version >= 2:
        assert len(answer["cluster_id"]) == 22
    (found,) = answer["topics"]
    assert (found["error_code"], found["name"]) == ("none", name)
    for index, part in enumerate(found["partitions"]):
        assert (part["partition_index"], part["leader_id"], part["error_code"]) == (
            index,
            3,
            "none",
        )
        assert part["replica_nodes"] == part["isr_nodes"] == [3]
    if version >= 10:
        assert uuid.UUID(found["topic_id"]).int
    if version >= 8:
        assert found["topic_authorized_operations"] == NOT_ASKED


def test_metadata_of_all_and_of_none(client, topic):
    for version, body in ((0, {"topics": []}), (1, {"topics": None}), (12, {"topics": None})):
        names = [one["name"] for one in client.call("metadata", version, **body)["topics"]]
        assert topic in names
    for version in (1, 5, 13):
        assert client.call("metadata", version, topics=[])["topics"] == []


def test_metadata_by_id(client, topic):
    known, unknown = client.topic_id(topic), uuid.uuid4()
    answer = client.call(
        "metadata",
        12,
        topics=[{"name": None, "topic_id": known}, {"name": None, "topic_id": unknown}],
    )
    first, second = answer["topics"]
    assert (first["name"], first["error_code"]) == (topic, "none")
    assert (second["name"], second["error_code"]) == (None, "unknown_topic_id")
    assert second["topic_id"] == str(unknown)


def test_authorised_operations_when_asked(client, topic):
    answer = client.call(
        "metadata",
        9,
        topics=[{"name": topic}],
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=True,
    )
    assert answer["cluster_authorized_operations"] == ALL_CLUSTER_OPERATIONS
    assert answer["topics"][0]["topic_authorized_operations"] == ALL_TOPIC_OPERATIONS


def test_a_topic_is_created_when_asked_for_and_known_the_next_time(client):
    name = unique("auto")
    ask = {"topics": [{"name": name}], "allow_auto_topic_creation": False}
    for _ in range(2):
        (found,) = client.call("metadata", 9, **ask)["topics"]
        assert found["error_code"] == "unknown_topic_or_partition"
    ask["allow_auto_topic_creation"] = True
    (found,) = client.call("metadata", 9, **ask)["topics"]
    assert (found["error_code"], found["partitions"]) == ("unknown_topic_or_partition", [])
    (found,) = client.call("metadata", 9, **ask)["topics"]
    assert (found["error_code"], len(found["partitions"])) == ("none", 2)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "x" * 250])
def test_bad_names_are_no_topics(client, name):
    (found,) = client.call("metadata", 9, topics=[{"name": name}])["topics"]
    assert found["error_code"] == "invalid_topic_exception"
    assert client.create(name)[0] == "invalid_topic_exception"


def test_nobody_makes_a_topic_of_the_metadata_logs_name(client):
    for _ in range(2):
        (found,) = client.call("metadata", 9, topics=[{"name": "__cluster_metadata"}])["topics"]
        assert found["error_code"] == "unknown_topic_or_partition"
    assert client.create("__cluster_metadata")[0] == "invalid_request"


def test_internal_topics_are_marked(client):
    client.coordinator("tx", TRANSACTION)
    (found,) = client.call("metadata", 9, topics=[{"name": "__transaction_state"}])["topics"]
    assert (found["is_internal"], len(found["partitions"])) == (True, 2)


# --- CreateTopics, CreatePartitions, DeleteTopics -------------------------------------------------


def _create(client: Cluster, name: str, version: int = 7, **fields):
    entry = {"name": name, "num_partitions": 1, "replication_factor": 1, **fields}
    answer = client.call("create_topics", version, topics=[entry], timeout=1000)
    (one,) = answer["topics"]
    return one["error_code"], one


Cluster.create = _create  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", range(2, 8))
def test_creating_in_every_version(client, version):
    name = unique("c")
    configs = [{"name": "retention.ms", "value": "77"}]
    code, one = client.create(name, version, num_partitions=3, configs=configs)
    assert code == "none"
    if version >= 5:
        assert (one["num_partitions"], one["replication_factor"]) == (3, 1)
        found = {entry["name"]: entry for entry in one["configs"]}
        assert (found["retention.ms"]["value"], found["retention.ms"]["config_source"]) == ("77", 1)
        assert found["max.message.bytes"]["value"] == "100000"
        assert found["max.message.bytes"]["config_source"] == 4
        assert found["segment.ms"]["config_source"] == 5
    if version >= 7:
        assert uuid.UUID(one["topic_id"]) == client.topic_id(name)
    assert client.create(name, version)[0] == "topic_already_exists"
    assert client.leaders(name) == 3


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_partitions": 0}, "invalid_partitions"),
        ({"num_partitions": -2}, "invalid_partitions"),
        ({"num_partitions": 10_001}, "policy_violation"),
        ({"replication_factor": 0}, "invalid_replication_factor"),
        ({"replication_factor": 2}, "invalid_replication_factor"),
        ({"configs": [{"name": "no.such", "value": "1"}]}, "invalid_config"),
        ({"configs": [{"name": "retention.ms", "value": "x"}]}, "invalid_config"),
        ({"configs": [{"name": "retention.ms", "value": None}]}, "invalid_config"),
        ({"assignments": [{"partition_index": 0, "broker_ids": [3]}]}, "invalid_request"),
    ],
)
def test_what_can_not_be_created(client, fields, code):
    name = unique("c")
    got, one = client.create(name, **fields)
    assert got == code
    assert one["error_message"]
    assert client.leaders(name) == 0


@pytest.mark.parametrize(
    ("assignment", "code"),
    [
        ({0: [3], 1: [3]}, "none"),
        ({0: [3], 2: [3]}, "invalid_replica_assignment"),
        ({0: [4]}, "invalid_replica_assignment"),
        ({0: [3, 3]}, "invalid_replica_assignment"),
        ({0: []}, "invalid_replica_assignment"),
    ],
)
def test_manual_assignment(client, assignment, code):
    entries = [
        {"partition_index": index, "broker_ids": brokers} for index, brokers in assignment.items()
    ]
    got, _ = client.create(
        unique("c"), num_partitions=-1, replication_factor=-1, assignments=entries
    )
    assert got == code


def test_defaults_duplicates_collisions_and_validate_only(client):
    name = unique("c.d")
    code, one = client.create(name, num_partitions=-1, replication_factor=-1)
    assert (code, one["num_partitions"]) == ("none", 2)
    code, one = client.create(name.replace(".", "_"))
    assert code == "invalid_topic_exception"
    assert name in one["error_message"]
    twice = unique("c")
    entry = {"name": twice, "num_partitions": 1, "replication_factor": 1}
    answer = client.call("create_topics", 7, topics=[entry, entry])
    assert [one["error_code"] for one in answer["topics"]] == ["invalid_request"]
    answer = client.call("create_topics", 7, topics=[entry], validate_only=True)
    assert answer["topics"][0]["error_code"] == "none"
    assert answer["topics"][0]["topic_id"] == "None" or answer["topics"][0]["topic_id"] is None
    assert (
        client.call("metadata", 9, topics=[{"name": twice}], allow_auto_topic_creation=False)[
            "topics"
        ][0]["error_code"]
        == "unknown_topic_or_partition"
    )


@pytest.mark.parametrize("version", range(4))
def test_growing(client, version):
    name = client.create_topic(unique("g"), 2)

    def grow(**fields):
        entry = {"name": name, "assignments": None, **fields}
        answer = client.call("create_partitions", version, topics=[entry])
        return answer["results"][0]["error_code"]

    assert grow(count=2) == grow(count=1) == grow(count=-1) == "invalid_partitions"
    assert grow(count=3, assignments=[{"broker_ids": [4]}]) == "invalid_replica_assignment"
    assert grow(count=3, assignments=[]) == "invalid_replica_assignment"
    assert grow(count=20_000) == "policy_violation"
    assert grow(name="none", count=3) == "unknown_topic_or_partition"
    answer = client.call(
        "create_partitions",
        version,
        topics=[{"name": name, "count": 4, "assignments": None}],
        validate_only=True,
    )
    assert answer["results"][0]["error_code"] == "none"
    assert client.leaders(name) == 2
    assert grow(count=4, assignments=[{"broker_ids": [3]}, {"broker_ids": [3]}]) == "none"
    assert client.leaders(name) == 4
    assert client.produce(name, [b"x"], partition=3)["error_code"] == "none"


@pytest.mark.parametrize("version", range(1, 7))
def test_deleting_in_every_version(client, version):
    name = client.create_topic(unique("d"))
    client.produce(name, [b"x"])

    def delete(name: str) -> str:
        asked = {"topic_names": [name]} if version < 6 else {"topics": [{"name": name}]}
        answer = client.call("delete_topics", version, **asked)
        return answer["responses"][0]["error_code"]

    assert delete(name) == "none"
    assert delete(name) == "unknown_topic_or_partition"
    client.coordinator("tx", TRANSACTION)
    assert delete("__transaction_state") == "invalid_topic_exception"
    assert client.produce(name, [b"x"])["error_code"] == "unknown_topic_or_partition"


def test_deleting_by_id(client):
    name = client.create_topic(unique("d"))
    topic_id = client.topic_id(name)
    both = [{"name": name, "topic_id": topic_id}]
    double = [{"name": name}, {"name": None, "topic_id": topic_id}]
    unknown = [{"name": None, "topic_id": uuid.uuid4()}]
    for topics, code in (
        (both, "invalid_request"), (double, "invalid_request"), (unknown, "unknown_topic_id"),
    ):  # fmt: skip
        answer = client.call("delete_topics", 6, topics=topics)
        assert {one["error_code"] for one in answer["responses"]} == {code}
    answer = client.call("delete_topics", 6, topics=[{"name": None, "topic_id": topic_id}])
    assert [(one["name"], one["error_code"]) for one in answer["responses"]] == [(name, "none")]


def test_deletion_can_be_disabled(tmp_path):
    with (
        Broker.in_thread(tmp_path, config={"delete.topic.enable": "false"}) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        client.create_topic("a")
        for version, code in ((1, "invalid_request"), (3, "topic_deletion_disabled")):
            answer = client.call("delete_topics", version, topic_names=["a"])
            assert answer["responses"][0]["error_code"] == code


# --- Produce -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 14))
def test_producing_in_every_version(client, version):
    name = client.create_topic(unique("p"), 2)
    entry = {
        "partition_data": [
            {"index": 0, "records": batch([b"a", b"b"])},
            {"index": 1, "records": batch([b"c"])},
            {"index": 2, "records": batch([b"d"])},
        ]
    }
    known = {"name": name} if version < 13 else {"topic_id": client.topic_id(name)}
    for base in (0, 2):
        answer = client.call("produce", version, acks=-1, topic_data=[{**known, **entry}])
        parts = answer["responses"][0]["partition_responses"]
        assert [part["error_code"] for part in parts] == [
            "none", "none", "unknown_topic_or_partition",
        ]  # fmt: skip
        assert (parts[0]["base_offset"], parts[1]["base_offset"]) == (base, base // 2)
        assert parts[0]["log_append_time"] in {-1, None}
        assert parts[2]["base_offset"] == -1
    assert client.values(name) == [b"a", b"b"] * 2


def test_an_unknown_id(client):
    entry = {"topic_id": uuid.uuid4(), "partition_data": [{"index": 0, "records": batch([b"a"])}]}
    answer = client.call("produce", 13, acks=1, topic_data=[entry])
    part = answer["responses"][0]["partition_responses"][0]
    assert part["error_code"] == "unknown_topic_id"


@pytest.mark.parametrize("acks", [2, -2, 127])
def test_bad_acks(client, topic, acks):
    assert client.produce(topic, [b"x"], acks=acks)["error_code"] == "invalid_required_acks"
    assert client.offset(topic) == 0


def test_no_answer_without_acks_and_an_error_closes(client, bootstrap, topic):
    def send(one: RawClient, name: str) -> None:
        data = [{"index": 0, "records": batch([b"x"])}]
        one.send("produce", 9, acks=0, topic_data=[{"name": name, "partition_data": data}])
        one._waiting.pop()

    send(client, topic)
    assert client.offset(topic) == 1
    with RawClient(bootstrap) as other:
        send(other, unique("none"))
        with pytest.raises(ConnectionLostError):
            other.receive_frame()


@pytest.mark.parametrize(
    ("records", "code"),
    [
        pytest.param(b"", "invalid_record", id="nothing"),
        pytest.param(b"x" * 60, "corrupt_message", id="noise"),
        pytest.param(batch([b"a"]) + batch([b"b"]), "invalid_record", id="two batches"),
        pytest.param(batch([b"a"])[:-1], "invalid_record", id="cut short"),
        pytest.param(batch([b"a"])[:-1] + b"?", "corrupt_message", id="a wrong CRC"),
        pytest.param(seal(b"", count=0), "invalid_record", id="no records"),
        pytest.param(batch([b"a"], attributes=0x20), "invalid_record", id="a control batch"),
        pytest.param(
            batch([b"a"], attributes=0x05), "unsupported_compression_type", id="no such codec"
        ),
        pytest.param(batch([b"x" * 100_000]), "message_too_large", id="too large"),
        pytest.param(
            batch([b"a"], timestamp_ms=2**50), "invalid_timestamp", id="too far in the future"
        ),
        pytest.param(
            seal(b"no frame", count=1, attributes=3), "invalid_record", id="does not inflate"
        ),
        pytest.param(
            seal(batch([b"a"])[HEADER.size :], count=8),
            "invalid_record",
            id="eight announced, one held",
        ),
        pytest.param(
            seal(bytes(20), count=15_000_000, attributes=3),
            "invalid_record",
            id="millions announced in 81 bytes",
        ),
        pytest.param(
            batch([b"a"], producer_id=1, producer_epoch=0, sequence=-1),
            "invalid_record",
            id="an id without a sequence",
        ),
    ],
)
def test_bad_batches(client, topic, records, code):
    part = client.produce(topic, records)
    assert (part["error_code"], part["base_offset"]) == (code, -1)
    assert part["error_message"]
    assert client.offset(topic) == 0


def test_a_refusal_for_its_times_lists_the_records(client, topic):
    part = client.produce(topic, batch([b"a", b"b", b"c"], timestamp_ms=2**50))
    assert part["error_message"] == (
        "One or more records have been rejected due to invalid timestamp"
    )
    assert [one["batch_index"] for one in part["record_errors"]] == [0, 1, 2]
    assert all(one["batch_index_error_message"] for one in part["record_errors"])
    assert "record_errors" not in client.produce(
        topic, batch([b"a"], timestamp_ms=2**50), version=7
    )


def test_zstd_needs_version_7(client, topic):
    records = seal(
        bytes(cramjam.zstd.compress(batch([b"x"])[HEADER.size :])), count=1, attributes=4
    )
    assert client.produce(topic, records, version=6)["error_code"] == "unsupported_compression_type"
    assert client.produce(topic, records, version=7)["error_code"] == "none"


def test_a_compacted_topic_wants_keys(client):
    name = client.create_topic(unique("k"), 1, {"cleanup.policy": "compact"})
    part = client.produce(name, [b"a"])
    assert part["error_code"] == "invalid_record"
    assert client.produce(name, batch([b"a"], key=b"k"))["error_code"] == "none"


def test_log_append_time_is_answered(client):
    name = client.create_topic(unique("l"), 1, {"message.timestamp.type": "LogAppendTime"})
    before = int(time.time() * 1000)
    part = client.produce(name, [b"a"])
    assert before <= part["log_append_time"] <= int(time.time() * 1000)


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
def test_internal_topics_are_closed(bootstrap, name):
    with Cluster(bootstrap, client_id="__admin_client") as client:
        for kind in (GROUP_KIND, TRANSACTION):
            client.coordinator(unique("any"), kind)
        assert client.produce(name, [b"x"])["error_code"] == "invalid_topic_exception"
        assert client.produce(name, [b"x"], partition=9)["error_code"] == UNKNOWN
        assert client.produce(name, [b"x"], acks=2)["error_code"] == "invalid_required_acks"


def test_compressed_batches_stay_as_they_came(client, topic):
    data = gzip.compress(batch([b"x"])[HEADER.size :])
    records = seal(data, count=1, attributes=1)
    assert client.produce(topic, records)["error_code"] == "none"
    part = client.fetch(topic)
    assert part["records"][HEADER.size :] == data


# --- Produce: transactions ------------------------------------------------------------------------


def _add(client: Cluster, tid: str, pid: int, epoch: int, topic: str) -> str:
    answer = client.call(
        "add_partitions_to_txn", 1, v3_and_below_transactional_id=tid,
        v3_and_below_producer_id=pid, v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )  # fmt: skip
    topics = answer["results_by_topic_v3_and_below"]
    return str(topics[0]["results_by_partition"][0]["partition_error_code"])


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("name", ["__transaction_state", "__fencepost_history"])
def test_no_transaction_spans_the_log_of_the_coordinator_itself(client, topic, version, name):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    topics = [{"name": topic, "partitions": [0]}, {"name": name, "partitions": [0, 99]}]
    if version < 4:
        body = {"v3_and_below_transactional_id": tid, "v3_and_below_producer_id": pid}
        body |= {"v3_and_below_producer_epoch": epoch, "v3_and_below_topics": topics}
    else:
        one = {"transactional_id": tid, "producer_id": pid, "producer_epoch": epoch}
        body = {"transactions": [{**one, "verify_only": False, "topics": topics}]}
    if name == "__fencepost_history":
        until(lambda: client.leaders(name), "the history of the claim")
    refused = client.call("add_partitions_to_txn", version, **body)
    assert errors_in(refused)[-3:] == [
        "operation_not_attempted",
        *(["topic_authorization_failed"] * 2),
    ]
    # The coordinator serves on, and what is refused is in no transaction.
    assert _add(client, tid, pid, epoch, topic) == "none"
    ended = client.call("end_txn", 1, transactional_id=tid, producer_id=pid, producer_epoch=epoch)
    assert ended["error_code"] == "none"
    markers = {"producer_id": pid, "producer_epoch": epoch, "coordinator_epoch": 99}
    answer = client.call(
        "write_txn_markers",
        1,
        markers=[{**markers, "topics": [{"name": name, "partition_indexes": [0]}]}],
    )
    assert errors_in(answer) == ["unknown_topic_or_partition"]


def _batch(pid: int, epoch: int, sequence: int = 0) -> bytes:
    return batch(
        [b"x"], producer_id=pid, producer_epoch=epoch, sequence=sequence, transactional=True
    )


@pytest.mark.parametrize(
    ("version", "code"), [(9, "invalid_txn_state"), (11, "transaction_abortable")]
)
def test_a_partition_that_was_not_added_is_refused(client, topic, version, code):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    other = client.create_topic(unique("t"))
    assert _add(client, tid, pid, epoch, other) == "none"
    part = client.produce(topic, _batch(pid, epoch), version=version, transactional_id=tid)
    assert part["error_code"] == code
    assert _add(client, tid, pid, epoch, topic) == "none"
    part = client.produce(topic, _batch(pid, epoch), version=version, transactional_id=tid)
    assert part["error_code"] == "none"
    assert (client.offset(topic), client.lso(topic)) == (1, 0)


def test_version_12_adds_the_partition(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    for sequence in (0, 1):
        part = client.produce(topic, _batch(pid, epoch, sequence), version=12, transactional_id=tid)
        assert part["error_code"] == "none"
    assert client.lso(topic) == 0
    answer = client.call(
        "describe_producers", 0, topics=[{"name": topic, "partition_indexes": [0, 9]}]
    )
    first, second = answer["topics"][0]["partitions"]
    assert second["error_code"] == "unknown_topic_or_partition"
    (active,) = first["active_producers"]
    assert (active["producer_id"], active["producer_epoch"], active["last_sequence"]) == (
        pid, epoch, 1,
    )  # fmt: skip
    assert active["current_txn_start_offset"] == 0
    answer = client.call(
        "end_txn", 3, transactional_id=tid, producer_id=pid, producer_epoch=epoch, committed=False
    )
    assert answer["error_code"] == "none"
    part = client.fetch(topic, isolation=READ_COMMITTED)
    assert part["aborted_transactions"] == [{"producer_id": pid, "first_offset": 0}]
    assert part["last_stable_offset"] == part["high_watermark"] == 3


def test_of_two_mistakes_the_transaction_s_is_told(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)

    def refused(epoch: int, version: int) -> str:
        data = _batch(pid, epoch)
        part = client.produce(topic, data, version=version, transactional_id=tid, acks=2)
        assert client.offset(topic) == 0
        return str(part["error_code"])

    assert refused(epoch, 9) == "invalid_txn_state"
    assert refused(epoch + 1, 12) == "invalid_producer_epoch"
    assert refused(epoch, 12) == "invalid_required_acks"


def test_a_transactional_batch_of_nobody_is_refused(client, topic):
    data = batch([b"x"], transactional=True)
    for version in (9, 12):
        part = client.produce(topic, data, version=version, transactional_id=unique("tx"))
        assert part["error_code"] == "invalid_producer_id_mapping"
    assert client.offset(topic) == 0


def test_markers_of_one_producer_share_a_row(client):
    name = client.create_topic(unique("t"), 2)

    def marker(*indexes: int) -> dict[str, object]:
        topics = [{"name": name, "partition_indexes": [index]} for index in indexes]
        return {"producer_id": 7, "producer_epoch": 0, "coordinator_epoch": 0, "topics": topics}

    answer = client.call("write_txn_markers", 1, markers=[marker(0, 9), marker(1, 0)])
    (row,) = answer["markers"]
    (told,) = row["topics"]
    codes = {part["partition_index"]: part["error_code"] for part in told["partitions"]}
    assert (row["producer_id"], codes) == (7, {0: "none", 9: UNKNOWN, 1: "none"})
    assert len(told["partitions"]) == 3


def test_producers_of_a_name_that_no_topic_can_have(client):
    asked = [{"name": name, "partition_indexes": [0]} for name in ("a/b", "", "none-such")]
    codes = errors_in(client.call("describe_producers", 0, topics=asked))
    assert codes == ["invalid_topic_exception", "invalid_topic_exception", UNKNOWN]


def test_a_new_producer_of_version_12_begins_with_sequence_0(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    part = client.produce(topic, _batch(pid, epoch, 5), version=12, transactional_id=tid)
    assert part["error_code"] == "out_of_order_sequence_number"


def test_a_fenced_producer_hears_of_its_epoch(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    assert client.init_producer(tid) == (pid, epoch + 1)
    part = client.produce(topic, _batch(pid, epoch), version=12, transactional_id=tid)
    assert part["error_code"] == "invalid_producer_epoch"


def test_transactional_batches_need_their_id(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    part = client.produce(topic, _batch(pid, epoch), version=12)
    assert part["error_code"] == "transactional_id_authorization_failed"
    part = client.produce(topic, batch([b"a"], attributes=0x10))
    assert part["error_code"] == "transactional_id_authorization_failed"
    assert client.offset(topic) == 0
    part = client.produce(topic, _batch(pid + 77, epoch), version=12, transactional_id=tid)
    assert part["error_code"] == "invalid_producer_id_mapping"


def test_one_producer_in_a_request(client):
    name = client.create_topic(unique("p"), 2)
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    data = [
        {"index": 0, "records": _batch(pid, epoch)},
        {"index": 1, "records": _batch(pid + 1, epoch)},
    ]
    answer = client.call(
        "produce", 12, acks=-1, transactional_id=tid,
        topic_data=[{"name": name, "partition_data": data}],
    )  # fmt: skip
    parts = answer["responses"][0]["partition_responses"]
    assert {part["error_code"] for part in parts} == {"invalid_producer_id_mapping"}


# --- Fetch ---------------------------------------------------------------------------------------


def _fetch(client: Cluster, parts, version: int = 12, topic=None, **fields):
    """Fetch ``parts`` (index, offset, and more fields by name) of one topic."""
    entries = [
        {"partition_max_bytes": 1 << 20, "fetch_offset": 0, "partition": 0, **part}
        for part in parts
    ]
    known = {"topic": topic} if version < 13 else {"topic_id": topic}
    body = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, **fields}
    return client.call("fetch", version, topics=[{**known, "partitions": entries}], **body)


@pytest.mark.parametrize("version", range(4, 19))
def test_fetching_in_every_version(client, version):
    name = client.create_topic(unique("f"), 2)
    client.produce(name, [b"a", b"b"])
    known = name if version < 13 else client.topic_id(name)
    answer = _fetch(client, [{}, {"partition": 1}, {"partition": 2}], version, known)
    first, second, third = answer["responses"][0]["partitions"]
    assert [one.values for one in batches(first["records"])] == [(b"a", b"b")]
    assert (first["high_watermark"], first["last_stable_offset"]) == (2, 2)
    assert first["aborted_transactions"] is None
    assert (second["error_code"], second["records"], second["high_watermark"]) == ("none", b"", 0)
    assert third["error_code"] == "unknown_topic_or_partition"
    if version >= 5:
        assert first["log_start_offset"] == 0
    if version >= 7:
        assert answer["session_id"] == 0


@pytest.mark.parametrize(
    ("offset", "code"),
    [(0, "none"), (2, "none"), (3, "offset_out_of_range"), (-1, "offset_out_of_range")],
)
def test_fetch_offsets(client, topic, offset, code):
    client.produce(topic, [b"a", b"b"])
    part = client.fetch(topic, offset=offset)
    assert part["error_code"] == code


def test_a_fetch_by_an_unknown_id(client):
    answer = _fetch(client, [{}], 13, uuid.uuid4())
    assert answer["responses"][0]["partitions"][0]["error_code"] == "unknown_topic_id"


def test_read_committed_has_a_list_and_ends_at_the_lso(client, topic):
    client.produce(topic, [b"a"])
    part = client.fetch(topic, isolation=READ_COMMITTED)
    assert part["aborted_transactions"] == []
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    client.produce(topic, _batch(pid, epoch), version=12, transactional_id=tid)
    part = client.fetch(topic, isolation=READ_COMMITTED, offset=1)
    assert (part["records"], part["last_stable_offset"], part["high_watermark"]) == (b"", 1, 2)


def test_the_first_partition_with_data_may_exceed_the_limits_by_one_batch(client):
    name = client.create_topic(unique("f"), 3)
    for index in (1, 2):
        for _ in range(3):
            client.produce(name, [b"x" * 1000], partition=index)
    parts = [{"partition": index, "partition_max_bytes": 10} for index in range(3)]
    answer = _fetch(client, parts, topic=name, max_bytes=10)
    sizes = [len(part["records"]) for part in answer["responses"][0]["partitions"]]
    assert sizes[0] == sizes[2] == 0
    assert 1000 < sizes[1] < 2000
    answer = _fetch(
        client, [{"partition": index} for index in range(3)], topic=name, max_bytes=2500
    )
    sizes = [len(part["records"]) for part in answer["responses"][0]["partitions"]]
    assert sizes[0] == sizes[2] == 0
    assert 2000 < sizes[1] < 2500


def test_the_brokers_limit_of_a_fetch(client, topic):
    for _ in range(8):
        client.produce(topic, [b"x" * 10_000])
    assert 40_000 < len(client.fetch(topic)["records"]) <= 50_000


LONG_MS = 60_000
"""The connection waits for an answer for 20 s only: a fetch that waits for its time fails."""


def test_a_fetch_waits_for_min_bytes_or_its_time(client, bootstrap, topic):
    begin = time.perf_counter()
    assert _fetch(client, [{}], topic=topic, max_wait=150)["responses"]
    assert time.perf_counter() - begin > 0.14

    def write() -> None:
        with Cluster(bootstrap) as other:
            time.sleep(0.1)
            other.produce(topic, [b"x"])
            other.produce(topic, [b"y" * 500])

    writer = threading.Thread(target=write)
    writer.start()
    answer = _fetch(client, [{}], topic=topic, max_wait=LONG_MS, min_bytes=400)
    writer.join()
    (part,) = answer["responses"][0]["partitions"]
    assert len(batches(part["records"])) == 2


@pytest.mark.parametrize("fields", [{"min_bytes": 0}, {"max_wait": 0}, {"max_wait": -1}])
def test_a_fetch_that_need_not_wait_does_not(client, topic, fields):
    _fetch(client, [{}], topic=topic, **{"max_wait": LONG_MS, **fields})


def test_a_fetch_does_not_wait_where_waiting_brings_no_more(client):
    name = client.create_topic(unique("f"), 1, {"segment.bytes": str(1 << 20)})
    for _ in range(60):
        client.produce(name, [b"x" * 20_000])
    # The tail of the first segment is less than was asked for, and there is more behind it.
    sizes = set()
    for offset in range(48, 56):
        part = {"fetch_offset": offset}
        answer = _fetch(client, [part], topic=name, max_wait=LONG_MS, min_bytes=50_000)
        sizes.add(len(batches(answer["responses"][0]["partitions"][0]["records"])))
    assert sizes == {1, 2}
    # There is enough, of which whole batches within the partition's limit are less than enough.
    part = {"fetch_offset": 56, "partition_max_bytes": 30_000}
    answer = _fetch(client, [part], topic=name, max_wait=LONG_MS, min_bytes=25_000)
    assert len(batches(answer["responses"][0]["partitions"][0]["records"])) == 1


def test_a_fetch_with_an_error_or_without_partitions_does_not_wait(client, topic):
    _fetch(client, [{}, {"partition": 9}], topic=topic, max_wait=LONG_MS)
    client.call("fetch", 12, max_wait=LONG_MS, min_bytes=1, max_bytes=1, topics=[])


def test_a_waiting_fetch_hears_that_its_topic_is_gone(client, bootstrap, topic):
    def delete() -> None:
        with Cluster(bootstrap) as other:
            time.sleep(0.1)
            other.call("delete_topics", 5, topic_names=[topic])

    deleter = threading.Thread(target=delete)
    deleter.start()
    answer = _fetch(client, [{}], topic=topic, max_wait=LONG_MS)
    deleter.join()
    (part,) = answer["responses"][0]["partitions"]
    assert part["error_code"] == "unknown_topic_or_partition"


# --- describing ----------------------------------------------------------------------------------


def test_what_is_named_twice_is_described_once(client, topic):
    resource = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}
    answer = client.call("describe_configs", 4, resources=[resource, resource])
    assert [one["resource_name"] for one in answer["results"]] == [topic]
    asked = {"name": topic, "partition_indexes": [0, 0, 1]}
    answer = client.call("describe_producers", 0, topics=[asked, asked])
    parts = [[part["partition_index"] for part in one["partitions"]] for one in answer["topics"]]
    assert parts == [[0, 1], []]
    answer = client.call("describe_transactions", 0, transactional_ids=["t", "u", "t"])
    assert [one["transactional_id"] for one in answer["transaction_states"]] == ["t", "u"]
    answer = client.call("describe_groups", 6, groups=["g", "h", "g"])
    assert [one["group_id"] for one in answer["groups"]] == ["g", "h"]
    answer = client.call("consumer_group_describe", 1, group_ids=["g", "h", "g"])
    assert [one["group_id"] for one in answer["groups"]] == ["g", "h"]
    everything, nothing = {"group_id": "g", "topics": None}, {"group_id": "g", "topics": []}
    answer = client.call("offset_fetch", 8, groups=[everything, nothing, everything, nothing])
    assert len(answer["groups"]) == 3


# --- leader epochs --------------------------------------------------------------------------------


def test_leader_epochs_over_a_restart(tmp_path):
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"0", b"1"])
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        (topic,) = client.call("metadata", 9, topics=[{"name": "a"}])["topics"]
        assert topic["partitions"][0]["leader_epoch"] == 1

        def end_of(epoch: int, current: int = -1):
            parts = [{"partition": 0, "leader_epoch": epoch, "current_leader_epoch": current}]
            answer = client.call(
                "offset_for_leader_epoch", 4, topics=[{"topic": "a", "partitions": parts}]
            )
            part = answer["topics"][0]["partitions"][0]
            return part["error_code"], part["leader_epoch"], part["end_offset"]

        # Nothing was written under the new epoch yet; it begins at the log end all the same.
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1) == ("none", 1, 2)
        client.produce("a", [b"2"])
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1, 1) == ("none", 1, 3)
        assert end_of(2) == ("none", -1, -1)
        assert end_of(0, 0)[0] == "fenced_leader_epoch"
        assert end_of(0, 2)[0] == "unknown_leader_epoch"

        def fetch(offset: int, **epochs: int):
            answer = _fetch(client, [{"fetch_offset": offset, **epochs}], topic="a")
            return answer["responses"][0]["partitions"][0]

        assert fetch(0, current_leader_epoch=0)["error_code"] == "fenced_leader_epoch"
        assert fetch(0, current_leader_epoch=2)["error_code"] == "unknown_leader_epoch"
        assert fetch(3, last_fetched_epoch=1)["diverging_epoch"] == {"epoch": -1, "end_offset": -1}
        diverging = fetch(3, last_fetched_epoch=0)
        assert (diverging["diverging_epoch"], diverging["records"]) == (
            {"epoch": 0, "end_offset": 2}, b"",
        )  # fmt: skip
        assert fetch(2, last_fetched_epoch=5)["error_code"] == "offset_out_of_range"

        answer = client.call(
            "list_offsets", 4, replica_id=-1, topics=[{"name": "a", "partitions": [
                {"partition_index": 0, "timestamp": EARLIEST, "current_leader_epoch": 1}]}],
        )  # fmt: skip
        part = answer["topics"][0]["partitions"][0]
        assert (part["offset"], part["leader_epoch"]) == (0, 0)


# --- ListOffsets, DeleteRecords -------------------------------------------------------------------


def _list(client: Cluster, topic: str, timestamp: int, version: int = 11, isolation: int = 0):
    parts = [{"partition_index": 0, "timestamp": timestamp}]
    body = {} if version < 2 else {"isolation_level": isolation}
    answer = client.call(
        "list_offsets",
        version,
        replica_id=-1,
        topics=[{"name": topic, "partitions": parts}],
        **body,
    )
    part = answer["topics"][0]["partitions"][0]
    return part["error_code"], part["offset"], part["timestamp"]


@pytest.mark.parametrize("version", range(1, 12))
def test_listing_offsets_in_every_version(client, topic, version):
    for number in range(3):
        client.produce(topic, batch([b"x"], timestamp_ms=NOW_MS + 10 * (number % 2)))
    assert _list(client, topic, -1, version) == ("none", 3, -1)
    assert _list(client, topic, -2, version) == ("none", 0, -1)
    assert _list(client, topic, NOW_MS + 1, version) == ("none", 1, NOW_MS + 10)
    assert _list(client, topic, NOW_MS + 11, version) == ("none", -1, -1)
    unsupported = ("unsupported_version", -1, -1)
    assert _list(client, topic, -3, version) == (
        ("none", 1, NOW_MS + 10) if version >= 7 else unsupported
    )
    assert _list(client, topic, -4, version) == (("none", 0, -1) if version >= 8 else unsupported)
    assert _list(client, topic, -5, version) == (("none", -1, -1) if version >= 9 else unsupported)
    assert _list(client, topic, -6, version) == (("none", -1, -1) if version >= 11 else unsupported)
    assert _list(client, topic, -7, version) == unsupported


def test_listing_an_empty_partition_twice_and_one_that_is_not_there(client, topic):
    assert _list(client, topic, -3) == ("none", -1, -1)
    assert _list(client, unique("none"), -1)[0] == "unknown_topic_or_partition"
    part = {"partition_index": 0, "timestamp": -1}
    answer = client.call(
        "list_offsets", 5, replica_id=-1, topics=[{"name": topic, "partitions": [part, part]}]
    )
    codes = [one["error_code"] for one in answer["topics"][0]["partitions"]]
    assert codes == ["invalid_request"]


def test_a_topic_that_is_named_twice_has_one_row(client):
    name = client.create_topic(unique("t"), 2)
    zero, one = ({"partition_index": index, "timestamp": -1} for index in (0, 1))
    topics = [{"name": name, "partitions": parts} for parts in ([zero], [one, zero])]
    (row,) = client.call("list_offsets", 5, replica_id=-1, topics=topics)["topics"]
    codes = {part["partition_index"]: part["error_code"] for part in row["partitions"]}
    assert codes == {0: "invalid_request", 1: "none"}


@pytest.mark.parametrize("version", [4, 6, 7, 12, 13, 18])
def test_an_isolation_level_that_there_is_not(client, topic, version):
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000}
    named = {"topic": topic} if version < 13 else {"topic_id": client.topic_id(topic)}
    body = {} if version > 14 else {"replica_id": -1}
    answer = client.call(
        "fetch", version, max_bytes=1_000, isolation_level=2,
        topics=[{**named, "partitions": [part]}], **body,
    )  # fmt: skip
    told = [part["error_code"] for row in answer["responses"] for part in row["partitions"]]
    assert told == (["invalid_request"] if version < 13 else [])
    if version > 6:
        assert (answer["error_code"], answer["session_id"]) == ("invalid_request", 0)
    assert _list(client, topic, -1, isolation=2) == ("invalid_request", -1, -1)
    assert _list(client, topic, -1, isolation=1) == ("none", 0, -1)


@pytest.mark.parametrize(
    ("epoch", "code"), [(-1, "not_leader_or_follower"), (0, "unknown_leader_epoch")]
)
def test_nobody_follows(client, topic, epoch, code):
    client.produce(topic, [b"x"])
    part = {
        "partition": 0,
        "current_leader_epoch": epoch,
        "last_fetched_epoch": -1,
        "partition_max_bytes": 1_000,
    }
    for replica in (0, 3):
        body = {"session_epoch": -1, "topics": [{"topic": topic, "partitions": [part]}]}
        answer = client.call("fetch", 12, replica_id=replica, max_bytes=1_000, **body)
        (told,) = answer["responses"][0]["partitions"]
        assert (told["error_code"], told["records"]) == (code, b"")


def test_the_latest_committed_offset_is_the_lso(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    client.produce(topic, [b"a"])
    client.produce(topic, _batch(pid, epoch), version=12, transactional_id=tid)
    assert _list(client, topic, -1)[1] == 2
    assert _list(client, topic, -1, isolation=1)[1] == 1


@pytest.mark.parametrize("version", range(3))
def test_deleting_records(client, topic, version):
    client.produce(topic, [b"a"])
    client.produce(topic, [b"b"])

    def delete(offset: int, name: str = topic):
        parts = [{"partition_index": 0, "offset": offset}]
        answer = client.call(
            "delete_records", version, topics=[{"name": name, "partitions": parts}], timeout=1000
        )
        part = answer["topics"][0]["partitions"][0]
        return part["error_code"], part["low_watermark"]

    assert delete(3) == delete(-2) == ("offset_out_of_range", -1)
    assert delete(1) == ("none", 1)
    assert delete(0) == ("none", 1)
    assert client.fetch(topic, offset=0)["error_code"] == "offset_out_of_range"
    assert client.values(topic) == [b"b"]
    assert delete(-1) == ("none", 2)
    assert delete(0, unique("none"))[0] == "unknown_topic_or_partition"
    assert delete(0, "__consumer_offsets")[0] == "invalid_topic_exception"
    compacted = client.create_topic(unique("k"), 1, {"cleanup.policy": "compact"})
    assert delete(0, compacted)[0] == "policy_violation"


def test_deleted_records_do_not_come_back_after_a_kill(tmp_path):
    broker = Broker.in_thread(tmp_path / "data").start()
    with Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"a", b"b"])
        client.call(
            "delete_records", 2,
            topics=[{"name": "a", "partitions": [{"partition_index": 0, "offset": 2}]}],
        )  # fmt: skip
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "data", copy)
    broker.stop()
    with Broker.in_thread(copy) as killed, Cluster(killed.bootstrap) as client:
        assert client.offset("a", 0, EARLIEST) == 2


# --- DescribeCluster, DescribeTopicPartitions -----------------------------------------------------


@pytest.mark.parametrize("version", range(3))
def test_describing_the_cluster(client, version):
    answer = client.call("describe_cluster", version, include_cluster_authorized_operations=True)
    assert (answer["error_code"], answer["controller_id"]) == ("none", 3)
    (broker,) = answer["brokers"]
    assert (broker["broker_id"], broker["rack"]) == (3, "r1")
    assert answer["cluster_authorized_operations"] == ALL_CLUSTER_OPERATIONS
    assert answer["cluster_id"] == client.call("metadata", 9, topics=[])["cluster_id"]
    if version >= 1:
        answer = client.call("describe_cluster", version, endpoint_type=2)
        assert answer["error_code"] == "mismatched_endpoint_type"
        answer = client.call("describe_cluster", version, endpoint_type=9)
        assert answer["error_code"] == "unsupported_endpoint_type"


def test_topics_are_described_in_pages(client):
    stem = unique("page")
    names = [client.create_topic(f"{stem}-{letter}", 3) for letter in "abc"]
    asked = [{"name": name} for name in (*names, f"{stem}-aa", "bad name")]
    pages, cursor = [], None
    for _ in range(10):
        answer = client.call(
            "describe_topic_partitions", 0, topics=asked, response_partition_limit=4, cursor=cursor
        )
        pages.append(answer["topics"])
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert len(pages) == 3
    seen = [
        (topic["name"], part["partition_index"])
        for page in pages
        for topic in page
        for part in topic["partitions"]
    ]
    assert seen == [(name, index) for name in names for index in range(3)]
    errors = {topic["name"]: topic["error_code"] for page in pages for topic in page}
    assert errors[f"{stem}-aa"] == "unknown_topic_or_partition"
    assert errors["bad name"] == "invalid_topic_exception"
    for at, index in (("nowhere", 0), (names[0], -1)):
        cursor = {"topic_name": at, "partition_index": index}
        answer = client.call("describe_topic_partitions", 0, topics=asked, cursor=cursor)
        assert {topic["error_code"] for topic in answer["topics"]} == {"invalid_request"}
    every = client.call("describe_topic_partitions", 0, topics=[])["topics"]
    assert {topic["name"] for topic in every} >= set(names)
    assert every == sorted(every, key=lambda topic: topic["name"])


# --- configurations -------------------------------------------------------------------------------


def _describe(client: Cluster, kind: int, name: str, keys=None, version: int = 4, **fields):
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    answer = client.call("describe_configs", version, resources=[resource], **fields)
    (result,) = answer["results"]
    return result["error_code"], {entry["name"]: entry for entry in result["configs"]}


def _alter(client: Cluster, kind: int, name: str, *changes, validate_only: bool = False):
    entries = [
        {"name": key, "config_operation": operation, "value": value}
        for key, operation, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": entries}
    answer = client.call(
        "incremental_alter_configs", 1, resources=[resource], validate_only=validate_only
    )
    return answer["responses"][0]["error_code"]


SET, DELETE, APPEND, SUBTRACT = range(4)


@pytest.mark.parametrize("version", range(1, 5))
def test_describing_a_topic(client, version):
    name = client.create_topic(unique("conf"), 1, {"retention.ms": "77"})
    fields = {"include_documentation": True} if version >= 3 else {}
    code, found = _describe(client, TOPIC, name, None, version, include_synonyms=True, **fields)
    assert code == "none"
    entry = found["retention.ms"]
    assert (entry["value"], entry["config_source"], entry["read_only"]) == ("77", 1, False)
    assert [(one["name"], one["source"]) for one in entry["synonyms"]] == [("retention.ms", 1)]
    assert found["segment.ms"]["value"] == "604800000"
    assert found["max.message.bytes"]["config_source"] == 4
    if version >= 3:
        assert entry["config_type"] == 5
        assert entry["documentation"]
    code, found = _describe(client, TOPIC, name, ["cleanup.policy"], version)
    assert list(found) == ["cleanup.policy"]
    assert found["cleanup.policy"]["synonyms"] == []
    assert _describe(client, TOPIC, unique("none"))[0] == "unknown_topic_or_partition"
    assert _describe(client, TOPIC, "bad name")[0] == "invalid_topic_exception"


def test_describing_a_broker_and_other_resources(client):
    code, found = _describe(client, BROKER, "3", include_synonyms=True)
    assert code == "none"
    assert (found["num.partitions"]["value"], found["num.partitions"]["config_source"]) == ("2", 4)
    assert found["num.partitions"]["read_only"]
    assert not found["log.retention.ms"]["read_only"]
    assert [one["source"] for one in found["num.partitions"]["synonyms"]] == [4, 5]
    assert _describe(client, BROKER, "4")[0] == "invalid_request"
    assert _describe(client, BROKER, "")[0] == "none"
    code, found = _describe(client, GROUP, "g")
    assert (code, len(found)) == ("none", 17)
    assert {name.split(".")[0] for name in found} == {"consumer", "share", "streams"}
    assert {one["config_source"] for one in found.values()} == {5}
    assert _describe(client, GROUP, "")[0] == "invalid_request"
    assert _describe(client, METRICS, "m") == ("none", {})
    assert _describe(client, 3, "m")[0] == "invalid_request"


def test_a_group_has_settings_of_its_own(client):
    session, beat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    for change, code in (
        ((session, SET, "50000"), "none"),
        ((session, SET, "60000"), "none"),
        ((session, SET, "60001"), "invalid_config"),
        ((session, SET, "45000"), "none"),
        ((session, SET, "44999"), "invalid_config"),
        ((session, SET, "x"), "invalid_config"),
        ((beat, SET, "15000"), "none"),
        ((beat, SET, "15001"), "invalid_config"),
        (("consumer.assignment.interval.ms", SET, "0"), "none"),
        (("no.such.key", SET, "1"), "invalid_config"),
    ):
        assert _alter(client, GROUP, "own", change) == code, change
    _, found = _describe(client, GROUP, "own", include_synonyms=True)
    assert found[session]["value"] == "45000"
    assert [one["source"] for one in found[beat]["synonyms"]] == [8, 5]
    client.coordinator("own", GROUP_KIND)
    joined = client.call(
        "consumer_group_heartbeat",
        1,
        group_id="own",
        member_id="m",
        member_epoch=0,
        rebalance_timeout=60_000,
        subscribed_topic_names=[],
        topic_partitions=[],
    )
    assert joined["heartbeat_interval"] == 15_000
    assert _alter(client, GROUP, "own", (beat, DELETE, None)) == "none"
    assert _describe(client, GROUP, "own")[1][beat]["value"] == "5000"


def test_changing_a_topic_step_by_step(client, topic):
    def values() -> dict[str, str]:
        return {
            name: entry["value"]
            for name, entry in _describe(client, TOPIC, topic)[1].items()
            if entry["config_source"] == 1
        }

    assert _alter(client, TOPIC, topic, ("retention.ms", SET, "5")) == "none"
    assert _alter(client, TOPIC, topic, ("cleanup.policy", APPEND, "compact")) == "none"
    assert values() == {"retention.ms": "5", "cleanup.policy": "delete,compact"}
    assert _alter(client, TOPIC, topic, ("cleanup.policy", APPEND, "delete")) == "none"
    assert _alter(client, TOPIC, topic, ("cleanup.policy", SUBTRACT, "delete,x")) == "none"
    assert values() == {"retention.ms": "5", "cleanup.policy": "compact"}
    assert _alter(client, TOPIC, topic, ("retention.ms", SET, "6"), validate_only=True) == "none"
    assert _alter(client, TOPIC, topic, ("retention.ms", DELETE, None)) == "none"
    assert values() == {"cleanup.policy": "compact"}
    for change, code in (
        (("no.such", SET, "1"), "invalid_config"),
        (("retention.ms", SET, "x"), "invalid_config"),
        (("retention.ms", APPEND, "1"), "invalid_config"),
        (("retention.ms", SET, None), "invalid_request"),
        (("retention.ms", 7, "1"), "invalid_request"),
    ):
        assert _alter(client, TOPIC, topic, change) == code
    twice = ("retention.ms", SET, "1")
    assert _alter(client, TOPIC, topic, twice, twice) == "invalid_request"
    assert _alter(client, TOPIC, unique("none"), twice) == "unknown_topic_or_partition"
    assert values() == {"cleanup.policy": "compact"}


@pytest.mark.parametrize("version", range(3))
def test_replacing_all_settings(client, topic, version):
    def replace(configs: dict[str, str | None], **fields):
        entries = [{"name": name, "value": value} for name, value in configs.items()]
        resource = {"resource_type": TOPIC, "resource_name": topic, "configs": entries}
        answer = client.call("alter_configs", version, resources=[resource], **fields)
        return answer["responses"][0]["error_code"]

    def value(name: str) -> str:
        return _describe(client, TOPIC, topic)[1][name]["value"]

    assert replace({"retention.ms": "5", "segment.ms": "6"}) == "none"
    assert replace({"segment.ms": "7"}, validate_only=True) == "none"
    assert (value("retention.ms"), value("segment.ms")) == ("5", "6")
    assert replace({"segment.ms": "7"}) == "none"
    assert (value("retention.ms"), value("segment.ms")) == ("604800000", "7")
    assert replace({"segment.ms": None}) == "invalid_request"
    assert replace({"no.such": "1"}) == "invalid_config"


def test_changing_brokers_reaches_topics_and_survives(tmp_path):
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        assert _alter(client, BROKER, "", ("message.max.bytes", SET, "200")) == "none"
        assert _alter(client, BROKER, "1", ("message.max.bytes", SET, "100")) == "none"
        assert client.produce("a", [b"x" * 100])["error_code"] == "message_too_large"
        _, found = _describe(client, TOPIC, "a", include_synonyms=True)
        synonyms = found["max.message.bytes"]["synonyms"]
        assert [(one["value"], one["source"]) for one in synonyms] == [
            ("100", 2), ("200", 3), ("1048588", 5),
        ]  # fmt: skip
        assert _alter(client, BROKER, "1", ("num.partitions", SET, "4")) == "invalid_request"
        assert _alter(client, BROKER, "2", ("message.max.bytes", SET, "4")) == "invalid_request"
        assert _alter(client, BROKER, "1", ("message.max.bytes", SET, "x")) == "invalid_config"
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        assert client.produce("a", [b"x" * 100])["error_code"] == "message_too_large"
        assert _alter(client, BROKER, "1", ("message.max.bytes", DELETE, None)) == "none"
        assert _alter(client, BROKER, "", ("message.max.bytes", DELETE, None)) == "none"
        assert client.produce("a", [b"x" * 100])["error_code"] == "none"
        assert _describe(client, BROKER, "") == ("none", {})


def test_the_logger_and_groups(client):
    _, found = _describe(client, LOGGER, "3")
    before = found["root"]["value"]
    assert found["root"]["config_source"] == 6
    assert _alter(client, LOGGER, "3", ("root", SET, "ERROR")) == "none"
    assert _describe(client, LOGGER, "3")[1]["root"]["value"] == "ERROR"
    assert _alter(client, LOGGER, "3", ("root", SET, before)) == "none"
    assert _alter(client, LOGGER, "3", ("root", SET, "LOUD")) == "invalid_config"
    assert _alter(client, LOGGER, "3", ("kafka", SET, "INFO")) == "invalid_config"
    assert _alter(client, GROUP, "g", ("consumer.session.timeout.ms", SET, "1")) == "invalid_config"


def test_resources_that_are_named_twice(client, topic):
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": []}
    for api, version in (("alter_configs", 2), ("incremental_alter_configs", 1)):
        answer = client.call(api, version, resources=[resource, resource])
        codes = [one["error_code"] for one in answer["responses"]]
        assert codes == ["invalid_request", "invalid_request"]


def test_settings_without_effect_are_accepted(client):
    name = client.create_topic(unique("i"), 1, {"min.insync.replicas": "2"})
    assert _describe(client, TOPIC, name)[1]["min.insync.replicas"]["value"] == "2"
