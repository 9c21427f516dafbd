"""Registration, heartbeats, fencing and controlled shutdown of brokers.

Source: ``ClusterControlManager``, ``ReplicationControlManager.processBrokerHeartbeat``; KIP-631,
KIP-841, KIP-858, KIP-966.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.cluster.controller.errors import (
    BrokerIdNotRegisteredError,
    ControllerIdNotRegisteredError,
    DuplicateBrokerRegistrationError,
    InconsistentClusterIdError,
    InvalidRegistrationError,
    InvalidRequestError,
    UnsupportedFeatureLevelError,
)
from fencepost.cluster.controller.heartbeats import (
    BrokerControlState,
    BrokerHeartbeatManager,
    BrokerHeartbeatRequest,
    RegistrationChange,
    state_of,
    step,
)
from fencepost.cluster.controller.outcome import ControllerResult, PartitionChange, events_of
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import BrokerRegistration, TopicImage
from fencepost.cluster.records import (
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    ControllerEndpoint,
    ControllerFeature,
    MetadataRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    UnregisterBrokerRecord,
    UnregisterControllerRecord,
)
from fencepost.logcore.machine import Event
from fencepost.logcore.values import dataclass

_FENCE, _UNFENCE = 1, -1
FIRST_WITH_CONTROLLER_UNREGISTRATION: Final = 33
"""The first ``metadata.version`` with UnregisterControllerRecord: 4.4-IV2."""
MAX_CHANGES: Final = 1_000
"""The maximum number of partitions that one decision about a broker changes, because other requests
wait during a decision. An operation on more partitions takes several decisions; the last of them
registers, fences or unregisters the broker. Apache Kafka's controller has no such limit."""
_RESERVED_DIRECTORIES: Final = 100
"""Directory ids below this number are reserved (kafka: ``DirectoryId``)."""


@dataclass(frozen=True, slots=True)
class BrokerRegistrationRequest:
    """A broker's registration request (kafka: ``BrokerRegistrationRequest``)."""

    broker_id: int
    cluster_id: str
    incarnation_id: UUID
    end_points: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...]
    log_dirs: tuple[UUID, ...]
    rack: str | None = None
    previous_broker_epoch: int = -1
    """The epoch of the previous run if that run shut down cleanly, so that no record was lost."""
    is_migrating_zk_broker: bool = False


@dataclass(frozen=True, slots=True)
class ControllerRegistrationRequest:
    """A controller's registration request (kafka: ``ControllerRegistrationRequest``)."""

    controller_id: int
    incarnation_id: UUID
    zk_migration_ready: bool
    end_points: tuple[ControllerEndpoint, ...]
    features: tuple[ControllerFeature, ...]


@dataclass(frozen=True, slots=True)
class BrokerHeartbeatReply:
    """The answer to a heartbeat."""

    is_caught_up: bool
    is_fenced: bool
    should_shut_down: bool
    is_more: bool = False
    """Whether the caller must decide on the same heartbeat again, because more changes remain."""


# --- registration ---


