"""A consumer group's data (KIP-848): the content of its records, and the state derived from it.

Each record sets its own part of the state and depends on no other record, so that the order of
records in a compacted log does not matter. A member exists as long as its record of type 5
exists, and the group as long as any of its records exists. When the broker restarts, the soft state
is lost, such as timers and the versions of the topics that were checked.

Source: Kafka's ``ConsumerGroup``, ``ConsumerGroupMember``, ``ModernGroup``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import ClassVar, Final

from fencepost.groups import consumer_records as cr
from fencepost.groups.commands import ListedGroup, OffsetToCommit, TopicVisibility
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.errors import (
    GroupError,
    IllegalGenerationError,
    StaleMemberEpochError,
    UnknownMemberIdError,
    UnsupportedGroupRequestError,
)
from fencepost.groups.group import (
    MEMBER_BYTES,
    PARTITION_BYTES,
    GroupBase,
    ShardTotals,
    protocols_bytes,
    text_bytes,
)
from fencepost.groups.reconcile import CurrentAssignment, MemberState, TopicIdPartition
from fencepost.groups.record_fields import TopicPartitions
from fencepost.groups.regex import RegexScan
from fencepost.groups.subscriptions import Subscriptions
from fencepost.logcore.machine import DecisionBuilder, InvariantViolation, Record

INITIAL_EPOCH: Final = 1
"""The epoch of a new group, as in Kafka 4.3. 0 stands for a target that was never computed."""


class ConsumerState(StrEnum):
    """The group's state, which follows from its epochs and its members."""

    EMPTY = "Empty"
    """No members."""
    ASSIGNING = "Assigning"
    """The target for the group epoch is not computed yet."""
    RECONCILING = "Reconciling"
    """Some member has not reached its target."""
    STABLE = "Stable"
    """All members have reached their targets."""


def by_topic(partitions: Iterable[TopicIdPartition]) -> tuple[TopicPartitions, ...]:
    """Return partitions grouped by topic, in ascending order."""
    grouped: dict[bytes, list[int]] = {}
    for topic_id, index in sorted(partitions):
        grouped.setdefault(topic_id, []).append(index)
    return tuple((topic_id, tuple(indexes)) for topic_id, indexes in grouped.items())


def flat(topics: Iterable[TopicPartitions]) -> frozenset[TopicIdPartition]:
    """Return (topic id, partition) pairs."""
    return frozenset((topic_id, index) for topic_id, indexes in topics for index in indexes)


