"""Transactions in checkpoints that a real Apache Flink 2.2.1 wrote.

``python -m tests.ecosystem.flink_checkpoints`` recreates the files.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
from pathlib import Path

import pytest

from fencepost.cli.flink_checkpoint import METADATA, CheckpointError, read_flink_checkpoint

FOLDER = Path(__file__).parent / "flink_checkpoints"
STATE = b"streaming_committer_raw_states"
IDS = ["flink-copy-0-", "flink-copy-1-"]
CHANGES = 500


@pytest.mark.parametrize("name", ["inline", "files"])
def test_checkpoint_has_transaction_and_producer_id_of_each_writer(name: str) -> None:
    found = read_flink_checkpoint(FOLDER / name)
    assert read_flink_checkpoint(FOLDER / name / METADATA) == found
    assert sorted(committable.transactional_id[: len(IDS[0])] for committable in found) == IDS
    (number,) = {committable.checkpoint_id for committable in found}
    assert all(committable.transactional_id.endswith(f"-{number}") for committable in found)
    identities = {(committable.producer_id, committable.epoch) for committable in found}
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


def test_file_that_is_no_known_checkpoint_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"Flink", b"\0" * 64):
        assert "is not a checkpoint" in refused(changed(tmp_path, data))
    data = (FOLDER / "inline" / METADATA).read_bytes()
    assert "version 7 is unknown" in refused(changed(tmp_path, data[:7] + b"\7" + data[8:]))
    old = refused(changed(tmp_path, data[:7] + b"\3" + data[8:]))
    assert "version 3 does not mark the file's end" in old
    assert "fencepost txns list --state Ongoing" in old
    assert "is not a file" in refused(tmp_path)


def test_unknown_version_of_a_committable_is_refused(tmp_path: Path) -> None:
    data = (FOLDER / "inline" / METADATA).read_bytes()
    # Version 1, and 27 or 28 bytes: epoch, producer id, and the transactional id with its length.
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


def with_absolute_paths(data: bytes, parent: str) -> bytes:
    """Return a ``_metadata`` file with absolute URIs instead of the state files' names."""
    parts, end = [], 0
    for found in re.finditer(rb"\x06\x00\x24([0-9a-f-]{36})(.{8})", data, re.DOTALL):
        uri = f"{parent}/".encode() + found[1]
        handle = b"\2" + found[2] + len(uri).to_bytes(2, "big") + uri
        parts += [data[end : found.start()], handle]
        end = found.end()
    return b"".join([*parts, data[end:]])


def test_state_in_a_file_with_an_absolute_path_is_read_beside_the_checkpoint(
    tmp_path: Path,
) -> None:
    data = (FOLDER / "files" / METADATA).read_bytes()
    found = read_flink_checkpoint(FOLDER / "files")
    absolute = with_absolute_paths(data, "s3://bucket/jobs/_entropy_/chk-3")
    folder = changed(tmp_path, absolute, "files")
    assert read_flink_checkpoint(folder) == found
    names = [path for path in folder.iterdir() if path.name != METADATA]
    for name in names:
        name.rename(tmp_path / name.name)
    text = refused(folder)
    assert f"copy that file into {folder}" in text
    assert "s3://bucket/jobs/_entropy_/chk-3/" in text
    for name in ("", "..", "a\\b"):
        other = re.sub(rb"(?<=/)[0-9a-f-]{36}", name.ljust(36, "/").encode(), absolute)
        assert "outside of the folder" in refused(changed(tmp_path, other, "files"))


def test_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    """If it were accepted, the truncated state would look like a state without transactions."""
    data = (FOLDER / "inline" / METADATA).read_bytes()
    last = data.index(b"org.apache.flink.runtime.checkpoint.CheckpointProperties")
    folder = changed(tmp_path, data)
    for end in range(8, last, 5):
        (folder / METADATA).write_bytes(data[:end])
        refused(folder)


def test_changed_bytes_raise_only_checkpoint_errors(tmp_path: Path) -> None:
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
