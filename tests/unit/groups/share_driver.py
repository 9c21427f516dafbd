"""A Driver with share group members; tests act as the share coordinator and send its responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fencepost.groups.consumer_commands import Environment, ShareSettings, TopicsImage
from fencepost.groups.consumer_group import flat
from fencepost.groups.share_commands import (
    ShareHeartbeat,
    ShareHeartbeatResult,
    ShareStateInitialized,
    StateToInitialize,
)
from fencepost.groups.share_group import ShareGroup
from tests.unit.groups.group_driver import Driver, G

T, U = b"T" * 16, b"U" * 16
TOPICS = {"t": (T, 4), "u": (U, 2)}


class ShareDriver(Driver):
    """One shard with topics ``t`` (4 partitions) and ``u`` (2)."""

    def __init__(self, share: ShareSettings | None = None, **settings: Any) -> None:
        self.topics = TopicsImage(dict(TOPICS), 1)
        self.share = share or ShareSettings()
        super().__init__(environment=self._environment, **settings)

    def _environment(self, _group_id: str) -> Environment:
        return Environment(topics=self.topics, share=self.share)

    def change_topics(self, **topics: tuple[bytes, int]) -> None:
        """Set the partition counts of topics; None removes a topic."""
        merged = {**self.topics.topics, **topics}
        known = {name: value for name, value in merged.items() if value is not None}
        self.topics = TopicsImage(known, self.topics.version + 1)

    def beat(self, member_id: str, epoch: int, **fields: Any) -> ShareHeartbeatResult:
        command = ShareHeartbeat(G, member_id, epoch, "client", "/127.0.0.1")
        result = self.ask(replace(command, **fields))
        assert isinstance(result, ShareHeartbeatResult)
        return result

    def join(self, member_id: str, *topics: str) -> ShareHeartbeatResult:
        return self.beat(member_id, 0, subscribed_topic_names=topics or ("t",))

    def initialize(self, wanted: StateToInitialize | None) -> None:
        """Report that the share coordinator has initialized all requested partitions."""
        assert wanted is not None
        places = frozenset((topic_id, index) for topic_id, index, _ in wanted.offsets)
        self.ask(ShareStateInitialized(G, places))

    def settle(self, *members: str) -> dict[str, dict[bytes, tuple[int, ...]]]:
        """Send heartbeats until nothing changes; return each member's assignment."""
        epochs = {name: self.share_group.current(name).member_epoch for name in members}
        for _ in range(10):
            self.advance(self.share.assignment_interval_ms)
            before = len(self.log)
            pending = flat(
                (topic.topic_id, topic.partitions) for topic in self.share_group.state.initializing
            )
            if pending:
                self.ask(ShareStateInitialized(G, pending))
            for name in members:
                result = self.beat(name, epochs[name])
                epochs[name] = result.member_epoch
            if len(self.log) == before:
                return {name: self.assigned(name) for name in members}
        raise AssertionError("the group does not settle")

    def assigned(self, member_id: str) -> dict[bytes, tuple[int, ...]]:
        found: dict[bytes, list[int]] = {}
        for topic_id, index in sorted(self.share_group.current(member_id).partitions):
            found.setdefault(topic_id, []).append(index)
        return {topic_id: tuple(indexes) for topic_id, indexes in found.items()}

    @property
    def share_group(self) -> ShareGroup:
        group = self.groups[G]
        assert isinstance(group, ShareGroup)
        return group
