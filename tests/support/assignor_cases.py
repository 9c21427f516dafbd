"""Random inputs for client-side assignors: groups that rebalance a few times.

The same seed gives the same inputs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fencepost.groups.assignors.client.built_in import BUILT_IN as ASSIGNORS
from fencepost.groups.assignors.client.model import (
    ClientAssignor,
    Racks,
    Subscription,
    TopicPartition,
)

Topics = dict[str, tuple[Racks, ...]]
Members = dict[str, Subscription]


@dataclass(frozen=True)
class Case:
    """The input of one assignment."""

    assignor: str
    topics: Topics
    members: Members


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield ``count`` cases: groups of up to 12 members, each group with a few generations."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        for case in _life(rng):
            yield case
            made += 1
            if made == count:
                return


def _life(rng: random.Random) -> Iterator[Case]:
    assignor = ASSIGNORS[rng.choice(tuple(ASSIGNORS))]
    with_racks, alike = rng.random() < 0.5, rng.random() < 0.5
    topics: Topics = {}
    members: Members = {}
    last: dict[str, list[TopicPartition]] = {}
    for generation in range(1, rng.randint(2, 6)):
        _change_topics(rng, topics, with_racks)
        _change_members(rng, topics, members, with_racks, alike)
        subscriptions = {
            name: _subscription(rng, assignor, member, last.get(name), generation, topics)
            for name, member in members.items()
        }
        yield Case(assignor.name, dict(topics), subscriptions)
        last = assignor.assign(topics, subscriptions)


def _change_topics(rng: random.Random, topics: Topics, with_racks: bool) -> None:
    for _ in range(rng.randint(0 if topics else 1, 4)):
        name = f"{rng.choice(('orders', 'bills', 'x'))}-{rng.randint(0, 9)}"
        topics[name] = tuple(_racks(rng, with_racks) for _ in range(rng.randint(1, 9)))
    if len(topics) > 1 and rng.random() < 0.2:
        del topics[rng.choice(sorted(topics))]


def _racks(rng: random.Random, with_racks: bool) -> Racks:
    return frozenset(rng.sample(("a", "b", "c"), rng.randint(0, 2))) if with_racks else frozenset()


def _change_members(
    rng: random.Random, topics: Topics, members: Members, with_racks: bool, alike: bool
) -> None:
    for name in list(members):
        if len(members) > 1 and rng.random() < 0.2:
            del members[name]
    for _ in range(rng.randint(0 if members else 1, 4)):
        name = f"client-{rng.getrandbits(64):x}"
        rack = rng.choice(("a", "b", "c", "d", None)) if with_racks else None
        instance = f"i{rng.randint(0, 99)}" if rng.random() < 0.2 else None
        if instance in {member.instance_id for member in members.values()}:
            instance = None
        members[name] = Subscription((), rack_id=rack, instance_id=instance)
    everything = (*sorted(topics), "missing")
    for name, member in members.items():
        if alike or not member.topics or rng.random() < 0.2:
            chosen = (
                everything if alike else rng.sample(everything, rng.randint(1, len(everything)))
            )
            members[name] = replace(member, topics=tuple(sorted(chosen)))


def _subscription(
    rng: random.Random,
    assignor: ClientAssignor,
    member: Subscription,
    last: list[TopicPartition] | None,
    generation: int,
    topics: Topics,
) -> Subscription:
    """Return a member's subscription.

    Some subscriptions have a wrong generation and random owned partitions. With an eager assignor,
    some have no generation.
    """
    owned = [] if last is None else [tp for tp in last if tp[1] < len(topics.get(tp[0], ()))]
    generation_sent = generation - 1
    if rng.random() < 0.15:
        generation_sent = rng.randint(-1, generation)
        everything = [(name, index) for name, rows in topics.items() for index in range(len(rows))]
        owned = rng.sample(everything, rng.randint(0, min(4, len(everything))))
    data = assignor.user_data(None if last is None else owned, generation_sent)
    if assignor.is_cooperative:
        return replace(
            member, user_data=data, owned=tuple(sorted(owned)), generation=generation_sent
        )
    return replace(member, user_data=data, generation=generation_sent if rng.random() < 0.9 else -1)
