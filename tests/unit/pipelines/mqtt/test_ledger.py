"""The ledger: its entries survive a restart, and the oldest entries are evicted first."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.pipelines.mqtt.ledger import (
    PACKET_SLOTS,
    PACKETS_PER_SLOT,
    Ledger,
    LedgerError,
    digest,
    former_digest,
    identity,
)
from fencepost.pipelines.mqtt.message_ids import OwnId, json_id


def compacted(written: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the last value of each key in the order of the log, as compaction leaves it."""
    last = dict(written)
    return [value for key, value in written if last[key] is value]


def restarted(ledger: Ledger) -> Ledger:
    """Return the ledger that the next connection restores from all its records."""
    return Ledger.restore([value for _, value in ledger.snapshot(whole=True)])


def test_packet_id_is_a_redelivery_until_it_is_released() -> None:
    ledger = Ledger()
    mark = digest("a", b"1")
    ledger.receive(7, mark)
    again = Ledger.restore([value for _, value in ledger.snapshot(whole=True)])
    assert again.is_redelivery(7, mark, dup=False)
    assert again.is_redelivery(7, mark, dup=True)
    assert not again.is_redelivery(7, digest("a", b"2"), dup=True)
    assert not again.is_redelivery(8, mark, dup=True)
    again.release(7)
    assert not restarted(again).is_redelivery(7, mark, dup=False)


def test_released_packet_is_a_redelivery_only_with_the_dup_flag() -> None:
    """The MQTT broker may not have read the bridge's PUBCOMP."""
    ledger = Ledger()
    ledger.receive(7, b"m")
    ledger.release(7)
    for tested in (ledger, restarted(ledger)):
        assert tested.is_redelivery(7, b"m", dup=True)
        assert tested.was_released(7, b"m")
        assert not tested.is_redelivery(7, b"m", dup=False)
        assert not tested.is_redelivery(7, b"n", dup=True)
        tested.receive(7, b"m", dup=True)
        assert not tested.was_released(7, b"m")
        tested.release(7)
        assert tested.is_redelivery(7, b"m", dup=True)


def test_reused_packet_id_ends_redelivery_check_of_released_packets() -> None:
    ledger = Ledger()
    ledger.receive(1, b"m")
    ledger.release(1)
    assert ledger.is_redelivery(1, b"m", dup=True)
    ledger.receive(1, b"n")
    ledger.release(1)
    for tested in (ledger, restarted(ledger)):
        assert tested.reuses_ids
        assert not tested.is_redelivery(1, b"n", dup=True)


def test_packet_id_reused_after_restart_keeps_the_redelivery_check() -> None:
    """The MQTT broker may have restored older state, and may then reuse packet ids."""
    ledger = Ledger()
    ledger.receive(1, b"m")
    ledger.release(1)
    again = restarted(ledger)
    again.receive(1, b"n")
    assert not again.reuses_ids


def test_open_packet_not_redelivered_after_restart_is_released() -> None:
    ledger = Ledger()
    ledger.receive(1, b"m")
    ledger.receive(2, b"m")
    assert ledger.settle() == 0
    again = restarted(ledger)
    assert again.is_redelivery(2, b"m", dup=False)
    again.receive(2, b"m")
    assert again.settle() == 1
    assert not again.is_redelivery(1, b"m", dup=False)
    assert again.is_redelivery(1, b"m", dup=True)
    assert again.is_redelivery(2, b"m", dup=False)


def test_released_packet_above_the_limit_evicts_the_oldest_slot() -> None:
    ledger = Ledger()
    limit = PACKET_SLOTS * PACKETS_PER_SLOT
    for number in range(limit):
        ledger.receive(number, b"m")
        ledger.release(number)
    assert ledger.is_redelivery(0, b"m", dup=True)
    ledger.receive(limit, b"m")
    ledger.release(limit)
    assert not ledger.is_redelivery(0, b"m", dup=True)
    for tested in (ledger, restarted(ledger)):
        known = [tested.was_released(number, b"m") for number in range(limit + 1)]
        assert known.count(True) == limit + 1 - PACKETS_PER_SLOT


def test_eviction_of_a_slot_keeps_packet_ids_used_again_since() -> None:
    ledger = Ledger()
    for number in [0, *range(PACKET_SLOTS * PACKETS_PER_SLOT - 1), 0, 70_000]:
        ledger.receive(number, b"m", dup=True)
        ledger.release(number)
    assert ledger.was_released(0, b"m")
    assert not ledger.was_released(1, b"m")


def test_ledger_of_earlier_version_without_released_packets_is_read() -> None:
    """Earlier versions of the bridge wrote such ledgers."""
    ledger = Ledger.restore([msgpack.packb([3, ["x"], {7: b"m"}, True])])
    assert ledger.knows("a", OwnId("x"), dup=True)
    assert not ledger.knows("a", OwnId("x"))  # another device may use the same message id
    assert ledger.open == {7: b"m"}
    assert ledger.is_connecting
    assert not ledger.was_released(7, b"m")


def test_message_digest_depends_on_all_properties() -> None:
    messages: list[tuple[str, bytes, list[tuple[str, str]], list[tuple[str, bytes]]]] = [
        ("a", b"1", [], []),
        ("a", b"1", [("i", "1")], []),
        ("a", b"1", [("i", "2")], []),
        ("a", b"1\0i\x001", [], []),
        ("a", b"1", [], [("content-type", b"i")]),
        ("a", b"1", [], [("correlation-data", b"i")]),
        ("a", b"1", [], [("correlation-data", b"j")]),
    ]
    assert len({digest(*message) for message in messages}) == len(messages)
    assert digest("a", b"1") == digest("a", b"1", (), ())
    assert digest("a", b"1") != former_digest("a", b"1")


