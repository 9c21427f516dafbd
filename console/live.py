"""Live views: a view is refreshed while pages show it, and sent to them when it has changed.

All pages with the same view and parameters share one :class:`ViewWatch`, so that the broker's load
does not grow with the number of open pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from fencepost.console.limits import (
    KEEPALIVE_S,
    MAX_CLIENTS,
    MIN_INTERVAL_S,
    PULSE_S,
    REST_FACTOR,
)

Look = Callable[[], Awaitable[Mapping[str, Any]]]
Explain = Callable[[Exception], Mapping[str, Any]]
KEEPALIVE = ": nothing new\n\n"
ALL_WELL: Mapping[str, Any] = {"silent": [], "away": None}
"""The result of a check if every broker answers. It is also used if the check itself fails: then
the view reports the error."""


def event(name: str, data: Mapping[str, Any]) -> str:
    """Format a server-sent event. JSON contains no line breaks, which would end the field."""
    return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


class TooManyClientsError(Exception):
    """The limit of concurrent streams is reached."""


class ViewWatch:
    """One view with its parameters. It is refreshed only while it has subscribers."""

    def __init__(self, look: Look, explain: Explain) -> None:
        self._look = look
        self._explain = explain
        self._seen: object = None
        self._frame: str | None = None
        self._beat: str | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.subscribers = 0

    async def frames(self) -> AsyncIterator[str]:
        """Yield the current state, then each newer one; states between two reads are skipped."""
        self.subscribers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        sent: str | None = None
        felt: str | None = None
        try:
            while True:
                changed = self._changed
                if self._frame is not None and self._frame is not sent:
                    sent = self._frame
                    yield sent
                    continue
                if self._beat is not None and self._beat is not felt:
                    felt = self._beat
                    yield felt
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), KEEPALIVE_S)
                except TimeoutError:
                    yield KEEPALIVE
        finally:
            self.subscribers -= 1
            if not self.subscribers and self._task is not None:
                self._task.cancel()
                self._task = None
                # The next subscriber must not receive an outdated state.
                self._frame = self._seen = None

    def send_beat(self, beat: str | None) -> None:
        """Tell subscribers which brokers do not answer; a refresh may notice this later."""
        self._beat = beat
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            kind = "data"
            state: Mapping[str, Any]
            try:
                state = await self._look()
            except Exception as error:  # noqa: BLE001 - sent to the subscribers
                kind, state = "away", self._explain(error)
            if (kind, state) != self._seen:
                self._seen = (kind, state)
                self._frame = event(kind, {"at_ms": time.time_ns() // 1_000_000, "data": state})
                self._wake()
            cost = time.monotonic() - began
            await asyncio.sleep(max(MIN_INTERVAL_S, REST_FACTOR * cost if kind == "data" else 0))


class ViewWatches:
    """All watched views, by name and parameters.

    While a view is watched, ``probe`` is called repeatedly. It returns the brokers that do not
    answer, and may take about a second.
    """

    def __init__(self, probe: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._watches: dict[tuple[str, ...], ViewWatch] = {}
        self._probe = probe
        self._beat: str | None = None
        self._pulse: asyncio.Task[None] | None = None
        self.clients = 0

    async def _run(self) -> None:
        # An earlier stream may have reported a silent broker, so the first result is always sent.
        seen: Mapping[str, Any] | None = None
        while True:
            try:
                pulse = await self._probe()
            except Exception:  # noqa: BLE001 - the view itself says what is wrong
                pulse = ALL_WELL
            if pulse != seen:
                seen = pulse
                self._beat = event("pulse", pulse)
                for watch in self._watches.values():
                    watch.send_beat(self._beat)
            await asyncio.sleep(PULSE_S)

    @contextlib.contextmanager
    def client(self) -> Any:
        """Count one more stream. Raises :class:`TooManyClientsError`."""
        if self.clients >= MAX_CLIENTS:
            raise TooManyClientsError(f"{MAX_CLIENTS} streams are open, which is the limit")
        self.clients += 1
        try:
            yield
        finally:
            self.clients -= 1

    async def follow(
        self, key: tuple[str, ...], look: Look, explain: Explain
    ) -> AsyncIterator[str]:
        """Yield the frames of the watch of ``key``; start the watch if necessary."""
        watch = self._watches.setdefault(key, ViewWatch(look, explain))
        watch.send_beat(self._beat)
        if self._pulse is None:
            self._pulse = asyncio.create_task(self._run())
        frames = watch.frames()
        try:
            async for frame in frames:
                yield frame
        finally:
            await frames.aclose()  # type: ignore[attr-defined]
            if not watch.subscribers:
                self._watches.pop(key, None)
            if not self._watches and self._pulse is not None:
                self._pulse.cancel()
                self._pulse = self._beat = None
