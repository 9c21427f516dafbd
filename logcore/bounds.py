"""The highest numbers that are accepted from files and from other brokers.

Offsets, producer ids, leader epochs and group epochs may use half of their field's positive range,
because the broker continues to count from the accepted number and must not run out of numbers.
Apache Kafka counts all of these numbers up from 0.
"""

from __future__ import annotations

from typing import Final

from fencepost.logcore.batch import MAGIC, BatchHeader
from fencepost.logcore.config import MAX_INT64
from fencepost.logcore.errors import CorruptRecordError

MAX_OFFSET: Final = (1 << 62) - 1
"""The maximum offset of a record."""

MAX_PRODUCER_ID: Final = (1 << 62) - 1

MAX_LEADER_EPOCH: Final = (1 << 30) - 1
"""The maximum leader epoch of a partition, which grows with every election and every start."""

MAX_GROUP_EPOCH: Final = (1 << 30) - 1
"""The maximum epoch or generation of a group, and epoch of a member or an assignment."""

MAX_PARTITION: Final = (1 << 31) - 1
"""The maximum index of a partition."""

MAX_PRODUCER_EPOCH: Final = (1 << 15) - 1
"""The maximum epoch of a producer. After this epoch, the producer gets another id."""


def check_offsets(header: BatchHeader) -> None:
    """Raise CorruptRecordError for offsets that no batch in a log can have."""
    if header.last_offset >= MAX_INT64:
        raise CorruptRecordError(f"no offset follows the batch at offset {header.base_offset}")
    if header.magic >= MAGIC and not 0 <= header.base_offset <= header.last_offset:
        raise CorruptRecordError(
            f"the batch at offset {header.base_offset} ends at offset {header.last_offset}"
        )


class BoundError(Exception):
    """A number in a file is out of bounds; the message says which."""


def bounded(name: str, value: int, low: int, high: int) -> int:
    """Return ``value``. Raises BoundError unless it is from ``low`` to ``high``."""
    if not low <= value <= high:
        raise BoundError(f"{name} {value} is not from {low} to {high}")
    return value
