"""Server-side assignors: valid, balanced, sticky and deterministic assignments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.groups.assignors.built_in import BUILT_IN
from fencepost.groups.assignors.model import (
    MAX_ASSIGNORS,
    AssignorFault,
    AssignorRegistry,
    GroupSpec,
    MemberSpec,
    run,
)
from fencepost.groups.assignors.range import RangeAssignor
from fencepost.groups.assignors.testing import check
from fencepost.groups.assignors.uniform import UniformAssignor
from tests.support.stalls import watched_loop

TOPICS = tuple(bytes([number]) * 16 for number in range(1, 5))
T, U = TOPICS[:2]
ASSIGNORS = tuple(BUILT_IN.values())


@st.composite
def groups(draw, *, homogeneous: bool | None = None):
    topic_ids = TOPICS[: draw(st.integers(1, 4))]
    counts = {topic_id: draw(st.integers(1, 9)) for topic_id in topic_ids}
    same = draw(st.booleans()) if homogeneous is None else homogeneous
    everything = frozenset(topic_ids)
    members = {}
    for number in range(draw(st.integers(1, 6))):
        own = everything if same else draw(st.frozensets(st.sampled_from(topic_ids)))
        # Owned partitions may also be owned by another member, deleted, or no longer subscribed to.
        held = draw(
            st.frozensets(st.tuples(st.sampled_from(TOPICS), st.integers(0, 10)), max_size=8)
        )
        instance = f"i{9 - number}" if draw(st.booleans()) else None
        members[f"m{number}"] = MemberSpec(instance, own, held)
    return GroupSpec(members, counts)


@pytest.mark.parametrize("assignor", ASSIGNORS, ids=lambda assignor: assignor.name)
def test_assignor_passes_the_check_for_custom_assignors(assignor):
    check(assignor)


def with_targets(group: GroupSpec, targets) -> GroupSpec:
    return GroupSpec(
        {name: replace(spec, assigned=targets[name]) for name, spec in group.members.items()},
        group.partition_counts,
    )


def everything_given(group: GroupSpec, result) -> bool:
    wanted = {
        (topic_id, index)
        for topic_id, count in group.partition_counts.items()
        if any(topic_id in spec.topic_ids for spec in group.members.values())
        for index in range(count)
    }
    return set().union(*result.values()) == wanted


@pytest.mark.parametrize("assignor", ASSIGNORS, ids=lambda assignor: assignor.name)
@settings(max_examples=50, deadline=None)
@given(group=groups())
def test_assignment_is_complete_and_independent_of_member_order(assignor, group):
    check_completeness(assignor, group)


@pytest.mark.slow
@pytest.mark.parametrize("assignor", ASSIGNORS, ids=lambda assignor: assignor.name)
@settings(max_examples=200, deadline=None)
@given(group=groups())
def test_assignment_of_further_groups_is_complete(assignor, group):
    check_completeness(assignor, group)


def check_completeness(assignor, group):
    result = run(assignor, group)
    assert everything_given(group, result)
    shuffled = GroupSpec(
        dict(reversed(group.members.items())), dict(reversed(group.partition_counts.items()))
    )
    assert run(assignor, shuffled) == result


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(group=groups())
def test_uniform_result_is_balanced_across_subscribers(group):
    result = run(UniformAssignor(), group)
    for name, partitions in result.items():
        for topic_id in {topic_id for topic_id, _ in partitions}:
            for other, spec in group.members.items():
                if topic_id in spec.topic_ids:
                    assert len(partitions) - len(result[other]) < 2, (name, other)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(group=groups())
def test_uniform_keeps_its_own_result(group):
    result = run(UniformAssignor(), group)
    assert run(UniformAssignor(), with_targets(group, result)) == result


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(group=groups(homogeneous=True), leaves=st.booleans())
def test_uniform_moves_the_fewest_partitions(group, leaves):
    before = run(UniformAssignor(), group)
    members = dict(with_targets(group, before).members)
    if leaves and len(members) > 1:
        del members["m0"]
    else:
        members["new"] = MemberSpec(None, members["m0"].topic_ids)
    after = run(UniformAssignor(), GroupSpec(members, group.partition_counts))
    total = sum(len(partitions) for partitions in after.values())
    quota, extra = divmod(total, len(members))
    # A member only gives up partitions beyond its quota.
    for name in members.keys() - {"new"}:
        kept = before[name] & after[name]
        assert len(kept) >= min(len(before[name]), quota)
        if not extra:
            assert len(kept) == min(len(before[name]), quota)
    over = sorted((len(before[name]) for name in members.keys() - {"new"}), reverse=True)
    most = sum(min(n, quota + (rank < extra)) for rank, n in enumerate(over))
    assert sum(len(before.get(name, frozenset()) & after[name]) for name in members) == most


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(group=groups())
def test_range_assigns_consecutive_partitions_evenly(group):
    result = run(RangeAssignor(), group)
    for topic_id, count in group.partition_counts.items():
        shares = [
            sorted(index for topic, index in partitions if topic == topic_id)
            for name, partitions in result.items()
            if topic_id in group.members[name].topic_ids
        ]
        for share in shares:
            assert share == list(range(share[0], share[0] + len(share))) if share else True
        if shares:
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert sum(map(len, shares)) == count


def test_range_puts_static_members_first_and_co_partitions():
    both = frozenset({T, U})
    members = {
        "a": MemberSpec(None, both),
        "z": MemberSpec("i1", both),
        "y": MemberSpec("i2", both),
    }
    result = run(RangeAssignor(), GroupSpec(members, {T: 4, U: 4}))
    assert result["z"] == {(T, 0), (T, 1), (U, 0), (U, 1)}
    assert result["y"] == {(T, 2), (U, 2)}
    assert result["a"] == {(T, 3), (U, 3)}


def test_uniform_balances_members_with_different_subscriptions():
    members = {
        "a": MemberSpec(None, frozenset({T}), frozenset({(T, 0), (T, 1)})),
        "b": MemberSpec(None, frozenset({T, U}), frozenset({(T, 2), (U, 0), (U, 1)})),
        "c": MemberSpec(None, frozenset({U})),
    }
    result = run(UniformAssignor(), GroupSpec(members, {T: 3, U: 3}))
    assert {name: len(mine) for name, mine in result.items()} == {"a": 2, "b": 2, "c": 2}
    assert {(T, 0), (T, 1)} == result["a"]


def test_group_without_members_or_subscriptions_gets_no_partitions():
    for assignor in ASSIGNORS:
        assert run(assignor, GroupSpec({}, {})) == {}
        alone = GroupSpec({"a": MemberSpec(None, frozenset())}, {})
        assert run(assignor, alone) == {"a": frozenset()}


class Custom:
    def __init__(self, name, result=()):
        self.name = name
        self.result = dict(result)

    def assign(self, group):
        return self.result


@pytest.mark.parametrize(
    "result",
    [
        {"x": frozenset({(T, 0)})},
        {"a": frozenset({(T, 3)})},
        {"a": frozenset({(T, -1)})},
        {"a": frozenset({(U, 0)})},
        {"a": frozenset({(T, 0)}), "b": frozenset({(T, 0)})},
    ],
)
def test_invalid_result_of_a_custom_assignor_is_refused(result):
    group = GroupSpec(
        {"a": MemberSpec(None, frozenset({T})), "b": MemberSpec(None, frozenset({T}))},
        {T: 3, U: 3},
    )
    with pytest.raises(AssignorFault):
        run(Custom("c", result), group)


def test_registry_refuses_too_few_too_many_and_duplicate_assignors():
    full = [Custom(f"c{number}") for number in range(MAX_ASSIGNORS)]
    registry = AssignorRegistry(full)
    assert registry.default is full[0]
    assert "c3" in registry
    assert registry.get("c3") is full[3]
    assert registry.names[0] == "c0"
    for wrong in ([], [*full, Custom("more")], [Custom("c"), Custom("c")]):
        with pytest.raises(ValueError, match="assignors"):
            AssignorRegistry(wrong)


def crowd(members: int, topics: int, partitions: int, held: int = 0) -> GroupSpec:
    """Return members, half of which subscribe to every other topic; m0 owns ``held`` partitions."""
    ids = [number.to_bytes(16) for number in range(topics)]
    holds = frozenset((ids[0], index) for index in range(held))
    return GroupSpec(
        {
            f"m{number:05}": MemberSpec(
                None, frozenset(ids[:: 1 + number % 2]), frozenset() if number else holds
            )
            for number in range(members)
        },
        dict.fromkeys(ids, partitions),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [crowd(1000, 2, 5000), crowd(1000, 100, 10), crowd(1000, 2, 5000, held=5000)],
    ids=["two large topics", "many topics", "all are held by one"],
)
def test_uniform_with_many_members_does_not_stall_the_loop(group):
    with watched_loop() as watch:
        watch.time(lambda: run(UniformAssignor(), group), "assign")
    watch.check()
