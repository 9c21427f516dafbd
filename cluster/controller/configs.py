"""Changes of dynamic settings.

``check_configs`` decides which values are valid. This module computes the new values, and applies
the rules of eligible leader replicas for ``min.insync.replicas``.

Source: ``ConfigurationControlManager``; KIP-339, KIP-966.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from fencepost.cluster.controller.activation import MIN_INSYNC_REPLICAS
from fencepost.cluster.controller.errors import (
    InvalidConfigError,
    PolicyViolationError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from fencepost.cluster.records import ClearElrRecord, ConfigRecord, MetadataRecord

Resource = tuple[int, str]
"""The type and the name of a resource with settings; "" as a broker's name stands for all
brokers."""

CheckConfigs = Callable[[int, str, Mapping[str, str], Mapping[str, str]], None]
"""Raises a DomainError unless a resource (type, name) may have these settings, given the previous
settings."""


class OpType(IntEnum):
    """The operation on a setting (kafka: ``AlterConfigOp.OpType``)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class AlterConfig(NamedTuple):
    """The change of one setting."""

    name: str
    op: OpType
    value: str | None = None


def incremental_alter_configs(
    view: ControllerView,
    resource: Resource,
    changes: Sequence[AlterConfig],
    *,
    check_configs: CheckConfigs,
    list_default: Callable[[int, str], str | None],
    validate_only: bool = False,
) -> ControllerResult[None]:
    """Change some settings of a resource, or with ``validate_only`` only check the change.

    ``list_default(type, key)`` returns the default value of a setting that is a list, and None for
    any other setting. Raises the errors of ``check_configs``, InvalidConfigError,
    UnknownTopicOrPartitionError, and PolicyViolationError if too many groups have settings.
    """
    current = view.image.configs.get(resource, {})
    altered: dict[str, str | None] = {}
    for change in changes:
        if change.op in (OpType.APPEND, OpType.SUBTRACT):
            default = list_default(resource[0], change.name)
            if default is None:
                raise InvalidConfigError(
                    f"Can't {change.op.name} to key {change.name} because its type is not LIST."
                )
            parts = [element for element in current.get(change.name, default).split(",") if element]
            for element in (change.value or "").split(","):
                if change.op is OpType.APPEND and element not in parts:
                    parts.append(element)
                elif change.op is OpType.SUBTRACT:
                    parts = [part for part in parts if part != element]
            altered[change.name] = ",".join(parts)
        else:
            altered[change.name] = None if change.op is OpType.DELETE else change.value
    return _alter(view, resource, altered, check_configs, validate_only=validate_only)


def legacy_alter_configs(
    view: ControllerView,
    resource: Resource,
    configs: Mapping[str, str | None],
    *,
    check_configs: CheckConfigs,
    validate_only: bool = False,
) -> ControllerResult[None]:
    """Replace all settings of a resource; settings that are not named are removed.

    With ``validate_only`` nothing changes. Raises the errors of :func:`incremental_alter_configs`.
    """
    current = view.image.configs.get(resource, {})
    removed: dict[str, str | None] = {name: None for name in current if name not in configs}
    return _alter(
        view, resource, {**configs, **removed}, check_configs, validate_only=validate_only
    )


def _alter(
    view: ControllerView,
    resource: Resource,
    changes: Mapping[str, str | None],
    check_configs: CheckConfigs,
    *,
    validate_only: bool,
) -> ControllerResult[None]:
    kind, name = resource
    current = view.image.configs.get(resource, {})
    after = {key: value for key, value in {**current, **changes}.items() if value is not None}
    check_configs(kind, name, after, current)
    if kind == TOPIC_RESOURCE and name not in view.image.topics:
        raise UnknownTopicOrPartitionError(f"The topic '{name}' does not exist.")
    _check_min_isr(view, resource, after, changes)
    _check_limit(view, resource, after)
    if validate_only:
        return ControllerResult(None)
    records: list[MetadataRecord] = [
        ConfigRecord(kind, name, key, value)
        for key, value in changes.items()
        # Write a broker's setting even if its value is the same: the file that it names may have
        # changed (KAFKA-14136).
        if current.get(key) != value or kind == BROKER_RESOURCE
    ]
    is_min_isr_new = current.get(MIN_INSYNC_REPLICAS) != after.get(MIN_INSYNC_REPLICAS)
    if is_min_isr_new and view.elr_enabled:
        # The eligible leader replicas depend on the previous value.
        records.append(ClearElrRecord(name if kind == TOPIC_RESOURCE else ""))
    return ControllerResult(None, tuple(records))


def _check_limit(view: ControllerView, resource: Resource, after: Mapping[str, str]) -> None:
    """Raise PolicyViolationError if too many groups or metrics subscriptions have settings."""
    configs, settings = view.image.configs, view.settings
    limits = {
        GROUP_RESOURCE: (settings.max_configured_groups, "groups have settings"),
        CLIENT_METRICS_RESOURCE: (settings.max_client_metrics, "client metrics subscriptions"),
    }
    if resource[0] not in limits or not after or configs.get(resource):
        return
    limit, noun = limits[resource[0]]
    if sum(kind == resource[0] for kind, _ in configs) >= limit:
        raise PolicyViolationError(f"there are {limit} {noun} already")


def _check_min_isr(
    view: ControllerView,
    resource: Resource,
    after: Mapping[str, str],
    changes: Mapping[str, str | None],
) -> None:
    """Raise InvalidConfigError if ELRs are enabled and brokers' ``min.insync.replicas`` differ."""
    kind, name = resource
    if kind != BROKER_RESOURCE or MIN_INSYNC_REPLICAS not in changes or not view.elr_enabled:
        return
    if name:
        raise InvalidConfigError(
            f"Broker-level {MIN_INSYNC_REPLICAS} cannot be altered while ELR is enabled."
        )
    if MIN_INSYNC_REPLICAS not in after:
        raise InvalidConfigError(
            f"Cluster-level {MIN_INSYNC_REPLICAS} cannot be removed while ELR is enabled."
        )
