"""The controller's authorization: brokers' requests need CLUSTER_ACTION."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.handlers.controller_registry import controller_registry
from fencepost.coordinator.security.authorizer import STANDARD
from fencepost.coordinator.security.principal import Principal
from fencepost.protocol.api import CONTROLLER_APIS, ApiKey
from tests.support.controllers import Pretender, anonymous
from tests.support.raw import RawClient
from tests.support.waits import until
from tests.unit.coordinator.controller.conftest import Node

OF_BROKERS = sorted({*CONTROLLER_APIS, ApiKey.FETCH} & set(controller_registry().versions))
"""The APIs that only brokers and controllers use."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Yield a controller with an authorizer without ACLs; ``User:admin`` is a super user."""
    with Node(
        tmp_path_factory.mktemp("guarded"),
        authorizer_class_name=STANDARD,
        super_users="User:admin",
    ) as running:
        yield running


@pytest.mark.parametrize("key", OF_BROKERS, ids=lambda key: ApiKey(key).name)
def test_broker_api_without_cluster_action_is_refused(guarded: Node, key: int) -> None:
    handler = controller_registry().handler(key)
    assert handler.permission == "CLUSTER_ACTION Cluster"
    body: dict[str, Any] = {"request_principal": anonymous()} if key == ApiKey.ENVELOPE else {}
    name = handler.api.module
    with RawClient(guarded.bootstrap) as client:
        answer = client.call(name, handler.api.max_version, **body)
    assert answer["error_code"] == "cluster_authorization_failed"


def log_in(node: Node, pretender: Pretender, name: str) -> None:
    """Set the principal of a connection."""

    async def log_in() -> bool:
        for connection in node.broker.server.connections:
            if connection.peer_port == pretender.controller.local_port:
                principal = Principal("User", name)
                connection.session = replace(connection.session, principal=principal)
                return True
        return False

    until(lambda: node.thread.call(log_in), "the connection is there")


def test_forwarded_request_is_authorized_as_its_own_principal(guarded: Node) -> None:
    broker = Pretender(guarded.bootstrap, 1, "")
    log_in(guarded, broker, "admin")
    topics = [{"name": "t", "num_partitions": 1, "replication_factor": 1}]
    for principal, outcome in (
        (anonymous(), "topic_authorization_failed"),
        (anonymous("admin"), "invalid_replication_factor"),
    ):
        error, inside = broker.envelope("create_topics", 7, principal=principal, topics=topics)
        assert error == "none"
        assert inside is not None
        assert inside["topics"][0]["error_code"] == outcome
    broker.close()


def test_forwarded_create_acls_appends_a_record_to_the_metadata_log(tmp_path: Path) -> None:
    """ACLs are records in the metadata log, which brokers replay."""
    with Node(tmp_path, authorizer_class_name=STANDARD, super_users="User:ANONYMOUS") as node:
        broker = node.pretender(1)
        end = broker.end()
        rule = {
            "resource_type": 2, "resource_pattern_type": 3, "resource_name": "t",
            "principal": "User:a", "host": "*", "operation": 3, "permission_type": 3,
        }  # fmt: skip
        error, inside = broker.envelope("create_acls", 3, creations=[rule])
        assert (error, inside and inside["results"][0]["error_code"]) == ("none", "none")
        (record,) = broker.records(end)
        assert type(record).__name__ == "AccessControlEntryRecord"
        broker.close()
