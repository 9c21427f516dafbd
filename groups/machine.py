"""The group coordinator of one partition of ``__consumer_offsets``.

The state machine passes requests to their handlers, replays the log, and loads and unloads groups.
The classic protocol is in ``classic*.py``, the consumer protocol (KIP-848) in ``consumer*.py``,
committed offsets in ``offsets.py``.

Sources: ``GroupCoordinatorShard``, ``GroupMetadataManager``, ``OffsetMetadataManager``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from fencepost.groups import (
    admin,
    classic,
    classic_join,
    classic_rebalance,
    consumer,
    consumer_members,
    consumer_target,
    expressions,
    offsets,
    records,
    share_heartbeat,
    share_state,
)
from fencepost.groups.assignors.remote import TargetComputed
from fencepost.groups.classic_group import ClassicGroup
from fencepost.groups.classic_state import ClassicState
from fencepost.groups.commands import (
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    ExpireOffsets,
    FetchOffsets,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    SyncGroup,
    TopicsDeleted,
    TxnCommitOffsets,
)
from fencepost.groups.consumer_commands import (
    ConsumerHeartbeat,
    DescribeConsumerGroup,
    Environment,
)
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.consumer_records import (
    ConsumerKey,
)
from fencepost.groups.events import EventKind
from fencepost.groups.foreign_group import ForeignGroup, ForeignKey
from fencepost.groups.group import ShardTotals, pending_bytes
from fencepost.groups.limits import GroupLimits
from fencepost.groups.offset_store import OffsetStore, StoredOffset
from fencepost.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    Key,
    OffsetCommitKey,
    OffsetCommitValue,
    Value,
)
from fencepost.groups.shard import MAX_BATCH_BYTES, Group, Shard, group_bytes
from fencepost.groups.share_commands import (
    AlterShareOffsets,
    DeleteShareOffsets,
    DeleteShareState,
    DescribeShareGroup,
    ListShareState,
    ShareHeartbeat,
    ShareStateDeleted,
    ShareStateInitialized,
    ShareTopicsDeleted,
)
from fencepost.groups.share_group import ShareGroup
from fencepost.groups.share_records import ShareKey
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import (
    Decision,
    DecisionBuilder,
    InvariantViolation,
    ProducerStamp,
    Record,
    Token,
    Written,
)

G = TypeVar("G", ConsumerGroup, ShareGroup, ForeignGroup)

Handler = Callable[[Shard, DecisionBuilder, Token, Any], None]
"""Handles the commands of one class. It may raise :class:`DomainError` before it changes state."""

HANDLERS: Mapping[type, Handler] = MappingProxyType(
    {
        ConsumerHeartbeat: consumer.heartbeat,
        Heartbeat: classic.heartbeat,
        CommitOffsets: offsets.commit_offsets,
        TxnCommitOffsets: offsets.txn_commit_offsets,
        FetchOffsets: offsets.fetch_offsets,
        JoinGroup: classic_join.join_group,
        SyncGroup: classic.sync_group,
        LeaveGroup: classic.leave_group,
        DeleteOffsets: offsets.delete_offsets,
        DescribeGroup: admin.describe_group,
        DescribeConsumerGroup: admin.describe_consumer_group,
        ListGroups: admin.list_groups,
        DeleteGroup: admin.delete_group,
        TargetComputed: consumer_target.target_computed,
        ShareHeartbeat: share_heartbeat.heartbeat,
        DescribeShareGroup: share_state.describe_share_group,
        ListShareState: share_state.list_state,
        AlterShareOffsets: share_state.alter_offsets,
        ShareStateInitialized: share_state.state_initialized,
        DeleteShareOffsets: share_state.delete_offsets,
        DeleteShareState: share_state.delete_state,
        ShareStateDeleted: share_state.state_deleted,
        ShareTopicsDeleted: share_state.topics_deleted,
        TopicsDeleted: offsets.topics_deleted,
        ExpireOffsets: offsets.expire_offsets,
    }
)
"""The handler of each command."""


class GroupMachine:
    """All groups of one partition of ``__consumer_offsets``, as a ``Machine`` of ``logcore``.

    ``initial_rebalance_delay_ms`` is ``group.initial.rebalance.delay.ms``; ``offsets_retention_ms``
    is ``offsets.retention.minutes`` in milliseconds. ``environment`` returns the cluster's topics
    and the current settings of a group, for commands and for timers. ``max_batch_bytes`` returns
    the current ``max.message.bytes`` of the topic. ``memory`` and ``offset_memory`` count the
    shard's bytes against the broker's budgets. Commands and results are in
    ``fencepost.groups.commands`` and ``fencepost.groups.consumer_commands``.
    """

    def __init__(
        self,
        limits: GroupLimits | None = None,
        *,
        initial_rebalance_delay_ms: int = 3_000,
        offsets_retention_ms: int = 604_800_000,
        memory: Account | None = None,
        offset_memory: Account | None = None,
        max_batch_bytes: Callable[[], int] = lambda: MAX_BATCH_BYTES,
        environment: Callable[[str], Environment] = lambda _: Environment(),
    ) -> None:
        self._shard = Shard(
            limits or GroupLimits(),
            initial_rebalance_delay_ms,
            offsets_retention_ms,
            offsets=OffsetStore(offset_memory),
            totals=ShardTotals(memory or Account()),
            max_batch_bytes=max_batch_bytes,
            environment=environment,
        )
        self._active = False
        self._skipped: Counter[int] = Counter()

    @property
    def groups(self) -> Mapping[str, Group]:
        """All groups, read-only."""
        return self._shard.groups

    @property
    def offsets(self) -> OffsetStore:
        """All offsets, read-only."""
        return self._shard.offsets

    @property
    def share_rebalances(self) -> int:
        """The number of share group heartbeats since the load that required new targets."""
        return self._shard.share_rebalances

    # --- deciding --------------------------------------------------------------------------------

    def decide(self, token: Token, command: object, now_ms: int) -> Decision:
        """Return the decision on a command, or raise an error that the command's class lists."""
        handler = HANDLERS.get(type(command))
        if handler is None:
            raise InvariantViolation(f"not a command: {type(command).__name__}")
        shard, decision = self._shard, DecisionBuilder(now_ms)
        handler(shard, decision, token, command)
        return decision.build()

    def fire(self, key: Hashable, now_ms: int) -> Decision:
        """Decide on an expired timer; ignore a timer of a deleted group."""
        shard, decision = self._shard, DecisionBuilder(now_ms)
        match key:
            case (str(kind), str(group_id), *rest):
                group = shard.groups.get(group_id)
            case _:
                raise InvariantViolation(f"not a timer: {key!r}")
        match group, kind, rest:
            case None, _, _:
                pass
            case ClassicGroup(), "session", [str(member_id)]:
                classic_rebalance.session_timer_fired(shard, decision, group, member_id)
            case ClassicGroup(), "join", []:
                classic_rebalance.join_timer_fired(shard, decision, group)
            case ClassicGroup(), "sync", []:
                classic_rebalance.sync_timer_fired(shard, decision, group)
            case ConsumerGroup(), _, [str(member_id)]:
                consumer_members.member_timer_fired(shard, decision, group, kind, member_id)
            case ShareGroup(), "session", [str(member_id)]:
                share_heartbeat.session_timer_fired(shard, decision, group, member_id)
            case ConsumerGroup(), "regex", []:
                expressions.regex_timer_fired(shard, decision, group)
            case ConsumerGroup(), "assignor", []:
                consumer_target.assignor_timer_fired(shard, decision, group)
            case _:
                raise InvariantViolation(f"not a timer: {key!r}")
        return decision.build()

    # --- replaying -------------------------------------------------------------------------------

    def replay(
        self,
        record: Record,
        offset: int,
        timestamp_ms: int,
        stamp: ProducerStamp | None,
    ) -> None:
        """Apply one record. Unknown record types are skipped and counted.

        Raises ``CorruptRecordError``: skipping the record would lose state.
        """
        content = record.decoded if type(record) is Written else records.decode(record)
        decoded = cast("tuple[Key, Value | None] | None", content)
        if decoded is not None and type(decoded[1]) is OffsetCommitValue:  # nearly every record
            commit = cast("tuple[OffsetCommitKey, OffsetCommitValue]", decoded)
            self._replay_offset(commit[0], StoredOffset(commit[1], offset), stamp)
            return
        match decoded:
            case None:
                self._skipped[records.record_type(record.key)] += 1
            case (OffsetCommitKey() as key, None):
                self._shard.offsets.remove(key.group_id, (key.topic, key.partition))
            case (GroupMetadataKey(group_id), None):
                self._remove_group(group_id)
            case (GroupMetadataKey(group_id), GroupMetadataValue() as value):
                self._replay_group(group_id, value)
            case (ConsumerKey() as key, value):
                group = self._group_of_kind(ConsumerGroup, key.group_id, exists=value is not None)
                if group is not None:
                    group.replay(key, value)
                    self._drop_removed(group)
            case (ShareKey() as key, value):
                share = self._group_of_kind(ShareGroup, key.group_id, exists=value is not None)
                if share is not None:
                    share.replay(key, value, timestamp_ms)
                    self._drop_removed(share)
            case (ForeignKey() as key, value):
                self._replay_foreign(key, exists=value is not None)
            case _:
                raise InvariantViolation(f"cannot replay {decoded!r}")

    def replay_marker(
        self,
        stamp: ProducerStamp,
        offset: int,  # noqa: ARG002 - a transaction's offsets keep those of their own records
        *,
        commit: bool,
    ) -> None:
        """Apply an end marker: commit the transaction's pending offsets, or drop them."""
        self._shard.offsets.end_transaction(stamp.producer_id, commit=commit)

    def _replay_offset(
        self, key: OffsetCommitKey, stored: StoredOffset, stamp: ProducerStamp | None
    ) -> None:
        self._ensure_group(key.group_id)
        partition = (key.topic, key.partition)
        if stamp is None:
            self._shard.offsets.put(key.group_id, partition, stored)
        else:
            self._shard.offsets.put_pending(key.group_id, partition, stamp.producer_id, stored)

    def _ensure_group(self, group_id: str) -> None:
        """Create a *simple* group, Empty and without a protocol type, unless the group exists."""
        shard = self._shard
        if group_id not in shard.groups:
            shard.put_group(ClassicGroup(group_id, shard.totals))

    def _replay_group(self, group_id: str, value: GroupMetadataValue) -> None:
        shard = self._shard
        group = shard.groups.get(group_id)
        if self._active:
            self._install(group, group_id, value)
            return
        if group is not None:
            group.discard()
        shard.put_group(ClassicGroup.from_record(group_id, shard.totals, value))

    def _install(self, group: Group | None, group_id: str, value: GroupMetadataValue) -> None:
        """Replay a GroupMetadata record while serving, and carry out ``Shard.pending_install``."""
        shard = self._shard
        successor = None
        if shard.pending_install is not None and shard.pending_install.group.group_id == group_id:
            # The last record of a conversion. The tombstones before it have removed the old group.
            # If the group has offsets, they left a simple group.
            if not isinstance(group, ConsumerGroup):
                group = shard.pending_install.group
                shard.put_group(group)
            successor, shard.pending_install = shard.pending_install.successor, None
        if not isinstance(group, ClassicGroup):
            raise InvariantViolation(
                f"a GroupMetadata record of {group_id!r}, which is not a classic group"
            )
        group.install(value, successor)

    def _group_of_kind(self, kind: type[G], group_id: str, *, exists: bool) -> G | None:
        """Return the group whose record is replayed; None if a tombstone finds no such group.

        A group is of one kind at a time. The latest value determines the kind, and the last
        tombstone removes the group.
        """
        shard = self._shard
        group = shard.groups.get(group_id)
        if isinstance(group, kind):
            return group
        if not exists:
            return None
        if group is not None:
            is_simple = isinstance(group, ClassicGroup) and not (group.saved or group.members)
            if self._active and not is_simple:
                raise InvariantViolation(f"{group_id!r} is a group of another kind")
            group.discard()
        fresh = kind(group_id, shard.totals)
        shard.put_group(fresh)
        return fresh

    def _replay_foreign(self, key: ForeignKey, *, exists: bool) -> None:
        if self._active:
            raise InvariantViolation("a record of a streams group was written here")
        group = self._group_of_kind(ForeignGroup, key.group_id, exists=exists)
        if group is not None:
            group.replay(key, exists=exists)
            self._drop_removed(group)

    def _drop_removed(self, group: ConsumerGroup | ShareGroup | ForeignGroup) -> None:
        """Remove a group that has lost its last record."""
        if group.is_removed:
            self._shard.drop_group(group.group_id)
            if self._shard.offsets.of_group(group.group_id) is not None:
                self._ensure_group(group.group_id)

    def _remove_group(self, group_id: str) -> None:
        group = self._shard.groups.get(group_id)
        if isinstance(group, ConsumerGroup | ShareGroup | ForeignGroup):
            return
        self._shard.drop_group(group_id)
        if group is not None:
            if self._active:
                group.transition_to(ClassicState.DEAD)
            group.discard()
        if self._shard.offsets.of_group(group_id) is not None:
            self._ensure_group(group_id)

    # --- serving ---------------------------------------------------------------------------------

    def on_loaded(self, now_ms: int) -> Decision:
        """Begin to serve: restart all sessions, rebalance groups that are too large."""
        self._active = True
        decision = DecisionBuilder(now_ms)
        for group in self._shard.groups.values():
            if isinstance(group, ClassicGroup):
                classic.group_loaded(self._shard, decision, group)
            elif isinstance(group, ConsumerGroup):
                consumer_members.group_loaded(self._shard, decision, group)
            elif isinstance(group, ShareGroup):
                share_heartbeat.group_loaded(self._shard, decision, group)
        for kind, count in sorted(self._skipped.items()):
            decision.event(EventKind.RECORDS_SKIPPED, "", record_type=kind, count=count)
        return decision.build()

    def on_unloaded(self) -> Decision:
        """Stop serving: fail every parked request, so that clients find the new coordinator."""
        decision = DecisionBuilder(0)
        shard, pending = self._shard, self._shard.pending_install
        if pending is not None and shard.groups.get(pending.group.group_id) != pending.group:
            pending.group.on_unloaded(decision)
        for group in shard.groups.values():
            group.on_unloaded(decision)
        self._active = False
        return decision.build()

    def digest(self) -> str:
        """Return a hash of the durable state: groups' records, offsets, open transactions."""
        groups = [
            (group_id, state)
            for group_id, group in sorted(self._shard.groups.items(), key=lambda item: item[0])
            if (state := group.durable_state()) is not None
        ]
        state = repr((groups, self._shard.offsets.durable_state()))
        return hashlib.sha256(state.encode(errors="surrogatepass")).hexdigest()

    def check(self) -> None:
        """Verify every group, the offsets, and the totals that the limits are compared with."""
        shard = self._shard
        memory = sum(pending_bytes(*given) for given in shard.pending_member_ids)
        pending: set[tuple[str, str]] = set()
        for group_id, group in shard.groups.items():
            if group.group_id != group_id:
                raise InvariantViolation(f"group {group.group_id!r} is stored as {group_id!r}")
            group.check()
            memory += group_bytes(group_id) + group.memory_bytes
            if isinstance(group, ClassicGroup):
                pending |= {(group_id, member_id) for member_id in group.pending_members}
        totals = shard.totals
        if totals.memory.used != memory:
            raise InvariantViolation("the memory of the shard's groups is miscounted")
        if totals.pending.keys() != pending:
            raise InvariantViolation("the shard's pending members are miscounted")
        if shard.pending_install is not None:
            raise InvariantViolation(
                f"the record of {shard.pending_install.group.group_id!r} was not replayed"
            )
        shard.offsets.check()
        for group_id in shard.offsets.group_ids():
            if group_id not in shard.groups:
                raise InvariantViolation(f"offsets of {group_id!r}, which does not exist")
