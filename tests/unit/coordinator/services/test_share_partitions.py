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
async def shares(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Shares]:
    services = await Services(tmp_path, CONFIG, clock=clock).start()
    services.topic("queue")
    shares = Shares(services)
    await shares.initialize()
    yield shares
    shares.check()
    await services.stop()


async def test_expired_lock_makes_records_available_again(
    shares: Shares, clock: ManualClock
) -> None:
    shares.produce(3)
    assert (await shares.fetch()).acquired == [AcquiredRange(0, 2, 1)]
    waiting = shares.begin(OTHER, max_wait_ms=30_000)
    clock.advance(LOCK_MS - 1)
    shares.shares.timers.run_due()
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    assert shares.shares.timers.run_due() == 1
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 2, 2)]


async def test_acknowledgements_survive_fencing_and_acquisitions_do_not(shares: Shares) -> None:
    shares.produce(1, 1, 1)
    await shares.fetch()
    assert await shares.acknowledge(1, 1, ACCEPT) == Acknowledged()
    await asyncio.sleep(0)
    assert shares.shares.acknowledged == {AcknowledgeType.ACCEPT: 1}
    shares.shares._fence_all(tuple(shares.shares), "test")
    assert len(shares.shares) == 0
    part = await shares.fetch(OTHER)
    assert part.acquired == [AcquiredRange(0, 0, 1), AcquiredRange(2, 2, 1)]


async def test_new_share_partition_reads_state_after_writes_of_the_former(shares: Shares) -> None:
    """The former writes have the same epochs, so a record could become final twice."""
    shares.produce(1)
    await shares.fetch()
    persister = shares.services.share_persister
    transport, held = persister._transport, []

    def hold(command: Any) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        held.append((command, future))
        return future

    persister._transport = hold
    accepted = shares.acknowledge(0, 0, ACCEPT)
    shares.shares._fence_all(tuple(shares.shares), "test")
    waiting = shares.begin(OTHER, max_wait_ms=30_000)
    await asyncio.sleep(0.01)
    assert [type(command).__name__ for command, _ in held] == ["WriteShareState"]
    persister._transport = transport
    command, future = held.pop()
    future.set_result(await transport(command))
    assert await accepted == Acknowledged()
    await until_true(
        lambda: any(s.share.state is PartitionState.ACTIVE for s in shares.shares), "read"
    )
    shares.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(1, 1, 1)]


async def test_failed_state_write_leaves_records_acquired_by_the_member(shares: Shares) -> None:
    shares.produce(1)
    await shares.fetch()
    shares.services.share_persister._transport = failing(SharePartitionFailedError("no disk"))
    with pytest.raises(SharePartitionFailedError):
        await shares.acknowledge(0, 0, ACCEPT)
    (served,) = shares.shares
    (held,) = served.share.in_flight()
    assert held.member_id == MEMBER


def failing(error: Exception) -> Any:
    def fail(_command: Any) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    return fail


async def test_share_partition_is_fenced_by_a_later_state_epoch(shares: Shares) -> None:
    shares.produce(2)
    await shares.fetch()
    await shares.initialize(start_offset=1, state_epoch=2)
    with pytest.raises(SharePartitionFencedError):
        await shares.acknowledge(0, 1, ACCEPT)
    assert len(shares.shares) == 0
    assert (await shares.fetch()).acquired == [AcquiredRange(1, 1, 1)]


async def test_acknowledgement_of_unfetched_share_partition_is_refused(shares: Shares) -> None:
    with pytest.raises(UnknownSharePartitionError):
        await shares.acknowledge(0, 0, ACCEPT)


async def test_new_leader_epoch_drops_the_share_partition(shares: Shares) -> None:
    shares.produce(1)
    await shares.fetch()
    image = shares.services.metadata.image
    shares.shares.publish(image, image)
    assert len(shares.shares) == 1
    (served,) = shares.shares
    served.share.leader_epoch -= 1
    assert (await shares.fetch(OTHER)).acquired == [AcquiredRange(0, 0, 1)]
    (now,) = shares.shares
    assert now is not served
    assert served.share.state is PartitionState.FENCED


async def test_deleted_topic_ends_waiting_fetches(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000)
    await until_true(lambda: shares.services.share_fetches.waiting == 1, "the fetch waits")
    delete_topic(shares.services.metadata, "queue")
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert len(shares.shares) == 0


