"""The commands of share groups (KIP-932), and their results.

As in ``fencepost.groups.commands``, a command goes into ``GroupMachine.decide``, and its result or
a :class:`fencepost.groups.errors.GroupError` comes back. The state machine sends no requests to the
share coordinator. If the state of share partitions must be initialized or deleted, the result of
the first command lists the partitions; the caller sends the request to the share coordinator, and
reports the response with a second command.

Source: the ShareGroupHeartbeat, ShareGroupDescribe, AlterShareGroupOffsets and
DeleteShareGroupOffsets schemas of Apache Kafka, and ``GroupCoordinatorService``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.groups.consumer_commands import NamedPartitions
from fencepost.groups.record_fields import TopicPartitions
from fencepost.groups.share_records import ShareMemberValue
from fencepost.logcore.machine import DomainError
from fencepost.logcore.values import dataclass, fast_init

START_UNKNOWN: Final = -1
"""The start offset of a partition if ``share.auto.offset.reset`` determines where reading
starts."""
START_EARLIEST: Final = 0
"""The start offset of a partition that was added to a topic of the group (KAFKA-20742)."""


@dataclass(frozen=True, slots=True)
class StateToInitialize:
    """Partitions whose state the share coordinator must create, with their start offsets.

    ``state_epoch`` is the group epoch: it fences the leaders that still have the previous state.
    """

    state_epoch: int
    offsets: tuple[tuple[bytes, int, int], ...]
    """Each (topic id, partition, start offset)."""


@fast_init
@dataclass(frozen=True, slots=True)
class ShareHeartbeat:
    """A ShareGroupHeartbeat; None means unchanged.

    Errors: InvalidGroupRequest, GroupIdNotFound, GroupMaxSizeReached, UnknownMemberId,
    FencedMemberEpoch, GroupLimitExceeded.
    """

    group_id: str
    member_id: str
    member_epoch: int
    client_id: str
    client_host: str
    rack_id: str | None = None
    subscribed_topic_names: tuple[str, ...] | None = None


@fast_init
@dataclass(frozen=True, slots=True)
class ShareHeartbeatResult:
    """``assignment`` None means unchanged. ``to_initialize`` is for the share coordinator."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int = 0
    assignment: tuple[TopicPartitions, ...] | None = None
    to_initialize: StateToInitialize | None = None


@dataclass(frozen=True, slots=True)
class DescribeShareGroup:
    """Describe one share group. Errors: GroupIdNotFound."""

    group_id: str


@dataclass(frozen=True, slots=True)
class DescribedShareMember:
    """One member. The assignment omits topics that no longer exist."""

    member_id: str
    metadata: ShareMemberValue
    """The member's record."""
    member_epoch: int
    assignment: tuple[NamedPartitions, ...]


@dataclass(frozen=True, slots=True)
class DescribeShareGroupResult:
    """``state`` is Kafka's name: Empty, Stable."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor_name: str
    members: tuple[DescribedShareMember, ...]


@dataclass(frozen=True, slots=True)
class ShareStateInitialized:
    """Report of the share coordinator on ``StateToInitialize``, as (topic id, partition) pairs.

    Errors: GroupIdNotFound.
    """

    group_id: str
    initialized: frozenset[tuple[bytes, int]]
    failed: frozenset[tuple[bytes, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class ListShareState:
    """List the partitions whose state is initialized, for DescribeShareGroupOffsets.

    The result of a group that does not exist, or is of another kind, is empty, as in Kafka.
    """

    group_id: str


@dataclass(frozen=True, slots=True)
class ListShareStateResult:
    """Partitions by topic; topics that no longer exist are omitted."""

    partitions: tuple[NamedPartitions, ...]


@dataclass(frozen=True, slots=True)
class AlterShareOffsets:
    """Set start offsets of an empty group, which is created if it does not exist.

    ``offsets`` are (topic, partition, start offset). Errors: NonEmptyGroup, GroupIdNotFound (a
    group of another kind), GroupLimitExceeded.
    """

    group_id: str
    offsets: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class AlterShareOffsetsResult:
    """``unknown`` are (topic, partition) that do not exist."""

    to_initialize: StateToInitialize
    unknown: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class DeleteShareOffsets:
    """Begin to delete the state of topics of an empty group.

    Errors: NonEmptyGroup, GroupIdNotFound.
    """

    group_id: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeleteShareState:
    """Begin to delete the state of all topics of an empty group, before DeleteGroups.

    Errors: NonEmptyGroup, GroupIdNotFound.
    """

    group_id: str


@dataclass(frozen=True, slots=True)
class StateToDelete:
    """Partitions whose state the share coordinator must delete.

    ``unknown`` are topics that do not exist, ``without_state`` topics without state.
    """

    partitions: tuple[NamedPartitions, ...]
    unknown: tuple[str, ...] = ()
    without_state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShareStateDeleted:
    """Report of the share coordinator on ``StateToDelete``. Errors: GroupIdNotFound."""

    group_id: str
    topic_ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ShareTopicsDeleted:
    """Forget the state of deleted topics in all groups of the shard, or in some of them.

    The command is sent again while the result has ``more``.
    """

    topic_ids: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a report, or of ShareTopicsDeleted."""

    more: bool = False
    """Whether groups are left."""


@dataclass(frozen=True, slots=True)
class AlteredShareOffsets:
    """The result of AlterShareGroupOffsets: unknown partitions, and partitions that failed."""

    unknown: frozenset[tuple[str, int]]
    """Each (topic, partition) that does not exist."""
    failed: Mapping[tuple[bytes, int], DomainError]
    """By topic id and partition."""


@dataclass(frozen=True, slots=True)
class DeletedShareOffsets:
    """The result of DeleteShareGroupOffsets: the requested topics, and the topics that failed."""

    begun: StateToDelete
    failed: Mapping[bytes, DomainError]
    """By topic id."""
