"""Requests of group members, of clients that commit offsets, and of administrators of groups."""

from __future__ import annotations

import struct
from typing import Any

from tests.lives.draw import Condition, Draw, Later, Request, settled
from tests.lives.knowledge import Knowledge, Slot
from tests.support import requests
from tests.support.requests import Body

PROTOCOLS = (
    ("range",),
    ("cooperative-sticky", "range"),
    ("roundrobin", "range"),
    ("cooperative-sticky",),
    ("own",),
)
"""Protocols that members offer. Most members use the first two, which have an entry in common."""


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def _rows(rows: list[tuple[str, list[int]]]) -> bytes:
    out = struct.pack(">i", len(rows))
    for topic, parts in rows:
        out += _text(topic) + struct.pack(f">i{len(parts)}i", len(parts), *parts)
    return out


def subscription(version: int, topics: list[str], owned: list[tuple[str, list[int]]]) -> bytes:
    """Return a ``ConsumerProtocolSubscription`` at ``version`` (0 to 3) without user data."""
    out = struct.pack(">hi", version, len(topics)) + b"".join(map(_text, topics))
    out += struct.pack(">i", -1)
    if version >= 1:
        out += _rows(owned)
    if version >= 2:
        out += struct.pack(">i", -1)
    if version >= 3:
        out += struct.pack(">h", -1)
    return out


def assignment(rows: list[tuple[str, list[int]]]) -> bytes:
    """Return a ``ConsumerProtocolAssignment`` v0 without user data."""
    return struct.pack(">h", 0) + _rows(rows) + struct.pack(">i", -1)


def _subscribed(d: Draw) -> list[str]:
    return sorted({d.topic()[:1000] for _ in range(d.rng.randint(1, 2))})


def join_group(d: Draw, about: Slot, only_if: Condition | None = None) -> Request:
    topics = _subscribed(d)
    owned = [(t, [d.partition()]) for t in topics if d.chance(0.3)]
    # Apache Kafka never responds to a JoinGroup whose metadata it cannot parse.
    junk = d.rng.randbytes(d.rng.randint(0, 40)) if d.chance(0 if d.calm else 0.04) else None
    metadata = subscription(d.rng.randint(0, 3), topics, owned) if junk is None else junk
    usual = PROTOCOLS if d.chance(0.1) else PROTOCOLS[:2]
    names = d.pick(usual) if d.chance(0.97) else d.pick([(), ("",), (d.odd(),)])
    patience = [60_000] if d.calm else [500, 700, 1_500, 3_000]
    return Request(
        "join_group",
        d.version("join_group"),
        requests.join_group(
            about[0],
            d.member_id(about, 0.94),
            group_instance_id=d.instance(about),
            session_timeout=d.pick(patience) if d.chance(0.97) else d.pick([0, 1, 10**8]),
            rebalance_timeout=d.pick([60_000] if d.calm else [0, 200, 1_000, 1_000, 3_000]),
            protocol_type="consumer" if d.chance(0.97) else d.pick(["", "connect", d.odd()]),
            protocols=[requests.join_protocol(name, metadata) for name in names],
            reason=d.pick([None, "", "because", d.odd()]) if d.chance(0.1) else None,
        ),
        about,
        only_if,
    )


def _assignments(d: Draw, about: Slot) -> Later:
    """Draw the assignments that a leader sends for all members; a follower sends none."""
    topics = _subscribed(d)
    junk = d.rng.randbytes(6) if d.chance(0.04) else None
    extra = d.odd() if d.chance(0.02) else None

    def give(k: Knowledge) -> list[Body]:
        members = [*k.members[about].leads, *([] if extra is None else [extra])]
        rows = [[(t, [n]) for t in topics] for n in range(len(members))]
        return [
            requests.sync_assignment(member, assignment(row) if junk is None else junk)
            for member, row in zip(members, rows, strict=True)
        ]

    return give


def sync_group(d: Draw, about: Slot, only_if: Condition | None = None) -> Request:
    kind = d.pick(["consumer", None, "connect"]) if d.chance(0.1) else "consumer"
    name = d.pick(["range", None, ""]) if d.chance(0.1) else ...
    return Request(
        "sync_group",
        d.version("sync_group"),
        requests.sync_group(
            about[0],
            d.generation(about),
            d.member_id(about, 0.95),
            group_instance_id=d.instance(about),
            protocol_type=kind,
            protocol_name=(lambda k: k.members[about].protocol) if name is ... else name,
            assignments=_assignments(d, about),
        ),
        about,
        only_if,
    )


