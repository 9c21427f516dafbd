"""Reading keys and values of dead-letter records from the source log, and building batches of them.

Source: ``ShareGroupDLQRecordFetcher``, ``ProduceRequestHandler.topicProduceData``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from fencepost.coordinator.runtime.background import Pace
from fencepost.groups.share.dead_letters import Headers
from fencepost.logcore.batch import (
    HEADER_SIZE,
    LogRecord,
    batch_of_payload,
    iter_headers,
    record_chunks,
    verify_crc,
)
from fencepost.logcore.compression import Codec, inflated_pieces
from fencepost.logcore.errors import LogError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.logcore.record_codec import encode_records

MAX_BATCH_BYTES: Final = 1 << 20
"""The maximum size of a batch of several records, unless ``max.message.bytes`` is lower."""

MAX_INFLATED_BYTES: Final = 16 << 20
"""The maximum decompressed size of a source batch, unless the queue's ``max.message.bytes`` is
lower: some codecs decompress a block of any size in one call."""

Body = tuple[bytes | None, bytes | None]
"""Key and value."""

NO_BODY: Final[Body] = None, None

_NEVER_A_RANGE: Final = 1 << 62
"""A ``min_range_bytes`` above the size of any batch: the reader returns bytes."""

_log = structlog.get_logger(__name__)


class SourceRecords:
    """Reads keys and values of a log by ascending offsets; keeps one batch and one chunk in memory.

    As in Kafka, if a compressed batch decompresses to more than the queue's ``max.message.bytes``,
    its records are sent without key and value.
    """

    def __init__(self, log: Partition, max_message_bytes: int, pace: Pace) -> None:
        self._log, self._pace = log, pace
        self._most = min(max_message_bytes, MAX_INFLATED_BYTES)
        self._chunks: Iterator[Sequence[LogRecord]] = iter(())
        self._bodies: dict[int, Body] = {}
        self._read_to = self._batch_last = -1
        """The last offsets of the current chunk and of its batch."""

    async def body(self, offset: int) -> Body:
        """Return a record's key and value; NO_BODY if the record is gone or cannot be read."""
        try:
            if offset > self._batch_last:
                await self._open(offset)
            while self._read_to < offset <= self._batch_last:
                self._next_chunk()
                await self._pace()
        except LogError as error:
            _log.warning(
                "a batch cannot be copied to the dead-letter queue; its records go without bodies",
                partition=self._log.name,
                offset=offset,
                cause=str(error),
            )
            self._without_bodies(max(offset, self._batch_last))
        return self._bodies.get(offset, NO_BODY)

    def _next_chunk(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is None:
            self._without_bodies(self._batch_last)
        elif chunk:
            self._bodies = {record.offset: (record.key, record.value) for record in chunk}
            self._read_to = chunk[-1].offset

    def _without_bodies(self, last: int) -> None:
        """Treat the records up to ``last`` as records without bodies."""
        self._chunks, self._bodies = iter(()), {}
        self._read_to = self._batch_last = last

    async def _open(self, offset: int) -> None:
        """Begin with the batch that contains ``offset``, or with the first batch after it."""
        self._without_bodies(offset - 1)
        read = self._log.reader.fetch(
            offset,
            1,
            Isolation.READ_UNCOMMITTED,
            at_least_one=True,
            min_range_bytes=_NEVER_A_RANGE,
        )
        data = read.records
        if not isinstance(data, bytes) or not data:
            self._without_bodies(offset)
            return
        at, header = next(iter_headers(data))
        self._batch_last = max(offset, header.last_offset)
        verify_crc(data, at, header)
        if header.codec is not Codec.NONE:
            # This pass only checks the size: the batch is never kept in memory as a whole.
            stored = memoryview(data)[at + HEADER_SIZE : at + header.size]
            for _ in inflated_pieces(header.codec, stored, self._most):
                await self._pace()
        self._chunks = record_chunks(data, at, header)


class DeadLetterBatch:
    """A batch under construction, with the timestamp of its first record."""

    def __init__(self, max_message_bytes: int, now_ms: int) -> None:
        self._max_message_bytes, self._now_ms = max_message_bytes, now_ms
        self._encoded: list[bytes] = []
        self._size = HEADER_SIZE

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self._encoded)

    def add(self, headers: Headers, body: Body) -> bool:
        """Add a record, or return False if the batch is full.

        If the record would not fit into any batch, it is added without its body. (Kafka sends it
        with its body, and the queue's leader refuses the batch.)
        """
        record = self._encode(headers, body)
        if HEADER_SIZE + len(record) > self._max_message_bytes:
            record = self._encode(headers, NO_BODY)
        full = min(self._max_message_bytes, MAX_BATCH_BYTES)
        if self._encoded and self._size + len(record) > full:
            return False
        self._encoded.append(record)
        self._size += len(record)
        return True

    def _encode(self, headers: Headers, body: Body) -> bytes:
        index = self.count
        return encode_records(
            [LogRecord(index, self._now_ms, *body, headers)], 0, self._now_ms, index
        )

    def encoded(self) -> bytes:
        """Return the batch as a producer without idempotence sends it."""
        return batch_of_payload(
            b"".join(self._encoded),
            self.count,
            codec=Codec.NONE,
            base_timestamp_ms=self._now_ms,
            max_timestamp_ms=self._now_ms,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            transactional=False,
        )
