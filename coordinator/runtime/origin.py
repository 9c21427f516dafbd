"""The client behind a command: shards get it with the command, and the history keeps it."""

from __future__ import annotations

from fencepost.logcore.values import dataclass, made_often


@made_often
@dataclass(frozen=True, slots=True)
class Origin:
    """The client that sent the request which a decision is about."""

    client_id: str | None
    client_host: str