def register(
    view: ControllerView,
    heartbeats: BrokerHeartbeatManager,
    request: BrokerRegistrationRequest,
    next_offset: int,
    now_ms: int,
) -> ControllerResult[int | None]:
    """Register a broker; the answer is its epoch, or None if the caller must call again.

    ``next_offset`` is the offset of the first record that will be written, and becomes the epoch of
    a new registration. Raises InconsistentClusterIdError, DuplicateBrokerRegistrationError,
    BrokerIdNotRegisteredError, InvalidRegistrationError, UnsupportedFeatureLevelError.
    """
    if request.cluster_id != view.settings.cluster_id:
        raise InconsistentClusterIdError(
            f"Expected cluster ID {view.settings.cluster_id}, but got cluster ID "
            f"{request.cluster_id}"
        )
    broker_id = request.broker_id
    existing = view.image.brokers.get(broker_id)
    is_same = existing is not None and existing.incarnation_id == request.incarnation_id
    if not is_same and heartbeats.has_valid_session(broker_id, now_ms):
        raise DuplicateBrokerRegistrationError(
            "Another broker is registered with that broker id. If the broker was recently "
            "restarted this should self-resolve once the heartbeat manager expires the broker's "
            "session."
        )
    if request.is_migrating_zk_broker:
        raise BrokerIdNotRegisteredError("Controller does not support registering ZK brokers.")
    _check_directories(view, request)
    _check_features(view, request)

    record = RegisterBrokerRecord(
        broker_id=broker_id,
        incarnation_id=request.incarnation_id,
        broker_epoch=next_offset,
        end_points=request.end_points,
        features=request.features,
        rack=request.rack,
        log_dirs=request.log_dirs,
    )
    if existing is not None and is_same:
        record = replace(
            record,
            broker_epoch=existing.epoch,
            fenced=existing.fenced,
            in_controlled_shutdown=existing.in_controlled_shutdown,
        )
        return ControllerResult(record.broker_epoch, (record,))
    is_clean = existing is not None and existing.epoch == request.previous_broker_epoch
    changes = _shut_down(view, broker_id, is_clean=is_clean)
    if len(changes) > MAX_CHANGES:
        ahead = _first_of(changes)
        return ControllerResult(None, ahead.records, events=ahead.events)
    event = Event(
        "broker-registered",
        f"broker {broker_id}",
        {
            "broker_epoch": record.broker_epoch,
            "incarnation_id": str(request.incarnation_id),
            "after": "clean shutdown" if is_clean else "unclean shutdown or first start",
        },
    )
    records: tuple[MetadataRecord, ...] = (*(change.record for change in changes), record)
    return ControllerResult(record.broker_epoch, records, events=(event, *events_of(changes)))


def _check_directories(view: ControllerView, request: BrokerRegistrationRequest) -> None:
    directories = request.log_dirs
    if not directories:
        raise InvalidRegistrationError("No directories specified in request")
    if any(directory.int < _RESERVED_DIRECTORIES for directory in directories):
        raise InvalidRegistrationError("Reserved directory ID in request")
    if len(set(directories)) != len(directories):
        raise InvalidRegistrationError("Duplicate directory ID in request")
    for registered in view.image.brokers.values():
        if registered.broker_id != request.broker_id:
            for shared in set(directories) & set(registered.directories):
                raise InvalidRegistrationError(
                    f"Broker {registered.broker_id} is already registered with directory {shared}"
                )


def _check_features(view: ControllerView, request: BrokerRegistrationRequest) -> None:
    """Raise unless the broker supports each finalized level; an omitted feature counts as 0-0."""
    ranges = {
        feature.name: (feature.min_supported_version, feature.max_supported_version)
        for feature in request.features
    }
    if METADATA_VERSION not in ranges:
        raise InvalidRegistrationError("Request features do not contain 'metadata.version'")
    for name in dict.fromkeys((*ranges, *view.image.features)):
        low, high = ranges.get(name, (0, 0))
        finalized = view.image.features.get(name, 0)
        if not low <= finalized <= high:
            raise UnsupportedFeatureLevelError(
                f"Unable to register because the broker does not support finalized version "
                f"{finalized} of {name}. The broker wants a version between {low} and {high}, "
                "inclusive."
            )


def register_controller(request: ControllerRegistrationRequest) -> ControllerResult[None]:
    """Record a controller's listeners and supported features."""
    record = RegisterControllerRecord(
        request.controller_id,
        request.incarnation_id,
        request.zk_migration_ready,
        request.end_points,
        request.features,
    )
    return ControllerResult(None, (record,))


