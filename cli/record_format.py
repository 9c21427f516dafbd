"""Formats for printing a record: text, a table row, JSON, bytes, or a template.

A null value or key is printed as a word (``<null>``); a text that is equal to that word gets a
backslash before it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from fencepost.cli.decoding import Decoder, decoder_of, plain
from fencepost.cli.output import moment
from fencepost.cli.printing import json_text
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.printable import printable

if TYPE_CHECKING:
    from fencepost.logcore.batch import LogRecord

NULL = "<null>"
OPTION = "--format"
NAMED = ("text", "table", "json", "raw", "base64")
FIELDS = {
    "t": "topic",
    "p": "partition",
    "o": "offset",
    "k": "key",
    "s": "value",
    "h": "headers as name=value,…",
    "T": "timestamp in ms since 1970",
    "D": "timestamp in ISO 8601, UTC",
    "K": "bytes of the key, -1 for none",
    "S": "bytes of the value, -1 for a tombstone",
    "%": "a percent sign",
}
"""The letters after ``%`` in a template; they are kcat's, except D."""

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "a": "\a", "e": "\x1b"}

Formatter = Callable[[int, "LogRecord"], bytes]
"""(partition, record) → the bytes to print, with a line end if the format has one."""


def unescape(text: str, option: str) -> str:
    r"""Resolve the escapes ``\n``, ``\t``, ``\r``, ``\0``, ``\\`` and ``\xNN`` in an option.

    Raises click.BadParameter for another character after a backslash.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[1][0] == "x" and len(match[1]) == 3:
            return chr(int(match[1][1:], 16))
        if match[1] not in _ESCAPES:
            why = f"{match[0]} in {text!r} is not an escape sequence; \\\\ is a backslash"
            raise click.BadParameter(why, param_hint=option)
        return _ESCAPES[match[1]]

    if text.endswith("\\") and (len(text) - len(text.rstrip("\\"))) % 2:
        why = f"{text!r} ends with an incomplete escape sequence; \\\\ is a backslash"
        raise click.BadParameter(why, param_hint=option)
    return _ESCAPE.sub(replacement, text)


def formatter(
    topic: str, form: str, *, null: str, decode: bool, terminal: bool = False
) -> Formatter:
    """Return the formatter of ``topic`` for ``form``: a format's name, or a template with ``%``.

    ``decode`` decodes the records of an internal topic. With ``terminal``, keys, values and headers
    are escaped; a file or a pipe gets them unchanged. Raises click.BadParameter.
    """
    show = _escaped if terminal else bytes
    decoder = decoder_of(topic) if decode else None
    if form not in NAMED:
        if "%" not in form:
            formats = ", ".join(NAMED)
            why = f"{form!r} is neither {formats} nor a template with %k %s …"
            raise click.BadParameter(why, param_hint=OPTION)
        return _template(topic, form, null, decoder, show)
    if form == "raw":
        return lambda _index, record: show(record.value or b"") + b"\n"
    if form == "base64":
        # A tombstone is "-", which is not base64; an empty value is an empty line.
        return lambda _, record: _bytes(
            f"{'-' if record.value is None else _base64(record.value)}\n"
        )

    def line(index: int, record: LogRecord) -> bytes:
        decoded = _decoded(decoder, record)
        if form == "json":
            return _json(topic, index, record, decoded)
        value = _shown(record.value, null) if decoded is None else decoded
        if form == "text":
            return show(_bytes(value)) + b"\n"
        key = _shown(record.key, null) if decoded is None else "-"
        stamp = moment(record.timestamp_ms) or "-"
        row = f"{index:>9}  {record.offset:>10}  {stamp:<24}  {printable(key)}  {printable(value)}"
        return _bytes(f"{row}\n")

    return line


def header(form: str) -> str | None:
    """Return the line above the records; None if the format has none."""
    if form != "table":
        return None
    return f"{'PARTITION':>9}  {'OFFSET':>10}  {'TIMESTAMP':<24}  KEY  VALUE"


def _escaped(data: bytes) -> bytes:
    return printable(data.decode("utf-8", "backslashreplace")).encode()


def _template(
    topic: str,
    form: str,
    null: str,
    decoder: Decoder | None,
    show: Callable[[bytes], bytes],
) -> Formatter:
    parts = re.split(r"%(.?)", form, flags=re.DOTALL)
    for letter in parts[1::2]:
        if letter not in FIELDS:
            directives = ", ".join(f"%{directive} {text}" for directive, text in FIELDS.items())
            why = f"%{letter} in {form!r} is not a field; the fields are {directives}"
            raise click.BadParameter(why, param_hint=OPTION)
    literal = [_bytes(unescape(part, OPTION)) for part in parts[0::2]]
    letters, nothing = parts[1::2], null.encode()

    def value(record: LogRecord) -> bytes:
        decoded = _decoded(decoder, record)
        if decoded is not None:
            return _bytes(decoded)
        return nothing if record.value is None else record.value

    fields: Mapping[str, Callable[[int, LogRecord], bytes]] = {
        "t": lambda _, _record: topic.encode(),
        "p": lambda index, _: b"%d" % index,
        "o": lambda _, record: b"%d" % record.offset,
        "k": lambda _, record: nothing if record.key is None else record.key,
        "s": lambda _, record: value(record),
        "h": lambda _, record: b",".join(
            _bytes(name) + b"=" + (nothing if data is None else data)
            for name, data in record.headers
        ),
        "T": lambda _, record: b"%d" % record.timestamp_ms,
        "D": lambda _, record: (moment(record.timestamp_ms) or "-").encode(),
        "K": lambda _, record: b"%d" % (-1 if record.key is None else len(record.key)),
        "S": lambda _, record: b"%d" % (-1 if record.value is None else len(record.value)),
        "%": lambda _, _record: b"%",
    }
    made = [fields[letter] for letter in letters]

    def line(index: int, record: LogRecord) -> bytes:
        filled = (
            show(field(index, record)) + text for field, text in zip(made, literal[1:], strict=True)
        )
        return literal[0] + b"".join(filled)

    return line


def _decoded(decoder: Decoder | None, record: LogRecord) -> str | None:
    """Decode a record of an internal topic to JSON; None if it cannot be decoded."""
    if decoder is None:
        return None
    try:
        fields = decoder(record)
    except (InvalidRecordError, CorruptRecordError):
        return None
    return None if fields is None else json_text(plain(fields))


def _json(topic: str, index: int, record: LogRecord, decoded: str | None) -> bytes:
    """Return one JSON line. Bytes that are not UTF-8 appear escaped, and again in base64."""
    headers = [[_legible(name), _plain(data)] for name, data in record.headers]
    row: dict[str, object] = {
        "topic": topic,
        "partition": index,
        "offset": record.offset,
        "timestamp": moment(record.timestamp_ms),
        "key": _plain(record.key),
        "value": _plain(record.value),
        "headers": headers,
    }
    for name, data in (("key_base64", record.key), ("value_base64", record.value)):
        if not _is_text(data):
            row[name] = _base64(data)
    if not all(_is_text(data) for _, data in record.headers):
        row["headers_base64"] = [[_legible(name), _base64(data)] for name, data in record.headers]
    if decoded is not None:
        row["decoded"] = json.loads(decoded)
    return _bytes(json_text(row) + "\n")


def _is_text(data: bytes | None) -> bool:
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _plain(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "backslashreplace")


def _legible(name: str) -> str:
    """Return a header name as text; bytes that are not UTF-8 were decoded to surrogates."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _shown(data: bytes | None, null: str) -> str:
    text = _plain(data)
    if text is None:
        return null
    return f"\\{text}" if null and text.lstrip("\\") == null else text


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
