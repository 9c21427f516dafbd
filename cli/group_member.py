"""The consumer group member behind ``fencepost consume --group``.

The member uses the classic protocol, which every Kafka broker supports; it can share a group with
members that use the consumer protocol. It is single-threaded: heartbeats are sent between fetches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from kio.schema.errors import ErrorCode

from fencepost.cli.group_reset import commit
from fencepost.client.client import ApiError
from fencepost.client.queries.session import OffsetAndMetadata
from fencepost.groups.assignors.client.built_in import BUILT_IN
from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import (
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

SESSION_TIMEOUT_MS = 45_000
REBALANCE_TIMEOUT_MS = 60_000
"""The Java client's defaults are 45 s and 5 minutes (``max.poll.interval.ms``). For a rebalance one
minute is enough here, because between two polls the command only prints one response."""

HEARTBEAT_S = 1.0

ASSIGNORS = ("range", "roundrobin")
"""The assignors that the member offers, which most clients know, and which need no state."""

LAST_JOIN_VERSION = 3
"""The newest version of JoinGroup that the member uses. From version 4 on, a second request is
needed, with the member id that the first response contains."""

MOST_JOINS = 20
"""The maximum number of attempts to complete a rebalance while other members join and leave."""

_AGAIN = frozenset(
    {
        ErrorCode.rebalance_in_progress,
        ErrorCode.illegal_generation,
        ErrorCode.unknown_member_id,
        ErrorCode.fenced_instance_id,
    }
)


class GroupConsumer:
    """One member of ``group`` that reads ``topic``. Raises ApiError if it is refused."""

    def __init__(self, session: ClusterSession, group: str, topic: str) -> None:
        self.group = group
        self._session = session
        self._topic = topic
        self._member_id = ""
        self._generation = -1
        self._beat_at = 0.0

    def join(self) -> list[int]:
        """Complete a rebalance; return the partitions of the topic assigned to this member."""
        for _ in range(MOST_JOINS):
            try:
                return self._join()
            except ApiError as error:
                if error.code not in _AGAIN:
                    raise
                if error.code != ErrorCode.rebalance_in_progress:
                    self._member_id = ""
        raise click.ClickException(f"group {self.group!r} keeps rebalancing")

    def _join(self) -> list[int]:
        subscription = encode_subscription(Subscription((self._topic,)), version=1)
        joined = self._ask(
            "JoinGroup",
            LAST_JOIN_VERSION,
            timeout_ms=REBALANCE_TIMEOUT_MS + self._session.timeout_ms,
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
            timeout_ms=REBALANCE_TIMEOUT_MS,
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
        """Compute the assignment of all members, as the leader."""
        subscriptions = {row.member_id: decode_subscription(row.metadata) for row in members}
        named = {topic for subscription in subscriptions.values() for topic in subscription.topics}
        metadata = self._session.client.metadata(refresh=True).topics
        # Without racks: partitions are not matched to the racks of members.
        topics = {
            topic: [frozenset[str]() for _ in metadata[topic].partitions]
            for topic in sorted(named)
            if topic in metadata
        }
        result = BUILT_IN[assignor].assign(topics, subscriptions)
        return {
            member: encode_assignment(partitions, version=1)
            for member, partitions in result.items()
        }

    def is_settled(self) -> bool:
        """Send a heartbeat if one is due; return False if the member must rejoin."""
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
        """Commit the next offset of each partition; return False if the member must rejoin."""
        offsets = {(self._topic, index): OffsetAndMetadata(at) for index, at in positions.items()}
        claim = {"generation_id_or_member_epoch": self._generation, "member_id": self._member_id}
        try:
            commit(self._session, self.group, offsets, **claim)
        except ApiError as error:
            if error.code in _AGAIN:
                return False
            raise
        return True

    def leave(self) -> None:
        """Leave the group, so that its other members need not wait for the session timeout."""
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
