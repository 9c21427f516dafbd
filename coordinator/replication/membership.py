"""A broker's membership in a KRaft cluster: its registration and the metadata it observes.

Heartbeats and metadata fetches run on an event loop in a separate thread. A controller fences a
broker that is silent for ``broker.session.timeout.ms``, so a long callback on the broker's own
loop, above all log recovery at startup, must not delay heartbeats.

Source: ``BrokerServer.startup`` and ``shutdown``, ``SharedServer``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final
from uuid import UUID

import structlog

from fencepost.cluster.controller.activation import METADATA_VERSION
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.lifecycle import (
    FATAL,
    BrokerLifecycleManager,
    BrokerState,
    LifecycleEvent,
    LifecycleIntervals,
    RegisterBroker,
)
from fencepost.cluster.observer import MetadataDivergedError
from fencepost.coordinator.replication.broker_registrar import BrokerRegistrar
from fencepost.coordinator.replication.controller_channel import RemoteControllerChannel
from fencepost.coordinator.replication.controller_connection import Address
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.replication.metadata_fetcher import MetadataFetcher
from fencepost.coordinator.replication.quorum import QuorumConfig
from fencepost.coordinator.runtime.background import report, spawn, swallow
from fencepost.logcore.errors import LogError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.errors import WireError

_log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0
"""How long to wait for the end of the thread."""


class BrokerMembership:
    """The membership of one broker. Only the event loop that creates it, its owner, may call it.

    ``on_lost`` is called on the owner's loop if the broker must stop: its broker epoch is invalid,
    or it can no longer follow the metadata.
    """

    def __init__(
        self,
        quorum: QuorumConfig,
        registration: RegisterBroker,
        intervals: LifecycleIntervals,
        on_lost: Callable[[MembershipError], None],
    ) -> None:
        self._quorum, self._registration, self._intervals = quorum, registration, intervals
        self._on_lost = on_lost
        self._owner = asyncio.get_running_loop()
        self._caught_up: asyncio.Future[None] = self._owner.create_future()
        self._unfenced: asyncio.Future[None] = self._owner.create_future()
        self._released: asyncio.Future[None] = self._owner.create_future()
        self.lifecycle = BrokerLifecycleManager(registration, intervals)
        self._observing = MetadataFetcher(
            quorum,
            node_id=registration.broker_id,
            cluster_id=registration.cluster_id,
            directory_id=_only(registration.log_dirs),
            publish=self._observed,
        )
        self._newest = MetadataImage()
        self._publish: Callable[[MetadataImage], None] | None = None
        self._delivery_is_due = False
        self._applied_offset = -1
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._registering: BrokerRegistrar
        self._ready = threading.Event()

    # --- state that any thread may read ---

    @property
    def controller(self) -> Address | None:
        """The active controller's address; None if this broker does not know it."""
        return self._observing.controller

    @property
    def broker_epoch(self) -> int:
        """The epoch of the broker's registration; -1 while it is not registered."""
        return self.lifecycle.broker_epoch

    @property
    def state(self) -> BrokerState:
        """The state of the broker's lifecycle."""
        return self.lifecycle.state

    @property
    def in_controlled_shutdown(self) -> bool:
        """Whether the broker has asked for a controlled shutdown.

        Such a broker must not join an ISR, nor become the leader of a partition.
        """
        return self.state is BrokerState.PENDING_CONTROLLED_SHUTDOWN

    # --- lifecycle ---

    async def join(self) -> MetadataImage:
        """Register, catch up, and return the metadata image. Raises MembershipError."""
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()
        await self._caught_up
        return self._newest

    def follow(self, publish: Callable[[MetadataImage], None], applied: MetadataImage) -> None:
        """Call ``publish`` with each newer image, on the owner's loop.

        ``applied`` is the image already published. If images come faster than they are published,
        only the newest is delivered.
        """
        self._applied_offset = applied.offset
        self._publish = publish
        self._deliver()

    async def unfence(self) -> None:
        """Wait until the controller has unfenced the broker. Raises MembershipError."""
        self.call(self._registering.ready_to_unfence)
        await self._unfenced

    async def controlled_shutdown(self) -> None:
        """Wait until the controller has moved leadership away, for a bounded time."""
        if self._loop is None or self._released.done():
            return
        self.call(self._registering.begin_controlled_shutdown)
        with suppress(MembershipError):
            await asyncio.shield(self._released)

    async def stop(self) -> None:
        """Stop heartbeats without notice; the broker is fenced when its session times out."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._publish = None
        self.call(self._stop.set)
        await asyncio.to_thread(thread.join, CLOSE_TIMEOUT_S)
        for future in (self._caught_up, self._unfenced, self._released):
            future.cancel()

    def call(self, work: Callable[[], object]) -> None:
        """Run ``work`` in the thread; do nothing if the thread has ended."""
        self._ready.wait(CLOSE_TIMEOUT_S)
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(work)

    # --- the owner's loop ---

    def _deliver(self) -> None:
        self._delivery_is_due = False
        image, publish = self._newest, self._publish
        if publish is None or image.offset <= self._applied_offset:
            return
        with swallow("publish metadata", offset=image.offset):
            publish(image)
        self._applied_offset = image.offset

    def _handle_event(self, step: LifecycleEvent) -> None:
        match step:
            case LifecycleEvent.CAUGHT_UP:
                _done(self._caught_up)
            case LifecycleEvent.UNFENCED:
                _done(self._unfenced)
            case LifecycleEvent.SHUT_DOWN:
                _done(self._released)
            case _ if step in FATAL:
                self._on_failure(MembershipError(step.value))

    def _on_failure(self, why: MembershipError) -> None:
        waited = [future for future in (self._caught_up, self._unfenced) if not future.done()]
        for future in (*waited, self._released):
            if not future.done():
                future.set_exception(without_traceback(why))
                future.exception()  # retrieved here, as perhaps no caller awaits it
        if not waited:
            self._on_lost(why)

    # --- the thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=type(self._owner)) as runner:
                runner.run(self._live())
        except BaseException as error:  # noqa: BLE001 - reported to the owner
            self._call_owner(partial(self._on_failure, MembershipError(str(error))))
        finally:
            self._ready.set()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report)
        session_half_ms = self._intervals.session_ms // 2
        channel = RemoteControllerChannel(
            lambda: self._observing.controller,
            client_id=f"broker-{self._registration.broker_id}-heartbeat",
            retry_timeout_ms=session_half_ms,
            request_timeout_ms=self._quorum.socket_timeout_ms,
            security=self._quorum.security,
        )
        self._registering = BrokerRegistrar(
            self.lifecycle, channel, applied=self._offset_of_all, on_step=self._on_event
        )
        self._loop = loop
        self._ready.set()
        tasks = [
            spawn(self._run_vital(self._observing.run()), "observe the metadata"),
            spawn(self._run_vital(self._registering.run()), "register with the controller"),
        ]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channel.close()

    async def _run_vital(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that the broker depends on; if it fails, the broker stops."""
        try:
            await work
        except Exception as error:
            self._call_owner(partial(self._on_failure, MembershipError(str(error) or repr(error))))
            if not isinstance(error, (MetadataDivergedError, MembershipError, LogError, WireError)):
                raise
            _log.error("the broker cannot be a member", cause=str(error))

    def _offset_of_all(self) -> int:
        if self._publish is None:
            return self._observing.observer.applied_offset
        return self._applied_offset

    def _observed(self, image: MetadataImage) -> None:
        self._newest = image
        registration = image.brokers.get(self._registration.broker_id)
        if registration is not None and registration.epoch == self.broker_epoch:
            self._registering.observed(
                image.features.get(METADATA_VERSION, 0), registration.directories
            )
        if not self._delivery_is_due:
            self._delivery_is_due = True
            self._call_owner(self._deliver)

    def _on_event(self, step: LifecycleEvent) -> None:
        self._call_owner(partial(self._handle_event, step))

    def _call_owner(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self._owner.call_soon_threadsafe(work)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _only(log_dirs: tuple[UUID, ...]) -> UUID:
    return log_dirs[0]