def unregister_controller(view: ControllerView, controller_id: int) -> ControllerResult[None]:
    """Remove a controller's registration.

    Raises InvalidRequestError, UnsupportedFeatureLevelError, ControllerIdNotRegisteredError.
    """
    if controller_id == view.settings.node_id:
        raise InvalidRequestError("Controller cannot unregister itself while it is active.")
    if view.image.features.get(METADATA_VERSION, 0) < FIRST_WITH_CONTROLLER_UNREGISTRATION:
        raise UnsupportedFeatureLevelError(
            "The current MetadataVersion is too old to support controller unregistration."
        )
    if controller_id not in view.image.controllers:
        raise ControllerIdNotRegisteredError(
            f"Controller ID {controller_id} is not currently registered."
        )
    return ControllerResult(None, (UnregisterControllerRecord(controller_id),))


# --- heartbeats ---


def heartbeat(
    view: ControllerView,
    heartbeats: BrokerHeartbeatManager,
    request: BrokerHeartbeatRequest,
    now_ms: int,
) -> ControllerResult[BrokerHeartbeatReply]:
    """Process a heartbeat; raises StaleBrokerEpochError."""
    broker = view.registered(request.broker_id, request.broker_epoch)
    leads = request.want_shut_down and any(
        partition.leader == broker.broker_id for _, _, partition in view.partitions()
    )
    following = heartbeats.next_state(view.image, request, leads=leads)
    outcome = _directories_offline(view, broker, request.offline_log_dirs)
    if outcome.records:
        # Only record the offline directories now: the next heartbeat decides on the broker's state.
        following = state_of(broker)
    else:
        now = state_of(broker)
        if now is following is BrokerControlState.CONTROLLED_SHUTDOWN:
            outcome = _continue_shutdown(view, heartbeats, request)
        else:
            outcome = _STEPS[step(now, following)](view, heartbeats, request)
        if outcome.answer and following is not BrokerControlState.CONTROLLED_SHUTDOWN:
            following = now  # partitions remain, so the broker is not fenced yet
    cordoned = _directories_cordoned(broker, request.cordoned_log_dirs)
    heartbeats.touch(request.broker_id, request.current_metadata_offset, now_ms)
    is_fenced = following in (BrokerControlState.FENCED, BrokerControlState.SHUTDOWN_NOW)
    reply = BrokerHeartbeatReply(
        is_caught_up=heartbeats.is_caught_up(request),
        is_fenced=is_fenced,
        should_shut_down=following is BrokerControlState.SHUTDOWN_NOW,
        is_more=outcome.answer,
    )
    return ControllerResult(reply, (*outcome.records, *cordoned), events=outcome.events)


def _do_nothing(
    _view: ControllerView, _heartbeats: BrokerHeartbeatManager, _request: BrokerHeartbeatRequest
) -> ControllerResult[bool]:
    return ControllerResult(False)


def _fence_on_request(
    view: ControllerView, _: BrokerHeartbeatManager, request: BrokerHeartbeatRequest
) -> ControllerResult[bool]:
    wish = "it shuts down" if request.want_shut_down else "it wants to be fenced"
    return fence(view, view.image.brokers[request.broker_id], wish)


def _unfence(
    view: ControllerView, heartbeats: BrokerHeartbeatManager, request: BrokerHeartbeatRequest
) -> ControllerResult[bool]:
    cause = "it has caught up with the record of its registration"
    return unfence(view, heartbeats, view.image.brokers[request.broker_id], cause)


def unfence(
    view: ControllerView, heartbeats: BrokerHeartbeatManager, broker: BrokerRegistration, why: str
) -> ControllerResult[bool]:
    """Unfence a broker, and elect leaders for its leaderless partitions."""
    leaderless = [
        (topic, index)
        for topic, index, partition in view.partitions()
        if partition.leader < 0 and broker.broker_id in partition.replicas
    ]
    cause = f"broker {broker.broker_id} was unfenced"
    heartbeats.elect_soon(leaderless[MAX_CHANGES:], cause)
    changes = view.leader_and_isr_updates(leaderless[:MAX_CHANGES], cause, added=broker.broker_id)
    record = BrokerRegistrationChangeRecord(broker.broker_id, broker.epoch, fenced=_UNFENCE)
    event = Event(
        "broker-unfenced",
        f"broker {broker.broker_id}",
        {"broker_epoch": broker.epoch, "cause": why},
    )
    return _result_of(changes, before=(record,), events=(event,))