class ConsumerGroup(GroupBase):
    """A group of the consumer protocol."""

    type_name: ClassVar[str] = "consumer"

    def __init__(self, group_id: str, totals: ShardTotals) -> None:
        super().__init__(group_id, totals)
        self.saved_epoch: cr.GroupEpochValue | None = None
        self.saved_assignment: cr.AssignmentEpochValue | None = None
        self.members: dict[str, cr.ConsumerMemberValue] = {}
        self.currents: dict[str, CurrentAssignment] = {}
        self.targets: dict[str, frozenset[TopicIdPartition]] = {}
        self.regexes: dict[str, cr.RegularExpressionValue] = {}
        self.has_partition_metadata = False
        self.static_members: dict[str, str] = {}
        self.owners: dict[TopicIdPartition, str] = {}
        self.checked_version: int | None = None
        """The version of the topics for which the metadata hash was checked."""
        self.regexes_version: tuple[int, int] | None = None
        """The versions of the topics, and of their visibility (``TopicVisibility``), for which the
        regular expressions were resolved."""
        self.visibility: TopicVisibility | None = None
        """The topics that the expressions may match: those visible to the last sender."""
        self.regexes_checked_ms: int | None = None
        """When the regular expressions were last matched against all topics."""
        self.refused_regexes: dict[str, str] = {}
        """Regular expressions that cannot be matched, and why; their last topics stay valid."""
        self.scan: RegexScan | None = None
        """The matching of regular expressions that is in progress; a timer continues it."""
        self.joining: set[str] = set()
        """Classic members that were told to rejoin: their join timers run."""
        self.syncing: set[str] = set()
        """Classic members that joined and have not sent SyncGroup: their sync timers run."""
        self.subscriptions = Subscriptions()
        """The subscriptions of all members."""
        self._subscribed: frozenset[str] | None = None

    # --- queries ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The group epoch."""
        return INITIAL_EPOCH if self.saved_epoch is None else self.saved_epoch.epoch

    @property
    def assignment_epoch(self) -> int:
        """The group epoch that the target was computed for."""
        return 0 if self.saved_assignment is None else self.saved_assignment.epoch

    @property
    def state(self) -> ConsumerState:
        """See :class:`ConsumerState`."""
        if not self.members:
            return ConsumerState.EMPTY
        if self.epoch > self.assignment_epoch:
            return ConsumerState.ASSIGNING
        epoch = self.assignment_epoch
        if all(self.current(member_id).is_reconciled_to(epoch) for member_id in self.members):
            return ConsumerState.STABLE
        return ConsumerState.RECONCILING

    @property
    def state_name(self) -> str:
        """See :class:`ClassicGroup`."""
        return self.state.value

    @property
    def is_empty(self) -> bool:
        """See :class:`ClassicGroup`."""
        return not self.members

    @property
    def is_exempt_from_expiration(self) -> bool:
        """See :class:`ClassicGroup`."""
        return False

    def owner_of(self, instance_id: str | None) -> str | None:
        """Return the id of the member with an instance id, None if there is none."""
        return None if instance_id is None else self.static_members.get(instance_id)

    def current(self, member_id: str) -> CurrentAssignment:
        """Return the member's current assignment; a new member has none, at epoch 0."""
        return self.currents.get(member_id) or CurrentAssignment()

    def subscribed_topics(self) -> frozenset[str]:
        """Return every topic that a member subscribes to, by name or expression."""
        if self._subscribed is None:
            self._subscribed = self.subscriptions.topics(self.regexes)
        return self._subscribed

    def supports_classic(self, protocol_type: str, names: Iterable[str]) -> bool:
        """Whether a classic member offers a protocol that all other classic members offer."""
        if protocol_type != "consumer":
            return False
        offers = [
            {name for name, _ in member.classic.protocols}
            for member in self.members.values()
            if member.classic is not None
        ]
        return any(all(name in offer for offer in offers) for name in names)

    def is_all_classic_without(self, member_ids: Collection[str]) -> bool:
        """Whether all other members speak the classic protocol."""
        remaining = [member for name, member in self.members.items() if name not in member_ids]
        return all(member.classic is not None for member in remaining)

    def waits_for_partitions(self, member_id: str) -> bool:
        """Whether other members still hold partitions of the member's target."""
        current = self.current(member_id)
        return current.state is MemberState.UNRELEASED_PARTITIONS and any(
            partition in self.owners
            for partition in self.targets.get(member_id, ())
            if partition not in current.assigned
        )

    # --- timers ----------------------------------------------------------------------------------

    def expect_join(self, decision: DecisionBuilder, member_id: str) -> None:
        """Start the rejoin timer of a classic member, unless it runs already."""
        if member_id not in self.joining:
            self.joining.add(member_id)
            timeout_ms = max(self.members[member_id].rebalance_timeout_ms, 0)
            decision.arm(self.timer("join", member_id), timeout_ms)

    def expect_sync(
        self, decision: DecisionBuilder, member_id: str, rebalance_timeout_ms: int
    ) -> None:
        """Wait for the SyncGroup of a classic member that (re)joined."""
        self.joining.discard(member_id)
        decision.disarm(self.timer("join", member_id))
        self.syncing.add(member_id)
        decision.arm(self.timer("sync", member_id), max(rebalance_timeout_ms, 0))

    def stop_waiting(self, decision: DecisionBuilder, member_id: str) -> None:
        """Stop waiting for a classic member that has received its assignment."""
        self.syncing.discard(member_id)
        decision.disarm(self.timer("sync", member_id))

    def stop_classic_timers(self, decision: DecisionBuilder, member_id: str) -> None:
        """Stop waiting for a member's JoinGroup and SyncGroup."""
        self.joining.discard(member_id)
        decision.disarm(self.timer("join", member_id))
        self.stop_waiting(decision, member_id)

    def stop_timers(self, decision: DecisionBuilder, member_id: str) -> None:
        """Cancel all timers of a member."""
        decision.disarm(self.timer("session", member_id))
        decision.disarm(self.timer("rebalance", member_id))
        self.stop_classic_timers(decision, member_id)

    def stop_upkeep(self, decision: DecisionBuilder) -> None:
        """Cancel the group's own timers, because it has no members left or changes its kind."""
        decision.disarm(self.timer("assignor"))
        decision.disarm(self.timer("regex"))
        self.scan = None

    # --- replay ----------------------------------------------------------------------------------

    def replay(self, key: cr.ConsumerKey, value: object) -> None:
        """Set the part of the group that ``key`` names; None removes it."""
        self._subscribed = None
        match key.kind, value:
            case Kind.GROUP_METADATA, cr.GroupEpochValue() | None:
                self.saved_epoch = value
            case Kind.TARGET_ASSIGNMENT_METADATA, cr.AssignmentEpochValue() | None:
                self.saved_assignment = value
            case Kind.PARTITION_METADATA, _:
                self.has_partition_metadata = value is not None
            case Kind.MEMBER_METADATA, cr.ConsumerMemberValue() | None:
                self._put_member(key.name, value)
            case Kind.TARGET_ASSIGNMENT_MEMBER, cr.TargetAssignmentValue():
                self.targets[key.name] = flat(value.partitions)
            case Kind.TARGET_ASSIGNMENT_MEMBER, None:
                self.targets.pop(key.name, None)
            case Kind.CURRENT_MEMBER_ASSIGNMENT, cr.CurrentAssignmentValue():
                self._put_current(key.name, read_current(value))
            case Kind.CURRENT_MEMBER_ASSIGNMENT, None:
                self._put_current(key.name, None)
            case Kind.REGULAR_EXPRESSION, cr.RegularExpressionValue() | None:
                self._put_regex(key.name, value)
            case _:
                raise InvariantViolation(f"cannot replay {value!r} of {key!r}")

    def _put_member(self, member_id: str, value: cr.ConsumerMemberValue | None) -> None:
        old = self.members.pop(member_id, None)
        self.subscriptions.change(old, value)
        if old is not None:
            self._totals.memory.add(-member_bytes(member_id, old))
            if old.instance_id is not None and self.owner_of(old.instance_id) == member_id:
                del self.static_members[old.instance_id]
        if value is not None:
            self.members[member_id] = value
            self._totals.memory.add(member_bytes(member_id, value))
            # An empty instance id is valid too: JoinGroup accepts it.
            if value.instance_id is not None:
                self.static_members[value.instance_id] = member_id

    def _put_current(self, member_id: str, current: CurrentAssignment | None) -> None:
        old = self.currents.pop(member_id, None)
        self._totals.memory.add(held_bytes(current) - held_bytes(old))
        for partition in () if old is None else old.held:
            # In a compacted log, the record of the next owner may come first.
            if self.owners.get(partition) == member_id:
                del self.owners[partition]
        if current is not None:
            self.currents[member_id] = current
            for partition in current.held:
                self.owners[partition] = member_id

    def _put_regex(self, regex: str, value: cr.RegularExpressionValue | None) -> None:
        memory, old = self._totals.memory, self.regexes.pop(regex, None)
        if old is not None:
            memory.add(-text_bytes(regex, *old.topics))
        if value is not None:
            self.regexes[regex] = value
            memory.add(text_bytes(regex, *value.topics))

    def discard(self) -> None:
        """Subtract the group from the shard's totals, because it leaves the table."""
        for member_id in list(self.members):
            self._put_member(member_id, None)
        for member_id in list(self.currents):
            self._put_current(member_id, None)
        for regex in list(self.regexes):
            self._put_regex(regex, None)

    # --- methods of all kinds of groups ----------------------------------------------------------

    def as_listed_group(self) -> ListedGroup:
        """See :class:`ClassicGroup`."""
        return ListedGroup(self.group_id, "consumer", self.state_name, self.type_name)

    def validate_commit(
        self,
        member_id: str,
        group_instance_id: str | None,
        generation_id: int,
        offsets: Iterable[OffsetToCommit],
        *,
        in_txn: bool,
        knows_member_epochs: bool,
    ) -> None:
        """See :class:`ClassicGroup`.

        A member with an older epoch may commit partitions that were assigned at that epoch or
        before (KIP-1251). As in Kafka, the member id alone identifies the sender, and the instance
        id does not.
        """
        if generation_id < 0 and not self.members:
            return
        # Old producers send no member data with a transaction's offsets.
        if in_txn and (generation_id, member_id, group_instance_id) == (-1, "", None):
            return
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberIdError(f"group {self.group_id!r} has no member {member_id!r}")
        if not in_txn and not knows_member_epochs and member.classic is None:
            raise UnsupportedGroupRequestError(
                "members of this group need version 9 or later of OffsetCommit"
            )
        current = self.current(member_id)
        if generation_id == current.member_epoch:
            return
        error: GroupError = StaleMemberEpochError(f"epoch {current.member_epoch} is current")
        if member.classic is not None or (in_txn and not knows_member_epochs):
            error = IllegalGenerationError(f"epoch {current.member_epoch} is current")
        if generation_id > current.member_epoch:
            raise error
        for item in offsets:
            partition = (item.topic_id or b"", item.partition)
            epoch = current.assigned.get(partition, current.pending_revocation.get(partition))
            if epoch is None or generation_id < epoch:
                raise error

    def validate_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """See :class:`ClassicGroup`."""
        if member_id is None and member_epoch < 0:
            return
        if member_id not in self.members:
            raise UnknownMemberIdError(f"group {self.group_id!r} has no member {member_id!r}")
        member, current = self.members[member_id], self.current(member_id)
        if member_epoch != current.member_epoch:
            if member.classic is not None:
                raise IllegalGenerationError(f"epoch {current.member_epoch} is current")
            raise StaleMemberEpochError(f"epoch {current.member_epoch} is current")

    def on_committed(self, decision: DecisionBuilder, member_id: str) -> None:
        """See :class:`ClassicGroup`. Only heartbeats renew a session in this protocol."""

    def validate_offset_delete(self) -> None:
        """See :class:`ClassicGroup`. Only subscribed topics are protected."""

    def is_subscribed_to(self, topic: str) -> bool:
        """See :class:`ClassicGroup`."""
        return topic in self.subscribed_topics()

    def expiry_base_ms(self, commit_timestamp_ms: int) -> int | None:
        """See :class:`ClassicGroup`."""
        return commit_timestamp_ms

    def tombstones(self, names: Mapping[str, str] | None = None) -> Iterator[Record]:
        """See :class:`ClassicGroup`.

        If a decision has already moved the records of a member to another id, ``names`` maps the
        member id to that id.
        """
        group_id, renamed = self.group_id, names or {}
        for kind, member_ids in (
            (Kind.CURRENT_MEMBER_ASSIGNMENT, self.currents),
            (Kind.TARGET_ASSIGNMENT_MEMBER, self.targets),
        ):
            for member_id in member_ids:
                yield cr.tombstone(kind, group_id, renamed.get(member_id, member_id))
        yield cr.tombstone(Kind.TARGET_ASSIGNMENT_METADATA, group_id)
        for member_id in self.members:
            name = renamed.get(member_id, member_id)
            yield cr.tombstone(Kind.MEMBER_METADATA, group_id, name)
        for regex in self.regexes:
            yield cr.tombstone(Kind.REGULAR_EXPRESSION, group_id, regex)
        yield cr.tombstone(Kind.PARTITION_METADATA, group_id)
        yield cr.tombstone(Kind.GROUP_METADATA, group_id)

    def on_removed(self, decision: DecisionBuilder) -> None:
        """See :class:`ClassicGroup`."""
        for member_id in self.members:
            self.stop_timers(decision, member_id)

    def on_unloaded(self, decision: DecisionBuilder) -> None:
        """See :class:`ClassicGroup`. No request of such a group is ever parked."""

    @property
    def is_removed(self) -> bool:
        """Whether tombstones have removed every record of the group."""
        return not (
            self.saved_epoch
            or self.saved_assignment
            or self.has_partition_metadata
            or self.members
            or self.currents
            or self.targets
            or self.regexes
        )

    def durable_state(self) -> object:
        """See :class:`ClassicGroup`."""
        if self.is_removed:
            return None
        return (
            (self.saved_epoch, self.saved_assignment, self.has_partition_metadata),
            sorted(self.members.items(), key=lambda item: item[0]),
            [(name, write_current(self.currents[name])) for name in sorted(self.currents)],
            [(name, by_topic(self.targets[name])) for name in sorted(self.targets)],
            sorted(self.regexes.items(), key=lambda item: item[0]),
        )

    @property
    def memory_bytes(self) -> int:
        """See :class:`ClassicGroup`."""
        members = sum(member_bytes(name, value) for name, value in self.members.items())
        topics = sum(text_bytes(regex, *found.topics) for regex, found in self.regexes.items())
        return members + topics + sum(map(held_bytes, self.currents.values()))

    def check(self) -> None:
        """See :class:`ClassicGroup`."""
        static = {
            member.instance_id: name
            for name, member in self.members.items()
            if member.instance_id is not None
        }
        self._require(static == self.static_members, "instance ids and members differ")
        expected = Subscriptions()
        for member in self.members.values():
            expected.change(None, member)
        self._require(expected == self.subscriptions, "the subscriptions are miscounted")
        self._require(self.currents.keys() <= self.members.keys(), "a non-member has an assignment")
        self._require(self.targets.keys() <= self.members.keys(), "a non-member has a target")
        classic = {name for name, member in self.members.items() if member.classic is not None}
        self._require(
            self.joining <= classic, "JoinGroup is awaited from a member that is not classic"
        )
        self._require(
            self.syncing <= classic, "SyncGroup is awaited from a member that is not classic"
        )
        held = Counter(tp for current in self.currents.values() for tp in current.held)
        self._require(all(count == 1 for count in held.values()), "a partition has two owners")
        self._require(held.keys() == self.owners.keys(), "owners and assignments differ")
        if self.epoch == self.assignment_epoch:
            targeted = Counter(tp for target in self.targets.values() for tp in target)
            self._require(all(n == 1 for n in targeted.values()), "a partition has two targets")
        for member_id, current in self.currents.items():
            self._require(
                all(self.owners[tp] == member_id for tp in current.held), "an owner is wrong"
            )
            self._require(
                current.assigned.keys().isdisjoint(current.pending_revocation),
                "a partition is assigned and revoked",
            )
            self._require(current.member_epoch <= self.epoch, "a member is ahead of its group")


