"""Consumers of the classic protocol that read assignments and lead, over the consumer driver."""

from __future__ import annotations

import struct
from typing import Any

from consumer_driver import ConsumerDriver
from group_driver import PARKED, REBALANCE, SESSION, G, subscription

from groups.commands import (
    Heartbeat,
    JoinGroup,
    JoinGroupResult,
    LeaveGroup,
    LeavingMember,
    SyncGroup,
    SyncGroupResult,
)
from groups.errors import (
    FencedInstanceIdError,
    IllegalGenerationError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from groups.subscription import read_assignment, read_subscription

MY_FAULT = (IllegalGenerationError, UnknownMemberIdError, FencedInstanceIdError)


def assigned(*partitions: tuple[str, tuple[int, ...]], user_data: bytes = b"") -> bytes:
    """An assignment, version 0."""
    out = struct.pack(">hi", 0, len(partitions))
    for name, indexes in partitions:
        out += struct.pack(">h", len(name)) + name.encode()
        out += struct.pack(f">i{len(indexes)}i", len(indexes), *indexes)
    return out + (struct.pack(">i", len(user_data)) + user_data if user_data else b"\xff" * 4)


class ClassicClient:
    """What an eager consumer knows. ``owned`` is empty from its JoinGroup to its SyncGroup."""

    def __init__(
        self,
        driver: ConsumerDriver,
        name: str,
        topics: tuple[str, ...] = ("t",),
        instance_id: str | None = None,
    ) -> None:
        self.driver, self.name, self.topics, self.instance_id = driver, name, topics, instance_id
        self.member_id, self.generation, self.leader = "", -1, ""
        self.owned: frozenset[tuple[bytes, int]] = frozenset()
        self.members: dict[str, bytes] = {}
        self.join_token: int | None = None
        self.sync_token: int | None = None

    def join(self) -> None:
        """Give everything up and (re)join; the answer may come later."""
        self.owned = frozenset()
        self.sync_token = None
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
            protocols=(("range", subscription(*self.topics)),),
            require_known_member_id=True,
            supports_skip_assignment=True,
            new_member_id=f"{self.name}-{self.driver._ids}",
            topics=self.driver.image,
        )
        self.join_token = self.driver.send(command)
        answer = self.driver.answers[self.join_token]
        if isinstance(answer, MemberIdRequiredError):
            self.member_id = answer.member_id
            self.join()
        else:
            self.hear()

    def hear(self) -> None:
        """Take note of answers that came."""
        if self.join_token is not None:
            answer = self.driver.answers[self.join_token]
            if answer is PARKED:
                return
            self.join_token = None
            if isinstance(answer, JoinGroupResult):
                self.member_id, self.generation = answer.member_id, answer.generation_id
                self.leader = answer.leader
                self.members = {member.member_id: member.metadata for member in answer.members}
                self.sync()
            else:
                self._fail(answer)
        elif self.sync_token is not None:
            answer = self.driver.answers[self.sync_token]
            if answer is PARKED:
                return
            self.sync_token = None
            if isinstance(answer, SyncGroupResult):
                self.owned = self._read(answer.assignment)
            else:
                self._fail(answer)

    def _fail(self, answer: object) -> None:
        self.owned = frozenset()
        if isinstance(answer, MY_FAULT) and not isinstance(answer, IllegalGenerationError):
            self.member_id = ""
        self.generation = -1

    def sync(self) -> None:
        """Ask for one's assignment; a leader shares out what everybody subscribes to."""
        plan = self._plan() if self.leader == self.member_id else {}
        self.sync_token = self.driver.send(
            SyncGroup(
                G,
                self.generation,
                self.member_id,
                self.instance_id,
                "consumer",
                "range",
                tuple(plan.items()),
                self.driver.image,
            )
        )
        self.hear()

    def heartbeat(self) -> Any:
        """Stay; raises what the coordinator answers."""
        return self.driver.ask(Heartbeat(G, self.generation, self.member_id, self.instance_id))

    def step(self) -> None:
        """Do what a client does next: wait, heartbeat, rejoin when told to."""
        if self.join_token is not None or self.sync_token is not None:
            self.hear()
            return
        if self.generation < 0:
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
        self.driver.send(LeaveGroup(G, (member,), self.driver.image))
        self.member_id, self.generation = "", -1

    def _plan(self) -> dict[str, bytes]:
        wants = {name: read_subscription(said).topics for name, said in self.members.items()}
        plan: dict[str, dict[str, list[int]]] = {name: {} for name in wants}
        turn = 0
        for topic, (_, count) in sorted(self.driver.image.topics.items()):
            takers = sorted(name for name, topics in wants.items() if topic in topics)
            for index in range(count if takers else 0):
                plan[takers[turn % len(takers)]].setdefault(topic, []).append(index)
                turn += 1
        return {
            name: assigned(*((topic, tuple(indexes)) for topic, indexes in mine.items()))
            for name, mine in plan.items()
        }

    def _read(self, assignment: bytes) -> frozenset[tuple[bytes, int]]:
        known = self.driver.image.topics
        return frozenset(
            (known[topic][0], index)
            for topic, indexes in read_assignment(assignment).partitions
            if topic in known
            for index in indexes
        )
