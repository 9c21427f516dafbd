"""Searches for planted bugs, to show that the simulation finds them.

``python -m tests.sim.planted`` runs simulations of different seeds with each bug and the options
that the bug needs. It prints how many simulated runs it took to find the bug. ``--world shares``
searches for the bugs of share groups, ``--world zookeeper`` for the bugs of clusters on ZooKeeper.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, Final

from tests.sim import daemons, shares, zk_directed
from tests.sim.bug import Bug
from tests.sim.bugs_shares import SHARES as SHARE_BUGS
from tests.sim.bugs_zookeeper import ZOOKEEPER
from tests.sim.directed import DIRECTED
from tests.sim.run import DAEMONS, SHARES
from tests.sim.run import ZOOKEEPER as ON_ZOOKEEPER


def _function(where: Any) -> FunctionType:
    if isinstance(where, property):
        where = where.fget
    if isinstance(where, classmethod | MethodType):
        where = where.__func__
    assert isinstance(where, FunctionType), where
    return where


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Replace the product's lines by the lines of a bug within the block."""
    sources: dict[FunctionType, str] = {}
    for where, line, becomes in bug.lines:
        function = _function(where)
        source = sources.get(function) or textwrap.dedent(inspect.getsource(function))
        if source.count(line) != 1:
            raise LookupError(
                f"{bug.name}: {line!r} does not occur exactly once in {function.__qualname__}"
            )
        sources[function] = source.replace(line, becomes)
    kept = {function: function.__code__ for function in sources}
    for function, source in sources.items():
        made: dict[str, Callable[..., Any]] = {}
        # Only the code object is replaced; the function keeps its globals and argument defaults.
        exec("from __future__ import annotations\n" + source, function.__globals__, made)
        changed = made[function.__name__]
        function.__code__ = _function(changed).__code__
    try:
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code


def play_directed(name: str, seed: int) -> object:
    """Run the simulation of a seed with the options that a bug needs."""
    return daemons.live(replace(daemons.draw_options(seed), **DIRECTED[name][1]))


def play_shares(name: str, seed: int) -> object:
    """Run the simulation of a seed with a share group, with the options that a bug needs."""
    options = next(options for bug, options in SHARE_BUGS if bug.name == name)
    return shares.live(replace(shares.draw_share_options(seed), **options))


WORLDS: Final = {
    DAEMONS: (tuple(bug for bug, _ in DIRECTED.values()), play_directed),
    SHARES: (tuple(bug for bug, _ in SHARE_BUGS), play_shares),
    ON_ZOOKEEPER: (ZOOKEEPER, zk_directed.play_directed),
}
"""World → its bugs, and the function that runs a seed's simulation with a bug's options."""


def seeds_until_found(
    bug: Bug, first: int, most: int, world: str = DAEMONS
) -> tuple[int, str] | None:
    """Return the number of runs until one fails because of the bug, and the failure, or None."""
    _, play = WORLDS[world]
    with planted(bug):
        for count in range(1, most + 1):
            try:
                play(bug.name, first + count - 1)
            except Exception as error:  # noqa: BLE001 - any failure is a find
                return count, f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Search for the bugs of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=5, help="searches for each bug")
    parser.add_argument("--most", type=int, default=400, help="the most seeds of a search")
    parser.add_argument(
        "--only", default="", help="search only for bugs whose names contain this text"
    )
    parser.add_argument("--world", choices=WORLDS, default=DAEMONS)
    parser.add_argument("--tell", action="store_true", help="also print the failures")
    given = parser.parse_args()
    print("| planted bug | median of seeds | most |\n|---|---|---|")
    for bug in WORLDS[given.world][0]:
        if given.only not in bug.name:
            continue
        found = [
            seeds_until_found(bug, 1 + 10_000 * search, given.most, given.world)
            for search in range(given.searches)
        ]
        counts = [given.most + 1 if result is None else result[0] for result in found]
        median = statistics.median(counts)
        shown = f"{median:g}" if median <= given.most else "not found"
        worst = max(counts) if max(counts) <= given.most else f"over {given.most}"
        print(f"| {bug.name} | {shown} | {worst} |", flush=True)
        if given.tell:
            for result in found:
                print("    ", None if result is None else result[1][:200])


if __name__ == "__main__":
    main()
