"""Registration, heartbeats, fencing and unregistration of brokers.

Kafka's classes are ClusterControlManager and BrokerHeartbeatManager.
"""

from __future__ import annotations

from itertools import product
from uuid import UUID

import pytest

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.cluster.controller.brokers import ControllerRegistrationRequest
from fencepost.cluster.controller.errors import (
    BrokerIdNotRegisteredError,
    ControllerIdNotRegisteredError,
    DuplicateBrokerRegistrationError,
    InconsistentClusterIdError,
    InvalidRegistrationError,
    InvalidRequestError,
    StaleBrokerEpochError,
    UnsupportedFeatureLevelError,
)
from fencepost.cluster.controller.heartbeats import (
    TRANSITIONS,
    BrokerControlState,
    BrokerHeartbeatRequest,
    step,
)
from fencepost.cluster.controller.isr import DirectoryAssignment
from fencepost.cluster.records import (
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    FeatureLevelRecord,
    NoOpRecord,
    PartitionChangeRecord,
    RegisterBrokerRecord,
    UnregisterControllerRecord,
)
from fencepost.logcore.machine import DomainError, InvariantViolation
from tests.unit.cluster.controller.cluster_driver import FEATURES, SETTINGS, Cluster, directory

SESSION_MS = SETTINGS.session_timeout_ms


# --- registration ---


def test_registration_with_mismatched_cluster_id_is_refused() -> None:
    with pytest.raises(InconsistentClusterIdError):
        Cluster(()).register(0, cluster_id="another")


def test_registration_gives_the_offset_of_its_record_as_epoch() -> None:
    cluster = Cluster(())
    end = cluster.end
    assert cluster.register(0) == end
    assert cluster.image.brokers[0].fenced
    assert isinstance(cluster.log[end], RegisterBrokerRecord)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"log_dirs": ()}, InvalidRegistrationError),
        ({"log_dirs": (UUID(int=99),)}, InvalidRegistrationError),
        ({"log_dirs": (UUID(int=100),)}, None),
        ({"log_dirs": (directory(1), directory(1))}, InvalidRegistrationError),
        ({"log_dirs": (directory(0),)}, InvalidRegistrationError),
        ({"log_dirs": (directory(1), directory(1, 1))}, None),
        ({"features": ()}, InvalidRegistrationError),
        ({"features": (FEATURES[0],)}, UnsupportedFeatureLevelError),
        ({"features": (BrokerFeature("metadata.version", 7, 29), FEATURES[1])},
         UnsupportedFeatureLevelError),
        ({"features": (*FEATURES, BrokerFeature("of.the.future", 0, 3))}, None),
        ({"features": (*FEATURES, BrokerFeature("of.the.future", 1, 3))},
         UnsupportedFeatureLevelError),
        ({"is_migrating_zk_broker": True}, BrokerIdNotRegisteredError),
    ],
)  # fmt: skip
def test_registration_with_invalid_fields_is_refused(
    changes: dict[str, object], error: type[DomainError] | None
) -> None:
    cluster = Cluster([0], elr=True)
    if error is None:
        cluster.register(1, **changes)
    else:
        with pytest.raises(error):
            cluster.register(1, **changes)
    assert (1 in cluster.image.brokers) == (error is None)


def test_new_incarnation_is_refused_until_session_timeout() -> None:
    cluster = Cluster([0])
    first = cluster.epoch(0)
    cluster.now_ms += SESSION_MS
    with pytest.raises(DuplicateBrokerRegistrationError):
        cluster.register(0)
    cluster.now_ms += 1
    assert cluster.register(0) > first
    with pytest.raises(StaleBrokerEpochError):
        cluster.do(
            cluster.controller.heartbeat(
                BrokerHeartbeatRequest(0, first, cluster.end), cluster.now_ms
            )
        )


def test_new_incarnation_before_first_heartbeat_is_registered_at_once() -> None:
    cluster = Cluster(())
    cluster.register(0)
    cluster.register(0)


def test_granted_controlled_shutdown_does_not_end_the_session() -> None:
    cluster = Cluster([0])
    assert cluster.beat(0, want_shut_down=True).should_shut_down
    with pytest.raises(DuplicateBrokerRegistrationError):
        cluster.register(0)


