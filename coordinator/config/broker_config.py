"""The broker's configuration: Kafka's keys, read from a file and KEY=VALUE pairs.

A broker key gets its value from one of four levels, the strongest first: the dynamic setting of
this broker, the dynamic default of all brokers, the static setting (of the command line, or else of
the file), and the key's default. Dynamic settings are kept in the metadata log. The value of a
topic key is the topic's own setting, or else the value of its first broker synonym that has a
value.

Source: ``KafkaConfig``, ``DynamicBrokerConfig``, ``LogConfig``, ``ConfigHelper``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from fencepost.coordinator.config.broker_keys import BROKER_KEYS, REPLACED, SYNONYMS
from fencepost.coordinator.config.cluster_keys import ON_ZOOKEEPER
from fencepost.coordinator.config.cross_checks import check_together
from fencepost.coordinator.config.durations import setting_value
from fencepost.coordinator.config.ignored_keys import IGNORED_KEYS, IGNORED_PREFIXES
from fencepost.coordinator.config.key import (
    ConfigError,
    ConfigKey,
    ConfigType,
    Value,
    nearest,
    setting_text,
)
from fencepost.coordinator.config.security_keys import OF_LISTENERS
from fencepost.coordinator.config.settings_file import read_file
from fencepost.coordinator.config.topic_keys import REFUSED_TOPIC_KEYS, TOPIC_KEYS
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.runtime.background import swallow
from fencepost.logcore.config import LogConfig

__all__ = [
    "BROKER_KEYS",
    "TOPIC_KEYS",
    "BrokerConfig",
    "ConfigError",
    "ConfigKey",
    "ConfigSource",
    "ConfigType",
    "Setting",
    "check_topic_configs",
    "load",
    "log_config",
]

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_Int = int
_Bool = bool
# Aliases, because BrokerConfig has methods with these names: inside of the class, a method would
# hide the type of the same name.

_LOG_FIELDS = frozenset(LogConfig.__dataclass_fields__)

HIDDEN_SEGMENT_BYTES = "internal.segment.bytes"
"""Overrides ``segment.bytes`` without its lower bound."""


REMOTE_STORAGE = "remote.storage.enable"


def shown_topic_keys(overrides: Mapping[str, str]) -> list[ConfigKey]:
    """Return the topic keys that DescribeConfigs shows: internal ones only if they are set."""
    return [key for name, key in TOPIC_KEYS.items() if not key.internal or name in overrides]


LISTENER_PREFIX = "listener.name."
"""Prefix of the keys that set a value for one listener."""


class ConfigSource(IntEnum):
    """The level from which a value comes; the numbers are those of DescribeConfigs."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    GROUP = 8


class Setting(NamedTuple):
    """A key's value on one level."""

    name: str
    text: str | None
    source: ConfigSource


# --- reading the operator's settings -------------------------------------------------------------


def load(pairs: Sequence[str] = (), config_file: Path | None = None) -> dict[str, str]:
    """Return the settings of a file, overridden by KEY=VALUE ``pairs``. Raises ConfigError.

    The file is TOML, or in Java's properties format like Apache Kafka's own files; the content
    determines the format. Only the syntax is checked; :class:`BrokerConfig` checks keys and values.
    In ``pairs``, times may be durations such as 1h.
    """
    settings = {} if config_file is None else read_file(config_file)
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise ConfigError(pair, None, "a setting is written KEY=VALUE")
        try:
            settings[key.strip()] = setting_value(key.strip(), value.strip())
        except ValueError as error:
            raise ConfigError(key.strip(), value.strip(), str(error)) from error
    return settings


def take_data_directory(settings: dict[str, str]) -> Path | None:
    """Remove ``log.dirs`` and ``log.dir`` from ``settings``; return the first one set, or None.

    Raises ConfigError if a value names several directories.
    """
    directories = {key: settings.pop(key, "").strip() for key in ("log.dirs", "log.dir")}
    for key, text in directories.items():
        if "," in text:
            raise ConfigError(key, text, "only one data directory is supported")
        if text:
            return Path(text)
    return None


# --- broker level --------------------------------------------------------------------------------


