"""The codecs of record batches, in the forms that Kafka's Java clients and librdkafka read.

Inflating is bounded: a size that the data declares is compared with the limit first, and what
comes out never gets past it. zstd and snappy accept some flipped bits silently, so a batch's CRC
has to be checked before its records are inflated.

Source: Kafka's ``Lz4BlockOutputStream`` (LZ4 frames of independent 64 KiB blocks), snappy-java's
``SnappyOutputStream`` ("xerial" framing), RFC 1952 (gzip), RFC 8878 (zstd).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final

import cramjam

from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError

Data = bytes | bytearray | memoryview


class Codec(IntEnum):
    """Bits 0-2 of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_GZIP_WBITS: Final = 31
_GZIP_LEVEL: Final = -1
_GZIP_FIRST_CHUNK: Final = 1024

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = 32 * 1024
_XERIAL_FIRST_INT: Final = struct.unpack(">i", _XERIAL_MAGIC[:4])[0]
_INT32: Final = struct.Struct(">i")
_SNAPPY_MAX_RATIO: Final = 22
"""A three-byte copy element of snappy yields at most 64 bytes."""

_LZ4_FRAME_HEADER: Final = bytes.fromhex("04224d18604082")
"""Magic; version 1, independent blocks, no checksums; 64 KiB blocks; the header's checksum."""
_LZ4_INDEPENDENT_BLOCKS: Final = 0x20
_LZ4_HAS_BLOCK_CHECKSUMS: Final = 0x10
_LZ4_HAS_SIZE: Final = 0x08
_LZ4_HAS_CHECKSUM: Final = 0x04
_LZ4_HAS_DICTIONARY: Final = 0x01
_LZ4_BLOCK: Final = 64 * 1024
_LZ4_RAW_BLOCK: Final = 0x80000000
_LZ4_END_MARK: Final = b"\x00\x00\x00\x00"
_LZ4_FAST_LEVEL: Final = 9
_LZ4_MAX_RATIO: Final = 255
"""Each further length byte of an LZ4 sequence stands for at most 255 bytes."""
_LITTLE_UINT32: Final = struct.Struct("<I")

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL: Final = 3

_FIRST_GUESS_RATIO: Final = 8
_SMALLEST_GUESS: Final = 4096


def compress(codec: Codec, data: Data, level: int | None = None) -> bytes:
    """Compress ``data``; ``level`` is the codec's own scale, None its default.

    snappy has no levels. lz4 compresses in its fast mode at its default level, 9, and in its
    high-compression mode at all others, as Kafka does.
    """
    if codec is Codec.NONE:
        return bytes(data)
    if codec is Codec.GZIP:
        return zlib.compress(data, _GZIP_LEVEL if level is None else level, _GZIP_WBITS)
    if codec is Codec.SNAPPY:
        return _compress_xerial(memoryview(data))
    if codec is Codec.LZ4:
        return _compress_lz4(memoryview(data), level)
    return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL if level is None else level))


def decompress(codec: Codec, data: Data, max_output_bytes: int) -> bytes:
    """Inflate ``data``; see :func:`inflate`."""
    return bytes(inflate(codec, data, max_output_bytes))


def inflate(
    codec: Codec, data: Data, max_output_bytes: int, *, strict: bool = False
) -> bytes | bytearray:
    """Inflate ``data`` into whatever it came in, without one copy more.

    ``strict``: only what every client reads. Java reads no lz4 blocks that depend on one another
    and no second lz4 frame, librdkafka nothing behind the first gzip member or snappy stream.

    Raises CorruptRecordError when it is damaged, cut short or inflates to more than
    ``max_output_bytes``.
    """
    if codec is Codec.NONE:
        if len(data) > max_output_bytes:
            raise _too_large(max_output_bytes)
        return bytes(data)
    view = memoryview(data)
    if codec is Codec.GZIP:
        return _decompress_gzip(view, max_output_bytes, strict=strict)
    if codec is Codec.SNAPPY:
        return _decompress_snappy(view, max_output_bytes, strict=strict)
    if codec is Codec.LZ4:
        most = _check_lz4_frame(view) if strict else None
        ceiling = min(max_output_bytes, len(view) * _LZ4_MAX_RATIO)
        return _inflate_bounded(codec, cramjam.lz4.decompress_into, view, most, ceiling)
    declared = _zstd_content_size(view)
    if declared is not None and declared > max_output_bytes:
        raise _too_large(max_output_bytes)
    return _inflate_bounded(codec, cramjam.zstd.decompress_into, view, declared, max_output_bytes)


