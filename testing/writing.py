"""The topics and batches of :meth:`KafkaUnderTest.produce`."""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.client.queries.session import ClusterSession, check
from fencepost.client.requests import Partition
from fencepost.client.requests import produce as produce_request
from fencepost.logcore.batch import LogRecord, encode_batch

BATCH_BYTES = 256 << 10
"""The limit of keys and values in one batch; a single message may be larger."""


def chunks(rows: list[tuple[int, LogRecord]]) -> Iterator[list[tuple[int, LogRecord]]]:
    """Yield chunks whose batches stay well below ``message.max.bytes``."""
    chunk: list[tuple[int, LogRecord]] = []
    size = 0
    for row in rows:
        more = len(row[1].key or b"") + len(row[1].value or b"")
        if chunk and size + more > BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((row[0], row[1]._replace(offset=len(chunk))))
        size += more
    if chunk:
        yield chunk


def write(session: ClusterSession, place: Partition, records: list[LogRecord]) -> int:
    """Append one batch, and return its first offset."""
    batch = encode_batch(records, base_offset=0)
    answer = session.client.call(
        "Produce",
        9,
        to_leader=place,
        entity=lambda make: produce_request(
            make, {place: batch}, timeout_ms=session.timeout_ms, transactional_id=None
        ),
    )
    row = answer.responses[0].partition_responses[0]
    check(row.error_code, "Produce", f"{place[0]}-{place[1]}", getattr(row, "error_message", None))
    offset: int = row.base_offset
    return offset


def is_created(session: ClusterSession, topic: str) -> bool:
    """Let the broker create a topic as for a producer. Raises ApiError until it is created."""
    answer = session.client.call(
        "Metadata",
        entity=lambda f: f.message(
            topics=[f.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=True
        ),
    )
    check(answer.topics[0].error_code, "Metadata", topic)
    return True
