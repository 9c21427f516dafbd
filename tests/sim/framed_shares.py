"""Members of a share group, which fetch, acknowledge, hold records too long, and disappear.

Members behave like a client library, and sometimes as no library does: they acknowledge records
after the lock has expired, continue a session after an unknown outcome, or stop their heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.client.requests import Partition
from fencepost.groups.share.states import AcknowledgeType
from fencepost.protocol.errors import WireError
from fencepost.protocol.messages import RequestFactory
from tests.sim.framed import BACKOFF_MS, LOST, RETRIED, FrameClient, Promises, _read
from tests.sim.invariants import BrokenInvariantError
from tests.sim.share_ledger import ShareLedger

GROUP: Final = "shares"
HEARTBEAT_MS: Final = 150
SESSION_MS: Final = 1_500
LOCK_MS: Final = 1_000
"""``group.share.record.lock.duration.ms``, the shortest that a broker allows."""
FULL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
LEAVE_EPOCH: Final = -1
DESCRIBE_MS: Final = 250
"""The pause between two DescribeShareGroupOffsets."""

GAP, ACCEPT, RELEASE, REJECT, RENEW = AcknowledgeType
_DRAWN: Final = (ACCEPT,) * 13 + (RELEASE,) * 4 + (REJECT,) * 2
IGNORED: Final = 0.12
"""The probability that a member does nothing with the records that it received."""
PAUSES_MS: Final = (1, 1, 5, 20, 20, 50, 100, 100, 200, LOCK_MS + 20, LOCK_MS + 300)
"""The pauses between two requests of a member. In the last two its acquisition locks expire."""
PIGGYBACKS: Final = 0.5
"""The probability that acknowledgements are sent with a ShareFetch."""

_FATAL: Final = frozenset({ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch})
_SESSION_LOST: Final = frozenset(
    {ErrorCode.share_session_not_found, ErrorCode.invalid_share_session_epoch}
)
_ALLOWED: Final = frozenset(
    {
        ErrorCode.none,
        ErrorCode.not_leader_or_follower,
        ErrorCode.replica_not_available,
        ErrorCode.kafka_storage_error,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.offset_not_available,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_server_error,
        ErrorCode.unknown_leader_epoch,
    }
)
"""Errors of a fetched partition that do not end Java's consumer (``ShareFetchCollector``)."""


@dataclass
class Held:
    """A record that a member has received and not acknowledged."""

    count: int
    has_record: bool
    sent_ms: float
    """When the ShareFetch that returned the record was sent."""


@dataclass
class Session:
    """A share session with one broker, as the member knows it."""

    epoch: int = FULL_EPOCH
    partitions: set[int] = field(default_factory=set)
    held: dict[int, dict[int, Held]] = field(default_factory=dict)
    """Partition → offset → the record."""
    begun_ms: float = 0
    """When the member opened the session, or last noticed that its connection was lost."""


_Kinds = list[tuple[int, AcknowledgeType]]


