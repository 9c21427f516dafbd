"""`/metrics`, `/healthz` and `/readyz` of one broker, before its startup and until it has stopped.

Only one scrape at a time collects samples. Requests for the same format that arrive during a scrape
all get its response. A scrape works in slices of a millisecond; its text is sent in parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from fencepost.coordinator.metrics import client_telemetry, health, own, snapshot
from fencepost.coordinator.metrics.exposition import OPENMETRICS, PROMETHEUS, SLICE_MS, ScrapePage
from fencepost.coordinator.metrics.families import Series
from fencepost.coordinator.metrics.lag import LagTallies
from fencepost.coordinator.metrics.view import ByteRates, MetricsView
from fencepost.coordinator.runtime.background import Pace, call_later, spawn
from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.coordinator.server.http import (
    HttpError,
    HttpRequest,
    HttpResponse,
    HttpServer,
    Tls,
    serve_http,
)
from fencepost.coordinator.server.http_access import HttpUsers
from fencepost.coordinator.server.http_messages import text_response
from fencepost.coordinator.server.request_watch import RequestWatch
from fencepost.logcore.clock import monotonic_s

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.server.server import Server

COMPAT: Final[Mapping[str, str]] = {
    "kafka-exporter": "kafka_exporter",
    "kminion": "kminion",
    "jmx": "jmx",
}
"""Modules with the metric names of other exporters, by their names in the configuration."""

TICK_MS: Final = 100
"""Interval between measurements of the event loop's lag."""

ABOUT_ITSELF: Final = 4
"""The number of samples about the scrape itself; they are added even if the limit is reached."""

