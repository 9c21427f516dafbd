"""The bytes of ``__consumer_offsets``.

The vectors were written by Apache Kafka 4.3.0's own serialisers, one per value version.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.groups import records
from fencepost.groups.assignors.client.protocol import subscribed_topics
from fencepost.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter
from fencepost.logcore.machine import Record, Written

TIME = 1_700_000_000_000
TOPIC_ID = bytes(range(1, 17))
OFFSET = OffsetCommitValue(1_234_567_890_123, 7, "méta", TIME)
OFFSET_BYTES = {
    0: "00000000011f71fb04cb00056dc3a974610000018bcfe56800",
    1: "00010000011f71fb04cb00056dc3a974610000018bcfe56800ffffffffffffffff",
    2: "00020000011f71fb04cb00056dc3a974610000018bcfe56800",
    3: "00030000011f71fb04cb0000000700056dc3a974610000018bcfe56800",
    4: "00040000011f71fb04cb00000007066dc3a974610000018bcfe5680000",
}
OFFSET_WITH_ID_BYTES = (
    "00040000011f71fb04cb00000007066dc3a974610000018bcfe568000100100102030405060708090a0b0c0d0e0f10"
)
OFFSET_WITH_EXPIRY_BYTES = "00010000011f71fb04cb00056dc3a974610000018bcfe568000000018bcfe57b88"
OFFSET_EMPTY_BYTES = "00040000000000000000ffffffff01000000000000000000"

FIRST = MemberMetadata(
    "c-1", "i-1", "c", "/127.0.0.1", 300_000, 45_000, b"\x00\x01\x02", b"\x09\x08"
)
SECOND = MemberMetadata("c-2", None, "c", "/127.0.0.1", 300_000, 45_000, b"", b"")
GROUP = GroupMetadataValue("consumer", 5, "range", "c-1", TIME, (FIRST, SECOND))
GROUP_BYTES = {
    0: "00000008636f6e73756d657200000005000572616e67650003632d31000000020003632d31000163000a2f31"
    "32372e302e302e310000afc8000000030001020000000209080003632d32000163000a2f3132372e302e302e31"
    "0000afc80000000000000000",
    1: "00010008636f6e73756d657200000005000572616e67650003632d31000000020003632d31000163000a2f31"
    "32372e302e302e31000493e00000afc8000000030001020000000209080003632d32000163000a2f3132372e30"
    "2e302e31000493e00000afc80000000000000000",
    2: "00020008636f6e73756d657200000005000572616e67650003632d310000018bcfe568000000000200036"
    "32d31000163000a2f3132372e302e302e31000493e00000afc80000000300010200000002090800"
    "03632d32000163000a2f3132372e302e302e31000493e00000afc80000000000000000",
    3: "00030008636f6e73756d657200000005000572616e67650003632d310000018bcfe568000000000200036"
    "32d310003692d31000163000a2f3132372e302e302e31000493e00000afc80000000300010200000002090800"
    "03632d32ffff000163000a2f3132372e302e302e31000493e00000afc80000000000000000",
    4: "000409636f6e73756d6572000000050672616e676504632d310000018bcfe568000304632d3104692d310263"
    "0b2f3132372e302e302e31000493e00000afc8040001020309080004632d320002630b2f3132372e302e302e31"
    "000493e00000afc801010000",
}
GROUP_EMPTY_BYTES = "0003000000000000ffffffff000000000000000100000000"
OFFSET_KEY = bytes.fromhex("000100056772c3bc700003746f7000000003")
GROUP_KEY = bytes.fromhex("000200056772c3bc70")


def decode_value(key: bytes, value: str):
    decoded = records.decode(Record(key, bytes.fromhex(value)))
    assert decoded is not None
    return decoded[1]


def test_encoded_keys_equal_kafkas_bytes():
    assert records.offset_tombstone("grüp", "top", 3).key == OFFSET_KEY
    assert records.group_tombstone("grüp").key == GROUP_KEY
    assert records.decode(Record(OFFSET_KEY, None)) == (OffsetCommitKey("grüp", "top", 3), None)
    assert records.decode(Record(GROUP_KEY, None)) == (GroupMetadataKey("grüp"), None)
    legacy = b"\x00\x00" + OFFSET_KEY[2:]
    assert records.decode(Record(legacy, None)) == (OffsetCommitKey("grüp", "top", 3), None)


def test_encoded_offset_commits_equal_kafkas_bytes():
    assert records.offset_commit("g", "t", 0, OFFSET).value.hex() == OFFSET_BYTES[4]
    with_id = OffsetCommitValue(OFFSET.offset, 7, "méta", TIME, topic_id=TOPIC_ID)
    assert records.offset_commit("g", "t", 0, with_id).value.hex() == OFFSET_WITH_ID_BYTES
    expiring = OffsetCommitValue(OFFSET.offset, -1, "méta", TIME, TIME + 5_000)
    assert records.offset_commit("g", "t", 0, expiring).value.hex() == OFFSET_WITH_EXPIRY_BYTES
    assert (
        records.offset_commit("g", "t", 0, OffsetCommitValue(0, -1, "", 0)).value.hex()
        == OFFSET_EMPTY_BYTES
    )
    zero_id = OffsetCommitValue(0, -1, "", 0, topic_id=bytes(16))
    assert records.offset_commit("g", "t", 0, zero_id).value.hex() == OFFSET_EMPTY_BYTES


def test_encoded_group_metadata_equals_kafkas_bytes():
    assert records.group_metadata("g", GROUP).value.hex() == GROUP_BYTES[3]
    created = GroupMetadataValue("", 0, None, None, 1, ())
    assert records.group_metadata("g", created).value.hex() == GROUP_EMPTY_BYTES


@pytest.mark.parametrize("version", range(5))
def test_offset_commit_of_every_version_is_decoded(version):
    epoch = 7 if version >= 3 else -1
    expected = OffsetCommitValue(OFFSET.offset, epoch, "méta", TIME)
    assert decode_value(OFFSET_KEY, OFFSET_BYTES[version]) == expected


def test_expire_timestamp_and_topic_id_are_decoded():
    assert decode_value(OFFSET_KEY, OFFSET_WITH_EXPIRY_BYTES).expire_timestamp_ms == TIME + 5_000
    assert decode_value(OFFSET_KEY, OFFSET_WITH_ID_BYTES).topic_id == TOPIC_ID
    zero = OFFSET_BYTES[4][:-2] + "010010" + "00" * 16
    assert decode_value(OFFSET_KEY, zero).topic_id is None


@pytest.mark.parametrize("version", range(5))
def test_group_metadata_of_every_version_is_decoded(version):
    value = decode_value(GROUP_KEY, GROUP_BYTES[version])
    timeout = 300_000 if version >= 1 else 45_000
    assert value.state_timestamp_ms == (TIME if version >= 2 else -1)
    assert [member.rebalance_timeout_ms for member in value.members] == [timeout] * 2
    instance = "i-1" if version >= 3 else None
    assert [member.group_instance_id for member in value.members] == [instance, None]
    assert [member.subscription for member in value.members] == [b"\x00\x01\x02", b""]
    assert [member.assignment for member in value.members] == [b"\x09\x08", b""]
    assert (value.protocol_type, value.generation_id, value.protocol_name, value.leader) == (
        "consumer",
        5,
        "range",
        "c-1",
    )


@pytest.mark.parametrize("version", ["0005", "00ff", "ffff"])
@pytest.mark.parametrize("key", [OFFSET_KEY, GROUP_KEY])
def test_value_of_an_unknown_version_is_corrupt(key, version):
    with pytest.raises(CorruptRecordError):
        decode_value(key, version + OFFSET_BYTES[4][4:])


def test_unknown_tagged_fields_are_skipped():
    tagged = OFFSET_BYTES[4][:-2] + "01" + "07" + "02" + "abcd"
    assert decode_value(OFFSET_KEY, tagged) == OFFSET


@pytest.mark.parametrize("key_type", ["0009", "0018", "00ff"])
def test_record_of_an_unknown_type_is_skipped(key_type):
    assert records.decode(Record(bytes.fromhex(key_type + "0001"), b"??")) is None


@pytest.mark.parametrize("hexed", ["", "00", "0001", "00010005ab", "0002ffff", "00020001ff"])
def test_malformed_key_is_corrupt(hexed):
    with pytest.raises(CorruptRecordError):
        records.decode(Record(bytes.fromhex(hexed), None))


@pytest.mark.parametrize(
    ("key", "whole"),
    [(OFFSET_KEY, value) for value in (*OFFSET_BYTES.values(), OFFSET_WITH_ID_BYTES)]
    + [(GROUP_KEY, value) for value in GROUP_BYTES.values()],
)
def test_value_truncated_at_any_byte_is_corrupt(key, whole):
    value = bytes.fromhex(whole)
    for length in range(len(value)):
        with pytest.raises(CorruptRecordError):
            records.decode(Record(key, value[:length]))


@pytest.mark.parametrize("value", ["ffffffff", "7fffffff", "00000001"])
def test_impossible_array_count_is_corrupt(value):
    broken = GROUP_EMPTY_BYTES[:-8] + value
    with pytest.raises(CorruptRecordError):
        decode_value(GROUP_KEY, broken)


@pytest.mark.parametrize(
    "tags", ["05", "0100020102", "ffffffffff01", "ffffffff7f", "01000fff" + "00" * 14]
)
def test_malformed_tagged_fields_are_corrupt(tags):
    with pytest.raises(CorruptRecordError):
        decode_value(OFFSET_KEY, OFFSET_BYTES[4][:-2] + tags)


@given(st.binary(max_size=200), st.binary(max_size=60), st.sampled_from(range(3)))
def test_random_bytes_decode_or_are_corrupt(value, key, kind):
    for tried in (key, kind.to_bytes(2, "big") + key, OFFSET_KEY, GROUP_KEY):
        try:
            records.decode(Record(tried, value))
        except CorruptRecordError:
            continue


texts = st.text(max_size=20)


@given(
    st.builds(
        OffsetCommitValue,
        st.integers(-1, 2**63 - 1),
        st.integers(-1, 2**31 - 1),
        texts,
        st.integers(-1, 2**63 - 1),
        st.just(-1),
        st.none() | st.binary(min_size=16, max_size=16).filter(any),
    )
)
def test_encoded_offset_commit_decodes_to_the_same_value(value):
    assert decode_value(OFFSET_KEY, records.offset_commit("g", "t", 0, value).value.hex()) == value


@given(
    texts,
    st.integers(0, 2**31 - 1),
    st.builds(
        OffsetCommitValue,
        st.integers(-1, 2**63 - 1),
        st.integers(-1, 2**31 - 1),
        texts | st.just("m" * 127),
        st.integers(-1, 2**63 - 1),
        st.just(-1) | st.integers(0, 2**63 - 1),
        st.none() | st.just(bytes(16)) | st.binary(min_size=16, max_size=16),
    ),
)
def test_content_kept_with_a_new_record_equals_its_decoded_bytes(name, partition, value):
    record = records.offset_commit(name, name, partition, value)
    content = record.decoded if type(record) is Written else None
    read = records.decode(Record(*record))
    if value.expire_timestamp_ms == -1 and value.topic_id != bytes(16):
        assert content == read
        assert list(map(type, content)) == list(map(type, read))
    else:
        assert content is None


@given(
    st.builds(
        GroupMetadataValue,
        texts,
        st.integers(0, 2**31 - 1),
        st.none() | texts,
        st.none() | texts,
        st.integers(-1, 2**63 - 1),
        st.lists(
            st.builds(
                MemberMetadata,
                texts,
                st.none() | texts,
                texts,
                texts,
                st.integers(0, 2**31 - 1),
                st.integers(0, 2**31 - 1),
                st.binary(max_size=20),
                st.binary(max_size=20),
            ),
            max_size=4,
        ).map(tuple),
    )
)
def test_encoded_group_metadata_decodes_to_the_same_value(value):
    assert decode_value(GROUP_KEY, records.group_metadata("g", value).value.hex()) == value


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16_383, 16_384, 2**31, 2**32 - 1])
def test_encoded_uvarint_decodes_to_the_same_number(number):
    writer = FieldWriter(0)
    writer.uvarint(number)
    reader = FieldReader(writer.done())
    reader.int16()
    assert reader.uvarint() == number
    assert reader.remaining == 0


def test_flexible_writer_equals_kafkas_bytes():
    writer = FieldWriter(4, flexible=True)
    writer.string(GROUP.protocol_type)
    writer.int32(GROUP.generation_id)
    writer.string(GROUP.protocol_name)
    writer.string(GROUP.leader)
    writer.int64(GROUP.state_timestamp_ms)
    writer.count(len(GROUP.members))
    for member in GROUP.members:
        writer.string(member.member_id)
        writer.string(member.group_instance_id)
        writer.string(member.client_id)
        writer.string(member.client_host)
        writer.int32(member.rebalance_timeout_ms)
        writer.int32(member.session_timeout_ms)
        writer.bytes_(member.subscription)
        writer.bytes_(member.assignment)
        writer.tags({})
    writer.tags({})
    assert writer.done().hex() == GROUP_BYTES[4]


@pytest.mark.parametrize(
    ("metadata", "topics"),
    [
        ("0000" + "00000000", set()),
        ("0000" + "00000002" + "000174" + "000175" + "ffffffff", {"t", "u"}),
        ("0003" + "00000001" + "000174" + "00000000" + "deadbeef", {"t"}),
        ("7fff" + "00000001" + "000174", {"t"}),
        ("ffff" + "00000000", None),
        ("", None),
        ("00", None),
        ("0000" + "00000001", None),
        ("0000" + "00000001" + "0001ff", None),
        ("0000" + "00000001" + "ffff", None),
        ("0000" + "7fffffff", None),
    ],
)
def test_subscribed_topics_are_decoded_or_none_if_malformed(metadata, topics):
    assert subscribed_topics(bytes.fromhex(metadata)) == topics


@pytest.mark.parametrize("metadata", ["", "m", "é" * 63, "m" * 127, "m" * 128, "m" * 30_000])
def test_fast_path_decodes_offset_commits_like_the_general_decoder(metadata: str) -> None:
    """The fast path handles up to 126 bytes of metadata; the general path handles more."""
    value = OffsetCommitValue(7, -1, metadata, TIME, topic_id=TOPIC_ID)
    record = records.offset_commit("grüp", "top", 2**31 - 1, value)
    common = records._decode_common(record)
    assert (common is not None) == (len(metadata.encode()) <= 126)
    assert records.decode(record) == (OffsetCommitKey("grüp", "top", 2**31 - 1), value)


def test_damaged_offset_commit_of_the_fast_path_is_corrupt() -> None:
    record = records.offset_commit(
        "g", "t", 0, OffsetCommitValue(7, -1, "mm", TIME, topic_id=TOPIC_ID)
    )
    assert record.value is not None
    for damaged in (
        Record(record.key, record.value.replace(b"mm", b"m\xff")),
        Record(record.key[:6], record.value),
        Record(record.key, record.value[:-1]),
    ):
        with pytest.raises(CorruptRecordError):
            records.decode(damaged)
