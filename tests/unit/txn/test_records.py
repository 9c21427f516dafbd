from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import Record, Written
from fencepost.txn import records
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.state import TransactionMetadata, TransactionState
from tests.unit.txn.driver import Driver, S, metadata

# Written out by hand from TransactionLogKey.json and TransactionLogValue.json.
KEY = bytes.fromhex("0000 0008") + b"orders-1"
EMPTY_V1 = bytes.fromhex(
    "0001"  # version
    "00000000000001f4"  # producer id 500
    "0005"  # producer epoch
    "0000ea60"  # timeout 60000
    "00"  # Empty
    "00"  # partitions: null
    "00000000000f4240"  # last update 1000000
    "ffffffffffffffff"  # start -1
    "01"  # one tagged field
    "000800000000000001f4"  # previous producer id 500
)
PREPARE_V1 = bytes.fromhex(
    "0001"
    "00000000000001f4"
    "7fff"  # 32767
    "0000ea60"
    "02"  # PrepareCommit
    "03"  # two topics
    "0261020000000000"  # a: [0]
    "026203000000000000000100"  # b: [0, 1]
    "00000000000f4240"
    "00000000000f4240"
    "03"
    "000800000000000001f4"
    "010800000000000003e8"  # next producer id 1000
    "02020002"  # client transaction version 2
)
ONGOING_V0 = bytes.fromhex(
    "0000"
    "00000000000001f4"
    "0005"
    "0000ea60"
    "01"
    "00000002"
    "0001610000000100000000"
    "000162000000020000000000000001"
    "00000000000f4240"
    "00000000000f4240"
)
EMPTY_V0 = bytes.fromhex(
    "000000000000000001f400050000ea6000ffffffff00000000000f4240ffffffffffffffff"
)
COMPLETE_V0 = bytes.fromhex(
    "000000000000000001f400050000ea60040000000000000000000f424000000000000f4240"
)
ALL = (("b", 1), ("a", 0), ("b", 0))
SAMPLES = [
    (EMPTY_V1, metadata(S.EMPTY, tv=0), 1),
    (
        PREPARE_V1,
        metadata(
            S.PREPARE_COMMIT, identity=ProducerIdentity(500, 32_767), next_id=1000, partitions=ALL
        ),
        1,
    ),
    (ONGOING_V0, metadata(S.ONGOING, partitions=ALL, tv=0, previous=-1), 0),
    (EMPTY_V0, metadata(S.EMPTY, tv=0, previous=-1), 0),
    (COMPLETE_V0, metadata(S.COMPLETE_COMMIT, tv=0, previous=-1), 0),
]


@pytest.mark.parametrize(("value", "txn", "version"), SAMPLES)
def test_transaction_record_encodes_to_kafkas_bytes_and_back(
    value: bytes, txn: TransactionMetadata, version: int
) -> None:
    assert records.encode_value(txn, version) == value
    assert records.encode("orders-1", txn, version) == Record(KEY, value)
    assert records.decode(Record(KEY, value)) == ("orders-1", txn)


def test_tombstone_has_key_and_null_value() -> None:
    assert records.tombstone("orders-1") == Record(KEY, None)
    assert records.decode(Record(KEY, None)) == ("orders-1", None)


@pytest.mark.parametrize(
    ("transaction_version", "first"), [(0, b"\0\0"), (1, b"\0\1"), (2, b"\0\1")]
)
def test_transaction_version_selects_record_version(transaction_version: int, first: bytes) -> None:
    record = records.encode("x", metadata(S.EMPTY, tv=0), transaction_version)
    assert (record.value or b"")[:2] == first


def test_tv2_transaction_in_tv0_cluster_keeps_next_producer_id_over_reload(
    shard: Callable[..., Driver],
) -> None:
    driver = shard(transaction_version=0, hold=True)
    driver.place(metadata(S.ONGOING, identity=ProducerIdentity(500, 32_766)))
    driver.ended(ProducerIdentity(500, 32_766), commit=True)
    driver.reload()
    driver.write_markers()
    assert driver.stored == (1000, 0)


def test_tv0_cluster_writes_record_version_0(shard: Callable[..., Driver]) -> None:
    driver = shard(transaction_version=0)
    driver.transact(driver.started(), tv=0)
    assert {record.value[:2] for record in driver.log if record.value} == {b"\0\0"}


