"""The highest figures that are taken over from files and from other brokers.

Each is half of what its field holds, or less: what goes on from it (the next offset, the next
producer id, the next epoch) does not run out. Apache Kafka counts all of them up from 0.
"""

from __future__ import annotations

from typing import Final

from fencepost.logcore.batch import MAGIC, BatchHeader
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import CorruptRecordError

MAX_OFFSET: Final = (1 << 62) - 1
"""Of a record."""

MAX_PRODUCER_ID: Final = (1 << 62) - 1

MAX_LEADER_EPOCH: Final = (1 << 30) - 1
"""Of a partition; it grows with every election and every start."""

MAX_GROUP_EPOCH: Final = (1 << 30) - 1
"""Of a group (also its generation), of its members and of their assignments."""

MAX_PARTITION: Final = (1 << 31) - 1
"""The index of a partition."""

MAX_PRODUCER_EPOCH: Final = (1 << 15) - 1
"""A producer whose epochs are used up gets another id."""


def check_offsets(header: BatchHeader) -> None:
    """Raise CorruptRecordError for offsets that no batch in a log has."""
    if header.last_offset >= MAX_INT64:
        raise CorruptRecordError(f"no offset follows the batch at offset {header.base_offset}")
    if header.magic >= MAGIC and not 0 <= header.base_offset <= header.last_offset:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} ends at offset {header.last_offset}"
        )


class BoundError(Exception):
    """A figure in a file is not one that could go on; the message says which."""


def bounded(what: str, value: int, low: int, high: int) -> int:
    """Return ``value``. Raises BoundError unless it is from ``low`` to ``high``."""
    if not low <= value <= high:
        raise BoundError(f"{what} {value} is not from {low} to {high}")
    return value
