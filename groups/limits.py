"""Every limit of the group coordinator: name, unit, default and its reason.

Where a text names a Kafka key, the broker's configuration sets the limit.
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bounds of one shard. Each is tested at the limit and one past it.

    Two more bounds are not constant: the records of a decision must fit one batch of the topic (see
    ``Shard.max_batch_bytes``), and budgets limit the memory of all shards together
    (``logcore/budget.py``).
    """

    min_session_timeout_ms: int = 6_000
    """``group.min.session.timeout.ms``, as in Kafka. Pauses of a client would end shorter
    sessions."""

    max_session_timeout_ms: int = 1_800_000
    """``group.max.session.timeout.ms``, as in Kafka. Until a session ends, the partitions of a dead
    member stay unread."""

    new_member_join_timeout_ms: int = 300_000
    """Lifetime of a member whose first JoinGroup still waits; fixed in Kafka's code. Clients give
    up within their request timeout, and a waiting member sends no heartbeats."""

    max_group_size: int = 1_000
    """``group.max.size``, members. Kafka's default is unlimited; the group's record, rewritten at
    each generation, must fit one batch, and clients cannot manage larger groups anyway."""

    max_string_bytes: int = 32_767
    """UTF-8 bytes of a group, member, instance, client or rack id, a client's host, a protocol's
    type or name, a regular expression, or a topic's name in a subscription. As in Kafka, the limit
    is the longest string that a record can hold."""

    max_protocols: int = 32
    """Protocols that one member may offer; clients offer at most a handful."""

    max_pending_members: int = 1_000
    """Members per group that were given an id and have not rejoined with it (KIP-394). The oldest
    is forgotten first: a real client rejoins within milliseconds, so a flood of joins evicts its
    own ids."""

    max_shard_pending_members: int = 10_000
    """Pending members of all groups of a shard together. Ids that consumer groups gave out are
    counted separately, with the same limit."""

    max_groups: int = 20_000
    """Groups per shard. A group costs about a kilobyte; the next expiry sweep removes unused
    groups."""

    max_offset_metadata_bytes: int = 4_096
    """``offset.metadata.max.bytes``, the limit of the string stored with an offset. As in Kafka, it
    counts UTF-16 units despite its name. A string of more than 32,767 bytes is refused as well: the
    record's length field cannot hold more."""

    max_group_offsets: int = 100_000
    """Offsets, committed or pending, of one group; deleting the group tombstones them in one
    batch."""

    max_looks_per_pass: int = 1_000
    """Offsets and groups that one ExpireOffsets or TopicsDeleted checks, and may write tombstones
    for: less than 20 ms of work, most of it log lines for removed groups."""

    max_subscribed_topics: int = 50_000
    """Topic names that one consumer may subscribe to. Each assignment reads all of them."""

    min_regex_refresh_interval_ms: int = 1_000
    """Minimum interval for matching a group's expressions against all topics again when topics
    change. The matching takes about ten milliseconds for an expression and a thousand topics.
    Kafka's interval is fixed at 10 s, which delays new topics."""

    max_regex_steps_per_turn: int = 20_000
    """Steps of matching that one heartbeat, or one turn of a timer, may take: about 3 ms, enough
    for a thousand topics. Further steps follow in later turns of the event loop."""

    max_group_regexes: int = 100
    """Distinct expressions in one consumer group; all are matched against all topics."""

    max_reason_chars: int = 256
    """Characters of a client's join or leave reason kept in events."""
