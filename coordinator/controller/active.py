"""The active controller: carries out what the controller machine decides.

A decision is appended to the metadata log, installed and then answered, in one turn of the loop, so
that the next one is made in view of it. Whoever answers waits for the disk first.

Nothing goes off by itself before :meth:`ActiveController.start`: a broker that stands alone asks
for decisions and needs no timer.

Source: ``QuorumController``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from fencepost.cluster.controller.brokers import Registration
from fencepost.cluster.controller.errors import DuplicateBrokerRegistrationError
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import Outcome
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.controller.quorum_log import Observer, QuorumLog
from fencepost.coordinator.controller.store import MetadataStore
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.origin import Origin
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import LogError
from fencepost.logcore.machine import Event

_log = structlog.get_logger(__name__)

T = TypeVar("T")

LATE_MS: Final = 100
"""A timer that goes off later than this was held up by this very process. The time that it lost
counts against no broker, whose heartbeats lie unread in their sockets."""

LOGGED_EVENTS: Final = 20
"""Causes of one decision that are logged one by one."""

RETRY_MS: Final = 1_000
"""Until the next try of what could not be written."""

Remember = Callable[[Event, Origin | None, str | None], None]
"""Keeps a cause for the history: an event, who asked for it, by which API."""


class Decide(Protocol):
    """Has the active controller decide; see :meth:`ActiveController.decide`."""

    def __call__(self, decision: Callable[[Controller], Outcome[T]], /) -> T:
        """Carry the decision out; returns its answer."""


class ActiveController:
    """``services.active_controller``. The loop that made it is the only one that may call it.

    ``log`` is the one that brokers read; a controller on ZooKeeper has none. ``own_broker`` is set
    where this process is a broker as well: its life is the controller's.
    """

    def __init__(
        self,
        store: MetadataStore,
        settings: ControllerSettings,
        clock: Clock,
        log: QuorumLog | None,
        remember: Remember,
        *,
        own_broker: bool,
    ) -> None:
        self.settings = settings
        self.store = store
        self._log = log
        self._clock = clock
        self._remember = remember
        self.has_own_broker = own_broker
        self.machine = Controller(settings, store.image, clock.monotonic_ms())
        self._sync()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_ms = 0

    def _sync(self) -> None:
        """Look at the newest image; the own broker has applied it, and needs no heartbeats."""
        machine, node_id = self.machine, self.settings.node_id
        machine.image = self.store.image
        own = machine.image.brokers.get(node_id)
        if self.has_own_broker and own is not None:
            machine.heartbeats.register(node_id, own.epoch, own.epoch)
            machine.heartbeats.keep(node_id, machine.image.offset)

    @property
    def log(self) -> QuorumLog:
        """The metadata log that brokers read. RuntimeError for a controller that has none."""
        if self._log is None:
            raise RuntimeError("a controller on ZooKeeper has no log of metadata")
        return self._log

    def observers(self) -> list[Observer]:
        """The brokers that read the metadata log."""
        return [] if self._log is None else self._log.observers()

    # --- decisions ---

    def look(self) -> Controller:
        """The machine, with the newest image, for what changes nothing."""
        self._sync()
        return self.machine

    def decide(
        self,
        decision: Callable[[Controller], Outcome[T]],
        *,
        origin: Origin | None = None,
        trigger: str | None = None,
    ) -> T:
        """Have the machine decide, and carry it out; returns the answer.

        The records may not be on disk yet: the answer must wait for them. Raises what the machine
        does, and LogError where they could not be written; nothing has changed then.
        """
        self._sync()
        outcome = decision(self.machine)
        if outcome.records:
            self.store.append(outcome.records)
            image = self.store.image
            base_offset = image.offset - len(outcome.records) + 1
            self.machine.install(image, outcome.records, base_offset, self.now_ms())
            self._sync()
        self._tell(outcome.events, origin, trigger)
        self._arm()
        return outcome.answer

    def learned(self, records: Sequence[MetadataRecord]) -> None:
        """These, the latest ones, are somebody else's: they may be a reason to decide something."""
        image = self.store.image
        self.machine.install(image, records, image.offset - len(records) + 1, self.now_ms())
        self._sync()
        self._arm()

    def _tell(self, events: Sequence[Event], origin: Origin | None, trigger: str | None) -> None:
        """Keep the causes, and log them: one broker may take thousands of partitions along."""
        for event in events:
            self._remember(event, origin, trigger)
        for event in events[:LOGGED_EVENTS]:
            _log.info(event.kind, subject=event.subject, **event.detail)
        if len(events) > LOGGED_EVENTS:
            _log.info("and so on", count=len(events) - LOGGED_EVENTS)

    def now_ms(self) -> int:
        """The machine's time: that of sessions."""
        return self._clock.monotonic_ms()

    def register_broker(self, request: Registration) -> Callable[[Controller], Outcome[int | None]]:
        """The decision to let a broker join. Raises DuplicateBrokerRegistrationError."""
        if self.has_own_broker and request.broker_id == self.settings.node_id:
            raise DuplicateBrokerRegistrationError("the controller's node is the broker of that id")
        return lambda one: one.register_broker(request, self.store.next_offset, self.now_ms())

    # --- by itself ---

    def start(self) -> None:
        """Begin to look after sessions, and to serve observers: a controller listener opens."""
        self._loop = asyncio.get_running_loop()
        self._sync()
        self.machine.begin(self.now_ms())
        self._sync()
        if not self.has_own_broker and self.settings.node_id in self.store.image.brokers:
            # It had this directory, which is locked by this process now.
            self.machine.heartbeats.lapse(self.settings.node_id)
        if self._log is not None:
            self._log.start()
        self._arm()

    async def stop(self) -> None:
        """Decide nothing more by itself, and let observers wait no longer."""
        self.rest()
        if self._log is not None:
            await self._log.stop()

    def rest(self) -> None:
        """Decide nothing more by itself, from now on."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def observed(self) -> None:
        """Somebody has fetched the metadata log."""
        if not self.machine.has_listeners:
            self.machine.has_listeners = True
            self._arm()

    def _arm(self) -> None:
        """Wake up for what is due next; a later timer is left as it is."""
        if self._loop is None:
            return
        due_ms = self.machine.next_task_ms()
        if due_ms is None or (self._timer is not None and self._due_ms <= due_ms):
            return
        self._arm_at(due_ms)

    def _arm_at(self, due_ms: int) -> None:
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_ms = due_ms
        delay_ms = max(0, due_ms - self.now_ms())
        self._timer = call_later(self._loop, delay_ms, "controller", self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_ms = self.now_ms()
        late_ms = now_ms - self._due_ms
        if late_ms > LATE_MS:
            self.machine.heartbeats.extend(late_ms)
        self.machine.has_listeners = self._log is not None and self._log.has_observers()
        try:
            # Nobody waits for it; the log hears of its appends and has them forced to disk.
            with self.store.unforced():
                is_more = self.decide(lambda one: one.run_task(now_ms), trigger="timer controller")
        except LogError as error:
            _log.warning("controller can not write its log", cause=str(error))
            self._arm_at(now_ms + RETRY_MS)
            return
        if self._log is not None:
            self._log.look_after(now_ms)
        if is_more:
            self._arm_at(now_ms)
