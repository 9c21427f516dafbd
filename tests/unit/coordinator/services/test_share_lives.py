"""Random events in a share group on a real log: members, expired locks, leaders, reloads.

An accepted record must not be delivered again, no record may have two owners at the same time, and
at the end a consumer that accepts everything must reach the end of the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.runtime.errors import CoordinatorNotAvailableError
from fencepost.coordinator.services.share_fetches import FetchedShare
from fencepost.groups.share.commands import AcquiredRange, AcquireMode
from fencepost.groups.share.session import SessionKey
from fencepost.groups.share.state import ReadStateSummary
from fencepost.groups.share.states import AcknowledgeType
from fencepost.logcore.machine import DomainError
from tests.support.batches import batches
from tests.support.clock import ManualClock
from tests.support.quick import seeds
from tests.unit.coordinator.services.coordinators import Services, reload
from tests.unit.coordinator.services.test_share_partitions import (
    CONFIG,
    GROUP,
    LOCK_MS,
    Shares,
)

STEPS = 150
LOST = 0.05
"""The probability that a request to the share coordinator, or its response, is lost."""
MEMBERS = ("a", "b", "c")
TYPES = (AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT)


class Life:
    """One random run; ``held`` maps members to offsets that they believe to have acquired."""

    def __init__(self, shares: Shares, clock: ManualClock, rng: random.Random) -> None:
        self.one, self.clock, self.rng = shares, clock, rng
        self.held: dict[str, set[int]] = {member: set() for member in MEMBERS}
        self.ended: set[int] = set()
        """Offsets that a member has successfully accepted or rejected."""
        self.fetches: list[tuple[str, asyncio.Task[list[FetchedShare]]]] = []
        self.acknowledging: list[asyncio.Task[None]] = []
        shares.services.share_persister._transport = self.send
        self._acquire = shares.shares.acquire
        shares.shares.acquire = self.acquire  # type: ignore[method-assign]

    def acquire(self, *args: Any) -> list[AcquiredRange]:
        """Acquire records, and check them at once: they may be final when the response arrives."""
        acquired = self._acquire(*args)
        for entry in acquired:
            again = self.ended & set(range(entry.first, entry.last + 1))
            assert not again, f"{again} were accepted or rejected"
        return acquired

    async def step(self) -> None:
        steps = (
            *(self.produce, self.fetch, self.fetch, self.settle, self.settle),
            *(self.acknowledge, self.acknowledge, self.acknowledge, self.advance),
            *(self.new_leader, self.reload, self.close_session, self.delete_records),
        )
        weights = (3, 4, 4, 3, 3, 4, 4, 4, 1, 1, 0.3, 1, 0.2)
        await self.rng.choices(steps, weights)[0]()
        self.one.shares.timers.run_due()
        for served in self.one.shares:
            served.share.check()

    async def produce(self) -> None:
        self.one.produce(*[self.rng.randint(1, 12) for _ in range(self.rng.randint(1, 3))])

    async def fetch(self) -> None:
        member = self.rng.choice(MEMBERS)
        if any(busy == member for busy, _ in self.fetches):
            return
        task = self.one.begin(
            member,
            max_wait_ms=self.rng.choice((0, 5)),
            max_records=self.rng.choice((1, 5, 500)),
            max_bytes=self.rng.choice((1, 200, 1 << 20)),
            batch_size=self.rng.choice((1, 10, 500)),
            mode=self.rng.choice(tuple(AcquireMode)),
        )
        self.fetches.append((member, task))

    async def settle(self) -> None:
        if self.fetches:
            member, task = self.fetches.pop(self.rng.randrange(len(self.fetches)))
            (part,) = await task
            self.take(member, part)

    def take(self, member: str, part: FetchedShare) -> None:
        assert part.error is None or isinstance(part.error, DomainError)
        for entry in part.acquired:
            assert 1 <= entry.delivery_count <= 5
            self.held[member] |= set(range(entry.first, entry.last + 1))
        if part.acquired:
            raw = part.records if isinstance(part.records, bytes) else part.records.peek(1 << 22)
            sent = batches(raw)
            assert sent[0].base_offset <= part.acquired[0].first
            assert sent[-1].last_offset >= part.acquired[-1].last

    async def acknowledge(self) -> None:
        member = self.rng.choice(MEMBERS)
        if not self.held[member]:
            return
        first = self.rng.choice(sorted(self.held[member]))
        last = first
        while last + 1 in self.held[member] and self.rng.random() < 0.8:
            last += 1
        kind = self.rng.choice(TYPES)
        offsets = set(range(first, last + 1))
        self.held[member] -= offsets
        owned = offsets & self.owned(member)
        future = self.one.acknowledge(first, last, (int(kind),), member)
        self.acknowledging.append(asyncio.ensure_future(self.acknowledged(future, kind, owned)))
        await self.hop()

    def owned(self, member: str) -> set[int]:
        """Return the offsets that the member has acquired; NONE confirms only these offsets."""
        return {
            offset
            for served in self.one.shares
            for run in served.share.in_flight()
            if run.member_id == member
            for offset in range(run.first, run.last + 1)
        }

    async def acknowledged(
        self, future: asyncio.Future[object], kind: AcknowledgeType, offsets: set[int]
    ) -> None:
        try:
            await future
        except DomainError:
            return  # a lock has expired, the leader is new, or the state was not written
        if kind is not AcknowledgeType.RELEASE:
            assert not offsets & self.ended, f"{offsets & self.ended} have ended twice"
            self.ended |= offsets

    async def hop(self, most: int = 3) -> None:
        """Let other tasks run for a while."""
        for _ in range(self.rng.randint(0, most)):
            await asyncio.sleep(0)

    def send(self, command: Any) -> asyncio.Future[object]:
        """Deliver a command to the share coordinator late; sometimes lose it or the reply."""
        return asyncio.ensure_future(self.sent(command))

    async def sent(self, command: Any) -> object:
        await self.hop(30)
        if self.rng.random() < LOST:
            raise CoordinatorNotAvailableError("the request is lost")
        reply = await self.one.services.share_coordinator.send(command)
        await self.hop(30)
        if self.rng.random() < LOST:
            raise CoordinatorNotAvailableError("the response is lost")
        return reply

    async def advance(self) -> None:
        self.clock.advance(self.rng.choice((1_000, LOCK_MS)))

    async def new_leader(self) -> None:
        self.one.shares._fence_all(tuple(self.one.shares), "a new leader")

    async def reload(self) -> None:
        coordinator: Any = self.one.services.share_coordinator
        await reload(coordinator._shards, 0)

    async def close_session(self) -> None:
        member = self.rng.choice(MEMBERS)
        sessions = self.one.shares.sessions
        sessions.fetch(SessionKey(GROUP, member), 0, member, additions=[self.one.where])
        self.held[member].clear()
        self.one.shares.connection_closed(member)
        await asyncio.sleep(0)

    async def delete_records(self) -> None:
        log = self.one.log
        offset = self.rng.randint(log.log_start_offset, log.high_watermark)
        log.cleanup.delete_records_before(offset)

    async def finish(self) -> None:
        """Let one consumer accept all remaining records."""
        while self.fetches:
            await self.settle()
        await asyncio.gather(*self.acknowledging)
        self.clock.advance(LOCK_MS)
        self.one.shares.timers.run_due()
        end = self.one.log.high_watermark
        for _ in range(500):
            part = await self.one.fetch("last", max_wait_ms=5)
            self.take_last(part)
            for entry in part.acquired:
                with suppress(DomainError):  # a lost response
                    await self.one.acknowledge(
                        entry.first, entry.last, (int(AcknowledgeType.ACCEPT),), "last"
                    )
            self.clock.advance(LOCK_MS)
            self.one.shares.timers.run_due()
            (served,) = self.one.shares
            if served.share.start_offset == end and not part.acquired:
                break
        else:
            raise AssertionError(f"{served.share.in_flight()} are left of {end}")

    def take_last(self, part: FetchedShare) -> None:
        self.held["last"] = set()
        self.take("last", part)


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


@pytest.mark.parametrize("seed", seeds(12))
async def test_accepted_records_are_not_redelivered_and_all_records_end(
    shares: Shares, clock: ManualClock, seed: int
) -> None:
    shares.services.share_persister._pause = no_pause
    life = Life(shares, clock, random.Random(seed))
    for _ in range(STEPS):
        await life.step()
    await life.finish()
    summary: Any = await shares.services.share_coordinator.send(ReadStateSummary(shares.key))
    assert summary.start_offset <= shares.log.high_watermark


async def no_pause(_pause_ms: int) -> None:
    await asyncio.sleep(0)
