"""Run random actions on groups, and check the final log."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from hypothesis import strategies as st

from tests.unit.groups.group_driver import Driver, Entry, load
from tests.unit.groups.log_compaction import every_variant, partly_compacted

ACTIONS = 20
"""The number of actions.

A step is three small numbers, so that Hypothesis shrinks a failing run to a few steps.
"""

LONGEST_TO_TRY_ALL = 300
"""Shorter logs are compacted up to each of their offsets, longer logs up to some offsets."""


class Life(Protocol):
    """One random run."""

    driver: Driver

    def step(self, action: int, who: int, what: int) -> None:
        """Perform one action."""

    def finish(self) -> None:
        """Check the final state."""


def lives(max_size: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Return a strategy for runs of ten to ``max_size`` steps."""
    step = st.tuples(st.integers(0, ACTIONS - 1), st.integers(0, 7), st.integers(0, 3))
    return st.lists(step, min_size=10, max_size=max_size)


def live(life: Life, steps: list[tuple[int, int, int]]) -> None:
    for action, who, what in steps:
        life.step(action, who, what)
    life.finish()


def long_life(life: Life, seed: int, length: int) -> None:
    rng = random.Random(seed)
    steps = [(rng.randrange(ACTIONS), rng.randrange(8), rng.randrange(4)) for _ in range(length)]
    live(life, steps)
    assert life.driver.decisions > 100


def loads_back(log: list[Entry], digest: str) -> None:
    """Check that the log loads to the state with this digest; ``on_loaded`` keeps the state."""
    machine = load(log)
    machine.check()
    machine.on_loaded(0)
    machine.check()
    assert machine.digest() == digest


def log_loads_back(log: list[Entry], digest: str, variants: int) -> None:
    """Check that some compacted variants of a log load to the state with this digest."""
    rng = random.Random(len(log))
    every = list(every_variant(log)) if len(log) < LONGEST_TO_TRY_ALL else []
    for variant in rng.sample(every, min(variants, len(every))):
        loads_back(variant, digest)
    for _ in range(variants):
        loads_back(partly_compacted(log, rng), digest)


def every_variant_loads_back(make: Callable[[], Driver]) -> None:
    """Check that every compacted variant of a scenario's log loads to the same state."""
    driver = make()
    digest = driver.machine.digest()
    for variant in every_variant(driver.log):
        loads_back(variant, digest)
    rng = random.Random(1)
    for _ in range(50):
        loads_back(partly_compacted(driver.log, rng), digest)


def every_prefix_loads(make: Callable[[], Driver]) -> None:
    """Check that every prefix of a log loads, since a crash may end it anywhere."""
    log = make().log
    for length in range(len(log) + 1):
        machine = load(log[:length])
        machine.check()
        machine.on_loaded(0)
        machine.check()
