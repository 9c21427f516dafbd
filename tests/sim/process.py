"""A broker process: its images, and the partitions that it leads and follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepost.cluster.image import LocalChanges, LocalPartition, MetadataImage, local_changes
from fencepost.cluster.isr import ReplicationView
from fencepost.txn.errors import ProducerIdsUnavailableError
from fencepost.txn.ids import BlockProducerIds, ProducerIdBlock
from fencepost.txn.marker_queues import SendMarkers
from tests.sim.coordinator import Ask, Coordinator
from tests.sim.disk import Key, ModelLog
from tests.sim.following import Following
from tests.sim.groups import AskGroup, Groups
from tests.sim.invariants import BrokenInvariantError
from tests.sim.leading import FollowerFetch, Leading, ListOffset
from tests.sim.messages import (
    AllocateIds,
    Consume,
    InitProducerIdless,
    Leaders,
    NewProducerId,
    Produce,
    Where,
)
from tests.sim.network import Answer, Node
from tests.sim.shards import Shards

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Settings of all brokers of a cluster; times are short because histories are."""

    min_isr: int = 1
    lag_ms: int = 1_000
    """``replica.lag.time.max.ms``."""
    fetch_wait_ms: int = 200
    """``replica.fetch.wait.max.ms``."""
    fetch_batches: int = 8
    """The most batches of one answer (``replica.fetch.max.bytes``)."""
    fetch_timeout_ms: int = 1_200
    backoff_ms: int = 150
    """``replica.fetch.backoff.ms``."""
    session_ms: int = 900
    request_timeout_ms: int = 700
    checkpoint_ms: int = 600
    flush_ms: int = 400


