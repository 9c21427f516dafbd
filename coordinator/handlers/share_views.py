"""DescribeConfigs entries that show the in-flight records of share partitions.

``fencepost groups describe`` and ``groups blame`` show what the leader of a partition knows about
the members of a share group, and Kafka has no API for that. A client sends the leader a
DescribeConfigs request for the group that names the key
``fencepost.share.partition/TOPIC/PARTITION``. The leader returns the in-flight records as read-only
JSON. An empty object means that the broker does not have the share partition in memory. A response
contains such a key only if the request names it. Apache Kafka leaves out keys that it does not
know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.config.broker_config import ConfigSource, ConfigType
from fencepost.coordinator.handlers import Context
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.session import SessionKey
from fencepost.groups.share.view import view_of
from fencepost.protocol import Entity
from fencepost.protocol.steps import Steps

PREFIX: Final = "fencepost.share.partition/"
"""The prefix of a share partition's key; ``TOPIC/PARTITION`` follows."""


def entries(ctx: Context, group: str, names: Iterable[str]) -> Steps[tuple[Entity, ...]]:
    """Return an entry for each key of a share partition that the client may describe."""
    views: list[Entity] = []
    for name in names:
        topic, _, index = name.removeprefix(PREFIX).rpartition("/")
        if not name.startswith(PREFIX) or not index.isdecimal():
            continue
        if ctx.may(Operation.DESCRIBE, ResourceType.GROUP, group) and ctx.may(
            Operation.DESCRIBE, ResourceType.TOPIC, topic
        ):
            value = json.dumps(_view(ctx, group, topic, int(index)))
            doc = "In-flight records of a share partition, as JSON."
            views.append(view_entry(ctx, name, value, doc))
        yield
    return tuple(views)


def _view(ctx: Context, group: str, topic: str, index: int) -> dict[str, Any]:
    image = ctx.broker.metadata.topic(topic)
    if image is None or not ctx.broker.has_shares:
        return {}
    shares = ctx.broker.shares
    served = shares.get(SharePartitionKey(group, image.topic_id.bytes, index))
    if served is None:
        return {}
    view = view_of(served.share)
    fields: dict[str, Any] = {**view._asdict(), "high_watermark": served.log.high_watermark}
    if view.first_open is not None:
        fields["first_open"] = first = view.first_open._asdict()
        if view.first_open.member is not None:
            client = shares.clients.of(SessionKey(group, view.first_open.member))
            first["client_id"] = None if client is None else client.client_id
            first["client_host"] = None if client is None else client.client_host
    return fields


def view_entry(ctx: Context, name: str, value: str, doc: str) -> Entity:
    """Return a read-only entry of DescribeConfigs for a value that is not a setting."""
    has_doc = getattr(ctx.body, "include_documentation", False)
    return ctx.respond.DescribeConfigsResourceResult(
        name=name,
        value=value,
        read_only=True,
        is_sensitive=False,
        config_source=ConfigSource.DEFAULT,
        synonyms=(),
        config_type=ConfigType.STRING,
        documentation=doc if has_doc else None,
    )
