"""The states of a broker in a cluster, from its registration to its controlled shutdown.

The caller sends :meth:`BrokerLifecycleManager.next_request`, one request at a time, passes in each
response, and acts on the returned :class:`LifecycleEvent`s. It also reports that the broker has
recovered its logs (:meth:`BrokerLifecycleManager.ready_to_unfence`), and that the broker must stop
(:meth:`BrokerLifecycleManager.begin_controlled_shutdown`).

Source: ``BrokerLifecycleManager``, ``BrokerState``; KIP-631, KIP-841.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from fencepost.cluster.records import BrokerEndpoint
from fencepost.logcore.machine import InvariantViolation

STALE_BROKER_EPOCH: Final = 77

CATCH_UP_INTERVAL_MS: Final = 10
"""The heartbeat interval while the broker catches up with the metadata."""

RETRY_INTERVAL_MS: Final = 100
"""The pause before the retry of a registration that did not reach a controller."""

SHUTDOWN_INTERVAL_MS: Final = 50
"""The pause between the first and the second heartbeat that ask for a controlled shutdown."""

UNKNOWN_EPOCH: Final = -1

FIRST_WITH_DIRECTORIES: Final = 17
"""The first metadata.version whose registrations list log directories (3.7-IV2)."""


class BrokerState(IntEnum):
    """The state of a broker; the numbers are the values of Kafka's metric ``BrokerState``."""

    NOT_RUNNING = 0
    STARTING = 1
    RECOVERY = 2
    RUNNING = 3
    PENDING_CONTROLLED_SHUTDOWN = 6
    SHUTTING_DOWN = 7


TRANSITIONS: Final[Mapping[tuple[BrokerState, BrokerState], str]] = MappingProxyType(
    {
        (BrokerState.NOT_RUNNING, BrokerState.STARTING): "it begins to register",
        (BrokerState.STARTING, BrokerState.RECOVERY): "it has caught up with the metadata",
        (BrokerState.RECOVERY, BrokerState.RUNNING): "it has been unfenced",
        (BrokerState.RUNNING, BrokerState.PENDING_CONTROLLED_SHUTDOWN): "it is to stop",
        (BrokerState.PENDING_CONTROLLED_SHUTDOWN, BrokerState.SHUTTING_DOWN): (
            "the controller lets it go, its time is up, or its epoch is lost"
        ),
        (BrokerState.NOT_RUNNING, BrokerState.SHUTTING_DOWN): "it is to stop",
        (BrokerState.STARTING, BrokerState.SHUTTING_DOWN): (
            "it is to stop, or could not register in time"
        ),
        (BrokerState.RECOVERY, BrokerState.SHUTTING_DOWN): "it is to stop",
        (BrokerState.RUNNING, BrokerState.SHUTTING_DOWN): "its epoch is lost",
    }
)
"""Every change of state, and its cause."""


class LifecycleEvent(StrEnum):
    """An event that the broker must act on."""

    REGISTERED = "the controller has registered the broker"
    CAUGHT_UP = "the broker has caught up with the metadata"
    UNFENCED = "the broker has been unfenced"
    FENCED = "the controller has fenced the broker"
    SHUT_DOWN = "the broker no longer leads a partition, and may stop"
    NOT_REGISTERED = "the broker could not register in time"
    EPOCH_LOST = "another broker has registered with this node id"


FATAL: Final = frozenset({LifecycleEvent.NOT_REGISTERED, LifecycleEvent.EPOCH_LOST})
"""Events after which the broker must stop."""


@dataclass(frozen=True, slots=True)
class RegisterBroker:
    """A broker's registration (BrokerRegistration)."""

    broker_id: int
    cluster_id: str
    incarnation_id: UUID
    """A new random id for each process."""
    listeners: tuple[BrokerEndpoint, ...]
    features: Mapping[str, tuple[int, int]]
    """The lowest and highest supported level of each feature."""
    log_dirs: tuple[UUID, ...]
    rack: str | None = None
    previous_broker_epoch: int = UNKNOWN_EPOCH
    """The epoch of the previous run if that run shut down cleanly, otherwise -1 (KIP-966)."""


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """A broker's periodic heartbeat (BrokerHeartbeat)."""

    broker_id: int
    broker_epoch: int
    current_metadata_offset: int
    want_fence: bool
    want_shut_down: bool
    cordoned_log_dirs: tuple[UUID, ...] | None
    """None until the broker has caught up with the metadata (KIP-1066): the controller then leaves
    the cordoned directories unchanged."""


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """The controller's answer to a heartbeat."""

    error: int = 0
    is_caught_up: bool = False
    is_fenced: bool = True
    should_shut_down: bool = False


