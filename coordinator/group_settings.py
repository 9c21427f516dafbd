"""Settings of single groups of the consumer protocol: their checks, and what follows from them.

Source: ``GroupConfig.validate`` and ``GroupConfigManager``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.config import BrokerConfig, ConfigError, ConfigSource, Setting
from coordinator.config_group_defs import GROUP_OWN_KEYS
from groups.consumer_commands import ConsumerSettings

SESSION, HEARTBEAT, ASSIGNMENT = GROUP_OWN_KEYS


def broker_key(name: str) -> str:
    """The broker key that is the default of a group's key."""
    return f"group.{name}"


def check(config: BrokerConfig, settings: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` unless a group may have these settings."""
    values: dict[str, int] = {}
    for name, text in settings.items():
        if name not in GROUP_OWN_KEYS:
            raise ConfigError(name, text, "unknown group configuration")
        value = GROUP_OWN_KEYS[name].parse(text)
        what = name.removeprefix("consumer.")
        low = config.int(f"group.consumer.min.{what}")
        high = config.int(f"group.consumer.max.{what}")
        if not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(name, text, f"it must lie in {low}..{high} ms")
        values[name] = value
    session = values.get(SESSION, config.int(broker_key(SESSION)))
    heartbeat = values.get(HEARTBEAT, config.int(broker_key(HEARTBEAT)))
    if values and session <= heartbeat:
        raise ConfigError(SESSION, session, f"it must be above {HEARTBEAT} ({heartbeat})")


def applied(base: ConsumerSettings, settings: Mapping[str, str]) -> ConsumerSettings:
    """The broker's settings with a group's own in their place."""

    def value(name: str, default: int) -> int:
        return int(settings[name]) if name in settings else default

    return replace(
        base,
        session_timeout_ms=value(SESSION, base.session_timeout_ms),
        heartbeat_interval_ms=value(HEARTBEAT, base.heartbeat_interval_ms),
        assignment_interval_ms=value(ASSIGNMENT, base.assignment_interval_ms),
    )


def places(config: BrokerConfig, name: str, settings: Mapping[str, str]) -> list[Setting]:
    """Where a group's key is set, the strongest first; the broker's own places follow."""
    found = [Setting((name, settings[name], ConfigSource.GROUP))] if name in settings else []
    return found + config.settings(broker_key(name))
