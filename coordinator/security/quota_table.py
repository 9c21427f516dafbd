"""All quotas as they were set; they are kept in the metadata log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.quota_entities import Entity
from fencepost.cluster.records import ClientQuotaRecord, EntityData
from fencepost.coordinator.errors import InvalidRequestError, PolicyViolationError
from fencepost.coordinator.metadata.observed import AnyMetadata

MAX_QUOTAS: Final = 20_000
"""Quotas of all entities, about a kilobyte each: they outlive the clients that they are for."""

Changed = Callable[[Entity, str, float | None], None]
"""Hears of the new value of one quota of an entity, None where it has none any more."""


class QuotaTable:
    """The quotas by entity and key. Nobody else may change them in the metadata log."""

    def __init__(self, metadata: AnyMetadata) -> None:
        self._metadata = metadata
        self._listeners: list[Changed] = []
        self.count = 0
        """Quotas of all entities."""
        self.entities: dict[Entity, dict[str, float]] = {}
        """The quotas of each entity that has any, in the order in which they came."""
        for named, values in metadata.image.quotas.items():
            for key, value in values.items():
                self._put(frozenset(named), key, value)

    def __iter__(self) -> Iterator[tuple[Entity, str, float]]:
        for entity, values in self.entities.items():
            for key, value in values.items():
                yield entity, key, value

    def listen(self, callback: Changed) -> None:
        """Have ``callback`` hear of every change."""
        self._listeners.append(callback)

    def changes(
        self, entity: Entity, wanted: Mapping[str, float | None]
    ) -> dict[str, float | None]:
        """What of ``wanted`` is not so yet."""
        now = self.entities.get(entity, {})
        return {key: value for key, value in wanted.items() if now.get(key) != value}

    def check_room(self, more: int) -> None:
        """Raise PolicyViolationError if that many more quotas do not fit."""
        if more > 0 and self.count + more > MAX_QUOTAS:
            raise PolicyViolationError(f"there may be {MAX_QUOTAS} quotas (MAX_QUOTAS)")

    def change(
        self, entity: Entity, wanted: Mapping[str, float | None]
    ) -> asyncio.Future[None] | None:
        """Set quotas of an entity, or take them away; who calls has checked them.

        Returns what :meth:`fencepost.coordinator.metadata.log.MetadataLog.append` does. Raises
        PolicyViolationError where there are too many, InvalidRequestError, LogError.
        """
        changes = self.changes(entity, wanted)
        if not changes:
            return None
        now = self.entities.get(entity, {})
        self.check_room(
            sum(
                1 if value is not None else -1
                for key, value in changes.items()
                if (key in now) is (value is None)
            )
        )
        named = tuple(EntityData(*one) for one in sorted(entity, key=lambda one: one[0]))
        records = [
            ClientQuotaRecord(named, key, value or 0.0, remove=value is None)
            for key, value in changes.items()
        ]
        if reason := self._metadata.reason_against(records[0]):
            raise InvalidRequestError(reason)
        holds = self._metadata.append(records)
        if holds is not None:
            return holds  # and :meth:`follow` hears of it
        for key, value in changes.items():
            self._put(entity, key, value)
            for listener in self._listeners:
                listener(entity, key, value)
        return None

    def follow(self, old: MetadataImage, new: MetadataImage) -> None:
        """Go by the quotas of another image: the controller has changed them."""
        if old.quotas is new.quotas:
            return
        for named in old.quotas.keys() | new.quotas.keys():
            before, after = old.quotas.get(named, {}), new.quotas.get(named, {})
            for key in before.keys() | after.keys():
                if before.get(key) != after.get(key):
                    self._put(frozenset(named), key, after.get(key))
                    for listener in self._listeners:
                        listener(frozenset(named), key, after.get(key))

    def _put(self, entity: Entity, key: str, value: float | None) -> None:
        values = self.entities.setdefault(entity, {})
        self.count -= len(values)
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
        self.count += len(values)
        if not values:
            del self.entities[entity]
