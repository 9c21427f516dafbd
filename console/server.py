"""The console's process: routes, answers, streams, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
from aiohttp import web

from fencepost.cli.printing import print_lines
from fencepost.client.channel import (
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.client.queries.session import ClusterSession
from fencepost.client.router import ApiError
from fencepost.client.security import PLAINTEXT, Security
from fencepost.console import doctor, groups, limits, messages, overview, topics, transactions
from fencepost.console.gate import ConnectionGate
from fencepost.console.guard import API, HEADERS, AccessGuard, Handler, RequestRefusal, is_loopback
from fencepost.console.history import HistoryCache
from fencepost.console.limits import MAX_BODY_BYTES, MAX_SEARCHES, MIN_INTERVAL_S, PULSE_TIMEOUT_S
from fencepost.console.live import KEEPALIVE, TooManyClientsError, ViewWatches, event
from fencepost.console.paging import Params
from fencepost.console.pulse import HealthProbe
from fencepost.console.sessions import SessionPool
from fencepost.logcore.system import on_signal
from fencepost.protocol.errors import UnsupportedVersion, WireError

STATIC = Path(__file__).parent / "static"
STREAM = "text/event-stream"

View = Callable[[ClusterSession, Params, HistoryCache], dict[str, Any]]
VIEWS: Mapping[str, View] = {
    "overview": overview.overview_view,
    "transactions": transactions.transactions_view,
    "transaction": transactions.transaction_view,
    "groups": groups.groups_view,
    "group": groups.group_view,
    "plan": groups.plan_view,
    "doctor": doctor.doctor_view,
    "topics": topics.topics_view,
    "topic": topics.topic_view,
}
"""The views of ``GET /api/NAME``."""

NOT_FOUND = frozenset(
    {
        "unknown_topic_or_partition",
        "group_id_not_found",
        "transactional_id_not_found",
        "offset_out_of_range",
    }
)

OPEN_TO_OTHERS = (
    "other machines can reach it without encryption, so that eavesdroppers get the token;"
    " put a tunnel (ssh -L) or a proxy with TLS in front of it. Browsers on other"
    " machines use a host name given with --allow-host"
)


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The options of the command line."""

    bootstrap: str
    listen: str = "127.0.0.1:0"
    token: str = ""
    allow_writes: bool = False
    hosts: Collection[str] = ()
    """Host names that requests may use in addition to this machine's own names."""
    undo_dir: Path = Path()
    timeout_s: float = 10.0
    security: Security = PLAINTEXT
    """The console's transport security and credentials for the brokers."""
    tls: ssl.SSLContext | None = None
    """The TLS context for browsers' connections."""


def explained(error: Exception) -> tuple[int, dict[str, str]]:
    """Return the HTTP status and the body for ``error``: a keyword for programs, and a message."""
    fields: tuple[int, str, str]
    if isinstance(error, RequestRefusal):
        fields = error.status_code, error.error, error.message
    elif isinstance(error, (BrokerUnreachable, ConnectionLostError)):
        fields = 503, "unreachable", str(error)
    elif isinstance(error, AuthenticationError):
        fields = 502, "login", str(error)
    elif isinstance(error, ApiError):
        name = error.code.name
        fields = 404 if name in NOT_FOUND else 502, name.replace("_", "-"), str(error)
    elif isinstance(error, UnsupportedVersion):
        fields = 501, "unsupported", f"this broker does not support the request: {error}"
    elif isinstance(error, WireError):
        fields = 502, "protocol", str(error)
    elif isinstance(error, TooManyClientsError):
        fields = 429, "too-many", str(error)
    elif isinstance(error, messages.NoSuchRecordError):
        fields = 404, "no-record", str(error)
    elif isinstance(error, groups.ChangedMeanwhileError):
        fields = 409, "changed", str(error)
    elif isinstance(error, click.ClickException):
        fields = 400, "refused", error.message
    elif isinstance(error, ValueError):
        fields = 400, "refused", str(error)
    else:
        fields = 500, "broken", f"{type(error).__name__}: {error}"
    status, word, sentence = fields
    return status, {"error": word, "message": sentence}


