"""No step of a share partition within the limits blocks the event loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.services.share_fetches import FetchedShare, ShareFetch
from fencepost.groups.share.acknowledge import MAX_EXPIRED_RUNS
from fencepost.groups.share.commands import AcknowledgeBatch
from fencepost.groups.share.session import SessionKey
from fencepost.groups.share.states import AcknowledgeType
from tests.support.clock import ManualClock
from tests.support.stalls import LoopWatch
from tests.unit.coordinator.services.coordinators import Services
from tests.unit.coordinator.services.test_share_partitions import (
    CONFIG,
    GROUP,
    LOCK_MS,
    MEMBER,
    Shares,
)

pytestmark = pytest.mark.slow

LOCKS = 2_000
"""The default of ``share.partition.max.record.locks``. With the highest value, 10,000, one step of
a fetch or acknowledgement of single records takes more than 50 ms.
"""
MAX_LOCKS = 10_000
"""The maximum value of ``share.partition.max.record.locks``."""
ALTERNATING = (int(AcknowledgeType.ACCEPT), int(AcknowledgeType.RELEASE)) * (LOCKS // 2)


class Watched(Shares):
    """A group whose steps are timed separately."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.watch = LoopWatch()

    def read(self, count: int = LOCKS) -> FetchedShare:
        """Fetch all available records, and time each step of the fetch."""
        fetch = ShareFetch(GROUP, MEMBER, [(self.key, "queue")], 0, 1, 1 << 25, count, batch_size=1)
        work: Iterator[Any] = self.services.share_fetches.run(fetch)
        ended: list[list[FetchedShare]] = []

        def step() -> None:
            try:
                next(work)
            except StopIteration as end:
                ended.append(end.value)

        while not ended:
            self.watch.time(step, "a step of a fetch")
        return ended[0][0]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
async def watched(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Watched]:
    services = await Services(tmp_path, CONFIG, clock=clock).start()
    services.topic("queue")
    watched = Watched(services)
    await watched.initialize()
    await watched.fetch()
    yield watched
    watched.watch.check()
    await services.stop()


async def test_fetch_of_many_batches_does_not_block_the_event_loop(
    watched: Watched, clock: ManualClock
) -> None:
    watched.produce(*([1] * LOCKS))
    assert len(watched.read().acquired) == LOCKS
    clock.advance(LOCK_MS)
    watched.watch.time(watched.shares.timers.run_due, "expired locks")
    assert watched.read().acquired[0].delivery_count == 2


@pytest.mark.parametrize("at_once", [MAX_LOCKS, 50], ids=["one-fetch", "many-fetches"])
async def test_simultaneous_expiration_of_10000_locks_runs_in_slices(
    tmp_path: Path, clock: ManualClock, at_once: int
) -> None:
    limits = (
        "group.share.partition.max.record.locks",
        "group.share.max.partition.max.record.locks",
    )
    config = {**CONFIG, **dict.fromkeys(limits, str(MAX_LOCKS))}
    services = await Services(tmp_path, config, clock=clock).start()
    services.topic("queue")
    expiring = Watched(services)
    await expiring.initialize()
    await expiring.fetch()
    expiring.produce(*([1] * MAX_LOCKS))
    for _ in range(MAX_LOCKS // at_once):
        assert len(expiring.read(at_once).acquired) == at_once
        clock.advance(1)
    clock.advance(LOCK_MS)
    expiring.watch, turns, before = LoopWatch(), 0, 0
    (served,) = expiring.shares
    while any(entry.member_id is not None for entry in served.share.in_flight()):
        turns += 1
        expiring.watch.time(expiring.shares.timers.run_due, "expired locks")
        before, ended = served.lock_timeouts, served.lock_timeouts - before
        assert ended % MAX_EXPIRED_RUNS == 0
        await asyncio.sleep(0)
    expiring.watch.check()
    expiring.check()
    assert 1 < turns <= MAX_LOCKS // MAX_EXPIRED_RUNS
    assert expiring.read(MAX_LOCKS).acquired[-1].delivery_count == 2
    await services.stop()


async def test_alternating_acknowledgements_do_not_block_the_event_loop(watched: Watched) -> None:
    watched.produce(LOCKS)
    assert watched.read().acquired[0].size == LOCKS
    batches = [AcknowledgeBatch(0, LOCKS - 1, ALTERNATING)]
    acknowledge = partial(watched.shares.acknowledge, watched.key, MEMBER, batches)
    watched.watch.time(acknowledge, "alternating acknowledgements")
    await asyncio.sleep(0)
    part = watched.read()
    assert len(part.acquired) == LOCKS // 2
    session = SessionKey(GROUP, MEMBER)
    watched.shares.sessions.fetch(session, 0, "c", additions=[watched.where])
    release = partial(watched.shares.release, watched.key, MEMBER)
    watched.watch.time(release, "a closed session")
    watched.watch.time(
        partial(watched.shares._fence_all, tuple(watched.shares), "test"), "a new leader"
    )
    watched.watch.time(partial(watched.shares.open, watched.key, "queue"), "a new share partition")
    (served,) = watched.shares
    watched.watch.time(partial(watched.shares.initialized, served), "a load")
