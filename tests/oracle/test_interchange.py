"""Partition directories move between Fencepost and Apache Kafka, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.conftest import Written
from tests.oracle.interchange import (
    BROKER,
    PARTITIONS,
    SMALL,
    continue_producing,
    coordinators,
    fencepost,
    fingerprint,
    released_records_are_acquired_again,
)
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka
from tests.support.waits import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(1200),
]

INTERNAL = ("__consumer_offsets", "__transaction_state", "__share_group_state")


def assert_same(seen: dict[str, Any], expected: dict[str, Any], *, kafkas: int) -> None:
    """Compare two fingerprints, of which the one with the index ``kafkas`` is Apache Kafka's.

    Kafka searches for a timestamp in only one segment: the first segment whose largest timestamp is
    not below the given timestamp. If compaction or DeleteRecords has removed the record, Kafka
    finds no record, whereas Fencepost searches the next segments. Kafka's largest timestamp may
    belong to a deleted record; Fencepost's always belongs to a record that exists.
    """
    for name, wanted in expected.items():
        pair = seen[name], wanted
        times = list(zip(*(side["times"] for side in pair), strict=True))
        if name in {"table-0", "trimmed-0"}:
            times = [both for both in times if both[kafkas] != (-1, -1)]
        assert all(one == other for one, other in times), times
        left_out = {"times", "max timestamp"} if name == "trimmed-0" else {"times"}
        rest = [{key: value for key, value in side.items() if key not in left_out} for side in pair]
        assert rest[0] == rest[1], name


def partitions_of(data_dir: Path, *topics: str) -> list[Path]:
    return [path for topic in topics for path in sorted(data_dir.glob(f"{topic}-[0-9]*"))]


@pytest.fixture(params=["killed", "stopped"])
def imported(request: pytest.FixtureRequest, by_kafka: Written, tmp_path: Path) -> Iterator[Daemon]:
    """Yield a daemon with the imported directories of Apache Kafka."""
    daemon = Daemon(tmp_path / "data", BROKER)
    source = by_kafka.images[request.param]
    fencepost(
        "log",
        "import",
        "--data-dir",
        daemon.data_dir,
        *partitions_of(source, *PARTITIONS, *INTERNAL),
        "--config",
        "offsets.topic.num.partitions=4",
        "--config",
        "share.coordinator.state.topic.num.partitions=4",
    )
    yield daemon.start()
    assert daemon.child is not None
    daemon.child.kill()


def test_partitions_of_kafka_are_served_by_fencepost(imported: Daemon, by_kafka: Written) -> None:
    with Cluster(imported.bootstrap) as cluster:
        assert_same(fingerprint(cluster), by_kafka.records, kafkas=1)
        assert coordinators(cluster) == by_kafka.coordinators
        released_records_are_acquired_again(cluster)
        continue_producing(cluster, by_kafka.producer)
        # A new producer gets a producer id that Kafka has not given out.
        assert cluster.init_producer()[0] > by_kafka.producer["producer_id"]
        # InitProducerId aborts the transaction that was still open on Kafka.
        cluster.init_producer("open")
        until(lambda: cluster.lso("txn", 1) == cluster.offset("txn", 1), "the end of it")
    imported.stop()
    imported.start()
    with Cluster(imported.bootstrap) as cluster:
        assert fingerprint(cluster)["table-0"]["batches"] == by_kafka.records["table-0"]["batches"]


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_partitions_of_fencepost_are_served_by_kafka(
    by_fencepost: Written, tmp_path: Path, end: str
) -> None:
    kafka = Kafka(tmp_path, {**BROKER, "log.cleaner.enable": "false"})
    kafka.start()
    assert kafka.child is not None
    try:
        with Cluster(kafka.bootstrap) as cluster:
            for topic, partitions in PARTITIONS.items():
                compacted = {"cleanup.policy": "compact"} if topic == "table" else {}
                cluster.create_topic(topic, partitions, {**SMALL, **compacted})
        kafka.child.terminate(deadline_s=60)
        fencepost(
            "log",
            "export",
            "--data-dir",
            by_fencepost.images[end],
            "--to",
            kafka.data_dir,
            *PARTITIONS,
        )
        kafka.start()
        with Cluster(kafka.bootstrap) as cluster:
            until(lambda: all(cluster.leaders(t) == n for t, n in PARTITIONS.items()), "leaders")
            assert_same(fingerprint(cluster), by_fencepost.records, kafkas=0)
            continue_producing(cluster, by_fencepost.producer)
        complaints = [
            line
            for line in kafka.child.lines
            # The test sends the sequence gap on purpose.
            if "OutOfOrderSequence" not in line
            and "Error processing append operation" not in line
            and re.search(r"corrupt|invalid|Error|inconsisten", line, re.IGNORECASE)
        ]
        assert not complaints, "\n".join(complaints[:20])
    finally:
        kafka.child.kill()
