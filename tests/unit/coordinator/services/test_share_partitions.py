"""Share partitions and waiting fetches on real logs, without sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.runtime.errors import NotCoordinatorError
from fencepost.coordinator.services.share_fetches import FetchedShare, ShareFetch
from fencepost.coordinator.services.share_partitions import SharePartitions
from fencepost.groups.share.commands import (
    AcknowledgeBatch,
    Acknowledged,
    AcquiredRange,
    AcquireMode,
    SharePartitionKey,
)
from fencepost.groups.share.errors import (
    ShareCoordinatorUnavailableError,
    SharePartitionFailedError,
    SharePartitionFencedError,
    UnknownSharePartitionError,
)
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.session import SessionKey, TopicPartition
from fencepost.groups.share.state import (
    InitializeState,
    ReadShareState,
    ReadStateSummary,
    StateSummary,
)
from fencepost.groups.share.states import AcknowledgeType, PartitionState
from fencepost.logcore.machine import Record
from fencepost.logcore.partition import Partition
from tests.support.clock import ManualClock
from tests.support.metadata_changes import delete_topic, set_group_configs
from tests.support.waits import until_true
from tests.unit.coordinator.services.coordinators import Services

CONFIG = {"share.coordinator.state.topic.num.partitions": "1"}
ACCEPT, RELEASE = (int(AcknowledgeType.ACCEPT),), (int(AcknowledgeType.RELEASE),)
LOCK_MS = 30_000
GROUP, MEMBER, OTHER = "g", "member", "other"


class Shares:
    """A group that consumes a topic of a broker."""

    def __init__(self, services: Services) -> None:
        self.services = services

    @property
    def shares(self) -> SharePartitions:
        return self.services.shares

    @property
    def log(self) -> Partition:
        return self.services.replicas.leader("queue", 0)

    @property
    def key(self) -> SharePartitionKey:
        return SharePartitionKey(GROUP, self.services.metadata.known("queue").topic_id.bytes, 0)

    @property
    def where(self) -> TopicPartition:
        return TopicPartition(self.key.topic_id, 0)

    async def initialize(self, start_offset: int = 0, state_epoch: int = 1) -> None:
        command = InitializeState(self.key, state_epoch, start_offset)
        await self.services.share_coordinator.send(command)

    def produce(self, *counts: int) -> None:
        """Append batches; ``counts`` has the number of records of each batch."""
        for count in counts:
            self.log.append_records([Record(b"k", b"x")] * count, now_ms=1_700_000_000_000)

    async def fetch(self, member: str = MEMBER, **fields: Any) -> FetchedShare:
        """Fetch and return the result of the partition."""
        (part,) = await self.begin(member, **fields)
        return part

    def begin(self, member: str = MEMBER, **fields: Any) -> asyncio.Task[list[FetchedShare]]:
        """Begin a fetch."""
        values: dict[str, Any] = {
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "max_records": 500,
            "batch_size": 500,
            **fields,
        }
        fetch = ShareFetch(GROUP, member, [(self.key, "queue")], **values)
        return asyncio.ensure_future(driven(self.services.share_fetches.run(fetch)))

    def acknowledge(
        self, first: int, last: int, types: tuple[int, ...], member: str = MEMBER
    ) -> Any:
        batches = [AcknowledgeBatch(first, last, types)]
        return self.shares.acknowledge(self.key, member, batches)

    def check(self) -> None:
        for served in self.shares:
            served.share.check()
            assert served.share.fetch_lock is None
        self.shares.sessions.check()


async def driven(work: Any) -> Any:
    """Run steps, and wait for the futures that the steps yield, like a connection."""
    try:
        while True:
            wait = next(work)
            if wait is None:
                await asyncio.sleep(0)
            else:
                await asyncio.wait({wait})
    except StopIteration as end:
        return end.value
    finally:
        work.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
async def one(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Shares]:
    services = await Services(tmp_path, CONFIG, clock=clock).start()
    services.topic("queue")
    shares = Shares(services)
    await shares.initialize()
    yield shares
    shares.check()
    await services.stop()


async def test_expired_lock_makes_records_available_again(one: Shares, clock: ManualClock) -> None:
    one.produce(3)
    assert (await one.fetch()).acquired == [AcquiredRange(0, 2, 1)]
    waiting = one.begin(OTHER, max_wait_ms=30_000)
    clock.advance(LOCK_MS - 1)
    one.shares.timers.run_due()
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    assert one.shares.timers.run_due() == 1
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 2, 2)]


async def test_acknowledgements_survive_fencing_and_acquisitions_do_not(one: Shares) -> None:
    one.produce(1, 1, 1)
    await one.fetch()
    assert await one.acknowledge(1, 1, ACCEPT) == Acknowledged()
    await asyncio.sleep(0)
    assert one.shares.acknowledged == {AcknowledgeType.ACCEPT: 1}
    one.shares._fence_all(tuple(one.shares), "test")
    assert len(one.shares) == 0
    part = await one.fetch(OTHER)
    assert part.acquired == [AcquiredRange(0, 0, 1), AcquiredRange(2, 2, 1)]


async def test_new_share_partition_reads_state_after_writes_of_the_former(one: Shares) -> None:
    """The former writes have the same epochs, so a record could become final twice."""
    one.produce(1)
    await one.fetch()
    persister = one.services.share_persister
    transport, held = persister._transport, []

    def hold(command: Any) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        held.append((command, future))
        return future

    persister._transport = hold
    accepted = one.acknowledge(0, 0, ACCEPT)
    one.shares._fence_all(tuple(one.shares), "test")
    waiting = one.begin(OTHER, max_wait_ms=30_000)
    await asyncio.sleep(0.01)
    assert [type(command).__name__ for command, _ in held] == ["WriteShareState"]
    persister._transport = transport
    command, future = held.pop()
    future.set_result(await transport(command))
    assert await accepted == Acknowledged()
    await until_true(
        lambda: any(s.share.state is PartitionState.ACTIVE for s in one.shares), "read"
    )
    one.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(1, 1, 1)]


async def test_failed_state_write_leaves_records_acquired_by_the_member(one: Shares) -> None:
    one.produce(1)
    await one.fetch()
    one.services.share_persister._transport = failing(SharePartitionFailedError("no disk"))
    with pytest.raises(SharePartitionFailedError):
        await one.acknowledge(0, 0, ACCEPT)
    (served,) = one.shares
    (held,) = served.share.in_flight()
    assert held.member_id == MEMBER


def failing(error: Exception) -> Any:
    def fail(_command: Any) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    return fail


async def test_share_partition_is_fenced_by_a_later_state_epoch(one: Shares) -> None:
    one.produce(2)
    await one.fetch()
    await one.initialize(start_offset=1, state_epoch=2)
    with pytest.raises(SharePartitionFencedError):
        await one.acknowledge(0, 1, ACCEPT)
    assert len(one.shares) == 0
    assert (await one.fetch()).acquired == [AcquiredRange(1, 1, 1)]


async def test_acknowledgement_of_unfetched_share_partition_is_refused(one: Shares) -> None:
    with pytest.raises(UnknownSharePartitionError):
        await one.acknowledge(0, 0, ACCEPT)


async def test_new_leader_epoch_drops_the_share_partition(one: Shares) -> None:
    one.produce(1)
    await one.fetch()
    image = one.services.metadata.image
    one.shares.publish(image, image)
    assert len(one.shares) == 1
    (served,) = one.shares
    served.share.leader_epoch -= 1
    assert (await one.fetch(OTHER)).acquired == [AcquiredRange(0, 0, 1)]
    (now,) = one.shares
    assert now is not served
    assert served.share.state is PartitionState.FENCED


async def test_deleted_topic_ends_waiting_fetches(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000)
    await until_true(lambda: one.services.share_fetches.waiting == 1, "the fetch waits")
    delete_topic(one.services.metadata, "queue")
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert len(one.shares) == 0


async def test_share_partitions_are_dropped_with_last_session_of_the_group(one: Shares) -> None:
    one.produce(1)
    sessions = one.shares.sessions
    sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[one.where])
    sessions.fetch(SessionKey(GROUP, OTHER), 0, "c2", additions=[one.where])
    await one.fetch()
    one.shares.connection_closed("c1")
    assert (await one.fetch(OTHER, max_wait_ms=30_000)).acquired == [AcquiredRange(0, 0, 2)]
    one.shares.connection_closed("c2")
    await until_true(lambda: len(one.shares) == 0, "the share partition is dropped")
    assert len(sessions) == 0


async def test_disabling_share_version_drops_share_partitions_and_sessions(one: Shares) -> None:
    one.produce(1)
    one.shares.sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[one.where])
    await one.fetch()
    image = one.services.metadata.image
    enabled = replace(image, features={**image.features, "share.version": 1})
    one.shares.publish(enabled, replace(image, features={**image.features, "share.version": 0}))
    assert (len(one.shares), len(one.shares.sessions)) == (0, 0)


@pytest.mark.parametrize(("reset", "acquired"), [("earliest", 0), ("latest", 2)])
async def test_start_offset_without_state_follows_auto_offset_reset(
    one: Shares, reset: str, acquired: int
) -> None:
    set_group_configs(one.services.metadata, GROUP, {"share.auto.offset.reset": reset})
    await one.initialize(start_offset=-1, state_epoch=2)
    one.produce(1, 1)
    assert bool((await one.fetch()).acquired) == (reset == "earliest")
    one.produce(1)
    assert (await one.fetch()).acquired[-1].first == 2
    (served,) = one.shares
    assert served.share.start_offset == acquired


async def test_start_offset_by_duration_is_first_record_within_it(
    one: Shares, clock: ManualClock
) -> None:
    reset = {"share.auto.offset.reset": "by_duration:PT1H"}
    set_group_configs(one.services.metadata, GROUP, reset)
    await one.initialize(start_offset=-1, state_epoch=2)
    now_ms = clock.now_ms()
    for age_ms in (7_200_000, 3_600_000, 60_000):
        one.log.append_records([Record(b"k", b"x")], now_ms=now_ms - age_ms)
    assert (await one.fetch()).acquired == [AcquiredRange(1, 2, 1)]


async def test_failed_state_read_fails_the_fetch_and_is_repeated_by_the_next(one: Shares) -> None:
    one.produce(1)
    one.services.share_persister._transport = failing(SharePartitionFailedError("not initialized"))
    assert isinstance((await one.fetch(max_wait_ms=30_000)).error, SharePartitionFailedError)
    one.services.share_persister._transport = one.services.share_coordinator.send
    assert (await one.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_unexpected_exception_drops_the_share_partition(
    one: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.produce(2)
    await one.fetch()
    (served,) = one.shares
    monkeypatch.setattr(served.share, "next_write_id", lambda: 1 // 0)
    with pytest.raises(SharePartitionFailedError):
        one.acknowledge(0, 0, ACCEPT)
    assert len(one.shares) == 0
    assert (await one.fetch()).acquired == [AcquiredRange(0, 1, 1)]


async def test_fetch_waits_for_min_bytes(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000, min_bytes=100)
    one.produce(1)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    one.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 1, 1)]


async def test_fetch_returns_available_records_after_max_wait(one: Shares) -> None:
    one.produce(1)
    part = await one.fetch(max_wait_ms=20, min_bytes=1 << 19)
    assert part.acquired == [AcquiredRange(0, 0, 1)]
    assert one.services.share_fetches.expired == 1


async def test_cancelled_fetch_leaves_no_waiter_and_no_lock(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000)
    await until_true(lambda: one.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = one.shares
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (served.waiting, one.services.share_fetches.waiting) == ({}, 0)
    one.produce(1)
    assert (await one.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_answered_fetch_leaves_no_waiter_kafka_19389(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000)
    await until_true(lambda: one.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = one.shares
    listeners = len(served.log.marks._listeners)
    one.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 0, 1)]
    assert (served.waiting, one.services.share_fetches.waiting) == ({}, 0)
    assert len(served.log.marks._listeners) == listeners - 1


async def test_leader_change_ends_a_waiting_fetch_kafka_19567(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000)
    await until_true(lambda: one.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = one.shares
    before = one.services.metadata.image
    topic = before.topics["queue"]
    (partition,) = topic.partitions
    led = replace(partition, leader_epoch=partition.leader_epoch + 1)
    after = replace(topic, partitions=(led,))
    image = replace(before, topics={"queue": after}, topics_by_id={topic.topic_id: after})
    one.shares.publish(before, image)
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert served.share.state is PartitionState.FENCED


async def test_failed_read_releases_the_fetch_lock_kafka_18918(
    one: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.produce(1)
    with monkeypatch.context() as broken:
        broken.setattr(one.log.reader, "fetch", lambda *_args, **_more: 1 // 0)
        part = await one.fetch()
        assert isinstance(part.error, SharePartitionFailedError)
    (served,) = one.shares
    assert served.share.fetch_lock is None
    assert (await one.fetch(OTHER)).acquired == [AcquiredRange(0, 0, 1)]


async def test_dropped_share_partition_is_freed_kafka_21096(one: Shares) -> None:
    """No metric, timer or waiter keeps a dropped share partition alive."""

    def live() -> int:
        gc.collect()
        return sum(isinstance(each, SharePartition) for each in gc.get_objects())

    others = live()
    one.produce(1)
    one.shares.sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[one.where])
    await one.fetch()
    assert live() == others + 1
    one.shares.connection_closed("c1")
    await until_true(lambda: live() == others, "the share partition is freed")


async def test_throttled_fetch_acquires_nothing(one: Shares) -> None:
    one.produce(1)
    part = await one.fetch(max_wait_ms=30_000, may_acquire=lambda: False)
    assert (part.acquired, part.records) == ([], b"")
    assert (await one.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_fetch_in_record_limit_mode_reads_only_max_records(one: Shares) -> None:
    one.produce(*([1] * 300))
    part = await one.fetch(max_records=100, mode=AcquireMode.RECORD_LIMIT)
    assert sum(entry.size for entry in part.acquired) == 100
    size = len(part.records)
    assert 0 < size < 100 * 100
    part = await one.fetch()
    assert sum(entry.size for entry in part.acquired) == 200


async def test_fetch_waits_while_record_locks_are_at_the_limit(one: Shares) -> None:
    set_group_configs(one.services.metadata, GROUP, {"share.partition.max.record.locks": "100"})
    one.produce(*([10] * 15))
    part = await one.fetch()
    assert sum(entry.size for entry in part.acquired) == 100
    assert (await one.fetch(OTHER, max_wait_ms=10)).acquired == []
    await one.acknowledge(0, 9, RELEASE)
    assert (await one.fetch(OTHER)).acquired == [AcquiredRange(0, 9, 2)]
    waiting = one.begin(OTHER, max_wait_ms=30_000)
    await one.acknowledge(10, 19, ACCEPT)
    assert not waiting.done()  # the start offset is still 0
    await one.acknowledge(0, 9, ACCEPT, OTHER)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(100, 119, 1)]


async def test_fetch_waits_for_log_end_to_pass_the_start_offset(one: Shares) -> None:
    await one.initialize(start_offset=2, state_epoch=2)
    one.produce(1)
    part = await one.fetch(max_wait_ms=10)
    assert (part.acquired, part.error) == ([], None)
    one.produce(1, 1)
    assert (await one.fetch()).acquired == [AcquiredRange(2, 2, 1)]


async def test_closed_session_releases_records_and_writes_their_state(one: Shares) -> None:
    one.produce(1)
    key = SessionKey(GROUP, MEMBER)
    one.shares.sessions.fetch(key, 0, "c1", additions=[one.where])
    await one.fetch()
    one.shares.end_session(key)
    assert (await one.fetch(OTHER, max_wait_ms=30_000)).acquired == [AcquiredRange(0, 0, 2)]
    send = one.services.share_coordinator.send
    assert await send(ReadStateSummary(one.key)) == StateSummary(
        0, 0, one.log.marks.leader_epoch, 1
    )
    state: Any = await send(ReadShareState(one.key, one.log.marks.leader_epoch))
    assert [tuple(batch) for batch in state.batches] == [(0, 0, 0, 1)]


async def test_waiting_fetch_is_fenced_on_shutdown(one: Shares) -> None:
    waiting = one.begin(max_wait_ms=30_000)
    await until_true(lambda: one.services.share_fetches.waiting == 1, "the fetch waits")
    one.shares.close()
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert isinstance((await one.fetch()).error, SharePartitionFencedError)


def assert_about(pauses: list[int], expected: list[int]) -> None:
    """Assert that each pause, in ms, differs from the expected pause by at most 20 %."""
    for pause, ms in zip(pauses, expected, strict=True):
        assert 0.8 * ms - 1 <= pause <= 1.2 * ms


async def test_state_write_is_retried_until_coordinator_is_found(one: Shares) -> None:
    one.produce(1)
    await one.fetch()
    persister, pauses = one.services.share_persister, []
    transport, left = persister._transport, [NotCoordinatorError("moved")] * 2

    async def pause(pause_ms: int) -> None:
        pauses.append(pause_ms)

    def send(command: Any) -> asyncio.Future[object]:
        return failing(left.pop())(command) if left else transport(command)

    persister._transport, persister._pause = send, pause
    assert await one.acknowledge(0, 0, ACCEPT) == Acknowledged()
    assert_about(pauses, [2_000, 4_000])


async def test_state_write_fails_after_five_attempts(one: Shares) -> None:
    one.produce(1)
    await one.fetch()
    persister, pauses = one.services.share_persister, []

    async def pause(pause_ms: int) -> None:
        pauses.append(pause_ms)

    persister._transport, persister._pause = failing(NotCoordinatorError("moved")), pause
    with pytest.raises(ShareCoordinatorUnavailableError):
        await one.acknowledge(0, 0, ACCEPT)
    assert_about(pauses, [2_000, 4_000, 8_000, 16_000])


async def test_stop_ends_retries_of_state_writes(one: Shares) -> None:
    one.produce(1)
    await one.fetch()
    persister = one.services.share_persister
    forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    persister._transport = failing(NotCoordinatorError("moved"))
    persister._pause = lambda _pause_ms: forever
    accepted = one.acknowledge(0, 0, ACCEPT)
    await until_true(lambda: len(persister._repeating) == 1, "the write is repeated")
    one.services._close_shares()
    with pytest.raises(SharePartitionFencedError):
        await accepted
    await until_true(lambda: not persister._repeating, "the repetition ends")


async def test_fetch_with_min_bytes_0_does_not_wait(one: Shares) -> None:
    """As in Kafka, MinBytes 0 is satisfied at once."""
    await one.fetch()
    part = await asyncio.wait_for(asyncio.shield(one.begin(max_wait_ms=3_600_000, min_bytes=0)), 60)
    assert (part[0].acquired, part[0].error) == ([], None)


@pytest.mark.parametrize("batch_size", [-1, 0, 1, 3])
async def test_acquired_ranges_are_split_at_log_batches_by_batch_size(
    one: Shares, batch_size: int
) -> None:
    one.produce(2, 2, 2)
    acquired = (await one.fetch(batch_size=batch_size)).acquired
    cut = [AcquiredRange(0, 1, 1), AcquiredRange(2, 3, 1), AcquiredRange(4, 5, 1)]
    assert acquired == ([AcquiredRange(0, 3, 1), cut[2]] if batch_size == 3 else cut)
