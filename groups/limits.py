"""Every limit of the group coordinator: name, unit, default and its reason.

Where a text names a Kafka key, the broker's configuration sets the limit.
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The constant limits of one shard.

    Two other limits are not constant: the records of a decision must fit one batch of the topic
    (``Shard.max_batch_bytes``), and budgets limit the memory of all shards together
    (``logcore/budget.py``).
    """

    min_session_timeout_ms: int = 6_000
    """``group.min.session.timeout.ms``, as in Kafka. A shorter session would end at each pause of
    the client."""

    max_session_timeout_ms: int = 1_800_000
    """``group.max.session.timeout.ms``, as in Kafka. The partitions of a dead member stay unread
    until its session ends."""

    new_member_join_timeout_ms: int = 300_000
    """The time, fixed in Kafka's code, after which a member is removed if its first JoinGroup still
    waits. A waiting member sends no heartbeats, and its client gives up at the request timeout."""

    max_group_size: int = 1_000
    """``group.max.size``: the maximum number of members. Kafka's default is unlimited. Here the
    group's record, which is written again for each generation, must fit one batch."""

    max_string_bytes: int = 32_767
    """The maximum size, in UTF-8 bytes, of a group, member, instance, client or rack id, of a
    client's host, of a protocol's type or name, of a regular expression, and of a topic's name in a
    subscription. As in Kafka, it is the size of the longest string that a record can hold."""

    max_protocols: int = 32
    """The maximum number of protocols that a member may offer; clients offer at most a handful."""

    max_pending_members: int = 1_000
    """The maximum number of a group's members that were given an id and have not rejoined with it
    (KIP-394). The oldest id is forgotten first. A real client rejoins within milliseconds, so a
    sender of too many joins mostly evicts its own ids."""

    max_shard_pending_members: int = 10_000
    """The maximum number of such pending members in all classic groups of a shard together. The
    pending members of consumer groups are counted separately, with the same limit."""

    max_groups: int = 20_000
    """The maximum number of groups in a shard. A group takes about a kilobyte of memory; the next
    expiry sweep removes unused groups."""

    max_offset_metadata_bytes: int = 4_096
    """``offset.metadata.max.bytes``: the maximum length of the string that a client stores with an
    offset. As in Kafka, the limit counts UTF-16 units despite its name. A string of more than
    32,767 bytes is refused as well, because the record's length field cannot hold more."""

    max_group_offsets: int = 100_000
    """The maximum number of committed and pending offsets of a group. When the group is deleted,
    one batch contains the tombstones of all of them."""

    max_looks_per_pass: int = 1_000
    """The maximum number of offsets and groups that one ExpireOffsets or TopicsDeleted command
    checks. The work takes less than 20 ms, most of it for the log lines of removed groups."""

    max_subscribed_topics: int = 50_000
    """The maximum number of topic names in a consumer's subscription. Each assignment reads all of
    them."""

    min_regex_refresh_interval_ms: int = 1_000
    """When topics change, a group's expressions are matched against all topics again, at most once
    in this interval. The matching takes about ten milliseconds for an expression and a thousand
    topics. Kafka's interval is fixed at 10 s, which delays the reading of new topics."""

    max_regex_steps_per_turn: int = 20_000
    """The maximum number of matching steps in one heartbeat, or at one expiry of the timer. They
    take about 3 ms, and suffice for a thousand topics. Further steps follow in later turns of the
    event loop."""

    max_group_regexes: int = 100
    """The maximum number of distinct expressions in a consumer group. Each is matched against all
    topics."""

    max_reason_chars: int = 256
    """The maximum number of characters that events keep of a client's reason to join or leave."""
