"""Shards of both coordinators reach the same state by every path."""

from __future__ import annotations

from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    NotCoordinatorError,
)
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.coordinator.runtime.shards import ShardSet
from fencepost.groups.commands import CommitOffsets, JoinGroup, OffsetToCommit
from fencepost.groups.consumer_commands import ConsumerHeartbeat
from fencepost.logcore.machine import DomainError
from fencepost.protocol.steps import finish
from fencepost.txn.commands import AddPartitions, InitProducerId
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services, reload

pytestmark = pytest.mark.usefixtures("killed_logs_are_closed")

GROUPS = [f"g{number}" for number in range(30)]


def digests(shards: ShardSet) -> list[str]:
    return [shard.machine.digest() for shard in shards.shards]


async def filled(directory: Path) -> Services:
    """Return services with groups of every type and transactions, on many shards."""
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


async def test_shards_have_the_same_state_after_clean_and_unclean_restart(tmp_path: Path) -> None:
    services = await filled(tmp_path)
    for orderly in (True, False):
        before = digests(services.groups._shards), digests(services.txns._shards)
        assert len(set(before[0])) > 10
        assert len(set(before[1])) > 10
        await (services.stop() if orderly else services.kill())
        services = await Services(tmp_path).start()
        assert (digests(services.groups._shards), digests(services.txns._shards)) == before
    await services.stop()


def left(shards: ShardSet) -> list[int]:
    return [shard.partition.index for shard in shards.shards]


COMMIT = CommitOffsets("g3", -1, "", None, (OffsetToCommit("t", 0, 99),))


async def test_shard_unloads_on_resignation_and_reloads_the_same_state(tmp_path: Path) -> None:
    services = await filled(tmp_path)
    for coordinator, key in ((services.groups, "g3"), (services.txns, "g3")):
        shards = coordinator._shards
        index, before = coordinator.partition_for(key), digests(shards)
        epoch = shards.shard_at(index).leader_epoch
        coordinator.resigned(index, epoch + 1)
        assert left(shards) == [number for number in range(50) if number != index]
        with pytest.raises(NotCoordinatorError):
            await coordinator.submit(key, COMMIT)
        assert coordinator.partition_for(key) == index
        coordinator.elected(index, epoch + 2)
        with pytest.raises(CoordinatorLoadInProgressError):
            await coordinator.submit(key, COMMIT)
        assert await shards.loaded(30_000)
        assert digests(shards) == before
        await reload(shards, index)
        assert digests(shards) == before
        assert shards.shard_at(index).leader_epoch == epoch + 4
    await services.groups.submit("g3", COMMIT)
    await services.stop()


async def test_shard_ignores_elections_and_resignations_of_old_epochs(tmp_path: Path) -> None:
    """ISR changes (KAFKA-15468) and late metadata cause no election."""
    services = await filled(tmp_path)
    groups, shards = services.groups, services.groups._shards
    index = groups.partition_for("g3")
    shard = shards.shard_at(index)
    groups.elected(index, shard.leader_epoch)
    groups.resigned(index, shard.leader_epoch)
    groups.resigned(index, shard.leader_epoch - 1)
    assert shards.shard_at(index) is shard
    assert shard.state is ShardState.ACTIVE
    groups.elected(index, shard.leader_epoch + 1)
    assert shard.state is ShardState.CLOSED
    assert await shards.loaded(30_000)
    assert shards.shard_at(index).leader_epoch == shard.leader_epoch + 1
    await services.stop()


async def test_shard_of_deleted_topic_closes_without_leader_epoch(tmp_path: Path) -> None:
    """KAFKA-16118, KAFKA-19274. Requests waiting for the shard get a response."""
    services = await filled(tmp_path)
    for coordinator in (services.groups, services.txns):
        index = coordinator.partition_for("g3")
        shard = coordinator._shards.shard_at(index)
        coordinator.resigned(index, None)
        assert shard.state is ShardState.CLOSED
        with pytest.raises(NotCoordinatorError):
            await coordinator.submit("g3", COMMIT)
        coordinator.resigned(index, None)
    await services.stop()


async def test_waiting_join_group_is_not_coordinator_after_resignation(tmp_path: Path) -> None:
    services = await filled(tmp_path)
    index = services.groups.partition_for("classic")
    join = JoinGroup(
        group_id="classic",
        member_id="",
        group_instance_id=None,
        client_id="client",
        client_host="/127.0.0.1",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=(("range", b""),),
        require_known_member_id=False,
        supports_skip_assignment=True,
        new_member_id="m",
    )
    waiting = services.groups.submit("classic", join)
    assert not waiting.done()
    services.groups.resigned(index, 1_000)
    with pytest.raises(DomainError) as refused:
        await waiting
    assert error_code(refused.value) is ErrorCode.not_coordinator
    await services.stop()


async def test_shard_is_not_served_if_leadership_is_lost_while_loading(tmp_path: Path) -> None:
    """Leadership is lost after half of the log is read, or before the partition is opened."""
    services = await filled(tmp_path)
    groups, shards = services.groups, services.groups._shards
    index = groups.partition_for("g3")
    before = digests(shards)
    shard = shards.shard_at(index)
    groups.elected(index, shard.leader_epoch + 1)
    await until_true(lambda: not shards._unopened, "the partition is open")
    groups.resigned(index, shard.leader_epoch + 2)
    groups.elected(index, shard.leader_epoch + 3)
    groups.resigned(index, shard.leader_epoch + 4)
    await until_true(lambda: shards._loading is None, "nothing is read any more")
    assert index not in left(shards)
    groups.elected(index, shard.leader_epoch + 5)
    assert await shards.loaded(30_000)
    assert digests(shards) == before
    await services.stop()
