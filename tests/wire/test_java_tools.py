"""Apache Kafka's own command-line tools with Java clients, including TV2 producers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fencepost.coordinator.runtime.key_partition import partition_for
from tests.support.cluster import READ_COMMITTED, Cluster, unique
from tests.support.kafka import run_tool
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("java_tools")]


def events(text: str) -> list[dict[str, object]]:
    """Return the JSON lines of a tool's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_java_broker_api_versions_tool_reads_every_api(bootstrap: str) -> None:
    said = run_tool(
        "org.apache.kafka.tools.BrokerApiVersionsCommand", "--bootstrap-server", bootstrap
    )
    for name in (
        "Produce(0): 0 to",
        "Fetch(1): 4 to",
        "EndTxn(26): 0 to 5",
        "JoinGroup(11): 0 to 9",
    ):
        assert name in said
    assert "ERROR" not in said


def test_exactly_once_copy_by_java(bootstrap: str, cluster: Cluster, tmp_path: Path) -> None:
    """VerifiableProducer writes; TransactionalMessageCopier copies, and aborts at random."""
    source, target = (
        cluster.create_topic(unique("java-in")),
        cluster.create_topic(unique("java-out")),
    )
    count = 30_000
    produced = events(
        run_tool(
            "org.apache.kafka.tools.VerifiableProducer",
            *("--bootstrap-server", bootstrap, "--topic", source, "--max-messages", str(count)),
            *("--value-prefix", "1000000000"),
        )
    )
    assert sum(e["name"] == "producer_send_success" for e in produced) == count
    copied = events(
        run_tool(
            "org.apache.kafka.tools.TransactionalMessageCopier",
            *("--broker-list", bootstrap, "--input-topic", source, "--output-topic", target),
            *("--input-partition", "0", "--consumer-group", unique("copier")),
            # One in three transactions is aborted, so almost certainly some of the thirty are. Each
            # transaction is larger than a batch: an abort drops records that wait for linger.ms.
            *("--transactional-id", unique("copier"), "--transaction-size", "1000"),
            *("--max-messages", str(count), "--enable-random-aborts", "--use-group-metadata"),
        )
    )
    assert copied[-1]["remaining"] == 0
    until(lambda: cluster.lso(target) == cluster.offset(target), "every transaction has ended")
    wanted = cluster.values(source)
    assert len(wanted) == count
    assert cluster.values(target, isolation=READ_COMMITTED) == wanted
    assert len(cluster.values(target)) > count, "no transaction was aborted"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_java_consumer_group_commits_and_is_described_by_the_tool(
    bootstrap: str, cluster: Cluster, protocol: str
) -> None:
    topic, group = cluster.create_topic(unique("java-group"), 2), unique("g")
    for partition in range(2):
        cluster.produce(topic, [b"%d" % i for i in range(50)], partition=partition)
    said = events(
        run_tool(
            "org.apache.kafka.tools.VerifiableConsumer",
            *("--bootstrap-server", bootstrap, "--topic", topic, "--group-id", group),
            *("--max-messages", "100", "--reset-policy", "earliest"),
            *("--group-protocol", protocol),
        )
    )
    assigned = [e for e in said if e["name"] == "partitions_assigned"]
    assert len(assigned) == 1
    listed = cluster.call("list_groups", 5, states_filter=[], types_filter=[protocol])
    assert group in {found["group_id"] for found in listed["groups"]}
    assert sum(e["count"] for e in said if e["name"] == "records_consumed") == 100
    assert [cluster.committed(group, topic, p) for p in range(2)] == [50, 50]
    shown = run_tool(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        *("--bootstrap-server", bootstrap, "--describe", "--group", group),
    )
    rows = [line.split() for line in shown.splitlines() if line.startswith(group)]
    assert sorted((row[1], row[2], row[3], row[4], row[5]) for row in rows) == [
        (topic, "0", "50", "50", "0"),
        (topic, "1", "50", "50", "0"),
    ]


def test_java_transactional_perf_producer_writes_every_record(
    bootstrap: str, cluster: Cluster
) -> None:
    topic = cluster.create_topic(unique("java-perf"))
    said = run_tool(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", "3000", "--record-size", "100"),
        *("--throughput", "-1", "--bootstrap-server", bootstrap),
        *("--transactional-id", unique("perf"), "--transaction-duration-ms", "20"),
    )
    assert "3000 records sent" in said
    until(lambda: cluster.lso(topic) == cluster.offset(topic), "every transaction has ended")
    assert len(cluster.values(topic, isolation=READ_COMMITTED)) == 3000


def test_hanging_transaction_is_aborted_by_the_java_tool(bootstrap: str, cluster: Cluster) -> None:
    from tests.wire.test_transactions_v2 import Producer

    topic = cluster.create_topic(unique("java-hang"))
    producer = Producer(cluster, unique("id")).init()
    assert producer.produce(topic, b"stuck") == "none"
    tool = ("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", bootstrap)
    described = run_tool(*tool, "describe", "--transactional-id", producer.name)
    assert "Ongoing" in described
    assert f"{topic}-0" in described
    run_tool(*tool, "abort", "--topic", topic, "--partition", "0", "--start-offset", "0")
    assert cluster.lso(topic) == cluster.offset(topic) == 2
    assert cluster.values(topic, isolation=READ_COMMITTED) == []


def test_coordinator_records_parse_in_java(bootstrap: str, cluster: Cluster) -> None:
    from tests.wire.test_transactions_v2 import Producer

    topic, group = cluster.create_topic(unique("java-parse")), unique("g")
    cluster.coordinator(group, 0)
    producer = Producer(cluster, unique("id")).init()
    places = {
        name: partition_for(key, int(SETTINGS[setting]))
        for name, key, setting in (
            ("__transaction_state", producer.name, "transaction.state.log.num.partitions"),
            ("__consumer_offsets", group, "offsets.topic.num.partitions"),
        )
    }
    begin = {name: cluster.offset(name, index) for name, index in places.items()}
    assert producer.produce(topic, b"v") == "none"
    assert producer.commit_offset(group, topic, 1) == "none"
    producer.end(True)
    until(lambda: cluster.lso(topic) == 2, "the end of the transaction")
    for internal, formatter, wanted in (
        ("__transaction_state", "TransactionLogMessageFormatter", producer.name),
        ("__consumer_offsets", "OffsetsMessageFormatter", group),
    ):
        where = places[internal]
        # The tool ends after this number of records, so it need not wait for further records.
        count = sum(
            len(batch.values)
            for batch in cluster.read(internal, partition=where)
            if batch.base_offset >= begin[internal]
        )
        assert count > 0
        said = run_tool(
            "org.apache.kafka.tools.consumer.ConsoleConsumer",
            *("--bootstrap-server", bootstrap, "--topic", internal, "--partition", str(where)),
            *("--offset", str(begin[internal]), "--max-messages", str(count)),
            *("--formatter", f"org.apache.kafka.tools.consumer.{formatter}"),
            *("--timeout-ms", "60000"),
            *("--command-property", "exclude.internal.topics=false"),
        )
        assert wanted in said
        assert "unknown" not in said.lower()
