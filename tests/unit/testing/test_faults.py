"""Faults: errors in the right fields of every API, lost requests and responses, and delays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kio.schema.errors import ErrorCode

from fencepost.protocol.api import APIS, Api, ApiKey
from fencepost.protocol.schema import all_fields, message_class
from fencepost.testing.broker import OwnBroker
from fencepost.testing.faults import Fault, Faults
from tests.support.batches import batch
from tests.support.cluster import TRANSACTION, Cluster, unique
from tests.support.raw import ConnectionLostError, RawClient, errors_in
from tests.support.share import ACCEPT, Member, initialize, parts_of
from tests.support.telemetry import ENABLED
from tests.support.waits import until

ERROR = "COORDINATOR_NOT_AVAILABLE"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    directory = tmp_path_factory.mktemp("faults")
    with (
        OwnBroker(directory, config=ENABLED) as broker,
        RawClient(broker.bootstrap) as raw_client,
    ):
        topic = {"name": "t", "num_partitions": 1, "replication_factor": 1}
        raw_client.call("create_topics", 5, topics=[topic], timeout=10_000)
        yield broker


@pytest.fixture
def broker(running: OwnBroker) -> Iterator[OwnBroker]:
    yield running
    running.faults.clear()


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[Cluster]:
    with Cluster(broker.bootstrap) as client:
        yield client


def one_of_each(cls: type) -> dict[str, Any]:
    """Return the fields of a request, with one element in each list."""
    values: dict[str, Any] = {}
    for info in all_fields(cls):
        if info.struct is not None:
            element = one_of_each(info.struct)
            values[info.name] = [element] if info.is_array else element
        elif info.kafka_type == "string":
            values[info.name] = ["t"] if info.is_array else "t"
        elif info.is_array and info.kafka_type == "int32":
            values[info.name] = [7]
        elif info.name in {"index", "partition", "partition_index"}:
            values[info.name] = 7
        elif info.name == "acks":
            values[info.name] = 1
    return values


def texts_in(answer: Any) -> list[object]:
    if isinstance(answer, dict):
        return [text for value in answer.values() for text in texts_in(value)]
    if isinstance(answer, list):
        return [text for value in answer for text in texts_in(value)]
    return [answer]


DEEP = {ApiKey.FETCH, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE}
"""APIs whose responses have the error in the partitions, and no error at the top level."""


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_fault_error_is_in_the_response_of_every_version(
    broker: OwnBroker, client: RawClient, api: Api
) -> None:
    for version in range(api.min_version, api.stable_max + 1):
        request = one_of_each(message_class(api.key, version, "request"))
        fault = broker.faults.add(api=api.name, error=ERROR)
        answer = client.call(api.module, version, **request)
        errors = set(errors_in(answer))
        assert ERROR.lower() in errors, (version, answer)
        # As in Kafka, responses of the APIs in DEEP have no top-level error. In a Metadata
        # response, partitions of a topic with an error have no error of their own.
        if api.key not in {*DEEP, ApiKey.METADATA}:
            assert errors == {ERROR.lower()}, (version, answer)
        assert fault.hits == 1
        assert fault.is_used_up
        if "partition_index" in str(answer) and api.key is not ApiKey.METADATA:
            assert 7 in texts_in(answer), (version, answer)


@pytest.mark.parametrize(
    ("api", "version", "place"),
    [
        ("produce", 9, {"name": "t", "index": 7}),
        ("fetch", 12, {"topic": "t", "partition_index": 7}),
        ("offset_commit", 8, {"name": "t", "partition_index": 7}),
        ("find_coordinator", 4, {"key": "t"}),
        ("describe_groups", 5, {"group_id": "t"}),
        ("delete_groups", 2, {"group_id": "t"}),
        ("describe_transactions", 0, {"transactional_id": "t"}),
        ("add_partitions_to_txn", 3, {"name": "t", "partition_index": 7}),
        ("describe_configs", 4, {"resource_name": "t"}),
        ("create_topics", 7, {"name": "t"}),
    ],
)
def test_fault_error_response_names_the_requested_resource(
    broker: OwnBroker, client: RawClient, api: str, version: int, place: dict[str, object]
) -> None:
    key = next(spec for spec in APIS.values() if spec.module == api)
    broker.faults.add(api=key.name, error=ERROR)
    request = one_of_each(message_class(key.key, version, "request"))
    answer = client.call(api, version, **request)
    assert place.items() <= dict(pairs_in(answer)).items()


def test_share_faults_are_partition_errors_and_keep_the_session(
    broker: OwnBroker,
) -> None:
    with Cluster(broker.bootstrap) as client:
        name = client.create_topic(unique("t"), 1)
        (described,) = client.call("metadata", 12, topics=[{"name": name}])["topics"]
        topic = UUID(described["topic_id"])
        initialize(client, "workers", topic)
        parts = [{"index": 0, "records": batch([b"a", b"b"])}]
        client.call(
            *("produce", 9),
            acks=-1,
            timeout=10_000,
            topic_data=[{"name": name, "partition_data": parts}],
        )
        member = Member(client, "workers")
        until(lambda: parts_of(member.fetch({topic: {0: []}})), "records are fetched")

        broker.faults.add(api="ShareAcknowledge", error="INVALID_RECORD_STATE")
        answer = member.acknowledge({topic: {0: [(0, 0, ACCEPT)]}})
        assert answer["error_code"] == "none"
        assert parts_of(answer)[0]["error_code"] == "invalid_record_state"

        broker.faults.add(api="ShareFetch", error="NOT_LEADER_OR_FOLLOWER")
        part = parts_of(member.fetch({topic: {0: [(0, 0, ACCEPT)]}}))[0]
        assert part["error_code"] == "not_leader_or_follower"
        assert part["acknowledge_error_code"] == int(ErrorCode.not_leader_or_follower)

        broker.faults.add(api="ShareFetch", error="NOT_LEADER_OR_FOLLOWER")
        part = parts_of(member.fetch({}))[0]
        assert (part["error_code"], part["acknowledge_error_code"]) == ("not_leader_or_follower", 0)

        broker.faults.add(api="ShareFetch", error="SHARE_SESSION_NOT_FOUND")
        assert member.fetch({})["error_code"] == "share_session_not_found"

        answer = member.acknowledge({topic: {0: [(0, 1, ACCEPT)]}})
        assert parts_of(answer)[0]["error_code"] == "none"


def pairs_in(answer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(answer, dict):
        for name, value in answer.items():
            if not isinstance(value, (dict, list)):
                yield name, value
            yield from pairs_in(value)
    elif isinstance(answer, list):
        for row in answer:
            yield from pairs_in(row)


def init(client: RawClient) -> dict[str, Any]:
    told = {"transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
    return client.call("init_producer_id", 4, transactional_id=None, **told)


def test_faults_apply_in_order_each_for_its_number_of_requests(
    broker: OwnBroker, client: RawClient
) -> None:
    broker.faults.add(api="InitProducerId", error="NOT_COORDINATOR", times=2)
    broker.faults.add(error=15)
    codes = [init(client)["error_code"] for _ in range(4)]
    assert codes == ["not_coordinator", "not_coordinator", "coordinator_not_available", "none"]


def test_unlimited_fault_applies_until_it_is_removed(broker: OwnBroker, client: RawClient) -> None:
    fault = broker.faults.add(api="InitProducerId", error=ERROR, times=None)
    for _ in range(3):
        assert init(client)["error_code"] == ERROR.lower()
    fault.remove()
    assert init(client)["error_code"] == "none"
    assert fault.hits == 3


def test_fault_applies_only_to_matching_requests(broker: OwnBroker, client: Cluster) -> None:
    def end(name: str) -> str:
        told = {"producer_id": 1, "producer_epoch": 0, "committed": True}
        return client.call("end_txn", 3, transactional_id=name, **told)["error_code"]

    for name in ("a", "b", "c"):
        client.coordinator(name, TRANSACTION)
    add = broker.faults.add
    add(api="EndTxn", error=ERROR, match={"transactional_id": "a", "client_id": "raw"})
    add(api="EndTxn", error="UNKNOWN_SERVER_ERROR", match={"client_id": "else"}, times=None)
    add(
        api="EndTxn",
        error="NOT_COORDINATOR",
        match=lambda r: r.body.committed and "b" in str(r.transactional_ids),
    )
    assert end("c") == "invalid_producer_id_mapping"
    assert end("b") == "not_coordinator"
    assert end("a") == ERROR.lower()
    assert end("a") == "invalid_producer_id_mapping"


def test_fault_matches_topic_by_name_in_requests_with_topic_ids(
    broker: OwnBroker, client: RawClient
) -> None:
    (topic,) = client.call("metadata", 12, topics=[{"name": "t"}])["topics"]
    asked = [{"topic_id": UUID(topic["topic_id"]), "partitions": [{}]}]
    by_name = broker.faults.observe(api="Fetch", match={"topic": "t"})
    broker.faults.add(api="Fetch", error="NOT_LEADER_OR_FOLLOWER", match={"topic": "other"})
    answer = client.call("fetch", 13, max_bytes=100, topics=asked)
    assert set(errors_in(answer)) == {"none"}
    assert by_name.hits == 1
    assert by_name.seen[0].topics == ["t"]


def test_request_with_a_lost_response_is_executed(broker: OwnBroker) -> None:
    created = {"num_partitions": 1, "replication_factor": 1}
    for place, lost in enumerate(({"close": "after"}, {"drop": True}, {"drop": "answer"})):
        fault = broker.faults.add(api="CreateTopics", **lost)
        with RawClient(broker.bootstrap) as client:
            client.send("create_topics", 5, topics=[{"name": f"done{place}", **created}], timeout=9)
            fault.wait(10)
            if "close" in lost:
                with pytest.raises(ConnectionLostError):
                    client.receive()
        names = topics_of(broker)
        assert f"done{place}" in names


def test_lost_request_is_not_executed(broker: OwnBroker) -> None:
    created = {"num_partitions": 1, "replication_factor": 1}
    for place, lost in enumerate(({"close": "before"}, {"drop": "request"})):
        fault = broker.faults.add(api="CreateTopics", **lost)
        with RawClient(broker.bootstrap) as client:
            client.send("create_topics", 5, topics=[{"name": f"lost{place}", **created}], timeout=9)
            fault.wait(10)
            if "close" in lost:
                with pytest.raises(ConnectionLostError):
                    client.receive()
        assert f"lost{place}" not in topics_of(broker)


def topics_of(broker: OwnBroker) -> set[str]:
    with RawClient(broker.bootstrap) as client:
        return {topic["name"] for topic in client.call("metadata", 9, topics=None)["topics"]}


def test_connection_with_dropped_response_is_closed_when_faults_are_cleared(
    broker: OwnBroker,
) -> None:
    fault = broker.faults.add(api="InitProducerId", drop=True)
    with RawClient(broker.bootstrap, deadline_s=0.3) as client:
        client.send("init_producer_id", 4, transaction_timeout=1, transactional_id=None)
        client.send("api_versions", 0)
        fault.wait(10)
        with pytest.raises(TimeoutError):
            client.receive()
        client._socket.settimeout(20)
        broker.faults.clear()
        with pytest.raises(ConnectionLostError):
            client.receive()


def test_delay_blocks_only_its_own_connection(broker: OwnBroker, client: RawClient) -> None:
    fault = broker.faults.add(api="InitProducerId", delay_ms=300)
    begin = time.monotonic()
    client.send("init_producer_id", 4, transaction_timeout=1, transactional_id=None)
    fault.wait(10)
    with RawClient(broker.bootstrap) as other:
        assert init(other)["error_code"] == "none"
    assert client.receive()["error_code"] == "none"
    assert time.monotonic() - begin >= 0.3


def test_stop_ends_requests_held_by_faults(tmp_path: Path) -> None:
    broker = OwnBroker(tmp_path).start()
    with RawClient(broker.bootstrap) as client:
        for lost in ({"drop": True}, {"delay_ms": 600_000}):
            broker.faults.add(api="ApiVersions", **lost)
        client.send("api_versions", 0)
        with RawClient(broker.bootstrap) as other:
            other.send("api_versions", 0)
            waiting = threading.Thread(target=broker.stop)
            waiting.start()
            waiting.join(20)
            assert not waiting.is_alive()


def test_server_without_faults_uses_its_own_registry(broker: OwnBroker) -> None:
    async def registry(running: Any) -> object:
        return running.server.registry

    own = broker.call(registry)
    fault = broker.faults.observe()
    assert broker.call(registry) is not own
    fault.remove()
    assert broker.call(registry) is own
    broker.faults.add(error=1)
    broker.faults.clear()
    assert broker.call(registry) is own


def test_observer_counts_requests_and_changes_nothing(broker: OwnBroker, client: RawClient) -> None:
    seen = broker.faults.observe(api="InitProducerId")
    broker.faults.add(api="InitProducerId", error=ERROR)
    assert [init(client)["error_code"] for _ in range(2)] == [ERROR.lower(), "none"]
    assert (seen.hits, [request.api for request in seen.seen]) == (2, ["InitProducerId"] * 2)
    with pytest.raises(TimeoutError, match="InitProducerId: 2 of 3 requests"):
        seen.wait(0.01, hits=3)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"api": "Endtransaction", "error": ERROR}, "no API 'Endtransaction'"),
        ({"error": "NO_SUCH"}, "no error 'NO_SUCH'"),
        ({"error": ERROR, "drop": True}, "one of"),
        ({"api": "EndTxn"}, "without effect"),
        ({"drop": "all"}, "drop is one of request, answer, not 'all'"),
        ({"close": "never"}, "close is one of before, after, not 'never'"),
        ({"error": ERROR, "times": 0}, "times is 1 or more, not 0"),
        (
            {"api": "EndTxn", "error": ERROR, "match": {"foo": 1, "topic": "t"}},
            "EndTxn has no field foo; there are api, broker, client_host, client_id, committed, ",
        ),
    ],
)
def test_invalid_fault_is_refused_with_a_reason(told: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Faults().add(**told)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_every_field_of_a_request_can_be_matched(api: Api) -> None:
    """This includes fields that only the oldest or only the newest version has."""
    for version in {api.min_version, api.max_version}:
        for info in all_fields(message_class(api.key, version, "request")):
            Faults().observe(api=api.key, match={info.name: 1, "client_id": "a", "topic": "t"})
    with pytest.raises(ValueError, match=f"{api.name} has no field foo; there are "):
        Faults().observe(api=api.key, match={"foo": 1})


def test_faults_survive_a_broker_restart(tmp_path: Path) -> None:
    with OwnBroker(tmp_path) as broker:
        fault = broker.faults.add(api="InitProducerId", error=ERROR)
        broker.crash()
        broker.restart()
        with RawClient(broker.bootstrap) as client:
            assert init(client)["error_code"] == ERROR.lower()
        assert fault.hits == 1


# --- real clients ---


def test_producer_retries_after_a_retriable_fault_error(broker: OwnBroker) -> None:
    fault: Fault = broker.faults.add(
        api="Produce", error="NOT_LEADER_OR_FOLLOWER", times=2, match={"topic": "t"}
    )
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "enable.idempotence": True, "retry.backoff.ms": 10}
    )
    delivered: list[int] = []
    producer.produce(
        "t", b"v", on_delivery=lambda _error, message: delivered.append(message.offset())
    )
    assert producer.flush(30) == 0
    assert (fault.hits, len(delivered)) == (2, 1)


def test_commit_with_a_lost_response_is_done_once(broker: OwnBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "lost"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("t", b"once", partition=0)
    lost = broker.faults.add(api="EndTxn", close="after", match={"transactional_id": "lost"})
    producer.commit_transaction(30)
    assert lost.hits == 1
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "reader",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition("t", 0, 0)])
    values = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        values.append(message.value())
    consumer.close()
    assert values.count(b"once") == 1


def test_admin_client_reports_a_non_retriable_fault_error(broker: OwnBroker) -> None:
    broker.faults.add(api="ListGroups", error="GROUP_AUTHORIZATION_FAILED", times=None)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    listed = admin.list_consumer_groups(request_timeout=10).result()
    assert "authorization" in str(listed.errors[0]).lower()


def test_producer_fails_after_a_non_retriable_fault_error(broker: OwnBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "x"})
    broker.faults.add(api="InitProducerId", error="TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
    with pytest.raises(KafkaException, match="TRANSACTIONAL_ID_AUTHORIZATION_FAILED"):
        producer.init_transactions(30)


def test_match_that_raises_applies_to_no_request_and_is_reported(
    broker: OwnBroker, client: Any
) -> None:
    fault = broker.faults.add(
        api="InitProducerId", error=ERROR, match=lambda request: request.nothing
    )
    assert init(client)["error_code"] == "none"
    with pytest.raises(RuntimeError, match=r"match of InitProducerId .* raised AttributeError"):
        fault.wait(10)
