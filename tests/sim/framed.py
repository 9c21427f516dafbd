"""Clients that speak real frames to real brokers, and note acknowledged requests.

Each lives on a node and a loop of its own and uses Fencepost's asynchronous client, so that its
connections, its look-ups of leaders and coordinators and its retries are under test as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.wire.client.client import AsyncWireClient
from fencepost.coordinator.wire.client.requests import NAMED, Partition, rows_of, topics
from fencepost.coordinator.wire.errors import WireError
from fencepost.coordinator.wire.messages import RequestFactory
from fencepost.logcore.batch import LogRecord, decode_records, encode_batch, iter_headers
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import EPOCH_MS
from tests.sim.sockets import SocketLoop, Wires

REQUEST_MS: Final = 2_500
"""How long a client waits for an answer."""
BACKOFF_MS: Final = 60
LOST: Final = None
"""In the place of an answer that has not come."""

Log = dict[int, str]
"""The values of a partition by offset."""


@dataclass
class Promises:
    """Acknowledgements to clients, which are compared with the logs in the end."""

    appended: dict[Partition, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """Acknowledged batches by their first offsets."""
    in_order: dict[str, list[str]] = field(default_factory=dict)
    """Values of idempotent producers, in the order in which they were sent."""
    read: dict[Partition, Log] = field(default_factory=dict)
    """Values that consumers were given."""
    deleted: dict[Partition, int] = field(default_factory=dict)
    """Below these offsets records may have been deleted."""
    transactions: list[Transaction] = field(default_factory=list)
    committed: dict[Partition, int] = field(default_factory=dict)
    """The greatest offset of the group whose commit was acknowledged."""
    partitions: int = 1
    """Of the topic, as far as its admin was told."""
    owners: dict[int, dict[int, str]] = field(default_factory=dict)
    """The owner of each partition by generation."""

    def append(self, place: Partition, offset: int, values: tuple[str, ...]) -> None:
        """A producer was told so."""
        known = self.appended.setdefault(place, {})
        if known.setdefault(offset, values) != values:
            raise BrokenInvariantError(f"{place}: {values} and {known[offset]} are at {offset}")

    def see(self, place: Partition, offset: int, value: str) -> None:
        """A consumer was given so."""
        known = self.read.setdefault(place, {})
        if known.setdefault(offset, value) != value:
            raise BrokenInvariantError(f"{place}: {value} and {known[offset]} are at {offset}")

    def assign(self, generation: int, member: str, owned: Iterable[int]) -> None:
        """A member was given partitions."""
        known = self.owners.setdefault(generation, {})
        for one in owned:
            if known.setdefault(one, member) != member:
                raise BrokenInvariantError(
                    f"generation {generation}: {one} is {member}'s and {known[one]}'s"
                )


@dataclass
class Transaction:
    """A transaction, as its producer knows it."""

    name: str
    written: dict[Partition, list[str]] = field(default_factory=dict)
    """Acknowledged."""
    tried: dict[Partition, list[str]] = field(default_factory=dict)
    commits: bool | None = None
    """Whether its producer asked for a commit or an abort; None if for neither."""
    is_acknowledged: bool = False

    def check(self, seen: Mapping[Partition, set[str]]) -> None:
        """Compare with the values that a read_committed consumer sees."""
        there = {value for values in seen.values() for value in values}
        tried = {value for values in self.tried.values() for value in values}
        written = {value for values in self.written.values() for value in values}
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
    """A process of its own that asks brokers."""

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
        self.waits_for = ""
        self._failed = failed
        with self.loop.running():
            self._client = AsyncWireClient(list(bootstrap), client_id=name, timeout_ms=REQUEST_MS)

    def begin(self) -> None:
        """Live."""
        self.spawn(self._whole_life())

    async def _whole_life(self) -> None:
        await self.live()
        self.is_done = True

    async def live(self) -> None:
        """Send requests until the client is stopped."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside; a failure is one of the history."""

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
        """Be gone."""
        self.loop.end()

    async def wait(self, milliseconds: int) -> None:
        """Sleep."""
        await asyncio.sleep(milliseconds / 1000)

    async def ask(self, api: str, **fields: Any) -> Any:
        """Return the first answer, errors included; :data:`LOST` if none has come."""
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
        """Look up leaders and coordinators before the next request."""
        self._client.forget()

    async def produce(
        self,
        batches: Mapping[Partition, bytes],
        *,
        acks: int = -1,
        transactional_id: str | None = None,
    ) -> dict[Partition, tuple[ErrorCode, int]] | None:
        """Append to partitions of one leader: error and first offset of each, or nothing."""

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
        self, place: Partition, offset: int, *, committed: bool
    ) -> tuple[ErrorCode, list[tuple[int, str]], int] | None:
        """Read on: error, offsets with values, and the next offset; None if no answer came."""

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

        answer = await self.ask("Fetch", at_most=NAMED["Fetch"], to_leader=place, entity=body)
        if answer is LOST:
            return None
        if answer.error_code:
            return answer.error_code, [], offset
        row = answer.responses[0].partitions[0]
        if row.error_code:
            return row.error_code, [], offset
        aborted = (
            [(one.first_offset, one.producer_id) for one in row.aborted_transactions or ()]
            if committed
            else []
        )
        return ErrorCode.none, *_read(bytes(row.records or b""), offset, aborted)


