"""Validation of the settings of topics, brokers and groups, for the controller.

Source: ``ControllerConfigurationValidator``, ``KafkaConfigSchema``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.cluster.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from fencepost.coordinator.config import client_metrics, group_settings
from fencepost.coordinator.config.broker_config import (
    BROKER_KEYS,
    LISTENER_PREFIX,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigKey,
    ConfigType,
    check_topic_configs,
)
from fencepost.coordinator.config.client_metrics import CLIENT_METRICS_KEYS
from fencepost.coordinator.config.group_keys import GROUP_OWN_KEYS
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS
from fencepost.coordinator.metadata.state_topics import check_state_topic


def check_configs(
    config: BrokerConfig,
    kind: int,
    name: str,
    configs: Mapping[str, str],
    before: Mapping[str, str],
) -> None:
    """Raise ConfigError or InvalidRequestError unless a resource can have all these settings."""
    if kind == TOPIC_RESOURCE:
        check_topic_configs(config, configs)
        check_state_topic(name, configs)
    elif kind == BROKER_RESOURCE:
        config.check_dynamic(configs, before)
        if name == DEFAULT_SETTINGS:
            _check_for_all_brokers(configs)
    elif kind == GROUP_RESOURCE:
        group_settings.check(config, configs)
    elif kind == CLIENT_METRICS_RESOURCE:
        client_metrics.check(configs)


_KEYS: Mapping[int, Mapping[str, ConfigKey]] = {
    TOPIC_RESOURCE: TOPIC_KEYS,
    BROKER_RESOURCE: BROKER_KEYS,
    GROUP_RESOURCE: GROUP_OWN_KEYS,
    CLIENT_METRICS_RESOURCE: CLIENT_METRICS_KEYS,
}


def list_default(kind: int, key: str) -> str | None:
    """Return the default of a list key; None for a key of another type.

    The broker's own settings are ignored, since other brokers may not share them. Source:
    ``ConfigurationControlManager.getParts``, ``KafkaConfigSchema.getDefault``.
    """
    keys: Mapping[str, ConfigKey] = _KEYS.get(kind, {})
    if key not in keys or keys[key].type is not ConfigType.LIST:
        return None
    return keys[key].default or ""


def _check_for_all_brokers(configs: Mapping[str, str]) -> None:
    """Raise InvalidRequestError for per-broker settings.

    Source: ``DynamicBrokerConfig.perBrokerConfigs``.
    """
    broker_settings = [
        name
        for name in configs
        if name.startswith(LISTENER_PREFIX)
        and name.removeprefix(LISTENER_PREFIX).partition(".")[2].startswith("ssl.")
    ]
    if broker_settings:
        raise InvalidRequestError(
            f"Cannot update these configs at default cluster level: {', '.join(broker_settings)}"
        )
