"""Transactions in checkpoints that a real Apache Flink 2.2.1 wrote.

``python -m tests.ecosystem.flink_checkpoints`` makes the files again.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import pytest

from fencepost.cli.flink_checkpoint import METADATA, CheckpointError, read_flink_checkpoint

FOLDER = Path(__file__).parent / "flink_checkpoints"
STATE = b"streaming_committer_raw_states"
IDS = ["flink-copy-0-", "flink-copy-1-"]
CHANGES = 500


@pytest.mark.parametrize("name", ["inline", "files"])
def test_both_writers_have_a_transaction_with_its_identity(name: str) -> None:
    found = read_flink_checkpoint(FOLDER / name)
    assert read_flink_checkpoint(FOLDER / name / METADATA) == found
    assert sorted(one.transactional_id[: len(IDS[0])] for one in found) == IDS
    (number,) = {one.checkpoint_id for one in found}
    assert all(one.transactional_id.endswith(f"-{number}") for one in found)
    identities = {(one.producer_id, one.epoch) for one in found}
    assert len(identities) == 2
    assert all(producer_id > 0 and epoch == 0 for producer_id, epoch in identities)


def changed(tmp_path: Path, data: bytes, name: str = "inline") -> Path:
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER / name, folder)
    (folder / METADATA).write_bytes(data)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_flink_checkpoint(folder)
    return str(caught.value)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"Flink", b"\0" * 64):
        assert "is not a checkpoint" in refused(changed(tmp_path, data))
    data = (FOLDER / "inline" / METADATA).read_bytes()
    assert "version 7" in refused(changed(tmp_path, data[:7] + b"\7" + data[8:]))
    assert "is not a file" in refused(tmp_path)


def test_unknown_version_of_a_committable_is_refused(tmp_path: Path) -> None:
    data = (FOLDER / "inline" / METADATA).read_bytes()
    # Version 1 and 27 or 28 bytes: epoch, producer id, and the length and text of the id.
    at = data.index(IDS[0].encode()) - 12 - 8
    assert data[at : at + 4] == b"\0\0\0\1"
    text = refused(changed(tmp_path, data[:at] + b"\0\0\0\2" + data[at + 4 :]))
    assert "committable of version 2" in text


def test_state_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    data = (FOLDER / "files" / METADATA).read_bytes()
    at = data.index(b"\6\0\x24", data.index(STATE)) + 3
    for name in ("../" + "a" * 33, "/etc/" + "a" * 31, "a" * 35 + "\\"):
        text = refused(changed(tmp_path, data[:at] + name.encode() + data[at + 36 :], "files"))
        assert "outside of the folder" in text
    missing = changed(tmp_path, data[:at] + b"a" * 36 + data[at + 36 :], "files")
    assert "is not a file" in refused(missing)


def test_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    """Otherwise a state that is missing would look like one without transactions."""
    data = (FOLDER / "inline" / METADATA).read_bytes()
    last = data.index(b"org.apache.flink.runtime.checkpoint.CheckpointProperties")
    folder = changed(tmp_path, data)
    for end in range(8, last, 5):
        (folder / METADATA).write_bytes(data[:end])
        refused(folder)


def test_changed_bytes_never_raise_another_error(tmp_path: Path) -> None:
    data, draw = (FOLDER / "inline" / METADATA).read_bytes(), random.Random(7)
    begin = data.index(STATE) - 8
    folder = changed(tmp_path, data)
    for _ in range(CHANGES):
        bad = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            bad[draw.randrange(begin, len(bad))] = draw.choice((0, 1, 127, 128, 255))
        (folder / METADATA).write_bytes(bad)
        with contextlib.suppress(CheckpointError):
            read_flink_checkpoint(folder)