LAG_BOUNDS: Final = (0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""The histogram's bounds in seconds; a turn of the loop should take less than 0.05."""


class Endpoint:
    """Serves HTTP for a broker; the broker updates ``services``, ``server`` and ``stage``."""

    def __init__(
        self,
        *,
        compat: Sequence[str],
        max_series: int,
        users: HttpUsers | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._users, self._tls = users, tls
        self.stage = health.STARTING
        """The stage of the broker: :data:`health.SERVING`, or the reason why it is not ready."""
        self.services: Services | None = None
        self.server: Server | None = None
        self._compat = tuple(compat)
        self._max_series = max_series
        self._loop = asyncio.get_running_loop()
        self._http: HttpServer | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._loop_lag = Histogram(LAG_BOUNDS)
        self._lags, self._rates = LagTallies(), ByteRates()
        self._scrapes: dict[str, tuple[asyncio.Task[None], ScrapePage]] = {}
        """Scrapes in progress, by format."""
        self._one_at_a_time = asyncio.Lock()
        self._began = own.process_start_s()
        self._scraped, self._took = 0, 0.0

    # --- life ---

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        self._http = await serve_http(host, port, self._handle, tls=self._tls)
        self._set_tick()

    @property
    def address(self) -> tuple[str, int]:
        """The (host, port) of the listener. Raises RuntimeError if it is closed."""
        if self._http is None:
            raise RuntimeError("metrics are not served")
        return self._http.host, self._http.port

    def serves(self, services: Services, server: Server) -> None:
        """Start collecting the metrics of a broker that now accepts clients."""
        self.services, self.server = services, server
        self.stage = health.SERVING

    def stops(self) -> None:
        """Report that the broker is stopping, and stop collecting its metrics."""
        self.stage, self.services, self.server = health.STOPPING, None, None

    def watch(self, server: Server) -> None:
        """Count all requests to a server, beginning with its first."""
        server.watch = RequestWatch()

    async def close(self) -> None:
        """Cancel the scrapes and close the listener."""
        if self._tick is not None:
            self._tick.cancel()
        tasks = [task for task, _ in self._scrapes.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._http is not None:
            await self._http.close()

    def _set_tick(self) -> None:
        self._due = self._loop.time() + TICK_MS / 1000
        self._tick = call_later(self._loop, TICK_MS, "loop lag", self._note_lag)

    def _note_lag(self) -> None:
        self._loop_lag.note(max(0.0, self._loop.time() - self._due))
        self._set_tick()

    # --- requests ---

    async def _handle(self, request: HttpRequest) -> HttpResponse:
        answer = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        if request.path not in answer:
            raise HttpError(404, f"there are {', '.join(answer)}")
        if request.method not in {"GET", "HEAD"}:
            raise HttpError(405, "GET it", {"Allow": "GET, HEAD"})
        return await answer[request.path](request)

    async def _healthz(self, _request: HttpRequest) -> HttpResponse:
        return text_response(200, "ok")

    async def _readyz(self, _request: HttpRequest) -> HttpResponse:
        why = health.unready(self.stage, self.services)
        return text_response(503, why) if why else text_response(200, "ready")

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        if self._users is not None:
            self._users.check(request.headers)
        media_type = _format(request.headers.get("accept", ""))
        if media_type not in self._scrapes:
            page = ScrapePage(media_type, self._max_series)
            task = spawn(self._scrape(page), "scrape")
            self._scrapes[media_type] = task, page
            task.add_done_callback(lambda _: self._scrapes.pop(media_type))
        task, page = self._scrapes[media_type]
        # A client that disconnects does not cancel the scrape: other requests may wait for it.
        await asyncio.shield(task)
        return HttpResponse(200, media_type, _sent(page.pieces))

    # --- a scrape ---

    async def _scrape(self, page: ScrapePage) -> None:
        """Collect all samples and write them to the page."""
        async with self._one_at_a_time:
            since = monotonic_s()
            pace = Pace(SLICE_MS)
            await page.add(own.of_process(self._began), pace)
            await page.add(self._of_endpoint(), pace)
            services, server = self.services, self.server
            if services is not None and server is not None:
                await self._add_broker(page, services, server, pace)
            self._took = monotonic_s() - since
            self._scraped += 1
            about = ScrapePage(page.content_type, ABOUT_ITSELF)
            await about.add(self._of_scrape(page), pace)
            page.pieces += about.pieces
            page.end()

    def _of_endpoint(self) -> Iterator[Series]:
        yield own.unlabelled("fencepost_ready", int(not health.unready(self.stage, self.services)))
        yield own.labelled("fencepost_event_loop_lag_seconds", ("", self._loop_lag))

    def _of_scrape(self, page: ScrapePage) -> Iterator[Series]:
        yield own.unlabelled("fencepost_scrapes_total", self._scraped)
        yield own.unlabelled("fencepost_scrape_seconds", self._took)
        yield own.unlabelled("fencepost_metrics_series", page.series)
        yield own.unlabelled("fencepost_metrics_dropped_series", page.dropped)

    async def _add_broker(
        self, page: ScrapePage, services: Services, server: Server, pace: Pace
    ) -> None:
        view_snapshot = await snapshot.collect(services, self._max_series, pace)
        await self._lags.fill(view_snapshot, services.logs.cleaned, pace)
        page.dropped += view_snapshot.missed
        for families in (
            own.of_server(server),
            own.of_quotas(services),
            client_telemetry.series(services),
            own.of_broker(services, _version()),
            own.of_topics(view_snapshot),
            own.of_transactions(services, view_snapshot),
            own.of_groups(services, view_snapshot, self._lags.unseen),
            own.of_partitions(view_snapshot),
        ):
            await page.add(families, pace)
        if self._compat:
            traffic = {
                "": view_snapshot.traffic,
                **{topic.topic.name: topic.traffic for topic in view_snapshot.topics},
            }
            counts = {
                (name, direction): getattr(counters, direction)
                for name, counters in traffic.items()
                for direction in ("bytes_in", "bytes_out")
            }
            view = MetricsView(
                services, server, view_snapshot, self._rates.after(counts, monotonic_s())
            )
            for name in self._compat:
                await page.add(_series_of(name)(view), pace)


def _series_of(name: str) -> Callable[[MetricsView], Iterator[Series]]:
    module = import_module(f"fencepost.coordinator.metrics.{COMPAT[name]}")
    series: Callable[[MetricsView], Iterator[Series]] = module.series
    return series


def _version() -> str:
    try:
        return version("fencepost")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def _format(accept: str) -> str:
    """Return the format for an Accept header: OpenMetrics if it is named before plain text."""
    for media_range in accept.lower().split(","):
        kind = media_range.partition(";")[0].strip()
        if kind == "application/openmetrics-text":
            return OPENMETRICS
        if kind in {"text/plain", "*/*"}:
            break
    return PROMETHEUS


async def _sent(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
