"""The share coordinator: the state machine of one partition of ``__share_group_state``.

The share coordinator stores the state that leaders of share partitions write, and fences former
leaders. The group coordinator initializes and deletes the state. A command concerns one share
partition; Kafka's requests name several.

Two epochs fence requests. The *state epoch* is the group epoch at which the state was initialized
or its start offset altered. The *leader epoch* is the partition's; a read raises the stored leader
epoch and thereby fences former leaders. A write with a larger epoch than the stored one is
accepted, but does not raise the stored epoch, because a leader reads before it writes
(KAFKA-19456).

Source: Kafka's ``ShareCoordinatorShard``, ``ShareGroupOffset``, ``ShareCoordinatorOffsetsManager``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Final

from fencepost.groups.share import errors
from fencepost.groups.share.batches import UNKNOWN_COUNT, UNKNOWN_OFFSET, StateBatch, combine
from fencepost.groups.share.commands import InFlightRange, SharePartitionKey, StateRead
from fencepost.groups.share.state_records import (
    MAX_DELIVERY_COUNT,
    PERSISTED_STATES,
    Snapshot,
    Update,
    decode,
    snapshot_record,
    tombstone,
    update_record,
)
from fencepost.groups.share.states import RecordState
from fencepost.logcore.budget import Account
from fencepost.logcore.fields import MAX_STRING_BYTES
from fencepost.logcore.machine import (
    Decision,
    DecisionBuilder,
    InvariantViolation,
    ProducerStamp,
    Record,
    Token,
)
from fencepost.logcore.values import dataclass

NEGATIVE_PARTITION: Final = "The partition id cannot be a negative number."
NEGATIVE_LEADER_EPOCH: Final = "The leader epoch cannot be a negative number."
NEGATIVE_STATE_EPOCH: Final = "The state epoch cannot be a negative number."
WRITE_UNINITIALIZED: Final = "Write operation on uninitialized share partition not allowed."
READ_UNINITIALIZED: Final = "Read operation on uninitialized share partition not allowed."
FENCED_LEADER_EPOCH: Final = (
    "The leader epoch in the request is older than the epoch on the broker."
)
FENCED_STATE_EPOCH: Final = (
    "The share coordinator rejected the request because the share-group state epoch did not match."
)
LONG_GROUP_ID: Final = f"The group id has more than {MAX_STRING_BYTES} bytes."
IMPOSSIBLE_BATCH: Final = "Impossible state batch"
UNKNOWN_PARTITION: Final = "This server does not host this topic-partition."


MAX_STATE_BATCHES: Final = 20_000
"""The maximum number of batches in a state: twice the highest
``group.share.partition.max.record.locks``. The batches are merged in one turn of the event loop,
and must fit a record of 1 MiB. Kafka has no limit."""
TOO_MANY_BATCHES: Final = f"The state of a share partition has at most {MAX_STATE_BATCHES} batches."

ENTRY_BYTES: Final = 700
"""The approximate memory, in bytes, of a state without its batches and its group id."""
BATCH_BYTES: Final = 170
"""The memory, in bytes, of a state batch: a tuple with two large numbers."""


@dataclass(frozen=True, slots=True)
class ShareStateLimits:
    """The limits of one shard."""

    update_records_per_snapshot: int = 500
    """``share.coordinator.snapshot.update.records.per.snapshot``: the maximum number of updates
    between two snapshots of a share partition. When the shard is loaded, at most that many updates
    of each share partition are read."""

    cold_snapshot_interval_ms: int = 300_000
    """``share.coordinator.cold.partition.snapshot.interval.ms``: the maximum age of a snapshot. The
    log is pruned only up to the oldest snapshot, so old snapshots are written again."""

    max_sweep_bytes: int = 524_288
    """The maximum size, in bytes, of the records that one decision of a sweep writes. They must fit
    a batch of 1 MiB. The largest snapshot, of 10,000 offsets in alternating states, takes about
    0.2 MiB."""


@dataclass(frozen=True, slots=True)
class InitializeState:
    """Begin a state without batches; sent by the group coordinator."""

    key: SharePartitionKey
    state_epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class ReadShareState:
    """Read the state as the leader of ``leader_epoch``; the answer is a ``StateRead``."""

    key: SharePartitionKey
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class WriteShareState:
    """Write changed batches; sent by the leader."""

    key: SharePartitionKey
    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int
    batches: tuple[StateBatch, ...]


@dataclass(frozen=True, slots=True)
class ReadStateSummary:
    """Read the offsets without batches or fencing; the answer is a :class:`StateSummary`."""

    key: SharePartitionKey


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Delete the state; a missing state is no error."""

    key: SharePartitionKey


