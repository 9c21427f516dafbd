"""Settings of client metrics subscriptions (KIP-714): checks and levels.

``coordinator/telemetry/subscriptions.py`` applies them to clients.

Source: ``ClientMetricsConfigs``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.broker_config import ConfigSource, Setting
from fencepost.coordinator.config.java_patterns import is_valid
from fencepost.coordinator.config.key import ConfigError, read_keys, text_of
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass

CLIENT_METRICS_KEYS = {
    key.name: key
    for key in read_keys("""
metrics LIST ""
    Prefixes of the names of the metrics that matching clients push, or * for all metrics; without
    any, they push none.
interval.ms INT 300000 unit=ms
    How often matching clients push their metrics, from 100 ms to 1 hour.
match LIST ""
    Conditions such as client_id=shop-.*, all of which a client must match. Without any, every
    client does. The expressions are RE2/J's, and match the whole value.
""")
}
"""Keys of a subscription, by name."""

METRICS, MATCH, INTERVAL_MS = "metrics", "match", "interval.ms"
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 100, 3_600_000
DEFAULT_INTERVAL_MS = 300_000

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

    The expressions of ``match`` are checked earlier, by :func:`check_expressions`.
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
    """Call :func:`check`, then check the expressions of ``match`` in steps.

    Raises ConfigError for an invalid expression.
    """
    check(settings)
    for pattern, (_, expression) in _conditions(settings).items():
        if not (yield from is_valid(expression.strip())):
            raise _illegal(settings, pattern)


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """The values of a subscription's keys; ``match`` has the expressions by parameter."""

    metrics: frozenset[str]
    interval_ms: int
    match: Mapping[str, str]


def settings_of(settings: Mapping[str, str]) -> SubscriptionSettings:
    """Return the values of a subscription's settings. Raises ConfigError."""
    metrics, interval_ms = (
        CLIENT_METRICS_KEYS[name].value_of(settings.get(name)) for name in (METRICS, INTERVAL_MS)
    )
    return SubscriptionSettings(
        frozenset(metrics) if isinstance(metrics, tuple) else frozenset(),
        interval_ms if isinstance(interval_ms, int) else DEFAULT_INTERVAL_MS,
        {param.strip(): text.strip() for param, text in _conditions(settings).values()},
    )


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
    """Return a list with the setting of a subscription's key; empty if the key has its default."""
    if name not in settings:
        return []
    text = text_of(CLIENT_METRICS_KEYS[name].parse(settings[name]))
    return [Setting(name, text, ConfigSource.CLIENT_METRICS)]
