"""Apache Kafka's DumpLogSegments reads every file of Fencepost without a complaint.

The tool always exits with status 0, so the test checks its output.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cluster import GROUP, Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import run_tool
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.clients import confluent_consumer, confluent_producer, drain, poll_until
from tests.wire.test_transactions_v2 import Producer

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("java_tools")]

COMPLAINT = re.compile(
    r"isvalid: false|mismatch|out of order|non-consecutive|invalid bytes|corrupt|outdated"
    r"|exception|error|could not|unknown|\bfail",
    re.IGNORECASE,
)
"""A pattern of all complaints of the tool."""

FIRST_OF_A_SEGMENT = re.compile(
    r"^Non-consecutive offsets in \S*?/0*(\d+)\.log\n  -1 is followed by \1$", re.MULTILINE
)
"""The tool expects each segment to begin at offset 0, even a segment from Apache Kafka."""

KINDS = (".log", ".index", ".timeindex", ".txnindex", ".snapshot")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SEGMENT_BYTES = 1 << 20


def write_everything(daemon: Daemon, cluster: Cluster) -> None:
    """Write rolled segments, every codec, TV1 and TV2 transactions, group state and offsets."""
    small = {"segment.bytes": str(SEGMENT_BYTES), "index.interval.bytes": "1024"}
    for codec in CODECS:
        cluster.create_topic(f"plain-{codec}", configs=small)
        with confluent_producer(
            daemon.bootstrap, compression_type=codec, linger_ms=5, batch_size=20_000
        ) as producer:
            for i in range(600):
                # Hex digits compress to half; librdkafka sends incompressible data uncompressed.
                text = os.urandom(2500).hex()
                producer.produce(f"plain-{codec}", text, b"%d" % i, headers=[("h", b"v")])
                producer.poll(0)
    cluster.create_topic("txn", 2, configs=small)
    cluster.coordinator("group", GROUP)
    modern = Producer(cluster, "modern").init()
    for number in range(12):
        for partition in range(2):
            assert modern.produce("txn", os.urandom(200_000), partition) == "none"
        assert modern.commit_offset("group", "txn", number) == "none"
        modern.end(number % 3 != 0)
    with confluent_producer(daemon.bootstrap, transactional_id="classic") as classic:
        classic.init_transactions(60)
        for number in range(4):
            classic.begin_transaction()
            classic.produce("txn", os.urandom(100_000), partition=0)
            classic.flush(60)
            (classic.commit_transaction if number % 2 else classic.abort_transaction)(20)
        with confluent_consumer(daemon.bootstrap, group_id="members") as consumer:
            consumer.subscribe(["plain-none"])
            drain(consumer, 100)
            consumer.commit(asynchronous=False)
            poll_until([consumer], consumer.assignment, "assignment")
        # One transaction stays open: it must be in the snapshot and the indexes.
        classic.begin_transaction()
        classic.produce("txn", b"open", partition=1)
        classic.flush(60)
        until(lambda: cluster.lso("txn", 1) < cluster.offset("txn", 1), "an open transaction")
        daemon.stop()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a daemon after a clean stop."""
    daemon = Daemon(tmp_path_factory.mktemp("files") / "data", SETTINGS).start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            write_everything(daemon, cluster)
    finally:
        assert daemon.child is not None
        daemon.child.kill()
    return daemon.data_dir


def files(data_dir: Path, *kinds: str, topic: str = "*") -> list[str]:
    found = [str(f) for kind in kinds for f in sorted(data_dir.glob(f"{topic}-*/*{kind}"))]
    assert found, f"no {kinds} of {topic}"
    return found


