"""Configuration by request: describing and changing topics, brokers, groups and the logger.

A resource is a type and a name. Changes are checked as a whole before anything is written.

Source: ``ConfigHelper``, ``ConfigAdminManager``, ``ConfigurationControlManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from fencepost.coordinator.config import group_settings, logs
from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    LISTENER_PREFIX,
    TOPIC_KEYS,
    ConfigError,
    ConfigKey,
    ConfigSource,
    ConfigType,
    Setting,
    shown_topic_keys,
)
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.key import text_of
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS
from fencepost.coordinator.metadata.state_topics import safe_configs, value_in_force
from fencepost.coordinator.metadata.topic_admin import check_name
from fencepost.coordinator.services import Services

MAX_CHANGES_PER_RESOURCE = 1_000
"""Entries that change one resource: several times the number of keys there are."""


class ResourceType(IntEnum):
    """What configurations belong to; the numbers are Kafka's ``ConfigResource.Type``."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class Operation(IntEnum):
    """What an incremental change does; the numbers are Kafka's ``AlterConfigOp.OpType``."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Change(NamedTuple):
    """One incremental change."""

    name: str
    operation: int
    value: str | None


class Described(NamedTuple):
    """A key of a resource with what holds for it. ``synonyms`` are the strongest first."""

    key: ConfigKey
    value: str | None
    source: ConfigSource
    synonyms: list[Setting]
    read_only: bool = False


LOGGER = ConfigKey(logs.ROOT, ConfigType.STRING, None, "The lowest level that is logged.")


# --- describing ----------------------------------------------------------------------------------


def describe(broker: Services, kind: int, name: str) -> list[Described]:
    """All keys of a resource.

    Raises InvalidRequestError, InvalidTopicError, UnknownTopicOrPartitionError.
    """
    if kind == ResourceType.TOPIC:
        return _describe_topic(broker, name)
    if kind == ResourceType.BROKER:
        return _describe_broker(broker, name)
    if kind == ResourceType.BROKER_LOGGER:
        _check_node(broker, name)
        level = Setting(logs.ROOT, logs.level(), ConfigSource.BROKER_LOGGER)
        return [_described(LOGGER, [level])]
    if kind in {ResourceType.GROUP, ResourceType.CLIENT_METRICS}:
        if not name:
            raise InvalidRequestError("the name of the resource is empty")
        # Clients have no settings of their own.
        return _describe_group(broker, name) if kind == ResourceType.GROUP else []
    raise InvalidRequestError(f"Unsupported resource type: {kind}")


def _describe_topic(broker: Services, name: str) -> list[Described]:
    # Topics of the broker's own are described as well: kafka-topics asks about all that there are.
    if broker.metadata.topic(name) is None:
        check_name(name)
    broker.metadata.known(name)
    overrides, config = broker.metadata.topic_configs(name), broker.config
    safe = safe_configs(name, overrides)
    return [
        Described(
            key,
            text_of(value_in_force(name, key.name, config.topic_value(key.name, safe))),
            config.topic_source(key.name, overrides),
            config.topic_settings(key.name, overrides),
        )
        for key in shown_topic_keys(overrides)
    ]


def _describe_group(broker: Services, name: str) -> list[Described]:
    config, own = broker.config, broker.metadata.group_settings(name)
    return [
        _described(key, group_settings.places(config, key.name, own))
        for key in GROUP_OWN_KEYS.values()
    ]


def _describe_broker(broker: Services, name: str) -> list[Described]:
    of_listeners = broker.config.of_listeners()
    if name == DEFAULT_SETTINGS:
        source = ConfigSource.DYNAMIC_DEFAULT_BROKER
        return [
            _broker_key(
                of_listeners[key][0] if key in of_listeners else BROKER_KEYS[key],
                [Setting(key, text, source)],
            )
            for key, text in broker.config.dynamic(source).items()
        ]
    _check_node(broker, name)
    own = [_broker_key(key, broker.config.settings(key.name)) for key in BROKER_KEYS.values()]
    return [*own, *(_broker_key(*one) for one in of_listeners.values())]


def _broker_key(key: ConfigKey, settings: list[Setting]) -> Described:
    described = _described(key, settings)
    synonyms = [one for one in settings if one.text is not None]
    return described._replace(synonyms=synonyms, read_only=not key.updatable)


def _described(key: ConfigKey, settings: list[Setting]) -> Described:
    return Described(key, settings[0].text, settings[0].source, settings)


def _check_changeable(ctx: Context, name: str) -> None:
    """Raise unless a broker's own settings may be changed here: a controller keeps everybody's."""
    is_known = name.isdecimal() and int(name) in ctx.metadata.image.brokers
    if not (ctx.keeps_all_brokers_settings and is_known):
        _check_node(ctx.broker, name)


def _check_node(broker: Services, name: str) -> None:
    if name != str(broker.node_id):
        raise InvalidRequestError(
            f"Unexpected broker id, expected {broker.node_id}, but received {name!r}"
        )


# --- changing ------------------------------------------------------------------------------------

Permit = Callable[[], None]
"""Raises what is answered to who may not change a resource."""


def replace(
    ctx: Context,
    kind: int,
    name: str,
    entries: Iterable[tuple[str, str | None]],
    *,
    validate_only: bool,
    permit: Permit,
) -> None:
    """AlterConfigs: what is not named goes back to its default.

    Raises what ``permit`` does, InvalidRequestError, ConfigError, InvalidTopicError,
    UnknownTopicOrPartitionError.
    """
    configs: dict[str, str] = {}
    for key, value in entries:
        if value is None:
            raise InvalidRequestError(f"Null value not supported for : {key}")
        if key in configs:
            raise InvalidRequestError(f"Error due to duplicate config keys : {key}")
        configs[key] = value
    if kind == ResourceType.BROKER_LOGGER:
        raise InvalidRequestError("levels are changed one by one, with IncrementalAlterConfigs")
    _check_permission(ctx, kind, name, permit)
    _store(ctx, kind, name, configs, validate_only=validate_only)


def change(
    ctx: Context,
    kind: int,
    name: str,
    changes: list[Change],
    *,
    validate_only: bool,
    permit: Permit,
) -> None:
    """IncrementalAlterConfigs: set, reset, or edit lists; the rest stays.

    Raises what ``permit`` does, InvalidRequestError, ConfigError, InvalidTopicError,
    UnknownTopicOrPartitionError.
    """
    if len(changes) > MAX_CHANGES_PER_RESOURCE:
        raise InvalidRequestError(f"more than {MAX_CHANGES_PER_RESOURCE} changes of a resource")
    seen: set[str] = set()
    for one in changes:
        if one.name in seen:
            raise InvalidRequestError(f"Error due to duplicate config keys : {one.name}")
        seen.add(one.name)
        if one.value is None and one.operation != Operation.DELETE:
            raise InvalidRequestError(f"Null value not supported for : {one.name}")
    _check_permission(ctx, kind, name, permit)
    if kind == ResourceType.BROKER_LOGGER:
        _change_logger(ctx.broker, name, changes, validate_only=validate_only)
        return
    configs = dict(_stored(ctx, kind, name))
    for one in changes:
        _apply(ctx.broker, kind, configs, one)
    _store(ctx, kind, name, configs, validate_only=validate_only)


def _check_permission(ctx: Context, kind: int, name: str, permit: Permit) -> None:
    """Nothing that is kept is looked at before, nor whether the resource is there."""
    if kind == ResourceType.BROKER and name != DEFAULT_SETTINGS:
        _check_changeable(ctx, name)
    permit()


def _apply(broker: Services, kind: int, configs: dict[str, str], one: Change) -> None:
    if one.operation == Operation.DELETE:
        configs.pop(one.name, None)
    elif one.operation == Operation.SET:
        configs[one.name] = one.value or ""
    elif one.operation in {Operation.APPEND, Operation.SUBTRACT}:
        keys = TOPIC_KEYS if kind == ResourceType.TOPIC else BROKER_KEYS
        key = keys.get(one.name)
        if key is None or key.type is not ConfigType.LIST:
            raise ConfigError(one.name, one.value, "only a list can be appended to or taken from")
        items = _items(configs.get(one.name, _inherited(broker, kind, one.name)))
        named = _items(one.value)
        if one.operation == Operation.APPEND:
            items += [item for item in named if item not in items]
        else:
            items = [item for item in items if item not in named]
        configs[one.name] = ",".join(items)
    else:
        raise InvalidRequestError(f"Unknown operation type {one.operation} of {one.name}")


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _inherited(broker: Services, kind: int, name: str) -> str | None:
    if kind == ResourceType.TOPIC:
        return text_of(broker.config.topic_value(name, {}))
    return text_of(broker.config.get(name))


def _stored(ctx: Context, kind: int, name: str) -> Mapping[str, str]:
    """What is stored for a resource now."""
    if kind == ResourceType.TOPIC:
        return ctx.metadata.topic_configs(name)
    if kind == ResourceType.BROKER:
        return ctx.metadata.settings(name)
    if kind == ResourceType.GROUP:
        return ctx.metadata.group_settings(name)
    return {}


def _store(
    ctx: Context, kind: int, name: str, configs: Mapping[str, str], *, validate_only: bool
) -> None:
    """Check ``configs`` and make them the resource's own."""
    if not name and kind in {ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLIENT_METRICS}:
        raise InvalidRequestError("the name of the resource is empty")
    if kind == ResourceType.TOPIC:
        check_name(name)
        ctx.topics.configure(name, configs, validate_only=validate_only)
    elif kind == ResourceType.BROKER:
        if name != DEFAULT_SETTINGS:
            _check_changeable(ctx, name)
        ctx.broker.config.check_dynamic(configs)
        if name == DEFAULT_SETTINGS:
            _check_for_all_brokers(configs)
        ctx.topics.configure_brokers(name, configs, validate_only=validate_only)
    elif kind == ResourceType.GROUP:
        group_settings.check(ctx.broker.config, configs)
        if not validate_only:
            ctx.broker.storage.metadata_log.set_group_settings(name, configs)
    elif kind == ResourceType.CLIENT_METRICS:
        for key, value in configs.items():
            raise ConfigError(key, value, "clients have no settings here")
    else:
        raise InvalidRequestError(f"Unsupported resource type: {kind}")


def _check_for_all_brokers(configs: Mapping[str, str]) -> None:
    """Refuse what single brokers have. Source: ``DynamicBrokerConfig.perBrokerConfigs``."""
    own = [
        name
        for name in configs
        if name.startswith(LISTENER_PREFIX)
        and name.removeprefix(LISTENER_PREFIX).partition(".")[2].startswith("ssl.")
    ]
    if own:
        raise InvalidRequestError(
            f"Cannot update these configs at default cluster level: {', '.join(own)}"
        )


def _change_logger(
    broker: Services, name: str, changes: list[Change], *, validate_only: bool
) -> None:
    _check_node(broker, name)
    level = logs.level()
    for one in changes:
        if one.operation not in {Operation.SET, Operation.DELETE}:
            raise InvalidRequestError(f"the level of {one.name} can only be set")
        if one.name != logs.ROOT:
            raise ConfigError(one.name, one.value, "there is no such logger")
        if one.operation == Operation.DELETE:
            raise InvalidRequestError(f"the level of {logs.ROOT} can not be taken away")
        if one.value not in logs.LEVELS:
            raise ConfigError(one.name, one.value, f"a level is one of {', '.join(logs.LEVELS)}")
        level = str(one.value)
    if not validate_only:
        logs.set_level(level)
