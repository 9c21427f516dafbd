"""The clients that have opened share sessions, for the history and for descriptions of the group.

A share partition knows only the ids of its members, and the group coordinator knows only the
clients of members that have joined. But a member need not join to fetch, and its locks outlive its
membership.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fencepost.coordinator.runtime.origin import Origin
from fencepost.groups.share.session import SessionKey
from fencepost.logcore.machine import Event

MAX_CLIENTS: Final = 10_000
"""The maximum number of remembered clients; above it, the client that opened its session first is
forgotten."""


class ShareClients:
    """The clients that have opened share sessions on this broker, including ended sessions."""

    def __init__(self) -> None:
        self._clients: dict[SessionKey, Origin] = {}

    def opened(self, key: SessionKey, client: Origin) -> None:
        """Remember the client that opens a session."""
        self._clients.pop(key, None)
        self._clients[key] = client
        if len(self._clients) > MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]

    def of(self, key: SessionKey) -> Origin | None:
        """Return the client of a member; None if it is not known."""
        return self._clients.get(key)

    def named(self, event: Event) -> Event:
        """Add to an event the client of the member that the event names.

        The client that caused the event may be a different one.
        """
        member = event.detail.get("member")
        client = self.of(SessionKey(event.subject, str(member))) if member else None
        if client is None:
            return event
        names = {"client_id": client.client_id, "client_host": client.client_host}
        return replace(event, detail={**event.detail, **names})
