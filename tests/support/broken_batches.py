"""Batches as a broken producer might send them: invalid contents with a valid CRC.

Most are nearly valid, because random bytes never pass the first check. A broker may accept or
refuse each of them, but every consumer must be able to read past an accepted one.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

import cramjam

from fencepost.logcore.batch import HEADER_SIZE, LogRecord, encode_batch
from fencepost.logcore.compression import Codec, compress
from tests.support.batches import CONTROL, NOW_MS, TRANSACTIONAL, seal

Body = bytes
"""One encoded record, including its length."""

NUMBERS: Final = (
    *(bytes((byte,)) for byte in (0x00, 0x01, 0x02, 0x03, 0x0D, 0x7E, 0x7F)),
    *(b"\x80\x00", b"\x80\x80\x00", b"\x80\x01", b"\xff\x7f", b"\x80" * 5 + b"\0"),
    *(
        b"\xff\xff\xff\xff\x0f",
        b"\xfe\xff\xff\xff\x0f",
        b"\x80\x80\x80\x80\x10",
        b"\xff" * 9 + b"\1",
    ),
)
"""Zig-zag varints: small, negative, overlong, with too many bits, with too many bytes."""


def draw_batch(rng: random.Random) -> bytes:
    """Draw one client batch with up to two defects."""
    records = [_record(rng) for _ in range(rng.choice((1, 1, 2, 3, 10, 70)))]
    bodies = _bodies(records)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        rng.choice(_FAULTS_OF_RECORDS)(bodies, rng)
    payload = b"".join(bodies)
    codec = rng.choice(list(Codec))
    stored = compress(codec, payload)
    attributes: int = codec
    count = len(records)
    kind = rng.random()
    if kind < 0.1:
        stored = _edited(stored, rng)
    elif kind < 0.15:
        stored, attributes = _packed_otherwise(payload, rng)
    elif kind < 0.2:
        count = rng.choice((0, 1, count - 1, count + 1, 8, 15_000_000, 2**31 - 1))
    elif kind < 0.25:
        attributes = rng.choice(
            (codec ^ 1, 5, 7, codec | 0x08, codec | CONTROL, codec | TRANSACTIONAL, codec | 0x40)
        )
    elif kind < 0.3:
        payload += rng.randbytes(rng.randint(1, 20))
        stored = compress(codec, payload)
    return seal(stored, count=count, attributes=attributes, timestamp_ms=_time(rng))


def _time(rng: random.Random) -> int:
    return NOW_MS if rng.random() < 0.9 else rng.choice((-1, 0, NOW_MS * 2, 2**63 - 1, -(2**63)))


def _record(rng: random.Random) -> LogRecord:
    def blob() -> bytes | None:
        size = rng.choice((-1, 0, 1, 5, 62, 63, 64, 65, 300, 9000))
        return None if size < 0 else rng.randbytes(size) if size < 100 else bytes(size)

    headers = tuple((f"h{at}", blob()) for at in range(rng.choice((0, 0, 0, 1, 3))))
    key = blob() if rng.random() < 0.5 else b"key"
    return LogRecord(0, NOW_MS + rng.choice((0, 1, -5, 500, 100_000)), key, blob(), headers)


def _bodies(records: list[LogRecord]) -> list[Body]:
    numbered = [record._replace(offset=at) for at, record in enumerate(records)]
    # To find the end of each record, encode a batch of only the records up to it.
    ends = [len(encode_batch(numbered[:at])) - HEADER_SIZE for at in range(1, len(numbered) + 1)]
    whole = encode_batch(numbered)[HEADER_SIZE:]
    return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _edit_one(bodies: list[Body], rng: random.Random) -> None:
    at = rng.randrange(len(bodies))
    bodies[at] = _edited(bodies[at], rng)


def _another_number(bodies: list[Body], rng: random.Random) -> None:
    """Replace up to two of a record's first bytes, which hold its varints, by another varint."""
    at = rng.randrange(len(bodies))
    body, where = bodies[at], rng.randrange(9)
    bodies[at] = body[:where] + rng.choice(NUMBERS) + body[where + rng.randint(0, 2) :]


def _swap(bodies: list[Body], rng: random.Random) -> None:
    rng.shuffle(bodies)


def _repeat(bodies: list[Body], rng: random.Random) -> None:
    bodies[rng.randrange(len(bodies))] = rng.choice(bodies)


def _lose(bodies: list[Body], rng: random.Random) -> None:
    del bodies[rng.randrange(len(bodies))]
    bodies.append(b"")


_FAULTS_OF_RECORDS: Final[tuple[Callable[[list[Body], random.Random], None], ...]] = (
    _edit_one,
    _another_number,
    _another_number,
    _swap,
    _repeat,
    _lose,
)


def _edited(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        out[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return bytes(out)


def _packed_otherwise(payload: bytes, rng: random.Random) -> tuple[bytes, int]:
    """Return a stream that some decoders of the codec accept, and others do not."""
    half = len(payload) // 2
    snappy = bytes(cramjam.snappy.compress_raw(payload))
    forms: tuple[tuple[bytes, int], ...] = (
        (bytes(cramjam.lz4.compress(payload)), Codec.LZ4),
        (snappy, Codec.SNAPPY),
        (b"\x82SNAPPY\0" + struct.pack("<ii", 1, 1) + struct.pack(">i", len(snappy)) + snappy, 2),
        *(
            (compress(codec, payload[:half]) + compress(codec, payload[half:]), codec)
            for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD)
        ),
        (b"\x50\x2a\x4d\x18\x04\0\0\0skip" + compress(Codec.ZSTD, payload), Codec.ZSTD),
    )
    stored, codec = rng.choice(forms)
    return stored, int(codec)
