"""Group commit with real clients, on a file system that is slow, broken or full on demand."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.protocol.api import APIS, ApiKey
from tests.support.batches import batch
from tests.support.cluster import GROUP, READ_COMMITTED, TRANSACTION, Answer, Cluster
from tests.support.faults import FaultyDisk
from tests.support.raw import errors_in
from tests.support.waits import until
from tests.unit.coordinator.on_faulty_disk import Running, running

PRODUCE = APIS[ApiKey.PRODUCE]
VERSIONS = range(PRODUCE.min_version, PRODUCE.max_version + 1)


def commit_offset(client: Cluster, topic: str, offset: int, group: str = "g") -> str:
    answer = client.call(
        "offset_commit",
        7,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[
            {"name": topic, "partitions": [{"partition_index": 0, "committed_offset": offset}]}
        ],
    )
    return str(answer["topics"][0]["partitions"][0]["error_code"])


# --- one fsync for many requests ------------------------------------------------------------------


def test_appends_that_wait_together_share_one_fsync(tmp_path):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t", 2)
        for partition in (0, 1):
            assert (
                system.client.produce(topic, [b"first"], partition=partition)["error_code"]
                == "none"
            )
        groups, since = system.broker.services.flusher.rounds, len(system.disk.steps)
        system.disk.gate.clear()
        opener = system.begin(lambda: system.connect().produce(topic, [b"opener"]))
        assert system.disk.held.wait(60)
        clients = [system.connect() for _ in range(16)]
        joined = [
            system.begin(lambda at=at, c=c: c.produce(topic, [b"%d" % at], partition=at % 2))
            for at, c in enumerate(clients)
        ]
        written = lambda: system.disk.of_logs(topic, since=since).count(("write", topic)) == 17  # noqa: E731
        until(written, "every append is written while the first fsync is under way")
        assert not any(future.done() for future in [opener, *joined])
        system.disk.gate.set()
        assert {future.result(60)["error_code"] for future in [opener, *joined]} == {"none"}
        # One sync for the first request, and then one for each partition of the other sixteen
        # requests.
        assert system.broker.services.flusher.rounds == groups + 2
        assert system.disk.of_logs(topic, since=since).count(("sync", topic)) == 3


def test_unflushed_record_is_invisible_while_other_requests_are_served(tmp_path):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t")
        system.client.produce(topic, [b"first"])
        system.disk.gate.clear()
        waiting = system.begin(lambda: system.connect().produce(topic, [b"second"]))
        assert system.disk.held.wait(60)
        # Requests are served, and the high watermark stays at the flushed offset.
        assert system.client.offset(topic) == 1
        assert system.client.values(topic) == [b"first"]
        assert not waiting.done()
        system.disk.gate.set()
        assert waiting.result(60)["base_offset"] == 1
        assert system.client.values(topic) == [b"first", b"second"]


def test_retry_of_unflushed_batch_waits_for_the_same_fsync(tmp_path):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t")
        producer, epoch = system.client.init_producer()
        data = batch([b"once"], producer_id=producer, producer_epoch=epoch, sequence=0)
        system.disk.gate.clear()
        first = system.begin(lambda: system.connect().produce(topic, data))
        assert system.disk.held.wait(60)
        retry = system.begin(lambda: system.connect().produce(topic, data))
        assert system.client.offset(topic) == 0
        assert not first.done()
        assert not retry.done()
        system.disk.gate.set()
        assert first.result(60)["base_offset"] == retry.result(60)["base_offset"] == 0
        assert system.client.values(topic) == [b"once"]


@pytest.mark.parametrize("version", VERSIONS)
def test_produce_of_every_version_is_answered_once_flushed(tmp_path, version):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t")
        named = {"topic_id": system.client.topic_id(topic)} if version >= 13 else {"name": topic}
        answer = system.client.call(
            "produce",
            version,
            acks=-1,
            timeout=10_000,
            topic_data=[{**named, "partition_data": [{"index": 0, "records": batch([b"x"])}]}],
        )
        (response,) = answer["responses"]
        assert {name: str(value) for name, value in named.items()}.items() <= response.items()
        assert response["partition_responses"][0]["error_code"] == "none"
        assert system.client.values(topic) == [b"x"]


def test_append_waiting_for_deleted_topic_is_unknown_topic_or_partition(tmp_path):
    """As in Apache Kafka; no failure of the disk is reported or logged."""
    with running(tmp_path) as system, capture_logs() as said:
        topic = system.client.create_topic("t")
        system.disk.gate.clear()
        opener = system.begin(lambda: system.connect().produce(topic, [b"opener"]))
        assert system.disk.held.wait(60)
        waiting = system.begin(lambda: system.connect().produce(topic, [b"x"]))
        until(
            lambda: system.broker.services.logs.partition(topic, 0).log_end_offset == 2,
            "both appended",
        )
        deleting = system.begin(
            lambda: system.connect().call("delete_topics", 4, topic_names=[topic], timeout=10_000)
        )
        until(lambda: system.broker.services.metadata.topic(topic) is None, "the topic is gone")
        system.disk.gate.set()
        assert deleting.result(60)["responses"][0]["error_code"] == "none"
        assert waiting.result(60)["error_code"] == "unknown_topic_or_partition"
        opener.result(60)
        assert [line for line in said if line["log_level"] == "error"] == []


def test_produce_without_flush_messages_neither_syncs_nor_waits(tmp_path):
    with running(tmp_path, flush_messages=str(2**63 - 1)) as system:
        topic = system.client.create_topic("t")
        rounds = system.broker.services.flusher.rounds
        system.disk.gate.clear()
        for _ in range(10):
            assert system.client.produce(topic, [b"x"])["error_code"] == "none"
        assert system.broker.services.flusher.is_idle
        assert system.broker.services.flusher.rounds == rounds
        assert ("sync", topic) not in system.disk.of_logs(topic)


def test_flush_messages_of_three_flushes_every_third_record(tmp_path):
    with running(tmp_path, flush_messages="3") as system:
        topic = system.client.create_topic("t")
        points = []
        for _ in range(7):
            system.client.produce(topic, [b"x"])
            points.append(system.broker.services.logs.partition(topic, 0).recovery_point)
        assert points == [0, 0, 3, 3, 3, 6, 6]


def test_record_is_flushed_after_flush_ms_without_delaying_its_response(tmp_path):
    with running(tmp_path, flush_messages=str(2**63 - 1), flush_ms="1") as system:
        topic = system.client.create_topic("t")
        system.disk.gate.clear()
        assert system.client.produce(topic, [b"x"])["error_code"] == "none"
        assert system.client.values(topic) == [b"x"]
        system.disk.gate.set()
        partition = system.broker.services.logs.partition(topic, 0)
        until(lambda: partition.recovery_point == 1, "the record is on disk")


def test_offset_commit_and_fetch_wait_for_fsync(tmp_path):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t")
        system.client.coordinator("g", GROUP)
        assert commit_offset(system.client, topic, 1) == "none"
        system.disk.gate.clear()
        committing = system.begin(lambda: commit_offset(system.connect(), topic, 2))
        assert system.disk.held.wait(60)
        # OffsetFetch would return a value that a power loss could undo, so it waits too.
        asking = system.begin(lambda: system.connect().committed("g", topic))
        assert system.client.offset(topic) == 0
        assert not committing.done()
        assert not asking.done()
        system.disk.gate.set()
        assert committing.result(60) == "none"
        assert asking.result(60) == 2


# --- transactions: each step is flushed before the next is written --------------------------------


def transact(system: Running, topic: str, *, version: int, epoch: int, producer: int) -> Answer:
    """Run a transaction (version 1 or 2) with one record, and return the response to EndTxn."""
    client = system.client
    if version == 1:
        added = client.call(
            "add_partitions_to_txn",
            3,
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=producer,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )
        part = added["results_by_topic_v3_and_below"][0]["results_by_partition"][0]
        assert part["partition_error_code"] == "none", added
    data = batch([b"x"], producer_id=producer, producer_epoch=epoch, sequence=0, transactional=True)
    produced = client.produce(topic, data, transactional_id="x", version=12 if version == 2 else 9)
    assert produced["error_code"] == "none", produced
    return client.call(
        "end_txn",
        5 if version == 2 else 3,
        transactional_id="x",
        producer_id=producer,
        producer_epoch=epoch,
        committed=True,
    )


@pytest.mark.parametrize("version", [1, 2])
def test_each_step_of_a_transaction_is_flushed_before_the_next_is_written(tmp_path, version):
    with running(tmp_path) as system:
        topic = system.client.create_topic("t")
        system.client.produce(topic, [b"before"])
        producer, epoch = system.client.init_producer("x")
        since, state = len(system.disk.steps), "__transaction_state"
        ended = transact(system, topic, version=version, epoch=epoch, producer=producer)
        assert ended["error_code"] == "none"
        assert system.disk.of_logs(topic, state, since=since) == [
            ("write", state),  # the partition is added
            ("sync", state),
            ("write", topic),  # the record
            ("sync", topic),
            ("write", state),  # PrepareCommit
            ("sync", state),
            ("write", topic),  # the marker
            ("sync", topic),
            ("write", state),  # CompleteCommit
            ("sync", state),
        ]
        assert system.client.values(topic, isolation=READ_COMMITTED) == [b"before", b"x"]


@pytest.mark.parametrize("version", [1, 2])
def test_transactional_batch_waits_for_flush_of_its_added_partition(tmp_path, version):
    """The repeated request finds the partition added, but the record is not yet flushed."""
    with running(tmp_path) as system:
        topic, state = system.client.create_topic("t"), "__transaction_state"
        system.client.produce(topic, [b"before"])
        producer, epoch = system.client.init_producer("x")
        add = {
            "v3_and_below_transactional_id": "x",
            "v3_and_below_producer_id": producer,
            "v3_and_below_producer_epoch": epoch,
            "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
        }
        data = batch(
            [b"x"], producer_id=producer, producer_epoch=epoch, sequence=0, transactional=True
        )
        api_version = 12 if version == 2 else 9
        since = len(system.disk.steps)
        system.disk.gate.clear()
        first, others = system.connect(), [system.connect() for _ in range(3)]
        if version == 1:
            first.send("add_partitions_to_txn", 3, **add)
            assert system.disk.held.wait(60)
        for client in others:
            client.begin_produce(topic, data, transactional_id="x", version=api_version)
        assert system.disk.held.wait(60)
        for _ in others:
            assert system.client.offset(topic) == 1
        assert system.disk.of_logs(topic, state, since=since) == [("write", state)]
        system.disk.gate.set()
        answers = [client.receive() for client in others]
        assert {error for answer in answers for error in errors_in(answer)} == {"none"}
        if version == 1:
            assert set(errors_in(first.receive())) == {"none"}
        assert system.disk.of_logs(topic, state, since=since)[:3] == [
            ("write", state),
            ("sync", state),
            ("write", topic),
        ]
        assert system.client.values(topic) == [b"before", b"x"]


# --- failing disks --------------------------------------------------------------------------------


def log_of(topic: str) -> Callable[[str], bool]:
    return lambda path: f"/{topic}-" in path and path.endswith(".log")


def test_failed_fsync_takes_partition_offline_until_restart(tmp_path):
    disk = FaultyDisk()
    with capture_logs() as said, running(tmp_path, disk) as system:
        bad, good = system.client.create_topic("bad"), system.client.create_topic("good")
        system.client.produce(bad, [b"stored"])
        system.client.produce(good, [b"stored"])
        disk.gate.clear()
        opener = system.begin(lambda: system.connect().produce(good, [b"opener"]))
        assert disk.held.wait(60)
        since = len(disk.steps)
        clients = [system.connect() for _ in range(4)]
        shared = [system.begin(lambda c=c: c.produce(bad, [b"lost"])) for c in clients]
        other = system.begin(lambda: system.connect().produce(good, [b"kept"]))
        written = lambda: len(disk.of_logs(bad, good, since=since)) == 5  # noqa: E731
        until(written, "all five are written")
        disk.sync_fails = log_of("bad")
        disk.gate.set()
        assert opener.result(60)["error_code"] == "none"
        assert {future.result(60)["error_code"] for future in shared} == {"kafka_storage_error"}
        # The file of the other partition was synced successfully.
        assert other.result(60)["error_code"] == "none"
        # After the failed sync the kernel treats the pages as clean, so no flush is retried.
        disk.sync_fails = lambda _path: False
        syncs = disk.of_logs(bad).count(("sync", bad))
        assert system.client.produce(bad, [b"more"])["error_code"] == "kafka_storage_error"
        assert system.client.fetch(bad)["error_code"] == "kafka_storage_error"
        assert disk.of_logs(bad).count(("sync", bad)) == syncs
        assert system.client.produce(good, [b"more"])["error_code"] == "none"
    (report,) = [line for line in said if line["event"] == "partition off line"]
    assert report["partition"] == "bad-0"
    assert "bad-0/00000000000000000000.log" in report["cause"]
    assert "Input/output error" in report["cause"]
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    with running(tmp_path) as system:
        # Acknowledged records still exist; unacknowledged records may exist.
        assert system.client.values("bad")[:1] == [b"stored"]
        assert system.client.values("good") == [b"stored", b"opener", b"kept", b"more"]
        assert system.client.produce("bad", [b"again"])["error_code"] == "none"


def test_failed_write_is_not_acknowledged_and_takes_partition_offline(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        system.client.produce(topic, [b"stored"])
        disk.write_fails = log_of("t")
        assert system.client.produce(topic, [b"lost"])["error_code"] == "kafka_storage_error"
        disk.write_fails = lambda _path: False
        assert system.client.produce(topic, [b"lost"])["error_code"] == "kafka_storage_error"
        (known,) = system.client.call("metadata", 9, topics=[{"name": topic}])["topics"]
        assert known["partitions"][0]["error_code"] == "leader_not_available"
    with running(tmp_path) as system:
        assert system.client.values("t") == [b"stored"]


def test_offset_commit_on_failed_fsync_is_not_coordinator(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        system.client.coordinator("g", GROUP)
        assert commit_offset(system.client, topic, 1) == "none"
        disk.sync_fails = log_of("__consumer_offsets")
        assert commit_offset(system.client, topic, 2) == "not_coordinator"
        assert commit_offset(system.client, topic, 3) in {
            "not_coordinator",
            "coordinator_load_in_progress",
        }
    with running(tmp_path) as system:
        system.client.coordinator("g", GROUP)
        assert system.client.committed("g", "t") in {1, 2}


def test_marker_with_failed_fsync_is_written_after_restart(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        producer, epoch = system.client.init_producer("x")
        stop = threading.Event()

        def at_marker(path: str) -> bool:
            is_marker = log_of("t")(path) and disk.of_logs("t").count(("write", "t")) == 2
            if is_marker:
                stop.set()
            return is_marker

        disk.sync_fails = at_marker
        # A successful EndTxn means only that the decision is on disk.
        ended = transact(system, topic, version=2, epoch=epoch, producer=producer)
        assert ended["error_code"] == "none"
        assert stop.is_set()
        listed = system.client.call("list_transactions", 0)["transaction_states"]
        assert [state["transaction_state"] for state in listed] == ["PrepareCommit"]
    with running(tmp_path) as system:
        system.client.coordinator("x", TRANSACTION)
        until(
            lambda: system.client.lso("t") == system.client.offset("t"), "the transaction is over"
        )
        assert system.client.values("t", isolation=READ_COMMITTED) == [b"x"]


# --- full disks -----------------------------------------------------------------------------------


def test_full_disk_refuses_appends_and_recovers_without_restart(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        producer, epoch = system.client.init_producer()

        def send(sequence: int) -> str:
            data = batch(
                [b"%d" % sequence],
                producer_id=producer,
                producer_epoch=epoch,
                sequence=sequence,
            )
            return str(system.client.produce(topic, data)["error_code"])

        assert send(0) == "none"
        path = tmp_path / "t-0" / "00000000000000000000.log"
        size = path.stat().st_size
        disk.is_full = True
        assert [send(1), send(1)] == ["kafka_storage_error"] * 2
        assert path.stat().st_size == size, "the torn tail is cut off"
        assert system.client.values(topic) == [b"0"], "reading goes on"
        disk.is_full = False
        assert send(1) == "none"
        assert system.client.values(topic) == [b"0", b"1"]
    assert (tmp_path / ".kafka_cleanshutdown").exists()


def test_coordinators_recover_after_full_disk_has_room(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        system.client.coordinator("g", GROUP)
        producer, epoch = system.client.init_producer("x")
        assert commit_offset(system.client, topic, 1) == "none"
        data = batch(
            [b"x"], producer_id=producer, producer_epoch=epoch, sequence=0, transactional=True
        )
        sent = system.client.produce(topic, data, transactional_id="x", version=12)
        assert sent["error_code"] == "none"
        disk.is_full = True
        assert commit_offset(system.client, topic, 2) == "not_coordinator"

        def end() -> str:
            answer = system.client.call(
                "end_txn",
                5,
                transactional_id="x",
                producer_id=producer,
                producer_epoch=epoch,
                committed=True,
            )
            return str(answer["error_code"])

        retriable = {
            "not_coordinator",
            "coordinator_load_in_progress",
            "concurrent_transactions",
            "not_enough_replicas",
        }
        assert end() == "not_coordinator"
        assert commit_offset(system.client, topic, 3) in retriable
        assert end() in retriable
        disk.is_full = False
        until(
            lambda: commit_offset(system.client, topic, 4) == "none", "offsets are committed again"
        )
        until(lambda: end() == "none", "the transaction ends")
        assert system.client.committed("g", topic) == 4
        assert system.client.values(topic, isolation=READ_COMMITTED) == [b"x"]


def test_clean_shutdown_flushes_waiting_appends(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk) as system:
        topic = system.client.create_topic("t")
        disk.gate.clear()
        system.begin(lambda: system.connect().produce(topic, [b"x"]))
        assert disk.held.wait(60)
        threading.Timer(0.2, disk.gate.set).start()
    with running(tmp_path) as system:
        assert system.broker.services.logs.was_clean
        assert system.client.values("t") == [b"x"]


# --- metadata changes -----------------------------------------------------------------------------

CHANGES: dict[str, tuple[int, Answer]] = {
    "create_topics": (
        5,
        {
            "topics": [
                {
                    "name": "new",
                    "num_partitions": 1,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [],
                }
            ],
            "timeout": 10_000,
            "validate_only": False,
        },
    ),
    "create_partitions": (
        1,
        {
            "topics": [{"name": "t", "count": 2, "assignments": None}],
            "timeout": 10_000,
            "validate_only": False,
        },
    ),
    "alter_configs": (
        1,
        {
            "resources": [
                {
                    "resource_type": 2,
                    "resource_name": "t",
                    "configs": [{"name": "retention.ms", "value": "9"}],
                }
            ],
            "validate_only": False,
        },
    ),
    "update_features": (
        1,
        {
            "timeout": 10_000,
            "feature_updates": [
                {"feature": "transaction.version", "max_version_level": 1, "upgrade_type": 2}
            ],
            "validate_only": False,
        },
    ),
    "metadata": (4, {"topics": [{"name": "auto"}], "allow_auto_topic_creation": True}),
}
"""All requests that change the metadata, except deletions."""


@pytest.mark.parametrize("api", CHANGES)
def test_metadata_change_waits_for_fsync_other_requests_do_not(tmp_path, api):
    version, body = CHANGES[api]
    with running(tmp_path) as system:
        system.client.create_topic("t")
        metadata = system.broker.services.metadata.partition
        before = metadata.log_end_offset
        system.disk.gate.clear()
        changing = system.begin(lambda: system.connect().call(api, version, **body))
        assert system.disk.held.wait(60)
        assert system.client.offset("t") == 0
        after = metadata.log_end_offset
        assert after > before
        assert not changing.done()
        system.disk.gate.set()
        expected = "unknown_topic_or_partition" if api == "metadata" else "none"
        assert set(errors_in(changing.result(60))) <= {"none", expected}
        assert metadata.recovery_point == after == metadata.log_end_offset


@pytest.mark.parametrize("kind", ["sync", "write"])
def test_failed_metadata_log_refuses_the_change_and_stops_the_broker(tmp_path, kind):
    """If the broker did not stop, it would use the refused change."""
    version, body = CHANGES["create_topics"]

    def broken(step: str, path: str) -> None:
        if step == kind and "__cluster_metadata" in path:
            raise OSError(errno.EIO, "Input/output error")

    lost: list[BrokerError] = []
    with running(tmp_path) as system:
        system.broker.on_lost = lost.append
        client = system.connect()
        system.disk.before = broken
        answer = client.call("create_topics", version, **body)
        assert set(errors_in(answer)) - {"none"} == {"kafka_storage_error"}
        until(lambda: lost, "the broker has to stop")
    (why,) = lost
    assert str(why).startswith("__cluster_metadata-0 is off line: ")
    assert not (tmp_path / ".kafka_cleanshutdown").exists()
    with running(tmp_path) as system:
        # The change was not acknowledged, so it may or may not exist.
        assert system.client.create_topic("after") == "after"


@pytest.mark.parametrize("kind", ["sync", "write"])
@pytest.mark.parametrize("api_version", [0, 4, 12, 13])
def test_metadata_with_auto_creation_is_answered_if_metadata_log_fails(tmp_path, kind, api_version):
    """Apache Kafka's controller creates the topic later, so a failure changes no response."""

    def broken(step: str, path: str) -> None:
        if step == kind and "__cluster_metadata" in path:
            raise OSError(errno.EIO, "Input/output error")

    with running(tmp_path) as system:
        system.broker.on_lost = lambda _why: None
        system.client.create_topic("t")
        system.disk.before = broken
        body = {"allow_auto_topic_creation": True} if api_version >= 4 else {}
        topics = [{"name": "t"}, {"name": "new"}, {"name": "newer"}]
        if api_version >= 10:
            topics = [{**topic, "topic_id": None} for topic in topics]
        answer = system.connect().call("metadata", api_version, topics=topics, **body)
        errors = {topic["name"]: topic["error_code"] for topic in answer["topics"]}
    unknown = "unknown_topic_or_partition"
    assert errors == {"t": "none", "new": unknown, "newer": unknown}
