"""Produce, with and without transactions, through a socket and Kafka's own message schemas."""

from __future__ import annotations

import gzip
import time
import uuid

import cramjam
import pytest

from tests.support.batches import HEADER, batch, seal
from tests.support.cluster import GROUP as GROUP_KIND
from tests.support.cluster import READ_COMMITTED, TRANSACTION, Cluster, unique
from tests.support.raw import ConnectionLostError, RawClient, errors_in
from tests.support.waits import until
from tests.unit.coordinator.handlers.asking import txn_batch

UNKNOWN = "unknown_topic_or_partition"
BOUND = "max.decompressed.message.bytes"
MAX_TIMESTAMP = -3


# --- Produce --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 14))
def test_produce_in_every_version_appends_and_returns_base_offsets(client, version):
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


def test_produce_to_an_unknown_topic_id_is_refused(client):
    entry = {"topic_id": uuid.uuid4(), "partition_data": [{"index": 0, "records": batch([b"a"])}]}
    answer = client.call("produce", 13, acks=1, topic_data=[entry])
    part = answer["responses"][0]["partition_responses"][0]
    assert part["error_code"] == "unknown_topic_id"


def test_batch_above_max_decompressed_message_bytes_is_refused(client):
    """The limit applies at once to Produce requests and to lookups by timestamp."""
    name = client.create_topic(unique("p"))
    records = gzip.compress(batch([b"x" * 300])[HEADER.size :])
    compressed = seal(records, count=1, attributes=1)

    def produced() -> str:
        entry = {"name": name, "partition_data": [{"index": 0, "records": compressed}]}
        answer = client.call("produce", 9, acks=-1, topic_data=[entry])
        return answer["responses"][0]["partition_responses"][0]["error_code"]

    def found(timestamp: int) -> tuple[str, int]:
        part = {"partition_index": 0, "timestamp": timestamp, "current_leader_epoch": -1}
        topics = [{"name": name, "partitions": [part]}]
        answer = client.call("list_offsets", 7, replica_id=-1, topics=topics)
        (row,) = answer["topics"][0]["partitions"]
        return row["error_code"], row["offset"]

    def bound(size: int) -> None:
        entry = {"name": BOUND, "config_operation": 0, "value": str(size)}
        resource = {"resource_type": 2, "resource_name": name, "configs": [entry]}
        answer = client.call("incremental_alter_configs", 1, resources=[resource])
        assert answer["responses"][0]["error_code"] == "none"

    body = 300 + 7
    bound(body - 1)
    assert produced() == "invalid_record"
    bound(body)
    assert produced() == "none"
    assert found(0) == found(MAX_TIMESTAMP) == ("none", 0)
    bound(body - 1)
    assert found(0) == found(MAX_TIMESTAMP) == ("invalid_record", -1)
    assert client.fetch(name)["records"][HEADER.size :] == records, "consumers decompress it"
    bound(body)
    assert found(0) == ("none", 0)


@pytest.mark.parametrize("acks", [2, -2, 127])
def test_produce_with_invalid_acks_is_refused(client, topic, acks):
    assert client.produce(topic, [b"x"], acks=acks)["error_code"] == "invalid_required_acks"
    assert client.offset(topic) == 0


def test_produce_with_acks_0_has_no_response_and_closes_on_error(client, bootstrap, topic):
    def send(sender: RawClient, name: str) -> None:
        data = [{"index": 0, "records": batch([b"x"])}]
        sender.send("produce", 9, acks=0, topic_data=[{"name": name, "partition_data": data}])
        sender._waiting.pop()

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
def test_invalid_batch_is_refused_and_not_appended(client, topic, records, code):
    part = client.produce(topic, records)
    assert (part["error_code"], part["base_offset"]) == (code, -1)
    assert part["error_message"]
    assert client.offset(topic) == 0


def test_batch_with_invalid_timestamps_is_refused_with_record_errors(client, topic):
    part = client.produce(topic, batch([b"a", b"b", b"c"], timestamp_ms=2**50))
    assert part["error_message"] == (
        "One or more records have been rejected due to invalid timestamp"
    )
    assert [record_error["batch_index"] for record_error in part["record_errors"]] == [0, 1, 2]
    assert all(record_error["batch_index_error_message"] for record_error in part["record_errors"])
    assert "record_errors" not in client.produce(
        topic, batch([b"a"], timestamp_ms=2**50), version=7
    )


def test_zstd_batch_is_refused_below_produce_version_7(client, topic):
    records = seal(
        bytes(cramjam.zstd.compress(batch([b"x"])[HEADER.size :])), count=1, attributes=4
    )
    assert client.produce(topic, records, version=6)["error_code"] == "unsupported_compression_type"
    assert client.produce(topic, records, version=7)["error_code"] == "none"


def test_record_without_a_key_is_refused_by_a_compacted_topic(client):
    name = client.create_topic(unique("k"), 1, {"cleanup.policy": "compact"})
    part = client.produce(name, [b"a"])
    assert part["error_code"] == "invalid_record"
    assert client.produce(name, batch([b"a"], key=b"k"))["error_code"] == "none"


