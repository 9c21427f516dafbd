"""Conversions of groups with members, and groups with members of both protocols."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from fencepost.groups.assignors.client.protocol import decode_assignment
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.commands import Heartbeat, JoinGroup, LeavingMember, SyncGroup
from fencepost.groups.consumer_commands import MigrationPolicy
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupLimitExceededError,
    GroupMaxSizeReachedError,
    IllegalGenerationError,
    InconsistentGroupProtocolError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.limits import GroupLimits
from tests.unit.groups.churn import every_prefix_loads, every_variant_loads_back
from tests.unit.groups.consumer_driver import ConsumerDriver, T, settings, settle
from tests.unit.groups.group_driver import PARKED, REBALANCE, SESSION, Driver, G, subscription
from tests.unit.groups.mixed_driver import COOPERATIVE, ClassicClient, assigned


def classic_pair(**more: Any) -> tuple[ConsumerDriver, ClassicClient, ClassicClient]:
    """Return a Stable classic group of two members with two partitions each."""
    driver = ConsumerDriver(**more)
    one, two = ClassicClient(driver, "one"), ClassicClient(driver, "two")
    one.join()
    two.join()
    driver.finish_initial_delay()
    for client in (one, two, one, two):
        client.step()
    assert driver.state() == "Stable"
    assert len(one.owned) == len(two.owned) == 2
    return driver, one, two


def join_dynamic(driver: ConsumerDriver, **other: Any) -> tuple[int, str]:
    """Join a ConsumerDriver with KIP-394's two requests; return token and member id."""
    first = driver.answers[Driver.join(driver, **other)]
    assert isinstance(first, MemberIdRequiredError)
    return Driver.join(driver, first.member_id, **other), first.member_id


# --- upgrades -------------------------------------------------------------------------------------


def test_classic_group_is_upgraded_when_a_consumer_joins():
    driver, one, two = classic_pair()
    generation = driver.group().generation_id
    driver.commit(("t", 0, 7), generation=generation, member_id=one.member_id)
    had = one.owned | two.owned
    consumer = driver.client("m")
    group = driver.consumer_group()
    assert group.epoch == generation + 1
    assert {group.current(c.member_id).member_epoch for c in (one, two)} == {generation}
    assert not consumer.owned, "nobody has given anything up yet"
    assert {tp for c in (one, two) for tp in group.current(c.member_id).assigned} == had
    for _ in range(4):
        one.step()
        two.step()
        settle(consumer, rounds=1)
    assert driver.state_of_consumers() == "Stable"
    owned = [one.owned, two.owned, consumer.owned]
    assert frozenset().union(*owned) == had
    assert sum(map(len, owned)) == 4
    assert driver.fetch().offset == 7
    assert driver.event("group-upgraded")["members"] == 2
    driver.reload()
    assert driver.state_of_consumers() == "Stable"


@pytest.mark.parametrize("policy", [MigrationPolicy.DISABLED, MigrationPolicy.DOWNGRADE])
def test_classic_group_is_not_upgraded_if_the_migration_policy_forbids_it(policy):
    driver, _, _ = classic_pair(consumer=settings(migration_policy=policy))
    with pytest.raises(GroupIdNotFoundError, match=r"migration\.policy"):
        driver.join("m")
    assert isinstance(driver.groups[G], ClassicGroup)


@pytest.mark.parametrize("limit", [2, 1])
def test_classic_group_at_or_above_the_max_size_is_not_upgraded(limit):
    driver, _, _ = classic_pair(consumer=settings(max_size=limit))
    error = GroupMaxSizeReachedError if limit == 2 else GroupIdNotFoundError
    with pytest.raises(error):
        driver.join("m")
    assert driver.state() == "Stable"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"\0", "of '.*': "),
        (assigned(("t", (0,)), user_data=b"mine"), "an unsupported custom assignor is in use"),
        (b"\xff\xff" + assigned(("t", (0,)))[2:], "of '.*': "),
    ],
)
def test_group_with_undecodable_or_custom_assignments_is_not_upgraded(given, why):
    driver = ConsumerDriver()
    token, member_id = join_dynamic(driver)
    driver.finish_initial_delay()
    driver.answer(token)
    driver.answer(driver.sync(member_id, assignments=[(member_id, given)]))
    prefix = "^Cannot upgrade classic group g to consumer group because "
    with pytest.raises(GroupIdNotFoundError, match=prefix + why):
        driver.join("m")
    assert driver.state() == "Stable"


