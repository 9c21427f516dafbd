"""Members of a consumer group, of either protocol, that commit at random.

They commit counters, not positions in a log: the check is that no member fetches a smaller offset
than was acknowledged before. A member without an answer to its commit joins again as a new member,
because the request may still arrive (a real client is as uncertain, and accepts it).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final
from uuid import UUID

from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import (
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from fencepost.groups.commands import (
    CommitOffsets,
    CommitOffsetsResult,
    FetchOffsets,
    FetchOffsetsResult,
    FetchTopic,
    Heartbeat,
    JoinGroup,
    JoinGroupResult,
    JoinMember,
    LeaveGroup,
    LeavingMember,
    OffsetToCommit,
    SyncGroup,
    SyncGroupResult,
    TxnCommitOffsets,
)
from fencepost.groups.consumer_commands import (
    LEAVE_EPOCH,
    NO_TIMEOUT,
    ConsumerHeartbeat,
    ConsumerHeartbeatResult,
)
from fencepost.groups.errors import (
    FencedMemberEpochError,
    GroupError,
    GroupIdNotFoundError,
    IllegalGenerationError,
    MemberIdRequiredError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.logcore.machine import ProducerStamp
from tests.sim.clients import BACKOFF_MS, World
from tests.sim.groups import GROUP, REBALANCE_MS, SESSION_MS, GroupLedger, Key
from tests.sim.txn_client import TIMEOUT_MS, Identity, Step, Transactional

HEARTBEAT_MS: Final = 150
COMMITS: Final = 0.8
"""The probability that a member commits between two heartbeats."""
DAWDLES: Final = 0.05
"""The probability that it is so slow that its session or its transaction may time out."""
GOES: Final = 0.02
"""The probability that it leaves or crashes between two heartbeats, and then joins again."""
OUT: Final = (
    UnknownMemberIdError,
    FencedMemberEpochError,
    IllegalGenerationError,
    GroupIdNotFoundError,
)
"""Errors after which a member joins as a new one; a lost log takes the group with it."""


class Member(Transactional):
    """The part that both protocols share: fetching and committing offsets."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        partitions: int,
        ledger: GroupLedger,
        *,
        in_transactions: bool,
    ) -> None:
        super().__init__(world, name, topic, partitions)
        self.ledger = ledger
        self.in_transactions = in_transactions
        self.member_id = ""
        self.epoch = -1
        """The generation, or the member epoch."""
        self.owned: frozenset[int] = frozenset()
        self.positions: dict[int, int] = {}
        """The positions in its owned partitions, where it knows them."""
        self.is_working = False
        """Whether it has a position in each partition of its assignment."""
        self.is_in_transaction = False
        self._times = 0
        self._identity: Identity | None = None
        self._sequences: dict[int, int] = {}
        self._coming: tuple[OffsetToCommit, ...] = ()
        self._tag = ""
        self._advance(None)

    def began_anew(self) -> None:
        # The positions belong to the deleted topic of the same name.
        self.positions.clear()

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing but heartbeat."""
        return self.is_working and not self.is_in_transaction

    def _ask(self, command: object) -> Step:
        """Return the coordinator epoch and the response, or (-1, None) without an answer."""
        answer = yield ("group", command)
        return (-1, None) if answer is None else (answer.epoch, answer.response)

    def _another_life(self) -> None:
        """Drop the member id, to join as a new member."""
        self.member_id, self.epoch = "", -1
        self._lose()

    def _lose(self) -> None:
        self.owned = frozenset()
        self.positions.clear()
        self.is_working = False

    def _find_topic(self) -> Step:
        while not self.replicas:
            self.look_up()
            yield ("wait", BACKOFF_MS)

    # --- offsets ---

    def _fetch(self, partitions: Iterable[int], **who: Any) -> Step:
        """Fetch the positions in partitions; return whether that succeeded."""
        asked = tuple(sorted(partitions))
        if not asked:
            return True
        topic_id = self.topic_id
        assert topic_id is not None
        known = self.ledger.acknowledged((topic_id, one) for one in asked)
        were_open = tuple(self.ledger.open)
        topic = FetchTopic(self.topic, asked, topic_id.bytes)
        command = FetchOffsets(GROUP, (topic,), require_stable=True, **who)
        epoch, answer = yield from self._ask(command)
        if not isinstance(answer, FetchOffsetsResult) or self.topic_id != topic_id:
            return False
        ((_, rows),) = answer.topics
        found = {row.partition: row for row in rows}
        if any(row.error is not None for row in found.values()):
            return False
        offsets = {(topic_id, one): (row.offset, row.metadata) for one, row in found.items()}
        self.ledger.fetched(epoch, offsets, known, were_open)
        self.positions.update((one, max(row.offset, 0)) for one, row in found.items())
        return True

    def _process(self) -> Step:
        """Advance in some partitions and commit; return whether it can go on as the same member."""
        taken = [one for one in self.positions if self.draw.random() < 0.5]
        if not taken or self.is_stopped or self.draw.random() >= COMMITS:
            return True
        if self.draw.random() < DAWDLES:
            yield ("wait", self.draw.randint(0, SESSION_MS * 2))
        self._times += 1
        if self.in_transactions:
            return (yield from self._process_in_transaction(taken))
        offsets = self._advanced(taken, f"{self.node.name}:{self._times}")
        known = self.ledger.acknowledged((self.topic_id, one) for one in taken)
        epoch, answer = yield from self._ask(
            CommitOffsets(
                GROUP, self.epoch, self.member_id, None, offsets, knows_member_epochs=True
            )
        )
        if isinstance(answer, CommitOffsetsResult):
            told = _told(offsets)
            self.ledger.committed(epoch, told, known)
        return answer is not None

    def _advanced(self, taken: list[int], tag: str) -> tuple[OffsetToCommit, ...]:
        taken = [one for one in taken if one in self.positions]  # the topic may have been recreated
        for one in taken:
            self.positions[one] += self.draw.randint(1, 4)
        topic_id = self.topic_id
        assert topic_id is not None
        self.ledger.topics[tag] = topic_id
        return tuple(
            OffsetToCommit(
                self.topic, one, self.positions[one], metadata=tag, topic_id=topic_id.bytes
            )
            for one in taken
        )

    def _process_in_transaction(self, taken: list[int]) -> Step:
        self.is_in_transaction = True
        if self._identity is None:
            self._identity = yield from self._init()
            self._sequences = {}
        self._tag = tag = f"{self.node.name}:t{self._times}"
        self._coming = self._advanced(taken, tag)
        ledger = self.begin()
        after = yield from self._transact(ledger, self._identity, self._sequences)
        if after != self._identity:
            self._identity, self._sequences = after, {}
        if ledger.commits is not True:
            self.ledger.ends(tag, commits=False)
        elif ledger.is_acknowledged:
            epoch, told = self.ledger.open.get(tag, (-1, {}))
            self.ledger.ends(tag, commits=True)
            self.ledger.committed(epoch, told, {})
        else:
            self.ledger.open.pop(tag, None)
        if not (ledger.commits and ledger.is_acknowledged):
            self.positions.clear()
        self.is_in_transaction = False
        # The offsets of an abandoned transaction may still arrive; its end has bumped the producer
        # epoch, so that they are refused (KIP-890).
        return True

    def _commit_offsets(self, identity: Identity, number: int) -> Step:
        del number
        command = TxnCommitOffsets(
            GROUP, self.epoch, self.member_id, None, self._coming, ProducerStamp(*identity)
        )
        while True:
            answer = yield ("group", command, self.node.name)
            if answer is None or isinstance(answer.response, GroupError):
                return False
            if isinstance(answer.response, CommitOffsetsResult):
                told = _told(self._coming)
                self.ledger.open[self._tag] = answer.epoch, told
                if self.draw.random() < DAWDLES:
                    yield ("wait", self.draw.randint(0, TIMEOUT_MS))
                return True
            if self.draw.random() < 0.3:
                return False


def _told(offsets: Iterable[OffsetToCommit]) -> dict[Key, int]:
    return {(UUID(bytes=one.topic_id), one.partition): one.offset for one in offsets}


class ClassicMember(Member):
    """A member of the classic protocol: JoinGroup, SyncGroup, Heartbeat."""

    def _live(self) -> Step:
        yield from self._find_topic()
        while True:
            joined = yield from self._join()
            if joined is None or not (yield from self._sync(joined)):
                continue
            yield from self._work()

    def _join(self) -> Step:
        self._lose()
        self._times += 1
        known = dict(self.ledger.generations)
        subscription = encode_subscription(Subscription((self.topic,)))
        command = JoinGroup(
            group_id=GROUP,
            member_id=self.member_id,
            group_instance_id=None,
            client_id=self.node.name,
            client_host="/127.0.0.1",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=REBALANCE_MS,
            protocol_type="consumer",
            protocols=(("range", subscription),),
            require_known_member_id=True,
            supports_skip_assignment=True,
            new_member_id=f"{self.node.name}-{self._times}",
        )
        epoch, answer = yield from self._ask(command)
        if isinstance(answer, MemberIdRequiredError):
            self.member_id = answer.member_id
        elif isinstance(answer, OUT):
            self._another_life()
        elif isinstance(answer, JoinGroupResult):
            self.ledger.joined(epoch, answer.generation_id, known)
            self.member_id, self.epoch = answer.member_id, answer.generation_id
            return answer
        return None

    def _sync(self, joined: JoinGroupResult) -> Step:
        plan: dict[str, bytes] = {}
        if joined.leader == self.member_id:
            plan = self._plan(joined.members)
        command = SyncGroup(
            GROUP, self.epoch, self.member_id, None, "consumer", "range", tuple(plan.items())
        )
        epoch, answer = yield from self._ask(command)
        if isinstance(answer, OUT):
            self._another_life()
        if not isinstance(answer, SyncGroupResult):
            return False
        self.owned = frozenset(index for _, index in decode_assignment(answer.assignment)[0])
        self.ledger.assigned(epoch, self.epoch, self.member_id, self.owned)
        self._leads_of = len(self.replicas) if joined.leader == self.member_id else None
        return True

    def _plan(self, members: tuple[JoinMember, ...]) -> dict[str, bytes]:
        names = sorted(one.member_id for one in members)
        return {
            name: encode_assignment(
                (self.topic, index) for index in range(at, len(self.replicas), len(names))
            )
            for at, name in enumerate(names)
        }

    def _work(self) -> Step:
        """Heartbeat, fetch and commit until the member must join again."""
        while True:
            yield from self._fetch(self.owned - self.positions.keys())
            self.is_working = self.positions.keys() == self.owned
            if self.is_working and not (yield from self._process()):
                self._another_life()
                return
            yield ("wait", self.draw.randint(HEARTBEAT_MS // 4, HEARTBEAT_MS))
            if not self.is_stopped and self.draw.random() < GOES:
                if self.draw.random() < 0.5:
                    leaving = LeaveGroup(GROUP, (LeavingMember(self.member_id),))
                    yield from self._ask(leaving)
                self._another_life()
                return
            _, answer = yield from self._ask(Heartbeat(GROUP, self.epoch, self.member_id, None))
            if isinstance(answer, OUT):
                self._another_life()
                return
            if isinstance(answer, RebalanceInProgressError):
                return
            if self.draw.random() < 0.2:
                self.look_up()
            if self._leads_of not in (None, len(self.replicas)):
                return  # a leader rejoins for new partitions


class ConsumerMember(Member):
    """A member of the consumer protocol (KIP-848)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._said: frozenset[int] | None = None
        """The owned partitions that it last reported; it reports them only after a change."""
        self._is_unsure = True
        """Whether the next heartbeat has all fields, so that the answer has the assignment."""
        super().__init__(*arguments, **options)

    def _live(self) -> Step:
        yield from self._find_topic()
        while True:
            if not self.member_id:
                self._times += 1
                self.member_id, self.epoch = f"{self.node.name}-{self._times}", 0
                self._said, self._is_unsure = None, True
            if not (yield from self._beat()):
                continue
            who = {"member_id": self.member_id, "member_epoch": self.epoch}
            yield from self._fetch(self.owned - self.positions.keys(), **who)
            self.is_working = self.positions.keys() == self.owned == self._said
            if not (yield from self._process()):
                self._another_life()
            yield ("wait", self.draw.randint(HEARTBEAT_MS // 4, HEARTBEAT_MS))
            if not self.is_stopped and self.draw.random() < GOES:
                if self.member_id and self.draw.random() < 0.5:
                    bye = ConsumerHeartbeat(
                        GROUP, self.member_id, LEAVE_EPOCH, self.node.name, "/127.0.0.1"
                    )
                    yield from self._ask(bye)
                self._another_life()

    def _beat(self) -> Step:
        """Heartbeat and apply the assignment; return whether the coordinator accepted it."""
        owned, is_unsure = self.owned, self._is_unsure
        says = is_unsure or self._said != owned
        command = ConsumerHeartbeat(
            GROUP,
            self.member_id,
            self.epoch,
            self.node.name,
            "/127.0.0.1",
            rebalance_timeout_ms=REBALANCE_MS if is_unsure else NO_TIMEOUT,
            subscribed_topic_names=(self.topic,) if is_unsure else None,
            owned=self._named() if says else None,
        )
        _, answer = yield from self._ask(command)
        if isinstance(answer, OUT):
            self._another_life()
        self._is_unsure = not isinstance(answer, ConsumerHeartbeatResult)
        if not isinstance(answer, ConsumerHeartbeatResult):
            return False
        self.epoch = answer.member_epoch
        if says:
            self._said = owned
        if answer.assignment is not None:
            here = None if self.topic_id is None else self.topic_id.bytes
            if any(topic_id != here for topic_id, _ in answer.assignment):
                self.look_up()
                self._is_unsure = True  # to get the assignment again, of a topic that it knows
            self.owned = frozenset(
                one for at, indexes in answer.assignment if at == here for one in indexes
            )
            self.positions = {one: at for one, at in self.positions.items() if one in self.owned}
        return True

    def _named(self) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        if not self.owned or self.topic_id is None:
            return ()
        return ((self.topic_id.bytes, tuple(sorted(self.owned))),)