class BrokerConfig:
    """All broker keys and their current values.

    ``settings`` are the static settings: strings as in ``server.properties``, or numbers, booleans
    and lists. A topic key (``flush.messages``) sets the broker key that gives its default
    (``log.flush.interval.messages``). Raises :class:`ConfigError` for unknown keys, for invalid
    values, and for values that contradict each other.
    """

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self._static: dict[str, str] = {}
        self._ignored: dict[str, str] = {}
        for given, value in (settings or {}).items():
            text = setting_text(given, value).strip()
            reason = _reason_to_ignore(given)
            if reason:
                self._ignored[given] = reason
                continue
            of_listener = _key_of_listener(given)
            name = given if of_listener is not None else _broker_name(given, text)
            (of_listener or BROKER_KEYS[name]).parse(text)
            self._static[name] = text
        self._dynamic: dict[ConfigSource, dict[str, str]] = {
            ConfigSource.DYNAMIC_BROKER: {},
            ConfigSource.DYNAMIC_DEFAULT_BROKER: {},
        }
        self._listeners: list[Callable[[], None]] = []
        self._values: dict[str, Value] = {}
        self._refresh()
        check_together(self._values)

    def reload(self, settings: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Apply a new version of the static settings, for keys that may change at run time.

        Returns the changed keys, and the keys whose change takes effect when the broker next
        starts. If it raises ConfigError, nothing has changed.
        """
        fresh = BrokerConfig(settings)
        differ = sorted(
            name
            for name in self._static.keys() | fresh._static.keys()
            if self._static.get(name) != fresh._static.get(name)
        )
        changed = [name for name in differ if _key(name).updatable]
        for name in changed:
            if name in fresh._static:
                self._static[name] = fresh._static[name]
            else:
                del self._static[name]
        self._changed()
        return changed, [name for name in differ if name not in changed]

    # --- values ---

    def _typed(self, name: str, kind: type[T]) -> T:
        """Return the value of a key. Raises TypeError if it is unset or of another type."""
        value = self._values[name]
        if not isinstance(value, kind) or type(value) is not kind:  # a bool is also an int
            raise TypeError(f"{name} is no {kind.__name__}: {value!r}")
        return value

    def int(self, name: str) -> _Int:
        """Return the value of an integer key."""
        return self._typed(name, _Int)

    def bool(self, name: str) -> _Bool:
        """Return the value of a boolean key."""
        return self._typed(name, _Bool)

    def number(self, name: str) -> float:
        """Return the value of a DOUBLE key."""
        return self._typed(name, float)

    def items(self, name: str) -> tuple[str, ...]:
        """Return the value of a list key."""
        return self._typed(name, tuple)

    def text(self, name: str) -> str | None:
        """Return the value of a text key; None if it is not set."""
        return None if self._values[name] is None else self._typed(name, str)

    def get(self, name: str) -> Value:
        """Return the value of any key. Raises KeyError if it is not a broker key."""
        return self._values[name]

    def on_listener(self, listener: str, name: str, mechanism: str = "") -> Value:
        """Return the value of an ``OF_LISTENERS`` key for a listener and a SASL mechanism."""
        layers = (*self._dynamic.values(), self._static)
        prefix = f"{LISTENER_PREFIX}{listener.lower()}."
        for full in (f"{prefix}{mechanism.lower()}.{name}", prefix + name):
            for layer in layers:
                if full in layer:
                    return OF_LISTENERS[name].parse(layer[full])
        return self._values[name]

    def is_set_on_listener(self, listener: str, name: str) -> _Bool:
        """Return whether a key is set for this listener in particular."""
        full = f"{LISTENER_PREFIX}{listener.lower()}.{name}"
        return any(full in layer for layer in (*self._dynamic.values(), self._static))

    def settings(self, name: str) -> list[Setting]:
        """Return a broker key's settings by level, the strongest first; the last is the default."""
        default = Setting(name, BROKER_KEYS[name].default, ConfigSource.DEFAULT)
        return [*self._settings_of_keys([name]), default]

    def _settings_of_keys(self, names: Collection[str]) -> list[Setting]:
        """Return the settings of these keys, by level, then in the order of ``names``."""
        layers = (*self._dynamic.items(), (ConfigSource.STATIC_BROKER, self._static))
        return [
            Setting(name, layer[name], source)
            for source, layer in layers
            for name in names
            if name in layer
        ]

    def static_text(self, name: str) -> str | None:
        """Return the static setting of a broker key, or its default."""
        return self._static.get(name, BROKER_KEYS[name].default)

    def synonyms(self, name: str) -> list[Setting]:
        """Return the settings of a broker key and its synonyms, by level, the strongest first.

        As in Kafka, the list leaves out synonyms that precede the first setting of the key itself:
        if only log.retention.hours is set, the list for log.retention.ms is empty.

        Source: ``ConfigHelper.configSynonyms``.
        """
        names = _synonyms(name)
        settings = self._settings_of_keys(names)
        defaults = ((name, BROKER_KEYS[name].default) for name in names if name in BROKER_KEYS)
        settings += [
            Setting(key, text, ConfigSource.DEFAULT) for key, text in defaults if text is not None
        ]
        return list(dropwhile(lambda item: item.name != name, settings))

    def other_keys(self) -> dict[str, tuple[ConfigKey, list[Setting]]]:
        """Return the settings whose keys are not in ``BROKER_KEYS``, by their full names.

        Such a key is for a single listener, or unknown to this broker: a controller of Apache Kafka
        accepts any key.
        """
        layers = (*self._dynamic.items(), (ConfigSource.STATIC_BROKER, self._static))
        unknown: dict[str, tuple[ConfigKey, list[Setting]]] = {}
        for source, layer in layers:
            for name, text in layer.items():
                if name not in BROKER_KEYS:
                    key = _key_of_listener(name) or _UNKNOWN_KEY
                    entry = unknown.setdefault(name, (replace(key, name=name), []))
                    entry[1].append(Setting(name, text, source))
        return unknown

    def without_effect(self) -> list[tuple[str, str]]:
        """Return (key, reason) of the static settings that have no effect, for a warning."""
        inert = {name: _key(name).inert for name in self._static if _key(name).inert}
        if not self._values["zookeeper.connect"]:
            reason = "the controllers are not on ZooKeeper: zookeeper.connect is not set"
            inert |= {name: reason for name in self._static if name in ON_ZOOKEEPER}
        return [*inert.items(), *self._ignored.items()]

    # --- topic level ---

    def topic_settings(self, name: str, overrides: Mapping[str, str]) -> list[Setting]:
        """Return the settings of a topic key and of its synonyms, the strongest first.

        Each value is in the unit of the key under which it is set.
        """
        settings = []
        if name in overrides:
            settings.append(Setting(name, overrides[name], ConfigSource.TOPIC))
        synonyms = TOPIC_KEYS[name].synonyms
        return settings + self.synonyms(synonyms[0].name) if synonyms else settings

    def topic_source(self, name: str, overrides: Mapping[str, str]) -> ConfigSource:
        """Return the level from which the value of a topic key comes."""
        settings = self.topic_settings(name, overrides)
        return settings[0].source if settings else ConfigSource.DEFAULT

    def topic_value(self, name: str, overrides: Mapping[str, str]) -> Value:
        """Return the value of a topic key, in its own unit."""
        key = TOPIC_KEYS[name]
        if name in overrides:
            return key.parse(overrides[name])
        for synonym in key.synonyms:
            value = self._values[synonym.name]
            if value is None:
                continue
            if synonym.factor == 1 or not isinstance(value, int):
                return value
            return -1 if value < 0 else value * synonym.factor
        return key.value_of(None)

    # --- dynamic settings ---

    def dynamic(self, source: ConfigSource) -> Mapping[str, str]:
        """Return the dynamic settings of one level."""
        return self._dynamic[source]

    def check_dynamic(self, settings: Mapping[str, str], before: Mapping[str, str] = {}) -> None:
        """Check the dynamic settings that differ from the settings in ``before``.

        An unchanged setting is not checked: a controller of Apache Kafka accepts any key. Raises
        ConfigError for unknown keys, and InvalidRequestError for bad values and for keys that
        cannot change while the broker runs.
        """
        for name, text in settings.items():
            if before.get(name) == text:
                continue
            key = _find_key(name)
            if key is None:
                reason = _reason_to_ignore(name)
                raise ConfigError(
                    name, None, f"it has no effect: {reason}" if reason else _unknown(name)
                )
            try:
                key.parse(text)
            except ConfigError as error:
                # As ``ConfigAdminManager.validateBrokerConfigChange`` does (KAFKA-13609).
                raise InvalidRequestError(str(error)) from error
            if not key.updatable:
                raise InvalidRequestError(f"Cannot update these configs dynamically: {name}")
            if name in OF_LISTENERS and name.startswith("ssl."):
                raise InvalidRequestError(
                    "These security configs can be dynamically updated only per-listener using the"
                    f" listener prefix: {name}"
                )

    def proposed(self, source: ConfigSource, settings: Mapping[str, str]) -> BrokerConfig:
        """Return a copy with these dynamic settings at one level, without unusable settings."""
        proposal = BrokerConfig(self._static)
        proposal._dynamic = {**self._dynamic, source: _usable(settings)}
        proposal._refresh()
        return proposal

    def set_dynamic(self, source: ConfigSource, settings: Mapping[str, str]) -> None:
        """Replace the dynamic settings of one level and call the listeners.

        A value that this broker cannot use is logged and ignored: a controller of Apache Kafka may
        have accepted it. Source: ``DynamicBrokerConfig.removeInvalidConfigs``.
        """
        self._dynamic[source] = _usable(settings)
        self._changed()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after every change of a setting; an exception in it is logged."""
        self._listeners.append(callback)

    def _changed(self) -> None:
        self._refresh()
        for listener in self._listeners:
            with swallow("settings changed"):
                listener()

    def _refresh(self) -> None:
        self._values = dict(_defaults())
        for layer in (self._static, *reversed(self._dynamic.values())):
            for name, text in layer.items():
                if name in BROKER_KEYS:  # and not the setting of a single listener
                    self._values[name] = BROKER_KEYS[name].parse(text)


@cache
def _defaults() -> Mapping[str, Value]:
    """Return the default of every broker key; parsed once in a process that starts many brokers."""
    return {name: key.value_of(None) for name, key in BROKER_KEYS.items()}


def _key(name: str) -> ConfigKey:
    """Return the key of an accepted setting. Raises KeyError for another name."""
    key = _find_key(name)
    if key is None:
        raise KeyError(name)
    return key


def _find_key(name: str) -> ConfigKey | None:
    """Return the key of a broker setting, possibly for a single listener; None if unknown."""
    return BROKER_KEYS.get(name) or _key_of_listener(name)


def _usable(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in settings.items() if _is_usable(name, text)}


def _is_usable(name: str, text: str) -> bool:
    key = _find_key(name)
    try:
        if key is not None:
            key.parse(text)
    except ConfigError as error:
        _log.error("dynamic setting is not used", key=name, cause=str(error))
        return False
    return True


def _key_of_listener(name: str) -> ConfigKey | None:
    """Return the key of ``listener.name.LISTENER.KEY`` or ``listener.name.LISTENER.MECHANISM.KEY``.

    None for any other name.
    """
    if not name.startswith(LISTENER_PREFIX):
        return None
    _, _, rest = name.removeprefix(LISTENER_PREFIX).partition(".")
    return OF_LISTENERS.get(rest) or OF_LISTENERS.get(rest.partition(".")[2])


_UNKNOWN_KEY = ConfigKey("", ConfigType.UNKNOWN, None, "Unknown to this broker.")

_UNITS = tuple(
    tuple(synonym.name for synonym in key.synonyms)
    for key in TOPIC_KEYS.values()
    if any(synonym.factor != 1 for synonym in key.synonyms)
)
"""Groups of keys with the same meaning in different units, the strongest first."""


def _synonyms(name: str) -> tuple[str, ...]:
    """Return the broker keys with the same meaning, the strongest first.

    Source: ``DynamicBrokerConfig.brokerConfigSynonyms``.
    """
    if name == "log.flush.interval.ms":
        return name, "log.flush.scheduler.interval.ms"
    of_listener = _key_of_listener(name)
    if of_listener is not None:
        return name, of_listener.name
    return next((names for names in _UNITS if name in names), (name,))


def is_password(name: str) -> bool:
    """Return whether a broker setting of this name is a password."""
    key = _find_key(name)
    return key is not None and key.type is ConfigType.PASSWORD


def _broker_name(key_name: str, text: str) -> str:
    if key_name in BROKER_KEYS:
        return key_name
    topic_key = TOPIC_KEYS.get(key_name)
    if topic_key is not None and topic_key.synonyms:
        return topic_key.synonyms[0].name
    if key_name in SYNONYMS:
        return SYNONYMS[key_name]
    if key_name in REPLACED:
        raise ConfigError(key_name, text, REPLACED[key_name])
    # The error omits the value: it may be a password under a misspelt name.
    raise ConfigError(key_name, None, _unknown(key_name))


def _unknown(name: str) -> str:
    """Return the reason for refusing an unknown key, with the most similar known key."""
    names: Iterable[str] = (*BROKER_KEYS, *IGNORED_KEYS, *TOPIC_KEYS)
    if name.startswith(LISTENER_PREFIX):
        listener, _, _ = name.removeprefix(LISTENER_PREFIX).partition(".")
        names = (f"{LISTENER_PREFIX}{listener}.{key}" for key in OF_LISTENERS)
    return f"unknown configuration{nearest(name, names)}"


def _reason_to_ignore(name: str) -> str:
    """Return why a key of Apache Kafka is accepted but ignored; empty for any other name."""
    if name in IGNORED_KEYS:
        return IGNORED_KEYS[name]
    for prefix, reason in IGNORED_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    if name.startswith(LISTENER_PREFIX) and _key_of_listener(name) is None:
        _, _, rest = name.removeprefix(LISTENER_PREFIX).partition(".")
        for key in (rest, rest.partition(".")[2]):
            if key in IGNORED_KEYS:
                return IGNORED_KEYS[key]
            if key in BROKER_KEYS:
                return BROKER_KEYS[key].inert or f"{key} is for all listeners"
            if key in SYNONYMS or key in REPLACED:
                return f"{key} is for all listeners"
    return ""


# --- topic level ---------------------------------------------------------------------------------


def check_topic_configs(config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Check the settings of a topic. Raises ConfigError."""
    for name, text in overrides.items():
        if name not in TOPIC_KEYS:
            reason = REFUSED_TOPIC_KEYS.get(name, "unknown topic configuration")
            raise ConfigError(name, text, reason)
        if TOPIC_KEYS[name].parse(text) is True and name == REMOTE_STORAGE:
            # Source: ``LogConfig.validateRemoteStorageOnlyIfSystemEnabled``.
            raise ConfigError(name, text, TOPIC_KEYS[name].inert)
    log_settings = log_config(config, overrides)
    shortest, longest = log_settings.min_compaction_lag_ms, log_settings.max_compaction_lag_ms
    if shortest > longest:
        raise ConfigError(
            "min.compaction.lag.ms", shortest, f"it is above max.compaction.lag.ms ({longest})"
        )


def log_config(config: BrokerConfig, overrides: Mapping[str, str]) -> LogConfig:
    """Return the configuration of a topic's logs.

    The broker's settings may have changed since the topic's settings were checked. So settings of
    the topic and of the broker may contradict each other; a log tolerates that.
    """
    values: dict[str, Any] = {
        name.replace(".", "_"): config.topic_value(name, overrides)
        for name in TOPIC_KEYS
        if name.replace(".", "_") in _LOG_FIELDS or name == HIDDEN_SEGMENT_BYTES
    }
    hidden_segment_bytes = values.pop(HIDDEN_SEGMENT_BYTES.replace(".", "_"))
    if hidden_segment_bytes is not None:
        values["segment_bytes"] = hidden_segment_bytes
    values["cleanup_policy"] = frozenset(values["cleanup_policy"])
    return LogConfig(**values)
