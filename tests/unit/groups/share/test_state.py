"""The share coordinator: fencing, snapshots, pruning, and deterministic replay."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fencepost.groups.share import state as texts
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import SharePartitionKey, StateRead
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    FencedStateEpochError,
    InvalidShareRequestError,
    ShareCoordinatorUnloadedError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.state import (
    DeleteState,
    ForgetTopics,
    InitializeState,
    ReadShareState,
    ReadStateSummary,
    ShareStateLimits,
    ShareStateMachine,
    SnapshotColdPartitions,
    StateChanged,
    StateSummary,
    Swept,
    WriteShareState,
)
from fencepost.groups.share.state_records import Snapshot, Update, decode, update_record
from fencepost.logcore.machine import DomainError, InvariantViolation
from tests.support.quick import seeds
from tests.unit.groups.share.state_driver import ACKNOWLEDGED, KEY, LIMITS, TOPIC, Coordinator

GONE = bytes(16)


def read() -> Coordinator:
    """Return a coordinator whose state a leader with epoch 5 has read."""
    coordinator = Coordinator()
    coordinator.initialize()
    coordinator(ReadShareState(KEY, 5))
    return coordinator


def test_initialized_state_is_empty() -> None:
    coordinator = Coordinator()
    coordinator.initialize(start=-1)
    assert coordinator(ReadStateSummary(KEY)) == StateSummary(-1, -1, 0, 1)
    coordinator.initialize(start=7)
    assert coordinator(ReadStateSummary(KEY)) == StateSummary(7, 0, 0, 1), "the lag is known"
    assert coordinator(ReadShareState(KEY, 0)) == StateRead(1, 7, ())
    epochs = [decode(record).value.snapshot_epoch for record in coordinator.log]  # type: ignore[union-attr]
    assert epochs == [0, 1]


def test_read_returns_the_combined_batches_of_all_writes() -> None:
    coordinator = read()
    coordinator.write([StateBatch(0, 4, 0, 1), StateBatch(5, 9, 2, 1)])
    coordinator.write([StateBatch(0, 4, 2, 2)], start=0, count=10)
    assert coordinator(ReadShareState(KEY, 5)) == StateRead(
        1, 0, (StateBatch(0, 4, 2, 2), StateBatch(5, 9, 2, 1))
    )
    assert coordinator(ReadStateSummary(KEY)) == StateSummary(0, 10, 5, 1)


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [(20, 1, (20, 1)), (10, 2, (10, 3)), (10, 7, (10, 7)), (5, 9, (10, 3))],
)
def test_late_write_lowers_neither_start_offset_nor_count(
    start: int, count: int, expected: tuple[int, int]
) -> None:
    coordinator = read()
    coordinator.write((), start=10, count=3)
    coordinator.write((), start=start, count=count)
    summary = coordinator(ReadStateSummary(KEY))
    assert isinstance(summary, StateSummary)
    assert (summary.start_offset, summary.delivery_complete_count) == expected


def test_repeated_initialization_without_a_start_offset_keeps_the_state() -> None:
    """A former group coordinator repeats a request whose response was lost."""
    coordinator = read()
    coordinator.write([StateBatch(0, 4, 2, 1)], start=5, count=0)
    before = coordinator(ReadShareState(KEY, 5))
    assert coordinator(InitializeState(KEY, 1, -1)) == StateChanged()
    assert coordinator(ReadShareState(KEY, 5)) == before
    assert coordinator(InitializeState(KEY, 1, 3)) == StateChanged(), "an altered offset"
    assert coordinator(ReadShareState(KEY, 5)) == StateRead(1, 3, ())


# --- errors --------------------------------------------------------------------------------------

OTHER = SharePartitionKey("orders", TOPIC, 1)
MISSING = SharePartitionKey("orders", TOPIC, 3)
NEGATIVE = SharePartitionKey("orders", TOPIC, -1)
WRITE = WriteShareState(KEY, 1, 5, 0, 0, ())


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (InitializeState(NEGATIVE, 1, 0), InvalidShareRequestError, texts.NEGATIVE_PARTITION),
        (InitializeState(OTHER, -1, 0), InvalidShareRequestError, texts.NEGATIVE_STATE_EPOCH),
        (InitializeState(KEY, 0, 0), FencedStateEpochError, texts.FENCED_STATE_EPOCH),
        (InitializeState(MISSING, 1, 0), UnknownSharePartitionError, texts.UNKNOWN_PARTITION),
        (ReadShareState(NEGATIVE, 5), InvalidShareRequestError, texts.NEGATIVE_PARTITION),
        (ReadShareState(KEY, -1), InvalidShareRequestError, texts.NEGATIVE_LEADER_EPOCH),
        (ReadShareState(OTHER, 5), InvalidShareRequestError, texts.READ_UNINITIALIZED),
        (ReadShareState(KEY, 4), FencedShareLeaderEpochError, texts.FENCED_LEADER_EPOCH),
        (replace(WRITE, key=NEGATIVE), InvalidShareRequestError, texts.NEGATIVE_PARTITION),
        (replace(WRITE, leader_epoch=-1), InvalidShareRequestError, texts.NEGATIVE_LEADER_EPOCH),
        (replace(WRITE, state_epoch=-1), InvalidShareRequestError, texts.NEGATIVE_STATE_EPOCH),
        (replace(WRITE, key=OTHER), InvalidShareRequestError, texts.WRITE_UNINITIALIZED),
        (
            replace(WRITE, leader_epoch=4, state_epoch=0),
            FencedShareLeaderEpochError,
            texts.FENCED_LEADER_EPOCH,
        ),
        (replace(WRITE, state_epoch=0), FencedStateEpochError, texts.FENCED_STATE_EPOCH),
        (ReadStateSummary(NEGATIVE), InvalidShareRequestError, texts.NEGATIVE_PARTITION),
        (ReadStateSummary(MISSING), UnknownSharePartitionError, texts.UNKNOWN_PARTITION),
        (DeleteState(NEGATIVE), InvalidShareRequestError, texts.NEGATIVE_PARTITION),
        (DeleteState(MISSING), UnknownSharePartitionError, texts.UNKNOWN_PARTITION),
    ],
)
def test_refused_request_changes_nothing_kafka_19338_20694_20743(
    command: object, error: type[DomainError], message: str
) -> None:
    coordinator = read()
    before = coordinator.machine.digest(), len(coordinator.log)
    with pytest.raises(error) as refused:
        coordinator(command)
    assert type(refused.value) is error
    assert str(refused.value) == message
    assert (coordinator.machine.digest(), len(coordinator.log)) == before


@pytest.mark.parametrize(
    "batch",
    [
        StateBatch(5, 4, 0, 1),
        StateBatch(-1, 4, 0, 1),
        StateBatch(0, 4, 1, 1),
        StateBatch(0, 4, 5, 1),
        StateBatch(0, 4, 0, -1),
        StateBatch(0, 4, 0, 32_768),
    ],
)
def test_invalid_state_batch_is_refused(batch: StateBatch) -> None:
    coordinator = read()
    with pytest.raises(InvalidShareRequestError, match=texts.IMPOSSIBLE_BATCH):
        coordinator.write([batch])


def test_state_has_a_bounded_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_STATE_BATCHES", 3)
    coordinator = read()
    apart = [StateBatch(offset, offset, 2, 1) for offset in range(0, 10, 2)]
    with pytest.raises(InvalidShareRequestError, match="batches"):
        coordinator.write(apart[:4])
    coordinator.write(apart[:3])
    with pytest.raises(InvalidShareRequestError, match="batches"):
        coordinator.write(apart[3:4])
    coordinator.write([StateBatch(1, 1, 2, 1)])  # the batch joins two others


@pytest.mark.parametrize(("size", "is_accepted"), [(32_767, True), (32_768, False)])
def test_group_id_too_long_for_a_record_is_refused(size: int, is_accepted: bool) -> None:
    coordinator = Coordinator()
    key = KEY._replace(group_id="g" * size)
    if is_accepted:
        coordinator.initialize(key)
    else:
        with pytest.raises(InvalidShareRequestError, match="more than 32767 bytes"):
            coordinator.initialize(key)


def test_requests_for_a_deleted_topic_are_refused() -> None:
    coordinator = read()
    coordinator.counts.clear()
    for command in (WRITE, ReadShareState(KEY, 5), ReadStateSummary(KEY), DeleteState(KEY)):
        with pytest.raises(UnknownSharePartitionError):
            coordinator(command)


def test_unknown_state_has_an_empty_summary_and_may_be_deleted() -> None:
    coordinator = Coordinator()
    assert coordinator(ReadStateSummary(KEY)) == StateSummary(-1, -1, 0, 0)
    assert coordinator(DeleteState(KEY)) == StateChanged()
    assert not coordinator.log


def test_unloaded_shard_refuses_requests() -> None:
    coordinator = read()
    coordinator.machine.on_unloaded()
    with pytest.raises(ShareCoordinatorUnloadedError):
        coordinator(ReadShareState(KEY, 5))


def test_unknown_command_is_an_invariant_violation() -> None:
    with pytest.raises(InvariantViolation):
        Coordinator()("read")


# --- fencing -------------------------------------------------------------------------------------


def test_read_of_a_new_leader_fences_the_former_one_after_a_reload_kafka_17796() -> None:
    coordinator = read()
    coordinator(ReadShareState(KEY, 6))
    coordinator.machine = coordinator.loaded()
    with pytest.raises(FencedShareLeaderEpochError):
        coordinator.write(leader_epoch=5)
    coordinator.write(leader_epoch=6)


def test_second_read_of_a_leader_writes_nothing() -> None:
    coordinator = read()
    before = len(coordinator.log)
    coordinator(ReadShareState(KEY, 5))
    assert len(coordinator.log) == before


def test_write_with_larger_epochs_does_not_raise_the_known_ones_kafka_19456() -> None:
    coordinator = read()
    coordinator.write(leader_epoch=9, state_epoch=9)
    coordinator.write(leader_epoch=5, state_epoch=1)
    summary = coordinator(ReadStateSummary(KEY))
    assert isinstance(summary, StateSummary)
    assert (summary.leader_epoch, summary.state_epoch) == (5, 1)


def test_altered_offset_fences_the_leader_until_it_reads_again() -> None:
    coordinator = read()
    coordinator.write()
    coordinator.initialize(state_epoch=2, start=3)
    with pytest.raises(FencedStateEpochError):
        coordinator.write()
    assert coordinator(ReadShareState(KEY, 5)) == StateRead(2, 3, ())
    with pytest.raises(FencedShareLeaderEpochError):
        coordinator(ReadShareState(KEY, 4))


# --- snapshots and pruning -----------------------------------------------------------------------


def test_snapshot_follows_after_the_limit_of_updates() -> None:
    coordinator = read()
    for _ in range(7):
        coordinator.write()
    assert coordinator.kinds() == [
        "Snapshot", "Update", "Update", "Update", "Snapshot",
        "Update", "Update", "Update", "Snapshot",
    ]  # fmt: skip
    last = decode(coordinator.log[-1])
    assert last is not None
    assert isinstance(last.value, Snapshot)
    assert (last.value.snapshot_epoch, last.value.batches) == (2, ACKNOWLEDGED)


def test_limit_of_0_writes_only_snapshots() -> None:
    coordinator = Coordinator(ShareStateLimits(update_records_per_snapshot=0))
    coordinator.initialize()
    coordinator(ReadShareState(KEY, 5))
    coordinator.write()
    assert coordinator.kinds() == ["Snapshot"] * 3


def test_log_is_redundant_below_the_oldest_latest_snapshot() -> None:
    coordinator = read()
    coordinator.initialize(OTHER)
    assert coordinator.machine.redundant_offset() == 0
    for _ in range(3):
        coordinator.write()
    assert coordinator.kinds()[-1] == "Snapshot"
    assert coordinator.machine.redundant_offset() == 2, "the other key's snapshot"
    coordinator(DeleteState(OTHER))
    assert coordinator.machine.redundant_offset() == len(coordinator.log) - 2, "KAFKA-19695"


def test_log_of_deleted_keys_is_redundant_kafka_19201() -> None:
    coordinator = read()
    coordinator.initialize(SharePartitionKey("orders", TOPIC, 2))
    assert coordinator(ForgetTopics(frozenset({GONE}))) == Swept(more=False)
    assert coordinator(ForgetTopics(frozenset({TOPIC}))) == Swept(more=False)
    assert len(coordinator.machine) == 0
    assert coordinator.machine.redundant_offset() == len(coordinator.log) - 1


def test_cold_snapshots_let_the_log_be_pruned_and_end_when_all_are_cold() -> None:
    coordinator = read()
    coordinator.initialize(OTHER)
    coordinator(SnapshotColdPartitions())
    assert coordinator.kinds()[-1] == "Snapshot"
    assert len(coordinator.log) == 3, "none is old enough"
    coordinator.now_ms += LIMITS.cold_snapshot_interval_ms
    digest = coordinator(ReadShareState(KEY, 5))
    assert coordinator(SnapshotColdPartitions()) == Swept(more=False)
    assert coordinator.kinds()[3:] == ["Snapshot", "Snapshot"]
    assert coordinator(ReadShareState(KEY, 5)) == digest
    assert coordinator.machine.redundant_offset() == 3
    coordinator.now_ms += LIMITS.cold_snapshot_interval_ms
    coordinator(SnapshotColdPartitions())
    assert len(coordinator.log) == 5, "all of them are repetitions"


@pytest.mark.parametrize("sweep", [SnapshotColdPartitions(), ForgetTopics(frozenset({TOPIC}))])
def test_sweep_that_exceeds_a_batch_is_continued(sweep: object) -> None:
    coordinator = Coordinator(ShareStateLimits(max_sweep_bytes=150))
    coordinator.counts[TOPIC] = 20
    for partition in range(20):
        coordinator.initialize(SharePartitionKey("orders", TOPIC, partition))
    coordinator.now_ms += 300_000
    before, turns = len(coordinator.log), 1
    while coordinator(sweep) == Swept(more=True):
        turns += 1
    assert len(coordinator.log) == before + 20
    assert turns >= 3


def test_update_without_its_snapshot_is_kept_until_the_tombstone() -> None:
    machine = ShareStateMachine(LIMITS, lambda _: 1)
    update = Update(0, 3, 7, ACKNOWLEDGED, 5)
    machine.replay(update_record(KEY, update), 10, 0, None)
    machine.check()
    assert len(machine) == 1


@pytest.mark.parametrize("seed", seeds(30))
def test_every_allowed_log_start_gives_the_same_state(seed: int) -> None:
    rng = Random(seed)
    coordinator = Coordinator()
    keys = [SharePartitionKey(group, TOPIC, partition) for group in "gh" for partition in (0, 1, 2)]
    for _ in range(120):
        key = rng.choice(keys)
        first = rng.randrange(30)
        batch = StateBatch(
            first, first + rng.randrange(6), rng.choice((0, 2, 4)), rng.randint(1, 4)
        )
        command = rng.choices(
            (
                InitializeState(key, rng.randint(0, 3), rng.randint(-1, 5)),
                ReadShareState(key, rng.randint(0, 6)),
                WriteShareState(
                    key, rng.randint(0, 3), rng.randint(0, 6), rng.randrange(20), 3, (batch,)
                ),
                DeleteState(key),
                SnapshotColdPartitions(),
            ),
            (3, 4, 14, 1, 1),
        )[0]
        coordinator.now_ms += rng.choice((0, 1, 200_000))
        try:
            coordinator(command)
        except (InvalidShareRequestError, FencedStateEpochError, FencedShareLeaderEpochError):
            continue
        start = coordinator.machine.redundant_offset()
        digest = coordinator.machine.digest()
        for log_start in {0, start // 2, start}:
            assert coordinator.loaded(log_start).digest() == digest, f"from {log_start}"
