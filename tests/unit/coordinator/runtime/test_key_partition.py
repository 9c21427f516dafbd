"""The partition of a key must be the same as in Java.

With another hash, a broker would look up a group's offsets in the wrong partition.
"""

import pytest

from fencepost.coordinator.runtime.key_partition import (
    MAX_CACHED_CHARACTERS,
    _cached_hash,
    java_string_hash,
    partition_for,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("group", 98629247),
        ("polygenelubricants", 0x8000_0000),  # the well-known string with the hash -2**31
        ("ä", 228),
        ("\U0001f600", (0xD83D * 31 + 0xDE00) & 0xFFFF_FFFF),  # two UTF-16 units
        ("\ud83d", 0xD83D),  # a lone surrogate is a unit
    ],
)
def test_string_hash_equals_the_hash_of_java(text: str, expected: int) -> None:
    assert java_string_hash(text) == expected


def test_hash_wraps_at_32_bits() -> None:
    signed = 0
    for char in "a rather long transactional id":
        signed = (signed * 31 + ord(char) + 2**31) % 2**32 - 2**31
    assert java_string_hash("a rather long transactional id") == signed % 2**32


def test_smallest_hash_maps_to_partition_zero() -> None:
    assert partition_for("polygenelubricants", 50) == 0


def test_negative_hash_maps_by_its_absolute_value() -> None:
    text = "a rather long transactional id"
    value = java_string_hash(text)
    negative = next(t for t in (f"{text}{n}" for n in range(100)) if java_string_hash(t) >= 2**31)
    value = java_string_hash(negative)
    assert partition_for(negative, 50) == (2**32 - value) % 50


def test_keys_map_to_partitions_in_range() -> None:
    assert {partition_for(f"group-{n}", 50) for n in range(5_000)} == set(range(50))
    assert partition_for("anything", 1) == 0


def test_long_key_is_hashed_and_not_cached() -> None:
    java_string_hash("g" * MAX_CACHED_CHARACTERS)
    kept = _cached_hash.cache_info()
    longer = "g" * (MAX_CACHED_CHARACTERS + 1)
    assert java_string_hash(longer) == (java_string_hash(longer[1:]) * 31 + ord("g")) % 2**32
    assert _cached_hash.cache_info().currsize == kept.currsize
