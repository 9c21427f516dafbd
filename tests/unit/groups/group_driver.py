"""A driver that runs a GroupMachine as the runtime does, and checks it at every step.

Each step decides, checks that the decision changed no durable state, appends and replays its
records, arms timers and calls ``check()``. Every request has a token, and must be answered exactly
once. Only ``advance`` moves the clock.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fencepost.groups import records
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.commands import (
    CommitOffsets,
    CommitOffsetsResult,
    DescribeGroup,
    FetchOffsets,
    FetchTopic,
    Heartbeat,
    JoinGroup,
    JoinGroupResult,
    LeaveGroup,
    LeavingMember,
    OffsetToCommit,
    SyncGroup,
    TxnCommitOffsets,
)
from fencepost.groups.consumer_group import (
    ConsumerGroup,
)
from fencepost.groups.errors import GroupIdNotFoundError, MemberIdRequiredError
from fencepost.groups.foreign_group import ForeignGroup
from fencepost.groups.limits import GroupLimits
from fencepost.groups.machine import GroupMachine
from fencepost.groups.reconcile import MemberState
from fencepost.groups.shard import MAX_BATCH_BYTES
from fencepost.groups.share_group import ShareGroup
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import Decision, DomainError, Event, ProducerStamp, Record
from tests.unit.groups.telling import Seen, check_told, seen

G = "g"
NOW = 1_000_000
SESSION = 10_000
REBALANCE = 60_000
DELAY = 3_000
RETENTION = 604_800_000


def subscription(*topics: str) -> bytes:
    """Return a consumer's JoinGroup metadata, version 0."""
    out = struct.pack(">hi", 0, len(topics))
    for topic in topics:
        out += struct.pack(">h", len(topic)) + topic.encode()
    return out + struct.pack(">i", -1)


RANGE = (("range", subscription("t")),)


@dataclass(frozen=True, slots=True)
class Marker:
    """An end-of-transaction marker in the log."""

    producer_id: int
    commit: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One record or marker of the log, at its offset."""

    offset: int
    record: Record | None
    stamp: ProducerStamp | None
    marker: Marker | None = None
    timestamp_ms: int = NOW


class Parked:
    """The placeholder for the response of a request that still waits."""

    def __repr__(self) -> str:
        return "PARKED"


PARKED = Parked()


def load(log: Iterable[Entry], **settings: Any) -> GroupMachine:
    """Return a new machine that has replayed ``log`` and does not serve yet.

    ``budget`` and ``offset_budget`` limit its memory accounts; other settings are parameters of
    GroupMachine.
    """
    memory = Account(settings.pop("budget", None))
    offset_memory = Account(settings.pop("offset_budget", None))
    machine = GroupMachine(memory=memory, offset_memory=offset_memory, **settings)
    for account in (memory, offset_memory):
        weakref.finalize(machine, account.close)
    for entry in log:
        replay(machine, entry)
    return machine


def replay(machine: GroupMachine, entry: Entry) -> None:
    if entry.marker is not None:
        stamp = ProducerStamp(entry.marker.producer_id, 0)
        machine.replay_marker(stamp, entry.offset, commit=entry.marker.commit)
    elif entry.record is not None:
        machine.replay(entry.record, entry.offset, entry.timestamp_ms, entry.stamp)


MADE: deque[Driver] = deque(maxlen=2)
"""The test's last drivers, whose logs the real cleaner compacts after the test."""


