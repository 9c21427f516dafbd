"""Share groups on real partitions, with the share coordinator's machine behind the persister."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.metadata.metadata import SHARE_VERSION
from fencepost.coordinator.runtime.errors import NotCoordinatorError
from fencepost.groups.commands import CommitOffsets, DeleteGroup, ListGroups, OffsetToCommit
from fencepost.groups.errors import GroupIdNotFoundError, NonEmptyGroupError
from fencepost.groups.share import errors
from fencepost.groups.share.state import DeleteState, InitializeState, StateSummary
from fencepost.groups.share_commands import (
    AlterShareOffsets,
    DeleteShareOffsets,
    ListShareState,
    ShareHeartbeat,
    ShareHeartbeatResult,
)
from fencepost.groups.share_group import ShareGroup
from fencepost.protocol.steps import finish
from fencepost.tools.decisions import decide
from tests.support.clock import ManualClock
from tests.support.metadata_changes import delete_topic, set_group_configs
from tests.support.share_state import LocalShareState
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services

T = "t"
PARTITIONS = 2


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    services = await Services(tmp_path, clock=ManualClock(1_700_000_000_000)).start()
    services.topic(T, PARTITIONS)
    finish(services.groups.open_in_steps())
    yield services
    await services.stop()


@pytest.fixture
def state(services: Services) -> LocalShareState:
    return LocalShareState(services)


def topic_id(services: Services) -> bytes:
    return services.metadata.known(T).topic_id.bytes


def beat(services: Services, epoch: int, **fields: Any) -> asyncio.Future[object]:
    if epoch == 0:
        fields.setdefault("subscribed_topic_names", (T,))
    return services.share_groups.heartbeat(
        ShareHeartbeat("g", "m", epoch, "client", "/127.0.0.1", **fields), None
    )


async def answered(services: Services, epoch: int, **fields: Any) -> ShareHeartbeatResult:
    result = await beat(services, epoch, **fields)
    assert isinstance(result, ShareHeartbeatResult)
    return result


def group(services: Services) -> ShareGroup:
    found = services.groups._shards.shard_for("g").machine.groups["g"]
    assert isinstance(found, ShareGroup)
    return found


async def initialized(services: Services, count: int = PARTITIONS) -> None:
    await until_true(lambda: len(group(services).initialized) == count, "the state is initialized")


async def with_state(services: Services) -> None:
    """Create a group with the state of all partitions, and leave the group."""
    await beat(services, 0)
    await initialized(services)
    await beat(services, -1)


async def listed(services: Services) -> tuple[tuple[str, tuple[int, ...]], ...]:
    result: Any = await services.groups.submit("g", ListShareState("g"))
    return tuple((partition.topic, partition.partitions) for partition in result.partitions)


# --- joining -------------------------------------------------------------------------------------


async def test_partitions_are_assigned_once_their_state_is_initialized(
    services: Services, state: LocalShareState
) -> None:
    first = await answered(services, 0)
    assert (first.member_epoch, first.assignment) == (2, ())
    await initialized(services)
    assert all(isinstance(command, InitializeState) for command in state.commands)
    assert state.summary("g", topic_id(services), 1) == StateSummary(-1, -1, 0, 2)
    clock: Any = services.clock
    clock.advance(1_000)
    second = await answered(services, 2)
    assert second.assignment == ((topic_id(services), (0, 1)),)


async def test_state_is_initialized_despite_disconnect_of_the_client(
    services: Services, state: LocalShareState
) -> None:
    state.gate = asyncio.get_running_loop().create_future()
    beat(services, 0).cancel()
    state.gate.set_result(None)
    await initialized(services)


async def test_failed_initialization_is_repeated_by_the_next_heartbeat(
    services: Services, state: LocalShareState
) -> None:
    state.failures.append(errors.SharePartitionFailedError("the disk is full"))
    await beat(services, 0)
    await initialized(services, PARTITIONS - 1)
    await beat(services, 2)
    await initialized(services)


async def test_initialization_in_progress_is_not_started_again(
    services: Services, state: LocalShareState
) -> None:
    """A second initialization would undo consumption after the first initialization."""
    state.gate = asyncio.get_running_loop().create_future()
    await beat(services, 0)
    await until_true(lambda: len(state.commands) == PARTITIONS, "the initialization begins")
    clock: Any = services.clock
    clock.advance(30_000)
    assert (await answered(services, 2)).to_initialize is not None
    await asyncio.sleep(0)
    state.gate.set_result(None)
    await initialized(services)
    assert len(state.commands) == PARTITIONS


async def test_repetition_answered_after_the_initialization_does_not_initialize_again(
    services: Services, state: LocalShareState
) -> None:
    """The repetition may be answered late, because the record is replicated late."""
    state.gate = asyncio.get_running_loop().create_future()
    await beat(services, 0)
    await until_true(lambda: len(state.commands) == PARTITIONS, "the initialization begins")
    clock: Any = services.clock
    clock.advance(30_000)
    late = (await answered(services, 2)).to_initialize
    assert late is not None
    state.gate.set_result(None)
    await initialized(services)
    await services.share_groups._initialize_new("g", late)
    assert len(state.commands) == PARTITIONS


async def test_stop_cancels_initialization_waiting_for_share_coordinator(
    services: Services, state: LocalShareState
) -> None:
    state.gate = asyncio.get_running_loop().create_future()
    await beat(services, 0)
    await until_true(lambda: len(state.commands) == PARTITIONS, "the initialization begins")
    await services.share_groups.stop()
    assert group(services).initialized == frozenset()


async def test_share_group_survives_a_restart(
    services: Services, state: LocalShareState, tmp_path: Path
) -> None:
    await beat(services, 0)
    await initialized(services)
    await services.stop()
    clock: Any = services.clock
    clock.advance(1_000)
    again = await Services(tmp_path, clock=clock).start()
    assert len(group(again).initialized) == PARTITIONS
    assert (await answered(again, 2)).member_epoch == 3
    await again.stop()


# --- offsets -------------------------------------------------------------------------------------


async def test_altered_offset_becomes_start_offset_at_the_share_coordinator(
    services: Services, state: LocalShareState
) -> None:
    command = AlterShareOffsets("g", ((T, 0, 7), (T, 9, 7), ("missing", 0, 7)))
    altered: Any = await services.share_groups.alter_offsets(command, None)
    assert altered.unknown == {(T, 9), ("missing", 0)}
    assert altered.failed == {}
    assert state.summary("g", topic_id(services), 0) == StateSummary(7, 0, 0, 1)
    assert await listed(services) == ((T, (0,)),)


async def test_offset_is_altered_despite_disconnect_of_the_client(
    services: Services, state: LocalShareState
) -> None:
    state.gate = asyncio.get_running_loop().create_future()
    future = services.share_groups.alter_offsets(AlterShareOffsets("g", ((T, 0, 7),)), None)
    await until_true(lambda: bool(state.commands), "the alteration begins")
    future.cancel()
    state.gate.set_result(None)
    await initialized(services, 1)


async def test_failed_offset_alteration_is_reported_for_its_partition_only(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    state.failures.append(errors.SharePartitionFailedError("the disk is full"))
    command = AlterShareOffsets("g", ((T, 0, 7), (T, 1, 8)))
    altered: Any = await services.share_groups.alter_offsets(command, None)
    assert {key: str(error) for key, error in altered.failed.items()} == {
        (topic_id(services), 0): "the disk is full"
    }
    assert state.summary("g", topic_id(services), 1).start_offset == 8
    assert await listed(services) == ((T, (0, 1)),), "the former state is still there"


async def test_offsets_of_a_group_with_members_are_not_altered_or_deleted(
    services: Services, state: LocalShareState
) -> None:
    await beat(services, 0)
    await initialized(services)
    share = services.share_groups
    for refused in (
        await share.alter_offsets(AlterShareOffsets("g", ((T, 0, 7),)), None),
        await share.delete_offsets(DeleteShareOffsets("g", (T,)), None),
    ):
        assert isinstance(refused, NonEmptyGroupError)
        assert str(refused) == "The group is not empty."


async def test_deleted_offsets_are_deleted_at_the_share_coordinator(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    deleted: Any = await services.share_groups.delete_offsets(
        DeleteShareOffsets("g", (T, "missing")), None
    )
    assert (deleted.failed, deleted.begun.unknown) == ({}, ("missing",))
    assert await listed(services) == ()
    assert group(services).state.deleting == ()
    assert state.summary("g", topic_id(services), 0) == StateSummary()


async def test_failed_deletion_of_offsets_can_be_repeated(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    state.failures.append(errors.SharePartitionFailedError("the disk is full"))
    command = DeleteShareOffsets("g", (T,))
    failed: Any = await services.share_groups.delete_offsets(command, None)
    assert str(failed.failed[topic_id(services)]) == "the disk is full"
    assert group(services).state.deleting == ((topic_id(services), T),)
    again: Any = await services.share_groups.delete_offsets(command, None)
    assert again.failed == {}
    assert group(services).state.deleting == ()


# --- deletion ------------------------------------------------------------------------------------


async def test_deleted_group_leaves_no_state_at_the_share_coordinator(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    state.commands.clear()
    await services.share_groups.delete_group("g", None)
    assert [type(command) for command in state.commands] == [DeleteState] * PARTITIONS
    assert (await services.groups.list_groups(ListGroups())).groups == ()
    assert state.summary("g", topic_id(services), 0) == StateSummary()


async def test_group_stays_until_its_state_is_deleted(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    state.failures.extend(NotCoordinatorError("it moves") for _ in range(5 * PARTITIONS))
    refused = await services.share_groups.delete_group("g", None)
    assert isinstance(refused, NotCoordinatorError)
    assert [row.group_id for row in (await services.groups.list_groups(ListGroups())).groups] == [
        "g"
    ]
    await services.share_groups.delete_group("g", None)
    assert (await services.groups.list_groups(ListGroups())).groups == ()


async def test_groups_of_other_kinds_are_deleted_without_the_share_coordinator(
    services: Services, state: LocalShareState
) -> None:
    commit = CommitOffsets("g", -1, "", None, (OffsetToCommit(T, 0, 7),))
    await services.groups.submit("g", commit)
    await services.share_groups.delete_group("g", None)
    with pytest.raises(GroupIdNotFoundError):
        await services.share_groups.delete_group("g", None)
    with pytest.raises(GroupIdNotFoundError):
        await services.groups.submit("g", DeleteGroup("g"))
    assert state.commands == []


async def test_group_forgets_the_state_of_a_deleted_topic(
    services: Services, state: LocalShareState
) -> None:
    await with_state(services)
    delete_topic(services.metadata, T)
    await services.groups.forgotten()
    await until_true(lambda: group(services).state.initialized == (), "the topic is forgotten")


# --- settings ------------------------------------------------------------------------------------


async def test_group_configs_apply_within_the_brokers_bounds(tmp_path: Path) -> None:
    config = {
        "group.share.session.timeout.ms": "50000",
        "group.share.heartbeat.interval.ms": "6000",
        "group.share.max.size": "3",
        "group.share.initialize.retry.interval.ms": "1",
    }
    services = await Services(tmp_path, config).start()
    base = services.groups.environment("other").share
    assert (base.session_timeout_ms, base.heartbeat_interval_ms) == (50_000, 6_000)
    assert (base.max_size, base.initialize_retry_ms) == (3, 1)
    own = {"share.heartbeat.interval.ms": "99000", "consumer.session.timeout.ms": "46000"}
    set_group_configs(services.metadata, "g", own)
    environment = services.groups.environment("g")
    assert environment.share.heartbeat_interval_ms == 15_000, "the broker's maximum"
    assert environment.share.session_timeout_ms == 50_000
    assert environment.settings.session_timeout_ms == 46_000
    await services.stop()


async def test_assignor_other_than_simple_is_refused_at_the_start(tmp_path: Path) -> None:
    kafka = "org.apache.kafka.coordinator.group.assignor.SimpleAssignor"
    await (await Services(tmp_path / "a", {"group.share.assignors": kafka}).start()).stop()
    with pytest.raises(ConfigError, match="only the assignor simple"):
        Services(tmp_path / "b", {"group.share.assignors": "range"})


async def test_share_groups_are_served_from_share_version_1(services: Services) -> None:
    def set_level(level: int, kind: UpgradeType) -> None:
        update = FeatureUpdate(SHARE_VERSION, level, kind)
        decide(services.storage, lambda controller: controller.update_features((update,)))

    assert services.groups.serves_share_groups
    set_level(0, UpgradeType.SAFE_DOWNGRADE)
    assert not services.groups.serves_share_groups
    set_level(1, UpgradeType.UPGRADE)
    assert services.groups.serves_share_groups