def test_new_session_forgets_packets_and_keeps_message_ids() -> None:
    ledger = Ledger()
    ledger.receive(7, b"m")
    ledger.receive(8, b"m")
    ledger.release(8)
    ledger.add_id("a", OwnId("x"))
    before = ledger.snapshot()
    ledger.new_session()
    for tested in (ledger, Ledger.restore([v for _, v in (*before, *ledger.snapshot())])):
        assert not tested.open
        assert not tested.has_packets
        assert not tested.was_released(8, b"m")
        assert tested.knows("a", OwnId("x"))
    ledger.receive(8, b"m")
    ledger.release(8)
    after = Ledger.restore([v for _, v in (*before, *ledger.snapshot())])
    assert after.was_released(8, b"m")


def test_restored_ledger_knows_of_the_pending_connect() -> None:
    ledger = Ledger()
    ledger.receive(7, b"m")
    ledger.is_connecting = True
    again = Ledger.restore([value for _, value in ledger.snapshot(whole=True)])
    assert again.is_connecting
    assert again.open == {7: b"m"}
    again.new_session()
    last = Ledger.restore([value for _, value in again.snapshot(whole=True)])
    assert not last.is_connecting
    assert not last.open


def test_full_ring_of_message_ids_evicts_its_oldest_slot() -> None:
    ledger = Ledger(slots=3, ids_per_slot=2)
    for number in range(6):
        ledger.add_id("a", OwnId(str(number)))
    assert all(ledger.knows("a", OwnId(str(number))) for number in range(6))
    ledger.add_id("a", OwnId("6"))
    assert not ledger.knows("a", OwnId("0"))
    assert not ledger.knows("a", OwnId("1"))
    assert all(ledger.knows("a", OwnId(str(number))) for number in range(2, 7))
    assert len(ledger) == 5


def test_message_id_is_per_topic_and_stored_in_constant_size() -> None:
    ledger = Ledger()
    long = "x" * 1_000_000
    ledger.add_id("a", OwnId(long))
    ledger.add_id("b", OwnId("1"))
    for tested in (ledger, restarted(ledger)):
        assert tested.knows("a", OwnId(long))
        assert not tested.knows("b", OwnId(long))
        assert not tested.knows("a", OwnId("1"))
        assert tested.knows("b", OwnId("1"))
    assert sum(len(value) for _, value in ledger.snapshot(whole=True)) < 100


def test_json_ids_of_different_types_are_different_ids() -> None:
    ledger = Ledger()
    ids = [json_id(b'{"id": %s}' % text, "id") for text in (b"1", b'"1"', b"1.0", b"true")]
    for message_id in (*ids, OwnId("1")):
        assert message_id is not None
        assert not ledger.knows("a", message_id)
        ledger.add_id("a", message_id)
    for again in (ledger, restarted(ledger)):
        assert all(again.knows("a", message_id) for message_id in ids if message_id)


def test_message_ids_of_earlier_versions_are_recognized() -> None:
    """Earlier versions applied ``str()`` to the JSON value, so 7 and "7" were equal."""
    slots = [[0, [identity("a", "1"), identity("a", "True"), "x"], {}, False, False, 0]]
    ledger = Ledger.restore([msgpack.packb(slot) for slot in slots])

    def knows(payload: bytes, *, dup: bool = False, topic: str = "a") -> bool:
        message_id = json_id(payload, "id")
        assert message_id is not None
        return ledger.knows(topic, message_id, dup=dup)

    assert knows(b'{"id": 1}')
    assert knows(b'{"id": "1"}')
    assert knows(b'{"id": true}')
    assert knows(b'{"id": "x"}', dup=True)
    assert not knows(b'{"id": "x"}')
    assert not knows(b'{"id": 1.0}')
    assert not knows(b'{"id": 1}', topic="b")


def test_ledger_writes_less_than_1500_bytes_per_message() -> None:
    """The limit holds even with one message per transaction, which rewrites two QoS 2 slots."""
    ledger = Ledger()
    count = total = 0
    for number in range(2_000):
        ledger.receive(number, digest("a", b"%d" % number))
        ledger.add_id("a", OwnId(str(number)))
        total += sum(len(key) + len(value) for key, value in ledger.snapshot())
        ledger.release(number)
        total += sum(len(key) + len(value) for key, value in ledger.snapshot())
        count += 1
    assert total / count < 1_500


@given(st.lists(st.lists(st.integers(0, 40), max_size=7), max_size=30), st.booleans())
def test_restored_ledger_equals_the_ledger_before_the_restart(
    batches: list[list[int]], compact: bool
) -> None:
    ledger = Ledger(slots=3, ids_per_slot=4)
    written: list[tuple[bytes, bytes]] = []
    for batch in batches:
        for number in batch:
            if not ledger.knows("a", OwnId(str(number))):
                ledger.add_id("a", OwnId(str(number)))
            ledger.receive(number, b"m")
            if number % 3 == 0:
                ledger.release(number)
        written += ledger.snapshot()
    values = compacted(written) if compact else [value for _, value in written]
    again = Ledger.restore(values, slots=3, ids_per_slot=4)
    assert again.open == ledger.open
    assert again._id_ring.sequence == ledger._id_ring.sequence
    assert again._released == ledger._released
    assert [again.knows("a", OwnId(str(n))) for n in range(41)] == [
        ledger.knows("a", OwnId(str(n))) for n in range(41)
    ]


@pytest.mark.parametrize(
    "broken", [b"", b"\xc1", b"\x01", b"\x93\x01\x02\x03", b"\x94\x01\x02\x03\xc2"]
)
def test_malformed_ledger_record_is_refused(broken: bytes) -> None:
    with pytest.raises(LedgerError):
        Ledger.restore([broken])
