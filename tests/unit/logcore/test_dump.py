"""Dumps of every kind of file, intact and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.logcore.batch import LogRecord
from fencepost.logcore.checkpoints import (
    CLEANER_CHECKPOINT,
    LEADER_EPOCH_CHECKPOINT,
    META_PROPERTIES,
    PARTITION_METADATA,
    MetaProperties,
    write_meta_properties,
    write_offsets,
)
from fencepost.logcore.compression import Codec
from fencepost.logcore.dump import dump_file, is_problem
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.fs import OsFileSystem
from tests.support.faults import MortalDisk
from tests.support.old_formats import encode_message_set
from tests.unit.logcore.compaction_driver import (
    commit_offsets,
    compact,
    end,
    fill_active,
    put,
    small,
)
from tests.unit.logcore.partition_driver import T0, marker, open_partition

FS = OsFileSystem()


def rows(path: Path, **options: object) -> list[dict[str, object]]:
    return list(dump_file(FS, str(path.parent), path.name, **options))


def problems(path: Path) -> list[object]:
    return [row["problem"] for row in rows(path, verify=True) if is_problem(row)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of a cleanly closed partition with every kind of file."""
    fs = MortalDisk()
    partition = open_partition(tmp_path, config=small(segment_bytes=2_000), fs=fs, leader_epoch=2)
    for turn in range(10):
        put(partition, [(b"k%d" % turn, b"v" * 100)], producer_id=7, now_ms=T0 + turn)
        put(partition, [(b"z", b"v" * 300)], codec=Codec.ZSTD, now_ms=T0 + turn)
    commit_offsets(partition, 1, [(b"k", b"bad")])
    marker(partition, 1, commit=False)
    fill_active(partition)
    put(partition, [(b"last", None)])
    partition.close()
    return Path(partition.log.directory)


def test_dump_of_intact_files_reports_no_problem(directory: Path) -> None:
    kinds = set()
    for path in sorted(directory.iterdir()):
        found = rows(path, verify=True, records=True)
        assert not [row for row in found if is_problem(row)], path.name
        kinds |= {row["kind"] for row in found}
    assert kinds == {
        "batch",
        "record",
        "offset-index",
        "time-index",
        "txn-index",
        "producer",
        "epoch",
        "identity",
    }


def test_dump_of_a_compacted_log_reports_no_problem(tmp_path: Path) -> None:
    partition = open_partition(tmp_path, config=small(), fs=MortalDisk())
    for turn in range(12):
        commit_offsets(partition, 1, [(b"k", b"%d" % turn)])
        end(partition, 1, commit=turn % 3 > 0)
        put(partition, [(b"k", None), (b"other", b"o" * 60)], producer_id=4)
    fill_active(partition)
    compact(partition)
    compact(partition, 0)
    for path in sorted(Path(partition.log.directory).iterdir()):
        assert not problems(path), path.name


def test_dump_shows_records_control_types_and_decoded_content(directory: Path) -> None:
    def decoder(record: LogRecord) -> dict[str, object] | None:
        return {"initial": record.key[:1]} if record.key == b"z" else None

    found = [
        row
        for path in sorted(directory.glob("*.log"))
        for row in rows(path, records=True, decoder=decoder)
    ]
    records = [row for row in found if row["kind"] == "record"]
    assert records[1]["decoded"] == {"initial": b"z"}
    assert "decoded" not in records[0]
    assert [
        (record["control"], record["coordinator_epoch"])
        for record in records
        if "control" in record
    ] == [("ABORT", 0)]
    assert records[-1]["value"] is None
    assert {row["codec"] for row in found if row["kind"] == "batch"} == {0, int(Codec.ZSTD)}


def test_dump_reports_a_decoder_error_as_a_problem(directory: Path) -> None:
    def decoder(record: LogRecord) -> None:
        raise InvalidRecordError("no such thing")

    found = rows(min(directory.glob("*.log")), verify=True, decoder=decoder)
    assert "no such thing" in {row.get("problem") for row in found}


