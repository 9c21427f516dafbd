"""Plans: the assignment of a group if members joined or left, or the assignor were another.

A plan changes nothing: it is computed from the group's description and the cluster's metadata. For
classic groups, the members' subscriptions and current partitions go through the client-side
assignors of ``groups``; a cooperative assignor runs until no partition moves. For consumer groups
the server-side assignors run, including custom ones that are installed here; the broker's limits on
them do not apply. Hypothetical members are called ``added-1`` and so on. The real id of a new
member is not known before it joins, so the order of otherwise equal members may differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from fencepost.client.queries.awaited import REBALANCING, awaited
from fencepost.client.queries.group_view import CLASSIC, GroupView, MemberView
from fencepost.client.queries.share_offsets import SHARE
from fencepost.groups.assignors.built_in import BUILT_IN as SERVER_SIDE
from fencepost.groups.assignors.client.built_in import BUILT_IN as CLIENT_SIDE
from fencepost.groups.assignors.client.model import ClientAssignor, Subscription
from fencepost.groups.assignors.client.protocol import decode_subscription
from fencepost.groups.assignors.model import Assignor, AssignorFault, GroupSpec, MemberSpec, run
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.regex import Regex
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

MOST_ROUNDS = 10
"""The maximum number of rounds of a cooperative assignor until no partition moves. A correct
assignor needs two."""

Owners = dict[str, frozenset["Partition"]]


def rebalance_warning(group: GroupView) -> str | None:
    """Return a warning if the group is rebalancing, so that the current assignment will change."""
    if group.state in {"Stable", "Empty", "Dead"}:
        return None
    return f"group {group.group!r} is {group.state}: its current assignment is about to change"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Partitions by member, before and after. A partition moves if its owner changes."""

    assignor: str
    now: Owners
    then: Owners

    @property
    def moved(self) -> int:
        """The number of partitions that get another owner or a first owner, or lose their owner."""
        before = {tp: name for name, partitions in self.now.items() for tp in partitions}
        after = {tp: name for name, partitions in self.then.items() for tp in partitions}
        return sum(before.get(tp) != after.get(tp) for tp in before.keys() | after.keys())

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return len(frozenset().union(*self.now.values(), *self.then.values()))


def plan(
    session: ClusterSession, group: GroupView, add: int, remove: Sequence[str], assignor: str | None
) -> GroupPlan:
    """Compute the plan. Raises ClickException for unknown members and assignors.

    A consumer group reports its subscriptions in every state, a classic group only while Stable.
    """
    if group.kind == SHARE:
        raise click.ClickException(
            f"{group.group!r} is a share group: its members share partitions, and none moves"
        )
    if not group.members:
        raise click.ClickException(
            f"group {group.group!r} is {group.state} and has no members: a plan needs their"
            " subscriptions"
        )
    if group.kind == CLASSIC and (
        group.state in REBALANCING or not all(member.metadata for member in group.members)
    ):
        raise _rebalances(session, group)
    ids = {name for member in group.members for name in (member.member_id, member.instance_id)}
    for name in remove:
        if name not in ids:
            raise click.ClickException(f"{group.group!r} has no member {name!r}")
    now = {member.member_id: frozenset(member.assigned) for member in group.members}
    stay = [
        member
        for member in group.members
        if member.member_id not in remove and member.instance_id not in remove
    ]
    name = assignor or group.assignor
    then: Owners = {}
    if group.kind == CLASSIC:
        if name not in CLIENT_SIDE:
            raise _unknown_assignor(name, CLIENT_SIDE)
        then = _classic(session, CLIENT_SIDE[name], group, stay, add)
    else:
        computes = _server_side(name)
        if stay or add:
            then = _consumer(session, computes, group, stay, add)
    return GroupPlan(name, now, then)


def _rebalances(session: ClusterSession, group: GroupView) -> click.ClickException:
    rebalance = awaited(session, group.group)
    waits = "" if rebalance is None else f"; it waits for {rebalance}"
    return click.ClickException(
        f"group {group.group!r} rebalances ({group.state}){waits}: brokers return the"
        " subscriptions of its members only while it is Stable"
    )


def known_assignors(group: GroupView) -> list[str]:
    """Return the built-in assignors that a plan for ``group`` may name."""
    return sorted(CLIENT_SIDE if group.kind == CLASSIC else SERVER_SIDE)


