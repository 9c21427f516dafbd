"""Apache Kafka's own tools accept the client settings that the plugin makes for Java."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.testing import Kafka
from tests.support.kafka import required, run_tool

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_kafkas_tools_connect_with_the_plugins_client_config(
    tmp_path: Path, mechanism: str, *, tls: bool
) -> None:
    users = {"alice": 'pa"ss, w\\;o]rd='}
    with Kafka(users=users, tls=tls, acls=["alice DESCRIBE topic:orders"]) as broker:
        broker.topic("orders")
        broker.topic("secret")
        told = broker.client_config("alice", "java", mechanism=mechanism)
        settings = tmp_path / "client.properties"
        lines = (f"{key}={value}\n".replace("\\", "\\\\") for key, value in told.items())
        settings.write_text("".join(lines))
        with required():
            listed = run_tool(
                "org.apache.kafka.tools.TopicCommand",
                *("--bootstrap-server", broker.bootstrap, "--command-config", str(settings)),
                "--list",
            )
    assert listed.split() == ["orders"]
