"""The settings of share partitions: the broker's, overridden by a group's own.

Source: ``ShareGroupConfigProvider``, ``GroupConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.group_settings import (
    OFFSET_RESET,
    number_in_force,
    reset_duration_ms,
)
from fencepost.coordinator.metadata.metadata import SHARE_VERSION, Metadata
from fencepost.groups.share.commands import IsolationLevel, OffsetReset, ShareSettings
from fencepost.groups.share.dead_letters import TOPIC_NAME

FIRST_WITH_QUEUES: Final = 2
"""The first level of share.version that allows dead-letter queues of groups."""

MAX_CACHED: Final = 10_000
"""The maximum number of groups whose settings are cached. Only groups with settings of their own
are cached, and the controller limits these to the same number
(``controller.view.ControllerSettings``)."""


class ShareSettingsCache:
    """The effective settings of each group; share partitions read them for every record range."""

    def __init__(self, config: BrokerConfig, metadata: Metadata) -> None:
        self._config, self._metadata = config, metadata
        self._default: ShareSettings | None = None
        self._cache: dict[str, tuple[Mapping[str, str], ShareSettings]] = {}
        config.listen(self.forget)

    def forget(self) -> None:
        """Drop the cache: the broker's settings or the levels of features have changed."""
        self._default = None
        self._cache.clear()

    def of(self, group_id: str) -> ShareSettings:
        """Return the settings of a group at this moment."""
        overrides = self._metadata.group_settings(group_id)
        if not overrides:
            if self._default is None:
                self._default = _settings(self._config, {}, has_queues=False)
            return self._default
        cached = self._cache.get(group_id)
        if cached is not None and cached[0] is overrides:
            return cached[1]
        has_queues = self._metadata.feature_level(SHARE_VERSION) >= FIRST_WITH_QUEUES
        settings = _settings(self._config, overrides, has_queues=has_queues)
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[group_id] = overrides, settings
        return settings


def _settings(
    config: BrokerConfig, overrides: Mapping[str, str], *, has_queues: bool
) -> ShareSettings:
    reset = overrides.get(OFFSET_RESET, OffsetReset.LATEST.value).strip()
    duration_ms = reset_duration_ms(reset)
    return ShareSettings(
        record_lock_duration_ms=number_in_force(config, "share.record.lock.duration.ms", overrides),
        delivery_count_limit=number_in_force(config, "share.delivery.count.limit", overrides),
        max_record_locks=number_in_force(config, "share.partition.max.record.locks", overrides),
        renew_acknowledge_enabled=overrides.get("share.renew.acknowledge.enable", "true")
        .strip()
        .lower()
        == "true",
        isolation_level=IsolationLevel(
            overrides.get("share.isolation.level", IsolationLevel.READ_UNCOMMITTED.value).strip()
        ),
        auto_offset_reset=OffsetReset.BY_DURATION
        if duration_ms is not None
        else OffsetReset(reset),
        reset_duration_ms=duration_ms or 0,
        dead_letter_queue=has_queues and bool(overrides.get(TOPIC_NAME, "").strip()),
    )
