"""Checks of the state after a power loss, derived only from the batches of the workload.

The model is deliberately simple: it walks all batches that were ever written, from the first one,
and knows no files, segments, snapshots or indexes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost.logcore.batch import (
    ControlType,
    decode_records,
    iter_headers,
    parse_control,
    parse_header,
)
from fencepost.logcore.index import AbortedTxn
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from fencepost.protocol.steps import finish
from tests.crash.power_workloads import T0, Promise, Recorder, Written, open_log
from tests.support.memory_disk import MemoryDisk
from tests.support.partitions import fetch_bytes

RECOVERY_CRASHES = 0.25
"""Share of the states in which a second power loss interrupts the recovery."""

LOOK_UPS = 4
"""How many offsets and timestamps are looked up in each state."""


@dataclass
class Model:
    """The transactions and producers of a log after some of its batches."""

    end: int = 0
    open: dict[int, int] = field(default_factory=dict)
    aborted: set[tuple[int, int, int]] = field(default_factory=set)
    """(producer id, first offset, marker offset)"""
    producers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Epoch, last sequence, coordinator epoch."""

    def add(self, batch: Written) -> None:
        header = parse_header(batch.data)
        self.end = batch.last_offset + 1
        producer = header.producer_id
        if producer < 0:
            return
        epoch, sequence, coordinator = self.producers.get(producer, (-1, -1, -1))
        if epoch != header.producer_epoch:
            sequence = -1
        if header.is_control:
            control = parse_control(next(decode_records(batch.data, 0, header).__iter__()))
            first = self.open.pop(producer, None)
            if first is not None and control.type is ControlType.ABORT:
                self.aborted.add((producer, first, batch.base_offset))
            coordinator = control.coordinator_epoch
        else:
            sequence = header.last_sequence
            if header.is_transactional:
                self.open.setdefault(producer, batch.base_offset)
        self.producers[producer] = header.producer_epoch, sequence, coordinator

    @property
    def last_stable_offset(self) -> int:
        return min(self.open.values(), default=self.end)

    def is_hidden(self, batch: Written) -> bool:
        """Return whether the batch is aborted, and so hidden from a read_committed reader."""
        header = parse_header(batch.data)
        return header.is_transactional and any(
            producer == header.producer_id and first <= batch.base_offset < marker
            for producer, first, marker in self.aborted
        )


class BrokenPromiseError(AssertionError):
    """A state after a power loss that breaks a promise."""


def judge(run: Recorder, step: int, disk: MemoryDisk, choice: random.Random) -> None:
    """Recover a state of ``run`` after a power loss, and check it; raise BrokenPromiseError."""
    promise = _promise_at(run, step)
    fallen = disk.after_kill()
    partition = open_log(disk, run.config, promise.epoch)
    check_log(run, step, promise, partition, choice)
    found = _state(partition)
    again = open_log(disk.after_kill(), run.config, promise.epoch)
    _same("a second recovery", _state(again), found)
    if choice.random() < RECOVERY_CRASHES and disk.steps:
        loss = fallen.base()
        last = choice.randrange(len(disk.steps) + 1)
        for count in loss.walk(disk.steps):
            if count == last:
                break
        third = open_log(loss.state(choice), run.config, promise.epoch)
        _same("a recovery whose forerunner lost power", _state(third), found)


def _same(what: str, seen: Any, expected: Any) -> None:
    if seen == expected:
        return
    for one, other in ((seen, expected), (expected, seen)):
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            for at, item in enumerate(one):
                if at >= len(other) or other[at] != item:
                    raise BrokenPromiseError(
                        f"{what}: differs at [{at}]: {seen[at:][:3]} / {expected[at:][:3]}"
                    )
    raise BrokenPromiseError(f"{what}: {seen!r} instead of {expected!r}")


def _promise_at(run: Recorder, step: int) -> Promise:
    result = run.promises[0]
    for promise in run.promises:
        if promise.step > step:
            break
        result = promise
    return result


def _state(partition: Partition) -> tuple[object, ...]:
    return (
        partition.log_start_offset,
        partition.log_end_offset,
        partition.last_stable_offset,
        _batches(partition),
        sorted(partition.producers.view()),
        _aborted(partition),
        partition._epochs.entries,
    )


def _aborted(partition: Partition) -> list[AbortedTxn]:
    """Return the entries of the transaction index that hide at least one record.

    Other entries may remain: if compaction has removed all records of an entry, the entry stays
    until the index is rebuilt from the log.
    """
    hidden = [
        (header.producer_id, header.last_offset)
        for header, _ in partition.reader.read_all()
        if header.is_transactional and not header.is_control
    ]
    return [
        entry
        for segment in partition.log.segments
        for entry in segment.txn_index.entries
        if any(
            producer == entry.producer_id and entry.first_offset <= last <= entry.last_offset
            for producer, last in hidden
        )
    ]


def _batches(partition: Partition) -> list[tuple[int, bytes]]:
    return [(header.base_offset, bytes(batch)) for header, batch in partition.reader.read_all()]