StateCommand = InitializeState | ReadShareState | WriteShareState | ReadStateSummary | DeleteState
"""A command for one share partition, which its ``key`` identifies."""


@dataclass(frozen=True, slots=True)
class SnapshotColdPartitions:
    """Write snapshots of share partitions whose snapshots are old; the answer is :class:`Swept`."""


@dataclass(frozen=True, slots=True)
class ForgetTopics:
    """Delete the state of deleted topics; the answer is :class:`Swept`."""

    topic_ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The answer to InitializeState, WriteShareState and DeleteState."""


@dataclass(frozen=True, slots=True)
class StateSummary:
    """The answer to ReadStateSummary. The default values are the answer for an unknown key."""

    start_offset: int = UNKNOWN_OFFSET
    delivery_complete_count: int = UNKNOWN_COUNT
    leader_epoch: int = 0
    state_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Swept:
    """The records of a sweep are written, as far as they fit one decision."""

    more: bool
    """Whether the sweep must be repeated at once."""


@dataclass(slots=True)
class _Entry:
    """The state of one share partition."""

    value: Snapshot
    snapshot_offset: int
    """The offset of the share partition's latest snapshot record."""
    leader_epoch: int
    """The highest leader epoch of any record; reads and writes with a lower epoch are fenced. The
    epoch in ``value`` becomes 0 again when the state is initialized again."""
    state_epoch: int
    updates: int = 0
    """The number of update records since the snapshot."""


