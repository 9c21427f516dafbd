"""Settings of single groups: checks, defaults and effective values.

The broker's bounds may tighten after a group's settings were stored. DescribeConfigs shows a stored
value beyond a bound unchanged, but the bound takes effect.

Source: ``GroupConfig.validate``, ``GroupConfig.evaluate`` and ``GroupConfigManager``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigSource,
    Setting,
)
from fencepost.coordinator.config.cross_checks import KINDS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.key import text_of
from fencepost.groups.consumer_commands import ConsumerSettings, ShareSettings

_log = structlog.get_logger(__name__)

FIELDS = {
    "session.timeout.ms": "session_timeout_ms",
    "heartbeat.interval.ms": "heartbeat_interval_ms",
    "assignment.interval.ms": "assignment_interval_ms",
}
"""The names of keys of a group, without the prefix that names the group's kind. Each maps to a
field of :class:`ConsumerSettings` and :class:`ShareSettings`."""

SERVED_KINDS = ("consumer", "share")
"""The kinds of groups whose keys have an effect."""

OFFSET_RESET = "share.auto.offset.reset"
DEAD_LETTER_TOPIC = "errors.deadletterqueue.topic.name"

_DURATION = re.compile(
    r"by_duration:(?P<sign>[-+]?)P(?:(?P<d>[-+]?\d+)D)?"
    r"(?:T(?=[-+\d])(?:(?P<h>[-+]?\d+)H)?(?:(?P<m>[-+]?\d+)M)?"
    r"(?:(?P<s>[-+]?\d+(?:[.,]\d{0,9})?)S)?)?",
    re.ASCII | re.IGNORECASE,
)
_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}


STREAMS_ASSIGNOR = "streams.assignor.name"
STREAMS_ASSIGNORS = "group.streams.assignors"


def broker_key(name: str) -> str:
    """Return the broker key that gives the default of a group's key."""
    return STREAMS_ASSIGNORS if name == STREAMS_ASSIGNOR else f"group.{name}"


