"""Client instances: their subscriptions, and when they may send the next request.

Source: ``ClientMetricsInstance``, ``ClientMetricsManager``.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from crc32c import crc32c

from fencepost.coordinator.telemetry.reports import Report
from fencepost.coordinator.telemetry.subscriptions import Client, RequestedMetrics
from fencepost.logcore.machine import DomainError

_NEVER: Final = -(1 << 62)
_INT32: Final = 1 << 32
_INT64_MASK: Final = (1 << 64) - 1


class ClientInstance:
    """One producer, consumer or admin client, and its subscription."""

    def __init__(
        self, instance_id: UUID, client: Client, version: int, requested: RequestedMetrics
    ) -> None:
        self.instance_id, self.client = instance_id, client
        self.version = version
        """The version of the subscriptions with which the instance was matched."""
        self.metrics, self.interval_ms = requested.metrics, requested.interval_ms
        self.subscription_id = subscription_id(requested, instance_id)
        self.is_terminating = False
        self.last_error: type[DomainError] | None = None
        """Why the last push was refused."""
        self.expires_ms = 0
        self.report = Report()
        self.pause_noted_ms: int | None = None
        """When a pause between polls was last recorded in the history."""
        self._last_get_ms = self._last_push_ms = _NEVER

    def may_get(self, now_ms: int) -> bool:
        """Return whether the push interval has passed since the last counted request or push.

        If it has, count the current request.
        """
        if now_ms - max(self._last_get_ms, self._last_push_ms) < self.interval_ms:
            return False
        self._last_get_ms = now_ms
        return True

    def may_push(self, now_ms: int) -> bool:
        """Return whether the push interval has passed since the last counted push.

        If it has, count the current push. The first push after the client has fetched its
        subscription may come at any time, because the client waits for a random time between 0.5
        and 1.5 intervals.
        """
        is_first = self._last_get_ms > self._last_push_ms
        if not is_first and now_ms - self._last_push_ms < self.interval_ms:
            return False
        self._last_push_ms = now_ms
        return True


def subscription_id(requested: RequestedMetrics, instance_id: UUID) -> int:
    """Return the subscription id, a signed 32-bit number that is the same on every broker.

    With one metric or none, the result is Kafka's subscription id. With several metrics, Kafka's id
    depends on the order of Java's hash set.
    """
    text = f"[{', '.join(requested.metrics)}]{requested.interval_ms}"
    halves = (instance_id.int >> 64) ^ (instance_id.int & _INT64_MASK)
    id_ = crc32c(text.encode()) ^ (halves >> 32) ^ (halves & (_INT32 - 1))
    return id_ - _INT32 if id_ >= _INT32 >> 1 else id_
