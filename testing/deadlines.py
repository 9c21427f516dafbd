"""The deadlines of one broker: finds the next one, and runs the work that is due.

Everything in this module runs on the broker's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fencepost.coordinator.history.entries import Entry
from fencepost.coordinator.services.base import PERIODIC
from fencepost.logcore.clock import Clock

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.runtime.background import Repeated
    from fencepost.coordinator.runtime.timers import TimerQueue

SETTLES: Final = (
    "append",
    "flush of sealed segments",
    "group commit",
    "load ",
    "markers",
    "removals",
    "reserve producer ids",
    "settings of open logs",
    "upkeep of ",
    "wait for producer ids",
)
"""Name prefixes of the broker's asyncio tasks that an advance waits for."""

SETTLE_S: Final = 10.0
"""The time limit, in real seconds, for the tasks that an advance waits for."""

NAMES: Final = {"txn-timeout": "transaction", "txn-park": "init-producer-id"}
""":attr:`Fired.what` by the first part of a timer's key, for the keys where the two differ."""


@dataclass(slots=True)
class Fired:
    """A deadline that was reached."""

    at_ms: int
    """The clock's time of day, milliseconds since the epoch."""
    what: str
    """``session``, ``join``, ``sync``, ``rebalance``, ``transaction``, ``retention``, …: the
    README's table has them all."""
    who: str
    """The group, the transactional id, or the partition as ``topic-0``."""
    member: str | None = None
    """The member of the group, if the deadline concerns one."""
    events: list[str] = field(default_factory=list)
    """The resulting events, as named in the history; empty if nothing changed."""
    detail: dict[str, Any] = field(default_factory=dict)
    """More about the deadline: offsets before and after, counts."""

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Deadlines:
    """The deadlines of ``broker`` on ``clock``; ``keep`` is called with everything that fires."""

    def __init__(self, broker: Broker, clock: Clock, keep: Callable[[Fired], None]) -> None:
        self._broker, self._clock, self._keep = broker, clock, keep
        services = broker.services
        self._hooked: list[TimerQueue] = []
        services.history.listener = self._event
        self._current: Fired | None = None
        self.news: list[Fired] | None = None
        """Entries since the last :meth:`run_due`; None outside of an advance."""
        self._target_ms = self._spacing_ms = 0
        self._last_round_ms: dict[Hashable, int] = {}

    @property
    def _queues(self) -> list[TimerQueue]:
        """The broker's queues; the first share group adds the queues of share partitions."""
        queues = self._broker.services.timer_queues
        for queue in queues:
            if queue not in self._hooked:
                queue.on_fire = partial(self._timer_fires, queue)
                self._hooked.append(queue)
        return queues

    def close(self) -> None:
        """Remove all hooks from the broker."""
        for queue in self._hooked:
            queue.on_fire = None
        self._broker.services.history.listener = None

    async def begin(self, target_ms: int, spacing_ms: int) -> None:
        """Prepare an advance to ``target_ms``.

        Recurring work waits at least ``spacing_ms`` between two rounds. A round that is due before
        the target is done at the target at the latest.
        """
        self._target_ms, self._spacing_ms = target_ms, spacing_ms
        self._last_round_ms.clear()
        await self._settle()
        self.news = []

    async def end(self) -> None:
        """Finish an advance: tasks that pause in real time recompute their pause."""
        for task in self._tasks():
            await task.catch_up()

    async def next_ms(self) -> int | None:
        """Return the monotonic time of the next deadline up to the target; None without one."""
        deadlines = [self._round_ms(task, task.due_ms) for task in self._tasks()]
        for queue in self._queues:
            # The queue is sorted by time. Periodic timers may be postponed, so go on to the first
            # timer that is not periodic.
            for due_ms, key in queue:
                deadlines.append(
                    self._round_ms((queue, key), due_ms) if key in PERIODIC else due_ms
                )
                if key not in PERIODIC:
                    break
        due = [
            deadline
            for deadline in deadlines
            if deadline is not None and deadline <= self._target_ms
        ]
        return min(due, default=None)

    def _round_ms(self, what: Hashable, due_ms: int | None) -> int | None:
        """Return when the next round of ``what``, due at ``due_ms``, begins."""
        if due_ms is None or due_ms > self._target_ms:
            return None
        last_ms = self._last_round_ms.get(what)
        if last_ms is None:
            return due_ms
        return min(max(due_ms, last_ms + self._spacing_ms), self._target_ms)

    def _tasks(self) -> list[Repeated]:
        return [task for task in self._broker.repeated if task.clock is self._clock]

    async def run_due(self) -> list[Fired]:
        """Do the work that is due now and its immediate consequences; return the entries."""
        for queue in self._queues:
            while queue.run_due():
                await self._settle()
        await self._settle()
        now_ms = self._clock.monotonic_ms()
        for task in self._tasks():
            round_ms = self._round_ms(task, task.due_ms)
            if round_ms is not None and round_ms <= now_ms:
                self._last_round_ms[task] = now_ms
                before = self._partitions()
                await task.catch_up()
                self._compare(task.what, before)
        await self._settle()
        self._current = None
        news, self.news = self.news or [], []
        return news

    async def _settle(self) -> None:
        """Wait until running tasks are done, and the loop has polled its sockets."""
        for _ in range(3):
            await asyncio.sleep(0)
        under_way = {task for task in asyncio.all_tasks() if task.get_name().startswith(SETTLES)}
        if under_way:
            await asyncio.wait(under_way, timeout=SETTLE_S)

    # --- entries ---

    def _report_fired(self, fired: Fired) -> None:
        if self.news is not None:
            self.news.append(fired)
        self._keep(fired)

    def _timer_fires(self, queue: TimerQueue, key: Hashable, now_ms: int) -> None:
        if key in PERIODIC:
            self._last_round_ms[queue, key] = self._clock.monotonic_ms()
            self._current = None
            return
        if isinstance(key, tuple) and isinstance(key[1], tuple):  # of a share partition
            key = key[0], key[1][0]
        kind, who, *member = map(str, key if isinstance(key, tuple) else ("markers", key))
        self._current = Fired(now_ms, NAMES.get(kind, kind), who, member[0] if member else None)
        self._report_fired(self._current)

    def _event(self, entry: Entry) -> None:
        """Add an event to the timer that caused it; report an event of the upkeep by itself."""
        cause = (entry.trigger or "").partition(" ")[0]
        current = self._current
        if cause == "timer" and current is not None and current.who == entry.subject:
            current.events.append(entry.what)
            current.detail.update(entry.detail)
        elif cause == "upkeep":
            self._report_fired(
                Fired(entry.at_ms, entry.what, entry.subject, detail=dict(entry.detail))
            )

    def _partitions(self) -> dict[str, dict[str, int]]:
        """Return, for each partition, the values that a round may change."""
        logs = self._broker.storage.logs
        return {
            log.name: {
                "log_start_offset": log.log_start_offset,
                "producers": sum(1 for _ in log.producers.view()),
                "cleaned_offset": logs.cleaned.get((log.topic, log.index), 0),
            }
            for log in logs
        }

    def _compare(self, what: str, before: dict[str, dict[str, int]]) -> None:
        for name, now in self._partitions().items():
            former = before.get(name, now)
            changed = {key: (former[key], now[key]) for key in now if former[key] != now[key]}
            if changed:
                self._report_fired(Fired(self._clock.now_ms(), what, name, detail=dict(changed)))
