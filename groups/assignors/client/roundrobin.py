"""The *roundrobin* assignor: the members get one partition each in turn.

A member that does not subscribe to a partition's topic is skipped.

Source: Kafka's ``RoundRobinAssignor``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.groups.assignors.client.java_order import utf16
from fencepost.groups.assignors.client.model import (
    ClientAssignor,
    Result,
    Subscription,
    Topics,
    member_order,
)


class RoundRobinAssignor(ClientAssignor):
    """The *roundrobin* assignor; the module's docstring describes the algorithm."""

    name = "roundrobin"
    is_cooperative = False

    def assign(self, topics: Topics, members: Mapping[str, Subscription]) -> Result:
        """See :class:`fencepost.groups.assignors.client.model.ClientAssignor`."""
        result: Result = {member_id: [] for member_id in members}
        ring = [
            (member_id, frozenset(member.topics))
            for member_id, member in sorted(members.items(), key=member_order)
        ]
        names = {topic for _, subscribed in ring for topic in subscribed}
        turn = 0
        for topic in sorted(names & topics.keys(), key=utf16):
            for index in range(len(topics[topic])):
                while topic not in ring[turn % len(ring)][1]:
                    turn += 1
                result[ring[turn % len(ring)][0]].append((topic, index))
                turn += 1
        return result
