"""Places the replicas of new partitions: striped over racks and brokers, from random positions.

The first replica of each partition is on an unfenced broker. Within a rack, fenced brokers are used
last.

Source: ``StripedReplicaPlacer``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import field
from typing import Any, Protocol

from fencepost.cluster.controller.errors import InvalidReplicationFactorError
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.image import BrokerRegistration
from fencepost.logcore.steps import Steps
from fencepost.logcore.values import dataclass

_NO_BROKER = -1


class RandomSource(Protocol):
    """A source of random numbers, such as ``random.Random``."""

    def randrange(self, stop: int, /) -> int:
        """Return a number from 0 to ``stop`` - 1."""

    def shuffle(self, x: MutableSequence[Any], /) -> None:
        """Shuffle a list in place."""


@dataclass(slots=True)
class _BrokerList:
    """The brokers of a rack, used in turn.

    Each partition is one ``epoch``, in which a broker is used at most once.
    """

    brokers: list[int] = field(default_factory=list)
    offset: int = 0
    _index: int = 0
    _epoch: int = 0

    def next(self, epoch: int) -> int:
        if not self.brokers:
            return _NO_BROKER
        if self._epoch != epoch:
            self._epoch, self._index = epoch, 0
            self.offset = (self.offset + 1) % len(self.brokers)
        if self._index >= len(self.brokers):
            return _NO_BROKER
        self._index += 1
        return self.brokers[(self._index - 1 + self.offset) % len(self.brokers)]


@dataclass(slots=True)
class _Rack:
    unfenced: _BrokerList = field(default_factory=_BrokerList)
    fenced: _BrokerList = field(default_factory=_BrokerList)

    def next(self, epoch: int) -> int:
        broker_id = self.unfenced.next(epoch)
        return self.fenced.next(epoch) if broker_id == _NO_BROKER else broker_id


class _RackList:
    """All racks, used in turn."""

    def __init__(self, brokers: Iterable[BrokerRegistration], draw: RandomSource) -> None:
        self._draw = draw
        racks: dict[str | None, _Rack] = {}
        self.total = self.unfenced = 0
        for broker in sorted(brokers, key=lambda broker: broker.broker_id):
            rack = racks.setdefault(broker.rack, _Rack())
            (rack.fenced if broker.fenced else rack.unfenced).brokers.append(broker.broker_id)
            self.total += 1
            self.unfenced += not broker.fenced
        self._racks = [
            racks[name] for name in sorted(racks, key=lambda name: (name is not None, name or ""))
        ]
        for brokers_of_rack in self._lists():
            if brokers_of_rack.brokers:
                brokers_of_rack.offset = draw.randrange(len(brokers_of_rack.brokers))
        self._epoch = 0
        self._offset = draw.randrange(len(self._racks)) if self._racks else 0

    def _lists(self) -> list[_BrokerList]:
        return [brokers for rack in self._racks for brokers in (rack.unfenced, rack.fenced)]

    def place(self, replication_factor: int) -> tuple[int, ...]:
        """Return the replicas of the next partition."""
        if self._epoch == self.unfenced and self.unfenced > 1:
            # Every broker has been first once: shuffle, so that the placements do not repeat.
            self._draw.shuffle(self._racks)
            for brokers in self._lists():
                self._draw.shuffle(brokers.brokers)
            self._epoch = 0
        count = len(self._racks)
        self._offset %= count
        first = self._offset
        while True:
            leader = self._racks[first].unfenced.next(self._epoch)
            if leader != _NO_BROKER:
                break
            first = (first + 1) % count
        replicas = [leader]
        rack, skipped = self._offset, False
        while len(replicas) < replication_factor:
            if rack == first and not skipped:
                skipped = True  # The leader's rack already has a replica.
            else:
                replica = self._racks[rack].next(self._epoch)
                if replica != _NO_BROKER:
                    replicas.append(replica)
            rack = (rack + 1) % count
        self._epoch += 1
        self._offset += 1
        return tuple(replicas)


def place(
    view: ControllerView, partitions: int, replication_factor: int, draw: RandomSource
) -> Steps[Sequence[tuple[int, ...]]]:
    """Return the replicas of each new partition; raises InvalidReplicationFactorError.

    Brokers in controlled shutdown, and brokers whose directories are all cordoned, get no replica.
    """
    racks = _RackList(
        (brokers for brokers in view.image.brokers.values() if _is_usable(brokers)), draw
    )
    if replication_factor <= 0:
        raise InvalidReplicationFactorError(
            f"Invalid replication factor {replication_factor}: the replication factor must be "
            "positive."
        )
    if racks.unfenced == 0:
        raise InvalidReplicationFactorError("All brokers are currently fenced.")
    if replication_factor > racks.total:
        raise InvalidReplicationFactorError(
            f"The target replication factor of {replication_factor} cannot be reached because "
            f"only {racks.total} broker(s) are registered."
        )
    if racks.total == 1:
        return [racks.place(1)] * partitions
    placements = []
    for _ in range(partitions):
        replicas = racks.place(replication_factor)
        if not any(map(view.is_active, replicas)):
            raise InvalidReplicationFactorError(
                "All brokers are currently fenced or in controlled shutdown."
            )
        placements.append(replicas)
        yield
    return placements


def _is_usable(broker: BrokerRegistration) -> bool:
    cordoned = broker.cordoned_directories or ()
    if broker.directories and set(broker.directories) <= set(cordoned):
        return False
    return broker.fenced or not broker.in_controlled_shutdown
