"""The subscriptions of a consumer group's members, counted.

Each join and each leave computes the group's topics again. Most members of a large group have the
same subscription, so the computation reads the few distinct subscriptions instead of all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fencepost.groups.consumer_records import ConsumerMemberValue, RegularExpressionValue

Subscription = tuple[tuple[str, ...], str]
"""Topics by name, and an expression or ""."""


class Subscriptions:
    """The number of members with each subscription."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Subscription, int] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subscriptions) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """Return an independent copy."""
        other = type(self)()
        other._counts = self._counts.copy()
        return other

    def change(self, old: ConsumerMemberValue | None, new: ConsumerMemberValue | None) -> None:
        """Replace a member's old subscription by the new one. None: the member joins or leaves."""
        for member, by in ((old, -1), (new, 1)):
            if member is not None:
                subscription = member.subscribed_topic_names, member.subscribed_topic_regex or ""
                count = self._counts.get(subscription, 0) + by
                if count:
                    self._counts[subscription] = count
                else:
                    del self._counts[subscription]

    @property
    def expressions(self) -> set[str]:
        """The regular expressions in the members' subscriptions."""
        return {regex for _, regex in self._counts if regex}

    def topics(self, resolved: Mapping[str, RegularExpressionValue]) -> frozenset[str]:
        """Return the topics that members subscribe to by name, or by a ``resolved`` expression."""
        topics = set().union(*(names for names, _ in self._counts))
        for regex in self.expressions & resolved.keys():
            topics.update(resolved[regex].topics)
        return frozenset(topics)
