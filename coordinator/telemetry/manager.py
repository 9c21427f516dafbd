"""The client instances that push metrics to this broker, within limits.

Source: ``ClientMetricsManager``. An instance and its values are dropped when its connection
ends, after three push intervals without a request, or when there are too many instances.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

import structlog

from fencepost.cluster.image import CLIENT_METRICS_RESOURCE
from fencepost.coordinator.errors import (
    InvalidRequestError,
    TelemetryTooLargeError,
    TooEarlyError,
    UnknownSubscriptionIdError,
)
from fencepost.coordinator.history.entries import POLL_PAUSE_REPORTED
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.runtime.origin import Origin, origin_of
from fencepost.coordinator.runtime.rate_limited_log import RateLimitedLog
from fencepost.coordinator.telemetry.instances import ClientInstance
from fencepost.coordinator.telemetry.otlp import read
from fencepost.coordinator.telemetry.reports import POLL_PAUSE, Report
from fencepost.coordinator.telemetry.results import ACCEPTED, INVALID, LOST, REFUSED
from fencepost.coordinator.telemetry.subscriptions import Client, Subscriptions
from fencepost.logcore.checkpoints import uuid_to_text
from fencepost.logcore.clock import Clock
from fencepost.logcore.compression import Codec, inflated_pieces
from fencepost.logcore.errors import (
    CorruptRecordError,
    InvalidRecordError,
    UnsupportedCompressionError,
)
from fencepost.logcore.machine import DomainError, Event
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.metadata.metadata import Metadata

ACCEPTED_CODECS: Final = (Codec.ZSTD, Codec.LZ4, Codec.GZIP, Codec.SNAPPY)
"""The accepted codecs, in order of preference; uncompressed pushes are accepted as well."""

MIN_EXPIRY_MS: Final = 60_000
EXPIRY_INTERVALS: Final = 3
"""An instance is forgotten after this many push intervals without a request."""

SWEEP_MS: Final = 10_000
"""The minimum time between two searches for instances to forget."""

MIN_PAUSE_MS: Final = 10_000
"""The minimum pause between two polls that is recorded in a group's history."""

PAUSE_RENEWAL_MS: Final = 60_000
"""The minimum time between two history entries about pauses of one client, because Java clients
report the same maximum for 60 seconds."""

RESERVED_IDS: Final = frozenset({UUID(int=0), UUID(int=1)})

_log = structlog.get_logger(__name__)

Record = Callable[[str, str, Event, Origin | None, str | None], None]
"""``HistoryRecorder.remember``."""


@dataclass(frozen=True, slots=True)
class TelemetryLimits:
    """Limits on the memory of client telemetry, and on what it adds to the history."""

    max_instances: int = 16_384
    """The maximum number of client instances, as in Kafka; the least recently active instances
    above this number are dropped."""

    max_series_bytes: int = 32 << 20
    """The maximum approximate memory of all values; above this size, the values that were pushed
    least recently are dropped."""

    max_pauses: int = 100
    """The maximum number of entries about pauses per minute, in the histories of all groups."""


