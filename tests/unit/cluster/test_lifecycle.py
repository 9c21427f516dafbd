"""A broker's lifecycle: cases of Kafka's ``BrokerLifecycleManagerTest``, and others."""

from __future__ import annotations

import math
from pathlib import Path
from uuid import UUID

import pytest

from fencepost.cluster import lifecycle as rules
from fencepost.cluster.diagram import lifecycle_diagram
from fencepost.cluster.lifecycle import (
    BrokerLifecycleManager,
    BrokerState,
    HeartbeatResponse,
    LifecycleEvent,
    LifecycleIntervals,
    RegisterBroker,
    SendHeartbeat,
)
from fencepost.logcore.machine import InvariantViolation

ME = RegisterBroker(
    broker_id=7,
    cluster_id="c",
    incarnation_id=UUID(int=9),
    listeners=(),
    features={},
    log_dirs=(UUID(int=500),),
    previous_broker_epoch=3,
)


class Life:
    """A lifecycle and its clock."""

    def __init__(self) -> None:
        self.now, self.steps = 1_000.0, list[LifecycleEvent]()
        self.life = BrokerLifecycleManager(ME)
        self.life.start(self.now)

    @property
    def state(self) -> BrokerState:
        return self.life.state

    def sent(self) -> RegisterBroker | SendHeartbeat:
        """Advance the clock to the next request and return the request."""
        found = self.life.next_request(self.now, 11)
        if isinstance(found, float):
            assert found < math.inf, "nothing will ever be sent"
            self.now = found
            found = self.life.next_request(self.now, 11)
        assert not isinstance(found, float)
        return found

    def register(self, epoch: int = 400, error: int = 0) -> Life:
        assert isinstance(self.sent(), RegisterBroker)
        self.steps += self.life.on_registered(error, epoch, self.now)
        return self

    def beat(self, **answer: object) -> SendHeartbeat:
        found = self.sent()
        assert isinstance(found, SendHeartbeat)
        given = HeartbeatResponse(**answer)  # type: ignore[arg-type]
        self.steps += self.life.on_heartbeat(given, self.now)
        return found

    def running(self) -> Life:
        self.register()
        self.beat(is_caught_up=True)
        self.life.ready_to_unfence(self.now)
        self.beat(is_caught_up=True, is_fenced=False)
        assert self.state is BrokerState.RUNNING
        return self


def test_create_and_close() -> None:
    life = BrokerLifecycleManager(ME)
    assert life.state is BrokerState.NOT_RUNNING
    assert life.next_request(0, 0) == math.inf
    assert life.begin_controlled_shutdown(0) == [LifecycleEvent.SHUT_DOWN]
    assert life.state is BrokerState.SHUTTING_DOWN


def test_create_start_and_close() -> None:
    life = Life()
    assert life.state is BrokerState.STARTING
    assert life.life.begin_controlled_shutdown(life.now) == [LifecycleEvent.SHUT_DOWN]
    assert life.life.next_request(life.now, 0) == math.inf


def test_successful_registration() -> None:
    life = Life()
    assert life.sent() == ME
    assert life.life.on_registered(0, 400, life.now) == [LifecycleEvent.REGISTERED]
    assert life.life.broker_epoch == 400
    first = life.beat()
    assert first == SendHeartbeat(
        7, 400, 11, want_fence=True, want_shut_down=False, cordoned_log_dirs=None
    )


def test_broker_runs_after_catch_up_recovery_and_unfencing() -> None:
    life = Life().register()
    began = life.now
    life.beat()
    life.beat()
    assert life.now - began == rules.CATCH_UP_INTERVAL_MS
    life.beat(is_caught_up=True)
    assert life.state is BrokerState.RECOVERY
    assert life.beat(is_caught_up=True, is_fenced=True).cordoned_log_dirs == ()
    # Log recovery may take long; the broker sends heartbeats meanwhile.
    assert life.state is BrokerState.RECOVERY
    life.life.ready_to_unfence(life.now)
    at = life.now
    assert not life.beat(is_caught_up=True, is_fenced=False).want_fence
    assert life.now == at, "being ready is told at once"
    assert life.steps == [
        LifecycleEvent.REGISTERED,
        LifecycleEvent.CAUGHT_UP,
        LifecycleEvent.UNFENCED,
    ]
    life.beat(is_fenced=False)
    assert life.now - at == LifecycleIntervals().heartbeat_ms


