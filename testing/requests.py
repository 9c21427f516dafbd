"""A request as a test sees it, and the rules that select requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any

from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.handlers import Context
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.schema import all_fields, message_class

_TOPIC_LISTS = frozenset({"topics", "topic_data", "topic_names", "topic_partitions"})
_GROUP_FIELDS = frozenset({"group_id", "groups_names", "group_ids"})
_ID_FIELDS = frozenset({"transactional_id", "transactional_ids"})
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
        self._broker = ctx.broker

    def __repr__(self) -> str:
        return f"{self.api} v{self.version} of {self.client_id}"

    def values(self, *names: str) -> list[Any]:
        """Return the values of all fields with these names (kio's: ``partition_index``)."""
        return list(_values(self.body, frozenset(names)))

    @cached_property
    def topics(self) -> list[str]:
        """The topics that the request names, also by their ids."""
        found = dict.fromkeys(_topics(self.body, inside=False))
        ids = [one for one in self.values("topic_id") if one is not None]
        if ids:
            names = {one.topic_id: one.name for one in self._broker.metadata.topics.values()}
            found |= dict.fromkeys(names[one] for one in ids if one in names)
        return list(found)

    @cached_property
    def groups(self) -> list[str]:
        """The groups that the request names."""
        if self.api_key == _FIND:
            return self._coordinators(0)
        found = _flat(self.values(*_GROUP_FIELDS))
        if self.api_key == ApiKey.DESCRIBE_GROUPS:
            found += self.body.groups
        return found

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


_ABOUT = frozenset({"broker", "client_id", "client_host", "version", "api"})
_NAMED = frozenset({"topic", "group", "group_id", "transactional_id"})


def check_fields(names: Collection[str], key: ApiKey | None) -> None:
    """Raise ValueError for a field that the request has in no version.

    Without ``key`` the field must occur in the request of some API.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"match: a field's name is a str, not {name!r}")
    asked = set(names) - _ABOUT - _NAMED
    if not asked:
        return
    known = set[str]()
    for api in APIS.values() if key is None else [APIS[key]]:
        for version in range(api.max_version, api.min_version - 1, -1):
            known.update(_names(message_class(api.key, version, "request")))
            if asked <= known:
                return
    unknown, there = sorted(asked - known), sorted({*known, *_ABOUT, *_NAMED})
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


def _has(request: SeenRequest, name: str, wanted: object) -> bool:
    match name:
        case _ if name in _ABOUT:
            found = [getattr(request, name)]
        case "topic":
            found = request.topics
        case "group" | "group_id":
            found = request.groups
        case "transactional_id":
            found = request.transactional_ids
        case _:
            found = _flat(request.values(name))
    if isinstance(wanted, (list, tuple, set, frozenset)):
        return any(one in wanted for one in found)
    return wanted in found


def _flat(values: Collection[Any]) -> list[Any]:
    """Return the values without nulls, with lists replaced by their elements."""
    flat: list[Any] = []
    for one in values:
        flat += one if isinstance(one, tuple) else (one,)
    return [one for one in flat if one is not None]


def _values(entity: Any, names: frozenset[str]) -> Iterator[Any]:
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.name in names:
            yield value
        for one in value if isinstance(value, tuple) else (value,):
            if is_dataclass(one):
                yield from _values(one, names)


def _topics(entity: Any, *, inside: bool) -> Iterator[str]:
    """Yield the names in all lists of topics."""
    for field in fields(entity):
        value = getattr(entity, field.name)
        is_list = field.name in _TOPIC_LISTS
        if inside and field.name in {"name", "topic", "topic_name"} and value:
            yield value
        for one in value if isinstance(value, tuple) else (value,):
            if is_dataclass(one):
                yield from _topics(one, inside=is_list)
            elif is_list and isinstance(one, str):
                yield one
