"""A process's transaction coordinator on a replicated partition, and its end markers.

The state machine, the shard runtime, the marker queues and the producer state are the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fencepost.coordinator.runtime.errors import CoordinatorNotAvailableError, ShardError
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.machine import DomainError, EndMarker
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    DescribeTransaction,
    ListTransactions,
    TopicPartition,
    WriteMarkers,
)
from fencepost.txn.errors import CoordinatorUnloadedError
from fencepost.txn.limits import TxnLimits
from fencepost.txn.machine import TxnMachine
from fencepost.txn.marker_queues import (
    Codes,
    MarkerQueues,
    NoDestination,
    Result,
    SendMarkers,
    WrittenMarkers,
)
from tests.sim.disk import Key, end_of_transaction
from tests.sim.groups import GROUPS_TOPIC
from tests.sim.invariants import BrokenInvariantError
from tests.sim.messages import Code, Produce
from tests.sim.network import Answer
from tests.sim.shards import SHARD, LedPartition, Shards

if TYPE_CHECKING:
    from tests.sim.process import Process

TXN_TOPIC: Final = "__transaction_state"
RETRY_MS: Final = 100
VERSION: Final = 2
"""``transaction.version``; below 2, a late request is taken for one of the next transaction."""


class Ask(NamedTuple):
    """A command for the coordinator; the answer is its result, or a DomainError."""

    command: Any


class Coordinator(Shards):
    """The transaction coordinator of a process, which also appends other coordinators' markers."""

    topic = TXN_TOPIC

    def __init__(self, broker: Process) -> None:
        super().__init__(broker)
        self.queues = MarkerQueues(self._leader_of, lambda _shard: self.epoch)

    # --- callbacks of the shard ---

    def build(self, partition: Any, coordinator_epoch: int) -> TxnMachine:
        """Return an empty state machine."""
        del partition
        return TxnMachine(TxnLimits(), self.broker.ids, coordinator_epoch, lambda: VERSION)

    def admit(self, partition: LedPartition, command: object) -> DomainError | None:
        """Return an error for a write while the partition is under its min ISR."""
        if isinstance(command, DescribeTransaction | ListTransactions):
            return None
        led = self.broker.leading.leader(partition.key)
        if led is None or led.is_under_min_isr:
            return CoordinatorNotAvailableError("too few replicas")
        return None

    def run_effect(
        self, shard: Any, effect: object, now_ms: int, first_attempt_done: Callable[[], None]
    ) -> None:
        """Queue the end markers of an effect, or reserve producer ids."""
        del now_ms
        if not isinstance(effect, WriteMarkers):
            self.broker.reserve_ids()
        elif effect.partitions:
            last = shard.machine.last_offset(effect.transactional_id)
            if last is not None and last >= shard.partition.high_watermark:
                raise BrokenInvariantError(f"{effect} is carried out before it is committed")
            self.queues.add(effect, SHARD)
            self.send_markers()
        else:
            shard.report(effect.written())
        first_attempt_done()

    def unserved(self) -> None:
        """Drop the queued markers, which the next coordinator sends."""
        self.queues.unload(SHARD)

    def ask(self, request: Ask, reply: Answer) -> None:
        """Serve a request of a client or of a partition's leader."""
        self.broker.reserve_ids()
        self.submit(request.command, reply)

    # --- markers of this coordinator ---

    def _leader_of(self, partition: TopicPartition) -> int | NoDestination:
        topic = self.broker.image.topics.get(partition[0])
        if topic is None or partition[1] >= len(topic.partitions):
            return NoDestination.NO_PARTITION
        leader = topic.partitions[partition[1]].leader
        return leader if leader >= 0 else NoDestination.NO_LEADER

    def send_markers(self) -> None:
        """Send the queued markers to the partitions' leaders."""
        self._report(self.queues.route())
        for send in list(self.queues.next_requests()):
            self.broker.cluster.network.call(
                self.broker.node,
                f"b{send.broker_id}",
                send,
                lambda codes, send=send: self._sent(send, codes),
                timeout_ms=1_500,
                purpose="markers",
                may_repeat=True,
            )
        if self.queues.unknown:
            self.broker.node.after(RETRY_MS, self._retry)

    def _sent(self, send: SendMarkers, codes: Codes | None) -> None:
        if codes is None:
            self.queues.failed(send)
        else:
            self._report(self.queues.answered(send, codes))
        self.send_markers()

    def _retry(self) -> None:
        self.queues.retry()
        self.send_markers()

    def leaders_changed(self) -> None:
        """Route the queued markers by a new image."""
        self.queues.leaders_changed()
        self.send_markers()

    def _report(self, results: list[Result]) -> None:
        for result in results:
            if isinstance(result, WrittenMarkers) and self.shard is not None:
                self.shard.report(result.request.written(result.partitions))

    # --- markers of any coordinator ---

    def mark(self, send: SendMarkers, reply: Answer) -> None:
        """Append end markers, and answer once they are committed."""
        codes: dict[int, dict[TopicPartition, str]] = {}
        left = 1

        def settled(producer_id: int, partition: TopicPartition, code: str) -> None:
            nonlocal left
            codes.setdefault(producer_id, {})[partition] = code
            left -= 1
            if not left:
                reply(codes)

        for marker in send.markers:
            for partition in marker.partitions:
                left += 1
                producer_id = marker.end.stamp.producer_id
                self._mark(
                    partition,
                    marker.end,
                    lambda code, producer_id=producer_id, partition=partition: settled(
                        producer_id, partition, code
                    ),
                )
        left -= 1
        if not left:
            reply(codes)

    def _mark(
        self, partition: TopicPartition, end: EndMarker, settled: Callable[[str], None]
    ) -> None:
        broker = self.broker
        topic = broker.image.topics.get(partition[0])
        key = None if topic is None else (topic.topic_id, partition[1])
        machine = None if key is None else broker.leading.leader(key)
        if key is None or machine is None:
            settled("NOT_LEADER_OR_FOLLOWER")
            return
        if machine.is_under_min_isr:
            settled("NOT_ENOUGH_REPLICAS")
            return
        try:
            self._append_marker(partition[0], key, end)
        except InvalidProducerEpochError:
            settled("INVALID_PRODUCER_EPOCH")
        except TransactionCoordinatorFencedError:
            settled("TRANSACTION_COORDINATOR_FENCED")
        except ShardError:
            settled("NOT_LEADER_OR_FOLLOWER")
        else:
            broker.leading.wait(
                key,
                broker.log(key).end,
                machine.leader_epoch,
                1_200,
                lambda code: settled(code.name),
            )

    def _append_marker(self, topic: str, key: Key, end: EndMarker) -> None:
        broker = self.broker
        if topic == GROUPS_TOPIC:
            broker.groups.complete_transaction(end)
            return
        LedPartition(broker, topic, key, -1).check_marker(end)
        broker.leading.append(key, Produce(key, end_of_transaction(end), -1))

    # --- batches of transactions ---

    def verify(
        self,
        partition: TopicPartition,
        producer: tuple[str | None, int, int],
        refuse: Callable[[Code], None],
        go_on: Callable[[], None],
    ) -> None:
        """Ask the coordinator whether a partition is in the producer's transaction.

        ``producer`` is the transactional id, the producer id, and its epoch.
        """
        broker, (transactional_id, producer_id, epoch) = self.broker, producer
        key = broker.image.topics[partition[0]].topic_id, partition[1]
        log, leader_epoch = broker.log(key), broker.leader_epoch(key)
        guard = log.producers.guard(producer_id)
        state = broker.image.topics.get(TXN_TOPIC)
        leader = -1 if state is None else state.partitions[SHARD].leader

        def verified(answer: Any) -> None:
            error = answer
            if isinstance(answer, AddPartitionsResult):
                error = answer.errors.get(partition)
            if answer is None or isinstance(error, ShardError | CoordinatorUnloadedError):
                refuse(Code.NOT_ENOUGH_REPLICAS)
            elif isinstance(error, DomainError):
                broker.node.say(f"refuses {producer_id}: {type(error).__name__}")
                concurrent = type(error).__name__ == "ConcurrentTransactionsError"
                refuse(Code.CONCURRENT_TRANSACTIONS if concurrent else Code.INVALID_TXN_STATE)
            elif log.producers.guard(producer_id) is not guard or (
                broker.leads(key) != leader_epoch or broker.disk.logs.get(key) is not log
            ):
                refuse(Code.NOT_LEADER_OR_FOLLOWER)
            else:
                go_on()

        if leader < 0 or transactional_id is None:
            refuse(Code.NOT_ENOUGH_REPLICAS)
            return
        command = AddPartitions(
            transactional_id, producer_id, epoch, (partition,), client_transaction_version=VERSION
        )
        broker.cluster.network.call(
            broker.node, f"b{leader}", Ask(command), verified, timeout_ms=2_500, purpose="verify"
        )
