"""Blocks of producer ids, each given to one broker.

Source: ``ProducerIdControlManager``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fencepost.cluster.controller.errors import ProducerIdsExhaustedError
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.records import ProducerIdsRecord

BLOCK_SIZE: Final = 1_000
"""The number of producer ids in a block."""
_MAX_INT64: Final = (1 << 63) - 1


class ProducerIdsBlock(NamedTuple):
    """A block of ``size`` producer ids, starting with ``first``."""

    first: int
    size: int = BLOCK_SIZE


def allocate_producer_ids(
    view: ControllerView, broker_id: int, broker_epoch: int
) -> ControllerResult[ProducerIdsBlock]:
    """Allocate the next block; raises StaleBrokerEpochError, ProducerIdsExhaustedError."""
    view.registered(broker_id, broker_epoch)
    first = view.image.next_producer_id
    if first > _MAX_INT64 - BLOCK_SIZE:
        raise ProducerIdsExhaustedError("all producer ids have been allocated")
    record = ProducerIdsRecord(broker_id, first + BLOCK_SIZE, broker_epoch)
    return ControllerResult(ProducerIdsBlock(first), (record,))


def reserve_producer_ids(view: ControllerView, below: int) -> ControllerResult[None]:
    """Never allocate an id that is lower than ``below``: other brokers may use such ids."""
    if below <= view.image.next_producer_id:
        return ControllerResult(None)
    return reset_producer_ids(view, below)


def reset_producer_ids(view: ControllerView, following: int) -> ControllerResult[None]:
    """Allocate ids from ``following`` on, even if that is lower than before."""
    broker_id = view.settings.node_id
    broker = view.image.brokers.get(broker_id)
    epoch = -1 if broker is None else broker.epoch
    return ControllerResult(None, (ProducerIdsRecord(broker_id, following, epoch),))
