"""A reader of OTLP metrics in steps: only the fields that client telemetry needs.

The data comes from clients. The reader descends a fixed number of levels, keeps a bounded number of
data points and attributes, and yields between fields, so that neither deep nesting nor long data
can block the broker. Gauges and sums have values; histograms and summaries, which no Kafka client
sends, are skipped.

Source: ``opentelemetry/proto/metrics/v1/metrics.proto``, ``common/v1/common.proto``, and the wire
format of protocol buffers.
"""

from __future__ import annotations

import math
import struct
from dataclasses import field
from enum import Enum, auto
from functools import lru_cache
from typing import Final

from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass

AT_ONCE: Final = 200
"""The number of fields that are read between two yields."""

MAX_POINTS: Final = 5_000
"""The maximum number of data points of one push; further data points are counted and dropped."""

MAX_ATTRIBUTES: Final = 8
"""The maximum number of attributes of one data point, or of the client's resource; further
attributes are dropped."""

MAX_TEXT_BYTES: Final = 250
"""The maximum size of a name, unit or attribute; a longer string is truncated."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES: Final = 10
_DELTA: Final = 1
_DOUBLE, _INT64, _UINT64 = struct.Struct("<d"), struct.Struct("<q"), struct.Struct("<Q")

Attributes = tuple[tuple[str, str], ...]
"""Pairs of key and value, ordered by key."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric."""

    name: str
    attributes: Attributes
    value: float
    unit: str
    time_ms: int
    """The client's time, in milliseconds since 1970."""
    is_delta: bool
    """Whether the value is the increase of a counter since the previous push."""


@dataclass(slots=True)
class ClientMetrics:
    """The content of one push."""

    resource: dict[str, str] = field(default_factory=dict)
    """Attributes of the client, such as ``group_id``."""
    points: list[Point] = field(default_factory=list)
    dropped: int = 0
    """The number of data points above :data:`MAX_POINTS`."""


class _Message(Enum):
    """The kinds of messages that the reader descends into."""

    METRICS_DATA = auto()
    RESOURCE_METRICS = auto()
    RESOURCE = auto()
    RESOURCE_ATTRIBUTE = auto()
    SCOPE_METRICS = auto()
    METRIC = auto()
    GAUGE = auto()
    SUM = auto()
    POINT = auto()
    POINT_ATTRIBUTE = auto()
    VALUE = auto()


def _tag(number: int, wire_type: int) -> int:
    return number << 3 | wire_type


_M = _Message
_NESTED: Final = {
    (_M.METRICS_DATA, _tag(1, _BYTES)): _M.RESOURCE_METRICS,
    (_M.RESOURCE_METRICS, _tag(1, _BYTES)): _M.RESOURCE,
    (_M.RESOURCE_METRICS, _tag(2, _BYTES)): _M.SCOPE_METRICS,
    (_M.RESOURCE, _tag(1, _BYTES)): _M.RESOURCE_ATTRIBUTE,
    (_M.RESOURCE_ATTRIBUTE, _tag(2, _BYTES)): _M.VALUE,
    (_M.SCOPE_METRICS, _tag(2, _BYTES)): _M.METRIC,
    (_M.METRIC, _tag(5, _BYTES)): _M.GAUGE,
    (_M.METRIC, _tag(7, _BYTES)): _M.SUM,
    (_M.GAUGE, _tag(1, _BYTES)): _M.POINT,
    (_M.SUM, _tag(1, _BYTES)): _M.POINT,
    (_M.POINT, _tag(7, _BYTES)): _M.POINT_ATTRIBUTE,
    (_M.POINT_ATTRIBUTE, _tag(2, _BYTES)): _M.VALUE,
}
"""The kind of a nested message, by the kind of the enclosing message and the field's tag."""

_ATTRIBUTES: Final = frozenset({_M.RESOURCE_ATTRIBUTE, _M.POINT_ATTRIBUTE})


def read(data: bytes) -> Steps[ClientMetrics]:
    """Read an OTLP ``MetricsData`` message in steps. Raises InvalidRecordError if it is damaged."""
    reader = _Reader(data)
    yield from reader.run()
    return reader.found


