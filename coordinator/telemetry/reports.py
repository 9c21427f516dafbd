"""The last values of the metrics that one client instance has pushed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from fencepost.coordinator.telemetry.otlp import Attributes, ClientMetrics, Point
from fencepost.logcore.steps import Steps

MAX_SERIES: Final = 1_000
"""The maximum number of series of one client instance; further series are counted and dropped."""

SERIES_BYTES: Final = 300
"""The approximate memory of a series, without its attributes."""

AT_ONCE: Final = 200
"""The number of data points that are applied between two yields."""

_PREFIX: Final = "org.apache.kafka."

POLL_PAUSE: Final = "time_between_polls_max_ms"

HIGHLIGHTS: Final[Mapping[str, str]] = {
    f"{_PREFIX}{name}": short
    for name, short in {
        "consumer.time.between.poll.max": POLL_PAUSE,
        "consumer.share.time.between.poll.max": POLL_PAUSE,
        "consumer.last.poll.seconds.ago": "last_poll_seconds_ago",
        "consumer.share.last.poll.seconds.ago": "last_poll_seconds_ago",
        "consumer.poll.idle.ratio.avg": "poll_idle_ratio",
        "consumer.share.poll.idle.ratio.avg": "poll_idle_ratio",
        "consumer.coordinator.commit.latency.max": "commit_latency_max_ms",
        "consumer.coordinator.rebalance.total": "rebalances",
        "consumer.coordinator.rebalance.latency.max": "rebalance_latency_max_ms",
        "consumer.coordinator.failed.rebalance.total": "failed_rebalances",
        "consumer.fetch.manager.fetch.latency.max": "fetch_latency_max_ms",
        "consumer.fetch.manager.records.lag.max": "records_lag_max",
        "producer.request.latency.max": "request_latency_max_ms",
        "producer.record.queue.time.max": "record_queue_time_max_ms",
        "producer.record.error.total": "record_errors",
        "producer.record.retry.total": "record_retries",
    }.items()
}
"""Short names of the metrics that are shown for each client, by Kafka's names (KIP-714)."""


class Value(NamedTuple):
    """The last value of a series, or the sum of all deltas for a counter."""

    value: float
    unit: str
    time_ms: int


class Report:
    """The last values that one client instance has pushed."""

    def __init__(self) -> None:
        self.at_ms: int | None = None
        """The time of the last push, in milliseconds since 1970; None before the first push."""
        self.pushes = 0
        self.resource: dict[str, str] = {}
        self.dropped = 0
        """The number of data points of the last push that are not kept."""
        self.series_bytes = 0
        """The approximate memory of the series."""
        self.counted_bytes = 0
        """The bytes of this report that are included in the manager's total for all instances."""
        self._series: dict[tuple[str, Attributes], Value] = {}
        self.highlights: dict[str, float] = {}
        """Values by the short names of :data:`HIGHLIGHTS`: the greatest value of a metric with
        several series."""

    def __len__(self) -> int:
        return len(self._series)

    @property
    def group(self) -> str | None:
        """The group that a consumer reports."""
        return self.resource.get("group_id")

    @property
    def member(self) -> str | None:
        """The member id in the group: ``group_member_id``; librdkafka calls it ``member_id``."""
        return self.resource.get("group_member_id") or self.resource.get("member_id")

    def apply(self, pushed: ClientMetrics, now_ms: int) -> Steps[None]:
        """Keep the values of a push, in steps."""
        self.at_ms = now_ms
        self.pushes += 1
        self.resource = pushed.resource
        self.dropped = pushed.dropped
        highlights: dict[str, float] = {}
        for count, point in enumerate(pushed.points, 1):
            value = self._store_point(point)
            short = HIGHLIGHTS.get(point.name)
            if short is not None:
                highlights[short] = max(value, highlights.get(short, value))
            if not count % AT_ONCE:
                yield
        self.highlights |= highlights

    def _store_point(self, point: Point) -> float:
        key = point.name, point.attributes
        point_value = self._series.get(key)
        value = point.value
        if point_value is not None and point.is_delta:
            value += point_value.value
        if point_value is None and len(self._series) >= MAX_SERIES:
            self.dropped += 1
            return value
        if point_value is None:
            texts = sum(len(key) + len(text) for key, text in point.attributes)
            self.series_bytes += SERIES_BYTES + 2 * texts
        self._series[key] = Value(value, point.unit, point.time_ms)
        return value

    def forget_series(self) -> None:
        """Free the memory of the series; the highlights stay."""
        self._series.clear()
        self.series_bytes = 0

    def series(self) -> Iterator[tuple[str, Attributes, Value]]:
        """Yield the name, the attributes and the value of each series, by name."""
        for (name, attributes), value in sorted(self._series.items()):
            yield name, attributes, value
