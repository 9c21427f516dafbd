"""Client instances: subscriptions, push intervals, refusals, expiration and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.image import CLIENT_METRICS_RESOURCE, MetadataImage
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.errors import (
    InvalidRequestError,
    TelemetryTooLargeError,
    TooEarlyError,
    UnknownSubscriptionIdError,
)
from fencepost.coordinator.history.entries import POLL_PAUSE_REPORTED
from fencepost.coordinator.metadata.metadata import Metadata
from fencepost.coordinator.telemetry.instances import ClientInstance, subscription_id
from fencepost.coordinator.telemetry.manager import (
    MIN_EXPIRY_MS,
    MIN_PAUSE_MS,
    PAUSE_RENEWAL_MS,
    SWEEP_MS,
    ClientTelemetry,
    Push,
    TelemetryLimits,
)
from fencepost.coordinator.telemetry.reports import MAX_SERIES, POLL_PAUSE, SERIES_BYTES
from fencepost.coordinator.telemetry.subscriptions import Client, RequestedMetrics
from fencepost.logcore.compression import Codec, compress
from fencepost.logcore.errors import InvalidRecordError, UnsupportedCompressionError
from fencepost.logcore.machine import DomainError, Event
from fencepost.protocol.steps import Steps, finish
from tests.support import otlp
from tests.support.clock import ManualClock
from tests.support.quick import only

ME = Client("shop-1", "apache-kafka-java", "4.4.0", "10.0.0.7", 50_123)
INTERVAL_MS = 1_000
EVERY_SECOND = {"metrics": "org.apache.kafka.", "interval.ms": str(INTERVAL_MS)}
PAUSE = "org.apache.kafka.consumer.time.between.poll.max"
REBALANCES = "org.apache.kafka.consumer.coordinator.rebalance.total"
MAX_BYTES = 100_000


class Telemetry:
    """The client telemetry of a broker, and the history that it writes."""

    def __init__(self, limits: TelemetryLimits | None = None, **settings: Mapping[str, str]):
        self.clock = ManualClock()
        self.metadata = Metadata(BrokerConfig(), node_id=1)
        self.recorded: list[Event] = []
        self.readable = {"g"}
        self.made = ClientTelemetry(
            self.metadata,
            self.clock,
            lambda _scope, _shard, event, _origin, _trigger: self.recorded.append(event),
            broker=1,
            max_bytes=MAX_BYTES,
            limits=limits,
        )
        self.configure(**(settings or {"s": EVERY_SECOND}))

    def configure(self, **settings: Mapping[str, str]) -> None:
        configs = {(CLIENT_METRICS_RESOURCE, name): own for name, own in settings.items()}
        self.metadata.install(MetadataImage(configs=configs))

    def subscribe(
        self, instance_id: UUID | None = None, client: Client = ME, connection: str = "c"
    ) -> ClientInstance:
        return finish(self.made.subscribe(client, connection, instance_id))

    def pushing(
        self,
        instance: ClientInstance,
        metrics: bytes = b"",
        codec: int = Codec.NONE,
        subscription: int | None = None,
        *,
        last: bool = False,
    ) -> Steps[None]:
        wanted = instance.subscription_id if subscription is None else subscription
        push = Push(instance.instance_id, wanted, last, codec, metrics)
        return self.made.push(ME, "c", push, self.readable.__contains__)

    def push(self, *args: Any, **kwargs: Any) -> None:
        finish(self.pushing(*args, **kwargs))

    def error(self, *args: Any, **kwargs: Any) -> type[DomainError] | None:
        try:
            self.push(*args, **kwargs)
        except DomainError as error:
            return type(error)
        return None


# --- subscriptions ---


def test_client_gets_an_id_and_the_metrics_of_matching_subscriptions() -> None:
    telemetry = Telemetry(
        all={"metrics": "b,a", "interval.ms": "5000"},
        mine={"metrics": "c", "interval.ms": "4000", "match": "client_id=shop-.*"},
        other={"metrics": "d", "interval.ms": "100", "match": "client_id=bank-.*"},
    )
    instance = telemetry.subscribe()
    assert instance.instance_id.int > 1
    assert (instance.metrics, instance.interval_ms) == (("a", "b", "c"), 4_000)


@pytest.mark.parametrize(
    ("match", "is_matched"),
    [
        ("client_id=shop-1", True),
        ("client_id=shop", False),
        ("client_software_name=apache-kafka-java,client_software_version=4\\..*", True),
        ("client_software_name=apache-kafka-java,client_software_version=3\\..*", False),
        ("client_source_address=10\\.0\\.0\\.[0-9]+", True),
        ("client_source_port=5[0-9]{4}", True),
        ("client_source_port=6[0-9]{4}", False),
        ("client_instance_id=AAAAAAAAAAAAAAAAAAAAKg", True),
        ("client_instance_id=B.*", False),
        # RE2/J has no lookarounds, so the subscription is kept, but it matches no client.
        ("client_id=(?!bank).*", False),
    ],
)
def test_all_conditions_of_a_subscription_must_match(match: str, is_matched: bool) -> None:
    telemetry = Telemetry(s={"metrics": "a", "match": match})
    assert bool(telemetry.subscribe(UUID(int=42)).metrics) is is_matched


def test_client_without_client_id_matches_no_condition_about_it() -> None:
    telemetry = Telemetry(s={"metrics": "a", "match": "client_id=.*"})
    nameless = Client(None, "x", "1", "10.0.0.7", 1)
    assert telemetry.subscribe(client=nameless).metrics == ()


def test_star_replaces_all_other_metrics() -> None:
    telemetry = Telemetry(a={"metrics": "x"}, b={"metrics": "*"})
    assert telemetry.subscribe().metrics == ("*",)


def test_client_without_subscription_gets_no_metrics_and_default_interval() -> None:
    telemetry = Telemetry(other={"metrics": "d", "match": "client_id=bank"})
    instance = telemetry.subscribe()
    assert (instance.metrics, instance.interval_ms) == ((), 300_000)


def test_unusable_settings_of_a_subscription_are_ignored() -> None:
    telemetry = Telemetry(bad={"interval.ms": "soon", "metrics": "a"}, good={"metrics": "b"})
    assert telemetry.subscribe().metrics == ("b",)


def test_subscription_id_depends_on_metrics_interval_and_instance() -> None:
    ids = {
        subscription_id(RequestedMetrics(metrics, interval_ms), UUID(int=number))
        for metrics in ((), ("a",))
        for interval_ms in (1, 2)
        for number in (2, 3)
    }
    assert len(ids) == 8
    assert all(-(1 << 31) <= number < 1 << 31 for number in ids)


# --- intervals ---


@pytest.mark.parametrize(("waited_ms", "is_accepted"), [(999, False), (1_000, True)])
def test_second_subscription_request_must_wait_for_the_interval(
    waited_ms: int, is_accepted: bool
) -> None:
    telemetry = Telemetry()
    instance_id = telemetry.subscribe().instance_id
    telemetry.clock.advance(waited_ms)
    if is_accepted:
        telemetry.subscribe(instance_id)
    else:
        with pytest.raises(TooEarlyError):
            telemetry.subscribe(instance_id)


@pytest.mark.parametrize(("waited_ms", "is_accepted"), [(999, False), (1_000, True)])
def test_push_must_wait_for_the_interval(waited_ms: int, is_accepted: bool) -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.clock.advance(1)
    assert telemetry.error(instance) is None  # the first push may arrive at any time
    telemetry.clock.advance(waited_ms)
    assert telemetry.error(instance) is (None if is_accepted else TooEarlyError)
    assert telemetry.made.results["too-early"] == (not is_accepted)


def test_refused_push_does_not_delay_the_next_one() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.push(instance)
    telemetry.clock.advance(INTERVAL_MS - 1)
    assert telemetry.error(instance) is TooEarlyError
    telemetry.clock.advance(1)
    assert telemetry.error(instance) is None


def test_last_push_may_come_early_and_ends_the_instance() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.push(instance)
    assert telemetry.error(instance, last=True) is None
    telemetry.clock.advance(INTERVAL_MS)
    assert telemetry.error(instance, last=True) is InvalidRequestError
    assert telemetry.error(instance) is InvalidRequestError
    # As in Kafka, after a refused request without ``terminating`` the instance may push again.
    assert telemetry.error(instance) is None


@pytest.mark.parametrize("refusal", ["subscription", "codec", "size"])
def test_subscription_may_be_fetched_at_once_after_some_refusals(refusal: str) -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.clock.advance(1)
    if refusal == "subscription":
        telemetry.error(instance, subscription=instance.subscription_id + 1)
    elif refusal == "codec":
        telemetry.error(instance, codec=9)
    else:
        telemetry.error(instance, b"x" * (MAX_BYTES + 1))
    if refusal == "size":
        with pytest.raises(TooEarlyError):
            telemetry.subscribe(instance.instance_id)
    else:
        telemetry.subscribe(instance.instance_id)


def test_changed_subscription_is_fetched_at_once_and_the_old_id_is_refused() -> None:
    telemetry = Telemetry()
    before = telemetry.subscribe()
    telemetry.push(before, otlp.metrics_data(otlp.counter(REBALANCES, otlp.point(2))))
    telemetry.configure(s={**EVERY_SECOND, "metrics": "other"})
    assert telemetry.error(before) is UnknownSubscriptionIdError
    after = telemetry.subscribe(before.instance_id)
    assert after.metrics == ("other",)
    assert after.subscription_id != before.subscription_id
    telemetry.clock.advance(INTERVAL_MS)  # as in Kafka, the interval begins at the refused push
    telemetry.push(after, otlp.metrics_data(otlp.counter(REBALANCES, otlp.point(3))))
    assert after.report.highlights["rebalances"] == 5
    telemetry.configure()
    with pytest.raises(UnknownSubscriptionIdError):
        telemetry.push(after)


def test_change_of_other_settings_does_not_change_subscriptions() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.configure(s=dict(EVERY_SECOND))
    telemetry.push(instance)
    assert list(telemetry.made) == [instance]


# --- refusals ---


@pytest.mark.parametrize("instance_id", [None, UUID(int=0), UUID(int=1)])
def test_push_needs_an_instance_id(instance_id: UUID | None) -> None:
    telemetry = Telemetry()
    with pytest.raises(InvalidRequestError):
        finish(telemetry.made.push(ME, "c", Push(instance_id, 0, False, 0, b""), bool))
    assert telemetry.made.results == {"invalid-request": 1}


def test_push_to_another_broker_with_the_same_subscriptions_is_accepted() -> None:
    instance = Telemetry().subscribe()
    other = Telemetry()
    other.push(instance)
    assert len(other.made) == 1


@pytest.mark.parametrize("codec", list(Codec))
def test_metrics_are_read_with_every_codec(codec: Codec) -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    data = otlp.metrics_data(otlp.gauge(PAUSE, otlp.point(7.0)))
    telemetry.push(instance, compress(codec, data), codec)
    assert instance.report.highlights == {POLL_PAUSE: 7.0}


@pytest.mark.parametrize("codec", [-1, 5])
def test_unknown_codec_is_refused(codec: int) -> None:
    telemetry = Telemetry()
    assert telemetry.error(telemetry.subscribe(), b"x", codec) is UnsupportedCompressionError


@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.parametrize("codec", list(Codec))
def test_metrics_above_the_limit_are_refused_before_and_after_decompression(
    codec: Codec, excess: int
) -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    filler = MAX_BYTES + excess - len(otlp.nested(99, b"x" * MAX_BYTES)) + MAX_BYTES
    data = otlp.nested(99, b"x" * filler)
    assert len(data) == MAX_BYTES + excess
    found = telemetry.error(instance, compress(codec, data), codec)
    # Decompressed metrics above the limit are invalid, as in Kafka: the client stops pushing.
    refused = TelemetryTooLargeError if codec is Codec.NONE else InvalidRecordError
    assert found is (refused if excess else None)


@pytest.mark.parametrize("codec", list(Codec))
def test_damaged_metrics_are_refused(codec: Codec) -> None:
    telemetry = Telemetry()
    assert telemetry.error(telemetry.subscribe(), b"\xff\xff\xff", codec) is InvalidRecordError
    assert telemetry.made.results["invalid-record"] == 1


# --- values and limits ---


def test_deltas_are_added_and_gauges_replaced() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    for deltas, idle in ((2, 0.5), (3, 0.25)):
        metrics = otlp.metrics_data(
            otlp.counter(REBALANCES, otlp.point(deltas)),
            otlp.gauge("org.apache.kafka.consumer.poll.idle.ratio.avg", otlp.point(idle)),
        )
        telemetry.push(instance, metrics)
        telemetry.clock.advance(INTERVAL_MS)
    assert instance.report.highlights == {"rebalances": 5, "poll_idle_ratio": 0.25}
    assert instance.report.pushes == 2


@pytest.mark.parametrize("count", [MAX_SERIES, MAX_SERIES + 1])
def test_series_of_one_instance_are_bounded(count: int) -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    telemetry.push(instance, otlp.metrics_data(*_gauges(count)))
    assert (len(instance.report), instance.report.dropped) == (MAX_SERIES, count - MAX_SERIES)


def _gauges(count: int) -> list[bytes]:
    return [otlp.gauge(f"m-{index}", otlp.point(index)) for index in range(count)]


def test_instance_with_the_oldest_push_loses_its_values_when_memory_is_full() -> None:
    telemetry = Telemetry(TelemetryLimits(max_series_bytes=6_000))
    first, second = (telemetry.subscribe(connection=name) for name in "ab")
    telemetry.push(first, otlp.metrics_data(*_gauges(10)))
    telemetry.push(second, otlp.metrics_data(*_gauges(10)))
    assert (len(first.report), len(second.report)) == (10, 10)
    telemetry.clock.advance(INTERVAL_MS)
    telemetry.push(first, otlp.metrics_data(*_gauges(11)))
    assert (len(first.report), len(second.report)) == (11, 0)


# --- other requests during a push ---

SERIES = 450
MANY = otlp.metrics_data(*(otlp.gauge(f"m-{index}", otlp.point(index)) for index in range(SERIES)))
TURNS = 18
LATER_TURNS = only(range(1, TURNS + 1), *range(1, TURNS + 1, 4))
ROOM = TelemetryLimits(max_series_bytes=SERIES * SERIES_BYTES)
"""Limits that allow one push of :data:`MANY`."""


def _begun(turns: int) -> tuple[Telemetry, ClientInstance, Steps[None]]:
    """Begin a push of :data:`MANY`, and interrupt it after some turns."""
    telemetry = Telemetry(ROOM)
    instance = telemetry.subscribe()
    work = telemetry.pushing(instance, MANY)
    for _ in range(turns):
        next(work)
    return telemetry, instance, work


def _check_room(telemetry: Telemetry) -> None:
    """Check that the limit has room for one push after the first instance has ended."""
    telemetry.made.connection_closed("c")
    for number in range(2):
        other = telemetry.subscribe(connection=str(number))
        telemetry.push(other, MANY)
        assert len(other.report) == SERIES
    assert sum(len(instance.report) for instance in telemetry.made) == SERIES


def test_push_is_interrupted_while_its_values_are_read_and_kept() -> None:
    _, instance, work = _begun(TURNS)
    assert 0 < len(instance.report) < SERIES, "the last turns keep values"
    finish(work)
    assert len(instance.report) == SERIES


@pytest.mark.parametrize("turns", only(range(TURNS + 1), *range(0, TURNS + 1, 4)))
def test_values_of_simultaneous_pushes_are_counted_once(turns: int) -> None:
    telemetry, instance, work = _begun(turns)
    telemetry.push(instance, MANY, last=True)
    if turns:
        finish(work)
    assert len(instance.report) == SERIES
    _check_room(telemetry)


@pytest.mark.parametrize("turns", LATER_TURNS)
def test_values_pushed_while_the_subscription_changes_are_kept(turns: int) -> None:
    telemetry, instance, work = _begun(turns)
    telemetry.configure(s={**EVERY_SECOND, "metrics": "other"})
    after = telemetry.subscribe(instance.instance_id)
    finish(work)
    assert len(after.report) == SERIES
    _check_room(telemetry)


@pytest.mark.parametrize("turns", LATER_TURNS)
def test_values_of_an_instance_that_ends_during_its_push_are_not_counted(turns: int) -> None:
    telemetry, _, work = _begun(turns)
    telemetry.made.connection_closed("c")
    finish(work)
    assert len(telemetry.made) == 0
    _check_room(telemetry)


@pytest.mark.parametrize("turns", LATER_TURNS)
def test_values_of_an_abandoned_push_make_room_for_later_ones(turns: int) -> None:
    telemetry, _, work = _begun(turns)
    work.close()
    telemetry.push(telemetry.subscribe(connection="d"), MANY)
    assert sum(len(instance.report) for instance in telemetry.made) == SERIES
    _check_room(telemetry)


# --- expiration ---


def test_least_recently_active_instance_makes_room_for_a_new_one() -> None:
    telemetry = Telemetry(TelemetryLimits(max_instances=2))
    first, second = (telemetry.subscribe(connection=name) for name in "ab")
    telemetry.push(first)
    third = telemetry.subscribe(connection="c")
    assert list(telemetry.made) == [third, first]
    assert second not in list(telemetry.made)


@pytest.mark.parametrize("late_ms", [-1, 0])
@pytest.mark.parametrize("interval_ms", [1_000, 30_000])
def test_instance_expires_after_three_intervals_or_a_minute(interval_ms: int, late_ms: int) -> None:
    telemetry = Telemetry(s={"metrics": "a", "interval.ms": str(interval_ms)})
    telemetry.subscribe()
    expiry_ms = max(MIN_EXPIRY_MS, 3 * interval_ms)
    assert expiry_ms > SWEEP_MS
    telemetry.clock.advance(expiry_ms + late_ms)
    assert len(list(telemetry.made)) == (late_ms < 0)


def test_instance_ends_with_its_connection() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe(connection="c")
    telemetry.push(instance, otlp.metrics_data(*_gauges(1)))
    telemetry.made.connection_closed("d")
    assert len(telemetry.made) == 1
    telemetry.made.connection_closed("c")
    assert len(telemetry.made) == len(instance.report) == 0


# --- the history of groups ---


def _pause(pause_ms: float, **resource: str) -> bytes:
    return otlp.metrics_data(
        otlp.gauge(PAUSE, otlp.point(float(pause_ms))), **(resource or {"group_id": "g"})
    )


@pytest.mark.parametrize("short_ms", [0, 1])
def test_long_pause_between_polls_is_recorded_in_the_groups_history(short_ms: int) -> None:
    telemetry = Telemetry()
    telemetry.push(telemetry.subscribe(), _pause(MIN_PAUSE_MS - short_ms))
    assert [(event.kind, event.subject) for event in telemetry.recorded] == (
        [] if short_ms else [(POLL_PAUSE_REPORTED, "g")]
    )


def test_history_entry_contains_the_pause_and_the_member() -> None:
    telemetry = Telemetry()
    pushed = _pause(20_040, group_id="g", group_member_id="m-1")
    telemetry.push(telemetry.subscribe(), pushed)
    (event,) = telemetry.recorded
    reason = "20.0 s passed between two calls of poll (time-between-poll-max)"
    assert event.detail["reason"] == reason
    assert (event.detail["pause_ms"], event.detail["member"]) == (20_040, "m-1")


@pytest.mark.parametrize("label", ["group_member_id", "member_id"])
def test_member_is_found_under_the_label_of_either_client(label: str) -> None:
    telemetry = Telemetry()
    pushed = _pause(MIN_PAUSE_MS, **{"group_id": "g", label: "m-1"})
    telemetry.push(telemetry.subscribe(), pushed)
    assert telemetry.recorded[0].detail["member"] == "m-1"


def test_client_without_read_on_the_group_adds_nothing_to_its_history() -> None:
    telemetry = Telemetry()
    telemetry.readable.clear()
    telemetry.push(telemetry.subscribe(), _pause(MIN_PAUSE_MS))
    assert telemetry.recorded == []


def test_pause_is_recorded_once_while_the_client_reports_the_same_maximum() -> None:
    telemetry = Telemetry()
    instance = telemetry.subscribe()
    for _ in range(PAUSE_RENEWAL_MS // INTERVAL_MS):
        telemetry.push(instance, _pause(MIN_PAUSE_MS))
        telemetry.clock.advance(INTERVAL_MS)
    assert len(telemetry.recorded) == 1
    telemetry.push(instance, _pause(MIN_PAUSE_MS))
    assert len(telemetry.recorded) == 2


@pytest.mark.parametrize("limit", [2, 3])
def test_entries_of_all_clients_are_bounded_per_minute(limit: int) -> None:
    telemetry = Telemetry(TelemetryLimits(max_pauses=limit))
    for number in range(3):
        telemetry.push(telemetry.subscribe(connection=str(number)), _pause(MIN_PAUSE_MS))
    assert len(telemetry.recorded) == limit
    telemetry.clock.advance(PAUSE_RENEWAL_MS)
    telemetry.push(telemetry.subscribe(connection="later"), _pause(MIN_PAUSE_MS))
    assert len(telemetry.recorded) == limit + 1
