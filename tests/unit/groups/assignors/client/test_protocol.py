"""Client-side assignors: valid, even and sticky assignments; bytes; checks of custom assignors."""

from __future__ import annotations

import pytest

from fencepost.groups.assignors.client import protocol
from fencepost.groups.assignors.client.java_order import (
    TableSet,
    partition_hash,
    string_hash,
    table_order,
)
from fencepost.groups.assignors.client.model import Subscription, topics_without_racks
from fencepost.groups.assignors.client.sticky import CooperativeStickyAssignor, StickyAssignor
from fencepost.groups.assignors.model import AssignorFault
from fencepost.groups.assignors.range import RangeAssignor as ServerRange
from fencepost.groups.assignors.testing import check, check_client_result
from fencepost.groups.assignors.uniform import UniformAssignor
from fencepost.logcore.errors import CorruptRecordError
from tests.support.assignor_cases import ASSIGNORS, cases


@pytest.mark.parametrize("assignor", [*ASSIGNORS.values(), UniformAssignor(), ServerRange()])
def test_built_in_assignor_passes_the_check_for_custom_assignors(assignor):
    check(assignor, groups=150)


def test_assignment_of_a_random_group_is_complete_and_without_duplicates():
    for case in cases(7, 600):
        assignor = ASSIGNORS[case.assignor]
        result = assignor.assign(case.topics, case.members)
        check_client_result(assignor, case.topics, case.members, result)


class _Wrong:
    name = "wrong"
    is_cooperative = False

    def __init__(self, assign):
        self._assign = assign

    def assign(self, topics, members):
        return self._assign(topics, members)

    def user_data(self, owned, generation):
        return None


@pytest.mark.parametrize(
    ("assign", "says"),
    [
        (lambda _t, m: {}, "instead of"),
        (lambda _t, m: {name: [] for name in m}, "unassigned"),
        (lambda _t, m: {name: [("t0", 0)] for name in m}, "t0-0"),
        (lambda _t, m: {name: [("none", 0)] for name in m}, "none-0"),
        (lambda _t, m: {name: [("t0", 99)] for name in m}, "t0-99"),
    ],
)
def test_check_for_custom_assignors_rejects_an_invalid_assignment(assign, says):
    with pytest.raises(AssignorFault, match=says):
        check(_Wrong(assign))


def test_cooperative_assignor_moves_a_partition_only_after_its_revocation():
    assignor = CooperativeStickyAssignor()
    topics = topics_without_racks({"t": 2})
    members = {
        "a": Subscription(("t",), owned=(("t", 0), ("t", 1)), generation=1),
        "b": Subscription(("t",)),
    }
    first = assignor.assign(topics, members)
    assert first == {"a": [("t", 0)], "b": []}
    with pytest.raises(AssignorFault, match="before it is revoked"):
        check_client_result(assignor, topics, members, {"a": [("t", 0)], "b": [("t", 1)]})
    members["a"] = Subscription(("t",), owned=(("t", 0),), generation=2)
    assert assignor.assign(topics, members) == {"a": [("t", 0)], "b": [("t", 1)]}


def test_sticky_assignor_keeps_owned_partitions_after_a_member_leaves():
    assignor = StickyAssignor()
    topics = topics_without_racks({"t": 6})
    members = {name: Subscription(("t",)) for name in "abc"}
    first = assignor.assign(topics, members)
    told = {
        name: Subscription(("t",), user_data=assignor.user_data(first[name], 1)) for name in "ab"
    }
    second = assignor.assign(topics, told)
    assert all(set(first[name]) <= set(second[name]) for name in "ab")
    assert sorted(len(mine) for mine in second.values()) == [3, 3]


def test_racks_are_matched_where_balance_allows():
    a, b = frozenset("a"), frozenset("b")
    topics = {"t": (b, b, a, a)}
    members = {
        "m1": Subscription(("t",), rack_id="a"),
        "m2": Subscription(("t",), rack_id="b"),
    }
    for name in ("range", "sticky", "cooperative-sticky"):
        result = ASSIGNORS[name].assign(topics, members)
        assert sorted(result["m1"]) == [("t", 2), ("t", 3)], name


@pytest.mark.parametrize("version", range(4))
def test_encoded_subscription_decodes_to_the_fields_of_its_version(version):
    whole = Subscription(("a", "b"), b"x", (("a", 0), ("b", 2)), 9, "r1", "i")
    read = protocol.decode_subscription(protocol.encode_subscription(whole, version), "i")
    assert read.topics == whole.topics
    assert read.user_data == b"x"
    assert read.owned == (whole.owned if version >= 1 else ())
    assert read.generation == (9 if version >= 2 else -1)
    assert read.rack_id == ("r1" if version >= 3 else None)


def test_subscription_of_a_later_version_is_decoded_up_to_its_known_fields():
    raw = bytearray(protocol.encode_subscription(Subscription(("t",), generation=3, rack_id="r")))
    raw[:2] = (17).to_bytes(2)
    assert protocol.decode_subscription(bytes(raw) + b"more").generation == 3
    assert protocol.decode_assignment(protocol.encode_assignment([("t", 1)])) == ((("t", 1),), None)
    assert protocol.decode_assignment(b"") == ((), None)


def test_truncated_subscription_or_negative_version_is_refused():
    raw = protocol.encode_subscription(Subscription(("t",), b"d", (("t", 1),), 3, "r"))
    for length in range(len(raw)):
        with pytest.raises(CorruptRecordError):
            protocol.decode_subscription(raw[:length])
    with pytest.raises(CorruptRecordError):
        protocol.decode_subscription(b"\xff\xff" + raw[2:])


def test_undecodable_user_data_yields_no_partitions_and_no_generation():
    whole = protocol.encode_sticky_data([("t", 1)], 5)
    assert protocol.decode_sticky_data(whole) == ((("t", 1),), 5)
    assert protocol.decode_sticky_data(whole[:-4]) == ((("t", 1),), -1), "version 0"
    assert protocol.decode_sticky_data(whole[:7]) == ((), -1)
    assert protocol.decode_sticky_data(None) == ((), -1)
    assert protocol.decode_cooperative_data(b"\0\0\0\x07") == 7
    assert protocol.decode_cooperative_data(b"\0") == -1


def test_hash_codes_and_table_order_equal_javas():
    # Computed from the formula in Java's documentation. "Aa" and "BB" are the well-known collision.
    assert string_hash("") == 0
    assert string_hash("Aa") == string_hash("BB") == 2112
    assert partition_hash(("Aa", 3)) == 31 * 34 + 2112
    assert table_order(["BB", "Aa"]) == ["BB", "Aa"]
    assert table_order(["q", "a"]) == ["q", "a"], "one slot of sixteen: as they came"
    assert table_order(["b", "a"]) == ["a", "b"]


def test_hash_table_does_not_shrink_when_entries_are_removed():
    table = TableSet(partition_hash)
    for index in range(40):
        table.add(("t", index))
    for index in range(1, 40):
        table.remove(("t", index))
    assert (len(table), table.first()) == (1, ("t", 0))