class Driver:
    """One shard with a log, timers and a clock."""

    watch_every = 1
    """The number of steps between checks of the invariants and digests.

    Runs of tens of thousands of steps set a number above 1.
    """

    def __init__(
        self,
        limits: GroupLimits | None = None,
        log: Iterable[Entry] = (),
        now: int = NOW,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        **settings: Any,
    ) -> None:
        self.max_batch_bytes = max_batch_bytes
        self.settings = {
            "limits": limits or GroupLimits(),
            "max_batch_bytes": lambda: self.max_batch_bytes,
            "initial_rebalance_delay_ms": DELAY,
            "offsets_retention_ms": RETENTION,
            **settings,
        }
        self.log: list[Entry] = list(log)
        self.now = now
        self.machine = load(self.log, **self.settings)
        MADE.append(self)
        self.timers: dict[Hashable, int] = {}
        self._set_for: dict[Hashable, int] = {}
        """The deadlines that the machine requested; no timer may fire before its deadline."""
        self.answers: dict[int, object] = {}
        self.events: list[Event] = []
        self.effects: list[object] = []
        self.decisions = 0
        self._told: dict[str, Seen] | None = None
        self._token = 0
        self._ids = 0
        self._apply(self.machine.on_loaded(self.now))

    # --- steps -----------------------------------------------------------------------------------

    def send(self, command: object) -> int:
        """Decide on a command and return its token; ``answers`` has its response or PARKED."""
        self._token += 1
        token = self._token
        self.answers[token] = PARKED
        before = self._watched()
        try:
            decision = self.machine.decide(token, command, self.now)
        except DomainError as error:
            self.answers[token] = error
            assert before in {None, self._watched()}
            self.check()
            return token
        assert before in {None, self._watched()}, "decide changed durable state"
        self._apply(decision)
        return token

    def ask(self, command: object) -> Any:
        """Send a command that is answered at once; return its result, or raise its error."""
        return self.answer(self.send(command))

    def answer(self, token: int) -> Any:
        answer = self.answers[token]
        assert answer is not PARKED, "no answer yet"
        if isinstance(answer, Exception):
            raise answer
        return answer

    def parked(self, token: int) -> bool:
        return self.answers[token] is PARKED

    def advance(self, by_ms: int) -> None:
        """Let time pass; timers fire in order, at their deadlines."""
        end = self.now + by_ms
        while self.timers:
            key, deadline = min(self.timers.items(), key=lambda item: (item[1], repr(item[0])))
            if deadline > end:
                break
            self.now = max(self.now, deadline)
            del self.timers[key]
            before = self._watched()
            now = max(self.now, self._set_for.pop(key))
            decision = self.machine.fire(key, now)
            assert before in {None, self._watched()}, "fire changed durable state"
            self._apply(decision, now)
        self.now = end

    def jump(self, by_ms: int) -> None:
        """Set the wall clock; timers keep their remaining time."""
        self.now += by_ms
        self.timers = {key: deadline + by_ms for key, deadline in self.timers.items()}

    def marker(self, producer_id: int, *, commit: bool) -> None:
        """End the transaction of ``producer_id``."""
        self._append(Entry(len(self.log), None, None, Marker(producer_id, commit)))
        self.check()

    def reload(self) -> None:
        """Crash and load again: the log must restore the same state."""
        digest = self.machine.digest()
        unloaded = self.machine.on_unloaded()
        assert not unloaded.records
        self._collect(unloaded)
        self.machine = load(self.log, **self.settings)
        self.timers.clear()
        self._told = None
        assert self.machine.digest() == digest, "a reload changed durable state"
        self._apply(self.machine.on_loaded(self.now))

    def _apply(self, decision: Decision, now: int | None = None) -> None:
        self.decisions += 1
        # The machine has already decided and may have changed state that is not durable, so compare
        # with the state that was recorded after the previous step.
        before = self._told
        for record in decision.records:
            self._append(Entry(len(self.log), record, decision.stamp, timestamp_ms=self.now))
        self._collect(decision, now)
        self.check()
        self._told = seen(self.groups) if self.watch_every == 1 else {}
        if before is not None and self.watch_every == 1:
            check_told(before, self._told, decision.events)

    def _append(self, entry: Entry) -> None:
        self.log.append(entry)
        replay(self.machine, entry)

    def _collect(self, decision: Decision, now: int | None = None) -> None:
        for timer in decision.timers:
            if timer.deadline_ms is None:
                self.timers.pop(timer.key, None)
            else:
                wait = timer.deadline_ms - (self.now if now is None else now)
                assert wait >= 0
                self.timers[timer.key] = self.now + wait
                self._set_for[timer.key] = timer.deadline_ms
        for reply in decision.replies:
            assert self.answers[reply.token] is PARKED, "a token was answered twice"
            self.answers[reply.token] = reply.response
        self.events.extend(decision.events)
        self.effects.extend(decision.effects)

    def _watched(self) -> object:
        """Return the digest and the groups, which only replay may change."""
        if self.decisions % self.watch_every:
            return None
        table = {group_id: id(group) for group_id, group in self.groups.items()}
        return self.machine.digest(), tuple(table.items())

    def check(self) -> None:
        """Check the machine's invariants, and that exactly the required timers are armed."""
        if self.decisions % self.watch_every:
            return
        self.machine.check()
        needed: set[Hashable] = set()
        allowed: set[Hashable] = set()
        for group in self.groups.values():
            if isinstance(group, ConsumerGroup):
                for member_id in group.members:
                    needed.add(group.timer("session", member_id))
                    is_unrevoked = (
                        group.current(member_id).state is MemberState.UNREVOKED_PARTITIONS
                    )
                    if is_unrevoked and group.members[member_id].classic is None:
                        needed.add(group.timer("rebalance", member_id))
                needed |= {group.timer("join", name) for name in group.joining}
                needed |= {group.timer("sync", name) for name in group.syncing}
                if group.members:
                    allowed |= {group.timer("assignor"), group.timer("regex")}
                if group.scan is not None:
                    needed.add(group.timer("regex"))
                continue
            if isinstance(group, ShareGroup):
                needed |= {group.timer("session", member_id) for member_id in group.members}
                continue
            if isinstance(group, ForeignGroup):
                continue
            assert isinstance(group, ClassicGroup)
            for member_id in group.pending_members:
                needed.add(group.timer("session", member_id))
            for member in group.members.values():
                target = allowed if member.counts_as_alive else needed
                target.add(group.timer("session", member.member_id))
            if group.state is ClassicState.PREPARING_REBALANCE:
                needed.add(group.timer("join"))
            if group.pending_sync:
                needed.add(group.timer("sync"))
        armed = set(self.timers)
        assert needed <= armed, f"not armed: {needed - armed}"
        assert armed <= needed | allowed, f"armed for nothing: {armed - needed - allowed}"

    # --- inspection -------------------------------------------------------------------------------

    @property
    def groups(self) -> dict[str, Any]:
        return self.machine._shard.groups

    def group(self, group_id: str = G) -> ClassicGroup:
        group = self.groups[group_id]
        assert isinstance(group, ClassicGroup)
        return group

    def state(self, group_id: str = G) -> str:
        try:
            return str(self.ask(DescribeGroup(group_id)).state)
        except GroupIdNotFoundError:
            return "Dead"

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def event(self, kind: str) -> dict[str, Any]:
        """Return the detail of the newest event of this kind."""
        return dict(next(event for event in reversed(self.events) if event.kind == kind).detail)

    def last_group_record(self) -> records.GroupMetadataValue | None:
        for entry in reversed(self.log):
            if entry.record is None:
                continue
            decoded = records.decode(entry.record)
            if decoded is not None and isinstance(decoded[0], records.GroupMetadataKey):
                value = decoded[1]
                assert value is None or isinstance(value, records.GroupMetadataValue)
                return value
        raise AssertionError("no group record")

    # --- commands --------------------------------------------------------------------------------

    def join(
        self, member_id: str = "", *, instance: str | None = None, version: int = 9, **other: Any
    ) -> int:
        """Send a JoinGroup as a client of the given version does and return the token."""
        self._ids += 1
        command = JoinGroup(
            group_id=G,
            member_id=member_id,
            group_instance_id=instance,
            client_id="c",
            client_host="/127.0.0.1",
            session_timeout_ms=SESSION,
            rebalance_timeout_ms=REBALANCE,
            protocol_type="consumer",
            protocols=RANGE,
            require_known_member_id=version >= 4,
            supports_skip_assignment=version >= 9,
            new_member_id=f"{instance or 'c'}-{self._ids}",
        )
        return self.send(replace(command, **other))

    def join_dynamic(self, **other: Any) -> tuple[int, str]:
        """Join as a new dynamic member with KIP-394's two requests; return token and member id."""
        first = self.answers[self.join(**other)]
        assert isinstance(first, MemberIdRequiredError)
        return self.join(first.member_id, **other), first.member_id

    def sync(
        self,
        member_id: str,
        generation: int | None = None,
        assignments: Sequence[tuple[str, bytes]] = (),
        *,
        group_id: str = G,
        instance: str | None = None,
        protocol: tuple[str | None, str | None] = (None, None),
    ) -> int:
        current = self.group(group_id).generation_id if group_id in self.groups else 0
        return self.send(
            SyncGroup(
                group_id,
                current if generation is None else generation,
                member_id,
                instance,
                protocol[0],
                protocol[1],
                tuple(assignments),
            )
        )

    def heartbeat(
        self, member_id: str, generation: int | None = None, instance: str | None = None
    ) -> Any:
        current = self.group().generation_id if G in self.groups else 0
        return self.ask(
            Heartbeat(G, current if generation is None else generation, member_id, instance)
        )

    def leave(self, *members: str | LeavingMember, group_id: str = G) -> Any:
        leaving = tuple(
            LeavingMember(member) if isinstance(member, str) else member for member in members
        )
        return self.ask(LeaveGroup(group_id, leaving)).members

    def commit(
        self,
        *offsets: tuple[str, int, int],
        generation: int = -1,
        member_id: str = "",
        instance: str | None = None,
        group_id: str = G,
        producer: int | None = None,
        **other: Any,
    ) -> CommitOffsetsResult:
        items = tuple(OffsetToCommit(*offset) for offset in offsets or (("t", 0, 5),))
        fields = (group_id, generation, member_id, instance, items)
        if producer is not None:
            command = TxnCommitOffsets(*fields, ProducerStamp(producer, 0), **other)
            return self.ask(command)  # type: ignore[no-any-return]
        return self.ask(CommitOffsets(*fields, **other))  # type: ignore[no-any-return]

    def fetch(
        self, topic: str = "t", partition: int = 0, *, stable: bool = False, group_id: str = G
    ) -> Any:
        """Return one partition's committed offset as FetchedOffset."""
        topics = (FetchTopic(topic, (partition,)),)
        return self.ask(FetchOffsets(group_id, topics, require_stable=stable)).topics[0][1][0]

    # --- ready-made groups -----------------------------------------------------------------------

    def finish_initial_delay(self) -> None:
        """Let time pass until the initial rebalance delay is over."""
        while self.group().initial_delay is not None:
            self.advance(DELAY)

    def rejoin_all(self, *, skip: Iterable[str] = ()) -> dict[str, int]:
        """Let members without a pending JoinGroup rejoin unchanged; return tokens by member id."""
        tokens = {}
        for member in list(self.group().members.values()):
            if member.join_token is None and member.member_id not in skip:
                tokens[member.member_id] = self.join(
                    member.member_id,
                    instance=member.group_instance_id,
                    protocols=member.protocols,
                    session_timeout_ms=member.session_timeout_ms,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                )
        return tokens

    def sync_all(self) -> dict[str, Any]:
        """Let every member sync, the leader last; return results by member id."""
        group = self.group()
        ids = sorted(group.members, key=lambda member_id: member_id == group.leader_id)
        plan = [(member_id, f"to {member_id}".encode()) for member_id in ids]
        tokens = {
            member_id: self.sync(
                member_id,
                assignments=plan if member_id == group.leader_id else (),
                instance=group.members[member_id].group_instance_id,
            )
            for member_id in ids
        }
        return {member_id: self.answer(token) for member_id, token in tokens.items()}


