"""What a suite is made of: workloads, and the figures that they return.

A figure's name ends with its unit, and the unit says which direction is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.brokers import FENCEPOST, KAFKA, SIDES, Broker, Make

Figures = dict[str, float]

LOWER_IS_BETTER = ("ms", "µs", "s", "s/GiB", "MiB", "KiB", "B", "%")
"""Units of which less is better; of every other one more is."""

DEFAULTS: Mapping[str, str] = {"group.initial.rebalance.delay.ms": "0"}
"""Both brokers run with their defaults but for the wait before a group's first rebalance."""

BROKERS: Mapping[str, str] = {FENCEPOST: "Fencepost", KAFKA: "Apache Kafka"}


@dataclass(frozen=True)
class Workload:
    """Runs against a broker that has just started, and against Apache Kafka in the same round."""

    name: str
    run: Callable[[Broker], Figures]
    settings: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    on_kafka: bool = True
    sides: Mapping[str, Make] = field(default_factory=lambda: SIDES)
    """How each side's broker is made."""
    is_pinged: bool = True
    """Not where the broker's processor time is all that is measured: a ping has a part in it."""


@dataclass(frozen=True)
class Local:
    """Needs no broker, only an empty directory."""

    name: str
    run: Callable[[Path], Figures]


@dataclass(frozen=True)
class Pair:
    """Measures two programs against the same broker; ``run`` gets an empty directory.

    It yields the side and the figures of each run as soon as it is over, and takes care of the
    order itself. The sides are those of its suite.
    """

    name: str
    run: Callable[[Path], Iterator[tuple[str, Figures]]]


@dataclass(frozen=True)
class Suite:
    """Workloads that belong together. ``about`` stands above its table."""

    name: str
    about: str
    workloads: tuple[Workload | Local | Pair, ...]
    sides: Mapping[str, str] = field(default_factory=lambda: BROKERS)
    """Our side and the one beside it: names in samples, and titles of columns."""


def unit(figure: str) -> str:
    """The last word of a figure's name."""
    return figure.rsplit(" ", 1)[-1]


def lower_is_better(figure: str) -> bool:
    return unit(figure) in LOWER_IS_BETTER