class ShareMember(FrameClient):
    """A member of :data:`GROUP`, with a session at each leader."""

    def __init__(
        self,
        *arguments: Any,
        topic: str,
        promises: Promises,
        ledger: ShareLedger,
        is_committed: bool,
    ) -> None:
        super().__init__(*arguments)
        self.topic, self.promises, self.ledger = topic, promises, ledger
        self.is_committed = is_committed
        """Whether the group reads committed records only."""
        self.member_id, self._lives = "", 0
        self._epoch = 0
        self._assigned: list[int] = []
        self._is_full = False
        """Whether the next heartbeat names the subscribed topics."""
        self._heartbeat_ms = 0.0
        self._sessions: dict[int, Session] = {}

    @property
    def _now(self) -> float:
        return self.loop.time() * 1000

    async def live(self) -> None:
        """Fetch and acknowledge until the delivery of every record is complete."""
        self._be_another()
        while not self.ledger.is_drained:
            if self._now >= self._heartbeat_ms:
                await self._heartbeat()
            await self._turn()

    def _be_another(self) -> None:
        """Continue with a new member id; the former id's locks last until its connection ends."""
        self._lives += 1
        self.member_id, self._epoch, self._assigned = f"{self.name}-{self._lives}", 0, []
        self._sessions.clear()

    # --- the group ---

    async def _heartbeat(self) -> None:
        self._heartbeat_ms = self._now + HEARTBEAT_MS
        answer = await self._beat(self._epoch)
        # The next heartbeat asks for the assignment again if this response is lost or an error.
        # Source: ShareHeartbeatRequestManager.HeartbeatState.reset.
        self._is_full = answer is LOST or bool(answer.error_code)
        if answer is LOST:
            return
        if answer.error_code:
            self.node.say(f"ShareGroupHeartbeat: {answer.error_code.name}")
            if answer.error_code not in RETRIED:
                self._epoch = 0
            self.forget()
            await self.wait(BACKOFF_MS)
            return
        self._epoch = answer.member_epoch
        if answer.assignment is not None:
            rows = answer.assignment.topic_partitions
            assigned = [index for row in rows for index in row.partitions]
            if len(set(assigned)) != len(assigned):
                raise BrokenInvariantError(f"{self.name} is assigned {assigned}")
            self._assigned = assigned
            self.ledger.assigned.update(assigned)

    async def _beat(self, epoch: int) -> Any:
        def body(make: RequestFactory) -> Any:
            return make.message(
                group_id=GROUP,
                member_id=self.member_id,
                member_epoch=epoch,
                rack_id=None,
                subscribed_topic_names=(self.topic,) if epoch == 0 or self._is_full else None,
            )

        return await self.ask("ShareGroupHeartbeat", to_group=GROUP, entity=body)

    # --- records ---

    async def _turn(self) -> None:
        leaders = await self._leaders()
        if not leaders:
            await self.wait(BACKOFF_MS)
            return
        node = self.draw.choice(sorted(leaders))
        session = self._sessions.setdefault(node, Session())
        chance = 1.0 if self.is_stopped else self.draw.random()
        if chance < 0.02:
            self.node.say("loses its connections")
            await self._disconnect()
        elif chance < 0.04:
            self.node.say("goes on as another member")
            self._be_another()
        elif chance < 0.05:
            await self._beat(LEAVE_EPOCH)
            self._be_another()
        elif chance < 0.08:
            await self._acknowledge(node, session, is_last=True)
        elif any(session.held.values()) and session.epoch and self.draw.random() > PIGGYBACKS:
            await self._acknowledge(node, session)
        else:
            await self._fetch(node, session, leaders[node], is_last=0.08 <= chance < 0.1)
        if not self.is_stopped:
            await self.wait(self.draw.choice(PAUSES_MS))
        else:
            await self.wait(20)

    async def _disconnect(self) -> None:
        await self._client.close()
        if self.draw.random() < 0.7:
            self._sessions.clear()

    async def _leaders(self) -> dict[int, list[int]]:
        """Return the assigned partitions by leader; at times also partitions of other members."""
        try:
            known = (await self._client.metadata()).topics.get(self.topic)
        except (WireError, OSError):
            return {}
        if known is None or known.error or known.topic_id is None:
            self.forget()
            return {}
        self.ledger.topic_id = known.topic_id
        if not known.partitions.keys() >= set(self._assigned):
            self.forget()
        leaders: dict[int, list[int]] = {}
        for index, partition in known.partitions.items():
            is_asked = index in self._assigned or (
                self.draw.random() < 0.05 and index in self.ledger.assigned
            )
            if partition.leader >= 0 and is_asked:
                leaders.setdefault(partition.leader, []).append(index)
            elif is_asked:
                self.forget()
        return leaders

    def _topic_id(self) -> UUID:
        assert self.ledger.topic_id is not None
        return self.ledger.topic_id

    async def _fetch(
        self, node: int, session: Session, partitions: Sequence[int], *, is_last: bool
    ) -> None:
        may_acknowledge = session.epoch != FULL_EPOCH
        kinds = self._chosen(session) if may_acknowledge else {}
        named = sorted({*kinds, *(set(partitions) - session.partitions)})
        forgotten = sorted(session.partitions - set(partitions) - set(named))
        is_last = is_last and may_acknowledge
        epoch, sent_ms = FINAL_EPOCH if is_last else session.epoch, self._now
        topic_id = self._topic_id()
        limit = self.draw.choice((1, 5, 500))
        wait_ms = self.draw.choice((0, 100, 500))
        if self.is_stopped:
            wait_ms = 0  # a single member must read all partitions before the simulated run ends

        def body(make: RequestFactory) -> Any:
            rows = [
                make.FetchPartition(
                    partition_index=index,
                    acknowledgement_batches=_batches(make, kinds.get(index, [])),
                )
                for index in named
            ]
            return make.message(
                group_id=GROUP,
                member_id=self.member_id,
                share_session_epoch=epoch,
                max_wait_ms=wait_ms,
                min_bytes=1,
                max_bytes=1 << 20,
                max_records=limit,
                batch_size=self.draw.choice((1, 500)),
                share_acquire_mode=self.draw.choice((0, 1)),
                is_renew_ack=False,
                topics=[make.FetchTopic(topic_id=topic_id, partitions=rows)] if rows else [],
                forgotten_topics_data=[make.ForgottenTopic(topic_id=topic_id, partitions=forgotten)]
                if forgotten
                else [],
            )

        self._sent(kinds)
        answer = await self.ask("ShareFetch", to_node=node, entity=body)
        if not await self._continues(node, session, answer, is_last=is_last):
            return
        session.partitions = (session.partitions | set(named)) - set(forgotten)
        for topic in answer.responses:
            for row in topic.partitions:
                index = row.partition_index
                if index in kinds:
                    self._judge(index, kinds[index], ErrorCode(row.acknowledge_error_code))
                self._take(session, row, sent_ms)

    def _take(self, session: Session, row: Any, sent_ms: float) -> None:
        index = row.partition_index
        if row.error_code:
            self.node.say(f"fetches {index}: {row.error_code.name}")
            if row.error_code not in _ALLOWED:
                raise BrokenInvariantError(f"{self.name}: ShareFetch: {row.error_code.name}")
            self.forget()
            session.held.pop(index, None)
            return
        place: Partition = self.topic, index
        data = bytes(row.records or b"")
        records = dict(_read(data, 0, [], has_gaps=True)[0]) if row.acquired_records else {}
        for entry in row.acquired_records:
            for offset in range(entry.first_offset, entry.last_offset + 1):
                self.ledger.delivered(self.member_id, index, offset, entry.delivery_count)
                value = records.get(offset)
                if value is not None:
                    self.promises.see(place, offset, value, committed=self.is_committed)
                session.held.setdefault(index, {})[offset] = Held(
                    entry.delivery_count, value is not None, sent_ms
                )

    async def _acknowledge(self, node: int, session: Session, *, is_last: bool = False) -> None:
        if session.epoch == FULL_EPOCH:
            return
        kinds = self._chosen(session)
        is_renewal = not is_last and not self.is_stopped and self.draw.random() < 0.1
        if is_renewal:
            kinds = {
                index: [(offset, RENEW) for offset, _ in chosen] for index, chosen in kinds.items()
            }
        epoch, topic_id = FINAL_EPOCH if is_last else session.epoch, self._topic_id()

        def body(make: RequestFactory) -> Any:
            rows = [
                make.AcknowledgePartition(
                    partition_index=index, acknowledgement_batches=_batches(make, chosen)
                )
                for index, chosen in sorted(kinds.items())
            ]
            return make.message(
                group_id=GROUP,
                member_id=self.member_id,
                share_session_epoch=epoch,
                is_renew_ack=is_renewal,
                topics=[make.AcknowledgeTopic(topic_id=topic_id, partitions=rows)] if rows else [],
            )

        if not is_renewal:
            self._sent(kinds)
        answer = await self.ask("ShareAcknowledge", to_node=node, entity=body)
        if not await self._continues(node, session, answer, is_last=is_last):
            return
        for topic in answer.responses:
            for row in topic.partitions:
                self._judge(row.partition_index, kinds.get(row.partition_index, []), row.error_code)

    async def _continues(self, node: int, session: Session, answer: Any, *, is_last: bool) -> bool:
        """Return whether a request was accepted; bring the session up to date."""
        if answer is LOST:
            # The broker may have advanced the session epoch, so usually open a new session.
            if self.is_stopped or self.draw.random() < 0.8:
                self._sessions.pop(node, None)
            return False
        if answer.error_code:
            self.node.say(f"is refused by {node}: {answer.error_code.name}")
            self._sessions.pop(node, None)
            if answer.error_code not in _SESSION_LOST:
                self.forget()
                await self.wait(BACKOFF_MS)
            return False
        if is_last:
            self._sessions.pop(node, None)
        else:
            session.epoch += 1
        return True

    def _sent(self, kinds: dict[int, _Kinds]) -> None:
        for index, chosen in kinds.items():
            self.ledger.tries(index, chosen)

    def _judge(self, index: int, kinds: _Kinds, code: ErrorCode) -> None:
        if code:
            self.node.say(f"acknowledges {index} in vain: {code.name}")
            self.forget()
        else:
            self.ledger.succeeded(self.member_id, index, kinds)

    def _chosen(self, session: Session) -> dict[int, _Kinds]:
        """Take held records, and choose how to acknowledge them."""
        kinds: dict[int, _Kinds] = {}
        for index, held in sorted(session.held.items()):
            if not held:
                continue
            if not self.is_stopped and self.draw.random() < IGNORED:
                held.clear()
                continue
            offsets = sorted(held)
            first = 0 if self.is_stopped else self.draw.randrange(len(offsets))
            kind = self.draw.choice(_DRAWN)
            chosen: _Kinds = []
            for offset in offsets[first:]:
                if chosen and offset != chosen[-1][0] + 1 and not self.is_stopped:
                    break
                if self.draw.random() < 0.2:
                    kind = self.draw.choice(_DRAWN)
                taken = ACCEPT if self.is_stopped else kind
                chosen.append((offset, taken if held.pop(offset).has_record else GAP))
            kinds[index] = chosen
        return kinds


