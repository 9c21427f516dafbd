"""Sealed segments are flushed in the background, and need no recovery after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost.logcore.checkpoints import (
    LEADER_EPOCH_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_offsets,
)
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.partition import Partition
from fencepost.logcore.verify import verify_partition
from tests.support.cluster import EARLIEST, LATEST, Cluster
from tests.support.daemon import Daemon
from tests.support.faults import FaultyDisk
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.unit.coordinator.on_faulty_disk import Running, running

NEVER = {"flush_messages": str(2**63 - 1)}
SMALL = {"segment.bytes": str(1 << 20)}
VALUE = b"x" * 500_000
"""Two of these values fill a segment."""


def fill(client: Cluster, topic: str, segments: int) -> None:
    for _ in range(2 * segments):
        assert client.produce(topic, [VALUE])["error_code"] == "none"


def checkpointed(data_dir: Path, topic: str) -> int:
    offsets = read_offsets(OsFileSystem(), str(data_dir), RECOVERY_POINT_CHECKPOINT)
    return offsets.get((topic, 0), 0)


def test_flipped_bit_in_flushed_segment_costs_no_other_record_after_a_kill(tmp_path):
    """This runs on a real daemon with default settings."""
    daemon = Daemon(tmp_path / "data", SETTINGS).start()
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic("t", 1, SMALL)
        fill(cluster, topic, 6)
        until(lambda: checkpointed(daemon.data_dir, topic) == 10, "the sealed segments are on disk")
    daemon.kill()
    logs = sorted((daemon.data_dir / "t-0").glob("*.log"))
    assert len(logs) == 6
    raw = bytearray(logs[1].read_bytes())
    raw[len(raw) // 4] ^= 1
    logs[1].write_bytes(raw)
    daemon.start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            assert cluster.offset(topic, 0, EARLIEST) == 0
            assert cluster.offset(topic, 0, LATEST) == 12
            # The other records of the log can be read.
            assert len(cluster.fetch(topic, offset=3)["records"]) > len(VALUE)
    finally:
        daemon.stop()


def partition_of(system: Running, topic: str) -> Partition:
    found = system.broker.services.logs.find_open((topic, 0))
    assert found is not None
    return found


def of_topic(topic: str) -> Callable[[str], bool]:
    return lambda path: f"/{topic}-0/" in path


def test_appends_do_not_wait_for_flush_of_sealed_segments(tmp_path):
    """Neither appends to the topic nor other topics' flushes wait for the flush."""
    with running(tmp_path) as system:
        slow = system.client.create_topic("slow", 1, {**SMALL, "flush.messages": str(2**63 - 1)})
        quick = system.client.create_topic("quick")
        system.disk.is_gated = of_topic(slow)
        system.disk.gate.clear()
        fill(system.client, slow, 4)
        assert system.disk.held.wait(60)
        assert system.client.produce(quick, [b"x"])["error_code"] == "none"
        assert ("sync", quick) in system.disk.of_logs(quick)
        partition = partition_of(system, slow)
        assert (partition.recovery_point, partition.high_watermark) == (0, 8)
        assert not system.broker.services.flusher.sealed.is_idle
        system.disk.gate.set()
        until(lambda: partition.recovery_point == 6, "the recovery point is at the active segment")
        until(lambda: checkpointed(tmp_path, slow) == 6, "and is written down")
        until(lambda: system.broker.services.flusher.sealed.is_idle, "nothing is left to do")