def test_group_with_two_owners_of_a_partition_is_not_upgraded():
    driver = ConsumerDriver()
    tokens = [join_dynamic(driver) for _ in range(2)]
    driver.finish_initial_delay()
    both = assigned(("t", (0,)))
    leader, other = (member_id for _, member_id in tokens)
    driver.sync(leader, assignments=[(leader, both), (other, both)])
    with pytest.raises(GroupIdNotFoundError, match="two owners"):
        driver.join("m")


def test_member_waiting_in_a_join_phase_must_rejoin():
    driver, one, two = classic_pair()
    waiting = Driver.join(driver, one.member_id)
    assert driver.parked(waiting)
    driver.join("m")
    assert isinstance(driver.answers[waiting], RebalanceInProgressError)
    assert isinstance(driver.groups[G], ConsumerGroup)
    with pytest.raises(RebalanceInProgressError):
        two.heartbeat()


def test_member_waiting_for_its_assignment_must_rejoin():
    driver = ConsumerDriver()
    tokens = [join_dynamic(driver) for _ in range(2)]
    driver.finish_initial_delay()
    waiting = driver.sync(tokens[1][1])
    assert driver.parked(waiting)
    driver.join("m")
    assert isinstance(driver.answers[waiting], RebalanceInProgressError)
    assert PARKED not in driver.answers.values()


@pytest.mark.parametrize("phase", ["joining", "assigning"])
def test_rebalancing_group_with_offsets_but_no_group_record_is_upgraded(phase):
    driver = ConsumerDriver()
    driver.commit(("t", 0, 5))
    token, member_id = join_dynamic(driver)
    if phase == "assigning":
        driver.finish_initial_delay()
    consumer = driver.client("m")
    assert set(driver.consumer_group().members) == {member_id, "m"}
    assert driver.parked(token) is False
    assert driver.fetch().offset == 5
    settle(consumer)
    driver.reload()
    assert set(driver.consumer_group().members) == {member_id, "m"}


def test_upgrade_by_static_replacement_assigns_partitions_to_a_joining_member():
    driver = ConsumerDriver()
    static = ClassicClient(driver, "s", instance_id="i")
    static.join()
    driver.finish_initial_delay()
    static.step()
    assert len(static.owned) == 4
    late = ClassicClient(driver, "late")
    late.join()
    assert driver.state() == "PreparingRebalance"
    # A new static member with the same subscription does not bump the group epoch.
    successor = driver.client("m", instance_id="i")
    for _ in range(4):
        late.step()
        settle(successor, rounds=1)
    assert len(late.owned) == len(successor.owned) == 2
    assert "the classic group was rebalancing" in driver.event("group-epoch-bumped")["reason"]


def test_upgrade_keeps_assignments_if_a_joining_member_lacks_the_last_protocol():
    driver = ConsumerDriver()
    both = tuple((name, subscription("t")) for name in ("cooperative-sticky", "range"))
    token, member_id = join_dynamic(driver, protocols=both)
    driver.finish_initial_delay()
    driver.answer(token)
    mine = assigned(("t", (0, 1, 2, 3)))
    driver.answer(driver.sync(member_id, assignments=[(member_id, mine)]))
    assert driver.group().protocol_name == "cooperative-sticky"
    _, other = join_dynamic(driver)
    driver.client("m")
    group = driver.consumer_group()
    assert set(group.members) == {member_id, other, "m"}
    assert group.current(member_id).assigned.keys() == {(T, index) for index in range(4)}