def codec_for_id(number: int) -> Codec:
    """Return the codec of attribute bits 0-2; InvalidRecordError for one that nobody defined."""
    try:
        return _CODECS[number]
    except IndexError:
        raise InvalidRecordError(f"unknown compression codec {number}") from None


_CODECS: Final = tuple(Codec)


def _too_large(max_output_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(f"compressed records inflate to more than {max_output_bytes} bytes")


def _inflate_bounded(
    codec: Codec,
    decompress_into: Callable[[memoryview, bytearray], int],
    data: memoryview,
    declared: int | None,
    ceiling: int,
) -> bytearray:
    """Inflate into buffers that grow up to ``ceiling`` bytes.

    The library says the same thing of a full buffer and of damaged data, so both are tried again
    with more room; the work is bounded by a third more than the last, largest try.
    """
    size = declared or max(_SMALLEST_GUESS, len(data) * _FIRST_GUESS_RATIO)
    while True:
        size = min(size, ceiling)
        out = bytearray(size)
        try:
            used = decompress_into(data, out)
        except cramjam.DecompressionError as error:
            if size < ceiling:
                size *= 4
                continue
            raise CorruptRecordError(
                f"{codec.name.lower()} records do not inflate within {ceiling} bytes: {error}"
            ) from None
        del out[used:]
        return out


def _decompress_gzip(data: memoryview, max_output_bytes: int, *, strict: bool) -> bytes:
    """Inflate one or more gzip members.

    Chunks grow within a member and start small for the next: what is left over of a chunk is
    copied, and many tiny members must not make that quadratic.
    """
    out: list[bytes] = []
    room = max_output_bytes
    pos, end = 0, len(data)
    chunk = end
    while True:
        member = zlib.decompressobj(_GZIP_WBITS)
        while not member.eof:
            if pos == end:
                raise CorruptRecordError("gzip records are cut short")
            piece = data[pos : pos + chunk]
            pos += len(piece)
            try:
                inflated = member.decompress(piece, room + 1)
            except zlib.error as error:
                raise CorruptRecordError(f"gzip records do not inflate: {error}") from None
            room -= len(inflated)
            if room < 0:
                raise _too_large(max_output_bytes)
            out.append(inflated)
            chunk *= 2
        pos -= len(member.unused_data)
        if pos == end:
            return b"".join(out)
        if strict:
            raise CorruptRecordError("gzip records in more than one member")
        chunk = _GZIP_FIRST_CHUNK


def _compress_xerial(data: memoryview) -> bytes:
    out = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK]))
        out += _INT32.pack(len(block)), block
    return b"".join(out)


def _decompress_snappy(data: memoryview, max_output_bytes: int, *, strict: bool) -> bytes:
    """Inflate xerial blocks, or one raw block where the magic is missing, as snappy-java does.

    Of the version numbers behind the magic no more is asked than that the first is positive: some
    producers write them with the wrong byte order.
    """
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _decompress_snappy_block(data, max_output_bytes)
    if len(data) < len(_XERIAL_HEADER):
        raise CorruptRecordError("snappy records are cut short in their header")
    if strict and _INT32.unpack_from(data, len(_XERIAL_MAGIC))[0] < 1:
        raise CorruptRecordError("snappy records of an impossible version")
    out: list[bytes] = []
    room = max_output_bytes
    pos, end = len(_XERIAL_HEADER), len(data)
    while pos < end:
        if end - pos < 4:
            raise CorruptRecordError("snappy records are cut short in a block's length")
        size = _INT32.unpack_from(data, pos)[0]
        if size == _XERIAL_FIRST_INT:
            # Streams may be concatenated; the next one's header stands where a length would.
            if strict:
                raise CorruptRecordError("snappy records in more than one stream")
            pos += len(_XERIAL_HEADER)
            continue
        pos += 4
        if not 0 <= size <= end - pos:
            raise CorruptRecordError(f"a snappy block of {size} bytes where {end - pos} are left")
        block = _decompress_snappy_block(data[pos : pos + size], room)
        room -= len(block)
        out.append(block)
        pos += size
    return b"".join(out)