@pytest.mark.parametrize("how", ["the topic is deleted", "and made anew", "the broker stops"])
def test_flush_of_sealed_segments_ends_well_on_topic_deletion_or_shutdown(tmp_path, how):
    with running(tmp_path, **NEVER) as system:
        topic = system.client.create_topic("t", 1, SMALL)
        system.disk.is_gated = of_topic(topic)
        system.disk.gate.clear()
        fill(system.client, topic, 3)
        assert system.disk.held.wait(60)
        if how == "the broker stops":
            # Stopping must wait, because the thread may still use the files.
            threading.Timer(0.2, system.disk.gate.set).start()
        else:
            answer = system.client.call("delete_topics", 3, topic_names=[topic], timeout=10_000)
            assert answer["responses"][0]["error_code"] == "none"
            if how == "and made anew":
                system.client.create_topic("t", 1, SMALL)
                fill(system.client, topic, 1)
            system.disk.gate.set()
            until(lambda: system.broker.services.flusher.sealed.is_idle, "the flush has ended")
            assert not system.broker.services.logs.is_offline(topic, 0)
            assert not any(".tmp" in path.name for path in tmp_path.glob("t-0/*"))
    with running(tmp_path) as system:
        assert system.broker.services.logs.was_clean
        ends = {"the topic is deleted": None, "and made anew": 2, "the broker stops": 6}
        found = system.broker.services.logs.find("t", 0)
        assert (found and found.log_end_offset) == ends[how]


def test_failed_fsync_of_sealed_segment_takes_its_partition_offline(tmp_path):
    disk = FaultyDisk()
    with running(tmp_path, disk, **NEVER) as system:
        topic, other = (system.client.create_topic(name, 1, SMALL) for name in ("t", "other"))
        disk.sync_fails = of_topic(topic)
        disk.gate.clear()
        fill(system.client, topic, 2)
        disk.gate.set()
        until(lambda: system.broker.services.logs.is_offline(topic, 0), "it is off line")
        assert system.client.produce(topic, [b"x"])["error_code"] == "kafka_storage_error"
        fill(system.client, other, 2)
        until(lambda: partition_of(system, other).recovery_point == 2, "the other one is on disk")
        disk.sync_fails = lambda _: False
    with running(tmp_path) as system:
        assert not system.broker.services.logs.was_clean
        assert system.client.offset(topic) == 4


def test_sealed_segments_unflushed_before_a_kill_are_flushed_after_start(tmp_path):
    daemon = Daemon(tmp_path / "data", SETTINGS).start()
    with Cluster(daemon.bootstrap) as cluster:
        topic = cluster.create_topic("t", 1, SMALL)
        fill(cluster, topic, 4)
    daemon.kill()
    (daemon.data_dir / RECOVERY_POINT_CHECKPOINT).unlink(missing_ok=True)
    with running(daemon.data_dir, **NEVER) as system:
        assert system.client.offset(topic) == 8
        until(
            lambda: partition_of(system, topic).recovery_point == 6, "the sealed ones are on disk"
        )
        until(lambda: checkpointed(daemon.data_dir, topic) == 6, "and it is written down")


@pytest.mark.slow
def test_partition_directory_verifies_without_problems_after_a_kill(tmp_path):
    """The first flush writes the leader epochs; until then, a restarted broker rebuilds them."""
    daemon = Daemon(tmp_path / "data", SETTINGS).start()
    with Cluster(daemon.bootstrap) as cluster:
        few, many = cluster.create_topic("few"), cluster.create_topic("many", 1, SMALL)
        assert cluster.produce(few, [b"x"])["error_code"] == "none"
        fill(cluster, many, 3)
        until(lambda: checkpointed(daemon.data_dir, many) == 4, "the sealed segments are on disk")
    daemon.kill()
    fs, directory = OsFileSystem(), str(daemon.data_dir / "many-0")
    assert not (daemon.data_dir / "few-0" / LEADER_EPOCH_CHECKPOINT).exists()
    assert not list(verify_partition(fs, str(daemon.data_dir / "few-0")))
    assert not list(verify_partition(fs, directory))
    # The checkpoint of a flushed log must exist.
    (daemon.data_dir / "many-0" / LEADER_EPOCH_CHECKPOINT).unlink()
    assert [row["problem"] for row in verify_partition(fs, directory)] == ["the file is missing"]
