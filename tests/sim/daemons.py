"""Simulated runs of a standalone broker, or of a controller and its brokers, from a seed.

Every broker and the controller run the whole daemon; clients send requests. Time, network and disk
are simulated.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.controller import metadata_log_reader
from fencepost.coordinator.metadata import log as metadata_log
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.logcore.marks import Marks
from tests.sim.cleanup import (
    BY_APPEND_TIME,
    CHECKS,
    CLEANER,
    COMPACTS,
    RETAIN,
    KeyedProducer,
    Retention,
    check_compacted,
)
from tests.sim.daemon import Daemon
from tests.sim.daemon_faults import (
    COORDINATORS,
    DOWN_MS,
    FAULTS,
    LOOK_MS,
    LOSING,
    LOSING_STORIES,
    OF_CLUSTERS,
    SHORT_LIVED,
    TOPIC,
)
from tests.sim.framed import GIVES_UP, FrameClient, Log, Producer, Promises, Reader, TxnProducer
from tests.sim.framed_admin import UNCLEAN, Admin
from tests.sim.framed_members import SETTINGS, ClassicMember, ConsumerMember, FramedMember
from tests.sim.invariants import BrokenInvariantError
from tests.sim.machine import Machines
from tests.sim.network import Network, Weather
from tests.sim.scheduler import Scheduler
from tests.sim.sockets import Wires
from tests.sim.stories import Stories
from tests.sim.watch import KEYED, Watch

START_MS: Final = 1_000
"""When the first clients start, and the first faults may occur."""
LIVELY_MS: Final = 1_500
"""How long clients continue to send requests after the last fault."""
CONVERGENCE_MS: Final = 30_000
WATCH_MS: Final = 10
WITH_RETENTION: Final = 0.1
"""The share of simulated runs in which retention deletes records."""
WITH_COMPACTION: Final = 0.1
"""The share of simulated runs with a compacted topic."""
CUT_MS: Final = 300
"""The interval of the controller's snapshot checks, with ``Options.snapshot_records``."""
ELECT_MS: Final = 3_000
"""The pause between two unclean elections at the end of a simulated run that loses records."""
ELR: Final = "eligible.leader.replicas.version"