def heartbeat(d: Draw, about: Slot) -> Request:
    return Request(
        "heartbeat",
        d.version("heartbeat"),
        requests.heartbeat(
            about[0],
            d.generation(about),
            d.member_id(about, 0.93),
            group_instance_id=d.instance(about),
        ),
        about,
    )


def leave_group(d: Draw, about: Slot) -> Request:
    def leaving_member(who: Slot) -> Body:
        instance = d.instance(who)
        member = d.member_id(who, 0.9) if instance is None or d.chance(0.5) else ""
        return requests.leaving_member(member, instance, reason=d.pick([None, "done", d.odd()]))

    others = [d.slot(about[0]) for _ in range(d.rng.choices((0, 1, 3), (8, 2, 1))[0])]
    return Request(
        "leave_group",
        d.version("leave_group"),
        requests.leave_group(
            about[0],
            member_id=d.member_id(about, 0.93),
            members=[leaving_member(who) for who in (about, *others)],
        ),
        about,
    )


def consumer_heartbeat(d: Draw, about: Slot, *, epoch: int | None = None) -> Request:
    """Draw a ConsumerGroupHeartbeat; ``epoch`` 0 joins, a negative epoch leaves.

    A heartbeat that joins has all the fields of a join, also after the member was fenced.
    """
    version = d.version("consumer_group_heartbeat")
    made = f"{about[0][:200]}-{about[1]}-{d.rng.randrange(3)}"
    names = _subscribed(d)
    regex = d.pick(
        [
            "topic-[ab]",
            f"{d.pools.stem}topic-.*",
            "(",
            "",
            ".*",
            "a{1,3}b|__.*",
            r"(?i:TOPIC)-\pL+\b",
            "(?s).*",
            r"\p{Greek}|topic-a",
            "(?=a)",
            "{*",
        ]
    )
    # Apache Kafka resolves a regex in the background, so the result depends on timing.
    by_regex = version >= 1 and d.chance(0.2) and not d.calm
    with_names = not by_regex or d.chance(0.3)
    is_full = d.chance(0.15)
    is_odd = d.chance(0.05)
    said_epoch: Later = d.member_epoch(about) if epoch is None else lambda _: epoch
    patience = d.pick([60_000] if d.calm else [500, 1_000, 3_000])
    owned: Any = d.pick([None, [], [{"topic_id": d.topic_id(d.topic()), "partitions": [0]}]])
    member = d.member_id(about, 0.0) if is_odd else lambda k: k.members[about].id or made
    assignor = d.pick(["uniform", "range", None, None]) if d.chance(0.2) else None
    if d.calm and assignor is not None:
        assignor = "uniform"  # between two assignors Apache Kafka decides a tie by its hash tables
    if d.chance(0.02):
        assignor = d.pick(["none", d.odd()])

    def full(value: Any) -> Later:
        return lambda k: value if is_full or said_epoch(k) == 0 else None

    def partitions(k: Knowledge) -> Any:
        if is_odd:
            return settled(owned, k)
        return [] if said_epoch(k) == 0 else k.members[about].owned

    return Request(
        "consumer_group_heartbeat",
        version,
        requests.consumer_group_heartbeat(
            about[0],
            member,
            said_epoch,
            instance_id=d.instance(about),
            rack_id=d.pick(["", "rack"]) if d.chance(0.03) else None,
            rebalance_timeout=lambda k: full(patience)(k) or -1,
            subscribed_topic_names=full(names if with_names else None),
            subscribed_topic_regex=full(regex if by_regex else None),
            server_assignor=assignor,
            topic_partitions=partitions,
        ),
        about,
    )


def committed(d: Draw) -> Body:
    """Draw one topic of an OffsetCommit."""
    name = d.topic()
    metadata = "" if d.chance(0.8) else d.pick([None, "note", "m" * 4_096, "m" * 4_097, d.odd()])

    def partition() -> Body:
        return {
            "partition_index": d.partition(),
            "committed_offset": d.pick([0, 1, 5, 100, 2**40, 2**63 - 1, -1]),
            "committed_leader_epoch": d.pick([-1, 0, 1, 7]),
        }

    partitions = [partition() for _ in range(d.rng.randint(1, 2))]
    return requests.offset_commit_topic(name, *partitions, committed_metadata=metadata)