def completing(
    count: int = 2, *, static: Iterable[str] = (), **settings: Any
) -> tuple[Driver, list[str]]:
    """Return a group in CompletingRebalance of generation 1; the first member leads."""
    driver = Driver(**settings)
    tokens = [driver.join_dynamic()[0] for _ in range(count)]
    tokens += [driver.join(instance=name) for name in static]
    driver.finish_initial_delay()
    results: list[JoinGroupResult] = [driver.answer(token) for token in tokens]
    assert {result.generation_id for result in results} == {1}
    return driver, [result.member_id for result in results]


def stable(
    count: int = 2, *, static: Iterable[str] = (), **settings: Any
) -> tuple[Driver, list[str]]:
    """Return a Stable group of generation 1; the first member leads."""
    driver, ids = completing(count, static=static, **settings)
    driver.sync_all()
    assert driver.state() == "Stable"
    return driver, ids


def preparing(count: int = 2, **settings: Any) -> tuple[Driver, list[str], int]:
    """Return a formerly Stable group whose leader just rejoined, and the leader's token."""
    driver, ids = stable(count, **settings)
    token = driver.join(ids[0])
    assert driver.state() == "PreparingRebalance"
    return driver, ids, token


def initial() -> tuple[Driver, list[str], list[int]]:
    """Return a group in its first join phase, with one member."""
    driver = Driver()
    token, member_id = driver.join_dynamic()
    assert driver.state() == "PreparingRebalance"
    return driver, [member_id], [token]


def empty() -> Driver:
    """Return a group whose last member has left."""
    driver, ids = stable(1)
    driver.leave(ids[0])
    assert driver.state() == "Empty"
    return driver
