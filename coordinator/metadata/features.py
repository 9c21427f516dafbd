"""Raising and lowering the finalized level of a feature: what is allowed, and in which words.

The features are those of ``metadata.FEATURES``. ``transaction.version`` rules over aborts that the
transaction coordinator makes by itself, and over the form of its records; it takes effect with the
next decision, and open transactions end by the rules that their client's requests name.

Source: ``FeatureControlManager.updateFeature``, ``QuorumFeatures.reasonNotSupported``; KIP-584,
KIP-778.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import structlog

from fencepost.coordinator.errors import InvalidUpdateVersionError
from fencepost.coordinator.metadata.log import MetadataLog

_log = structlog.get_logger(__name__)


class UpgradeType(IntEnum):
    """Which way the sender means to go; anything else is UNKNOWN."""

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
    metadata: MetadataLog,
    updates: Sequence[FeatureUpdate],
    *,
    node_id: int,
    validate_only: bool = False,
) -> None:
    """Check all of ``updates``, then make them, all or none; of one name the last one counts.

    A level that a feature has already is no change, and gets no new epoch. Raises
    InvalidUpdateVersionError.
    """
    wanted = {update.name: update for update in updates}
    for update in wanted.values():
        reason = _reason_against(metadata, update, node_id)
        if reason is not None:
            raise InvalidUpdateVersionError(
                "The update failed for all features since the following feature had an error: "
                f"Invalid update version {update.level} for feature {update.name}. {reason}"
            )
    changed = {
        name: update.level
        for name, update in wanted.items()
        if update.level != metadata.feature_level(name)
    }
    if changed and not validate_only:
        metadata.finalize_features(changed)
        _log.info("features finalized", epoch=metadata.features_epoch, **changed)


def _reason_against(metadata: MetadataLog, update: FeatureUpdate, node_id: int) -> str | None:
    if update.upgrade_type is UpgradeType.UNKNOWN:
        return "The controller does not support the given upgrade type."
    if update.level < 0:
        return "A feature version cannot be less than 0."
    supported = metadata.features.get(update.name)
    if supported is None:
        return f"Local controller {node_id} does not support this feature."
    low, high, current = supported
    if not low <= update.level <= high:
        return f"Local controller {node_id} only supports versions {low}-{high}"
    is_upgrade = update.upgrade_type is UpgradeType.UPGRADE
    if update.level < current and is_upgrade:
        return (
            "Can't downgrade the version of this feature without setting the upgrade type to "
            "either safe or unsafe downgrade."
        )
    if update.level > current and not is_upgrade:
        return "Can't downgrade to a newer version."
    return None
