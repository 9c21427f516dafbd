"""Changes of the finalized level of a feature: which are allowed, and Kafka's error messages.

Source: ``FeatureControlManager.updateFeatures``, ``QuorumFeatures.reasonNotSupported``; KIP-584,
KIP-778, KIP-966.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Final

from fencepost.cluster.controller.activation import (
    ELR_VERSION,
    METADATA_VERSION,
    MIN_INSYNC_REPLICAS,
)
from fencepost.cluster.controller.errors import InvalidUpdateVersionError
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import BROKER_RESOURCE
from fencepost.cluster.records import ConfigRecord, FeatureLevelRecord, MetadataRecord
from fencepost.logcore.machine import Event
from fencepost.logcore.values import dataclass

_CHANGES_METADATA: Final = frozenset({30, 32, 33})
"""The supported levels of ``metadata.version`` that add records or fields: a downgrade below such a
level is refused."""


class UpgradeType(IntEnum):
    """The direction of the update; an unknown number is UNKNOWN."""

    UNKNOWN = 0
    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


@dataclass(frozen=True, slots=True)
class FeatureUpdate:
    """Give feature ``name`` the finalized ``level``; 0 turns it off."""

    name: str
    level: int
    upgrade_type: UpgradeType = UpgradeType.UPGRADE


def update_features(
    view: ControllerView, updates: Sequence[FeatureUpdate], *, validate_only: bool = False
) -> ControllerResult[Mapping[str, int]]:
    """Check all ``updates``, then make all or none; the last update of a feature counts.

    A level that the feature already has is not a change; the answer contains only changed levels.
    With ``validate_only`` nothing changes. Raises InvalidUpdateVersionError.
    """
    by_name = {update.name: update for update in updates}
    for update in by_name.values():
        error = _error_of(view, update)
        if error is not None:
            raise InvalidUpdateVersionError(
                "The update failed for all features since the following feature had an error: "
                f"{error}"
            )
    changed = {
        name: update.level
        for name, update in by_name.items()
        if update.level != view.image.features.get(name, 0)
    }
    if validate_only:
        return ControllerResult(changed)
    records: list[MetadataRecord] = []
    if changed.get(ELR_VERSION):
        records += _unify_min_isr(view)
    records += [FeatureLevelRecord(name, level) for name, level in changed.items()]
    events = [
        Event(
            "feature-finalized",
            name,
            {"from": view.image.features.get(name, 0), "to": level, "cause": "UpdateFeatures"},
        )
        for name, level in changed.items()
    ]
    return ControllerResult(changed, tuple(records), events=tuple(events))


def _error_of(view: ControllerView, update: FeatureUpdate) -> str | None:
    reason = next(_reasons_against(view, update), None)
    if reason is not None:
        return f"Invalid update version {update.level} for feature {update.name}. {reason}"
    current = view.image.features.get(update.name, 0)
    if update.name != METADATA_VERSION or not any(
        update.level < level <= current for level in _CHANGES_METADATA
    ):
        return None
    reason = (
        "Unsafe metadata downgrade is not supported in this version."
        if update.upgrade_type is UpgradeType.UNSAFE_DOWNGRADE
        else "Refusing to perform the requested downgrade because it might delete metadata "
        "information."
    )
    return f"Unsupported metadata.version downgrade from {current} to {update.level}. {reason}"


def _reasons_against(view: ControllerView, update: FeatureUpdate) -> Iterator[str]:
    if update.upgrade_type is UpgradeType.UNKNOWN:
        yield "The controller does not support the given upgrade type."
    if update.level < 0:
        yield "A feature version cannot be less than 0."
    controller = f"Local controller {view.settings.node_id}"
    yield from _unsupported(controller, view.settings.features.get(update.name), update.level)
    for broker in view.image.brokers.values():
        supported = broker.features.get(update.name, None if update.level else (0, 0))
        yield from _unsupported(f"Broker {broker.broker_id}", supported, update.level)
    for registration in view.image.controllers.values():
        if registration.controller_id != view.settings.node_id:
            ranges = {
                feature.name: (feature.min_supported_version, feature.max_supported_version)
                for feature in registration.features
            }
            supported = ranges.get(update.name, None if update.level else (0, 0))
            yield from _unsupported(
                f"Controller {registration.controller_id}", supported, update.level
            )
    current = view.image.features.get(update.name, 0)
    is_upgrade = update.upgrade_type is UpgradeType.UPGRADE
    if update.level < current and is_upgrade:
        yield (
            "Can't downgrade the version of this feature without setting the upgrade type to "
            "either safe or unsafe downgrade."
        )
    if update.level > current and not is_upgrade:
        yield "Can't downgrade to a newer version."


def _unsupported(node: str, supported: tuple[int, int] | None, level: int) -> Iterator[str]:
    if supported is None:
        yield f"{node} does not support this feature."
    elif not supported[0] <= level <= supported[1]:
        yield f"{node} only supports versions {supported[0]}-{supported[1]}"


def _unify_min_isr(view: ControllerView) -> Iterator[ConfigRecord]:
    """Yield records that give all brokers one ``min.insync.replicas``, as ELRs require."""
    configs = view.image.configs
    if MIN_INSYNC_REPLICAS not in configs.get((BROKER_RESOURCE, ""), {}):
        value = view.settings.topic_defaults.get(MIN_INSYNC_REPLICAS, "1")
        yield ConfigRecord(BROKER_RESOURCE, "", MIN_INSYNC_REPLICAS, value)
    for (kind, name), values in configs.items():
        if kind == BROKER_RESOURCE and name and MIN_INSYNC_REPLICAS in values:
            yield ConfigRecord(kind, name, MIN_INSYNC_REPLICAS, None)