class Process:
    """A broker process; after a stop or a crash, the next process takes over its disk."""

    def __init__(self, cluster: Cluster, broker_id: int) -> None:
        self.cluster = cluster
        self.broker_id = broker_id
        self.site = cluster.invariants.sites[broker_id]
        self.disk = self.site.disk
        self.node: Node = cluster.network.nodes[f"b{broker_id}"]
        self.options: BrokerOptions = cluster.options.broker
        self.view = ReplicationView(broker_id, replica_lag_time_max_ms=self.options.lag_ms)
        self.image = MetadataImage()
        self.leading = Leading(self)
        self.following = Following(self)
        self.ids = BlockProducerIds()
        self.coordinator = Coordinator(self)
        self.groups = Groups(self)
        self.coordinators = self.coordinator, self.groups
        self.is_shutting_down = False
        self._asks_for_ids = False
        self._requests: dict[type, Callable[[Any, Answer], None]] = {
            Produce: self.leading.produce,
            FollowerFetch: self.leading.follower_fetches,
            ListOffset: self.leading.list_offset,
            Consume: self.leading.consume,
            Where: self._where,
            InitProducerIdless: self._new_producer_id,
            Ask: self.coordinator.ask,
            AskGroup: self.groups.ask,
            SendMarkers: self.coordinator.mark,
        }

    # --- lifecycle ---

    def start(self) -> None:
        """Start the process and its timers."""
        node, options = self.node, self.options
        node.begin()
        node.receive = self._receive
        self.site.process = self
        node.say("starts")
        self._join()
        node.after(options.lag_ms // 2, self._check_isr)
        node.after(options.checkpoint_ms, self._checkpoint)
        node.after(options.flush_ms, self._flush)

    def _join(self) -> None:
        """Join the cluster."""
        raise NotImplementedError

    def _stopped(self) -> None:
        """Flush the logs, write the checkpoint and end the process."""
        for log in self.disk.logs.values():
            log.force()
        self.disk.write_checkpoint()
        self.disk.end()
        self.node.say("has stopped, its epoch was -1")
        self.node.end()
        self.site.process = None
        self.cluster.ended(self.broker_id)

    # --- timers ---

    def _check_isr(self) -> None:
        self.leading.check_isr()
        self.node.after(self.options.lag_ms // 2, self._check_isr)

    def _checkpoint(self) -> None:
        self.disk.write_checkpoint()
        self.node.after(self.options.checkpoint_ms, self._checkpoint)

    def _flush(self) -> None:
        for log in self.disk.logs.values():
            log.force()
        self.node.after(self.options.flush_ms, self._flush)

    # --- metadata ---

    def _publish(self, image: MetadataImage) -> None:
        """Apply an image: lead, follow and delete partitions."""
        old, self.image = self.image, image
        self.view.brokers = image.brokers
        changes = local_changes(old, image, self.broker_id)
        for one in changes.deletes:
            self._delete(one)
        for one in changes.leaders:
            self.following.stop((one.topic_id, one.index))
            self.leading.lead(one)
        for one in changes.followers:
            self.leading.resign(one)
            stays_out = self.is_shutting_down and (
                self.broker_id not in one.registration.isr or one.registration.leader < 0
            )
            self.following.follow(one, fetches=not stays_out)
        for shards in self.coordinators:
            self._update(shards, changes)
        if old.topics is not image.topics:
            self.coordinator.leaders_changed()
            gone = old.topics_by_id.keys() - image.topics_by_id.keys()
            if gone:
                self.groups.topics_deleted(
                    (old.topics_by_id[one].name, one.bytes) for one in sorted(gone)
                )
        if old.offset < 0:
            self._remove_strays()
        if old.brokers is not image.brokers:
            self.leading.reconsider()

    def _update(self, shards: Shards, changes: LocalChanges) -> None:
        """Move a coordinator with the leadership of its partition (``publish_elections``)."""
        for one in changes.deletes:
            if one.topic == shards.topic:
                shards.resigned(None)
        for one in changes.elected:
            if one.topic == shards.topic:
                shards.elected((one.topic_id, one.index), one.registration.leader_epoch)
        for one in changes.followers:
            if one.topic == shards.topic:
                shards.resigned(one.registration.leader_epoch)

    def _delete(self, one: LocalPartition) -> None:
        key = one.topic_id, one.index
        self.node.say(f"deletes {one.topic}-{one.index}")
        self.leading.resign(one, is_gone=True)
        self.following.stop(key, is_gone=True)
        self.disk.logs.pop(key, None)
        self.disk.checkpoint.pop(key, None)

    def _remove_strays(self) -> None:
        """Delete the logs of partitions that the first image does not assign to this broker."""
        for key in list(self.disk.logs):
            known = self.image.partition(*key)
            if known is None or self.broker_id not in known.replicas:
                self.node.say(f"removes the stray {key[1]}")
                del self.disk.logs[key]

    # --- logs and epochs ---

    def log(self, key: Key) -> ModelLog:
        """Return the log of a partition, created if it does not exist."""
        found = self.disk.logs.get(key)
        if found is None:
            found = self.disk.logs[key] = ModelLog()
        return found

    def touched(self, key: Key) -> None:
        """Report a change of a log or its offsets to the invariants."""
        self.cluster.invariants.touched(self.broker_id, key)

    def leads(self, key: Key) -> int | None:
        """Return the leader epoch in which it leads a partition, None if it does not."""
        machine = self.leading.leader(key)
        return None if machine is None else machine.leader_epoch

    def leader_epoch(self, key: Key) -> int | None:
        """Return the leader epoch that it knows of a partition, None without a replica."""
        machine = self.leading.leader(key)
        if machine is not None:
            return machine.leader_epoch
        follower = self.following.followers.get(key)
        return None if follower is None else follower.leader_epoch

    @property
    def broker_epoch(self) -> int:
        """The broker epoch of its registration, -1 before the first one."""
        return self.view.broker_epoch

    def ask_controller(self, request: Any, answer: Answer, *, purpose: str, **options: Any) -> None:
        """Send a request to the controller."""
        raise NotImplementedError

    # --- requests ---

    def _receive(self, _sender: str, request: Any, reply: Answer) -> None:
        self._requests[type(request)](request, reply)

    def _where(self, request: Where, reply: Answer) -> None:
        topic = self.image.topics.get(request.topic)
        if topic is None:
            reply(Leaders(None))
            return
        leaders = tuple((one.leader, one.leader_epoch) for one in topic.partitions)
        reply(Leaders(topic.topic_id, leaders, tuple(one.replicas for one in topic.partitions)))

    def _new_producer_id(self, _request: InitProducerIdless, reply: Answer) -> None:
        try:
            producer_id = self.ids.take()
        except ProducerIdsUnavailableError:
            producer_id = -1
        if producer_id >= 0 and producer_id in self.cluster.given_ids:
            raise BrokenInvariantError(f"producer id {producer_id} is given out twice")
        self.cluster.given_ids.add(producer_id)
        self.reserve_ids()
        reply(NewProducerId(producer_id))

    def reserve_ids(self) -> None:
        """Request a block of producer ids if few are left."""
        if self._asks_for_ids or not self.ids.is_low or self.view.broker_epoch < 0:
            return
        self._asks_for_ids = True
        request = AllocateIds(self.broker_id, self.view.broker_epoch)

        def answered(answer: ProducerIdBlock | int | None) -> None:
            self._asks_for_ids = False
            if isinstance(answer, ProducerIdBlock):
                self.ids.add(answer)

        self.ask_controller(request, answered, purpose="ids")
