"""Random operations on a log, compared with a simple second implementation after each step.

HISTORIES=20000 pytest tests/unit/logcore/test_histories.py --hypothesis-seed 7

The steps are appends of all kinds, transaction markers, rolls, DeleteRecords, retention,
compaction, clean restarts, kills, bit rot and truncated logs in any order. Retention, rolls and
appends also run during a compaction round. The disk is in memory. When the log is opened, any of
the four offset checkpoints may be an older copy. A failing sequence is shrunk to the shortest
sequence that shows the failure.
"""

from __future__ import annotations

import os
import uuid
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fencepost.logcore.batch import (
    ControlType,
    LogRecord,
    decode_records,
    encode_batch,
    iter_headers,
    parse_control,
    verify_crc,
)
from fencepost.logcore.compaction import unthrottled
from fencepost.logcore.compression import Codec
from fencepost.logcore.config import LogConfig
from fencepost.logcore.errors import OffsetOutOfRangeError
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.logcore.record_retention import BYTES_PER_KEY
from fencepost.protocol.steps import finish
from tests.support.clock import ManualClock
from tests.support.memory_disk import MemoryDisk, split
from tests.support.partitions import append_batch, fetch_bytes, retain
from tests.unit.logcore.dumb_log import Chunk, DumbLog, DumbRound, Item

HISTORIES = int(os.environ.get("HISTORIES", "200"))
"""The number of random sequences for all cleanup policies together."""

T0 = 1_000_000
DIRECTORY = "/data/t-0"
TOMBSTONE_MS = 300
RETENTION_MS = 900
RETENTION_BYTES = 2_000
IDEMPOTENT = 10
"""Producers from this id on are idempotent without transactions."""

KINDS = (
    *("plain", "plain", "idempotent", "data", "data", "data", "end", "end", "roll"),
    *("stop", "kill", "delete", "retain", "compact", "compact", "compact-and", "look"),
    *("rot", "rot", "unroll", "cut", "cut"),
)
MEANWHILE = ("delete", "retain", "delete", "roll", "delete", "data", "delete", "end")
"""Steps that may run between two steps of a compaction round."""
ARGUMENTS = 8, 64
# A single number encodes a step and its two arguments, because drawing three numbers is slow.
NUMBERS = len(KINDS) * ARGUMENTS[0] * ARGUMENTS[1]
SPREAD = 6967
"""A number that has no common factor with NUMBERS.

Hypothesis draws small numbers more often, and these would encode only the first kinds of steps.
Multiplied by SPREAD modulo NUMBERS, small numbers encode all kinds.
"""
STEPS = st.lists(st.integers(0, NUMBERS - 1), min_size=4, max_size=26)


def config_of(policy: str, segment_bytes: int) -> LogConfig:
    return LogConfig(
        cleanup_policy=frozenset(policy.split(",")),
        segment_bytes=segment_bytes,
        segment_index_bytes=240,
        index_interval_bytes=100,
        delete_retention_ms=TOMBSTONE_MS,
        retention_ms=RETENTION_MS,
        retention_bytes=RETENTION_BYTES if policy != "compact" else -1,
        file_delete_delay_ms=0,
    )


class Marks(NamedTuple):
    """The partition's values in the four offset checkpoints."""

    recovery_point: int = 0
    log_start: int = 0
    cleaned: int | None = None
    high_watermark: int = 0


