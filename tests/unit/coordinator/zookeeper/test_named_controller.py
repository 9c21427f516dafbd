"""The controller's id in responses to clients, in a cluster that elects it in ZooKeeper."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.handlers.endpoints import Endpoints
from fencepost.coordinator.zookeeper.node import ZooKeeperNode
from tests.unit.coordinator.services.coordinators import Services


@pytest.mark.parametrize("known", [-1, 1, 2])
async def test_controller_id_is_minus_one_while_no_controller_is_known(
    tmp_path: Path, known: int
) -> None:
    """A broker that has just resigned must not return an arbitrary broker's id."""
    services = await Services(tmp_path).start()
    services.zookeeper = ZooKeeperNode(
        BrokerConfig({"zookeeper.connect": "nowhere:1"}),
        services.clock,
        node_id=1,
        listener="PLAINTEXT",
        on_lost=pytest.fail,
    )
    services.zookeeper.controller_id = known
    request: Any = SimpleNamespace(
        broker=services,
        connection=SimpleNamespace(session=SimpleNamespace(listener="PLAINTEXT")),
        advertised=("127.0.0.1", 9092),
    )
    assert Endpoints(request).controller_id == known
    await services.stop()
