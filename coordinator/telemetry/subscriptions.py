"""Subscriptions of client metrics, and which of them a client instance matches.

Expressions are matched by RE2/J's rules, in linear time and in steps. Apache Kafka compiles them
with ``java.util.regex``; an expression with lookarounds, backreferences or possessive quantifiers,
which RE2/J lacks, matches no client here.

Source: ``ClientMetricsInstanceMetadata.isMatch``, ``ClientMetricsManager.createClientInstance``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import UUID

import structlog

from fencepost.coordinator.config.client_metrics import (
    DEFAULT_INTERVAL_MS,
    SubscriptionSettings,
    settings_of,
)
from fencepost.coordinator.config.key import ConfigError
from fencepost.logcore.checkpoints import uuid_to_text
from fencepost.logcore.machine import InvalidRegularExpressionError
from fencepost.logcore.regex import Regex, in_steps
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass

ALL_METRICS: Final = "*"

UNKNOWN_SOFTWARE: Final = ("unknown", "unknown")
"""The name and version of a client that has not sent them."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Client:
    """The client behind a request, as its connection shows it."""

    client_id: str | None
    software_name: str | None
    software_version: str | None
    host: str
    port: int

    def attributes(self, instance_id: UUID) -> dict[str, str | None]:
        """Return the values against which conditions are matched, by parameter."""
        return {
            "client_instance_id": uuid_to_text(instance_id),
            "client_id": self.client_id,
            "client_software_name": self.software_name,
            "client_software_version": self.software_version,
            "client_source_address": self.host,
            "client_source_port": str(self.port),
        }


class Subscription:
    """A subscription with its conditions: expressions that must match the whole value."""

    def __init__(self, name: str, settings: SubscriptionSettings) -> None:
        self.name = name
        self.metrics, self.interval_ms = settings.metrics, settings.interval_ms
        self._conditions = {param: Regex(text) for param, text in settings.match.items()}
        self._is_usable = True

    def matches(self, attributes: Mapping[str, str | None]) -> Steps[bool]:
        """Return, in steps, whether a client with these attributes matches all conditions."""
        if not self._is_usable:
            return False
        for param, regex in self._conditions.items():
            text = attributes[param]
            if text is None:
                return False
            try:
                yield from in_steps(regex, regex.build())
            except InvalidRegularExpressionError as error:
                self._is_usable = False
                _log.warning(
                    "client metrics subscription matches no client",
                    subscription=self.name,
                    condition=f"{param}={regex.pattern}",
                    cause=str(error),
                )
                return False
            if not (yield from in_steps(regex, regex.walk(text))):
                return False
        return True


@dataclass(frozen=True, slots=True)
class RequestedMetrics:
    """The metrics that one client instance should push, and the push interval."""

    metrics: tuple[str, ...] = ()
    """Prefixes of names, ordered; ``*`` stands for all metrics."""
    interval_ms: int = DEFAULT_INTERVAL_MS


class Subscriptions:
    """All subscriptions; :meth:`replace` is called when their settings have changed."""

    def __init__(self) -> None:
        self.version = 0
        """Increases with each change; instances with an older version are matched again."""
        self._settings: Mapping[str, Mapping[str, str]] = {}
        self._subscriptions: tuple[Subscription, ...] = ()

    def replace(self, settings: Mapping[str, Mapping[str, str]]) -> None:
        """Install the settings of all subscriptions, by their names."""
        if settings == self._settings:
            return
        former = {subscription.name: subscription for subscription in self._subscriptions}
        subscriptions: list[Subscription] = []
        for name, texts in settings.items():
            if name in former and texts == self._settings[name]:
                subscriptions.append(former[name])
                continue
            try:
                subscriptions.append(Subscription(name, settings_of(texts)))
            except ConfigError as error:
                # Another release or Apache Kafka's controller may have accepted these settings.
                _log.warning(
                    "client metrics subscription ignored", subscription=name, cause=str(error)
                )
        self._settings, self._subscriptions = settings, tuple(subscriptions)
        self.version += 1

    def wanted(self, client: Client, instance_id: UUID) -> Steps[RequestedMetrics]:
        """Return, in steps, the metrics and interval of all subscriptions that match a client."""
        attributes = client.attributes(instance_id)
        metrics: set[str] = set()
        interval_ms = DEFAULT_INTERVAL_MS
        for subscription in self._subscriptions:
            if (yield from subscription.matches(attributes)):
                metrics.update(subscription.metrics)
                interval_ms = min(interval_ms, subscription.interval_ms)
            yield
        if ALL_METRICS in metrics:
            metrics = {ALL_METRICS}
        return RequestedMetrics(tuple(sorted(metrics)), interval_ms)
