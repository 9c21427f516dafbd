"""Requests of share groups: to the group coordinator, the leaders and the share coordinator.

Lives on two brokers omit these requests, because assignments depend on when the share coordinator
responds. ``tests/oracle/traces_share.py`` has random share sessions on two brokers.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.lives.draw import Draw, Request
from tests.support import requests
from tests.support.requests import Body

MEMBERS = 3
EPOCHS = (0, 0, 0, -1, 1, 2, 2, 3, 4, 5, -2)


def share_group_heartbeat(d: Draw) -> Request:
    """Draw a heartbeat with a random epoch. If the epoch joins, the heartbeat has the topics."""
    epoch = d.pick(EPOCHS)
    names = d.some(d.topic) if epoch == 0 or d.chance(0.2) else None
    body = requests.share_group_heartbeat(
        d.group(),
        _share_member(d),
        epoch,
        rack_id=d.pick(["", "rack"]) if d.chance(0.03) else None,
        subscribed_topic_names=names,
    )
    return Request("share_group_heartbeat", d.version("share_group_heartbeat"), body)


def share_group_describe(d: Draw) -> Request:
    names = d.some(d.group)
    body = requests.share_group_describe(*names, include_authorized_operations=d.chance(0.2))
    return Request("share_group_describe", d.version("share_group_describe"), body)


def _partitions(d: Draw) -> list[int]:
    return [d.partition() for _ in range(d.rng.randint(0, 2))]


def describe_share_group_offsets(d: Draw) -> Request:
    def group() -> Body:
        named = d.some(lambda: {"topic_name": d.topic(), "partitions": _partitions(d)})
        return {"group_id": d.group(), "topics": None if d.chance(0.3) else named}

    version = d.version("describe_share_group_offsets")
    return Request("describe_share_group_offsets", version, {"groups": d.some(group)})


def alter_share_group_offsets(d: Draw) -> Request:
    offsets = {index: d.pick([0, 1, 7, -5, 10**6]) for index in _partitions(d)}
    body = requests.alter_share_group_offsets(d.group(), d.topic(), offsets)
    return Request("alter_share_group_offsets", d.version("alter_share_group_offsets"), body)


def delete_share_group_offsets(d: Draw) -> Request:
    body = requests.delete_share_group_offsets(d.group(), *d.some(d.topic))
    return Request("delete_share_group_offsets", d.version("delete_share_group_offsets"), body)


def _share_member(d: Draw) -> str:
    return f"share-member-{d.rng.randrange(MEMBERS)}" if d.chance(0.95) else d.odd()


def _acknowledged(d: Draw) -> Body:
    """Draw up to three acknowledged ranges of a partition, mostly of valid types."""

    def batch() -> Body:
        first = d.pick([0, 0, 1, 2, 5, -1])
        last = first + d.pick([0, 0, 1, 4, -1])
        count = d.pick([1, 1, last - first + 1, 0])
        types = [d.pick([0, 1, 1, 2, 2, 3, 4, 5]) for _ in range(max(count, 0))]
        return {"first_offset": first, "last_offset": last, "acknowledge_types": types}

    batches = d.some(batch) if d.chance(0.5) else []
    return {"partition_index": d.partition(), "acknowledgement_batches": batches}


def _of_sessions(d: Draw) -> Body:
    def topic() -> Body:
        return {
            "topic_id": d.topic_id(d.topic()),
            "partitions": d.some(lambda: _acknowledged(d)),
        }

    return {
        "group_id": d.group(),
        "member_id": _share_member(d),
        "share_session_epoch": d.pick(EPOCHS),
        "is_renew_ack": d.chance(0.05),
        "topics": d.some(topic),
    }


def share_fetch(d: Draw) -> Request:
    """Draw a fetch that opens a session, or has a random session epoch."""

    def forgotten() -> Body:
        return {"topic_id": d.topic_id(d.topic()), "partitions": _partitions(d)}

    body = {
        **_of_sessions(d),
        "max_wait": d.pick([0, 0, 10, 50, -1]),
        "min_bytes": d.pick([0, 1, 1000]),
        "max_bytes": d.pick([0, 1, 1 << 20, 1 << 20]),
        "max_records": d.pick([0, 1, 10, 500, -1]),
        "batch_size": d.pick([0, 1, 500]),
        "share_acquire_mode": d.pick([0, 0, 1, 1, 2]),
        "forgotten_topics_data": d.some(forgotten) if d.chance(0.2) else [],
    }
    return Request("share_fetch", d.version("share_fetch"), body)


def share_acknowledge(d: Draw) -> Request:
    version = d.version("share_acknowledge")
    return Request("share_acknowledge", version, _of_sessions(d))


def _of_state(api: str) -> Callable[[Draw], Request]:
    def draw(d: Draw) -> Request:
        epochs = {
            name: d.pick([0, 0, 1, 2, -1]) if name.endswith("_epoch") else value
            for name, value in requests.SHARE_STATE_FIELDS[api].items()
        }
        body = requests.share_group_state(
            api, d.group(), d.topic_id(d.topic()), partition=d.partition(), **epochs
        )
        return Request(api, d.version(api), body)

    draw.__name__ = api
    return draw


REQUESTS: list[Callable[[Draw], Request]] = [
    share_group_heartbeat,
    share_group_describe,
    describe_share_group_offsets,
    alter_share_group_offsets,
    delete_share_group_offsets,
    share_fetch,
    share_acknowledge,
    *(_of_state(api) for api in requests.SHARE_STATE_FIELDS),
]
