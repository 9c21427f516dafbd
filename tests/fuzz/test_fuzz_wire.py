"""Arbitrary frames decode to a request or cause a permitted error, within bounded memory.

The cases have a seed and a number, so a failure can be repeated. Noise is made from valid frames of
all APIs and versions, because purely random bytes never get past the header.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import pytest

from fencepost.protocol.api import APIS
from fencepost.protocol.codec import (
    Request,
    decode_request,
    decode_response,
    encode_request,
)
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion
from fencepost.protocol.frames import FrameBuffer
from fencepost.protocol.schema import message_class
from fencepost.protocol.writer import uvarint
from tests.fuzz.entities import random_entity

CASES = 20_000
"""How many cases of each kind of noise there are."""
FEW_CASES = 2_000
"""How many cases of each kind run in ``make test``."""
MAX_OBJECTS = 2_000
SERVED = {key: (api.min_version, api.max_version) for key, api in APIS.items()}


def corpus() -> list[bytes]:
    rng = random.Random(1)
    frames = []
    for api in APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            entity = random_entity(message_class(api.key, version, "request"), rng, width=2)
            frames.append(b"".join(encode_request(api.key, version, 1, "fuzz", entity))[4:])
    return frames


def flip_bits(frame: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 8)):
        frame[rng.randrange(8, len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


def cut(frame: bytearray, rng: random.Random) -> bytes:
    return bytes(frame[: rng.randrange(len(frame))])


def insert(frame: bytearray, rng: random.Random) -> bytes:
    at = rng.randrange(8, len(frame) + 1)
    frame[at:at] = rng.randbytes(rng.randint(1, 40))
    return bytes(frame)


def big_numbers(frame: bytearray, rng: random.Random) -> bytes:
    """Overwrite some bytes with a count or length that is slightly or absurdly too large."""
    value = rng.choice((len(frame), 1000, 2**15 - 1, 2**20, 2**31 - 1, 2**32 - 1))
    number = rng.choice(
        (uvarint(value), struct.pack(">I", value), b"\xff" * 4, b"\x80\0\0\0", b"\xff" * 6)
    )
    at = rng.randrange(8, len(frame) + 1)
    frame[at : at + len(number)] = number
    return bytes(frame)


def splice(frame: bytearray, rng: random.Random) -> bytes:
    """Replace the API key and the version by random values, and keep the body."""
    key = rng.choice(list(SERVED))
    frame[0:4] = struct.pack(">hh", key, rng.randint(*SERVED[key]))
    return bytes(frame)


def noise(_frame: bytearray, rng: random.Random) -> bytes:
    key = rng.choice(list(SERVED))
    head = struct.pack(">hhih", key, rng.randint(*SERVED[key]), 1, -1)
    return rng.choice((b"", head, head + b"\0")) + rng.randbytes(rng.randrange(200))


@pytest.mark.parametrize("cases", [FEW_CASES, pytest.param(CASES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mutate", [flip_bits, cut, insert, big_numbers, splice, noise])
def test_any_bytes_are_a_request_or_a_permitted_error(
    mutate: Callable[[bytearray, random.Random], bytes], cases: int
) -> None:
    frames = corpus()
    rng = random.Random(mutate.__name__)
    good = bad = 0
    tracemalloc.start()
    try:
        for _ in range(cases):
            frame = mutate(bytearray(rng.choice(frames)), rng)
            try:
                request = decode_request(frame, SERVED, max_objects=MAX_OBJECTS)
            except (MalformedRequest, UnsupportedVersion):
                bad += 1
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__} for {frame.hex()}") from error
            else:
                assert isinstance(request, Request)
                good += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bad > 100
    assert peak < 64 << 20


def test_any_bytes_are_a_response_or_a_permitted_error() -> None:
    rng = random.Random(5)
    keys = list(SERVED)
    for _ in range(5 * CASES):
        key = rng.choice(keys)
        frame = rng.randbytes(rng.randrange(100))
        try:
            decode_response(key, rng.randint(*SERVED[key]), frame)
        except MalformedRequest:
            continue


def test_frames_are_the_same_for_any_fragmentation() -> None:
    rng = random.Random(7)
    for _ in range(CASES // 1_000):
        sizes = [rng.choice((0, 1, 9, 5000, 70_000, 300_000)) for _ in range(rng.randint(1, 6))]
        frames = [rng.randbytes(size) for size in sizes]
        stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
        buffer = FrameBuffer(300_000)
        step = rng.choice((3, 1000, 65_536, 10**6))
        got: list[bytes] = []
        pos = 0
        while pos < len(stream):
            room = buffer.writable()
            assert len(room) > 0
            count = min(len(room), step, len(stream) - pos)
            room[:count] = stream[pos : pos + count]
            buffer.received(count)
            pos += count
            while (frame := buffer.next_frame()) is not None:
                got.append(bytes(frame))
        assert got == frames
        assert buffer.pending == 0
