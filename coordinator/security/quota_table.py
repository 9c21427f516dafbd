"""All client quotas of the metadata image, by entity and key.

Source: ``ClientQuotaMetadataManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.quota_entities import Entity
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.background import swallow

Changed = Callable[[Entity, str, float | None], None]
"""Called with an entity, a key and the new value, which is None for a deleted quota."""


class QuotaTable:
    """The quotas by entity and key, which are updated with every image."""

    def __init__(self, metadata: Metadata) -> None:
        self._listeners: list[Changed] = []
        self.count = 0
        """The number of quotas of all entities."""
        self.entities: dict[Entity, dict[str, float]] = {}
        """The quotas of each entity with quotas, in order of creation."""
        for named, values in metadata.image.quotas.items():
            for key, value in values.items():
                self._put(frozenset(named), key, value)
        metadata.subscribe(Subscriber.QUOTAS, self.follow)

    def __iter__(self) -> Iterator[tuple[Entity, str, float]]:
        for entity, values in self.entities.items():
            for key, value in values.items():
                yield entity, key, value

    def listen(self, callback: Changed) -> None:
        """Call ``callback`` with every change; an exception in it is logged."""
        self._listeners.append(callback)

    def follow(self, old: MetadataImage, new: MetadataImage) -> None:
        """Apply the quotas of the ``new`` image."""
        if old.quotas is new.quotas:
            return
        # Images share the values of unchanged entities.
        before, after = set(map(id, old.quotas.values())), set(map(id, new.quotas.values()))
        changed = [entity for entity, values in new.quotas.items() if id(values) not in before]
        changed += [
            entity
            for entity, values in old.quotas.items()
            if id(values) not in after and entity not in new.quotas
        ]
        for named in changed:
            self._follow(frozenset(named), old.quotas.get(named, {}), new.quotas.get(named, {}))

    def _follow(
        self, entity: Entity, before: Mapping[str, float], after: Mapping[str, float]
    ) -> None:
        for key in {**before, **after}:
            value = after.get(key)
            if before.get(key) != value:
                self._put(entity, key, value)
                for listener in self._listeners:
                    with swallow("follow a quota", entity=dict(entity), key=key):
                        listener(entity, key, value)

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
