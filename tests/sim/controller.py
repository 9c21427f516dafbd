"""The node of the controller: its log survives, its process comes and goes.

A decision is appended and forced at once, so whatever was answered is there after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from uuid import UUID

from fencepost.cluster.alter_partition import AlterPartitionRequest
from fencepost.cluster.controller import brokers, isr
from fencepost.cluster.controller.errors import (
    ClusterError,
    IneligibleReplicaError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    NewLeaderElectedError,
    NotControllerError,
    StaleBrokerEpochError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.heartbeats import Heartbeat as ControllerHeartbeat
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import Outcome
from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.errors import Errors
from fencepost.cluster.image import TOPIC_RESOURCE, MetadataImage, PartitionRegistration
from fencepost.cluster.isr import AlteredPartition
from fencepost.cluster.lifecycle import Heartbeat, HeartbeatAnswer, Registration
from fencepost.cluster.observer import (
    FetchMetadata,
    FetchSnapshot,
    LeaderHint,
    MetadataBatch,
    MetadataFetched,
    OffsetAndEpoch,
    SnapshotFetched,
)
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    MetadataRecord,
)
from fencepost.logcore.errors import FencedLeaderEpochError
from fencepost.logcore.machine import DomainError
from fencepost.txn.ids import ProducerIdBlock
from tests.sim.invariants import BrokenInvariantError, differences
from tests.sim.messages import AllocateIds
from tests.sim.metadata_log import MetadataLog
from tests.sim.network import Answer, Node
from tests.sim.operators import Operators

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

CONTROLLER: Final = "c"
NODE_ID: Final = 100
FETCH_WAIT_MS: Final = 250
MAX_BATCHES: Final = 20
TASKS_MS: Final = 50
"""Between two looks for what is due."""

ERRORS: Final[Mapping[type[DomainError], int]] = {
    StaleBrokerEpochError: Errors.STALE_BROKER_EPOCH,
    IneligibleReplicaError: Errors.INELIGIBLE_REPLICA,
    InvalidRequestError: Errors.INVALID_REQUEST,
    InvalidUpdateVersionError: Errors.INVALID_UPDATE_VERSION,
    NewLeaderElectedError: Errors.NEW_LEADER_ELECTED,
    NotControllerError: Errors.NOT_CONTROLLER,
    UnknownTopicIdError: Errors.UNKNOWN_TOPIC_ID,
    UnknownTopicOrPartitionError: Errors.UNKNOWN_TOPIC_OR_PARTITION,
    FencedLeaderEpochError: Errors.FENCED_LEADER_EPOCH,
}
OTHER_ERROR: Final = -1
SNAPSHOT_NOT_FOUND: Final = 98
SNAPSHOT_PIECE_BYTES: Final = 700


class Registered(NamedTuple):
    """The answer to a registration."""

    error: int
    broker_epoch: int = -1


@dataclass(slots=True)
class _Waiting:
    offset: int
    last_fetched_epoch: int
    reply: Answer
    is_done: bool = False


class ControllerNode(Operators):
    """The only controller there is."""

    refusal = ClusterError

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster = cluster
        self.node = node
        self.log = MetadataLog()
        self.epoch = 0
        self.settings = ControllerSettings(
            cluster_id="simulated",
            node_id=NODE_ID,
            session_timeout_ms=cluster.options.broker.session_ms,
            leader_imbalance_check_interval_ms=5_000,
            unclean_check_interval_ms=1_000,
            max_idle_interval_ms=0,
        )
        self.machine = Controller(self.settings, MetadataImage(), 0)
        self._waiting: list[_Waiting] = []
        self._requests: dict[type, Callable[[Any, Answer], None]] = {
            FetchMetadata: self._fetch,
            FetchSnapshot: self._fetch_snapshot,
            Registration: self._register,
            Heartbeat: self._heartbeat,
            AlterPartitionRequest: self._alter_partition,
            AllocateIds: self._allocate_ids,
        }

    # --- its life ---

    def start(self) -> None:
        """A process begins, unless one runs; it knows what the log says."""
        if self.node.is_up:
            return
        self.node.begin()
        self.node.receive = lambda _sender, request, reply: self._requests[type(request)](
            request, reply
        )
        self.epoch += 1
        self.node.say(f"is the controller in epoch {self.epoch}")
        image = self.log.load()
        if different := differences(image, self.machine.image):
            raise BrokenInvariantError(f"the controller has loaded another image: {different}")
        self.machine = Controller(self.settings, image, self.node.now_ms)
        if not self.log.end:
            self._bootstrap()
        self._run_tasks()

    def crash(self) -> None:
        """The process is gone, and with it all that it had only in memory."""
        self.node.say("is killed")
        self.node.end()
        self._waiting.clear()

    def _bootstrap(self) -> None:
        options = self.cluster.options
        records: list[MetadataRecord] = [FeatureLevelRecord("metadata.version", 25)]
        if options.elr:
            records.append(FeatureLevelRecord("eligible.leader.replicas.version", 1))
        records.append(ConfigRecord(4, "", "min.insync.replicas", str(options.broker.min_isr)))
        if options.unclean:
            records.append(ConfigRecord(4, "", "unclean.leader.election.enable", "true"))
        self._append(records)

    def _run_tasks(self) -> None:
        while self._carry_out(self.machine.run_task(self.node.now_ms)):
            pass
        most = self.cluster.options.snapshot_records
        if most and self.log.records > most:
            self.log.compact(self.machine.image, self.node.now_ms)
            self.node.say(f"has a snapshot of what is below {self.log.start}")
        self.node.after(TASKS_MS, self._run_tasks)

    # --- deciding ---

    @property
    def next_offset(self) -> int:
        """Of the next record."""
        return self.log.end

    def _carry_out(self, outcome: Outcome[Any]) -> Any:
        """Append, force, replay: what was decided is the case from now on."""
        if outcome.records:
            self._append(outcome.records)
        for event in outcome.events:
            self.node.say(f"{event.kind} {event.subject} {dict(event.detail)}")
        return outcome.answer

    def decide(self, decision: Callable[[Controller], Outcome[Any]]) -> Any:
        """Have it decide, and do so; the answer. Raises ClusterError."""
        return self._carry_out(decision(self.machine))

    def _append(self, records: Sequence[MetadataRecord]) -> None:
        base = self.next_offset
        last = base + len(records) - 1
        self.log.append(
            MetadataBatch(base, last, self.epoch, tuple(encode(one) for one in records))
        )
        self.machine.replay(records, base, self.epoch, self.node.now_ms)
        self.cluster.invariants.decided(self.machine.image)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._answer_fetch(one)

    # --- requests of brokers ---

    def _fetch(self, request: FetchMetadata, reply: Answer) -> None:
        one = _Waiting(request.offset, request.last_fetched_epoch, reply)
        if request.current_leader_epoch != self.epoch:
            reply(MetadataFetched(error=Errors.FENCED_LEADER_EPOCH, hint=self._hint))
        elif request.offset < self.next_offset:
            self._answer_fetch(one)
        else:
            self._waiting.append(one)
            self.node.after(FETCH_WAIT_MS, self._answer_fetch, one)

    def _answer_fetch(self, one: _Waiting) -> None:
        if one.is_done:
            return
        one.is_done = True
        read = self.log.read(one.offset, one.last_fetched_epoch, MAX_BATCHES)
        snapshot = read if isinstance(read, OffsetAndEpoch) else None
        one.reply(
            MetadataFetched(
                hint=self._hint,
                high_watermark=self.next_offset,
                snapshot=snapshot,
                records=cast("bytes", () if snapshot else read),
            )
        )

    @property
    def _hint(self) -> LeaderHint:
        return LeaderHint(NODE_ID, self.epoch, {NODE_ID: (CONTROLLER, 0)})

    def _fetch_snapshot(self, request: FetchSnapshot, reply: Answer) -> None:
        if request.current_leader_epoch != self.epoch:
            reply(SnapshotFetched(error=Errors.FENCED_LEADER_EPOCH, hint=self._hint))
            return
        content = self.log.content(request.snapshot)
        if content is None:
            reply(SnapshotFetched(error=SNAPSHOT_NOT_FOUND, hint=self._hint))
            return
        piece = content[request.position : request.position + SNAPSHOT_PIECE_BYTES]
        reply(
            SnapshotFetched(
                hint=self._hint, size=len(content), position=request.position, piece=piece
            )
        )

    def _register(self, request: Registration, reply: Answer) -> None:
        wanted = brokers.Registration(
            broker_id=request.broker_id,
            cluster_id=request.cluster_id,
            incarnation_id=request.incarnation_id,
            end_points=request.listeners,
            features=tuple(
                BrokerFeature(name, *levels) for name, levels in request.features.items()
            ),
            log_dirs=request.log_dirs,
            previous_broker_epoch=request.previous_broker_epoch,
        )
        try:
            epoch = self._carry_out(
                self.machine.register_broker(wanted, self.next_offset, self.node.now_ms)
            )
        except ClusterError as error:
            self.node.say(f"refuses broker {request.broker_id}: {type(error).__name__}")
            reply(Registered(OTHER_ERROR))
            return
        reply(Registered(0, epoch))

    def _heartbeat(self, request: Heartbeat, reply: Answer) -> None:
        told = ControllerHeartbeat(
            request.broker_id,
            request.broker_epoch,
            request.current_metadata_offset,
            request.want_fence,
            request.want_shut_down,
            cordoned_log_dirs=request.cordoned_log_dirs,
        )
        try:
            answer = self._carry_out(self.machine.heartbeat(told, self.node.now_ms))
        except StaleBrokerEpochError:
            reply(HeartbeatAnswer(error=Errors.STALE_BROKER_EPOCH))
            return
        reply(
            HeartbeatAnswer(
                is_caught_up=answer.is_caught_up,
                is_fenced=answer.is_fenced,
                should_shut_down=answer.should_shut_down,
            )
        )

    def _alter_partition(self, request: AlterPartitionRequest, reply: Answer) -> None:
        try:
            reply(altered(self.decide, request))
        except StaleBrokerEpochError:
            reply(int(Errors.STALE_BROKER_EPOCH))

    def _allocate_ids(self, request: AllocateIds, reply: Answer) -> None:
        try:
            block = self._carry_out(
                self.machine.allocate_producer_ids(request.broker_id, request.broker_epoch)
            )
        except StaleBrokerEpochError:
            reply(int(Errors.STALE_BROKER_EPOCH))
            return
        reply(ProducerIdBlock(block.first, block.size))

    # --- what operators ask for ---

    def _asked(self) -> ControllerNode | None:
        is_there = self.node.is_up and self.node.paused_until_ms <= self.cluster.scheduler.now
        return self if is_there else None

    def alter_config(self, name: str, value: str) -> None:
        """Give a topic another ``retention.ms``."""
        if self.node.is_up and name in self.machine.image.topics:
            self._append([ConfigRecord(TOPIC_RESOURCE, name, "retention.ms", value)])

    def delete_topic(self, name: str) -> bool:
        """Delete a topic."""
        topic = self.machine.image.topics.get(name)
        if topic is None:
            return False
        return self._try(lambda one: one.delete_topic(topic.topic_id), f"deletes {name}")


def _altered(answer: PartitionRegistration | DomainError) -> int | AlteredPartition:
    if isinstance(answer, DomainError):
        return ERRORS[type(answer)]
    return AlteredPartition(answer.leader_epoch, answer.partition_epoch, answer.isr)


def altered(
    decide: Callable[[Callable[[Controller], Outcome[Any]]], Any], request: AlterPartitionRequest
) -> dict[tuple[UUID, int], int | AlteredPartition]:
    """Have a controller decide on changes of ISRs; its answers. Raises StaleBrokerEpochError."""
    items = [
        isr.AlterIsr(
            one.topic_id,
            one.index,
            one.leader_epoch,
            one.partition_epoch,
            one.new_isr,
            one.leader_recovery_state,
        )
        for one in request.changes
    ]
    answers = decide(
        lambda machine: machine.alter_partition(request.broker_id, request.broker_epoch, items)
    )
    return {
        (one.topic_id, one.index): _altered(answer)
        for one, answer in zip(request.changes, answers, strict=True)
    }
