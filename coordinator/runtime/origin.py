"""The client behind a command: passed to shards with the command, and recorded in the history."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from fencepost.logcore.values import dataclass, fast_init

MAX_KEPT: Final = 256
"""The maximum number of cached clients; each consists of two short strings."""


@fast_init
@dataclass(frozen=True, slots=True)
class Origin:
    """The client whose request a decision is about."""

    client_id: str | None
    client_host: str


@lru_cache(maxsize=MAX_KEPT)
def origin_of(client_id: str | None, client_host: str) -> Origin:
    """Return the client with this id and host. It is cached, because each request needs it."""
    return Origin(client_id, client_host)
