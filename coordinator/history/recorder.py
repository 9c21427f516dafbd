"""Records the events of the coordinators' decisions, and their causes, in the history topic.

A decision appends its events to a queue in the same turn of the loop. Some milliseconds later the
queue is written to a partition of ``__fencepost_history``. Clients can read this topic but not
write it; its size and age are bounded. No request waits for the write: events beyond the queue's
limit are dropped and counted, a failed write is logged and not retried, and a crash loses the
events of the last :data:`FLUSH_MS`. The history is for people; no decision is ever based on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from fencepost.coordinator.history.causes import cause_of
from fencepost.coordinator.history.entries import (
    GROUP,
    TRANSACTION,
    Entry,
    encode_key,
    encode_value,
)
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    HISTORY_TOPIC,
    TRANSACTION_STATE,
)
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.origin import Origin
from fencepost.logcore.clock import Clock
from fencepost.logcore.machine import Event, Record
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.config.broker_config import BrokerConfig
    from fencepost.coordinator.metadata.metadata import InternalTopic
    from fencepost.coordinator.storage.log_manager import LogManager
    from fencepost.logcore.partition import Partition

FLUSH_MS = 50
"""The delay from an event to its write: short for a person who follows the history, and long enough
to write many events in one batch."""

PLACE_RETRY_MS = 200
"""The interval between attempts to write while the broker has no partition to write to."""

COMPLAINT_INTERVAL_MS = 60_000
"""Minimum time between two log lines that report lost history entries."""

TRANSACTION_COMMITTED = "transaction-committed"
"""The kind of the routine events that ``fencepost.history.commits`` records."""

_SCOPES = {CONSUMER_OFFSETS: GROUP, TRANSACTION_STATE: TRANSACTION}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """Limits on the memory and the event loop time that the history uses."""

    max_queued: int = 10_000
    """The maximum number of queued events, about 5 MiB. If the queue is full, new events are
    dropped and counted, because the oldest events show how a problem began."""

    max_batch_bytes: int = 256 << 10
    """The maximum size of one write, after which the event loop runs other callbacks."""


class HistoryRecorder:
    """Writes the history (``services.history``); only counts events if the history is off."""

    def __init__(
        self,
        internal_topic: InternalTopic,
        logs: LogManager,
        config: BrokerConfig,
        clock: Clock,
        limits: HistoryLimits | None = None,
    ) -> None:
        self.limits = HistoryLimits() if limits is None else limits
        self.dropped = 0
        """The number of events that were never written."""
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """The number of events by topic, kind and cause, including events that are not recorded.
        """
        self._internal_topic = internal_topic
        self._logs = logs
        self._clock = clock
        self._queue: deque[Entry] = deque()
        self.find_partition: Callable[[], Partition | None] | None = None
        """Returns the partition to which a broker of a cluster writes, or None: entries then stay
        queued. Must not raise. A standalone broker has no such function, and writes to partition
        0."""
        self.listener: Callable[[Entry], None] | None = None
        """Called with each entry in the turn of its event; it must not raise."""
        is_on = config.bool("fencepost.history.enable")
        self._loop = asyncio.get_running_loop() if is_on else None
        self._routine = frozenset(
            {TRANSACTION_COMMITTED} if config.bool("fencepost.history.commits") else ()
        )
        """Kinds that are recorded although they recur in normal operation."""
        self._timer: asyncio.TimerHandle | None = None
        self._overflowed = 0
        """The number of events dropped by a full queue since the last log line."""
        self._unwritten = 0
        """The number of events lost by failed writes since the last log line."""
        self._last_error = ""
        self._complained_ms: int | None = None

    @property
    def waiting(self) -> int:
        """The number of events that are not written yet."""
        return len(self._queue)

    def take_over(self, other: HistoryRecorder) -> None:
        """Take over the queue and the counts of ``other``, which records nothing more."""
        self.counts += other.counts
        waiting, other._queue = other._queue, deque()
        other.stop()
        self._queue.extendleft(reversed(waiting))
        self._arm()

    def _arm(self) -> None:
        if self._queue and self._timer is None and self._loop is not None:
            self._timer = call_later(self._loop, FLUSH_MS, "history", self._flush)

    def stop(self) -> None:
        """Write the queued entries if the partition exists, and record nothing more."""
        self._loop = None
        self.write_now()

    def write_now(self) -> None:
        """Cancel the timer and write all queued entries, because a caller is about to read them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.write_all()

    def write_all(self) -> None:
        """Write all queued entries, in batches; stop if the partition does not exist yet."""
        while self._queue and self._write_batch():
            pass

    def remember(
        self,
        topic: str,
        shard: str,
        event: Event,
        origin: Origin | None,
        trigger: str | None = None,
    ) -> None:
        """Queue an event of a shard of ``topic``, and count it; never raises, and never writes."""
        self.counts[topic, event.kind, cause_of(event, trigger)] += 1
        if self._loop is None or (event.routine and event.kind not in self._routine):
            return
        if len(self._queue) >= self.limits.max_queued:
            self.dropped += 1
            self._overflowed += 1
            return
        entry = Entry(
            at_ms=self._clock.now_ms(),
            scope=_SCOPES.get(topic, topic),
            subject=event.subject,
            what=event.kind,
            shard=shard,
            client_id=None if origin is None else origin.client_id,
            client_host=None if origin is None else origin.client_host,
            trigger=trigger,
            detail=event.detail,
        )
        self._queue.append(entry)
        if self.listener is not None:
            self.listener(entry)
        self._arm()

    def _flush(self) -> None:
        """Write one batch, and schedule the next one after other callbacks."""
        self._timer = None
        pause_ms = 0 if self._write_batch() else PLACE_RETRY_MS
        if self._queue and self._loop is not None:
            self._timer = call_later(self._loop, pause_ms, "history", self._flush)

    def _write_batch(self) -> bool:
        """Write one batch from the queue; return False if there is no partition to write to yet."""
        partition = None if self.find_partition is None else self.find_partition()
        if partition is None and self.find_partition is not None:
            return False
        records: list[Record] = []
        taken = size = 0
        try:
            while self._queue and size < self.limits.max_batch_bytes:
                entry = self._queue.popleft()
                taken += 1
                record = Record(encode_key(entry.scope, entry.subject), encode_value(entry))
                size += len(record.key) + len(record.value or b"")
                records.append(record)
            if partition is None:
                self._internal_topic(HISTORY_TOPIC)
                partition = self._logs.partition(HISTORY_TOPIC, 0)
            partition.append_records(records, now_ms=self._clock.now_ms())
        except Exception as error:  # noqa: BLE001 - no failure of the history may stop the broker
            self.dropped += taken
            self._unwritten += taken
            self._last_error = f"{type(error).__name__}: {error}"
        self._report_loss()
        return True

    def _report_loss(self) -> None:
        """Log how many events were lost, for each cause, unless the last lines are recent."""
        now_ms = self._clock.monotonic_ms()
        last_ms = self._complained_ms
        if last_ms is not None and now_ms - last_ms < COMPLAINT_INTERVAL_MS:
            return
        for events, cause in (
            (self._unwritten, self._last_error),
            (self._overflowed, "too many events at once"),
        ):
            if events:
                _log.warning("history not written", events=events, cause=cause)
                self._complained_ms = now_ms
        self._unwritten = self._overflowed = 0
