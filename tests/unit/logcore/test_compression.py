"""The codecs: frames that Java reads, and limits against decompression bombs."""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import struct
import sys
import time
import tracemalloc
import zlib

import cramjam
import pytest
from aiokafka import codec as aiokafka_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.compression import (
    Codec,
    _zstd_library,
    codec_for_id,
    compress,
    compressed_pieces,
    decompress,
)
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError

CODECS = [codec for codec in Codec if codec is not Codec.NONE]
MIB = 1 << 20
TEXT = b'{"carrier": "UA", "flight": 1545, "origin": "EWR"}' * 3000
AIOKAFKA = {
    Codec.GZIP: (aiokafka_codec.gzip_encode, aiokafka_codec.gzip_decode),
    Codec.SNAPPY: (aiokafka_codec.snappy_encode, aiokafka_codec.snappy_decode),
    Codec.LZ4: (aiokafka_codec.lz4_encode, aiokafka_codec.lz4_decode),
    Codec.ZSTD: (aiokafka_codec.zstd_encode, aiokafka_codec.zstd_decode),
}


def zstd_stream(data: bytes) -> bytes:
    """Return a frame without a content size, like frames of streaming writers."""
    compressor = cramjam.zstd.Compressor(level=3)
    compressor.compress(data)
    return bytes(compressor.finish())


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [0, 1, 100, 32_768, 32_769, 65_536, 65_537, 150_000])
def test_compressed_bytes_decompress_to_the_same_bytes(codec: Codec, size: int) -> None:
    for data in (TEXT[:size], os.urandom(size), bytes(size)):
        packed = compress(codec, memoryview(data))
        assert decompress(codec, bytearray(packed), size) == data


