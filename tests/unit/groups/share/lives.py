"""Random events of a share partition, compared with the naive model after each step.

A run has a log with compacted holes and aborted transactions, three members, changing leaders, and
a share coordinator that may be slow, refuse requests, or lose responses.
"""

from __future__ import annotations

from random import Random

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import (
    AbortedTransaction,
    AcknowledgeBatch,
    Acknowledged,
    AcquireMode,
    AcquireRequest,
    Fetched,
    FetchedBatch,
    IsolationLevel,
    ShareSettings,
    StateRead,
    WriteState,
)
from fencepost.groups.share.errors import (
    InvalidRecordStateError,
    InvalidShareRequestError,
    SharePartitionFailedError,
)
from fencepost.logcore.machine import DomainError
from tests.unit.groups.share.driver import LOCK_MS, Driver
from tests.unit.groups.share.ledger import Ledger
from tests.unit.groups.share.naive import AVAILABLE, FINAL, NaivePartition

MEMBERS = ("m1", "m2", "m3")
KINDS = {"state": InvalidRecordStateError, "request": InvalidShareRequestError}


class Log:
    """A log's batches, with holes between them, and its transactions."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.batches: list[FetchedBatch] = []
        self.transactions: list[tuple[AbortedTransaction, int]] = []
        """The aborted transactions, with the offsets of their markers."""
        self.start = self.end = 0

    def append(self) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            producer, first = rng.randrange(3), self.end
            for _ in range(rng.randint(1, 2)):
                self._add(rng.randint(1, 6), producer, is_transactional=True)
            is_abort = rng.random() < 0.6
            if is_abort:
                self.transactions.append((AbortedTransaction(producer, first), self.end))
            self._add(1, producer, is_transactional=True, is_abort_marker=is_abort)
        else:
            self._add(rng.randint(1, 12), -1)

    def _add(self, size: int, producer: int, **marks: bool) -> None:
        self.batches.append(FetchedBatch(self.end, self.end + size - 1, producer, **marks))
        self.end += size

    def compact(self) -> None:
        """Remove a batch that is neither the last batch nor transactional."""
        plain = [batch for batch in self.batches[:-1] if not batch.is_transactional]
        if plain:
            self.batches.remove(self.rng.choice(plain))

    def move_start(self) -> None:
        if self.start < self.end:
            self.start = self.rng.randint(self.start, min(self.end, self.start + 15))
            self.batches = [batch for batch in self.batches if batch.last >= self.start]

    def read(self, offset: int, most: int) -> tuple[FetchedBatch, ...]:
        return tuple([batch for batch in self.batches if batch.last >= offset][:most])

    def aborted(self, batches: tuple[FetchedBatch, ...]) -> tuple[AbortedTransaction, ...]:
        return tuple(
            transaction
            for transaction, marker in self.transactions
            if transaction.first_offset <= batches[-1].last and marker >= batches[0].first
        )

    def aborted_offsets(self) -> frozenset[int]:
        """Return the offsets of aborted data, without markers."""
        return frozenset(
            offset
            for transaction, marker in self.transactions
            for offset in range(transaction.first_offset, marker)
        )


class Coordinator:
    """The share coordinator, with one entry per record."""

    def __init__(self) -> None:
        self.start = 0
        self.states: dict[int, tuple[int, int]] = {}
        """Offset → (delivery count, state)."""

    def write(self, write: WriteState) -> None:
        self.start = max(self.start, write.start_offset)
        for batch in write.batches:
            for offset in range(batch.first, batch.last + 1):
                new = (batch.delivery_count, batch.state)
                self.states[offset] = max(new, self.states.get(offset, new))
        for offset in [offset for offset in self.states if offset < self.start]:
            del self.states[offset]

    def read(self) -> StateRead:
        batches: list[StateBatch] = []
        for offset, (count, state) in sorted(self.states.items()):
            last = batches[-1] if batches else None
            if last is not None and last.last + 1 == offset and last[2:] == (state, count):
                batches[-1] = last._replace(last=offset)
            else:
                batches.append(StateBatch(offset, offset, state, count))
        return StateRead(0, self.start, tuple(batches))


def written(write: WriteState) -> dict[int, tuple[int, int]]:
    """Return offset → (state, delivery count) of a write."""
    return {
        offset: (batch.state, batch.delivery_count)
        for batch in write.batches
        for offset in range(batch.first, batch.last + 1)
    }


class Life:
    """One random run."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.settings = ShareSettings(
            record_lock_duration_ms=LOCK_MS,
            delivery_count_limit=rng.choice((2, 3, 5, 6)),
            max_record_locks=rng.choice((10, 25, 100)),
            isolation_level=rng.choice(tuple(IsolationLevel)),
            dead_letter_queue=rng.random() < 0.4,
            renew_acknowledge_enabled=rng.random() < 0.9,
        )
        self.log = Log(rng)
        self.coordinator = Coordinator()
        self.ledger = Ledger(self.settings.delivery_count_limit)
        self.acknowledged: dict[int, set[int]] = {}
        """Token → offsets that are final once the reply to the token is successful."""
        self.answered: set[int] = set()
        self.term = 0
        self._lead()

    def _lead(self) -> None:
        """Make a new leader, with a higher epoch."""
        self.term += 1
        state = self.coordinator.read()
        now_ms = self.driver.now_ms if self.term > 1 else 1_000_000
        self.driver = Driver(self.settings, start=None, leader_epoch=self.term)
        self.driver.now_ms = now_ms
        self.driver.load(state)
        self.naive = NaivePartition(self.settings, state.start_offset, state.batches)
        self.ledger.leader_changed(
            {offset: count for offset, (count, _) in self.coordinator.states.items()}
        )
        self.acknowledged.clear()
        self.answered.clear()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.finish()

    def step(self) -> None:
        rng = self.rng
        (action,) = rng.choices(
            (
                self.produce, self.fetch, self.acknowledge, self.write_ends, self.dead_letter_ends,
                self.pass_time, self.release, self.compact, self.log_start, self.change_leader,
            ),
            (8, 16, 16, 12, 4, 6, 2, 1, 1, 0.6),
        )  # fmt: skip
        action()
        self.compare()

    # --- the steps -------------------------------------------------------------------------------

    def produce(self) -> None:
        self.log.append()

    def compact(self) -> None:
        self.log.compact()

    def log_start(self) -> None:
        self.log.move_start()
        if self.rng.random() < 0.5:
            # A leader may also learn of the new log start offset from retention, at any time.
            self._move_log_start()

    def _move_log_start(self) -> None:
        self.driver.move_log_start(self.log.start)
        self.naive.log_start_moved(self.log.start)

    def fetch(self, mode: AcquireMode | None = None, member: str | None = None) -> bool:
        rng, driver = self.rng, self.driver
        offset = driver.partition.next_fetch_offset()
        if offset < self.log.start:
            # Kafka's leader learns of the new log start offset from OFFSET_OUT_OF_RANGE.
            self._move_log_start()
            return True
        batches = self.log.read(offset, rng.randint(1, 5))
        if not batches or not driver.partition.can_acquire():
            return False
        request = AcquireRequest(
            member or rng.choice(MEMBERS),
            rng.choice((1, 3, 8, 50)),
            rng.choice((1, 5, 50)),
            rng.choice(tuple(AcquireMode)) if mode is None else mode,
        )
        aborted = self.log.aborted(batches)
        expected = self.naive.acquire(request, Fetched(offset, batches, aborted), driver.now_ms)
        acquired = driver.fetch(
            request.member_id,
            batches,
            at=offset,
            max_records=request.max_records,
            batch_size=request.batch_size,
            mode=request.mode,
            aborted=aborted,
        )
        assert acquired == expected, f"acquired {acquired}, not {expected}"
        is_committed = self.settings.isolation_level is IsolationLevel.READ_COMMITTED
        self.ledger.deliver(
            acquired,
            start_offset=driver.partition.start_offset,
            bound=self.log.end,
            aborted=self.log.aborted_offsets() if is_committed else frozenset(),
        )
        return bool(acquired)

    def acknowledge(self) -> None:
        rng = self.rng
        member = rng.choice(MEMBERS)
        owned = [o for o, entry in self.naive.records.items() if entry.owner == member]
        batches: list[AcknowledgeBatch] = []
        first = 0
        for _ in range(rng.randint(1, 3)):
            if owned and rng.random() < 0.9:
                first = max(first, rng.choice(owned))
                last = first
                while last + 1 in owned and rng.random() < 0.8:
                    last += 1
            else:
                first = max(0, rng.randint(self.naive.start - 3, self.naive.end + 2), first)
                last = first + rng.randint(0, 4)
            size = last - first + 1
            types = tuple(rng.choices((0, 1, 2, 3, 4), (1, 4, 3, 1, 1), k=size))
            batches.append(
                AcknowledgeBatch(first, last, types if rng.random() < 0.4 else types[:1])
            )
            first = last + rng.randint(0, 1)
        self._acknowledge(member, batches)

    def _acknowledge(self, member: str, batches: list[AcknowledgeBatch]) -> None:
        driver = self.driver
        ending = {
            offset
            for batch in batches
            for offset in range(batch.first, batch.last + 1)
            if batch.types[0 if len(batch.types) == 1 else offset - batch.first] in (0, 1, 3)
            and offset in self.naive.records
        }
        before = len(driver.writes)
        token = driver.acknowledge(
            member, *[(batch.first, batch.last, batch.types) for batch in batches]
        )
        outcome = self.naive.acknowledge(member, batches, self._write_id(), driver.now_ms)
        if outcome == "ok":
            assert len(driver.writes) == before + 1, "the outcome must be written"
            self._compare_write()
            self.acknowledged[token] = ending
        elif outcome == "none":
            assert driver.replies.get(token) == Acknowledged()
        else:
            assert type(driver.replies.get(token)) is KINDS[outcome], (outcome, driver.replies)

    def _write_id(self) -> int:
        """Return the id of the write that a step has just begun, or 0 without pending writes."""
        return self.driver.writes[-1].write_id if self.driver.writes else 0

    def _compare_write(self) -> None:
        """Compare the write that has just begun with the model's records in transition."""
        write = self.driver.writes[-1]
        expected = {
            offset: (entry.state, entry.count)
            for offset, entry in self.naive.records.items()
            if entry.write == write.write_id
        }
        assert written(write) == expected

    def release(self, member: str | None = None) -> None:
        member = member or self.rng.choice(MEMBERS)
        before = len(self.driver.writes)
        token = self.driver.release(member)
        outcome = self.naive.release(member, self._write_id())
        assert (len(self.driver.writes) > before) == (outcome == "ok")
        if outcome == "ok":
            self._compare_write()
        assert (token in self.driver.replies) == (outcome == "none")

    def write_ends(self, error: DomainError | None = None) -> None:
        driver, rng = self.driver, self.rng
        if not driver.writes:
            return
        index = rng.randrange(len(driver.writes))
        if error is None and rng.random() < 0.2:
            error = SharePartitionFailedError("the coordinator is slow")
        if error is None or rng.random() < 0.5:
            # In case of an error, the write took effect but its response is lost.
            self.coordinator.write(driver.writes[index])
        write = driver.complete(index, error)
        self.naive.written(write.write_id, failed=error is not None)
        if error is not None:
            self.naive.expire(driver.now_ms)
        self.naive.advance()
        self._note_answers()

    def _note_answers(self) -> None:
        for token in [token for token in self.acknowledged if token in self.driver.replies]:
            offsets = self.acknowledged.pop(token)
            if self.driver.replies.get(token) == Acknowledged():
                self.ledger.finish(offsets)

    def dead_letter_ends(self) -> None:
        driver = self.driver
        if driver.dead_letters:
            index = self.rng.randrange(len(driver.dead_letters))
            request = driver.dead_letters[index]
            driver.complete_dead_letter(index)
            self.naive.dead_lettered(request.first, request.last)

    def pass_time(self) -> None:
        driver = self.driver
        end = driver.now_ms + self.rng.choice((1, LOCK_MS // 3, LOCK_MS // 2, LOCK_MS * 2))
        while driver.deadline_ms is not None and driver.deadline_ms <= end:
            before = len(driver.writes)
            driver.advance(max(0, driver.deadline_ms - driver.now_ms))
            expired = self.naive.expire(driver.now_ms)
            assert set().union(*map(written, driver.writes[before:])) == expired
        driver.advance(end - driver.now_ms)
        assert not self.naive.expire(end), "a lock has no timer"

    def change_leader(self) -> None:
        driver = self.driver
        for write in driver.writes:
            if self.rng.random() < 0.5:
                self.coordinator.write(write)
        self._lead()

    # --- comparison ------------------------------------------------------------------------------

    def compare(self) -> None:
        naive, partition = self.naive, self.driver.partition
        expected = {
            offset: (entry.state, entry.count, entry.owner)
            for offset, entry in sorted(naive.records.items())
        }
        assert self.driver.states() == expected
        transitions = {
            offset
            for entry in partition.in_flight()
            if entry.is_in_transition
            for offset in range(entry.first, entry.last + 1)
        }
        assert transitions == {o for o, entry in naive.records.items() if entry.write is not None}
        assert (partition.start_offset, partition.end_offset) == (naive.start, naive.end)
        assert partition.delivery_complete_count == naive.complete_count()
        assert partition.next_fetch_offset() == naive.next_fetch_offset()
        self.ledger.observe(partition.start_offset, self.coordinator.start)
        for write in self.driver.writes[-1:]:
            assert write.start_offset <= partition.start_offset

    def finish(self) -> None:
        """Let one member accept everything: all records in the log must become final."""
        driver = self.driver
        for _ in range(2_000):
            while driver.writes:
                self.coordinator.write(driver.writes[0])
                write = driver.complete(0)
                self.naive.written(write.write_id, failed=False)
                self.naive.advance()
                self._note_answers()
                self.compare()
            if driver.dead_letters:
                self.dead_letter_ends()
                continue
            if driver.partition.start_offset >= self.log.end:
                return
            before = driver.partition.next_fetch_offset()
            self.fetch(AcquireMode.BATCH_OPTIMIZED, "m1")
            owned = sorted(o for o, e in self.naive.records.items() if e.owner == "m1")
            if owned:
                self._acknowledge("m1", [AcknowledgeBatch(o, o, (1,)) for o in owned])
            elif driver.partition.next_fetch_offset() == before:
                if not any(entry.owner for entry in self.naive.records.values()):
                    break
                self.pass_time()
            self.compare()
        rest = {o: e for o, e in self.naive.records.items() if e.state not in FINAL}
        readable = {o for batch in self.log.batches for o in range(batch.first, batch.last + 1)}
        stuck = {o: e for o, e in rest.items() if e.state != AVAILABLE or o in readable}
        assert not stuck, f"stuck at {driver.partition.start_offset}: {stuck}"
        assert not [o for o in readable if o > driver.partition.end_offset], "not read"
