"""The reader of OTLP metrics: values, limits, and hostile input."""

from __future__ import annotations

import math
import random

import pytest

from fencepost.coordinator.telemetry.otlp import (
    AT_ONCE,
    MAX_ATTRIBUTES,
    MAX_POINTS,
    MAX_TEXT_BYTES,
    ClientMetrics,
    Point,
    read,
)
from fencepost.logcore.errors import InvalidRecordError
from fencepost.protocol.steps import finish
from tests.support import otlp


def _read(data: bytes) -> ClientMetrics:
    return finish(read(data))


def test_gauge_and_counter_are_read_with_labels_units_and_times() -> None:
    data = otlp.metrics_data(
        otlp.gauge("idle", otlp.point(0.25, 5_000), unit="1"),
        otlp.counter("rebalances", otlp.point(3, 6_000, {"topic": "t", "partition": "0"})),
        group_id="g",
    )
    found = _read(data)
    assert found.resource == {"group_id": "g"}
    assert found.points == [
        Point("idle", (), 0.25, "1", 5_000, is_delta=False),
        Point("rebalances", (("partition", "0"), ("topic", "t")), 3, "", 6_000, is_delta=True),
    ]


@pytest.mark.parametrize(
    ("temporality", "is_monotonic", "is_delta"),
    [(otlp.DELTA, True, True), (otlp.DELTA, False, False), (otlp.CUMULATIVE, True, False)],
)
def test_only_monotonic_delta_sum_is_a_delta(
    temporality: int, is_monotonic: bool, is_delta: bool
) -> None:
    metric = otlp.counter("m", otlp.point(1), temporality=temporality, is_monotonic=is_monotonic)
    (point,) = _read(otlp.metrics_data(metric)).points
    assert point.is_delta is is_delta


def test_fields_are_read_in_any_order() -> None:
    point = otlp.attributes(7, {"a": "b"}) + otlp.point(2)
    data_points = otlp.number(3, 1) + otlp.number(2, otlp.DELTA) + otlp.nested(1, point)
    metric = otlp.nested(otlp.SUM, data_points) + otlp.nested(3, "ms") + otlp.nested(1, "late")
    resource = otlp.nested(1, otlp.attributes(1, {"group_id": "g"}))
    data = otlp.nested(1, otlp.nested(2, otlp.nested(2, metric)) + resource)
    found = _read(data)
    assert found.points == [Point("late", (("a", "b"),), 2, "ms", 0, is_delta=True)]
    assert found.resource == {"group_id": "g"}


def test_attribute_values_of_all_scalar_types_become_texts() -> None:
    values = {
        "bool": otlp.number(2, 1),
        "int": otlp.number(3, (1 << 64) - 7),
        "double": otlp.fixed64(4, b"\0\0\0\0\0\0\xf8\x3f"),
        "list": otlp.nested(5, otlp.nested(1, otlp.nested(1, "x"))),
    }
    pairs = [otlp.nested(7, otlp.nested(1, k) + otlp.nested(2, v)) for k, v in values.items()]
    metric = otlp.gauge("m", otlp.point(1) + b"".join(pairs))
    (point,) = _read(otlp.metrics_data(metric)).points
    assert dict(point.attributes) == {"bool": "true", "int": "-7", "double": "1.5", "list": ""}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_left_out(value: float) -> None:
    metric = otlp.gauge("m", otlp.point(value), otlp.point(1.0))
    assert [point.value for point in _read(otlp.metrics_data(metric)).points] == [1.0]


def test_metric_without_name_and_point_without_value_are_left_out() -> None:
    unnamed = otlp.nested(otlp.GAUGE, otlp.nested(1, otlp.point(1)))
    empty = otlp.gauge("m", otlp.attributes(7, {"a": "b"}))
    histogram = otlp.nested(1, "h") + otlp.nested(9, otlp.nested(1, otlp.point(1)))
    assert _read(otlp.metrics_data(unnamed, empty, histogram)).points == []