@pytest.mark.parametrize(
    "record",
    [
        Record(b"\0\1" + KEY[2:], EMPTY_V1),
        Record(b"\0\1anything", None),
        Record(KEY, b"\0\2" + EMPTY_V1[2:]),
        Record(KEY, b"\xff\xff"),
    ],
)
def test_records_of_unknown_version_are_skipped(record: Record) -> None:
    assert records.decode(record) is None
    driver = Driver(hold=True)
    driver.log = []
    driver.machine = type(driver.machine)(driver.limits, driver.ids, 0, 2)
    driver.machine.replay(record, 0, 0, None)
    events = driver.machine.on_loaded(0).events
    assert [event.kind for event in events] == ["records-passed-over"]
    assert len(driver.machine) == 0


def test_unknown_tagged_fields_are_skipped() -> None:
    value = EMPTY_V1[:-11] + bytes.fromhex("02 00 08 00000000000001f4 04 02 0007")
    decoded = records.decode(Record(KEY, value))
    assert decoded is not None
    assert decoded.txn == metadata(S.EMPTY, tv=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"", EMPTY_V1),
        (b"\0", EMPTY_V1),
        (KEY[:-1], EMPTY_V1),
        (KEY + b"x", EMPTY_V1),
        (b"\0\0\xff\xff", EMPTY_V1),
        (b"\0\0\0\1\xff", EMPTY_V1),
        (KEY, b""),
        (KEY, EMPTY_V1 + b"\0"),
        (KEY, EMPTY_V1[:16] + b"\6" + EMPTY_V1[17:]),
        (KEY, EMPTY_V1[:16] + b"\7" + EMPTY_V1[17:]),
        (KEY, EMPTY_V1[:16] + b"\x63" + EMPTY_V1[17:]),
        (KEY, EMPTY_V1[:16] + b"\1" + EMPTY_V1[17:]),  # Ongoing, with null partitions
        (KEY, EMPTY_V1[:17] + b"\xff\xff\xff\xff\x0f" + EMPTY_V1[18:]),
        (KEY, EMPTY_V1[:17] + b"\xff\xff\xff\xff\xff\x0f" + EMPTY_V1[18:]),
        (KEY, EMPTY_V0[:17] + b"\x7f\xff\xff\xff" + EMPTY_V0[21:]),
        (KEY, EMPTY_V0[:17] + b"\xff\xff\xff\xfe" + EMPTY_V0[21:]),
        (KEY, EMPTY_V1[:-9] + b"\x07" + EMPTY_V1[-8:-1]),
    ],
)
def test_malformed_record_is_corrupt(key: bytes, value: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        records.decode(Record(key, value))


@pytest.mark.parametrize("value", [EMPTY_V1, PREPARE_V1, ONGOING_V0, EMPTY_V0])
def test_truncated_record_is_corrupt(value: bytes) -> None:
    for length in range(2, len(value)):
        with pytest.raises(CorruptRecordError):
            records.decode(Record(KEY, value[:length]))


@given(st.binary(max_size=60), st.one_of(st.none(), st.binary(max_size=120)))
def test_random_bytes_raise_only_corrupt_record(key: bytes, value: bytes | None) -> None:
    for prefix in (b"", b"\0\0", b"\0\1"):
        with contextlib.suppress(CorruptRecordError):
            records.decode(Record(KEY if prefix else key, value and prefix + value))


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@given(
    TEXT,
    st.builds(
        TransactionMetadata,
        producer_id=INT64,
        previous_producer_id=INT64,
        next_producer_id=INT64,
        producer_epoch=st.integers(-(2**15), 2**15 - 1),
        timeout_ms=st.integers(-(2**31), 2**31 - 1),
        state=st.sampled_from(
            [state for state in TransactionState if 0 < state <= S.COMPLETE_ABORT]
        ),
        partitions=st.frozensets(st.tuples(TEXT, st.integers(-(2**31), 2**31 - 1)), max_size=300),
        start_ms=INT64,
        last_update_ms=INT64,
        client_transaction_version=st.integers(0, 2**15 - 1),
        next_producer_epoch=st.integers(-1, 2**15 - 1),
    ),
)
def test_any_transaction_metadata_survives_encoding_and_decoding(
    transactional_id: str, txn: TransactionMetadata
) -> None:
    key = records.encode_key(transactional_id)
    assert records.decode(Record(key, records.encode_value(txn, 1))) == (transactional_id, txn)
    for version in (0, 1):
        record = records.encode(transactional_id, txn, version)
        content = record.decoded if type(record) is Written else None
        assert content == (records.decode(Record(*record)) if (record.value or b"")[1] else None)
    decoded = records.decode(Record(key, records.encode_value(txn, 0)))
    assert decoded is not None
    assert decoded.txn is not None
    assert decoded.txn.partitions == txn.partitions
    assert decoded.txn.previous_producer_id == decoded.txn.next_producer_id == -1
