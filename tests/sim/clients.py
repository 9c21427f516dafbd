"""Producers that retry, and consumers that check every record that they read."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from fencepost.logcore.machine import ProducerStamp
from tests.sim.disk import Batch, Key, data
from tests.sim.invariants import BrokenInvariantError, Invariants
from tests.sim.messages import (
    Code,
    Consume,
    Consumed,
    InitProducerIdless,
    Leaders,
    NewProducerId,
    Produce,
    Produced,
    Where,
)
from tests.sim.network import Network, Node

REQUEST_TIMEOUT_MS: Final = 2_500
BACKOFF_MS: Final = 60
SURE_REFUSALS: Final = frozenset(
    {Code.NOT_LEADER_OR_FOLLOWER, Code.UNKNOWN_TOPIC_OR_PARTITION, Code.FENCED_LEADER_EPOCH}
)
"""Errors after which a client looks up the leader again."""


@dataclass(slots=True)
class World:
    """The network, the invariants and the brokers that all clients share."""

    network: Network
    invariants: Invariants
    brokers: list[str] = field(default_factory=list)


class Client:
    """A client that sends requests to brokers and caches the leaders of a topic's partitions."""

    def __init__(self, world: World, name: str, topic: str) -> None:
        self.world = world
        self.topic = topic
        self.topic_id: UUID | None = None
        self.leaders: dict[int, tuple[int, int]] = {}
        self.replicas: dict[int, tuple[int, ...]] = {}
        self.node: Node = world.network.add(name)
        self.draw = self.node.scheduler.draw
        self._is_looking = False
        self.node.begin()

    def ask(self, broker: str, request: Any, answer: Any, **options: Any) -> None:
        """Send a request to a broker."""
        self.world.network.call(
            self.node, broker, request, answer, timeout_ms=REQUEST_TIMEOUT_MS, **options
        )

    def look_up(self) -> None:
        """Ask a random broker for the leaders, unless such a request is in flight."""
        if self._is_looking:
            return
        self._is_looking = True
        broker = self.draw.choice(self.world.brokers)
        self.ask(broker, Where(self.topic), self._looked_up)

    def _looked_up(self, answer: Leaders | None) -> None:
        self._learn(answer)
        self.node.after(BACKOFF_MS, self.go_on)

    def _learn(self, answer: Leaders | None) -> None:
        self._is_looking = False
        if answer is not None and answer.topic_id is not None:
            if answer.topic_id != self.topic_id:
                self.topic_id = answer.topic_id
                self.leaders.clear()
                self.replicas.clear()
                self.began_anew()
            for index, (leader, epoch) in enumerate(answer.leaders):
                if epoch >= self.leaders.get(index, (-1, -1))[1]:
                    self.leaders[index] = leader, epoch
                self.replicas[index] = answer.replicas[index]

    def began_anew(self) -> None:
        """Reset the state: the topic was deleted and created again."""

    def go_on(self) -> None:
        """Send the next request, or look up the leader first."""

    def key(self, index: int) -> Key:
        """Return a partition's key, with the topic id that this client knows."""
        assert self.topic_id is not None
        return self.topic_id, index


@dataclass(slots=True)
class _Unacked:
    values: tuple[Hashable, ...]
    sequence: int
    is_sent: bool = False
    is_acked: bool = False
    broker: str = ""
    """The broker that it was sent to."""


