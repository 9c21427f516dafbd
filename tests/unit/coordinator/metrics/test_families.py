"""A broker's metrics and health while it starts, runs and stops, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_prometheus

from fencepost.coordinator.config.broker_config import ConfigError
from fencepost.coordinator.config.broker_keys import BROKER_KEYS
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.history.causes import REBALANCE_CAUSES, cause_of
from fencepost.coordinator.metrics import jmx, kafka_exporter, kminion, own
from fencepost.coordinator.metrics.endpoint import COMPAT
from fencepost.coordinator.metrics.exposition import OPENMETRICS, PROMETHEUS, ScrapePage
from fencepost.coordinator.metrics.families import (
    MAX_LABEL_CHARACTERS,
    Family,
    Sample,
    label,
    labels,
)
from fencepost.coordinator.metrics.health import SERVING, unready
from fencepost.coordinator.metrics.view import RATE_SECONDS, ByteRates
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Event
from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster
from tests.support.daemon import ROOT
from tests.support.http import Address, exchange, page, request
from tests.support.stalls import watched_loop
from tests.support.waits import DEADLINE_S, until, until_async, until_true

ALL = ",".join(COMPAT)
SETTINGS = {
    "fencepost.metrics.listen": "0",
    "fencepost.metrics.compat": ALL,
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
}

Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""(Name, sorted labels) → value."""


@asynccontextmanager
async def serving(home: Path, settings: Mapping[str, str] = SETTINGS) -> AsyncIterator[Broker]:
    async with asyncio.timeout(DEADLINE_S), Broker(home, config=settings) as broker:
        yield broker


def found(families: Iterator[Metric]) -> Found:
    """Return all samples; check that no two samples have the same labels."""
    values: Found = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in values, key
            values[key] = sample.value
    return values


async def scraped(broker: Broker) -> Found:
    status, kind, text = await page(broker.metrics_address, "/metrics")
    assert (status, kind) == (200, PROMETHEUS)
    return found(read_prometheus(text))


def value(values: Found, name: str, **wanted: str) -> float:
    return values[name, tuple(sorted(wanted.items()))]


class Client:
    """A transactional producer and a group member, with typical activity behind them."""

    def __init__(self, bootstrap: str) -> None:
        servers = {"bootstrap.servers": bootstrap}
        self.producer = Producer({**servers, "transactional.id": "shop"})
        self.producer.init_transactions()
        self.write(10, "commit_transaction")
        self.write(10, "abort_transaction")
        self.write(10, "commit_transaction")
        first = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        self.consumer = Consumer({**servers, **first, "group.id": "g"})
        self.consumer.subscribe(["t"])
        for _ in range(5):
            message = until(lambda: self.consumer.poll(0.5), "a record")
        self.consumer.commit(message, asynchronous=False)
        self.write(7)

    def write(self, count: int, end: str | None = None) -> None:
        self.producer.begin_transaction()
        for number in range(count):
            self.producer.produce("t", b"%d" % number)
        self.producer.flush()
        if end is not None:
            getattr(self.producer, end)()

    def close(self) -> None:
        self.consumer.close()


@asynccontextmanager
async def used(broker: Broker) -> AsyncIterator[Client]:
    client = await asyncio.to_thread(Client, broker.bootstrap)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


# --- scrapes ---