def test_unknown_fields_are_skipped() -> None:
    unknown = (
        otlp.number(99, 1)
        + otlp.fixed64(98, b"12345678")
        + otlp.varint(97 << 3 | 5)
        + b"1234"
        + otlp.nested(96, "text")
    )
    data = unknown + otlp.metrics_data(otlp.gauge("m", otlp.point(1) + unknown) + unknown)
    assert [point.name for point in _read(data).points] == ["m"]


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1])
def test_points_above_the_limit_are_counted_and_dropped(count: int) -> None:
    half = count // 2
    first = otlp.gauge("m", *[otlp.point(1)] * half)
    second = otlp.gauge("n", *[otlp.point(1)] * (count - half))
    found = _read(otlp.metrics_data(first, second))
    assert (len(found.points), found.dropped) == (MAX_POINTS, count - MAX_POINTS)


@pytest.mark.parametrize("count", [MAX_ATTRIBUTES, MAX_ATTRIBUTES + 1])
def test_attributes_above_the_limit_are_dropped(count: int) -> None:
    labels = {f"key-{index}": "v" for index in range(count)}
    found = _read(otlp.metrics_data(otlp.gauge("m", otlp.point(1, labels=labels)), **labels))
    assert len(found.points[0].attributes) == len(found.resource) == MAX_ATTRIBUTES


@pytest.mark.parametrize("length", [MAX_TEXT_BYTES, MAX_TEXT_BYTES + 1])
def test_long_text_is_truncated_to_the_limit(length: int) -> None:
    text = "x" * length
    metric = otlp.gauge(text, otlp.point(1, labels={"label": text}), unit=text)
    found = _read(otlp.metrics_data(metric, group_id=text))
    (point,) = found.points
    cut = "x" * MAX_TEXT_BYTES
    assert (point.name, point.unit, dict(point.attributes)) == (cut, cut, {"label": cut})
    assert found.resource == {"group_id": cut}


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05abc",
        b"\x80" * 10,
        b"\x0b",
        b"\x0c",
        b"\x0f",
        otlp.nested(1, otlp.nested(2, otlp.nested(2, b"\x2a\x7f"))),
        otlp.nested(1, otlp.nested(2, otlp.nested(2, otlp.nested(5, otlp.nested(1, b"\x19123"))))),
    ],
    ids=["no-size", "short", "long-varint", "group", "group-end", "type-7", "inner", "fixed"],
)
def test_damaged_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRecordError):
        _read(data)


def test_nested_message_cannot_reach_beyond_its_parent() -> None:
    # The inner size fits into the data, but not into the enclosing message.
    inner = otlp.varint(2 << 3 | 2) + otlp.varint(6)
    with pytest.raises(InvalidRecordError):
        _read(otlp.nested(1, inner) + b"\x0a\x04\x0a\x02\x0a\x00")


@pytest.mark.parametrize("seed", range(8))
def test_corrupted_metrics_are_read_or_refused_with_invalid_record(seed: int) -> None:
    random_numbers = random.Random(seed)
    good = otlp.metrics_data(
        otlp.gauge("m", *(otlp.point(float(n), n, {"topic": f"t-{n}"}) for n in range(20))),
        otlp.counter("c", otlp.point(7)),
        group_id="g",
    )
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        for _ in range(random_numbers.randint(1, 8)):
            data[random_numbers.randrange(len(data))] = random_numbers.randrange(256)
        if random_numbers.random() < 0.3:
            del data[random_numbers.randrange(len(data)) :]
        if random_numbers.random() < 0.2:
            data = bytearray(random_numbers.randbytes(random_numbers.randrange(300)))
        try:
            found = _read(bytes(data))
        except InvalidRecordError:
            refused += 1
        else:
            assert all(math.isfinite(point.value) and point.name for point in found.points)
    assert 0 < refused < 400


@pytest.mark.parametrize(
    "data",
    [
        otlp.number(99, 1) * 10_000,
        otlp.nested(1, b"") * 10_000,
        otlp.metrics_data(*[otlp.gauge("m")] * 10_000),
        otlp.metrics_data(otlp.gauge("m", *[b""] * 10_000)),
        otlp.metrics_data(otlp.gauge("m", otlp.attributes(7, {"": ""}) * 10_000)),
    ],
    ids=["numbers", "resources", "metrics", "points", "attributes"],
)
def test_reader_yields_between_many_small_fields(data: bytes) -> None:
    assert sum(1 for _ in read(data)) >= 10_000 // AT_ONCE
