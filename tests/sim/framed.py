"""Clients that send requests to simulated brokers, and record what is acknowledged.

Each client has its own node and event loop, and uses Fencepost's asynchronous client library, so
that its connections, metadata lookups and retries are tested as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.client.client import AsyncWireClient
from fencepost.client.requests import NAMED, Partition, topics
from fencepost.logcore.batch import LogRecord, decode_records, encode_batch, iter_headers
from fencepost.protocol.errors import WireError
from fencepost.protocol.messages import RequestFactory
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import EPOCH_MS
from tests.sim.sockets import SocketLoop, Wires
from tests.sim.watch import KEYED

REQUEST_MS: Final = 2_500
"""The timeout of a request."""
DOUBTS_MS: Final = 1_000
"""For how long a reader repeats a fetch that was answered with OFFSET_OUT_OF_RANGE."""
BACKOFF_MS: Final = 60
LOST: Final = None
"""Stands for the missing answer to a request."""

Log = dict[int, str]
"""The values of a partition by offset."""


@dataclass
class Promises:
    """All acknowledgements to clients; at the end they are compared with the logs."""

    appended: dict[Partition, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """Acknowledged batches by their first offsets."""
    in_order: dict[str, list[str]] = field(default_factory=dict)
    """Values of idempotent producers, in the order in which they were sent."""
    doubtful: set[str] = field(default_factory=set)
    """Values that a producer resent in another epoch, because their outcome was unknown."""
    read: dict[Partition, Log] = field(default_factory=dict)
    """Values that consumers read."""
    read_committed: dict[Partition, Log] = field(default_factory=dict)
    """Values that ``read_committed`` consumers read."""
    deleted: dict[Partition, int] = field(default_factory=dict)
    """Offsets below which records may have been deleted."""
    made_ms: dict[str, int] = field(default_factory=dict)
    """Value → when its producer first sent it."""
    look_at_starts: Callable[[], None] = lambda: None
    """Called to bring :attr:`deleted` up to date."""
    transactions: list[Transaction] = field(default_factory=list)
    committed: dict[Partition, int] = field(default_factory=dict)
    """The greatest acknowledged committed offset of the group."""
    producer_ids: dict[int, str] = field(default_factory=dict)
    """Producer id → name of the client that got it."""
    offsets: int = 0
    """The last offset that a member committed; each commit has a greater offset."""
    aborted: set[int] = field(default_factory=set)
    """Offsets committed in transactions that the member aborts."""
    pending: dict[Partition, int] = field(default_factory=dict)
    """Acknowledged offsets of transactions that a member has not yet ended."""
    partitions: int = 1
    """The topic's number of partitions, according to the admin's last response."""
    assigned_partitions: int = 1
    """The number of partitions in the last assignment by a leader of the classic group."""
    generation: int = -1
    """The greatest generation that a member of the group got."""
    owners: dict[int, dict[int, str]] = field(default_factory=dict)
    """Generation → partition → its owner."""

    is_void: Callable[[Partition], bool] = lambda _place: False
    """Returns whether a partition may have lost acknowledged records."""

    acknowledged: Callable[[Partition, int], None] = lambda _place, _end: None
    """Called with the end offset of each batch that was acknowledged with acks=all."""

    def append(
        self, place: Partition, offset: int, values: tuple[str, ...], *, by_all: bool = False
    ) -> None:
        """Record an acknowledged batch; ``by_all``: it was sent with acks=all."""
        if by_all:
            self.acknowledged(place, offset + len(values))
        known = self.appended.setdefault(place, {})
        if known.setdefault(offset, values) != values and not self.is_void(place):
            raise BrokenInvariantError(f"{place}: {values} and {known[offset]} are at {offset}")

    def given_id(self, producer_id: int, name: str) -> None:
        """Record a producer id; raise BrokenInvariantError if another producer has it."""
        owner = self.producer_ids.setdefault(producer_id, name)
        if owner != name:
            raise BrokenInvariantError(f"{name} is given the id {producer_id} of {owner}")

    def see(self, place: Partition, offset: int, value: str, *, committed: bool) -> None:
        """Record a value that a consumer read."""
        if committed:
            self.read_committed.setdefault(place, {})[offset] = value
        known = self.read.setdefault(place, {})
        if known.setdefault(offset, value) != value and not self.is_void(place):
            raise BrokenInvariantError(f"{place}: {value} and {known[offset]} are at {offset}")

    def group_began(self) -> None:
        """Forget all generations.

        An empty group that changes its protocol starts again, and so do its generations
        (``GroupMetadataManager.maybeDeleteEmptyConsumerGroup``).
        """
        self.generation = 0
        self.owners.clear()

    def assign(self, generation: int, member: str, owned: Iterable[int]) -> None:
        """Record a member's assignment in a generation."""
        self.generation = max(self.generation, generation)
        known = self.owners.setdefault(generation, {})
        for index in owned:
            if known.setdefault(index, member) != member:
                raise BrokenInvariantError(
                    f"generation {generation}: {index} is {member}'s and {known[index]}'s"
                )


