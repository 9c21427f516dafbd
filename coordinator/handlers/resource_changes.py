"""Configuration changes of topics, brokers, groups and the logger.

A request's changes of a resource are validated together before anything is written.

Source: ``ConfigAdminManager``; the rules of ``ConfigurationControlManager`` are in
:mod:`fencepost.cluster.controller.configs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fencepost.cluster.controller.configs import AlterConfig, CheckConfigs, OpType
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config import logs
from fencepost.coordinator.config.broker_config import ConfigError
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.controller_decisions import decider
from fencepost.coordinator.handlers.resources import ConfigResourceType, check_node
from fencepost.coordinator.metadata.config_checks import check_configs, list_default
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS
from fencepost.coordinator.metadata.names import check_name

MAX_CHANGES_PER_RESOURCE = 1_000
"""The maximum number of changes of one resource in a request, several times the number of existing
keys."""


class ConfigChange(NamedTuple):
    """One incremental change; ``operation`` is a number of :class:`OpType`."""

    name: str
    operation: int
    value: str | None


Permit = Callable[[], None]
"""Raises an authorization error if the client may not change the resource."""


def replace(
    ctx: Context,
    kind: int,
    name: str,
    entries: Iterable[tuple[str, str | None]],
    *,
    validate_only: bool,
    permit: Permit,
) -> None:
    """Replace a resource's settings (AlterConfigs); remove the keys that are not named.

    Raises the errors of ``permit``, InvalidRequestError, InvalidTopicError, and the errors of
    :func:`fencepost.cluster.controller.configs.legacy_alter_configs`.
    """
    configs: dict[str, str | None] = {}
    for key, value in entries:
        if value is None:
            raise InvalidRequestError(f"Null value not supported for : {key}")
        if key in configs:
            raise InvalidRequestError(f"Error due to duplicate config keys : {key}")
        configs[key] = value
    if kind == ConfigResourceType.BROKER_LOGGER:
        raise InvalidRequestError("log levels can only be changed with IncrementalAlterConfigs")
    _check_permission(ctx, kind, name, permit)
    decider(ctx)(
        lambda controller: controller.legacy_alter_configs(
            (kind, name),
            configs,
            check_configs=_checks(ctx),
            validate_only=validate_only,
        )
    )


def change(
    ctx: Context,
    kind: int,
    name: str,
    changes: list[ConfigChange],
    *,
    validate_only: bool,
    permit: Permit,
) -> None:
    """Change single settings of a resource (IncrementalAlterConfigs).

    Raises the errors of ``permit``, InvalidRequestError, InvalidTopicError, ConfigError for a
    logger, and the errors of
    :func:`fencepost.cluster.controller.configs.incremental_alter_configs`.
    """
    if len(changes) > MAX_CHANGES_PER_RESOURCE:
        raise InvalidRequestError(f"more than {MAX_CHANGES_PER_RESOURCE} changes of a resource")
    seen: set[str] = set()
    for config_change in changes:
        if config_change.name in seen:
            raise InvalidRequestError(f"Error due to duplicate config keys : {config_change.name}")
        seen.add(config_change.name)
        if config_change.value is None and config_change.operation != OpType.DELETE:
            raise InvalidRequestError(f"Null value not supported for : {config_change.name}")
    _check_permission(ctx, kind, name, permit)
    if kind == ConfigResourceType.BROKER_LOGGER:
        _change_logger(ctx.broker, name, changes, validate_only=validate_only)
        return
    alterations = [
        AlterConfig(config_change.name, _op_type(config_change), config_change.value)
        for config_change in changes
    ]
    decider(ctx)(
        lambda controller: controller.incremental_alter_configs(
            (kind, name),
            alterations,
            check_configs=_checks(ctx),
            list_default=list_default,
            validate_only=validate_only,
        )
    )


def _check_permission(ctx: Context, kind: int, name: str, permit: Permit) -> None:
    """Raise if the client may not change the settings, or if this process does not store them."""
    permit()
    if kind == ConfigResourceType.BROKER and name != DEFAULT_SETTINGS:
        _check_changeable(ctx, name)
    if (
        kind in {ConfigResourceType.GROUP, ConfigResourceType.CLIENT_METRICS}
        and ctx.zookeeper_controller is not None
    ):
        # Kafka 3.9, the last release with ZooKeeper, has no such settings on znodes.
        raise InvalidRequestError(f"Unknown resource type {kind}")


def _checks(ctx: Context) -> CheckConfigs:
    """Return a check of a resource's name and of its settings after a change.

    Source: ``ControllerConfigurationValidator``.
    """

    def check(kind: int, name: str, configs: Mapping[str, str], before: Mapping[str, str]) -> None:
        _check_resource(kind, name)
        check_configs(ctx.broker.config, kind, name, configs, before)

    return check


def _check_resource(kind: int, name: str) -> None:
    if kind not in {
        ConfigResourceType.TOPIC,
        ConfigResourceType.BROKER,
        ConfigResourceType.GROUP,
        ConfigResourceType.CLIENT_METRICS,
    }:
        raise InvalidRequestError(f"Unsupported resource type: {kind}")
    if not name and kind != ConfigResourceType.BROKER:
        raise InvalidRequestError("the name of the resource is empty")
    if kind == ConfigResourceType.TOPIC:
        check_name(name)


def _op_type(config_change: ConfigChange) -> OpType:
    try:
        return OpType(config_change.operation)
    except ValueError:
        raise InvalidRequestError(
            f"Unknown operation type {config_change.operation} of {config_change.name}"
        ) from None


def _check_changeable(ctx: Context, name: str) -> None:
    """Raise unless this node stores the broker's settings; a controller stores every broker's."""
    is_known = name.isdecimal() and int(name) in ctx.metadata.image.brokers
    if not (ctx.keeps_all_brokers_settings and is_known):
        check_node(ctx.broker, name)


def _change_logger(
    broker: Services, name: str, changes: list[ConfigChange], *, validate_only: bool
) -> None:
    check_node(broker, name)
    level = logs.level()
    for change in changes:
        if change.operation not in {OpType.SET, OpType.DELETE}:
            raise InvalidRequestError(f"the level of {change.name} can only be set")
        if change.name != logs.ROOT:
            raise ConfigError(change.name, change.value, "there is no such logger")
        if change.operation == OpType.DELETE:
            raise InvalidRequestError(f"the level of {logs.ROOT} cannot be removed")
        if change.value not in logs.LEVELS:
            raise ConfigError(
                change.name, change.value, f"the level must be one of {', '.join(logs.LEVELS)}"
            )
        level = str(change.value)
    if not validate_only:
        logs.set_level(level)
