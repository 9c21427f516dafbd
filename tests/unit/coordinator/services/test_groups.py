"""Groups on real partitions: routing, loading, expiration, transactional offsets, restarts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fencepost.coordinator.config.broker_config import ConfigSource
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime import shard as shard_module
from fencepost.coordinator.runtime.errors import CoordinatorLoadInProgressError, NotCoordinatorError
from fencepost.coordinator.runtime.key_partition import partition_for
from fencepost.coordinator.runtime.shard import MAX_RELOAD_BACKOFF_MS
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.groups.commands import (
    CommitOffsets,
    FetchOffsets,
    FetchTopic,
    Heartbeat,
    HeartbeatResult,
    JoinGroup,
    ListGroups,
    OffsetToCommit,
    TxnCommitOffsets,
)
from fencepost.groups.errors import UnknownMemberIdError, UnstableOffsetCommitError
from fencepost.logcore.machine import EndMarker, ProducerStamp
from fencepost.protocol.steps import finish
from tests.support.clock import ManualClock
from tests.support.metadata_changes import set_group_configs
from tests.support.waits import until_async
from tests.unit.coordinator.services.coordinators import Services, fail, loading, reload, serves

JOIN = JoinGroup(
    "g", "", "instance", "client", "/127.0.0.1", 120_000, 60_000, "consumer",
    (("range", b""),), True, True, "instance-1",
)  # fmt: skip
HEARTBEAT = Heartbeat("g", 1, "member", None)


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    services = await Services(tmp_path).start()
    services.topic("t")
    yield services
    await services.stop()


def commit(group_id: str, offset: int, topic: str = "t", topic_id: bytes | None = None) -> object:
    offsets = (OffsetToCommit(topic, 0, offset, topic_id=topic_id),)
    return CommitOffsets(group_id, -1, "", None, offsets)


async def committed(services: Services, group_id: str, *, stable: bool = False) -> int:
    command = FetchOffsets(group_id, (FetchTopic("t", (0,)),), require_stable=stable)

    async def asked() -> object:
        with suppress(CoordinatorLoadInProgressError):  # retry like a client
            return await services.groups.submit(group_id, command)
        return None

    result = await until_async(asked, f"{group_id} is read")
    [(_, [offset])] = result.topics  # type: ignore[attr-defined]
    if offset.error is not None:
        raise offset.error
    value: int = offset.offset
    return value


async def test_offsets_topic_and_shards_do_not_exist_before_first_request(
    services: Services,
) -> None:
    assert services.metadata.topic(CONSUMER_OFFSETS) is None
    assert (await services.groups.list_groups(ListGroups())).groups == ()
    with pytest.raises(NotCoordinatorError):
        await services.groups.submit("g", HEARTBEAT)
    with pytest.raises(NotCoordinatorError):
        services.groups.partition_for("g")


async def test_first_request_opens_all_shards(services: Services) -> None:
    finish(services.groups.open_in_steps())
    finish(services.groups.open_in_steps())
    with pytest.raises(UnknownMemberIdError):
        await services.groups.submit("g", HEARTBEAT)
    assert services.groups.partition_for("g") == partition_for("g", 50)
    assert services.groups.partition_of("g").index == partition_for("g", 50)


async def test_all_shards_are_opened_after_disconnect_of_the_first_client(
    services: Services,
) -> None:
    steps = services.groups.open_in_steps()
    next(steps)
    steps.close()
    await services.groups._shards.loaded(timeout_ms=30_000)
    finish(services.groups.open_in_steps())
    assert len(services.groups.shards) == 50
    for number in range(200):
        with pytest.raises(UnknownMemberIdError):
            await services.groups.submit(f"g{number}", replace(HEARTBEAT, group_id=f"g{number}"))


async def test_groups_survive_a_restart(services: Services, tmp_path: Path) -> None:
    finish(services.groups.open_in_steps())
    for number in range(60):
        await services.groups.submit(f"g{number}", commit(f"g{number}", number))
    await services.stop()
    again = await Services(tmp_path).start()
    assert [await committed(again, f"g{number}") for number in range(60)] == list(range(60))
    listed = await again.groups.list_groups(ListGroups())
    assert {group.group_id for group in listed.groups} == {f"g{number}" for number in range(60)}
    await again.stop()


async def test_offset_commit_survives_a_kill(services: Services, tmp_path: Path) -> None:
    finish(services.groups.open_in_steps())
    await services.groups.submit("g", commit("g", 5))
    await services.kill()
    again = await Services(tmp_path).start()
    assert await committed(again, "g") == 5
    await again.stop()


async def test_heartbeat_succeeds_while_shard_is_loading(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(services.groups.open_in_steps())
    shard = services.groups._shards.shards[services.groups.partition_for("g")]
    async with loading(shard, monkeypatch):
        assert services.groups.submit("g", HEARTBEAT).result() == HeartbeatResult()
        with pytest.raises(CoordinatorLoadInProgressError):
            await services.groups.submit("g", commit("g", 1))
        with pytest.raises(CoordinatorLoadInProgressError):
            await services.groups.list_groups(ListGroups())


async def test_groups_of_a_failed_shard_are_not_listed(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "RELOAD_BACKOFF_MS", MAX_RELOAD_BACKOFF_MS)
    finish(services.groups.open_in_steps())
    await services.groups.submit("g", commit("g", 1))
    shard = services.groups._shards.shards[services.groups.partition_for("g")]
    fail(shard)
    await serves(shard)
    fail(shard)
    with pytest.raises(NotCoordinatorError):
        await services.groups.submit("g", HEARTBEAT)
    assert (await services.groups.list_groups(ListGroups())).groups == ()
    assert shard.state is ShardState.FAILED


async def test_offsets_of_deleted_topic_are_removed(services: Services) -> None:
    finish(services.groups.open_in_steps())
    topic = services.metadata.topic("t")
    assert topic is not None
    old_id = topic.topic_id.bytes
    await services.groups.submit("g", commit("g", 5, topic_id=old_id))
    await services.groups.submit("other", commit("other", 6, topic_id=b"n" * 16))
    await services.groups.on_topics_deleted([("t", old_id)])
    assert await committed(services, "g") == -1
    assert await committed(services, "other") == 6


async def test_loading_shard_removes_offsets_of_deleted_topics_later(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.coordinator.runtime.shards.RETRY_MS", 5)
    finish(services.groups.open_in_steps())
    await services.groups.submit("g", commit("g", 5))
    shard = services.groups._shards.shards[services.groups.partition_for("g")]
    async with loading(shard, monkeypatch):
        await services.groups.on_topics_deleted([("t", None)])
        await asyncio.sleep(0.02)

    async def is_gone() -> bool:
        return await committed(services, "g") == -1

    await until_async(is_gone, "the offset is gone")


async def test_offsets_expire_on_the_timer(tmp_path: Path) -> None:
    config = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "1000"}
    services = await Services(tmp_path, config).start()
    finish(services.groups.open_in_steps())
    await services.groups.submit("g", commit("g", 5))
    services.clock.advance(59_999)  # type: ignore[attr-defined]
    services.groups._shards.timers.run_due()
    assert await committed(services, "g") == 5
    services.clock.advance(1_000)  # type: ignore[attr-defined]
    services.groups._shards.timers.run_due()

    async def is_gone() -> bool:
        return await committed(services, "g") == -1

    await until_async(is_gone, "the offset is forgotten")
    assert (await services.groups.list_groups(ListGroups())).groups == ()
    await services.stop()


@pytest.mark.parametrize("commits", [True, False])
async def test_transactional_offsets_are_visible_only_after_commit_marker(
    services: Services, tmp_path: Path, commits: bool
) -> None:
    finish(services.groups.open_in_steps())
    producer = ProducerStamp(9, 0)
    await services.groups.submit("g", commit("g", 5))
    offsets = (OffsetToCommit("t", 0, 8),)
    await services.groups.submit("g", TxnCommitOffsets("g", -1, "", None, offsets, producer))
    assert await committed(services, "g") == 5
    with pytest.raises(UnstableOffsetCommitError):
        await committed(services, "g", stable=True)
    index = services.groups.partition_for("g")
    services.groups.complete_transaction(index, EndMarker(producer, commits))
    expected = 8 if commits else 5
    assert await committed(services, "g", stable=True) == expected
    await services.kill()
    again = await Services(tmp_path).start()
    assert await committed(again, "g", stable=True) == expected
    await again.stop()


async def test_wall_clock_set_back_does_not_prolong_a_rebalance(
    tmp_path: Path,
) -> None:
    clock = ManualClock(1_700_000_000_000)
    config = {"group.initial.rebalance.delay.ms": "100"}
    services = await Services(tmp_path, config, clock=clock).start()
    finish(services.groups.open_in_steps())
    timers = services.groups._shards.timers
    joined = services.groups.submit("g", JOIN)
    clock.jump(-3_600_000)
    clock.advance(100)
    timers.run_due()
    assert joined.result().generation_id == 1  # type: ignore[attr-defined]
    clock.advance(JOIN.rebalance_timeout_ms)
    timers.run_due()
    (group,) = (await services.groups.list_groups(ListGroups())).groups
    assert group.state == "Empty", "who does not sync in time is removed"
    await services.stop()


async def test_join_of_first_member_completes_without_waiting(services: Services) -> None:
    finish(services.groups.open_in_steps())
    joined = services.groups.submit("g", JOIN)
    services.groups._shards.timers.run_due()
    assert joined.result().generation_id == 1  # type: ignore[attr-defined]


async def test_parked_join_group_is_answered_on_shutdown(services: Services) -> None:
    finish(services.groups.open_in_steps())
    first = services.groups.submit("g", JOIN)
    shards = services.groups._shards
    services.clock.advance(1)  # type: ignore[attr-defined]
    shards.timers.run_due()
    assert first.result().leader == "instance-1"  # type: ignore[attr-defined]
    # A second member starts a rebalance, which the first member never joins.
    second = services.groups.submit(
        "g", replace(JOIN, group_instance_id="other", new_member_id="other-1")
    )
    assert not second.done()
    await services.groups.stop()
    assert second.exception() is not None


async def test_changed_assignment_interval_applies_to_a_running_broker(services: Services) -> None:
    key, groups = "group.consumer.assignment.interval.ms", services.groups

    def interval_ms() -> int:
        return groups.environment("g").settings.assignment_interval_ms

    assert interval_ms() == 1000
    for text, expected in (("0", 0), ("15000", 15_000), ("15001", 15_000)):
        services.config.set_dynamic(ConfigSource.DYNAMIC_BROKER, {key: text})
        assert interval_ms() == expected
    services.config.set_dynamic(ConfigSource.DYNAMIC_BROKER, {})
    assert interval_ms() == 1000


async def test_group_configs_outside_bounds_of_a_later_start_are_capped(tmp_path: Path) -> None:
    session, beat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    interval = "consumer.assignment.interval.ms"
    stored = {session: "60000", beat: "5000", interval: "200"}
    services = await Services(tmp_path).start()
    with capture_logs() as lines:
        set_group_configs(services.metadata, "g", stored)
        set_group_configs(services.metadata, "within", {session: "50000"})
    assert [line["event"] for line in lines if "bound" in line] == []
    await services.stop()

    bounds = {
        "group.consumer.max.session.timeout.ms": "50000",
        "group.consumer.min.heartbeat.interval.ms": "7000",
        "group.consumer.heartbeat.interval.ms": "7000",
        "group.consumer.min.assignment.interval.ms": "300",
        "group.consumer.max.assignment.interval.ms": "2000",
    }
    with capture_logs() as lines:
        services = await Services(tmp_path, bounds).start()
    assert sorted(
        (line["group"], line["setting"], line["value"], line["effective"], line["bound"])
        for line in lines
        if "bound" in line
    ) == [
        ("g", interval, 200, 300, "group.consumer.min.assignment.interval.ms"),
        ("g", beat, 5000, 7000, "group.consumer.min.heartbeat.interval.ms"),
        ("g", session, 60_000, 50_000, "group.consumer.max.session.timeout.ms"),
    ]

    found = services.groups.environment("g").settings
    assert found.session_timeout_ms == 50_000
    assert found.heartbeat_interval_ms == 7_000
    assert found.assignment_interval_ms == 300
    assert services.metadata.group_settings("g") == stored
    assert services.groups.environment("within").settings.session_timeout_ms == 50_000
    await services.stop()


async def test_memory_budgets_are_released_when_a_shard_reloads_or_unloads(
    services: Services,
) -> None:
    groups = services.groups
    shards, memory, offset_memory = groups._shards, groups._group_memory, groups._offset_memory
    finish(groups.open_in_steps())
    await groups.submit("g", commit("g", 5))
    groups.submit("g", JOIN)
    index = groups.partition_for("g")
    joined = memory.used
    assert joined
    assert offset_memory.used
    gc.disable()  # memory must be freed without garbage collection
    try:
        await reload(shards, index)
        assert 0 < memory.used < joined  # the group has an offset, but no member
        held = memory.used, offset_memory.used
        await reload(shards, index)
        assert (memory.used, offset_memory.used) == held
        fail(shards.shard_at(index))
        await serves(shards.shard_at(index))
        assert (memory.used, offset_memory.used) == held
        shards.resigned(index, None)
        assert (memory.used, offset_memory.used) == (0, 0)
    finally:
        gc.enable()
