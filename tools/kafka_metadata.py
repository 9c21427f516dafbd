"""The next block of producer ids, from a stopped Apache Kafka's metadata log.

Kafka's controller allocates ids in blocks, and writes a ``ProducerIdsRecord`` for each. Log and
snapshots hold record batches; a record's value consists of frame version, record type, version, and
the fields.

Source: ``MetadataRecordSerde``, ``ProducerIdsRecord.json``, ``ProducerIdControlManager``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from fencepost.logcore.batch import decode_records
from fencepost.logcore.dump import read_batches
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.segment import LOG_SUFFIX

METADATA_DIRECTORY: Final = "__cluster_metadata-0"
SNAPSHOT_SUFFIX: Final = ".checkpoint"

_PRODUCER_IDS: Final = b"\x01\x0f\x00"
"""Frame version 1, record type 15, version 0; each a varint of one byte."""

_FIELDS: Final = struct.Struct(">iqq")
"""Broker id, broker epoch, first id of the next block."""


def next_producer_id(fs: FileSystem, directory: str) -> int | None:
    """Return the first producer id that is in no block yet, 0 before the first block.

    None if ``directory`` has no metadata log, or an unreadable one. Raises OSError.
    """
    path = f"{directory}/{METADATA_DIRECTORY}"
    names = fs.list_directory(path)
    files = [name for name in names or () if name.endswith((LOG_SUFFIX, SNAPSHOT_SUFFIX))]
    if not files:
        return None
    try:
        return max((block for name in files for block in _blocks(fs, f"{path}/{name}")), default=0)
    except LogError:
        return None


def _blocks(fs: FileSystem, path: str) -> Iterator[int]:
    for _, header, data in read_batches(fs, path, payload=True):
        # Kafka ignores a half-written batch at the end as well.
        if isinstance(header, str) or header.is_control:
            continue
        for record in decode_records(data, 0, header):
            value = record.value or b""
            if value.startswith(_PRODUCER_IDS) and len(value) >= 3 + _FIELDS.size:
                yield _FIELDS.unpack_from(value, len(_PRODUCER_IDS))[2]
