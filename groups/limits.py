"""Every limit of the group coordinator: name, unit, default and its reason.

The daemon's configuration overrides those that Kafka has a key for (named in the comments).
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bounds of one shard. Each is tested at the limit and one past it.

    Two more bounds are not constant: what a decision writes must fit one batch of the topic (see
    ``Shard.max_batch_bytes``), and what all shards hold together has budgets
    (``logcore/budget.py``).
    """

    min_session_timeout_ms: int = 6_000
    """``group.min.session.timeout.ms``: Kafka's. Shorter ones expire in a pause of the client."""

    max_session_timeout_ms: int = 1_800_000
    """``group.max.session.timeout.ms``: Kafka's. Longer ones leave partitions unread too long."""

    new_member_join_timeout_ms: int = 300_000
    """Life of a member whose first JoinGroup still waits; fixed in Kafka's code. Clients give up
    within their request timeout, and a waiting member has no heartbeat that could reveal it."""

    max_group_size: int = 1_000
    """``group.max.size``, members. Kafka's default is unlimited; the group's record, rewritten at
    each generation, must fit one batch, and a thousand members is past what its clients manage."""

    max_string_bytes: int = 32_767
    """UTF-8 bytes of a group, member, instance, client or rack id, a client's host, a protocol's
    type or name, a regular expression, or a topic's name in a subscription: Kafka's bound, which is
    what a string of a record can hold."""

    max_protocols: int = 32
    """Protocols one member may offer; clients offer at most a handful."""

    max_pending_members: int = 1_000
    """Members per group that were given an id and have not come back with it (KIP-394). The oldest
    is forgotten first: an honest client returns within milliseconds, so a flood evicts itself."""

    max_shard_pending_members: int = 10_000
    """The same for all groups of a shard together. Ids that consumer groups gave out are counted
    apart, and for the shard alone."""

    max_groups: int = 20_000
    """Groups per shard. A group costs about a kilobyte; unused ones go with the next expiry."""

    max_offset_metadata_bytes: int = 4_096
    """``offset.metadata.max.bytes``: Kafka's, which counts UTF-16 units of the string stored with
    an offset whatever the key says. A string that fills more than 32,767 bytes is refused as well:
    the record's length field ends there."""

    max_group_offsets: int = 100_000
    """Offsets, committed or pending, of one group; deleting the group tombstones them in one
    batch."""

    max_looks_per_pass: int = 1_000
    """Offsets and groups that one ExpireOffsets or TopicsDeleted looks at, and may write tombstones
    for: less than 20 ms of work, most of it the lines that tell of groups that go."""

    max_subscribed_topics: int = 50_000
    """Topic names one consumer may subscribe to. Each assignment looks at all of them."""

    min_regex_refresh_interval_ms: int = 1_000
    """At most so often a group's expressions are matched against all topics again when topics
    change; about ten milliseconds of work per thousand topics and expression. Kafka's is fixed at
    10 s, which makes new topics slow to be seen."""

    max_regex_steps_per_turn: int = 20_000
    """Steps of matching that one heartbeat, or one turn of a timer, may take: about 3 ms, enough
    for a thousand topics. What is left is done in turns of its own."""

    max_group_regexes: int = 100
    """Different expressions in one consumer group; all are matched against all topics."""

    max_reason_chars: int = 256
    """Characters of a client's join or leave reason kept in events."""
