"""The hash by which a consumer group detects changes of its topics, the same as Kafka's.

The record of the group epoch contains the hash. If a coordinator took over a group from another
broker and computed a different hash, it would detect a change and compute a new assignment.

Source: ``Utils.computeTopicHash`` and ``computeGroupHash`` of Kafka's group coordinator, which use
XXH3 with 64 bits and seed 0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest

MAX_KEPT: Final = 20_000
"""The maximum number of cached topic hashes. Hashing a topic with racks takes about 3 µs for each
partition, and an update of the metadata hashes the topics of all groups in one turn of the event
loop."""


def group_hash(topics: Iterable[tuple[str, int]]) -> int:
    """Return the signed hash of topics by name, given as (name, :func:`topic_hash`); 0 for none."""
    hashes = [number for _, number in sorted(topics)]
    return _signed(xxh3_64_intdigest(struct.pack(f"<{len(hashes)}q", *hashes))) if hashes else 0


@lru_cache(maxsize=MAX_KEPT)
def topic_hash(
    name: str, topic_id: bytes, partitions: int, racks: tuple[tuple[str, ...], ...] = ()
) -> int:
    """Return the signed hash of a topic.

    ``racks`` are the racks of each partition's replicas, in order; empty if no broker has a rack.
    """
    high, low = struct.unpack(">QQ", topic_id)
    parts = [struct.pack("<BQQ", 0, high, low), _text(name), struct.pack("<i", partitions)]
    if racks:
        for index, of_partition in enumerate(racks):
            parts.append(struct.pack("<i", index))
            for rack in of_partition:
                text = _text(rack)
                parts += (text[-4:], text)
    else:
        parts.append(struct.pack(f"<{partitions}i", *range(partitions)))
    return _signed(xxh3_64_intdigest(b"".join(parts)))


def _text(text: str) -> bytes:
    """Encode a string as its UTF-16 units, followed by their number."""
    units = text.encode("utf-16-le", "surrogatepass")
    return units + struct.pack("<i", len(units) // 2)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