@dataclass
class Transaction:
    """A transaction, as its producer knows it."""

    name: str
    written: dict[Partition, list[str]] = field(default_factory=dict)
    """Values whose append was acknowledged."""
    tried: dict[Partition, list[str]] = field(default_factory=dict)
    commits: bool | None = None
    """True if the producer requested a commit, False for an abort, None before either request."""
    is_acknowledged: bool = False

    def check(self, seen: Mapping[Partition, set[str]], deleted: set[str]) -> None:
        """Raise BrokenInvariantError if the transaction's visibility differs from its outcome.

        ``seen`` has the values that a ``read_committed`` consumer sees, and ``deleted`` has values
        below the log start offset.
        """
        there = {value for values in seen.values() for value in values}
        tried = {value for values in self.tried.values() for value in values}
        written = {value for values in self.written.values() for value in values} - deleted
        shown = tried & there
        if self.commits and self.is_acknowledged:
            if not written <= there:
                raise BrokenInvariantError(f"{self} lacks {sorted(written - there)}")
        elif self.commits:
            if shown and not written <= shown:
                raise BrokenInvariantError(f"{self} is there in part: {sorted(shown)}")
        elif shown:
            raise BrokenInvariantError(f"{self} was not committed, and shows {sorted(shown)}")


class FrameClient:
    """A client process on its own node, which sends requests to brokers."""

    def __init__(
        self, wires: Wires, name: str, bootstrap: Sequence[str], failed: Callable[[str], None]
    ) -> None:
        self.name = name
        self.node = wires.network.add(name)
        self.node.begin()
        wires.host_of(self.node)
        self.loop = SocketLoop(self.node, wires)
        self.draw = wires.scheduler.draw
        self.is_stopped = False
        self.is_done = False
        self.is_awaited = True
        """Whether the client must finish before the simulated run ends."""
        self.waits_for = ""
        self._failed = failed
        with self.loop.running():
            self._client = AsyncWireClient(list(bootstrap), client_id=name, timeout_ms=REQUEST_MS)

    def begin(self) -> None:
        """Start the client's task."""
        self.spawn(self._whole_life())

    async def _whole_life(self) -> None:
        await self.live()
        self.is_done = True

    async def live(self) -> None:
        """Send requests until the client is stopped."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the client; its exception fails the simulated run."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._failed(f"{self.name}: {error!r}")
                raise error

        with self.loop.running():
            task = self.loop.create_task(work)
        task.add_done_callback(ended)
        return task

    def end(self) -> None:
        """End the client's tasks."""
        self.loop.end()

    async def wait(self, milliseconds: int) -> None:
        """Sleep for a simulated time."""
        await asyncio.sleep(milliseconds / 1000)

    async def ask(self, api: str, **fields: Any) -> Any:
        """Send a request; return its answer, also one with an error, or :data:`LOST`."""
        self.waits_for = api
        try:
            answer = await self._client.call(api, check=False, **fields)
        except (WireError, OSError) as error:
            self.node.say(f"{api} fails: {type(error).__name__}: {error}")
            self.forget()
            await self.wait(BACKOFF_MS)
            return LOST
        self.waits_for = f"{api} was answered"
        return answer

    def forget(self) -> None:
        """Drop cached leaders and coordinators, so that the next request looks them up."""
        self._client.forget()

    async def init_producer(self) -> tuple[int, int] | None:
        """Send InitProducerId; return producer id and epoch, or None after a retriable error.

        The client's name is its transactional id.
        """
        answer = await self.ask(
            "InitProducerId",
            to_transaction=self.name,
            transactional_id=self.name,
            transaction_timeout_ms=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        if answer is LOST:
            return None
        if answer.error_code:
            self.node.say(f"gets no id: {answer.error_code.name}")
            if answer.error_code not in RETRIED:
                raise BrokenInvariantError(f"{self.name}: InitProducerId: {answer.error_code!r}")
            self.forget()
            await self.wait(BACKOFF_MS)
            return None
        return answer.producer_id, answer.producer_epoch

    async def produce(
        self,
        batches: Mapping[Partition, bytes],
        *,
        acks: int = -1,
        transactional_id: str | None = None,
    ) -> dict[Partition, tuple[ErrorCode, int]] | None:
        """Send a Produce request to the leader of the first partition.

        Return the error and base offset of each partition; without an answer return None.
        """

        def body(make: RequestFactory) -> Any:
            asked = (
                (place, make.PartitionProduceData(index=place[1], records=batch))
                for place, batch in batches.items()
            )
            return make.message(
                transactional_id=transactional_id,
                acks=acks,
                timeout_ms=REQUEST_MS,
                topic_data=topics(make.TopicProduceData, asked, "partition_data"),
            )

        answer = await self.ask(
            "Produce", at_most=NAMED["Produce"], to_leader=next(iter(batches)), entity=body
        )
        if answer is LOST:
            return None
        return {
            (topic.name, row.index): (row.error_code, row.base_offset)
            for topic in answer.responses
            for row in topic.partition_responses
        }

    async def fetch(
        self, place: Partition, offset: int, *, committed: bool, node_id: int | None = None
    ) -> tuple[ErrorCode, list[tuple[int, str]], int] | None:
        """Fetch once from the leader, or from the broker ``node_id``.

        Return the error, the (offset, value) pairs of the records, and the next offset. Without an
        answer return None.
        """

        def body(make: RequestFactory) -> Any:
            asked = make.FetchPartition(
                partition=place[1], fetch_offset=offset, partition_max_bytes=1 << 20
            )
            return make.message(
                max_wait_ms=100,
                min_bytes=1,
                max_bytes=1 << 20,
                isolation_level=int(committed),
                topics=[make.FetchTopic(topic=place[0], partitions=[asked])],
            )

        target = {"to_leader": place} if node_id is None else {"to_node": node_id}
        answer = await self.ask("Fetch", at_most=NAMED["Fetch"], entity=body, **target)
        if answer is LOST:
            return None
        if answer.error_code:
            return answer.error_code, [], offset
        if not answer.responses:
            # The answer to a throttled client has only the throttle time, no partitions.
            await self.wait(answer.throttle_time_ms)
            return None
        row = answer.responses[0].partitions[0]
        if row.error_code:
            return row.error_code, [], offset
        aborted = (
            [
                (transaction.first_offset, transaction.producer_id)
                for transaction in row.aborted_transactions or ()
            ]
            if committed
            else []
        )
        data = bytes(row.records or b"")
        return ErrorCode.none, *_read(data, offset, aborted, has_gaps=place[0] == KEYED)


def _read(
    data: bytes, offset: int, aborted: list[tuple[int, int]], *, has_gaps: bool
) -> tuple[list[tuple[int, str]], int]:
    """Return the visible (offset, value) pairs of fetched bytes, and the next offset.

    Records below ``offset``, control records and aborted records are left out. Gaps between batches
    raise BrokenInvariantError, except in a compacted topic, which ``has_gaps``.
    """
    found: list[tuple[int, str]] = []
    waiting, hidden = sorted(aborted), set[int]()
    for at, header in iter_headers(data):
        if header.base_offset > offset and not has_gaps:
            raise BrokenInvariantError(f"a fetch at {offset} has {header.base_offset} next")
        while waiting and waiting[0][0] <= header.last_offset:
            hidden.add(waiting.pop(0)[1])
        if header.is_control:
            hidden.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in hidden):
            found += [
                (record.offset, (record.value or b"").decode())
                for record in decode_records(data, at, header)
                if record.offset >= offset
            ]
        offset = header.next_offset
    return found, offset


