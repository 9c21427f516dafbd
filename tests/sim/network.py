"""Nodes that stop, and a network that delays, loses and repeats messages.

A node has a disk and a clock; each process that runs on it is another *incarnation*. A connection
keeps the order of its requests. After it breaks, its requests in flight may still arrive, even
after requests of the next connection or after the end of the process that sent them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sim.scheduler import Scheduler

MAX_LATE_MS: Final = 2_500
"""The longest time that a late request spends in buffers."""

NOTICED_MS: Final = 300
"""The longest time until a node notices a broken connection."""

CLOCK_MS: Final = 1_000_000
"""How far a clock is ahead of the simulated time before any fault sets it."""

Answer = Callable[[Any], None]
"""Called once: with the answer, or with None if none will come."""


class Node:
    """A machine on which one process at a time runs."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.is_up = False
        self.incarnation = 0
        self.paused_until_ms = 0
        self.clock_ms = CLOCK_MS
        """How far its clock is ahead of the simulated time."""
        self._deferred: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """The calls that were due while it was paused, in order."""
        self.receive: Callable[[str, Any, Answer], None] = lambda _sender, _request, _answer: None
        """The process's handler of requests."""

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
    repeated: float = 0.0
    """Share of requests that arrive a second time, soon or late."""
    slow: float = 0.0
    """Share of messages that take up to ``slow_ms``."""
    slow_ms: int = 1_000


@dataclass(slots=True)
class _Connection:
    generation: int = 0
    last_arrival: int = 0
    incarnation: int = -1
    """The incarnation of the target's process at the other end."""
    is_broken: bool = False
    """Whether a message was lost on it: nothing else arrives, and the source will notice."""
    calls: list[_Call] = field(default_factory=list)
    """Calls that are not settled yet."""

    def begin_anew(self) -> None:
        """Send the next requests over a new connection."""
        self.generation += 1
        self.last_arrival = 0
        self.is_broken = False


@dataclass(slots=True, eq=False)
class _Call:
    source: Node
    incarnation: int
    target: Node
    answer: Answer
    connection: _Connection
    generation: int
    is_settled: bool = False


@dataclass(slots=True)
class Network:
    """Carries requests and their answers between nodes."""

    scheduler: Scheduler
    weather: Weather
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Pairs of source and target names between which nothing arrives."""
    numbers: int = 0
    """The last number given to a connection that is used only until it breaks."""
    _connections: dict[tuple[str, str, str], _Connection] = field(default_factory=dict)

    def add(self, name: str) -> Node:
        """Add a node."""
        node = self.nodes[name] = Node(self.scheduler, name)
        return node

    def call(
        self,
        source: Node,
        target: str,
        request: Any,
        answer: Answer,
        *,
        timeout_ms: int,
        purpose: str = "",
        may_repeat: bool = False,
    ) -> None:
        """Send a request; ``answer`` is called with the response, or with None."""
        other = self.nodes[target]
        key = (source.name, target, purpose)
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = _Connection()
        leads_nowhere = False
        if connection.incarnation != other.incarnation:
            leads_nowhere = any(one.generation == connection.generation for one in connection.calls)
            if not leads_nowhere:
                connection.incarnation = other.incarnation
                connection.begin_anew()
        call = _Call(source, source.incarnation, other, answer, connection, connection.generation)
        connection.calls.append(call)
        self.scheduler.after(timeout_ms, self._time_out, call)
        if connection.is_broken:
            return
        if (source.name, target) in self.cut:
            connection.is_broken = True
            return
        if leads_nowhere or self.scheduler.chance(self.weather.lost):
            # A request to a process that has ended is lost as well: a source with calls in flight
            # has not noticed that end, and reaches the next process only once they have failed.
            self._lose(call)
            return
        arrival = max(connection.last_arrival, self.scheduler.now + self.latency())
        connection.last_arrival = arrival
        reached = connection.incarnation
        delay = arrival - self.scheduler.now
        self.scheduler.after(delay, self._arrive, call, reached, request)
        if may_repeat and self.scheduler.chance(self.weather.repeated):
            late_ms = self.scheduler.draw.randint(1, MAX_LATE_MS)
            again = delay + self.scheduler.draw.choice((self.latency(), late_ms))
            self.scheduler.after(again, self._arrive, call, reached, request)

    def send_late(self, source: Node, target: str, request: Any) -> None:
        """Send a request that may arrive long after the sending process has ended."""
        other = self.nodes[target]
        call = _Call(source, source.incarnation, other, lambda _answer: None, _Connection(), 0)
        call.connection.calls.append(call)
        wait_ms = self.scheduler.draw.randint(1, MAX_LATE_MS)
        self.scheduler.after(wait_ms, self._arrive, call, other.incarnation, request)

    def _lose(self, call: _Call) -> None:
        """Break the connection of a lost message; the source notices soon."""
        call.connection.is_broken = True
        wait_ms = self.scheduler.draw.randint(1, NOTICED_MS)
        self.scheduler.after(wait_ms, self._break, call.connection, call.generation)

    def _break(self, connection: _Connection, generation: int) -> None:
        if connection.generation == generation:
            connection.begin_anew()
        for call in tuple(connection.calls):
            if call.generation == generation:
                self._settle(call, None)

    def latency(self) -> int:
        """Draw the latency of a message."""
        weather, draw = self.weather, self.scheduler.draw.random
        if weather.slow and draw() < weather.slow:
            return 1 + int(draw() * weather.slow_ms)
        low, high = weather.latency_ms
        return low + int(draw() * (high - low + 1))

    def _arrive(self, call: _Call, incarnation: int, request: Any) -> None:
        target = call.target
        if not target.is_up or target.incarnation != incarnation:
            self.scheduler.after(self.latency(), self._settle, call, None)
            return
        target.do(self._handle, call, request)

    def _handle(self, call: _Call, request: Any) -> None:
        target, answered = call.target, False

        def reply(response: Any) -> None:
            nonlocal answered
            if answered:
                raise AssertionError(f"{target.name} answers {request} twice")
            answered = True
            if (target.name, call.source.name) in self.cut:
                return
            if self.scheduler.chance(self.weather.lost):
                self._lose(call)
                return
            self.scheduler.after(self.latency(), self._settle, call, response)

        target.receive(call.source.name, request, reply)

    def _time_out(self, call: _Call) -> None:
        if not call.is_settled:
            self._break(call.connection, call.generation)

    def _settle(self, call: _Call, response: Any) -> None:
        if call.is_settled:
            return
        call.is_settled = True
        call.connection.calls.remove(call)
        source = call.source
        if source.incarnation == call.incarnation and source.is_up:
            source.do(call.answer, response)
