"""The ledger: what was seen is known after a restart, and what is forgotten is the oldest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.mqtt.ledger import Ledger, LedgerError, bounded, digest
from pipelines.mqtt.routes import MAX_ID_BYTES


def compacted(written: list[tuple[bytes, bytes]]) -> list[bytes]:
    """What compaction leaves: the last value of each key, in the order of the log."""
    last = dict(written)
    return [value for key, value in written if last[key] is value]


def test_a_packet_id_is_known_until_it_is_released() -> None:
    ledger = Ledger()
    mark = digest("a", b"1")
    ledger.receive(7, mark)
    again = Ledger.restore([value for _, value in ledger.snapshot(0)])
    assert again.is_redelivery(7, mark)
    assert not again.is_redelivery(7, digest("a", b"2"))
    assert not again.is_redelivery(8, mark)
    again.release(7)
    assert not Ledger.restore([v for _, v in again.snapshot(0)]).is_redelivery(7, mark)


def test_a_new_session_forgets_packets_and_keeps_ids() -> None:
    ledger = Ledger()
    ledger.receive(7, b"m")
    ledger.add_id("x")
    ledger.new_session()
    assert not ledger.open
    assert ledger.knows("x")


def test_a_restart_knows_that_a_connect_was_not_acted_on() -> None:
    ledger = Ledger()
    ledger.receive(7, b"m")
    ledger.is_connecting = True
    again = Ledger.restore([value for _, value in ledger.snapshot(0)])
    assert again.is_connecting
    assert again.open == {7: b"m"}
    again.new_session()
    last = Ledger.restore([value for _, value in again.snapshot(0)])
    assert not last.is_connecting
    assert not last.open


def test_the_ring_remembers_its_size_and_forgets_the_oldest_slot() -> None:
    ledger = Ledger(slots=3, ids_per_slot=2)
    for number in range(6):
        ledger.add_id(str(number))
    assert all(ledger.knows(str(number)) for number in range(6))
    ledger.add_id("6")
    assert not ledger.knows("0")
    assert not ledger.knows("1")
    assert all(ledger.knows(str(number)) for number in range(2, 7))
    assert len(ledger) == 5


def test_a_long_id_is_remembered_by_its_hash() -> None:
    assert bounded("x" * MAX_ID_BYTES) == "x" * MAX_ID_BYTES
    long = "x" * (MAX_ID_BYTES + 1)
    assert len(bounded(long)) == 64
    ledger = Ledger()
    ledger.add_id(long)
    assert ledger.knows(long)


@given(st.lists(st.lists(st.integers(0, 40), max_size=7), max_size=30), st.booleans())
def test_a_restart_knows_what_was_known(batches: list[list[int]], compact: bool) -> None:
    ledger = Ledger(slots=3, ids_per_slot=4)
    written: list[tuple[bytes, bytes]] = []
    for batch in batches:
        first = ledger.sequence
        for number in batch:
            if not ledger.knows(str(number)):
                ledger.add_id(str(number))
            ledger.receive(number, b"m")
            if number % 3 == 0:
                ledger.release(number)
        written += ledger.snapshot(first)
    values = compacted(written) if compact else [value for _, value in written]
    again = Ledger.restore(values, slots=3, ids_per_slot=4)
    assert again.open == ledger.open
    assert again.sequence == ledger.sequence
    assert [again.knows(str(n)) for n in range(41)] == [ledger.knows(str(n)) for n in range(41)]


@pytest.mark.parametrize(
    "broken", [b"", b"\xc1", b"\x01", b"\x93\x01\x02\x03", b"\x94\x01\x02\x03\xc2"]
)
def test_what_no_bridge_wrote_is_refused(broken: bytes) -> None:
    with pytest.raises(LedgerError):
        Ledger.restore([broken])
