"""Checks the results of requested changes of users, quotas and ACLs.

Any broker may change these entries while other brokers and tools change them, too. Each transaction
is checked: a broker changes only the entries that it was asked to change, and creates a change
notification in the same transaction. If a change was acknowledged, it must have been in ZooKeeper
at some time since the request, and it must be in the broker's image. Znodes are compared as text,
so a broker must also keep the entries that it does not understand.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.records import ClientQuotaRecord, UserScramCredentialRecord
from fencepost.coordinator.zookeeper import access_znodes
from tests.sim.invariants import BrokenInvariantError
from tests.sim.zk_server import Change, Tree

ENTITIES: Final = ("/config/users/", "/config/clients/", "/config/ips/")
RULES: Final = ("/kafka-acl/", "/kafka-acl-extended/prefixed/")
NOTED: Final = {
    "/kafka-acl/": "/kafka-acl-changes/",
    "/kafka-acl-extended/": "/kafka-acl-extended-changes/",
    "/config/": "/config/changes/",
}
"""The folder of change notifications, by the prefix of the changed path."""


class Item(NamedTuple):
    """One entry of a znode."""

    path: str
    key: str
    """The name of a setting, or the whole text of an ACL."""
    value: str | None
    """None if the entry must not exist."""


def held(path: str, data: bytes | None) -> dict[str, str]:
    """Return the entries of a znode; unreadable data is one entry with an empty key."""
    if not data:
        return {}
    try:
        value = json.loads(data)
        if path.startswith(RULES):
            return {json.dumps(acl, sort_keys=True): "" for acl in value["acls"]}
        return dict(value["config"])
    except (KeyError, ValueError, TypeError):
        return {"": data.decode()}


def written(path: str, items: Mapping[str, str]) -> bytes:
    """Return the data of a znode with these entries."""
    if path.startswith(RULES):
        return json.dumps({"version": 1, "acls": [json.loads(item) for item in items]}).encode()
    return json.dumps({"version": 1, "config": dict(items)}).encode()


@dataclass(slots=True, eq=False)
class Asked:
    """A change that a client has requested from a broker."""

    who: str
    item: Item
    change: access_znodes.SecurityChange
    was_there: bool = False
    """Whether ZooKeeper has had the change at some time since its request."""
    is_untouched: bool = False
    """Whether the entry has not changed since ZooKeeper last had the requested change."""
    overtaken: Sequence[Asked] = ()
    """Earlier requests to this broker for other values of the entry; one write may cover both."""

    def is_so(self) -> None:
        """Record that ZooKeeper has the change."""
        self.was_there = self.is_untouched = True
        for request in self.overtaken:
            request.was_there, request.is_untouched = True, False


class AccessTruth:
    """The users, quotas and ACLs in ZooKeeper, checked with each transaction."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.items: dict[str, dict[str, str]] = {}
        """The entries of the znodes, by path."""
        self._asked: list[Asked] = []

    # --- changes ---

    def asks(self, who: str, path: str, key: str, value: str, *, is_removed: bool) -> Asked:
        """Add a request for a change to a broker; return it."""
        (record,) = access_znodes.records_of(path, written(path, {key: value}))
        item = Item(path, key, None if is_removed else value)
        asked = Asked(who, item, access_znodes.SecurityChange(record, is_removed))
        asked.overtaken = [
            request
            for request in self._asked
            if (request.who, request.item.path, request.item.key) == (who, path, key)
            and request.item != item
        ]
        if self._is_so(item):
            asked.is_so()
        self._asked.append(asked)
        return asked

    def acknowledged(self, asked: Asked, image: MetadataImage) -> None:
        """Check a change that a broker has acknowledged."""
        self._asked.remove(asked)
        if not asked.was_there:
            raise BrokenInvariantError(f"{asked.who} has not done {asked.item}, and says so")
        wanted = None if asked.change.is_removed else _value(asked.change.record)
        if asked.is_untouched and _known(image, asked.change.record) != wanted:
            raise BrokenInvariantError(f"{asked.who} does not know what it has done: {asked.item}")

    def _is_so(self, item: Item) -> bool:
        return self.items.get(item.path, {}).get(item.key) == item.value

    # --- transactions ---

    def committed(self, who: str, changes: Sequence[Change], *, is_broker: bool) -> None:
        """Check a committed transaction."""
        for change in changes:
            if not change.path.startswith((*ENTITIES, *RULES)):
                continue
            before = self.items.get(change.path, {})
            after = {} if change.kind == "delete" else held(change.path, change.data)
            self.items[change.path] = after
            touched = {
                Item(change.path, key, after.get(key))
                for key in before.keys() | after.keys()
                if before.get(key) != after.get(key)
            }
            if is_broker and touched:
                self._check(who, change.path, touched, changes)
            for asked in self._asked:
                if asked.item.path == change.path:
                    self._look_at(asked, touched)

    def _look_at(self, asked: Asked, touched: set[Item]) -> None:
        is_so = self._is_so(asked.item)
        if is_so and not asked.was_there:
            asked.is_so()
        elif any(item.key == asked.item.key for item in touched):
            asked.is_untouched = False

    def _check(self, who: str, path: str, touched: set[Item], changes: Sequence[Change]) -> None:
        wanted = {request.item for request in self._asked if request.who == who}
        if other := touched - wanted:
            raise BrokenInvariantError(f"{who} was not asked for {sorted(map(str, other))}")
        folder = next(to for start, to in NOTED.items() if path.startswith(start))
        if not any(
            change.kind == "create" and change.path.startswith(folder) for change in changes
        ):
            raise BrokenInvariantError(f"{who} tells nobody of {path}")

    # --- the end ---

    def different(self, image: MetadataImage) -> list[str]:
        """Return a message for each difference between a broker's image and ZooKeeper."""
        truth: dict[Hashable, object] = {}
        for path, node in self._tree.nodes.items():
            if path.startswith((*ENTITIES, *RULES)):
                for record in access_znodes.records_of(path, node.data):
                    truth[_place(record)] = _value(record)
        known: dict[Hashable, object] = {**image.scram, **image.acls}
        known |= {
            (entity, key): value
            for entity, values in image.quotas.items()
            for key, value in values.items()
        }
        return [
            f"{place}: {known.get(place)} for {truth.get(place)}"
            for place in {**truth, **known}
            if known.get(place) != truth.get(place)
        ]


def _place(record: access_znodes.AccessRecord) -> Hashable:
    """Return the key of a record in an image."""
    match record:
        case UserScramCredentialRecord():
            return record.name, record.mechanism
        case ClientQuotaRecord():
            entity = tuple(
                (component.entity_type, component.entity_name) for component in record.entity
            )
            return entity, record.key
        case _:
            return record.id


def _value(record: access_znodes.AccessRecord) -> object:
    return record.value if isinstance(record, ClientQuotaRecord) else record


def _known(image: MetadataImage, record: access_znodes.AccessRecord) -> object:
    match record:
        case UserScramCredentialRecord():
            return image.scram.get((record.name, record.mechanism))
        case ClientQuotaRecord():
            entity = tuple(
                (component.entity_type, component.entity_name) for component in record.entity
            )
            return image.quotas.get(entity, {}).get(record.key)
        case _:
            return image.acls.get(record.id)
