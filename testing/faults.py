"""Faults that a test injects into a broker: errors, lost responses, closed connections, delays.

::

    lost = broker.faults.add(api="EndTxn", close="after")  # committed, but the response is lost
    broker.faults.add(api="Produce", error="NOT_LEADER_OR_FOLLOWER", times=2, match={"topic": "t"})
    seen = broker.faults.observe(api="OffsetCommit")
    ...
    lost.wait(timeout=5)

Every method may be called from any thread. While there are no faults or observers, the broker's
server uses its original registry of handlers, so that this module costs nothing.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from kio.schema.errors import ErrorCode

from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.handlers import CloseConnection, Context, Handler, Registry
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.clock import monotonic_s
from fencepost.protocol.api import APIS, ApiKey
from fencepost.testing.arguments import checked, one_of
from fencepost.testing.error_answers import APIS_ANSWERED_WITH_DATA, error_answer
from fencepost.testing.partial_faults import SPLIT, answer_in_part, places_of
from fencepost.testing.requests import SeenRequest, check_fields, finished, matcher

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.testing.views import Partition

Match = Callable[[SeenRequest], object] | Mapping[str, object]
"""A function of each request, or fields with the values that they must have."""

OWN_CLIENT_ID: Final = "fencepost-testing"
"""The client id of this package's own requests to a broker under test."""

_is_broker = re.compile(
    r"broker-\d+-(fetcher-\d+|txn-marker-sender|heartbeat)|AddPartitionsManager-client-\d+"
).fullmatch
"""Matches the client ids that brokers use, the same as in Kafka."""

MAX_SEEN: Final = 1_000
"""The limit of requests that a :class:`Fault` keeps; the oldest are dropped first."""


@checked
class Fault:
    """A fault or an observer, created by :class:`Faults`."""

    def __init__(
        self,
        owner: Faults,
        api: ApiKey | None,
        match: Match | None,
        *,
        times: int | None = None,
        error: ErrorCode | None = None,
        drop: str | None = None,
        close: str | None = None,
        delay_ms: float = 0,
        only: Collection[Partition] = (),
    ) -> None:
        self.api = api
        self.times = times
        self.error = error
        self.drop = drop
        self.close = close
        self.delay_ms = delay_ms
        self.only = frozenset(only)
        """A request must name one of these partitions; only these partitions get an error."""
        self.seen: deque[SeenRequest] = deque(maxlen=MAX_SEEN)
        """The matching requests."""
        self.failure: str | None = None
        """The first exception that ``match`` raised, as a text. A request for which ``match``
        raises does not match."""
        self._hits = 0
        self.owner = owner
        if isinstance(match, Mapping):
            check_fields(match, api)
        self._matches = matcher(match)
        self._changed = threading.Condition()
        self._told: list[Callable[[], object]] = []
        """Callbacks of waiting coroutines, called at each matching request."""

    @property
    def hits(self) -> int:
        """The number of matching requests."""
        return self._hits

    @property
    def is_used_up(self) -> bool:
        """Whether the fault has no further effect: ``times`` is reached, or it was removed."""
        return self not in self.owner.all

    def remove(self) -> None:
        """End the effect of this fault."""
        self.owner.remove(self)

    def wait(self, timeout: float = 10.0, *, hits: int = 1) -> None:
        """Return after ``hits`` matching requests; raises TimeoutError after ``timeout`` s.

        Raises RuntimeError if ``match`` has raised an exception.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over(hits), timeout):
                raise self._too_few(hits, timeout)

    async def wait_async(self, timeout: float = 10.0, *, hits: int = 1) -> None:
        """Do :meth:`wait` in a coroutine; the wait can be cancelled."""
        changed = asyncio.Event()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, changed.set)
        with self._changed:
            self._told.append(tell)
        # The caller's loop may have a clock that the test has frozen.
        end = monotonic_s() + timeout
        alarm = threading.Timer(timeout, tell)
        alarm.daemon = True
        alarm.start()
        try:
            while not self._is_over(hits):
                if monotonic_s() >= end:
                    raise self._too_few(hits, timeout)
                changed.clear()
                await changed.wait()
        finally:
            alarm.cancel()
            with self._changed:
                self._told.remove(tell)

    def _too_few(self, hits: int, timeout: float) -> TimeoutError:
        name = "any API" if self.api is None else APIS[self.api].name
        return TimeoutError(f"{name}: {self._hits} of {hits} requests in {timeout} s")

    def takes(self, request: SeenRequest) -> bool:
        """Return whether the fault applies to a request; if so, count the request."""
        if self.api is not None and self.api != request.api_key:
            return False
        if self.times is not None and self._hits >= self.times:
            return False
        try:
            if self.only and self.only.isdisjoint(request.partitions):
                return False
            if not self._matches(request):
                return False
        except Exception as error:  # noqa: BLE001 - a test's own function, on the broker's thread
            self._fail(f"match of {request!r} raised {type(error).__name__}: {error}")
            return False
        with self._changed:
            self._hits += 1
            self.seen.append(request)
            self._changed.notify_all()
            for tell in self._told:
                tell()
        return True

    def _fail(self, why: str) -> None:
        with self._changed:
            self.failure = self.failure or why
            self._changed.notify_all()
            for tell in self._told:
                tell()

    def _is_over(self, hits: int) -> bool:
        """Return whether there were enough requests; raise RuntimeError if ``match`` failed."""
        if self._hits < hits and self.failure is not None:
            raise RuntimeError(self.failure)
        return self._hits >= hits

    def _only_by_topic(self) -> dict[str, list[int]]:
        indexes: dict[str, list[int]] = {}
        for topic, index in sorted(self.only):
            indexes.setdefault(topic, []).append(index)
        return indexes

    def as_json(self) -> dict[str, object]:
        """Return the fault's arguments and hits, for JSON."""
        return {
            "api": None if self.api is None else APIS[self.api].name,
            "error": None if self.error is None else self.error.name.upper(),
            "drop": self.drop,
            "close": self.close,
            "delay_ms": self.delay_ms,
            "only": self._only_by_topic(),
            "times": self.times,
            "hits": self._hits,
        }


