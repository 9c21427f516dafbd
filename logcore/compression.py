"""The codecs of record batches, in the forms that Kafka's Java clients and librdkafka read.

Decompression is bounded: a size that the data declares is compared with the limit first, and the
output never exceeds it. zstd and snappy accept some flipped bits silently, so a batch's CRC must be
checked before its records are decompressed.

Source: Kafka's ``Lz4BlockOutputStream`` (LZ4 frames of independent 64 KiB blocks), snappy-java's
``SnappyOutputStream`` ("xerial" framing), RFC 1952 (gzip), RFC 8878 (zstd).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from enum import IntEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple, Protocol

import cramjam

from fencepost.logcore.byte_count import INPUT_BYTES
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.fs import fresh_memory

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
_FIRST_CHUNK: Final = 1024
"""The number of input bytes in the first call for a gzip member or zstd frame, except the first
member or frame of the data."""

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
"""Each further length byte of an LZ4 sequence adds at most 255 bytes."""
_LITTLE_UINT32: Final = struct.Struct("<I")
_LITTLE_UINT64: Final = struct.Struct("<Q")

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL: Final = 3
_ZSTD_LARGEST_TABLES: Final = 19
"""The highest zstd level with table sizes of its own; higher levels use the sizes of this level."""


PIECE_BYTES: Final = 64 * 1024
"""The maximum output of one call of a codec, if the codec can decompress in pieces."""


def compress(codec: Codec, data: Data, level: int | None = None) -> bytes:
    """Compress ``data``; ``level`` is on the codec's scale, None means its default.

    snappy has no levels. As in Kafka, lz4 uses its fast mode at the default level, 9, and its
    high-compression mode at all other levels.
    """
    if codec is Codec.ZSTD:  # in one call, which writes the size into the frame
        return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL if level is None else level))
    return b"".join(compressed_pieces(codec, (data,), level))


def compressed_pieces(
    codec: Codec, pieces: Iterable[Data], level: int | None = None, size: int | None = None
) -> Iterator[bytes]:
    """Compress the concatenation of ``pieces``, as :func:`compress` does, and yield the output.

    No call holds the GIL for longer than a piece takes, and no output is kept.
    ``size`` is the total size of all pieces, if known: zstd allocates less memory for small ones.
    """
    if codec is Codec.NONE:
        yield from map(bytes, pieces)
    elif codec is Codec.GZIP:
        gzip = zlib.compressobj(_GZIP_LEVEL if level is None else level, wbits=_GZIP_WBITS)
        for piece in pieces:
            yield gzip.compress(piece)
        yield gzip.flush()
    elif codec is Codec.SNAPPY:
        yield _XERIAL_HEADER
        for raw in _blocks(pieces, _XERIAL_BLOCK):
            block = bytes(cramjam.snappy.compress_raw(raw))
            yield _INT32.pack(len(block)) + block
    elif codec is Codec.LZ4:
        yield _LZ4_FRAME_HEADER
        for raw in _blocks(pieces, _LZ4_BLOCK):
            yield _lz4_block(raw, level)
        yield _LZ4_END_MARK
    else:
        yield from _zstd_compressed(pieces, _ZSTD_LEVEL if level is None else level, size)


def decompress(codec: Codec, data: Data, max_output_bytes: int) -> bytes:
    """Decompress ``data`` in one step; see :func:`inflated_pieces`."""
    return b"".join(inflated_pieces(codec, data, max_output_bytes))


def inflated_pieces(
    codec: Codec, data: Data, max_output_bytes: int, *, strict: bool = False
) -> Iterator[bytes]:
    """Decompress ``data`` and yield it in pieces of at most PIECE_BYTES.

    No call of a codec produces more than that, except for a block of lz4 (4 MiB at most) or snappy
    (22 times its compressed size). ``strict``: accept only data that every client reads. Java
    cannot read lz4 blocks that depend on one another, or a second lz4 frame; librdkafka ignores
    everything after the first gzip member or snappy stream.

    Raises CorruptRecordError if the data is damaged, cut short or decompresses to more than
    ``max_output_bytes``.
    """
    view = memoryview(data)
    room = max_output_bytes
    for piece in _INFLATED[codec](view, max_output_bytes, strict):
        room -= len(piece)
        INPUT_BYTES.add(len(piece))
        if room < 0:
            raise _too_large(max_output_bytes)
        if len(piece) <= PIECE_BYTES:
            yield bytes(piece)
        else:
            for start in range(0, len(piece), PIECE_BYTES):
                yield bytes(piece[start : start + PIECE_BYTES])


def codec_for_id(number: int) -> Codec:
    """Return the codec of attribute bits 0-2; InvalidRecordError for an undefined one."""
    try:
        return _CODECS[number]
    except IndexError:
        raise InvalidRecordError(f"unknown compression codec {number}") from None


_CODECS: Final = tuple(Codec)


def _too_large(max_output_bytes: int) -> CorruptRecordError:
    return CorruptRecordError(f"compressed records inflate to more than {max_output_bytes} bytes")


def _inflate_at_once(
    codec: Codec,
    decompress_into: Callable[[memoryview, memoryview], int],
    data: memoryview,
    most: int,
) -> memoryview:
    """Decompress in one call, for data that the library cannot decompress in pieces.

    The call releases the GIL. The output buffer is an anonymous map, whose pages the kernel
    allocates on the first write: a ``bytearray`` would be filled with zeros under the GIL.
    """
    out = fresh_memory(max(most, 1))
    try:
        return out[: decompress_into(data, out)]
    except cramjam.DecompressionError as error:
        raise CorruptRecordError(
            f"{codec.name.lower()} records do not inflate within {most} bytes: {error}"
        ) from None


def _blocks(pieces: Iterable[Data], size: int) -> Iterator[Data]:
    """Split ``pieces`` into blocks of ``size`` bytes, the last of which may be smaller."""
    rest = b""
    for piece in pieces:
        data = memoryview(rest + bytes(piece) if rest else piece)
        whole = len(data) - len(data) % size
        for start in range(0, whole, size):
            yield data[start : start + size]
        rest = bytes(data[whole:])
    if rest:
        yield rest


# --- none ---


def _stored_pieces(data: memoryview, most: int, _strict: bool) -> Iterator[memoryview]:
    if len(data) > most:
        raise _too_large(most)
    yield data


# --- gzip and zstd: streams of members ---


class _Member(Protocol):
    """The decompressor of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool:
        """Whether the end was reached."""

    @property
    def unused_data(self) -> bytes:
        """The bytes of input after the end."""

    def decompress(self, data: Data, max_length: int, /) -> bytes:
        """Decompress to at most ``max_length`` bytes."""


