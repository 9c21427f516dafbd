"""The broker's configuration: Kafka's keys, read from a file and KEY=VALUE pairs.

What holds for a broker key is, the strongest first: the dynamic setting of this broker, the dynamic
default of all brokers (both kept in the metadata log), the static setting (command line before
file), the key's default. A topic key is looked up in the topic's own settings and then through its
broker synonyms in that order.

Source: ``KafkaConfig``, ``DynamicBrokerConfig``, ``LogConfig``, ``ConfigHelper``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from fencepost.coordinator.config.broker_keys import BROKER_KEYS, REPLACED, SYNONYMS
from fencepost.coordinator.config.cluster_keys import ON_ZOOKEEPER
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
from fencepost.coordinator.config.topic_keys import TOPIC_KEYS
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.runtime.background import survived
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
# BrokerConfig has methods of these names, which would hide the types in its annotations.

_LOG_FIELDS = frozenset(LogConfig.__dataclass_fields__)

HIDDEN_SEGMENT_BYTES = "internal.segment.bytes"
"""Overrides ``segment.bytes`` without its lower bound."""


def shown_topic_keys(overrides: Mapping[str, str]) -> list[ConfigKey]:
    """The keys of a topic with these settings that are shown: the hidden one only if it is set."""
    return [
        key for name, key in TOPIC_KEYS.items() if name != HIDDEN_SEGMENT_BYTES or name in overrides
    ]


LISTENER_PREFIX = "listener.name."
"""What begins the key of a value that is for one listener."""


class ConfigSource(IntEnum):
    """Where a value comes from; the numbers are those of DescribeConfigs."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    BROKER_LOGGER = 6
    GROUP = 8


class Setting(NamedTuple):
    """One place where a value is set."""

    name: str
    text: str | None
    source: ConfigSource


# --- reading what the operator wrote -------------------------------------------------------------


def load(pairs: Sequence[str] = (), config_file: Path | None = None) -> dict[str, str]:
    """The settings of a file, overridden by KEY=VALUE ``pairs``. Raises ConfigError.

    A file is TOML, or has Java's properties format as Apache Kafka's own; its content decides. Only
    the form is checked; :class:`BrokerConfig` checks keys and values. In ``pairs``, times may be
    durations such as 1h.
    """
    settings = {} if config_file is None else read_file(config_file)
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key.strip():
            raise ConfigError(pair, None, "a setting is written KEY=VALUE")
        try:
            settings[key.strip()] = setting_value(key.strip(), value.strip())
        except ValueError as error:
            raise ConfigError(key.strip(), value.strip(), str(error)) from error
    return settings


def take_data_directory(settings: dict[str, str]) -> Path | None:
    """Take ``log.dirs`` and ``log.dir`` out of ``settings``: the first that is set, or None.

    Raises ConfigError where several directories are named.
    """
    given = {key: settings.pop(key, "").strip() for key in ("log.dirs", "log.dir")}
    for key, text in given.items():
        if "," in text:
            raise ConfigError(key, text, "there is one data directory")
        if text:
            return Path(text)
    return None


# --- broker level --------------------------------------------------------------------------------