@checked
class Faults:
    """The faults of one broker. The first fault that matches a request applies to it.

    A restart creates a new :class:`Broker`, to which the same faults are attached. Faults do not
    affect clients whose id is in ``spared``.

    In a cluster ``of_all`` has the faults for all brokers. They are tried after the broker's own,
    and do not affect requests between brokers.
    """

    def __init__(
        self,
        spared: Collection[str] = frozenset({OWN_CLIENT_ID}),
        *,
        of_all: Faults | None = None,
    ) -> None:
        self.spared = frozenset(spared)
        self._of_all = of_all
        self._of_one: list[Faults] = []
        if of_all is not None:
            of_all._of_one.append(self)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._observers: list[Fault] = []
        self._broker: Broker | None = None
        self._registry: Registry | None = None
        self._parked: set[asyncio.Future[None]] = set()

    @property
    def all(self) -> list[Fault]:
        """Faults and observers that are not used up, oldest first."""
        return [*self._faults, *self._observers]

    def add(
        self,
        *,
        api: str | ApiKey | None = None,
        error: str | int | ErrorCode | None = None,
        drop: bool | Literal["request", "answer"] = False,
        close: Literal["before", "after"] | None = None,
        delay_ms: float = 0,
        times: int | None = 1,
        match: Match | None = None,
        only: Mapping[str, int | Iterable[int]] | None = None,
    ) -> Fault:
        """Apply a fault to the next ``times`` requests that ``match``; None is no limit.

        ``api`` is one of Kafka's names, or None for any. Give one of these:

        * ``error``: the request is not handled, and gets a response with this error;
        * ``drop``: the request is never answered; with ``"answer"`` (or True) it is handled all the
          same, with ``"request"`` it is not;
        * ``close``: the connection is closed ``"before"`` the request is handled, or ``"after"``
          it, without the response;
        * only ``delay_ms``: the request is handled that much later. The delay may also precede one
          of the others.

        With ``only``, such as ``{"orders": [0, 2]}``, a request must name one of these partitions.
        An ``error`` is returned for these partitions only; the request's other partitions are
        handled. That is possible for Produce, Fetch, ListOffsets, OffsetCommit, TxnOffsetCommit,
        DeleteRecords and OffsetForLeaderEpoch.

        Raises ValueError for an unknown name, including an unknown field of ``api`` in ``match``,
        and unless exactly one of the effects above is given.
        """
        lost: str | None = "answer" if drop is True else drop or None
        if (error is not None) + (lost is not None) + (close is not None) > 1:
            raise ValueError("give only one of error, drop and close")
        if error is None and lost is None and close is None and delay_ms <= 0:
            raise ValueError("a fault without effect: give error, drop, close or delay_ms")
        if lost is not None:
            one_of("drop", lost, ("request", "answer"))
        if close is not None:
            one_of("close", close, ("before", "after"))
        key, places = _api(api), places_of(only) if only is not None else ()
        if places and error is not None and key not in SPLIT:
            api_names = ", ".join(APIS[api_key].name for api_key in SPLIT)
            raise ValueError(f"an error in only some partitions needs an api among {api_names}")
        fault = Fault(
            self,
            key,
            match,
            times=times,
            error=None if error is None else _error(error),
            drop=lost,
            close=close,
            delay_ms=delay_ms,
            only=places,
        )
        with self._lock:
            self._faults.append(fault)
            self._install()
        return fault

    def observe(self, *, api: str | ApiKey | None = None, match: Match | None = None) -> Fault:
        """Add an observer, which counts and keeps requests, and changes nothing."""
        observer = Fault(self, _api(api), match)
        with self._lock:
            self._observers.append(observer)
            self._install()
        return observer

    def remove(self, fault: Fault) -> None:
        """Remove a fault or an observer; do nothing if it was removed before."""
        with self._lock:
            for kept in (self._faults, self._observers):
                if fault in kept:
                    kept.remove(fault)
            self._install()

    def clear(self) -> None:
        """Remove faults and observers; close connections of dropped requests, end all delays."""
        with self._lock:
            self._faults.clear()
            self._observers.clear()
            self._install()
        for place in list(self._parked):
            loop = place.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, place)

    # --- for the broker's owner ---

    def attach(self, broker: Broker) -> None:
        """Apply to the requests of ``broker`` from now on; call it on the broker's loop."""
        with self._lock:
            self._broker = broker
            self._registry = broker.server.registry
            self._install()

    def detach(self, broker: Broker) -> None:
        """Detach from a broker that is about to stop; call it on the broker's loop."""
        with self._lock:
            if self._broker is broker and self._registry is not None:
                broker.server.registry = self._registry
                self._broker = self._registry = None
        loop = asyncio.get_running_loop()
        for owner in filter(None, (self, self._of_all)):
            for place in list(owner._parked):
                if place.get_loop() is loop:
                    _set(place)

    # --- inside ---

    def _install(self) -> None:
        """Install the registry with faults in the server, or the original one."""
        for faults in self._of_one:
            faults._install()
        if self._broker is not None and self._registry is not None:
            is_needed = bool(self.all or (self._of_all is not None and self._of_all.all))
            server = self._broker.server
            if is_needed == (server.registry is self._registry):
                registry = (
                    _FaultyRegistry(self._registry, self.run) if is_needed else self._registry
                )
                server.registry = registry

    def _find(self, request: SeenRequest) -> Fault | None:
        """Return the first fault that applies to ``request``, after calling all observers."""
        fault = self._find_own(request)
        if fault is None and self._of_all is not None and not _is_broker(request.client_id or ""):
            fault = self._of_all._find_own(request)
        return fault

    def _find_own(self, request: SeenRequest) -> Fault | None:
        with self._lock:
            faults, observers = list(self._faults), list(self._observers)
        for observer in observers:
            observer.takes(request)
        for fault in faults:
            if fault.takes(request):
                if fault.times is not None and fault.hits >= fault.times:
                    self.remove(fault)
                return fault
        return None

    def run(self, handler: Handler, ctx: Context) -> Any:
        """Handle a request in place of ``handler``."""
        if ctx.client_id in self.spared:
            return handler.run(ctx)
        fault = self._find(SeenRequest(ctx))
        return handler.run(ctx) if fault is None else self._faulty(fault, handler, ctx)

    def _faulty(self, fault: Fault, handler: Handler, ctx: Context) -> Work[Any]:
        if fault.delay_ms > 0:
            yield from self._wait(fault, fault.delay_ms / 1000)
        if fault.close == "before":
            raise CloseConnection("a fault: closed before the request")
        if fault.error is not None:
            if fault.only:
                return (yield from answer_in_part(ctx, handler, fault.error, fault.only))
            real = None
            if ctx.api_key in APIS_ANSWERED_WITH_DATA:
                real = yield from finished(handler.run(ctx))
            answer = error_answer(ctx, fault.error, real)
            if answer is None:
                raise CloseConnection(
                    "a fault: the request has no response that could contain an error"
                )
            return answer
        if fault.drop != "request":
            answer = yield from finished(handler.run(ctx))
            if fault.close is None and fault.drop is None:
                return answer
        if fault.drop is not None:
            # Later requests on the connection are not answered either, as responses have the order
            # of their requests.
            yield from self._wait(fault, None)
        raise CloseConnection("a fault: closed after the request")

    def _wait(self, fault: Fault, seconds: float | None) -> Work[None]:
        """Wait for ``seconds``, or without a limit if None.

        The end of the connection or of the broker, and :meth:`clear`, end the wait earlier.
        """
        loop, parked = asyncio.get_running_loop(), fault.owner._parked
        place: asyncio.Future[None] = loop.create_future()
        alarm = None if seconds is None else loop.call_later(seconds, _set, place)
        parked.add(place)
        try:
            yield place
        finally:
            parked.discard(place)
            if alarm is not None:
                alarm.cancel()