def test_repeated_registration_of_an_incarnation_keeps_epoch_and_fencing() -> None:
    cluster = Cluster(())
    request = cluster.registration(0)
    register = cluster.controller.register_broker
    epoch = cluster.do(register(request, cluster.end, cluster.now_ms))
    cluster.beat(0)
    assert cluster.do(register(request, cluster.end, cluster.now_ms)) == epoch
    assert not cluster.image.brokers[0].fenced
    # The broker has not caught up until it has applied the newer record.
    assert not cluster.beat(0, offset=epoch).is_caught_up


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("elr", [True, False])
def test_new_incarnation_leaves_isr_and_after_unclean_shutdown_elr(elr: bool, clean: bool) -> None:
    """A new incarnation leaves every ISR, and every ELR unless the last shutdown was clean."""
    cluster = Cluster(elr=elr, min_isr=2)
    cluster.create("a", [0, 1, 2])
    cluster.alter_isr("a", [0, 1])
    cluster.pass_time(SESSION_MS + 1, beating=[0, 2])
    assert cluster.partition("a").isr == (0,)
    assert cluster.partition("a").elr == ((1,) if elr else ())
    former = cluster.epoch(1)
    cluster.register(1, previous_broker_epoch=former if clean else -1)
    assert cluster.partition("a").elr == ((1,) if elr and clean else ())


def test_restart_within_the_session_removes_broker_from_isr() -> None:
    """KIP-903: the disk of the new incarnation may be empty."""
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    cluster.reboot(0)
    assert cluster.partition("a").isr == (1, 2)
    assert cluster.partition("a").leader == 1
    assert cluster.causes("leader-elected", "a-0") == [
        "broker 0 registered again after an unclean shutdown"
    ]


# --- the state table ---


@pytest.mark.parametrize("pair", list(product(BrokerControlState, repeat=2)))
def test_unlisted_broker_state_transition_raises(
    pair: tuple[BrokerControlState, BrokerControlState],
) -> None:
    if pair in TRANSITIONS:
        step(*pair)
    else:
        with pytest.raises(InvariantViolation):
            step(*pair)


def test_fenced_broker_is_unfenced_when_it_has_applied_its_registration() -> None:
    cluster = Cluster(())
    epoch = cluster.register(0)
    behind = cluster.beat(0, offset=epoch - 1)
    assert (behind.is_caught_up, behind.is_fenced) == (False, True)
    waiting = cluster.beat(0, offset=epoch, want_fence=True)
    assert (waiting.is_caught_up, waiting.is_fenced) == (True, True)
    ready = cluster.beat(0, offset=epoch)
    assert (ready.is_caught_up, ready.is_fenced, ready.should_shut_down) == (True, False, False)
    assert cluster.log[-1] == BrokerRegistrationChangeRecord(0, epoch, fenced=-1)


def test_heartbeat_without_state_change_writes_no_record() -> None:
    cluster = Cluster([0])
    end = cluster.end
    cluster.beat(0)
    cluster.fence(0)
    cluster.fence(0)
    cluster.beat(0, want_shut_down=True)
    assert cluster.log[end:] == [BrokerRegistrationChangeRecord(0, cluster.epoch(0), fenced=1)]


def test_heartbeat_with_stale_broker_epoch_is_refused() -> None:
    cluster = Cluster([0])
    for broker_id, epoch in ((0, cluster.epoch(0) + 1), (7, 0)):
        with pytest.raises(StaleBrokerEpochError):
            cluster.controller.heartbeat(
                BrokerHeartbeatRequest(broker_id, epoch, 0), cluster.now_ms
            )


# --- sessions ---


def test_only_brokers_past_their_session_timeout_are_fenced() -> None:
    cluster = Cluster()
    cluster.now_ms += 5
    cluster.beat(1)
    assert cluster.controller.next_task_ms() == cluster.now_ms - 5 + SESSION_MS + 1
    cluster.now_ms += SESSION_MS - 4
    cluster.beat(2)
    cluster.do(cluster.controller.run_task(cluster.now_ms))
    assert [broker.fenced for broker in cluster.image.brokers.values()] == [True, False, False]
    assert cluster.causes("broker-fenced", "broker 0") == ["its session has timed out"]


