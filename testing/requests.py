"""A request as a test sees it, and the rules that select requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.schema import all_fields, message_class

_TOPIC_LISTS = frozenset({"topics", "topic_data", "topic_names", "topic_partitions"})
_GROUP_FIELDS = frozenset({"group_id", "groups_names", "group_ids"})
_ID_FIELDS = frozenset({"transactional_id", "transactional_ids"})
_PARTITION_LISTS = frozenset({"partitions", "partition_data", "partition_indexes"})
_NAMES = ("name", "topic", "topic_name")
_INDEXES = ("partition_index", "partition", "index")
FETCH_BY_ID = 13
"""From this version on a Fetch names topics by their ids."""
_FIND = ApiKey.FIND_COORDINATOR


class SeenRequest:
    """A request that has arrived: its API, its client, and the names in it."""

    def __init__(self, ctx: Context) -> None:
        self.api_key = ctx.api_key
        self.api: str = APIS[ctx.api_key].name
        self.version = ctx.version
        self.client_id = ctx.client_id
        self.client_host = ctx.peer_host
        self.broker = ctx.broker.node_id
        """The id of the broker that received the request."""
        self.body: Any = ctx.body
        """The decoded request, an instance of kio's class, with all its fields."""
        self._ctx = ctx

    def __repr__(self) -> str:
        return f"{self.api} v{self.version} of {self.client_id}"

    def values(self, *names: str) -> list[Any]:
        """Return the values of all fields with these names (kio's: ``partition_index``)."""
        return list(_values(self.body, frozenset(names)))

    @cached_property
    def topics(self) -> list[str]:
        """The topics that the request names, by name or by id."""
        all_names = dict.fromkeys(_topics(self.body, inside=False))
        ids = [topic_id for topic_id in self.values("topic_id") if topic_id is not None]
        if ids:
            names = {
                topic.topic_id: topic.name for topic in self._ctx.broker.metadata.topics.values()
            }
            all_names |= dict.fromkeys(names[topic_id] for topic_id in ids if topic_id in names)
        return list(all_names)

    @cached_property
    def partitions(self) -> frozenset[tuple[str, int]]:
        """The partitions that the request names, as (topic, index).

        While a Fetch is handled, they include the partitions of its session.
        """
        if self.api_key == ApiKey.FETCH:
            return frozenset(place for _, place in fetched_partitions(self._ctx))
        return frozenset(_places(self._ctx, self.body))

    @cached_property
    def groups(self) -> list[str]:
        """The groups that the request names."""
        if self.api_key == _FIND:
            return self._coordinators(0)
        names = _flat(self.values(*_GROUP_FIELDS))
        if self.api_key == ApiKey.DESCRIBE_GROUPS:
            names += self.body.groups
        return names

    @cached_property
    def transactional_ids(self) -> list[str]:
        """The transactional ids that the request names."""
        if self.api_key == _FIND:
            return self._coordinators(1)
        return _flat(self.values(*_ID_FIELDS))

    def _coordinators(self, key_type: int) -> list[str]:
        if getattr(self.body, "key_type", 0) != key_type:
            return []
        return _flat(self.values("key", "coordinator_keys"))


def topic_name(ctx: Context, topic: Any) -> tuple[object, str]:
    """Return a topic's key in a message (its name or its id), and the topic's name.

    The name of an unknown id is empty.
    """
    topic_id = getattr(topic, "topic_id", None)
    if topic_id is not None:
        image = ctx.broker.metadata.topic_by_id(topic_id)
        return topic_id, "" if image is None else image.name
    name = next((image for attribute in _NAMES if (image := getattr(topic, attribute, None))), "")
    return name, str(name)


def index_of(partition: Any) -> int:
    """Return a partition's index; in some messages the entry of a partition is just its index."""
    if isinstance(partition, int):
        return partition
    return next(
        (
            found
            for attribute in _INDEXES
            if type(found := getattr(partition, attribute, None)) is int
        ),
        -1,
    )


def _places(ctx: Context, entity: Any) -> Iterator[tuple[str, int]]:
    for info in fields(entity):
        value = getattr(entity, info.name)
        if info.name in _PARTITION_LISTS and (name := topic_name(ctx, entity)[1]):
            yield from ((name, index_of(item)) for item in value or ())
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from _places(ctx, item)


