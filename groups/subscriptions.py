"""What the members of a consumer group subscribe to, counted.

Each join and each leave asks for it. The members of a crowd mostly want the same, so the answer
comes from the few different subscriptions there are and not from a walk over all members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fencepost.groups.consumer_records import ConsumerMemberValue, RegularExpressionValue

Subscription = tuple[tuple[str, ...], str]
"""Topics by name, and an expression; empty where there is none."""


class Subscriptions:
    """How many members have which subscription."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Subscription, int] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subscriptions) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]

    def copy(self) -> Self:
        """The same, to be changed by itself."""
        other = type(self)()
        other._counts = self._counts.copy()
        return other

    def change(self, old: ConsumerMemberValue | None, new: ConsumerMemberValue | None) -> None:
        """Count a member as ``new`` and no more as ``old``; None where it comes or goes."""
        for member, by in ((old, -1), (new, 1)):
            if member is not None:
                wants = member.subscribed_topic_names, member.subscribed_topic_regex or ""
                count = self._counts.get(wants, 0) + by
                if count:
                    self._counts[wants] = count
                else:
                    del self._counts[wants]

    @property
    def expressions(self) -> set[str]:
        """The regular expressions that members subscribe by."""
        return {regex for _, regex in self._counts if regex}

    def topics(self, resolved: Mapping[str, RegularExpressionValue]) -> frozenset[str]:
        """The topics that members subscribe to by name, or by what is ``resolved``."""
        topics = set().union(*(names for names, _ in self._counts))
        for regex in self.expressions & resolved.keys():
            topics.update(resolved[regex].topics)
        return frozenset(topics)
