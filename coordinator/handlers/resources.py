"""The configuration of topics, brokers, groups and the logger, as DescribeConfigs returns it.

A resource is a type and a name.

Source: ``ConfigHelper``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config import client_metrics, group_settings, logs
from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    BrokerConfig,
    ConfigKey,
    ConfigSource,
    ConfigType,
    Setting,
    shown_topic_keys,
)
from fencepost.coordinator.config.client_metrics import CLIENT_METRICS_KEYS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.config.key import text_of
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS
from fencepost.coordinator.metadata.names import check_name
from fencepost.coordinator.metadata.state_topics import safe_configs, value_in_force


class ConfigResourceType(IntEnum):
    """The types of configurable resources; the numbers are Kafka's ``ConfigResource.Type``."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class Described(NamedTuple):
    """A resource's key with its effective value. ``synonyms`` are in order of precedence."""

    key: ConfigKey
    value: str | None
    source: ConfigSource
    synonyms: list[Setting]
    read_only: bool = False


LOGGER = ConfigKey(logs.ROOT, ConfigType.STRING, None, "The lowest level that is logged.")


# --- describing ----------------------------------------------------------------------------------


def describe(broker: Services, kind: int, name: str) -> list[Described]:
    """Return all keys of a resource.

    Raises InvalidRequestError, InvalidTopicError, UnknownTopicOrPartitionError.
    """
    if kind == ConfigResourceType.TOPIC:
        return _describe_topic(broker, name)
    if kind == ConfigResourceType.BROKER:
        return _describe_broker(broker, name)
    if kind == ConfigResourceType.BROKER_LOGGER:
        check_node(broker, name)
        level = Setting(logs.ROOT, logs.level(), ConfigSource.BROKER_LOGGER)
        return [_described(LOGGER, [level])]
    if kind in {ConfigResourceType.GROUP, ConfigResourceType.CLIENT_METRICS}:
        if not name:
            raise InvalidRequestError("the name of the resource is empty")
        if kind == ConfigResourceType.GROUP:
            return _describe_group(broker, name)
        return _describe_client_metrics(broker, name)
    raise InvalidRequestError(f"Unsupported resource type: {kind}")


def _describe_topic(broker: Services, name: str) -> list[Described]:
    # Internal topics are described as well: kafka-topics queries all existing topics.
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
    config, settings = broker.config, broker.metadata.group_settings(name)
    described = (
        _described(key, group_settings.config_synonyms(config, key.name, settings))
        for key in GROUP_OWN_KEYS.values()
    )
    return [
        config._replace(value=group_settings.shown_value(config.key.name, config.value))
        for config in described
        if not config.key.internal or config.source is not ConfigSource.DEFAULT
    ]


def _describe_client_metrics(broker: Services, name: str) -> list[Described]:
    settings = broker.metadata.client_metrics_settings(name)
    described = []
    for key in CLIENT_METRICS_KEYS.values():
        levels = client_metrics.levels(key.name, settings)
        default = Setting(key.name, key.default, ConfigSource.DEFAULT)
        described.append(_described(key, [*levels, default])._replace(synonyms=levels))
    return described


def _describe_broker(broker: Services, name: str) -> list[Described]:
    config = broker.config
    others = config.other_keys()
    if name == DEFAULT_SETTINGS:
        source = ConfigSource.DYNAMIC_DEFAULT_BROKER
        described = [
            _broker_key(
                config,
                others[key][0] if key in others else BROKER_KEYS[key],
                [Setting(key, text, source)],
            )
            for key, text in config.dynamic(source).items()
        ]
        return [
            config._replace(synonyms=[place for place in config.synonyms if place.source is source])
            for config in described
        ]
    check_node(broker, name)
    broker_settings = [
        _broker_key(config, key, settings)
        for key in BROKER_KEYS.values()
        if len(settings := config.settings(key.name)) > 1 or not key.internal
    ]
    return [*broker_settings, *(_broker_key(config, *other) for other in others.values())]


def _broker_key(config: BrokerConfig, key: ConfigKey, settings: list[Setting]) -> Described:
    described = _described(key, settings)
    return described._replace(synonyms=config.synonyms(key.name), read_only=not key.updatable)


def _described(key: ConfigKey, settings: list[Setting]) -> Described:
    return Described(key, settings[0].text, settings[0].source, settings)


def check_node(broker: Services, name: str) -> None:
    """Raise InvalidRequestError unless ``name`` is the id of this node."""
    if name != str(broker.node_id):
        raise InvalidRequestError(
            f"Unexpected broker id, expected {broker.node_id}, but received {name!r}"
        )
