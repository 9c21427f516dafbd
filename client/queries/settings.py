"""The settings of topics, brokers, groups and client metrics: values, sources and changes.

Source: ``ConfigCommand`` of Kafka; DescribeConfigs and IncrementalAlterConfigs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fencepost.client.queries.session import check

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

KINDS = {"topic": 2, "broker": 4, "client-metrics": 16, "group": 32}
"""The resource types of DescribeConfigs, by the names that the commands give them."""

SOURCES = {
    1: "topic",
    2: "broker",
    3: "cluster",
    4: "file",
    5: "default",
    6: "logger",
    7: "client metrics",
    8: "group",
}
"""Sources of values; ``broker`` and ``cluster`` are dynamic, for one broker and for all."""

EVERY_BROKER = ""
"""The name of the resource with the dynamic defaults of all brokers."""

SET, DELETE = 0, 1

Resource = tuple[str, str]
"""A kind, which is a key of :data:`KINDS`, and a name."""


class ConfigEntry(NamedTuple):
    """One setting of one resource. The value of a secret is None."""

    kind: str
    resource: str
    key: str
    value: str | None
    source: str
    is_read_only: bool
    is_secret: bool


def describe_configs(
    session: ClusterSession, resources: Sequence[Resource], keys: Sequence[str] | None = None
) -> list[ConfigEntry]:
    """Return all settings of ``resources``, or only ``keys``, sorted by key. Raises ApiError."""
    entries: list[ConfigEntry] = []
    names = {number: kind for kind, number in KINDS.items()}
    for node, node_resources in _by_node(resources).items():
        answer = session.client.call(
            "DescribeConfigs",
            check=False,
            to_node=node,
            entity=partial(describe_request, resources=node_resources, keys=keys),
        )
        for result in answer.results:
            kind, name = names[result.resource_type], result.resource_name
            check(result.error_code, "DescribeConfigs", name or kind, result.error_message)
            entries += (
                ConfigEntry(
                    kind,
                    name,
                    entry.name,
                    entry.value,
                    SOURCES.get(entry.config_source, str(entry.config_source)),
                    entry.read_only,
                    entry.is_sensitive,
                )
                for entry in sorted(result.configs, key=lambda entry: str(entry.name))
            )
    return entries


def _by_node(resources: Iterable[Resource]) -> dict[int, list[Resource]]:
    """Group resources by node: a broker reports only its own settings; -1 is any node."""
    by_node: dict[int, list[Resource]] = defaultdict(list)
    for kind, name in resources:
        is_one_broker = kind == "broker" and name != EVERY_BROKER and name.isdecimal()
        by_node[int(name) if is_one_broker else -1].append((kind, name))
    return by_node


def describe_request(make: Any, resources: Sequence[Resource], keys: Sequence[str] | None) -> Any:
    """Build a DescribeConfigs of ``resources``; without ``keys``, all keys are requested."""
    return make.message(
        resources=[
            make.DescribeConfigsResource(
                resource_type=KINDS[kind], resource_name=name, configuration_keys=keys
            )
            for kind, name in resources
        ],
    )


def known_keys(session: ClusterSession, resource: Resource) -> set[str]:
    """Return the keys that ``resource`` may have. Raises ApiError."""
    kind, name = resource
    if kind == "broker" and name == EVERY_BROKER:
        # For the defaults of all brokers, DescribeConfigs returns only keys that are set.
        name = str(session.some_broker)
    return {config.key for config in describe_configs(session, [(kind, name)])}


def alter(
    session: ClusterSession,
    resource: Resource,
    put: Mapping[str, str],
    unset: Iterable[str],
    *,
    execute: bool,
) -> None:
    """Change settings, or only validate the change. Raises ApiError with the reason."""
    kind, name = resource
    ((node, _),) = _by_node([resource]).items()

    def build(make: Any) -> Any:
        row = make.AlterableConfig
        configs = [row(name=key, config_operation=SET, value=put[key]) for key in put]
        configs += [row(name=key, config_operation=DELETE, value=None) for key in unset]
        entries = make.AlterConfigsResource(
            resource_type=KINDS[kind], resource_name=name, configs=configs
        )
        return make.message(resources=[entries], validate_only=not execute)

    answer = session.client.call("IncrementalAlterConfigs", check=False, to_node=node, entity=build)
    for result in answer.responses:
        where = result.resource_name or kind
        check(result.error_code, "IncrementalAlterConfigs", where, result.error_message)