def _begin_shutdown(
    view: ControllerView, _: BrokerHeartbeatManager, request: BrokerHeartbeatRequest
) -> ControllerResult[bool]:
    return begin_shutdown(view, view.image.brokers[request.broker_id])


def begin_shutdown(view: ControllerView, broker: BrokerRegistration) -> ControllerResult[bool]:
    """Move leadership away from a broker and remove it from every ISR.

    The answer says whether partitions may remain; if so, the caller must call again. The broker may
    stop once every active broker has applied the last record of the shutdown.
    """
    cause = f"broker {broker.broker_id} is in controlled shutdown"
    inside = _in_isr(view, broker.broker_id)
    if view.settings.needs_leader_epoch_bump:
        inside = (key for key in inside if _has_another(view, *key, broker.broker_id))
    changes = view.leader_and_isr_updates(
        inside, cause, removed=broker.broker_id, at_most=MAX_CHANGES
    )
    record = BrokerRegistrationChangeRecord(
        broker.broker_id, broker.epoch, in_controlled_shutdown=1
    )
    event = Event(
        "broker-in-controlled-shutdown",
        f"broker {broker.broker_id}",
        {"broker_epoch": broker.epoch, "partitions": len(changes)},
    )
    done = _result_of(changes, before=(record,), events=(event,))
    return replace(done, answer=len(changes) == MAX_CHANGES)


def _has_another(view: ControllerView, topic: TopicImage, index: int, broker_id: int) -> bool:
    """Whether the ISR has another active broker. If not, the leader stays (ZooKeeper)."""
    isr = topic.partitions[index].isr
    return any(replica != broker_id and view.is_active(replica) for replica in isr)


def led_by(view: ControllerView, broker_id: int) -> list[tuple[str, int]]:
    """Return the partitions that a broker leads and that have other replicas.

    Source: ``ControllerContext.partitionLeadersOnBroker``.
    """
    return [
        (topic.name, index)
        for topic, index, partition in view.partitions()
        if partition.leader == broker_id and len(partition.replicas) > 1
    ]


def _continue_shutdown(
    view: ControllerView, heartbeats: BrokerHeartbeatManager, request: BrokerHeartbeatRequest
) -> ControllerResult[bool]:
    """Continue a controlled shutdown with the partitions whose ISR still contains the broker."""
    partition = next(_in_isr(view, request.broker_id), None)
    return (
        ControllerResult(False) if partition is None else _begin_shutdown(view, heartbeats, request)
    )


def _directories_offline(
    view: ControllerView, broker: BrokerRegistration, offline: tuple[UUID, ...]
) -> ControllerResult[bool]:
    failed = set(offline) & set(broker.directories)
    if not failed:
        return ControllerResult(False)
    inside = (
        (topic, index)
        for topic, index in _in_isr(view, broker.broker_id)
        if topic.partitions[index].directory_of(broker.broker_id) in failed
    )
    cause = f"a log directory of broker {broker.broker_id} is offline"
    changes = view.leader_and_isr_updates(
        inside, cause, removed=broker.broker_id, at_most=MAX_CHANGES + 1
    )
    if len(changes) > MAX_CHANGES:
        return _first_of(changes)
    online = tuple(directory for directory in broker.directories if directory not in failed)
    record = BrokerRegistrationChangeRecord(broker.broker_id, broker.epoch, log_dirs=online)
    event = Event(
        "log-directories-offline",
        f"broker {broker.broker_id}",
        {"offline": sorted(map(str, failed)), "online": sorted(map(str, online))},
    )
    return _result_of(changes, after=(record,), events=(event,))


