"""All reconciliations of three members and three partitions, whose target may always change.

The model holds the server's state and each client's actual partitions. A heartbeat's response may
be lost. A client revokes partitions at any time, and reports its partitions only then. A client
whose epoch is refused drops all partitions and rejoins with epoch 0.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

import pytest

from fencepost.groups.errors import FencedMemberEpochError
from fencepost.groups.reconcile import (
    TRANSITIONS,
    CurrentAssignment,
    MemberState,
    Target,
    reconcile,
)

T, U = b"t" * 16, b"u" * 16
PARTITIONS = tuple((T, index) for index in range(3))
EVERY_TARGET = tuple(itertools.product(range(3), repeat=3))
UP_TO_SYMMETRY = ((0, 0, 0), (0, 0, 1), (0, 1, 2))

Frozen = tuple[int, int, int, frozenset, frozenset]


@dataclass(frozen=True, slots=True)
class Client:
    """The state of a client: ``told`` is the last assignment that it received."""

    epoch: int = 0
    owned: frozenset = frozenset()
    told: frozenset = frozenset()


@dataclass(frozen=True, slots=True)
class World:
    members: tuple[Frozen, ...]
    clients: tuple[Client, ...]
    target: tuple[int, ...]
    epoch: int


def thaw(member: Frozen) -> CurrentAssignment:
    epoch, previous, state, assigned, pending = member
    return CurrentAssignment(
        epoch,
        previous,
        MemberState(state),
        dict.fromkeys(sorted(assigned), 0),
        dict.fromkeys(sorted(pending), 0),
    )


def freeze(member: CurrentAssignment) -> Frozen:
    return (
        member.member_epoch,
        member.previous_member_epoch,
        int(member.state),
        frozenset(member.assigned),
        frozenset(member.pending_revocation),
    )


def heartbeat(world: World, index: int, *, answered: bool, seen: set) -> World:
    client, member = world.clients[index], thaw(world.members[index])
    held = {
        partition
        for other, frozen in enumerate(world.members)
        if other != index
        for partition in frozen[3] | frozen[4]
    }
    fenced = client.epoch not in {0, member.member_epoch} and not (
        client.epoch == member.previous_member_epoch and client.owned <= member.assigned.keys()
    )
    if fenced:
        members = list(world.members)
        members[index] = freeze(CurrentAssignment())
        clients = list(world.clients)
        clients[index] = Client()
        return replace(world, members=tuple(members), clients=tuple(clients))
    wanted = frozenset(tp for tp, who in zip(PARTITIONS, world.target, strict=True) if who == index)
    target = Target(world.epoch, wanted)
    # A client that has not adopted its assignment yet reports no partitions.
    owned = client.owned if client.owned == client.told else None
    after = reconcile(member, target, held.__contains__, owned)
    if after is not member:
        seen.add((member.state, after.state))
    members = list(world.members)
    members[index] = freeze(after)
    clients = list(world.clients)
    if answered:
        clients[index] = replace(
            client, epoch=after.member_epoch, told=frozenset(after.assigned.keys())
        )
    return replace(world, members=tuple(members), clients=tuple(clients))


def catch_up(world: World, index: int) -> World:
    client = world.clients[index]
    clients = list(world.clients)
    clients[index] = replace(client, owned=client.told)
    return replace(world, clients=tuple(clients))


def check(world: World) -> None:
    for one, other in itertools.combinations(range(3), 2):
        held = [world.members[index][3] | world.members[index][4] for index in (one, other)]
        assert held[0].isdisjoint(held[1]), "two members hold one partition"
        owned = [world.clients[index].owned for index in (one, other)]
        assert owned[0].isdisjoint(owned[1]), "two clients own one partition"
    for member, client in zip(world.members, world.clients, strict=True):
        assert member[3].isdisjoint(member[4])
        assert member[0] <= world.epoch
        assert (MemberState(member[2]) is MemberState.UNREVOKED_PARTITIONS) == bool(member[4])
        assert client.owned <= member[3] | member[4], "a client owns what the server gave away"


def converge(world: World) -> None:
    for _ in range(4):
        for index in range(3):
            world = catch_up(heartbeat(world, index, answered=True, seen=set()), index)
            check(world)
    for index, member in enumerate(world.members):
        wanted = {tp for tp, who in zip(PARTITIONS, world.target, strict=True) if who == index}
        assert member[:1] + member[2:] == (world.epoch, 0, wanted, frozenset())
        assert world.clients[index].owned == wanted


def settled(start: tuple[int, ...]) -> World:
    """Return the state of the model after all members have adopted the target ``start``."""
    world = World((freeze(CurrentAssignment()),) * 3, (Client(),) * 3, start, 1)
    for _ in range(4):
        for index in range(3):
            world = catch_up(heartbeat(world, index, answered=True, seen=set()), index)
    return world


def explore(start: World, targets: int, *, losses: bool, converge_every: int) -> tuple[int, set]:
    """Visit every state reachable with ``targets`` targets; return their number and transitions."""
    transitions: set = set()
    todo = deque([start])
    seen = {start}
    count = 0
    while todo:
        world = todo.popleft()
        count += 1
        check(world)
        if count % converge_every == 0:
            converge(world)
        after = [
            heartbeat(world, index, answered=answered, seen=transitions)
            for index in range(3)
            for answered in ((True, False) if losses else (True,))
        ]
        after += [catch_up(world, index) for index in range(3)]
        if world.epoch < targets:
            after += [
                replace(world, target=target, epoch=world.epoch + 1) for target in EVERY_TARGET
            ]
        for following in after:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return count, transitions


@pytest.mark.slow
@pytest.mark.parametrize("start", UP_TO_SYMMETRY)
def test_every_interleaving_with_lost_responses_converges_to_the_target(start):
    count, _ = explore(settled(start), 2, losses=True, converge_every=5)
    assert count > 2_000


@pytest.mark.slow
def test_every_interleaving_with_two_target_changes_converges():
    start = settled((0, 0, 1))
    count, transitions = explore(start, 3, losses=False, converge_every=50)
    assert count > 10_000
    assert transitions == {pair for pair in TRANSITIONS if MemberState.UNKNOWN not in pair}


@pytest.mark.slow
def test_every_interleaving_of_three_new_members_converges():
    count, transitions = explore(
        World((freeze(CurrentAssignment()),) * 3, (Client(),) * 3, (0, 0, 1), 1),
        2,
        losses=False,
        converge_every=20,
    )
    assert count > 2_000
    known = {pair for pair in TRANSITIONS if MemberState.UNKNOWN not in pair}
    assert transitions <= known


# --- cases that the enumeration does not reach ---------------------------------------------------


def free(_partition) -> bool:
    return False


def held(_partition) -> bool:
    return True


def test_reconcile_without_change_returns_the_same_object():
    member = CurrentAssignment(3, 2, assigned={(T, 0): 1})
    assert reconcile(member, Target(3, frozenset({(T, 0)})), free, None) is member


def test_kept_partitions_keep_their_assignment_epoch():
    member = CurrentAssignment(3, 2, assigned={(T, 0): 1})
    after = reconcile(member, Target(4, frozenset({(T, 0), (T, 1)})), free, None)
    assert after == CurrentAssignment(4, 3, MemberState.STABLE, {(T, 0): 1, (T, 1): 4})


def test_heartbeat_without_owned_partitions_confirms_no_revocation():
    member = CurrentAssignment(3, 2, assigned={(T, 0): 1})
    waiting = reconcile(member, Target(4, frozenset()), free, None)
    assert waiting == CurrentAssignment(3, 2, MemberState.UNREVOKED_PARTITIONS, {}, {(T, 0): 1})
    assert reconcile(waiting, Target(5, frozenset()), free, None) is waiting
    assert reconcile(waiting, Target(5, frozenset()), free, {(T, 0)}) is waiting
    assert reconcile(waiting, Target(5, frozenset()), free, set()) == CurrentAssignment(5, 3)


def test_member_that_no_longer_owns_revoked_partitions_advances_at_once():
    member = CurrentAssignment(3, 2, assigned={(T, 0): 1})
    assert reconcile(member, Target(4, frozenset()), free, set()) == CurrentAssignment(4, 3)


def test_member_waits_for_unreleased_partitions_at_the_new_epoch():
    member = CurrentAssignment(3, 2)
    waiting = reconcile(member, Target(4, frozenset({(T, 0)})), held, set())
    assert waiting == CurrentAssignment(4, 3, MemberState.UNRELEASED_PARTITIONS)
    assert reconcile(waiting, Target(4, frozenset({(T, 0)})), held, set()) == waiting
    after = reconcile(waiting, Target(4, frozenset({(T, 0)})), free, set())
    assert after == CurrentAssignment(4, 3, MemberState.STABLE, {(T, 0): 4})


def test_partitions_of_unsubscribed_topics_are_revoked_before_the_target_changes():
    member = CurrentAssignment(3, 2, assigned={(T, 0): 3, (U, 0): 3})
    target = Target(3, frozenset({(T, 0), (U, 0)}))
    only_t = T.__eq__
    waiting = reconcile(member, target, free, None, only_t)
    assert waiting.pending_revocation == {(U, 0): 3}
    assert waiting.member_epoch == 3
    nothing = reconcile(waiting, target, free, None, lambda topic_id: False)
    assert nothing.pending_revocation == {(U, 0): 3, (T, 0): 3}
    assert nothing.assigned == {}
    after = reconcile(waiting, target, free, {(T, 0)}, only_t)
    assert after == CurrentAssignment(3, 2, MemberState.STABLE, {(T, 0): 3})


def test_member_in_unknown_state_is_fenced_until_it_owns_no_partitions():
    member = CurrentAssignment(3, 2, MemberState.UNKNOWN, {(T, 0): 3})
    target = Target(4, frozenset({(T, 0), (T, 1)}))
    for owned in (None, {(T, 0)}):
        with pytest.raises(FencedMemberEpochError):
            reconcile(member, target, free, owned)
    assert reconcile(member, target, free, set()).state is MemberState.STABLE
    assert reconcile(member, target, held, set()).state is MemberState.UNRELEASED_PARTITIONS
