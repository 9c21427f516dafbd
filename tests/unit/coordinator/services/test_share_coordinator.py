"""The share coordinator on real files: its topic, its log, pruning, reloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fencepost.coordinator.metadata.names import SHARE_GROUP_STATE
from fencepost.coordinator.runtime.errors import NotCoordinatorError
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.services.base import PRUNE, UPKEEP
from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import SharePartitionKey, StateRead
from fencepost.groups.share.errors import (
    FencedShareLeaderEpochError,
    InvalidShareRequestError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.state import (
    DeleteState,
    InitializeState,
    ReadShareState,
    ReadStateSummary,
    StateSummary,
    WriteShareState,
)
from tests.support.clock import ManualClock
from tests.support.metadata_changes import delete_topic
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services, reload

CONFIG = {
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.snapshot.update.records.per.snapshot": "3",
}
FIVE_MINUTES_MS = 300_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
async def services(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Services]:
    started = await Services(tmp_path, CONFIG, clock=clock).start()
    started.topic("queue", 2)
    yield started
    await started.stop()


def key_of(services: Services, group: str = "g", partition: int = 0) -> SharePartitionKey:
    topic = services.metadata.known("queue")
    return SharePartitionKey(group, topic.topic_id.bytes, partition)


def written(key: SharePartitionKey, first: int, last: int) -> WriteShareState:
    return WriteShareState(key, 1, 0, first, last - first + 1, (StateBatch(first, last, 2, 1),))


async def test_first_command_creates_the_topic_with_kafkas_settings(services: Services) -> None:
    assert services.metadata.topic(SHARE_GROUP_STATE) is None
    await services.share_coordinator.send(InitializeState(key_of(services), 1, 0))
    configs = services.metadata.topic_configs(SHARE_GROUP_STATE)
    assert configs["cleanup.policy"] == "delete"
    assert configs["retention.ms"] == "-1"


async def test_state_survives_a_reload_and_a_restart(
    services: Services, tmp_path: Path, clock: ManualClock
) -> None:
    key, send = key_of(services), services.share_coordinator.send
    await send(InitializeState(key, 1, 5))
    await send(WriteShareState(key, 1, 0, 5, 2, (StateBatch(6, 7, 2, 1),)))
    await send(ReadShareState(key, 4))
    known = StateRead(1, 5, (StateBatch(6, 7, 2, 1),))
    await reload(services.share_coordinator._shards, 0)
    assert await send(ReadShareState(key, 4)) == known
    with pytest.raises(FencedShareLeaderEpochError):
        await send(ReadShareState(key, 3))
    await services.stop()
    again = await Services(tmp_path, CONFIG, clock=clock).start()
    assert await again.share_coordinator.send(ReadShareState(key, 4)) == known
    await again.stop()


async def test_unloaded_shard_is_not_coordinator(services: Services) -> None:
    key, coordinator = key_of(services), services.share_coordinator
    await coordinator.send(InitializeState(key, 1, 5))
    coordinator.resigned(0, 99)
    with pytest.raises(NotCoordinatorError):
        await coordinator.send(ReadStateSummary(key))


async def test_unknown_partition_and_uninitialized_state_are_refused(services: Services) -> None:
    send = services.share_coordinator.send
    with pytest.raises(UnknownSharePartitionError):
        await send(InitializeState(key_of(services, partition=2), 1, 0))
    with pytest.raises(InvalidShareRequestError):
        await send(ReadShareState(key_of(services), 0))
    assert await send(ReadStateSummary(key_of(services))) == StateSummary()
    await send(DeleteState(key_of(services)))


async def test_records_below_a_snapshot_stay_until_the_snapshot_is_committed(
    services: Services, clock: ManualClock
) -> None:
    """An election may truncate the snapshot; then only these records have the state."""
    key, coordinator = key_of(services), services.share_coordinator
    await coordinator.send(InitializeState(key, 1, 0))
    await coordinator.send(written(key, 0, 0))
    (shard,) = coordinator.shards
    partition = shard.partition
    committed = partition.log_end_offset
    partition.marks.replicate(committed)
    clock.advance(FIVE_MINUTES_MS)
    coordinator._send_upkeep(UPKEEP, clock.now_ms())
    await until_true(lambda: shard.machine.redundant_offset() == committed, "a cold snapshot")

    async def start_offset_after_pruning() -> int:
        coordinator._send_upkeep(PRUNE, clock.now_ms())
        await coordinator.pruned()
        return partition.log_start_offset

    assert await start_offset_after_pruning() == 0
    assert partition.log_end_offset == committed + 1
    partition.marks.replicate(partition.log_end_offset)
    assert await start_offset_after_pruning() == committed


async def test_log_is_pruned_below_the_oldest_latest_snapshot(
    services: Services, clock: ManualClock
) -> None:
    key, idle = key_of(services), key_of(services, "idle")
    coordinator = services.share_coordinator
    await coordinator.send(InitializeState(idle, 1, 0))
    await coordinator.send(InitializeState(key, 1, 0))
    for offset in range(9):
        await coordinator.send(written(key, offset, offset))
    (shard,) = coordinator.shards
    assert shard.machine.redundant_offset() == 0  # the snapshot of the idle partition
    clock.advance(FIVE_MINUTES_MS)
    coordinator._send_upkeep(UPKEEP, clock.now_ms())
    await until_true(lambda: shard.machine.redundant_offset() > 0, "cold snapshots")
    coordinator._send_upkeep(PRUNE, clock.now_ms())
    await coordinator.pruned()
    start_offset = shard.partition.log_start_offset
    assert start_offset == shard.machine.redundant_offset() > 0
    assert coordinator.last_pruned == {0: start_offset}
    before = await coordinator.send(ReadShareState(key, 0))
    await reload(coordinator._shards, 0)
    assert await coordinator.send(ReadShareState(key, 0)) == before
    assert await coordinator.send(ReadStateSummary(idle)) == StateSummary(0, 0, 0, 1)


async def test_snapshot_upkeep_and_pruning_recur_every_five_minutes(
    services: Services, clock: ManualClock
) -> None:
    coordinator = services.share_coordinator
    deadlines = {key: due for due, key in coordinator.timers}
    assert deadlines.keys() == {UPKEEP, PRUNE}
    clock.advance(FIVE_MINUTES_MS)
    assert coordinator.timers.run_due() == 2
    later = {key: due for due, key in coordinator.timers}
    assert all(later[key] == due + FIVE_MINUTES_MS for key, due in deadlines.items())


async def test_states_of_deleted_topic_are_removed(services: Services) -> None:
    key, coordinator = key_of(services), services.share_coordinator
    await coordinator.send(InitializeState(key, 1, 0))
    (shard,) = coordinator.shards
    assert len(shard.machine) == 1
    delete_topic(services.metadata, "queue")
    await coordinator.forgotten()
    assert len(shard.machine) == 0


async def test_state_above_memory_budget_is_refused_until_another_is_deleted(
    tmp_path: Path,
) -> None:
    config = {**CONFIG, "fencepost.share.state.max.bytes": "1000"}
    services = await Services(tmp_path, config).start()
    services.topic("queue", 2)
    send: Callable[..., asyncio.Future[object]] = services.share_coordinator.send
    await send(InitializeState(key_of(services), 1, 0))
    with pytest.raises(Exception, match=r"fencepost\.share\.state\.max\.bytes=1000"):
        await send(InitializeState(key_of(services, partition=1), 1, 0))
    await send(DeleteState(key_of(services)))
    await send(InitializeState(key_of(services, partition=1), 1, 0))
    (shard,) = services.share_coordinator.shards
    shard.machine.check()
    assert shard.state is ShardState.ACTIVE
    await services.stop()