@dataclass(frozen=True)
class Options:
    """The settings, faults and clients of one simulated run."""

    seed: int
    brokers: int
    """The number of brokers. A single broker is standalone; several brokers have a controller."""
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
    """For each member of the group: does it use the consumer protocol, and is it static?"""

    lag_ms: int = 1_000
    session_ms: int = 1_500
    elr: bool = False
    """Whether eligible leader replicas are kept (KIP-966)."""
    unclean: bool = False
    """``unclean.leader.election.enable``."""
    is_forced: bool = True
    """Whether a cluster with power losses flushes each append (``flush.messages=1``)."""
    transactional_members: float = 0.0
    """The share of members that commit in transactions."""
    outage_ms: int = DOWN_MS
    """The longest pause of a node, and the longest cut of the network."""
    in_flight: int = 5
    idempotent: float = 0.5
    """The share of idempotent producers."""
    gives_up: float = GIVES_UP
    """The probability that a transactional producer gets a new epoch instead of retrying."""
    acks: int | None = None
    """The acks of all producers that are not idempotent; with None each producer draws a value."""
    fetch_bytes: int = 1 << 20
    """``replica.fetch.max.bytes`` and ``replica.fetch.response.max.bytes``."""
    fetch_wait_ms: int = 200
    """``replica.fetch.wait.max.ms``, at most a quarter of :attr:`lag_ms`."""
    compacts: bool = False
    """Whether a producer writes to a topic that brokers compact."""
    snapshot_records: int | None = None
    """Number of records in the metadata log that causes a snapshot; None: as in the real daemon."""

    @property
    def loses(self) -> bool:
        """Whether acknowledged records may be lost."""
        losing = {*LOSING, *LOSING_STORIES, *(() if self.is_forced else ("power_loss",))}
        return self.is_cluster and not losing.isdisjoint(self.faults)

    @property
    def is_cluster(self) -> bool:
        """Whether there are several brokers, and a controller."""
        return self.brokers > 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all brokers and of the controller."""
        is_forced = "power_loss" in self.faults and (self.is_forced or not self.is_cluster)
        flushes = {"flush.messages": 1} if is_forced else {}
        return {
            "offsets.topic.num.partitions": COORDINATORS,
            "transaction.state.log.num.partitions": COORDINATORS,
            "log.index.size.max.bytes": 4_096,
            **SETTINGS,
            **(CHECKS if RETAIN in self.faults else {}),
            **(CLEANER if self.compacts else {}),
            **(flushes | self._of_cluster if self.is_cluster else flushes),
        }

    @property
    def _of_cluster(self) -> dict[str, Any]:
        return self._elects | {
            "offsets.topic.replication.factor": self.factor,
            "transaction.state.log.replication.factor": self.factor,
            "transaction.state.log.min.isr": self.min_isr,
            "min.insync.replicas": self.min_isr,
            "unclean.leader.election.enable": self.unclean,
            "replica.lag.time.max.ms": self.lag_ms,
            "replica.fetch.wait.max.ms": min(self.fetch_wait_ms, self.lag_ms // 4),
            "replica.fetch.max.bytes": self.fetch_bytes,
            "replica.fetch.response.max.bytes": self.fetch_bytes,
            "replica.socket.timeout.ms": 1_500,
            "controller.socket.timeout.ms": 1_500,
            "request.timeout.ms": 1_500,
        }

    @property
    def _elects(self) -> dict[str, Any]:
        """The settings that concern the controller."""
        return {
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "broker.heartbeat.interval.ms": self.session_ms // 5,
            "broker.session.timeout.ms": self.session_ms,
            "controller.quorum.request.timeout.ms": 1_500,
            "controller.quorum.fetch.timeout.ms": 1_500,
        }


def draw_options(seed: int) -> Options:
    """Draw the options of a seed."""
    draw = random.Random(f"daemons {seed}")
    brokers = draw.choice((1, 1, 2, 3))
    factor = min(brokers, draw.choice((1, 2, 3, 3)))
    is_cluster = brokers > 1
    options = Options(
        seed=seed,
        brokers=brokers,
        factor=factor,
        min_isr=min(factor, draw.choice((1, 2))),
        partitions=draw.choice((1, 2, 3)),
        weather=draw_weather(draw),
        disk_ms=draw.choice(((0, 0), (0, 3), (1, 30))),
        creep_ns=draw.choice((0, 0, 10_000)),
        faults=tuple(draw.sample(FAULTS + OF_CLUSTERS * is_cluster, draw.choice((1, 2, 4)))),
        fault_pause_ms=draw.choice((200, 500, 1_000)),
        chaos_ms=draw.choice((2_000, 4_000)),
        producers=draw.choice((1, 2, 3)),
        transactions=draw.choice((0, 1, 2)),
        readers=draw.choice((1, 2)),
        members=draw_members(draw),
        lag_ms=draw.choice((500, 1_000, 2_000)),
        session_ms=draw.choice((900, 1_500)),
        elr=draw.random() < 0.4 and is_cluster,
        outage_ms=draw.choice((DOWN_MS, 2_500)),
        snapshot_records=draw.choice((None, 5)),
        transactional_members=draw.choice((0.0, 0.0, 0.5, 1.0)),
    )
    # A separate generator keeps the other options of each seed unchanged.
    cleanup = random.Random(f"daemons cleanup {seed}")
    if cleanup.random() < WITH_RETENTION:
        options = replace(options, faults=(*options.faults, RETAIN))
    options = replace(options, compacts=cleanup.random() < WITH_COMPACTION)
    if is_cluster and draw.random() < 0.25:
        # A lost record may belong to a transaction or be a commit of offsets, so there are neither.
        losing = draw.choice((*LOSING, "power_loss"))
        return replace(
            options,
            faults=(*options.faults, losing),
            unclean=draw.random() < 0.5,
            is_forced=losing != "power_loss",
            transactions=0,
            members=(),
            compacts=False,
        )
    return options


def draw_weather(draw: random.Random) -> Weather:
    """Draw the quality of the network."""
    is_bad = draw.random() < 0.5
    latency_ms = draw.choice(((1, 3), (1, 10), (5, 40)))
    lost = draw.choice((0.0, 0.005, 0.03)) if is_bad else 0.0
    draw.choice((0.0, 0.05, 0.3))  # unused; keeps the later options of each seed unchanged
    return Weather(
        latency_ms=latency_ms,
        lost=lost,
        slow=draw.choice((0.0, 0.01, 0.05)) if is_bad else 0.0,
        slow_ms=draw.choice((200, 1_500)),
    )


def draw_members(draw: random.Random) -> tuple[tuple[bool, bool], ...]:
    """Draw the members of a group, which may have one protocol, both, or no members."""
    share, static = draw.choice((0.0, 1.0, 0.5)), draw.choice((0.0, 0.0, 0.5))
    count = draw.choice((0, 1, 2, 3))
    return tuple((draw.random() < share, draw.random() < static) for _ in range(count))


@dataclass(frozen=True)
class Result:
    """The outcome of a simulated run."""

    seed: int
    digest: str
    steps: int
    acknowledged: int
    transactions: int
    """The number of committed transactions."""
    converged_ms: int


class History:
    """One simulated run: its daemons, clients and faults."""

    start_ms, lively_ms = START_MS, LIVELY_MS

    def __init__(self, options: Options, told: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.scheduler = Scheduler(options.seed, told)
        self.draw = self.scheduler.draw
        self.network = Network(self.scheduler, options.weather)
        self.wires = Wires(self.network)
        self.machines = Machines(self.scheduler, options.creep_ns)
        if options.snapshot_records is not None:
            self.machines.changes += (
                (metadata_log, "COMPACT_FACTOR", 0),
                (metadata_log, "COMPACT_SLACK_RECORDS", options.snapshot_records),
                (metadata_log_reader, "CUT_MS", CUT_MS),
            )
        self.machines.changes += (
            (Marks, "move_high_watermark", self._watched(Marks.move_high_watermark)),
        )
        self.failures = self.machines.failures
        self.controller: Daemon | None = None
        self.brokers: list[Daemon] = []
        self._make_daemons()
        self.promises = Promises()
        unforced = {HISTORY_TOPIC} if "power_loss" in options.faults else set[str]()
        self.watch = self._watch(frozenset(unforced))
        self.promises.partitions = options.partitions
        self.clients: list[FrameClient] = []
        self.admin: Admin
        self.promises.is_void = self._is_void
        self.retention = Retention(self.promises, loses=options.loses)
        self.promises.look_at_starts = self._look_at_starts
        self.faults = self._faults()
        self.scheduler.after_step = self._check

    def _watch(self, unforced: frozenset[str]) -> Watch:
        return Watch(unforced)

    def _faults(self) -> Stories:
        return Stories(self)

    def _make_daemons(self) -> None:
        joins = self._joins() if self.options.is_cluster else {}
        for number in range(1, self.options.brokers + 1):
            host = self.wires.host_of(self.network.add(f"b{number}"))
            broker = self._daemon(
                f"b{number}", number, joins | {"listeners": f"PLAINTEXT://{host}:9092"}
            )
            self.brokers.append(broker)

    def _joins(self) -> dict[str, Any]:
        """Create the controller; return the settings with which brokers join it."""
        host = self.wires.host_of(self.network.add("ct"))
        joins = {"controller.quorum.bootstrap.servers": f"{host}:9093"}
        self.controller = self._daemon(
            "ct",
            100,
            joins | {"process.roles": "controller", "listeners": f"CONTROLLER://{host}:9093"},
        )
        return joins | {"process.roles": "broker"}

    def _daemon(self, name: str, node_id: int, settings: dict[str, Any]) -> Daemon:
        config = {"node.id": node_id, **self.options.settings, **settings}
        return Daemon(self.wires, self.network.nodes[name], config, self.options.disk_ms)

    @property
    def daemons(self) -> list[Daemon]:
        """The controller, if there is one, and then the brokers."""
        return [*([] if self.controller is None else [self.controller]), *self.brokers]

    @property
    def image(self) -> MetadataImage | None:
        """The controller's metadata image while it serves, otherwise None."""
        services = None if self.controller is None else self.controller.services
        return None if services is None else services.metadata.image

    @property
    def has_unforced_image(self) -> bool:
        """Whether the controller's image has records that no broker sees yet.

        These records are lost if the controller loses power.
        """
        services = None if self.controller is None else self.controller.services
        if services is None:
            return False
        log = services.storage.metadata_log.partition
        return log.recovery_point < log.log_end_offset

    def _look(self) -> None:
        """Check the invariants of all brokers now, and repeat this every ``WATCH_MS``."""
        self._look_now()
        self._look_at_starts()
        self.scheduler.after(WATCH_MS, self._look)

    def _look_now(self) -> None:
        self.watch.look(self.image, self.brokers)

    def _look_at_starts(self) -> None:
        if RETAIN in self.options.faults:
            self.retention.look(self.brokers, self.scheduler.now)

    def _watched(self, move: Callable[[Marks, int], None]) -> Callable[[Marks, int], None]:
        def moved(marks: Marks, offset: int) -> None:
            move(marks, offset)
            self.watch.high_watermark_moved(marks.name, offset)

        return moved

    def _acknowledged(self, place: tuple[str, int], end: int) -> None:
        self._look_now()
        self.watch.acknowledged(place, end)

    def _check(self) -> None:
        if self.failures:
            raise BrokenInvariantError("; ".join(self.failures))

    def _client(self, kind: Any, name: str, **options: Any) -> Any:
        made = kind(
            self.wires,
            name,
            [broker.address for broker in self.brokers],
            self.failures.append,
            **options,
        )
        self.clients.append(made)
        return made

    @property
    def _recreates(self) -> bool:
        return not {"recreate", "forget_offsets"}.isdisjoint(self.options.faults)

    def _is_void(self, place: tuple[str, int]) -> bool:
        """Return whether a partition may have lost acknowledged records."""
        self._look_now()
        return place in self.watch.void

    # --- a history ---

    def run(self) -> Result:
        """Run the simulation, with all checks."""
        options, scheduler = self.options, self.scheduler
        scheduler.say("--", str(options))
        self._start_all()
        if options.is_cluster:
            self._look()
            if options.factor > 1:
                # A leader without followers has no state machine with a high watermark.
                self.promises.acknowledged = self._acknowledged
            for daemon in self.daemons:
                daemon.before_end = self._look_now
        self.admin = self._client(Admin, "admin")
        self.admin.spawn(self._make_topic())
        scheduler.run(self.start_ms)
        self._add_clients()
        self._warm_up()
        self.faults.begin()
        scheduler.run(scheduler.now + options.chaos_ms)
        self._heal()
        healed_ms = scheduler.now
        scheduler.run(healed_ms + self.lively_ms)
        for client in self.clients:
            client.is_stopped = True
        converged_ms = self._converge(healed_ms)
        self._judge()
        return Result(
            options.seed,
            scheduler.trace.digest,
            scheduler.steps,
            sum(client.acknowledged for client in self.clients if isinstance(client, Producer)),
            sum(client.committed for client in self.clients if isinstance(client, TxnProducer)),
            converged_ms,
        )

    def _warm_up(self) -> None:
        """Wait before the first fault; by default the faults begin at once."""

    async def _make_topic(self) -> None:
        if self.options.elr:
            await self.admin.enable(ELR)
        settings = BY_APPEND_TIME if RETAIN in self.options.faults else {}
        await self.admin.create(TOPIC, self.options.partitions, self.options.factor, settings)
        if self.options.compacts:
            await self.admin.create(KEYED, 1, self.options.factor, COMPACTS)
        if self._recreates:
            await self.admin.create(SHORT_LIVED, 1, self.options.factor)

    def _add_clients(self) -> None:
        options, draw, promises = self.options, self.draw, self.promises
        places = [(TOPIC, index) for index in range(options.partitions)]
        for number in range(options.producers):
            is_idempotent = draw.random() < options.idempotent and not options.loses
            self._client(
                Producer,
                f"p{number}",
                place=draw.choice(places),
                promises=promises,
                acks=draw.choice((-1, -1, 1, 0) if options.acks is None else (options.acks,)),
                is_promised=not options.is_cluster,
                is_idempotent=is_idempotent,
                in_flight=draw.choice((1, options.in_flight)) if is_idempotent else 1,
                pause_ms=draw.choice((30, 80, 200)),
            )
        for number in range(options.transactions):
            self._client(
                TxnProducer,
                f"x{number}",
                places=places,
                promises=promises,
                gives_up=options.gives_up,
            )
        for number in range(options.readers):
            self._client(
                Reader,
                f"c{number}",
                place=places[number % len(places)],
                promises=promises,
                committed=draw.random() < 0.5,
                nodes=range(1, options.brokers + 1) if draw.random() < 0.5 else (),
            )
        if self._recreates:
            # The topic may be missing at the end: a delayed DeleteTopics may take effect last.
            self._client(
                Producer,
                "px",
                place=(SHORT_LIVED, 0),
                promises=promises,
                acks=1,
                is_promised=False,
                is_idempotent=False,
                in_flight=1,
                pause_ms=50,
            ).is_awaited = False
        if options.compacts:
            self._add_keyed_clients()
        for number, (is_consumer, is_static) in enumerate(options.members):
            self._client(
                ConsumerMember if is_consumer else ClassicMember,
                f"m{number}",
                topic=TOPIC,
                promises=promises,
                instance=f"i{number}" if is_static else None,
                is_transactional=draw.random() < options.transactional_members,
            )
        for member in self.members:
            member.others = self.members
            member.has_generations = not any(is_consumer for is_consumer, _ in options.members)
        for client in self.clients[1:]:
            client.begin()

    def _add_keyed_clients(self) -> None:
        place, promises = (KEYED, 0), self.promises
        self._client(
            KeyedProducer,
            "pk",
            place=place,
            promises=promises,
            acks=-1,
            is_idempotent=False,
            in_flight=1,
            pause_ms=40,
        )
        self._client(Reader, "ck", place=place, promises=promises, committed=False)

    @property
    def members(self) -> list[FramedMember]:
        """The members of the group."""
        return [client for client in self.clients if isinstance(client, FramedMember)]

    def _start_all(self) -> None:
        for daemon in self.daemons:
            daemon.start()

    def _heal(self) -> None:
        self.faults.heal()
        self.network.cut.clear()
        self.network.weather = Weather()
        self._start_all()

    # --- the end ---

    def _converge(self, healed_ms: int) -> int:
        waiting: list[str] = []
        while self.scheduler.now < healed_ms + CONVERGENCE_MS:
            self.scheduler.run(self.scheduler.now + LOOK_MS)
            self._start_all()
            if self.options.loses and self.scheduler.now % ELECT_MS < LOOK_MS:
                # Without an eligible replica a partition has no leader until this election.
                self.admin.spawn(self.admin.elect_leaders(UNCLEAN))
            waiting = [
                f"{client.name} waits: {client.waits_for}"
                for client in self.clients[1:]
                if not client.is_done and not isinstance(client, FramedMember) and client.is_awaited
            ]
            waiting += self._unsettled()
            waiting += self.watch.differences(self.image, self.brokers)
            if not waiting and all(daemon.is_serving for daemon in self.daemons):
                return self.scheduler.now - healed_ms
        raise BrokenInvariantError(f"{CONVERGENCE_MS / 1000} s after the last fault: {waiting}")

    def _unsettled(self) -> list[str]:
        """Return the reasons why some partitions do not have exactly one owner in the group yet."""
        members = self.members
        wrong = [
            f"{member.name} is not at work: {member.waits_for}"
            for member in members
            if not member.is_working
        ]
        owned = sorted(index for member in members for index in member.owned)
        if members and owned != list(range(self.promises.partitions)):
            wrong.append(f"the members read {owned}")
        return wrong

    def _judge(self) -> None:
        """Read all partitions, and compare them with the clients' acknowledgements."""
        judge = self._client(Admin, "judge")
        logs: dict[bool, dict[tuple[str, int], dict[int, str]]] = {False: {}, True: {}}
        compacted: Log = {}
        done: list[bool] = []

        async def read_all() -> None:
            for committed, found in logs.items():
                for index in range(self.promises.partitions):
                    place = TOPIC, index
                    found[place] = await self._read(judge, place, committed=committed)
            if self.options.compacts:
                compacted.update(await self._read(judge, (KEYED, 0), committed=False))
            done.append(True)

        judge.spawn(read_all())
        until_ms = self.scheduler.now + CONVERGENCE_MS
        while not done and self.scheduler.now < until_ms:
            self.scheduler.run(self.scheduler.now + LOOK_MS)
        if not done:
            raise BrokenInvariantError("the logs cannot be read")
        self._look_at_starts()
        check_compacted(self.promises, (KEYED, 0), compacted)
        judge_logs(self.promises, logs[False], logs[True], self.watch.void)

    async def _read(
        self, judge: Admin, place: tuple[str, int], *, committed: bool
    ) -> dict[int, str]:
        """Read a whole partition; return its values by offset."""
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
        """End all nodes, and the tasks of all daemons and clients."""
        for node in self.network.nodes.values():
            node.end()
        for daemon in (*self.daemons, *self.clients):
            daemon.end()


