"""Blocks of producer ids from the active controller.

Source: ``RPCProducerIdManager``.
"""

from __future__ import annotations

from collections.abc import Callable

from kio.schema.errors import ErrorCode

from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.logcore.machine import DomainError
from fencepost.logcore.values import dataclass
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import WireError
from fencepost.txn.errors import ProducerIdsUnavailableError
from fencepost.txn.ids import ProducerIdBlock


@dataclass(frozen=True, slots=True)
class ControllersProducerIds:
    """Requests blocks over ``channel`` for the broker registered with ``broker_epoch``."""

    channel: ControllerChannel
    node_id: int
    broker_epoch: Callable[[], int]

    async def allocate(self) -> ProducerIdBlock:
        """Return a block for this broker alone. Raises ProducerIdsUnavailableError."""
        request = NewestVersionRequest(
            ApiKey.ALLOCATE_PRODUCER_IDS,
            lambda make: make.message(broker_id=self.node_id, broker_epoch=self.broker_epoch()),
        )
        try:
            answer = await self.channel.send(request)
        except (DomainError, WireError) as error:
            raise ProducerIdsUnavailableError(str(error)) from error
        if answer.error_code is not ErrorCode.none:
            raise ProducerIdsUnavailableError(f"the controller says {answer.error_code.name}")
        return ProducerIdBlock(answer.producer_id_start, answer.producer_id_len)
