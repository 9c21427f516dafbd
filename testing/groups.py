"""Waits for a consumer group: its state, its members, its lag, and its consumers' positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fencepost.client.queries.group_view import GroupView, describe_group, offset_rows, totals
from fencepost.client.queries.session import ClusterSession
from fencepost.coordinator.config.key import nearest
from fencepost.testing.reading import no_topic
from fencepost.testing.views import Partition

NotFetched = Callable[[GroupView], list[Partition]]
"""Returns the assigned partitions that were not fetched since their members looked up the offsets.
"""


@dataclass
class GroupWait:
    """A condition on a group of either protocol, and the group as the last poll saw it.

    ``state`` is one of Kafka's names; by default it is *Stable*, or *Empty* for ``members=0``. With
    ``not_fetched`` every member must have a partition, and have fetched each of its partitions.
    """

    group: str
    members: int | None = None
    state: str | None = None
    lag: int | None = None
    not_fetched: NotFetched | None = None
    seen: GroupView | None = None
    """The group at the last poll."""
    _behind: int | None = None
    _missing: list[Partition] = field(default_factory=list)
    _others: list[str] = field(default_factory=list)

    @property
    def _target_state(self) -> str:
        return self.state or ("Empty" if self.members == 0 else "Stable")

    def is_over(self, session: ClusterSession) -> bool:
        """Poll the group, and return whether the condition holds."""
        self.seen = view = describe_group(session, self.group)
        if view.state != self._target_state or self.members not in {None, len(view.members)}:
            if view.state == "Dead":
                self._others = [str(row.group_id) for row in session.groups()]
            return False
        if self.not_fetched is not None:
            self._missing = self.not_fetched(view)
            if self._missing or not any(member.assigned for member in view.members):
                return False
        if self.lag is None:
            return True
        self._behind = totals(offset_rows(session, [view]))["lag_at_most"]
        return self._behind is not None and self._behind <= self.lag

    def describe(self) -> str:
        """Return the condition and what the last poll saw, for the message of a TimeoutError."""
        count = "" if self.members is None else f" with {self.members} members"
        condition = f"group {self.group} {self._target_state}{count}"
        if self.lag is not None:
            behind = "unknown" if self._behind is None else self._behind
            condition += f" and at most {self.lag} behind (it is {behind})"
        if self.not_fetched is not None:
            missing = ", ".join(f"{topic}:{index}" for topic, index in self._missing)
            condition += f" and fetching{f' (not yet {missing})' if missing else ''}"
        view = self.seen
        if view is None:
            return condition
        if view.state == "Dead":
            return (
                f"{condition}: there is no group {self.group!r}{nearest(self.group, self._others)}"
            )
        clients = ", ".join(f"{member.client_id}@{member.host}" for member in view.members)
        return (
            f"{condition}: it is {view.state} with {len(view.members)} members"
            f"{f' ({clients})' if clients else ''}"
        )


def misspelt(
    session: ClusterSession,
    group: str,
    expected: Mapping[Partition, int | None],
    seen: Mapping[Partition, int],
) -> list[str]:
    """Return a sentence for each name in an assertion that does not exist, and may be misspelt."""
    sentences = []
    if not seen:
        groups = [str(row.group_id) for row in session.groups()]
        if group not in groups:
            sentences.append(f"there is no group {group!r}{nearest(group, groups)}")
    topics = session.client.metadata(refresh=True).topics
    missing = sorted({topic for topic, _ in expected} - topics.keys())
    sentences += [str(no_topic(session, topic)) for topic in missing]
    sentences += [
        f"{topic} has no partition {index}, but {len(topics[topic].partitions)}"
        for topic, index in sorted(expected)
        if topic in topics and index not in topics[topic].partitions
    ]
    return sentences
