"""Client telemetry (KIP-714): the rules for its requests on either broker; real clients."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, Producer

from fencepost.coordinator.telemetry.instances import subscription_id
from fencepost.coordinator.telemetry.manager import MIN_PAUSE_MS
from fencepost.coordinator.telemetry.subscriptions import RequestedMetrics
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.compression import Codec, compress
from tests.support import otlp
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import java_command, required
from tests.support.own_broker import OwnBroker
from tests.support.processes import Child
from tests.support.raw import Answer
from tests.support.share import configure
from tests.support.targets import SETTINGS
from tests.support.telemetry import ENABLED, with_receiver
from tests.support.waits import until
from tests.wire.command_line import cli

MAX_BYTES = 100_000
INTERVAL_MS = 600
"""Push interval: long enough that two requests in a row are too close, even on a busy machine."""

CLIENT_METRICS = 16
OWN_ONLY = "Apache Kafka passes the metrics of clients on to a plugin"


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnBroker]:
    kind = request.config.getoption("--target")
    settings = {
        **SETTINGS,
        "telemetry.max.bytes": str(MAX_BYTES),
        "group.share.min.record.lock.duration.ms": "1000",
    }
    home = tmp_path_factory.mktemp("telemetry")
    started: Any
    if kind == "kafka":
        with required():
            started = with_receiver(home, settings)
            started.start()
    elif kind == "fencepost":
        started = Daemon(home / "data", {**settings, **ENABLED}).start()
    else:
        pytest.skip("a container has a configuration of its own")
    yield started
    started.stop()


@pytest.fixture
def mine(broker: OwnBroker) -> Iterator[Cluster]:
    """Yield a connection whose client id has a separate subscription."""
    with Cluster(broker.bootstrap) as cluster:
        cluster.client_id = unique("telemetry")
        subscribe(cluster, metrics="a.prefix.")
        yield cluster


def subscribe(cluster: Cluster, **settings: str) -> None:
    """Change the subscription of a client id, and wait until the broker has applied it."""
    told = {"interval.ms": str(INTERVAL_MS), "match": f"client_id={cluster.client_id}", **settings}
    resource = {
        "resource_type": CLIENT_METRICS,
        "resource_name": f"of-{cluster.client_id}",
        "configs": [
            {"name": key, "config_operation": 0, "value": value} for key, value in told.items()
        ],
    }
    cluster.call("incremental_alter_configs", 1, resources=[resource], validate_only=False)
    wanted = "*" if "*" in told["metrics"] else told["metrics"]

    def applied() -> bool:
        found = cluster.call("get_telemetry_subscriptions", 0)
        return list(found["requested_metrics"]) == [wanted]

    until(applied, "the broker applies the subscription")


def get(cluster: Cluster, instance_id: str | UUID) -> Answer:
    return cluster.call("get_telemetry_subscriptions", 0, client_instance_id=_uuid(instance_id))


def push(cluster: Cluster, told: Answer, metrics: bytes = b"", **more: Any) -> str:
    body = {
        "client_instance_id": _uuid(told["client_instance_id"]),
        "subscription_id": told["subscription_id"],
        "metrics": metrics,
        **more,
    }
    error: str = cluster.call("push_telemetry", 0, **body)["error_code"]
    return error


def _uuid(text: str | UUID) -> UUID:
    return text if isinstance(text, UUID) else UUID(text)


def test_api_versions_advertises_the_telemetry_apis(mine: Cluster) -> None:
    keys = {api["api_key"] for api in mine.call("api_versions", 2)["api_keys"]}
    assert {71, 72} <= keys


def test_client_gets_an_id_and_its_subscription(mine: Cluster) -> None:
    told = mine.call("get_telemetry_subscriptions", 0)
    assert told["error_code"] == "none"
    assert _uuid(told["client_instance_id"]).int > 1
    assert told["requested_metrics"] == ["a.prefix."]
    assert list(told["accepted_compression_types"]) == [4, 3, 1, 2]
    assert (told["push_interval"], told["telemetry_max_bytes"]) == (INTERVAL_MS, MAX_BYTES)
    assert told["delta_temporality"] is True


@pytest.mark.parametrize("metrics", ["a.prefix.", "*", "*,b"])
def test_subscription_id_is_computed_as_in_kafka(mine: Cluster, metrics: str) -> None:
    subscribe(mine, metrics=metrics)
    for instance_id in (UUID(int=7), UUID(int=(1 << 127) + 12_345)):
        told = get(mine, instance_id)
        wanted = RequestedMetrics(tuple(told["requested_metrics"]), INTERVAL_MS)
        assert told["subscription_id"] == subscription_id(wanted, instance_id)


def test_requests_before_the_interval_are_refused(mine: Cluster) -> None:
    told = mine.call("get_telemetry_subscriptions", 0)
    early = "throttling_quota_exceeded"
    assert get(mine, told["client_instance_id"])["error_code"] == early
    # The client may send its first push at any time, but not the second push.
    assert push(mine, told) == "none"
    assert push(mine, told) == early
    assert get(mine, told["client_instance_id"])["error_code"] == early
    until(lambda: push(mine, told) == "none", "the interval has passed")


def test_push_of_unknown_subscription_is_refused_and_throttles_the_next(mine: Cluster) -> None:
    told = mine.call("get_telemetry_subscriptions", 0)
    other = {**told, "subscription_id": told["subscription_id"] + 1}
    assert push(mine, other) == "unknown_subscription_id"
    # The client may get its subscription at once, but the refused push starts the interval.
    again = get(mine, told["client_instance_id"])
    assert (again["error_code"], again["subscription_id"]) == ("none", told["subscription_id"])
    assert push(mine, told) == "throttling_quota_exceeded"


@pytest.mark.parametrize(
    ("metrics", "compression_type", "error"),
    [
        (b"", 5, "unsupported_compression_type"),
        (b"", -1, "unsupported_compression_type"),
        (b"x" * (MAX_BYTES + 1), 0, "telemetry_too_large"),
        (compress(Codec.GZIP, b"x" * (MAX_BYTES + 1)), 1, "invalid_record"),
        (compress(Codec.SNAPPY, b"x" * (MAX_BYTES + 1)), 2, "invalid_record"),
        (compress(Codec.LZ4, b"x" * (MAX_BYTES + 1)), 3, "invalid_record"),
        (compress(Codec.ZSTD, b"x" * (MAX_BYTES + 1)), 4, "invalid_record"),
        (b"no gzip", 1, "invalid_record"),
        (b"no zstd", 4, "invalid_record"),
        (compress(Codec.ZSTD, otlp.metrics_data(otlp.gauge("m", otlp.point(1)))), 4, "none"),
    ],
    ids=[
        *("codec-5", "codec-minus", "too-large", "gzip-bomb", "snappy-bomb", "lz4-bomb"),
        *("zstd-bomb", "no-gzip", "no-zstd", "good"),
    ],
)
def test_invalid_push_is_refused(
    mine: Cluster, metrics: bytes, compression_type: int, error: str
) -> None:
    told = mine.call("get_telemetry_subscriptions", 0)
    assert push(mine, told, metrics, compression_type=compression_type) == error


def test_push_after_the_terminating_push_is_refused(mine: Cluster) -> None:
    told = mine.call("get_telemetry_subscriptions", 0)
    assert push(mine, told) == "none"
    assert push(mine, told, terminating=True) == "none"
    assert push(mine, told, terminating=True) == "invalid_request"
    assert push(mine, told) == "invalid_request"


@pytest.mark.parametrize("instance_id", [UUID(int=0), UUID(int=1)])
def test_push_needs_an_instance_id(mine: Cluster, instance_id: UUID) -> None:
    told = {"client_instance_id": instance_id, "subscription_id": 0}
    assert push(mine, told) == "invalid_request"


def test_client_instance_is_forgotten_when_its_connection_closes(
    mine: Cluster, broker: OwnBroker
) -> None:
    with Cluster(broker.bootstrap) as other:
        other.client_id = mine.client_id
        told = other.call("get_telemetry_subscriptions", 0)
        assert push(other, told, terminating=True) == "none"
        assert push(mine, told, terminating=True) == "invalid_request"
    # The broker accepts another push once it has forgotten that the instance sent its last push.
    until(
        lambda: push(mine, told, terminating=True) == "none",
        "the broker forgets the instance of the closed connection",
    )


# --- real clients, and what this broker shows of them ---


@pytest.fixture
def ours(request: pytest.FixtureRequest, broker: OwnBroker) -> str:
    """Return the address of a Fencepost broker to which all clients push all metrics."""
    if request.config.getoption("--target") != "fencepost":
        pytest.skip(OWN_ONLY)
    with Cluster(broker.bootstrap) as cluster:
        cluster.client_id = "real-client"
        subscribe(cluster, metrics="*", match="client_id=real-.*")
    return broker.bootstrap


def rows(bootstrap: str, *options: str) -> list[dict[str, Any]]:
    shown = cli(bootstrap, "clients", "telemetry", *options, "--format=json").stdout
    found: list[dict[str, Any]] = json.loads(shown)
    return found


def pushed(bootstrap: str, client_id: str, *values: str) -> dict[str, Any]:
    """Return the row of a client as soon as the client has pushed all of these values."""

    def look() -> dict[str, Any] | None:
        for row in rows(bootstrap):
            if row["client_id"] == client_id and set(values) <= row["values"].keys():
                return row
        return None

    return until(look, f"{client_id} pushes {values}")


def test_metrics_of_librdkafka_are_shown(ours: str) -> None:
    with Cluster(ours) as cluster:
        topic = cluster.create_topic(unique("t"))
    common = {"bootstrap.servers": ours, "enable.metrics.push": True}
    producer = Producer({**common, "client.id": "real-producer"})
    producer.produce(topic, b"x")
    producer.flush()
    group = {"group.id": unique("g"), "auto.offset.reset": "earliest"}
    consumer = Consumer({**common, **group, "client.id": "real-consumer"})
    consumer.subscribe([topic])
    assert until(lambda: consumer.poll(0.1), "a record") is not None

    def idle() -> dict[str, Any] | None:
        consumer.poll(0.1)
        found = [listed for listed in rows(ours) if listed["client_id"] == "real-consumer"]
        return found[0] if found and "poll_idle_ratio" in found[0]["values"] else None

    row = until(idle, "the consumer pushes its metrics")
    assert row["resource"]["group_id"] == group["group.id"]
    assert "rdkafka" in row["software"]
    assert row["subscribed"] == ["*"]
    producing = pushed(ours, "real-producer", "request_latency_max_ms")
    series = rows(ours, "--client-id", "real-producer")
    assert len(series) == producing["series_count"] > 1
    assert all(sample["metric"].startswith("org.apache.kafka.producer.") for sample in series)
    consumer.close()
    until(
        lambda: not rows(ours, "--client-id", "real-consumer"),
        "the values of the closed consumer are dropped",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
def test_history_names_the_poll_pause_that_expired_a_java_consumer(
    ours: str, tmp_path: Path
) -> None:
    group, topic = unique("slow"), unique("t")
    settings = tmp_path / "consumer.properties"
    settings.write_text("client.id=real-java\n")
    command = java_command(
        "org.apache.kafka.tools.VerifiableConsumer",
        *("--bootstrap-server", ours, "--topic", topic, "--group-id", group),
        *("--session-timeout", str(MIN_PAUSE_MS // 2), "--command-config", str(settings)),
    )
    with Cluster(ours) as cluster:
        cluster.create_topic(topic)
        consumer = Child(command)
        try:
            row = until(lambda: polling(ours, cluster, topic), "the consumer pushes its metrics")
            assert row["software"].startswith("apache-kafka-java 4.")
            assert (row["resource"]["group_id"], row["dropped"]) == (group, 0)
            os.kill(consumer.pid, signal.SIGSTOP)
            since = monotonic_s()
            assert "poll" not in told(ours, group, "member-expired")["why"]
            until(lambda: monotonic_s() - since > MIN_PAUSE_MS / 1000, "the pause is long enough")
            os.kill(consumer.pid, signal.SIGCONT)
            # The tool polls until there are records, and reports the pause at the next poll.
            entry = told(ours, group, "poll-pause-reported", lambda: cluster.produce(topic, [b"x"]))
            pause_ms = entry["detail"]["pause_ms"]
            until(
                lambda: pauses_of_members(ours, group) == [pause_ms],
                "the member that has rejoined shows the pause",
            )
            assert "POLL_PAUSE" in cli(ours, "groups", "describe", group, "--members").stdout
        finally:
            consumer.kill()
    pause_s = pause_ms / 1000
    assert pause_s >= MIN_PAUSE_MS / 1000
    assert entry["why"].startswith(f"{pause_s:.1f} s passed between two calls of poll")
    gone = told(ours, group, "member-expired")
    assert gone["why"].endswith(f"; its client had not called poll for {pause_s:.1f} s")
    assert "had not called poll" in cli(ours, "groups", "history", group, "--wide").stdout


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
def test_history_names_the_poll_pause_that_expired_a_java_share_consumers_lock(
    ours: str, tmp_path: Path
) -> None:
    group, topic = unique("share"), unique("t")
    settings = tmp_path / "consumer.properties"
    settings.write_text("client.id=real-java\n")
    command = java_command(
        "org.apache.kafka.tools.VerifiableShareConsumer",
        *("--bootstrap-server", ours, "--topic", topic, "--group-id", group),
        *("--acknowledgement-mode", "sync", "--command-config", str(settings)),
    )
    with Cluster(ours) as cluster:
        cluster.create_topic(topic)
        configure(cluster, group, share_record_lock_duration_ms=str(MIN_PAUSE_MS))
        consumer = Child(command)
        try:
            row = until(lambda: polling(ours, cluster, topic), "the consumer pushes its metrics")
            assert row["resource"]["group_id"] == group

            def acquired() -> bool:
                shown = cli(ours, "groups", "describe", group, "--format=json").stdout
                return any(listed["acquired"] for listed in json.loads(shown))

            def is_stopped_with_a_record() -> bool:
                """Stop the consumer while the broker holds its fetch, which a record completes."""
                os.kill(consumer.pid, signal.SIGSTOP)
                cluster.produce(topic, [b"x"])
                try:
                    return until(acquired, "the record is acquired", deadline_s=2)
                except TimeoutError:
                    os.kill(consumer.pid, signal.SIGCONT)
                    return False

            until(is_stopped_with_a_record, "the consumer is stopped with a record")
            lost = told(ours, group, "share-records-returned")
            assert lost["why"] == "acquisition lock expired"
            os.kill(consumer.pid, signal.SIGCONT)
            entry = told(ours, group, "poll-pause-reported", lambda: cluster.produce(topic, [b"x"]))
            pause_ms = entry["detail"]["pause_ms"]
            until(lambda: pauses_of_members(ours, group) == [pause_ms], "the member's pause")
        finally:
            consumer.kill()
    assert pause_ms >= MIN_PAUSE_MS
    lost = told(ours, group, "share-records-returned")
    pause = f"its client had not called poll for {pause_ms / 1000:.1f} s"
    assert lost["why"] == f"acquisition lock expired; {pause}"


def pauses_of_members(bootstrap: str, group: str) -> list[int | None]:
    shown = cli(bootstrap, "groups", "members", group, "--format=json").stdout
    return [row["poll_pause_ms"] for row in json.loads(shown)]


def polling(bootstrap: str, cluster: Cluster, topic: str) -> dict[str, Any] | None:
    """Write a record, and return the row of the Java consumer once it has reported its polls."""
    cluster.produce(topic, [b"x"])
    found = [row for row in rows(bootstrap) if row["client_id"] == "real-java"]
    return found[0] if found and "poll_idle_ratio" in found[0]["values"] else None


def told(
    bootstrap: str, group: str, kind: str, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the first entry of a kind in a group's history, as soon as there is one."""

    def look() -> dict[str, Any] | None:
        meanwhile()
        shown = cli(bootstrap, "groups", "history", group, "--format=json", status=None).stdout
        found = [row for row in json.loads(shown or "[]") if row["what"] == kind]
        return found[0] if found else None

    return until(look, f"{kind} of {group}")