def _directories_cordoned(
    broker: BrokerRegistration, cordoned: tuple[UUID, ...] | None
) -> tuple[MetadataRecord, ...]:
    current = broker.cordoned_directories
    if cordoned is None or (current is not None and set(current) == set(cordoned)):
        return ()
    return (
        BrokerRegistrationChangeRecord(broker.broker_id, broker.epoch, cordoned_log_dirs=cordoned),
    )


_STEPS: Final[
    Mapping[
        RegistrationChange,
        Callable[
            [ControllerView, BrokerHeartbeatManager, BrokerHeartbeatRequest], ControllerResult[bool]
        ],
    ]
] = {
    RegistrationChange.NOTHING: _do_nothing,
    RegistrationChange.FENCE: _fence_on_request,
    RegistrationChange.UNFENCE: _unfence,
    RegistrationChange.BEGIN_SHUTDOWN: _begin_shutdown,
}


# --- brokers discovered in ZooKeeper ---


def register_discovered(
    view: ControllerView,
    heartbeats: BrokerHeartbeatManager,
    record: RegisterBrokerRecord,
    location: str,
) -> ControllerResult[bool]:
    """Handle a broker found in ZooKeeper; the answer says whether the caller must call again."""
    registered = view.image.brokers.get(record.broker_id)
    # A new epoch means that the broker's previous session has ended, even if no controller noticed
    # it: fence the broker first (KAFKA-7235).
    if registered is not None and registered.epoch != record.broker_epoch and not registered.fenced:
        return replace(fence(view, registered, f"it is {location} in a later epoch"), answer=True)
    if registered is None or registered.epoch != record.broker_epoch:
        return ControllerResult(True, (replace(record, fenced=True),))
    if registered.fenced:
        return unfence(view, heartbeats, registered, f"it is {location}")
    if registered.listeners != {end_point.name: end_point for end_point in record.end_points}:
        shuts_down = registered.in_controlled_shutdown
        return ControllerResult(
            False, (replace(record, fenced=False, in_controlled_shutdown=shuts_down),)
        )
    return ControllerResult(False)


def remove_unregistered(view: ControllerView, broker_id: int, cause: str) -> ControllerResult[bool]:
    """Remove an unregistered broker from every ISR.

    The answer says whether the caller must call again.
    """
    changes = view.leader_and_isr_updates(
        _in_isr(view, broker_id), cause, removed=broker_id, at_most=MAX_CHANGES
    )
    return replace(_result_of(changes, events=()), answer=len(changes) == MAX_CHANGES)


# --- fencing and unregistration ---


def fence(
    view: ControllerView, broker: BrokerRegistration, cause: str, *, forgets: bool = False
) -> ControllerResult[bool]:
    """Remove a broker from every ISR, elect other leaders for its partitions, and fence it.

    The last record fences the broker, or with ``forgets`` unregisters it. The answer says whether
    partitions remain; if so, the caller must call again.
    """
    broker_id = broker.broker_id
    changes = view.leader_and_isr_updates(
        _in_isr(view, broker_id),
        f"broker {broker_id} was fenced",
        removed=broker_id,
        at_most=MAX_CHANGES + 1,
    )
    if len(changes) > MAX_CHANGES:
        return _first_of(changes)
    record: MetadataRecord = BrokerRegistrationChangeRecord(broker_id, broker.epoch, fenced=_FENCE)
    if forgets:
        record = UnregisterBrokerRecord(broker_id, broker.epoch)
    event = Event(
        "broker-fenced",
        f"broker {broker_id}",
        {"broker_epoch": broker.epoch, "cause": cause, "partitions": len(changes)},
    )
    return _result_of(changes, after=(record,), events=(event,))