@dataclass(frozen=True, slots=True)
class LifecycleIntervals:
    """Intervals and timeouts in milliseconds."""

    heartbeat_ms: int = 2_000
    """``broker.heartbeat.interval.ms``."""
    session_ms: int = 9_000
    """``broker.session.timeout.ms``; the controller uses its own setting."""
    initial_registration_ms: int = 60_000
    """``initial.broker.registration.timeout.ms``."""
    controlled_shutdown_ms: int = 300_000
    """After this time the broker stops without the controller's consent."""


class BrokerLifecycleManager:
    """The state of one broker, and its requests to the controller."""

    def __init__(
        self, registration: RegisterBroker, intervals: LifecycleIntervals = LifecycleIntervals()
    ) -> None:
        self._registration, self._intervals = registration, intervals
        self.state = BrokerState.NOT_RUNNING
        self.broker_epoch = UNKNOWN_EPOCH
        self.is_fenced = True
        """Whether the broker is fenced according to the last heartbeat's answer; True before the
        first answer."""
        self._registered = False
        self._metadata_version = 0
        self._ready_to_unfence = False
        self._in_flight = False
        self._due_ms = math.inf
        self._at_once = False
        """Whether the next request must be sent without a pause once the request in flight is
        answered."""
        self._register_until_ms = math.inf
        self._shut_down_until_ms = math.inf
        self._session_until_ms = math.inf
        """When a broker that is shutting down stops waiting for a silent controller."""
        self._shutdown_requested = False

    @property
    def is_over(self) -> bool:
        """Whether the broker sends no further request to the controller."""
        return self.state is BrokerState.SHUTTING_DOWN

    # --- events of the broker ---

    def start(self, now_ms: float) -> None:
        """Begin to register."""
        self._transition_to(BrokerState.STARTING)
        self._register_until_ms = now_ms + self._intervals.initial_registration_ms
        self._due_ms = now_ms

    def ready_to_unfence(self, now_ms: float) -> None:
        """Ask to be unfenced: the logs are recovered, and the first image is applied."""
        self._ready_to_unfence = True
        self._schedule(now_ms, 0)

    def register_again(self, registration: RegisterBroker, now_ms: float) -> None:
        """Register again with changed values; the same incarnation keeps its broker epoch."""
        epoch = self._registration.previous_broker_epoch
        self._registration = replace(registration, previous_broker_epoch=epoch)
        self._registered = False
        self._schedule(now_ms, 0)

    def observed(self, metadata_version: int, log_dirs: Sequence[UUID], now_ms: float) -> bool:
        """Check the registration in the metadata; return whether the broker registers again.

        The controller of an upgraded cluster does not know the brokers' directories, and elects no
        replica whose directory is unknown (kafka: ``BrokerRegistrationTracker``).
        """
        rose = metadata_version > self._metadata_version
        self._metadata_version = metadata_version
        if not (rose and self._registered) or log_dirs or metadata_version < FIRST_WITH_DIRECTORIES:
            return False
        self.register_again(self._registration, now_ms)
        return True

    def begin_controlled_shutdown(self, now_ms: float) -> list[LifecycleEvent]:
        """Ask the controller for a controlled shutdown; stop at once unless RUNNING."""
        if self.state in (BrokerState.PENDING_CONTROLLED_SHUTDOWN, BrokerState.SHUTTING_DOWN):
            return []
        if self.state is not BrokerState.RUNNING:
            return self._shut_down(LifecycleEvent.SHUT_DOWN)
        self._transition_to(BrokerState.PENDING_CONTROLLED_SHUTDOWN)
        self._shut_down_until_ms = now_ms + self._intervals.controlled_shutdown_ms
        # After a session timeout without an answer, the broker is fenced and has no leadership to
        # hand over. Kafka's broker waits for the whole timeout.
        self._session_until_ms = now_ms + self._intervals.session_ms
        self._schedule(now_ms, 0)
        return []

    # --- requests ---

    def next_request(
        self, now_ms: float, applied_offset: int
    ) -> RegisterBroker | SendHeartbeat | float:
        """Return the request to send now, or the time at which to call again.

        ``applied_offset`` is the offset of the last metadata record that the broker has applied.
        """
        if self._in_flight or self.is_over:
            return math.inf
        if now_ms < self._due_ms:
            return self._due_ms
        self._in_flight, self._due_ms = True, math.inf
        if not self._registered:
            return self._registration
        return SendHeartbeat(
            self._registration.broker_id,
            self.broker_epoch,
            applied_offset,
            want_fence=not self._ready_to_unfence,
            want_shut_down=self.state is BrokerState.PENDING_CONTROLLED_SHUTDOWN,
            cordoned_log_dirs=None if self.state is BrokerState.STARTING else (),
        )

    def deadline_ms(self) -> float:
        """Return the time at which :meth:`on_time` must be called."""
        if self.is_over:
            return math.inf
        return min(self._register_until_ms, self._shut_down_until_ms, self._session_until_ms)

    def on_time(self, now_ms: float) -> list[LifecycleEvent]:
        """Stop the broker if one of its timeouts has passed."""
        if self.is_over:
            return []
        if now_ms >= min(self._shut_down_until_ms, self._session_until_ms):
            return self._shut_down(LifecycleEvent.SHUT_DOWN)
        if now_ms >= self._register_until_ms:
            return self._shut_down(LifecycleEvent.NOT_REGISTERED)
        return []

    # --- answers ---

    def on_failure(self, now_ms: float) -> list[LifecycleEvent]:
        """Schedule a retry of a request that failed or got no answer.

        The pause after a failed registration is short, because an unregistered broker serves no
        client.
        """
        interval_ms = self._intervals.heartbeat_ms
        if not self._registered:
            interval_ms = min(RETRY_INTERVAL_MS, interval_ms)
        return self._request_done(now_ms, interval_ms)

    def _request_done(self, now_ms: float, interval_ms: int) -> list[LifecycleEvent]:
        self._in_flight = self._at_once = False
        self._schedule(now_ms, interval_ms)
        return []

    def on_registered(self, error: int, broker_epoch: int, now_ms: float) -> list[LifecycleEvent]:
        """Handle the answer to a registration."""
        if error:
            return self._request_done(now_ms, self._intervals.heartbeat_ms)
        self._in_flight = False
        self._registered = True
        self._register_until_ms = math.inf
        self.broker_epoch = broker_epoch
        self._schedule(now_ms, 0)
        return [LifecycleEvent.REGISTERED]

    def on_heartbeat(self, answer: HeartbeatResponse, now_ms: float) -> list[LifecycleEvent]:
        """Handle the answer to a heartbeat."""
        if answer.error == STALE_BROKER_EPOCH:
            return self._lose_epoch(now_ms)
        if answer.error:
            return self.on_failure(now_ms)
        self._in_flight = False
        steps = []
        if answer.is_fenced and not self.is_fenced and not answer.should_shut_down:
            steps.append(LifecycleEvent.FENCED)
        unfenced = self.is_fenced and not answer.is_fenced
        self.is_fenced = answer.is_fenced
        interval_ms = self._intervals.heartbeat_ms
        match self.state:
            case BrokerState.STARTING:
                if answer.is_caught_up:
                    self._transition_to(BrokerState.RECOVERY)
                    steps.append(LifecycleEvent.CAUGHT_UP)
                interval_ms = CATCH_UP_INTERVAL_MS
            case BrokerState.RECOVERY if not answer.is_fenced and self._ready_to_unfence:
                self._transition_to(BrokerState.RUNNING)
                steps.append(LifecycleEvent.UNFENCED)
            case BrokerState.RUNNING if unfenced:
                steps.append(LifecycleEvent.UNFENCED)
            case BrokerState.PENDING_CONTROLLED_SHUTDOWN:
                if answer.should_shut_down:
                    return steps + self._shut_down(LifecycleEvent.SHUT_DOWN)
                self._session_until_ms = now_ms + self._intervals.session_ms
                if not self._shutdown_requested:
                    interval_ms = SHUTDOWN_INTERVAL_MS
                self._shutdown_requested = True
        self._schedule(now_ms, interval_ms)
        return steps

    def _lose_epoch(self, now_ms: float) -> list[LifecycleEvent]:
        """Handle STALE_BROKER_EPOCH: register again while starting, otherwise stop.

        A running broker stops because another process has registered its id. Kafka's broker keeps
        sending heartbeats, which cannot succeed.
        """
        if self.state is BrokerState.RUNNING:
            return self._shut_down(LifecycleEvent.EPOCH_LOST)
        if self.state is BrokerState.PENDING_CONTROLLED_SHUTDOWN:
            return self._shut_down(LifecycleEvent.SHUT_DOWN)
        self._registered = False
        return self.on_failure(now_ms)

    def _shut_down(self, why: LifecycleEvent) -> list[LifecycleEvent]:
        self._transition_to(BrokerState.SHUTTING_DOWN)
        return [why]

    def _schedule(self, now_ms: float, delay_ms: int) -> None:
        if self._in_flight:
            self._at_once |= delay_ms == 0
            return
        if self._at_once:
            delay_ms, self._at_once = 0, False
        self._due_ms = now_ms + delay_ms

    def _transition_to(self, state: BrokerState) -> None:
        if (self.state, state) not in TRANSITIONS:
            raise InvariantViolation(f"a broker that is {self.state.name} becomes {state.name}")
        self.state = state
