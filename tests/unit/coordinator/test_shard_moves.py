"""Shards of both coordinators reach the same state however they come to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.coordinator.runtime.errors import NotCoordinatorError
from fencepost.coordinator.runtime.shards import ShardSet
from fencepost.coordinator.wire.steps import finish
from fencepost.groups.commands import CommitOffsets, OffsetToCommit
from fencepost.groups.consumer_commands import ConsumerHeartbeat
from fencepost.txn.commands import AddPartitions, InitProducerId
from tests.unit.coordinator.services import Services

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")

GROUPS = [f"g{number}" for number in range(30)]


def digests(shards: ShardSet) -> list[str]:
    return [shard.machine.digest() for shard in shards.shards]


async def filled(directory: Path) -> Services:
    """Groups of every kind with offsets, and transactions, on many shards."""
    services = await Services(directory).start()
    services.topic("t", 3)
    finish(services.groups.open_in_steps())
    finish(services.txns.open_in_steps())
    for number, name in enumerate(GROUPS):
        offsets = tuple(OffsetToCommit("t", index, number) for index in range(3))
        await services.groups.submit(name, CommitOffsets(name, -1, "", None, offsets))
        beat = ConsumerHeartbeat(
            f"c{name}",
            f"member-{number}",
            0,
            "client",
            "/127.0.0.1",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=("t",),
            owned=(),
        )
        await services.groups.submit(beat.group_id, beat)
        made = await services.txns.submit(name, InitProducerId(name, 60_000))
        producer = made.producer_id, made.producer_epoch  # type: ignore[attr-defined]
        await services.txns.submit(name, AddPartitions(name, *producer, (("t", number % 3),)))
    return services


async def test_every_restart_reaches_the_same_state(tmp_path: Path) -> None:
    services = await filled(tmp_path)
    for orderly in (True, False):
        before = digests(services.groups._shards), digests(services.txns._shards)
        assert len(set(before[0])) > 10
        assert len(set(before[1])) > 10
        await (services.stop() if orderly else services.kill())
        services = await Services(tmp_path).start()
        assert (digests(services.groups._shards), digests(services.txns._shards)) == before
    await services.stop()


async def test_a_live_shard_is_unloaded_and_comes_back_the_same(tmp_path: Path) -> None:
    services = await filled(tmp_path)
    command = CommitOffsets("g3", -1, "", None, (OffsetToCommit("t", 0, 99),))
    for coordinator, key in ((services.groups, "g3"), (services.txns, "g3")):
        shards = coordinator._shards
        index, before = coordinator.partition_for(key), digests(shards)
        await shards.unload(index)
        assert digests(shards) != before
        with pytest.raises(NotCoordinatorError):
            await coordinator.submit(key, command)
        await shards.reload(index)
        assert digests(shards) == before
        await shards.reload(index)
        assert digests(shards) == before
    await services.groups.submit("g3", command)
    await services.stop()