def test_upgrade_after_incomplete_rebalances_keeps_the_last_owner():
    driver = ConsumerDriver()
    token, member_id = join_dynamic(driver)
    driver.finish_initial_delay()
    driver.answer(token)
    mine = assigned(("t", (0, 1, 2, 3)))
    driver.answer(driver.sync(member_id, assignments=[(member_id, mine)]))
    _, other = join_dynamic(driver)
    rejoined = driver.answer(Driver.join(driver, member_id))
    assert rejoined.generation_id == 2
    join_dynamic(driver)  # no assignment has been made in this generation yet
    consumer = driver.client("m")
    group = driver.consumer_group()
    assert not consumer.owned
    assert group.current(member_id).assigned.keys() == {(T, index) for index in range(4)}
    driver.commit(("t", 3, 5, -1, "", T), generation=2, member_id=member_id)
    assert not group.current(other).assigned


def test_partition_stays_unassigned_until_previous_owner_revokes_it():
    driver = ConsumerDriver()
    one, two, three = (
        ClassicClient(driver, name, offers=(COOPERATIVE,)) for name in ("one", "two", "three")
    )
    one.join()
    two.join()
    driver.finish_initial_delay()
    for client in (one, two, one, two):
        client.step()
    assert two.owned == {(T, 1), (T, 3)}
    three.join()
    two.is_slow = True
    for client in (one, two, one, three):
        client.step()
    assert two.must_sync, "it has not heard that partition 3 is not its own any more"
    assert (T, 3) in two.owned
    consumer = driver.client("m")
    group = driver.consumer_group()
    assert group.current(two.member_id).assigned.keys() == two.owned
    assert (T, 3) not in consumer.owned
    for _ in range(6):
        for client in (one, two, three):
            client.step()
        settle(consumer, rounds=1)
    assert all(len(client.owned) == 1 for client in (one, two, three, consumer))


def test_classic_group_whose_joining_members_have_left_is_upgraded():
    driver = ConsumerDriver()
    classic = ClassicClient(driver, "one")
    classic.join()
    classic.leave()
    assert driver.state() == "PreparingRebalance"
    assert len(driver.client("m").owned) == 4
    driver.advance(REBALANCE)
    assert isinstance(driver.groups[G], ConsumerGroup)


def test_refused_upgrade_keeps_the_classic_group_and_its_waiting_join():
    driver, classic, _ = classic_pair(max_batch_bytes=500)
    waiting = Driver.join(driver, classic.member_id)
    with pytest.raises(GroupLimitExceededError):
        driver.join("m")
    assert driver.parked(waiting)
    assert driver.state() == "PreparingRebalance"


# --- classic members of a consumer group ---------------------------------------------------------


def mixed() -> tuple[ConsumerDriver, ClassicClient]:
    """Return a consumer that owns all partitions, and a classic member that has just joined."""
    driver = ConsumerDriver()
    driver.client("m")
    classic = ClassicClient(driver, "one")
    classic.join()
    return driver, classic


def test_classic_join_in_a_consumer_group_is_answered_at_once_without_a_leader():
    driver, classic = mixed()
    assert (classic.generation, classic.leader) == (3, "")
    assert driver.consumer_group().members[classic.member_id].classic is not None


def test_classic_joins_without_member_id_add_neither_members_nor_timers():
    driver = ConsumerDriver()
    driver.client("m")
    for _ in range(50):
        with pytest.raises(MemberIdRequiredError):
            driver.answer(Driver.join(driver))
    assert len(driver.consumer_group().members) == 1
    assert not driver.timers.keys() - {("session", G, "m")}


