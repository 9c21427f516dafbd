"""A connection to a controller; requests have the newest version that both sides support."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.client.channel import BrokerUnreachable
from fencepost.client.client import AsyncWireClient
from fencepost.client.security import Security
from fencepost.coordinator.replication.peers import usable_security
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import KNOWN_APIS
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory, request_factory
from fencepost.protocol.schema import Entity

CONNECT_TIMEOUT_MS: Final = 2_000

UNUSABLE_RESPONSES: Final = (OverflowError, TypeError, ValueError)
"""Exceptions caused by a decoded response that holds an impossible host or port, or a null list.
The caller may retry: a later response may be valid."""

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class NewestVersionRequest:
    """A request to be built in the newest version that both sides support."""

    api_key: int
    build: Callable[[RequestFactory], Entity]

    def at(self, version: int) -> Entity:
        """Return the request in this version."""
        return self.build(request_factory(self.api_key, version))


Request = Entity
"""A kio entity of one version, or :class:`NewestVersionRequest`."""


class ControllerConnection:
    """A connection to one controller; a request to another address replaces the connection."""

    def __init__(self, client_id: str, security: Security) -> None:
        self._client_id, self._security = client_id, security
        self._client: AsyncWireClient | None = None
        self._to: Address | None = None
        self.versions: Mapping[int, tuple[int, int]] = {}
        """The versions that the last controller supports, by API key."""

    async def ask(self, to: Address, request: Request, *, timeout_ms: float) -> Entity:
        """Send a request, and return the response.

        Raises WireError (including UnsupportedVersion), OSError or TimeoutError. After any
        exception the connection is closed.
        """
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                client = await self._connected(to)
                self.versions = await client.versions()
                if isinstance(request, NewestVersionRequest):
                    request = request.at(newest(request.api_key, self.versions))
                return await client.request(
                    request.__api_key__, request.__version__, request, timeout_ms=timeout_ms
                )
        except BaseException as error:
            await self.close()
            if isinstance(error, UNUSABLE_RESPONSES) and not isinstance(error, WireError):
                raise BrokerUnreachable(f"{to[0]}:{to[1]}: {error!r}") from error
            raise

    async def _connected(self, to: Address) -> AsyncWireClient:
        if self._client is None or self._to != to:
            await self.close()
            host, port = to
            with usable_security():
                self._client = AsyncWireClient(
                    [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"],
                    client_id=self._client_id,
                    security=self._security,
                    timeout_ms=CONNECT_TIMEOUT_MS,
                )
            self._to = to
        return self._client

    async def close(self) -> None:
        """Close the connection, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def error_name(code: int) -> str:
    """Return the name of an error code, or a string with its number."""
    try:
        return ErrorCode(code).name.upper()
    except ValueError:
        return f"error {code}"


def newest(api_key: int, versions: Mapping[int, tuple[int, int]]) -> int:
    """Return the newest version in both ``versions`` and our own. Raises UnsupportedVersion."""
    api = KNOWN_APIS[api_key]
    low, high = versions.get(api.key, (0, -1))
    version = min(high, api.stable_max)
    if version < max(low, api.min_version):
        raise UnsupportedVersion(api.key, version)
    return version