async def test_every_metric_family_has_a_series_and_every_series_a_family(tmp_path: Path) -> None:
    known = {
        name: family
        for module in (own, kafka_exporter, kminion, jmx)
        for name, family in module.FAMILIES.items()
    }
    async with serving(tmp_path) as broker, used(broker):
        _, _, text = await page(broker.metrics_address, "/metrics")
    told = {metric.name: metric for metric in read_prometheus(text)}
    assert {name.removesuffix("_total") for name in known} == told.keys()
    samples = found(read_prometheus(text))
    names = {name for name, _ in samples}
    names |= {re.sub("_(bucket|sum|count)$", "", name) for name in names}
    # These families have no samples: no such event has happened, no listener uses TLS, no client
    # has a quota or pushes metrics, and there is no share group.
    assert known.keys() - names == {
        "fencepost_certificate_not_after_seconds",
        "fencepost_certificate_stale",
        "fencepost_client_quota",
        "fencepost_client_rate",
        "fencepost_client_throttle_seconds_total",
        "fencepost_client_throttles_total",
        "fencepost_connection_throttle_seconds_total",
        "fencepost_dead_letter_failures_total",
        "fencepost_dead_letter_records_total",
        "fencepost_dead_letter_requests_total",
        "fencepost_handshake_failures_total",
        "fencepost_login_failures_total",
        "fencepost_logins_total",
        "fencepost_partition_hanging_transactions",
        "fencepost_producer_fences_total",
        "fencepost_share_events_total",
        "fencepost_share_in_flight_batches",
        "fencepost_share_in_flight_records",
        "fencepost_telemetry_commit_latency_max_seconds",
        "fencepost_telemetry_poll_idle_ratio",
        "fencepost_telemetry_poll_interval_max_seconds",
        "fencepost_telemetry_push_age_seconds",
        "fencepost_telemetry_rebalances",
        "kafka_server_sharepartitionmetrics_acquisitionlocktimeout_total",
        "kafka_server_sharepartitionmetrics_fetchlocktimems",
        "kafka_server_sharepartitionmetrics_fetchlocktimems_count",
        "kafka_server_sharepartitionmetrics_inflightbatchcount",
        "kafka_server_sharepartitionmetrics_inflightmessagecount",
        "kafka_server_sharegroupmetrics_deadletterqueuefailedproducerequests_total",
        "kafka_server_sharegroupmetrics_deadletterqueuerecordcount_count",
        "kafka_server_sharegroupmetrics_deadletterqueuetotalproducerequests_total",
        "kafka_server_sharegroupmetrics_topicpartitionsacquiretimems",
        "kafka_server_sharegroupmetrics_topicpartitionsacquiretimems_count",
    }
    assert all(
        metric.name.endswith("_total") for metric in known.values() if metric.kind == "counter"
    )
    for name, told_labels in samples:
        family = known.get(name) or known[re.sub("_(bucket|sum|count)$", "", name)]
        assert {key for key, _ in told_labels} <= {*family.labels, "le"}, name


async def test_group_lag_counts_records_a_read_committed_consumer_can_still_read(
    tmp_path: Path,
) -> None:
    where = {"group": "g", "topic": "t", "partition": "0"}
    async with serving(tmp_path) as broker, used(broker) as client:
        values = await scraped(broker)

        def lag(name: str) -> float:
            return value(values, f"fencepost_group_{name}", **where)

        # 10 committed, marker, 10 aborted, marker, 10 committed, marker, 7 open; 5 were read.
        assert lag("committed_offset") == 5
        assert lag("lag_offsets") == 35
        assert lag("lag_records") == 5 + 10
        assert lag("held_back_records") == 7
        assert lag("lag_uncommitted_records") == 15 + 10 + 7
        assert lag("lag_seconds") > 0
        held = {"topic": "t", "partition": "0"}
        assert value(values, "fencepost_partition_open_transactions", **held) == 1
        assert value(values, "fencepost_partition_open_transaction_seconds", **held) > 0
        assert value(values, "fencepost_transactions", state="Ongoing") == 1
        assert value(values, "fencepost_transactions_hanging") == 0
        assert value(values, "fencepost_transactions_ended_total", outcome="commit") == 2
        assert value(values, "fencepost_transaction_aborts_total", cause="client") == 1
        assert value(values, "fencepost_group_rebalances_total", cause="member-joined") == 1
        assert value(values, "fencepost_groups", type="classic", state="Stable") == 1

        def read_all() -> None:
            client.producer.commit_transaction()
            for _ in range(10 - 5 + 10 + 7):
                message = until(lambda: client.consumer.poll(0.5), "a record")
            client.consumer.commit(message, asynchronous=False)

        await asyncio.to_thread(read_all)
        values = await scraped(broker)
        assert (lag("lag_records"), lag("held_back_records"), lag("lag_seconds")) == (0, 0, 0)
        assert lag("lag_offsets") == 1, "the last marker, for ever"