def check_log(
    run: Recorder, step: int, promise: Promise, partition: Partition, choice: random.Random
) -> None:
    """Compare a recovered partition with the written batches; raise BrokenPromiseError."""
    start, end = partition.log_start_offset, partition.log_end_offset
    if not promise.lowest_start <= start <= promise.highest_start:
        raise BrokenPromiseError(f"the log starts at {start}, promised {promise}")
    if end < promise.end:
        raise BrokenPromiseError(f"the log ends at {end}, promised {promise}: {partition.recovery}")
    begun = [batch for batch in run.history if batch.begin <= step and batch.base_offset < end]
    model = Model(end=start)
    for batch in begun:
        model.add(batch)
    left = [batch for batch in begun if batch.last_offset >= start]
    if run.config.is_compacted:
        _check_compacted(partition, left, model)
    else:
        _same("batches", _batches(partition), [(batch.base_offset, batch.data) for batch in left])
        _same("the end of the log", end, max(model.end, start))
    _same("the LSO", partition.last_stable_offset, max(model.last_stable_offset, start))
    _check_producers(run, partition, model, left)
    _check_reader(run, partition, model, left)
    if left and not run.config.is_compacted:
        _check_look_ups(partition, left, choice)


def _check_producers(
    run: Recorder, partition: Partition, model: Model, left: Sequence[Written]
) -> None:
    seen = {
        producer.producer_id: (
            producer.producer_epoch,
            producer.last_sequence,
            producer.coordinator_epoch,
        )
        for producer in partition.producers.view()
    }
    expected = dict(model.producers)
    if not run.is_forced:
        # A producer may be lost if retention removed its batches and only the snapshot had its
        # state.
        here = {parse_header(batch.data).producer_id for batch in left}
        expected = {key: value for key, value in expected.items() if key in here or key in seen}
    _same("producers", seen, expected)
    open_now = {
        producer.producer_id: producer.current_txn_first_offset
        for producer in partition.producers.view()
        if producer.current_txn_first_offset >= 0
    }
    _same("open transactions", open_now, model.open)


def _check_reader(
    run: Recorder, partition: Partition, model: Model, left: Sequence[Written]
) -> None:
    """Compare what a read_committed consumer reads with the model's committed records."""
    seen: dict[int, tuple[bytes | None, bytes | None]] = {}
    offset = partition.log_start_offset
    while True:
        read = fetch_bytes(partition, offset, 2_000, Isolation.READ_COMMITTED)
        if not read.records:
            break
        waiting = sorted((first, producer) for producer, first in read.aborted or ())
        hidden: set[int] = set()
        for at, header in iter_headers(read.records):
            while waiting and waiting[0][0] <= header.last_offset:
                hidden.add(waiting.pop(0)[1])
            if header.is_control:
                hidden.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in hidden):
                for record in decode_records(read.records, at, header):
                    seen[record.offset] = record.key, record.value
            offset = header.next_offset
    visible: dict[int, tuple[bytes | None, bytes | None]] = {}
    for batch in left:
        header = parse_header(batch.data)
        hidden_here = header.is_control or model.is_hidden(batch)
        if batch.last_offset < model.last_stable_offset and not hidden_here:
            for record in decode_records(batch.data, 0, header):
                visible[record.offset] = record.key, record.value
    if run.config.is_compacted:
        if not seen.items() <= visible.items():
            raise BrokenPromiseError(f"records nobody committed: {seen.items() - visible.items()}")
        _same("the table", _table(seen), _table(visible))
    else:
        _same("committed records", seen, visible)


def _table(seen: dict[int, tuple[bytes | None, bytes | None]]) -> dict[bytes, bytes]:
    table: dict[bytes, bytes] = {}
    for _, (key, value) in sorted(seen.items()):
        if key is not None:
            table.pop(key, None)
            if value is not None:
                table[key] = value
    return table


def _check_compacted(partition: Partition, left: Sequence[Written], model: Model) -> None:
    """Check that batches are in order, and that each one has only records of a written batch."""
    known = {batch.last_offset: batch for batch in left}
    last = -1
    for base_offset, data in _batches(partition):
        header = parse_header(data)
        written = known.get(header.last_offset)
        if base_offset <= last or written is None:
            raise BrokenPromiseError(f"a batch at {base_offset} behind {last} that nobody wrote")
        was = {
            record.offset: record
            for record in decode_records(written.data, 0, parse_header(written.data))
        }
        for record in decode_records(data, 0, header):
            whole = was.get(record.offset)
            if whole is None or (record.key, record.value) != (whole.key, whole.value):
                raise BrokenPromiseError(f"a record at {record.offset} that nobody wrote")
        last = header.last_offset
    _same("the end of the log", partition.log_end_offset, max(model.end, last + 1))


def _check_look_ups(partition: Partition, left: Sequence[Written], choice: random.Random) -> None:
    """Look batches up by offset and by time: the indexes must agree with a scan."""
    start = partition.log_start_offset
    for batch in choice.sample(left, min(LOOK_UPS, len(left))):
        offset = max(batch.base_offset, start)
        read = fetch_bytes(partition, offset, 1, Isolation.READ_UNCOMMITTED)
        _same(f"a fetch of {offset}", read.records[: len(batch.data)], batch.data)
    records = [
        record
        for batch in left
        for record in decode_records(batch.data, 0, parse_header(batch.data))
        if record.offset >= start
    ]
    for _ in range(LOOK_UPS):
        time_ms = T0 + choice.randrange(10 * len(left) + 20)
        first = next((record for record in records if record.timestamp_ms >= time_ms), None)
        found = finish(partition.reader.offset_for_timestamp(time_ms, Isolation.READ_UNCOMMITTED))
        _same(
            f"the offset for time {time_ms}",
            None if found is None else (found.offset, found.timestamp_ms),
            None if first is None else (first.offset, first.timestamp_ms),
        )
