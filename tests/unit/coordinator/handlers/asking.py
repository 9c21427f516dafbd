"""Requests for the tests of several APIs."""

from __future__ import annotations

from tests.support.batches import batch
from tests.support.cluster import Cluster


def txn_batch(pid: int, epoch: int, sequence: int = 0) -> bytes:
    return batch(
        [b"x"], producer_id=pid, producer_epoch=epoch, sequence=sequence, transactional=True
    )


def fetch_parts(client: Cluster, parts, version: int = 12, topic=None, **fields):
    """Fetch ``parts``: partitions of one topic, each with any fields of a Fetch request."""
    entries = [
        {"partition_max_bytes": 1 << 20, "fetch_offset": 0, "partition": 0, **part}
        for part in parts
    ]
    known = {"topic": topic} if version < 13 else {"topic_id": topic}
    body = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, **fields}
    return client.call("fetch", version, topics=[{**known, "partitions": entries}], **body)


def create(client: Cluster, name: str, version: int = 7, **fields):
    entry = {"name": name, "num_partitions": 1, "replication_factor": 1, **fields}
    answer = client.call("create_topics", version, topics=[entry], timeout=1000)
    (topic,) = answer["topics"]
    return topic["error_code"], topic