def _unknown_assignor(name: str, names: Iterable[str]) -> click.ClickException:
    return click.ClickException(f"unknown assignor {name!r}; known are {', '.join(sorted(names))}")


def _server_side(name: str) -> Assignor:
    """Return a built-in or installed server-side assignor, as the broker would find it."""
    if name in SERVER_SIDE:
        return SERVER_SIDE[name]
    from importlib.metadata import entry_points

    from fencepost.coordinator.services.assignors.frames import ENTRY_POINTS

    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in installed:
        raise _unknown_assignor(name, (*SERVER_SIDE, *installed))
    try:
        made: Assignor = installed[name].load()()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise click.ClickException(f"assignor {name!r} cannot be loaded: {problem}") from error
    return made


def _classic(
    session: ClusterSession,
    assignor: ClientAssignor,
    group: GroupView,
    stay: Sequence[MemberView],
    add: int,
) -> Owners:
    try:
        subscriptions = {
            m.member_id: decode_subscription(m.metadata, m.instance_id) for m in group.members
        }
    except CorruptRecordError as error:
        raise click.ClickException(
            f"the members of group {group.group!r} are not consumers: {error}"
        ) from error
    most_common = Counter(
        subscription.topics for subscription in subscriptions.values()
    ).most_common(1)[0][0]
    members = {member.member_id: subscriptions[member.member_id] for member in stay}
    members |= {f"added-{number}": Subscription(most_common) for number in range(1, add + 1)}
    owned = {member.member_id: list(member.assigned) for member in stay}
    topics = _racks(session, {topic for member in members.values() for topic in member.topics})
    for generation in range(1, MOST_ROUNDS):
        member_subscriptions = {
            name: replace(
                member,
                owned=tuple(owned.get(name, ())) if assignor.is_cooperative else (),
                generation=generation if name in owned else -1,
                user_data=assignor.user_data(owned.get(name), generation),
            )
            for name, member in members.items()
        }
        before, owned = owned, assignor.assign(topics, member_subscriptions)
        if not assignor.is_cooperative or before == owned:
            break
    return {name: frozenset(partitions) for name, partitions in owned.items()}


def _racks(session: ClusterSession, topics: set[str]) -> dict[str, tuple[frozenset[str], ...]]:
    cluster = session.client.metadata(refresh=True)
    racks = {node: broker.rack for node, broker in cluster.brokers.items()}
    return {
        name: tuple(
            frozenset(rack for node in row.replicas if (rack := racks.get(node)) is not None)
            for _, row in sorted(topic.partitions.items())
        )
        for name, topic in cluster.topics.items()
        if name in topics
    }


def _consumer(
    session: ClusterSession,
    assignor: Assignor,
    group: GroupView,
    stay: Sequence[MemberView],
    add: int,
) -> Owners:
    topics = session.client.metadata(refresh=True).topics
    ids = {name: topic.topic_id.bytes for name, topic in topics.items() if topic.topic_id}

    def topic_ids(member: MemberView) -> frozenset[bytes]:
        names = set(member.topics)
        if member.regex:
            matches = Regex(member.regex).matches
            names |= {name for name in topics if matches(name)}
        return frozenset(ids[name] for name in names if name in ids)

    most_common = Counter(topic_ids(member) for member in group.members).most_common(1)[0][0]
    members = {
        member.member_id: MemberSpec(
            member.instance_id,
            topic_ids(member),
            frozenset((ids[name], index) for name, index in member.target or () if name in ids),
        )
        for member in stay
    }
    members |= {f"added-{number}": MemberSpec(None, most_common) for number in range(1, add + 1)}
    subscribed = frozenset[bytes]().union(*(spec.topic_ids for spec in members.values()))
    names = {topic_id: name for name, topic_id in ids.items()}
    counts = {topic_id: len(topics[names[topic_id]].partitions) for topic_id in subscribed}
    try:
        given = run(assignor, GroupSpec(members, counts))
    except AssignorFault as fault:
        raise click.ClickException(str(fault)) from fault
    return {
        name: frozenset((names[topic_id], index) for topic_id, index in partitions)
        for name, partitions in given.items()
    }
