"""Apache Kafka reads a preallocated log whose broker was killed in the middle of a segment."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fencepost.logcore.checkpoints import PARTITION_METADATA
from tests.oracle.test_our_files import COMPLAINT, FIRST_OF_A_SEGMENT
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, java_command
from tests.support.targets import SETTINGS

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(240),
]

SEGMENT_BYTES = 1 << 20
CONFIGS = {"preallocate": "true", "segment.bytes": str(SEGMENT_BYTES)}
VALUES = [b"%d " % number + b"x" * 150_000 for number in range(10)]


def test_preallocated_log_of_a_killed_broker_is_served_by_kafka(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "ours", SETTINGS).start()
    with Cluster(daemon.bootstrap) as cluster:
        cluster.create_topic("pre", configs=CONFIGS)
        for value in VALUES:
            assert cluster.produce("pre", [value])["error_code"] == "none"
    daemon.kill()
    logs = sorted((daemon.data_dir / "pre-0").glob("*.log"))
    assert len(logs) == 2
    assert [log.stat().st_size == SEGMENT_BYTES for log in logs] == [False, True]
    said = [dumped(logs[0]), dumped(logs[1], killed=True)]
    assert not COMPLAINT.search(said[0]), said[0]
    assert [offsets(dump) for dump in said] == [list(range(6)), list(range(6, 10))]

    kafka = Kafka(tmp_path, SETTINGS)
    kafka.start()
    assert kafka.child is not None
    try:
        with Cluster(kafka.bootstrap) as cluster:
            cluster.create_topic("pre", configs=CONFIGS)
        kafka.child.kill()
        place = kafka.data_dir / "pre-0"
        for path in place.iterdir():
            if path.name != PARTITION_METADATA:
                path.unlink()
        for log in logs:
            shutil.copy(log, place)
        kafka.start()
        with Cluster(kafka.bootstrap) as cluster:
            cluster.produce("pre", [b"more"])
            assert cluster.values("pre") == [*VALUES, b"more"]
    finally:
        kafka.child.kill()

    daemon.start()
    with Cluster(daemon.bootstrap) as cluster:
        assert cluster.values("pre") == VALUES
    daemon.stop()
    said = [dumped(log) for log in logs]
    assert not any(COMPLAINT.search(dump) for dump in said), said
    assert [offsets(dump) for dump in said] == [list(range(6)), list(range(6, 10))]
    assert all(log.stat().st_size < SEGMENT_BYTES for log in logs)


def dumped(path: Path, *, killed: bool = False) -> str:
    """Return the tool's output. The tool fails at the zeros, after it has printed all batches."""
    tool = "org.apache.kafka.tools.DumpLogSegments"
    done = subprocess.run(
        java_command(tool, "--deep-iteration", "--files", str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    assert bool(done.returncode) == killed, done.stdout
    assert ("Found record size 0 smaller than minimum" in done.stdout) == killed, done.stdout
    return FIRST_OF_A_SEGMENT.sub("", done.stdout)


def offsets(said: str) -> list[int]:
    return [int(offset) for offset in re.findall(r"^\| offset: (\d+) ", said, re.MULTILINE)]
