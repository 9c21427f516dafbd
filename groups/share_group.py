"""A share group's data (KIP-932): the content of its records, and the state derived from it.

Each record sets its own part of the state, as in consumer groups. Members share partitions, so that
there is neither an owner nor a revocation: a member moves straight to its target.

Source: Kafka's ``ShareGroup``, ``ShareGroupMember`` and ``ModernGroup``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

from fencepost.groups import share_records as sr
from fencepost.groups.assignors.model import TopicIdPartition
from fencepost.groups.commands import ListedGroup, OffsetToCommit
from fencepost.groups.consumer_group import by_topic, flat
from fencepost.groups.consumer_records import AssignmentEpochValue, TargetAssignmentValue
from fencepost.groups.group import (
    MEMBER_BYTES,
    PARTITION_BYTES,
    GroupBase,
    ShardTotals,
    not_found,
    text_bytes,
)
from fencepost.groups.share_records import ShareRecordType as Kind
from fencepost.logcore.machine import DecisionBuilder, InvariantViolation, Record
from fencepost.logcore.values import dataclass

INITIAL_EPOCH: Final = 1
"""The epoch of a group before its first member joins, and the epoch of its empty target."""

SHARE: Final = "share"
"""The protocol type and the group type in ListGroups."""

STATE_PARTITION_BYTES: Final = 64
"""The memory, in bytes, of a partition in a group's record of type 15, which lists the partitions
with state."""


@dataclass(frozen=True, slots=True)
class ShareAssignment:
    """A member's current assignment; a new member has none, at epoch 0."""

    member_epoch: int = 0
    previous_member_epoch: int = 0
    partitions: frozenset[TopicIdPartition] = frozenset()

    def written(self) -> sr.ShareAssignmentValue:
        """Return the content of the assignment's record."""
        return sr.ShareAssignmentValue(
            self.member_epoch, self.previous_member_epoch, by_topic(self.partitions)
        )


