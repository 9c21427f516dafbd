"""The brokers' sessions and heartbeats: soft state that the controller loses when it restarts.

Source: ``BrokerHeartbeatManager``, ``BrokerHeartbeatTracker``, ``BrokerControlState``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final
from uuid import UUID

from fencepost.cluster.image import BrokerRegistration, MetadataImage, TopicImage
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass


class BrokerControlState(Enum):
    """A broker's state at the controller (kafka: ``BrokerControlState``)."""

    FENCED = "FENCED"
    UNFENCED = "UNFENCED"
    CONTROLLED_SHUTDOWN = "CONTROLLED_SHUTDOWN"
    SHUTDOWN_NOW = "SHUTDOWN_NOW"


class RegistrationChange(Enum):
    """The change that must be written when a broker's state changes."""

    NOTHING = "nothing"
    UNFENCE = "unfence"
    FENCE = "fence"
    BEGIN_SHUTDOWN = "begin controlled shutdown"


_S = BrokerControlState

TRANSITIONS: Final[Mapping[tuple[BrokerControlState, BrokerControlState], RegistrationChange]] = {
    (_S.FENCED, _S.FENCED): RegistrationChange.NOTHING,
    (_S.FENCED, _S.UNFENCED): RegistrationChange.UNFENCE,
    (_S.FENCED, _S.SHUTDOWN_NOW): RegistrationChange.NOTHING,
    (_S.UNFENCED, _S.UNFENCED): RegistrationChange.NOTHING,
    (_S.UNFENCED, _S.FENCED): RegistrationChange.FENCE,
    (_S.UNFENCED, _S.CONTROLLED_SHUTDOWN): RegistrationChange.BEGIN_SHUTDOWN,
    (_S.UNFENCED, _S.SHUTDOWN_NOW): RegistrationChange.FENCE,
    (_S.CONTROLLED_SHUTDOWN, _S.CONTROLLED_SHUTDOWN): RegistrationChange.NOTHING,
    (_S.CONTROLLED_SHUTDOWN, _S.FENCED): RegistrationChange.FENCE,
    (_S.CONTROLLED_SHUTDOWN, _S.SHUTDOWN_NOW): RegistrationChange.FENCE,
}
"""Every allowed transition. A broker in SHUTDOWN_NOW that sends another heartbeat counts as
FENCED."""


def step(current: BrokerControlState, following: BrokerControlState) -> RegistrationChange:
    """Return the change to write for a transition.

    Raises InvariantViolation for a transition that is not in the table.
    """
    try:
        return TRANSITIONS[current, following]
    except KeyError:
        raise InvariantViolation(f"a broker cannot go from {current} to {following}") from None


def state_of(broker: BrokerRegistration) -> BrokerControlState:
    """Return a broker's state according to its registration."""
    if broker.fenced:
        return BrokerControlState.FENCED
    return _S.CONTROLLED_SHUTDOWN if broker.in_controlled_shutdown else _S.UNFENCED


@dataclass(frozen=True, slots=True)
class BrokerHeartbeatRequest:
    """A broker's heartbeat (kafka: ``BrokerHeartbeatRequest``)."""

    broker_id: int
    broker_epoch: int
    current_metadata_offset: int
    """The offset of the last metadata record that the broker has applied."""
    want_fence: bool = False
    want_shut_down: bool = False
    offline_log_dirs: tuple[UUID, ...] = ()
    cordoned_log_dirs: tuple[UUID, ...] | None = None
    """Directories that take no new partitions (KIP-1066); None leaves them unchanged."""


@dataclass(slots=True)
class BrokerHeartbeatState:
    """The soft state of one registration."""

    epoch: int
    registration_offset: int
    last_contact_ms: int | None = None
    """The time of the last heartbeat; None before the first heartbeat, and after the session has
    ended."""
    metadata_offset: int = -1
    shutdown_offset: int = -1
    """The offset of the last record of the controlled shutdown. Every active broker must apply that
    record before this broker may stop."""