@pytest.mark.parametrize("elr", [True, False])
def test_kafka_13173_brokers_fenced_together_leave_all_isrs(elr: bool) -> None:
    """KAFKA-13173: two sessions expire; the second fencing sees the ISRs that the first left."""
    cluster = Cluster(range(5), elr=elr)
    cluster.create("foo", [0, 1, 2], [1, 2, 3], [2, 3, 0], [0, 2, 1])
    cluster.pass_time(SESSION_MS + 1, beating=[1, 3, 4])
    assert [cluster.partition("foo", index).isr for index in range(4)] == [
        (1,), (1, 3), (3,), (1,)
    ]  # fmt: skip
    assert [cluster.partition("foo", index).leader for index in range(4)] == [1, 1, 3, 1]


def test_new_controller_gives_each_broker_a_full_session() -> None:
    cluster = Cluster()
    cluster.now_ms += SESSION_MS
    cluster.restart()
    cluster.now_ms += SESSION_MS
    assert not cluster.controller.run_task(cluster.now_ms).records
    cluster.now_ms += 1
    assert cluster.controller.run_task(cluster.now_ms).records


def test_pause_of_the_controller_does_not_expire_sessions() -> None:
    cluster = Cluster()
    cluster.now_ms += 60_000
    cluster.controller.heartbeats.extend(60_000)
    assert not cluster.controller.run_task(cluster.now_ms).records


def test_without_brokers_the_only_task_is_the_no_op_record() -> None:
    cluster = Cluster(())
    assert cluster.controller.next_task_ms() is None
    cluster.controller.has_listeners = True
    assert cluster.controller.next_task_ms() == cluster.now_ms + 500
    end = cluster.end
    cluster.pass_time(1_000)
    assert cluster.log[end:] == [NoOpRecord()]


# --- controlled shutdown ---


def test_controlled_shutdown_moves_leaders_and_waits_for_other_brokers() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1], [1, 0])
    end = cluster.end
    reply = cluster.beat(0, want_shut_down=True)
    assert (reply.is_fenced, reply.should_shut_down) == (False, False)
    assert cluster.log[end:] == [
        BrokerRegistrationChangeRecord(0, cluster.epoch(0), in_controlled_shutdown=1),
        PartitionChangeRecord(cluster.image.topics["a"].topic_id, 0, isr=(1,), leader=1),
        PartitionChangeRecord(cluster.image.topics["a"].topic_id, 1, isr=(1,)),
    ]
    # The other brokers have not applied the controlled shutdown's records yet.
    assert not cluster.beat(0, want_shut_down=True).should_shut_down
    cluster.beat(1)
    assert not cluster.beat(0, want_shut_down=True).should_shut_down
    cluster.beat(2)
    assert cluster.beat(0, want_shut_down=True).should_shut_down
    assert cluster.image.brokers[0].fenced


def test_controlled_shutdown_of_broker_without_leaderships_is_granted_at_once() -> None:
    cluster = Cluster()
    cluster.create("a", [1, 0])
    assert cluster.beat(0, want_shut_down=True).should_shut_down
    assert cluster.partition("a").isr == (1,)


@pytest.mark.parametrize("elr", [True, False])
def test_controlled_shutdown_of_last_isr_member_leaves_no_leader(elr: bool) -> None:
    cluster = Cluster([101], elr=elr)
    cluster.create("a", [101])
    cluster.beat(101, want_shut_down=True)
    state = cluster.partition("a")
    assert state.leader == -1
    assert state.isr == (() if elr else (101,))
    assert state.elr == state.last_known_elr == ((101,) if elr else ())
    assert cluster.beat(101, want_shut_down=True).should_shut_down
    # After a clean shutdown the broker leads again.
    cluster.reboot(101, clean=True)
    cluster.unfence(101)
    assert (cluster.partition("a").leader, cluster.partition("a").isr) == (101, (101,))
    assert cluster.partition("a").elr == cluster.partition("a").last_known_elr == ()


def test_controlled_shutdown_continues_after_controller_failover() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1])
    cluster.beat(0, want_shut_down=True)
    cluster.restart()
    assert not cluster.beat(0, want_shut_down=True).should_shut_down
    cluster.unfence(1, 2)
    assert cluster.beat(0, want_shut_down=True).should_shut_down


