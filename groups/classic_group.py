"""A classic group's data and the steps that keep it consistent; no protocol decisions.

``saved`` is the group's newest GroupMetadata record, which only a replay changes. All other fields
describe the live group: members of a join phase, parked requests, the next generation. When the
broker restarts, everything that is not in the record is lost.

Source: Kafka's ``ClassicGroup`` and ``ClassicGroupMember``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar, Final

from fencepost.groups.assignors.client.protocol import subscribed_topics
from fencepost.groups.classic_members import ClassicMember, select_protocol
from fencepost.groups.classic_state import ClassicState, require_transition
from fencepost.groups.commands import JoinMember, ListedGroup, OffsetToCommit
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupDeadError,
    IllegalGenerationError,
    NonEmptyGroupError,
    NotGroupCoordinatorError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from fencepost.groups.group import GroupBase, ShardTotals, pending_bytes
from fencepost.groups.records import (
    NO_TIMESTAMP,
    GroupMetadataValue,
    MemberMetadata,
    group_tombstone,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.machine import (
    DecisionBuilder,
    DomainError,
    InvariantViolation,
    Record,
    Token,
)
from fencepost.logcore.values import dataclass

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
"""The protocol type whose metadata the coordinator can read."""


@dataclass(frozen=True, slots=True)
class InitialDelay:
    """The delay of an Empty group's first rebalance, during which more members may join."""

    delay_ms: int
    remaining_ms: int


