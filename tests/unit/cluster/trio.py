"""A few brokers with one partition, the network between them, and a minimal controller.

Nothing happens by itself: the scenario or random test takes every step. Messages stay in
``Trio.messages`` until the test delivers, repeats or drops them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fencepost.cluster.alter_partition import AlterPartitionRequest, AlterPartitions
from fencepost.cluster.divergence import diverging_epoch
from fencepost.cluster.errors import Errors, NotLeaderOrFollowerError, UnknownReplicaError
from fencepost.cluster.follower import (
    FollowerStep,
    OffsetSpec,
    PartitionFetch,
    PartitionFollower,
    PartitionResponse,
)
from fencepost.cluster.image import BrokerRegistration, PartitionRegistration
from fencepost.cluster.isr import AlteredPartition, IsrChange, ReplicationView
from fencepost.cluster.leader import AcksVerdict, LeaderStep, PartitionLeader
from fencepost.logcore.errors import OffsetOutOfRangeError
from tests.unit.cluster.replicas import LAG_MS, TOPIC, TOPIC_ID, ListLog, broker, registration

MAX_RECORDS = 2
"""The maximum number of records in a fetch response."""

Image = tuple[PartitionRegistration, dict[int, BrokerRegistration]]


@dataclass(eq=False)
class Write:
    """A record written with acks=all, and the result of its Produce request."""

    node: int
    offset: int
    leader_epoch: int
    value: object
    verdict: AcksVerdict = AcksVerdict.WAITING


@dataclass(eq=False)
class Message:
    """A message in flight: callbacks for its delivery and for its loss."""

    kind: str
    source: int
    target: int
    deliver: Callable[[], None]
    lost: Callable[[], None] = lambda: None


class Node:
    """A broker. Its log survives a restart, but its state machines do not."""

    def __init__(self, trio: Trio, broker_id: int) -> None:
        self.trio, self.broker_id = trio, broker_id
        self.log = ListLog()
        self.restart()

    def restart(self, high_watermark: int | None = None) -> None:
        """Restart with the current log, and with ``high_watermark`` as the checkpoint, if given.

        The restarted broker applies only the newest image and later images.
        """
        if high_watermark is not None:
            self.log.high_watermark = min(high_watermark, self.log.log_end_offset)
        epoch = self.trio.brokers[self.broker_id].epoch
        self.view = ReplicationView(self.broker_id, epoch, LAG_MS, dict(self.trio.brokers))
        self.leader = PartitionLeader(
            self.view, TOPIC, TOPIC_ID, 0, min_insync_replicas=self.trio.min_isr
        )
        self.follower = PartitionFollower(TOPIC, TOPIC_ID, 0, self.log)
        self.queue = AlterPartitions(self.view)
        self.applied = max(0, len(self.trio.images) - 1)

    @property
    def is_leader(self) -> bool:
        return self.leader.is_leader

    def apply(self, count: int = 1) -> None:
        """Apply the next ``count`` images."""
        for now, brokers in self.trio.images[self.applied : self.applied + count]:
            self.applied += 1
            self.view.brokers = brokers
            if now.leader == self.broker_id:
                self._lead(now)
            elif self.leader.resign(now):
                self.trio.look_at_writes()
                if self.broker_id in now.replicas:
                    self.do(self.follower.become_follower(now))
                else:
                    self.follower.stop()

    def _lead(self, now: PartitionRegistration) -> None:
        self.follower.stop()
        log = self.log
        step = self.leader.become_leader(
            now, log.log_start_offset, log.log_end_offset, log.high_watermark, self.trio.now_ms
        )
        if step.epoch_entry is not None:
            log.begin_epoch(*step.epoch_entry)
        self.take(step)

    def take(self, step: LeaderStep) -> LeaderStep:
        """Execute a step of the leader's machine."""
        if step.high_watermark_moved:
            self.log.high_watermark = self.leader.high_watermark
        change = step.send
        if change is not None and not self.queue.submit(change):
            self.altered(change, Errors.OPERATION_NOT_ATTEMPTED)
        self.trio.look_at_writes()
        return step

    def altered(self, change: IsrChange, answer: int | AlteredPartition) -> LeaderStep:
        """Deliver the controller's response to an ISR change."""
        return self.take(self.leader.alter_partition_answered(change, answer, self.trio.now_ms))

    def do(self, step: FollowerStep) -> None:
        """Execute a step of the follower's machine; ListOffsets requests are answered at once."""
        if step.truncate is not None:
            self.log.cut(step.truncate.offset, anew=step.truncate.full)
            self.do(self.follower.on_truncated())
        if step.high_watermark is not None:
            self.log.high_watermark = step.high_watermark
        if step.log_start_offset is not None:
            del self.log.records[: step.log_start_offset - self.log.log_start_offset]
            self.log.log_start_offset = step.log_start_offset
        if step.offset_request is not None:
            leader = self.trio.nodes[self.follower.leader]
            offset, error = leader.list_offset(
                step.offset_request.end, step.offset_request.current_leader_epoch
            )
            self.do(self.follower.on_offset(step.offset_request, offset, error, self.trio.now_ms))

    # --- the leader's side of requests ---

    def list_offset(self, end: OffsetSpec, leader_epoch: int) -> tuple[int, int]:
        """Answer a replica's ListOffsets request with an offset and an error code."""
        error = self._check_epoch(leader_epoch)
        if error:
            return -1, error
        log = self.log
        return log.log_end_offset if end is OffsetSpec.LATEST else log.log_start_offset, Errors.NONE

    def _check_epoch(self, leader_epoch: int) -> int:
        if leader_epoch < self.leader.leader_epoch:
            return Errors.FENCED_LEADER_EPOCH
        if leader_epoch > self.leader.leader_epoch:
            return Errors.UNKNOWN_LEADER_EPOCH
        return Errors.NONE if self.is_leader else Errors.NOT_LEADER_OR_FOLLOWER

    def serve(self, source: int, broker_epoch: int, fetch: PartitionFetch) -> PartitionResponse:
        """Answer a follower's fetch."""
        error = self._check_epoch(fetch.current_leader_epoch)
        if error:
            return PartitionResponse(error)
        log, offset = self.log, fetch.fetch_offset
        try:
            self.leader.check_replica(source)
            epoch = fetch.last_fetched_epoch
            end = log.end_of_epoch(epoch)
            diverging = diverging_epoch(end, epoch, offset, log.log_start_offset)
            high = log.high_watermark
            if diverging is None and not log.log_start_offset <= offset <= log.log_end_offset:
                return PartitionResponse(Errors.OFFSET_OUT_OF_RANGE)
            step = self.leader.update_follower_fetch_state(
                source,
                broker_epoch,
                offset,
                fetch.log_start_offset,
                log.log_end_offset,
                self.trio.now_ms,
                is_diverging=diverging is not None,
            )
        except NotLeaderOrFollowerError:
            return PartitionResponse(Errors.NOT_LEADER_OR_FOLLOWER)
        except UnknownReplicaError:
            return PartitionResponse(Errors.UNKNOWN_LEADER_EPOCH)
        except OffsetOutOfRangeError:
            return PartitionResponse(Errors.OFFSET_OUT_OF_RANGE)
        self.take(step)
        if diverging is not None:
            return PartitionResponse(0, high, log.log_start_offset, diverging)
        first = offset - log.log_start_offset
        records = log.records[first : first + MAX_RECORDS]
        return PartitionResponse(0, high, log.log_start_offset, None, records, len(records))

    def got(self, sent: PartitionFetch, answer: PartitionResponse) -> None:
        """Deliver a fetch response to this follower."""
        step = self.follower.on_answer(sent, answer, self.trio.now_ms)
        self.do(step)
        if step.append_up_to_epoch is not None:
            self.log.records += [
                record for record in answer.records if record[0] <= step.append_up_to_epoch
            ]
            self.do(self.follower.on_appended())


