"""Assignments of replicas to brokers with as few moves as possible.

Kafka's own tool generates a new assignment, which moves nearly all replicas; here well-placed
replicas stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

from fencepost.client.requests import Partition

Replicas = tuple[int, ...]


class TooFewBrokers(ValueError):  # noqa: N818 - it says what is wrong
    """More replicas are requested than there are brokers."""


def spread(
    current: Mapping[Partition, Replicas],
    racks: Mapping[int, str | None],
    factor: int | None = None,
) -> dict[Partition, Replicas]:
    """Return an assignment of all partitions to the brokers in ``racks``.

    Each partition gets ``factor`` replicas, or as many as it has, on different racks if there are
    enough. Brokers hold, and lead, nearly the same number of partitions. A replica on one of the
    brokers stays there unless that broker would hold too many replicas. Raises TooFewBrokers.
    """
    factors = {tp: factor or len(replicas) for tp, replicas in current.items()}
    most = max(factors.values(), default=0)
    if most > len(racks):
        raise TooFewBrokers(f"{most} replicas need {most} brokers; the cluster has {len(racks)}")
    plan = _AssignmentPlan(current, racks)
    for tp, count in factors.items():
        plan.keep(tp, count)
    for tp, count in factors.items():
        plan.fill(tp, count)
    while plan.level():
        pass
    return _with_leaders({tp: tuple(nodes) for tp, nodes in plan.nodes.items()})


class _AssignmentPlan:
    """An assignment under construction."""

    def __init__(
        self, current: Mapping[Partition, Replicas], racks: Mapping[int, str | None]
    ) -> None:
        self._current = current
        self._racks = {node: rack or f"broker {node}" for node, rack in racks.items()}
        self._rack_count = len(set(self._racks.values()))
        self._held: dict[int, dict[Partition, None]] = {node: {} for node in sorted(racks)}
        self.nodes: dict[Partition, list[int]] = {}

    def keep(self, tp: Partition, count: int) -> None:
        """Keep replicas that are on the brokers, one per rack if there are enough racks."""
        kept: list[int] = []
        for node in self._current[tp]:
            if len(kept) < count and node in self._held and self._fits(node, kept, count):
                kept.append(node)
                self._held[node][tp] = None
        self.nodes[tp] = kept

    def _fits(self, node: int, others: list[int], count: int) -> bool:
        """Return whether a node's rack is free, or there are fewer racks than replicas."""
        if self._rack_count < count:
            return True
        return self._racks[node] not in {self._racks[other] for other in others}

    def fill(self, tp: Partition, count: int) -> None:
        """Add brokers, first in unused racks, then by the fewest replicas."""
        nodes = self.nodes[tp]
        while len(nodes) < count:
            used = {self._racks[node] for node in nodes}
            node = min(
                (broker_id for broker_id in self._held if broker_id not in nodes),
                key=lambda broker_id: (self._racks[broker_id] in used, len(self._held[broker_id])),
            )
            nodes.append(node)
            self._held[node][tp] = None

    def level(self) -> bool:
        """Move one replica off an overloaded broker; return False if no move would help."""
        by_load = sorted(self._held, key=lambda broker_id: len(self._held[broker_id]))
        for most in reversed(by_load):
            for least in by_load:
                if len(self._held[most]) - len(self._held[least]) < 2:
                    break
                tp = self._cheapest(most, least)
                if tp is not None:
                    nodes = self.nodes[tp]
                    nodes[nodes.index(most)] = least
                    del self._held[most][tp]
                    self._held[least][tp] = None
                    return True
        return False

    def _cheapest(self, most: int, least: int) -> Partition | None:
        """Return the partition whose move copies the least; None if none can move."""
        best: tuple[int, Partition] | None = None
        for tp in self._held[most]:
            nodes, there = self.nodes[tp], self._current[tp]
            others = [node for node in nodes if node != most]
            if least not in nodes and self._fits(least, others, len(nodes)):
                cost = (least not in there) - (most not in there)
                if best is None or cost < best[0]:
                    best = cost, tp
        return None if best is None else best[1]


def _with_leaders(replicas: Mapping[Partition, Replicas]) -> dict[Partition, Replicas]:
    """Choose preferred leaders: the first replica, unless its broker already leads its share.

    In that case choose the replica whose broker leads the fewest partitions.
    """
    leads = Counter[int]()
    most = ceil(len(replicas) / max(1, len({node for row in replicas.values() for node in row})))
    assignment: dict[Partition, Replicas] = {}
    for tp, nodes in replicas.items():
        first = nodes[0] if leads[nodes[0]] < most else min(nodes, key=lambda node: leads[node])
        leads[first] += 1
        assignment[tp] = (first, *(node for node in nodes if node != first))
    return assignment