class ClassicGroup(GroupBase):
    """A group of the classic protocol, or a *simple* one: offsets without members or a record."""

    type_name: ClassVar[str] = "classic"

    def __init__(self, group_id: str, totals: ShardTotals, now_ms: int = NO_TIMESTAMP) -> None:
        super().__init__(group_id, totals)
        self.state = ClassicState.EMPTY
        self.generation_id = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.state_timestamp_ms = now_ms
        self.saved: GroupMetadataValue | None = None
        self.members: dict[str, ClassicMember] = {}
        self.static_members: dict[str, str] = {}
        self.pending_members: dict[str, None] = {}
        self.pending_sync: set[str] = set()
        self.waiting_joins = 0
        self.initial_delay: InitialDelay | None = None
        self.new_member_added = False
        self._support: Counter[str] = Counter()
        self._topics: frozenset[str] | None = None

    @classmethod
    def from_record(
        cls, group_id: str, totals: ShardTotals, saved: GroupMetadataValue
    ) -> ClassicGroup:
        """Return the group that a record describes."""
        group = cls(group_id, totals)
        group.generation_id = saved.generation_id
        group.protocol_type = saved.protocol_type or None
        group.state_timestamp_ms = saved.state_timestamp_ms
        if saved.members and saved.protocol_name is None:
            raise CorruptRecordError(f"group {group_id!r} has members but no protocol")
        for member in saved.members:
            group.add(
                ClassicMember(
                    member_id=member.member_id,
                    group_instance_id=member.group_instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    session_timeout_ms=member.session_timeout_ms,
                    rebalance_timeout_ms=member.rebalance_timeout_ms,
                    protocols=((saved.protocol_name or "", member.subscription),),
                    assignment=member.assignment,
                )
            )
        if group.members:
            group.protocol_name = saved.protocol_name
            # A record with an unknown leader is usable: any member can lead the next generation.
            group.leader_id = saved.leader if saved.leader in group.members else group.leader_id
        group.state = ClassicState.STABLE if group.members else ClassicState.EMPTY
        group._save(saved)
        group.refresh_subscription()
        return group

    @classmethod
    def from_consumer_group(
        cls,
        group_id: str,
        totals: ShardTotals,
        generation_id: int,
        members: Iterable[ClassicMember],
        now_ms: int,
    ) -> ClassicGroup:
        """Return the classic group that replaces a consumer group; the decision appends its record.

        The caller must set the members' assignments before any other use.
        """
        group = cls(group_id, totals, now_ms)
        group.generation_id = generation_id
        group.protocol_type = CONSUMER_PROTOCOL_TYPE
        for member in members:
            group.add(member)
        group.protocol_name = select_protocol(list(group.members.values()))
        group.state = ClassicState.STABLE
        group.refresh_subscription()
        return group

    # --- queries ---------------------------------------------------------------------------------

    @property
    def state_name(self) -> str:
        """Kafka's name of the group's state."""
        return self.state.value

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members, so that it may be deleted."""
        return self.state is ClassicState.EMPTY

    @property
    def is_exempt_from_expiration(self) -> bool:
        """Whether a member is about to join the empty group, so that it must not be deleted."""
        return bool(self.pending_members)

    @property
    def everyone_joined(self) -> bool:
        """Whether the join phase waits for no further member."""
        return self.waiting_joins == len(self.members) and not self.pending_members

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest rebalance timeout of the members."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def supports(self, protocol_type: str, protocols: Iterable[tuple[str, bytes]]) -> bool:
        """Whether a member with these protocols fits the group."""
        names = [name for name, _ in protocols]
        if self.state is ClassicState.EMPTY:
            return bool(protocol_type) and bool(names)
        everyone = len(self.members)
        return protocol_type == self.protocol_type and any(
            self._support[name] == everyone for name in names
        )

    def validate_member(self, member_id: str, group_instance_id: str | None) -> ClassicMember:
        """Return the member, or raise UnknownMemberId or FencedInstanceId."""
        if group_instance_id is not None:
            owner = self.static_members.get(group_instance_id)
            if owner is None:
                raise UnknownMemberIdError(f"no member has instance id {group_instance_id!r}")
            if owner != member_id:
                raise FencedInstanceIdError(f"instance id {group_instance_id!r} has a new owner")
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberIdError(f"group {self.group_id!r} has no member {member_id!r}")
        return member

    def join_members(self, members: Iterable[ClassicMember]) -> tuple[JoinMember, ...]:
        """Return ``members`` in the form that their leader receives."""
        return tuple(
            JoinMember(m.member_id, m.group_instance_id, m.metadata(self.protocol_name))
            for m in members
        )

    def metadata_value(
        self,
        members: Iterable[ClassicMember],
        leader: str | None,
        assignments: dict[str, bytes] | None = None,
    ) -> GroupMetadataValue:
        """Return the record's content for the current generation with these members.

        ``assignments`` are the new assignments by member id; without them all members keep theirs.
        """
        return GroupMetadataValue(
            protocol_type=self.protocol_type or "",
            generation_id=self.generation_id,
            protocol_name=self.protocol_name,
            leader=leader,
            state_timestamp_ms=self.state_timestamp_ms,
            members=tuple(
                MemberMetadata(
                    member_id=m.member_id,
                    group_instance_id=m.group_instance_id,
                    client_id=m.client_id,
                    client_host=m.client_host,
                    rebalance_timeout_ms=m.rebalance_timeout_ms,
                    session_timeout_ms=m.session_timeout_ms,
                    subscription=m.metadata(self.protocol_name),
                    assignment=(
                        m.assignment if assignments is None else assignments.get(m.member_id, b"")
                    ),
                )
                for m in members
            ),
        )

    # --- steps -----------------------------------------------------------------------------------

    def transition_to(self, state: ClassicState, now_ms: int | None = None) -> None:
        """Enter ``state``; without ``now_ms`` the state's timestamp comes from the record."""
        require_transition(self.state, state, self.group_id)
        self.state = state
        if now_ms is not None:
            self.state_timestamp_ms = now_ms

    def add(self, member: ClassicMember) -> None:
        """Add a member. The first one leads; the caller must set the protocol type."""
        if member.member_id in self.members:
            raise InvariantViolation(f"member {member.member_id!r} exists already")
        if member.group_instance_id is not None:
            if member.group_instance_id in self.static_members:
                raise InvariantViolation(f"instance id {member.group_instance_id!r} is taken")
            self.static_members[member.group_instance_id] = member.member_id
        self.members[member.member_id] = member
        if self.leader_id is None:
            self.leader_id = member.member_id
        if member.join_token is not None:
            self.waiting_joins += 1
        self._count(member, 1)
        self.forget_pending(member.member_id)

    def remove(self, member_id: str) -> ClassicMember:
        """Remove a member; elect another leader if it led. The caller must answer its requests."""
        member = self.members.pop(member_id)
        if member.group_instance_id is not None:
            del self.static_members[member.group_instance_id]
        if member.join_token is not None:
            self.waiting_joins -= 1
        if self.leader_id == member_id:
            self.leader_id = next(iter(self.members), None)
        self._count(member, -1)
        self.pending_sync.discard(member_id)
        return member

    def replace_static(self, old_member_id: str, successor: ClassicMember) -> ClassicMember:
        """Replace a member with a successor of the same instance id; return the old member."""
        was_leader = self.leader_id == old_member_id
        was_pending_sync = old_member_id in self.pending_sync
        old = self.remove(old_member_id)
        self.add(successor)
        if was_leader:
            self.leader_id = successor.member_id
        if was_pending_sync:
            self.pending_sync.add(successor.member_id)
        return old

    def update(
        self,
        member: ClassicMember,
        protocols: tuple[tuple[str, bytes], ...],
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
    ) -> None:
        """Update a rejoining member from its request."""
        self._count(member, -1)
        member.protocols = protocols
        member.session_timeout_ms = session_timeout_ms
        member.rebalance_timeout_ms = rebalance_timeout_ms
        self._count(member, 1)

    def park_join(self, member: ClassicMember, token: Token) -> Token | None:
        """Park ``token`` until the join phase ends; return the token that it replaces."""
        superseded, member.join_token = member.join_token, token
        if superseded is None:
            self.waiting_joins += 1
        return superseded

    def take_join(self, member: ClassicMember) -> Token | None:
        """Return the member's parked JoinGroup token; the caller must answer it."""
        token, member.join_token = member.join_token, None
        if token is not None:
            self.waiting_joins -= 1
        return token

    def discard(self) -> None:
        """Subtract the group from the shard's totals, because it leaves the table."""
        for member_id in list(self.members):
            self.remove(member_id)
        self._save(None)

    def add_pending(self, member_id: str) -> None:
        """Remember a member id that was given out."""
        self.pending_members[member_id] = None
        self._totals.add_pending(self.group_id, member_id)

    def forget_pending(self, member_id: str) -> None:
        """Forget a member id if it is pending."""
        self.pending_members.pop(member_id, None)
        self._totals.forget_pending(self.group_id, member_id)

    def start_generation(self, now_ms: int) -> None:
        """End the join phase with the current members."""
        self.generation_id += 1
        self.protocol_name = select_protocol(list(self.members.values()))
        self.refresh_subscription()
        self.initial_delay = None
        self.transition_to(ClassicState.COMPLETING_REBALANCE, now_ms)

    def is_sync_pending(self, member_id: str) -> bool:
        """Whether a rebalance is under way, or the member must still send SyncGroup after one."""
        return self.state is not ClassicState.STABLE or member_id in self.pending_sync

    def refresh_subscription(self) -> None:
        """Compute the topics that the members subscribe to; None if they cannot be known."""
        self._topics = None
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return
        topics: set[str] = set()
        for member in self.members.values():
            of_member = subscribed_topics(member.metadata(self.protocol_name))
            if of_member is None:
                return
            topics |= of_member
        self._topics = frozenset(topics)

    def _count(self, member: ClassicMember, sign: int) -> None:
        for name in member.protocol_names:
            self._support[name] += sign
            if not self._support[name]:
                del self._support[name]
        self._totals.memory.add(sign * member.memory_bytes)

    # --- replay ----------------------------------------------------------------------------------

    def install(self, saved: GroupMetadataValue, successor: ClassicMember | None = None) -> None:
        """Replay a GroupMetadata record that this coordinator has written.

        The record is a leader's assignment, the replacement of a static member by ``successor``,
        the end of a rebalance without members, or the first record of a new or converted group. The
        group's state determines which of these kinds is expected; any other record is a bug.
        """
        is_current = saved.generation_id == self.generation_id
        if self.state is ClassicState.COMPLETING_REBALANCE and is_current:
            self._install_assignments(saved)
            self.transition_to(ClassicState.STABLE)
        elif self.state is ClassicState.STABLE and is_current and successor is not None:
            self._install_successor(successor)
            self._install_assignments(saved)
        elif (
            self.state is ClassicState.PREPARING_REBALANCE
            and saved.generation_id == self.generation_id + 1
            and not self.members
            and not saved.members
        ):
            self.generation_id = saved.generation_id
            self.protocol_name = None
            self.initial_delay = None
            self.transition_to(ClassicState.EMPTY)
            self.state_timestamp_ms = saved.state_timestamp_ms
        elif self.saved is not None or not is_current:
            raise InvariantViolation(
                f"group {self.group_id!r} in {self.state} of generation {self.generation_id}"
                f" can't replay generation {saved.generation_id}"
            )
        self._save(saved)
        if self.state is not ClassicState.PREPARING_REBALANCE:
            self.refresh_subscription()

    def _save(self, saved: GroupMetadataValue | None) -> None:
        self._totals.memory.add(assignment_bytes(saved) - assignment_bytes(self.saved))
        self.saved = saved

    def _install_assignments(self, saved: GroupMetadataValue) -> None:
        if [member.member_id for member in saved.members] != list(self.members):
            raise InvariantViolation(f"group {self.group_id!r} replays another one's members")
        for member in saved.members:
            self.members[member.member_id].assignment = member.assignment
        self.state_timestamp_ms = saved.state_timestamp_ms

    def _install_successor(self, successor: ClassicMember) -> None:
        old_member_id = self.static_members.get(successor.group_instance_id or "")
        if old_member_id is None:
            raise InvariantViolation(f"nobody to replace by {successor.member_id!r}")
        self.replace_static(old_member_id, successor)

    # --- methods of all kinds of groups ----------------------------------------------------------

    def as_listed_group(self) -> ListedGroup:
        """Return the group's line in ListGroups."""
        return ListedGroup(self.group_id, self.protocol_type or "", self.state_name, self.type_name)

    def validate_commit(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        offsets: Iterable[OffsetToCommit],  # noqa: ARG002 - a generation covers all partitions
        *,
        in_txn: bool,
        knows_member_epochs: bool,  # noqa: ARG002 - generations are as old as the protocol
    ) -> None:
        """Raise a :class:`fencepost.groups.errors.GroupError` unless this sender may commit now.

        ``knows_member_epochs``: the request's version has member epochs (OffsetCommit v9,
        TxnOffsetCommit v6). The order of checks is Kafka's.
        """
        if self.state is ClassicState.DEAD:
            raise GroupDeadError(f"group {self.group_id!r} is being removed")
        if generation_id < 0 and self.is_empty:
            return
        if generation_id >= 0 or member_id or group_instance_id is not None:
            self.validate_member(member_id, group_instance_id)
            if generation_id != self.generation_id:
                raise IllegalGenerationError(f"generation {self.generation_id} is current")
        elif not in_txn:
            raise UnknownMemberIdError("only members commit while a group has members")
        if not in_txn and self.state is ClassicState.COMPLETING_REBALANCE:
            raise RebalanceInProgressError("commit again once the assignment is known")

    def validate_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """Accept every sender: any client may fetch the offsets of a classic group."""

    def on_committed(self, decision: DecisionBuilder, member_id: str) -> None:
        """Count an accepted non-transactional commit of ``member_id`` as a heartbeat."""
        member = self.members.get(member_id)
        if member is not None:
            decision.arm(self.timer("session", member_id), member.session_timeout_ms)

    def validate_offset_delete(self) -> None:
        """Raise ``NonEmptyGroupError`` unless offsets may be deleted."""
        if not self.is_empty and self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            raise NonEmptyGroupError(f"group {self.group_id!r} has members that are not consumers")

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether a member consumes ``topic``, or might.

        Consumers whose subscription cannot be read may consume any topic.
        """
        if self._topics is None:
            return self.protocol_type == CONSUMER_PROTOCOL_TYPE
        return topic in self._topics

    def expiry_base_ms(self, commit_timestamp_ms: int) -> int | None:
        """Return the time from which an offset's retention counts; None if it cannot expire now."""
        if self.protocol_type is None:
            return commit_timestamp_ms
        if self.is_empty:
            is_set = self.state_timestamp_ms != NO_TIMESTAMP
            return self.state_timestamp_ms if is_set else commit_timestamp_ms
        if self.state is ClassicState.STABLE and self._topics is not None:
            return commit_timestamp_ms
        return None

    def tombstones(self) -> Iterable[Record]:
        """Return the tombstones of the group's records; its offsets have separate tombstones."""
        return (group_tombstone(self.group_id),)

    def on_removed(self, decision: DecisionBuilder) -> None:
        """Cancel timers and forget pending members, because the decision removes the group."""
        for member_id in list(self.pending_members):
            self.forget_pending(member_id)
            decision.disarm(self.timer("session", member_id))

    def on_unloaded(self, decision: DecisionBuilder) -> None:
        """Answer every parked request: the shard stops serving."""
        error: DomainError = NotGroupCoordinatorError("the shard stops serving")
        for member in self.members.values():
            for token in (self.take_join(member), member.sync_token):
                if token is not None:
                    decision.reply(token, error)
            member.sync_token = None
        self.pending_sync.clear()
        self.initial_delay = None
        self.transition_to(ClassicState.DEAD)

    def durable_state(self) -> object:
        """Return the durable state in a form with a stable repr; None without a record."""
        return self.saved

    @property
    def memory_bytes(self) -> int:
        """Recount the memory of the whole group."""
        members = sum(member.memory_bytes for member in self.members.values())
        pending = sum(pending_bytes(self.group_id, name) for name in self.pending_members)
        return members + pending + assignment_bytes(self.saved)

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``InvariantViolation`` if the group contradicts itself."""
        self._check_counts()
        empty, state = not self.members, self.state
        self._require(
            empty == (self.leader_id is None) and (empty or self.leader_id in self.members),
            "the leader is not one of the members",
        )
        if state is ClassicState.EMPTY:
            self._require(empty and self.protocol_name is None, "Empty with members or a protocol")
        if state is not ClassicState.PREPARING_REBALANCE:
            self._require(self.waiting_joins == 0, "a JoinGroup waits outside the join phase")
            self._require(self.initial_delay is None, "an initial delay outside the join phase")
        if state not in {ClassicState.COMPLETING_REBALANCE, ClassicState.STABLE}:
            self._require(not self.pending_sync, "SyncGroups are due outside a generation")
        for member in self.members.values():
            self._require(
                member.sync_token is None
                or (
                    state is ClassicState.COMPLETING_REBALANCE
                    and member.member_id not in self.pending_sync
                ),
                "a SyncGroup waits for nothing",
            )
        self._check_saved()

    def _check_counts(self) -> None:
        members = self.members.values()
        waiting = sum(member.join_token is not None for member in members)
        self._require(self.waiting_joins == waiting, "parked JoinGroups are miscounted")
        static = {
            member.group_instance_id: member.member_id for member in members if member.is_static
        }
        self._require(self.static_members == static, "instance ids and members differ")
        support = Counter(name for member in members for name in member.protocol_names)
        self._require(self._support == support, "protocol support is miscounted")
        self._require(
            not self.members or len(self.members) in support.values(),
            "no protocol suits every member",
        )
        self._require(
            self.pending_sync <= self.members.keys(), "SyncGroup is due from a non-member"
        )
        self._require(
            self.pending_members.keys().isdisjoint(self.members), "a member is pending as well"
        )

    def _check_saved(self) -> None:
        saved = self.saved
        if self.state is ClassicState.STABLE:
            knows_leader = saved is None or saved.leader in self.members
            leader = self.leader_id if saved is None or knows_leader else saved.leader
            expected = self.metadata_value(self.members.values(), leader)
            self._require(saved == expected, "Stable differs from the log")
        elif self.state is ClassicState.EMPTY:
            generation_id = 0 if saved is None else saved.generation_id
            self._require(
                generation_id == self.generation_id and (saved is None or not saved.members),
                "Empty differs from the log",
            )
        elif saved is not None:
            self._require(
                saved.generation_id <= self.generation_id, "the log is ahead of the group"
            )


def assignment_bytes(saved: GroupMetadataValue | None) -> int:
    """Return the size of the leader's assignments in the log, in bytes."""
    return 0 if saved is None else sum(len(member.assignment) for member in saved.members)