def _member_pieces(
    name: str,
    begin: Callable[[], _Member],
    error: type[Exception],
    data: memoryview,
    *,
    single: bool,
) -> Iterator[bytes]:
    """Decompress one or more members.

    At the end of a member, the unread rest of its input chunk is copied. Chunks therefore begin
    small for each further member and then grow, so that many tiny members do not cost quadratic
    time.
    """
    pos, end = 0, len(data)
    chunk = PIECE_BYTES
    while True:
        member = begin()
        out = b""
        while not member.eof:
            if len(out) == PIECE_BYTES:
                # The same input may give more output. (zlib returns its unread input.)
                source: Data = getattr(member, "unconsumed_tail", b"")
            elif pos == end:
                raise CorruptRecordError(f"{name} records are cut short")
            else:
                source = data[pos : pos + chunk]
                pos += len(source)
                chunk = min(2 * chunk, PIECE_BYTES)
            try:
                out = member.decompress(source, PIECE_BYTES)
            except error as reason:
                raise CorruptRecordError(f"{name} records do not inflate: {reason}") from None
            yield out
        pos -= len(member.unused_data)
        if pos == end:
            return
        if single:
            raise CorruptRecordError(f"{name} records in more than one member")
        chunk = _FIRST_CHUNK


def _gzip_pieces(data: memoryview, _most: int, strict: bool) -> Iterator[bytes]:
    def begin() -> _Member:
        return zlib.decompressobj(_GZIP_WBITS)

    return _member_pieces("gzip", begin, zlib.error, data, single=strict)


