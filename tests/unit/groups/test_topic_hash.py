"""The topic hash of a consumer group equals Kafka's hash, as Kafka may load such records."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_intdigest

from fencepost.groups.consumer_commands import TopicsImage
from fencepost.groups.consumer_target import metadata_hash
from fencepost.groups.topic_hash import group_hash, topic_hash

BY_SIZE = {
    0: 3244421341483603138,
    1: 1433843135270481901,
    3: -6266602912829716452,
    4: 7895465118229274323,
    8: 6941064856527638883,
    9: -72226354546400344,
    16: -5131753158909839995,
    17: 8163341949877205007,
    33: 4486878507168070088,
    64: 2917965298538373825,
    65: -9038134159117547962,
    97: 2137665177113230204,
    128: 7440608504995537343,
    129: -4150982730466284604,
    150: -2099654248002752798,
    160: -2950444285678012285,
    200: 8389308914288017243,
    240: 7229805477010515663,
    241: -8364630114420064745,
    256: 4339360625268998362,
    300: -172648679454408153,
    512: -756038794506822371,
    1023: -3284946428344021948,
    1024: -7241394453710343503,
    1025: -9192937061388044938,
    1088: 3424848841118183642,
    2000: 8212356305084836938,
    4096: -2935635270157212802,
    5000: 8762507191635236893,
}
"""Number of bytes → the hash of the bytes 3, 10, 17 and so on that hash4j 0.22 computes in Java."""


@pytest.mark.parametrize("size", BY_SIZE)
def test_xxh3_of_the_library_equals_hash4j(size: int) -> None:
    data = bytes((at * 7 + 3) & 255 for at in range(size))
    assert xxh3_64_intdigest(data) == BY_SIZE[size] & (1 << 64) - 1


ID = bytes(range(16))
TOPICS = {
    (): -6864518685027797556,
    (("a", "b"), ("b",), ()): -8765270811213858875,
}
"""Racks of three partitions → the topic's hash by Kafka's ``Utils.computeTopicHash``."""


@pytest.mark.parametrize("racks", TOPICS)
def test_topic_hash_equals_kafkas(racks: tuple[tuple[str, ...], ...]) -> None:
    assert topic_hash("tópic-😀", ID, 3, racks) == TOPICS[racks]


def test_group_hash_equals_kafkas_and_is_0_without_topics() -> None:
    """Topics are hashed in the order of their names; the hash of no topics is 0."""
    assert group_hash([("b", 2), ("a", -1), ("c", 3)]) == 5761250613315063933
    assert group_hash([]) == 0


def test_metadata_hash_covers_existing_topics_partition_counts_and_racks() -> None:
    """The hash covers ids, partition counts and racks, and ignores topics that do not exist."""

    def of(*names: str, count: int = 1, racks: tuple[tuple[str, ...], ...] = ()) -> int:
        image = TopicsImage({"t": (ID, count), "u": (ID, 1)}, 1, lambda _: racks)
        return metadata_hash(image, frozenset(names))

    assert of() == of("gone") == 0
    assert of("t") == of("t", "gone")
    different = of("t"), of("u"), of("t", "u"), of("t", count=2), of("t", racks=(("a",),))
    assert len(set(different)) == len(different)
