"""Client telemetry over a socket: subscriptions, access to pushed metrics, and hostile pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.acl import Operation
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.handlers.telemetry_views import KEY, MAX_DETAILED
from fencepost.coordinator.history.entries import POLL_PAUSE_REPORTED
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS
from fencepost.coordinator.telemetry.manager import MIN_PAUSE_MS
from fencepost.logcore.compression import Codec, compress
from tests.support import otlp, requests
from tests.support.cluster import Cluster, unique
from tests.support.guarded import Guarded
from tests.support.guarded import cluster as cluster_right
from tests.support.guarded import group as group_right
from tests.support.raw import ConnectionLostError
from tests.support.stalls import watched_loop

BROKER = 4
NODE = "3"
PAUSE = "org.apache.kafka.consumer.time.between.poll.max"


def configs(client: Cluster, *keys: str) -> dict[str, Any]:
    resource = requests.described_resource(BROKER, NODE, *keys)
    answer = client.call("describe_configs", 4, **requests.describe_configs(resource))
    (result,) = answer["results"]
    return {config["name"]: config["value"] for config in result["configs"]}


def push(client: Cluster, instance_id: UUID, metrics: bytes, codec: int = Codec.NONE) -> str:
    told = client.call("get_telemetry_subscriptions", 0, client_instance_id=instance_id)
    error: str = client.call(
        "push_telemetry",
        0,
        client_instance_id=instance_id,
        subscription_id=told["subscription_id"],
        compression_type=int(codec),
        metrics=metrics,
    )["error_code"]
    return error


def test_only_a_request_by_name_returns_the_metrics_of_clients(client: Cluster) -> None:
    client.client_id = unique("c")
    metrics = otlp.metrics_data(
        otlp.gauge(PAUSE, otlp.point(5.0, 1_000), unit="ms"),
        otlp.gauge("lag", otlp.point(7, 2_000, {"topic": "t"})),
        group_id="g",
    )
    assert push(client, UUID(int=100), metrics) == "none"
    settings = {name for name in configs(client) if name.startswith(KEY)}
    assert settings == {"fencepost.client.telemetry.enable"}
    found = json.loads(configs(client, KEY)[KEY])
    (mine,) = (row for row in found if row["client_id"] == client.client_id)
    assert (mine["pushes"], mine["series_count"], mine["dropped"]) == (1, 2, 0)
    assert mine["values"] == {"time_between_polls_max_ms": 5.0}
    assert mine["resource"] == {"group_id": "g"}
    assert "series" not in mine
    by_name = f"{KEY}/{client.client_id}"
    (detailed,) = json.loads(configs(client, by_name)[by_name])
    assert detailed == {
        **mine,
        "series": [["lag", {"topic": "t"}, 7, "", 2_000], [PAUSE, {}, 5.0, "ms", 1_000]],
    }
    absent = f"{KEY}/{unique('none')}"
    assert configs(client, absent, f"{KEY}s") == {absent: "[]"}


@pytest.mark.parametrize("count", [MAX_DETAILED, MAX_DETAILED + 1])
def test_instances_shown_with_all_values_are_bounded(client: Cluster, count: int) -> None:
    client.client_id = unique("many")
    for number in range(count):
        instance_id = UUID(int=1_000 * count + number)
        client.call("get_telemetry_subscriptions", 0, client_instance_id=instance_id)
    name = f"{KEY}/{client.client_id}"
    assert len(json.loads(configs(client, name)[name])) == MAX_DETAILED
    shown = [row["client_id"] for row in json.loads(configs(client, KEY)[KEY])]
    assert shown.count(client.client_id) == count


def test_metrics_of_clients_need_describe_configs_on_the_cluster(guarded: Guarded) -> None:
    with Cluster(guarded.bootstrap) as client:
        guarded.allow()
        assert configs(client, KEY) == {}
        guarded.allow(cluster_right(Operation.DESCRIBE_CONFIGS))
        assert KEY in configs(client, KEY)


def test_history_of_a_group_gets_pauses_only_of_clients_that_may_read_it(guarded: Guarded) -> None:
    group = unique("g")
    metrics = otlp.metrics_data(otlp.gauge(PAUSE, otlp.point(float(MIN_PAUSE_MS))), group_id=group)
    counts = guarded.services.history.counts
    key = CONSUMER_OFFSETS, POLL_PAUSE_REPORTED, "request PushTelemetry"
    with Cluster(guarded.bootstrap) as client:
        for number, rights, expected in (
            (1, (group_right(Operation.DESCRIBE, group),), 0),
            (2, (group_right(Operation.READ, group),), 1),
        ):
            guarded.allow(*rights)
            before = counts[key]
            assert push(client, UUID(int=10 + number), metrics) == "none"
            assert counts[key] - before == expected


def test_telemetry_is_neither_advertised_nor_served_by_default(tmp_path: Path) -> None:
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        keys = {api["api_key"] for api in client.call("api_versions", 2)["api_keys"]}
        assert 74 in keys
        assert not keys & {71, 72}
        with pytest.raises(ConnectionLostError):
            client.call("get_telemetry_subscriptions", 0)


PIECES = {
    "fields": otlp.number(99, 1),
    "points": otlp.nested(1, otlp.nested(2, otlp.nested(2, otlp.gauge("m", otlp.point(1))))),
    "attributes": otlp.nested(1, otlp.nested(1, otlp.attributes(1, {"a": "b"}))),
}


# Each piece and each codec occurs in a quick test.
@pytest.mark.parametrize(
    ("codec", "piece"),
    [
        pytest.param(
            codec,
            piece,
            id=f"{name}-{codec}",
            marks=[pytest.mark.slow] if codec is not quick else [],
        )
        for (name, piece), quick in zip(
            PIECES.items(), (Codec.GZIP, Codec.ZSTD, Codec.NONE), strict=True
        )
        for codec in (Codec.NONE, Codec.GZIP, Codec.ZSTD)
    ],
)
def test_largest_pushes_do_not_block_the_loop(client: Cluster, codec: Codec, piece: bytes) -> None:
    data = piece * ((1 << 20) // len(piece))
    with watched_loop() as watch:
        assert push(client, UUID(int=500), compress(codec, data), codec) == "none"
    watch.check()
    client.close()
