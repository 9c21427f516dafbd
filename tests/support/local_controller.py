"""A controller channel without a connection: a function of the test handles the requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from fencepost.coordinator.replication.controller_connection import NewestVersionRequest, Request
from fencepost.coordinator.runtime.background import spawn
from fencepost.protocol.api import KNOWN_APIS
from fencepost.protocol.schema import Entity


class LocalControllerChannel:
    """A :class:`ControllerChannel` that passes requests to ``handle``."""

    def __init__(self, handle: Callable[[Entity], Awaitable[Entity]]) -> None:
        self._handle = handle
        self.versions: Mapping[int, tuple[int, int]] = {
            api.key: (api.min_version, api.stable_max) for api in KNOWN_APIS.values()
        }
        """See ControllerChannel."""
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: Request) -> asyncio.Future[Entity]:
        """See ControllerChannel."""
        if isinstance(request, NewestVersionRequest):
            request = request.at(KNOWN_APIS[request.api_key].stable_max)
        future: asyncio.Future[Entity] = asyncio.get_running_loop().create_future()
        task = spawn(self._answer(request, future), "a request to the controller")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _answer(self, request: Entity, future: asyncio.Future[Entity]) -> None:
        try:
            answer = await self._handle(request)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the caller must see any error
            if not future.done():
                future.set_exception(error)
            return
        if not future.done():
            future.set_result(answer)

    async def close(self) -> None:
        """See :class:`ControllerChannel`."""
        for task in self._tasks:
            task.cancel()