def judge_logs(
    promises: Promises,
    logs: dict[tuple[str, int], dict[int, str]],
    committed: dict[tuple[str, int], dict[int, str]],
    void: set[tuple[str, int]],
) -> None:
    """Compare acknowledgements with logs, except in partitions that may have lost records."""
    for place, log in logs.items():
        if place in void:
            continue
        low = promises.deleted.get(place, 0)
        for offset, values in promises.appended.get(place, {}).items():
            for at, value in enumerate(values, offset):
                if at >= low and log.get(at) != value:
                    raise BrokenInvariantError(
                        f"{place}: {value} was acknowledged at {at}, where {log.get(at)} is"
                    )
        for given, kept in ((promises.read, log), (promises.read_committed, committed[place])):
            for at, value in given.get(place, {}).items():
                if at >= low and kept.get(at) != value:
                    raise BrokenInvariantError(
                        f"{place}: {value} was read at {at}, where {kept.get(at)} is"
                    )
        for name, sent in promises.in_order.items():
            of_producer = [log[at] for at in sorted(log) if log[at].startswith(f"{name}:")]
            # Batches that were resent in another epoch may be duplicated.
            again = Counter(of_producer) - Counter(dict.fromkeys(of_producer, 1))
            there = [*dict.fromkeys(of_producer)]
            is_in_order = not there or there == sent[len(sent) - len(there) :]
            if not (is_in_order and again.keys() <= promises.doubtful) and not low:
                raise BrokenInvariantError(
                    f"{place}: {name} sent {sent}, and {of_producer} is there"
                )
    seen = {place: set(log.values()) for place, log in committed.items()}
    deleted = {
        value
        for place, appended in promises.appended.items()
        for offset, values in appended.items()
        for at, value in enumerate(values, offset)
        if at < promises.deleted.get(place, 0)
    }
    for transaction in promises.transactions:
        transaction.check(seen, deleted)


def play(seed: int, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of a seed; a failure raises, with the last events in its notes."""
    return live(draw_options(seed), told)


def live(options: Options, told: Callable[[str], None] | None = None) -> Result:
    """Run the simulation of these options; see :func:`play`."""
    return played(History(options, told), f"make sim WORLD=daemons SEED={options.seed} N=1")


def played(history: History, repeat: str) -> Result:
    """Run a simulation; a failure has the last events and ``repeat`` in its notes."""
    with history.machines.in_place():
        try:
            with history.scheduler.explained(history.options, repeat):
                return history.run()
        finally:
            history.close()
