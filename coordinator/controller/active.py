"""The active controller: carries out the decisions of the controller's state machine.

A decision is appended to the metadata log and installed in one turn of the loop, so that the next
decision sees it. The caller must wait for the disk before it sends the response.

:meth:`ActiveController.start` starts the timers. A standalone broker needs no timers: it only
requests decisions.

Source: ``QuorumController``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from fencepost.cluster.controller.brokers import BrokerRegistrationRequest
from fencepost.cluster.controller.errors import DuplicateBrokerRegistrationError
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.records import MetadataRecord
from fencepost.coordinator.controller.metadata_log_reader import MetadataLogReader, ObserverState
from fencepost.coordinator.controller.store import MetadataStore
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.origin import Origin
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import LogError
from fencepost.logcore.machine import Event

_log = structlog.get_logger(__name__)

T = TypeVar("T")

LATE_MS: Final = 100
"""If a timer fires later than this many milliseconds after its deadline, this process was blocked.
The delay is added to the sessions of all brokers, because their heartbeats waited in the sockets
meanwhile."""

LOGGED_EVENTS: Final = 20
"""The maximum number of events of one decision that are logged individually."""

RETRY_MS: Final = 1_000
"""The delay before a timer's decision is retried if its records could not be written."""

Remember = Callable[[Event, Origin | None, str | None], None]
"""Records an event for the history, with the request's origin and the API that caused it."""


class Decide(Protocol):
    """A function that carries out decisions, such as :meth:`ActiveController.decide`."""

    def __call__(self, decision: Callable[[Controller], ControllerResult[T]], /) -> T:
        """Carry out the decision, and return its answer."""


class ActiveController:
    """``services.active_controller``. Only the event loop that created it may call it.

    ``log`` is the metadata log that brokers read; None for a controller on ZooKeeper.
    If ``own_broker`` is true, this node is also a broker. This broker sends no heartbeats; the
    controller itself extends the broker's session.
    """

    def __init__(
        self,
        store: MetadataStore,
        settings: ControllerSettings,
        clock: Clock,
        log: MetadataLogReader | None,
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
        """Load the newest image into the state machine; extend this node's broker session."""
        machine, node_id = self.machine, self.settings.node_id
        machine.image = self.store.image
        registration = machine.image.brokers.get(node_id)
        if self.has_own_broker and registration is not None:
            machine.heartbeats.register(node_id, registration.epoch, registration.epoch)
            machine.heartbeats.touch_local(node_id, machine.image.offset)

    @property
    def log(self) -> MetadataLogReader:
        """The metadata log that brokers read. Raises RuntimeError for a controller on ZooKeeper."""
        if self._log is None:
            raise RuntimeError("a controller on ZooKeeper has no metadata log")
        return self._log

    def observers(self) -> list[ObserverState]:
        """Return the brokers that read the metadata log."""
        return [] if self._log is None else self._log.observers()

    # --- decisions ---

    def current_machine(self) -> Controller:
        """Return the state machine with the newest image, for reading only."""
        self._sync()
        return self.machine

    def decide(
        self,
        decision: Callable[[Controller], ControllerResult[T]],
        *,
        origin: Origin | None = None,
        trigger: str | None = None,
    ) -> T:
        """Have the state machine decide, carry out the decision, and return the answer.

        The records may not be on disk yet: the response must wait for
        :meth:`MetadataStore.durable`. Raises the errors of the state machine, and LogError if the
        records could not be written. After an error the metadata is unchanged.
        """
        self._sync()
        outcome = decision(self.machine)
        if outcome.records:
            self.store.append(outcome.records)
            image = self.store.image
            base_offset = image.offset - len(outcome.records) + 1
            self.machine.install(image, outcome.records, base_offset, self.now_ms())
            self._sync()
        self._record_events(outcome.events, origin, trigger)
        self._arm()
        return outcome.answer

    def replay_records(self, records: Sequence[MetadataRecord]) -> None:
        """Replay the latest records of another controller; they may require decisions here."""
        image = self.store.image
        self.machine.install(image, records, image.offset - len(records) + 1, self.now_ms())
        self._sync()
        self._arm()

    def _record_events(
        self, events: Sequence[Event], origin: Origin | None, trigger: str | None
    ) -> None:
        """Record the events, and log the first ones: a broker's failure can cause thousands."""
        for event in events:
            self._remember(event, origin, trigger)
        for event in events[:LOGGED_EVENTS]:
            _log.info(event.kind, subject=event.subject, **event.detail)
        if len(events) > LOGGED_EVENTS:
            _log.info("further events not logged", count=len(events) - LOGGED_EVENTS)

    def now_ms(self) -> int:
        """Return the monotonic time in milliseconds, by which sessions expire."""
        return self._clock.monotonic_ms()

    def register_broker(
        self, request: BrokerRegistrationRequest
    ) -> Callable[[Controller], ControllerResult[int | None]]:
        """Return the decision to register a broker. Raises DuplicateBrokerRegistrationError."""
        if self.has_own_broker and request.broker_id == self.settings.node_id:
            raise DuplicateBrokerRegistrationError(
                f"broker {request.broker_id} runs in the controller's own process"
            )
        return lambda controller: controller.register_broker(
            request, self.store.next_offset, self.now_ms()
        )

    # --- by itself ---

    def start(self) -> None:
        """Start the session timers and serve observers.

        Other nodes must be able to connect already.
        """
        self._loop = asyncio.get_running_loop()
        self._sync()
        self.machine.begin(self.now_ms())
        self._sync()
        if not self.has_own_broker and self.settings.node_id in self.store.image.brokers:
            # A registered broker with this node's id has used the same data directory. It has
            # stopped, because this process now holds the lock of the directory.
            self.machine.heartbeats.expire_session(self.settings.node_id)
        if self._log is not None:
            self._log.start()
        self._arm()

    async def stop(self) -> None:
        """Stop all timers, and complete the observers' delayed fetches."""
        self.stop_timers()
        if self._log is not None:
            await self._log.stop()

    def stop_timers(self) -> None:
        """Stop all timers."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def observed(self) -> None:
        """Note that an observer has fetched the metadata log."""
        if not self.machine.has_listeners:
            self.machine.has_listeners = True
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the next task, unless it is set for an earlier time."""
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
            # No request waits for this decision. MetadataLogReader starts the flush when it is
            # notified of the append.
            with self.store.unforced():
                is_more = self.decide(
                    lambda controller: controller.run_task(now_ms), trigger="timer controller"
                )
        except LogError as error:
            _log.warning("controller cannot write its log", cause=str(error))
            self._arm_at(now_ms + RETRY_MS)
            return
        if self._log is not None:
            self._log.maybe_write_snapshot(now_ms)
        if is_more:
            self._arm_at(now_ms)