@cache
def _zstd_library() -> ModuleType | None:
    """Import a module that handles zstd in pieces: Python's own since 3.14, or its backport.

    Without either module, one call of cramjam decompresses a whole batch. The first zstd batch
    causes the import.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def _zstd_pieces(data: memoryview, most: int, _strict: bool) -> Iterator[Data]:
    declared = _zstd_content_size(data)
    if declared is not None and declared > most:
        raise _too_large(most)
    library = _zstd_library()
    if library is not None:
        return _member_pieces(
            "zstd", library.ZstdDecompressor, library.ZstdError, data, single=False
        )
    return iter((_inflate_at_once(Codec.ZSTD, cramjam.zstd.decompress_into, data, most),))


def _zstd_compressed(pieces: Iterable[Data], level: int, size: int | None) -> Iterator[bytes]:
    library = _zstd_library()
    if library is None:
        yield bytes(cramjam.zstd.compress(b"".join(pieces), level=level))
        return
    parameter = library.CompressionParameter
    options = {parameter.compression_level: level}
    if level > _ZSTD_LARGEST_TABLES:
        # The tables of level 22 take 800 MB for 100 MB of records, and the compressor returns them
        # to the system while it holds the interpreter lock, for up to 100 ms. zstd reduces these
        # sizes itself for small batches.
        options |= {parameter.window_log: 23, parameter.chain_log: 24, parameter.hash_log: 22}
    compressor = library.ZstdCompressor(options=options)
    compressor.set_pledged_input_size(size)
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def _zstd_content_size(data: memoryview) -> int | None:
    """Return the content size in the first frame's header, None without one."""
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


# --- snappy ---


def _snappy_pieces(data: memoryview, most: int, strict: bool) -> Iterator[Data]:
    """Decompress xerial blocks, or one raw block without the magic, as snappy-java does.

    Of the two version numbers after the magic only the first is checked, to be positive: some
    producers write both in the wrong byte order.
    """
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        yield _snappy_block(data, most)
        return
    if len(data) < len(_XERIAL_HEADER):
        raise CorruptRecordError("snappy records are cut short in their header")
    if strict and _INT32.unpack_from(data, len(_XERIAL_MAGIC))[0] < 1:
        raise CorruptRecordError("snappy records of an impossible version")
    pos, end = len(_XERIAL_HEADER), len(data)
    while pos < end:
        if end - pos < 4:
            raise CorruptRecordError("snappy records are cut short in a block's length")
        size = _INT32.unpack_from(data, pos)[0]
        if size == _XERIAL_FIRST_INT:
            # Streams may be concatenated; the next stream's header is in place of a length.
            if strict:
                raise CorruptRecordError("snappy records in more than one stream")
            pos += len(_XERIAL_HEADER)
            continue
        pos += 4
        if not 0 <= size <= end - pos:
            raise CorruptRecordError(f"a snappy block of {size} bytes where {end - pos} are left")
        yield _snappy_block(data[pos : pos + size], most)
        pos += size


def _snappy_block(block: memoryview, most: int) -> Data:
    if not block:
        raise CorruptRecordError("a snappy block of no bytes")
    try:
        declared = cramjam.snappy.decompress_raw_len(block)
        if declared > most:
            raise _too_large(most)
        if declared > len(block) * _SNAPPY_MAX_RATIO:
            raise CorruptRecordError(f"a snappy block of {len(block)} bytes declares {declared}")
        if declared <= PIECE_BYTES:
            return bytes(cramjam.snappy.decompress_raw(block))
    except cramjam.DecompressionError as error:
        raise CorruptRecordError(f"snappy records do not inflate: {error}") from None
    return _inflate_at_once(Codec.SNAPPY, cramjam.snappy.decompress_raw_into, block, declared)