def test_dump_reports_torn_and_corrupt_batches(directory: Path) -> None:
    path = min(directory.glob("*.log"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "torn batch" in str(problems(path)[-1])
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    assert "CRC" in str(problems(path)[-1])
    assert not [row for row in rows(path) if is_problem(row)]
    path.write_bytes(whole + whole[:200])
    assert "where" in str(problems(path)[0])
    path.write_bytes(whole + b"\x00" * 30)
    assert "30 bytes are left" in str(problems(path)[-1])


def test_dump_reports_damaged_index_entries(directory: Path) -> None:
    offsets = min(directory.glob("*.index"))
    whole = offsets.read_bytes()
    assert len(whole) >= 16
    offsets.write_bytes(whole + b"\x00" * 80)
    assert problems(offsets) == []
    offsets.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "no batch begins" in str(problems(offsets)[0])
    offsets.write_bytes(whole[:3] + bytes([whole[3] ^ 1]) + whole[4:])
    assert "ends with offset" in str(problems(offsets)[0])
    offsets.write_bytes(whole[8:16] + whole[:8])
    assert "follows" in str(problems(offsets)[0])
    offsets.write_bytes(whole[:-3])
    assert "bytes follow" in str(problems(offsets)[0])
    times = min(directory.glob("*.timeindex"))
    whole = times.read_bytes()
    times.write_bytes(whole[:7] + bytes([whole[7] ^ 1]) + whole[8:])
    assert "largest so far" in " ".join(map(str, problems(times)))
    times.write_bytes(whole[12:24] + whole[:12])
    assert len(problems(times)) >= 2
    min(directory.glob("*.log")).unlink()
    times.write_bytes(whole)
    assert "behind the log" in str(problems(times)[0])
    aborts = next(directory.glob("*.txnindex"))
    whole = aborts.read_bytes()
    aborts.write_bytes(whole[:9] + b"\x09" + whole[10:])
    assert "no marker of producer 9" in str(problems(aborts)[0])
    aborts.write_bytes(whole * 2)
    assert "follows" in str(problems(aborts)[0])
    aborts.write_bytes(whole[:-1])
    assert "inside an entry" in str(problems(aborts)[0])


def test_dump_reports_damaged_snapshots_checkpoints_and_metadata(
    tmp_path: Path, directory: Path
) -> None:
    snapshot = max(directory.glob("*.snapshot"))
    raw = snapshot.read_bytes()
    snapshot.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert "CRC" in str(problems(snapshot)[0])
    early = snapshot.with_name(f"{1:020d}.snapshot")
    early.write_bytes(raw)
    assert "behind the snapshot" in str(problems(early)[0])
    epochs = directory / LEADER_EPOCH_CHECKPOINT
    assert rows(epochs) == [{"kind": "epoch", "epoch": 2, "start_offset": 0}]
    epochs.write_text("0\n2\n3 5\n2 9\n")
    assert "follows" in str(problems(epochs)[0])
    epochs.write_text("0\n2\n3 5\n")
    assert len(problems(epochs)) == 1
    (directory / PARTITION_METADATA).write_text("version: 1")
    assert len(problems(directory / PARTITION_METADATA)) == 1
    write_offsets(FS, str(tmp_path), CLEANER_CHECKPOINT, {("orders", 0): 5})
    found = rows(tmp_path / CLEANER_CHECKPOINT)
    assert found == [{"kind": "checkpoint", "topic": "orders", "partition": 0, "offset": 5}]
    write_offsets(FS, str(tmp_path), CLEANER_CHECKPOINT, {("orders", 0): 5, ("orders", 1): -5})
    (problem,) = problems(tmp_path / CLEANER_CHECKPOINT)
    assert str(problem).startswith(f"{CLEANER_CHECKPOINT} holds -5, which is not from 0 to")
    write_meta_properties(FS, str(tmp_path), MetaProperties("c", 1, open_id(directory)))
    assert rows(tmp_path / META_PROPERTIES)[0]["cluster_id"] == "c"
    (tmp_path / META_PROPERTIES).write_text("version=7\n")
    assert len(problems(tmp_path / META_PROPERTIES)) == 1
    with pytest.raises(ValueError, match="not a log file"):
        rows(tmp_path / "notes.txt")


def open_id(directory: Path):
    import uuid

    return uuid.uuid5(uuid.NAMESPACE_URL, directory.name)


def test_dump_shows_batches_and_records_of_old_formats(tmp_path: Path) -> None:
    path = tmp_path / f"{0:020d}.log"
    records = [LogRecord(at, T0, b"k", b"v") for at in range(3)]
    old = encode_message_set(records[:2], 0) + encode_message_set(records[2:], 1, codec=Codec.GZIP)
    path.write_bytes(old)
    found = rows(path, verify=True, records=True)
    assert [row["magic"] for row in found if row["kind"] == "batch"] == [0, 0, 1]
    assert [row["offset"] for row in found if row["kind"] == "record"] == [0, 1, 2]
    assert not [row for row in found if is_problem(row)]


def test_dump_reads_swap_files(directory: Path) -> None:
    path = min(directory.glob("*.log"))
    path = path.rename(path.with_name(path.name + ".swap"))
    assert rows(path, verify=True)
    assert problems(path) == []
