"""What a bug on purpose is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.sim.swarm import Options

Line = tuple[Any, str, str]
"""A function or property, a piece of its source that is there once, and what is to stand there."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug."""

    name: str
    lines: tuple[Line, ...]
    needs: Callable[[Options], bool] = lambda _options: True
    """Histories in which it can show at all; the others are not played in a search for it."""
    is_rare: bool = False
    """Whether it takes so many seeds that it is searched for by hand alone."""


def where(needs: Callable[[Options], bool], bugs: Iterable[Bug]) -> Iterator[Bug]:
    """The same bugs, which need the same of a history."""
    return (replace(one, needs=needs) for one in bugs)


def struck_by(*faults: str) -> Callable[[Options], bool]:
    """A need: one of these faults."""
    return lambda options: not set(faults).isdisjoint(options.faults)