# --- lz4 ---


class _Lz4Frame(NamedTuple):
    """The descriptor of a frame, and the position of its first block."""

    flags: int
    block_bytes: int
    content_bytes: int | None
    blocks_at: int

    @property
    def is_linked(self) -> bool:
        """Whether a block depends on earlier blocks."""
        return not self.flags & _LZ4_INDEPENDENT_BLOCKS


def _lz4_frame(data: memoryview, pos: int) -> _Lz4Frame:
    if bytes(data[pos : pos + 4]) != _LZ4_FRAME_HEADER[:4]:
        raise CorruptRecordError("lz4 records that are not frames of lz4")
    try:
        flags, largest = data[pos + 4], data[pos + 5] >> 4
        at = pos + 6
        content_bytes = None
        if flags & _LZ4_HAS_SIZE:
            content_bytes = _LITTLE_UINT64.unpack_from(data, at)[0]
            at += 8
        if flags & _LZ4_HAS_DICTIONARY:
            at += 4
        checksum = data[at]
    except (IndexError, struct.error):
        raise _lz4_cut_short() from None
    if flags >> 6 != 1 or not 4 <= largest <= 7:
        raise CorruptRecordError("an lz4 frame of an unknown version")
    if checksum != xxh32_short(bytes(data[pos + 4 : at])) >> 8 & 0xFF:
        raise CorruptRecordError("the checksum of an lz4 frame's descriptor is wrong")
    return _Lz4Frame(flags, 1 << 8 + 2 * largest, content_bytes, at + 1)


def _lz4_cut_short() -> CorruptRecordError:
    return CorruptRecordError("an lz4 frame is cut short")


def _lz4_pieces(data: memoryview, most: int, strict: bool) -> Iterator[Data]:
    """Decompress frames of independent blocks block by block.

    The library handles linked blocks and the content checksum only in one call for a whole frame.
    Consumers check the content checksum, so ``strict`` does as well; otherwise the batch's CRC,
    which the caller has checked, is enough.
    """
    pos, end = 0, len(data)
    if strict:
        frame = _check_lz4_frame(data)
        if frame.flags & _LZ4_HAS_CHECKSUM:
            ceiling = min(most, end * _LZ4_MAX_RATIO)
            yield _inflate_at_once(Codec.LZ4, cramjam.lz4.decompress_into, data, ceiling)
            return
    while True:
        frame = _lz4_frame(data, pos)
        if frame.is_linked or frame.flags & _LZ4_HAS_DICTIONARY:
            ceiling = min(most, end * _LZ4_MAX_RATIO)
            rest = data[pos:]
            yield _inflate_at_once(Codec.LZ4, cramjam.lz4.decompress_into, rest, ceiling)
            return
        pos = yield from _lz4_blocks(data, frame)
        if pos == end:
            return


def _lz4_blocks(data: memoryview, frame: _Lz4Frame) -> Generator[Data, None, int]:
    """Decompress the blocks of a frame; return the position after it."""
    pos, inflated = frame.blocks_at, 0
    tail = 4 if frame.flags & _LZ4_HAS_BLOCK_CHECKSUMS else 0
    head = _lz4_block_header(tail > 0, frame.block_bytes)
    out = bytearray(frame.block_bytes)
    try:
        while word := _LITTLE_UINT32.unpack_from(data, pos)[0]:
            stop = pos + 4 + (word & ~_LZ4_RAW_BLOCK) + tail
            if stop > len(data):
                raise _lz4_cut_short()
            # Wrap the block in a frame, so that the library checks the block's checksum.
            single_block = b"".join((head, data[pos:stop], _LZ4_END_MARK))
            used = cramjam.lz4.decompress_into(single_block, out)
            inflated += used
            yield memoryview(out)[:used]
            pos = stop
    except struct.error:
        raise _lz4_cut_short() from None
    except cramjam.DecompressionError as error:
        raise CorruptRecordError(f"lz4 records do not inflate: {error}") from None
    pos += 8 if frame.flags & _LZ4_HAS_CHECKSUM else 4
    if pos > len(data):
        raise _lz4_cut_short()
    if frame.content_bytes not in {None, inflated}:
        raise CorruptRecordError(f"an lz4 frame of {frame.content_bytes} bytes has {inflated}")
    return pos