def test_broker_ready_before_catch_up_is_unfenced_after_it() -> None:
    life = Life().register()
    life.life.ready_to_unfence(life.now)
    life.beat(is_caught_up=True)
    life.beat(is_caught_up=True, is_fenced=False)
    assert life.state is BrokerState.RUNNING


def test_registration_timeout() -> None:
    life = Life()
    ends = life.now + LifecycleIntervals().initial_registration_ms
    assert life.life.deadline_ms() == ends
    life.register(error=101)  # DUPLICATE_BROKER_REGISTRATION: the former session is still valid
    assert life.life.on_time(ends - 1) == []
    assert life.life.on_time(ends) == [LifecycleEvent.NOT_REGISTERED]
    assert life.state is BrokerState.SHUTTING_DOWN


def test_successful_registration_has_no_timeout() -> None:
    assert Life().register().life.deadline_ms() == math.inf


@pytest.mark.parametrize("error", [101, 104, 119, 35, 41])
def test_refused_registration_is_retried_by_the_same_incarnation(error: int) -> None:
    life = Life()
    began = life.now
    life.register(error=error)
    assert life.sent() == ME
    assert life.now - began == LifecycleIntervals().heartbeat_ms


def test_failed_registration_request_is_retried_soon() -> None:
    """Controllers that start at the same time must not delay a broker's registration for long."""
    life = Life()
    assert life.sent() == ME
    began = life.now
    life.life.on_failure(life.now)
    assert life.sent() == ME
    assert life.now - began == rules.RETRY_INTERVAL_MS


def test_failed_heartbeat_is_retried_after_the_heartbeat_interval() -> None:
    life = Life().running()
    life.sent()
    at = life.now
    life.life.on_failure(life.now)
    assert isinstance(life.sent(), SendHeartbeat)
    assert life.now - at == LifecycleIntervals().heartbeat_ms


def test_state_change_during_a_heartbeat_is_sent_at_once_after_it() -> None:
    life = Life().register()
    life.beat(is_caught_up=True)
    life.sent()
    life.life.ready_to_unfence(life.now)
    assert life.life.next_request(life.now + 99_999, 11) == math.inf
    life.life.on_heartbeat(HeartbeatResponse(is_caught_up=True), life.now)
    at = life.now
    assert not life.beat().want_fence  # type: ignore[union-attr]
    assert life.now == at


def test_state_change_during_failed_heartbeat_waits_for_the_interval() -> None:
    life = Life().register()
    life.beat(is_caught_up=True)
    life.sent()
    life.life.ready_to_unfence(life.now)
    life.life.on_failure(life.now)
    at = life.now
    assert not life.sent().want_fence  # type: ignore[union-attr]
    assert life.now - at == LifecycleIntervals().heartbeat_ms


def test_fenced_broker_keeps_running_and_requests_unfencing() -> None:
    """The broker lost contact to the controller for a while: it keeps serving and is unfenced."""
    life = Life().running()
    life.beat(is_fenced=True)
    assert (life.state, life.life.is_fenced) == (BrokerState.RUNNING, True)
    assert not life.beat(is_fenced=False).want_fence
    assert life.steps[-2:] == [LifecycleEvent.FENCED, LifecycleEvent.UNFENCED]


def test_stale_broker_epoch_stops_a_running_broker() -> None:
    life = Life().running()
    life.beat(error=rules.STALE_BROKER_EPOCH)
    assert life.steps[-1] is LifecycleEvent.EPOCH_LOST
    assert life.steps[-1] in rules.FATAL
    assert life.life.next_request(life.now + 99_999, 11) == math.inf


