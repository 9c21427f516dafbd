"""Settings of client metrics subscriptions (KIP-714): checks and levels.

No client is asked for its metrics, as on a broker of Apache Kafka without a telemetry reporter, so
the settings have no effect; tools for Apache Kafka can change and list them.

Source: ``ClientMetricsConfigs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.broker_config import ConfigSource, Setting
from fencepost.coordinator.config.java_patterns import is_valid
from fencepost.coordinator.config.key import ConfigError, text_of
from fencepost.coordinator.config.unused_keys import UNUSED_CLIENT_METRICS_KEYS
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.logcore.steps import Steps

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
    """Raise ConfigError or InvalidRequestError unless a subscription may have these settings.

    :func:`check_expressions` has checked the expressions in them before.
    """
    for name in settings:
        if name not in CLIENT_METRICS_KEYS:
            raise InvalidRequestError(f"Unknown client metrics configuration: {name}")
    values = {name: CLIENT_METRICS_KEYS[name].parse(text) for name, text in settings.items()}
    interval_ms = values.get(INTERVAL_MS)
    if isinstance(interval_ms, int) and not MIN_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        raise InvalidRequestError(
            f"Invalid value {interval_ms} for {INTERVAL_MS}, interval must be between"
            f" {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS} (1 hour)"
        )
    for pattern, (param, expression) in _conditions(settings).items():
        if not expression or param.strip() not in _MATCH_PARAMS or "=" in expression:
            raise _illegal(settings, pattern)


def check_expressions(settings: Mapping[str, str]) -> Steps[None]:
    """Raise, in steps, the errors of :func:`check`, or ConfigError for an invalid expression."""
    check(settings)
    for pattern, (_, expression) in _conditions(settings).items():
        if not (yield from is_valid(expression.strip())):
            raise _illegal(settings, pattern)


def _conditions(settings: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the items of ``match``, each with its parameter and expression.

    Java's ``split`` drops empty strings at the end, so an item may end in equals signs.
    """
    items = CLIENT_METRICS_KEYS[MATCH].parse(settings.get(MATCH, ""))
    if not isinstance(items, tuple):
        return {}
    parts = {item: item.rstrip("=").partition("=") for item in items}
    return {item: (param, expression) for item, (param, _, expression) in parts.items()}


def _illegal(settings: Mapping[str, str], pattern: str) -> ConfigError:
    return ConfigError(MATCH, settings[MATCH], f"Illegal client matching pattern: {pattern}")


def levels(name: str, settings: Mapping[str, str]) -> list[Setting]:
    """Return where a subscription's key is set; a default is not listed."""
    if name not in settings:
        return []
    text = text_of(CLIENT_METRICS_KEYS[name].parse(settings[name]))
    return [Setting(name, text, ConfigSource.CLIENT_METRICS)]
