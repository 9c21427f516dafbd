"""Checks for custom assignors: properties of every result, and random groups to try.

    from fencepost.groups.assignors.testing import check
    check(MyAssignor())            # raises AssignorFault, which describes a wrong result

``check`` takes server-side assignors (``fencepost.groups.assignors.model.Assignor``) and
client-side ones (``fencepost.groups.assignors.client.model.ClientAssignor``). Groups come from a
seed, so that a failure is reproducible; the assignor gets each group twice, because it must be a
function of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from fencepost.groups.assignors.client.model import ClientAssignor, Result, Subscription, Topics
from fencepost.groups.assignors.client.model import TopicPartition as NamedPartition
from fencepost.groups.assignors.model import (
    Assignor,
    AssignorFault,
    GroupAssignment,
    GroupSpec,
    MemberSpec,
    run,
)

DEFAULT_GROUPS: Final = 500
"""The number of groups that ``check`` tries by default; the built-in assignors take a few
seconds."""

_MOST_MEMBERS, _MOST_TOPICS, _MOST_PARTITIONS = 8, 5, 9
_RACKS: Final = ("a", "b", "c")


def check(
    assignor: Assignor | ClientAssignor, *, groups: int = DEFAULT_GROUPS, seed: int = 1
) -> None:
    """Try ``assignor`` on random groups, each over a few rounds in which members join and leave.

    Raises :class:`fencepost.groups.assignors.model.AssignorFault`, which describes the wrong
    result.
    """
    dice = _Random(seed)
    tried = 0
    while tried < groups:
        if isinstance(assignor, ClientAssignor):
            life = _client_life(dice, assignor)
        else:
            life = _server_life(dice, assignor)
        tried += sum(1 for _ in life)


def check_server_result(assignor: Assignor, group: GroupSpec, result: GroupAssignment) -> None:
    """Raise AssignorFault unless ``result`` is valid and assigns every assignable partition."""
    assigned = {partition for mine in result.values() for partition in mine}
    subscribed = {topic for member in group.members.values() for topic in member.topic_ids}
    for topic, count in group.partition_counts.items():
        missing = [index for index in range(count) if (topic, index) not in assigned]
        if topic in subscribed and missing:
            raise AssignorFault(assignor.name, f"it leaves {missing} of {topic.hex()} unassigned")


def check_client_result(
    assignor: ClientAssignor, topics: Topics, members: Mapping[str, Subscription], result: Result
) -> None:
    """Raise AssignorFault unless ``result`` is valid and complete.

    A cooperative result may omit owned partitions, and must omit those that move to another member.
    """
    if result.keys() != members.keys():
        raise AssignorFault(assignor.name, f"members {sorted(result)} instead of {sorted(members)}")
    owners: dict[NamedPartition, str] = {}
    owner = {partition: name for name, member in members.items() for partition in member.owned}
    for name, target in result.items():
        for topic, index in target:
            if topic not in members[name].topics or not 0 <= index < len(topics.get(topic, ())):
                raise AssignorFault(assignor.name, f"it gives {name} {topic}-{index}")
            if (topic, index) in owners:
                raise AssignorFault(assignor.name, f"it gives {topic}-{index} twice")
            owners[topic, index] = name
            if assignor.is_cooperative and owner.get((topic, index), name) != name:
                former = owner[topic, index]
                newer = members[former].generation >= members[name].generation
                if newer and (topic, index) not in members[name].owned:
                    raise AssignorFault(
                        assignor.name,
                        f"{topic}-{index} moves from {former} to {name} before it is revoked",
                    )
    subscribed = {topic for member in members.values() for topic in member.topics}
    for topic in sorted(subscribed & topics.keys()):
        for index in range(len(topics[topic])):
            free = not assignor.is_cooperative or (topic, index) not in owner
            if free and (topic, index) not in owners:
                raise AssignorFault(assignor.name, f"it leaves {topic}-{index} unassigned")


class _Random:
    """A seeded generator, because state machines' packages must not import :mod:`random`."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 2 + 1

    def randrange(self, limit: int) -> int:
        """Return the next number, from 0 up to ``limit`` - 1."""
        # Knuth's MMIX constants; only the upper bits are random enough.
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % limit

    def sample(self, items: list[str]) -> list[str]:
        """Return one or more of ``items``."""
        chosen = [item for item in items if self.randrange(2)]
        return chosen or [items[self.randrange(len(items))]]


def _server_life(dice: _Random, assignor: Assignor) -> Iterator[None]:
    members: dict[str, MemberSpec] = {}
    for _ in range(1 + dice.randrange(4)):
        names = [f"t{number}" for number in range(1 + dice.randrange(_MOST_TOPICS))]
        ids = {name: name.encode().ljust(16, b"\0") for name in names}
        counts = {ids[name]: 1 + dice.randrange(_MOST_PARTITIONS) for name in names}
        members = {name: spec for name, spec in members.items() if dice.randrange(4)}
        for number in range(0 if members else 1, dice.randrange(_MOST_MEMBERS - 2) + 2):
            members.setdefault(f"m{number}", MemberSpec(None, frozenset()))
        alike = dice.randrange(2)
        for name, spec in members.items():
            topic_ids = frozenset(ids[name] for name in (names if alike else dice.sample(names)))
            members[name] = replace(spec, topic_ids=topic_ids)
        group = GroupSpec(dict(members), counts)
        result = run(assignor, group)
        check_server_result(assignor, group, result)
        if run(assignor, group) != result:
            raise AssignorFault(assignor.name, "the same group gives another result")
        members = {name: replace(spec, assigned=result[name]) for name, spec in members.items()}
        yield


def _client_life(dice: _Random, assignor: ClientAssignor) -> Iterator[None]:
    members: dict[str, Subscription] = {}
    for generation in range(1, 2 + dice.randrange(4)):
        names = [f"t{number}" for number in range(1 + dice.randrange(_MOST_TOPICS))]
        topics = {
            name: tuple(
                frozenset(_RACKS[: dice.randrange(3)])
                for _ in range(1 + dice.randrange(_MOST_PARTITIONS))
            )
            for name in names
        }
        members = {name: member for name, member in members.items() if dice.randrange(4)}
        for number in range(0 if members else 1, dice.randrange(_MOST_MEMBERS - 2) + 2):
            rack = _RACKS[dice.randrange(3)] if dice.randrange(2) else None
            members.setdefault(f"m{number}", Subscription((), rack_id=rack))
        alike = dice.randrange(2)
        for name, member in members.items():
            subscribed = tuple(names if alike else sorted(dice.sample(names)))
            owned = tuple(
                (topic, index)
                for topic, index in member.owned
                if topic in subscribed and index < len(topics.get(topic, ()))
            )
            members[name] = replace(member, topics=subscribed, owned=owned)
        result = assignor.assign(topics, members)
        check_client_result(assignor, topics, members, result)
        if assignor.assign(topics, members) != result:
            raise AssignorFault(assignor.name, "the same group gives another result")
        members = {
            name: replace(
                member,
                owned=tuple(result[name]) if assignor.is_cooperative else (),
                generation=generation,
                user_data=assignor.user_data(result[name], generation),
            )
            for name, member in members.items()
        }
        yield
