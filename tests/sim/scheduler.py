"""A queue of events at simulated times, without a clock, threads or an event loop.

Events at the same time run in the order in which they were scheduled, and all randomness comes from
one generator, so a seed determines the whole simulated run. The events are added to a
:class:`Trace`, whose digest is the same for the same seed.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Final

KEPT_LINES: Final = 60
"""How many of the last events a failure shows."""


class Trace:
    """The events of a simulated run as lines: the last lines, and a digest of all lines."""

    def __init__(self, told: Callable[[str], None] | None = None) -> None:
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self.count = 0
        self._digest = hashlib.blake2b(digest_size=8)
        self._told = told

    def add(self, line: str) -> None:
        """Add a line."""
        self.count += 1
        self.last.append(line)
        self._digest.update(line.encode())
        if self._told is not None:
            self._told(line)

    @property
    def digest(self) -> str:
        """The digest of all lines so far."""
        return self._digest.hexdigest()


class Scheduler:
    """The simulated time in milliseconds, and the queue of scheduled calls."""

    def __init__(self, seed: int, told: Callable[[str], None] | None = None) -> None:
        self.now = 0
        self.draw = random.Random(seed)
        self.trace = Trace(told)
        self.steps = 0
        self.after_step: Callable[[], None] = lambda: None
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def say(self, who: str, what: str) -> None:
        """Add a line to the trace, with the current time."""
        self.trace.add(f"{self.now:>7} {who} {what}\n")

    def after(self, delay_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call of ``action`` in ``delay_ms``."""
        self._asked += 1
        heappush(self._queue, (self.now + delay_ms, self._asked, action, arguments))

    def run(self, until_ms: int) -> None:
        """Run all calls that are due up to a time."""
        queue, after_step = self._queue, self.after_step
        while queue and queue[0][0] <= until_ms:
            self.now, _, action, arguments = heappop(queue)
            self.steps += 1
            action(*arguments)
            after_step()
        self.now = until_ms

    @contextmanager
    def explained(self, options: object, repeat: str) -> Iterator[None]:
        """Add notes to a failure: the last events, the options, and the command to repeat it."""
        try:
            yield
        except Exception as error:
            error.add_note("the last events:\n" + "".join(self.trace.last))
            error.add_note(f"{options}\nrepeat it: {repeat}")
            raise

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return probability > 0 and self.draw.random() < probability
