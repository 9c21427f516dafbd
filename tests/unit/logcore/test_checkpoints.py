from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from fencepost.logcore.checkpoints import (
    CLEAN_SHUTDOWN,
    LOCK,
    META_PROPERTIES,
    PARTITION_METADATA,
    RECOVERY_POINT_CHECKPOINT,
    CheckpointError,
    MetaProperties,
    read_epochs,
    read_meta_properties,
    read_offsets,
    read_partition_metadata,
    take_clean_shutdown,
    uuid_from_text,
    uuid_to_text,
    write_clean_shutdown,
    write_epochs,
    write_meta_properties,
    write_offsets,
    write_partition_metadata,
)
from fencepost.logcore.fs import OsFileSystem

FS = OsFileSystem()
NAME = RECOVERY_POINT_CHECKPOINT
TOPIC_ID = uuid.UUID("3f1c2e5a-8d7b-4a90-b6f2-0123456789ab")


def test_offset_checkpoint_has_kafkas_text_format(tmp_path: Path) -> None:
    offsets = {("orders", 0): 17, ("a.b_c-d", 12): 0}
    write_offsets(FS, str(tmp_path), NAME, offsets)
    assert (tmp_path / NAME).read_text() == "0\n2\norders 0 17\na.b_c-d 12 0\n"
    assert read_offsets(FS, str(tmp_path), NAME) == offsets
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_missing_checkpoint_is_empty(tmp_path: Path) -> None:
    assert read_offsets(FS, str(tmp_path), NAME) == {}
    assert read_epochs(FS, str(tmp_path)) is None


@pytest.mark.parametrize(
    "text",
    [
        "0\n",
        "1\n0\n",
        "0\n2\na 0 1\n",
        "0\n0\na 0 1\n",
        "0\n1\na 0\n",
        "0\n1\na x 1\n",
        "0\nx\n",
    ],
)
def test_corrupt_offset_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(CheckpointError):
        read_offsets(FS, str(tmp_path), NAME)


def test_offset_checkpoint_with_binary_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError):
        read_offsets(FS, str(tmp_path), NAME)


def test_epoch_checkpoint_has_kafkas_text_format(tmp_path: Path) -> None:
    write_epochs(FS, str(tmp_path), [(0, 0), (3, 40)])
    assert (tmp_path / "leader-epoch-checkpoint").read_text() == "0\n2\n0 0\n3 40\n"
    assert read_epochs(FS, str(tmp_path)) == [(0, 0), (3, 40)]


def test_partition_metadata_has_kafkas_text_format(tmp_path: Path) -> None:
    assert read_partition_metadata(FS, str(tmp_path)) is None
    write_partition_metadata(FS, str(tmp_path), TOPIC_ID)
    text = (tmp_path / PARTITION_METADATA).read_text()
    assert text == "version: 0\ntopic_id: PxwuWo17SpC28gEjRWeJqw"
    assert read_partition_metadata(FS, str(tmp_path)) == TOPIC_ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version: 1\ntopic_id: PxwuWo17SpC28gEjRWeJqw",
        "version: 0",
        "version: 0\ntopic: PxwuWo17SpC28gEjRWeJqw",
        "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA",
        "version: 0\ntopic_id: PxwuWo17SpC28gEj",
        "version: 0\ntopic_id: Pxwu$o17SpC28gEjRWeJqw",
    ],
)
def test_corrupt_partition_metadata_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / PARTITION_METADATA).write_text(text)
    with pytest.raises(CheckpointError):
        read_partition_metadata(FS, str(tmp_path))


def test_uuid_round_trips_as_text_of_22_characters() -> None:
    for value in (TOPIC_ID, uuid.UUID(int=0), uuid.UUID(int=(1 << 128) - 1)):
        text = uuid_to_text(value)
        assert len(text) == 22
        assert uuid_from_text(text) == value


def test_written_meta_properties_are_read_back(tmp_path: Path) -> None:
    assert read_meta_properties(FS, str(tmp_path)) is None
    meta = MetaProperties("bXk6Y2x1c3Rlcl9fX19fXw", 1, TOPIC_ID)
    write_meta_properties(FS, str(tmp_path), meta)
    assert read_meta_properties(FS, str(tmp_path)) == meta


def test_meta_properties_written_by_kafka_are_read(tmp_path: Path) -> None:
    (tmp_path / META_PROPERTIES).write_text(
        "#\n#Sat Nov 21 09:00:00 UTC 2026\n"
        "cluster.id=abc\ndirectory.id=PxwuWo17SpC28gEjRWeJqw\nnode.id=4\nversion=1\n"
    )
    assert read_meta_properties(FS, str(tmp_path)) == MetaProperties("abc", 4, TOPIC_ID)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version=0\nbroker.id=1\n",
        "version=1\ncluster.id=a\n",
        "version=1\ncluster.id=a\nnode.id=x",
    ],
)
def test_corrupt_meta_properties_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / META_PROPERTIES).write_text(text)
    with pytest.raises(CheckpointError):
        read_meta_properties(FS, str(tmp_path))


def test_clean_shutdown_mark_is_taken_once(tmp_path: Path) -> None:
    assert not take_clean_shutdown(FS, str(tmp_path))
    write_clean_shutdown(FS, str(tmp_path))
    assert json.loads((tmp_path / CLEAN_SHUTDOWN).read_text()) == {"version": 0, "brokerEpoch": -1}
    assert take_clean_shutdown(FS, str(tmp_path))
    assert not take_clean_shutdown(FS, str(tmp_path))


def test_lock_is_exclusive_until_it_is_closed(tmp_path: Path) -> None:
    path = str(tmp_path / LOCK)
    handle = FS.lock(path)
    with pytest.raises(BlockingIOError):
        FS.lock(path)
    FS.close(handle)
    FS.close(FS.lock(path))


RECORD_LOCK = """\
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
    print("locked", flush=True)
    sys.stdin.read()
"""
"""Hold Java's lock in a separate process until the end of the process's input.

Exit status 3 means that another process holds the lock.
"""


def test_second_lock_attempt_in_the_same_process_does_not_release_the_lock(tmp_path: Path) -> None:
    """A record lock ends when the process that holds it closes any descriptor of the file."""
    path = str(tmp_path / LOCK)
    handle = FS.lock(path)
    command = [sys.executable, "-c", RECORD_LOCK, path]
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            FS.lock(path)
        other = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=30, check=False)
        assert other.returncode == 3
    FS.close(handle)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError):
            FS.lock(path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    FS.close(FS.lock(path))
