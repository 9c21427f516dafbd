"""The commands that find the producer of an open transaction, on any Kafka broker."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from fencepost import Broker
from fencepost.coordinator.daemon.in_thread import BrokerThread
from tests.support.batches import batch
from tests.support.cluster import GROUP, READ_COMMITTED, Cluster, unique
from tests.support.daemon import Daemon
from tests.support.faults import FaultyDisk
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer
from tests.wire.command_line import cli
from tests.wire.test_cli import rows
from tests.wire.test_consumer_protocol import member
from tests.wire.test_transactions_v2 import PASSING, Producer

JSON = ("--format", "json")
BROKER = 4
VERIFICATION = "transaction.partition.verification.enable"


@pytest.fixture
def topic(cluster):
    return cluster.create_topic(unique("blame"), 2)


@contextlib.contextmanager
def open_transaction(
    bootstrap: str, topic: str, count: int = 3, partition: int = 0
) -> Iterator[tuple[str, confluent_kafka.Producer]]:
    """Open a transaction with ``count`` records; yield its id and producer; then abort it."""
    name = unique("pipeline")
    with confluent_producer(bootstrap, transactional_id=name) as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(topic, b"%d" % number, partition=partition)
        producer.flush(60)
        yield name, producer
        producer.abort_transaction(60)


def set_verification(cluster: Cluster, value: str) -> None:
    answer = cluster.call(
        "incremental_alter_configs",
        1,
        resources=[
            {
                "resource_type": BROKER,
                "resource_name": "",
                "configs": [{"name": VERIFICATION, "config_operation": 0, "value": value}],
            }
        ],
        validate_only=False,
    )
    assert answer["responses"][0]["error_code"] == "none", answer


def hang(
    cluster: Cluster,
    topic: str,
    *,
    name: str | None = None,
    producer: tuple[int, int] | None = None,
) -> tuple[str, int]:
    """Write without AddPartitionsToTxn, so that the transaction hangs, as before KIP-890."""
    name = name or unique("hanging")
    producer_id, epoch = producer or cluster.init_producer(name)
    set_verification(cluster, "false")
    try:
        # A broker takes a moment to apply its new setting.
        until(
            lambda: (
                cluster.produce(
                    topic,
                    batch(
                        [b"stuck"],
                        producer_id=producer_id,
                        producer_epoch=epoch,
                        sequence=0,
                        transactional=True,
                        timestamp_ms=time.time_ns() // 1_000_000,
                    ),
                    transactional_id=name,
                )["error_code"]
                == "none"
            ),
            "a write without verification",
        )
    finally:
        set_verification(cluster, "true")
    return name, producer_id


@pytest.mark.slow
def test_list_is_filtered_by_age_and_pattern(bootstrap, topic):
    def listed(*options: str) -> list[object]:
        done = cli(bootstrap, "txns", "list", *options, "--format", "json")
        return [row["transactional_id"] for row in rows(done)]

    with open_transaction(bootstrap, topic) as (name, _):
        assert listed("--id-pattern", re.escape(name)) == [name]
        assert listed("--id-pattern", "nothing-.*-like-this") == []
        until(
            lambda: name in listed("--duration-filter", "1", "--state", "Ongoing"), "an age of 1 ms"
        )
        assert name not in listed("--duration-filter", "3600000")
    bad = cli(bootstrap, "txns", "list", "--id-pattern", "(", status=1)
    assert "--id-pattern: '(' is not a regular expression" in bad.stderr
    assert "INVALID_REGULAR_EXPRESSION" in bad.stderr


@pytest.mark.slow
def test_producers_lists_producer_state_of_each_partition(bootstrap, topic):
    with open_transaction(bootstrap, topic, partition=1) as (name, _):
        described = rows(cli(bootstrap, "txns", "describe", name, "--format", "json"))
        found = rows(cli(bootstrap, "txns", "producers", topic, "--format", "json"))
        assert [
            (row["partition"], row["producer_id"], row["epoch"], row["start_offset"])
            for row in found
        ] == [(1, described[0]["producer_id"], described[0]["epoch"], 0)]
        assert found[0]["last_sequence"] == 2
    producers = rows(cli(bootstrap, "txns", "producers", f"{topic}:1", "--format", "json"))
    assert [row["start_offset"] for row in producers] == [None]
    only = ("txns", "producers", f"{topic}:1", "--open", "--format", "json")
    assert rows(cli(bootstrap, *only)) == []
    cli(bootstrap, "txns", "producers", f"{topic}:7", status=1)
    cli(bootstrap, "txns", "producers", f"{topic}:x", status=2)


@pytest.mark.slow
def test_hanging_transaction_is_found_blamed_and_aborted(bootstrap, cluster, topic):
    name, producer_id = hang(cluster, topic)
    where = f"{topic}:0"
    find = ("txns", "find-hanging", "--topic", topic, "--max-transaction-timeout")
    assert cli(bootstrap, *find, "15").stdout == "no transaction hangs\n"
    found = rows(cli(bootstrap, *find, "0", "--format", "json", status=1))
    assert [(row["producer_id"], row["start_offset"]) for row in found] == [(producer_id, 0)]
    assert found[0]["reason"] == f"{name} is Empty"
    blamed = rows(cli(bootstrap, "txns", "blame", where, "--format", "json"))
    assert [(row["transactional_id"], row["behind"]) for row in blamed] == [(name, 1)]
    assert blamed[0]["hanging"] == f"{name} is Empty"

    tried = cli(bootstrap, "txns", "abort", where, "--start-offset", "0").stdout
    assert tried.startswith("would abort")
    assert cluster.lso(topic) == 0
    cli(bootstrap, "txns", "abort", where, "--start-offset", "1", status=1)
    by_id = ("--producer-id", str(producer_id), "--execute")
    done = cli(bootstrap, "txns", "abort", where, *by_id)
    assert done.stdout.startswith("aborted the transaction of producer")
    assert cluster.lso(topic) == cluster.offset(topic) == 2
    assert cli(bootstrap, *find, "0").stdout == "no transaction hangs\n"


@pytest.mark.slow
def test_hanging_transaction_shows_all_known_facts_of_its_producer(
    bootstrap, cluster, topic, target
):
    """The coordinator knows the transactional id of only one of the two transactions."""
    before = dt.datetime.now(dt.UTC)
    producer = cluster.init_producer(unique("hanging"))
    nobodys = cluster.init_producer()  # an idempotent producer has no transactional id
    cluster.produce(topic, [b"others"])
    name = unique("hanging")
    hang(cluster, topic, name=name, producer=cluster.init_producer(name))
    hang(cluster, topic, producer=nobodys)
    find = ("txns", "find-hanging", "--topic", topic, "--max-transaction-timeout", "0")
    # Only Fencepost records which client claimed a transactional id. An idempotent producer has no
    # transactional id.
    has_history = target.name == "fencepost"

    def listed() -> list[dict[str, Any]]:
        found = rows(cli(bootstrap, *find, *JSON, status=1))
        is_written = not has_history or any(row["client"] for row in found)
        return sorted(found, key=lambda row: row["start_offset"]) if is_written else []

    known, unknown = until(listed, "the broker has written the history")
    for row, start in ((known, 1), (unknown, 2)):
        assert (row["topic"], row["partition"], row["start_offset"]) == (topic, 0, start)
        assert (row["epoch"], row["coordinator_epoch"], row["last_sequence"]) == (0, -1, 0)
        since, last = (dt.datetime.fromisoformat(row[key]) for key in ("since", "last_write"))
        assert before - dt.timedelta(milliseconds=1) <= since == last <= dt.datetime.now(dt.UTC)
    assert (known["transactional_id"], known["reason"]) == (name, f"{name} is Empty")
    assert known["producer_id"] > producer[0]
    assert (unknown["producer_id"], unknown["transactional_id"]) == (nobodys[0], None)
    assert unknown["reason"] == "no coordinator knows this producer id"
    assert known["client"] == (["raw@127.0.0.1"] if has_history else [])
    assert (known["claimed"] is not None) == has_history
    assert (unknown["client"], unknown["claimed"]) == ([], None)
    table = cli(bootstrap, *find, status=1).stdout.splitlines()
    columns = ["START_OFFSET", "SINCE", "TRANSACTIONAL_ID", "CLIENT", "CLAIMED", "REASON"]
    assert table[0].split()[-6:] == columns
    for row in (known, unknown):
        where = ("txns", "abort", f"{topic}:0", "--producer-id", str(row["producer_id"]))
        cli(bootstrap, *where, "--execute")
    assert cluster.lso(topic) == cluster.offset(topic)


@pytest.mark.slow
def test_hanging_producer_with_expired_id_is_named_from_the_history(tmp_path):
    """The coordinator has dropped the expired id; the history names the id and its client."""
    expiring = {
        "transactional.id.expiration.ms": "1000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    }
    daemon = Daemon(tmp_path / "data", {**SETTINGS, **expiring}).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            topic = cluster.create_topic(unique("blame"))
            cluster.init_producer(unique("somebody"))
            name, producer_id = hang(cluster, topic)

            def is_gone() -> bool:
                listed = cluster.call("list_transactions", 0)["transaction_states"]
                return name not in {transaction["transactional_id"] for transaction in listed}

            until(is_gone, "the expiry")
            find = ("txns", "find-hanging", "--max-transaction-timeout", "0", *JSON)
            (found,) = rows(cli(daemon.bootstrap, *find, status=1))
            assert found["reason"] == "no coordinator knows this producer id"
            assert (found["producer_id"], found["transactional_id"]) == (producer_id, name)
            assert found["client"] == ["raw@127.0.0.1"]
            assert found["claimed"] is not None
            assert found["since"] == found["last_write"]
    finally:
        daemon.kill()


@pytest.mark.slow
def test_transaction_of_a_log_moved_without_transaction_state_hangs(tmp_path):
    """The log is moved without __transaction_state: only producer id and epoch are known."""
    first = Daemon(tmp_path / "first").start()
    try:
        with Cluster(first.bootstrap) as cluster:
            topic = cluster.create_topic(unique("moved"))
            producer = Producer(cluster, unique("owner")).init()
            assert producer.produce(topic, b"aborted") == "none"
            producer.end(commit=False)
            assert producer.produce(topic, b"open") == "none"
        first.stop()
    finally:
        first.kill()
    second = Daemon(tmp_path / "second")
    cli("", "log", "import", "--data-dir", str(second.data_dir), f"{first.data_dir}/{topic}-0")
    second.start()
    try:
        find = ("txns", "find-hanging", "--max-transaction-timeout", "0", *JSON)
        (found,) = rows(cli(second.bootstrap, *find, status=1))
        assert (found["producer_id"], found["epoch"]) == (producer.producer_id, producer.epoch)
        # The coordinator epoch is known from the marker of the previous transaction.
        assert found["coordinator_epoch"] >= 0
        assert (found["start_offset"], found["last_sequence"]) == (2, 0)
        assert (found["transactional_id"], found["client"], found["claimed"]) == (None, [], None)
        assert found["since"] is not None
        order = ("txns", "abort", f"{topic}:0", "--start-offset", "2", "--execute")
        cli(second.bootstrap, *order)
        with Cluster(second.bootstrap) as cluster:
            assert cluster.lso(topic) == cluster.offset(topic) == 4
    finally:
        second.kill()


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_hanging_transaction_names_members_of_its_pending_offsets(
    bootstrap, cluster, topic, protocol
):
    """The producer sent offsets of a group, but did not add the partition of its records."""
    source, group = cluster.create_topic(unique("source")), unique("copier")
    cluster.produce(source, [b"a"])
    begin = member if protocol == "consumer" else confluent_consumer
    given = (bootstrap, group, source) if protocol == "consumer" else (bootstrap,)
    conf = {"client_id": "copier-1"} | ({} if protocol == "consumer" else {"group_id": group})
    with begin(*given, **conf) as consumer:
        consumer.subscribe([source])
        assert consumer.poll(60) is not None
        name, producer_id = hang(cluster, topic)
        (listed,) = rows(cli(bootstrap, "txns", "producers", topic, "--open", *JSON))
        who = {"transactional_id": name, "producer_id": producer_id, "group_id": group}
        who["producer_epoch"] = listed["epoch"]
        added = until(lambda: settled(cluster.call("add_offsets_to_txn", 3, **who)), "the offsets")
        assert added["error_code"] == "none"
        place = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}
        as_member = {}
        if protocol == "consumer":
            asked = {"group_ids": [group], "include_authorized_operations": False}
            found = cluster.call("consumer_group_describe", 0, **asked)["groups"][0]["members"][0]
            as_member = {"member_id": found["member_id"], "generation_id": found["member_epoch"]}
        sent = cluster.call(
            "txn_offset_commit",
            3 if as_member else 2,
            **who,
            **as_member,
            topics=[{"name": source, "partitions": [{**place, "committed_metadata": ""}]}],
        )
        assert sent["topics"][0]["partitions"][0]["error_code"] == "none"
        find = ("txns", "find-hanging", "--topic", topic, "--max-transaction-timeout", "0")
        (found,) = rows(cli(bootstrap, *find, *JSON, status=1))
        table = cli(bootstrap, *find, status=1).stdout
    assert found["reason"] == f"{name} is Ongoing without this partition"
    assert [client.partition("@")[0] for client in found["client"]] == ["copier-1"]
    assert "copier-1@" in table
    ended = {k: v for k, v in who.items() if k != "group_id"}
    cluster.call("end_txn", 3, **ended, committed=False)
    where = ("txns", "abort", f"{topic}:0", "--producer-id", str(producer_id), "--execute")
    cli(bootstrap, *where)


def settled(answer: dict[str, Any]) -> dict[str, Any] | None:
    return None if answer["error_code"] in PASSING else answer


def test_ongoing_transaction_is_not_reported_as_hanging(bootstrap, cluster, topic):
    with open_transaction(bootstrap, topic) as (name, _):
        everywhere = rows(
            cli(
                bootstrap,
                *("txns", "find-hanging", "--topic", topic, "--format", "json"),
                *("--max-transaction-timeout", "0"),
            )
        )
        assert everywhere == []
        order = ("txns", "abort", f"{topic}:0", "--start-offset", "0")
        refused = cli(bootstrap, *order, "--execute", status=1)
        assert f"{name} is Ongoing" in refused.stderr
        assert cluster.lso(topic) == 0
        assert "would abort" in cli(bootstrap, *order, "--force").stdout


def test_terminate_aborts_the_transaction_of_a_dead_producer(bootstrap, cluster, topic, target):
    name, group = unique("dead"), unique("group")
    cluster.coordinator(group, GROUP)
    dead = Producer(cluster, name).init()
    for partition in (0, 1):
        assert dead.produce(topic, b"open", partition) == "none"
    assert dead.commit_offset(group, topic, 7) == "none"
    find = ("txns", "find-hanging", "--topic", topic, "--max-transaction-timeout", "0")
    assert cli(bootstrap, *find).stdout == "no transaction hangs\n"
    aborting = ("txns", "abort", f"{topic}:0", "--start-offset", "0")
    assert "`txns terminate`" in cli(bootstrap, *aborting, status=1).stderr
    order = ("txns", "terminate", name)
    shown = cli(bootstrap, *order).stdout
    assert re.match(f"would abort the transaction of {name}, open since 20.*Z in __con", shown)
    assert f"{topic}:0, {topic}:1, and fence producer {dead.producer_id} epoch" in shown
    assert [cluster.lso(topic, partition) for partition in (0, 1)] == [0, 0]
    done = cli(bootstrap, *order, "--execute").stdout
    assert done.startswith(f"aborted the transaction of {name}, open since")
    for partition in (0, 1):
        until(lambda at=partition: cluster.lso(topic, at) == 2, "readers go on")
    assert cluster.values(topic, isolation=READ_COMMITTED) == []
    assert cluster.committed(group, topic, stable=True) == -1
    # The former producer is fenced; its successor is not.
    assert dead.produce(topic, b"late") == "invalid_producer_epoch"
    for again in (order, (*order, "--execute")):
        said = cli(bootstrap, *again).stdout
        assert said.startswith(f"{name} has no open transaction; its state is ")
    successor = Producer(cluster, name).init()
    assert successor.produce(topic, b"new") == "none"
    assert successor.end(commit=True)["error_code"] == "none"
    until(lambda: cluster.lso(topic) == cluster.offset(topic), "readers go on")
    assert cluster.values(topic, isolation=READ_COMMITTED) == [b"new"]
    if target.name == "fencepost":

        def found() -> list[dict[str, Any]]:
            history = rows(cli(bootstrap, "txns", "history", name, *JSON))
            return [row for row in history if row["what"] == "transaction-aborted"]

        (aborted,) = until(found, "the broker has written the history")
        assert (aborted["client"], aborted["host"]) == ("fencepost-cli", "127.0.0.1")
        assert aborted["trigger"] == "request InitProducerId"


def test_terminate_of_unknown_transactional_id_is_refused(bootstrap, cluster):
    cluster.init_producer(unique("somebody"))
    order = ("txns", "terminate", unique("nobody"))
    for given in (order, (*order, "--execute")):
        refused = cli(bootstrap, *given, status=1)
        assert "there is no transactional id" in refused.stderr


def test_terminate_in_prepare_abort_is_refused(tmp_path):
    """The disk fails when the abort marker is written, so the state stays PrepareAbort."""
    disk, name = FaultyDisk(), unique("stuck")
    with BrokerThread(lambda: Broker(tmp_path, config=SETTINGS, fs=disk)) as broker:
        with Cluster(broker.bootstrap) as cluster:
            topic = cluster.create_topic("bad")
            producer = Producer(cluster, name).init()
            assert producer.produce(topic, b"open") == "none"
        disk.write_fails = lambda path: "/bad-0/" in path
        order = ("txns", "terminate", name, "--execute")
        for timeout in ("2", "30"):
            words = (*order, "--timeout", timeout)
            refused = cli(broker.bootstrap, *words, status=1)
            assert f"{name} is PrepareAbort: its outcome is decided" in refused.stderr


def test_abort_without_partition_or_producer_is_a_usage_error(bootstrap, topic):
    cli(bootstrap, "txns", "abort", f"{topic}:0", status=2)
    cli(bootstrap, "txns", "abort", topic, "--start-offset", "0", status=2)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_blame_names_a_waiting_group_without_committed_offsets(bootstrap, cluster, topic, protocol):
    cluster.produce(topic, [b"before"], partition=1)
    group = unique("reader")
    with open_transaction(bootstrap, topic), open_transaction(bootstrap, topic, partition=1):
        if protocol == "consumer":
            reader = member(bootstrap, group, topic)
        else:
            reader = confluent_consumer(bootstrap, group_id=group)
        with reader as consumer:
            consumer.subscribe([topic])
            until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == 2, "owned")
            found = rows(cli(bootstrap, "txns", "blame", topic, *JSON))
            table = cli(bootstrap, "txns", "blame", topic).stdout
    for row, is_stuck in zip(found, (True, False), strict=True):
        (waits,) = row["groups"]
        assert (waits["group"], waits["committed"], waits["lag"]) == (group, None, None)
        assert waits["stuck"] is is_stuck, "there is a record before the second transaction"
    assert f"{group}:unknown!" in table


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_blame_names_the_producer_and_the_waiting_groups(bootstrap, cluster, topic, protocol):
    source = cluster.create_topic(unique("source"))
    group, reader = unique("copier"), unique("reader")
    cluster.produce(source, [b"a", b"b"])
    cluster.produce(topic, [b"before"])
    cluster.coordinator(reader, GROUP)
    with confluent_consumer(bootstrap, group_id=reader) as follower:
        committed = [confluent_kafka.TopicPartition(topic, 0, 1)]
        follower.commit(offsets=committed, asynchronous=False)
    if protocol == "consumer":
        copier = member(bootstrap, group, source, client_id="copier-1")
    else:
        copier = confluent_consumer(bootstrap, group_id=group, client_id="copier-1")
    with copier as consumer:
        consumer.subscribe([source])
        assert consumer.poll(60) is not None
        with open_transaction(bootstrap, topic) as (name, producer):
            offset = [confluent_kafka.TopicPartition(source, 0, 1)]
            producer.send_offsets_to_transaction(offset, consumer.consumer_group_metadata(), 60)
            found = rows(cli(bootstrap, "txns", "blame", topic, "--format", "json"))
            table = cli(bootstrap, "txns", "blame", f"{topic}:0").stdout
    pinned, free = found
    assert (pinned["stable"], pinned["end"], pinned["behind"]) == (1, 4, 3)
    assert (pinned["transactional_id"], pinned["state"], pinned["open"]) == (name, "Ongoing", 1)
    assert pinned["hanging"] is None
    assert pinned["since"] is not None
    assert [client.partition("@")[0] for client in pinned["client"]] == ["copier-1"]
    assert [(row["group"], row["lag"], row["stuck"]) for row in pinned["groups"]] == [
        (reader, 3, True)
    ]
    assert (free["behind"], free["transactional_id"], free["groups"]) == (0, None, [])
    assert f"{reader}:3!" in table


@pytest.mark.slow
def test_blame_names_groups_hidden_from_the_principal(tmp_path):
    config = {
        **SETTINGS,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker.in_thread(tmp_path, config=config) as broker, Cluster(broker.bootstrap) as client:
        topic = client.create_topic("t", 1)
        for group in ("secret", "waits"):
            client.coordinator(group, GROUP)
            with confluent_consumer(broker.bootstrap, group_id=group) as consumer:
                committed = [confluent_kafka.TopicPartition(topic, 0, 0)]
                consumer.commit(offsets=committed, asynchronous=False)
        only_owner = ("--allow-principal", "User:owner", "--operation", "Read", "--group", "secret")
        cli(broker.bootstrap, "acls", "add", *only_owner)
        with open_transaction(broker.bootstrap, topic):
            told = cli(broker.bootstrap, "txns", "blame", topic, *JSON)
    (row,) = rows(told)
    assert [group["group"] for group in row["groups"]] == ["waits"]
    assert row["hidden_groups"] == ["secret"]
    assert "may not describe: secret" in told.stderr
