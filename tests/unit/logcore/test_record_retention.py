"""The cleaner's decisions about random logs, compared with a deliberately simple model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.batch import (
    Codec,
    LogRecord,
    decode_records,
    encode_batch,
    end_marker,
    iter_headers,
    verify_crc,
)
from fencepost.logcore.record_retention import (
    BYTES_PER_KEY,
    AbortedTransaction,
    LastRecord,
    OffsetMap,
    RecordFilter,
    Transactions,
    map_offsets,
)
from tests.unit.logcore.batch_driver import placed

LIMIT = 1 << 20
RETENTION_MS = 1_000


@dataclass
class History:
    """A log in memory, and the committed records that readers must find."""

    log: bytearray = field(default_factory=bytearray)
    next_offset: int = 0
    now_ms: int = 10_000
    aborted: list[AbortedTransaction] = field(default_factory=list)
    committed: dict[int, tuple[bytes | None, bytes | None]] = field(default_factory=dict)
    pending: dict[int, list[LogRecord]] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)

    def data(self, pairs, producer_id=-1, codec=Codec.NONE):
        records = [
            LogRecord(self.next_offset + at, self.now_ms, key, value)
            for at, (key, value) in enumerate(pairs)
        ]
        self.next_offset += len(records)
        transactional = producer_id >= 0
        self.log += encode_batch(
            records,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=0 if transactional else -1,
            base_sequence=self.sequences.get(producer_id, 0) if transactional else -1,
            transactional=transactional,
        )
        if transactional:
            self.sequences[producer_id] = self.sequences.get(producer_id, 0) + len(records)
            self.pending.setdefault(producer_id, []).extend(records)
        else:
            self.committed.update({record.offset: (record.key, record.value) for record in records})

    def end(self, producer_id, *, commit):
        records = self.pending.pop(producer_id, [])
        marker = end_marker(
            commit=commit,
            producer_id=producer_id,
            producer_epoch=0,
            coordinator_epoch=0,
            timestamp_ms=self.now_ms,
        )
        self.log += placed(marker, self.next_offset)
        if commit:
            self.committed.update({record.offset: (record.key, record.value) for record in records})
        elif records:
            self.aborted.append(
                AbortedTransaction(producer_id, records[0].offset, self.next_offset)
            )
        self.next_offset += 1


def batches(log):
    view = memoryview(bytes(log))
    return [(header, view[pos : pos + header.size]) for pos, header in iter_headers(view)]


def clean(history, *, log=None, aborted=None, now_ms=None, budget=1 << 20, known=True):
    source = history.log if log is None else log
    aborts = history.aborted if aborted is None else aborted
    offsets = OffsetMap(budget)
    map_offsets(batches(source), Transactions(aborts), offsets, start=0, max_output_bytes=LIMIT)
    last_records = {
        header.producer_id: LastRecord(-1 if header.is_control else header.last_offset, 0)
        for header, _ in batches(source)
        if header.has_producer and known
    }
    step = RecordFilter(
        offsets,
        Transactions(aborts),
        last_records,
        last_offset=history.next_offset - 1,
        now_ms=history.now_ms if now_ms is None else now_ms,
        delete_retention_ms=RETENTION_MS,
        max_output_bytes=LIMIT,
    )
    kept = bytearray().join(step.run(batches(source)))
    return kept, step.transactions.retained_aborts


def read(log, aborted):
    """Return (key, value) of committed records by offset, by a simple filter of aborted records."""
    seen = {}
    for header, buf in batches(log):
        verify_crc(buf, 0, header)
        if header.is_control:
            continue
        for record in decode_records(buf, 0, header):
            hidden = header.is_transactional and any(
                entry.producer_id == header.producer_id
                and entry.first_offset <= record.offset <= entry.last_offset
                for entry in aborted
            )
            if not hidden:
                seen[record.offset] = (record.key, record.value)
    return seen


def last_values(seen):
    return {key: value for _, (key, value) in sorted(seen.items()) if key is not None}


def live(values):
    return {key: value for key, value in values.items() if value is not None}


KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
PAIRS = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=4)), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), PAIRS, st.sampled_from(list(Codec))),
        st.tuples(st.just("txn"), PAIRS, st.integers(0, 2)),
        st.tuples(st.just("end"), st.booleans(), st.integers(0, 2)),
    ),
    max_size=14,
)


def play(steps):
    history = History()
    for kind, what, who in steps:
        if kind == "plain":
            history.data(what, codec=who)
        elif kind == "txn":
            history.data(what, producer_id=who)
        else:
            history.end(who, commit=what)
    for producer_id in list(history.pending):
        history.end(producer_id, commit=True)  # the caller passes no open transaction
    return history


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(STEPS)
def test_compaction_keeps_the_last_committed_value_of_each_key(steps):
    history = play(steps)
    kept, aborted = clean(history)
    assert last_values(read(kept, aborted)) == last_values(history.committed)
    assert read(kept, aborted).items() <= history.committed.items()


@settings(max_examples=120, deadline=None)
@given(STEPS, st.integers(1, 3))
def test_repeated_rounds_remove_tombstones_and_keep_live_values(steps, rounds):
    history = play(steps)
    kept, aborted, now_ms = history.log, history.aborted, history.now_ms
    for _ in range(rounds):
        kept, aborted = clean(history, log=kept, aborted=aborted, now_ms=now_ms)
        now_ms += RETENTION_MS
    assert live(last_values(read(kept, aborted))) == live(last_values(history.committed))
    if rounds == 3:
        assert None not in [value for _, value in read(kept, aborted).values()]


@settings(max_examples=120, deadline=None)
@given(STEPS, st.integers(1, 3))
def test_full_offset_map_cleans_a_part_and_loses_no_value(steps, keys):
    history = play(steps)
    kept, aborted = clean(history, budget=keys * BYTES_PER_KEY)
    assert last_values(read(kept, aborted)) == last_values(history.committed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_end_offset_and_last_sequence_of_each_producer_survive_compaction(steps):
    history = play(steps)
    kept, aborted = clean(history)
    for _ in range(3):
        kept, aborted = clean(history, log=kept, aborted=aborted, now_ms=10**9)
    headers = [header for header, _ in batches(kept)]
    before = [header for header, _ in batches(history.log)]
    if before:
        assert headers[-1].next_offset == before[-1].next_offset
    for producer_id in {header.producer_id for header in before if header.has_producer}:
        mine = [header for header in before if header.producer_id == producer_id]
        assert any(
            header.last_offset == mine[-1].last_offset and header.producer_id == producer_id
            for header in headers
        )


def test_tombstone_is_removed_once_its_delete_horizon_has_passed():
    history = History()
    history.data([(b"k", b"v")])
    history.data([(b"k", None)])
    history.data([(b"other", b"x")])
    first, _ = clean(history)
    header, buf = batches(first)[0]
    assert header.delete_horizon_ms == history.now_ms + RETENTION_MS
    assert decode_records(buf, 0, header)[0].timestamp_ms == history.now_ms
    early, _ = clean(history, log=first, now_ms=history.now_ms + RETENTION_MS - 1)
    assert early == first
    late, _ = clean(history, log=first, now_ms=history.now_ms + RETENTION_MS)
    assert [header.base_offset for header, _ in batches(late)] == [2]


def test_aborted_records_are_removed_at_once_and_their_marker_later():
    history = History()
    history.data([(b"k", b"hidden")], producer_id=1)
    history.end(1, commit=False)
    history.data([(b"k", b"v")], producer_id=1)
    history.end(1, commit=True)
    history.data([(b"z", b"z")])
    kept, aborted = clean(history)
    assert read(kept, []) == {2: (b"k", b"v"), 4: (b"z", b"z")}
    again, aborted = clean(history, log=kept, aborted=aborted, now_ms=20_000)
    stays, _ = clean(history, log=again, aborted=aborted, now_ms=30_000)
    assert 1 in [header.base_offset for header, _ in batches(stays)]  # an epoch of a known producer
    final, _ = clean(history, log=again, aborted=aborted, now_ms=30_000, known=False)
    assert [header.base_offset for header, _ in batches(final)] == [2, 3, 4]
    assert read(final, []) == read(kept, [])
