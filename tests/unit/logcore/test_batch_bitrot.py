"""Flip every bit of a batch: the damage is detected, except in fields outside the CRC."""

from __future__ import annotations

import pytest

from fencepost.logcore.batch import parse_header, verify_crc
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.legacy import iter_messages, parse_message, verify_message_crc
from tests.unit.logcore.kafka_batches import BYTES

PLACED_BY_THE_LEADER = {*range(8), *range(12, 16)}
"""Base offset and leader epoch. Length and magic are outside the CRC too, but are checked."""


def undetected_v2(batch: bytes) -> set[int]:
    found = set()
    for position in range(len(batch)):
        for bit in range(8):
            rotten = bytearray(batch)
            rotten[position] ^= 1 << bit
            try:
                verify_crc(rotten, 0, parse_header(rotten))
            except CorruptRecordError:
                continue
            found.add(position)
    return found


@pytest.mark.parametrize("name", ["m2-none", "m2-gzip", "m2-snappy", "m2-lz4", "m2-zstd", "empty"])
def test_every_flipped_bit_that_the_crc_covers_is_detected(name: str) -> None:
    assert undetected_v2(BYTES[name]) == PLACED_BY_THE_LEADER


@pytest.mark.parametrize("name", ["m2-none", "marker-ABORT"])
def test_every_flipped_bit_is_detected_if_more_batches_follow(name: str) -> None:
    # With a longer length the CRC is computed over following bytes too, and detects the damage.
    neighbour = BYTES["m2-gzip"]
    here = undetected_v2(BYTES[name] + neighbour) & set(range(len(BYTES[name])))
    assert here == PLACED_BY_THE_LEADER


@pytest.mark.parametrize("name", ["m0-gzip", "m0-lz4", "m1-gzip", "m1-snappy", "m1-lz4-lat"])
def test_every_flipped_bit_of_an_old_message_except_its_offset_is_detected(name: str) -> None:
    message = BYTES[name]
    assert len(list(iter_messages(message))) == 1
    found = set()
    for position in range(len(message)):
        for bit in range(8):
            rotten = bytearray(message)
            rotten[position] ^= 1 << bit
            try:
                verify_message_crc(rotten, 0, parse_message(rotten))
            except CorruptRecordError:
                continue
            found.add(position)
    assert found == set(range(8))