def answer(data: Mapping[str, Any], status: int = 200) -> web.Response:
    """Return a JSON answer. Lone surrogates in a broker's text are escaped, not refused."""
    body = json.dumps(data, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


class Console:
    """The web application, for one cluster."""

    def __init__(self, settings: ConsoleSettings) -> None:
        self.settings = settings
        self.token = settings.token or secrets.token_urlsafe(32)
        ask = partial(
            SessionPool, settings.bootstrap, settings.timeout_s, security=settings.security
        )
        self.sessions = ask()
        # A search that waits for new records blocks its thread, so pages use other threads.
        self.searchers = ask(MAX_SEARCHES)
        self.gate: ConnectionGate | None = None
        self.history = HistoryCache()
        self.pulse = HealthProbe(
            settings.bootstrap, min(settings.timeout_s, PULSE_TIMEOUT_S), settings.security
        )
        self.watches = ViewWatches(self.pulse.probe)
        self.searches = 0
        host = settings.listen.rpartition(":")[0]
        names = {"127.0.0.1", "localhost", "::1", host, *settings.hosts} - {"0.0.0.0", "::", ""}  # noqa: S104 - no name
        self.guard = AccessGuard(self.token, names, allow_writes=settings.allow_writes)

    def application(self) -> web.Application:
        """Return the application that aiohttp serves."""
        app = web.Application(middlewares=[self._handle_guarded], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name}", self._static)
        app.router.add_get("/api/about", self._about)
        app.router.add_get("/api/record", self._record)
        app.router.add_get("/api/messages", self._messages)
        app.router.add_post("/api/reset", self._reset)
        app.router.add_get("/api/{view}", self._view)
        app.on_cleanup.append(self._close_sessions)
        return app

    async def _close_sessions(self, _app: web.Application) -> None:
        self.sessions.close()
        self.searchers.close()
        self.pulse.close()

    @web.middleware
    async def _handle_guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self.guard.check(request)
            if self.gate is not None and request.path.startswith(API):
                self.gate.authenticated(request.protocol)
            response = await handler(request)
        except web.HTTPException as error:
            if isinstance(error, RequestRefusal):
                status, body = explained(error)
                response = answer(body, status)
            else:
                body = {"error": "http", "message": error.reason}
                response = answer(body, error.status)
        except Exception as error:  # noqa: BLE001 - every failure is an answer
            status, body = explained(error)
            response = answer(body, status)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    # --- the page ---

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in {file.name for file in STATIC.iterdir()}:
            raise web.HTTPNotFound
        return web.FileResponse(STATIC / name)

    # --- answers ---

    async def _about(self, _request: web.Request) -> web.StreamResponse:
        return answer(
            {
                "bootstrap": self.settings.bootstrap,
                "allow_writes": self.settings.allow_writes,
                "limits": {name.lower(): v for name, v in vars(limits).items() if name.isupper()},
            }
        )

    async def _view(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["view"]
        view = VIEWS.get(name)
        if view is None:
            raise RequestRefusal(404, "unknown-view", f"there is no view {name!r}")
        params = dict(request.query)

        async def read_view() -> dict[str, Any]:
            return await self.sessions.run_query(lambda s: view(s, params, self.history))

        if STREAM not in request.headers.get("Accept", ""):
            return answer(await read_view())
        with self.watches.client():
            key = (name, *(f"{k}={v}" for k, v in sorted(params.items())))
            return await self._stream(
                request, self.watches.follow(key, read_view, lambda error: explained(error)[1])
            )

    async def _record(self, request: web.Request) -> web.StreamResponse:
        params = dict(request.query)
        return answer(await self.sessions.run_query(lambda s: messages.record_view(s, params)))

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")  # noqa: TRY004 - an answer, not a bug
        if not body.get("execute"):
            return answer(await self.sessions.run_query(partial(groups.preview, body=body)))
        self.guard.check_writes()
        undo_dir = self.settings.undo_dir
        done = await self.sessions.run_query(partial(groups.reset, body=body, undo_dir=undo_dir))
        return answer(done)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        params = dict(request.query)
        search = messages.Search.of(params)
        if self.searches >= MAX_SEARCHES:
            raise TooManyClientsError(f"{MAX_SEARCHES} searches are running, which is the limit")
        with self.watches.client():
            self.searches += 1
            try:
                begun = await self.searchers.run_query(lambda s: search.begin(s, params))
                return await self._stream(request, self._search_events(search, begun))
            finally:
                self.searches -= 1

    async def _search_events(
        self, search: messages.Search, begun: dict[str, Any]
    ) -> AsyncIterator[str]:
        """Yield the events of one search: begin, rows with progress, end."""
        yield event("begin", begun)
        loop = asyncio.get_running_loop()
        told_at = loop.time()
        rows: list[dict[str, Any]] = []
        while (why := search.end_reason) is None:
            try:
                rows += await self.searchers.run_query(search.step)
            except (WireError, ValueError, click.ClickException) as error:
                yield event("rows", {"rows": rows, **search.progress()})
                yield event("failed", {**explained(error)[1], **search.progress()})
                return
            if loop.time() - told_at >= MIN_INTERVAL_S or (search.follow and rows):
                told_at = loop.time()
                yield event("rows", {"rows": rows, **search.progress()})
                rows = []
        yield event("rows", {"rows": rows, **search.progress()})
        yield event("end", {"why": why, **search.progress()})

    async def _stream(self, request: web.Request, frames: AsyncIterator[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": STREAM})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            try:
                await response.write(KEEPALIVE.encode())
                async for frame in frames:
                    await response.write(frame.encode("utf-8", "backslashreplace"))
            finally:
                await frames.aclose()  # type: ignore[attr-defined]
        return response


@contextlib.asynccontextmanager
async def served(settings: ConsoleSettings) -> AsyncIterator[str]:
    """Serve inside the context; yields the URL with the token. Raises OSError."""
    console = Console(settings)
    host, _, port = settings.listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    # An open page keeps its stream open, so the shutdown must not wait for it.
    runner = web.AppRunner(
        console.application(), access_log=None, shutdown_timeout=0.5, handler_cancellation=True
    )
    await runner.setup()
    try:
        console.gate = ConnectionGate(cast("web.Server", runner.server), settings.tls)
        listener = await asyncio.get_running_loop().create_server(console.gate, host, int(port))
        try:
            bound = listener.sockets[0].getsockname()[1]
            name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a wildcard
            shown = f"[{name}]" if ":" in name else name
            scheme = "http" if settings.tls is None else "https"
            yield f"{scheme}://{shown}:{bound}/#token={console.token}"
        finally:
            listener.close()
            console.gate.close()
    finally:
        await runner.cleanup()


def run(settings: ConsoleSettings) -> None:
    """Serve in this process until SIGTERM or Ctrl-C; the first printed line contains the URL."""

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            on_signal(asyncio.get_running_loop(), number, stop.set)
        async with served(settings) as url:
            print_lines(f"console {url}")
            print_lines(f"of {settings.bootstrap}; Ctrl-C stops it", err=True)
            if settings.tls is None and not is_loopback(settings.listen.rpartition(":")[0]):
                print_lines(OPEN_TO_OTHERS, err=True)
            await stop.wait()

    asyncio.run(serve())