def _read(
    data: bytes, offset: int, aborted: list[tuple[int, int]]
) -> tuple[list[tuple[int, str]], int]:
    """Values of a fetch from ``offset`` on, without markers and aborted records."""
    found: list[tuple[int, str]] = []
    waiting, hidden = sorted(aborted), set[int]()
    for at, header in iter_headers(data):
        while waiting and waiting[0][0] <= header.last_offset:
            hidden.add(waiting.pop(0)[1])
        if header.is_control:
            hidden.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in hidden):
            found += [
                (one.offset, (one.value or b"").decode())
                for one in decode_records(data, at, header)
                if one.offset >= offset
            ]
        offset = header.next_offset
    return found, offset


def batch(values: Sequence[str], **stamp: Any) -> bytes:
    """One batch of these values."""
    records = [LogRecord(at, EPOCH_MS, None, value.encode()) for at, value in enumerate(values)]
    return encode_batch(records, **stamp)


class Admin(FrameClient):
    """Sends the requests of operators."""

    async def live(self) -> None:
        """Do nothing: each request is a task of its own."""

    async def create(self, name: str, partitions: int, factor: int) -> None:
        """Make a topic, however long it takes."""

        def body(make: RequestFactory) -> Any:
            topic = make.CreatableTopic(
                name=name, num_partitions=partitions, replication_factor=factor
            )
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        while True:
            answer = await self.ask("CreateTopics", entity=body)
            if answer is not LOST:
                code = answer.topics[0].error_code
                self.node.say(f"creates {name}: {code.name}")
                if code in {ErrorCode.none, ErrorCode.topic_already_exists}:
                    return
            await self.wait(BACKOFF_MS)

    async def grow(self, name: str, promises: Promises) -> None:
        """Give a topic one more partition."""
        count = promises.partitions + 1

        def body(make: RequestFactory) -> Any:
            topic = make.CreatePartitionsTopic(name=name, count=count)
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        while True:
            answer = await self.ask("CreatePartitions", entity=body)
            if answer is LOST:
                continue
            code = answer.results[0].error_code
            self.node.say(f"gives {name} {count} partitions: {code.name}")
            if code in {ErrorCode.none, ErrorCode.invalid_partitions}:
                promises.partitions = max(promises.partitions, count)
                return
            await self.wait(BACKOFF_MS)

    async def reassign(self, place: Partition, replicas: Sequence[int] | None) -> None:
        """Begin a reassignment, or call it off."""

        def body(make: RequestFactory) -> Any:
            row = make.ReassignablePartition(partition_index=place[1], replicas=replicas)
            topic = make.ReassignableTopic(name=place[0], partitions=[row])
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        answer = await self.ask("AlterPartitionReassignments", entity=body)
        if answer is not LOST:
            code = answer.error_code or answer.responses[0].partitions[0].error_code
            self.node.say(f"reassigns {place} to {replicas}: {code.name}")

    async def elect_preferred(self) -> None:
        """Let the first replicas lead."""

        def body(make: RequestFactory) -> Any:
            return make.message(election_type=0, topic_partitions=None, timeout_ms=REQUEST_MS)

        answer = await self.ask("ElectLeaders", entity=body)
        if answer is not LOST:
            self.node.say(f"has preferred leaders elected: {answer.error_code.name}")

    async def delete_records(self, promises: Promises, place: Partition, offset: int) -> None:
        """Cut the beginning of a log."""
        promises.deleted[place] = max(promises.deleted.get(place, 0), offset)

        def body(make: RequestFactory) -> Any:
            row = make.DeleteRecordsPartition(partition_index=place[1], offset=offset)
            topic = make.DeleteRecordsTopic(name=place[0], partitions=[row])
            return make.message(topics=[topic], timeout_ms=REQUEST_MS)

        answer = await self.ask("DeleteRecords", to_leader=place, entity=body)
        if answer is not LOST:
            code = next(rows_of(answer))[1].error_code
            self.node.say(f"deletes records of {place} below {offset}: {code.name}")


