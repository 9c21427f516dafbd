"""Which partitions and controllers keep a broker from being restarted."""

from __future__ import annotations

import pytest

from fencepost.client.queries.replicas import (
    PartitionDescription,
    QuorumDescription,
    quorum_without,
    restart_problem,
)


def partition(
    replicas: tuple[int, ...], isr: tuple[int, ...], offline: tuple[int, ...] = ()
) -> PartitionDescription:
    leader = isr[0] if isr else -1
    return PartitionDescription("t", 0, leader, 0, replicas, isr, (), (), offline)


@pytest.mark.parametrize(
    ("state", "min_isr", "down", "problem"),
    [
        (partition((1, 2, 3), (1, 2, 3)), 2, (), None),
        (partition((2, 3), (2,)), 2, (), None),  # no replica on broker 1
        (partition((1,), (1,)), 1, (), "no other replica"),
        (partition((1, 2), ()), 1, (), "offline"),
        (partition((1, 2), (1,)), 1, (), "no other replica is in sync"),
        (partition((1, 2), (2,)), 1, (), None),
        (partition((1, 2, 3), (1, 2)), 2, (), "under min ISR without it"),
        (partition((1, 2, 3), (1, 2, 3)), 2, (3,), "under min ISR without it"),
        (partition((1, 2, 3), (1, 2, 3), offline=(3,)), 2, (), "under min ISR without it"),
        (partition((1, 2), (1, 2)), 3, (), "under min ISR without it"),  # min ISR 3 needs more
        (partition((1, 2, 3), (2, 3)), 2, (), None),
    ],
)
def test_restart_is_refused_if_it_takes_a_partition_below_min_isr(
    state: PartitionDescription, min_isr: int, down: tuple[int, ...], problem: str | None
) -> None:
    assert restart_problem(state, 1, min_isr, down) == problem


@pytest.mark.parametrize(
    ("log_ends", "problem"),
    [
        ({2: 10, 3: 10, 4: 10, 1: 0}, None),  # broker 1 is not a voter
        ({1: 10}, "broker 1 is the only controller"),
        ({1: 10, 2: 10, 3: 12}, None),
        ({1: 10, 2: 10, 3: 9}, "1 controllers would be left, and 2 are a majority"),
        ({1: 10, 2: 10}, "1 controllers would be left, and 2 are a majority"),
    ],
)
def test_restart_is_refused_if_controllers_would_lose_their_majority(
    log_ends: dict[int, int], problem: str | None
) -> None:
    voters = frozenset(log_ends) - ({1} if 4 in log_ends else set())
    leader = max(voters)
    assert quorum_without(QuorumDescription(leader, 1, 10, voters, log_ends), 1) == problem
