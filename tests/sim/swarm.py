"""What a seed decides before a history begins: settings, faults, clients."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.sim.network import Weather
from tests.sim.process import BrokerOptions

FAULTS: Final = (
    "kill",
    "power_loss",
    "clean_stop",
    "pause",
    "cut",
    "isolate",
    "clock_jump",
    "controller_restart",
    "reassign",
    "cancel",
    "preferred",
    "recreate",
    "add_partitions",
    "flap",
    "flip",
    "delete_records",
    "deaf",
    "new_producer",
    "lose_disk",
    "reboot",
    "half_cut",
    "alter_config",
    "unheard",
)
"""Names of the methods of :class:`tests.sim.faults.Faults`."""

LOSING: Final = frozenset({"power_loss", "lose_disk", "reboot", "recreate", "delete_records"})
"""Those by which records may go for good."""

TOGETHER: Final[tuple[tuple[str, ...], ...]] = (
    ("lose_disk", "power_loss", "deaf"),
    ("reboot",),
    ("reboot", "pause"),
    ("reboot", "deaf", "flap"),
    ("half_cut", "flap"),
    ("flap",),
    ("flap", "new_producer", "kill"),
    ("flip", "new_producer"),
    ("flip", "deaf", "cut"),
    ("flip", "deaf", "pause", "deaf"),
    ("flip", "kill", "pause"),
    ("flap", "cut", "pause", "isolate"),
    ("flap", "deaf", "cut", "controller_restart"),
    ("reassign", "cancel", "preferred", "add_partitions", "pause"),
    ("recreate", "deaf", "add_partitions", "kill"),
    ("delete_records", "flip", "kill", "isolate"),
    ("unheard", "deaf"),
    ("alter_config", "kill", "isolate", "controller_restart"),
)
"""Faults that lead to rare places only with each other."""


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """One producer."""

    index: int
    acks: int
    is_idempotent: bool
    max_in_flight: int
    pause_ms: int


@dataclass(frozen=True, slots=True)
class Options:
    """One history."""

    seed: int
    brokers: int
    replication_factor: int
    partitions: int
    broker: BrokerOptions
    elr: bool
    unclean: bool
    """``unclean.leader.election.enable``."""
    weather: Weather
    faults: tuple[str, ...]
    fault_pause_ms: int
    """Mean time between two faults."""
    chaos_ms: int
    producers: tuple[ProducerOptions, ...]
    transactions: int
    """Producers of transactions."""
    consumers: tuple[bool, ...]
    """One each; whether it reads from followers."""
    members: tuple[bool, ...] = ()
    """Of a group; whether they commit in transactions."""
    snapshot_records: int = 0
    """So many records in the metadata log make the controller cut it; 0: never."""
    consumer_protocol: bool = False
    """Whether the group is of the consumer protocol (KIP-848), not of the classic one."""
    features: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {
            "metadata.version": (7, 30),
            "eligible.leader.replicas.version": (0, 1),
        }
    )

    @property
    def has_transactions(self) -> bool:
        """Whether anybody has."""
        return self.transactions > 0 or any(self.members)

    def __str__(self) -> str:
        settings = (
            f"{self.brokers} brokers, {self.partitions} partitions of"
            f" {self.replication_factor} replicas, min ISR {self.broker.min_isr}"
        )
        if self.elr:
            settings += ", ELR"
        if self.unclean:
            settings += ", unclean elections"
        if self.members:
            kind = "consumer" if self.consumer_protocol else "classic"
            settings += f", a {kind} group of {len(self.members)}"
        return f"{settings}, faults {', '.join(self.faults) or 'none'}"


def draw_options(seed: int) -> Options:
    """What a seed decides."""
    draw = random.Random(f"options {seed}")
    brokers = draw.choice((2, 3, 3, 3, 4, 5))
    factor = min(brokers, draw.choice((1, 2, 3, 3, 3)))
    min_isr = min(factor, draw.choice((1, 2, 2)))
    elr = draw.random() < 0.6
    lag_ms = draw.choice((500, 1_000, 2_000))
    faults: tuple[str, ...]
    if draw.random() < 0.5:
        faults = draw.choice(TOGETHER)
    else:
        faults = tuple(draw.sample(FAULTS, draw.choice((1, 2, 4, 8))))
    partitions = draw.choice((1, 1, 2, 3))
    transactions = draw.choice((0, 0, 0, 1, 2))
    members = draw_members(draw)
    if transactions or any(members):
        # What is promised of them needs that no partition loses its truth.
        faults = tuple(one for one in faults if one not in LOSING)
    return Options(
        seed=seed,
        brokers=brokers,
        replication_factor=factor,
        partitions=partitions,
        broker=BrokerOptions(
            min_isr=min_isr,
            lag_ms=lag_ms,
            fetch_wait_ms=draw.choice((50, 150, 300)),
            backoff_ms=draw.choice((50, 200)),
            fetch_batches=draw.choice((2, 8)),
            session_ms=draw.choice((600, 900, 1_500)),
            flush_ms=draw.choice((100, 400, 2_000)),
            checkpoint_ms=draw.choice((300, 3_000)),
        ),
        elr=elr,
        unclean=draw.random() < 0.15 and not (transactions or any(members)),
        transactions=transactions,
        weather=draw_weather(draw),
        faults=faults,
        fault_pause_ms=draw.choice((100, 300, 800)),
        chaos_ms=draw.choice((4_000, 6_000, 10_000)),
        producers=tuple(_draw_producer(draw, partitions) for _ in range(draw.choice((1, 2, 3)))),
        consumers=tuple(draw.random() < 0.5 for _ in range(draw.choice((1, 2)))),
        members=members,
        snapshot_records=draw.choice((0, 15, 60)),
        consumer_protocol=draw.random() < 0.4,
    )


def draw_members(draw: random.Random) -> tuple[bool, ...]:
    """A group, or none."""
    share = draw.choice((0.0, 0.0, 0.5, 1.0))
    count = draw.choice((0, 0, 0, 1, 2, 3))
    return tuple(draw.random() < share for _ in range(count))


def draw_weather(draw: random.Random) -> Weather:
    """A network."""
    is_bad = draw.random() < 0.5
    return Weather(
        latency_ms=draw.choice(((1, 3), (1, 10), (5, 40))),
        lost=draw.choice((0.0, 0.005, 0.03)) if is_bad else 0.0,
        repeated=draw.choice((0.0, 0.05, 0.3)),
        slow=draw.choice((0.0, 0.01, 0.05)) if is_bad else 0.0,
        slow_ms=draw.choice((200, 1_500)),
    )


def _draw_producer(draw: random.Random, partitions: int) -> ProducerOptions:
    is_idempotent = draw.random() < 0.5
    return ProducerOptions(
        index=draw.randrange(partitions),
        acks=draw.choice((-1, -1, 1, 0)),
        is_idempotent=is_idempotent,
        max_in_flight=draw.choice((1, 5)) if is_idempotent else 1,
        pause_ms=draw.choice((30, 80, 200, 600)),
    )
