"""Settings of client metrics subscriptions (KIP-714): checks and levels.

No client is asked for its metrics, as on a broker of Apache Kafka without a telemetry reporter, so
the settings have no effect; tools for Apache Kafka can change and list them.

Source: ``ClientMetricsConfigs``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fencepost.coordinator.config.broker_config import ConfigSource, Setting
from fencepost.coordinator.config.key import ConfigError, text_of
from fencepost.coordinator.config.unused_keys import UNUSED_CLIENT_METRICS_KEYS
from fencepost.coordinator.errors import InvalidRequestError

CLIENT_METRICS_KEYS = {key.name: key for key in UNUSED_CLIENT_METRICS_KEYS}
"""Keys of a subscription, by name."""

MATCH, INTERVAL_MS = "match", "interval.ms"
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 3_600_000

_MATCH_PARAMS = {
    "client_instance_id",
    "client_id",
    "client_software_name",
    "client_software_version",
    "client_source_address",
    "client_source_port",
}


def check(settings: Mapping[str, str]) -> None:
    """Raise ConfigError or InvalidRequestError unless a subscription may have these settings."""
    for name, text in settings.items():
        if name not in CLIENT_METRICS_KEYS:
            raise InvalidRequestError(f"Unknown client metrics configuration: {name}")
        value = CLIENT_METRICS_KEYS[name].parse(text)
        if isinstance(value, int) and not MIN_INTERVAL_MS <= value <= MAX_INTERVAL_MS:
            raise InvalidRequestError(
                f"Invalid value {value} for {name}, interval must be between {MIN_INTERVAL_MS} and"
                f" {MAX_INTERVAL_MS} (1 hour)"
            )
        if name == MATCH and isinstance(value, tuple):
            for pattern in value:
                if not _is_match(pattern):
                    raise ConfigError(name, text, f"Illegal client matching pattern: {pattern}")


def _is_match(pattern: str) -> bool:
    """Return whether ``pattern`` is PARAMETER=EXPRESSION."""
    param, found, expression = pattern.partition("=")
    if not found or param.strip() not in _MATCH_PARAMS or not expression or "=" in expression:
        return False
    try:
        re.compile(expression.strip())
    except (re.error, RecursionError, OverflowError):  # nested too deeply, or a huge repetition
        return False
    return True


def levels(name: str, settings: Mapping[str, str]) -> list[Setting]:
    """Return where a subscription's key is set; a default is not listed."""
    if name not in settings:
        return []
    text = text_of(CLIENT_METRICS_KEYS[name].parse(settings[name]))
    return [Setting(name, text, ConfigSource.CLIENT_METRICS)]
