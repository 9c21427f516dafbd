"""UpdateFeatures (57): raise and lower the finalized level of features (KIP-584, KIP-778).

Versions: 0 has a flag that allows a downgrade, 1 the type of the upgrade and validate-only, 2 no
results by feature any more. Updates are made all or none; the first that can't be made is the error
of the whole request, in every version.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.errors import error_code
from coordinator.features import FeatureUpdate, UpgradeType, update_features
from coordinator.handlers import Context, handles
from coordinator.wire import ApiKey, Entity
from logcore.machine import DomainError

FIRST_WITH_UPGRADE_TYPE = 1


@handles(ApiKey.UPDATE_FEATURES, versions=(0, 2), permission="ALTER Cluster")
def run(ctx: Context) -> Entity:
    """Check and make the updates."""
    body, make = ctx.body, ctx.respond
    try:
        update_features(
            ctx.broker.metadata,
            [
                FeatureUpdate(one.feature, one.max_version_level, _upgrade_type(ctx.version, one))
                for one in body.feature_updates
            ],
            node_id=ctx.broker.node_id,
            validate_only=getattr(body, "validate_only", False),
        )
    except DomainError as error:
        return make.UpdateFeaturesResponse(
            throttle_time_ms=0,
            error_code=error_code(error),
            error_message=str(error),
            results=(),
        )
    fields: dict[str, Any] = {}
    if ctx.version <= FIRST_WITH_UPGRADE_TYPE:
        fields["results"] = tuple(
            make.UpdatableFeatureResult(
                feature=one.feature, error_code=ErrorCode.none, error_message=None
            )
            for one in body.feature_updates
        )
    return make.UpdateFeaturesResponse(
        throttle_time_ms=0, error_code=ErrorCode.none, error_message=None, **fields
    )


def _upgrade_type(version: int, update: Any) -> UpgradeType:
    if version < FIRST_WITH_UPGRADE_TYPE:
        return UpgradeType.SAFE_DOWNGRADE if update.allow_downgrade else UpgradeType.UPGRADE
    try:
        return UpgradeType(update.upgrade_type)
    except ValueError:
        return UpgradeType.UNKNOWN
