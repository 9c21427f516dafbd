"""Transactional producers, and the exactly-once check of their transactions."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from fencepost.coordinator.runtime.errors import ShardError
from fencepost.logcore.machine import DomainError, ProducerStamp
from fencepost.txn.commands import (
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
    TopicPartition,
)
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    ProducerIdsUnavailableError,
)
from tests.sim.clients import BACKOFF_MS, Client, World
from tests.sim.coordinator import TXN_TOPIC, VERSION, Ask
from tests.sim.disk import ModelLog, data
from tests.sim.groups import GROUPS_TOPIC, AskGroup
from tests.sim.invariants import BrokenInvariantError
from tests.sim.messages import Code, Produce, Produced
from tests.sim.shards import SHARD

TIMEOUT_MS: Final = 3_000
"""``transaction.timeout.ms``."""
GIVES_UP: Final = 0.15
"""The probability that a producer abandons an unanswered batch instead of retrying it."""

LOOKS_AGAIN: Final = 0.1
"""The probability that a client looks up the leader without a reason."""

RETRIED: Final = (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    ShardError,
    ProducerIdsUnavailableError,
)
RETRIED_CODES: Final = frozenset(
    {
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.NOT_ENOUGH_REPLICAS,
        Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        Code.REQUEST_TIMED_OUT,
        Code.CONCURRENT_TRANSACTIONS,
    }
)
Identity = tuple[int, int]
Step = Generator[tuple[Any, ...], Any, Any]


@dataclass(slots=True)
class Ledger:
    """A producer's knowledge of one transaction."""

    written: set[Hashable] = field(default_factory=set)
    tried: set[Hashable] = field(default_factory=set)
    commits: bool | None = None
    """Whether it asked to commit or to abort, None if it asked for neither."""
    is_acknowledged: bool = False


class Actor(Client):
    """A client that runs as a generator, which yields requests and gets their answers.

    A request is ``("coordinator", command)``, ``("group", command, transactional id)``,
    ``("produce", partition, batch)`` or ``("wait", milliseconds)``.
    """

    def __init__(self, world: World, name: str, topic: str) -> None:
        super().__init__(world, name, topic)
        self.coordinators = {
            "coordinator": Client(world, f"{name}-c", TXN_TOPIC),
            "group": Client(world, f"{name}-g", GROUPS_TOPIC),
        }
        self.is_stopped = False
        self.is_done = False
        self._life = self._live()
        self._request: tuple[Any, ...] = ()
        self._is_lost = True
        """Whether the last request failed, so that another broker may lead."""

    def _live(self) -> Step:
        raise NotImplementedError

    @property
    def waits_for(self) -> str:
        """The request in flight."""
        return str(self._request)

    def _advance(self, answer: Any) -> None:
        try:
            self._request = self._life.send(answer)
        except StopIteration:
            self.is_done = True
            return
        is_refused = answer is None or isinstance(getattr(answer, "response", answer), DomainError)
        self._is_lost = is_refused or bool(getattr(answer, "error", 0))
        self.node.after(self.draw.randint(1, BACKOFF_MS), self.go_on)

    def go_on(self) -> None:
        if self.is_done:
            return
        kind, *rest = self._request
        if kind == "wait":
            self.node.after(rest[0], self._advance, None)
            return
        asked = self.coordinators.get(kind, self)
        index = rest[0] if kind == "produce" else SHARD
        leader, _ = asked.leaders.get(index, (-1, -1))
        is_unknown = asked.topic_id is None or leader < 0
        if self._is_lost or is_unknown or self.draw.random() < LOOKS_AGAIN:
            asked.look_up()
        if is_unknown:
            self.node.after(BACKOFF_MS, self.go_on)
        elif kind == "coordinator":
            self.ask(f"b{leader}", Ask(rest[0]), self._advance)
        elif kind == "group":
            self.ask(f"b{leader}", AskGroup(*rest), self._advance)
        else:
            request = Produce(self.key(index), rest[1], -1, transactional_id=self.node.name)
            self.ask(f"b{leader}", request, self._advance, may_repeat=True)

    def _looked_up(self, answer: Any) -> None:
        self._learn(answer)


