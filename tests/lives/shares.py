"""Requests of share groups to the group coordinator.

Lives on two brokers leave them out: assignments depend on when the share coordinator has answered.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.lives.draw import Draw, Request
from tests.support import requests
from tests.support.requests import Body

MEMBERS = 3
EPOCHS = (0, 0, 0, -1, 1, 2, 2, 3, 4, 5, -2)


def share_group_heartbeat(d: Draw) -> Request:
    """Draw a heartbeat with a random epoch; one that joins has the topics."""
    epoch = d.pick(EPOCHS)
    names = d.some(d.topic) if epoch == 0 or d.chance(0.2) else None
    body = requests.share_group_heartbeat(
        d.group(),
        f"share-member-{d.rng.randrange(MEMBERS)}" if d.chance(0.95) else d.odd(),
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


REQUESTS: list[Callable[[Draw], Request]] = [
    share_group_heartbeat,
    share_group_describe,
    describe_share_group_offsets,
    alter_share_group_offsets,
    delete_share_group_offsets,
]