def batch(values: Sequence[str], **stamp: Any) -> bytes:
    """Encode one batch of these values, without keys."""
    records = [LogRecord(at, EPOCH_MS, None, value.encode()) for at, value in enumerate(values)]
    return encode_batch(records, **stamp)


class Producer(FrameClient):
    """Appends to one partition, and resends unacknowledged batches."""

    def __init__(
        self,
        *arguments: Any,
        place: Partition,
        promises: Promises,
        acks: int,
        is_idempotent: bool,
        in_flight: int,
        pause_ms: int,
        is_promised: bool = True,
    ) -> None:
        super().__init__(*arguments)
        self._is_promised = is_promised or is_idempotent or acks == -1
        """Whether acknowledged records must survive."""
        self.place, self.promises = place, promises
        self.acks = -1 if is_idempotent else acks
        self.is_idempotent, self.in_flight, self.pause_ms = is_idempotent, in_flight, pause_ms
        self.acknowledged = 0
        self._made = 0
        self._sequence = 0
        self._stamp: dict[str, int] = {}
        self._is_sure = False
        """Whether the first batch of the last round was acknowledged.

        Only if it was, the next round may have several batches in flight.
        """

    async def live(self) -> None:
        if self.is_idempotent:
            await self._ask_for_id()
            self.promises.in_order[self.name] = []
        while not self.is_stopped:
            count = self.draw.randint(1, self.in_flight) if self._is_sure else 1
            await self._send_all([self._next_batch() for _ in range(count)])
            await self.wait(self.draw.randint(1, 2 * self.pause_ms))

    async def _ask_for_id(self) -> None:
        while True:
            answer = await self.ask("InitProducerId", transactional_id=None)
            if answer is not LOST and not answer.error_code:
                self.promises.given_id(answer.producer_id, self.name)
                self._stamp = {
                    "producer_id": answer.producer_id,
                    "producer_epoch": answer.producer_epoch,
                }
                return
            await self.wait(BACKOFF_MS)

    def _next_batch(self) -> tuple[tuple[str, ...], bytes]:
        count = self.draw.choice((1, 1, 2, 3))
        values = tuple(f"{self.name}:{self._made + number}" for number in range(count))
        self._made += count
        self.promises.made_ms |= dict.fromkeys(values, self.node.scheduler.now)
        if self.is_idempotent:
            self.promises.in_order[self.name] += values
        return values, self._encode(values)

    def _encode(self, values: tuple[str, ...]) -> bytes:
        stamp = {**self._stamp, "base_sequence": self._sequence} if self._stamp else {}
        self._sequence += len(values)
        return batch(values, **stamp)

    async def _send_all(self, left: list[tuple[tuple[str, ...], bytes]]) -> None:
        """Send batches, and resend the unacknowledged ones until none is left."""
        were_together = False
        while left:
            if self._is_sure and len(left) > 1:
                codes = await asyncio.gather(*(self._send(*unsent) for unsent in left))
                were_together = True
            else:
                codes = [await self._send(*left[0])]
            self._is_sure = codes[0] == ErrorCode.none
            is_out_of_order = codes[0] == ErrorCode.out_of_order_sequence_number
            codes += [LOST] * (len(left) - len(codes))
            left = [
                unsent for unsent, code in zip(left, codes, strict=True) if code != ErrorCode.none
            ]
            if is_out_of_order and were_together:
                left = self._raise_epoch(left)
            if left and not self._is_sure:
                await self.wait(BACKOFF_MS)

    def _raise_epoch(
        self, left: list[tuple[tuple[str, ...], bytes]]
    ) -> list[tuple[tuple[str, ...], bytes]]:
        """Return the same batches in the producer's next epoch.

        A restarted leader knows only the last batch of a producer. The leader refuses an earlier
        batch of its log as out of order, so the client cannot find out whether that batch was
        appended. Source: ``TransactionManager.canRetry``.
        """
        self.node.say("raises its epoch")
        self._stamp["producer_epoch"] += 1
        self._sequence = 0
        self.promises.doubtful.update(value for values, _ in left for value in values)
        return [(values, self._encode(values)) for values, _ in left]

    async def _send(self, values: tuple[str, ...], data: bytes) -> ErrorCode | None:
        """Send one batch; return the error code of the answer, or :data:`LOST`."""
        answer = await self.produce({self.place: data}, acks=self.acks)
        if self.acks == 0:
            return ErrorCode.none
        if answer is None:
            return LOST
        code, offset = answer[self.place]
        if code:
            self.node.say(f"is refused: {code.name}")
            self.forget()
            return code
        self.acknowledged += len(values)
        if self._is_promised:
            self.promises.append(self.place, offset, values, by_all=self.acks == -1)
        return code


