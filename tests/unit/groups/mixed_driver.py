"""Classic consumers for a ConsumerDriver, which decode assignments and can lead a group."""

from __future__ import annotations

import struct
from typing import Any

from fencepost.groups.assignors.client.protocol import decode_assignment, decode_subscription
from fencepost.groups.commands import (
    Heartbeat,
    JoinGroup,
    JoinGroupResult,
    LeaveGroup,
    LeavingMember,
    SyncGroup,
    SyncGroupResult,
)
from fencepost.groups.errors import (
    FencedInstanceIdError,
    IllegalGenerationError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from tests.unit.groups.consumer_driver import ConsumerDriver
from tests.unit.groups.group_driver import PARKED, REBALANCE, SESSION, G, subscription

MY_FAULT = (IllegalGenerationError, UnknownMemberIdError, FencedInstanceIdError)


def assigned(*partitions: tuple[str, tuple[int, ...]], user_data: bytes = b"") -> bytes:
    """Return an assignment, version 0."""
    out = struct.pack(">hi", 0, len(partitions))
    for name, indexes in partitions:
        out += struct.pack(">h", len(name)) + name.encode()
        out += struct.pack(f">i{len(indexes)}i", len(indexes), *indexes)
    return out + (struct.pack(">i", len(user_data)) + user_data if user_data else b"\xff" * 4)


COOPERATIVE = "cooperative-sticky"


class ClassicClient:
    """The state of a consumer of the classic protocol.

    A client that offers only the cooperative protocol keeps reading during a rebalance. Any other
    client is eager: it owns nothing between its JoinGroup and its SyncGroup.
    """

    def __init__(
        self,
        driver: ConsumerDriver,
        name: str,
        topics: tuple[str, ...] = ("t",),
        instance_id: str | None = None,
        offers: tuple[str, ...] = ("range",),
    ) -> None:
        self.driver, self.name, self.topics, self.instance_id = driver, name, topics, instance_id
        self.offers = offers
        self.member_id, self.generation, self.leader, self.protocol = "", -1, "", ""
        self.owned: frozenset[tuple[bytes, int]] = frozenset()
        self.members: dict[str, bytes] = {}
        self.is_slow = False
        """Whether the client waits between the response to its JoinGroup and its SyncGroup."""
        self.must_sync = False
        self.planned_for = -1
        self.times_lost = 0
        """The number of times that the client has revoked or lost all its partitions."""
        self.join_token: int | None = None
        self.sync_token: int | None = None

    @property
    def reads_on(self) -> bool:
        return self.offers == (COOPERATIVE,)

    @property
    def is_stable(self) -> bool:
        """Whether the client has the assignment of its generation; otherwise it must not commit."""
        waits = self.join_token is not None or self.sync_token is not None
        return self.generation >= 0 and not waits and not self.must_sync

    def _subscription(self) -> bytes:
        """Return a subscription of version 1, with the owned partitions."""
        names, owned = self.driver.image.names(), {}
        for topic_id, index in sorted(self.owned):
            if topic_id in names:
                owned.setdefault(names[topic_id], []).append(index)
        # Owned partitions have an assignment's format, without version and user data.
        written = assigned(*((name, tuple(indexes)) for name, indexes in owned.items()))[2:-4]
        return struct.pack(">h", 1) + subscription(*self.topics)[2:] + written

    def join(self) -> None:
        """Join or rejoin; an eager client first revokes all. The response may come later."""
        if not self.reads_on:
            self._lose()
        self.sync_token, self.must_sync = None, False
        self.driver._ids += 1
        command = JoinGroup(
            group_id=G,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            client_id=self.name,
            client_host="/127.0.0.1",
            session_timeout_ms=SESSION,
            rebalance_timeout_ms=REBALANCE,
            protocol_type="consumer",
            protocols=tuple((name, self._subscription()) for name in self.offers),
            require_known_member_id=True,
            supports_skip_assignment=True,
            new_member_id=f"{self.name}-{self.driver._ids}",
            visibility=self.driver.visibility,
        )
        self.join_token = self.driver.send(command)
        answer = self.driver.answers[self.join_token]
        if isinstance(answer, MemberIdRequiredError):
            self.member_id = answer.member_id
            self.join()
        else:
            self.hear()

    def hear(self) -> None:
        """Process the responses that have arrived."""
        if self.join_token is not None:
            answer = self.driver.answers[self.join_token]
            if answer is PARKED:
                return
            self.join_token = None
            if isinstance(answer, JoinGroupResult):
                self.member_id, self.generation = answer.member_id, answer.generation_id
                self.leader, self.protocol = answer.leader, answer.protocol_name or ""
                self.members = {member.member_id: member.metadata for member in answer.members}
                self.must_sync = True
                if not self.is_slow:
                    self.sync()
            else:
                self._fail(answer)
        elif self.sync_token is not None:
            answer = self.driver.answers[self.sync_token]
            if answer is PARKED:
                return
            self.sync_token = None
            if isinstance(answer, SyncGroupResult):
                lost = self.owned - self._read(answer.assignment)
                self.owned = self._read(answer.assignment)
                if lost and self.reads_on:
                    self.join()  # so that other members get the revoked partitions
            else:
                self._fail(answer)

    def _fail(self, answer: object) -> None:
        if self.reads_on and isinstance(answer, RebalanceInProgressError):
            self.generation = -1
            return
        self._lose()
        if isinstance(answer, MY_FAULT) and not isinstance(answer, IllegalGenerationError):
            self.member_id = ""
        self.generation = -1

    def _lose(self) -> None:
        self.owned = frozenset()
        self.times_lost += 1

    def sync(self) -> None:
        """Send a SyncGroup; the leader's has the assignments of all members."""
        self.must_sync = False
        plan = self._plan() if self.leader == self.member_id else {}
        self.sync_token = self.driver.send(
            SyncGroup(
                G,
                self.generation,
                self.member_id,
                self.instance_id,
                "consumer",
                self.protocol,
                tuple(plan.items()),
            )
        )
        self.hear()

    def heartbeat(self) -> Any:
        """Send a heartbeat; raise the coordinator's error."""
        return self.driver.ask(Heartbeat(G, self.generation, self.member_id, self.instance_id))

    def step(self) -> None:
        """Perform the client's next action: receive responses, sync, join or heartbeat."""
        if self.join_token is not None or self.sync_token is not None:
            self.hear()
            return
        if self.must_sync:
            self.sync()
            return
        if self.generation < 0:
            self.join()
            return
        if self.leader == self.member_id and self.planned_for != self.driver.image.version:
            self.join()
            return
        try:
            self.heartbeat()
        except RebalanceInProgressError:
            self.join()
        except MY_FAULT as error:
            self._fail(error)
            self.join()

    def leave(self) -> None:
        self.owned = frozenset()
        member = LeavingMember(self.member_id, self.instance_id)
        self.driver.send(LeaveGroup(G, (member,)))
        self.member_id, self.generation = "", -1

    def _plan(self) -> dict[str, bytes]:
        said = {name: decode_subscription(metadata) for name, metadata in self.members.items()}
        self.planned_for = self.driver.image.version
        owners = {partition: name for name, decoded in said.items() for partition in decoded.owned}
        plan: dict[str, dict[str, list[int]]] = {name: {} for name in said}
        turn = 0
        for topic, (_, count) in sorted(self.driver.image.topics.items()):
            takers = sorted(name for name, decoded in said.items() if topic in decoded.topics)
            for index in range(count if takers else 0):
                taker = takers[turn % len(takers)]
                turn += 1
                # A partition of another owner is assigned only after that owner has revoked it.
                if self.protocol != COOPERATIVE or owners.get((topic, index), taker) == taker:
                    plan[taker].setdefault(topic, []).append(index)
        return {
            name: assigned(*((topic, tuple(indexes)) for topic, indexes in mine.items()))
            for name, mine in plan.items()
        }

    def _read(self, assignment: bytes) -> frozenset[tuple[bytes, int]]:
        known = self.driver.image.topics
        return frozenset(
            (known[topic][0], index)
            for topic, index in decode_assignment(assignment)[0]
            if topic in known
        )