def with_ids(d: Draw) -> list[Body]:
    """Draw the topics of a commit, each with its name and id."""
    topics = d.some(lambda: committed(d))
    return [{**topic, "topic_id": d.topic_id(topic["name"])} for topic in topics]


def offset_commit(d: Draw, about: Slot, kind: str | None = None) -> Request:
    """Draw an OffsetCommit of a classic member, a consumer or no member (``simple``)."""
    kind = kind or d.pick(["simple", "classic", "consumer"])
    generation: Any = -1
    member: Any = ""
    if kind == "classic":
        generation, member = d.generation(about), d.member_id(about, 0.94)
    elif kind == "consumer":
        generation, member = d.member_epoch(about), d.member_id(about, 0.94)
    elif d.chance(0.08):
        member = d.member_id(about)
    # In versions without an epoch, the broker refuses members of the consumer protocol.
    low = 9 if kind == "consumer" and d.chance(0.85) else 0
    return Request(
        "offset_commit",
        d.version("offset_commit", low),
        requests.offset_commit(
            about[0],
            generation_id_or_member_epoch=generation,
            member_id=member,
            group_instance_id=None if kind == "simple" else d.instance(about),
            retention_time=d.pick([-1, -1, 0, 1_000]),
            topics=with_ids(d),
        ),
        about,
    )


def offset_fetch(d: Draw, about: Slot) -> Request:
    def topic() -> Body:
        name = d.topic()
        partitions = [d.partition() for _ in range(d.rng.randint(0, 2))]
        return requests.offset_fetch_topic(name, *partitions, topic_id=d.topic_id(name))

    def topics() -> list[Body] | None:
        return None if d.chance(0.3) else d.some(topic)

    def group(name: str) -> Body:
        as_member = d.chance(0.2)
        return requests.offset_fetch_group(
            name,
            member_id=d.member_id((name, about[1])) if as_member else None,
            member_epoch=d.member_epoch((name, about[1])) if as_member else -1,
            topics=topics(),
        )

    version = d.version("offset_fetch")
    flat = topics()
    groups = [group(about[0]), *(group(d.group()) for _ in range(d.pick([0, 0, 0, 1])))]
    return Request(
        "offset_fetch",
        version,
        requests.offset_fetch(
            *groups,
            topics=[] if flat is None and version < 2 else flat,
            require_stable=d.chance(0.3),
        ),
        about,
    )


def offset_delete(d: Draw) -> Request:
    group = d.group()
    topics = d.some(lambda: requests.offset_delete_topic(d.topic(), d.partition()))
    return Request("offset_delete", 0, requests.offset_delete(group, *topics))


def delete_groups(d: Draw, name: str | None = None) -> Request:
    names = d.some(d.group) if name is None else [name]
    return Request("delete_groups", d.version("delete_groups"), requests.delete_groups(*names))


def describe_groups(d: Draw) -> Request:
    version, names = d.version("describe_groups"), d.some(d.group)
    body = requests.describe_groups(*names, include_authorized_operations=d.chance(0.2))
    return Request("describe_groups", version, body)


def consumer_group_describe(d: Draw) -> Request:
    version, names = d.version("consumer_group_describe"), d.some(d.group)
    body = requests.consumer_group_describe(*names, include_authorized_operations=d.chance(0.2))
    return Request("consumer_group_describe", version, body)


def list_groups(d: Draw) -> Request:
    states = ["Empty", "stable", "PreparingRebalance", "Dead", "nonsense", "", "Assigning"]
    return Request(
        "list_groups",
        d.version("list_groups"),
        requests.list_groups(
            states_filter=[] if d.chance(0.5) else d.some(lambda: d.pick(states)),
            types_filter=[]
            if d.chance(0.5)
            else d.some(lambda: d.pick(["classic", "Consumer", "share", "nonsense", ""])),
        ),
    )


def find_coordinator(d: Draw) -> Request:
    keys = d.some(d.group)
    return Request(
        "find_coordinator",
        d.version("find_coordinator"),
        requests.find_coordinator(*keys, key_type=d.rng.choices((0, 1, 2, -1), (10, 8, 1, 1))[0]),
    )