def check(config: BrokerConfig, settings: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` unless a group may have these settings."""
    values: dict[str, int] = {}
    for name, text in settings.items():
        if name not in GROUP_OWN_KEYS:
            raise ConfigError(name, text, "unknown", f"Unknown group config name: {name}")
        value = GROUP_OWN_KEYS[name].parse(text)
        if name == OFFSET_RESET and not _is_offset_reset(text.strip()):
            raise ConfigError(
                name,
                text,
                f"Invalid value `{text}` for configuration {name}. The value must be either"
                " 'earliest', 'latest' or of the format 'by_duration:<PnDTnHnMn.nS>'.",
            )
        if name == DEAD_LETTER_TOPIC and text.startswith("__"):
            raise ConfigError(name, None, "DLQ topic name must not start with '__'")
        if name == STREAMS_ASSIGNOR and value not in config.items(STREAMS_ASSIGNORS):
            assignors = ", ".join(config.items(STREAMS_ASSIGNORS))
            reason = (
                f"'{value}' is not a registered task assignor. Registered assignors are:"
                f" [{assignors}]."
            )
            raise ConfigError(name, text, reason, f"{name} {reason}")
        if isinstance(value, int) and not isinstance(value, bool):
            _check_bounds(config, name, value)
            values[name] = value
    for kind in KINDS:
        session, heartbeat = f"{kind}.session.timeout.ms", f"{kind}.heartbeat.interval.ms"
        silence, between = (
            values.get(name, config.int(broker_key(name))) for name in (session, heartbeat)
        )
        if values.keys() & {session, heartbeat} and silence <= between:
            reason = f"must be greater than {heartbeat}"
            raise ConfigError(session, silence, reason, f"{session} {reason}")


def _check_bounds(config: BrokerConfig, name: str, value: int) -> None:
    if not _capped(config, name, value)[1]:
        return
    low, high = (
        config.int(key) if (key := _bound(name, end)) in BROKER_KEYS else None
        for end in ("min", "max")
    )
    if high is None:
        reason = f"must be greater than or equal to {low}"
    elif low is None:
        reason = f"must be less than or equal to {high}"
    else:
        reason = f"must be in the range {low} to {high} inclusive."
    raise ConfigError(name, value, reason, f"{name} {reason}")


def _bound(name: str, end: str) -> str:
    """Return the broker key with a bound of a group's key; ``end`` is "min" or "max"."""
    kind, _, what = name.partition(".")
    return f"group.{kind}.{end}.{what.removeprefix('num.')}"


def _capped(config: BrokerConfig, name: str, value: int) -> tuple[int, str]:
    """Return a group's value capped to the broker's bounds, and the broker key that caps it."""
    for end, is_outside in (("min", int.__lt__), ("max", int.__gt__)):
        key = _bound(name, end)
        if key in BROKER_KEYS and is_outside(value, config.int(key)):
            return config.int(key), key
    return value, ""


def _is_offset_reset(text: str) -> bool:
    """Return whether ``text`` is a policy for the reset of offsets."""
    if text in {"earliest", "latest"}:
        return True
    duration_ms = reset_duration_ms(text)
    return duration_ms is not None and duration_ms >= 0


def reset_duration_ms(text: str) -> int | None:
    """Return the milliseconds of ``by_duration:DURATION``; None for any other text.

    The duration is in Java's format, such as ``PT1H``.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not text.startswith("by_duration:"):
        return None
    unit_counts = {unit: match[unit] for unit in _SECONDS if match[unit] is not None}
    seconds = sum(float(n.replace(",", ".")) * _SECONDS[unit] for unit, n in unit_counts.items())
    return round(1000 * (-seconds if match["sign"] == "-" else seconds)) if unit_counts else None


def number_in_force(config: BrokerConfig, name: str, settings: Mapping[str, str]) -> int:
    """Return the effective value of a numeric key.

    It is the group's own value, limited to the broker's bounds, or else the broker's value.
    """
    if name in settings:
        return _capped(config, name, int(settings[name]))[0]
    return config.int(broker_key(name))


S = TypeVar("S", ConsumerSettings, ShareSettings)


def applied(config: BrokerConfig, kind: str, base: S, settings: Mapping[str, str]) -> S:
    """Return the broker's settings, overridden by a group's settings within the broker's bounds.

    ``kind`` is "consumer" or "share", because a group id may have settings of both kinds.
    """
    overrides: dict[str, Any] = {
        field: _capped(config, key, int(settings[key]))[0]
        for what, field in FIELDS.items()
        if (key := f"{kind}.{what}") in settings
    }
    return replace(base, **overrides) if overrides else base


def warn_of_caps(config: BrokerConfig, group_id: str, settings: Mapping[str, str]) -> None:
    """Log a warning for each setting of a group that a bound of the broker overrides."""
    for name in {f"{kind}.{what}" for kind in SERVED_KINDS for what in FIELDS} & settings.keys():
        value = int(settings[name])
        effective, key = _capped(config, name, value)
        if key:
            _log.warning(
                "a group's setting is outside the broker's bounds; the bound takes effect",
                group=group_id,
                setting=name,
                value=value,
                effective=effective,
                bound=key,
            )


def config_synonyms(config: BrokerConfig, name: str, settings: Mapping[str, str]) -> list[Setting]:
    """Return the settings of a group's key: the group's own, then its broker key's."""
    synonyms: list[Setting] = []
    if name in settings:
        text = text_of(GROUP_OWN_KEYS[name].parse(settings[name]))
        synonyms.append(Setting(name, text, ConfigSource.GROUP))
    if broker_key(name) in BROKER_KEYS:
        return synonyms + config.settings(broker_key(name))
    return [*synonyms, Setting(name, GROUP_OWN_KEYS[name].default, ConfigSource.DEFAULT)]


def shown_value(name: str, text: str | None) -> str | None:
    """Return the text that DescribeConfigs shows for a group's setting.

    Of several assignors, DescribeConfigs shows the first.
    """
    return text.partition(",")[0].strip() if name == STREAMS_ASSIGNOR and text else text
