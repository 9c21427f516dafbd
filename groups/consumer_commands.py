"""The commands of consumer-protocol groups (KIP-848), and their results.

As in ``fencepost.groups.commands``: a command goes into ``GroupMachine.decide``, and its result or
a :class:`fencepost.groups.errors.GroupError` comes back. An :class:`Environment` holds the
cluster's topics.

Source: the ConsumerGroupHeartbeat and ConsumerGroupDescribe schemas of Apache Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Final

from fencepost.groups.assignors.model import AssignorRegistry
from fencepost.groups.assignors.range import RangeAssignor
from fencepost.groups.assignors.uniform import UniformAssignor
from fencepost.groups.commands import TopicVisibility
from fencepost.groups.consumer_records import ConsumerMemberValue
from fencepost.groups.record_fields import TopicPartitions
from fencepost.logcore.values import dataclass, fast_init

JOIN_EPOCH: Final = 0
"""The member (re)joins and owns nothing."""
LEAVE_EPOCH: Final = -1
"""The member leaves."""
STATIC_LEAVE_EPOCH: Final = -2
"""The static member leaves and intends to rejoin within its session."""
NO_TIMEOUT: Final = -1
"""``rebalance_timeout_ms`` when it did not change since the last heartbeat."""


@dataclass(frozen=True, slots=True, eq=False)
class TopicsImage:
    """The topics of the cluster: name → (topic id of 16 bytes, partition count).

    ``version`` grows with each change; a group checks its topics again when the version has grown.
    """

    topics: Mapping[str, tuple[bytes, int]]
    version: int = 0
    racks_of: Callable[[str], tuple[tuple[str, ...], ...]] = lambda _: ()
    """The racks of each partition's replicas, in order; empty if no broker has a rack."""

    def names(self) -> dict[bytes, str]:
        """Return topic id → name."""
        return {topic_id: name for name, (topic_id, _) in self.topics.items()}


class MigrationPolicy(StrEnum):
    """``group.consumer.migration.policy``: the allowed conversions of groups with members."""

    DISABLED = "disabled"
    UPGRADE = "upgrade"
    """Classic groups become consumer groups."""
    DOWNGRADE = "downgrade"
    """Consumer groups without a member of the consumer protocol become classic groups."""
    BIDIRECTIONAL = "bidirectional"

    @property
    def allows_upgrade(self) -> bool:
        """Whether a classic group with members may become a consumer group."""
        return self in {MigrationPolicy.UPGRADE, MigrationPolicy.BIDIRECTIONAL}

    @property
    def allows_downgrade(self) -> bool:
        """Whether a consumer group with members may become a classic group."""
        return self in {MigrationPolicy.DOWNGRADE, MigrationPolicy.BIDIRECTIONAL}


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The ``group.consumer.*`` configuration of the broker, or of a group that has its own."""

    session_timeout_ms: int = 45_000
    """``group.consumer.session.timeout.ms``: the client cannot choose it."""
    heartbeat_interval_ms: int = 5_000
    """``group.consumer.heartbeat.interval.ms``: sent to the client."""
    assignment_interval_ms: int = 1_000
    """``group.consumer.assignment.interval.ms``: at most one target is computed in this time."""
    max_size: int = 1_000
    """``group.consumer.max.size``: the maximum number of members. Kafka's default is unlimited; the
    target of a group of this size still fits one batch."""
    assignors: AssignorRegistry = field(
        default_factory=lambda: AssignorRegistry((UniformAssignor(), RangeAssignor()))
    )
    """``group.consumer.assignors``."""
    migration_policy: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL
    """``group.consumer.migration.policy``."""


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """The ``group.share.*`` configuration of the broker, or of a group that has its own."""

    session_timeout_ms: int = 45_000
    """``group.share.session.timeout.ms``."""
    heartbeat_interval_ms: int = 5_000
    """``group.share.heartbeat.interval.ms``: sent to the client."""
    assignment_interval_ms: int = 1_000
    """``group.share.assignment.interval.ms``: at most one target is computed in this time."""
    max_size: int = 200
    """``group.share.max.size``: the maximum number of members."""
    initialize_retry_ms: int = 30_000
    """``group.share.initialize.retry.interval.ms``: the time that the share coordinator has to
    answer before the group coordinator asks it again."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The state outside of a group on which decisions about the group depend."""

    topics: TopicsImage = field(default_factory=lambda: TopicsImage({}))
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    """The broker's settings of consumer groups, overridden by the group's."""
    share: ShareSettings = field(default_factory=ShareSettings)
    """The broker's settings of share groups, overridden by the group's."""


@fast_init
@dataclass(frozen=True, slots=True)
class ConsumerHeartbeat:
    """A ConsumerGroupHeartbeat. None (or :data:`NO_TIMEOUT`) means unchanged.

    From v1 the client chooses ``member_id``; ``new_member_id`` is used if it is empty (v0).
    ``subscribed_topic_regex`` "" removes an expression.

    Errors: InvalidGroupRequest, UnsupportedAssignor, InvalidRegularExpression, GroupIdNotFound,
    GroupMaxSizeReached, UnknownMemberId, FencedMemberEpoch, UnreleasedInstanceId, FencedInstanceId,
    GroupLimitExceeded.
    """

    group_id: str
    member_id: str
    member_epoch: int
    client_id: str
    client_host: str
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = NO_TIMEOUT
    subscribed_topic_names: tuple[str, ...] | None = None
    subscribed_topic_regex: str | None = None
    reason_against_regex: str | None = None
    """Why the expression is invalid; the caller checks it in steps (``regex.reason_against``)."""
    server_assignor: str | None = None
    owned: tuple[TopicPartitions, ...] | None = None
    new_member_id: str = ""
    client_makes_member_id: bool = True
    """From v1: an empty ``member_id`` is refused."""
    visibility: TopicVisibility | None = None
    """The topics that the sender may see; None for all."""


@fast_init
@dataclass(frozen=True, slots=True)
class ConsumerHeartbeatResult:
    """``assignment`` None means unchanged."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int = 0
    assignment: tuple[TopicPartitions, ...] | None = None


@dataclass(frozen=True, slots=True)
class DescribeConsumerGroup:
    """Describe one consumer group. Errors: GroupIdNotFound."""

    group_id: str


@dataclass(frozen=True, slots=True)
class NamedPartitions:
    """Partitions of one topic."""

    topic_id: bytes
    topic: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DescribedConsumer:
    """One member. Both assignments omit topics that no longer exist."""

    member_id: str
    metadata: ConsumerMemberValue
    """The member's record."""
    member_epoch: int
    assignment: tuple[NamedPartitions, ...]
    target_assignment: tuple[NamedPartitions, ...]


@dataclass(frozen=True, slots=True)
class DescribeConsumerGroupResult:
    """``state`` is Kafka's name: Empty, Assigning, Reconciling, Stable."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor_name: str
    members: tuple[DescribedConsumer, ...]
