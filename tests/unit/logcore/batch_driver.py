"""Batches with arbitrary contents, and malformed batches with a valid CRC."""

from __future__ import annotations

import struct

from crc32c import crc32c
from hypothesis import strategies as st

from fencepost.logcore.batch import HEADER_SIZE, LogRecord, parse_header
from fencepost.logcore.varint import encode

OFFSETS = st.integers(0, 2**40)
TIMESTAMPS = st.one_of(st.integers(-1, 2**42), st.integers(-(2**63), 2**63 - 1))
BLOBS = st.one_of(st.none(), st.binary(max_size=80), st.binary(min_size=1000, max_size=1200))
HEADERS = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8)), max_size=3)


@st.composite
def record_lists(draw: st.DrawFn, *, min_size: int = 1) -> list[LogRecord]:
    offset = draw(OFFSETS)
    records = []
    for _ in range(draw(st.integers(min_size, 6))):
        headers = tuple(draw(HEADERS))
        records.append(LogRecord(offset, draw(TIMESTAMPS), draw(BLOBS), draw(BLOBS), headers))
        offset += draw(st.integers(1, 5_000))
    return records


def with_payload(batch: bytes, payload: bytes, **fields: int) -> bytes:
    """Return a batch with other record bytes, ``fields`` in the header, and a valid CRC."""
    header = parse_header(batch)._replace(size=HEADER_SIZE + len(payload), **fields)
    after = struct.pack(">hiqqqhii", *header[5:]) + payload
    before = struct.pack(
        ">qiibI", header.base_offset, header.size - 12, header.leader_epoch, 2, crc32c(after)
    )
    return before + after


def body(*parts: int | bytes) -> bytes:
    """Return a record of varints and bytes, prefixed with its length."""
    content = b"\0" + b"".join(part if isinstance(part, bytes) else encode(part) for part in parts)
    return encode(len(content)) + content


MALFORMED = (
    b"",
    b"\x0e",
    body(0, 0, -1, -1, 0)[:-1],
    body(0, 0, -1, -1, 0) + b"\0",
    body(0, 0, -1, -1, 0, b"x"),
    encode(-5) + body(0, 0, -1, -1, 0),
    encode(2**31 - 1) + body(0, 0, -1, -1, 0),
    b"\xff\xff\xff\xff\xff\xff" + body(0, 0, -1, -1, 0),
    b"\xff" * 7,
    body(b"\xff" * 11, 0, -1, -1, 0),
    body(0, -1, -1, -1, 0),
    body(0, 1, -1, -1, 0),
    body(0, 0, -2, -1, 0),
    body(0, 0, -1, -2, 0),
    body(0, 0, 100, b"short", -1, 0),
    body(0, 0, 2**31 - 1, b"short", -1, 0),
    body(0, 0, -1, 2**31 - 1, b"short", 0),
    body(0, 0, -1, -1, -1),
    body(0, 0, -1, -1, 2**31 - 1),
    body(0, 0, -1, -1, 3, 0, 0),
    body(0, 0, -1, -1, 1, -1, b"", 0),
    body(0, 0, -1, -1, 1, 9, b"k", 0),
    body(0, 0, -1, -1, 1, 1, b"k", -2),
    body(0, 0, -1, -1, 1, 1, b"k", 2**31 - 1),
    body(0, 0, -1, -1, 1, 1, b"k", 9, b"v"),
)
"""Malformed records, each for a batch with one record."""

EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.integers(0, 2), st.integers(0, 255)),
    min_size=1,
    max_size=6,
)


def edited(data: bytes, edits: list[tuple[int, int, int]]) -> bytes:
    """Replace, insert or remove single bytes."""
    out = bytearray(data)
    for place, kind, byte in edits:
        at = place % (len(out) + 1)
        out[at : at + (kind != 1)] = b"" if kind == 2 else bytes((byte,))
    return bytes(out)


def placed(batch: bytes, base_offset: int, *, leader_epoch: int = 0) -> bytes:
    """Return a batch with this base offset and leader epoch; the CRC covers neither."""
    return (
        struct.pack(">q", base_offset) + batch[8:12] + struct.pack(">i", leader_epoch) + batch[16:]
    )