class ShareStateMachine:
    """The state machine of a share coordinator's partition.

    ``partition_count`` returns the number of partitions of a topic id; None if the topic is
    unknown. ``memory`` counts the bytes of all states.
    """

    def __init__(
        self,
        limits: ShareStateLimits,
        partition_count: Callable[[bytes], int | None],
        memory: Account | None = None,
    ) -> None:
        self._memory = memory or Account()
        self._limits = limits
        self._partition_count = partition_count
        self._entries: dict[SharePartitionKey, _Entry] = {}
        self._last_offset = -1
        self._redundant_offset = 0
        self._is_serving = False
        self.skipped_records = 0
        """The number of records whose type or version this broker does not know."""

    def __len__(self) -> int:
        return len(self._entries)

    def redundant_offset(self) -> int:
        """Return the offset below which the log can be deleted; it never falls.

        Of each share partition the latest snapshot is needed, because updates build on it. The
        result is the lowest offset of these snapshots. The snapshot of a deleted share partition
        does not count (KAFKA-19695).
        """
        offsets = [entry.snapshot_offset for entry in self._entries.values()]
        # Without any entry, the last record is a tombstone or has an unknown type.
        lowest = min(offsets, default=max(0, self._last_offset))
        self._redundant_offset = max(self._redundant_offset, lowest)
        return self._redundant_offset

    def states_of(self, group_id: str) -> dict[SharePartitionKey, tuple[int, list[InFlightRange]]]:
        """Return start offset and in-flight records of a group's share partitions, for inspection.

        The written start offset may be behind the start offset in the leader's memory, so complete
        records at the front are skipped.
        """
        states: dict[SharePartitionKey, tuple[int, list[InFlightRange]]] = {}
        for key, entry in self._entries.items():
            if key.group_id == group_id:
                start_offset, ranges = entry.value.start_offset, list[InFlightRange]()
                for first, last, number, count in entry.value.batches:
                    state = RecordState(number)
                    if first == start_offset and state.is_terminal:
                        start_offset = last + 1
                    else:
                        ranges.append(InFlightRange(first, last, state, count, None, None, False))
                states[key] = start_offset, ranges
        return states

    # --- the contract of machines ----------------------------------------------------------------

    def decide(self, token: Token, command: object, now_ms: int) -> Decision:
        """Return the record and the reply of a command. Raises ``ShareError`` to refuse it."""
        if not self._is_serving:
            raise errors.ShareCoordinatorUnloadedError("the shard does not serve")
        decision = DecisionBuilder(now_ms)
        match command:
            case InitializeState():
                self._initialize(decision, token, command)
            case ReadShareState():
                self._read(decision, token, command)
            case WriteShareState():
                self._write(decision, token, command)
            case ReadStateSummary():
                self._read_summary(decision, token, command)
            case DeleteState():
                self._delete(decision, token, command)
            case SnapshotColdPartitions():
                self._snapshot_cold(decision, token)
            case ForgetTopics():
                self._forget_topics(decision, token, command)
            case _:
                raise InvariantViolation(f"not a command of the share coordinator: {command!r}")
        return decision.build()

    def fire(self, key: Hashable, now_ms: int) -> Decision:  # noqa: ARG002 - Machine requires it
        """Tolerate any timer: this machine sets none."""
        return DecisionBuilder(now_ms).build()

    def replay(
        self,
        record: Record,
        offset: int,
        timestamp_ms: int,  # noqa: ARG002 - Machine requires it; the records contain their times
        stamp: ProducerStamp | None,  # noqa: ARG002 - Machine requires it; these batches have none
    ) -> None:
        """Apply one record; only replay changes the state. Raises CorruptRecordError."""
        self._last_offset = offset
        decoded = decode(record)
        if decoded is None:
            self.skipped_records += 1
            return
        key, value = decoded
        entry = self._entries.get(key)
        if entry is not None:
            self._memory.add(-_state_bytes(key, entry.value))
        match value:
            case None:
                self._entries.pop(key, None)
            case Snapshot():
                leader_epoch, state_epoch = value.leader_epoch, value.state_epoch
                if entry is not None:
                    leader_epoch = max(leader_epoch, entry.leader_epoch)
                    state_epoch = max(state_epoch, entry.state_epoch)
                self._entries[key] = _Entry(value, offset, leader_epoch, state_epoch)
            case Update():
                if entry is None:
                    # Records of a deleted share partition whose snapshot was pruned; its tombstone
                    # follows.
                    empty = Snapshot(value.snapshot_epoch, 0, 0, UNKNOWN_OFFSET, 0, 0, (), -1)
                    entry = self._entries[key] = _Entry(empty, offset, 0, 0)
                entry.value = _merged(entry.value, value)
                entry.leader_epoch = max(entry.leader_epoch, value.leader_epoch)
                entry.updates += 1
        if value is not None:
            self._memory.add(_state_bytes(key, self._entries[key].value))

    def replay_marker(
        self,
        stamp: ProducerStamp,  # noqa: ARG002 - Machine requires it
        offset: int,
        *,
        commit: bool,  # noqa: ARG002 - Machine requires it
    ) -> None:
        """Ignore an end marker: ``__share_group_state`` has no transactional batches."""
        self._last_offset = offset

    def on_loaded(self, now_ms: int) -> Decision:
        """Start serving."""
        self._is_serving = True
        return DecisionBuilder(now_ms).build()

    def on_unloaded(self) -> Decision:
        """Stop serving; no request waits."""
        self._is_serving = False
        return Decision()

    def digest(self) -> str:
        """Return a hash of the durable state."""
        total = hashlib.sha256()
        for key, entry in sorted(self._entries.items()):
            record = snapshot_record(key, entry.value)
            for part in (record.key, record.value or b""):
                total.update(len(part).to_bytes(4, "big"))
                total.update(part)
        return total.hexdigest()

    def check(self) -> None:
        """Raise InvariantViolation unless the state is consistent."""
        for key, entry in self._entries.items():
            value, previous_last = entry.value, entry.value.start_offset - 1
            for batch in value.batches:
                if batch.first <= previous_last or batch.last < batch.first:
                    raise InvariantViolation(f"{key}: {batch} after {previous_last}")
                previous_last = batch.last
            if entry.leader_epoch < value.leader_epoch or entry.state_epoch < value.state_epoch:
                raise InvariantViolation(f"{key}: epochs of {entry} fall behind")
            if not 0 <= entry.snapshot_offset <= self._last_offset:
                raise InvariantViolation(f"{key}: snapshot at {entry.snapshot_offset}")
            if entry.snapshot_offset < self._redundant_offset:
                raise InvariantViolation(f"{key}: its snapshot was pruned")
        used = sum(_state_bytes(key, entry.value) for key, entry in self._entries.items())
        if used != self._memory.used:
            raise InvariantViolation(f"states of {used} bytes, not {self._memory.used}")

    # --- commands --------------------------------------------------------------------------------

    def _initialize(
        self, decision: DecisionBuilder, token: Token, command: InitializeState
    ) -> None:
        """Write a snapshot without batches."""
        _require(command.key.partition >= 0, NEGATIVE_PARTITION)
        _require(command.state_epoch >= 0, NEGATIVE_STATE_EPOCH)
        _require(len(command.key.group_id.encode()) <= MAX_STRING_BYTES, LONG_GROUP_ID)
        entry = self._entries.get(command.key)
        if entry is not None and command.state_epoch < entry.state_epoch:
            raise errors.FencedStateEpochError(FENCED_STATE_EPOCH)
        self._require_partition(command.key)
        if entry is None and not self._memory.has_room(ENTRY_BYTES + len(command.key.group_id)):
            raise errors.SharePartitionFailedError(self._memory.budget.exceeded)
        is_unknown = command.start_offset == UNKNOWN_OFFSET
        if entry is not None and is_unknown and command.state_epoch == entry.state_epoch:
            # A former group coordinator repeats a request whose response was lost. Members may have
            # acknowledged records in the meantime, so the state stays; Kafka would reset it.
            decision.reply(token, StateChanged())
            return
        snapshot = Snapshot(
            snapshot_epoch=entry.value.snapshot_epoch + 1 if entry is not None else 0,
            state_epoch=command.state_epoch,
            leader_epoch=0,
            start_offset=command.start_offset,
            create_timestamp_ms=decision.now_ms,
            write_timestamp_ms=decision.now_ms,
            batches=(),
            delivery_complete_count=UNKNOWN_COUNT if is_unknown else 0,
        )
        decision.append(snapshot_record(command.key, snapshot))
        decision.reply(token, StateChanged())

    def _read(self, decision: DecisionBuilder, token: Token, command: ReadShareState) -> None:
        """Answer with the state, and record the leader's epoch if it is new.

        The epoch must be durable: otherwise, once another broker coordinates the shard, a former
        leader could write again (KAFKA-17796).
        """
        _require(command.key.partition >= 0, NEGATIVE_PARTITION)
        _require(command.leader_epoch >= 0, NEGATIVE_LEADER_EPOCH)
        entry = self._entry(command.key, READ_UNINITIALIZED)
        if command.leader_epoch < entry.leader_epoch:
            raise errors.FencedShareLeaderEpochError(FENCED_LEADER_EPOCH)
        self._require_partition(command.key)
        value = entry.value
        if command.leader_epoch != entry.leader_epoch:
            self._append(
                decision,
                command.key,
                entry,
                Update(
                    value.snapshot_epoch,
                    command.leader_epoch,
                    value.start_offset,
                    (),
                    value.delivery_complete_count,
                ),
            )
        decision.reply(token, StateRead(value.state_epoch, value.start_offset, value.batches))

    def _write(self, decision: DecisionBuilder, token: Token, command: WriteShareState) -> None:
        """Write an update, or a snapshot if enough updates follow the last snapshot."""
        _require(command.key.partition >= 0, NEGATIVE_PARTITION)
        _require(command.leader_epoch >= 0, NEGATIVE_LEADER_EPOCH)
        _require(command.state_epoch >= 0, NEGATIVE_STATE_EPOCH)
        _require(len(command.batches) <= MAX_STATE_BATCHES, TOO_MANY_BATCHES)
        for batch in command.batches:
            _require(_is_possible(batch), f"{IMPOSSIBLE_BATCH}: {batch}")
        entry = self._entry(command.key, WRITE_UNINITIALIZED)
        if command.leader_epoch < entry.leader_epoch:
            raise errors.FencedShareLeaderEpochError(FENCED_LEADER_EPOCH)
        if command.state_epoch < entry.state_epoch:
            raise errors.FencedStateEpochError(FENCED_STATE_EPOCH)
        self._require_partition(command.key)
        value = entry.value
        # Writes may arrive out of order: ignore a lower start offset, together with its count.
        count = command.delivery_complete_count
        if command.start_offset == value.start_offset:
            count = max(count, value.delivery_complete_count)
        elif command.start_offset < value.start_offset:
            count = value.delivery_complete_count
        start_offset = max(command.start_offset, value.start_offset)
        batches = combine((), command.batches, start_offset)
        update = Update(value.snapshot_epoch, value.leader_epoch, start_offset, batches, count)
        if len(value.batches) + len(batches) > MAX_STATE_BATCHES:
            _require(len(_merged(value, update).batches) <= MAX_STATE_BATCHES, TOO_MANY_BATCHES)
        self._append(decision, command.key, entry, update)
        decision.reply(token, StateChanged())

    def _append(
        self, decision: DecisionBuilder, key: SharePartitionKey, entry: _Entry, update: Update
    ) -> None:
        if entry.updates < self._limits.update_records_per_snapshot:
            decision.append(update_record(key, update))
            return
        snapshot = _merged(entry.value, update)._replace(
            snapshot_epoch=entry.value.snapshot_epoch + 1,
            create_timestamp_ms=decision.now_ms,
            write_timestamp_ms=decision.now_ms,
        )
        decision.append(snapshot_record(key, snapshot))

    def _read_summary(
        self, decision: DecisionBuilder, token: Token, command: ReadStateSummary
    ) -> None:
        """Answer with the offsets and epochs."""
        _require(command.key.partition >= 0, NEGATIVE_PARTITION)
        self._require_partition(command.key)
        entry = self._entries.get(command.key)
        if entry is None:
            decision.reply(token, StateSummary())
            return
        value = entry.value
        decision.reply(
            token,
            StateSummary(
                value.start_offset,
                value.delivery_complete_count,
                value.leader_epoch,
                value.state_epoch,
            ),
        )

    def _delete(self, decision: DecisionBuilder, token: Token, command: DeleteState) -> None:
        """Write a tombstone."""
        _require(command.key.partition >= 0, NEGATIVE_PARTITION)
        self._require_partition(command.key)
        if command.key in self._entries:
            decision.append(tombstone(command.key))
        decision.reply(token, StateChanged())

    def _snapshot_cold(self, decision: DecisionBuilder, token: Token) -> None:
        """Write old snapshots again, unless every snapshot is already a repetition.

        Without this exception, a coordinator without traffic would write snapshots for ever.
        """
        interval_ms = self._limits.cold_snapshot_interval_ms
        size, has_more = 0, False
        if not all(_is_repeated(entry.value) for entry in self._entries.values()):
            for key, entry in self._entries.items():
                if decision.now_ms - entry.value.write_timestamp_ms < interval_ms:
                    continue
                record = snapshot_record(
                    key,
                    entry.value._replace(
                        snapshot_epoch=entry.value.snapshot_epoch + 1,
                        write_timestamp_ms=decision.now_ms,
                    ),
                )
                size += _size(record)
                if size > self._limits.max_sweep_bytes and decision.records:
                    has_more = True
                    break
                decision.append(record)
        decision.reply(token, Swept(more=has_more))

    def _forget_topics(
        self, decision: DecisionBuilder, token: Token, command: ForgetTopics
    ) -> None:
        """Write tombstones for the state of deleted topics."""
        size, has_more = 0, False
        for key in self._entries:
            if key.topic_id in command.topic_ids:
                record = tombstone(key)
                size += _size(record)
                if size > self._limits.max_sweep_bytes and decision.records:
                    has_more = True
                    break
                decision.append(record)
        decision.reply(token, Swept(more=has_more))

    # --- checks ----------------------------------------------------------------------------------

    def _entry(self, key: SharePartitionKey, message: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise errors.InvalidShareRequestError(message)
        return entry

    def _require_partition(self, key: SharePartitionKey) -> None:
        count = self._partition_count(key.topic_id)
        if count is None or key.partition >= count:
            raise errors.UnknownSharePartitionError(UNKNOWN_PARTITION)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise errors.InvalidShareRequestError(message)


def _is_possible(batch: StateBatch) -> bool:
    """Whether replay accepts the batch. Kafka writes any batch; replaying an invalid one fails."""
    return (
        0 <= batch.first <= batch.last
        and batch.state in PERSISTED_STATES
        and 0 <= batch.delivery_count <= MAX_DELIVERY_COUNT
    )


def _merged(value: Snapshot, update: Update) -> Snapshot:
    start_offset = update.start_offset
    if start_offset == UNKNOWN_OFFSET:
        start_offset = value.start_offset
    return value._replace(
        leader_epoch=value.leader_epoch if update.leader_epoch == -1 else update.leader_epoch,
        start_offset=start_offset,
        batches=combine(value.batches, update.batches, start_offset),
        delivery_complete_count=update.delivery_complete_count,
    )


def _state_bytes(key: SharePartitionKey, value: Snapshot) -> int:
    return ENTRY_BYTES + len(key.group_id) + BATCH_BYTES * len(value.batches)


def _is_repeated(value: Snapshot) -> bool:
    return value.create_timestamp_ms != value.write_timestamp_ms


def _size(record: Record) -> int:
    return len(record.key) + len(record.value or b"")
