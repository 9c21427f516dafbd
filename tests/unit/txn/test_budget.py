"""The memory that a budget counts is close to the real use, as docs/operating.md states."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from fencepost.coordinator.runtime.timers import TimerQueue
from fencepost.logcore.budget import Account
from fencepost.logcore.clock import SystemClock
from fencepost.txn.commands import AddPartitions, InitProducerId
from fencepost.txn.limits import TxnLimits
from fencepost.txn.machine import TxnMachine
from tests.unit.txn.driver import START_MS, TIMEOUT_MS, CountingIds

pytestmark = pytest.mark.slow

ENOUGH = 8 << 20
"""The measured size of all ids together, in bytes: the size of some 10,000 ids."""


class Shard:
    """A machine that replays its records, with timers as in the daemon."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.memory = Account()
        self.machine = TxnMachine(TxnLimits(), CountingIds(), 7, lambda: 2, self.memory)
        self.machine.on_loaded(START_MS)
        self._timers = TimerQueue(SystemClock(), loop).timers(lambda _key, _now_ms: None)
        self._offset = 0

    def decide(self, command: object) -> None:
        decision = self.machine.decide(self._offset, command, START_MS)
        for record in decision.records:
            self.machine.replay(record, self._offset, START_MS, None)
            self._offset += 1
        for timer in decision.timers:
            self._timers.set(timer.key, START_MS + TIMEOUT_MS, START_MS)

    def claim(self, name: str) -> None:
        self.decide(InitProducerId(name, TIMEOUT_MS))

    def claim_again(self, name: str) -> None:
        self.claim(name)
        self.decide(InitProducerId(name, TIMEOUT_MS, *self.machine.transactions[name].identity))

    def begin(self, name: str, topics: int) -> None:
        self.claim_again(name)
        added = tuple(
            (f"{name}.{number:04}.order-events", 300 + number) for number in range(topics)
        )
        producer = self.machine.transactions[name].identity
        self.decide(AddPartitions(name, *producer, added))


FILL: dict[str, Callable[[Shard, int], None]] = {
    "new ids": lambda shard, n: shard.claim(f"orders-service-{n:06}"),
    "ids with a known last identity": lambda shard, n: shard.claim_again(f"orders-service-{n:06}"),
    "ids of wide characters": lambda shard, n: shard.claim(f"\u65e5{n:0100}"),
    "open transactions": lambda shard, n: shard.begin(f"orders-service-{n:06}", 1),
    "partitions": lambda shard, n: shard.begin(f"{n:06}", 20),
}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    gc.collect()
    tracemalloc.start()
    yield loop
    tracemalloc.stop()
    loop.close()


@pytest.mark.parametrize("kind", FILL)
def test_budget_counts_about_the_memory_used_by_transactional_ids(
    kind: str, loop: asyncio.AbstractEventLoop
) -> None:
    shard = Shard(loop)
    before = tracemalloc.get_traced_memory()[0]
    number = 0
    while shard.memory.used < ENOUGH:
        FILL[kind](shard, number)
        number += 1
    gc.collect()
    taken, used = tracemalloc.get_traced_memory()[0] - before, shard.memory.used
    print(f"{kind}: {taken / number:.0f} bytes an id, {taken / used:.2f} for each that is counted")
    assert 0.5 * used < taken < 1.25 * used