class Producer(FrameClient):
    """Appends to one partition, and sends unacknowledged batches again."""

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
        """Whether the last batch was acknowledged: only then several are under way."""

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
                self._stamp = {
                    "producer_id": answer.producer_id,
                    "producer_epoch": answer.producer_epoch,
                }
                return
            await self.wait(BACKOFF_MS)

    def _next_batch(self) -> tuple[tuple[str, ...], bytes]:
        count = self.draw.choice((1, 1, 2, 3))
        values = tuple(f"{self.name}:{self._made + one}" for one in range(count))
        self._made += count
        stamp = dict(self._stamp)
        if stamp:
            stamp["base_sequence"] = self._sequence
            self.promises.in_order[self.name] += values
        self._sequence += count
        return values, batch(values, **stamp)

    async def _send_all(self, left: list[tuple[tuple[str, ...], bytes]]) -> None:
        """Until all are acknowledged, in their order where it is kept."""
        while left:
            if self._is_sure and len(left) > 1:
                done = await asyncio.gather(*(self._send(*one) for one in left))
            else:
                done = [await self._send(*left[0])] + [False] * (len(left) - 1)
            self._is_sure = done[0]
            left = [one for one, is_done in zip(left, done, strict=True) if not is_done]
            if left and not self._is_sure:
                await self.wait(BACKOFF_MS)

    async def _send(self, values: tuple[str, ...], data: bytes) -> bool:
        answer = await self.produce({self.place: data}, acks=self.acks)
        if self.acks == 0:
            return True
        if answer is None:
            return False
        code, offset = answer[self.place]
        if code:
            self.node.say(f"is refused: {code.name}")
            self.forget()
            return False
        self.acknowledged += len(values)
        if self._is_promised:
            self.promises.append(self.place, offset, values)
        return True


class Reader(FrameClient):
    """Reads one partition on and on."""

    def __init__(
        self, *arguments: Any, place: Partition, promises: Promises, committed: bool
    ) -> None:
        super().__init__(*arguments)
        self.place, self.promises, self.committed = place, promises, committed
        self.offset = 0

    async def live(self) -> None:
        while not self.is_stopped:
            answer = await self.fetch(self.place, self.offset, committed=self.committed)
            if answer is None:
                continue
            code, found, after = answer
            if code == ErrorCode.offset_out_of_range:
                low = self.promises.deleted.get(self.place, 0)
                if self.offset >= low:
                    raise BrokenInvariantError(f"{self.place}: out of range at {self.offset}")
                self.offset = low
            elif code:
                self.forget()
            for offset, value in found:
                self.promises.see(self.place, offset, value)
            self.offset = after
            await self.wait(self.draw.randint(50, 300))


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
"""How often a producer of transactions does not try again, but begins with a new epoch."""


class TxnProducer(FrameClient):
    """Writes transactions to several partitions, one after the other."""

    def __init__(self, *arguments: Any, places: Sequence[Partition], promises: Promises) -> None:
        super().__init__(*arguments)
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
            one = Transaction(f"{self.name}:t{self._number}")
            self.promises.transactions.append(one)
            if not (await self._write(one) and await self._finish(one)):
                self._identity = -1, -1
            await self.wait(self.draw.randint(1, 300))
        # An open transaction would hold back the last stable offset.
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
        answer = await self.ask(
            "InitProducerId",
            to_transaction=self.name,
            transactional_id=self.name,
            transaction_timeout_ms=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        if answer is LOST:
            return False
        if answer.error_code:
            self.node.say(f"gets no id: {answer.error_code.name}")
            if answer.error_code not in RETRIED:
                raise BrokenInvariantError(f"{self.name}: InitProducerId: {answer.error_code!r}")
            self.forget()
            await self.wait(BACKOFF_MS)
            return False
        self._identity = answer.producer_id, answer.producer_epoch
        self._sequences = {}
        return True

    async def _write(self, one: Transaction) -> bool:
        for number in range(self.draw.randint(1, 4)):
            place = self.draw.choice(self.places)
            values = [f"{one.name}:{number}.{at}" for at in range(self.draw.randint(1, 3))]
            one.tried.setdefault(place, []).extend(values)
            if not await self._append(place, values):
                return False
            one.written.setdefault(place, []).extend(values)
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
                    self.promises.append(place, offset, tuple(values))
                    self._sequences[place] = self._sequences.get(place, 0) + len(values)
                    return True
                self.node.say(f"{values[0]} is refused: {code.name}")
                if code not in RETRIED:
                    return False
                self.forget()
            if self.draw.random() < GIVES_UP:
                return False
            await self.wait(BACKOFF_MS)

    async def _finish(self, one: Transaction) -> bool:
        commits = one.commits = self.draw.random() < 0.7
        while True:
            answer = await self.ask(
                "EndTxn", to_transaction=self.name, committed=commits, **self._claim
            )
            if answer is not LOST:
                if not answer.error_code:
                    one.is_acknowledged = True
                    self.committed += commits
                    after = answer.producer_id, answer.producer_epoch
                    if after != self._identity:
                        self._identity, self._sequences = after, {}
                    return True
                self.node.say(f"does not end {one.name}: {answer.error_code.name}")
                if answer.error_code not in RETRIED:
                    return False
                self.forget()
            if self.draw.random() < GIVES_UP:
                return False
            await self.wait(BACKOFF_MS)