def dump(paths: list[str], *options: str) -> str:
    """Return the tool's output. Complaints fail the test, with the line before each of them."""
    said = run_tool("org.apache.kafka.tools.DumpLogSegments", *options, "--files", ",".join(paths))
    lines = [
        line
        for line in FIRST_OF_A_SEGMENT.sub("", said).splitlines()
        if not line.startswith(("Dumping ", "WARNING: A "))
    ]
    complaints = [
        "\n".join(lines[max(number - 1, 0) : number + 1])
        for number, line in enumerate(lines)
        if COMPLAINT.search(_without_payload(line))
    ]
    assert not complaints, "\n".join(complaints[:20])
    return said


def _without_payload(line: str) -> str:
    # Record keys and values are arbitrary bytes of the test.
    return re.sub(r"(payload|key): .*", "", line)


def test_data_directory_has_every_kind_of_file(data_dir: Path) -> None:
    for kind in KINDS:
        assert files(data_dir, kind, topic="txn")
    assert len(files(data_dir, ".log", topic="txn")) > 2, "no segment was rolled"


def test_logs_are_valid_for_dump_log_segments(data_dir: Path) -> None:
    said = dump(files(data_dir, ".log", topic="[!_]*"), "--deep-iteration")
    codecs = Counter(re.findall(r"compresscodec: (\w+)", said))
    assert {"none", "gzip", "snappy", "lz4", "zstd"} <= codecs.keys()
    assert "isTransactional: true" in said
    assert re.search(r"endTxnMarker: COMMIT", said)
    assert re.search(r"endTxnMarker: ABORT", said)
    assert said.count("isvalid: true") > 100


@pytest.mark.parametrize("check", ["--verify-index-only", "--index-sanity-check"])
def test_indexes_match_their_logs(data_dir: Path, check: str) -> None:
    said = dump(files(data_dir, ".index", ".timeindex"), check)
    if check == "--index-sanity-check":
        good = said.count("passed sanity check") + said.count("is empty.")
        assert good == len(files(data_dir, ".index", ".timeindex"))


def test_indexes_are_read_entry_by_entry(data_dir: Path) -> None:
    said = dump(files(data_dir, ".index", ".timeindex", topic="plain-none"))
    assert said.count("offset: ") > 10
    assert said.count("timestamp: ") > 5


def test_transaction_indexes_list_the_aborted_transactions(data_dir: Path) -> None:
    dump(files(data_dir, ".txnindex"))
    said = dump(files(data_dir, ".txnindex", topic="txn"))
    entries = re.findall(r"producerId: (\d+) firstOffset: (\d+) lastOffset: (\d+)", said)
    # Of the TV2 producer's twelve transactions four are aborted, each in both partitions. Of the
    # TV1 producer's four transactions two are aborted, each in one partition.
    assert len(entries) == 4 * 2 + 2
    assert all(int(first) < int(last) for _, first, last in entries)


def test_producer_snapshots_list_the_producers(data_dir: Path) -> None:
    said = dump(files(data_dir, ".snapshot", topic="txn"))
    assert re.search(r"producerId: \d+ producerEpoch: \d+", said)
    assert re.search(r"currentTxnFirstOffset: OptionalLong\[\d+\]", said) or re.search(
        r"currentTxnFirstOffset: (Some\()?\d+", said
    )


def test_group_records_are_decoded(data_dir: Path) -> None:
    said = dump(files(data_dir, ".log", topic="__consumer_offsets"), "--offsets-decoder")
    assert '"group":"members"' in said
    assert '"topic":"txn"' in said


def test_transaction_records_are_decoded(data_dir: Path) -> None:
    said = dump(files(data_dir, ".log", topic="__transaction_state"), "--transaction-log-decoder")
    assert '"transactionalId":"modern"' in said
    assert '"transactionalId":"classic"' in said


def test_leader_epoch_checkpoints_have_their_declared_size(data_dir: Path) -> None:
    found = [str(f) for f in data_dir.glob("*/leader-epoch-checkpoint")]
    assert found
    for file in found:
        lines = Path(file).read_text().splitlines()
        assert lines[0] == "0"
        assert int(lines[1]) == len(lines) - 2
