"""A memory limit that all shards of a coordinator share.

Each shard counts its memory in an account of its own, so that unloading a shard returns everything
at once, even if its log was only partly read. Adding never fails, so a log of any size is loaded.
The limit applies to requests only: a request that needs more memory checks for room beforehand.
"""

from __future__ import annotations

from typing import Final

_UNBOUNDED: Final = 1 << 62


class Budget:
    """The bytes that all open accounts together may hold; ``key`` is the setting with the limit."""

    __slots__ = ("key", "limit", "used")

    def __init__(self, key: str = "no setting", limit: int = _UNBOUNDED) -> None:
        self.key = key
        self.limit = limit
        self.used = 0

    @property
    def exceeded(self) -> str:
        """The error message for a refused request."""
        return f"the broker has no memory left for it: the limit is {self}"

    def __str__(self) -> str:
        return f"{self.key}={self.limit}"


class Account:
    """One shard's share of a budget."""

    __slots__ = ("_is_open", "budget", "used")

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.used = 0
        self._is_open = True

    def add(self, amount: int) -> None:
        """Add ``amount`` bytes, which may be negative."""
        self.used += amount
        if self._is_open:
            self.budget.used += amount

    def has_room(self, amount: int) -> bool:
        """Return whether ``amount`` more bytes fit; an ``amount`` of 0 or less always fits."""
        return amount <= 0 or self.budget.used + amount <= self.budget.limit

    def close(self) -> None:
        """Return all bytes of the shard to the budget."""
        if self._is_open:
            self._is_open = False
            self.budget.used -= self.used
