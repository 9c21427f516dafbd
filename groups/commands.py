"""The commands of the group coordinator, and their results.

A command goes into :meth:`fencepost.groups.machine.GroupMachine.decide` with a token. The reply to
the token contains the command's result, or a :class:`fencepost.groups.errors.GroupError` of a class
that the command lists. Text is ``str``, opaque blobs are ``bytes``, times are milliseconds, topic
ids are their 16 bytes. The caller checks that topics exist, authorises the request and resolves
topic ids; the state machine checks group ids, members, generations and limits.

Source: the request and response schemas of Apache Kafka, without fields that only affect encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fencepost.logcore.machine import DomainError, ProducerStamp
from fencepost.logcore.values import dataclass, fast_init

NO_GENERATION = -1
"""The generation of a request from a sender outside of the group (admin tools, ``assign()``)."""
NO_RETENTION = -1
"""``CommitOffsets.retention_time_ms`` when the request carries none."""
NO_OFFSET = -1
"""The offset reported for a partition without a committed offset."""
NO_LEADER_EPOCH = -1
"""The leader epoch of an offset that was committed without a leader epoch."""

# --- membership ----------------------------------------------------------------------------------


class TopicVisibility(NamedTuple):
    """The topics that the sender of a command may see.

    An expression matches only topics visible to the member whose command triggers the matching. A
    change of ``version`` means that other topics may be visible, so expressions are matched again.
    """

    version: int
    may_see: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Join or rejoin. The reply, a :class:`JoinGroupResult`, waits for the end of the join phase.

    ``member_id`` is empty for a new member; ``new_member_id`` is the id that the server generated
    for it (``<client or instance id>-<uuid>``), used only if a new id is needed. ``protocols`` are
    (name, metadata) in the member's order of preference. ``require_known_member_id`` is set from v4
    on, ``supports_skip_assignment`` from v9 on.

    Errors: InvalidGroupId, InvalidSessionTimeout, InconsistentGroupProtocol, UnknownMemberId,
    MemberIdRequired, FencedInstanceId, GroupMaxSizeReached, GroupLimitExceeded, RebalanceInProgress
    (replaced by a newer JoinGroup of the same member), NotGroupCoordinator.
    """

    group_id: str
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    require_known_member_id: bool
    supports_skip_assignment: bool
    new_member_id: str
    reason: str = ""
    visibility: TopicVisibility | None = None
    """The topics that the sender may see; None for all."""


@dataclass(frozen=True, slots=True)
class JoinMember:
    """A member as the leader sees it; ``metadata`` is its metadata for the chosen protocol."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinGroupResult:
    """``members`` is filled only for the leader.

    A static leader that returns without a rebalance gets the members from v9 on (KIP-814).
    """

    member_id: str
    generation_id: int
    protocol_type: str | None
    protocol_name: str | None
    leader: str
    skip_assignment: bool = False
    members: tuple[JoinMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """Request the assignment; the leader sends all assignments. ``protocol_*`` are None below v5.

    Errors: InvalidGroupId, UnknownMemberId, FencedInstanceId, IllegalGeneration,
    InconsistentGroupProtocol, RebalanceInProgress, GroupLimitExceeded (the group's record would be
    too large), NotGroupCoordinator.
    """

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncGroupResult:
    """The member's part of the leader's assignment."""

    protocol_type: str | None
    protocol_name: str | None
    assignment: bytes


@fast_init
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renew the member's session.

    Errors: InvalidGroupId, UnknownMemberId, FencedInstanceId, IllegalGeneration,
    RebalanceInProgress.
    """

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None


@fast_init
@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """The session was renewed."""


@dataclass(frozen=True, slots=True)
class LeavingMember:
    """A member id, or an instance id with an empty member id (admin removal, KIP-345)."""

    member_id: str
    group_instance_id: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Remove members. Errors: InvalidGroupId; other errors are per member."""

    group_id: str
    members: tuple[LeavingMember, ...]


@dataclass(frozen=True, slots=True)
class LeaveGroupResult:
    """Each (member id, instance id, error) in request order; below v3 a top-level error instead."""

    members: tuple[tuple[str, str | None, DomainError | None], ...]


# --- offsets -------------------------------------------------------------------------------------


class OffsetToCommit(NamedTuple):
    """One partition's offset. ``topic_id`` has 16 bytes, and is None if it is unknown."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = NO_LEADER_EPOCH
    metadata: str = ""
    topic_id: bytes | None = None