class History:
    """A partition and its model."""

    def __init__(self, policy: str, segment_bytes: int) -> None:
        self.config = config_of(policy, segment_bytes)
        self.disk = MemoryDisk()
        self.disk.make_directory("/data")
        self.clock = ManualClock(T0)
        self.model = DumbLog()
        self.cleaned: int | None = None
        self.written = [Marks()]
        """All checkpoints that were written so far, from the oldest to the newest."""
        self.sequences: dict[int, int] = {}
        self.partition = self.open(Marks(), clean=False)

    def open(self, marks: Marks, *, clean: bool) -> Partition:
        partition = Partition.open(
            self.disk,
            DIRECTORY,
            topic="t",
            index=0,
            topic_id=uuid.UUID(int=7),
            config=self.config,
            clock=self.clock,
            clean=clean,
            recovery_point=marks.recovery_point,
            log_start_offset=marks.log_start,
            high_watermark=marks.high_watermark,
            compacted_below=marks.cleaned or 0,
        )
        known = max(marks.recovery_point, marks.high_watermark)
        lost = 0 if partition.recovery is None else partition.recovery.lost_offsets
        assert lost == max(known - partition.log_end_offset, 0)
        return partition

    def drawn(self, who: int, what: int) -> Marks:
        """Draw the value of each checkpoint for a restart: the newest, or an older copy."""
        newest, older = self.written[-1], self.written[len(self.written) * what // ARGUMENTS[1]]
        is_older = [who & 1, who & 2, who & 4, what & 1]
        chosen = (two[bool(at)] for at, *two in zip(is_older, newest, older, strict=True))
        return Marks._make(chosen)

    def step(self, kind: str, who: int, what: int) -> None:
        self.act(kind, who, what)
        start, end = self.partition.log_start_offset, self.partition.log_end_offset
        self.written.append(Marks(self.partition.recovery_point, start, self.cleaned, end))

    def act(self, kind: str, who: int, what: int) -> None:
        now_ms = self.clock.advance(20)
        if kind == "plain":
            self.put(-1, who, what)
        elif kind == "idempotent":
            self.put(IDEMPOTENT + who % 2, who, what)
        elif kind == "data":
            self.put(who % 3, who, what, transactional=True)
        elif kind == "end":
            self.model.marker(who % 3, now_ms, commit=what % 2 == 0)
            self.partition.append_marker(
                EndMarker(ProducerStamp(who % 3, 0), what % 2 == 0), now_ms
            )
        elif kind == "roll":
            self.partition.flushes.roll(now_ms)
        elif kind == "delete":
            offset = self.model.start + (self.model.end - self.model.start) * what // 63
            self.partition.cleanup.delete_records_before(offset)
            self.model.delete_before(offset)
        elif kind == "retain":
            self.retain(self.clock.advance(what * 10))
        elif kind == "compact":
            self.compact(self.clock.advance(what * 10), who)
        elif kind == "compact-and":
            self.compact(self.clock.advance(40), 7, meanwhile=(who, what))
        elif kind in {"stop", "kill"}:
            self.restart(self.drawn(who, what), clean=kind == "stop")
        elif kind == "cut":
            self.cut(who, what)
        elif kind == "rot":
            self.rot(who, what)
        elif kind == "unroll":
            self.unroll()
        else:
            self.look(who, what)

    def restart(self, marks: Marks, *, clean: bool) -> None:
        if clean:
            self.partition.close()
        self.disk = self.disk.after_kill()
        bases = sorted(self.sizes())
        names = self.disk.list_directory(DIRECTORY) or []
        self.partition = self.open(marks, clean=clean)
        self.model.start = max(marks.log_start, bases[0])
        self.cleaned = None if marks.cleaned is None else min(marks.cleaned, self.model.end)
        # A transaction whose first batches are deleted is known only from a snapshot that was
        # written before recovery.
        snapshots = (
            [self.model.end] if clean else [at for at in bases if f"{at:020d}.snapshot" in names]
        )
        upto = self.model.end if clean else marks.recovery_point
        if not any(bases[0] < at <= upto for at in snapshots):
            self.model.replay(bases[0])

    def put(self, producer: int, who: int, what: int, *, transactional: bool = False) -> None:
        now_ms, count = self.clock.now_ms(), 1 + what % 3
        # Timestamps go back and forth; one record in eight is a tombstone.
        records = [
            LogRecord(
                at,
                now_ms + (what * (at + 3)) % 70 - 35,
                b"key-%d" % ((who + at) % 5),
                None if (who + what + at) % 8 == 0 else b"%d" % what * (10 + what % 40),
            )
            for at in range(count)
        ]
        sequence = self.sequences.get(producer, 0) if producer >= 0 else -1
        self.sequences[producer] = sequence + count
        data = encode_batch(
            records,
            codec=Codec.GZIP if what % 9 == 8 else Codec.NONE,
            producer_id=producer,
            producer_epoch=0 if producer >= 0 else -1,
            base_sequence=sequence,
            transactional=transactional,
        )
        end = self.model.end
        items = [
            Item(end + record.offset, record.timestamp_ms, record.key, record.value)
            for record in records
        ]
        self.model.data(items, producer=producer, transactional=transactional)
        append_batch(self.partition, data, now_ms=now_ms, transaction_verified=True)

    # --- disk failures ---

    def rot(self, who: int, what: int) -> None:
        """Kill the broker, and flip a bit in flushed records: other records must not be lost."""
        self.partition.flushes.run_if_due(self.clock.now_ms())
        newest = self.written[-1]._replace(recovery_point=self.partition.recovery_point)
        marks = self.drawn(who, what) if what % 4 == 3 else newest
        # Every sealed segment is flushed now, but an older recovery point may not cover all of
        # them.
        upto = min(marks.recovery_point if marks is not newest else self.model.end, self.active)
        places = [
            (segment.path, at)
            for segment in self.partition.log.segments
            for position, header, _ in segment.batches()
            if header.last_offset < upto
            for at in range(position, position + header.size)
        ]
        kept, self.disk = self.disk.after_kill(), self.disk.after_kill()
        if places:
            self.flip(*places[len(places) * what // ARGUMENTS[1]], 1 << who)
            rotten = self.open(marks, clean=False)
            assert rotten.log_end_offset == self.model.end
            assert rotten.recovery is not None
            assert not rotten.recovery.reason
        self.disk = kept
        self.restart(marks, clean=False)

    def flip(self, path: str, at: int, bits: int) -> None:
        directory, name = split(path)
        self.disk.contents[self.disk.names[directory][name]][at] ^= bits

    def cut(self, who: int, what: int) -> None:
        """Kill, and damage a batch above the recovery point: recovery truncates the log there."""
        if what % 2:
            self.make_holes(who)
        marks = self.drawn(who | what % 2, what)
        # Damage below the log start empties the log: it then begins and ends at the start offset.
        # After a restart with older checkpoints, the start offset drawn here may be above the
        # model's.
        low = max(marks.recovery_point, marks.log_start, self.model.start)
        found: list[tuple[str, int, int]] = []
        holed: list[tuple[str, int, int]] = []
        for segment in self.partition.log.segments:
            end, is_holed = segment.base_offset, False
            for position, header, _ in segment.batches():
                if end >= low:
                    place = segment.path, position + header.size - 1, end
                    (holed if is_holed else found).append(place)
                is_holed = is_holed or header.base_offset > end
                end = header.next_offset
        # Prefer batches after whose truncation a compacted segment would be the last segment.
        found = holed or found
        if not found:
            return
        path, at, end = found[(who * ARGUMENTS[1] + what) * len(found) // (64 * ARGUMENTS[0])]
        self.disk = self.disk.after_kill()
        self.flip(path, at, 1)
        self.partition = self.open(marks, clean=False)
        assert self.partition.log_end_offset == end
        # Compaction may have removed a producer's last records: read its sequence from the log.
        entries = [
            entry
            for producer in self.partition.producers.view()
            if (entry := self.partition.producers.get(producer.producer_id)) is not None
        ]
        self.sequences = {producer.producer_id: producer.last_sequence + 1 for producer in entries}
        begun = {producer.producer_id: producer.current_txn_first_offset for producer in entries}
        self.model.cut(
            end,
            {
                producer.producer_id: producer.last_offset if producer.batches else -1
                for producer in entries
            },
            {producer: first for producer, first in begun.items() if first is not None},
        )
        self.model.start = max(marks.log_start, min(self.sizes()))
        self.cleaned = None if marks.cleaned is None else min(marks.cleaned, end)

    def unroll(self) -> None:
        """Lose the directory entry of an empty segment in a power loss.

        If the previous segment has been compacted, the directory entry is already on disk.
        """
        *_, before, last = [None, *self.partition.log.segments]
        self.disk = self.disk.after_kill()
        found = before.batches() if before and not last.size else ()
        offsets = sum(header.next_offset - header.base_offset for _, header, _ in found)
        if before and offsets == last.base_offset - before.base_offset:
            for name in self.disk.list_directory(DIRECTORY) or []:
                if name.startswith(f"{last.base_offset:020d}.") and not name.endswith(".snapshot"):
                    self.disk.remove(f"{DIRECTORY}/{name}")
        self.restart(self.written[-1], clean=False)

    # --- removals ---

    @property
    def active(self) -> int:
        return max(self.sizes())

    def sizes(self) -> dict[int, int]:
        names = self.disk.list_directory(DIRECTORY) or []
        return {
            int(name[:20]): len(self.disk.read_file(f"{DIRECTORY}/{name}") or b"")
            for name in names
            if name.endswith(".log")
        }

    def retain(self, now_ms: int) -> None:
        deletes = "delete" in self.config.cleanup_policy
        gone = self.model.retain(
            self.sizes(),
            now_ms,
            max_bytes=self.config.retention_bytes if deletes else -1,
            max_ms=RETENTION_MS if deletes else -1,
        )
        assert retain(self.partition, now_ms) == gone

    def interrupt(self, number: int, who: int, what: int, end: int) -> None:
        """Run a step between the steps of a compaction round."""
        if number == who % 4:
            kind = MEANWHILE[what % len(MEANWHILE)]
            self.step(kind, what % 8, what)
            if kind == "delete":
                # Retention then removes files; in one of four cases, all segments of the round.
                if what % 16 > 11:
                    self.model.delete_before(end)
                    self.partition.cleanup.delete_records_before(end)
                self.step("retain", who, 0)

    def compact(self, now_ms: int, keys: int, meanwhile: tuple[int, int] | None = None) -> None:
        """Run a round, with memory for a few keys or all keys.

        ``meanwhile`` chooses an interruption.
        """
        if not self.config.is_compacted:
            return
        if self.cleaned is None or not self.model.start <= self.cleaned <= self.model.end:
            self.cleaned = self.model.start
        budget = (keys % 4 + 1) * BYTES_PER_KEY if keys < 4 else 1 << 20
        dirty = self.partition.cleanup.dirty_range(self.cleaned, now_ms)
        assert dirty.first_dirty_offset == self.cleaned
        cleanup = self.partition.cleanup
        compaction = cleanup.plan_compaction(dirty, now_ms=now_ms, budget_bytes=budget)
        if compaction is None:
            return
        self.partition.flushes.run(now_ms)
        bases = sorted(self.sizes())
        compaction.map_keys(unthrottled)
        mapped, number = compaction.next_dirty_offset, 0
        assert self.cleaned < mapped <= min(self.model.stable, bases[-1])
        end = next(base for base in bases if base >= mapped)
        model = self.model.begin_round(self.cleaned, mapped, now_ms, TOMBSTONE_MS)
        while True:
            if meanwhile is not None:
                self.interrupt(number, *meanwhile, end)
            if not compaction.clean_next(unthrottled):
                break
            cleaned = compaction.cleaned
            assert cleaned is not None
            # Cleaning would not have changed the skipped segments.
            self.model.compact(model, cleaned.base_offset)
            if meanwhile is not None:
                self.interrupt(number + 1, *meanwhile, end)
            is_whole = self.partition.log.holds(cleaned.replaced)
            assert self.partition.cleanup.install_cleaned(compaction)
            if is_whole:
                last = cleaned.replaced[-1].base_offset
                self.model.compact(model, next(base for base in bases if base > last))
                self.settle(model)
            number += 2
        self.model.compact(model, end)
        self.cleaned = mapped
        self.settle(model)

    def make_holes(self, who: int) -> None:
        """Write a segment of small batches, and make a hole in it by compacting a batch away."""
        self.partition.flushes.roll(self.clock.now_ms())
        for key in (0, 1, 1, 2, 3):
            self.put(-1, who + key, 0)
        self.partition.flushes.roll(self.clock.now_ms())
        self.compact(self.clock.now_ms(), 7)

    def settle(self, model: DumbRound) -> None:
        """Keep batches without records in the model if they may or must remain."""
        real = {chunk.last: chunk for chunk in self.chunks()}
        bases = sorted(self.sizes())[1:]
        ends = sorted(real)
        lasts = {ends[at - 1] for base in bases if (at := bisect_left(ends, base))}
        left = []
        for chunk in self.model.chunks:
            if chunk.items or chunk.first >= model.cleaned:
                left.append(chunk)
            elif model.keeps_empty(chunk) or (chunk.last in real and chunk.last in lasts):
                items = (Item(chunk.first, chunk.max_time_ms, None, None),)
                left.append(chunk if chunk.commit is None else replace(chunk, items=items))
        self.model.chunks = left

    # --- comparison ---

    def chunks(self) -> Iterator[Chunk]:
        """Yield the batches in the files as Chunks of the model."""
        for _, header, batch in self.partition.log.batches():
            verify_crc(batch, 0, header)
            records = decode_records(batch, 0, header)
            commit = None
            if header.is_control:
                commit = parse_control(records[0]).type is ControlType.COMMIT
                records = [record._replace(key=None, value=None) for record in records]
            yield Chunk(
                header.base_offset,
                header.last_offset,
                header.max_timestamp,
                tuple(
                    Item(record.offset, record.timestamp_ms, record.key, record.value)
                    for record in records
                ),
                header.producer_id,
                header.is_transactional,
                commit,
                header.delete_horizon_ms,
            )

    def check(self) -> None:
        """Compare all state that can be compared without reading the log."""
        partition, model = self.partition, self.model
        assert (partition.log_start_offset, partition.log_end_offset) == (model.start, model.end)
        assert partition.last_stable_offset == model.stable
        known = {producer.producer_id: producer for producer in partition.producers.view()}
        assert known.keys() == model.last_data.keys()
        for producer, state in known.items():
            assert state.current_txn_first_offset == model.open.get(producer, -1)
            assert state.last_sequence == self.sequences.get(producer, 0) - 1

    def look(self, who: int, what: int) -> None:
        """Compare fetched records from an offset, and lookups by timestamp."""
        partition, model = self.partition, self.model
        offset = model.start + (model.end - model.start) * what // 63
        assert self.consumed(offset, 1 + who * 100) == model.visible(offset)
        for isolation, limit in (
            (Isolation.READ_UNCOMMITTED, model.end),
            (Isolation.READ_COMMITTED, model.stable),
        ):
            time_ms = T0 + (self.clock.now_ms() - T0) * what // 60
            found = finish(partition.reader.offset_for_timestamp(time_ms, isolation))
            assert (found and found[:2]) == model.by_time(time_ms, limit)
            found, latest = finish(partition.reader.max_timestamp_offset(isolation)), model.latest()
            assert (found and found[:2]) == (latest if latest and latest[0] < limit else None)
            held = sum(
                len(batch)
                for _, header, batch in partition.log.batches()
                if header.last_offset >= offset and header.base_offset < limit
            )
            assert partition.reader.available_bytes(offset, isolation) == (
                held if offset < limit else 0
            )
        for outside in (model.start - 1, model.end + 1):
            with pytest.raises(OffsetOutOfRangeError):
                fetch_bytes(partition, outside, 1, Isolation.READ_COMMITTED)

    def consumed(self, offset: int, max_bytes: int) -> list[tuple[int, bytes | None, bytes | None]]:
        """Return the records that a read_committed consumer gets."""
        seen: list[tuple[int, bytes | None, bytes | None]] = []
        position = offset
        while True:
            read = fetch_bytes(self.partition, position, max_bytes, Isolation.READ_COMMITTED)
            if not read.records:
                return seen
            waiting = sorted((first, producer) for producer, first in read.aborted or ())
            assert len(set(waiting)) == len(waiting)
            hidden: set[int] = set()
            for at, header in iter_headers(read.records):
                verify_crc(read.records, at, header)
                while waiting and waiting[0][0] <= header.last_offset:
                    hidden.add(waiting.pop(0)[1])
                if header.is_control:
                    hidden.discard(header.producer_id)
                elif not (header.is_transactional and header.producer_id in hidden):
                    seen += [
                        (record.offset, record.key, record.value)
                        for record in decode_records(read.records, at, header)
                        if record.offset >= position
                    ]
                last = header.next_offset
            assert last > position
            position = last


@pytest.mark.parametrize("segment_bytes", [500, 1300])
@pytest.mark.parametrize("policy", ["delete", "compact", "compact,delete"])
@settings(
    max_examples=-(-HISTORIES // 6),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(steps=STEPS)
@example(steps=[0, 0, 0, 1000, 2046, 1, 1, 9340])
def test_random_history_of_a_log_equals_the_simple_model(
    policy: str, segment_bytes: int, steps: list[int]
) -> None:
    history = History(policy, segment_bytes)
    for number in steps:
        rest, what = divmod(number * SPREAD % NUMBERS, ARGUMENTS[1])
        kind, who = divmod(rest, ARGUMENTS[0])
        history.step(KINDS[kind], who, what)
        history.check()
    assert list(history.chunks()) == history.model.chunks
    for what in (0, 21, 40, 63):
        history.look(what % 7, what)
    history.restart(history.written[-1], clean=False)
    history.check()
    assert list(history.chunks()) == history.model.chunks