@cache
def _lz4_block_header(has_checksums: bool, block_bytes: int) -> bytes:
    """Return the header of a frame of one block."""
    flags = 0x60 | (_LZ4_HAS_BLOCK_CHECKSUMS if has_checksums else 0)
    descriptor = bytes((flags, (block_bytes.bit_length() - 9) // 2 << 4))
    return _LZ4_FRAME_HEADER[:4] + descriptor + bytes((xxh32_short(descriptor) >> 8 & 0xFF,))


def _check_lz4_frame(data: memoryview) -> _Lz4Frame:
    """Raise CorruptRecordError unless ``data`` is exactly one frame of independent blocks."""
    frame = _lz4_frame(data, 0)
    pos, tail = frame.blocks_at, 4 if frame.flags & _LZ4_HAS_BLOCK_CHECKSUMS else 0
    try:
        while size := _LITTLE_UINT32.unpack_from(data, pos)[0]:
            pos += 4 + (size & ~_LZ4_RAW_BLOCK) + tail
    except struct.error:
        raise _lz4_cut_short() from None
    pos += 4 + (4 if frame.flags & _LZ4_HAS_CHECKSUM else 0)
    if frame.is_linked or pos != len(data):
        raise CorruptRecordError("lz4 records that are not one frame of independent blocks")
    return frame


def _lz4_block(raw: Data, level: int | None) -> bytes:
    """Compress one independent block, with its length: Java refuses dependent blocks.

    The library's block function only supports the fast mode. For other levels the block is taken
    out of a frame that has only this block; the frame function releases the GIL.
    """
    if level not in {None, _LZ4_FAST_LEVEL}:
        frame = memoryview(bytes(cramjam.lz4.compress(bytes(raw), level=level)))
        pos = _lz4_frame(frame, 0).blocks_at
        size = _LITTLE_UINT32.unpack_from(frame, pos)[0] & ~_LZ4_RAW_BLOCK
        return bytes(frame[pos : pos + 4 + size])
    block = bytes(cramjam.lz4.compress_block(raw, store_size=False))
    if len(block) < len(raw):
        return _LITTLE_UINT32.pack(len(block)) + block
    return _LITTLE_UINT32.pack(len(raw) | _LZ4_RAW_BLOCK) + bytes(raw)


def xxh32_short(data: bytes) -> int:
    """Hash up to 15 bytes with XXH32, seed 0 (without the part for longer inputs)."""
    mask = 0xFFFFFFFF
    value = 374761393 + len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        value = value + int.from_bytes(data[at : at + 4], "little") * 3266489917 & mask
        value = (value << 17 | value >> 15) * 668265263 & mask
    for byte in data[whole:]:
        value = value + byte * 374761393 & mask
        value = (value << 11 | value >> 21) * 2654435761 & mask
    value = (value ^ value >> 15) * 2246822519 & mask
    value = (value ^ value >> 13) * 3266489917 & mask
    return value ^ value >> 16


_INFLATED: Final[dict[Codec, Callable[[memoryview, int, bool], Iterator[Data]]]] = {
    Codec.NONE: _stored_pieces,
    Codec.GZIP: _gzip_pieces,
    Codec.SNAPPY: _snappy_pieces,
    Codec.LZ4: _lz4_pieces,
    Codec.ZSTD: _zstd_pieces,
}
