"""Elections and eligible leader replicas: the cases of Kafka's PartitionChangeBuilderTest."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import pytest

from fencepost.cluster.controller.partition_change import (
    RECOVERED,
    RECOVERING,
    Election,
    PartitionChangeBuilder,
)
from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.records import PartitionChangeRecord

TOPIC_ID = UUID(int=5)
HOME = UUID(int=1_000)


def partition(
    replicas: Iterable[int],
    isr: Iterable[int],
    leader: int,
    *,
    elr: Iterable[int] = (),
    last_known_elr: Iterable[int] = (),
    adding: Iterable[int] = (),
    removing: Iterable[int] = (),
    recovery: int = RECOVERED,
) -> PartitionRegistration:
    replicas = tuple(replicas)
    return PartitionRegistration(
        replicas=replicas,
        isr=tuple(isr),
        leader=leader,
        leader_epoch=100,
        partition_epoch=200,
        directories=(HOME,) * len(replicas),
        elr=tuple(elr),
        last_known_elr=tuple(last_known_elr),
        adding_replicas=tuple(adding),
        removing_replicas=tuple(removing),
        leader_recovery_state=recovery,
    )


def change(
    state: PartitionRegistration,
    *,
    alive: Iterable[int] | None = None,
    min_isr: int = 1,
    elr: bool = False,
    election: Election = Election.ONLINE,
    isr: tuple[int, ...] | None = None,
    replicas: tuple[int, ...] | None = None,
    adding: tuple[int, ...] | None = None,
    removing: tuple[int, ...] | None = None,
    unclean_shutdown: Iterable[int] = (),
) -> PartitionRegistration | None:
    """Return the partition after the change, or None if no record is written."""
    living = set(state.replicas) if alive is None else set(alive)
    record = PartitionChangeBuilder(
        partition=state,
        topic_id=TOPIC_ID,
        index=0,
        is_acceptable=lambda broker_id: broker_id in living,
        min_isr=min_isr,
        default_directory=lambda _broker_id: HOME,
        elr_enabled=elr,
        election=election,
        isr=isr,
        replicas=replicas,
        adding=adding,
        removing=removing,
        unclean_shutdown=frozenset(unclean_shutdown),
    ).build()
    return None if record is None else state.merge(record)


FOO = partition([2, 1, 3], [2, 1, 3], 1)


def test_change_record_is_no_op() -> None:
    assert change(FOO) is None
    assert change(FOO, isr=(2, 1, 3), replicas=(2, 1, 3)) is None


@pytest.mark.parametrize(
    ("election", "state", "alive", "leader"),
    [
        # Elect the preferred replica, else the leader, else the first in-sync replica.
        (Election.PREFERRED, FOO, {1, 2, 3}, 2),
        (Election.PREFERRED, FOO, {1, 3}, 1),
        (Election.PREFERRED, FOO, {3}, 3),
        (Election.PREFERRED, FOO, set(), -1),
        (Election.PREFERRED, partition([2, 1, 3], [1], 1), {1, 2, 3}, 1),
        (Election.PREFERRED, partition([2, 1, 3], [1], 1), {2, 3}, -1),
        (Election.ONLINE, FOO, {1, 2, 3}, 1),
        (Election.ONLINE, FOO, {2, 3}, 2),
        (Election.ONLINE, partition([2, 1, 3], [1, 3], 1), {2, 3}, 3),
        (Election.ONLINE, partition([2, 1, 3], [1], 1), {2, 3}, -1),
        (Election.UNCLEAN, FOO, {2, 3}, 2),
        (Election.UNCLEAN, partition([2, 1, 3], [1], 1), {2, 3}, 2),
        (Election.UNCLEAN, partition([2, 1, 3], [1, 3], 1), {2, 3}, 3),
        (Election.UNCLEAN, partition([2, 1, 3], [1], 1), set(), -1),
    ],
)
def test_elect_leader(
    election: Election, state: PartitionRegistration, alive: set[int], leader: int
) -> None:
    after = change(state, election=election, alive=alive) or state
    assert after.leader == leader
    assert after.leader_epoch == 100 + (leader != state.leader)
    is_unclean = leader >= 0 and leader not in state.isr
    assert after.leader_recovery_state == (RECOVERING if is_unclean else RECOVERED)
    assert after.isr == ((leader,) if is_unclean else state.isr)


def test_second_unclean_election_keeps_leader_recovering() -> None:
    state = partition([1, 2], [1], 1, recovery=RECOVERING)
    after = change(state, election=Election.UNCLEAN, alive={2})
    assert after is not None
    assert (after.leader, after.leader_recovery_state) == (2, RECOVERING)


@pytest.mark.parametrize(
    ("changes", "rises"),
    [
        ({"isr": (2, 1)}, False),
        ({"isr": (3, 1)}, False),
        ({"replicas": (2, 1, 3, 4)}, False),
        ({"replicas": (1, 3, 2)}, False),
        ({"replicas": (1, 2), "isr": (1, 2)}, True),
        ({"isr": (2, 3)}, True),
    ],
)
def test_trigger_leader_epoch_bump_if_needed(
    changes: dict[str, tuple[int, ...]], rises: bool
) -> None:
    """Removing a replica bumps the leader epoch; an ISR change alone does not (KAFKA-15021)."""
    after = change(FOO, **changes)  # type: ignore[arg-type]
    assert after is not None
    assert (after.leader_epoch, after.partition_epoch) == (100 + rises, 201)


def test_empty_isr_without_elr_keeps_its_last_member() -> None:
    after = change(partition([1, 2], [1], 1), isr=(), alive={2})
    assert after is not None
    assert (after.leader, after.isr) == (-1, (1,))


# --- reassignments ---


MOVING = partition([2, 1, 3, 4], [2, 1, 3], 2, adding=[4], removing=[3])


def test_kafka_15665_reassignment_waits_for_all_target_replicas() -> None:
    """KAFKA-15665."""
    six = partition([4, 5, 6, 1, 2, 3], [1, 2, 3], 1, adding=[4, 5, 6], removing=[1, 2, 3])
    for isr in ((1, 4), (1, 4, 5), (1, 2, 3, 4, 6)):
        after = change(six, isr=isr)
        assert after is not None
        assert (after.replicas, after.isr) == (six.replicas, isr)
    done = change(six, isr=(1, 6, 5, 4))
    assert done is not None
    assert (done.replicas, done.isr, done.leader) == ((4, 5, 6), (6, 5, 4), 4)
    assert done.adding_replicas == done.removing_replicas == ()
    assert done.leader_epoch == 101


def test_completed_reassignment_bumps_epoch_of_unchanged_leader() -> None:
    after = change(MOVING, isr=(2, 1, 4))
    assert after is not None
    assert (after.replicas, after.isr, after.leader) == ((2, 1, 4), (2, 1, 4), 2)
    assert after.leader_epoch == 101


def test_reordering_of_replicas_completes_at_once() -> None:
    after = change(FOO, replicas=(3, 2, 1), adding=(), removing=())
    assert after is not None
    assert (after.replicas, after.leader, after.leader_epoch) == ((3, 2, 1), 1, 100)


def test_added_replica_gets_default_directory_of_its_broker() -> None:
    after = change(FOO, replicas=(2, 1, 3, 4), adding=(4,))
    assert after is not None
    assert after.directories == (HOME,) * 4


# --- eligible leader replicas (KIP-966) ---


@pytest.mark.parametrize("elr", [True, False])
def test_eligible_leader_replicas_isr_shrink_below_min_isr(elr: bool) -> None:
    after = change(partition([1, 2, 3, 4], [1, 2, 3, 4], 1), isr=(1, 2), min_isr=3, elr=elr)
    assert after is not None
    assert (after.isr, after.elr) == ((1, 2), (3, 4) if elr else ())


def test_eligible_leader_replicas_isr_expand_above_min_isr() -> None:
    state = partition([1, 2, 3, 4], [1, 2], 1, elr=[3], last_known_elr=[4])
    after = change(state, isr=(1, 2, 3), min_isr=3, elr=True)
    assert after is not None
    assert (after.isr, after.elr, after.last_known_elr) == ((1, 2, 3), (), ())


def test_eligible_leader_replicas_isr_add_new_member_not_in_elr() -> None:
    state = partition([1, 2, 3, 4], [1], 1, elr=[3])
    after = change(state, isr=(1, 4), min_isr=3, elr=True)
    assert after is not None
    assert (after.isr, after.elr) == ((1, 4), (3,))


def test_eligible_leader_replicas_remove_unclean_shutdown_replicas() -> None:
    state = partition([1, 2, 3, 4], [1, 2, 3, 4], 1)
    after = change(state, isr=(1, 2), min_isr=3, elr=True, unclean_shutdown={3})
    assert after is not None
    assert after.elr == (4,)


def test_eligible_leader_replicas_elected_when_the_isr_is_empty() -> None:
    state = partition([1, 2, 3, 4], [], -1, elr=[2, 3], last_known_elr=[4])
    after = change(state, min_isr=3, elr=True, alive={3, 4})
    assert after is not None
    assert (after.leader, after.isr, after.elr, after.last_known_elr) == (3, (3,), (2,), ())
    assert after.leader_recovery_state == RECOVERED


def test_eligible_leader_replica_is_not_elected_while_isr_has_members() -> None:
    state = partition([1, 2, 3], [1], 1, elr=[2, 3])
    after = change(state, min_isr=3, elr=True, alive={2, 3})
    assert after is not None
    assert (after.leader, after.isr, after.elr) == (-1, (1,), (2, 3))


def test_eligible_leader_replicas_last_known_elr_should_be_populated_when_no_leader() -> None:
    state = partition([1, 2, 3, 4], [1], 1, elr=[2])
    after = change(state, isr=(), min_isr=3, elr=True, alive={3, 4})
    assert after is not None
    assert (after.leader, after.isr, after.elr) == (-1, (), (2, 1))
    assert after.last_known_elr == (1,)


LEADERLESS = partition([1, 2, 3], [], -1, last_known_elr=[1])


@pytest.mark.parametrize(
    ("alive", "election", "leader"),
    [
        ({1, 2}, Election.ONLINE, 1),
        ({1, 2}, Election.UNCLEAN, 1),
        ({1, 2}, Election.PREFERRED, 1),
        ({2, 3}, Election.ONLINE, -1),
        ({2, 3}, Election.UNCLEAN, 2),
    ],
)
def test_last_known_leader_is_elected_if_alive(
    alive: set[int], election: Election, leader: int
) -> None:
    """The last known leader may lack records like any other replica, but it must be alive."""
    after = change(LEADERLESS, alive=alive, election=election, min_isr=2, elr=True) or LEADERLESS
    assert after.leader == leader
    if leader >= 0:
        assert (after.isr, after.elr, after.last_known_elr) == ((leader,), (), ())
        assert after.leader_recovery_state == RECOVERING


def test_elr_is_cleared_by_next_change_after_it_is_disabled() -> None:
    state = partition([1, 2, 3], [1], 1, elr=[2])
    after = change(state, isr=(1, 3), min_isr=3)
    assert after is not None
    assert (after.isr, after.elr) == ((1, 3), ())


def test_removed_replica_leaves_the_elr() -> None:
    state = partition([1, 2, 3], [1, 2], 1, elr=[3], removing=[2, 3])
    after = change(state, isr=(1,), min_isr=2, elr=True)
    assert after is not None
    assert (after.replicas, after.isr, after.elr) == ((1,), (1,), ())


def test_partition_change_record_has_only_changed_fields() -> None:
    builder = PartitionChangeBuilder(
        FOO, TOPIC_ID, 4, lambda _: True, 1, lambda _: HOME, isr=(1, 2)
    )
    assert builder.build() == PartitionChangeRecord(TOPIC_ID, 4, isr=(1, 2))
