"""The input and the result of an assignor; the registry; the check of a result.

Source: Kafka's ``ConsumerGroupPartitionAssignor``, ``GroupSpec`` and ``MemberSubscription``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from fencepost.logcore.values import dataclass

TopicIdPartition = tuple[bytes, int]
"""A topic id (16 bytes) and a partition index."""

MAX_ASSIGNORS: Final = 16
"""The maximum number of assignors that a coordinator offers."""


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One member: the ids of its subscribed topics, and its current target."""

    instance_id: str | None
    topic_ids: frozenset[bytes]
    assigned: frozenset[TopicIdPartition] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The input of an assignor. ``partition_counts`` has every topic with a subscriber."""

    members: Mapping[str, MemberSpec]
    partition_counts: Mapping[bytes, int]

    @property
    def is_homogeneous(self) -> bool:
        """Whether all members subscribe to the same topics."""
        return len({spec.topic_ids for spec in self.members.values()}) <= 1


GroupAssignment = Mapping[str, frozenset[TopicIdPartition]]
"""Member id → its partitions; an omitted member gets none."""


class AssignorFault(Exception):  # noqa: N818 - it is the assignor's, not ours
    """An assignor raised, took too long or returned an invalid result; the group keeps its target.

    ``assignor`` is the assignor's name; ``problem`` describes the fault.
    """

    def __init__(self, assignor: str, problem: str) -> None:
        super().__init__(f"assignor {assignor!r}: {problem}")
        self.assignor = assignor
        self.problem = problem


class Assignor(Protocol):
    """Computes targets. It must be pure and deterministic; :func:`run` checks its results."""

    @property
    def name(self) -> str:
        """The name in requests and in the configuration."""

    def assign(self, group: GroupSpec) -> GroupAssignment:
        """Return the assignment."""


class AssignorRegistry:
    """The assignors of a coordinator by name; the first one is the default.

    Raises ``ValueError`` for no assignors, for two with the same name, and for more than
    :data:`MAX_ASSIGNORS`.
    """

    def __init__(self, assignors: Iterable[Assignor]) -> None:
        all_assignors = tuple(assignors)
        by_name = {assignor.name: assignor for assignor in all_assignors}
        if not 0 < len(all_assignors) <= MAX_ASSIGNORS:
            raise ValueError(f"expected 1 to {MAX_ASSIGNORS} assignors, not {len(all_assignors)}")
        counts = Counter(assignor.name for assignor in all_assignors)
        for name, count in counts.items():
            if count > 1:
                raise ValueError(f"{count} of the assignors have the name {name!r}")
        self._by_name = MappingProxyType(by_name)
        self.default = all_assignors[0]
        self.has_remote = any(hasattr(assignor, "is_remote") for assignor in all_assignors)
        """Whether some assignor is remote."""

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def names(self) -> tuple[str, ...]:
        """The names, the default's first."""
        return tuple(self._by_name)

    def get(self, name: str) -> Assignor:
        """Return an assignor; KeyError if there is none with that name."""
        return self._by_name[name]


def run(assignor: Assignor, group: GroupSpec) -> dict[str, frozenset[TopicIdPartition]]:
    """Return the assignor's result, with an entry for every member of the group.

    Raises :class:`AssignorFault` if the assignor fails, or if the result is not an assignment, or
    assigns a partition twice, a partition that does not exist, or a partition of a topic to which
    the member does not subscribe.
    """
    try:
        return checked(assignor.name, group, assignor.assign(group))
    except AssignorFault:
        raise
    except Exception as error:
        raise AssignorFault(assignor.name, f"{type(error).__name__}: {error}") from error


def checked(
    name: str, group: GroupSpec, result: GroupAssignment
) -> dict[str, frozenset[TopicIdPartition]]:
    """Check the ``result`` of the assignor ``name``, and return it as :func:`run` does."""
    assigned: set[TopicIdPartition] = set()
    targets = dict.fromkeys(group.members, frozenset[TopicIdPartition]())
    for member_id, partitions in result.items():
        member = group.members.get(member_id)
        if member is None:
            raise AssignorFault(name, f"it invents member {member_id!r}")
        target = frozenset(partitions)
        for topic_id, index in target:
            exists = 0 <= index < group.partition_counts.get(topic_id, 0)
            if not exists or topic_id not in member.topic_ids:
                raise AssignorFault(name, f"{member_id!r} may not get {topic_id.hex()}-{index}")
        if len(target) != len(list(partitions)) or not assigned.isdisjoint(target):
            raise AssignorFault(name, "it gives a partition twice")
        assigned |= target
        targets[member_id] = target
    return targets


def member_order(item: tuple[str, MemberSpec]) -> tuple[bool, str]:
    """Return a sort key: static members by instance id, then dynamic members by member id."""
    member_id, spec = item
    if spec.instance_id is None:
        return True, member_id
    return False, spec.instance_id
