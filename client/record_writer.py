"""Writes records to a topic: an idempotent producer that reports refused records one by one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from fencepost.client.client import (
    ApiError,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.client.partitioner import Line
from fencepost.client.queries.session import check
from fencepost.client.requests import add_partitions, added, produce
from fencepost.logcore.batch import LogRecord, encode_batch
from fencepost.logcore.compression import Codec

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

RETRY_S = 0.1

_ABOUT_RECORDS = frozenset(
    {
        ErrorCode.invalid_record,
        ErrorCode.invalid_timestamp,
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.corrupt_message,
    }
)
"""Errors that single records may have caused; the broker has then written none of the batch."""


class RecordWriter:
    """Sends batches with an idempotent producer, which is transactional if it has an id.

    ``refused`` has the number of each line that was not written, and the error. In a transaction
    a refusal raises ApiError instead.
    """

    def __init__(
        self, session: ClusterSession, topic: str, compression: str, transactional_id: str | None
    ) -> None:
        self.written = 0
        self.refused: list[tuple[int, str]] = []
        self._session = session
        self._topic = topic
        self._codec = Codec[compression.upper()]
        self._transactional_id = transactional_id
        self._sequences: dict[int, int] = defaultdict(int)
        self._added: set[int] = set()
        answer = self._coordinate(
            "InitProducerId", 2, transactional_id=transactional_id, transaction_timeout_ms=60_000
        )
        self._claim = {
            "transactional_id": transactional_id,
            "producer_id": answer.producer_id,
            "producer_epoch": answer.producer_epoch,
        }

    def _coordinate(self, api: str, version: int, **fields: Any) -> Any:
        """Send the transaction coordinator a request, as clients of transaction version 1 do.

        The client retries on CONCURRENT_TRANSACTIONS until the last transaction has ended.
        """
        return self._session.client.call(
            api, version, to_transaction=self._transactional_id, **fields
        )

    def write(self, lines: Mapping[int, Sequence[Line]]) -> None:
        """Send each partition its lines; return when all are acknowledged or refused."""
        if self._transactional_id is not None:
            self._add(set(lines) - self._added)
        for index, partition_lines in lines.items():
            self._write(index, partition_lines)

    def _write(self, index: int, lines: Sequence[Line]) -> None:
        """Send one batch; if some of its records are refused, send the others again."""
        row = self._produce(index, self._batch(index, lines))
        message = getattr(row, "error_message", None)
        try:
            check(row.error_code, "Produce", f"{self._topic}-{index}", message)
        except ApiError as error:
            if self._transactional_id is not None or error.code not in _ABOUT_RECORDS:
                raise
            reasons = {
                record_error.batch_index: record_error.batch_index_error_message
                for record_error in getattr(row, "record_errors", ())
            }
            if not reasons and len(lines) == 1:
                reasons = {0: None}
            reason = f"{error.code.name.upper()}: "
            self.refused += (
                (lines[at].number, f"{reason}{text or message or f'{self._topic}-{index}'}")
                for at, text in reasons.items()
            )
            rest = [line for at, line in enumerate(lines) if at not in reasons]
            middle = len(rest) if reasons else len(rest) // 2
            for part in (rest[:middle], rest[middle:]):
                if part:
                    self._write(index, part)
            return
        self._sequences[index] += len(lines)
        self.written += len(lines)

    def _batch(self, index: int, lines: Sequence[Line]) -> bytes:
        now_ms = int(time.time() * 1000)
        records = [
            LogRecord(
                at,
                now_ms if line.timestamp_ms is None else line.timestamp_ms,
                line.key,
                line.value,
                line.headers,
            )
            for at, line in enumerate(lines)
        ]
        return encode_batch(
            records,
            base_offset=0,
            codec=self._codec,
            producer_id=self._claim["producer_id"],
            producer_epoch=self._claim["producer_epoch"],
            base_sequence=self._sequences[index],
            transactional=self._transactional_id is not None,
        )

    def _produce(self, index: int, batch: bytes) -> Any:
        """Send a batch, also after a lost connection: its sequence number prevents duplicates."""
        # From version 12 on a transactional Produce adds its partition by itself, from 13 on
        # topics have ids; this writer adds partitions first, as older clients do.
        send = partial(
            self._session.client.call,
            "Produce",
            9,
            to_leader=(self._topic, index),
            entity=partial(
                produce,
                batches={(self._topic, index): batch},
                timeout_ms=self._session.timeout_ms,
                transactional_id=self._transactional_id,
            ),
        )
        deadline = time.monotonic() + self._session.timeout_ms / 1000
        while True:
            try:
                return send().responses[0].partition_responses[0]
            except BrokerUnreachable as error:
                is_lost = isinstance(error.__cause__, ConnectionLostError)
                if not is_lost or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_S)

    def _add(self, indexes: set[int]) -> None:
        """Add partitions to the transaction before their first batch is sent."""
        if not indexes:
            return
        places = [(self._topic, index) for index in indexes]
        answer = self._coordinate(
            "AddPartitionsToTxn",
            2,
            entity=partial(add_partitions, partitions=places, **self._claim),
        )
        for code in added(answer):
            check(code, "AddPartitionsToTxn", self._topic)
        self._added |= indexes

    def end(self, *, commit: bool) -> None:
        """Commit or abort the transaction, if there is one."""
        if self._transactional_id is None or not self._added:
            return
        self._added.clear()
        self._coordinate("EndTxn", 3, **self._claim, committed=commit)