class ShareGroup(GroupBase):
    """A group of the share protocol."""

    type_name: ClassVar[str] = SHARE

    def __init__(self, group_id: str, totals: ShardTotals) -> None:
        super().__init__(group_id, totals)
        self.saved_epoch: sr.ShareGroupEpochValue | None = None
        self.saved_assignment: AssignmentEpochValue | None = None
        self.members: dict[str, sr.ShareMemberValue] = {}
        self.currents: dict[str, ShareAssignment] = {}
        self.targets: dict[str, frozenset[TopicIdPartition]] = {}
        self.saved_state: sr.StatePartitionsValue | None = None
        self.state_saved_ms = 0
        """When :attr:`saved_state` was written."""
        self.checked_version: int | None = None
        """The version of the topics for which the metadata hash was checked."""
        self.settled_version: int | None = None
        """The version of the topics for which a heartbeat found nothing to do."""
        self._subscriptions: Counter[str] = Counter()

    # --- queries ---------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The group epoch."""
        return INITIAL_EPOCH if self.saved_epoch is None else self.saved_epoch.epoch

    @property
    def metadata_hash(self) -> int:
        """The hash of the subscribed topics at the group epoch."""
        return 0 if self.saved_epoch is None else self.saved_epoch.metadata_hash

    @property
    def assignment_epoch(self) -> int:
        """The group epoch that the target was computed for."""
        return INITIAL_EPOCH if self.saved_assignment is None else self.saved_assignment.epoch

    @property
    def state(self) -> sr.StatePartitionsValue:
        """The partitions with state at the share coordinator."""
        return self.saved_state or sr.StatePartitionsValue()

    @property
    def initialized(self) -> frozenset[TopicIdPartition]:
        """The partitions that may be assigned."""
        return flat((topic.topic_id, topic.partitions) for topic in self.state.initialized)

    @property
    def state_name(self) -> str:
        """See ``ClassicGroup``."""
        return "Stable" if self.members else "Empty"

    @property
    def is_empty(self) -> bool:
        """See ``ClassicGroup``."""
        return not self.members

    @property
    def is_exempt_from_expiration(self) -> bool:
        """See ``ClassicGroup``: a share group does not expire."""
        return True

    def current(self, member_id: str) -> ShareAssignment:
        """Return the member's current assignment."""
        return self.currents.get(member_id) or ShareAssignment()

    def subscribed_topics(self) -> frozenset[str]:
        """Return every topic that a member subscribes to."""
        return frozenset(self._subscriptions)

    def subscribed_topics_with(
        self, member_id: str, value: sr.ShareMemberValue | None
    ) -> frozenset[str]:
        """Return the topics that members subscribe to once the member has this record."""
        counts = self._subscriptions.copy()
        for member, by in ((self.members.get(member_id), -1), (value, 1)):
            if member is not None:
                for name in set(member.subscribed_topic_names):
                    counts[name] += by
        return frozenset(name for name, count in counts.items() if count > 0)

    # --- replay ----------------------------------------------------------------------------------

    def replay(self, key: sr.ShareKey, value: object, timestamp_ms: int) -> None:
        """Set the part of the group that ``key`` names; None removes it.

        ``timestamp_ms`` is when the record was written.
        """
        self.settled_version = None
        match key.kind, value:
            case Kind.GROUP_METADATA, sr.ShareGroupEpochValue() | None:
                self.saved_epoch = value
            case Kind.TARGET_ASSIGNMENT_METADATA, AssignmentEpochValue() | None:
                self.saved_assignment = value
            case Kind.MEMBER_METADATA, sr.ShareMemberValue() | None:
                self._put_member(key.member_id, value)
            case Kind.TARGET_ASSIGNMENT_MEMBER, TargetAssignmentValue():
                self.targets[key.member_id] = flat(value.partitions)
            case Kind.TARGET_ASSIGNMENT_MEMBER, None:
                self.targets.pop(key.member_id, None)
            case Kind.CURRENT_MEMBER_ASSIGNMENT, sr.ShareAssignmentValue():
                current = ShareAssignment(
                    value.member_epoch, value.previous_member_epoch, flat(value.partitions)
                )
                self._put_current(key.member_id, current)
            case Kind.CURRENT_MEMBER_ASSIGNMENT, None:
                self._put_current(key.member_id, None)
            case Kind.STATE_PARTITION_METADATA, sr.StatePartitionsValue() | None:
                self._totals.memory.add(_state_bytes(value) - _state_bytes(self.saved_state))
                self.saved_state, self.state_saved_ms = value, timestamp_ms
            case _:
                raise InvariantViolation(f"no way to replay {key!r} of {value!r}")

    def _put_member(self, member_id: str, value: sr.ShareMemberValue | None) -> None:
        old = self.members.pop(member_id, None)
        if old is not None:
            self._totals.memory.add(-_member_bytes(member_id, old))
            self._subscriptions.subtract(set(old.subscribed_topic_names))
        if value is not None:
            self.members[member_id] = value
            self._totals.memory.add(_member_bytes(member_id, value))
            self._subscriptions.update(set(value.subscribed_topic_names))
        self._subscriptions = +self._subscriptions

    def _put_current(self, member_id: str, current: ShareAssignment | None) -> None:
        old = self.currents.pop(member_id, None)
        self._totals.memory.add(_held_bytes(current) - _held_bytes(old))
        if current is not None:
            self.currents[member_id] = current

    def discard(self) -> None:
        """Subtract the group from the shard's totals, because it leaves the table."""
        for member_id in list(self.members):
            self._put_member(member_id, None)
        for member_id in list(self.currents):
            self._put_current(member_id, None)
        self._totals.memory.add(-_state_bytes(self.saved_state))
        self.saved_state = None

    # --- methods of all kinds of groups ----------------------------------------------------------

    def as_listed_group(self) -> ListedGroup:
        """See ``ClassicGroup``."""
        return ListedGroup(self.group_id, SHARE, self.state_name, self.type_name)

    def validate_commit(
        self,
        member_id: str,  # noqa: ARG002 - share groups have no committed offsets
        group_instance_id: str | None,  # noqa: ARG002
        generation_id: int,  # noqa: ARG002
        offsets: Iterable[OffsetToCommit],  # noqa: ARG002
        *,
        in_txn: bool,  # noqa: ARG002
        knows_member_epochs: bool,  # noqa: ARG002
    ) -> None:
        """See ``ClassicGroup``: a share group has no committed offsets."""
        raise not_found(self, self.group_id, "consumer")

    def validate_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """See ``ClassicGroup``: every fetch is accepted, and finds no committed offset."""

    def on_committed(self, decision: DecisionBuilder, member_id: str) -> None:
        """See ``ClassicGroup``."""

    def validate_offset_delete(self) -> None:
        """See ``ClassicGroup``: a share group has no committed offsets."""
        raise not_found(self, self.group_id, "consumer")

    def is_subscribed_to(self, topic: str) -> bool:
        """See ``ClassicGroup``."""
        return topic in self._subscriptions

    def expiry_base_ms(self, commit_timestamp_ms: int) -> int | None:  # noqa: ARG002 - never
        """See ``ClassicGroup``: no offset expires here."""
        return None

    def tombstones(self) -> Iterator[Record]:
        """See ``ClassicGroup``."""
        group_id = self.group_id
        for kind, member_ids in (
            (Kind.CURRENT_MEMBER_ASSIGNMENT, self.currents),
            (Kind.TARGET_ASSIGNMENT_MEMBER, self.targets),
            (Kind.MEMBER_METADATA, self.members),
        ):
            for member_id in member_ids:
                yield sr.tombstone(kind, group_id, member_id)
        yield sr.tombstone(Kind.TARGET_ASSIGNMENT_METADATA, group_id)
        yield sr.tombstone(Kind.STATE_PARTITION_METADATA, group_id)
        yield sr.tombstone(Kind.GROUP_METADATA, group_id)

    def on_removed(self, decision: DecisionBuilder) -> None:
        """See ``ClassicGroup``."""
        for member_id in self.members:
            decision.disarm(self.timer("session", member_id))

    def on_unloaded(self, decision: DecisionBuilder) -> None:
        """See ``ClassicGroup``. No request of such a group is ever parked."""

    @property
    def is_removed(self) -> bool:
        """Whether tombstones have removed every record of the group."""
        return not (
            self.saved_epoch
            or self.saved_assignment
            or self.saved_state
            or self.members
            or self.currents
            or self.targets
        )

    def durable_state(self) -> object:
        """See ``ClassicGroup``."""
        if self.is_removed:
            return None
        return (
            (self.saved_epoch, self.saved_assignment, self.saved_state),
            sorted(self.members.items(), key=lambda item: item[0]),
            [(name, self.currents[name].written()) for name in sorted(self.currents)],
            [(name, by_topic(self.targets[name])) for name in sorted(self.targets)],
        )

    @property
    def memory_bytes(self) -> int:
        """See ``ClassicGroup``."""
        members = sum(_member_bytes(name, value) for name, value in self.members.items())
        held = sum(map(_held_bytes, self.currents.values()))
        return members + held + _state_bytes(self.saved_state)

    def check(self) -> None:
        """See ``ClassicGroup``."""
        expected = Counter(
            name for member in self.members.values() for name in set(member.subscribed_topic_names)
        )
        self._require(expected == self._subscriptions, "the subscriptions are miscounted")
        self._require(self.currents.keys() <= self.members.keys(), "a stranger has an assignment")
        self._require(self.targets.keys() <= self.members.keys(), "a stranger has a target")
        for current in self.currents.values():
            self._require(current.member_epoch <= self.epoch, "a member is ahead of its group")
        state = self.state
        deleting = {topic_id for topic_id, _ in state.deleting}
        with_state = {topic.topic_id for topic in (*state.initializing, *state.initialized)}
        self._require(deleting.isdisjoint(with_state), "a topic is deleted and has state")


def identity(member_id: str, member: sr.ShareMemberValue) -> dict[str, object]:
    """Return the fields of a member in events."""
    return {
        "member": member_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
    }


def _member_bytes(member_id: str, member: sr.ShareMemberValue) -> int:
    strings = text_bytes(
        member_id,
        member.rack_id,
        member.client_id,
        member.client_host,
        *member.subscribed_topic_names,
    )
    return MEMBER_BYTES + strings


def _held_bytes(current: ShareAssignment | None) -> int:
    return 0 if current is None else len(current.partitions) * PARTITION_BYTES


def _state_bytes(state: sr.StatePartitionsValue | None) -> int:
    if state is None:
        return 0
    topics = (*state.initializing, *state.initialized)
    partitions = sum(len(topic.partitions) for topic in topics)
    names = text_bytes(*(topic.name for topic in topics), *(name for _, name in state.deleting))
    return partitions * STATE_PARTITION_BYTES + names
