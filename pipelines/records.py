"""A handler's input and output: batches of records, outputs and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Headers = tuple[tuple[str, bytes], ...]

REASON, TOPIC, PARTITION, OFFSET = (
    f"dead-letter.{what}" for what in ("reason", "topic", "partition", "offset")
)
"""Headers of a dead letter: why the record was refused, and its position, as UTF-8 text."""

NO_OFFSET = -1
"""The offset of a record that is in no partition."""

MAX_REASON_CHARS = 1_000
"""The maximum number of characters of a reason. A longer reason is cut, because an exception may
quote the whole record."""


@dataclass(frozen=True, slots=True)
class Record:
    """A consumed record. ``timestamp_ms`` is Unix time; ``value`` and ``key`` are decoded."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: Any
    value: Any
    headers: Headers = ()
    raw_key: bytes | None = None
    raw_value: bytes | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A record to write. Without a partition the key decides, as in Java's client.

    Without ``timestamp_ms`` the record gets the time of writing; a pipeline that should keep the
    input's time passes it on.
    """

    topic: str
    value: Any
    key: Any = None
    partition: int | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that the handler or a serde refuses, or an unwritable output, with the reason.

    An unwritable output has no partition: its topic is the intended one, its offset −1.
    """

    record: Record
    reason: str

    def letter(self, topic: str) -> Output:
        """Return the dead letter: the record's bytes, headers, time and position."""
        record = self.record
        place: Headers = ()
        if record.offset != NO_OFFSET:
            place = (
                (PARTITION, str(record.partition).encode()),
                (OFFSET, str(record.offset).encode()),
            )
        return Output(
            topic,
            record.raw_value,
            record.raw_key,
            headers=(
                *record.headers,
                (REASON, self.reason[:MAX_REASON_CHARS].encode(errors="replace")),
                (TOPIC, record.topic.encode(errors="replace")),
                *place,
            ),
            timestamp_ms=record.timestamp_ms,
        )


@dataclass(slots=True)
class Batch:
    """The records of one transaction; records of one partition are in the order of the log."""

    records: Sequence[Record]
    refusals: list[Refusal] = field(default_factory=list)

    def refuse(self, record: Record, reason: object) -> None:
        """Send ``record`` to the dead-letter topic, in the same transaction."""
        self.refusals.append(Refusal(record, str(reason)))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)
