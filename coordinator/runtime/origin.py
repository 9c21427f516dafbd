"""The client behind a command: shards get it with the command, and the history keeps it."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from fencepost.logcore.values import dataclass, made_often

MAX_KEPT: Final = 256
"""Clients that are kept, of two short texts each."""


@made_often
@dataclass(frozen=True, slots=True)
class Origin:
    """The client that sent the request which a decision is about."""

    client_id: str | None
    client_host: str


@lru_cache(maxsize=MAX_KEPT)
def origin_of(client_id: str | None, client_host: str) -> Origin:
    """The client of these names, which each of its requests has with it."""
    return Origin(client_id, client_host)
