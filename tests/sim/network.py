"""Nodes whose processes can end, and the quality of the network between the nodes.

A node has a disk and a clock; each process that runs on it is another *incarnation*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sim.scheduler import Scheduler

NOTICED_MS: Final = 300
"""The longest time until a node notices a broken connection."""

CLOCK_MS: Final = 1_000_000
"""How far a node's clock is ahead of the simulated time before any fault sets the clock."""


class Node:
    """A machine on which one process at a time runs."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.is_up = False
        self.incarnation = 0
        self.paused_until_ms = 0
        self.clock_ms = CLOCK_MS
        """How far the node's clock is ahead of the simulated time."""
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """The calls that were due while the process was paused, in order."""

    @property
    def now_ms(self) -> int:
        """The time by its clock."""
        return self.scheduler.now + self.clock_ms

    def begin(self) -> None:
        """Start a process."""
        self.is_up = True
        self.incarnation += 1

    def end(self) -> None:
        """End the process, and drop its deferred calls."""
        self.is_up = False
        self.paused_until_ms = 0
        self._deferred.clear()

    def after(self, delay_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call of this process, which is dropped if the process has ended."""
        self.scheduler.after(delay_ms, self._run, self.incarnation, action, arguments)

    def _run(
        self, incarnation: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if self.incarnation == incarnation and self.is_up:
            if not self.paused_until_ms:
                action(*arguments)  # the common case
            else:
                self.do(action, *arguments)

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run ``action`` now, or when the process's pause is over."""
        wait_ms = self.paused_until_ms - self.scheduler.now
        if wait_ms <= 0 and not self._deferred:
            self.paused_until_ms = 0
            action(*arguments)
            return
        if not self._deferred:
            self.scheduler.after(wait_ms, self._resume, self.incarnation)
        self._deferred.append((action, arguments))

    def _resume(self, incarnation: int) -> None:
        if self.incarnation != incarnation or not self.is_up:
            return
        wait_ms = self.paused_until_ms - self.scheduler.now
        if wait_ms > 0:
            self.scheduler.after(wait_ms, self._resume, incarnation)
            return
        while self._deferred and self.is_up:
            action, arguments = self._deferred[0]
            action(*arguments)
            if self._deferred:
                self._deferred.popleft()

    def say(self, what: str) -> None:
        """Add a line about this node to the trace."""
        self.scheduler.say(self.name, what)


@dataclass(slots=True)
class Weather:
    """The latency of the network, and how often it fails."""

    latency_ms: tuple[int, int] = (1, 5)
    lost: float = 0.0
    """Share of messages that never arrive; their connection breaks."""
    slow: float = 0.0
    """Share of messages that take up to ``slow_ms``."""
    slow_ms: int = 1_000


@dataclass(slots=True)
class Network:
    """The nodes, and the state of the network between them."""

    scheduler: Scheduler
    weather: Weather
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """(source, target): the network drops everything that the source sends to the target."""

    def add(self, name: str) -> Node:
        """Add a node."""
        node = self.nodes[name] = Node(self.scheduler, name)
        return node

    def latency(self) -> int:
        """Draw the latency of a message."""
        weather, draw = self.weather, self.scheduler.draw.random
        if weather.slow and draw() < weather.slow:
            return 1 + int(draw() * weather.slow_ms)
        low, high = weather.latency_ms
        return low + int(draw() * (high - low + 1))
