"""Staged faults, each of which waits for the state in which a planted bug can show.

A *story* is such a staged fault. It reads the daemons' objects to recognize the state. The fault is
a network fault, an operator's request or a kill, so the same events can also occur by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.image import PartitionRegistration
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.storage.replica import Replica
from tests.sim.daemon import Daemon
from tests.sim.daemon_faults import COORDINATORS, SHORT_LIVED, DaemonFaults
from tests.sim.framed import BACKOFF_MS, LOST, batch
from tests.sim.framed_admin import PREFERRED
from tests.sim.invariants import BrokenInvariantError

PATIENCE_MS: Final = 2_500
"""How long a story waits for the state that it needs."""
LATE_MS: Final = 2_000
ATTEMPTS: Final = 20
FETCH, MARKERS, ALTER_PARTITION, REGISTER = 1, 27, 56, 62
"""API keys."""

Place = tuple[str, int]


class Stories(DaemonFaults):
    """Runs the staged faults, one at a time."""

    _is_telling = False

    def _tell(self, story: Coroutine[Any, Any, None]) -> None:
        if self._is_telling:
            story.close()
            return
        self._is_telling = True

        async def tell() -> None:
            self.scheduler.say("--", f"a story begins: {story.__name__}")
            try:
                await story
            finally:
                self._is_telling = False
            self.scheduler.say("--", f"it ends: {story.__name__}")

        self._do(tell())

    # --- the state that a story waits for ---

    async def _wait(self, milliseconds: int) -> None:
        await self.history.admin.wait(milliseconds)

    async def _until(self, holds: Callable[[], object], patience_ms: int = PATIENCE_MS) -> bool:
        until_ms = self.scheduler.now + patience_ms
        while not self.is_over and self.scheduler.now < until_ms:
            if holds():
                return True
            await self._wait(1)
        return False

    def _node(self, broker_id: int) -> Daemon:
        return self.history.brokers[broker_id - 1]

    def _replica(self, broker_id: int, place: Place) -> Replica | None:
        services = self._node(broker_id).services
        found = None if services is None else services.replicas.replica(*place)
        return None if found is None or found.partition is None else found

    def _registration(self, place: Place) -> PartitionRegistration | None:
        image = self.history.image
        topic = None if image is None else image.topics.get(place[0])
        return None if topic is None else topic.partitions[place[1]]

    def _leader(self, place: Place) -> Replica | None:
        """Return the elected leader's replica, or None if that broker does not lead yet."""
        now = self._registration(place)
        if now is None or now.leader < 0:
            return None
        found = self._replica(now.leader, place)
        if found is None or not found.machine.is_leader:
            return None
        return found if found.machine.leader_epoch == now.leader_epoch else None

    def _end(self, broker_id: int, place: Place) -> int:
        found = self._replica(broker_id, place)
        return -1 if found is None or found.partition is None else found.partition.log_end_offset

    def _mark(self, broker_id: int, place: Place) -> int:
        found = self._replica(broker_id, place)
        return -1 if found is None or found.partition is None else found.partition.high_watermark

    def _coordinated(self) -> Place:
        topic = TRANSACTION_STATE if self.options.transactions else CONSUMER_OFFSETS
        return topic, self.draw.randrange(COORDINATORS)

    @contextmanager
    def _held(self, ways: Iterable[tuple[str, ...]]) -> Iterator[None]:
        """Hold everything on the connections from these clients to these servers."""
        asked = set(ways) - self.wires.held
        self.scheduler.say("--", f"held: {sorted(asked)}")
        self.wires.held |= asked
        try:
            yield
        finally:
            self.wires.held -= asked

    def _fetches_of(self, place: Place) -> set[tuple[str, ...]]:
        """Return the connections on which followers fetch from a leader."""
        now = self._registration(place)
        if now is None or now.leader < 0:
            return set()
        fetches = str(FETCH)
        return {
            (f"b{replica}", f"b{now.leader}", fetches)
            for replica in now.replicas
            if replica != now.leader
        }

    def _kill_one(self, broker_id: int) -> None:
        self._node(broker_id).kill()
        self._back(self._node(broker_id))

    async def _elect(self, place: Place, first: int) -> bool:
        """Elect a broker by making it the preferred leader; return whether it was elected."""
        now, admin = self._registration(place), self.history.admin
        if now is None:
            return False
        others = [replica for replica in now.replicas if replica != first]
        await admin.reassign(place, [first, *others])
        await admin.elect_leaders(PREFERRED)
        now = self._registration(place)
        return now is not None and now.leader == first

    # --- requests that arrive late ---

    def late_change(self) -> None:
        """Delay a broker's next AlterPartition, so that the broker's retry can arrive first."""
        self._late(self._broker(), "ct", ALTER_PARTITION)

    def late_markers(self) -> None:
        """Delay each broker's next WriteTxnMarkers, so that the broker's retry can arrive first."""
        for broker in self.history.brokers:
            for other in self.history.brokers:
                self._late(broker, other.node.name, MARKERS)

    def _late(self, client: Daemon, server: str, api_key: int, count: int = 1) -> None:
        delays = [self.draw.randint(LATE_MS // 8, LATE_MS) for _ in range(count)]
        self.wires.late[client.node.name, server, api_key] = delays

    def late_incarnation(self) -> None:
        """Let a follower lose its disk; a fetch of its former process arrives afterwards."""
        self._tell(self._late_incarnation())

    async def _late_incarnation(self) -> None:
        place = self._place()
        leader = self._leader(place)
        if leader is None:
            return
        server = self._node(leader.machine._view.broker_id)
        others = [
            broker for broker in self.history.brokers if broker is not server and broker.node.is_up
        ]
        if not others:
            return
        victim = self.draw.choice(others)
        # The fetch arrives after the next process has registered, but before that process's own
        # fetches.
        after_ms = self.options.session_ms + self.draw.randint(LATE_MS // 8, LATE_MS // 2)
        late = [after_ms] + [2 * LATE_MS] * 50
        self.wires.late[victim.node.name, server.node.name, FETCH] = late
        if await self._until(lambda: len(late) < 51) and victim.node.is_up:
            self._lost_records(victim)
            victim.kill(loses_disk=True)
            self.scheduler.after(1, victim.start)
            await self._wait(after_ms + 100)
        late.clear()

    def late_registration(self) -> None:
        """Let a leader lose its disk, and delay the registration of its next process."""
        self._tell(self._late_registration())

    async def _late_registration(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or now.leader < 0 or len(now.isr) < 2:
            return
        leader = self._node(now.leader)
        if leader.node.is_up:
            self._late(leader, "ct", REGISTER, 3)
            self._lost_records(leader)
            leader.kill(loses_disk=True)
            self.scheduler.after(1, leader.start)
            await self._wait(LATE_MS)

    # --- coordinators and leaders with records that their followers lack ---

    def starve(self) -> None:
        """Hold all followers' fetches from a coordinator, and then usually kill the coordinator."""
        self._tell(self._starve(self._coordinated()))

    def starve_leader(self) -> None:
        """Do as :meth:`starve` does, with the leader of a partition of the topic."""
        self._tell(self._starve(self._place()))

    async def _starve(self, place: Place) -> None:
        leader = self._leader(place)
        if leader is None:
            return
        with self._held(self._fetches_of(place)):
            await self._wait(self.draw.randint(100, self.options.lag_ms * 2 // 3))
            if self.draw.random() < 0.7:
                self._kill_one(leader.machine._view.broker_id)

    def kill_ahead(self) -> None:
        """Kill a coordinator while all in-sync followers know only an older high watermark."""
        self._tell(self._kill_ahead(self._coordinated()))

    async def _kill_ahead(self, place: Place) -> None:
        def is_ahead() -> bool:
            leader, now = self._leader(place), self._registration(place)
            if leader is None or now is None or leader.partition is None:
                return False
            others = [broker_id for broker_id in now.isr if broker_id != now.leader]
            mark = leader.partition.high_watermark
            return bool(others) and all(
                self._mark(other, place) < mark <= self._end(other, place) for other in others
            )

        if await self._until(is_ahead) and (now := self._registration(place)):
            await self._wait(self.draw.choice((0, 1, 2, 5)))
            self._kill_one(now.leader)

    # --- leaders and ISRs ---

    def join_behind_epoch(self) -> None:
        """Elect a leader whose high watermark is so old that a lagging replica reaches it.

        This replica is outside the ISR, and must not join it.
        """
        self._tell(self._join_behind_epoch())

    async def _join_behind_epoch(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or len(now.isr) < 3:
            return
        slow = self.draw.choice([broker_id for broker_id in now.isr if broker_id != now.leader])
        with self._held({(f"b{slow}", f"b{now.leader}")}):
            # The replica lacks all records that are acknowledged after it has left the ISR.
            if not await self._until(lambda: slow not in self._isr(place), 3 * PATIENCE_MS):
                return
            other = next(replica for replica in now.replicas if replica not in (slow, now.leader))

            def is_ahead() -> bool:
                mark = self._mark(now.leader, place)
                return self._mark(other, place) <= self._end(slow, place) < mark

            if not await self._until(is_ahead):
                return
            self._kill_one(now.leader)
        # When the next leader proposes to add the replica, hold the replica's fetches.
        if await self._until(lambda: self._joins(place, slow), 2 * PATIENCE_MS):
            with self._held(self._fetches_of(place)):
                await self._wait(self.options.lag_ms)

    def _isr(self, place: Place) -> tuple[int, ...]:
        now = self._registration(place)
        return () if now is None else now.isr

    def lose_expansion(self) -> None:
        """Lose the AlterPartition that adds a replica to the ISR; its connection breaks."""
        self._tell(self._lose_expansion())

    async def _lose_expansion(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or len(now.isr) < 2:
            return
        slow = self.draw.choice([broker_id for broker_id in now.isr if broker_id != now.leader])
        with self._held({(f"b{slow}", f"b{now.leader}")}):
            if not await self._until(lambda: slow not in self._isr(place), 3 * PATIENCE_MS):
                return
            # At about this time the replica also leaves the ISRs of other partitions.
            await self._wait(self.options.lag_ms // 2)
            leader = self._node(now.leader).node
            self.wires.held.add((leader.name, "ct", str(ALTER_PARTITION)))
        try:
            if await self._until(lambda: self._joins(place, slow)):
                await self._wait(2)
                self.wires.break_way(leader, "ct")
                await self._wait(1)
        finally:
            self.wires.held.discard((leader.name, "ct", str(ALTER_PARTITION)))

    def overtake(self) -> None:
        """Send a new producer's second batch after the first batch was refused below min ISR."""
        self._tell(self._overtake())

    async def _overtake(self) -> None:
        place, admin = self._place(), self.history.admin
        now = self._registration(place)
        if now is None or len(now.isr) < len(now.replicas):
            return
        given = await admin.ask("InitProducerId", transactional_id=None)
        if given is LOST or given.error_code:
            return

        async def send(sequence: int) -> ErrorCode | None:
            values = (f"{given.producer_id}.{sequence}",)
            stamp = {"producer_id": given.producer_id, "producer_epoch": given.producer_epoch}
            data = batch(values, **stamp, base_sequence=sequence)
            answer = await admin.produce({place: data})
            if answer is LOST:
                return LOST
            code, offset = answer[place]
            self.scheduler.say("--", f"{values[0]}: {code.name}")
            if not code:
                self.history.promises.append(place, offset, values, by_all=True)
            else:
                admin.forget()
            return code

        def is_under_min_isr() -> bool:
            leader = self._leader(place)
            return leader is not None and leader.machine.is_under_min_isr

        slow = self.draw.choice([broker_id for broker_id in now.isr if broker_id != now.leader])
        with self._held({(f"b{slow}", f"b{now.leader}")}):
            if not await self._until(is_under_min_isr, 3 * PATIENCE_MS):
                return
            if await send(0) != ErrorCode.not_enough_replicas:
                return
        # The second batch arrives as if it had been in flight when the first batch was refused.
        if await self._until(lambda: not is_under_min_isr(), 2 * PATIENCE_MS):
            await send(1)
        for sequence in (0, 1):
            code = None
            for _ in range(ATTEMPTS):
                code = await send(sequence)
                if code == ErrorCode.none or self.is_over:
                    break
                await self._wait(BACKOFF_MS)
            if code == ErrorCode.out_of_order_sequence_number and not self.is_over:
                raise BrokenInvariantError(f"batch {sequence} of a new producer is out of order")

    def _joins(self, place: Place, broker_id: int) -> bool:
        leader = self._leader(place)
        pending = None if leader is None else leader.machine.pending
        return pending is not None and broker_id in pending.joins

    def take_back_expansion(self) -> None:
        """Lose the answer to an ISR expansion, and hold the leader's fetches of metadata."""
        self._tell(self._take_back_expansion())

    async def _take_back_expansion(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or len(now.isr) < 3:
            return
        slow = self.draw.choice([broker_id for broker_id in now.isr if broker_id != now.leader])
        with self._held({(f"b{slow}", f"b{now.leader}")}):
            if not await self._until(lambda: slow not in self._isr(place), 3 * PATIENCE_MS):
                return
        if not await self._until(lambda: self._joins(place, slow)):
            return
        leader, slow_node = self._node(now.leader).node, self._node(slow).node
        with self._held({(leader.name, "ct", str(FETCH))}):
            self.network.cut.add(("ct", leader.name))
            try:
                if await self._until(lambda: slow in self._isr(place), 200):
                    # The controller has accepted the expansion, and the leader does not know it.
                    self.wires.break_way(leader, "ct")
            finally:
                self.network.cut.discard(("ct", leader.name))
            if slow_node.is_up:
                slow_node.paused_until_ms = self.scheduler.now + self.options.lag_ms
            await self._wait(self.options.lag_ms)

    def miss_epoch(self) -> None:
        """Elect another leader and then the former leader, which gets both changes at once."""
        self._tell(self._miss_epoch())

    async def _miss_epoch(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or len(now.isr) < 3 or now.leader < 0:
            return
        first = now.leader
        second, third = (broker_id for broker_id in now.isr if broker_id != first)
        with self._held({(f"b{second}", f"b{first}")}):
            # The third broker has batches of the first broker that the second broker lacks.
            if not await self._until(
                lambda: (
                    self._end(third, place) > self._end(second, place)
                    and self._knows(first, place, third) > self._end(second, place)
                ),
                self.options.lag_ms // 2,
            ):
                return
            with self._held({(f"b{first}", "ct", str(FETCH))}):
                if not await self._elect(place, second):
                    return
                cut = await self._until(
                    lambda: self._end(third, place) <= self._end(second, place),
                    self.options.lag_ms // 3,
                )
                node = self._node(third).node
                if not cut or not node.is_up:
                    return
                node.paused_until_ms = self.scheduler.now + self.options.lag_ms // 2
                await self._elect(place, first)

    def _knows(self, leader: int, place: Place, follower: int) -> int:
        found = self._replica(leader, place)
        state = None if found is None else found.machine.replicas.get(follower)
        return -1 if state is None else state.log_end_offset

    def lead_in_turns(self) -> None:
        """Elect two brokers in turn that cannot reach each other; each appends as the leader."""
        self._tell(self._lead_in_turns())

    async def _lead_in_turns(self) -> None:
        place = self._place()
        now = self._registration(place)
        if now is None or len(now.isr) < 3:
            return
        names = [broker.node.name for broker in self.history.brokers]
        one, other = self.draw.sample(list(now.isr), 2)
        with self._held((client, server) for client in names for server in names):
            for leader in (one, other, one):
                if not await self._elect(place, leader):
                    return
                before = self._end(leader, place)
                appends = await self._until(
                    lambda leader=leader, before=before: self._end(leader, place) > before,
                    self.options.lag_ms // 4,
                )
                if not appends:
                    return

    # --- operators ---

    def move_coordinator(self) -> None:
        """Move a coordinator to another broker while the former one stays alive."""
        self._tell(self._move_coordinator())

    async def _move_coordinator(self) -> None:
        place = self._coordinated()
        now = self._registration(place)
        if now is not None and len(now.isr) > 1:
            first = self.draw.choice(
                [broker_id for broker_id in now.isr if broker_id != now.leader]
            )
            await self._elect(place, first)

    def forget_offsets(self) -> None:
        """Commit an offset for a topic, delete the topic and create it again."""
        self._tell(self.history.admin.commit_and_recreate(SHORT_LIVED, self.options.factor))