async def test_share_partitions_are_dropped_with_last_session_of_the_group(shares: Shares) -> None:
    shares.produce(1)
    sessions = shares.shares.sessions
    sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[shares.where])
    sessions.fetch(SessionKey(GROUP, OTHER), 0, "c2", additions=[shares.where])
    await shares.fetch()
    shares.shares.connection_closed("c1")
    assert (await shares.fetch(OTHER, max_wait_ms=30_000)).acquired == [AcquiredRange(0, 0, 2)]
    shares.shares.connection_closed("c2")
    await until_true(lambda: len(shares.shares) == 0, "the share partition is dropped")
    assert len(sessions) == 0


async def test_disabling_share_version_drops_share_partitions_and_sessions(shares: Shares) -> None:
    shares.produce(1)
    shares.shares.sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[shares.where])
    await shares.fetch()
    image = shares.services.metadata.image
    enabled = replace(image, features={**image.features, "share.version": 1})
    shares.shares.publish(enabled, replace(image, features={**image.features, "share.version": 0}))
    assert (len(shares.shares), len(shares.shares.sessions)) == (0, 0)


@pytest.mark.parametrize(("reset", "acquired"), [("earliest", 0), ("latest", 2)])
async def test_start_offset_without_state_follows_auto_offset_reset(
    shares: Shares, reset: str, acquired: int
) -> None:
    set_group_configs(shares.services.metadata, GROUP, {"share.auto.offset.reset": reset})
    await shares.initialize(start_offset=-1, state_epoch=2)
    shares.produce(1, 1)
    assert bool((await shares.fetch()).acquired) == (reset == "earliest")
    shares.produce(1)
    assert (await shares.fetch()).acquired[-1].first == 2
    (served,) = shares.shares
    assert served.share.start_offset == acquired


async def test_start_offset_by_duration_is_first_record_within_it(
    shares: Shares, clock: ManualClock
) -> None:
    reset = {"share.auto.offset.reset": "by_duration:PT1H"}
    set_group_configs(shares.services.metadata, GROUP, reset)
    await shares.initialize(start_offset=-1, state_epoch=2)
    now_ms = clock.now_ms()
    for age_ms in (7_200_000, 3_600_000, 60_000):
        shares.log.append_records([Record(b"k", b"x")], now_ms=now_ms - age_ms)
    assert (await shares.fetch()).acquired == [AcquiredRange(1, 2, 1)]


