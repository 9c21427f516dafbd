"""ISR changes by leaders: the AlterPartition cases of ReplicationControlManager."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from fencepost.cluster.controller.errors import (
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    NotAReplicaError,
    NotControllerError,
    StaleBrokerEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.isr import DirectoryAssignment
from fencepost.cluster.image import PartitionRegistration
from fencepost.logcore.errors import FencedLeaderEpochError
from fencepost.logcore.machine import DomainError
from tests.unit.cluster.controller.cluster_driver import Cluster, directory


def shrunk() -> Cluster:
    """Return a cluster with partition a-0 on brokers 0, 1, 2, led by 0, whose ISR shrank once."""
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    assert isinstance(cluster.alter_isr("a", [0, 1]), PartitionRegistration)
    return cluster


def test_isr_shrink_and_expansion_keep_the_leader_epoch() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    answer = cluster.alter_isr("a", [1, 0])
    assert answer == cluster.partition("a")
    assert isinstance(answer, PartitionRegistration)
    assert (answer.isr, answer.leader, answer.leader_epoch, answer.partition_epoch) == (
        (1, 0), 0, 0, 1,
    )  # fmt: skip
    cluster.alter_isr("a", [0, 1, 2])
    # The leader epoch stays (KAFKA-15021).
    assert (cluster.partition("a").leader_epoch, cluster.partition("a").partition_epoch) == (0, 2)
    assert cluster.causes("isr-changed", "a-0") == ["AlterPartition of the leader, broker 0"] * 2


def test_alter_partition_with_same_isr_writes_nothing() -> None:
    cluster = shrunk()
    end = cluster.end
    assert cluster.alter_isr("a", [0, 1]) == cluster.partition("a")
    assert cluster.end == end


@pytest.mark.parametrize(
    ("sender", "changes", "error"),
    [
        # The requests are in the order of the checks: each request would fail the later checks too.
        (1, {"topic_id": UUID(int=9), "index": 7, "leader_epoch": 9}, UnknownTopicIdError),
        (1, {"index": 7, "leader_epoch": 9}, UnknownTopicOrPartitionError),
        (1, {"leader_epoch": 1, "partition_epoch": 0}, NotControllerError),
        (1, {"partition_epoch": 9, "leader_epoch": -1}, NotControllerError),
        (1, {"leader_epoch": -1, "partition_epoch": 0}, FencedLeaderEpochError),
        (1, {"partition_epoch": 0}, InvalidRequestError),
        (0, {"partition_epoch": 0, "new_isr": ()}, InvalidUpdateVersionError),
        (0, {"new_isr": ()}, InvalidRequestError),
        (0, {"new_isr": ((0, -1), (0, -1))}, InvalidRequestError),
        (0, {"new_isr": ((0, -1), (3, -1))}, InvalidRequestError),
        (0, {"new_isr": ((1, -1), (2, -1))}, InvalidRequestError),
        (0, {"new_isr": ((0, -1), (1, -1)), "leader_recovery_state": 1}, InvalidRequestError),
        (0, {"new_isr": ((0, -1),), "leader_recovery_state": 1}, InvalidRequestError),
        (0, {"new_isr": ((0, -1),), "leader_recovery_state": 2}, InvalidRequestError),
        (0, {"new_isr": ((0, -1), (1, 77))}, IneligibleReplicaError),
        (0, {"new_isr": ((0, -1), (1, -1), (2, -1))}, None),
    ],
)
def test_alter_partition_with_invalid_fields_is_refused(
    sender: int, changes: dict[str, object], error: type[DomainError] | None
) -> None:
    cluster = shrunk()
    end = cluster.end
    request = replace(cluster.isr_request("a", [0, 1, 2]), **changes)  # type: ignore[arg-type]
    (answer,) = cluster.alter(sender, request)
    assert isinstance(answer, error or PartitionRegistration)
    assert (cluster.end == end) == (error is not None)


def test_alter_partition_with_stale_broker_epoch_is_refused() -> None:
    cluster = shrunk()
    with pytest.raises(StaleBrokerEpochError):
        cluster.controller.alter_partition(0, cluster.epoch(0) - 1, [])


@pytest.mark.parametrize("how", ["fenced", "shutting down", "unregistered", "another incarnation"])
def test_alter_partition_should_reject_brokers_that_are_not_eligible(how: str) -> None:
    """KIP-841, KIP-903: a broker that has restarted since its last fetch is also not eligible."""
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    cluster.create("b", [1, 2])
    cluster.alter_isr("a", [0, 2])
    request = cluster.isr_request("a", [0, 1, 2])
    if how == "fenced":
        cluster.fence(1)
    elif how == "shutting down":
        assert not cluster.beat(1, want_shut_down=True).should_shut_down
    elif how == "unregistered":
        cluster.do(cluster.controller.unregister_broker(1))
    else:
        cluster.reboot(1)
        cluster.unfence(1)
    (answer,) = cluster.alter(0, request)
    assert isinstance(answer, IneligibleReplicaError)
    assert cluster.partition("a").isr == (0, 2)
    if how in ("fenced", "another incarnation"):
        cluster.unfence(1)
        assert isinstance(cluster.alter_isr("a", [0, 2, 1]), PartitionRegistration)


def test_kafka_12686_repeated_alter_partition_is_refused() -> None:
    """KAFKA-12686: after a lost response the leader must wait for the metadata, not retry."""
    cluster = shrunk()
    request = cluster.isr_request("a", [0, 1, 2])
    cluster.alter(0, request)
    assert isinstance(cluster.alter(0, request)[0], InvalidUpdateVersionError)


def test_alter_partition_from_before_an_election_is_fenced() -> None:
    cluster = shrunk()
    request = cluster.isr_request("a", [0])
    cluster.fence(0)
    cluster.unfence(0)
    assert isinstance(cluster.alter(0, request)[0], FencedLeaderEpochError)


def test_alter_partition_has_a_result_for_each_partition() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1], [1, 0])
    answers = cluster.alter(0, cluster.isr_request("a", [0], 0), cluster.isr_request("a", [0], 1))
    assert [type(answer) for answer in answers] == [PartitionRegistration, InvalidRequestError]


def test_alter_partition_by_recovered_leader_resets_leader_recovery_state() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1], unclean_leader_election_enable="true")
    cluster.alter_isr("a", [0])
    cluster.fence(0)
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.leader_recovery_state) == (1, (1,), 1)
    cluster.unfence(0)
    still = replace(cluster.isr_request("a", [1, 0]), leader_recovery_state=1)
    assert isinstance(cluster.alter(1, still)[0], InvalidRequestError)
    assert isinstance(cluster.alter_isr("a", [1, 0]), PartitionRegistration)
    assert cluster.partition("a").leader_recovery_state == 0


def test_isr_change_that_ends_reassignment_returns_new_leader_elected() -> None:
    cluster = Cluster()
    cluster.create("a", [0])
    cluster.reassign("a", [1])
    answer = cluster.alter_isr("a", [0, 1])
    assert isinstance(answer, NewLeaderElectedError)
    state = cluster.partition("a")
    assert (state.replicas, state.isr, state.leader, state.leader_epoch) == ((1,), (1,), 1, 1)


# --- directories ---


def test_assign_replicas_to_offline_dir_moves_the_leader() -> None:
    cluster = Cluster(range(4))
    topic_id = cluster.create("a", [0, 1, 2], [1, 2, 3])
    assert cluster.partition("a").directories == tuple(
        directory(broker_id) for broker_id in (0, 1, 2)
    )
    answers = cluster.do(
        cluster.controller.assign_replicas_to_dirs(
            0,
            cluster.epoch(0),
            [
                DirectoryAssignment(directory(0), topic_id, 0),
                DirectoryAssignment(directory(0), topic_id, 1),
                DirectoryAssignment(directory(0), topic_id, 2),
                DirectoryAssignment(directory(0), UUID(int=5), 0),
            ],
        )
    )
    assert [type(answer) for answer in answers] == [
        type(None), NotAReplicaError, UnknownTopicOrPartitionError, UnknownTopicIdError,
    ]  # fmt: skip
    assert cluster.partition("a").partition_epoch == 0
    # A replica in an offline directory leaves the ISR and cannot lead.
    cluster.do(
        cluster.controller.assign_replicas_to_dirs(
            0, cluster.epoch(0), [DirectoryAssignment(directory(0, 9), topic_id, 0)]
        )
    )
    state = cluster.partition("a")
    assert (state.leader, state.isr, state.directory_of(0)) == (1, (1, 2), directory(0, 9))
    with pytest.raises(StaleBrokerEpochError):
        cluster.controller.assign_replicas_to_dirs(0, 0, [])
