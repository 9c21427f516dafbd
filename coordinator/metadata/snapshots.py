"""Snapshots: files that hold an image as records, so that older records can be deleted.

``<end offset>-<epoch>.checkpoint`` beside the log holds the state after all records below the end
offset: a control batch with the header, the records, and a control batch with the footer. Offsets
in the file begin at 0. The file gets this name only when it is on disk, so a file with this name is
always complete. Records of the log below the end offset of a snapshot are ignored.

Source: ``Snapshots``, ``RecordsSnapshotWriter``, ``FileRawSnapshotWriter``; KIP-630.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.image_records import image_values
from fencepost.coordinator.metadata.control_records import Voter, snapshot_footer, snapshot_header
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.framing import data_batch, in_chunks, values_of
from fencepost.logcore.batch import (
    BatchHeader,
    ControlType,
    decode_records,
    iter_headers,
    parse_control,
    verify_crc,
)
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem, replace_file

SNAPSHOT_SUFFIX: Final = ".checkpoint"
_NAME: Final = re.compile(rf"([0-9]{{20}})-([0-9]{{10}}){re.escape(SNAPSHOT_SUFFIX)}")


class SnapshotId(NamedTuple):
    """The offset after the last record in a snapshot's state, and the epoch of that record."""

    end_offset: int
    epoch: int

    @property
    def file_name(self) -> str:
        """The name of the snapshot's file."""
        return f"{self.end_offset:020}-{self.epoch:010}{SNAPSHOT_SUFFIX}"


def snapshots(fs: FileSystem, directory: str) -> list[SnapshotId]:
    """Return the snapshots in the directory of a log, the newest last."""
    matches = map(_NAME.fullmatch, fs.list_directory(directory) or ())
    return sorted(
        SnapshotId(int(match[1]), int(match[2])) for match in matches if match is not None
    )


def write_snapshot(
    fs: FileSystem,
    directory: str,
    image: MetadataImage,
    now_ms: int,
    last_timestamp_ms: int,
    voters: Sequence[Voter] = (),
) -> SnapshotId:
    """Write the snapshot of an image, and delete older ones. Raises OSError.

    ``voters`` are written if the quorum keeps them in its log (kraft.version 1).
    """
    snapshot_id = SnapshotId(image.offset + 1, image.epoch)
    batches = [snapshot_header(last_timestamp_ms, now_ms, snapshot_id.epoch, voters)]
    offset = next(header.next_offset for _, header in iter_headers(batches[0]))
    for values in in_chunks(list(image_values(image))):
        batches.append(data_batch(values, now_ms, base_offset=offset, epoch=snapshot_id.epoch))
        offset += len(values)
    batches.append(snapshot_footer(now_ms, offset, snapshot_id.epoch))
    replace_file(fs, directory, snapshot_id.file_name, b"".join(batches))
    for snapshot in snapshots(fs, directory):
        if snapshot != snapshot_id:
            fs.remove(f"{directory}/{snapshot.file_name}")
    return snapshot_id


def load_snapshot(
    fs: FileSystem, directory: str, snapshot: SnapshotId, loader: ImageLoader
) -> None:
    """Load the state of a snapshot into ``loader``. Raises MetadataError, OSError."""
    name = snapshot.file_name
    data = memoryview(fs.read_file(f"{directory}/{name}") or b"")
    loader.begin_snapshot()
    controls: list[ControlType] = []
    try:
        for position, header in iter_headers(data):
            verify_crc(data, position, header)
            batch = data[position : position + header.size]
            if header.is_control:
                controls += _controls(header, batch)
            else:
                loader.replay(values_of(header, batch), header.last_offset, snapshot.epoch)
        if controls[:1] + controls[-1:] != [
            ControlType.SNAPSHOT_HEADER,
            ControlType.SNAPSHOT_FOOTER,
        ]:
            raise MetadataError(f"{directory}/{name} does not end with a footer")
        loader.end_snapshot(*snapshot)
    except LogError as error:
        raise MetadataError(f"{directory}/{name} cannot be read: {error}") from error


def _controls(header: BatchHeader, batch: memoryview) -> list[ControlType]:
    return [parse_control(record).type for record in decode_records(batch, 0, header)]
