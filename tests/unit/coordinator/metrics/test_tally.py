"""The exact lag, compared with the number of records that a reader gets."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from fencepost.coordinator.metrics import tally
from fencepost.coordinator.metrics.tally import BATCHES_PER_STEP, MIN_RUNS, PartitionTally
from fencepost.logcore.batch import decode_records, iter_headers
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.support.partitions import fetch_bytes
from tests.support.quick import seeds
from tests.unit.logcore.compaction_driver import COMPACTED, compact, fill_active, put
from tests.unit.logcore.partition_driver import append, marker, open_partition

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")

PRODUCERS = 4
STEPS = 120


def readable(partition: Partition, isolation: Isolation) -> list[int]:
    """Return the offsets of all records that a reader gets, from the log start to the limit."""
    offset, found, gone = partition.log_start_offset, [], set[int]()
    while True:
        fetched = fetch_bytes(partition, offset, 1 << 20, isolation)
        if not fetched.records:
            return [number for number in found if number >= partition.log_start_offset]
        aborted = sorted(fetched.aborted or (), key=lambda pair: pair[1])
        for position, header in iter_headers(fetched.records):
            gone |= {who for who, first in aborted if first == header.base_offset}
            if header.is_control:
                gone.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in gone):
                found += [
                    record.offset for record in decode_records(fetched.records, position, header)
                ]
            offset = header.next_offset


def learned(partition_tally: PartitionTally, limit: int) -> PartitionTally:
    for _ in partition_tally.learn(limit):
        pass
    assert partition_tally.end == limit
    return partition_tally


class Life:
    """Producers that write and end transactions in any order."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng = root, rng
        self.partition = open_partition(root)
        self.sequences = Counter[int]()
        self.open = set[int]()

    def step(self) -> None:
        rng, who = self.rng, self.rng.randrange(PRODUCERS)
        if rng.random() < 0.3:
            append(self.partition, rng.randint(1, 4))
        elif who in self.open and rng.random() < 0.5:
            marker(self.partition, who, commit=rng.random() < 0.5)
            self.open.discard(who)
        else:
            count = rng.randint(1, 4)
            append(
                self.partition,
                count,
                producer_id=who,
                sequence=self.sequences[who],
                transactional=True,
            )
            self.sequences[who] += count
            self.open.add(who)

    def restart(self) -> None:
        self.partition.close()
        self.partition = open_partition(self.root)


@pytest.mark.parametrize("seed", seeds(12))
def test_tally_counts_exactly_the_readable_records(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    if seed % 2:
        monkeypatch.setattr(tally, "BATCHES_PER_STEP", 3)
        monkeypatch.setattr(tally, "OFFSETS_PER_PART", 10)
    life = Life(tmp_path, rng)
    partition = life.partition
    decided = PartitionTally(partition, 0, 0, aborts=True)
    for step in range(STEPS):
        life.step()
        if rng.random() < 0.02:
            life.restart()
            partition = life.partition
            # After a restart, the broker counts from the offset of the slowest reader.
            decided = PartitionTally(
                partition, rng.randint(0, partition.last_stable_offset), 0, aborts=True
            )
        if step % 10 and rng.random() < 0.7:
            continue
        stable, high = partition.last_stable_offset, partition.high_watermark
        learned(decided, stable)
        held = learned(PartitionTally(partition, stable, 0, aborts=False), high)
        committed = readable(partition, Isolation.READ_COMMITTED)
        everything = readable(partition, Isolation.READ_UNCOMMITTED)
        for position in {
            decided.start,
            stable,
            *(rng.randint(decided.start, high) for _ in range(5)),
        }:
            hidden, aborted = decided.between(position, max(position, stable))
            got = max(0, stable - position) - hidden
            assert got - aborted == sum(offset >= position for offset in committed)
            behind = max(position, stable)
            waiting = high - behind - held.between(behind, high)[0]
            assert got + waiting == sum(offset >= position for offset in everything)
            first = next((offset for offset in committed if offset >= position), None)
            if first is not None:
                assert decided.next_record(position) == first
        if rng.random() < 0.3:
            decided.trim(rng.randint(decided.start, stable), 10_000)
    partition.close()


def test_tally_does_not_read_non_transactional_batches(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    append(partition, 5)
    counted = PartitionTally(partition, 0, 0, aborts=True)
    assert list(counted.learn(5)) == []
    assert (counted.end, counted.between(0, 5)) == (5, (0, 0))
    partition.close()


def test_tally_reads_old_batches_in_steps_after_a_restart(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    for _ in range(2 * BATCHES_PER_STEP + 1):
        append(partition)
    partition.close()
    partition = open_partition(tmp_path)
    counted = PartitionTally(partition, 0, 0, aborts=True)
    assert len(list(counted.learn(partition.high_watermark))) == 3
    append(partition, 7)
    assert list(counted.learn(partition.high_watermark)) == []
    partition.close()


@pytest.mark.parametrize("seed", range(4))
def test_tally_does_not_count_records_removed_by_compaction(seed: int, tmp_path: Path) -> None:
    """Batches, and gaps of removed batches, still contain the offsets of removed records."""
    rng = random.Random(seed)
    partition = open_partition(tmp_path, config=COMPACTED)
    for _ in range(60):
        put(partition, [(b"%d" % rng.randrange(9), b"v") for _ in range(rng.randint(1, 5))])
    fill_active(partition)
    cleaned = compact(partition) or 0
    end = partition.high_watermark
    everything = readable(partition, Isolation.READ_UNCOMMITTED)
    assert len(everything) < end
    for is_open_again in (False, True):
        if is_open_again:
            partition.close()
            partition = open_partition(tmp_path, config=COMPACTED)
        counted = learned(PartitionTally(partition, 0, cleaned, aborts=True), end)
        boundaries = {header.base_offset for header, _ in partition.reader.read_all()}
        for position in boundaries:
            left = end - position - counted.between(position, end)[0]
            assert left == sum(offset >= position for offset in everything)
    partition.close()


def test_tally_memory_is_bounded_and_its_total_stays_exact(tmp_path: Path) -> None:
    partition = open_partition(tmp_path)
    count = 4 * MIN_RUNS
    for number in range(count):
        append(partition, producer_id=1, sequence=number, transactional=True)
        marker(partition, 1, commit=True)
    counted = learned(PartitionTally(partition, 0, 0, aborts=True), partition.last_stable_offset)
    assert counted.runs == count
    counted.trim(0, 2 * MIN_RUNS)
    assert counted.runs == 2 * MIN_RUNS
    end = partition.high_watermark
    assert counted.between(0, end) == (count, 0)
    # Within a run the count may be too high by one, but never too low.
    off = [(end - at + 1) // 2 - counted.between(at, end)[0] for at in range(end)]
    assert set(off) == {0, 1}
    counted.trim(end, 1)
    assert counted.between(end, end) == (0, 0)
    partition.close()
