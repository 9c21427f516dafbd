"""Reassignments: ReplicationControlManagerTest's and PartitionReassignmentReplicasTest's cases."""

from __future__ import annotations

import pytest

from fencepost.cluster.controller.errors import (
    InvalidReplicaAssignmentError,
    InvalidReplicationFactorError,
    NoReassignmentInProgressError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.reassignment_steps import completed
from fencepost.cluster.controller.reassignments import ReassignablePartition
from tests.unit.cluster.controller.cluster_driver import Cluster


@pytest.mark.parametrize(
    ("replicas", "adding", "removing", "isr", "expected"),
    [
        ((0, 1, 2), (), (), (0, 1, 2), None),
        ((0, 1, 2), (2,), (), (0, 1), None),
        ((0, 1, 2), (2,), (), (0, 1, 2), ((0, 1, 2), (0, 1, 2))),
        ((0, 1, 2), (), (2,), (0, 2), None),
        ((0, 1, 2), (), (2,), (0, 1), ((0, 1), (0, 1))),
        ((0, 1, 2), (), (0, 1, 2), (0, 1, 2), None),
        ((4, 5, 6, 1, 2, 3), (4, 5, 6), (1, 2, 3), (1, 4), None),
        ((4, 5, 6, 1, 2, 3), (4, 5, 6), (1, 2, 3), (1, 4, 5, 6), ((4, 5, 6), (4, 5, 6))),
    ],
)
def test_maybe_complete_reassignment(
    replicas: tuple[int, ...],
    adding: tuple[int, ...],
    removing: tuple[int, ...],
    isr: tuple[int, ...],
    expected: object,
) -> None:
    assert completed(replicas, adding, removing, isr) == expected


def listed(cluster: Cluster) -> list[tuple[str, int]]:
    return [
        reassignment[:2] for reassignment in cluster.controller.list_partition_reassignments(None)
    ]


def test_reassignment_ends_when_all_target_replicas_are_in_sync() -> None:
    cluster = Cluster(range(6))
    cluster.create("a", [0, 1, 2])
    assert cluster.reassign("a", [3, 4, 5]) is None
    state = cluster.partition("a")
    assert (state.replicas, state.adding_replicas, state.removing_replicas) == (
        (3, 4, 5, 0, 1, 2), (3, 4, 5), (0, 1, 2),
    )  # fmt: skip
    # The leader and its epoch stay: no replica has been removed yet.
    assert (state.leader, state.leader_epoch, state.isr) == (0, 0, (0, 1, 2))
    assert listed(cluster) == [("a", 0)]
    cluster.alter_isr("a", [0, 1, 2, 3])
    cluster.alter_isr("a", [0, 3, 4])
    assert listed(cluster) == [("a", 0)]
    cluster.alter_isr("a", [0, 3, 4, 5])
    state = cluster.partition("a")
    assert (state.replicas, state.isr, state.leader, state.leader_epoch) == (
        (3, 4, 5), (3, 4, 5), 3, 1,
    )  # fmt: skip
    assert listed(cluster) == []
    assert cluster.causes("reassignment-changed", "a-0") == ["AlterPartitionReassignments"]
    assert cluster.causes("reassignment-ended", "a-0") == ["AlterPartition of the leader, broker 0"]


def test_reassignment_to_fewer_replicas_ends_at_once() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    cluster.reassign("a", [1, 2])
    state = cluster.partition("a")
    assert (state.replicas, state.isr, state.leader) == ((1, 2), (1, 2), 1)


def test_reassignment_to_another_order_ends_at_once() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1, 2])
    cluster.reassign("a", [2, 1, 0])
    state = cluster.partition("a")
    assert (state.replicas, state.leader, state.leader_epoch) == ((2, 1, 0), 0, 0)


