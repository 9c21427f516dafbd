"""A bound that all shards of a coordinator share.

Each shard books the memory that it holds in an account of its own, so that a shard which is
unloaded gives everything back at once, however far its log had been read. Booking never fails: a
log that is loaded is taken as it is. Only a request that adds something asks for room first.
"""

from __future__ import annotations

from typing import Final

_UNBOUNDED: Final = 1 << 62


class Budget:
    """Bytes that the open accounts may hold together; ``key`` is the setting that says how many."""

    __slots__ = ("key", "limit", "used")

    def __init__(self, key: str = "no setting", limit: int = _UNBOUNDED) -> None:
        self.key = key
        self.limit = limit
        self.used = 0

    @property
    def exceeded(self) -> str:
        """The sentence that refuses a request."""
        return f"there is no room for it: all that the broker keeps of this kind exceeds {self}"

    def __str__(self) -> str:
        return f"{self.key}={self.limit}"


class Account:
    """One shard's part of a budget."""

    __slots__ = ("_is_open", "budget", "used")

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.used = 0
        self._is_open = True

    def add(self, amount: int) -> None:
        """Book ``amount`` bytes more; fewer if it is negative."""
        self.used += amount
        if self._is_open:
            self.budget.used += amount

    def has_room(self, amount: int) -> bool:
        """Whether ``amount`` bytes more may be held; a change that adds none always may."""
        return amount <= 0 or self.budget.used + amount <= self.budget.limit

    def close(self) -> None:
        """Give everything back: the shard is forgotten."""
        if self._is_open:
            self._is_open = False
            self.budget.used -= self.used
