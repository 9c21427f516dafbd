"""Metrics with the JMX exporter's names, compared with Apache Kafka's MBeans."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

from fencepost.coordinator.daemon.broker import Broker
from tests.support import requests
from tests.support.clock import ManualClock
from tests.support.cluster import GROUP, Cluster
from tests.support.raw import RawClient
from tests.support.share import REJECT, Member, initialize, parts_of
from tests.support.waits import until, until_true
from tests.unit.coordinator.handlers.test_sasl_authenticate import CONFIG, USERS, is_closed, log_in
from tests.unit.coordinator.metrics.test_families import SETTINGS, scraped, serving, value

REQUESTS = "kafka_network_requestmetrics_requests_total"
TIMED = "kafka_network_requestmetrics_totaltimems_count"
CONNECTIONS = "kafka_server_socket_server_metrics_connection_count"
EXPIRED = "kafka_network_socketserver_expiredconnectionskilledcount"


async def test_follower_fetches_are_counted_separately_from_consumer_fetches(
    tmp_path: Path,
) -> None:
    limits = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1000, "session_epoch": -1, "topics": []}

    def fetch(bootstrap: str) -> None:
        with Cluster(bootstrap) as client:
            for replica_id in (-1, -1, 2):
                client.call("fetch", 11, replica_id=replica_id, **limits)
            # Since version 15, the follower's id is in a tagged field.
            for state in ({}, *[{"replica_state": {"replica_id": 2, "replica_epoch": 1}}] * 3):
                client.call("fetch", 16, **limits, **state)

    async with serving(tmp_path) as broker:
        await asyncio.to_thread(fetch, broker.bootstrap)
        values = await scraped(broker)
    for request, version, count in (
        ("FetchConsumer", "11", 2),
        ("FetchFollower", "11", 1),
        ("FetchConsumer", "16", 1),
        ("FetchFollower", "16", 3),
    ):
        assert value(values, REQUESTS, request=request, version=version) == count
    assert value(values, TIMED, request="FetchConsumer") == 3
    assert value(values, TIMED, request="FetchFollower") == 4
    assert value(values, "kafka_server_brokertopicmetrics_totalfetchrequests_total") == 7
    assert value(values, "fencepost_requests_total", api="Fetch", version="16") == 4


async def test_connections_with_expired_logins_are_counted(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    settings = {**SETTINGS, **CONFIG, "connections.max.reauth.ms": "60000"}

    def use_expired_login(bootstrap: str) -> None:
        with RawClient(bootstrap) as client:
            log_in(client)
            clock.advance(60_001)
            client.send("metadata", 1, topics=[])
            assert is_closed(client)

    async with Broker(tmp_path, config=settings, add_scram=USERS, clock=clock) as broker:
        assert value(await scraped(broker), EXPIRED) == 0
        await asyncio.to_thread(use_expired_login, broker.bootstrap)
        assert value(await scraped(broker), EXPIRED) == 1


async def test_connections_are_counted_by_listener(tmp_path: Path) -> None:
    listeners = ("CLIENTS", "INSIDE", "SPARE")
    settings = {
        **SETTINGS,
        "listeners": ",".join(f"{name}://127.0.0.1:0" for name in listeners),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in listeners),
        "inter.broker.listener.name": "INSIDE",
    }

    def connect(open_clients: ExitStack, address: tuple[str, int]) -> None:
        client = open_clients.enter_context(RawClient("{}:{}".format(*address)))
        client.call("api_versions", 0)

    async with serving(tmp_path, settings) as broker:
        with ExitStack() as open_clients:
            for name in ("CLIENTS", "INSIDE", "INSIDE"):
                address = broker.server.addresses[name]
                await asyncio.to_thread(connect, open_clients, address)
            values = await scraped(broker)
    assert {pairs: count for (name, pairs), count in values.items() if name == CONNECTIONS} == {
        (("listener", "CLIENTS"), ("networkProcessor", "0")): 1,
        (("listener", "INSIDE"), ("networkProcessor", "0")): 2,
        (("listener", "SPARE"), ("networkProcessor", "0")): 0,
    }


async def test_share_groups_are_counted_by_state(tmp_path: Path) -> None:
    prefix = "kafka_server_group_coordinator_metrics_"

    def use_share_groups(bootstrap: str) -> None:
        with Cluster(bootstrap) as client:
            client.coordinator("any", GROUP)
            client.create_topic("t")
            for name in ("stays", "leaves"):
                client.call("share_group_heartbeat", 1, **requests.join_share_group(name, "m", "t"))
            leave = requests.share_group_heartbeat("leaves", "m", -1)
            client.call("share_group_heartbeat", 1, **leave)

    async with serving(tmp_path) as broker:
        await asyncio.to_thread(use_share_groups, broker.bootstrap)
        values = await scraped(broker)
    for state, count in (("Stable", 1), ("Empty", 1), ("Dead", 0)):
        assert value(values, f"{prefix}share_group_count", state=state) == count
    for kind, count in (("share", 2), ("consumer", 0), ("classic", 0)):
        assert value(values, f"{prefix}group_count", protocol=kind) == count
    assert value(values, f"{prefix}share_group_rebalance_count") == 2
    assert value(values, "fencepost_groups", type="share", state="Stable") == 1
    assert value(values, "fencepost_group_rebalances_total", cause="member-joined") == 2
    assert value(values, "fencepost_group_rebalances_total", cause="member-left") == 1


async def test_records_in_dead_letter_queues_are_counted(tmp_path: Path) -> None:
    enable = {"errors.deadletterqueue.group.enable": "true"}

    def reject(bootstrap: str) -> None:
        with Cluster(bootstrap) as client:
            level = {"feature": "share.version", "max_version_level": 2, "upgrade_type": 1}
            client.call("update_features", 2, timeout=10_000, feature_updates=[level])
            client.create_topic("t")
            client.create_topic("dlq.full", configs={**enable, "max.message.bytes": "80"})
            client.create_topic("dlq.q", configs=enable)
            topic_id = client.topic_id("t")
            for group in ("dlq.q", "dlq.full"):
                name = {"name": "errors.deadletterqueue.topic.name", "value": group}
                row = {"resource_type": 32, "resource_name": group}
                rows = {**row, "configs": [{**name, "config_operation": 0}]}
                body = requests.incremental_alter_configs(rows, validate_only=False)
                client.call("incremental_alter_configs", 1, **body)
                initialize(client, group, topic_id)
                member = Member(client, group)
                client.produce("t", [b"a", b"b"])
                until(lambda m=member: fetched(m, topic_id), "records are acquired")
                member.acknowledge({topic_id: {0: [(0, 1, REJECT)]}})
            until(lambda: client.offset("dlq.q") == 2, "records are in the queue")

    def fetched(member: Member, topic_id: UUID) -> bool:
        part = parts_of(member.fetch({topic_id: {0: []}})).get(0)
        return part is not None and bool(part["acquired_records"])

    prefix = "kafka_server_sharegroupmetrics_deadletterqueue"
    async with serving(tmp_path) as broker:
        await asyncio.to_thread(reject, broker.bootstrap)
        queues = broker.services.shares.dead_letters
        await until_true(lambda: queues.failures, "a batch is given up")
        values = await scraped(broker)
    for group, records, failures in (("dlq.q", 2, None), ("dlq.full", None, 1)):
        for name, own, count in (
            ("recordcount_count", "records", records),
            ("totalproducerequests_total", "requests", 1),
            ("failedproducerequests_total", "failures", failures),
        ):
            if count is not None:
                assert value(values, f"{prefix}{name}", group=group) == count
                assert value(values, f"fencepost_dead_letter_{own}_total", group=group) == count
