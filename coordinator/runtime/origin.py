"""Who asked: told with a command to a shard, and by the history."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent the request that a decision is about."""

    client_id: str | None
    client_host: str
