"""Finalized levels of features, and their changes (KIP-584)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fencepost.client.queries.session import check

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
"""``UpgradeType`` of UpdateFeatures from version 1 on."""


def feature_levels(session: ClusterSession) -> list[dict[str, object]]:
    """Return each supported feature with its finalized level and its range of levels."""
    answer = session.client.call(
        "ApiVersions", client_software_name="fencepost", client_software_version="0"
    )
    finalized = {feature.name: feature.max_version_level for feature in answer.finalized_features}
    return [
        {
            "feature": feature.name,
            "finalized": finalized.get(feature.name, 0),
            "lowest": feature.min_version,
            "highest": feature.max_version,
            "epoch": answer.finalized_features_epoch,
        }
        for feature in sorted(answer.supported_features, key=lambda feature: str(feature.name))
    ]


def finalized_levels(session: ClusterSession) -> dict[str, int]:
    """Return the finalized level of each supported feature."""
    return {str(row["feature"]): int(str(row["finalized"])) for row in feature_levels(session)}


def update_features(
    session: ClusterSession,
    levels: Mapping[str, int],
    now: Mapping[str, int],
    lower: int,
    *,
    validate_only: bool = False,
) -> None:
    """Set finalized levels. Raises ApiError.

    ``lower`` is the upgrade type for levels that are lower than ``now``.
    """
    answer = session.client.call(
        "UpdateFeatures",
        to_node=session.controller,
        check=False,
        entity=lambda make: make.message(
            timeout=session.timeout_ms,
            feature_updates=[
                make.FeatureUpdateKey(
                    feature=name,
                    max_version_level=level,
                    upgrade_type=lower if level < now.get(name, 0) else UPGRADE,
                )
                for name, level in levels.items()
            ],
            validate_only=validate_only,
        ),
    )
    check(answer.error_code, "UpdateFeatures", None, answer.error_message)
