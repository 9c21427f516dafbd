"""Inputs and results of a test's calls to the broker, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fencepost.testing.arguments import integer, name_of, utf8

Partition: TypeAlias = tuple[str, int]
"""Topic and index."""

Headers: TypeAlias = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]


class Record(NamedTuple):
    """A record as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


Message: TypeAlias = bytes | str | Sequence[object] | Record | None
"""A value, or (key, value), optionally followed by headers, partition and timestamp in ms; or a
record from elsewhere, whose key, value, headers and timestamp are used."""

Offsets: TypeAlias = Mapping[str, Mapping[int, int | None]] | Mapping[Partition, int | None]
"""Offsets as ``{"orders": {0: 5}}`` or ``{("orders", 0): 5}``; None if nothing is committed."""


class Outgoing(NamedTuple):
    """A parsed message, before its partition is chosen."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int | None
    timestamp_ms: int | None


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has not ended; ``state`` is, for example, Ongoing or PrepareCommit."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    client: str | None
    """CLIENT_ID@HOST of the producer's client; None if the history does not have it."""
    partitions: tuple[Partition, ...]
    """Sorted; includes a partition of ``__consumer_offsets`` if the transaction commits offsets."""
    timeout_ms: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class ShareRecords:
    """Neighbouring records of a share group that have the same state, owner and count."""

    topic: str
    partition: int
    first: int
    """The first offset."""
    last: int
    """The last offset, which is included."""
    state: str
    """AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING or ARCHIVED, as in Kafka."""
    delivery_count: int
    member: str | None
    """The id of the member that has acquired the records."""
    locked_until_ms: int | None
    """The end of the acquisition lock, on the broker's clock."""
    is_pending: bool
    """Whether the state is being written; no consumer relies on it until the write succeeds."""

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def outgoing(message: Message, usual: Outgoing) -> Outgoing:
    """Parse a message, with defaults from ``usual``. Raises TypeError, ValueError."""
    if isinstance(message, Record):
        return Outgoing(
            message.key, message.value, message.headers, usual.partition, message.timestamp_ms
        )
    if message is None or isinstance(message, (bytes, str)):
        return usual._replace(value=_bytes(message, "a value"))
    if not isinstance(message, (tuple, list)):
        raise TypeError(f"a message is bytes, str, None or a tuple, not {message!r}")
    if not 2 <= len(message) <= 5:
        raise ValueError(
            "a message is (key, value), (key, value, headers), and so on with partition and"
            f" timestamp_ms; this has {len(message)} parts: {message!r}"
        )
    key, value, headers, partition, timestamp_ms = (*message, None, None, None)[:5]
    return Outgoing(
        _bytes(key, "a key"),
        _bytes(value, "a value"),
        usual.headers if headers is None else header_pairs(headers),
        usual.partition if partition is None else integer("a partition", partition),
        usual.timestamp_ms if timestamp_ms is None else integer("a timestamp", timestamp_ms),
    )


def header_pairs(headers: object) -> tuple[tuple[str, bytes | None], ...]:
    """Return headers as :class:`Record` has them. Raises TypeError."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise TypeError(f"headers are a mapping or pairs, not {headers!r}")
    encoded = []
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"a header is a pair of a str and a value, not {pair!r}")
        encoded.append((pair[0], _bytes(pair[1], f"header {pair[0]!r}")))
    return tuple(encoded)


def by_partition(offsets: Offsets) -> dict[Partition, int | None]:
    """Convert either form of :data:`Offsets` to a dict by partition. Raises TypeError."""
    rows: list[tuple[object, object, object]] = []
    if not isinstance(offsets, Mapping):
        raise TypeError(f"offsets are {{'orders': {{0: 5}}}}, not {offsets!r}")
    for key, value in offsets.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            rows += ((key, index, offset) for index, offset in value.items())
        elif isinstance(key, tuple) and len(key) == 2 and not isinstance(value, Mapping):
            rows.append((*key, value))
        else:
            raise TypeError(
                "offsets are {'orders': {0: 5}} or {('orders', 0): 5}, not"
                f" {{{key!r}: {value!r}}}"
            )
    return {
        (name_of("a topic", topic), integer("a partition", index, 0)): (
            None if offset is None else integer("an offset", offset, 0)
        )
        for topic, index, offset in rows
    }


def _bytes(value: object, what: str) -> bytes | None:
    if isinstance(value, str):
        return utf8(what, value)
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError(f"{what} is bytes, str or None, not {type(value).__name__}: {value!r}")


def bytes_of(value: bytes | str | None) -> bytes | None:
    """Return a ``key`` argument as bytes. Raises TypeError."""
    return _bytes(value, "a key")
