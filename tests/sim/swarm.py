"""The options of a history that its seed draws: settings, weather, clients."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.sim.network import Weather
from tests.sim.process import BrokerOptions


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """The options of one producer."""

    index: int
    acks: int
    is_idempotent: bool
    max_in_flight: int
    pause_ms: int


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one history."""

    seed: int
    brokers: int
    replication_factor: int
    partitions: int
    broker: BrokerOptions
    weather: Weather
    faults: tuple[str, ...]
    fault_pause_ms: int
    """Mean time between two faults."""
    chaos_ms: int
    producers: tuple[ProducerOptions, ...]
    transactions: int
    """The number of transactional producers."""
    consumers: tuple[bool, ...]
    """For each consumer, whether it reads from followers."""
    members: tuple[bool, ...] = ()
    """For each member of the group, whether it commits in transactions."""
    consumer_protocol: bool = False
    """Whether the group uses the consumer protocol (KIP-848) instead of the classic one."""

    @property
    def has_transactions(self) -> bool:
        """Whether any client has transactions."""
        return self.transactions > 0 or any(self.members)

    def __str__(self) -> str:
        settings = (
            f"{self.brokers} brokers, {self.partitions} partitions of"
            f" {self.replication_factor} replicas, min ISR {self.broker.min_isr}"
        )
        if self.members:
            kind = "consumer" if self.consumer_protocol else "classic"
            settings += f", a {kind} group of {len(self.members)}"
        return f"{settings}, faults {', '.join(self.faults) or 'none'}"


def draw_options(seed: int) -> Options:
    """Draw the options that all clusters have, except for faults.

    Some results are unused: these draws keep the history of every seed unchanged.
    """
    draw = random.Random(f"options {seed}")
    brokers = draw.choice((2, 3, 3, 3, 4, 5))
    factor = min(brokers, draw.choice((1, 2, 3, 3, 3)))
    min_isr = min(factor, draw.choice((1, 2, 2)))
    draw.random()
    lag_ms = draw.choice((500, 1_000, 2_000))
    if draw.random() < 0.5:
        draw.randrange(18)
    else:
        draw.sample(range(23), draw.choice((1, 2, 4, 8)))
    partitions = draw.choice((1, 1, 2, 3))
    transactions = draw.choice((0, 0, 0, 1, 2))
    members = draw_members(draw)
    broker = BrokerOptions(
        min_isr=min_isr,
        lag_ms=lag_ms,
        fetch_wait_ms=draw.choice((50, 150, 300)),
        backoff_ms=draw.choice((50, 200)),
        fetch_batches=draw.choice((2, 8)),
        session_ms=draw.choice((600, 900, 1_500)),
        flush_ms=draw.choice((100, 400, 2_000)),
        checkpoint_ms=draw.choice((300, 3_000)),
    )
    draw.random()
    weather = draw_weather(draw)
    fault_pause_ms, chaos_ms = draw.choice((100, 300, 800)), draw.choice((4_000, 6_000, 10_000))
    producers = tuple(_draw_producer(draw, partitions) for _ in range(draw.choice((1, 2, 3))))
    consumers = tuple(draw.random() < 0.5 for _ in range(draw.choice((1, 2))))
    draw.choice((0, 15, 60))
    return Options(
        seed=seed,
        brokers=brokers,
        replication_factor=factor,
        partitions=partitions,
        broker=broker,
        transactions=transactions,
        weather=weather,
        faults=(),
        fault_pause_ms=fault_pause_ms,
        chaos_ms=chaos_ms,
        producers=producers,
        consumers=consumers,
        members=members,
        consumer_protocol=draw.random() < 0.4,
    )


def draw_members(draw: random.Random) -> tuple[bool, ...]:
    """Draw the members of a group, none for no group."""
    share = draw.choice((0.0, 0.0, 0.5, 1.0))
    count = draw.choice((0, 0, 0, 1, 2, 3))
    return tuple(draw.random() < share for _ in range(count))


def draw_weather(draw: random.Random) -> Weather:
    """Draw the quality of the network."""
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