@pytest.mark.parametrize(
    "fields",
    [
        {"protocol_type": "connect"},
        {"protocols": ()},
        {"protocols": (("range", b"\0"),)},
        {"protocols": (("other", subscription("t")),)},
    ],
)
def test_classic_join_with_inconsistent_protocol_is_refused(fields):
    driver, _ = mixed()
    with pytest.raises(InconsistentGroupProtocolError):
        driver.answer(Driver.join(driver, version=3, **fields))


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(
    ("limits", "names", "rack"),
    [
        ({"max_string_bytes": 40}, ("t" * 40,), b"r"),
        ({"max_subscribed_topics": 2}, ("t", "u"), b"r"),
        ({"max_string_bytes": 40}, ("t",), b"r" * 40),
    ],
)
def test_classic_subscription_beyond_a_limit_is_refused_or_blocks_the_upgrade(
    limits, names, rack, fits
):
    if not fits:
        limits = {name: limit - 1 for name, limit in limits.items()}
    said = struct.pack(">h", 3) + subscription(*names)[2:]
    said += struct.pack(">iih", 0, 1, len(rack)) + rack  # without owned partitions
    protocols = (("range", said),)
    mixed_group = ConsumerDriver(GroupLimits(**limits))
    mixed_group.client("m")
    token = Driver.join(mixed_group, "four", protocols=protocols)
    classic = ConsumerDriver(GroupLimits(**limits))
    Driver.join(classic, version=3, protocols=protocols, new_member_id="four")
    if fits:
        assert "four" in mixed_group.consumer_group().members
        mixed_group.answer(token)
        classic.client("m")
        assert "four" in classic.consumer_group().members
        return
    with pytest.raises(GroupLimitExceededError):
        mixed_group.answer(token)
    with pytest.raises(GroupIdNotFoundError, match="Cannot upgrade classic group"):
        classic.client("m")


def test_full_consumer_group_refuses_classic_members():
    driver = ConsumerDriver(consumer=settings(max_size=1))
    driver.client("m")
    with pytest.raises(GroupMaxSizeReachedError):
        driver.answer(Driver.join(driver, version=3))


def test_heartbeat_or_sync_with_wrong_member_or_generation_is_refused():
    driver, classic = mixed()
    for member_id, generation, instance, error in [
        ("stranger", classic.generation, None, UnknownMemberIdError),
        ("m", classic.generation, None, UnknownMemberIdError),
        (classic.member_id, classic.generation + 1, None, IllegalGenerationError),
        (classic.member_id, classic.generation, "unknown", UnknownMemberIdError),
    ]:
        with pytest.raises(error):
            driver.ask(Heartbeat(G, generation, member_id, instance))
        with pytest.raises(error):
            driver.ask(SyncGroup(G, generation, member_id, instance, None, None))
    with pytest.raises(InconsistentGroupProtocolError):
        driver.ask(SyncGroup(G, classic.generation, classic.member_id, None, "consumer", "other"))
    with pytest.raises(InconsistentGroupProtocolError):
        driver.ask(SyncGroup(G, classic.generation, classic.member_id, None, "connect", "range"))


def test_classic_member_commits_owned_partitions_with_its_former_generation():
    driver, classic, _ = classic_pair()
    (_, had), generation = min(classic.owned), classic.generation
    driver.client("m", "u")
    classic.join()
    assert classic.generation > generation
    fields = {"generation": generation, "member_id": classic.member_id}
    driver.commit(("t", had, 7, -1, "", T), **fields)
    assert driver.fetch("t", had).offset == 7
    for other in ({"generation": generation - 1}, {"generation": classic.generation + 1}):
        with pytest.raises(IllegalGenerationError):
            driver.commit(("t", had, 8, -1, "", T), **{**fields, **other})


def test_classic_member_that_does_not_sync_in_time_is_removed():
    driver = ConsumerDriver()
    driver.client("m")
    joined = driver.answer(Driver.join(driver, version=3, rebalance_timeout_ms=SESSION - 2))
    driver.advance(SESSION - 3)
    assert joined.member_id in driver.consumer_group().members
    driver.advance(1)
    assert joined.member_id not in driver.consumer_group().members
    assert driver.event("member-expired")["reason"] == "did not send SyncGroup in time"


def with_rebalance(client: ClassicClient) -> None:
    try:
        client.heartbeat()
    except RebalanceInProgressError:
        return


