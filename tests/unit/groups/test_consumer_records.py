"""The bytes of consumer groups' records.

The vectors were written by Apache Kafka 4.3.0's own serialisers.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.groups import consumer_records as cr
from fencepost.groups import records
from fencepost.groups.consumer_records import (
    ConsumerKey,
    ConsumerRecordType,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import Record

GROUP, MEMBER, REGEX = "grüp", "m-1", "t.*"
TIME = 1_700_000_000_000
A, B = bytes(range(1, 17)), bytes(range(17, 33))

KEYS = {
    "000300056772c3bc70": (ConsumerRecordType.GROUP_METADATA,),
    "000400056772c3bc70": (ConsumerRecordType.PARTITION_METADATA,),
    "000500056772c3bc7000036d2d31": (ConsumerRecordType.MEMBER_METADATA, MEMBER),
    "000600056772c3bc70": (ConsumerRecordType.TARGET_ASSIGNMENT_METADATA,),
    "000700056772c3bc7000036d2d31": (ConsumerRecordType.TARGET_ASSIGNMENT_MEMBER, MEMBER),
    "000800056772c3bc7000036d2d31": (ConsumerRecordType.CURRENT_MEMBER_ASSIGNMENT, MEMBER),
    "001000056772c3bc700003742e2a": (ConsumerRecordType.REGULAR_EXPRESSION, REGEX),
}
MEMBER_VALUE = cr.ConsumerMemberValue(
    "i-1", "r", "c", "/127.0.0.1", ("t", "ü"), REGEX, 300_000, "uniform"
)
BARE = cr.ConsumerMemberValue(None, None, "c", "h", (), None, -1, None)
CLASSIC = cr.ConsumerMemberValue(
    *("i-1", "r", "c", "/127.0.0.1", ("t", "ü"), REGEX, 300_000, "uniform"),
    cr.ClassicMemberMetadata(45_000, (("range", b"\x01\x02"),)),
)
CURRENT = cr.CurrentAssignmentValue(
    member_epoch=6,
    previous_member_epoch=5,
    state=1,
    assigned=(cr.AssignedPartitions(A, (0, 2), (3, 6)),),
    pending_revocation=(cr.AssignedPartitions(B, (1,)),),
)
MEMBER_BYTES = (
    "000004692d31027202630b2f3132372e302e302e3103027403c3bc04742e2a000493e008756e69666f726d"
)
NOT_CLASSIC = "01000100"
"""A tagged field with null. Without the field, a broker takes the member for a classic member."""
A_HEX, B_HEX = A.hex(), B.hex()
VALUES = [
    (cr.group_epoch(GROUP, cr.GroupEpochValue(7)), "00000000000700"),
    (cr.group_epoch(GROUP, cr.GroupEpochValue(7, -5)), "000000000007010008fffffffffffffffb"),
    (cr.member(GROUP, MEMBER, MEMBER_VALUE), MEMBER_BYTES + NOT_CLASSIC),
    (cr.member(GROUP, MEMBER, BARE), "00000000026302680100ffffffff00" + NOT_CLASSIC),
    (
        cr.member(GROUP, MEMBER, CLASSIC),
        MEMBER_BYTES + "010011010000afc8020672616e67650301020000",
    ),
    (cr.assignment_epoch(GROUP, cr.AssignmentEpochValue(6)), "00000000000600"),
    (
        cr.assignment_epoch(GROUP, cr.AssignmentEpochValue(6, TIME)),
        "0000000000060100080000018bcfe56800",
    ),
    (
        cr.target_assignment(GROUP, MEMBER, cr.TargetAssignmentValue(((A, (0, 2)), (B, (1,))))),
        f"000003{A_HEX}03000000000000000200{B_HEX}02000000010000",
    ),
    (cr.target_assignment(GROUP, MEMBER, cr.TargetAssignmentValue(())), "00000100"),
    (
        cr.current_assignment(GROUP, MEMBER, CURRENT),
        (
            f"000000000006000000050102{A_HEX}030000000000000002010009030000000300000006"
            f"02{B_HEX}02000000010000"
        ),
    ),
    (
        cr.current_assignment(GROUP, MEMBER, cr.CurrentAssignmentValue(-2, 5, 0, (), ())),
        "0000fffffffe0000000500010100",
    ),
    (
        cr.regular_expression(GROUP, REGEX, cr.RegularExpressionValue(("t", "tt"), 9, TIME)),
        "000003027403747400000000000000090000018bcfe5680000",
    ),
]


@pytest.mark.parametrize(("expected", "names"), KEYS.items())
def test_encoded_keys_equal_kafkas_bytes(expected, names):
    kind, *rest = names
    record = cr.tombstone(kind, GROUP, *rest)
    assert record == Record(bytes.fromhex(expected), None)
    decoded = records.decode(record)
    assert decoded is not None
    key, value = decoded
    assert value is None
    assert key == ConsumerKey(kind, GROUP, *rest)


@pytest.mark.parametrize(("record", "expected"), VALUES)
def test_encoded_values_equal_kafkas_bytes(record, expected):
    assert record.value.hex() == expected
    key = next(key for key in KEYS if key[:4] == record.key[:2].hex())
    assert record.key.hex() == key


@pytest.mark.parametrize(
    "value",
    [MEMBER_VALUE, BARE, CLASSIC],
)
def test_encoded_member_metadata_decodes_to_the_same_value(value):
    decoded = records.decode(cr.member(GROUP, MEMBER, value))
    assert decoded == (ConsumerKey(ConsumerRecordType.MEMBER_METADATA, GROUP, MEMBER), value)


def test_encoded_values_of_other_types_decode_to_the_same_value():
    for record, value in [
        (cr.group_epoch(GROUP, cr.GroupEpochValue(7, -5)), cr.GroupEpochValue(7, -5)),
        (
            cr.assignment_epoch(GROUP, cr.AssignmentEpochValue(6, TIME)),
            cr.AssignmentEpochValue(6, TIME),
        ),
        (
            cr.target_assignment(GROUP, MEMBER, cr.TargetAssignmentValue(((A, (0, 2)),))),
            cr.TargetAssignmentValue(((A, (0, 2)),)),
        ),
        (cr.current_assignment(GROUP, MEMBER, CURRENT), CURRENT),
        (
            cr.regular_expression(GROUP, REGEX, cr.RegularExpressionValue(("t",), 9, TIME)),
            cr.RegularExpressionValue(("t",), 9, TIME),
        ),
    ]:
        decoded = records.decode(record)
        assert decoded is not None
        assert decoded[1] == value


def test_old_partition_metadata_decodes_to_an_empty_value():
    key = bytes.fromhex("000400056772c3bc70")
    decoded = records.decode(Record(key, bytes.fromhex("0000020274")))
    assert decoded is not None
    assert decoded[1] == cr.PartitionMetadataValue()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("000300056772c3bc70", "00010000000700"),  # a future version
        ("000300056772c3bc70", "00000000"),  # truncated
        (  # one epoch is missing
            "000800056772c3bc7000036d2d31",
            f"000000000006000000050102{A_HEX}03000000000000000201000502000000030100",
        ),
        ("000700056772c3bc7000036d2d31", "0000ffffffff0f"),  # more topics than bytes
    ],
)
def test_malformed_value_is_corrupt(key, value):
    with pytest.raises(CorruptRecordError):
        records.decode(Record(bytes.fromhex(key), bytes.fromhex(value)))


@given(st.sampled_from(sorted(KEYS)), st.binary(max_size=80))
def test_random_bytes_decode_or_are_corrupt(key, value):
    with contextlib.suppress(CorruptRecordError):
        records.decode(Record(bytes.fromhex(key), b"\0\0" + value))
