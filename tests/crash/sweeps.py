"""Sweeps that inject faults at many places, one at a time, on several clusters at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from fencepost.tools.sweep.points import CountedEvent, KillMoment, KillPoint
from tests.crash.brokers import Brokers


class Bench(Protocol):
    """A cluster, and its progress."""

    @property
    def cluster(self) -> Brokers[Any]:
        """The cluster, which is closed after all places have been tried."""


B = TypeVar("B", bound=Bench)
P = TypeVar("P")


@dataclass(frozen=True)
class Result(Generic[P]):
    """The result of one place: the steps at which it was reached, and the problem if any."""

    place: P
    reached: list[str]
    problem: str


class Sweep(Generic[B, P]):
    """Several clusters, each of which tries a part of the places.

    After a problem the cluster is killed, and a new cluster replaces it; its files are kept.
    """

    def __init__(
        self,
        home: Path,
        jobs: int,
        open_bench: Callable[[Path], B],
        try_place: Callable[[B, P, list[str]], None],
    ) -> None:
        """``try_place`` records the step at which a place was reached, and raises on a problem."""
        self.results: list[Result[P]] = []
        self._home, self._jobs = home, jobs
        self._open_bench, self._try_place = open_bench, try_place
        self._opened = 0
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """The problem of each place that has one."""
        return [result.problem for result in self.results if result.problem]

    def run(self, look: Callable[[B], Sequence[P]], *, to_the_first: bool = False) -> None:
        """Try the places that ``look`` returns; with ``to_the_first`` stop at the first problem."""
        first = self._bench()
        try:
            places = iter(look(first))
        except BaseException:
            first.cluster.close()
            raise
        benches = (first, *[None] * (self._jobs - 1))
        with ThreadPoolExecutor(self._jobs) as threads:
            for future in [
                threads.submit(self._work, bench, places, to_the_first) for bench in benches
            ]:
                future.result()

    def _bench(self) -> B:
        with self._lock:
            self._opened += 1
            home = self._home / f"cluster-{self._opened}"
        return self._open_bench(home)

    def _work(self, bench: B | None, places: Iterator[P], to_the_first: bool) -> None:
        while True:
            with self._lock:
                is_over = to_the_first and self.problems
                place = None if is_over else next(places, None)
            if place is None:
                break
            bench = bench or self._bench()
            result = self._tried(bench, place)
            with self._lock:
                self.results.append(result)
            if result.problem:
                print(result.problem, flush=True)
                bench.cluster.close()
                bench = None
        if bench is not None:
            bench.cluster.close()

    def _tried(self, bench: B, place: P) -> Result[P]:
        reached: list[str] = []
        problem = ""
        try:
            self._try_place(bench, place, reached)
        except Exception as error:  # noqa: BLE001 - any exception is a problem of the place
            where = bench.cluster.home.name
            problem = f"{place}: {type(error).__name__}: {error} ({where})"
        return Result(place, reached, problem)


def swept(
    sweep: Sweep[B, P],
    look: Callable[[B], Sequence[P]],
    choose: Callable[[Sequence[P]], Sequence[P]],
    kind: Callable[[P], object],
) -> list[P]:
    """Try the places that ``choose`` selects, print results by ``kind``, and return all places.

    Fail if a place has a problem, or if too many places are not reached.
    """
    places: list[P] = []

    def chosen(bench: B) -> Sequence[P]:
        places.extend(look(bench))
        return choose(places)

    began = time.monotonic()
    sweep.run(chosen)
    spent_s = time.monotonic() - began
    done = Counter(kind(result.place) for result in sweep.results if result.reached)
    print(f"{len(sweep.results)} of {len(places)} points in {spent_s:.0f} s, reached {done}")
    for result in sweep.results:
        if not (result.problem or result.reached):
            print(f"not reached: {result.place}")
    assert sweep.problems == []
    assert done.total() >= 0.8 * len(sweep.results)
    return places


def points_of(
    events: Sequence[CountedEvent], others: Sequence[CountedEvent]
) -> Iterator[KillPoint]:
    """Yield the points of the events that occurred in both runs."""
    wanted = Counter(event.what for event in events) & Counter(event.what for event in others)
    numbers: Counter[str] = Counter()
    for event in events:
        numbers[event.what] += 1
        if numbers[event.what] > wanted[event.what]:
            continue
        sides = [KillMoment.BEFORE, KillMoment.AFTER]
        if event.tearable:
            sides.insert(1, KillMoment.TORN)
        elif "Fetch" in event.what:
            sides = [KillMoment.BEFORE]  # its point AFTER equals the next point BEFORE
        for side in sides:
            yield KillPoint(side, numbers[event.what], event.what)
