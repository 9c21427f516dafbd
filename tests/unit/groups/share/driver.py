"""A driver for one share partition: its clock, its effects in order, and its replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fencepost.groups.share.acknowledge import acknowledge, expire_locks, release
from fencepost.groups.share.acquire import acquire
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import (
    AbortedTransaction,
    AcknowledgeBatch,
    AcquireMode,
    AcquireRequest,
    DropPartition,
    Fetched,
    FetchedBatch,
    LookUpStartOffset,
    ReadState,
    SendToDeadLetterQueue,
    SharePartitionKey,
    ShareSettings,
    StateRead,
    WakeFetches,
    WriteState,
)
from fencepost.groups.share.completion import dead_lettered, state_written
from fencepost.groups.share.partition import SharePartition
from fencepost.logcore.machine import DecisionBuilder, DomainError, Event

KEY = SharePartitionKey("orders", bytes(range(16)), 0)
LOCK_MS = 1_000
SETTINGS = ShareSettings(record_lock_duration_ms=LOCK_MS)


def log(*batches: tuple[int, int]) -> tuple[FetchedBatch, ...]:
    """Return batches with these first and last offsets."""
    return tuple(FetchedBatch(first, last) for first, last in batches)


class Driver:
    """A share partition whose effects wait until the test completes them."""

    def __init__(
        self,
        settings: ShareSettings = SETTINGS,
        *,
        start: int | None = 0,
        batches: Sequence[StateBatch] = (),
        leader_epoch: int = 1,
    ) -> None:
        self.now_ms = 1_000_000
        self.settings = settings
        self.reads: list[ReadState] = []
        self.lookups: list[LookUpStartOffset] = []
        self.writes: list[WriteState] = []
        self.dead_letters: list[SendToDeadLetterQueue] = []
        self.drops = 0
        self.wakes = 0
        self.events: list[Event] = []
        self.replies: dict[int, object] = {}
        self.deadline_ms: int | None = None
        self.tokens = 0
        self.partition = SharePartition(KEY, leader_epoch, lambda: self.settings)
        if start is not None:
            self.load(StateRead(0, start, tuple(batches)))

    def run(self, step: Callable[[DecisionBuilder], None]) -> None:
        """Take one step, collect its effects and check the invariants."""
        decision = DecisionBuilder(self.now_ms)
        step(decision)
        built = decision.build()
        for reply in built.replies:
            assert reply.token not in self.replies, "a request is answered once"
            self.replies[reply.token] = reply.response
        for timer in built.timers:
            self.deadline_ms = timer.deadline_ms
        for effect in built.effects:
            match effect:
                case WriteState():
                    self.writes.append(effect)
                case SendToDeadLetterQueue():
                    self.dead_letters.append(effect)
                case ReadState():
                    self.reads.append(effect)
                case LookUpStartOffset():
                    self.lookups.append(effect)
                case DropPartition():
                    self.drops += 1
                case WakeFetches():
                    self.wakes += 1
                case _:
                    raise AssertionError(effect)
        self.events += built.events
        self.partition.check()

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def load(self, state: StateRead | DomainError) -> int:
        """Initialize the share partition with a state."""
        token = self.token()
        self.run(lambda decision: self.partition.initialize(decision, token))
        self.run(lambda decision: self.partition.state_read(decision, state))
        return token

    def fetch(
        self,
        member: str,
        batches: Sequence[FetchedBatch],
        *,
        at: int | None = None,
        max_records: int = 500,
        batch_size: int = 500,
        mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED,
        aborted: Sequence[AbortedTransaction] = (),
    ) -> list[tuple[int, int, int]]:
        """Acquire records from batches, which were read at the next fetch offset or at ``at``."""
        offset = self.partition.next_fetch_offset() if at is None else at
        request = AcquireRequest(member, max_records, batch_size, mode)
        fetched = Fetched(offset, tuple(batches), tuple(aborted))
        acquired: list[tuple[int, int, int]] = []
        self.run(
            lambda decision: acquired.extend(
                tuple(entry) for entry in acquire(self.partition, decision, request, fetched)
            )
        )
        return acquired

    def acknowledge(self, member: str, *batches: tuple[int, int, tuple[int, ...] | int]) -> int:
        """Begin to acknowledge batches (first, last, types); return the token."""
        token = self.token()
        requests = [
            AcknowledgeBatch(first, last, (types,) if isinstance(types, int) else types)
            for first, last, types in batches
        ]
        self.run(lambda decision: acknowledge(self.partition, decision, token, member, requests))
        return token

    def release(self, member: str) -> int:
        """Begin to release the records of a closed session; return the token."""
        token = self.token()
        self.run(lambda decision: release(self.partition, decision, token, member))
        return token

    def complete(self, index: int = 0, error: DomainError | None = None) -> WriteState:
        """Complete one of the pending writes."""
        write = self.writes.pop(index)
        self.run(lambda decision: state_written(self.partition, decision, write.write_id, error))
        return write

    def complete_dead_letter(self, index: int = 0) -> None:
        request = self.dead_letters.pop(index)
        self.run(
            lambda decision: dead_lettered(
                self.partition, decision, [(request.first, request.last)], queue="dlq.queue"
            )
        )

    def settle(self) -> None:
        """Complete all pending writes and dead-letter records successfully."""
        while self.writes or self.dead_letters:
            if self.writes:
                self.complete()
            else:
                self.complete_dead_letter()

    def advance(self, ms: int) -> None:
        """Let time pass, and fire the lock timer when it is due."""
        end = self.now_ms + ms
        while self.deadline_ms is not None and self.deadline_ms <= end:
            self.now_ms = max(self.now_ms, self.deadline_ms)
            self.deadline_ms = None
            self.run(lambda decision: expire_locks(self.partition, decision))
        self.now_ms = end

    def move_log_start(self, offset: int) -> None:
        self.run(lambda decision: self.partition.log_start_moved(decision, offset))

    def states(self) -> dict[int, tuple[int, int, str | None]]:
        """Return offset → (state, delivery count, owner)."""
        return {
            offset: (int(entry.state), entry.delivery_count, entry.member_id)
            for entry in self.partition.in_flight()
            for offset in range(entry.first, entry.last + 1)
        }
