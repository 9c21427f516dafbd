"""Transactions over failing brokers: a model of a cluster with the real state machines.

A seed determines every step. The coordinators' state machines, their marker queues and the data
partitions' producer states are real. The model simulates everything else: a replicated transaction
log whose leader changes at any step, former leaders that do not know of the change, data partitions
whose leaders change, a network that loses, delays, duplicates and reorders messages, timeouts, and
a producer that retries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fencepost.logcore.batch import LogRecord, encode_batch, parse_header
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    LogError,
    TransactionCoordinatorFencedError,
)
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Decision, DomainError, Record
from fencepost.logcore.producers import ProducerStateManager
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
    TopicPartition,
    WriteMarkers,
)
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
)
from fencepost.txn.limits import TxnLimits
from fencepost.txn.machine import TxnMachine
from fencepost.txn.marker_queues import MarkerQueues, Result, SendMarkers, WrittenMarkers
from fencepost.txn.records import decode
from fencepost.txn.state import check_step
from tests.unit.txn.driver import CountingIds

SHARD = 0
TIMEOUT_MS = 60_000
BROKERS = (1, 2, 3)
LOST = object()
"""The client's result of a request that timed out."""


class NotHereError(DomainError):
    """This broker is not the coordinator, or not the leader."""


class DataPartition:
    """One partition of data; appended records are committed at once."""

    def __init__(self, name: TopicPartition, leader: int) -> None:
        self.name, self.leader = name, leader
        self.epoch = 0
        self.producers = ProducerStateManager(OsFileSystem(), "/nowhere")
        self.end = 0
        self.open: dict[int, list[str]] = {}
        self.visible: list[str] = []
        self.dropped: list[str] = []

    def append(self, pid: int, epoch: int, sequence: int, value: str, *, verified: bool) -> None:
        data = encode_batch(
            [LogRecord(0, 0, None, value.encode())],
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        header = parse_header(data)
        if self.producers.find_duplicate(header) is not None:
            return
        self.producers.check_batch(header, verified=verified, transaction_version=0)
        self.producers.apply_batch(header, self.end)
        self.end += 1
        self.open.setdefault(pid, []).append(value)

    def mark(self, request: WriteMarkers | Any) -> str:
        end = request.end
        pid, epoch = end.stamp.producer_id, end.stamp.producer_epoch
        try:
            self.producers.check_marker(pid, epoch, end.coordinator_epoch, end.transaction_version)
        except InvalidProducerEpochError:
            return "INVALID_PRODUCER_EPOCH"
        except TransactionCoordinatorFencedError:
            return "TRANSACTION_COORDINATOR_FENCED"
        self.producers.apply_marker(
            pid, epoch, end.coordinator_epoch, self.end, 0, commit=end.commit
        )
        self.end += 1
        (self.visible if end.commit else self.dropped).extend(self.open.pop(pid, ()))
        return "NONE"


class Coordinator:
    """A broker that believes it leads the transaction log in ``epoch``."""

    def __init__(self, world: World, broker: int, epoch: int, log: list[Record], hw: int) -> None:
        self.world, self.broker, self.epoch = world, broker, epoch
        self.log, self.hw = log, hw
        self.is_told = False
        """Whether the broker knows that it is no longer the leader."""
        self.machine = TxnMachine(TxnLimits(), world.ids, epoch, lambda: world.version)
        self.timers: dict[Hashable, int] = {}
        self.held: list[tuple[int, Decision]] = []
        self.queues = MarkerQueues(
            lambda partition: world.data[partition].leader,
            lambda _shard: None if self.is_told else self.epoch,
        )
        for offset, record in enumerate(log):
            self.machine.replay(record, offset, world.now_ms, None)
        self.take(self.machine.on_loaded(world.now_ms))

    def submit(self, token: int, command: object) -> None:
        try:
            decision = self.machine.decide(token, command, self.world.now_ms)
        except DomainError as error:
            self.world.answer(token, error)
            return
        self.take(decision)

    def take(self, decision: Decision) -> None:
        for record in decision.records:
            self.log.append(record)
            self.machine.replay(record, len(self.log) - 1, self.world.now_ms, None)
        for timer in decision.timers:
            self.timers.pop(timer.key, None)
            if timer.deadline_ms is not None:
                self.timers[timer.key] = timer.deadline_ms
        self.machine.check()
        self.held.append((len(self.log), decision))
        self.release()

    def replicated(self) -> None:
        """Replicate one more record to the followers."""
        if self.hw < len(self.log):
            self.hw += 1
            self.release()

    def release(self) -> None:
        while self.held and (self.held[0][0] <= self.hw or "effects" in self.world.bugs):
            _, decision = self.held.pop(0)
            for reply in decision.replies:
                self.world.answer(reply.token, reply.response)
            for effect in decision.effects:
                assert isinstance(effect, WriteMarkers)
                if effect.partitions:
                    self.queues.add(effect, SHARD)
                    self.report(self.queues.route())
                else:
                    self.submit(0, effect.written())

    def report(self, results: list[Result]) -> None:
        for result in results:
            if isinstance(result, WrittenMarkers) and not self.is_told:
                self.submit(0, result.request.written(result.partitions))

    def fire(self) -> None:
        for key, at in list(self.timers.items()):
            if at <= self.world.now_ms:
                del self.timers[key]
                self.take(self.machine.fire(key, self.world.now_ms))

    def resign(self) -> None:
        self.is_told = True
        waiting = [reply.token for _, decision in self.held for reply in decision.replies]
        waiting += [reply.token for reply in self.machine.on_unloaded().replies]
        self.held.clear()
        self.timers.clear()
        for token in waiting:
            self.world.answer(token, CoordinatorUnloadedError("moved"))


@dataclass
class Ledger:
    """The producer's view of one transaction."""

    written: dict[TopicPartition, list[str]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    asked: bool | None = None
    acknowledged: bool = False


Request = tuple[Any, ...]
Client = Generator[Request, Any, None]


class World:
    """All parts of the model, and the random generator that chooses every step."""

    def __init__(
        self, seed: int, *, transactions: int = 6, bugs: frozenset[str] = frozenset()
    ) -> None:
        self.random, self.bugs = Random(seed), bugs
        self.version = self.random.choice((1, 2))
        self.now_ms = 1_000_000
        self.ids = CountingIds()
        names = [("t", 0), ("t", 1), ("u", 0)]
        self.data = {name: DataPartition(name, self.random.choice(BROKERS)) for name in names}
        self.coordinators = [Coordinator(self, 1, 1, [], 0)]
        self.network: list[Callable[[], None]] = []
        self.ledgers: list[Ledger] = []
        self.is_healing = False
        self.trace: list[str] = []
        self._tokens = 0
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._pending: int | None = None
        self._asked: dict[int, int] = {}
        self.seen = 0
        """The highest epoch of a coordinator that has answered the producer."""
        self._client = self.produce(transactions)
        self.is_done = False
        self.advance(None)

    @property
    def leader(self) -> Coordinator:
        return self.coordinators[-1]

    # --- the producer ---

    def produce(self, transactions: int) -> Client:
        identity = yield from self.init()
        sequences: dict[TopicPartition, int] = {}
        for number in range(transactions):
            ledger = Ledger()
            self.ledgers.append(ledger)
            version = self.version
            after = yield from self.transact(number, ledger, identity, version, sequences)
            if after is None:
                after, version = (yield from self.init()), 2
            if after != identity:
                sequences.clear()
            identity = after

    def init(self) -> Generator[Request, Any, tuple[int, int]]:
        while True:
            answer = yield "coordinator", InitProducerId("id", TIMEOUT_MS)
            if isinstance(answer, InitProducerIdResult):
                return answer.producer_id, answer.producer_epoch

    def transact(
        self,
        number: int,
        ledger: Ledger,
        identity: tuple[int, int],
        version: int,
        sequences: dict[TopicPartition, int],
    ) -> Generator[Request, Any, tuple[int, int] | None]:
        """Run a transaction; return the next identity, or None if InitProducerId must be sent."""
        names = self.random.sample(sorted(self.data), self.random.randint(1, len(self.data)))
        for name in [*names, *self.random.sample(names, 1)]:
            if version < 2 and name not in ledger.written:
                added = yield from self.insist(
                    "coordinator", AddPartitions("id", *identity, (name,))
                )
                if not isinstance(added, AddPartitionsResult):
                    return None
            value = f"{number}-{name[0]}{name[1]}-{len(ledger.tried)}"
            ledger.tried.add(value)
            sequence = sequences.get(name, 0)
            answer = yield from self.insist(
                "produce", name, identity, sequence, value, gives_up=0.2
            )
            if answer is LOST:
                # The batch may still be in flight when the transaction has ended (KIP-890).
                yield from self.insist("coordinator", EndTxn("id", *identity, False, version))
                return None
            if answer is not None:
                return None
            sequences[name] = sequence + 1
            ledger.written.setdefault(name, []).append(value)
        ledger.asked = self.random.random() < 0.7
        command = EndTxn("id", *identity, ledger.asked, version)
        answer = yield from self.insist("coordinator", command)
        ledger.acknowledged = isinstance(answer, EndTxnResult)
        return (answer.producer_id, answer.producer_epoch) if ledger.acknowledged else None

    def insist(self, *request: Any, gives_up: float = 0) -> Generator[Request, Any, Any]:
        """Repeat a request until it gets a final response or the producer gives up."""
        while True:
            answer = yield request
            if answer is LOST and self.random.random() < gives_up:
                return LOST
            if answer is not LOST and not isinstance(
                answer, ConcurrentTransactionsError | CoordinatorUnloadedError | NotHereError
            ):
                return answer

    def advance(self, answer: Any) -> None:
        """Pass the response to the producer, and send its next request."""
        try:
            request = self._client.send(answer)
        except StopIteration:
            self.is_done, self._pending = True, None
            return
        self._pending = token = self.token(self.advance)
        kind, *rest = request

        def arrive() -> None:
            # Without TV2 the coordinator may mistake a late request for a request of the next
            # transaction. KIP-890 solves this problem.
            if self.version < 2 and token not in self._waiting:
                return
            if kind == "coordinator":
                self.ask(token, rest[0])
            else:
                self.append(token, *rest)

        self.send(arrive)

    def token(self, then: Callable[[Any], None]) -> int:
        self._tokens += 1
        self._waiting[self._tokens] = then
        return self._tokens

    def answer(self, token: int, response: Any) -> None:
        if token in self._waiting:
            self.send(lambda: self.give(token, response))

    def give(self, token: int, response: Any) -> None:
        then = self._waiting.pop(token, None)
        if then is not None:
            if token == self._pending and response is not LOST:
                self.seen = max(self.seen, self._asked.get(token, 0))
            then(response)

    def give_up(self) -> None:
        """Let the producer's request time out, so that the producer retries it."""
        if self._pending is not None:
            self.give(self._pending, LOST)

    # --- brokers ---

    def ask(self, token: int, command: object) -> None:
        """Deliver a request to a broker that the client may believe to be the coordinator.

        Below TV2 a client that has seen the new coordinator must not ask the former coordinator
        again, which may answer that a partition is still in the previous transaction.
        """
        known = self.seen if self.version < 2 and token == self._pending else 0
        candidates = [
            coordinator for coordinator in self.coordinators[-2:] if coordinator.epoch >= known
        ]
        at = self.leader if self.is_healing else self.random.choice(candidates)
        self._asked[token] = at.epoch
        if at.is_told:
            self.answer(token, NotHereError("not the coordinator"))
        else:
            at.submit(token, command)

    def append(
        self, token: int, name: TopicPartition, identity: tuple[int, int], sequence: int, value: str
    ) -> None:
        """Deliver a batch to its leader, which first asks the coordinator to verify the batch."""
        partition = self.data[name]
        if partition.producers.has_open_transaction(*identity):
            self.appended(token, partition, identity, sequence, value, verified=False)
            return
        guard, epoch = partition.producers.guard(identity[0]), partition.epoch

        def verified(answer: Any) -> None:
            error = answer
            if isinstance(answer, AddPartitionsResult):
                error = answer.errors.get(name)
            if isinstance(error, DomainError):
                self.answer(token, error)
            elif "guard" not in self.bugs and (
                partition.producers.guard(identity[0]) is not guard or partition.epoch != epoch
            ):
                self.answer(token, NotHereError("the transaction has ended meanwhile"))
            else:
                self.appended(token, partition, identity, sequence, value, verified=True)

        command = AddPartitions(
            "id",
            *identity,
            (name,),
            verify_only=self.version < 2,
            client_transaction_version=2 if self.version >= 2 else 0,
        )
        question = self.token(verified)
        self.send(lambda: self.ask(question, command))

    def appended(
        self,
        token: int,
        partition: DataPartition,
        identity: tuple[int, int],
        sequence: int,
        value: str,
        *,
        verified: bool,
    ) -> None:
        try:
            partition.append(*identity, sequence, value, verified=verified)
        except LogError as error:
            self.answer(token, error)
        else:
            self.answer(token, None)

    def marked(self, sender: Coordinator, send: SendMarkers) -> None:
        """Deliver markers to a broker, and send its response."""
        codes: dict[int, dict[TopicPartition, str]] = {}
        for marker in send.markers:
            for name in marker.partitions:
                partition = self.data[name]
                code = "NOT_LEADER_OR_FOLLOWER"
                if partition.leader == send.broker_id:
                    code = partition.mark(marker)
                codes.setdefault(marker.end.stamp.producer_id, {})[name] = code
        self.send(lambda: self.report(sender, send, codes))

    def report(self, sender: Coordinator, send: SendMarkers, codes: Mapping[int, Any]) -> None:
        if "stale" in self.bugs:
            for marker in send.markers:
                codes = {marker.end.stamp.producer_id: dict.fromkeys(marker.partitions, "NONE")}
        sender.report(sender.queues.on_answer(send, codes))

    # --- events ---

    def replicate(self) -> None:
        self.leader.replicated()

    def send(self, arrival: Callable[[], None]) -> None:
        self.network.append(arrival)

    def deliver(self) -> None:
        if self.network:
            at = 0 if self.is_healing else self.random.randrange(len(self.network))
            arrival = self.network.pop(at)
            if not self.is_healing and self.random.random() < 0.05:
                self.network.append(arrival)  # the network delivers the message twice
            if self.is_healing or self.random.random() < 0.95:
                arrival()

    def send_markers(self) -> None:
        for coordinator in self.coordinators:
            for send in list(coordinator.queues.next_requests()):
                self.send(lambda coordinator=coordinator, send=send: self.marked(coordinator, send))  # type: ignore[misc]

    def retry_markers(self) -> None:
        for coordinator in self.coordinators:
            coordinator.queues.leaders_changed()
            coordinator.report(coordinator.queues.route())

    def lose_markers(self) -> None:
        """Break all connections: markers in flight are sent again."""
        for coordinator in self.coordinators:
            for destination, known in coordinator.queues._destinations.items():
                for number in tuple(known.sent):
                    coordinator.queues.on_failure(SendMarkers(destination, number, ()))
        self.retry_markers()

    def fail_over(self) -> None:
        """Elect another leader of the transaction log that has at least all committed records."""
        former = self.leader
        if self.random.random() < 0.5:
            former.resign()
        known = self.random.randint(former.hw, len(former.log))
        broker = self.random.choice(
            [broker_id for broker_id in BROKERS if broker_id != former.broker]
        )
        for coordinator in self.coordinators[:-1]:
            if not coordinator.is_told:
                coordinator.resign()
        log = former.log[:known]
        if "truncate" in self.bugs:
            log = former.log[: max(0, former.hw - 1)]
        self.coordinators.append(
            Coordinator(self, broker, former.epoch + 1, log, min(former.hw, len(log)))
        )

    def move_data(self) -> None:
        partition = self.random.choice(list(self.data.values()))
        partition.leader = self.random.choice(BROKERS)
        partition.epoch += 1

    def run_out(self) -> None:
        self.now_ms += TIMEOUT_MS // 4
        self.leader.fire()

    def run(self, steps: int = 2_000) -> None:
        """Run random steps until the producer has finished, then finish without faults."""
        faults: list[tuple[Callable[[], None], float]] = [
            (self.deliver, 40),
            (self.send_markers, 15),
            (self.replicate, 25),
            (self.retry_markers, 4),
            (self.lose_markers, 1.5),
            (self.give_up, 2),
            (self.fail_over, 1.2),
            (self.move_data, 1.5),
            (self.run_out, 0.4),
        ]
        happenings, weights = zip(*faults, strict=True)
        for _ in range(steps):
            self.random.choices(happenings, weights)[0]()
            if self.is_done:
                break
        self.heal()

    def heal(self) -> None:
        self.is_healing = True
        for coordinator in self.coordinators[:-1]:
            if not coordinator.is_told:
                coordinator.resign()
        for round_ in range(20_000):
            self.lose_markers() if round_ % 500 == 499 else self.send_markers()
            self.leader.replicated()
            self.deliver()
            is_replicated = self.leader.hw == len(self.leader.log)
            if not self.network and is_replicated and not self.is_done:
                self.give_up()
            if self.is_done and not self.network and not len(self.leader.queues):
                if is_replicated and not self.unfinished():
                    return
                self.now_ms += TIMEOUT_MS
                self.leader.fire()
        raise AssertionError(f"no rest: {self.unfinished()}")

    def unfinished(self) -> list[object]:
        pending = self.leader.machine.is_pending("id")
        open_ = [
            (partition.name, partition.open) for partition in self.data.values() if partition.open
        ]
        return [*open_, *(["pending"] if pending else [])]

    # --- invariants ---

    def check(self) -> None:
        """Check exactly-once: acknowledged outcomes hold, and every transaction is atomic."""
        for partition in self.data.values():
            everything = partition.visible + partition.dropped
            assert len(set(everything)) == len(everything), (partition.name, "twice", everything)
        visible = {value for partition in self.data.values() for value in partition.visible}
        for number, ledger in enumerate(self.ledgers):
            acknowledged = {value for values in ledger.written.values() for value in values}
            seen = ledger.tried & visible
            where = (number, ledger, seen)
            if ledger.acknowledged and ledger.asked:
                assert acknowledged <= seen, ("a committed record is lost", where)
            elif ledger.asked is not True or ledger.acknowledged:
                assert not seen, ("a record of an aborted transaction is seen", where)
            else:
                assert not seen or acknowledged <= seen, ("half of a transaction", where)
        self.check_log()

    def check_log(self) -> None:
        """Check that each step of the transaction log is valid."""
        known = None
        for record in self.leader.log:
            decoded = decode(record)
            assert decoded is not None
            assert decoded.txn is not None
            check_step(known, decoded.txn)
            known = decoded.txn