async def test_failed_state_read_fails_the_fetch_and_is_repeated_by_the_next(
    shares: Shares,
) -> None:
    shares.produce(1)
    shares.services.share_persister._transport = failing(
        SharePartitionFailedError("not initialized")
    )
    assert isinstance((await shares.fetch(max_wait_ms=30_000)).error, SharePartitionFailedError)
    shares.services.share_persister._transport = shares.services.share_coordinator.send
    assert (await shares.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_unexpected_exception_drops_the_share_partition(
    shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares.produce(2)
    await shares.fetch()
    (served,) = shares.shares
    monkeypatch.setattr(served.share, "next_write_id", lambda: 1 // 0)
    with pytest.raises(SharePartitionFailedError):
        shares.acknowledge(0, 0, ACCEPT)
    assert len(shares.shares) == 0
    assert (await shares.fetch()).acquired == [AcquiredRange(0, 1, 1)]


async def test_fetch_waits_for_min_bytes(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000, min_bytes=100)
    shares.produce(1)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    shares.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 1, 1)]


async def test_fetch_returns_available_records_after_max_wait(shares: Shares) -> None:
    shares.produce(1)
    part = await shares.fetch(max_wait_ms=20, min_bytes=1 << 19)
    assert part.acquired == [AcquiredRange(0, 0, 1)]
    assert shares.services.share_fetches.expired == 1


async def test_cancelled_fetch_leaves_no_waiter_and_no_lock(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000)
    await until_true(lambda: shares.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = shares.shares
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (served.waiting, shares.services.share_fetches.waiting) == ({}, 0)
    shares.produce(1)
    assert (await shares.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_answered_fetch_leaves_no_waiter_kafka_19389(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000)
    await until_true(lambda: shares.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = shares.shares
    listeners = len(served.log.marks._listeners)
    shares.produce(1)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(0, 0, 1)]
    assert (served.waiting, shares.services.share_fetches.waiting) == ({}, 0)
    assert len(served.log.marks._listeners) == listeners - 1


async def test_leader_change_ends_a_waiting_fetch_kafka_19567(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000)
    await until_true(lambda: shares.services.share_fetches.waiting == 1, "the fetch waits")
    (served,) = shares.shares
    before = shares.services.metadata.image
    topic = before.topics["queue"]
    (partition,) = topic.partitions
    led = replace(partition, leader_epoch=partition.leader_epoch + 1)
    after = replace(topic, partitions=(led,))
    image = replace(before, topics={"queue": after}, topics_by_id={topic.topic_id: after})
    shares.shares.publish(before, image)
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert served.share.state is PartitionState.FENCED


async def test_failed_read_releases_the_fetch_lock_kafka_18918(
    shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares.produce(1)
    with monkeypatch.context() as broken:
        broken.setattr(shares.log.reader, "fetch", lambda *_args, **_more: 1 // 0)
        part = await shares.fetch()
        assert isinstance(part.error, SharePartitionFailedError)
    (served,) = shares.shares
    assert served.share.fetch_lock is None
    assert (await shares.fetch(OTHER)).acquired == [AcquiredRange(0, 0, 1)]


async def test_dropped_share_partition_is_freed_kafka_21096(shares: Shares) -> None:
    """No metric, timer or waiter keeps a dropped share partition alive."""

    def live() -> int:
        gc.collect()
        return sum(isinstance(each, SharePartition) for each in gc.get_objects())

    others = live()
    shares.produce(1)
    shares.shares.sessions.fetch(SessionKey(GROUP, MEMBER), 0, "c1", additions=[shares.where])
    await shares.fetch()
    assert live() == others + 1
    shares.shares.connection_closed("c1")
    await until_true(lambda: live() == others, "the share partition is freed")


async def test_throttled_fetch_acquires_nothing(shares: Shares) -> None:
    shares.produce(1)
    part = await shares.fetch(max_wait_ms=30_000, may_acquire=lambda: False)
    assert (part.acquired, part.records) == ([], b"")
    assert (await shares.fetch()).acquired == [AcquiredRange(0, 0, 1)]


async def test_fetch_in_record_limit_mode_reads_only_max_records(shares: Shares) -> None:
    shares.produce(*([1] * 300))
    part = await shares.fetch(max_records=100, mode=AcquireMode.RECORD_LIMIT)
    assert sum(entry.size for entry in part.acquired) == 100
    size = len(part.records)
    assert 0 < size < 100 * 100
    part = await shares.fetch()
    assert sum(entry.size for entry in part.acquired) == 200


async def test_fetch_waits_while_record_locks_are_at_the_limit(shares: Shares) -> None:
    set_group_configs(shares.services.metadata, GROUP, {"share.partition.max.record.locks": "100"})
    shares.produce(*([10] * 15))
    part = await shares.fetch()
    assert sum(entry.size for entry in part.acquired) == 100
    assert (await shares.fetch(OTHER, max_wait_ms=10)).acquired == []
    await shares.acknowledge(0, 9, RELEASE)
    assert (await shares.fetch(OTHER)).acquired == [AcquiredRange(0, 9, 2)]
    waiting = shares.begin(OTHER, max_wait_ms=30_000)
    await shares.acknowledge(10, 19, ACCEPT)
    assert not waiting.done()  # the start offset is still 0
    await shares.acknowledge(0, 9, ACCEPT, OTHER)
    (part,) = await waiting
    assert part.acquired == [AcquiredRange(100, 119, 1)]


async def test_fetch_waits_for_log_end_to_pass_the_start_offset(shares: Shares) -> None:
    await shares.initialize(start_offset=2, state_epoch=2)
    shares.produce(1)
    part = await shares.fetch(max_wait_ms=10)
    assert (part.acquired, part.error) == ([], None)
    shares.produce(1, 1)
    assert (await shares.fetch()).acquired == [AcquiredRange(2, 2, 1)]


async def test_closed_session_releases_records_and_writes_their_state(shares: Shares) -> None:
    shares.produce(1)
    key = SessionKey(GROUP, MEMBER)
    shares.shares.sessions.fetch(key, 0, "c1", additions=[shares.where])
    await shares.fetch()
    shares.shares.end_session(key)
    assert (await shares.fetch(OTHER, max_wait_ms=30_000)).acquired == [AcquiredRange(0, 0, 2)]
    send = shares.services.share_coordinator.send
    assert await send(ReadStateSummary(shares.key)) == StateSummary(
        0, 0, shares.log.marks.leader_epoch, 1
    )
    state: Any = await send(ReadShareState(shares.key, shares.log.marks.leader_epoch))
    assert [tuple(batch) for batch in state.batches] == [(0, 0, 0, 1)]


async def test_waiting_fetch_is_fenced_on_shutdown(shares: Shares) -> None:
    waiting = shares.begin(max_wait_ms=30_000)
    await until_true(lambda: shares.services.share_fetches.waiting == 1, "the fetch waits")
    shares.shares.close()
    (part,) = await waiting
    assert isinstance(part.error, SharePartitionFencedError)
    assert isinstance((await shares.fetch()).error, SharePartitionFencedError)


def assert_about(pauses: list[int], expected: list[int]) -> None:
    """Assert that each pause, in ms, differs from the expected pause by at most 20 %."""
    for pause, ms in zip(pauses, expected, strict=True):
        assert 0.8 * ms - 1 <= pause <= 1.2 * ms


async def test_state_write_is_retried_until_coordinator_is_found(shares: Shares) -> None:
    shares.produce(1)
    await shares.fetch()
    persister, pauses = shares.services.share_persister, []
    transport, left = persister._transport, [NotCoordinatorError("moved")] * 2

    async def pause(pause_ms: int) -> None:
        pauses.append(pause_ms)

    def send(command: Any) -> asyncio.Future[object]:
        return failing(left.pop())(command) if left else transport(command)

    persister._transport, persister._pause = send, pause
    assert await shares.acknowledge(0, 0, ACCEPT) == Acknowledged()
    assert_about(pauses, [2_000, 4_000])


async def test_state_write_fails_after_five_attempts(shares: Shares) -> None:
    shares.produce(1)
    await shares.fetch()
    persister, pauses = shares.services.share_persister, []

    async def pause(pause_ms: int) -> None:
        pauses.append(pause_ms)

    persister._transport, persister._pause = failing(NotCoordinatorError("moved")), pause
    with pytest.raises(ShareCoordinatorUnavailableError):
        await shares.acknowledge(0, 0, ACCEPT)
    assert_about(pauses, [2_000, 4_000, 8_000, 16_000])


async def test_stop_ends_retries_of_state_writes(shares: Shares) -> None:
    shares.produce(1)
    await shares.fetch()
    persister = shares.services.share_persister
    forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    persister._transport = failing(NotCoordinatorError("moved"))
    persister._pause = lambda _pause_ms: forever
    accepted = shares.acknowledge(0, 0, ACCEPT)
    await until_true(lambda: len(persister._repeating) == 1, "the write is repeated")
    shares.services._close_shares()
    with pytest.raises(SharePartitionFencedError):
        await accepted
    await until_true(lambda: not persister._repeating, "the repetition ends")


async def test_fetch_with_min_bytes_0_does_not_wait(shares: Shares) -> None:
    """As in Kafka, MinBytes 0 is satisfied at once."""
    await shares.fetch()
    part = await asyncio.wait_for(
        asyncio.shield(shares.begin(max_wait_ms=3_600_000, min_bytes=0)), 60
    )
    assert (part[0].acquired, part[0].error) == ([], None)


@pytest.mark.parametrize("batch_size", [-1, 0, 1, 3])
async def test_acquired_ranges_are_split_at_log_batches_by_batch_size(
    shares: Shares, batch_size: int
) -> None:
    shares.produce(2, 2, 2)
    acquired = (await shares.fetch(batch_size=batch_size)).acquired
    cut = [AcquiredRange(0, 1, 1), AcquiredRange(2, 3, 1), AcquiredRange(4, 5, 1)]
    assert acquired == ([AcquiredRange(0, 3, 1), cut[2]] if batch_size == 3 else cut)
