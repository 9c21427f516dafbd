"""A stopping broker requests a controlled shutdown, up to a retry limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.config.roles import Roles
from fencepost.coordinator.daemon.zookeeper_broker import ZooKeeperBroker
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.replication.controller_channel import (
    ControllerChannel,
)
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import response_factory
from tests.support.local_controller import LocalControllerChannel

SETTINGS = {
    "node.id": 3,
    "zookeeper.connect": "nowhere:1",
    "controlled.shutdown.max.retries": 3,
    "controlled.shutdown.retry.backoff.ms": 1,
}
Said = ErrorCode | int | Exception
"""A controller's response: an error, the number of remaining partitions, or a timeout."""


class Leaving(ZooKeeperBroker):
    """A broker with epoch 7 whose controller gives the responses ``said`` in this order."""

    def __init__(self, *said: Said) -> None:
        super().__init__(
            BrokerConfig(SETTINGS), Roles(True, False), {"PLAINTEXT": ListenerConfig()}, print
        )
        self._said = [*said]
        self._node: Any = SimpleNamespace(
            broker_epoch=7, controller=("h", 1), in_controlled_shutdown=False
        )
        self.asked: list[tuple[int, int]] = []

    def channel(self, _retry_timeout_ms: int | None) -> ControllerChannel:
        return LocalControllerChannel(self._answer)

    async def _answer(self, request: Any) -> Any:
        assert self._node.in_controlled_shutdown
        self.asked.append((request.broker_id, request.broker_epoch))
        make = response_factory(ApiKey.CONTROLLED_SHUTDOWN, 3)
        said = self._said.pop(0)
        if isinstance(said, Exception):
            raise said
        left = 0 if isinstance(said, ErrorCode) else said
        return make.message(
            error_code=said if isinstance(said, ErrorCode) else ErrorCode.none,
            remaining_partitions=tuple(
                make.RemainingPartition(topic_name="t", partition_index=index)
                for index in range(left)
            ),
        )


@pytest.mark.parametrize(
    ("said", "times"),
    [
        ([0], 1),
        ([2, 0], 2),
        ([2, 1, 1], 3),
        ([ErrorCode.stale_broker_epoch, RequestTimedOutError("late"), 0], 3),
    ],
)
async def test_controlled_shutdown_is_retried_until_no_partition_remains_or_limit(
    said: list[Said], times: int
) -> None:
    leaving = Leaving(*said)
    await leaving.leave()
    assert leaving.asked == [(3, 7)] * times


async def test_controlled_shutdown_without_controller_sends_no_request() -> None:
    leaving = Leaving()
    leaving._node.controller = None
    await leaving.leave()
    assert leaving.asked == []