class Reader(FrameClient):
    """A consumer without a group, which reads one partition continuously."""

    def __init__(
        self,
        *arguments: Any,
        place: Partition,
        promises: Promises,
        committed: bool,
        nodes: Sequence[int] = (),
    ) -> None:
        super().__init__(*arguments)
        self.place, self.promises, self.committed = place, promises, committed
        self._nodes = tuple(nodes)
        """Brokers to fetch from at random, as followers serve consumers too (KIP-392)."""
        self._asks_leader = True
        self.offset = 0
        self._doubts_since: int | None = None
        """Time of the first of the latest, uninterrupted OFFSET_OUT_OF_RANGE answers, in
        milliseconds. None if the last answer was another one.
        """

    async def live(self) -> None:
        while not self.is_stopped:
            node_id = None
            if self._nodes and not self._asks_leader:
                node_id = self.draw.choice(self._nodes)
            answer = await self.fetch(
                self.place, self.offset, committed=self.committed, node_id=node_id
            )
            # A broker without a replica, or with a lagging replica, refuses the request: ask the
            # leader.
            self._asks_leader = answer is None or (answer[0] != 0 and node_id is not None)
            if answer is None or self._asks_leader:
                continue
            code, found, after = answer
            if code == ErrorCode.offset_out_of_range:
                self.promises.look_at_starts()
                low = self.promises.deleted.get(self.place, 0)
                if self.offset >= low and self._may_doubt():
                    self.forget()
                    continue
                if self.offset >= low and not self.promises.is_void(self.place):
                    raise BrokenInvariantError(f"{self.place}: out of range at {self.offset}")
                self.offset = low
            elif code:
                self.forget()
            self._doubts_since = None
            for offset, value in found:
                self.promises.see(self.place, offset, value, committed=self.committed)
            self.offset = after
            await self.wait(self.draw.randint(50, 300))

    def _may_doubt(self) -> bool:
        """Whether an OFFSET_OUT_OF_RANGE may come from a broker that has lost its disk.

        A former leader answers so until it has caught up. Several former leaders may do so in turn.
        """
        now_ms = self.node.scheduler.now
        if self._doubts_since is None:
            self._doubts_since = now_ms
        return now_ms - self._doubts_since < DOUBTS_MS


