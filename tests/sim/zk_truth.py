"""The metadata in ZooKeeper, as the image that all brokers must reach; its invariants are checked.

* a partition's state is written in the newest controller epoch, and only the broker that was
  elected last writes the controller's znodes (KAFKA-6082);
* the version of a partition's state znode is the partition epoch that its controller knows, so no
  other client has written it in between;
* a replica that joins a partition is one of its adding replicas;
* a controller epoch is assigned once, in the transaction that makes a broker the controller;
* a topic keeps its id as long as it exists;
* the image keeps the invariants of :meth:`tests.sim.watch.Watch.look_at_image`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import BROKER_RESOURCE, NO_LEADER, TOPIC_RESOURCE, MetadataImage
from fencepost.cluster.records import (
    MetadataRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.loading import broker_record, config_records, partition_records
from tests.sim.invariants import BrokenInvariantError
from tests.sim.zk_access import AccessTruth
from tests.sim.zk_server import ENSEMBLE, Change, Ensemble, Transaction

TOOL: Final = "tool"
"""The client name of tools and older releases. The rules for controllers do not apply to them."""

_OF_CONTROLLERS: Final = (
    f"{znodes.TOPICS}/",
    f"{znodes.DELETE_TOPICS}/",
    f"{znodes.ISR_CHANGES}/",
    "/config/topics/",
    znodes.PRODUCER_IDS,
)
"""Prefixes of the paths that only a controller writes."""


class Truth:
    """The image in ZooKeeper, updated and checked with each transaction."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self.image = MetadataImage()
        self.access = AccessTruth(ensemble.tree)
        """Users, quotas and ACLs."""
        self.epoch = 0
        """The newest controller epoch."""
        self.elected = ""
        """The broker that was elected in the epoch :attr:`epoch`."""
        self.elections = 0
        self.deciding: Callable[[str], MetadataImage | None] = lambda _who: None
        """Returns the image that a node's controller expects after its current write, or None."""
        self.decided: Callable[[MetadataImage], None] = lambda _image: None
        """Called with each new image."""
        ensemble.committed = self._committed

    def _committed(self, who: str, done: Transaction) -> None:
        paths = dict.fromkeys(change.path for change in done.changes)
        if znodes.CONTROLLER_EPOCH in paths:
            self._epoch_was_given(who, done)
        for change in done.changes:
            if who not in (TOOL, ENSEMBLE):
                self._check(who, change)
        self._check_versions(who, paths)
        self.access.committed(who, done.changes, is_broker=who not in (TOOL, ENSEMBLE))
        records = [*self._records(paths)]
        if records:
            delta = MetadataDelta(self.image)
            for record in records:
                delta.replay(record)
            self.image = delta.apply(self.image.offset + len(records), self.epoch)
            self.decided(self.image)

    def _epoch_was_given(self, who: str, done: Transaction) -> None:
        epoch = int(self._ensemble.tree.nodes[znodes.CONTROLLER_EPOCH].data)
        is_first = epoch == 0 and self.epoch == 0
        creates = any(
            change.kind == "create" and change.path == znodes.CONTROLLER for change in done.changes
        )
        if not is_first and (epoch != self.epoch + 1 or not creates):
            raise BrokenInvariantError(f"{who} makes controller epoch {epoch} of {self.epoch}")
        if creates:
            self.epoch, self.elected = epoch, who
            self.elections += 1
            self._ensemble.scheduler.say(ENSEMBLE, f"{who} is elected in epoch {epoch}")

    def _check(self, who: str, change: Change) -> None:
        if not change.path.startswith(_OF_CONTROLLERS) or (
            change.path in znodes.PERSISTENT and (change.kind == "create")
        ):
            return
        if who != self.elected:
            raise BrokenInvariantError(
                f"{who} does {change.kind} {change.path},"
                f" and {self.elected} was elected in {self.epoch}"
            )
        if change.path.endswith("/state") and change.kind != "delete":
            state = znodes.state_of(change.path, change.data)
            if state.controller_epoch != self.epoch:
                raise BrokenInvariantError(
                    f"{change.path} is of {state.controller_epoch}, not {self.epoch}"
                )
            if change.kind == "create" and state.leader == NO_LEADER:
                raise BrokenInvariantError(f"{change.path} is created without a leader")

        parts = change.path.split("/")[1:]
        if change.kind == "set" and parts[:2] == ["brokers", "topics"] and len(parts) == 3:
            self._check_added(parts[2], znodes.topic_of(parts[2], change.data))

    def _check_added(self, name: str, node: znodes.TopicZnode) -> None:
        known = self.image.topics.get(name)
        for index, partition in enumerate(() if known is None else known.partitions):
            came = {*node.replicas.get(index, ())} - {*partition.replicas}
            if came - {*node.adding.get(index, ())}:
                raise BrokenInvariantError(f"{came} come to {name}-{index}, and are not added")

    def _check_versions(self, who: str, paths: dict[str, None]) -> None:
        wanted = self.deciding(who)
        for path in () if wanted is None else paths:
            parts, node = path.split("/")[1:], self._ensemble.tree.nodes.get(path)
            if parts[-1] != "state" or node is None:
                continue
            assert wanted is not None
            topic, index = wanted.topics.get(parts[2]), int(parts[4])
            if topic is not None and topic.partitions[index].partition_epoch != node.version:
                now = topic.partitions[index]
                raise BrokenInvariantError(f"{who} takes {path} for {now}, it has {node.version}")

    # --- the image ---

    def _records(self, paths: dict[str, None]) -> Iterator[MetadataRecord]:
        topics: dict[str, None] = {}
        for path in paths:
            parts = path.split("/")[1:]
            if parts[:2] == ["brokers", "topics"] or parts[:2] == ["admin", "delete_topics"]:
                if len(parts) > 2:
                    topics[parts[2]] = None
            elif parts[:2] == ["brokers", "ids"] and len(parts) == 3:
                yield from self._broker(int(parts[2]))
            elif parts[0] == "config" and len(parts) == 3:
                yield from self._settings(parts[1], parts[2], path)
        for name in topics:
            yield from self._topic(name)

    def _broker(self, broker_id: int) -> Iterator[MetadataRecord]:
        node = self._ensemble.tree.nodes.get(znodes.broker_path(broker_id))
        known = self.image.brokers.get(broker_id)
        if node is not None:
            yield broker_record(znodes.broker_of(broker_id, node.data), node.czxid)
        elif known is not None:
            yield UnregisterBrokerRecord(broker_id, known.epoch)

    def _settings(self, folder: str, name: str, path: str) -> Iterator[MetadataRecord]:
        kind = {"topics": TOPIC_RESOURCE, "brokers": BROKER_RESOURCE}.get(folder)
        if kind is None:
            return
        plain = "" if name == znodes.DEFAULT_ENTITY else name
        node = self._ensemble.tree.nodes.get(path)
        values = {} if node is None else znodes.config_of(path, node.data)
        yield from config_records(kind, plain, self.image.configs.get((kind, plain), {}), values)

    def _topic(self, name: str) -> Iterator[MetadataRecord]:
        nodes = self._ensemble.tree.nodes
        node, known = nodes.get(znodes.topic_path(name)), self.image.topics.get(name)
        found = None if node is None else znodes.topic_of(name, node.data)
        if found is None or found.topic_id is None or znodes.delete_path(name) in nodes:
            if known is not None:
                yield RemoveTopicRecord(known.topic_id)
            return
        if known is None:
            yield TopicRecord(name, found.topic_id)
        elif known.topic_id != found.topic_id:
            raise BrokenInvariantError(f"{name} has another id")
        states = {}
        for index in found.replicas:
            path = znodes.state_path(name, index)
            state = nodes.get(path)
            if state is not None:
                states[index] = znodes.state_of(path, state.data), state.version
        yield from partition_records(found.topic_id, found, states, found.replicas)

    # --- the end ---

    def left_over(self) -> list[str]:
        """Return a message for each znode that should have been deleted by the end of the run."""
        nodes = self._ensemble.tree.nodes
        wrong = [
            f"{path}/{name} is left over"
            for path in (znodes.DELETE_TOPICS, znodes.ISR_CHANGES, znodes.LOG_DIR_EVENTS)
            for name in nodes[path].children
        ]
        wrong += [
            f"{path} is left over"
            for path in (znodes.REASSIGN_PARTITIONS, znodes.PREFERRED_ELECTION)
            if path in nodes
        ]
        return wrong + [
            f"settings of {name} are left over"
            for name in nodes["/config/topics"].children
            if znodes.topic_path(name) not in nodes
        ]

    @property
    def controller(self) -> int | None:
        """The broker id in ``/controller``, None without that znode."""
        node = self._ensemble.tree.nodes.get(znodes.CONTROLLER)
        return None if node is None else znodes.controller_of(node.data)