@pytest.mark.parametrize("codec", CODECS)
def test_aiokafka_and_fencepost_decompress_each_others_bytes(codec: Codec) -> None:
    encode, decode = AIOKAFKA[codec]
    assert decode(compress(codec, TEXT)) == TEXT
    assert decompress(codec, encode(TEXT), len(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("codec", "levels"),
    [(Codec.GZIP, (1, 6, 9, -1)), (Codec.LZ4, (1, 9, 17)), (Codec.ZSTD, (-5, 1, 3, 19))],
)
def test_bytes_compressed_at_every_level_decompress(codec: Codec, levels: tuple[int, ...]) -> None:
    for level in levels:
        packed = compress(codec, TEXT, level)
        assert decompress(codec, packed, len(TEXT)) == TEXT


@pytest.mark.parametrize("level", [19, 20, 21, 22])
def test_zstd_of_large_batches_keeps_the_tables_of_level_19_at_higher_levels(level: int) -> None:
    piece, pieces = bytes(MIB), 32
    size = pieces * len(piece)
    frame = b"".join(compressed_pieces(Codec.ZSTD, [piece] * pieces, level, size))
    window_log = 10 + (frame[5] >> 3)
    assert window_log == 23, "the window would make the compressor's tables larger"
    assert decompress(Codec.ZSTD, frame, size) == bytes(size)


def test_lz4_is_fast_at_kafkas_default_level_only() -> None:
    data = b"".join(b"%d,%d;" % (index, index * index % 997) for index in range(9000))
    fast = compress(Codec.LZ4, data)
    assert compress(Codec.LZ4, data, 9) == fast
    assert len(compress(Codec.LZ4, data, 8)) < len(fast)


@pytest.mark.parametrize("level", [None, 1, 9])
def test_lz4_blocks_are_independent_and_64_kib(level: int | None) -> None:
    frame = compress(Codec.LZ4, TEXT, level)
    assert frame[:4] == b"\x04\x22\x4d\x18"
    flags, block = frame[4], frame[5]
    assert flags >> 6 == 1, "version"
    assert flags & 0x20, "independent blocks"
    assert not flags & 0x0D, "no content checksum, content size or dictionary"
    assert block == 0x40


def test_lz4_with_dependent_blocks_is_read() -> None:
    assert decompress(Codec.LZ4, bytes(cramjam.lz4.compress(TEXT)), len(TEXT)) == TEXT


def test_snappy_is_framed_as_snappy_java_does() -> None:
    packed = compress(Codec.SNAPPY, TEXT)
    assert packed.startswith(b"\x82SNAPPY\0\0\0\0\1\0\0\0\1")
    first = struct.unpack_from(">i", packed, 16)[0]
    assert bytes(cramjam.snappy.decompress_raw(packed[20 : 20 + first])) == TEXT[: 32 * 1024]


def test_raw_concatenated_and_other_endian_snappy_is_decompressed() -> None:
    raw = bytes(cramjam.snappy.compress_raw(TEXT))
    assert decompress(Codec.SNAPPY, raw, len(TEXT)) == TEXT
    framed = compress(Codec.SNAPPY, TEXT)
    assert decompress(Codec.SNAPPY, framed + framed, 2 * len(TEXT)) == TEXT + TEXT
    other_endian = framed[:8] + struct.pack("<ii", 1, 1) + framed[16:]
    assert decompress(Codec.SNAPPY, other_endian, len(TEXT)) == TEXT


def test_concatenated_gzip_members_and_frames_are_decompressed() -> None:
    members = gzip.compress(b"one") + gzip.compress(b"") + gzip.compress(TEXT)
    assert decompress(Codec.GZIP, members, MIB) == b"one" + TEXT
    for encode in (lambda data: compress(Codec.ZSTD, data), zstd_stream):
        assert decompress(Codec.ZSTD, encode(b"one") + encode(TEXT), MIB) == b"one" + TEXT
    skipped = b"\x50\x2a\x4d\x18\x02\0\0\0ab"
    assert decompress(Codec.ZSTD, skipped + compress(Codec.ZSTD, TEXT), MIB) == TEXT
    frames = compress(Codec.LZ4, b"one") + compress(Codec.LZ4, TEXT)
    assert decompress(Codec.LZ4, frames, MIB) == b"one" + TEXT


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("data", [TEXT, bytes(MIB), b"x"])
def test_output_of_exactly_the_limit_is_accepted_one_byte_more_is_refused(
    codec: Codec, data: bytes
) -> None:
    packed = compress(codec, data)
    assert decompress(codec, packed, len(data)) == data
    with pytest.raises(CorruptRecordError):
        decompress(codec, packed, len(data) - 1)


@functools.cache
def bombs() -> dict[str, tuple[Codec, bytes]]:
    size = 64 * MIB
    zeros = bytes(size)
    raw = bytes(cramjam.snappy.compress_raw(zeros))
    return {
        "gzip": (Codec.GZIP, zlib.compress(zeros, 9, 31)),
        "gzip members": (Codec.GZIP, gzip.compress(bytes(MIB)) * 64),
        "snappy": (Codec.SNAPPY, compress(Codec.SNAPPY, zeros)),
        "snappy raw": (Codec.SNAPPY, raw),
        "snappy lie": (Codec.SNAPPY, b"\xff\xff\xff\xff\x0f"),
        "snappy lie in the limit": (Codec.SNAPPY, b"\x80\x80\x40" + raw[:50]),
        "lz4": (Codec.LZ4, compress(Codec.LZ4, zeros)),
        "zstd": (Codec.ZSTD, compress(Codec.ZSTD, zeros)),
        "zstd stream": (Codec.ZSTD, zstd_stream(zeros[: 8 * MIB])),
        "zstd lie": (Codec.ZSTD, b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\1\0\0"),
        "zstd frames": (Codec.ZSTD, compress(Codec.ZSTD, bytes(MIB)) * 64),
    }


@pytest.mark.parametrize("name", list(bombs()))
def test_decompression_bomb_is_refused_within_the_memory_limit(name: str) -> None:
    codec, data = bombs()[name]
    limit = 2 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecordError):
            decompress(codec, data, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The decompressor holds the output, twice when it grows, and copies of the input.
    assert peak < 3 * limit + 2 * len(data)


def test_zstd_works_without_a_streaming_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    _zstd_library.cache_clear()
    try:
        assert _zstd_library() is None
        for size in (0, 1, 150_000):
            packed = b"".join(compressed_pieces(Codec.ZSTD, (TEXT[:size],)))
            assert decompress(Codec.ZSTD, packed, size) == TEXT[:size]
        for data, limit in ((compress(Codec.ZSTD, TEXT), len(TEXT) - 1), (packed[:-9], MIB)):
            with pytest.raises(CorruptRecordError):
                decompress(Codec.ZSTD, data, limit)
    finally:
        _zstd_library.cache_clear()


def test_many_tiny_gzip_members_take_linear_time() -> None:
    data = gzip.compress(b"") * 50_000
    started = time.perf_counter()
    assert decompress(Codec.GZIP, data, 10) == b""
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("keep", [0, 1, 3, 5, 12, 17, 19, 0.5, -1])
def test_truncated_input_is_corrupt(codec: Codec, keep: float) -> None:
    packed = compress(codec, TEXT)
    cut = packed[: int(len(packed) * keep) if isinstance(keep, float) else keep]
    with pytest.raises(CorruptRecordError):
        decompress(codec, cut, MIB)


@pytest.mark.parametrize("codec", CODECS)
def test_trailing_garbage_is_corrupt(codec: Codec) -> None:
    with pytest.raises(CorruptRecordError):
        decompress(codec, compress(codec, TEXT) + b"garbage!", MIB)


@given(codec=st.sampled_from(CODECS), data=st.binary(max_size=300), start=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_random_bytes_inflate_or_are_refused(codec: Codec, data: bytes, start: int) -> None:
    packed = compress(codec, TEXT[:500])[:start] + data
    with contextlib.suppress(CorruptRecordError):
        assert len(decompress(codec, packed, 4096)) <= 4096


def test_codec_ids_map_to_codecs_and_an_unknown_id_is_invalid() -> None:
    assert [codec_for_id(number) for number in range(5)] == list(Codec)
    with pytest.raises(InvalidRecordError):
        codec_for_id(5)
