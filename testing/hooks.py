"""Clock, faults and group states over HTTP, for tests in other languages: ``serve --test-hooks``.

A client of this port controls the broker's time. The port is therefore served on loopback only, and
bodies must be ``application/json``, which a page in a browser cannot send to another origin. The
README has the paths.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from fencepost.cli.output import utc
from fencepost.client.client import ApiError
from fencepost.client.queries.session import ClusterSession
from fencepost.cluster.controller.topics import NewTopic
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.controller.topic_decisions import create_topic
from fencepost.coordinator.daemon.broker import split_address
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.history.entries import Entry, decode_value
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.server.http import (
    HttpError,
    HttpRequest,
    HttpResponse,
    HttpServer,
    serve_http,
)
from fencepost.coordinator.server.http_messages import is_loopback
from fencepost.logcore.batch import decode_records
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.protocol.errors import WireError
from fencepost.testing.arguments import GROUP_STATES, names, one_of, setting_texts
from fencepost.testing.clock import TestClock
from fencepost.testing.faults import OWN_CLIENT_ID, Fault, Faults
from fencepost.testing.groups import GroupWait
from fencepost.testing.positions import FetchPositions
from fencepost.testing.shares import in_order, states_of
from fencepost.testing.waiting import LOOK_S, passes

if TYPE_CHECKING:
    from fencepost.cluster.image import TopicImage
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.testing.views import ShareRecords

JSON: Final = "application/json"

MAX_WAIT_S: Final = 60.0
"""How long a GET with ``wait_s`` waits at most."""

LOOK_AGAIN_S: Final = 0.05
"""The pause between two polls of a group."""

_GROUP_FIELDS: Final = ("group", "members", "state", "lag", "fetching", "wait_s")

_PATHS: Final[Mapping[str, tuple[str, ...]]] = {
    "clock": ("GET", "POST"),
    "faults": ("GET", "POST", "DELETE"),
    "fired": ("GET",),
    "groups": ("GET",),
    "history": ("GET",),
    "shares": ("GET",),
    "topics": ("GET", "POST"),
}

_FAULT_FIELDS: Final = ("api", "error", "drop", "close", "delay_ms", "times", "match", "only")


class HookServer:
    """A clock and faults for one broker, and their HTTP server.

    ``address`` is HOST:PORT, with port 0 for a free one. Raises ValueError unless the host is on
    loopback.
    """

    paths: ClassVar[Mapping[str, tuple[str, ...]]] = _PATHS
    """The methods of each path."""

    def __init__(self, address: str) -> None:
        try:
            self._host, self._port = split_address(address)
        except BrokerError as error:
            raise ValueError(str(error)) from error
        if self._host != "localhost" and not is_loopback(self._host):
            raise ValueError(
                f"{self._host} is not loopback: every client that reaches it could move the clock"
            )
        self.clock = TestClock(auto=True)
        """The broker's clock, which runs until a test stops it."""
        self.faults = Faults()
        self._positions = FetchPositions()
        self._broker: Broker | None = None
        self._server: HttpServer | None = None
        self._handles: dict[int, Fault] = {}

    async def start(self, broker: Broker) -> str:
        """Start the server; return its HOST:PORT. Raises OSError."""
        self._broker = broker
        address = await self.listen()
        self._positions.attach(broker)
        self.faults.attach(broker)
        return address

    async def listen(self) -> str:
        """Start the HTTP server, and return its HOST:PORT. Raises OSError."""
        self._server = await serve_http(self._host, self._port, self._answer)
        host = self._server.host
        return f"{f'[{host}]' if ':' in host else host}:{self._server.port}"

    async def stop(self) -> None:
        """Stop the server, and release requests that a fault holds."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._broker is not None:
            self.faults.detach(self._broker)
            self._broker = None

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        first, _, rest = request.path.strip("/").partition("/")
        method = "GET" if request.method == "HEAD" else request.method
        handlers = self.paths.get(first)
        if handlers is None:
            raise HttpError(404, f"there is no /{first}; there are {', '.join(self.paths)}")
        if method not in handlers:
            methods = ", ".join(handlers)
            raise HttpError(405, f"/{first} knows {methods}", {"Allow": methods})
        answer = getattr(self, f"_{method.lower()}_{first}")
        try:
            body = await answer(request, rest)
        except (ValueError, TypeError, DomainError, ConfigError, RuntimeError, WireError) as error:
            raise HttpError(400, str(error)) from error
        return HttpResponse(200, JSON, json.dumps(body, default=str).encode() + b"\n")

    @property
    def _running(self) -> Broker:
        if self._broker is None:
            raise HttpError(503, "the broker stops")
        return self._broker

    @property
    def _bootstrap(self) -> str:
        host, port = self._running.advertised
        return f"{host}:{port}"

    # --- the clock ---

    def _time(self) -> dict[str, object]:
        now_ms = self.clock.now_ms()
        return {"now_ms": now_ms, "now": utc(now_ms), "auto": self.clock.auto}

    async def _get_clock(self, _request: HttpRequest, _rest: str) -> object:
        return self._time()

    async def _post_clock(self, request: HttpRequest, rest: str) -> object:
        """Handle ``/clock``, which sets ``auto``, or ``/clock/advance``."""
        if rest == "advance":
            body = body_of(request, seconds=(int, float), ms=(int, float), speed=(int, float))
            fired = await self.clock.advance_async(**body)
            return {**self._time(), "fired": [deadline.as_json() for deadline in fired]}
        if rest:
            raise HttpError(404, "there are /clock and /clock/advance")
        body = body_of(request, auto=bool)
        self.clock.auto = body.get("auto", self.clock.auto)
        return self._time()

    async def _get_fired(self, request: HttpRequest, _rest: str) -> object:
        since_ms = int(request.query.get("since_ms", "0"))
        return {
            "fired": [
                deadline.as_json() for deadline in self.clock.fired if deadline.at_ms >= since_ms
            ]
        }

    # --- faults ---

    async def _post_faults(self, request: HttpRequest, _rest: str) -> object:
        body = body_of(
            request,
            **dict.fromkeys(_FAULT_FIELDS, object),
            observe=bool,
        )
        match = body.get("match")
        if match is not None and not isinstance(match, dict):
            raise ValueError("match is an object of fields and values")
        if body.pop("observe", False):
            if body.keys() - {"api", "match"}:
                raise ValueError("an observer has an api and a match, and does nothing")
            fault = self.faults.observe(**body)
        else:
            fault = self.faults.add(**body)
        number = max(self._handles, default=0) + 1
        self._handles[number] = fault
        return self._fault_json(number)

    async def _get_faults(self, request: HttpRequest, rest: str) -> object:
        """Return all faults, or the fault with a number.

        With ``?hits=…``, first wait for that many matching requests, at most ``wait_s`` seconds.
        """
        if not rest:
            return {"faults": [self._fault_json(number) for number in self._handles]}
        fault = self._handle(rest)
        if "hits" in request.query:
            hits = int(request.query["hits"])
            # Evaluated before the wait, so that an invalid number fails at once.
            wait_s = _wait_s(request)
            try:
                await fault.wait_async(wait_s, hits=hits)
            except TimeoutError as error:
                raise HttpError(408, str(error)) from error
        return self._fault_json(int(rest))

    async def _delete_faults(self, _request: HttpRequest, rest: str) -> object:
        if rest:
            self._handle(rest).remove()
            del self._handles[int(rest)]
        else:
            self.faults.clear()
            self._handles.clear()
        return {"faults": [self._fault_json(number) for number in self._handles]}

    def _handle(self, rest: str) -> Fault:
        fault = self._handles.get(int(rest)) if rest.isdecimal() else None
        if fault is None:
            raise HttpError(404, f"there is no fault {rest}")
        return fault

    def _fault_json(self, number: int) -> dict[str, object]:
        fault = self._handles[number]
        requests = [
            {
                "api": request.api,
                "version": request.version,
                "client_id": request.client_id,
                "topics": request.topics,
                "groups": request.groups,
                "transactional_ids": request.transactional_ids,
            }
            for request in list(fault.seen)
        ]
        return {"id": number, **fault.as_json(), "seen": requests}

    # --- queries ---

    async def _get_topics(self, _request: HttpRequest, _rest: str) -> object:
        return {
            "topics": [
                {"name": name, "id": str(topic.topic_id), "partitions": len(topic.partitions)}
                for name, topic in (await self._topics()).items()
            ]
        }

    async def _post_topics(self, request: HttpRequest, _rest: str) -> object:
        body = body_of(request, name=str, partitions=int, config=dict)
        if "name" not in body:
            raise ValueError("a topic has a name")
        config = setting_texts(body.get("config", {}))
        partitions = await self._create_topic(body["name"], body.get("partitions", -1), config)
        return {"name": body["name"], "partitions": partitions}

    async def _get_history(self, request: HttpRequest, _rest: str) -> object:
        """Return the history, filtered by ``?group=…`` or ``?transactional_id=…``, newest last."""
        scopes = {"group": "group", "transactional_id": "transaction"}
        subjects = {
            (scopes[name], value) for name, value in request.query.items() if name in scopes
        }
        entries = [
            entry
            for entry in await self._all_entries()
            if not subjects or (entry.scope, entry.subject) in subjects
        ]
        return {
            "history": [
                {name: getattr(entry, name) for name in Entry.__slots__} for entry in entries
            ]
        }

    async def _get_shares(self, request: HttpRequest, _rest: str) -> object:
        """Return the in-flight records of ``?group=…``."""
        if "group" not in request.query:
            raise ValueError("/shares needs ?group=…")
        shares = await self._shares(request.query["group"])
        return {"shares": [share.as_json() for share in shares]}

    async def _get_groups(self, request: HttpRequest, _rest: str) -> object:
        """Return the group ``?group=…``; first wait for a condition, at most ``wait_s`` seconds.

        The group is described through the broker's listener, like by any other client.
        """
        names("/groups", request.query, _GROUP_FIELDS)
        if "group" not in request.query:
            raise ValueError("/groups needs ?group=…")
        waiting, wait_s = self._group_wait(request.query), _wait_s(request)
        waits = not {"members", "state", "lag", "fetching"}.isdisjoint(request.query)
        end = monotonic_s() + wait_s
        session = ClusterSession(self._bootstrap, LOOK_S, client_id=OWN_CLIENT_ID)
        try:
            while not await asyncio.to_thread(_is_over, waiting, session) and waits:
                if monotonic_s() >= end:
                    raise HttpError(408, f"not within {wait_s} s: {waiting.describe()}")
                await asyncio.sleep(LOOK_AGAIN_S)
        except WireError as error:
            raise HttpError(400, f"the group cannot be described: {error}") from error
        finally:
            session.client.close()
        return asdict(waiting.seen) if waiting.seen is not None else {}

    def _group_wait(self, query: Mapping[str, str]) -> GroupWait:
        """Return the condition in a query. Raises ValueError."""
        members, lag = (int(query[name]) if name in query else None for name in ("members", "lag"))
        if "state" in query:
            one_of("state", query["state"], GROUP_STATES)
        one_of("fetching", query.get("fetching", "false"), ("true", "false"))
        fetching = query.get("fetching") == "true"
        missing = self._positions.not_fetched if fetching else None
        return GroupWait(query["group"], members, query.get("state"), lag, missing)

    async def _topics(self) -> Mapping[str, TopicImage]:
        return self._running.services.metadata.topics

    async def _create_topic(self, name: str, partitions: int, config: Mapping[str, str]) -> int:
        """Create a topic, and return the number of its partitions; -1 is the broker's default."""
        services = self._running.services
        topic = NewTopic(name, partitions, configs=config)
        return create_topic(services.active_controller.decide, services.config, topic).partitions

    async def _shares(self, group: str) -> list[ShareRecords]:
        return in_order(await states_of(self._running, group))

    async def _all_entries(self) -> list[Entry]:
        services = self._running.services
        services.history.write_all()
        partition = services.logs.find(HISTORY_TOPIC, 0)
        if partition is None:
            return []
        values = [
            record.value
            for header, batch in partition.reader.read_all()
            for record in decode_records(batch, 0, header)
        ]
        decoded = [decode_value(bytes(value)) for value in values if value is not None]
        return [record for record in decoded if record is not None]


def _is_over(waiting: GroupWait, session: ClusterSession) -> bool:
    """Poll a group; after a temporary error, such as a loading coordinator, return False."""
    try:
        return waiting.is_over(session)
    except WireError as error:
        if not (isinstance(error, ApiError) and passes(error)):
            raise
        return False


def _wait_s(request: HttpRequest) -> float:
    """Return the time limit of a wait. Raises ValueError."""
    return max(0.0, min(float(request.query.get("wait_s", "10")), MAX_WAIT_S))


def body_of(request: HttpRequest, **fields: Any) -> dict[str, Any]:
    """Return the JSON object in a request; check its fields. Raises HttpError, ValueError."""
    if not request.body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise HttpError(415, f"a body is {JSON}, and its header says so")
    body = json.loads(request.body)
    if not isinstance(body, dict):
        raise TypeError("a body is an object")
    for name, value in body.items():
        if name not in fields:
            raise ValueError(f"there is no {name!r} here; there are {', '.join(fields)}")
        # In Python a bool is an int.
        if not isinstance(value, fields[name]) or (
            isinstance(value, bool) and fields[name] not in {bool, object}
        ):
            raise TypeError(f"{name} cannot be {value!r}")
    return cast("dict[str, Any]", body)
