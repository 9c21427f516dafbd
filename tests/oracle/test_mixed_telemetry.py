"""Client telemetry in clusters: every broker has the subscription; one command asks all brokers."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support import otlp
from tests.support.cluster import Cluster, unique
from tests.support.kafka import required
from tests.support.mixed import MixedCluster
from tests.support.targets import SETTINGS
from tests.support.telemetry import ENABLED
from tests.support.waits import until
from tests.wire.command_line import cli

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("controllers", ["J", "P"])
def test_clients_of_all_brokers_are_listed(tmp_path: Path, controllers: str) -> None:
    settings = {**SETTINGS, **ENABLED}
    with required():
        cluster = MixedCluster(tmp_path, "PP", settings, controllers=controllers).start()
    connections = ExitStack()
    try:
        first, second = cluster.node(1).bootstrap, cluster.node(2).bootstrap
        setting = ("configs", "set", "client-metrics", "all", "metrics=a.", "interval.ms=100")
        cli(first, *setting, "--execute")
        names = []
        for number, address in enumerate((first, second), 1):
            client = connections.enter_context(Cluster(address))
            client.client_id = unique(f"client-{number}")
            names.append((number, client.client_id))

            def told(client: Cluster = client) -> dict[str, Any] | None:
                found = client.call("get_telemetry_subscriptions", 0)
                return found if list(found["requested_metrics"]) == ["a."] else None

            subscribed = until(told, f"broker {number} has the subscription")
            answer = client.call(
                "push_telemetry",
                0,
                client_instance_id=UUID(subscribed["client_instance_id"]),
                subscription_id=subscribed["subscription_id"],
                metrics=otlp.metrics_data(otlp.gauge("a.b", otlp.point(number))),
            )
            assert answer["error_code"] == "none"
        rows = json.loads(cli(second, "clients", "telemetry", "--format=json").stdout)
        assert [(row["broker"], row["client_id"]) for row in rows if row["pushes"]] == names
        asking = connections.enter_context(Cluster(first))
        listed = asking.call("list_config_resources", 0)["config_resources"]
        assert [resource["resource_name"] for resource in listed] == ["all"]
    finally:
        connections.close()
        cluster.stop()