def test_stale_broker_epoch_of_starting_broker_is_replaced_by_registration() -> None:
    life = Life().register()
    life.beat(error=rules.STALE_BROKER_EPOCH)
    life.register(epoch=900)
    assert life.life.broker_epoch == 900


def test_controlled_shutdown() -> None:
    """KAFKA-13858: heartbeats continue until the controller lets the broker shut down."""
    life = Life().running()
    assert life.life.begin_controlled_shutdown(life.now) == []
    at = life.now
    assert life.beat(is_fenced=False).want_shut_down
    assert life.now == at
    assert life.beat(is_fenced=False).want_shut_down
    assert life.now == at + rules.SHUTDOWN_INTERVAL_MS
    life.beat(is_fenced=False, should_shut_down=True)
    assert life.now == at + rules.SHUTDOWN_INTERVAL_MS + LifecycleIntervals().heartbeat_ms
    assert life.steps[-1] is LifecycleEvent.SHUT_DOWN
    assert life.state is BrokerState.SHUTTING_DOWN
    assert life.life.next_request(life.now + 99_999, 11) == math.inf, "each would write a record"


def test_controlled_shutdown_without_controller_ends_with_the_session() -> None:
    life = Life().running()
    life.life.begin_controlled_shutdown(life.now)
    life.beat(is_fenced=False)
    ends = life.now + LifecycleIntervals().session_ms
    assert life.life.deadline_ms() == ends
    assert life.life.on_failure(ends - 1) == life.life.on_time(ends - 1) == []
    assert life.life.on_time(ends) == [LifecycleEvent.SHUT_DOWN]


def test_controlled_shutdown_that_is_never_granted_ends_after_its_timeout() -> None:
    life = Life().running()
    begun = life.now
    life.life.begin_controlled_shutdown(begun)
    ends = begun + LifecycleIntervals().controlled_shutdown_ms
    while life.now < ends - LifecycleIntervals().heartbeat_ms:
        life.beat(is_fenced=False)
    assert life.life.on_time(ends - 1) == []
    assert life.life.on_time(ends) == [LifecycleEvent.SHUT_DOWN]


def test_stale_broker_epoch_ends_controlled_shutdown() -> None:
    life = Life().running()
    life.life.begin_controlled_shutdown(life.now)
    life.beat(error=rules.STALE_BROKER_EPOCH)
    assert life.steps[-1] is LifecycleEvent.SHUT_DOWN


def test_amended_registration_keeps_previous_broker_epoch() -> None:
    life = Life().running()
    rack = RegisterBroker(7, "c", UUID(int=9), (), {}, (UUID(int=500),), rack="r2")
    life.life.register_again(rack, life.now)
    sent = life.sent()
    assert isinstance(sent, RegisterBroker)
    assert (sent.rack, sent.previous_broker_epoch) == ("r2", 3)
    assert life.state is BrokerState.RUNNING


def test_broker_registers_again_at_first_level_with_directories() -> None:
    """At level 3.7-IV2 the broker registers again, unless its registration lists directories."""
    life = Life().running()
    assert not life.life.observed(rules.FIRST_WITH_DIRECTORIES - 1, (), life.now)
    assert life.life.observed(rules.FIRST_WITH_DIRECTORIES, (), life.now)
    assert isinstance(life.sent(), RegisterBroker)
    life.life.on_registered(0, 400, life.now)
    assert not life.life.observed(rules.FIRST_WITH_DIRECTORIES, (), life.now)
    assert isinstance(life.sent(), SendHeartbeat)
    known = Life().running()
    assert not known.life.observed(30, (UUID(int=500),), known.now)


def test_illegal_broker_state_transition_raises() -> None:
    life = Life()
    with pytest.raises(InvariantViolation, match="STARTING becomes STARTING"):
        life.life.start(0)


def test_readme_diagram_matches_the_lifecycle_table() -> None:
    readme = Path(rules.__file__).with_name("README.md").read_text()
    assert f"```mermaid\n{lifecycle_diagram()}\n```" in readme
