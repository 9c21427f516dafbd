"""A member of a consumer group, as ``fencepost consume --group`` is one.

It speaks the classic protocol, which every Kafka broker knows and in which members of either
protocol share a group. One thread does everything: heartbeats go out between two fetches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from kio.schema.errors import ErrorCode

from fencepost.coordinator.cli.group_reset import commit
from fencepost.coordinator.cli.queries.session import Position
from fencepost.coordinator.wire.client.client import ApiError
from fencepost.groups.assignors.client.built_in import BUILT_IN
from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session

SESSION_TIMEOUT_MS = 45_000
REBALANCE_TIMEOUT_MS = 60_000
"""Java's defaults are 45 s and ``max.poll.interval.ms``; here a poll is one answer printed."""

HEARTBEAT_S = 1.0

ASSIGNORS = ("range", "roundrobin")
"""What it offers: the assignors that most clients know and that need no memory."""

LAST_JOIN_VERSION = 3
"""From version 4 on a member asks twice, the first time for its id."""

MOST_JOINS = 20
"""Attempts to get through a rebalance while others come and go."""

_AGAIN = frozenset(
    {
        ErrorCode.rebalance_in_progress,
        ErrorCode.illegal_generation,
        ErrorCode.unknown_member_id,
        ErrorCode.fenced_instance_id,
    }
)


class Member:
    """One member of ``group`` that reads ``topic``. Raises ApiError where it is refused."""

    def __init__(self, session: Session, group: str, topic: str) -> None:
        self.group = group
        self._session = session
        self._topic = topic
        self._member_id = ""
        self._generation = -1
        self._beat_at = 0.0

    def join(self) -> list[int]:
        """Go through a rebalance; the partitions of the topic that are this member's now."""
        for _ in range(MOST_JOINS):
            try:
                return self._join()
            except ApiError as error:
                if error.code not in _AGAIN:
                    raise
                if error.code != ErrorCode.rebalance_in_progress:
                    self._member_id = ""
        raise click.ClickException(f"{self.group!r} does not come to rest")

    def _join(self) -> list[int]:
        subscription = encode_subscription(Subscription((self._topic,)), version=1)
        joined = self._ask(
            "JoinGroup",
            LAST_JOIN_VERSION,
            deadline_ms=REBALANCE_TIMEOUT_MS + self._session.timeout_ms,
            entity=lambda f: f.message(
                group_id=self.group,
                session_timeout_ms=SESSION_TIMEOUT_MS,
                rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
                member_id=self._member_id,
                protocol_type="consumer",
                protocols=[
                    f.JoinGroupRequestProtocol(name=name, metadata=subscription)
                    for name in ASSIGNORS
                ],
            ),
        )
        self._member_id, self._generation = joined.member_id, joined.generation_id
        shares = {}
        if joined.leader == joined.member_id:
            shares = self._shares(joined.protocol_name, joined.members)
        synced = self._ask(
            "SyncGroup",
            LAST_JOIN_VERSION,
            deadline_ms=REBALANCE_TIMEOUT_MS,
            entity=lambda f: f.message(
                **self._claim,
                assignments=[
                    f.SyncGroupRequestAssignment(member_id=member, assignment=share)
                    for member, share in shares.items()
                ],
            ),
        )
        self._beat_at = time.monotonic()
        if not synced.assignment:
            return []
        assigned, _ = decode_assignment(synced.assignment)
        return sorted(index for topic, index in assigned if topic == self._topic)

    def _shares(self, assignor: str, members: Any) -> dict[str, bytes]:
        """What each member gets, computed as the leader."""
        asked = {row.member_id: decode_subscription(row.metadata) for row in members}
        named = {topic for one in asked.values() for topic in one.topics}
        known = self._session.client.metadata(refresh=True).topics
        # Racks decide nothing here: no member of these two assignors is asked for one.
        topics = {
            topic: [frozenset[str]() for _ in known[topic].partitions]
            for topic in sorted(named)
            if topic in known
        }
        result = BUILT_IN[assignor].assign(topics, asked)
        return {member: encode_assignment(mine, version=1) for member, mine in result.items()}

    def is_settled(self) -> bool:
        """Send the heartbeat if it is time; False if the group rebalances and wants a join."""
        if time.monotonic() - self._beat_at < HEARTBEAT_S:
            return True
        try:
            self._ask("Heartbeat", LAST_JOIN_VERSION, **self._claim)
        except ApiError as error:
            if error.code in _AGAIN:
                return False
            raise
        self._beat_at = time.monotonic()
        return True

    def commit(self, positions: Mapping[int, int]) -> bool:
        """Commit the next offset to read of each partition; False if the group wants a join."""
        offsets = {(self._topic, index): Position(at) for index, at in positions.items()}
        claim = {"generation_id_or_member_epoch": self._generation, "member_id": self._member_id}
        try:
            commit(self._session, self.group, offsets, **claim)
        except ApiError as error:
            if error.code in _AGAIN:
                return False
            raise
        return True

    def leave(self) -> None:
        """Leave, so that the others need not wait for a time-out."""
        if self._member_id:
            claim: dict[str, Any] = {"group_id": self.group, "member_id": self._member_id}
            self._session.client.call("LeaveGroup", 2, to_group=self.group, check=False, **claim)

    @property
    def _claim(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self._generation,
            "member_id": self._member_id,
        }

    def _ask(self, api: str, version: int, **fields: Any) -> Any:
        return self._session.client.call(api, version, to_group=self.group, **fields)