def expire(
    view: ControllerView, heartbeats: BrokerHeartbeatManager, now_ms: int
) -> ControllerResult[bool]:
    """Fence the broker whose session expired first.

    Sessions expire one at a time, so that each decision sees the result of the previous one. The
    answer says whether the caller must call again at once.
    """
    broker_id = heartbeats.expired(now_ms)
    if broker_id is None:
        return ControllerResult(False)
    broker = view.image.brokers[broker_id]
    if not broker.fenced:
        outcome = fence(view, broker, "its session has timed out")
        if not outcome.answer:
            heartbeats.end_session(broker_id)
        return replace(outcome, answer=True)
    heartbeats.end_session(broker_id)
    return ControllerResult(True)


def elect_leaderless(
    view: ControllerView, heartbeats: BrokerHeartbeatManager
) -> ControllerResult[bool]:
    """Elect leaders for queued leaderless partitions; the answer says whether any were queued."""
    queued, cause = heartbeats.take_elections(MAX_CHANGES)
    leaderless = [
        (topic, index)
        for topic_id, index in queued
        if (topic := view.image.topics_by_id.get(topic_id)) is not None
        and topic.partitions[index].leader < 0
    ]
    changes = view.leader_and_isr_updates(leaderless, cause)
    return replace(_result_of(changes, events=()), answer=bool(queued))


def unregister(view: ControllerView, broker_id: int) -> ControllerResult[bool]:
    """Unregister a broker; the answer says whether the caller must call again.

    The broker also leaves the eligible leader replicas, because its logs may never return. Raises
    BrokerIdNotRegisteredError.
    """
    broker = view.image.brokers.get(broker_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(f"Broker ID {broker_id} is not currently registered")
    changes = view.leader_and_isr_updates(
        _in_isr(view, broker_id, with_elr=True),
        f"broker {broker_id} was unregistered",
        removed=broker_id,
        is_unclean_shutdown=True,
        at_most=MAX_CHANGES + 1,
    )
    if len(changes) > MAX_CHANGES:
        return _first_of(changes)
    record = UnregisterBrokerRecord(broker_id, broker.epoch)
    event = Event("broker-unregistered", f"broker {broker_id}", {"broker_epoch": broker.epoch})
    return _result_of(changes, after=(record,), events=(event,))


def _shut_down(view: ControllerView, broker_id: int, *, is_clean: bool) -> list[PartitionChange]:
    """Return the changes after a broker's previous process ended (``handleBrokerShutdown``)."""
    is_unclean = view.elr_enabled and not is_clean
    return view.leader_and_isr_updates(
        _in_isr(view, broker_id, with_elr=is_unclean),
        f"broker {broker_id} registered again after "
        + ("a clean shutdown" if is_clean else "an unclean shutdown"),
        removed=broker_id,
        is_unclean_shutdown=is_unclean,
        at_most=MAX_CHANGES + 1,
    )


def _in_isr(
    view: ControllerView, broker_id: int, *, with_elr: bool = False
) -> Iterator[tuple[TopicImage, int]]:
    """Yield the partitions whose ISR contains the broker.

    Without ELRs, an ISR keeps its last member, so leaderless partitions whose ISR is only this
    broker are omitted. ``with_elr`` adds partitions of which the broker is an eligible leader
    replica.
    """
    keeps_last = not (view.elr_enabled or with_elr)
    for topic, index, partition in view.partitions():
        if broker_id in partition.isr:
            if len(partition.isr) > 1 or partition.leader >= 0 or not keeps_last:
                yield topic, index
        elif with_elr and broker_id in partition.elr:
            yield topic, index


def _first_of(changes: Sequence[PartitionChange]) -> ControllerResult[bool]:
    """Return the first :data:`MAX_CHANGES` changes; the answer says that more changes remain."""
    return replace(_result_of(changes[:MAX_CHANGES], events=()), answer=True)


def _result_of(
    changes: Sequence[PartitionChange],
    *,
    before: tuple[MetadataRecord, ...] = (),
    after: tuple[MetadataRecord, ...] = (),
    events: tuple[Event, ...],
) -> ControllerResult[bool]:
    records = (*before, *(change.record for change in changes), *after)
    return ControllerResult(False, records, events=(*events, *events_of(changes)))