def _decompress_snappy_block(block: memoryview, max_output_bytes: int) -> bytes:
    if not block:
        raise CorruptRecordError("a snappy block of no bytes")
    try:
        declared = cramjam.snappy.decompress_raw_len(block)
        if declared > max_output_bytes:
            raise _too_large(max_output_bytes)
        if declared > len(block) * _SNAPPY_MAX_RATIO:
            raise CorruptRecordError(f"a snappy block of {len(block)} bytes declares {declared}")
        return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise CorruptRecordError(f"snappy records do not inflate: {error}") from None


def _check_lz4_frame(data: memoryview) -> int | None:
    """Raise CorruptRecordError unless ``data`` is one frame of independent blocks, to its end.

    Returns what it inflates to at most, None if the size of its blocks does not tell.
    """
    blocks = 0
    try:
        magic, flags, largest = data[:4], data[4], 1 << 8 + 2 * (data[5] >> 4)
        pos = 7 + (8 if flags & _LZ4_HAS_SIZE else 0) + (4 if flags & _LZ4_HAS_DICTIONARY else 0)
        while size := _LITTLE_UINT32.unpack_from(data, pos)[0]:
            pos += 4 + (size & ~_LZ4_RAW_BLOCK) + (4 if flags & _LZ4_HAS_BLOCK_CHECKSUMS else 0)
            blocks += 1
        pos += 4 + (4 if flags & _LZ4_HAS_CHECKSUM else 0)
    except (IndexError, struct.error):
        raise CorruptRecordError("an lz4 frame is cut short") from None
    if magic != _LZ4_FRAME_HEADER[:4] or not flags & _LZ4_INDEPENDENT_BLOCKS or pos != len(data):
        raise CorruptRecordError("lz4 records that are not one frame of independent blocks")
    return blocks * largest if largest == _LZ4_BLOCK else None


def _compress_lz4(data: memoryview, level: int | None) -> bytes:
    """Write one LZ4 frame of independent blocks: Java refuses dependent ones.

    At other levels than the default the library writes the frame, with block checksums that Java
    reads as well. Its block function, which our own frame stands on, knows the fast mode alone.
    """
    if level not in {None, _LZ4_FAST_LEVEL}:
        compressor = cramjam.lz4.Compressor(level, content_checksum=False, block_linked=False)
        compressor.compress(bytes(data))
        return bytes(compressor.finish())
    out = [_LZ4_FRAME_HEADER]
    for start in range(0, len(data), _LZ4_BLOCK):
        raw = data[start : start + _LZ4_BLOCK]
        block = bytes(cramjam.lz4.compress_block(raw, store_size=False))
        if len(block) < len(raw):
            out += _LITTLE_UINT32.pack(len(block)), block
        else:
            out += _LITTLE_UINT32.pack(len(raw) | _LZ4_RAW_BLOCK), bytes(raw)
    out.append(_LZ4_END_MARK)
    return b"".join(out)


def _zstd_content_size(data: memoryview) -> int | None:
    """Return the content size that the first frame's header declares, None if it does not."""
    if len(data) < 5 or bytes(data[:4]) != _ZSTD_MAGIC:
        return None
    descriptor = data[4]
    size_flag, single_segment = descriptor >> 6, descriptor >> 5 & 1
    width = (single_segment, 2, 4, 8)[size_flag]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if not width or start + width > len(data):
        return None
    size = int.from_bytes(data[start : start + width], "little")
    return size + 256 if width == 2 else size