RETRIED: Final = frozenset(
    {
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.request_timed_out,
        ErrorCode.network_exception,
        ErrorCode.kafka_storage_error,
    }
)
GIVES_UP: Final = 0.1
"""The probability that a transactional producer gets a new epoch instead of retrying."""


class TxnProducer(FrameClient):
    """Writes transactions to several partitions, one after the other."""

    def __init__(
        self,
        *arguments: Any,
        places: Sequence[Partition],
        promises: Promises,
        gives_up: float = GIVES_UP,
    ) -> None:
        super().__init__(*arguments)
        self._gives_up = gives_up
        self.places, self.promises = tuple(places), promises
        self._number = 0
        self._sequences: dict[Partition, int] = {}
        self._identity = (-1, -1)
        self.committed = 0

    async def live(self) -> None:
        while not self.is_stopped:
            if self._identity[0] < 0:
                await self._init()
                continue
            self._number += 1
            transaction = Transaction(f"{self.name}:t{self._number}")
            self.promises.transactions.append(transaction)
            if not (await self._write(transaction) and await self._finish(transaction)):
                self._identity = -1, -1
            await self.wait(self.draw.randint(1, 300))
        # InitProducerId ends a transaction left open, which would hold back the LSO.
        while self._identity[0] < 0 and not await self._init():
            pass

    @property
    def _claim(self) -> dict[str, Any]:
        return {
            "transactional_id": self.name,
            "producer_id": self._identity[0],
            "producer_epoch": self._identity[1],
        }

    async def _init(self) -> bool:
        identity = await self.init_producer()
        if identity is None:
            return False
        self._identity, self._sequences = identity, {}
        self.promises.given_id(identity[0], self.name)
        return True

    async def _write(self, transaction: Transaction) -> bool:
        for number in range(self.draw.randint(1, 4)):
            place = self.draw.choice(self.places)
            values = [f"{transaction.name}:{number}.{at}" for at in range(self.draw.randint(1, 3))]
            self.promises.made_ms |= dict.fromkeys(values, self.node.scheduler.now)
            transaction.tried.setdefault(place, []).extend(values)
            if not await self._append(place, values):
                return False
            transaction.written.setdefault(place, []).extend(values)
        return True

    async def _append(self, place: Partition, values: list[str]) -> bool:
        data = batch(
            values,
            producer_id=self._identity[0],
            producer_epoch=self._identity[1],
            base_sequence=self._sequences.get(place, 0),
            transactional=True,
        )
        while True:
            answer = await self.produce({place: data}, transactional_id=self.name)
            if answer is not None:
                code, offset = answer[place]
                if not code:
                    self.promises.append(place, offset, tuple(values), by_all=True)
                    self._sequences[place] = self._sequences.get(place, 0) + len(values)
                    return True
                self.node.say(f"{values[0]} is refused: {code.name}")
                if code not in RETRIED:
                    return False
                self.forget()
            if self.draw.random() < self._gives_up:
                return False
            await self.wait(BACKOFF_MS)

    async def _finish(self, transaction: Transaction) -> bool:
        commits = transaction.commits = self.draw.random() < 0.7
        while True:
            answer = await self.ask(
                "EndTxn", to_transaction=self.name, committed=commits, **self._claim
            )
            if answer is not LOST:
                if not answer.error_code:
                    transaction.is_acknowledged = True
                    self.committed += commits
                    after = answer.producer_id, answer.producer_epoch
                    if after != self._identity:
                        self._identity, self._sequences = after, {}
                    return True
                self.node.say(f"does not end {transaction.name}: {answer.error_code.name}")
                if answer.error_code not in RETRIED:
                    return False
                self.forget()
            if self.draw.random() < self._gives_up:
                return False
            await self.wait(BACKOFF_MS)