class Producer(Client):
    """Sends batches of one to three records to one partition until it is stopped.

    An idempotent producer has up to five batches in flight and resends failed ones in order.
    """

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        index: int,
        *,
        acks: int,
        is_idempotent: bool,
        max_in_flight: int,
        pause_ms: int,
    ) -> None:
        super().__init__(world, name, topic)
        self.index = index
        self.acks = -1 if is_idempotent else acks
        self.is_idempotent = is_idempotent
        self.max_in_flight = max_in_flight
        self.pause_ms = pause_ms
        self.is_stopped = False
        self.stamp: ProducerStamp | None = None
        self.acknowledged = 0
        self.last_error: int | None = None
        self._may_be_overtaken = False
        """Whether a broker that did not know the partition refused a batch, without noting it."""
        self._window: deque[_Unacked] = deque()
        self._made = 0
        self._sequence = 0
        self._generation = 0
        self._makes()
        self.look_up()

    @property
    def is_done(self) -> bool:
        """Whether the producer is stopped and has no batch in flight."""
        return self.is_stopped and not self._window

    def began_anew(self) -> None:
        # The batches in flight belonged to the deleted topic.
        self._window.clear()
        self._begin_with_another_id()

    def restart(self) -> None:
        """Start again without any state, as after a crash."""
        self.node.say("starts anew")
        self.began_anew()

    def _makes(self) -> None:
        if self.is_stopped:
            return
        if len(self._window) < self.max_in_flight:
            count = self.draw.choice((1, 1, 2, 3))
            values = tuple(f"{self.node.name}:{self._made + one}" for one in range(count))
            self._made += count
            self._window.append(_Unacked(values, self._sequence))
            self._sequence += count
            self.go_on()
        self.node.after(self.draw.randint(1, 2 * self.pause_ms), self._makes)

    def go_on(self) -> None:
        if not any(not one.is_sent for one in self._window):
            return
        leader, _ = self.leaders.get(self.index, (-1, -1))
        if self.topic_id is None or leader < 0:
            self.look_up()
            return
        if self.is_idempotent and self.stamp is None:
            self._ask_for_id()
            return
        broker = f"b{leader}"
        if any(one.is_sent and not one.is_acked and one.broker != broker for one in self._window):
            return  # no batch may overtake those in flight to the former leader
        for one in tuple(self._window):
            if not one.is_sent:
                one.is_sent, one.broker = True, broker
                self._send(one, broker)

    def _send(self, one: _Unacked, broker: str) -> None:
        batch: Batch = data(one.values, self.stamp, one.sequence if self.stamp else -1)
        request = Produce(self.key(self.index), batch, self.acks)
        generation = self._generation

        def answered(answer: Produced | None) -> None:
            if generation == self._generation and not one.is_acked:
                self._answered(one, request.key, answer)

        self.ask(broker, request, answered, may_repeat=True)
        if self.acks == 0:
            self._window.remove(one)

    def _answered(self, one: _Unacked, key: Key, answer: Produced | None) -> None:
        error = None if answer is None else answer.error
        if error == Code.NONE:
            assert answer is not None
            one.is_acked = True
            while self._window and self._window[0].is_acked:
                # A broker answers the requests of a connection in their order.
                self._window.popleft()
            self.acknowledged += len(one.values)
            if self.acks == -1:
                self.world.invariants.acknowledged(key, answer.base_offset, one.values)
            self.go_on()
            return
        one.is_sent = False
        self.last_error = error
        self._may_be_overtaken |= error == Code.UNKNOWN_TOPIC_OR_PARTITION
        if error == Code.OUT_OF_ORDER_SEQUENCE_NUMBER and self._window[0] is one:
            self._refused(key)
        if error is None or error in SURE_REFUSALS:
            self.look_up()
        else:
            self.node.after(BACKOFF_MS, self.go_on)

    def _refused(self, key: Key) -> None:
        """Take another producer id if the log may lack the batches before the first in flight.

        It may lack them after an election that lost records. It may also lack them if a broker that
        did not know the partition yet refused the earlier batches and received a later one just as
        it began to lead.
        """
        first = self._window[0]
        overtaken = self._may_be_overtaken and first.sequence == 0
        if not self.world.invariants.truth(key).was_void and not overtaken:
            return
        self._begin_with_another_id()
        self._window = deque(one for one in self._window if not one.is_acked)
        for one in self._window:
            one.is_sent = False
            one.sequence = self._sequence
            self._sequence += len(one.values)

    def _begin_with_another_id(self) -> None:
        self._generation += 1
        self._sequence = 0
        self.stamp = None
        self._may_be_overtaken = False

    def _ask_for_id(self) -> None:
        def answered(answer: NewProducerId | None) -> None:
            if answer is not None and answer.producer_id >= 0 and self.stamp is None:
                self.stamp = ProducerStamp(answer.producer_id, 0)
            self.node.after(BACKOFF_MS, self.go_on)

        self.ask(self.draw.choice(self.world.brokers), InitProducerIdless(), answered)


class Consumer(Client):
    """Reads one partition from its beginning and compares every record with the committed ones."""

    def __init__(
        self,
        world: World,
        name: str,
        topic: str,
        index: int,
        *,
        prefers_followers: bool,
        reads_committed: bool,
    ) -> None:
        super().__init__(world, name, topic)
        self.index = index
        self.reads_committed = reads_committed
        self.prefers_followers = prefers_followers
        self.offset = 0
        self._avoids_followers = 0
        self.look_up()

    def began_anew(self) -> None:
        self.offset = 0

    def go_on(self) -> None:
        leader, epoch = self.leaders.get(self.index, (-1, -1))
        if self.topic_id is None or leader < 0:
            self.look_up()
            return
        key, broker = self.key(self.index), leader
        if self.prefers_followers and not self._avoids_followers:
            broker = self.draw.choice(self.replicas[self.index] or (leader,))
        self._avoids_followers = max(self._avoids_followers - 1, 0)
        request = Consume(
            key,
            self.offset,
            epoch,
            from_follower=broker != leader,
            read_committed=self.reads_committed,
        )
        self.ask(f"b{broker}", request, lambda answer: self._answered(request, answer))

    def _answered(self, request: Consume, answer: Consumed | None) -> None:
        if self.topic_id != request.key[0] or answer is None:
            self.look_up()
            return
        if answer.error:
            self._refused(request, answer.error)
            return
        values: list[Hashable] = []
        for batch in answer.batches:
            if batch.base_offset > self.offset + len(values):
                raise BrokenInvariantError(f"a consumer at {self.offset} got {answer.batches}")
            values += batch.values[self.offset + len(values) - batch.base_offset :]
            if self.reads_committed and batch.header.is_transactional and batch.marker is None:
                self.world.invariants.has_ended(request.key, batch)
        if values:
            self.world.invariants.consumed(request.key, self.offset, values)
            self.offset += len(values)
        self.node.after(self.draw.randint(100, 500), self.go_on)

    def _refused(self, request: Consume, error: int) -> None:
        truth = self.world.invariants.truth(request.key)
        if error == Code.OFFSET_OUT_OF_RANGE:
            if request.from_follower:
                self._avoids_followers = 3
            elif self.offset < truth.dropped:
                self.offset = truth.dropped
            elif not truth.was_void:
                raise BrokenInvariantError(
                    f"{truth.name}: a consumer is out of range at {self.offset}, where"
                    f" {len(truth.committed)} were committed"
                )
            else:
                self.offset = min(self.offset, len(truth.committed))
        self.look_up()
