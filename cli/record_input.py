"""The input of ``fencepost produce``: lines in chunks as they arrive, parsed into records."""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from fencepost.client.partitioner import Headers, Line
from fencepost.logcore.system import has_input
from fencepost.logcore.values import dataclass

LINGER_S = 0.1
"""The lines that have been read are sent after a pause of this length in the input."""

BATCH_LINES = 2_000
BATCH_BYTES = 512 << 10
"""The limits for lines that are sent together; a single line may have more bytes."""

MAX_LINE_BYTES = 1_000_000
"""The maximum size of a line. A longer line, with a record's header, would not fit Kafka's default
max.message.bytes."""

READ_BYTES = 64 << 10

RECORD_BYTES = 70
"""Upper bound of a record's size in a batch, without its key, value and headers."""

FIELDS = frozenset(
    {
        *("key", "value", "headers", "key_base64", "value_base64", "headers_base64"),
        *("partition", "timestamp"),
        *("topic", "offset", "decoded"),  # `consume` prints them; they are ignored here
    }
)


class BadLineError(ValueError):
    """A line is not a valid record; the message says why."""


def chunks(file: BinaryIO, overhead: int = 0) -> Iterator[list[tuple[int, bytes]]]:
    """Yield chunks of numbered lines without their line ends, as they arrive.

    ``overhead`` is the size of each record in addition to its line. A line that is too long is
    truncated, but is still longer than the limit.
    """
    read, is_quiet = _source(file)
    chunk: list[tuple[int, bytes]] = []
    size, number, rest = 0, 0, b""
    while True:
        if chunk and is_quiet():
            yield chunk
            chunk, size = [], 0
        data = read()
        pieces = (rest + data).split(b"\n")
        rest = pieces.pop()[: MAX_LINE_BYTES + 2]
        if not data and rest:
            pieces.append(rest)
        for piece in pieces:
            line = piece.rstrip(b"\r")
            number += 1
            cost = len(line) + RECORD_BYTES + overhead
            if chunk and (size + cost > BATCH_BYTES or len(chunk) == BATCH_LINES):
                yield chunk
                chunk, size = [], 0
            chunk.append((number, line))
            size += cost
        if not data:
            if chunk:
                yield chunk
            return


def _source(file: BinaryIO) -> tuple[Callable[[], bytes], Callable[[], bool]]:
    """Return a function that reads some bytes, and one that tests for a pause in the input."""
    try:
        handle = file.fileno()
    except io.UnsupportedOperation:  # an in-memory file never pauses
        return lambda: file.read(READ_BYTES), lambda: False
    return (
        lambda: os.read(handle, READ_BYTES),
        lambda: not has_input(handle, LINGER_S),
    )


@dataclass(frozen=True, slots=True)
class TextLines:
    """Lines as text: each is a value, or a key and a value with a ``separator`` between them.

    Without a separator, ``key`` is the key of all records. ``null`` is the text for a null value
    (or key); without it, an empty value with a key is a tombstone.
    """

    separator: bytes | None
    key: bytes | None
    null: bytes | None
    headers: Headers

    def record(self, number: int, line: bytes) -> Line:
        """Parse a line into a record. Raises :class:`BadLineError`."""
        _check_length(line)
        key: bytes | None = self.key
        value: bytes | None = line
        if self.separator is not None:
            key, separator, value = line.partition(self.separator)
            if not separator:
                raise BadLineError(f"has no {self.separator.decode()!r}")
            key = None if key == self.null else key
        if value == (self.null if self.null is not None else b"" if key is not None else None):
            value = None
        return Line(number, key, value, self.headers)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Lines as JSON objects with a value, as ``consume --format json`` prints them."""

    headers: Headers

    def record(self, number: int, line: bytes) -> Line:
        """Parse a line into a record. Raises :class:`BadLineError`."""
        _check_length(line)
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadLineError(f"is not valid JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise BadLineError(
                "is not valid JSON: invalid UTF-8, too long a number, or too deeply nested"
            ) from error
        if not isinstance(row, dict):
            raise BadLineError("is not a JSON object")
        unknown = sorted(row.keys() - FIELDS)
        if unknown:
            field_names = ", ".join(sorted(FIELDS))
            raise BadLineError(f"has an unknown field {unknown[0]!r}; the fields are {field_names}")
        if "value" not in row and "value_base64" not in row:
            raise BadLineError("has no value; null makes a tombstone")
        return Line(
            number,
            _bytes_of(row, "key"),
            _bytes_of(row, "value"),
            (*self.headers, *_headers_of(row)),
            _whole(row, "partition", 0x7FFFFFFF),
            _time_of(row),
        )


def _check_length(line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise BadLineError(f"has more than {MAX_LINE_BYTES} bytes")


def _bytes_of(row: dict[str, object], name: str) -> bytes | None:
    """Return a key or value: base64 if given, text as UTF-8, anything else as JSON."""
    if f"{name}_base64" in row:
        return _decoded(row[f"{name}_base64"], f"{name}_base64")
    value = row.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _encoded(value, name)


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError(f"{name} has a lone surrogate") from error


def _decoded(text: object, name: str) -> bytes | None:
    if text is None:
        return None
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise BadLineError(f"{name} is not valid base64")


def _headers_of(row: dict[str, object]) -> Iterator[tuple[str, bytes | None]]:
    """Yield headers from an object, or from a list of pairs, where names may repeat."""
    coded = "headers_base64" in row
    name = "headers_base64" if coded else "headers"
    headers = row.get(name) or []
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if not isinstance(pairs, list):
        raise BadLineError(f"{name} is neither an object nor a list of pairs")
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadLineError(f"{name} has an item that is not a pair of a name and a value")
        if coded:
            value = _decoded(pair[1], name)
        elif pair[1] is None or isinstance(pair[1], str):
            value = None if pair[1] is None else _encoded(pair[1], name)
        else:
            raise BadLineError(f"{name}: the value of {pair[0]!r} is not a string")
        _encoded(pair[0], name)
        yield pair[0], value


def _whole(row: dict[str, object], name: str, most: int) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise BadLineError(f"{name} is not a number from 0 to {most}")
    return value


def _time_of(row: dict[str, object]) -> int | None:
    from fencepost.client.queries.times import MAX_MS, TimeError, milliseconds

    value = row.get("timestamp")
    if not isinstance(value, str):
        return _whole(row, "timestamp", MAX_MS)
    try:
        return milliseconds(value)
    except TimeError as error:
        raise BadLineError(f"timestamp: {error}") from error