def test_kafka_13972_cancelled_reassignment_bumps_leader_epoch() -> None:
    """KAFKA-13972: the leader epoch rises, so that the added replica deletes its log."""
    cluster = Cluster(range(4))
    cluster.create("a", [0, 1, 2])
    assert isinstance(cluster.reassign("a", None), NoReassignmentInProgressError)
    cluster.reassign("a", [0, 1, 3])
    cluster.alter_isr("a", [0, 1, 2])
    assert cluster.reassign("a", None) is None
    state = cluster.partition("a")
    assert (set(state.replicas), state.isr, state.leader) == ({0, 1, 2}, (0, 1, 2), 0)
    assert (state.adding_replicas, state.removing_replicas, state.leader_epoch) == ((), (), 1)
    assert cluster.causes("reassignment-ended", "a-0") == ["the reassignment was cancelled"]


@pytest.mark.parametrize("unclean", ["true", "false"])
def test_cancellation_elects_uncleanly_only_if_topic_allows_it(unclean: str) -> None:
    cluster = Cluster(range(4))
    cluster.create("a", [0, 1], unclean_leader_election_enable=unclean)
    cluster.reassign("a", [2, 3])
    cluster.alter_isr("a", [0, 2])
    cluster.fence(0)
    assert cluster.partition("a").leader == 2
    answer = cluster.reassign("a", None)
    if unclean == "true":
        assert answer is None
        assert cluster.partition("a").leader == 1
        assert set(cluster.partition("a").replicas) == {0, 1}
    else:
        assert isinstance(answer, InvalidReplicaAssignmentError)
        assert "unclean leader election" in str(answer)


def test_replaced_reassignment_removes_its_former_target_replicas() -> None:
    cluster = Cluster(range(5))
    cluster.create("a", [0, 1, 2])
    cluster.reassign("a", [0, 1, 3])
    cluster.alter_isr("a", [0, 1])
    cluster.reassign("a", [0, 1, 4])
    state = cluster.partition("a")
    assert (state.replicas, state.adding_replicas, state.removing_replicas) == (
        (0, 1, 4, 2, 3), (4,), (2, 3),
    )  # fmt: skip
    # Replica 2 is no longer being removed; replica 4 is still being added.
    cluster.reassign("a", [0, 1, 2, 4])
    state = cluster.partition("a")
    assert (state.adding_replicas, state.removing_replicas) == ((4,), (3,))
    cluster.reassign("a", None)
    assert set(cluster.partition("a").replicas) == {0, 1, 2, 3}


def test_reassignment_with_invalid_replicas_or_partition_is_refused() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1])
    for replicas in ([], [0, 0], [0, 9]):
        assert isinstance(cluster.reassign("a", replicas), InvalidReplicaAssignmentError)
    assert isinstance(cluster.reassign("b", [0]), UnknownTopicOrPartitionError)
    assert isinstance(cluster.reassign("a", [0], 1), UnknownTopicOrPartitionError)
    assert cluster.partition("a").partition_epoch == 0


def test_kip_860_reassignment_that_changes_replication_factor_is_refused() -> None:
    """KIP-860: the request is compared with the target of the reassignment in progress."""
    cluster = Cluster(range(4))
    cluster.create("a", [0, 1])

    def asked(*replicas: int) -> object:
        return cluster.do(
            cluster.controller.alter_partition_reassignments(
                [ReassignablePartition("a", 0, replicas)], allow_replication_factor_change=False
            )
        )[0]

    refused = asked(0, 1, 2)
    assert isinstance(refused, InvalidReplicationFactorError)
    assert str(refused) == "The replication factor is changed from 2 to 3"
    assert asked(2, 3) is None
    assert isinstance(asked(0, 1, 2, 3), InvalidReplicationFactorError)
    assert asked(1, 2) is None


def test_reassignment_waits_for_fenced_target_replica() -> None:
    cluster = Cluster()
    cluster.create("a", [0, 1])
    cluster.fence(2)
    cluster.reassign("a", [0, 2])
    assert cluster.partition("a").adding_replicas == (2,)
