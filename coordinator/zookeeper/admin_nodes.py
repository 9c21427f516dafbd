"""Reassignments and preferred-leader elections that tools request with znodes under ``/admin``.

The controller removes a partition from ``/admin/reassign_partitions`` when its reassignment is
complete or has failed, and deletes the znode when no partition is left. After a failover, the new
controller continues with the remaining partitions. The controller deletes a znode that it cannot
parse, because the znode would block later requests.

Source: ``KafkaController.processZkPartitionReassignment``, ``maybeRemoveFromZkReassignment``,
``processReplicaLeaderElection``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from fencepost.cluster.controller.errors import ElectionNotNeededError
from fencepost.cluster.controller.machine import Controller as Machine
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.partition_change import Election
from fencepost.cluster.controller.reassignment_steps import is_in_progress
from fencepost.cluster.controller.reassignments import ReassignablePartition
from fencepost.cluster.image import MetadataImage, TopicImage
from fencepost.coordinator.controller.active import Decide
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.coordinator.zookeeper.loading import batched
from fencepost.coordinator.zookeeper.session import Delete, RefusedError, Set, Write, ZkSession
from fencepost.coordinator.zookeeper.store import ZkMetadataStore
from fencepost.coordinator.zookeeper.watches import Changed, ZnodeWatches
from fencepost.logcore.machine import DomainError

_log = structlog.get_logger(__name__)

AT_ONCE: Final = 200
"""The maximum number of partitions in one decision; other tasks run between two decisions."""

Partition = tuple[str, int]
Targets = Mapping[Partition, tuple[int, ...]]


class AdminNodes:
    """Handles the reassignment znode and the election znode.

    ``on_change`` contains the watch callbacks for these two znodes, in this order.
    """

    def __init__(
        self,
        session: ZkSession,
        store: ZkMetadataStore,
        decide: Decide,
        *,
        watches: ZnodeWatches,
        on_change: tuple[Changed, Changed],
    ) -> None:
        self._session, self._store, self._decide = session, store, decide
        self._watches = watches
        self._reassigned, self._elected = on_change
        self._begun: dict[str, dict[int, tuple[int, ...]]] = {}
        """Reassignments in progress that the znode requests: target replicas by topic and index."""

    # --- reassignments ---

    def is_concerned(self, topics: Collection[TopicImage], image: MetadataImage) -> bool:
        """Return whether a reassignment from the znode has ended in one of these topics."""
        return any(
            not _is_under_way(image, (topic.name, index), target)
            for topic in topics
            for index, target in self._begun.get(topic.name, {}).items()
        )

    async def process_partition_reassignment(self) -> None:
        """Begin the requested reassignments, and remove the finished ones from the znode."""
        path = znodes.REASSIGN_PARTITIONS
        node = await self._session.get(path, self._watches.once(path, self._reassigned))
        if node is None:
            self._begun = {}
            return
        requested: Targets = {}
        try:
            requested = znodes.reassignments_of(node.data)
        except NotOurFormatError as error:
            _log.error("reassignment skipped", cause=str(error))
        new = {
            (name, index): target
            for (name, index), target in requested.items()
            if self._begun.get(name, {}).get(index) != target
        }
        failed: set[Partition] = set()
        for batch in batched([*new], AT_ONCE):
            items = [ReassignablePartition(*partition, new[partition]) for partition in batch]
            decision = partial(_reassigned, items=items)
            for partition, why in zip(batch, self._decide(decision), strict=True):
                if why is not None:
                    failed.add(partition)
                    _log.warning(
                        "no reassignment",
                        partition=f"{partition[0]}-{partition[1]}",
                        cause=str(why),
                    )
            await asyncio.sleep(0)
        await self._written()
        image = self._store.image
        left = {
            partition: target
            for partition, target in requested.items()
            if partition not in failed and _is_under_way(image, partition, target)
        }
        self._begun = {}
        for (name, index), target in left.items():
            self._begun.setdefault(name, {})[index] = target
        if not left:
            await self._do(Delete(path, node.version), self._reassigned)
        elif len(left) < len(requested):
            write = Set(path, znodes.reassignments_data(left), node.version)
            await self._do(write, self._reassigned)

    # --- elections ---

    async def process_preferred_replica_election(self) -> None:
        """Elect each requested partition's preferred replica as leader, if it is eligible."""
        path = znodes.PREFERRED_ELECTION
        node = await self._session.get(path, self._watches.once(path, self._elected))
        if node is None:
            return
        requested: list[Partition] = []
        try:
            requested = znodes.partitions_of(path, node.data)
        except NotOurFormatError as error:
            _log.error("election skipped", cause=str(error))
        for batch in batched(requested, AT_ONCE):
            for partition, why in self._decide(partial(_elected, partitions=batch)):
                if why is not None and not isinstance(why, ElectionNotNeededError):
                    _log.warning(
                        "no election", partition=f"{partition[0]}-{partition[1]}", cause=str(why)
                    )
            await asyncio.sleep(0)
        await self._written()
        await self._do(Delete(path, node.version), self._elected)

    # --- both ---

    async def _written(self) -> None:
        """Wait until ZooKeeper has all decisions so far. Raises NotControllerError."""
        written = self._store.durable()
        if written is not None:
            await written

    async def _do(self, write: Write, again: Changed) -> None:
        """Write the znode, or call ``again`` if another client has written it in the meantime."""
        try:
            await self._store.do([write])
        except RefusedError as refused:
            if refused.at == 0:  # the check of the controller epoch, see ``fenced``
                raise
            again()


def _reassigned(
    machine: Machine, items: Sequence[ReassignablePartition]
) -> ControllerResult[list[DomainError | None]]:
    return machine.alter_partition_reassignments(items, may_wait=True)


def _elected(
    machine: Machine, partitions: Sequence[Partition]
) -> ControllerResult[list[tuple[Partition, DomainError | None]]]:
    return machine.elect_leaders(Election.PREFERRED, partitions)


def _is_under_way(image: MetadataImage, partition: Partition, target: tuple[int, ...]) -> bool:
    name, index = partition
    topic = image.topics.get(name)
    if topic is None or not 0 <= index < len(topic.partitions):
        return False
    now = topic.partitions[index]
    staying = tuple(replica for replica in now.replicas if replica not in now.removing_replicas)
    return is_in_progress(now) and staying == target
