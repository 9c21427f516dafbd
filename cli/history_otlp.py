"""Entries of the history as OpenTelemetry logs, and spans of transactions and rebalances.

Trace and span ids are hashes of an entry's id, so an entry that is sent twice has the same ids.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import click

from fencepost.cli.history_sink import DeliveryError, Exported, check_url
from fencepost.coordinator.history.entries import GROUP, TRANSACTION, Entry
from fencepost.groups.assignors.simple import NAME as SHARE_ASSIGNOR
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

MAX_REBALANCES: Final = 10_000
"""The maximum number of rebalances that are remembered until they end; the oldest is forgotten
first."""

_ENDS = {"transaction-committed": "commit", "transaction-aborted": "abort"}
_WARNED = ("failed", "refused", "expired", "fenced", "lost", "timed-out", "given-up", "not-written")


@dataclass(slots=True)
class _Rebalance:
    start_ms: int
    why: str | None
    cause: str | None
    epoch: int | None
    """The group epoch; None for the classic protocol."""
    last_ms: int
    """The time of the last entry about the rebalance. It becomes the end of the span if the next
    rebalance starts before this one is complete."""
    members: int | None = None
    """The number of members in the new assignment, once it is known."""
    reconciled: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Span:
    """A span, before it is converted for the exporter. Times are in ms."""

    name: str
    start_ms: int
    end_ms: int
    attributes: Mapping[str, str | int]
    error: str | None = None
    """The reason why a transaction was aborted, unless its producer asked for that."""


class SpanBuilder:
    """Makes spans from entries, in the order of the history."""

    def __init__(self) -> None:
        self._rebalances: OrderedDict[str, _Rebalance] = OrderedDict()

    def span_of(self, entry: Entry) -> Span | None:
        """Take note of an entry; return the span that it ends."""
        if entry.scope == TRANSACTION:
            return _transaction(entry)
        return self._rebalance(entry) if entry.scope == GROUP else None

    def _rebalance(self, entry: Entry) -> Span | None:
        detail, name = entry.detail, entry.subject
        now = self._rebalances.get(name)
        match entry.what:
            case "rebalance-started" | "group-epoch-bumped":
                ended = None if now is None else self._end(entry, now, "superseded", now.last_ms)
                self._rebalances[name] = _Rebalance(
                    entry.at_ms, entry.why, entry.cause, detail.get("epoch"), entry.at_ms
                )
                if len(self._rebalances) > MAX_REBALANCES:
                    self._rebalances.popitem(last=False)
                return ended
            case "generation-started" if now is not None and now.epoch is None:
                return self._end(entry, now, "complete")
            case "target-assigned" if now is not None and now.epoch is not None:
                now.last_ms = entry.at_ms
                now.members = int(detail.get("members", 0))
                # Members of a share group do not confirm their assignment.
                if not now.members or detail.get("assignor") == SHARE_ASSIGNOR:
                    return self._end(entry, now, "complete")
            case "member-reconciled" if now is not None and now.epoch is not None:
                now.last_ms = entry.at_ms
                if detail.get("state") == "STABLE" and int(detail.get("epoch", -1)) >= now.epoch:
                    now.reconciled.add(str(detail.get("member")))
                if now.members is not None and len(now.reconciled) >= now.members:
                    return self._end(entry, now, "complete")
            case "group-deleted":
                self._rebalances.pop(name, None)
        return None

    def _end(
        self, entry: Entry, rebalance: _Rebalance, outcome: str, end_ms: int | None = None
    ) -> Span:
        self._rebalances.pop(entry.subject, None)
        attributes: dict[str, str | int] = {
            "messaging.consumer.group.name": entry.subject,
            "fencepost.outcome": outcome,
        }
        if rebalance.why is not None:
            attributes["fencepost.why"] = rebalance.why
        if rebalance.cause is not None:
            attributes["fencepost.cause"] = rebalance.cause
        generation = entry.detail.get("new_generation")
        if isinstance(generation, int):
            attributes["fencepost.generation"] = generation
        if rebalance.epoch is not None:
            attributes["fencepost.epoch"] = rebalance.epoch
        end_ms = entry.at_ms if end_ms is None else end_ms
        return Span("rebalance", rebalance.start_ms, end_ms, attributes)


def _transaction(entry: Entry) -> Span | None:
    open_ms, outcome = entry.detail.get("open_ms"), _ENDS.get(entry.what)
    if outcome is None or not isinstance(open_ms, int):
        return None
    attributes: dict[str, str | int] = {
        "fencepost.transactional_id": entry.subject,
        "fencepost.outcome": outcome,
    }
    if entry.cause is not None:
        attributes["fencepost.cause"] = entry.cause
    for key in ("producer_id", "producer_epoch", "partitions"):
        if isinstance(entry.detail.get(key), int):
            attributes[f"fencepost.{key}"] = entry.detail[key]
    error = entry.why if outcome == "abort" and entry.cause != "client" else None
    return Span("transaction", entry.at_ms - open_ms, entry.at_ms, attributes, error)


class OtlpSink:
    """Sends logs and spans to the OTLP/HTTP endpoint ``url``."""

    max_batch = 500

    def __init__(self, url: str, cluster_id: str) -> None:
        check_url(url, "--otlp")
        try:
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise click.ClickException(
                "--otlp needs the extra otel: pip install '.[otel]' in a clone of Fencepost"
                f" ({error})"
            ) from error
        base = url.rstrip("/")
        self._url, self._cluster_id = url, cluster_id
        self._logs = OTLPLogExporter(endpoint=f"{base}/v1/logs")
        self._spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces")
        self._resource = Resource.create(
            {"service.name": "fencepost", "fencepost.cluster_id": cluster_id}
        )
        self._failures = _LastMessage()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._failures)
        logger.propagate = False
        self._builder = SpanBuilder()

    def reset(self) -> None:
        """Forget the rebalances that have begun."""
        self._builder = SpanBuilder()

    def observe(self, entry: Exported) -> None:
        """Take note of a rebalance that began before the committed offset."""
        self._builder.span_of(entry.entry)

    def prepare(self, batch: Sequence[Exported]) -> Callable[[], None]:
        """Return a function that sends the spans and the logs of ``batch``."""
        logs, spans = [], []
        for entry in batch:
            span, context = self._builder.span_of(entry.entry), None
            if span is not None:
                context = self._context(entry)
                spans.append(self._span(span, context))
            logs.append(self._log(entry, context))
        return lambda: self._send(logs, spans)

    def _send(self, logs: Sequence[ReadableLogRecord], spans: Sequence[ReadableSpan]) -> None:
        self._failures.text = ""
        # Each exporter returns a member of its own enum; the names are the same.
        results = [self._spans.export(spans).name] if spans else []
        results.append(self._logs.export(logs).name)
        if set(results) != {"SUCCESS"}:
            cause = self._failures.text or "the receiver did not accept the entries"
            raise DeliveryError(f"{self._url}: {cause}")

    def _context(self, exported: Exported) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        raw = hashlib.sha256(exported.id(self._cluster_id).encode()).digest()
        trace_id, span_id = int.from_bytes(raw[:16]), int.from_bytes(raw[16:24])
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace_id or 1, span_id or 1, is_remote=False, trace_flags=sampled)

    def _span(self, span: Span, context: SpanContext) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Status, StatusCode

        code = StatusCode.UNSET if span.error is None else StatusCode.ERROR
        return ReadableSpan(
            span.name,
            context=context,
            resource=self._resource,
            attributes={"messaging.system": "kafka", **span.attributes},
            status=Status(code, span.error),
            start_time=span.start_ms * 1_000_000,
            end_time=span.end_ms * 1_000_000,
            instrumentation_scope=InstrumentationScope("fencepost.history"),
        )

    def _log(self, exported: Exported, context: SpanContext | None) -> ReadableLogRecord:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        entry = exported.entry
        is_warning = entry.what.endswith(_WARNED)
        record = LogRecord(
            timestamp=entry.at_ms * 1_000_000,
            observed_timestamp=entry.at_ms * 1_000_000,
            context=None if context is None else set_span_in_context(NonRecordingSpan(context)),
            severity_text="WARN" if is_warning else "INFO",
            severity_number=SeverityNumber.WARN if is_warning else SeverityNumber.INFO,
            body=f"{entry.subject}: {entry.what}" + (f": {entry.why}" if entry.why else ""),
            attributes=self._attributes(exported),
            event_name=f"fencepost.{entry.what}",
        )
        return ReadableLogRecord(record, self._resource, InstrumentationScope("fencepost.history"))

    def _attributes(self, exported: Exported) -> dict[str, Any]:
        entry = exported.entry
        attributes = {
            "fencepost.id": exported.id(self._cluster_id),
            "fencepost.scope": entry.scope,
            "fencepost.subject": entry.subject,
            "fencepost.what": entry.what,
            "fencepost.cause": entry.cause,
            "fencepost.why": entry.why,
            "fencepost.trigger": entry.trigger,
            "fencepost.shard": entry.shard,
            "messaging.client.id": entry.client_id,
            "client.address": entry.client_host,
        }
        for name, value in entry.detail.items():
            is_plain = value is None or isinstance(value, (str, int, float, bool))
            attributes[f"fencepost.detail.{name}"] = value if is_plain else json.dumps(value)
        return {name: value for name, value in attributes.items() if value is not None}


class _LastMessage(logging.Handler):
    """Keeps the exporter's last log message, the only place that has the cause of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