@dataclass(frozen=True, slots=True)
class ReportedPause:
    """The last long pause between two polls that a member of a group has reported."""

    group: str
    pause_ms: int
    at_ms: int
    """The time of the report, in milliseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Push:
    """The content of a PushTelemetry request."""

    instance_id: UUID | None
    subscription_id: int
    is_terminating: bool
    codec: int
    metrics: bytes


class ClientTelemetry:
    """The client instances of a broker (``services.telemetry``)."""

    def __init__(
        self,
        metadata: Metadata,
        clock: Clock,
        remember: Record,
        *,
        broker: int,
        max_bytes: int,
        limits: TelemetryLimits | None = None,
    ) -> None:
        self.limits = TelemetryLimits() if limits is None else limits
        self.max_bytes = max_bytes
        """The maximum size of the metrics in one push, both compressed and decompressed."""
        self.results: Counter[str] = Counter()
        """The number of pushes by result; see ``results.py``."""
        self._metadata, self._clock, self._remember = metadata, clock, remember
        self._shard = f"broker {broker}"
        self._configs: object = None
        self._subscriptions = Subscriptions()
        self._instances: OrderedDict[UUID, ClientInstance] = OrderedDict()
        """The instances by id, the least recently active first."""
        self._connections: dict[str, UUID] = {}
        """The instance that each connection created last."""
        self._with_series: OrderedDict[UUID, Report] = OrderedDict()
        """Reports of the instances whose values are kept, the least recent push first."""
        self._last_pauses: dict[UUID, ReportedPause] = {}
        """The last long pause of each instance; instances without a long pause are left out."""
        self._series_bytes = 0
        """The sum of the reports' ``counted_bytes``."""
        self._swept_ms = clock.monotonic_ms()
        self._pauses, self._pauses_since_ms = 0, self._swept_ms
        self._lines = RateLimitedLog("more client metrics refused")

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[ClientInstance]:
        """Yield the instances that have not expired, the most recently active one first."""
        self._sweep()
        return iter(tuple(reversed(self._instances.values())))

    def paused(self, group: str) -> Iterator[tuple[ClientInstance, ReportedPause]]:
        """Yield the instances whose last long pause was reported for ``group``."""
        self._sweep()
        for instance_id, pause in tuple(self._last_pauses.items()):
            instance = self._instances.get(instance_id)
            if pause.group == group and instance is not None:
                yield instance, pause

    # --- requests ---

    def subscribe(
        self, client: Client, connection_id: str, instance_id: UUID | None
    ) -> Steps[ClientInstance]:
        """Return, in steps, the instance whose subscription a client asks for.

        An instance without an id gets a random one. Raises TooEarlyError.
        """
        if instance_id is None:
            instance_id = uuid4()
        instance = yield from self._instance(instance_id, client, connection_id)
        if not instance.may_get(self._clock.monotonic_ms()) and instance.last_error not in {
            UnknownSubscriptionIdError,
            UnsupportedCompressionError,
        }:
            raise TooEarlyError(_too_early(instance_id))
        instance.last_error = None
        return instance

    def push(
        self,
        client: Client,
        connection_id: str,
        push: Push,
        may_read_group: Callable[[str], bool],
    ) -> Steps[None]:
        """Check a push and keep its values, in steps.

        ``may_read_group`` returns whether the client may add to the history of a group. Raises
        InvalidRequestError, TooEarlyError, UnknownSubscriptionIdError, UnsupportedCompressionError,
        TelemetryTooLargeError, InvalidRecordError.
        """
        try:
            yield from self._push(client, connection_id, push, may_read_group)
        except DomainError as error:
            result = REFUSED.get(type(error), INVALID)
            self.results[result] += 1
            if result in LOST and self._lines.may_log(self._clock.monotonic_ms()):
                _log.warning(
                    "client metrics refused",
                    client_id=client.client_id,
                    host=client.host,
                    cause=str(error),
                )
            raise
        self.results[ACCEPTED] += 1

    def connection_closed(self, connection_id: str) -> None:
        """Forget the instance of a closed connection."""
        instance_id = self._connections.pop(connection_id, None)
        if instance_id is not None:
            self._forget(instance_id)

    # --- instances ---

    def _instance(
        self, instance_id: UUID, client: Client, connection_id: str
    ) -> Steps[ClientInstance]:
        """Return the instance, matched with the current subscriptions, and defer its expiry."""
        self._refresh()
        self._sweep()
        instance = self._instances.get(instance_id)
        while instance is None or instance.version < self._subscriptions.version:
            version = self._subscriptions.version
            origin = client if instance is None else instance.client
            requested = yield from self._subscriptions.wanted(origin, instance_id)
            meanwhile = self._instances.get(instance_id)
            if meanwhile is not None and meanwhile is not instance:
                instance = meanwhile  # created by another request of the same client
                continue
            created = ClientInstance(instance_id, origin, version, requested)
            if instance is not None:
                created.report, created.pause_noted_ms = instance.report, instance.pause_noted_ms
            self._instances[instance_id] = instance = created
            self._connections[connection_id] = instance_id
            while len(self._instances) > self.limits.max_instances:
                self._forget(next(iter(self._instances)))
        self._instances.move_to_end(instance_id)
        expiry_ms = max(MIN_EXPIRY_MS, EXPIRY_INTERVALS * instance.interval_ms)
        instance.expires_ms = self._clock.monotonic_ms() + expiry_ms
        return instance

    def _refresh(self) -> None:
        """Install the subscriptions of a newer metadata image."""
        configs = self._metadata.image.configs
        if configs is not self._configs:
            self._configs = configs
            self._subscriptions.replace(
                {
                    name: dict(settings)
                    for (kind, name), settings in configs.items()
                    if kind == CLIENT_METRICS_RESOURCE and settings
                }
            )

    def _sweep(self) -> None:
        """Forget expired instances, unless the last search was recent."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._swept_ms < SWEEP_MS:
            return
        self._swept_ms = now_ms
        expired = [
            key for key, instance in self._instances.items() if instance.expires_ms <= now_ms
        ]
        for instance_id in expired:
            self._forget(instance_id)
        if len(self._connections) > len(self._instances):
            self._connections = {
                connection: key
                for connection, key in self._connections.items()
                if key in self._instances
            }

    def _forget(self, instance_id: UUID) -> None:
        self._instances.pop(instance_id, None)
        self._last_pauses.pop(instance_id, None)
        self._forget_series(instance_id)

    def _forget_series(self, instance_id: UUID) -> None:
        report = self._with_series.pop(instance_id, None)
        if report is not None:
            report.forget_series()
            self._count_series(report)

    def _count_series(self, report: Report) -> None:
        self._series_bytes += report.series_bytes - report.counted_bytes
        report.counted_bytes = report.series_bytes

    # --- pushes ---

    def _push(
        self, client: Client, connection_id: str, push: Push, may_read_group: Callable[[str], bool]
    ) -> Steps[None]:
        if push.instance_id is None or push.instance_id in RESERVED_IDS:
            raise InvalidRequestError("a push needs the client instance id of its subscription")
        instance = yield from self._instance(push.instance_id, client, connection_id)
        try:
            try:
                self._check(instance, push)
            finally:
                instance.is_terminating = push.is_terminating
            if push.metrics:
                yield from self._store_metrics(instance, push, may_read_group)
        except DomainError as error:
            instance.last_error = type(error)
            raise
        instance.last_error = None

    def _check(self, instance: ClientInstance, push: Push) -> None:
        """Raise an error if a push must be refused before its metrics are read."""
        named = uuid_to_text(instance.instance_id)
        if instance.is_terminating:
            raise InvalidRequestError(f"client {named} had sent its last push before")
        if not instance.may_push(self._clock.monotonic_ms()) and not push.is_terminating:
            raise TooEarlyError(_too_early(instance.instance_id))
        if push.subscription_id != instance.subscription_id:
            raise UnknownSubscriptionIdError(f"the subscription of client {named} has changed")
        if push.codec not in list(Codec):
            raise UnsupportedCompressionError(f"there is no compression type {push.codec}")
        if len(push.metrics) > self.max_bytes:
            raise TelemetryTooLargeError(
                f"client {named} pushes {len(push.metrics)} bytes; at most {self.max_bytes} are"
                " allowed (telemetry.max.bytes)"
            )

    def _store_metrics(
        self, instance: ClientInstance, push: Push, may_read_group: Callable[[str], bool]
    ) -> Steps[None]:
        pieces = []
        try:
            for piece in inflated_pieces(Codec(push.codec), push.metrics, self.max_bytes):
                pieces.append(piece)
                yield
        except CorruptRecordError as error:
            raise InvalidRecordError(str(error)) from None
        pushed = yield from read(b"".join(pieces))
        instance_id, report = instance.instance_id, instance.report
        try:
            yield from report.apply(pushed, self._clock.now_ms())
        finally:  # even a push that is cancelled midway has changed the report
            # Other requests may have replaced or dropped the instance in the meantime.
            current = self._instances.get(instance_id)
            if current is not None and current.report is report:
                self._count_series(report)
                self._with_series[instance_id] = report
                self._with_series.move_to_end(instance_id)
                while self._series_bytes > self.limits.max_series_bytes:
                    self._forget_series(next(iter(self._with_series)))
        if current is not None and current.report is report:
            self._note_pause(current, may_read_group)

    def _note_pause(self, instance: ClientInstance, may_read_group: Callable[[str], bool]) -> None:
        """Keep a long pause between polls, and record it in the group's history."""
        report, now_ms = instance.report, self._clock.monotonic_ms()
        group, pause_ms = report.group, report.highlights.get(POLL_PAUSE, 0)
        noted_ms = instance.pause_noted_ms
        if not group or pause_ms < MIN_PAUSE_MS:
            return
        if noted_ms is not None and now_ms - noted_ms < PAUSE_RENEWAL_MS:
            return
        if not may_read_group(group):
            return
        self._last_pauses[instance.instance_id] = ReportedPause(
            group, round(pause_ms), self._clock.now_ms()
        )
        if now_ms - self._pauses_since_ms >= PAUSE_RENEWAL_MS:
            self._pauses, self._pauses_since_ms = 0, now_ms
        if self._pauses >= self.limits.max_pauses:
            return
        self._pauses += 1
        instance.pause_noted_ms = now_ms
        client, pause = instance.client, f"{pause_ms / 1000:.1f} s"
        detail = {
            "reason": f"{pause} passed between two calls of poll (time-between-poll-max)",
            "pause_ms": round(pause_ms),
            "member": report.member or "",
            "client_instance_id": uuid_to_text(instance.instance_id),
        }
        event = Event(POLL_PAUSE_REPORTED, group, detail, quiet=True)
        origin = origin_of(client.client_id, client.host)
        self._remember(CONSUMER_OFFSETS, self._shard, event, origin, "request PushTelemetry")


def _too_early(instance_id: UUID) -> str:
    return f"the push interval of client {uuid_to_text(instance_id)} has not passed yet"