class BrokerHeartbeatManager:
    """The brokers' sessions, their metadata offsets, and the states they may enter next.

    The state is built from the image when the controller becomes active. Every unfenced broker then
    has a whole session timeout to send its first heartbeat.
    """

    def __init__(self, image: MetadataImage, session_timeout_ms: int, now_ms: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._contacts: dict[int, BrokerHeartbeatState] = {}
        self._elections: list[tuple[UUID, int]] = []
        self._elections_cause = ""
        self.restart(image, now_ms)

    def restart(self, image: MetadataImage, now_ms: int) -> None:
        """Reset the soft state to the content of the image."""
        self._contacts.clear()
        self._elections.clear()
        for broker in image.brokers.values():
            self.register(broker.broker_id, broker.epoch, image.offset)
            if not broker.fenced:
                self._contacts[broker.broker_id].last_contact_ms = now_ms

    def register(self, broker_id: int, epoch: int, offset: int) -> None:
        """Note a RegisterBrokerRecord at ``offset``. A new broker epoch ends the session."""
        contact = self._contacts.get(broker_id)
        if contact is None or contact.epoch != epoch:
            self._contacts[broker_id] = BrokerHeartbeatState(epoch, offset)
        else:
            contact.registration_offset = offset

    def unregister(self, broker_id: int) -> None:
        """Forget an unregistered broker."""
        self._contacts.pop(broker_id, None)

    def touch(self, broker_id: int, metadata_offset: int, now_ms: int) -> None:
        """Note a heartbeat from a broker with its registered epoch."""
        contact = self._contacts[broker_id]
        contact.last_contact_ms = now_ms
        contact.metadata_offset = metadata_offset

    def touch_local(self, broker_id: int, metadata_offset: int) -> None:
        """Note the metadata offset of this process's own broker, which needs no session."""
        contact = self._contacts[broker_id]
        contact.last_contact_ms, contact.metadata_offset = None, metadata_offset

    def fence(self, broker_id: int) -> None:
        """End a fenced broker's controlled shutdown; its next request to shut down is granted."""
        self._contacts[broker_id].shutdown_offset = -1

    def note_shutdown_offset(self, broker_id: int, offset: int) -> None:
        """Note the offset of the last record that a controlled shutdown has written so far."""
        self._contacts[broker_id].shutdown_offset = offset

    def expire_session(self, broker_id: int) -> None:
        """Expire the session of a broker whose process has ended; a new process may register."""
        self._contacts[broker_id].last_contact_ms = -self._session_timeout_ms - 1

    # --- pending elections ---

    @property
    def has_elections(self) -> bool:
        """Whether partitions wait for an election."""
        return bool(self._elections)

    def elect_soon(self, partitions: Iterable[tuple[TopicImage, int]], cause: str) -> None:
        """Queue leaderless partitions that may get a leader; each decision takes some of them."""
        more = [(topic.topic_id, index) for topic, index in partitions]
        if more:
            self._elections += more
            self._elections_cause = cause

    def take_elections(self, count: int) -> tuple[list[tuple[UUID, int]], str]:
        """Remove up to ``count`` partitions from the queue; return them and the cause."""
        partitions, self._elections = self._elections[:count], self._elections[count:]
        return partitions, self._elections_cause

    def has_valid_session(self, broker_id: int, now_ms: int) -> bool:
        """Whether the registered process sent a heartbeat within the session timeout."""
        contact = self._contacts.get(broker_id)
        if contact is None or contact.last_contact_ms is None:
            return False
        return contact.last_contact_ms + self._session_timeout_ms >= now_ms

    def next_expiry_ms(self) -> int | None:
        """Return the first time at which a session may have expired; None without sessions."""
        times = [
            contact.last_contact_ms
            for contact in self._contacts.values()
            if contact.last_contact_ms is not None
        ]
        return min(times) + self._session_timeout_ms + 1 if times else None

    def expired(self, now_ms: int) -> int | None:
        """Return the broker whose session expired first, None if all are valid."""
        stale = [
            (contact.last_contact_ms, broker_id)
            for broker_id, contact in self._contacts.items()
            if contact.last_contact_ms is not None and not self.has_valid_session(broker_id, now_ms)
        ]
        return min(stale)[1] if stale else None

    def end_session(self, broker_id: int) -> None:
        """End a broker's expired session."""
        self._contacts[broker_id].last_contact_ms = None

    def extend(self, lost_ms: int) -> None:
        """Extend every session by ``lost_ms``, during which the controller itself was stopped."""
        for contact in self._contacts.values():
            if contact.last_contact_ms is not None:
                contact.last_contact_ms += lost_ms

    def is_caught_up(self, heartbeat: BrokerHeartbeatRequest) -> bool:
        """Whether the broker has applied the record of its own registration."""
        contact = self._contacts[heartbeat.broker_id]
        return heartbeat.current_metadata_offset >= contact.registration_offset

    def metadata_offset(self, broker_id: int) -> int:
        """Return the offset of the last record that a broker has applied; -1 if it is unknown."""
        contact = self._contacts.get(broker_id)
        return -1 if contact is None else contact.metadata_offset

    def last_contact_ms(self, broker_id: int) -> int | None:
        """Return the time of a broker's last heartbeat; None without a session."""
        contact = self._contacts.get(broker_id)
        return None if contact is None else contact.last_contact_ms

    def _lowest_active_offset(self, image: MetadataImage) -> float:
        return min(
            (
                self.metadata_offset(broker.broker_id)
                for broker in image.brokers.values()
                if broker.is_active
            ),
            default=float("inf"),
        )

    def next_state(
        self, image: MetadataImage, heartbeat: BrokerHeartbeatRequest, *, leads: bool
    ) -> BrokerControlState:
        """Return the state that a heartbeat's sender enters (kafka: ``calculateNextBrokerState``).

        ``leads`` says whether the broker leads any partition.
        """
        broker = image.brokers[heartbeat.broker_id]
        current = state_of(broker)
        if current is _S.FENCED:
            if heartbeat.want_shut_down:
                return _S.SHUTDOWN_NOW
            # A process in controlled shutdown is not unfenced again; a new process may be.
            unfences = not heartbeat.want_fence and not broker.in_controlled_shutdown
            return _S.UNFENCED if unfences and self.is_caught_up(heartbeat) else _S.FENCED
        if current is _S.UNFENCED:
            if heartbeat.want_fence:
                return _S.SHUTDOWN_NOW if heartbeat.want_shut_down else _S.FENCED
            if heartbeat.want_shut_down:
                return _S.CONTROLLED_SHUTDOWN if leads else _S.SHUTDOWN_NOW
            return _S.UNFENCED
        if leads:
            return _S.CONTROLLED_SHUTDOWN
        contact = self._contacts[heartbeat.broker_id]
        if contact.shutdown_offset < 0:
            # The shutdown began under another controller; the image contains its records.
            contact.shutdown_offset = image.offset
        moved = contact.shutdown_offset <= self._lowest_active_offset(image)
        return _S.SHUTDOWN_NOW if moved else _S.CONTROLLED_SHUTDOWN
