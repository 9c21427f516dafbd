"""A clock that a test moves."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until the test moves it."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms
        self._jumped_ms = 0

    def now_ms(self) -> int:
        return self._now_ms + self._jumped_ms

    def monotonic_ms(self) -> int:
        return self._now_ms

    def advance(self, by_ms: int) -> int:
        """Move on by ``by_ms`` (may not be negative) and return the new time."""
        if by_ms < 0:
            raise ValueError("a manual clock moves forward only")
        self._now_ms += by_ms
        return self.now_ms()

    def jump(self, by_ms: int) -> None:
        """Move the wall clock forward or back, without the monotonic one."""
        self._jumped_ms += by_ms
