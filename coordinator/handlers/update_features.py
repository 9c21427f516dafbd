"""UpdateFeatures (57): raise and lower the finalized level of features (KIP-584, KIP-778).

Version 0 has a flag that allows a downgrade, which Kafka's controller ignores; version 1 has the
upgrade type and validate-only, version 2 drops the result of each feature. Either all updates are
made, or none. The first failing update determines the error of the whole request in every version.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.controller_decisions import decided
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import ApiKey, Entity

FIRST_WITH_UPGRADE_TYPE = 1

MAX_FEATURE_UPDATES = 1_000
"""The maximum number of updates in one request, to bound one turn of the event loop. Only five
features exist."""


@handles(ApiKey.UPDATE_FEATURES, versions=(0, 2), permission="ALTER Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Validate and apply the updates."""
    ctx.require_on_cluster(Operation.ALTER)
    body, make = ctx.body, ctx.respond
    if len(body.feature_updates) > MAX_FEATURE_UPDATES:
        raise InvalidRequestError(f"a request updates at most {MAX_FEATURE_UPDATES} features")
    by_feature: dict[str, FeatureUpdate] = {}
    results = []
    for update in body.feature_updates:
        name = update.feature
        by_feature[name] = FeatureUpdate(
            name, update.max_version_level, _upgrade_type(ctx.version, update)
        )
        if ctx.version <= FIRST_WITH_UPGRADE_TYPE:
            results.append(
                make.UpdatableFeatureResult(
                    feature=name, error_code=ErrorCode.none, error_message=None
                )
            )
        yield None
    updates, validate_only = list(by_feature.values()), getattr(body, "validate_only", False)
    yield from decided(
        ctx, lambda controller: controller.update_features(updates, validate_only=validate_only)
    )
    return make.UpdateFeaturesResponse(
        error_code=ErrorCode.none, error_message=None, results=tuple(results)
    )


def _upgrade_type(version: int, update: Any) -> UpgradeType:
    if version < FIRST_WITH_UPGRADE_TYPE:
        # ``QuorumController.updateFeatures`` reads only the upgrade type, in every version.
        return UpgradeType.UPGRADE
    try:
        return UpgradeType(update.upgrade_type)
    except ValueError:
        return UpgradeType.UNKNOWN