def topics_of(
    member: cr.ConsumerMemberValue, regexes: Mapping[str, cr.RegularExpressionValue]
) -> set[str]:
    """Return the topics that a member subscribes to, by name or expression."""
    topics = set(member.subscribed_topic_names)
    resolved = regexes.get(member.subscribed_topic_regex or "")
    if resolved is not None:
        topics.update(resolved.topics)
    return topics


def identity(member_id: str, member: cr.ConsumerMemberValue) -> dict[str, object]:
    """Return the fields of a member in events."""
    return {
        "member": member_id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
    }


def member_bytes(member_id: str, member: cr.ConsumerMemberValue) -> int:
    """Return the memory of a member without its partitions."""
    strings = text_bytes(
        member_id,
        member.instance_id,
        member.rack_id,
        member.client_id,
        member.client_host,
        member.subscribed_topic_regex,
        *member.subscribed_topic_names,
    )
    protocols = 0 if member.classic is None else protocols_bytes(member.classic.protocols)
    return MEMBER_BYTES + strings + protocols


def held_bytes(current: CurrentAssignment | None) -> int:
    """Return the memory of a member's partitions."""
    return 0 if current is None else len(current.held) * PARTITION_BYTES


# --- records of an assignment --------------------------------------------------------------------


def write_current(current: CurrentAssignment) -> cr.CurrentAssignmentValue:
    """Return the record's content for a member's current assignment."""

    def written(partitions: Mapping[TopicIdPartition, int]) -> tuple[cr.AssignedPartitions, ...]:
        return tuple(
            cr.AssignedPartitions(
                topic_id, indexes, tuple(partitions[topic_id, index] for index in indexes)
            )
            for topic_id, indexes in by_topic(partitions)
        )

    return cr.CurrentAssignmentValue(
        current.member_epoch,
        current.previous_member_epoch,
        int(current.state),
        written(current.assigned),
        written(current.pending_revocation),
    )


def read_current(value: cr.CurrentAssignmentValue) -> CurrentAssignment:
    """Return a current assignment; partitions without epoch (Kafka < 4.3) get the member epoch."""
    default = value.member_epoch if value.member_epoch >= 0 else value.previous_member_epoch

    def read(topics: Iterable[cr.AssignedPartitions]) -> dict[TopicIdPartition, int]:
        return {
            (topic.topic_id, index): epoch
            for topic in topics
            for index, epoch in zip(
                topic.partitions,
                topic.assignment_epochs or (default,) * len(topic.partitions),
                strict=True,
            )
        }

    is_known = value.state in set(MemberState)
    return CurrentAssignment(
        value.member_epoch,
        value.previous_member_epoch,
        MemberState(value.state) if is_known else MemberState.UNKNOWN,
        read(value.assigned),
        read(value.pending_revocation),
    )
