"""A simulated other broker behind a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.cluster.image import BrokerRegistration, MetadataImage
from fencepost.cluster.records import BrokerEndpoint
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request, decode_request, encode_response
from fencepost.protocol.messages import ResponseFactory, response_factory
from fencepost.protocol.schema import Entity

Answer = Callable[[Request], Awaitable[Entity | None]]


class Asked(NamedTuple):
    """A request that the simulated broker received."""

    api: ApiKey
    version: int
    client_id: str | None


class OtherBroker:
    """A simulated broker that answers requests in order; None closes the connection."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                request = decode_request(await reader.readexactly(size))
                api = ApiKey(request.api_key)
                self.asked.append(Asked(api, request.api_version, request.client_id))
                body = await self.answer(request)
                if body is None:
                    return
                version, correlation_id = request.api_version, request.correlation_id
                for chunk in encode_response(api, version, correlation_id, body):
                    writer.write(chunk)
                await writer.drain()
        except (OSError, EOFError, asyncio.CancelledError):
            return  # the client or the test has closed the connection
        finally:
            self.open.discard(writer)
            writer.close()

    def hang_up(self) -> None:
        """Close all connections, but still accept new connections."""
        for writer in self.open:
            writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.hang_up()


def versions(request: Request, **served: tuple[int, int]) -> Entity:
    """Return an ApiVersions response with the APIs in ``served`` (ApiKey names) and ApiVersions."""
    make = response_factory(ApiKey.API_VERSIONS, request.api_version)
    ranges = {"API_VERSIONS": (0, 4), **served}
    return make.message(
        api_keys=[
            make.ApiVersion(api_key=ApiKey[name], min_version=low, max_version=high)
            for name, (low, high) in ranges.items()
        ]
    )


def image_of(*, level: int = 30, listener: str = "PLAINTEXT", **ports: int) -> MetadataImage:
    """Return an image of brokers with these ports: ``b7=9092`` means broker 7 with port 9092."""
    brokers = {}
    for name, port in ports.items():
        number = int(name[1:])
        brokers[number] = BrokerRegistration(
            broker_id=number,
            epoch=100 + number,
            incarnation_id=UUID(int=number + 1),
            listeners={listener: BrokerEndpoint(listener, "127.0.0.1", port, 0)},
            features={},
            rack=None,
            fenced=False,
            in_controlled_shutdown=False,
            directories=(),
        )
    return MetadataImage(offset=1, epoch=1, brokers=brokers, features={"metadata.version": level})


class Scripted:
    """A simulated broker that answers an API with the next of ``codes``, or NONE after the last.

    The code None closes the connection. While ``may_answer`` is unset, no response is sent.
    """

    api: ApiKey
    oldest: int
    """The lowest version of the API that the other broker supports."""

    def __init__(self, newest: int) -> None:
        self.other = OtherBroker(self._answer)
        self.codes: list[ErrorCode | None] = []
        self.bodies: list[Entity] = []
        self.newest = newest
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def _answer(self, request: Request) -> Entity | None:
        if request.api_key == ApiKey.API_VERSIONS:
            return versions(request, **{self.api.name: (self.oldest, self.newest)})
        self.bodies.append(request.body)
        await self.may_answer.wait()
        code = self.codes.pop(0) if self.codes else ErrorCode.none
        if code is None:
            return None
        make = response_factory(self.api, request.api_version)
        return self.made(make, request.body, code)

    def made(self, make: ResponseFactory, body: Entity, code: ErrorCode) -> Entity:
        """Return a response with this code for each item of the request."""
        raise NotImplementedError