async def test_hanging_transaction_is_counted_per_partition_and_in_total(tmp_path: Path) -> None:
    """The partition has an open transaction that the coordinator does not know."""
    async with serving(tmp_path) as broker:

        def leave_one(cluster: Cluster) -> None:
            cluster.create_topic("t")
            who, epoch = cluster.init_producer("shop")
            cluster.call(
                "add_partitions_to_txn",
                3,
                v3_and_below_transactional_id="shop",
                v3_and_below_producer_id=who,
                v3_and_below_producer_epoch=epoch,
                v3_and_below_topics=[{"name": "t", "partitions": [0]}],
            )
            data = batch(
                [b"a"], producer_id=who, producer_epoch=epoch, sequence=0, transactional=True
            )
            cluster.produce("t", data, transactional_id="shop")

        await asyncio.to_thread(_with_cluster, broker.bootstrap, leave_one)
        where = {"topic": "t", "partition": "0"}
        assert value(await scraped(broker), "fencepost_transactions_hanging") == 0
        for shard in broker.services.txns.shards:
            shard.machine._shard.transactions.clear()  # type: ignore[attr-defined]
        values = await scraped(broker)
        assert value(values, "fencepost_transactions_hanging") == 1
        assert value(values, "fencepost_partition_hanging_transactions", **where) == 1
        assert value(values, "fencepost_partition_open_transaction_seconds", **where) >= 0


def commit_offsets(cluster: Cluster, group: str, topic: str, partitions: int) -> None:
    """Commit offset 0 of each partition, without being a member of the group."""
    parts = [
        {"partition_index": index, "committed_offset": 0, "committed_metadata": ""}
        for index in range(partitions)
    ]
    cluster.call(
        "offset_commit",
        7,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": topic, "partitions": parts}],
    )


def _with_cluster(bootstrap: str, do: Callable[[Cluster], None]) -> None:
    with Cluster(bootstrap) as cluster:
        do(cluster)


async def test_counters_never_decrease_after_a_topic_is_deleted(tmp_path: Path) -> None:
    """Deleting a topic ends only the topic's series; the broker's counters keep their values."""

    def counters(values: Found) -> Found:
        return {
            key: number
            for key, number in values.items()
            if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
            and not key[0].startswith(("kminion", "kafka_consumergroup"))
        }

    async with serving(tmp_path) as broker:
        before = counters(await scraped(broker))
        for number in range(4):

            def work(cluster: Cluster, number: int = number) -> None:
                cluster.create_topic(f"t{number}")
                cluster.produce(f"t{number}", [b"a"] * 50)
                cluster.read(f"t{number}")
                if number == 2:
                    cluster.call("delete_topics", 3, topic_names=["t0"], timeout=10_000)

            await asyncio.to_thread(_with_cluster, broker.bootstrap, work)
            after = counters(await scraped(broker))
            gone = {key for key in before if key not in after}
            assert all(("topic", "t0") in told for _, told in gone)
            assert {
                key: count for key, count in before.items() if count > after.get(key, count)
            } == {}
            before = after
        assert value(before, "fencepost_records_in_total") >= 200
        assert value(before, "fencepost_bytes_out_total") > 0


async def test_openmetrics_format_is_returned_only_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker, used(broker):
        address = broker.metrics_address
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        status, kind, text = await page(address, "/metrics", Accept=accept)
        assert (status, kind) == (200, OPENMETRICS)
        assert text.endswith("# EOF\n")
        assert value(found(read_openmetrics(text)), "fencepost_ready") == 1
        for accept in ("*/*", "text/plain", "text/html, text/plain", ""):
            assert (await page(address, "/metrics", Accept=accept))[1] == PROMETHEUS


# --- quotas ---