def test_classic_member_that_does_not_rejoin_in_time_is_removed():
    driver, classic = mixed()
    classic.sync()
    driver.beat("m", 2, subscribed_topic_names=("t", "u"))
    for _ in range(REBALANCE // (SESSION - 1) + 1):
        with_rebalance(classic)
        driver.beat("m", driver.consumer_group().current("m").member_epoch, owned=())
        driver.advance(SESSION - 1)
    assert classic.member_id not in driver.consumer_group().members
    assert driver.event("member-expired")["reason"] == "did not rejoin in time"


def owning(topic: str) -> tuple[tuple[str, bytes], ...]:
    """Return protocols of a member that owns the topic's first partition."""
    owned = struct.pack(">ih", 1, len(topic)) + topic.encode() + struct.pack(">ii", 1, 0)
    return (("range", struct.pack(">h", 1) + subscription(topic)[2:] + owned),)


def is_taken_in(driver: ConsumerDriver, member_id: str) -> bool:
    """Return whether a member with owned partitions may join under this id."""
    try:
        return bool(driver.answer(Driver.join(driver, member_id, protocols=owning("t"))).member_id)
    except UnknownMemberIdError:
        return False


def test_removed_classic_member_rejoins_only_without_owned_partitions():
    driver, classic = mixed()
    classic.sync()
    driver.leave(classic.member_id)
    assert not is_taken_in(driver, classic.member_id)
    # A client that keeps its partitions would otherwise request member ids again and again.
    _, new = join_dynamic(driver, protocols=owning("t"))
    assert new in driver.consumer_group().members
    driver.leave(new)
    assert not is_taken_in(driver, new)
    assert driver.answer(Driver.join(driver, classic.member_id)).member_id == classic.member_id


def test_member_id_generated_before_the_upgrade_is_valid_after_it():
    driver, classic = classic_pair()[:2]
    told = driver.answers[Driver.join(driver)]
    driver.client("m")
    assert is_taken_in(driver, told.member_id)
    assert not is_taken_in(driver, "nobody")
    assert classic.member_id in driver.consumer_group().members


def test_oldest_generated_member_id_is_forgotten_beyond_the_limit():
    driver = ConsumerDriver(GroupLimits(max_shard_pending_members=2))
    driver.client("m")
    first, *later = (driver.answers[Driver.join(driver)].member_id for _ in range(3))
    assert [is_taken_in(driver, name) for name in (first, *later)] == [False, True, True]


def test_classic_member_must_rejoin_only_once_the_target_has_changed():
    driver = ConsumerDriver(consumer=settings(assignment_interval_ms=1_000))
    driver.client("m")
    classic = ClassicClient(driver, "one")
    classic.join()
    assert classic.generation == 2
    assert classic.sync_token is None, "it is assigned what the last target gave it: nothing"
    driver.advance(999)
    classic.heartbeat()
    driver.advance(1)
    with pytest.raises(RebalanceInProgressError):
        classic.heartbeat()
    classic.join()
    assert (classic.generation, classic.owned) == (3, frozenset())
    driver.beat("m", 2, owned=((T, (0, 1)),))
    classic.step()
    assert len(classic.owned) == 2


def test_classic_member_of_a_consumer_group_has_its_own_session_timeout():
    driver, classic = mixed()
    classic.sync()
    driver.advance(SESSION - 1)
    assert classic.member_id in driver.consumer_group().members
    driver.reload()
    driver.advance(SESSION - 1)
    assert classic.member_id in driver.consumer_group().members
    driver.advance(1)
    assert classic.member_id not in driver.consumer_group().members


def test_leave_group_removes_members_of_either_protocol():
    driver, classic = mixed()
    driver.client("s", instance_id="i")
    results = driver.leave(
        LeavingMember("stranger"),
        LeavingMember("wrong", "i"),
        LeavingMember("", "unknown"),
        LeavingMember("", "i"),
        LeavingMember(classic.member_id),
        LeavingMember(classic.member_id),
    )
    assert [type(error) for _, _, error in results] == [
        UnknownMemberIdError,
        FencedInstanceIdError,
        UnknownMemberIdError,
        *[type(None)] * 3,
    ]
    assert set(driver.consumer_group().members) == {"m"}


def test_member_that_changes_its_protocol_keeps_its_id():
    driver, classic = mixed()
    classic.sync()
    client = driver.client(classic.member_id)
    assert driver.consumer_group().members[classic.member_id].classic is None
    with pytest.raises(UnknownMemberIdError):
        classic.heartbeat()
    assert client.epoch


# --- downgrades -----------------------------------------------------------------------------------


def settled_mix() -> tuple[ConsumerDriver, ClassicClient, Any]:
    driver, one, two = classic_pair()
    two.leave()
    one.step()
    one.step()
    consumer = driver.client("m")
    for _ in range(4):
        one.step()
        settle(consumer, rounds=1)
    assert len(one.owned) == len(consumer.owned) == 2
    return driver, one, consumer


@pytest.mark.parametrize("how", ["leave", "expire", "remove"])
def test_group_is_downgraded_when_its_last_consumer_leaves_or_expires(how):
    driver, classic, consumer = settled_mix()
    epoch = driver.consumer_group().epoch
    had = classic.owned
    if how == "leave":
        consumer.leave()
    elif how == "remove":
        driver.leave("m")
    else:
        for _ in range(5):
            driver.advance(SESSION - 1)
            with_rebalance(classic)
    assert driver.state() == "PreparingRebalance"
    assert driver.group().generation_id == epoch
    kept = assigned(("t", tuple(sorted(index for _, index in had))))
    # The assignment has the version of the member's subscription (1).
    assert driver.group().members[classic.member_id].assignment == b"\0\1" + kept[2:]
    with pytest.raises(RebalanceInProgressError):
        classic.heartbeat()
    driver.reload()
    assert driver.state() == "Stable"
    classic.join()
    classic.step()
    assert len(classic.owned) == 4
    assert driver.event("group-downgraded")["members"] == 1


def test_downgrade_after_reload_keeps_the_topic_names_of_assignments():
    driver, classic, consumer = settled_mix()
    had = classic.owned
    Driver.reload(driver)
    consumer.leave()
    kept = tuple(("t", index) for index in sorted(index for _, index in had))
    assert decode_assignment(driver.group().members[classic.member_id].assignment)[0] == kept


def test_group_is_not_downgraded_if_the_migration_policy_forbids_it():
    driver = ConsumerDriver(consumer=settings(migration_policy=MigrationPolicy.UPGRADE))
    consumer = driver.client("m")
    classic = ClassicClient(driver, "one")
    classic.join()
    classic.sync()
    consumer.leave()
    assert isinstance(driver.groups[G], ConsumerGroup)
    for _ in range(2):
        classic.step()
    assert len(classic.owned) == 4, "the broker goes on to assign"


@pytest.mark.parametrize("limit", [1, 0])
def test_group_above_the_classic_max_size_is_not_downgraded(limit):
    driver = ConsumerDriver(GroupLimits(max_group_size=limit))
    consumer = driver.client("m")
    ClassicClient(driver, "one").join()
    consumer.leave()
    assert isinstance(driver.groups[G], ClassicGroup if limit else ConsumerGroup)


def test_group_whose_classic_record_would_be_too_large_is_not_downgraded():
    driver = ConsumerDriver(max_batch_bytes=900)
    consumer = driver.client("m")
    fat = subscription("t") + b"\0" * 200
    Driver.join(driver, version=3, protocols=(("range", fat),))
    driver.max_batch_bytes = 200
    consumer.leave()
    assert isinstance(driver.groups[G], ConsumerGroup)


def test_static_replacement_with_the_other_protocol_converts_the_group():
    driver = ConsumerDriver()
    consumer = driver.client("m", instance_id="i")
    token = Driver.join(driver, instance="i")
    result = driver.answer(token)
    assert driver.state() == "Stable"
    group = driver.group()
    assert set(group.members) == {result.member_id}
    assert group.members[result.member_id].assignment == assigned(("t", (0, 1, 2, 3)))
    with pytest.raises(GroupIdNotFoundError):
        driver.beat("m", consumer.epoch, instance_id="i")
    driver.reload()
    back = driver.client("n", instance_id="i")
    assert back.owned == {(T, index) for index in range(4)}
    assert set(driver.consumer_group().members) == {"n"}


def test_member_waiting_for_a_partition_gets_it_when_the_group_becomes_classic():
    driver = ConsumerDriver()
    consumer = driver.client("m", instance_id="i")
    waiting = ClassicClient(driver, "one")
    waiting.join()
    consumer.beat()
    assert len(consumer.told) == 2, "it is to give up two, and does not say that it did"
    back = ClassicClient(driver, "two", instance_id="i")
    back.join()
    assert isinstance(driver.groups[G], ClassicGroup)
    for _ in range(4):
        waiting.step()
        back.step()
    assert driver.state() == "Stable"
    assert sorted(map(len, (waiting.owned, back.owned))) == [2, 2]
    assert len(waiting.owned | back.owned) == 4


# --- the log -------------------------------------------------------------------------------------


def there_and_back() -> ConsumerDriver:
    driver, classic, consumer = settled_mix()
    driver.commit(("t", 0, 7), generation=consumer.epoch, member_id="m", knows_member_epochs=True)
    consumer.leave()
    classic.join()
    classic.step()
    driver.join("n", instance_id="i", subscribed_topic_regex="t.*")
    Driver.join(driver, instance="i")
    return driver


def test_every_variant_of_the_log_loads_to_the_same_state():
    every_variant_loads_back(there_and_back)


def test_every_prefix_of_the_log_loads():
    every_prefix_loads(there_and_back)


def test_abandoned_joins_are_bounded_in_groups_of_either_protocol():
    limits = GroupLimits(max_pending_members=100)
    driver = ConsumerDriver(limits, consumer=settings(max_size=300))
    machine, refused = driver.machine, 0
    driver.client("m")
    for number in range(20_000):
        command: Any = JoinGroup(
            group_id=G if number % 2 else "h",
            member_id=f"x{number}" if number % 4 == 1 else "",
            group_instance_id=None,
            client_id="c",
            client_host="/h",
            session_timeout_ms=SESSION,
            rebalance_timeout_ms=REBALANCE,
            protocol_type="consumer",
            protocols=(("range", subscription("t")),),
            require_known_member_id=True,
            supports_skip_assignment=True,
            new_member_id=f"c-{number}",
        )
        try:
            decision = machine.decide(number + 1_000, command, driver.now)
        except (GroupMaxSizeReachedError, GroupLimitExceededError):
            refused += 1
            continue
        for record in decision.records:
            machine.replay(record, number, driver.now, None)
    machine.check()
    assert len(driver.consumer_group().members) == 300
    assert len(driver.group("h").pending_members) == 100
    assert refused > 4_600


def test_classic_subscription_is_decoded_in_every_version():
    driver = ConsumerDriver()
    driver.client("m", "t", "u")
    driver.answer(Driver.join(driver, "x"))
    owned = struct.pack(">ih", 1, 1) + b"t" + struct.pack(">ii", 1, 0)
    for version, tail in (
        (0, b""),
        (1, owned),
        (2, owned + struct.pack(">i", 3)),
        (3, owned + struct.pack(">ih", 3, 1) + b"r"),
        (9, owned + struct.pack(">ih", 3, 1) + b"r" + b"more"),
    ):
        metadata = struct.pack(">h", version) + subscription("t")[2:] + tail
        token = Driver.join(driver, "x", protocols=(("range", metadata),))
        result = driver.answer(token)
        member = driver.consumer_group().members[result.member_id]
        assert member.subscribed_topic_names == ("t",)
        assert member.rack_id == ("r" if version >= 3 else None)
