"""Simulated members of a group, of the classic or the consumer protocol.

Members commit increasing numbers, so an OffsetFetch must never return less than an acknowledged
commit. A member whose commit got no response rejoins with a new member id, because the commit may
still take effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.client.requests import NAMED, Partition, of_group, topics
from fencepost.groups.assignors.client.model import Subscription
from fencepost.groups.assignors.client.protocol import (
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from fencepost.groups.consumer_group import INITIAL_EPOCH
from fencepost.protocol.messages import RequestFactory
from tests.sim.framed import BACKOFF_MS, LOST, RETRIED, FrameClient, Promises
from tests.sim.invariants import BrokenInvariantError

GROUP: Final = "g"
SESSION_MS: Final = 1_500
REBALANCE_MS: Final = 1_500
HEARTBEAT_MS: Final = 150
JOIN_MS: Final = 6_000
"""The timeout of JoinGroup and SyncGroup."""
GOES: Final = 0.02
"""The probability that a member leaves after a heartbeat, with or without a request to leave."""
COMMITS: Final = 0.6
"""The probability that a member commits between two heartbeats."""
LEAVE_EPOCH: Final = -1
FIRST_GENERATION: Final = 1
FIRST_EPOCH: Final = INITIAL_EPOCH + 1
"""The first epoch of a consumer group that has a member."""

SETTINGS: Final = {
    "group.min.session.timeout.ms": 1,
    "group.initial.rebalance.delay.ms": 0,
    "group.consumer.session.timeout.ms": SESSION_MS,
    "group.consumer.min.session.timeout.ms": 1,
    "group.consumer.heartbeat.interval.ms": HEARTBEAT_MS,
    "group.consumer.min.heartbeat.interval.ms": 1,
    "group.consumer.migration.policy": "bidirectional",
}
"""Broker settings with short timeouts for groups."""


class FramedMember(FrameClient):
    """The common part of members of both protocols: offsets and their commits."""

    def __init__(
        self,
        *arguments: Any,
        topic: str,
        promises: Promises,
        instance: str | None,
        is_transactional: bool = False,
    ) -> None:
        super().__init__(*arguments)
        self._is_transactional = is_transactional
        """Whether the member commits offsets in transactions."""
        self.has_generations = False
        """Whether all members of the group are of the classic protocol."""
        self.others: Sequence[FramedMember] = ()
        """All members of the group."""
        self.heard_ms = -SESSION_MS
        """When the member sent its last successful heartbeat."""
        self._producer: tuple[int, int] | None = None
        """Producer id and epoch."""
        self.topic, self.promises, self.instance = topic, promises, instance
        self.member_id = ""
        self.epoch = -1
        """The generation, or the member epoch."""
        self.owned: frozenset[int] = frozenset()
        self.positions: dict[int, int] = {}
        self.is_working = False
        """Whether the member has taken its whole assignment and knows all its positions."""

    async def live(self) -> None:
        """Stay in the group until the run ends; a stopped member neither commits nor leaves."""
        while True:
            await self._live_on()

    async def _live_on(self) -> None:
        raise NotImplementedError

    async def _in_group(self, api: str, body: Any, **options: Any) -> Any:
        answer = await self.ask(api, to_group=GROUP, entity=body, **options)
        if answer is not LOST and getattr(answer, "error_code", 0):
            self.node.say(f"{api}: {answer.error_code.name}")
            if answer.error_code in RETRIED:
                self.forget()
                await self.wait(BACKOFF_MS)
        return answer

    def another_life(self) -> None:
        """Forget member id and epoch, so that the next request joins as a new member."""
        self.member_id, self.epoch = "", -1
        self.lose()

    def lose(self) -> None:
        """Give up all partitions."""
        self.owned = frozenset()
        self.positions.clear()
        self.is_working = False

    async def fetch_offsets(self, partitions: Iterable[int]) -> None:
        """Fetch the committed offsets of partitions, check them, and set the positions."""
        asked = sorted(partitions)
        if not asked:
            return
        known, pending = dict(self.promises.committed), dict(self.promises.pending)

        def body(make: RequestFactory) -> Any:
            rows = (((self.topic, index), index) for index in asked)
            named = topics(make.OffsetFetchRequestTopics, rows, "partition_indexes")
            group = make.OffsetFetchRequestGroup(group_id=GROUP, topics=named)
            return make.message(groups=(group,), require_stable=True)

        answer = await self._in_group("OffsetFetch", body, at_most=NAMED["OffsetFetch"])
        if answer is LOST or of_group(answer).error_code:
            return
        for row in of_group(answer).topics[0].partitions:
            place: Partition = self.topic, row.partition_index
            if row.error_code:
                continue
            if row.committed_offset < known.get(place, -1):
                raise BrokenInvariantError(
                    f"{self.name} is told {row.committed_offset} of {place}, after {known[place]}"
                )
            if row.committed_offset in self.promises.aborted:
                raise BrokenInvariantError(
                    f"{self.name} is told {row.committed_offset} of {place}, which was aborted"
                )
            if place in pending and self.promises.pending.get(place) == pending[place]:
                raise BrokenInvariantError(
                    f"{self.name} is told {row.committed_offset} of {place} as stable, while a"
                    f" transaction has {pending[place]}"
                )
            if row.partition_index in self.owned:
                self.positions[row.partition_index] = max(row.committed_offset, 0)

    async def process(self) -> bool:
        """At times commit new offsets; return whether the member may keep its member id."""
        taken = [index for index in sorted(self.positions) if self.draw.random() < 0.5]
        if not taken or self.is_stopped or self.draw.random() >= COMMITS:
            return True
        for index in taken:
            self.promises.offsets += 1
            self.positions[index] = self.promises.offsets
        told = {(self.topic, index): self.positions[index] for index in taken}
        if self._is_transactional:
            return await self._commit_in_transaction(told)

        def body(make: RequestFactory) -> Any:
            rows = _offset_rows(make.OffsetCommitRequestPartition, told)
            return make.message(
                group_id=GROUP,
                generation_id_or_member_epoch=self.epoch,
                member_id=self.member_id,
                group_instance_id=self.instance,
                topics=topics(make.OffsetCommitRequestTopic, rows),
            )

        newest = self.promises.generation
        answer = await self._in_group("OffsetCommit", body, at_most=NAMED["OffsetCommit"])
        if answer is LOST:
            return False
        codes = self._codes(answer)
        if codes == {ErrorCode.none} and self.has_generations and self.epoch < newest:
            raise BrokenInvariantError(f"{self.name} commits in {self.epoch}, after {newest}")
        if codes != {ErrorCode.none}:
            return not codes & {ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id}
        self._committed(told)
        return True

    def _codes(self, answer: Any) -> set[ErrorCode]:
        codes = {row.error_code for topic in answer.topics for row in topic.partitions}
        if codes != {ErrorCode.none}:
            self.node.say(f"cannot commit: {sorted(code.name for code in codes)}")
            self.positions.clear()
        return codes

    def _committed(self, told: dict[Partition, int]) -> None:
        for place, offset in told.items():
            self.promises.committed[place] = max(offset, self.promises.committed.get(place, -1))

    async def _commit_in_transaction(self, told: dict[Partition, int]) -> bool:
        """Commit or abort offsets in a transaction; return whether every request succeeded."""
        while self._producer is None:
            self._producer = await self.init_producer()
        producer, commits = self._producer, self.draw.random() < 0.7
        if not commits:
            self.promises.aborted |= set(told.values())
        claim = {
            "transactional_id": self.name,
            "producer_id": producer[0],
            "producer_epoch": producer[1],
        }

        def body(make: RequestFactory) -> Any:
            return make.message(
                **claim,
                group_id=GROUP,
                generation_id=self.epoch,
                member_id=self.member_id,
                group_instance_id=self.instance,
                topics=topics(
                    make.TxnOffsetCommitRequestTopic,
                    _offset_rows(make.TxnOffsetCommitRequestPartition, told),
                ),
            )

        answer = await self._in_group("TxnOffsetCommit", body, at_most=NAMED["TxnOffsetCommit"])
        is_added = answer is not LOST and self._codes(answer) == {ErrorCode.none}
        if is_added:
            self.promises.pending.update(told)
            await self.wait(self.draw.choice((0, 0, 0, 300, 2 * SESSION_MS)))
            for place in told:
                self.promises.pending.pop(place, None)
            ended = await self.ask("EndTxn", to_transaction=self.name, committed=commits, **claim)
            if ended is not LOST and not ended.error_code:
                self._producer = ended.producer_id, ended.producer_epoch
                if commits:
                    self._committed(told)
                else:
                    self.positions.clear()
                return True
        # InitProducerId aborts the transaction that may be open.
        self._producer = None
        while self._producer is None:
            self._producer = await self.init_producer()
        return False

    def goes(self) -> bool:
        """Return at random whether to leave the group now."""
        return not self.is_stopped and self.draw.random() < GOES

    async def pause(self) -> None:
        """Wait until the next heartbeat."""
        await self.wait(self.draw.randint(HEARTBEAT_MS // 4, HEARTBEAT_MS))


def _offset_rows(row: Any, told: dict[Partition, int]) -> Iterator[tuple[Partition, Any]]:
    for place, offset in told.items():
        yield (
            place,
            row(partition_index=place[1], committed_offset=offset, committed_metadata=""),
        )


class ClassicMember(FramedMember):
    """A member of the classic protocol: JoinGroup, SyncGroup, Heartbeat."""

    is_leader = False

    async def _live_on(self) -> None:
        joined = await self._join()
        if joined is not None and await self._sync(joined):
            await self._work()
        else:
            await self.wait(BACKOFF_MS)

    @property
    def _claim(self) -> dict[str, Any]:
        return {
            "group_id": GROUP,
            "generation_id": self.epoch,
            "member_id": self.member_id,
            "group_instance_id": self.instance,
        }

    async def _join(self) -> Any:
        self.lose()
        subscription = encode_subscription(Subscription((self.topic,)), version=1)

        def body(make: RequestFactory) -> Any:
            return make.message(
                group_id=GROUP,
                member_id=self.member_id,
                group_instance_id=self.instance,
                session_timeout_ms=SESSION_MS,
                rebalance_timeout_ms=REBALANCE_MS,
                protocol_type="consumer",
                protocols=[make.JoinGroupRequestProtocol(name="range", metadata=subscription)],
            )

        answer = await self._in_group("JoinGroup", body, timeout_ms=JOIN_MS)
        if answer is LOST:
            return None
        if answer.error_code == ErrorCode.member_id_required:
            self.member_id = answer.member_id
        elif answer.error_code:
            if answer.error_code not in RETRIED:
                self.another_life()
        else:
            self.member_id, self.epoch = answer.member_id, answer.generation_id
            if self.epoch == FIRST_GENERATION and not self.has_generations:
                self.promises.group_began()
            return answer
        return None

    async def _sync(self, joined: Any) -> bool:
        self.is_leader = joined.leader == self.member_id
        shares = self._shares(joined) if self.is_leader else {}

        def body(make: RequestFactory) -> Any:
            return make.message(
                **self._claim,
                protocol_type="consumer",
                protocol_name="range",
                assignments=[
                    make.SyncGroupRequestAssignment(member_id=member, assignment=share)
                    for member, share in shares.items()
                ],
            )

        answer = await self._in_group("SyncGroup", body, timeout_ms=JOIN_MS)
        if answer is LOST or answer.error_code:
            if answer is not LOST and answer.error_code == ErrorCode.unknown_member_id:
                self.another_life()
            return False
        held = decode_assignment(answer.assignment)[0] if answer.assignment else ()
        self.owned = frozenset(index for _, index in held)
        self.promises.assign(self.epoch, self.instance or self.member_id, self.owned)
        return True

    def _shares(self, joined: Any) -> dict[str, bytes]:
        if joined.skip_assignment:
            return {}
        names = sorted(member.member_id for member in joined.members)
        self.promises.assigned_partitions = self.promises.partitions
        return {
            name: encode_assignment(
                [(self.topic, index) for index in range(at, self.promises.partitions, len(names))],
                version=1,
            )
            for at, name in enumerate(names)
        }

    async def _work(self) -> None:
        """Commit and send heartbeats until the member must rejoin, or leaves."""
        while True:
            await self.fetch_offsets(self.owned - self.positions.keys())
            self.is_working = self.positions.keys() == self.owned
            if self.is_working and not await self.process():
                self.another_life()
                return
            await self.pause()
            if self.goes():
                await self._leave()
                return
            answer = await self._in_group("Heartbeat", lambda make: make.message(**self._claim))
            if answer is LOST or answer.error_code in RETRIED:
                continue
            if answer.error_code == ErrorCode.rebalance_in_progress:
                return
            if answer.error_code:
                self.another_life()
                return
            # Only the leader's client watches the metadata of the topic.
            if self.is_leader and self.promises.assigned_partitions < self.promises.partitions:
                return

    async def _leave(self) -> None:
        if self.draw.random() < 0.5 and self.instance is None:

            def body(make: RequestFactory) -> Any:
                identity = make.MemberIdentity(member_id=self.member_id)
                return make.message(group_id=GROUP, members=[identity])

            await self._in_group("LeaveGroup", body)
        self.another_life()


class ConsumerMember(FramedMember):
    """A member of the consumer protocol: ConsumerGroupHeartbeat (KIP-848)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._times = 0
        """The number of member ids so far."""
        self._topic_id: UUID | None = None
        self._said: frozenset[int] | None = None
        """The partitions that the last heartbeat reported as owned."""

    async def _live_on(self) -> None:
        if not self.member_id:
            self._times += 1
            self.member_id, self.epoch = f"{self.name}-{self._times}", 0
            self._said = None
        if not await self._beat():
            await self.wait(BACKOFF_MS)
            return
        await self.fetch_offsets(self.owned - self.positions.keys())
        self.is_working = self.positions.keys() == self.owned == self._said
        if not await self.process():
            self.another_life()
        await self.pause()
        if self.goes():
            # Another member may get the partitions before this member gets the answer.
            self.lose()
            if self.member_id and self.instance is None and self.draw.random() < 0.5:
                await self._in_group("ConsumerGroupHeartbeat", self._says(LEAVE_EPOCH, None))
            self.another_life()

    def _says(self, epoch: int, owned: frozenset[int] | None) -> Any:
        is_whole = epoch == 0 or owned is not None

        def body(make: RequestFactory) -> Any:
            mine = None
            if owned is not None:
                mine = (
                    []
                    if not owned or self._topic_id is None
                    else [
                        make.TopicPartitions(
                            topic_id=self._topic_id, partitions=tuple(sorted(owned))
                        )
                    ]
                )
            return make.message(
                group_id=GROUP,
                member_id=self.member_id,
                member_epoch=epoch,
                instance_id=self.instance,
                rebalance_timeout_ms=REBALANCE_MS if is_whole else -1,
                subscribed_topic_names=(self.topic,) if is_whole else None,
                topic_partitions=mine,
            )

        return body

    async def _beat(self) -> bool:
        """Send a heartbeat, and take the assignment; return whether that succeeded."""
        owned = self.owned
        says = self._said != owned or self.epoch == 0
        sent_ms = self.node.scheduler.now
        answer = await self._in_group(
            "ConsumerGroupHeartbeat", self._says(self.epoch, owned if says else None)
        )
        if answer is LOST:
            self._said = None
            return False
        if answer.error_code:
            self._said = None
            if answer.error_code not in RETRIED:
                self.another_life()
            return False
        if self.epoch == 0 and answer.member_epoch == FIRST_EPOCH:
            self.promises.group_began()
        self.epoch, self.heard_ms = answer.member_epoch, sent_ms
        if says:
            self._said = owned
        if answer.assignment is not None:
            rows = answer.assignment.topic_partitions
            if rows:
                self._topic_id = rows[0].topic_id
            self.owned = frozenset(index for row in rows for index in row.partitions)
            self._check_owners()
            self.positions = {
                index: at for index, at in self.positions.items() if index in self.owned
            }
        return True

    def _check_owners(self) -> None:
        """Raise BrokenInvariantError if another live member owns one of the new partitions.

        A member counts as live for half of the session timeout after its last heartbeat.
        """
        since_ms = self.node.scheduler.now - SESSION_MS // 2
        for member in self.others:
            held = self.owned & member.owned
            if member is not self and held and member.heard_ms > since_ms:
                raise BrokenInvariantError(f"{self.name} is given {held}, which {member.name} has")