@pytest.mark.slow
async def test_throttled_client_has_quota_and_throttle_time_series(tmp_path):
    async with serving(tmp_path) as broker:

        def throttled() -> list[float]:
            with Cluster(broker.bootstrap) as admin:
                admin.create_topic("t")
                entity = [{"entity_type": "client-id", "entity_name": None}]
                ops = [{"key": "producer_byte_rate", "value": 20_000.0, "remove": False}]
                entries = [{"entity": entity, "ops": ops}]
                admin.call("alter_client_quotas", 1, entries=entries, validate_only=False)
            waits: list[float] = []
            settings = {"bootstrap.servers": broker.bootstrap, "client.id": "greedy"}
            producer = Producer(
                {**settings, "throttle_cb": lambda event: waits.append(event.throttle_time)}
            )
            producer.produce("t", b"x" * 210_000)
            assert producer.flush(DEADLINE_S) == 0

            def heard() -> bool:
                producer.poll(0.01)
                return bool(waits)

            until(heard, "the client hears of it")
            return waits

        waits = await asyncio.to_thread(throttled)
        values = await scraped(broker)
        who = {"quota": "producer_byte_rate", "user": "", "client_id": "greedy"}
        assert value(values, "fencepost_client_quota", **who) == 20_000
        assert value(values, "fencepost_client_rate", **who) > 19_000
        assert value(values, "fencepost_client_throttles_total", **who) == 1
        total = value(values, "fencepost_client_throttle_seconds_total", **who)
        assert total == pytest.approx(waits[0], abs=0.01)
        assert total > 0.4
        assert value(values, "fencepost_connections_waiting") == 0
        # Metrics with other exporters' names have no total of all clients.
        assert not [name for name, labels in values if "quota" in name and not labels]


# --- dashboards ---

