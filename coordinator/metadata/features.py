"""Raising and lowering the finalized level of a feature.

The features are those of ``metadata.FEATURES``. ``transaction.version`` rules over aborts that the
transaction coordinator makes by itself, and over the form of its records; it takes effect with the
next decision, and open transactions end by the rules that their client's requests name.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from fencepost.cluster.controller import features as rules
from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.cluster.controller.view import View

__all__ = ["FeatureUpdate", "UpgradeType", "update_features"]

from fencepost.coordinator.metadata.log import MetadataLog

_log = structlog.get_logger(__name__)


def update_features(
    metadata: MetadataLog,
    view: View,
    updates: Sequence[FeatureUpdate],
    *,
    validate_only: bool = False,
) -> None:
    """Check all of ``updates``, then make them, all or none; of one name the last one counts.

    A level that a feature has already is no change, and gets no new epoch. Raises
    InvalidUpdateVersionError.
    """
    outcome = rules.update_features(view, updates)
    if outcome.records and not validate_only:
        metadata.append(outcome.records)
        _log.info("features finalized", epoch=metadata.features_epoch, **outcome.answer)
