"""Every limit of the group coordinator: name, unit, default and its reason.

The daemon's configuration overrides those that Kafka has a key for (named in the comments).
"""

from __future__ import annotations

from fencepost.logcore.values import dataclass


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Bounds of one shard. Each is tested at the limit and one past it."""

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

    max_metadata_bytes: int = 65_536
    """Bytes of one member's protocol metadata, all protocols together. A subscription to 16,000
    owned partitions fits; it is kept in memory and in every group record."""

    max_identifier_bytes: int = 1_024
    """UTF-8 bytes of a group, instance, client or rack id, a client's host, a protocol's type or
    name, or a regular expression. They are keys of tables and part of every record; Kafka allows
    32,767."""

    max_member_id_bytes: int = 1_061
    """UTF-8 bytes of a member id. The coordinator makes them of a client or instance id and 37
    more; Kafka allows 32,767."""

    max_topic_name_bytes: int = 32_767
    """UTF-8 bytes of a topic name in a subscription: Kafka's, which is what a string of a record
    can hold. No topic has such a name, but to wait for it is no error."""

    max_protocols: int = 32
    """Protocols one member may offer; clients offer at most a handful."""

    max_pending_members: int = 1_000
    """Members per group that were given an id and have not come back with it (KIP-394). The oldest
    is forgotten first: an honest client returns within milliseconds, so a flood evicts itself."""

    max_shard_pending_members: int = 10_000
    """The same for all groups of a shard together. Ids that consumer groups gave out are counted
    apart, and for the shard alone."""

    max_shard_members: int = 20_000
    """Members of all groups of a shard: 50 shards times 20,000 is a million members on one node."""

    max_shard_metadata_bytes: int = 268_435_456
    """Protocol metadata of all members of a shard: 256 MiB, so that many full groups of members
    with the largest metadata can't add up to the whole memory."""

    max_groups: int = 20_000
    """Groups per shard. A group costs about a kilobyte; unused ones go with the next expiry."""

    max_group_record_bytes: int = 1_000_000
    """Bytes of one GroupMetadata record, i.e. what the leader may assign: just under the
    1,048,588 bytes that a batch of ``__consumer_offsets`` may have."""

    max_offset_metadata_bytes: int = 4_096
    """``offset.metadata.max.bytes``: Kafka's, which counts UTF-16 units of the string stored with
    an offset whatever the key says. A string that fills more than 32,767 bytes is refused as well:
    the record's length field ends there."""

    max_commit_bytes: int = 1_000_000
    """Bytes of the records of one commit, which are one batch (see ``max_group_record_bytes``)."""

    max_group_offsets: int = 100_000
    """Offsets, committed or pending, of one group; deleting the group tombstones them in one
    batch."""

    max_looks_per_pass: int = 1_000
    """Offsets and groups that one ExpireOffsets or TopicsDeleted looks at, and may write tombstones
    for: less than 20 ms of work, most of it the lines that tell of groups that go."""

    max_subscribed_topics: int = 10_000
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
