"""Share groups and the share coordinator of a broker, across restarts and topic deletions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.state import StateSummary
from fencepost.groups.share_commands import (
    AlterShareOffsets,
    ListShareState,
    ShareHeartbeat,
    ShareHeartbeatResult,
)
from fencepost.groups.share_group import ShareGroup
from fencepost.protocol.steps import finish
from tests.support.clock import ManualClock
from tests.support.metadata_changes import create_partitions, delete_topic
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services

T = "t"
PARTITIONS = 2
CONFIG = {
    "offsets.topic.num.partitions": "2",
    "share.coordinator.state.topic.num.partitions": "2",
    "group.share.assignment.interval.ms": "0",
}


async def started(tmp_path: Path, clock: Any = None) -> Services:
    return await Services(tmp_path, CONFIG, clock=clock or ManualClock(1_700_000_000_000)).start()


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    services = await started(tmp_path)
    services.topic(T, PARTITIONS)
    finish(services.groups.open_in_steps())
    yield services
    await services.stop()


async def beat(services: Services, epoch: int, *topics: str) -> ShareHeartbeatResult:
    command = ShareHeartbeat(
        "g", "m", epoch, "client", "/127.0.0.1", subscribed_topic_names=topics or None
    )
    result = await services.share_groups.heartbeat(command, None)
    assert isinstance(result, ShareHeartbeatResult)
    return result


def group(services: Services) -> ShareGroup:
    found = services.groups._shards.shard_for("g").machine.groups["g"]
    assert isinstance(found, ShareGroup)
    return found


async def initialized(services: Services, count: int) -> None:
    await until_true(lambda: len(group(services).initialized) == count, "the state is initialized")


async def summary(services: Services, topic_id: bytes, index: int) -> StateSummary:
    key = SharePartitionKey("g", topic_id, index)
    found = (await services.share_groups.summaries([key]))[key]
    assert isinstance(found, StateSummary)
    return found


def topic_id(services: Services) -> bytes:
    return services.metadata.known(T).topic_id.bytes


async def test_altered_offsets_survive_a_restart(services: Services, tmp_path: Path) -> None:
    altered: Any = await services.share_groups.alter_offsets(
        AlterShareOffsets("g", ((T, 0, 7), (T, 1, 8))), None
    )
    assert altered.failed == {}
    await services.stop()
    again = await started(tmp_path, services.clock)
    assert await summary(again, topic_id(again), 1) == StateSummary(8, 0, 0, 1)
    found: Any = await again.groups.submit("g", ListShareState("g"))
    assert [(partition.topic, partition.partitions) for partition in found.partitions] == [
        (T, (0, 1))
    ]
    assert (await beat(again, 0, T)).assignment == ((topic_id(again), (0, 1)),)
    await again.stop()


async def test_partitions_added_to_a_known_topic_start_at_offset_0(services: Services) -> None:
    await beat(services, 0, T)
    await initialized(services, PARTITIONS)
    epoch = (await beat(services, 2)).member_epoch
    create_partitions(services.metadata, T, PARTITIONS + 1)
    await beat(services, epoch)
    await initialized(services, PARTITIONS + 1)
    starts = [
        (await summary(services, topic_id(services), index)).start_offset for index in range(3)
    ]
    assert starts == [-1, -1, 0]


async def test_recreated_topic_has_no_share_state_of_its_predecessor(services: Services) -> None:
    await services.share_groups.alter_offsets(AlterShareOffsets("g", ((T, 0, 7),)), None)
    former = topic_id(services)
    delete_topic(services.metadata, T)
    await services.topics_forgotten()
    await until_true(lambda: group(services).state.initialized == (), "the topic is forgotten")
    assert all(len(shard.machine) == 0 for shard in services.share_coordinator.shards)
    services.topic(T, PARTITIONS)
    assert topic_id(services) != former
    await beat(services, 0, T)
    await initialized(services, PARTITIONS)
    assert (await summary(services, topic_id(services), 0)).start_offset == -1
