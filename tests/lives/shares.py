"""Requests of share groups: to the group coordinator, the leaders and the share coordinator.

When two brokers are compared (``calm``), no response may depend on how fast the share coordinator
responds. Therefore a fetch may have to wait until the leader has read the state of a share
partition, and this partition is then the only one in its session. A member acknowledges all its
acquired records before it ends its session, because the broker would release the rest after the
response.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.lives.draw import Draw, Later, Request, settled
from tests.lives.knowledge import Knowledge, Slot
from tests.lives.pools import Pools
from tests.support import requests
from tests.support.requests import Body
from tests.support.share import ACCEPT, FINAL, FULL, GAP, GROUP, REJECT, RELEASE, RENEW

MEMBERS = 3
EPOCHS = (0, 0, 0, -1, 1, 2, 2, 3, 4, 5, -2)
READ_MS = 2_000
"""The time in which a leader reads the state of a share partition."""

LAST = (ACCEPT, ACCEPT, ACCEPT, REJECT, GAP)
OUTCOMES = (*LAST, RELEASE, RELEASE, RELEASE, RELEASE)
"""The types of acknowledgements. RELEASE is frequent: a fetch may acquire the records that it
releases, if the release is written first.
"""

Batches = list[Body]
Parts = dict[uuid.UUID, dict[int, Batches]]


def share_slot(d: Draw) -> Slot:
    """Draw a member of a share group."""
    return d.share_group(), d.rng.randrange(MEMBERS)


def _member_id(d: Draw, about: Slot) -> str:
    return f"share-member-{about[1]}" if d.chance(0.97) else d.odd()


def _live(d: Draw, live: Later, share: float = 0.9) -> Later:
    """Draw an epoch, which is the current epoch with probability ``share``."""
    if d.chance(share):
        return live
    other = d.pick(EPOCHS)
    return d.pick([lambda k: live(k) - 1, lambda k: live(k) + 1, lambda _: other])


# --- the group coordinator ------------------------------------------------------------------------


def share_group_heartbeat(d: Draw, about: Slot | None = None, epoch: int | None = None) -> Request:
    """Draw a heartbeat with an epoch. If the epoch joins, the heartbeat has the topics."""
    about = about or share_slot(d)
    live = (lambda k: k.shares[about].epoch) if epoch is None else (lambda _: epoch)
    drawn = _live(d, live)
    names, always = d.some(d.topic), d.chance(0.2)
    body = requests.share_group_heartbeat(
        about[0],
        _member_id(d, about),
        drawn,
        rack_id=d.pick(["", "rack"]) if d.chance(0.03) else None,
        subscribed_topic_names=lambda k: names if always or drawn(k) == 0 else None,
    )
    version = d.version("share_group_heartbeat")
    return Request("share_group_heartbeat", version, body, about)


def configure(pools: Pools) -> Request:
    """Return the request that sets the start offsets and isolation levels of the share groups."""
    earliest = requests.config_op("share.auto.offset.reset", "earliest")
    committed = requests.config_op("share.isolation.level", "read_committed")
    first, second = pools.share_groups
    body = requests.incremental_alter_configs(
        requests.altered_resource(GROUP, first, earliest),
        requests.altered_resource(GROUP, second, earliest, committed),
    )
    return Request("incremental_alter_configs", 1, body)


def share_group_describe(d: Draw) -> Request:
    names = d.some(d.share_group)
    body = requests.share_group_describe(*names, include_authorized_operations=d.chance(0.2))
    return Request("share_group_describe", d.version("share_group_describe"), body)


def _partitions(d: Draw) -> list[int]:
    # Apache Kafka looks for the state of a missing partition for half a minute, and fails if a
    # topic is named without partitions.
    return [0 if d.calm else d.partition() for _ in range(d.rng.randint(int(d.calm), 2))]


def describe_share_group_offsets(d: Draw) -> Request:
    def group() -> Body:
        named = d.some(lambda: {"topic_name": d.topic(), "partitions": _partitions(d)})
        return {"group_id": d.share_group(), "topics": None if d.chance(0.5) else named}

    version = d.version("describe_share_group_offsets")
    return Request("describe_share_group_offsets", version, {"groups": d.some(group)})


def alter_share_group_offsets(d: Draw) -> Request:
    offsets = {index: d.pick([0, 1, 7, -5, 10**6]) for index in _partitions(d)}
    body = requests.alter_share_group_offsets(d.share_group(), d.topic(), offsets)
    return Request("alter_share_group_offsets", d.version("alter_share_group_offsets"), body)


def delete_share_group_offsets(d: Draw) -> Request:
    body = requests.delete_share_group_offsets(d.share_group(), *d.some(d.topic))
    return Request("delete_share_group_offsets", d.version("delete_share_group_offsets"), body)


# --- the leaders ----------------------------------------------------------------------------------


def _any_batch(d: Draw, types: Sequence[int]) -> Body:
    """Draw a range to acknowledge, mostly with valid types; it need not be acquired."""
    first = d.pick([0, 0, 1, 2, 5, -1])
    last = first + d.pick([0, 0, 1, 4, -1])
    count = d.pick([1, 1, last - first + 1, 0])
    drawn = [d.pick([*types, 5]) for _ in range(max(count, 0))]
    return {"first_offset": first, "last_offset": last, "acknowledge_types": drawn}


def _held_batches(rng: random.Random, held: set[int], types: Sequence[int], all_: bool) -> Batches:
    """Draw ranges of held offsets, all or up to three, in order; and their types."""
    found: Batches = []
    starts = sorted(held) if all_ else sorted(rng.sample(sorted(held), min(3, len(held))))
    for first in starts:
        if found and first <= found[-1]["last_offset"]:
            continue
        last = first
        while last + 1 in held and rng.random() < 0.8:
            last += 1
        count = 1 if rng.random() < 0.6 else last - first + 1
        drawn = [rng.choice(types) for _ in range(count)]
        found.append({"first_offset": first, "last_offset": last, "acknowledge_types": drawn})
    return found


def _rows(parts: Parts) -> list[Body]:
    return [
        {
            "topic_id": topic_id,
            "partitions": [
                {"partition_index": index, "acknowledgement_batches": batches}
                for index, batches in indexes.items()
            ],
        }
        for topic_id, indexes in parts.items()
    ]


def _acknowledged(d: Draw, about: Slot, epoch: Later, types: Sequence[int], *, adds: bool) -> Later:
    """Draw the topics of a request: added partitions, and acknowledgements of held offsets.

    If ``adds`` is true, the request adds its partitions to the session, as a ShareFetch does.
    """
    named: list[tuple[Later, int, Batches]] = []
    for name in d.some(d.readable) if d.chance(0.5) else []:
        is_odd = d.chance(0.1)
        batches = d.some(lambda: _any_batch(d, types)) if is_odd else []
        named.append((d.topic_id(name), d.partition(), batches))
    opened = d.topic_id(d.readable()), d.partition()
    seed, chance = d.rng.random(), d.pick([0, 0.5, 1])

    def give(k: Knowledge) -> list[Body]:
        rng, member = random.Random(seed), k.shares[about]
        is_opening, is_last = epoch(k) == FULL, epoch(k) == FINAL
        parts: Parts = {}
        for later, index, batches in named:
            parts.setdefault(settled(later, k), {})[index] = list(batches)
        if is_opening and adds:
            parts.setdefault(settled(opened[0], k), {})[opened[1]] = []
        if d.calm and adds:
            parts = _only_read(k, about[0], parts, is_opening)
        if not is_opening:
            for topic_id, index in sorted(member.held, key=lambda at: (k.place(at[0]), at[1])):
                held = member.held[topic_id, index]
                if is_last or rng.random() < chance:
                    batches = _held_batches(rng, held, types, is_last)
                    parts.setdefault(topic_id, {})[index] = batches
        return _rows(parts)

    return give


def _only_read(k: Knowledge, group: str, parts: Parts, is_opening: bool) -> Parts:
    """Return the partitions whose state was read; without one, a new session gets any partition."""
    read: Parts = {}
    for topic_id, indexes in parts.items():
        for index, batches in indexes.items():
            if (group, topic_id, index) in k.read_shares:
                read.setdefault(topic_id, {})[index] = batches
    if read or not is_opening:
        return read
    topic_id, indexes = next(iter(parts.items()))
    index, batches = next(iter(indexes.items()))
    return {topic_id: {index: batches}}


def _session(
    d: Draw, about: Slot, epoch: int | None, types: Sequence[int], *, adds: bool
) -> tuple[Body, Later]:
    live = (lambda k: k.shares[about].session) if epoch is None else (lambda _: epoch)
    drawn = _live(d, live)
    is_renewal = d.chance(0.05)
    if is_renewal:
        types = (*types, RENEW, RENEW)
    body = {
        "group_id": about[0],
        "member_id": _member_id(d, about),
        "share_session_epoch": drawn,
        "is_renew_ack": is_renewal,
        "topics": _acknowledged(d, about, drawn, types, adds=adds),
    }
    return body, drawn


def share_fetch(d: Draw, about: Slot | None = None, epoch: int | None = None) -> Request:
    """Draw a fetch that opens, continues or ends the session of a member."""
    about = about or share_slot(d)
    body, drawn = _session(d, about, epoch, LAST if d.calm else OUTCOMES, adds=True)
    topics = body["topics"]

    def wait(k: Knowledge) -> int:
        group, member = about[0], k.shares[about]
        asked = {
            (group, row["topic_id"], part["partition_index"])
            for row in topics(k)
            for part in row["partitions"]
        }
        kept = set() if drawn(k) == FULL else member.partitions
        return 0 if (asked | kept) <= k.read_shares else READ_MS

    forgotten = [
        (d.topic_id(d.readable()), [d.partition()]) for _ in range(1 if d.chance(0.1) else 0)
    ]
    is_empty = body["is_renew_ack"] and d.chance(0.7)
    most = 0 if is_empty else 1 << 20
    limits: Mapping[str, Any] = {
        "max_wait": 0 if is_empty else wait if d.calm else d.pick([0, 0, 10, 50, -1]),
        "min_bytes": 0 if is_empty else 1 if d.calm else d.pick([0, 1, 1000]),
        "max_bytes": most if d.calm else d.pick([0, 1, most, most]),
        "max_records": 0 if is_empty else d.pick([1, 2, 5, 20, 500, *(() if d.calm else (0, -1))]),
        "batch_size": d.pick([1, 5, 500, *(() if d.calm else (0,))]),
        "share_acquire_mode": d.pick([0, 0, 1, 1, *(() if d.calm else (2,))]),
        "forgotten_topics_data": [
            {"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in forgotten
        ],
    }
    return Request("share_fetch", d.version("share_fetch"), {**body, **limits}, about)


def share_acknowledge(d: Draw, about: Slot | None = None, epoch: int | None = None) -> Request:
    """Draw an acknowledgement of held offsets, sometimes of other offsets."""
    about = about or share_slot(d)
    body, _ = _session(d, about, epoch, OUTCOMES, adds=False)
    return Request("share_acknowledge", d.version("share_acknowledge"), body, about)


# --- the share coordinator ------------------------------------------------------------------------


def _of_state(api: str) -> Callable[[Draw], Request]:
    def draw(d: Draw) -> Request:
        epochs = {
            name: d.pick([0, 0, 1, 2, -1]) if name.endswith("_epoch") else value
            for name, value in requests.SHARE_STATE_FIELDS[api].items()
        }
        body = requests.share_group_state(
            api, d.share_group(), d.topic_id(d.topic()), partition=d.partition(), **epochs
        )
        return Request(api, d.version(api), body)

    draw.__name__ = api
    return draw


OF_GROUPS: list[Callable[[Draw], Request]] = [
    share_group_heartbeat,
    share_group_describe,
    describe_share_group_offsets,
    alter_share_group_offsets,
    delete_share_group_offsets,
    share_fetch,
    share_acknowledge,
]
OF_STATES = [_of_state(api) for api in requests.SHARE_STATE_FIELDS]
REQUESTS = [*OF_GROUPS, *OF_STATES]