class BrokerConfig:
    """All broker keys with what holds for them now.

    ``settings`` are the static ones, as texts or as the numbers, booleans and lists that they mean.
    A topic key in it (``flush.messages``) is taken as the broker key of its default
    (``log.flush.interval.messages``). Raises :class:`ConfigError` for unknown keys, for bad values,
    and for values that contradict each other.
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
        _check_together(self._values)

    def reload(self, settings: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Take over static settings that were read anew, where a key may change at run time.

        Returns the keys that changed, and those whose change waits for the next start. Raises
        ConfigError, and changes nothing then.
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
        """The value of a key that is of that type. Raises TypeError for another, or for none."""
        value = self._values[name]
        if not isinstance(value, kind) or type(value) is not kind:  # True is an int otherwise
            raise TypeError(f"{name} is no {kind.__name__}: {value!r}")
        return value

    def int(self, name: str) -> _Int:
        """The value of an integer key."""
        return self._typed(name, _Int)

    def bool(self, name: str) -> _Bool:
        """The value of a boolean key."""
        return self._typed(name, _Bool)

    def number(self, name: str) -> float:
        """The value of a key with a fraction."""
        return self._typed(name, float)

    def items(self, name: str) -> tuple[str, ...]:
        """The value of a list key."""
        return self._typed(name, tuple)

    def text(self, name: str) -> str | None:
        """The value of a text key; None if it is not set."""
        return None if self._values[name] is None else self._typed(name, str)

    def get(self, name: str) -> Value:
        """The value of any key. Raises KeyError for a name that is no broker key."""
        return self._values[name]

    def on_listener(self, listener: str, name: str, mechanism: str = "") -> Value:
        """What holds for a key of ``OF_LISTENERS`` on a listener, and for a mechanism of SASL."""
        layers = (*self._dynamic.values(), self._static)
        prefix = f"{LISTENER_PREFIX}{listener.lower()}."
        for full in (f"{prefix}{mechanism.lower()}.{name}", prefix + name):
            for layer in layers:
                if full in layer:
                    return OF_LISTENERS[name].parse(layer[full])
        return self._values[name]

    def is_set_on_listener(self, listener: str, name: str) -> _Bool:
        """Whether a listener has a value of its own."""
        full = f"{LISTENER_PREFIX}{listener.lower()}.{name}"
        return any(full in layer for layer in (*self._dynamic.values(), self._static))

    def settings(self, name: str) -> list[Setting]:
        """Where a broker key is set, the strongest first; the last one is its default."""
        default = Setting(name, BROKER_KEYS[name].default, ConfigSource.DEFAULT)
        return [*self._places([name]), default]

    def _places(self, names: Collection[str]) -> list[Setting]:
        """Where these keys are set, level by level, and on each level in the order of ``names``."""
        layers = (*self._dynamic.items(), (ConfigSource.STATIC_BROKER, self._static))
        return [
            Setting(name, layer[name], source)
            for source, layer in layers
            for name in names
            if name in layer
        ]

    def static_text(self, name: str) -> str | None:
        """What holds for a broker key where no dynamic setting does."""
        return self._static.get(name, BROKER_KEYS[name].default)

    def synonyms(self, name: str) -> list[Setting]:
        """Where a broker key and its synonyms are set, level by level, the strongest first.

        As in Kafka the list begins with the key itself: a value in hours is shown behind the one in
        milliseconds, and not alone.

        Source: ``ConfigHelper.configSynonyms``.
        """
        names = _synonyms(name)
        found = self._places(names)
        defaults = ((one, BROKER_KEYS[one].default) for one in names if one in BROKER_KEYS)
        found += [
            Setting(one, text, ConfigSource.DEFAULT) for one, text in defaults if text is not None
        ]
        return list(dropwhile(lambda item: item.name != name, found))

    def other_keys(self) -> dict[str, tuple[ConfigKey, list[Setting]]]:
        """The keys that are set and not in ``BROKER_KEYS``, and where, by their whole names.

        They are for single listeners, or unknown here: a controller of Apache Kafka keeps any key.
        """
        layers = (*self._dynamic.items(), (ConfigSource.STATIC_BROKER, self._static))
        found: dict[str, tuple[ConfigKey, list[Setting]]] = {}
        for source, layer in layers:
            for name, text in layer.items():
                if name not in BROKER_KEYS:
                    key = _key_of_listener(name) or _UNKNOWN_KEY
                    known = found.setdefault(name, (replace(key, name=name), []))
                    known[1].append(Setting(name, text, source))
        return found

    def without_effect(self) -> list[tuple[str, str]]:
        """(key, reason) of the static settings that change nothing, for a warning."""
        inert = {name: _key(name).inert for name in self._static if _key(name).inert}
        if not self._values["zookeeper.connect"]:
            reason = "the controllers are not on ZooKeeper: zookeeper.connect is not set"
            inert |= {name: reason for name in self._static if name in ON_ZOOKEEPER}
        return [*inert.items(), *self._ignored.items()]

    # --- topic level ---

    def topic_settings(self, name: str, overrides: Mapping[str, str]) -> list[Setting]:
        """Where a topic key is set, the strongest first; text is in the unit of its own key."""
        found = []
        if name in overrides:
            found.append(Setting(name, overrides[name], ConfigSource.TOPIC))
        key = TOPIC_KEYS[name]
        if key.synonyms:
            return found + self.synonyms(key.synonyms[0].name)
        return [*found, Setting(name, key.default, ConfigSource.DEFAULT)]

    def topic_source(self, name: str, overrides: Mapping[str, str]) -> ConfigSource:
        """What level the value of a topic key comes from."""
        settings = self.topic_settings(name, overrides)
        return settings[0].source if settings else ConfigSource.DEFAULT

    def topic_value(self, name: str, overrides: Mapping[str, str]) -> Value:
        """What holds for a topic key, in its own unit."""
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
        """The dynamic settings of one level."""
        return self._dynamic[source]

    def check_dynamic(self, settings: Mapping[str, str], before: Mapping[str, str] = {}) -> None:
        """Check the dynamic settings that differ from those ``before``.

        A setting that stays as it was refuses no other: a controller of Apache Kafka keeps any key.
        Raises ConfigError for unknown keys, and InvalidRequestError for bad values and for keys
        that are fixed while the broker runs.
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
                # So answers ``ConfigAdminManager.validateBrokerConfigChange`` (KAFKA-13609).
                raise InvalidRequestError(str(error)) from error
            if not key.updatable:
                raise InvalidRequestError(f"Cannot update these configs dynamically: {name}")
            if name in OF_LISTENERS and name.startswith("ssl."):
                raise InvalidRequestError(
                    "These security configs can be dynamically updated only per-listener using the"
                    f" listener prefix: {name}"
                )

    def proposed(self, source: ConfigSource, settings: Mapping[str, str]) -> BrokerConfig:
        """What would hold with these dynamic settings of one level, less unusable ones."""
        made = BrokerConfig(self._static)
        made._dynamic = {**self._dynamic, source: _usable(settings)}
        made._refresh()
        return made

    def set_dynamic(self, source: ConfigSource, settings: Mapping[str, str]) -> None:
        """Replace the dynamic settings of one level and tell the listeners.

        A value that this broker cannot use is logged and left out: a controller of Apache Kafka
        may have kept it. Source: ``DynamicBrokerConfig.removeInvalidConfigs``.
        """
        self._dynamic[source] = _usable(settings)
        self._changed()

    def listen(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called after every change of a setting; its failure is logged."""
        self._listeners.append(callback)

    def _changed(self) -> None:
        self._refresh()
        for listener in self._listeners:
            with survived("settings changed"):
                listener()

    def _refresh(self) -> None:
        self._values = {
            name: key.value_of(self.settings(name)[0].text) for name, key in BROKER_KEYS.items()
        }


def _key(name: str) -> ConfigKey:
    """The key of a setting that was accepted."""
    found = _find_key(name)
    if found is None:
        raise KeyError(name)
    return found


def _find_key(name: str) -> ConfigKey | None:
    """Return the key of a broker's setting, also of one for a single listener; None if unknown."""
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
    """The key of ``listener.name.LISTENER.KEY``, or of one with a mechanism before KEY."""
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
"""Keys of the same meaning in different units, the strongest first."""


def _synonyms(name: str) -> tuple[str, ...]:
    """The broker keys of the same meaning, the strongest first.

    Source: ``DynamicBrokerConfig.brokerConfigSynonyms``.
    """
    if name == "log.flush.interval.ms":
        return name, "log.flush.scheduler.interval.ms"
    of_listener = _key_of_listener(name)
    if of_listener is not None:
        return name, of_listener.name
    return next((names for names in _UNITS if name in names), (name,))


def is_password(name: str) -> bool:
    """Whether a broker's setting of this name is a password."""
    key = _find_key(name)
    return key is not None and key.type is ConfigType.PASSWORD


def _broker_name(given: str, text: str) -> str:
    if given in BROKER_KEYS:
        return given
    topic_key = TOPIC_KEYS.get(given)
    if topic_key is not None and topic_key.synonyms:
        return topic_key.synonyms[0].name
    if given in SYNONYMS:
        return SYNONYMS[given]
    if given in REPLACED:
        raise ConfigError(given, text, REPLACED[given])
    # Without the value: perhaps it is a password, under a name with a mistake in it.
    raise ConfigError(given, None, _unknown(given))


def _unknown(name: str) -> str:
    """What is said of a key that is unknown, with the nearest one."""
    known: Iterable[str] = (*BROKER_KEYS, *IGNORED_KEYS, *TOPIC_KEYS)
    if name.startswith(LISTENER_PREFIX):
        listener, _, _ = name.removeprefix(LISTENER_PREFIX).partition(".")
        known = (f"{LISTENER_PREFIX}{listener}.{key}" for key in OF_LISTENERS)
    return f"unknown configuration{nearest(name, known)}"


def _reason_to_ignore(name: str) -> str:
    """Why a key of Apache Kafka's is accepted and kept nowhere; empty for every other name."""
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


def _check_together(values: Mapping[str, Value]) -> None:
    """Raise ConfigError where two bounds contradict each other, so that no client could get in."""
    for low, high in (
        ("group.min.session.timeout.ms", "group.max.session.timeout.ms"),
        ("log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"),
        *(
            (f"group.consumer.{low}{name}", f"group.consumer.{high}{name}")
            for name in ("session.timeout.ms", "heartbeat.interval.ms", "assignment.interval.ms")
            for low, high in (("min.", "max."), ("min.", ""), ("", "max."))
        ),
    ):
        smaller, larger = values[low], values[high]
        if isinstance(smaller, int) and isinstance(larger, int) and smaller > larger:
            raise ConfigError(low, smaller, f"it is above {high} ({larger})")
    beat, session = "group.consumer.heartbeat.interval.ms", "group.consumer.session.timeout.ms"
    between, silence = values[beat], values[session]
    if isinstance(between, int) and isinstance(silence, int) and between >= silence:
        raise ConfigError(beat, between, f"it must be below {session} ({silence})")


# --- topic level ---------------------------------------------------------------------------------


def check_topic_configs(config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Check settings that a topic shall have. Raises ConfigError."""
    for name, text in overrides.items():
        if name not in TOPIC_KEYS:
            raise ConfigError(name, text, "unknown topic configuration")
        TOPIC_KEYS[name].parse(text)
    found = log_config(config, overrides)
    shortest, longest = found.min_compaction_lag_ms, found.max_compaction_lag_ms
    if shortest > longest:
        raise ConfigError(
            "min.compaction.lag.ms", shortest, f"it is above max.compaction.lag.ms ({longest})"
        )


def log_config(config: BrokerConfig, overrides: Mapping[str, str]) -> LogConfig:
    """The configuration of the logs of a topic with these settings of its own.

    The broker's settings may have changed since the topic's were checked, so that they contradict
    each other. A log bears that.
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
