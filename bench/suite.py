"""The parts of a suite: workloads, and the figures that they return.

A figure's name is ``what was measured (unit)``, and the unit says which direction is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.brokers import FENCEPOST, KAFKA, KFAKE, SIDES, Broker, Make

Figures = dict[str, float]

LOWER_IS_BETTER = ("ms", "µs", "s", "s/GiB", "MiB", "KiB", "files", "% of a core")
"""Units in which less is better; in every other unit more is better."""

DEFAULTS: Mapping[str, str] = {
    "group.initial.rebalance.delay.ms": "0",
    "group.share.heartbeat.interval.ms": "500",
    "group.share.min.heartbeat.interval.ms": "500",
}
"""Both brokers run with their defaults, except that a group's first rebalance is not delayed and
that members of share groups send a heartbeat every 500 ms."""

BROKERS: Mapping[str, str] = {FENCEPOST: "Fencepost", KAFKA: "Apache Kafka"}

PRODUCTS: Mapping[str, Make] = {side: SIDES[side] for side in BROKERS}
ALONE: Mapping[str, Make] = {FENCEPOST: SIDES[FENCEPOST]}
BESIDE_KFAKE: Mapping[str, Make] = {side: SIDES[side] for side in (FENCEPOST, KFAKE)}


@dataclass(frozen=True)
class Workload:
    """A workload that runs on a broker of each of its ``sides`` once per round.

    A ``fresh`` workload gets a new broker with its ``settings``. The others share the warm broker
    of each side (:mod:`bench.warm`), whose settings are :data:`DEFAULTS`.
    """

    name: str
    """Describes the workload. A row of a table shows the name, a colon and a figure's name."""
    run: Callable[[Broker], Figures]
    settings: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    sides: Mapping[str, Make] = field(default_factory=lambda: PRODUCTS)
    """Side → the function that makes its broker."""
    is_pinged: bool = True
    """Whether another process pings the broker meanwhile, which takes the broker some processor
    time."""
    fresh: bool = False
    """Whether the workload needs a new broker: because it kills the broker, measures the broker's
    memory, or has settings of its own."""


@dataclass(frozen=True)
class Local:
    """A workload without a broker, which gets an empty directory."""

    name: str
    run: Callable[[Path], Figures]


@dataclass(frozen=True)
class Pair:
    """A comparison of two programs on the same broker; ``run`` gets an empty directory.

    ``run`` yields the side and the figures of each measurement as soon as it is over. It determines
    the order of the sides, which are :attr:`Suite.sides`.
    """

    name: str
    run: Callable[[Path], Iterator[tuple[str, Figures]]]


@dataclass(frozen=True)
class Suite:
    """A group of workloads. ``about`` is the text above its table."""

    name: str
    about: str
    workloads: tuple[Workload | Local | Pair, ...]
    sides: Mapping[str, str] = field(default_factory=lambda: BROKERS)
    """Our side and the other one: names in samples, and titles of columns."""


def label_and_unit(figure: str) -> tuple[str, str]:
    """Split a figure's name: ``median latency (ms)`` is measured in ms."""
    label, _, unit = figure.rpartition(" (")
    return label, unit.removesuffix(")")


def lower_is_better(figure: str) -> bool:
    return label_and_unit(figure)[1] in LOWER_IS_BETTER