@dataclass
class Trio:
    """The brokers, the messages in flight, and the controller's state."""

    min_isr: int = 1
    now_ms: int = 1_000_000
    members: tuple[int, ...] = (1, 2, 3)
    brokers: dict[int, BrokerRegistration] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.brokers = {node_id: broker(node_id) for node_id in (*self.members, 4)}
        self.nodes = {node_id: Node(self, node_id) for node_id in self.brokers}
        self.registration = registration(self.members, leader_epoch=0, partition_epoch=0)
        self.next_broker_epoch = 1000
        self._publish()
        self.settle()

    # --- the controller ---

    def _publish(self) -> None:
        self.images.append((self.registration, dict(self.brokers)))

    def change(
        self,
        *,
        isr: tuple[int, ...] | None = None,
        leader: int | None = None,
        replicas: tuple[int, ...] | None = None,
    ) -> None:
        """Apply a PartitionChangeRecord; a record with a leader begins a leader epoch."""
        was = self.registration
        self.registration = replace(
            was,
            isr=was.isr if isr is None else isr,
            replicas=was.replicas if replicas is None else replicas,
            leader=was.leader if leader is None else leader,
            leader_epoch=was.leader_epoch + (leader is not None),
            partition_epoch=was.partition_epoch + 1,
        )
        self._publish()

    def elect(self) -> None:
        """Elect the first assigned replica that is active and in the ISR."""
        now = self.registration
        alive = [
            replica
            for replica in now.replicas
            if replica in now.isr and self.brokers[replica].is_active
        ]
        self.change(leader=alive[0] if alive else -1)

    def fence(self, broker_id: int) -> None:
        """Fence a broker and remove it from the ISR, unless it is the last member."""
        self.brokers[broker_id] = replace(self.brokers[broker_id], fenced=True)
        self._publish()
        now = self.registration
        rest = tuple(member for member in now.isr if member != broker_id)
        if now.leader == broker_id:
            self.registration = replace(now, isr=rest or now.isr)
            self.elect()
        elif broker_id in now.isr and rest:
            self.change(isr=rest)

    def unfence(self, broker_id: int) -> None:
        """Unfence a broker, and elect a leader if the partition has no leader."""
        self.brokers[broker_id] = replace(self.brokers[broker_id], fenced=False)
        self._publish()
        if self.registration.leader < 0:
            self.elect()

    def register(self, broker_id: int) -> None:
        """Register a new incarnation of a broker."""
        self.fence(broker_id)
        epoch, self.next_broker_epoch = self.next_broker_epoch, self.next_broker_epoch + 1
        self.brokers[broker_id] = replace(self.brokers[broker_id], epoch=epoch)
        self._publish()

    def alter(self, request: AlterPartitionRequest) -> int | AlteredPartition:
        """Answer a leader's AlterPartition, after the controller's checks in the same order."""
        (change,) = request.changes
        now, epochs = self.registration, (change.leader_epoch, change.partition_epoch)
        if self.brokers[request.broker_id].epoch != request.broker_epoch:
            return Errors.STALE_BROKER_EPOCH
        if epochs[0] > now.leader_epoch or epochs[1] > now.partition_epoch:
            return Errors.NOT_CONTROLLER
        if epochs[0] < now.leader_epoch:
            return Errors.FENCED_LEADER_EPOCH
        isr = tuple(member for member, _ in change.new_isr)
        if request.broker_id != now.leader:
            return Errors.INVALID_REQUEST
        if epochs[1] < now.partition_epoch:
            return Errors.INVALID_UPDATE_VERSION
        if not set(isr) <= set(now.replicas) or now.leader not in isr:
            return Errors.INVALID_REQUEST
        for member, epoch in change.new_isr:
            if not self.brokers[member].is_active or epoch not in (-1, self.brokers[member].epoch):
                return Errors.INELIGIBLE_REPLICA
        self.change(isr=isr)
        return AlteredPartition(now.leader_epoch, self.registration.partition_epoch, isr)

    # --- messages ---

    def fetch(self, broker_id: int) -> Message | None:
        """Send a follower's next fetch."""
        node = self.nodes[broker_id]
        sent = node.follower.fetch(self.now_ms)
        if sent is None:
            return None
        target, epoch = node.follower.leader, node.view.broker_epoch

        def arrive() -> None:
            answer = self.nodes[target].serve(broker_id, epoch, sent)
            self.messages.append(
                Message(
                    "fetched", target, broker_id, lambda: self.nodes[broker_id].got(sent, answer)
                )
            )

        return self._post(Message("fetch", broker_id, target, arrive))

    def propose(self, broker_id: int) -> Message | None:
        """Send a leader's pending ISR changes."""
        node = self.nodes[broker_id]
        request = node.queue.next_request(self.now_ms)
        if request is None:
            return None
        queue = node.queue

        def arrive() -> None:
            answer = self.alter(request)
            error = Errors.NONE
            if answer == Errors.STALE_BROKER_EPOCH:
                error = Errors.STALE_BROKER_EPOCH
            self._post(Message("altered", 0, broker_id, lambda: back(error, answer), lost))

        def back(error: int, answer: int | AlteredPartition) -> None:
            if node.queue is queue:
                for change, result in queue.on_answer(error, {(TOPIC_ID, 0): answer}, self.now_ms):
                    node.altered(change, result)

        def lost() -> None:
            queue.on_answer(Errors.NETWORK_EXCEPTION, {}, self.now_ms)

        return self._post(Message("alter", broker_id, 0, arrive, lost))

    def _post(self, message: Message) -> Message:
        self.messages.append(message)
        return message

    def deliver(self, message: Message) -> None:
        """Deliver a message."""
        self.messages.remove(message)
        message.deliver()

    def drop(self, message: Message) -> None:
        """Drop a message and report its loss to the sender."""
        self.messages.remove(message)
        message.lost()

    # --- convenient sequences ---

    def produce(self, broker_id: int, value: object = None) -> Write | None:
        """Append a record with acks=all on a broker, if the broker believes that it leads."""
        node = self.nodes[broker_id]
        if not node.is_leader or node.leader.is_under_min_isr:
            return None
        log, epoch = node.log, node.leader.leader_epoch
        write = Write(broker_id, log.log_end_offset, epoch, value)
        self.writes.append(write)
        log.append(epoch, value=value)
        node.take(node.leader.on_appended(log.log_end_offset, self.now_ms))
        return write

    def look_at_writes(self) -> None:
        """Complete the writes whose result is known."""
        for write in self.writes:
            if write.verdict is AcksVerdict.WAITING:
                leader = self.nodes[write.node].leader
                write.verdict = leader.acks_verdict(write.offset + 1, write.leader_epoch)

    def round_trip(self, *brokers: int) -> None:
        """Let each of these brokers fetch once and receive the response."""
        for node_id in brokers:
            if self.fetch(node_id) is not None:
                self.deliver(self.messages[-1])
                self.deliver(self.messages[-1])

    def alter_now(self, broker_id: int) -> None:
        """Send a proposed ISR change to the controller and deliver the response."""
        if self.propose(broker_id) is not None:
            self.deliver(self.messages[-1])
            self.deliver(self.messages[-1])

    def settle(self) -> None:
        """Apply all images on every broker, beginning with the leader."""
        leader = self.registration.leader
        for node_id in sorted(self.nodes, key=lambda node_id: node_id != leader):
            self.nodes[node_id].apply(len(self.images))