def test_broker_in_controlled_shutdown_is_fenced_after_session_timeout() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1])
    cluster.beat(0, want_shut_down=True)
    cluster.pass_time(SESSION_MS + 1, beating=[1, 2])
    assert cluster.image.brokers[0].fenced


# --- unregistration, directories ---


def test_unregister_broker_removes_it_from_isr_and_elr() -> None:
    cluster = Cluster(elr=True, min_isr=2)
    cluster.create("a", [0, 1])
    cluster.create("b", [1, 2])
    cluster.fence(1)
    assert cluster.partition("a").elr == (1,)
    cluster.do(cluster.controller.unregister_broker(1))
    assert 1 not in cluster.image.brokers
    assert cluster.partition("a").elr == ()
    assert cluster.partition("b").leader == 2
    with pytest.raises(BrokerIdNotRegisteredError):
        cluster.controller.unregister_broker(1)


def test_unregister_controller_removes_its_registration() -> None:
    cluster = Cluster()
    registration = ControllerRegistrationRequest(7, UUID(int=5), False, (), ())
    cluster.do(cluster.controller.register_controller(registration))
    assert list(cluster.image.controllers) == [7]
    cluster.append([FeatureLevelRecord(METADATA_VERSION, 33)])
    with pytest.raises(ControllerIdNotRegisteredError, match="Controller ID 8 is not currently"):
        cluster.controller.unregister_controller(8)
    cluster.do(cluster.controller.unregister_controller(7))
    assert cluster.log[-1] == UnregisterControllerRecord(7)
    assert cluster.image.controllers == {}
    with pytest.raises(ControllerIdNotRegisteredError):
        cluster.controller.unregister_controller(7)


@pytest.mark.parametrize("level", [30, 32])
def test_unregister_controller_needs_metadata_version_33(level: int) -> None:
    cluster = Cluster()
    cluster.append([FeatureLevelRecord(METADATA_VERSION, level)])
    with pytest.raises(UnsupportedFeatureLevelError, match="too old to support controller"):
        cluster.controller.unregister_controller(7)


@pytest.mark.parametrize("level", [30, 33])
def test_active_controller_does_not_unregister_itself(level: int) -> None:
    cluster = Cluster()
    cluster.append([FeatureLevelRecord(METADATA_VERSION, level)])
    with pytest.raises(InvalidRequestError, match="cannot unregister itself while it is active"):
        cluster.controller.unregister_controller(SETTINGS.node_id)


def test_offline_log_dir_moves_leadership_of_its_replicas() -> None:
    cluster = Cluster([1, 2])
    dirs = (directory(0), directory(0, 1))
    cluster.register(0, log_dirs=dirs)
    cluster.beat(0)
    cluster.create("a", [0, 1], [0, 2])
    topic_id = cluster.image.topics["a"].topic_id
    cluster.do(
        cluster.controller.assign_replicas_to_dirs(
            0,
            cluster.epoch(0),
            [DirectoryAssignment(dirs[index], topic_id, index) for index in (0, 1)],
        )
    )
    cluster.beat(0, offline_log_dirs=(dirs[0],))
    assert [cluster.partition("a", index).leader for index in (0, 1)] == [1, 0]
    assert cluster.image.brokers[0].directories == (dirs[1],)
    # Every heartbeat repeats the offline directory, but the controller writes only one record.
    end = cluster.end
    cluster.beat(0, offline_log_dirs=(dirs[0],))
    assert cluster.end == end


def test_unfencing_waits_until_offline_log_dir_is_recorded() -> None:
    """The broker must not be elected for replicas in a directory that it reports as offline."""
    cluster = Cluster([1])
    dirs = (directory(0), directory(0, 1))
    cluster.register(0, log_dirs=dirs)
    assert cluster.beat(0, offline_log_dirs=(dirs[0],)).is_fenced
    assert not cluster.beat(0, offline_log_dirs=(dirs[0],)).is_fenced


def test_cordoned_log_dirs_are_recorded_once_per_change() -> None:
    cluster = Cluster([0])
    end = cluster.end
    for cordoned in (None, (), (), (directory(0),)):
        cluster.beat(0, cordoned_log_dirs=cordoned)
    assert [record.cordoned_log_dirs for record in cluster.log[end:]] == [(), (directory(0),)]  # type: ignore[union-attr]
