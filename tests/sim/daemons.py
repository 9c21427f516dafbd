"""A broker that stands alone, or a controller and its brokers, with clients, from a seed.

All of them are the whole daemon; time, network and disk are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from tests.sim.daemon import Daemon
from tests.sim.framed import Admin, FrameClient, Producer, Promises, Reader, TxnProducer
from tests.sim.framed_members import SETTINGS, ClassicMember, ConsumerMember, FramedMember
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import Machines
from tests.sim.network import Network, Weather
from tests.sim.scheduler import Scheduler
from tests.sim.sockets import Wires
from tests.sim.swarm import draw_weather
from tests.sim.watch import Watch

TOPIC: Final = "t"
START_MS: Final = 1_000
"""Until then nothing goes wrong."""
LIVELY_MS: Final = 1_500
"""Clients go on so long after the last fault."""
CONVERGENCE_MS: Final = 30_000
WATCH_MS: Final = 10
LOOK_MS: Final = 100
MOST_PARTITIONS: Final = 5
DOWN_MS: Final = 800

OF_CLUSTERS: Final = ("reassign", "call_off", "elect_preferred")
"""Added to the faults of clusters."""

FAULTS: Final = (
    "kill",
    "power_loss",
    "stop",
    "pause",
    "break_off",
    "cut",
    "grow",
    "delete_records",
)


@dataclass(frozen=True)
class Options:
    """One history's settings, faults and clients."""

    seed: int
    brokers: int
    """1: one that stands alone; more have a controller."""
    factor: int
    min_isr: int
    partitions: int
    weather: Weather
    disk_ms: tuple[int, int]
    creep_ns: int
    faults: tuple[str, ...]
    fault_pause_ms: int
    chaos_ms: int
    producers: int
    transactions: int
    readers: int
    members: tuple[tuple[bool, bool], ...]
    """Of a group: whether each is of the consumer protocol, and whether it is static."""

    lag_ms: int = 1_000
    session_ms: int = 1_500

    @property
    def is_cluster(self) -> bool:
        """Whether there is a controller."""
        return self.brokers > 1

    @property
    def settings(self) -> dict[str, Any]:
        """Those of all brokers, and of the controller."""
        flushes = {"flush.messages": 1} if "power_loss" in self.faults else {}
        return {
            "offsets.topic.num.partitions": 2,
            "transaction.state.log.num.partitions": 2,
            "log.index.size.max.bytes": 4_096,
            **SETTINGS,
            **(flushes | self._of_cluster if self.is_cluster else flushes),
        }

    @property
    def _of_cluster(self) -> dict[str, Any]:
        return {
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "offsets.topic.replication.factor": self.factor,
            "transaction.state.log.replication.factor": self.factor,
            "transaction.state.log.min.isr": self.min_isr,
            "min.insync.replicas": self.min_isr,
            "broker.heartbeat.interval.ms": self.session_ms // 5,
            "broker.session.timeout.ms": self.session_ms,
            "replica.lag.time.max.ms": self.lag_ms,
            "replica.fetch.wait.max.ms": min(200, self.lag_ms // 4),
            "replica.socket.timeout.ms": 1_500,
            "controller.socket.timeout.ms": 1_500,
            "controller.quorum.request.timeout.ms": 1_500,
            "controller.quorum.fetch.timeout.ms": 1_500,
            "request.timeout.ms": 1_500,
        }


def draw_options(seed: int) -> Options:
    """Draw the options of a seed."""
    draw = random.Random(f"daemons {seed}")
    brokers = draw.choice((1, 1, 2, 3))
    factor = min(brokers, draw.choice((1, 2, 3, 3)))
    return Options(
        seed=seed,
        brokers=brokers,
        factor=factor,
        min_isr=min(factor, draw.choice((1, 2))),
        partitions=draw.choice((1, 2, 3)),
        weather=draw_weather(draw),
        disk_ms=draw.choice(((0, 0), (0, 3), (1, 30))),
        creep_ns=draw.choice((0, 0, 10_000)),
        faults=tuple(draw.sample(FAULTS + OF_CLUSTERS * (brokers > 1), draw.choice((1, 2, 4)))),
        fault_pause_ms=draw.choice((200, 500, 1_000)),
        chaos_ms=draw.choice((2_000, 4_000)),
        producers=draw.choice((1, 2, 3)),
        transactions=draw.choice((0, 1, 2)),
        readers=draw.choice((1, 2)),
        members=draw_members(draw),
        lag_ms=draw.choice((500, 1_000, 2_000)),
        session_ms=draw.choice((900, 1_500)),
    )


def draw_members(draw: random.Random) -> tuple[tuple[bool, bool], ...]:
    """A group of one protocol, of both, or none."""
    share, static = draw.choice((0.0, 1.0, 0.5)), draw.choice((0.0, 0.0, 0.5))
    count = draw.choice((0, 1, 2, 3))
    return tuple((draw.random() < share, draw.random() < static) for _ in range(count))


@dataclass(frozen=True)
class Result:
    """The outcome of a history."""

    seed: int
    digest: str
    steps: int
    acknowledged: int
    transactions: int
    """Committed."""
    converged_ms: int


class History:
    """The history."""

    def __init__(self, options: Options, told: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.scheduler = Scheduler(options.seed, told)
        self.draw = self.scheduler.draw
        self.network = Network(self.scheduler, options.weather)
        self.wires = Wires(self.network)
        self.machines = Machines(self.scheduler, options.creep_ns)
        self.failures = self.machines.failures
        self.controller: Daemon | None = None
        self.brokers: list[Daemon] = []
        self._make_daemons()
        self.promises = Promises()
        unforced = {HISTORY_TOPIC} if "power_loss" in options.faults else set[str]()
        self.watch = Watch(frozenset(unforced))
        self.promises.partitions = options.partitions
        self.clients: list[FrameClient] = []
        self.admin: Admin
        self.is_healed = False
        self.scheduler.after_step = self._check

    def _make_daemons(self) -> None:
        options = self.options
        joins: dict[str, Any] = {}
        if options.is_cluster:
            host = self.wires.host_of(self.network.add("ct"))
            joins["controller.quorum.bootstrap.servers"] = f"{host}:9093"
            self.controller = self._daemon(
                "ct",
                100,
                joins | {"process.roles": "controller", "listeners": f"CONTROLLER://{host}:9093"},
            )
            joins["process.roles"] = "broker"
        for number in range(1, options.brokers + 1):
            host = self.wires.host_of(self.network.add(f"b{number}"))
            one = self._daemon(
                f"b{number}", number, joins | {"listeners": f"PLAINTEXT://{host}:9092"}
            )
            self.brokers.append(one)

    def _daemon(self, name: str, node_id: int, settings: dict[str, Any]) -> Daemon:
        config = {"node.id": node_id, **self.options.settings, **settings}
        return Daemon(self.wires, self.network.nodes[name], config, self.options.disk_ms)

    @property
    def daemons(self) -> list[Daemon]:
        """All of them."""
        return [*([] if self.controller is None else [self.controller]), *self.brokers]

    def _look(self) -> None:
        """Look at all brokers, now and again and again."""
        self.watch.look(self.controller, self.brokers)
        self.scheduler.after(WATCH_MS, self._look)

    def _check(self) -> None:
        if self.failures:
            raise BrokenInvariantError("; ".join(self.failures))

    def _client(self, kind: Any, name: str, **options: Any) -> Any:
        made = kind(
            self.wires, name, [one.address for one in self.brokers], self.failures.append, **options
        )
        self.clients.append(made)
        return made

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self.admin.spawn(work)

    # --- a history ---

    def run(self) -> Result:
        """Live it, with all checks."""
        options, scheduler = self.options, self.scheduler
        scheduler.say("--", str(options))
        self._start_all()
        if options.is_cluster:
            self._look()
        self.admin = self._client(Admin, "admin")
        self._do(self.admin.create(TOPIC, options.partitions, options.factor))
        scheduler.run(START_MS)
        self._add_clients()
        scheduler.after(self.draw.randint(1, options.fault_pause_ms), self._fault)
        scheduler.run(START_MS + options.chaos_ms)
        self._heal()
        healed_ms = scheduler.now
        scheduler.run(healed_ms + LIVELY_MS)
        for one in self.clients:
            one.is_stopped = True
        converged_ms = self._converge(healed_ms)
        self._judge()
        return Result(
            options.seed,
            scheduler.trace.digest,
            scheduler.steps,
            sum(one.acknowledged for one in self.clients if isinstance(one, Producer)),
            sum(one.committed for one in self.clients if isinstance(one, TxnProducer)),
            converged_ms,
        )

    def _add_clients(self) -> None:
        options, draw, promises = self.options, self.draw, self.promises
        places = [(TOPIC, index) for index in range(options.partitions)]
        for number in range(options.producers):
            is_idempotent = draw.random() < 0.5
            self._client(
                Producer,
                f"p{number}",
                place=draw.choice(places),
                promises=promises,
                acks=draw.choice((-1, -1, 1, 0)),
                is_promised=not options.is_cluster,
                is_idempotent=is_idempotent,
                in_flight=draw.choice((1, 5)) if is_idempotent else 1,
                pause_ms=draw.choice((30, 80, 200)),
            )
        for number in range(options.transactions):
            self._client(TxnProducer, f"x{number}", places=places, promises=promises)
        for number in range(options.readers):
            self._client(
                Reader,
                f"c{number}",
                place=places[number % len(places)],
                promises=promises,
                committed=draw.random() < 0.5,
            )
        for number, (is_consumer, is_static) in enumerate(options.members):
            self._client(
                ConsumerMember if is_consumer else ClassicMember,
                f"m{number}",
                topic=TOPIC,
                promises=promises,
                instance=f"i{number}" if is_static else None,
            )
        for one in self.clients[1:]:
            one.begin()

    @property
    def members(self) -> list[FramedMember]:
        """Of the group."""
        return [one for one in self.clients if isinstance(one, FramedMember)]

    # --- faults ---

    def _fault(self) -> None:
        if self.is_healed:
            return
        name = self.draw.choice(self.options.faults)
        getattr(self, f"_{name}")()
        pause_ms = self.draw.randint(1, 2 * self.options.fault_pause_ms)
        self.scheduler.after(pause_ms, self._fault)

    def _start_all(self) -> None:
        for one in self.daemons:
            one.start()

    def _one(self) -> Daemon:
        return self.draw.choice(self.daemons)

    def _back(self, one: Daemon) -> None:
        self.scheduler.after(self.draw.randint(1, DOWN_MS), one.start)

    def _kill(self) -> None:
        one = self._one()
        one.kill()
        self._back(one)

    def _power_loss(self) -> None:
        one = self._one()
        one.kill(power_loss=True)
        self._back(one)

    def _stop(self) -> None:
        one = self._one()
        one.stop()
        self._wait_for_stop(one)

    def _wait_for_stop(self, one: Daemon) -> None:
        if one.is_stopping and one.node.is_up:
            self.scheduler.after(LOOK_MS, self._wait_for_stop, one)
        else:
            self._back(one)

    def _pause(self) -> None:
        node = self._one().node
        if node.is_up and not node.paused_until_ms:
            node.say("is frozen")
            node.paused_until_ms = self.scheduler.now + self.draw.randint(1, DOWN_MS)

    def _break_off(self) -> None:
        node = self._one().node
        node.say(f"loses {self.wires.break_some(node)} connections")

    def _cut(self) -> None:
        one = self._one().node.name
        other = self.draw.choice([name for name in sorted(self.network.nodes) if name != one])
        way = self.draw.choice(((one, other), (other, one)))
        self.network.cut.add(way)
        self.scheduler.say("--", f"nothing comes from {way[0]} to {way[1]}")
        self.scheduler.after(self.draw.randint(1, DOWN_MS), self.network.cut.discard, way)

    def _grow(self) -> None:
        if self.promises.partitions < MOST_PARTITIONS:
            self._do(self.admin.grow(TOPIC, self.promises))

    def _place(self) -> tuple[str, int]:
        return TOPIC, self.draw.randrange(self.promises.partitions)

    def _reassign(self) -> None:
        replicas = self.draw.sample(range(1, self.options.brokers + 1), self.options.factor)
        self._do(self.admin.reassign(self._place(), replicas))

    def _call_off(self) -> None:
        self._do(self.admin.reassign(self._place(), None))

    def _elect_preferred(self) -> None:
        self._do(self.admin.elect_preferred())

    def _delete_records(self) -> None:
        places = sorted(self.promises.appended)
        if places:
            place = self.draw.choice(places)
            offset = self.draw.choice(sorted(self.promises.appended[place]))
            self._do(self.admin.delete_records(self.promises, place, offset))

    def _heal(self) -> None:
        self.is_healed = True
        self.network.cut.clear()
        self.network.weather = Weather()
        self._start_all()

    # --- the end ---

    def _converge(self, healed_ms: int) -> int:
        waiting: list[str] = []
        while self.scheduler.now < healed_ms + CONVERGENCE_MS:
            self.scheduler.run(self.scheduler.now + LOOK_MS)
            self._start_all()
            waiting = [
                f"{one.name} waits: {one.waits_for}"
                for one in self.clients[1:]
                if not one.is_done and not isinstance(one, FramedMember)
            ]
            waiting += self._unsettled()
            waiting += self.watch.differences(self.controller, self.brokers)
            if not waiting and all(one.is_serving for one in self.daemons):
                return self.scheduler.now - healed_ms
        raise BrokenInvariantError(f"{CONVERGENCE_MS / 1000} s after the last fault: {waiting}")

    def _unsettled(self) -> list[str]:
        """List the reasons why the group is not stable, with a reader for each partition."""
        members = self.members
        wrong = [
            f"{one.name} is not at work: {one.waits_for}" for one in members if not one.is_working
        ]
        owned = sorted(index for one in members for index in one.owned)
        if members and owned != list(range(self.promises.partitions)):
            wrong.append(f"the members read {owned}")
        return wrong

    def _judge(self) -> None:
        """Read everything, and compare."""
        judge = self._client(Admin, "judge")
        logs: dict[bool, dict[tuple[str, int], dict[int, str]]] = {False: {}, True: {}}
        done: list[bool] = []

        async def read_all() -> None:
            for committed, found in logs.items():
                for index in range(self.promises.partitions):
                    place = TOPIC, index
                    found[place] = await self._read(judge, place, committed=committed)
            done.append(True)

        judge.spawn(read_all())
        until_ms = self.scheduler.now + CONVERGENCE_MS
        while not done and self.scheduler.now < until_ms:
            self.scheduler.run(self.scheduler.now + LOOK_MS)
        if not done:
            raise BrokenInvariantError("the logs cannot be read")
        judge_logs(self.promises, logs[False], logs[True])

    async def _read(
        self, judge: Admin, place: tuple[str, int], *, committed: bool
    ) -> dict[int, str]:
        """A whole partition."""
        found: dict[int, str] = {}
        offset, in_vain = 0, 0
        while in_vain < 3:
            answer = await judge.fetch(place, offset, committed=committed)
            if answer is None:
                continue
            code, rows, after = answer
            if code == ErrorCode.offset_out_of_range:
                offset += 1
                continue
            found.update(rows)
            in_vain = 0 if after > offset else in_vain + 1
            offset = after
        return found

    def close(self) -> None:
        """Let go of everything."""
        for node in self.network.nodes.values():
            node.end()
        for one in (*self.daemons, *self.clients):
            one.end()


def judge_logs(
    promises: Promises,
    logs: dict[tuple[str, int], dict[int, str]],
    committed: dict[tuple[str, int], dict[int, str]],
) -> None:
    """Compare promises with logs."""
    for place, log in logs.items():
        low = promises.deleted.get(place, 0)
        for offset, values in promises.appended.get(place, {}).items():
            for at, value in enumerate(values, offset):
                if at >= low and log.get(at) != value:
                    raise BrokenInvariantError(
                        f"{place}: {value} was acknowledged at {at}, where {log.get(at)} is"
                    )
        for at, value in promises.read.get(place, {}).items():
            if at >= low and log.get(at) != value:
                raise BrokenInvariantError(f"{place}: {value} was read at {at}, not {log.get(at)}")
        for name, sent in promises.in_order.items():
            there = [log[at] for at in sorted(log) if log[at].startswith(f"{name}:")]
            if there and there != sent[len(sent) - len(there) :] and not low:
                raise BrokenInvariantError(f"{place}: {name} sent {sent}, and {there} is there")
    seen = {place: set(log.values()) for place, log in committed.items()}
    cut = any(promises.deleted.values())
    for one in promises.transactions:
        if not cut:
            one.check(seen)


def play(seed: int, told: Callable[[str], None] | None = None) -> Result:
    """Live through the history of a seed. Raises the failure, with the last events in its notes."""
    return live(draw_options(seed), told)


def live(options: Options, told: Callable[[str], None] | None = None) -> Result:
    """The same for options that no seed has drawn."""
    history = History(options, told)
    repeat = f"make sim WORLD=daemons SEED={options.seed} N=1"
    with history.machines.in_place():
        try:
            with history.scheduler.explained(options, repeat):
                return history.run()
        finally:
            history.close()