def _set(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


class _FaultyRegistry(Registry):
    """A server's registry with faults: every handler is called through :meth:`Faults.run`."""

    def __init__(self, real: Registry, run: Callable[[Handler, Context], Any]) -> None:
        self.__dict__.update(real.__dict__)
        self._real, self._run = real, run

    def handler(self, api_key: int) -> Handler:
        """Return the handler of an API, preceded by the faults."""
        handler = self._real.handler(api_key)
        return replace(handler, run=lambda ctx: self._run(handler, ctx))


def _api(api: str | ApiKey | None) -> ApiKey | None:
    if api is None or isinstance(api, ApiKey):
        return api
    if not isinstance(api, str):
        raise TypeError(f"api is a name like 'EndTxn', not {api!r}")
    keys = {api.name.lower(): ApiKey(key) for key, api in APIS.items()}
    if api.lower() in keys:
        return keys[api.lower()]
    near = difflib.get_close_matches(api.lower(), keys, cutoff=0.7)
    raise ValueError(
        f"there is no API {api!r}; "
        + (
            f"did you mean {' or '.join(APIS[keys[name]].name for name in near)}?"
            if near
            else "use Kafka's names, such as EndTxn or OffsetCommit"
        )
    )


def _error(error: str | int | ErrorCode) -> ErrorCode:
    codes = {
        error_code.name.upper(): error_code
        for error_code in ErrorCode
        if error_code is not ErrorCode.none
    }
    if isinstance(error, bool) or not isinstance(error, (str, int)):
        raise TypeError(f"error is a name like 'NOT_COORDINATOR', not {error!r}")
    for name, error_code in codes.items():
        if error_code == error or (isinstance(error, str) and name == error.upper()):
            return error_code
    hint = nearest(error.upper(), codes) if isinstance(error, str) else ""
    raise ValueError(f"there is no error {error!r} in Kafka's protocol{hint}")