@fast_init
@dataclass(frozen=True, slots=True)
class CommitOffsets:
    """Commit offsets. Only OffsetCommit v2 to v4 may have a ``retention_time_ms`` of 0 or more.

    Errors of the whole request: GroupIdNotFound (v9 and later) or IllegalGeneration for a missing
    group, UnknownMemberId, FencedInstanceId, IllegalGeneration, RebalanceInProgress,
    GroupLimitExceeded. Per partition: OffsetMetadataTooLarge.
    """

    group_id: str
    generation_id_or_member_epoch: int
    member_id: str
    group_instance_id: str | None
    offsets: tuple[OffsetToCommit, ...]
    retention_time_ms: int = NO_RETENTION
    knows_member_epochs: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class TxnCommitOffsets:
    """Commit offsets inside ``producer``'s transaction.

    The offsets become visible once the transaction's marker is replayed. The caller must first have
    the transaction coordinator verify or add the partition of ``__consumer_offsets``. Errors:
    InvalidGroupId, and those of :class:`CommitOffsets` (GroupIdNotFound from v6).
    """

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    offsets: tuple[OffsetToCommit, ...]
    producer: ProducerStamp
    knows_member_epochs: bool = False


@fast_init
@dataclass(frozen=True, slots=True)
class CommitOffsetsResult:
    """Each (topic, partition, error) in request order."""

    partitions: tuple[tuple[str, int, DomainError | None], ...]


@dataclass(frozen=True, slots=True)
class FetchTopic:
    """Partitions to fetch. With ``topic_id``, an offset stored for another id counts as missing."""

    topic: str
    partitions: tuple[int, ...]
    topic_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class FetchOffsets:
    """Fetch committed offsets; ``topics`` None requests all topics of the group.

    A missing group is no error. ``member_id`` and ``member_epoch`` are only for groups of the
    consumer protocol; classic groups ignore them.
    """

    group_id: str
    topics: tuple[FetchTopic, ...] | None
    require_stable: bool = False
    member_id: str | None = None
    member_epoch: int = -1


class FetchedOffset(NamedTuple):
    """One partition's result; ``error`` is None or UnstableOffsetCommit (then the offset is -1)."""

    partition: int
    offset: int
    leader_epoch: int
    metadata: str
    error: DomainError | None = None


@dataclass(frozen=True, slots=True)
class FetchOffsetsResult:
    """Each (topic, its partitions) in request order, or by topic name if all were requested.

    If there are more than ``offsets.MAX_OFFSETS_PER_TURN`` offsets, the topics and their partitions
    are iterators instead of tuples. These can be read only once, and return the offsets as of the
    command.
    """

    topics: Iterable[tuple[str, Iterable[FetchedOffset]]]


@dataclass(frozen=True, slots=True)
class DeleteOffsets:
    """Delete offsets. Errors: InvalidGroupId, GroupIdNotFound, NonEmptyGroup."""

    group_id: str
    topics: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class DeleteOffsetsResult:
    """Each (topic, partition, error) in request order; the error is GroupSubscribedToTopic."""

    partitions: tuple[tuple[str, int, DomainError | None], ...]


# --- administration ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DescribeGroup:
    """Describe one classic group. Errors: GroupIdNotFound (v<6 returns state Dead instead)."""

    group_id: str


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """``metadata`` is empty unless the group is Stable; ``assignment`` is the last assignment."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class DescribeGroupResult:
    """``state`` is Kafka's name (``PreparingRebalance``); ``protocol_name`` is "" unless Stable."""

    group_id: str
    state: str
    protocol_type: str
    protocol_name: str
    members: tuple[DescribedMember, ...]


@dataclass(frozen=True, slots=True)
class ListGroups:
    """List the shard's groups; an empty filter matches all groups, and case is ignored."""

    states: tuple[str, ...] = ()
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """``group_type`` is Kafka's lower-case name (``classic``), ``protocol_type`` "" if simple."""

    group_id: str
    protocol_type: str
    state: str
    group_type: str


@dataclass(frozen=True, slots=True)
class ListGroupsResult:
    """The groups, sorted by group id."""

    groups: tuple[ListedGroup, ...]


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Delete a group with its offsets. Errors: GroupIdNotFound, NonEmptyGroup."""

    group_id: str


@dataclass(frozen=True, slots=True)
class DeleteGroupResult:
    """The group was deleted."""


# --- upkeep: sent by the runtime -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicsDeleted:
    """Delete the offsets of deleted topics. ``topics`` are (name, topic id or None if unknown).

    An offset stored under a different topic id stays: it belongs to a newer topic of that name.
    """

    topics: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class ExpireOffsets:
    """Delete expired offsets and empty groups (Kafka: every 10 minutes)."""


@dataclass(frozen=True, slots=True)
class ForgottenResult:
    """The numbers of deleted offsets and groups; ``more`` says to send the command again."""

    offsets: int
    groups: int
    more: bool