def fetched_partitions(ctx: Context) -> Iterator[tuple[object, tuple[str, int]]]:
    """Yield the partitions of a Fetch, including those that its session already has.

    Each comes with its topic's key, a name or an id.
    """
    seen = set()
    for topic in ctx.body.topics:
        key, name = topic_name(ctx, topic)
        for part in topic.partitions:
            seen.add((key, part.partition))
            yield key, (name, part.partition)
    with suppress(AttributeError, DomainError):
        session = ctx.broker.fetches.sessions.resume(
            ctx.body.session_id,
            ctx.body.session_epoch,
            by_topic_id=bool(ctx.version >= FETCH_BY_ID),
        )
        gone = {
            (topic_name(ctx, topic)[0], index)
            for topic in ctx.body.forgotten_topics_data
            for index in topic.partitions
        }
        for key, index in session.partitions:
            if (key, index) not in seen and (key, index) not in gone:
                requested = (
                    SimpleNamespace(name=key)
                    if isinstance(key, str)
                    else SimpleNamespace(topic_id=key)
                )
                yield key, (topic_name(ctx, requested)[1], index)


def finished(result: Any) -> Work[Any]:
    """Return a handler's response, which may still be a generator or an awaitable."""
    while True:
        if hasattr(result, "send") and hasattr(result, "gi_frame"):
            result = yield from result
        elif hasattr(type(result), "__await__"):
            future = asyncio.ensure_future(result)
            if not future.done():
                yield future
            result = future.result()
        else:
            return result


_ABOUT = frozenset({"broker", "client_id", "client_host", "version", "api"})
_NAMED = frozenset({"topic", "group", "group_id", "transactional_id"})


def check_fields(names: Collection[str], key: ApiKey | None) -> None:
    """Raise ValueError for a field that the request has in no version.

    Without ``key`` the field must occur in the request of some API.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"match: a field's name is a str, not {name!r}")
    fields = set(names) - _ABOUT - _NAMED
    if not fields:
        return
    fields_known = set[str]()
    for api in APIS.values() if key is None else [APIS[key]]:
        for version in range(api.max_version, api.min_version - 1, -1):
            fields_known.update(_names(message_class(api.key, version, "request")))
            if fields <= fields_known:
                return
    unknown, there = sorted(fields - fields_known), sorted({*fields_known, *_ABOUT, *_NAMED})
    hint = nearest(unknown[0], there)
    if not hint and key is not None:
        hint = f"; there are {', '.join(there)}"
    has = "no API has" if key is None else f"{APIS[key].name} has no"
    raise ValueError(f"match: {has} field {', '.join(unknown)}{hint}")


def _names(cls: type) -> Iterator[str]:
    for info in all_fields(cls):
        yield info.name
        if info.struct is not None:
            yield from _names(info.struct)


def matcher(match: Callable[[SeenRequest], object] | Mapping[str, object] | None) -> Any:
    """Return a predicate for a test's ``match`` argument."""
    if match is None:
        return lambda _request: True
    if not callable(match) and not isinstance(match, Mapping):
        raise TypeError(f"match is a function of the request, or fields by name, not {match!r}")
    if callable(match):
        return match
    rules = dict(match)
    return lambda request: all(_has(request, name, value) for name, value in rules.items())


def _has(request: SeenRequest, name: str, expected: object) -> bool:
    match name:
        case _ if name in _ABOUT:
            values = [getattr(request, name)]
        case "topic":
            values = request.topics
        case "group" | "group_id":
            values = request.groups
        case "transactional_id":
            values = request.transactional_ids
        case _:
            values = _flat(request.values(name))
    if isinstance(expected, (list, tuple, set, frozenset)):
        return any(value in expected for value in values)
    return expected in values


def _flat(values: Collection[Any]) -> list[Any]:
    """Return the values without nulls, with lists replaced by their elements."""
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, tuple) else (value,)
    return [value for value in flat if value is not None]


def _values(entity: Any, names: frozenset[str]) -> Iterator[Any]:
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.name in names:
            yield value
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from _values(item, names)


def _topics(entity: Any, *, inside: bool) -> Iterator[str]:
    """Yield the names in all lists of topics."""
    for field in fields(entity):
        value = getattr(entity, field.name)
        is_list = field.name in _TOPIC_LISTS
        if inside and field.name in {"name", "topic", "topic_name"} and value:
            yield value
        for item in value if isinstance(value, tuple) else (value,):
            if is_dataclass(item):
                yield from _topics(item, inside=is_list)
            elif is_list and isinstance(item, str):
                yield item