class Transactional(Actor):
    """A client with transactions over the partitions of a topic."""

    def __init__(self, world: World, name: str, topic: str, partitions: int) -> None:
        super().__init__(world, name, topic)
        self.partitions = partitions
        self.ledgers: list[Ledger] = []

    # --- transactions ---

    def begin(self) -> Ledger:
        """Begin a transaction; return its ledger."""
        ledger = Ledger()
        self.ledgers.append(ledger)
        return ledger

    def _init(self) -> Step:
        while True:
            answer = yield ("coordinator", InitProducerId(self.node.name, TIMEOUT_MS))
            if isinstance(answer, InitProducerIdResult):
                return answer.producer_id, answer.producer_epoch

    def _transact(self, ledger: Ledger, identity: Identity, sequences: dict[int, int]) -> Step:
        """Run a transaction; return the identity for the next one, None to initialize again."""
        stamp, number = ProducerStamp(*identity), len(self.ledgers)
        for _ in range(self.draw.randint(1, 4)):
            index = self.draw.randrange(self.partitions)
            values = (f"{self.node.name}:{number}:{len(ledger.tried)}",)
            ledger.tried.update(values)
            sequence = sequences.get(index, 0)
            batch = data(values, stamp, sequence, is_transactional=True)
            answer = yield from self._insist(("produce", index, batch), GIVES_UP)
            if not isinstance(answer, Produced):
                # The batch may still arrive after the transaction has ended (KIP-890).
                yield from self._insist(("coordinator", self._end(identity, commits=False)))
                return None
            if answer.error:
                return None
            sequences[index] = sequence + 1
            ledger.written.update(values)
        if not (yield from self._commit_offsets(identity, number)):
            yield from self._insist(("coordinator", self._end(identity, commits=False)))
            return None
        ledger.commits = self.draw.random() < 0.7
        answer = yield from self._insist(("coordinator", self._end(identity, ledger.commits)))
        ledger.is_acknowledged = isinstance(answer, EndTxnResult)
        return (answer.producer_id, answer.producer_epoch) if ledger.is_acknowledged else None

    def _commit_offsets(self, identity: Identity, number: int) -> Step:
        """Commit a group member's offsets; return whether the transaction can go on."""
        del identity, number
        return True
        yield

    def _end(self, identity: Identity, commits: bool) -> EndTxn:
        return EndTxn(self.node.name, *identity, commits, VERSION)

    def _insist(self, request: tuple[Any, ...], gives_up: float = 0.0) -> Step:
        """Repeat a request until its answer is final; return None to give up without an answer."""
        while True:
            answer = yield request
            if answer is None and self.draw.random() < gives_up:
                return None
            is_refused = isinstance(answer, Produced) and answer.error in RETRIED_CODES
            if answer is not None and not is_refused and not isinstance(answer, RETRIED):
                return answer

    # --- the end ---

    def check(self, logs: dict[TopicPartition, ModelLog]) -> None:
        """Check that committed records are visible once, aborted ones never, and none in part."""
        visible: set[Hashable] = set()
        for name, log in logs.items():
            shown = committed_values(log)
            if len(set(shown)) != len(shown):
                raise BrokenInvariantError(f"{name}: a record of a transaction is there twice")
            visible.update(shown)
        for number, one in enumerate(self.ledgers, 1):
            seen = one.tried & visible
            told = f"{self.node.name}, transaction {number}: {one}, seen {sorted(map(str, seen))}"
            if one.is_acknowledged and one.commits:
                if not one.written <= seen:
                    raise BrokenInvariantError(f"a committed record is lost: {told}")
            elif not one.commits or one.is_acknowledged:
                if seen:
                    raise BrokenInvariantError(f"a record of an aborted transaction: {told}")
            elif seen and not one.written <= seen:
                raise BrokenInvariantError(f"half of a transaction: {told}")


class TxnProducer(Transactional):
    """A producer that runs one transaction after another."""

    def __init__(self, world: World, name: str, topic: str, partitions: int) -> None:
        super().__init__(world, name, topic, partitions)
        self._advance(None)

    def _live(self) -> Step:
        identity: Identity = yield from self._init()
        sequences: dict[int, int] = {}
        while not self.is_stopped:
            after = yield from self._transact(self.begin(), identity, sequences)
            if after is None:
                after = yield from self._init()
            if after != identity:
                sequences = {}
            identity = after


def committed_values(log: ModelLog) -> list[Hashable]:
    """Return the transactional values of a log that a read_committed consumer gets."""
    open_values: dict[int, list[Hashable]] = {}
    shown: list[Hashable] = []
    for batch in log.batches:
        producer_id, marker = batch.header.producer_id, batch.marker
        if marker is not None:
            values = open_values.pop(producer_id, [])
            shown += values if marker.commit else []
        elif batch.header.is_transactional:
            open_values.setdefault(producer_id, []).extend(batch.values)
    if open_values:
        raise BrokenInvariantError(f"transactions that never end: {open_values}")
    return shown