class _Reader:
    """The fields of the messages that are open, from the outermost to the innermost."""

    def __init__(self, data: bytes) -> None:
        self.found = ClientMetrics()
        self._data = data
        self._position = 0
        self._name = self._unit = ""
        self._metric_points: list[tuple[float, int, Attributes]] = []
        """Data points of the open metric; the metric's name may follow its data points."""
        self._is_delta = self._is_monotonic = False
        self._value: float | None = None
        self._time_ns = 0
        self._attributes: dict[str, str] = {}
        self._key = self._text = ""

    def run(self) -> Steps[None]:
        """Read all fields, depth first."""
        open_messages = [(_M.METRICS_DATA, len(self._data))]
        fields_read = 0
        while open_messages:
            kind, end = open_messages[-1]
            if self._position == end:
                open_messages.pop()
                self._ends(kind)
                continue
            fields_read += 1
            if not fields_read % AT_ONCE:
                yield
            tag = self._varint(end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                self._has_number(kind, tag, self._varint(end))
                continue
            size = self._size(tag, end)
            nested = _NESTED.get((kind, tag))
            if nested is not None:
                self._begins(nested)
                open_messages.append((nested, self._position + size))
                continue
            start = self._position
            self._position += size
            if wire_type == _BYTES:
                self._has_text(kind, tag, start)
            elif wire_type == _FIXED64:
                self._has_fixed(kind, tag, start)

    def _varint(self, end: int) -> int:
        result = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            if self._position >= end:
                raise InvalidRecordError("client metrics are cut short")
            byte = self._data[self._position]
            self._position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result & 0xFFFF_FFFF_FFFF_FFFF
        raise InvalidRecordError("client metrics contain a number of more than ten bytes")

    def _size(self, tag: int, end: int) -> int:
        """Return the size of the field that follows the tag, or its size prefix."""
        wire_type = tag & 7
        if wire_type == _BYTES:
            size = self._varint(end)
        elif wire_type in {_FIXED64, _FIXED32}:
            size = 8 if wire_type == _FIXED64 else 4
        else:
            raise InvalidRecordError(f"client metrics contain a field of wire type {wire_type}")
        if size > end - self._position:
            raise InvalidRecordError("client metrics are cut short")
        return size

    def _begins(self, kind: _Message) -> None:
        if kind is _M.METRIC:
            self._name = self._unit = ""
            self._metric_points = []
            self._is_delta = self._is_monotonic = False
        elif kind is _M.POINT:
            self._value, self._time_ns, self._attributes = None, 0, {}
        elif kind in _ATTRIBUTES:
            self._key = self._text = ""

    def _ends(self, kind: _Message) -> None:
        if kind is _M.METRIC:
            is_delta = self._is_delta and self._is_monotonic
            self.found.points += (
                Point(self._name, attributes, value, self._unit, time_ms, is_delta)
                for value, time_ms, attributes in self._metric_points
                if self._name
            )
        elif kind is _M.POINT:
            self._keep_point()
        elif kind is _M.RESOURCE_ATTRIBUTE:
            _add_attribute(self.found.resource, self._key, self._text)
        elif kind is _M.POINT_ATTRIBUTE:
            _add_attribute(self._attributes, self._key, self._text)

    def _keep_point(self) -> None:
        # Java's averages are NaN while there is nothing to average.
        if self._value is None or not math.isfinite(self._value):
            return
        if len(self.found.points) + len(self._metric_points) >= MAX_POINTS:
            self.found.dropped += 1
            return
        attributes = tuple(sorted(self._attributes.items()))
        self._metric_points.append((self._value, self._time_ns // 1_000_000, attributes))

    def _has_number(self, kind: _Message, tag: int, value: int) -> None:
        if kind is _M.SUM:
            if tag == _tag(2, _VARINT):
                self._is_delta = value == _DELTA
            elif tag == _tag(3, _VARINT):
                self._is_monotonic = bool(value)
        elif kind is _M.VALUE:
            if tag == _tag(2, _VARINT):
                self._text = "true" if value else "false"
            elif tag == _tag(3, _VARINT):
                self._text = str(value - (1 << 64) if value >> 63 else value)

    def _has_text(self, kind: _Message, tag: int, start: int) -> None:
        if tag not in {_tag(1, _BYTES), _tag(3, _BYTES)}:
            return
        end = min(self._position, start + MAX_TEXT_BYTES)
        if kind is _M.METRIC:
            text = _shared(self._data[start:end])
            if tag == _tag(1, _BYTES):
                self._name = text
            else:
                self._unit = text
        elif tag == _tag(1, _BYTES) and (kind in _ATTRIBUTES or kind is _M.VALUE):
            text = self._data[start:end].decode("utf-8", "replace")
            if kind is _M.VALUE:
                self._text = text
            else:
                self._key = text

    def _has_fixed(self, kind: _Message, tag: int, start: int) -> None:
        if kind is _M.POINT:
            if tag == _tag(3, _FIXED64):
                (self._time_ns,) = _UINT64.unpack_from(self._data, start)
            elif tag == _tag(4, _FIXED64):
                (self._value,) = _DOUBLE.unpack_from(self._data, start)
            elif tag == _tag(6, _FIXED64):
                (self._value,) = _INT64.unpack_from(self._data, start)
        elif kind is _M.VALUE and tag == _tag(4, _FIXED64):
            self._text = repr(_DOUBLE.unpack_from(self._data, start)[0])


# The metrics of all clients have the same few hundred names. In some versions of Python, sys.intern
# would keep the names sent by a hostile client forever.
@lru_cache(maxsize=1_000)
def _shared(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _add_attribute(attributes: dict[str, str], key: str, value: str) -> None:
    if key and (key in attributes or len(attributes) < MAX_ATTRIBUTES):
        attributes[key] = value