def _batches(make: RequestFactory, kinds: Iterable[tuple[int, AcknowledgeType]]) -> list[Any]:
    """Return batches of consecutive offsets, with one type per batch or one per offset."""
    runs: list[_Kinds] = []
    for offset, kind in kinds:
        if runs and runs[-1][-1][0] + 1 == offset:
            runs[-1].append((offset, kind))
        else:
            runs.append([(offset, kind)])
    return [
        make.AcknowledgementBatch(
            first_offset=run[0][0],
            last_offset=run[-1][0],
            acknowledge_types=[int(kind) for _, kind in run]
            if len({kind for _, kind in run}) > 1
            else [int(run[0][1])],
        )
        for run in runs
    ]


class ShareObserver(FrameClient):
    """Requests the persisted offsets of the group, until all deliveries are complete."""

    def __init__(self, *arguments: Any, ledger: ShareLedger, is_over: Callable[[], bool]) -> None:
        super().__init__(*arguments)
        self.ledger, self.is_over = ledger, is_over
        self.lags: dict[int, int] = {}

    async def live(self) -> None:
        """Describe the group until :attr:`is_over` holds."""
        while not (self.is_stopped and self.is_over()):
            await self.describe()
            await self.wait(DESCRIBE_MS)
        self.ledger.is_drained = True

    async def describe(self) -> bool:
        """Send one DescribeShareGroupOffsets; return whether all states could be read."""

        def body(make: RequestFactory) -> Any:
            row = make.DescribeShareGroupOffsetsRequestGroup(group_id=GROUP, topics=None)
            return make.message(groups=[row])

        answer = await self.ask("DescribeShareGroupOffsets", to_group=GROUP, entity=body)
        if answer is LOST:
            return False
        (group,) = answer.groups
        if group.error_code:
            self.forget()
            return False
        rows = {row.partition_index: row for topic in group.topics for row in topic.partitions}
        for index, row in rows.items():
            # Errors of the share coordinator are shown as the start offset -1.
            if not row.error_code and row.start_offset >= 0:
                self.ledger.told_start(index, row.start_offset)
                self.lags[index] = row.lag
        return self.ledger.with_outcomes() <= self.lags.keys()