DASHBOARDS = Path(__file__).with_name("dashboards.txt").read_text(encoding="utf-8")
OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds."""

_SELECTOR = re.compile(r"\b((?:kafka|kminion)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(=~|!=|=)\s*[\"']([^\"']*)[\"']")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str]]:
    name = ""
    for line in DASHBOARDS.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif line and not line.startswith("#"):
            yield name, line


def matches(told: Mapping[str, str], key: str, operator: str, wanted: str) -> bool:
    if key in OF_PROMETHEUS or wanted.startswith("$"):
        return key in told or key in OF_PROMETHEUS
    if operator == "=~":
        return re.fullmatch(wanted, told.get(key, "")) is not None
    return (told.get(key, "") == wanted) is (operator == "=")


async def test_every_dashboard_expression_for_other_exporters_matches_a_series(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as broker, used(broker):
        values = await scraped(broker)
    series: dict[str, list[dict[str, str]]] = {}
    for name, told in values:
        series.setdefault(name, []).append(dict(told))
    blind = []
    for dashboard, expression in expressions():
        grouped = {name.strip() for part in _BY.findall(expression) for name in part.split(",")}
        selectors = _SELECTOR.findall(expression)
        assert selectors, expression
        for name, matchers in selectors:
            fits = [
                told
                for told in series.get(name, ())
                if all(matches(told, *matcher) for matcher in _MATCHER.findall(matchers))
                and grouped <= told.keys()
            ]
            if not fits:
                blind.append((dashboard, expression))
    assert blind == []
    assert len(list(expressions())) > 45


# --- limits ---


async def test_series_above_the_scrape_limit_are_dropped_and_counted() -> None:
    family = Family("x", "gauge", ("n",), "x")
    samples: list[Sample] = [(labels(n=number), number) for number in range(10)]
    for limit in (9, 10, 11):
        whole = ScrapePage(PROMETHEUS, limit)
        await whole.add([(family, samples)], Pace())
        assert len(found(read_prometheus(b"".join(whole.pieces).decode()))) == min(limit, 10)
        assert (whole.series, whole.dropped) == (min(limit, 10), max(0, 10 - limit))
    took = Histogram((1.0,))
    for limit, kept in ((3, 0), (4, 4)):
        whole = ScrapePage(PROMETHEUS, limit)
        await whole.add([(family, [("", took)])], Pace())
        assert (whole.series, whole.dropped) == (kept, 4 - kept)


async def test_scrape_of_many_groups_stays_within_max_series(tmp_path: Path) -> None:
    settings = {**SETTINGS, "fencepost.metrics.max.series": "1000"}
    async with serving(tmp_path, settings) as broker:

        def commit(cluster: Cluster) -> None:
            cluster.create_topic("t")
            cluster.coordinator("g0", GROUP)
            for number in range(300):
                commit_offsets(cluster, f"g{number}", "t", 1)

        await asyncio.to_thread(_with_cluster, broker.bootstrap, commit)
        values = await scraped(broker)
        assert len(values) == 1000 + 4
        assert value(values, "fencepost_metrics_series") == 1000
        assert value(values, "fencepost_metrics_dropped_series") > 300
        assert value(values, "fencepost_ready") == 1


@pytest.mark.parametrize("text", ['a"b', "a\\", "a\nb", "ü𝄞", "\udc80", "x" * 300, "y" * 32_000])
async def test_label_value_of_any_characters_is_escaped_and_bounded(text: str) -> None:
    family = Family("x", "gauge", ("n",), 'a "\\" b\nc')
    for kind, read in ((PROMETHEUS, read_prometheus), (OPENMETRICS, read_openmetrics)):
        whole = ScrapePage(kind, 10)
        await whole.add([(family, [(labels(n=text), 1)])], Pace())
        whole.end()
        ((_, (told,)),) = found(read(b"".join(whole.pieces).decode()))
        assert len(told[1]) <= MAX_LABEL_CHARACTERS
        if len(text) <= MAX_LABEL_CHARACTERS and text.isprintable():
            assert told == ("n", text)


def test_long_label_values_stay_distinct() -> None:
    assert len({label("x" * 400 + end) for end in "abc"}) == 3


@pytest.mark.slow
async def test_scrape_of_ten_thousand_partitions_does_not_block_the_loop(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker:
        address = broker.metrics_address

        def create(cluster: Cluster) -> None:
            topics = [
                {"name": f"t{at}", "num_partitions": 1_000, "replication_factor": 1, "configs": []}
                for at in range(10)
            ]
            cluster.call("create_topics", 5, timeout=60_000, topics=topics)
            cluster.coordinator("g", GROUP)
            for at in range(10):
                commit_offsets(cluster, "g", f"t{at}", 1_000)

        await asyncio.to_thread(_with_cluster, broker.bootstrap, create)
        with watched_loop() as watch:
            _, _, text = await page(address, "/metrics")
        watch.check()
    assert text.count("\nfencepost_group_lag_records{") == 10_000
    assert text.count("\nfencepost_partition_size_bytes{") == 10_000 + 2


async def test_concurrent_scrapes_share_one_collection(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker:
        await scraped(broker)
        together = await asyncio.gather(*(scraped(broker) for _ in range(8)))
        counts = {value(scrape, "fencepost_scrapes_total") for scrape in together}
        assert len(counts) < 8, "some have shared one"
        assert value(await scraped(broker), "fencepost_scrapes_total") < 10


# --- causes and rates ---


@pytest.mark.parametrize(
    ("kind", "detail", "trigger", "cause"),
    [
        (
            "rebalance-started",
            {"reason": "new member m (client: left)"},
            None,
            "member-joined",
        ),
        ("rebalance-started", {"reason": "a, b left"}, None, "member-left"),
        (
            "rebalance-started",
            {"reason": "session timed out: m"},
            "timer session",
            "member-expired",
        ),
        ("rebalance-started", {"reason": "no SyncGroup in time from m"}, None, "sync-timed-out"),
        ("rebalance-started", {"reason": "leader m rejoins"}, None, "member-rejoined"),
        (
            "group-epoch-bumped",
            {"reason": "m changed its x"},
            None,
            "subscription-changed",
        ),
        ("group-epoch-bumped", {"reason": "m: no heartbeat came"}, None, "member-expired"),
        ("group-epoch-bumped", {"reason": "whatever"}, None, "other"),
        ("transaction-aborted", {"cause": "EndTxn"}, "request EndTxn", "client"),
        ("transaction-aborted", {"cause": "timeout"}, "timer txn-timeout", "timeout"),
        ("producer-fenced", {"cause": "InitProducerId"}, None, "new-producer"),
        (
            "timeout-postponed",
            {"cause": "any text"},
            "timer txn-timeout",
            "timer txn-timeout",
        ),
        ("records-skipped", {}, None, "load"),
    ],
)
def test_event_cause_is_mapped_to_a_fixed_label_value(
    kind: str, detail: dict[str, object], trigger: str | None, cause: str
) -> None:
    assert cause_of(Event(kind, "x", detail), trigger) == cause
    if kind in {"rebalance-started", "group-epoch-bumped"}:
        assert cause in REBALANCE_CAUSES


def test_byte_rate_converges_to_the_rate_of_its_counter() -> None:
    rates, key = ByteRates(), ("t", "bytes_in")
    assert rates.after({key: 100}, 0.0) == {key: 0.0}
    assert rates.after({key: 1_100}, 10.0) == {key: 100.0}
    now, count = 10.0, 1_100
    for _ in range(100):
        now, count = now + RATE_SECONDS / 10, count + 20 * RATE_SECONDS
        (rate,) = rates.after({key: count}, now).values()
    assert rate == pytest.approx(200, rel=0.01)


def test_histogram_quantile_is_within_its_bucket() -> None:
    took = Histogram((0.1, 0.2, 0.4))
    assert took.quantile(0.99) == 0.0
    for _ in range(90):
        took.note(0.05)
    for _ in range(10):
        took.note(0.3)
    assert (took.count, took.sum) == (100, pytest.approx(90 * 0.05 + 10 * 0.3))
    assert took.quantile(0.5) <= 0.1
    assert 0.2 < took.quantile(0.95) <= 0.4
    took.note(9.0)
    assert took.quantile(1.0) == 0.4


def test_metrics_compat_choices_match_the_available_exporters() -> None:
    assert BROKER_KEYS["fencepost.metrics.compat"].choices == tuple(COMPAT)


# --- health ---


class SlowDisk(OsFileSystem):
    """A disk that delays directory listings and flushes while its events are unset."""

    def __init__(self) -> None:
        self.listing, self.syncing = threading.Event(), threading.Event()
        self.listing.set()
        self.syncing.set()

    def list_directory(self, path: str) -> list[str] | None:
        self.listing.wait(DEADLINE_S)
        return super().list_directory(path)

    def sync(self, handle: int) -> None:
        self.syncing.wait(DEADLINE_S)
        super().sync(handle)


async def ready(address: Address) -> tuple[int, str]:
    status, _, text = await page(address, "/readyz")
    assert (await page(address, "/healthz"))[::2] == (200, "ok\n")
    return status, text


async def test_starting_broker_is_alive_but_not_ready(tmp_path: Path) -> None:
    disk = SlowDisk()
    disk.listing.clear()
    broker = Broker(tmp_path, config=SETTINGS, fs=disk)
    starting = asyncio.create_task(broker.start())
    try:

        async def address() -> Address | None:
            return broker.metrics_address if broker._metrics is not None else None

        at = await until_async(address, "metrics are served")
        assert at is not None
        status, text = await ready(at)
        assert (status, text.split(":")[0]) == (503, "starting")
        values = await scraped(broker)
        assert value(values, "fencepost_ready") == 0
    finally:
        disk.listing.set()
    await starting
    assert await ready(at) == (200, "ready\n")
    await broker.stop()


async def test_stopping_broker_is_alive_but_not_ready(tmp_path: Path) -> None:
    disk = SlowDisk()
    settings = {**SETTINGS, "log.flush.interval.messages": "1"}
    broker = Broker(tmp_path, config=settings, fs=disk)
    await broker.start()
    at = broker.metrics_address

    def write(cluster: Cluster) -> None:
        cluster.create_topic("t")
        disk.syncing.clear()
        cluster.begin_produce("t", [b"a"])

    await asyncio.to_thread(_with_cluster, broker.bootstrap, write)
    await until_true(lambda: not broker.services.flusher.is_idle, "the disk is waited for")
    stopping = asyncio.create_task(broker.stop())
    try:
        await until_true(lambda: broker._metrics is None or broker._metrics.services is None)
        status, text = await ready(at)
        assert (status, text.split(":")[0]) == (503, "stopping")
    finally:
        disk.syncing.set()
    await stopping
    with pytest.raises(OSError, match=r"."):
        await page(at, "/healthz")


async def test_broker_with_offline_partitions_is_unready_and_names_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker:

        def create(cluster: Cluster) -> None:
            cluster.create_topic("t", 5)
            for index in range(5):
                cluster.produce("t", [b"a"], partition=index)

        await asyncio.to_thread(_with_cluster, broker.bootstrap, create)
        assert await ready(broker.metrics_address) == (200, "ready\n")
        for index in range(4):
            broker.services.logs.partition("t", index).marks.fail(OSError("disk gone"))
        status, text = await ready(broker.metrics_address)
        assert status == 503
        assert text.startswith("off line: t-0, t-1, t-2 and 1 more;")
        values = await scraped(broker)
        assert value(values, "fencepost_partitions_offline") == 4
        assert value(values, "fencepost_ready") == 0


async def test_broker_with_a_loading_or_failed_coordinator_is_unready(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker:
        await asyncio.to_thread(
            _with_cluster, broker.bootstrap, lambda cluster: cluster.coordinator("g", GROUP)
        )
        services = broker.services
        # The partition of "g" is served first; the other partition is loaded after it.
        await until_true(lambda: len(services.groups.shards) == 2, "both are open")
        shard = services.groups.shards[1]
        assert unready(SERVING, services) == ""
        shard._fail(RuntimeError("on purpose"), None)
        assert unready(SERVING, services) == "failed: 1 of 2 partitions of __consumer_offsets"
        shard._enter(ShardState.LOADING)
        assert unready(SERVING, services) == "loading: 1 of 2 partitions of __consumer_offsets"
        shard._enter(ShardState.FAILED)
        await until_true(lambda: not unready(SERVING, services), "it is loaded again")


async def test_metrics_server_refuses_unknown_paths_methods_and_hosts(tmp_path: Path) -> None:
    async with serving(tmp_path) as broker:
        address = broker.metrics_address
        assert (await page(address, "/"))[::2] == (404, "there are /metrics, /healthz, /readyz\n")
        assert (await exchange(address, request("/metrics", "POST", b"x")))[0] == 405
        status, _, body = await exchange(address, request("/metrics", "HEAD"))
        assert (status, body) == (200, b"")
        assert (await exchange(address, request("/metrics", Host="evil.example")))[0] == 421


@pytest.mark.parametrize("wrong", ["x", "70000", "127.0.0.1:x"])
def test_invalid_metrics_listen_address_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fencepost\.metrics\.listen"):
        Broker(tmp_path, config={"fencepost.metrics.listen": wrong})


@pytest.mark.parametrize("right", ["0", ":0", "127.0.0.1:0"])
async def test_metrics_without_a_host_listen_on_loopback_only(right: str, tmp_path: Path) -> None:
    async with serving(tmp_path, {"fencepost.metrics.listen": right}) as broker:
        assert broker.metrics_address[0] == "127.0.0.1"
        values = await scraped(broker)
        assert not [name for name, _ in values if name.startswith(("kafka", "kminion"))]


async def test_metrics_port_in_use_prevents_the_broker_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        broker = Broker(tmp_path, config={"fencepost.metrics.listen": address})
        with pytest.raises(BrokerError, match="cannot serve metrics"):
            await broker.start()
    async with serving(tmp_path):
        pass  # the failed start has left nothing behind


async def test_broker_without_metrics_listen_loads_no_metrics_modules(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from fencepost import Broker\n"
        "async def run():\n"
        "    async with Broker(sys.argv[1]) as broker:\n"
        "        assert broker._server.watch is None\n"
        "asyncio.run(run())\n"
        "print([one for one in sys.modules if '.metrics' in one or one.endswith('net.http')])\n"
    )
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, str(tmp_path)), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    out, _ = await done.communicate()
    assert out.decode().splitlines()[-1] == "[]"
