"""Reads the metadata log of a stopped node without changing anything.

The node may be a standalone broker or a controller, including one of Apache Kafka: their logs have
the same format. If a kill has left an incomplete change at the end of the log, the change was never
acknowledged, and is ignored.

Source: ``KafkaMetadataLog``, ``MetadataBatchLoader``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.image_loader import ImageLoader
from fencepost.coordinator.metadata.epoch_checks import check_taken_over
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.framing import values_of
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.snapshots import load_snapshot, snapshots
from fencepost.logcore.batch import NO_TIMESTAMP, BatchHeader, decode_records, verify_crc
from fencepost.logcore.dump import read_batches
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.segment import LOG_SUFFIX
from fencepost.logcore.values import dataclass

_LOG_FILE: Final = re.compile(rf"[0-9]{{20}}{re.escape(LOG_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class StoppedMetadata:
    """The image of a metadata log, and the timestamp of its last record in ms since 1970."""

    image: MetadataImage
    last_timestamp_ms: int


def read_stopped(fs: FileSystem, directory: str) -> StoppedMetadata | None:
    """Read the metadata in the directory of a log; None if there is no log.

    Raises MetadataError for a damaged log, or one in the format of Fencepost 0.1; OSError.
    """
    ids = snapshots(fs, directory)
    names = sorted(filter(_LOG_FILE.fullmatch, fs.list_directory(directory) or ()))
    if not ids and not names:
        return None
    loader, begin, last_ms = ImageLoader(), 0, NO_TIMESTAMP
    if ids:
        load_snapshot(fs, directory, ids[-1], loader)
        begin = ids[-1].end_offset
    expected = begin
    try:
        for name in names:
            for header, batch in _whole_batches(fs, f"{directory}/{name}", name == names[-1]):
                if header.next_offset <= begin:
                    continue
                if header.base_offset > expected:
                    raise MetadataError(
                        f"{directory}: records {expected} to {header.base_offset - 1} are missing"
                    )
                expected = header.next_offset
                if header.is_control:
                    loader.skip_control_batch(header.last_offset, header.leader_epoch)
                    continue
                if decode_records(batch, 0, header)[0].key is not None:
                    raise MetadataError(
                        f"{METADATA_TOPIC} is of an older release: start the broker once, and stop"
                        " it, to rewrite it"
                    )
                loader.replay(values_of(header, batch), header.last_offset, header.leader_epoch)
                last_ms = header.max_timestamp
    except LogError as error:
        raise MetadataError(f"{directory} cannot be parsed: {error}") from error
    image = loader.publish()
    check_taken_over(image)
    return StoppedMetadata(image, last_ms)


def _whole_batches(fs: FileSystem, path: str, is_last: bool) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield the batches of a file up to a torn batch, which only the last file may have."""
    for _, header, batch in read_batches(fs, path, payload=True):
        if isinstance(header, str):
            if not is_last:
                raise MetadataError(f"{path} holds {header}")
            return
        try:
            verify_crc(batch, 0, header)
        except LogError as error:
            if not is_last:
                raise MetadataError(f"{path}: {error}") from error
            return
        yield header, batch
