"""Producer ids that Apache Kafka has allocated, according to its metadata log.

``fencepost log export`` warns if exported producer ids collide with them.
"""

from __future__ import annotations

import struct
from pathlib import Path

from click.testing import CliRunner

from fencepost.cli import main
from fencepost.coordinator.daemon.broker import Broker
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.fs import OsFileSystem
from fencepost.tools.kafka_metadata import METADATA_DIRECTORY, next_producer_id
from tests.support.batches import batch
from tests.support.cluster import Cluster

FS = OsFileSystem()


def block(next_id: int) -> bytes:
    """Return a ``ProducerIdsRecord`` like Kafka's controller: varints, fields, no tags."""
    return b"\x01\x0f\x00" + struct.pack(">iqq", 1, 5, next_id) + b"\x00"


def metadata(root: Path, name: str, *values: bytes) -> None:
    path = root / METADATA_DIRECTORY
    path.mkdir(parents=True, exist_ok=True)
    records = [LogRecord(at, 1_000, None, value) for at, value in enumerate(values)]
    (path / name).write_bytes(bytes(encode_batch(records)))


def test_next_producer_id_is_the_highest_of_log_and_snapshot(tmp_path: Path) -> None:
    assert next_producer_id(FS, str(tmp_path)) is None
    metadata(tmp_path, "00000000000000000000.log", b"\x01\x0c\x00other")
    assert next_producer_id(FS, str(tmp_path)) == 0
    metadata(tmp_path, "00000000000000000000.log", block(1000), b"\x01\x0c\x00other", block(2000))
    assert next_producer_id(FS, str(tmp_path)) == 2000
    metadata(tmp_path, "00000000000000000099-0000000001.checkpoint", block(5000))
    assert next_producer_id(FS, str(tmp_path)) == 5000


def test_torn_end_of_kafkas_metadata_log_is_ignored(tmp_path: Path) -> None:
    metadata(tmp_path, "00000000000000000000.log", block(3000))
    log = tmp_path / METADATA_DIRECTORY / "00000000000000000000.log"
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:40])
    assert next_producer_id(FS, str(tmp_path)) == 3000


def test_export_warns_of_producer_ids_that_kafka_may_assign(tmp_path: Path) -> None:
    data, kafka = tmp_path / "data", tmp_path / "kafka"
    for root in (data, kafka):
        with Broker.in_thread(root) as broker, Cluster(broker.bootstrap) as cluster:
            cluster.create_topic("orders")
            cluster.create_topic("plain")
            for _ in range(2):  # the second of two ids is 1
                producer_id, epoch = cluster.init_producer()
            if root is data:
                sent = batch([b"x"], producer_id=producer_id, producer_epoch=epoch, sequence=0)
                assert cluster.produce("orders", sent)["error_code"] == "none"
            else:
                # A topic directory of Kafka without records.
                cluster.produce("orders", [b"x"])
            cluster.produce("plain", [b"x"])
    for log in (*kafka.glob("orders-0/*.log"), *kafka.glob("plain-0/*.log")):
        log.write_bytes(b"")

    def warned(topic: str) -> str:
        command = ["log", "export", topic, "--data-dir", data, "--to", kafka]
        command += ["--replace", "--execute"]
        result = CliRunner().invoke(main, [str(word) for word in command])
        assert result.exit_code == 0, result.output
        return result.stderr

    for path in (kafka / METADATA_DIRECTORY).iterdir():
        path.unlink()
    assert f"up to {producer_id}; " in warned("orders")
    assert "does not show which ids" in warned("orders")
    assert not warned("plain"), "no producer in it"
    metadata(kafka, "00000000000000000000.log", block(producer_id))
    assert f"next block of ids begins at {producer_id}." in warned("orders")
    metadata(kafka, "00000000000000000000.log", block(producer_id + 1))
    assert not warned("orders")
