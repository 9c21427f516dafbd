"""Checks of a broker that was killed while it served random requests, and of its files."""

from __future__ import annotations

import json
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.lives.pools import INTERNAL_TOPICS
from tests.support.batches import HEADER, Batch, batches
from tests.support.cluster import Cluster

Told = dict[str, Any]

BY_A_CLIENT = re.compile(rb"\d+\.\d+")
"""The values that the clients of :mod:`tests.lives.life` produce."""

END_MARKERS = (b"\0\0\0\0", b"\0\0\0\1")
"""Keys of ABORT and COMMIT."""
LEADER_CHANGE = b"\0\0\0\2"
"""The key of the record that begins a leader epoch of the metadata log."""


def loaded(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (shard, digest) of every shard that was loaded when the broker started."""
    for line in lines:
        if '"shard loaded"' in line:
            event = json.loads(line)
            yield event["shard"], event["digest"]


def unlike(before: Mapping[str, Any], lines: list[str]) -> list[str]:
    """Return the shards whose loaded state differs from the state before the kill."""
    after = dict(loaded(lines))
    found = []
    for name, (state, end, digest) in before.items():
        if state != "Active":
            found.append(f"{name} was {state}")
        elif end and after.get(name) != digest:
            found.append(f"{name}, {end} records: {digest[:12]} before, {after.get(name)} after")
    return found


def lost(before: Mapping[str, Told], bootstrap: str, *, rewritten: frozenset[str]) -> list[str]:
    """Return the partitions of user topics whose records differ from the records before the kill.

    ``rewritten`` are topics whose records the broker itself may remove or replace.
    """
    found = []
    with Cluster(bootstrap) as cluster:
        for name, told in before.items():
            topic, index = name.rsplit("-", 1)
            if topic in rewritten or not told["batches"]:
                continue
            now = dict(stored(cluster, uuid.UUID(told["topic_id"]), int(index), told["start"]))
            gone = [at for at, crc in told["batches"].items() if now.get(int(at)) != crc]
            if gone:
                found.append(
                    f"{name}: of {len(told['batches'])} batches from {told['start']} to"
                    f" {told['end']}, {len(gone)} are not what they were, at {gone[:5]};"
                    f" there are {len(now)} at {sorted(now)[:5]}"
                )
    return found


def stored(
    cluster: Cluster, topic_id: uuid.UUID, index: int, offset: int
) -> Iterator[tuple[int, int]]:
    """Yield (first offset, CRC) of every batch that a client can read from ``offset`` on."""
    while True:
        asked = {"partition": index, "fetch_offset": offset, "partition_max_bytes": 1 << 24}
        answer = cluster.call(
            "fetch",
            13,
            max_wait=0,
            max_bytes=1 << 24,
            session_epoch=-1,
            topics=[{"topic_id": topic_id, "partitions": [{**asked, "current_leader_epoch": -1}]}],
        )
        (part,) = answer["responses"][0]["partitions"]
        data = part["records"] or b""
        at = 0
        while at + HEADER.size <= len(data):
            base, size = HEADER.unpack_from(data, at)[:2]
            yield base, zlib.crc32(data[at : at + 12 + size])
            offset = base + HEADER.unpack_from(data, at)[6] + 1
            at += 12 + size
        if not data:
            return


def topics(bootstrap: str) -> list[Any]:
    """Return name, id and number of partitions of all topics."""
    with Cluster(bootstrap) as cluster:
        rows = cluster.call("metadata", 12, topics=None)["topics"]
    return [(row["name"], row["topic_id"], len(row["partitions"])) for row in rows]


def foreign(data_dir: Path) -> list[str]:
    """Return the batches of the internal topics that were not written by a coordinator."""
    found = []
    for topic in INTERNAL_TOPICS:
        for log in sorted(data_dir.glob(f"{topic}-*/*.log")):
            for batch in batches(log.read_bytes()):
                why = _strange(topic, batch)
                if why:
                    found.append(f"{log.parent.name} at {batch.base_offset}: {why}")
    return found


def _strange(topic: str, batch: Batch) -> str | None:
    if any(value and BY_A_CLIENT.fullmatch(value) for value in batch.values):
        return f"a client's record: {batch.values}"
    if topic == "__cluster_metadata" and batch.is_control:
        if batch.keys != (LEADER_CHANGE,):
            return f"control records {batch.keys}"
    elif topic != "__consumer_offsets":
        if batch.is_control or batch.producer_id != -1 or batch.is_transactional:
            return f"a batch of producer {batch.producer_id}, attributes {batch.attributes}"
    elif batch.is_control and batch.keys[0] not in END_MARKERS:
        return f"a control record {batch.keys}"
    elif batch.is_transactional != (batch.producer_id >= 0):
        return f"attributes {batch.attributes} and producer {batch.producer_id}"
    return None