def test_produce_response_has_the_log_append_time(client):
    name = client.create_topic(unique("l"), 1, {"message.timestamp.type": "LogAppendTime"})
    before = int(time.time() * 1000)
    part = client.produce(name, [b"a"])
    assert before <= part["log_append_time"] <= int(time.time() * 1000)


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
def test_produce_to_an_internal_topic_is_refused(bootstrap, name):
    with Cluster(bootstrap, client_id="__admin_client") as client:
        for kind in (GROUP_KIND, TRANSACTION):
            client.coordinator(unique("any"), kind)
        assert client.produce(name, [b"x"])["error_code"] == "invalid_topic_exception"
        assert client.produce(name, [b"x"], partition=9)["error_code"] == UNKNOWN
        assert client.produce(name, [b"x"], acks=2)["error_code"] == "invalid_required_acks"


def test_compressed_batch_is_stored_unchanged(client, topic):
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
def test_transaction_cannot_include_the_transaction_state_or_history_topic(
    client, topic, version, name
):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    topics = [{"name": topic, "partitions": [0]}, {"name": name, "partitions": [0, 99]}]
    if version < 4:
        body = {"v3_and_below_transactional_id": tid, "v3_and_below_producer_id": pid}
        body |= {"v3_and_below_producer_epoch": epoch, "v3_and_below_topics": topics}
    else:
        transaction = {"transactional_id": tid, "producer_id": pid, "producer_epoch": epoch}
        body = {"transactions": [{**transaction, "verify_only": False, "topics": topics}]}
    if name == "__fencepost_history":
        until(lambda: client.leaders(name), "the history of the claim")
    refused = client.call("add_partitions_to_txn", version, **body)
    assert errors_in(refused)[-3:] == [
        "operation_not_attempted",
        *(["topic_authorization_failed"] * 2),
    ]
    # The coordinator still serves requests, and no transaction has the refused partitions.
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


@pytest.mark.parametrize(
    ("version", "code"), [(9, "invalid_txn_state"), (11, "transaction_abortable")]
)
def test_produce_to_a_partition_not_added_to_the_transaction_is_refused(
    client, topic, version, code
):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    other = client.create_topic(unique("t"))
    assert _add(client, tid, pid, epoch, other) == "none"
    part = client.produce(topic, txn_batch(pid, epoch), version=version, transactional_id=tid)
    assert part["error_code"] == code
    assert _add(client, tid, pid, epoch, topic) == "none"
    part = client.produce(topic, txn_batch(pid, epoch), version=version, transactional_id=tid)
    assert part["error_code"] == "none"
    assert (client.offset(topic), client.lso(topic)) == (1, 0)


def test_produce_version_12_adds_the_partition_to_the_transaction(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    for sequence in (0, 1):
        part = client.produce(
            topic, txn_batch(pid, epoch, sequence), version=12, transactional_id=tid
        )
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


def test_transaction_error_takes_precedence_over_invalid_acks(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)

    def refused(epoch: int, version: int) -> str:
        data = txn_batch(pid, epoch)
        part = client.produce(topic, data, version=version, transactional_id=tid, acks=2)
        assert client.offset(topic) == 0
        return str(part["error_code"])

    assert refused(epoch, 9) == "invalid_txn_state"
    assert refused(epoch + 1, 12) == "invalid_producer_epoch"
    assert refused(epoch, 12) == "invalid_required_acks"


def test_transactional_batch_without_producer_id_is_refused(client, topic):
    data = batch([b"x"], transactional=True)
    for version in (9, 12):
        part = client.produce(topic, data, version=version, transactional_id=unique("tx"))
        assert part["error_code"] == "invalid_producer_id_mapping"
    assert client.offset(topic) == 0


def test_write_txn_markers_merges_markers_of_one_producer_into_a_row(client):
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


def test_describe_producers_of_an_invalid_topic_name_is_refused(client):
    asked = [{"name": name, "partition_indexes": [0]} for name in ("a/b", "", "none-such")]
    codes = errors_in(client.call("describe_producers", 0, topics=asked))
    assert codes == ["invalid_topic_exception", "invalid_topic_exception", UNKNOWN]


def test_new_producer_with_version_12_must_begin_with_sequence_0(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    part = client.produce(topic, txn_batch(pid, epoch, 5), version=12, transactional_id=tid)
    assert part["error_code"] == "out_of_order_sequence_number"


def test_fenced_producer_gets_invalid_producer_epoch(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    assert client.init_producer(tid) == (pid, epoch + 1)
    part = client.produce(topic, txn_batch(pid, epoch), version=12, transactional_id=tid)
    assert part["error_code"] == "invalid_producer_epoch"


def test_transactional_batch_without_its_transactional_id_is_refused(client, topic):
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    part = client.produce(topic, txn_batch(pid, epoch), version=12)
    assert part["error_code"] == "transactional_id_authorization_failed"
    part = client.produce(topic, batch([b"a"], attributes=0x10))
    assert part["error_code"] == "transactional_id_authorization_failed"
    assert client.offset(topic) == 0
    part = client.produce(topic, txn_batch(pid + 77, epoch), version=12, transactional_id=tid)
    assert part["error_code"] == "invalid_producer_id_mapping"


def test_transactional_request_with_two_producer_ids_is_refused(client):
    name = client.create_topic(unique("p"), 2)
    tid = unique("tx")
    pid, epoch = client.init_producer(tid)
    data = [
        {"index": 0, "records": txn_batch(pid, epoch)},
        {"index": 1, "records": txn_batch(pid + 1, epoch)},
    ]
    answer = client.call(
        "produce", 12, acks=-1, transactional_id=tid,
        topic_data=[{"name": name, "partition_data": data}],
    )  # fmt: skip
    parts = answer["responses"][0]["partition_responses"]
    assert {part["error_code"] for part in parts} == {"invalid_producer_id_mapping"}
