"""The real daemon on a full disk: a small tmpfs, if the test may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

SETTINGS = {
    "flush.messages": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.ms": "-1",
}
RECORD_BYTES = 5_000
"""Size of a record: more than a page, so that each append needs a new block."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(handle, bytes(4096)):
            pass
    os.close(handle)


def commit(client: Cluster, topic: str, offset: int) -> str:
    part = {"partition_index": 0, "committed_offset": offset, "committed_metadata": "m" * 4_000}
    answer = client.call(
        "offset_commit",
        7,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": topic, "partitions": [part]}],
    )
    return str(answer["topics"][0]["partitions"][0]["error_code"])


def test_full_disk_loses_no_record_and_needs_no_restart(small_disk: Path) -> None:
    daemon = Daemon(small_disk / "data", SETTINGS).start()
    acknowledged: list[bytes | None] = []
    with Cluster(daemon.bootstrap) as client:
        topic = client.create_topic("t")
        client.coordinator("g", 0)
        assert commit(client, topic, 1) == "none"

        def send() -> str:
            value = b"%06d" % len(acknowledged) + bytes(RECORD_BYTES)
            code = str(client.produce(topic, [value])["error_code"])
            if code == "none":
                acknowledged.append(value)
            return code

        assert send() == "none"
        filler = small_disk / "filler"
        fill(filler)
        answers = [send() for _ in range(10)]
        assert set(answers[-5:]) == {"kafka_storage_error"}
        commits = [commit(client, topic, 2 + at) for at in range(10)]
        assert set(commits[-5:]) <= {"not_coordinator", "coordinator_load_in_progress"}
        # Reads still work, and return exactly the acknowledged records.
        assert client.values(topic) == acknowledged
        filler.unlink()
        until(lambda: send() == "none", "records are taken again")
        until(lambda: commit(client, topic, 77) == "none", "offsets are taken again")
        assert client.values(topic) == acknowledged
    daemon.stop()
    daemon.start()
    with Cluster(daemon.bootstrap) as client:
        client.coordinator("g", 0)
        assert client.values("t") == acknowledged
        assert client.committed("g", "t") == 77
    daemon.stop()
    assert daemon.child is not None
    said = [line for line in daemon.child.lines if "off line" in line]
    assert said == []
