"""A broker's registration and heartbeats, as its lifecycle decides.

Source: ``BrokerLifecycleManager``. If the cluster has a feature at a level that the broker does not
support, the controller rejects the registration with UNSUPPORTED_VERSION, and does not name the
feature. Kafka's brokers retry until their registration times out. This broker reads the finalized
features with ApiVersions, names the unsupported ones in its error, and stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from kio.schema.errors import ErrorCode

from fencepost.client.router import api_versions_body
from fencepost.cluster.lifecycle import (
    BrokerLifecycleManager,
    HeartbeatResponse,
    LifecycleEvent,
    RegisterBroker,
    SendHeartbeat,
)
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.replication.controller_channel import ControllerChannel
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.coordinator.replication.errors import MembershipError
from fencepost.coordinator.runtime.background import log_failure
from fencepost.protocol.api import ApiKey
from fencepost.protocol.errors import WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)

_ABOUT_FEATURES: Final = NewestVersionRequest(ApiKey.API_VERSIONS, api_versions_body)


def registration_body(request: RegisterBroker, make: RequestFactory) -> Entity:
    """Return a BrokerRegistration request."""
    return make.message(
        broker_id=request.broker_id,
        cluster_id=request.cluster_id,
        incarnation_id=request.incarnation_id,
        listeners=[
            make.Listener(
                name=listener.name,
                host=listener.host,
                port=listener.port,
                security_protocol=listener.security_protocol,
            )
            for listener in request.listeners
        ],
        features=[
            make.Feature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in sorted(request.features.items())
        ],
        rack=request.rack,
        is_migrating_zk_broker=False,
        log_dirs=sorted(request.log_dirs),
        previous_broker_epoch=request.previous_broker_epoch,
    )


def heartbeat_body(request: SendHeartbeat, make: RequestFactory) -> Entity:
    """Return a BrokerHeartbeat request."""
    return make.message(
        broker_id=request.broker_id,
        broker_epoch=request.broker_epoch,
        current_metadata_offset=request.current_metadata_offset,
        want_fence=request.want_fence,
        want_shut_down=request.want_shut_down,
        cordoned_log_dirs=request.cordoned_log_dirs,
    )


def unsupported(features: Mapping[str, tuple[int, int]], finalized: Mapping[str, int]) -> list[str]:
    """Describe the cluster's feature levels that are outside a broker's supported ranges."""
    problems = []
    for name, level in sorted(finalized.items()):
        low, high = features.get(name, (0, 0))
        if level and not low <= level <= high:
            problems.append(f"{name} is at level {level}, and this broker supports {low} to {high}")
    return problems


class BrokerRegistrar:
    """Registers a broker and sends its heartbeats, from :meth:`run` on.

    ``applied`` returns the offset of the last metadata record that the broker has applied.
    ``on_step`` is called with every step of the lifecycle, on the loop that :meth:`run` uses; all
    methods belong to that loop.
    """

    def __init__(
        self,
        lifecycle: BrokerLifecycleManager,
        channel: ControllerChannel,
        *,
        applied: Callable[[], int],
        on_step: Callable[[LifecycleEvent], None],
    ) -> None:
        self.lifecycle = lifecycle
        self._channel, self._applied, self._on_step = channel, applied, on_step
        self._wake = asyncio.Event()
        self._beyond: list[str] = []
        """The cluster's feature levels that exclude this broker."""

    def _now(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    async def run(self) -> None:
        """Run until the broker may or must stop, or until cancelled.

        Raises MembershipError if the cluster has a feature level that the broker lacks.
        """
        lifecycle = self.lifecycle
        lifecycle.start(self._now())
        while not lifecycle.is_over:
            if self._beyond:
                raise MembershipError("the cluster is not for it: " + "; ".join(self._beyond))
            request = lifecycle.next_request(self._now(), self._applied())
            if not isinstance(request, float):
                self._begin(request)
                continue
            await self._until(min(request, lifecycle.deadline_ms()))
            self._handle_events(lifecycle.on_time(self._now()))

    def _begin(self, request: RegisterBroker | SendHeartbeat) -> None:
        if isinstance(request, RegisterBroker):
            body = NewestVersionRequest(
                ApiKey.BROKER_REGISTRATION, partial(registration_body, request)
            )
        else:
            body = NewestVersionRequest(ApiKey.BROKER_HEARTBEAT, partial(heartbeat_body, request))
        self._channel.send(body).add_done_callback(partial(self._answered, request))

    def _answered(
        self, request: RegisterBroker | SendHeartbeat, answer: asyncio.Future[Entity]
    ) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if self.lifecycle.is_over:
            return
        self._wake.set()
        now_ms, what = self._now(), type(request).__name__.lower()
        if error is not None:
            if not isinstance(error, (WireError, RequestTimedOutError)):
                log_failure(what, error)
            _log.warning(f"{what} not answered", cause=str(error))
            self._handle_events(self.lifecycle.on_failure(now_ms))
            return
        body = answer.result()
        if body.error_code:
            _log.warning(f"{what} refused", error=ErrorCode(body.error_code).name.upper())
        if isinstance(request, RegisterBroker):
            if body.error_code == ErrorCode.unsupported_version:
                self._channel.send(_ABOUT_FEATURES).add_done_callback(
                    partial(self._heard_of_features, request)
                )
            self._handle_events(
                self.lifecycle.on_registered(body.error_code, body.broker_epoch, now_ms)
            )
            return
        heard = HeartbeatResponse(
            int(body.error_code), body.is_caught_up, body.is_fenced, body.should_shut_down
        )
        self._handle_events(self.lifecycle.on_heartbeat(heard, now_ms))

    def _heard_of_features(self, request: RegisterBroker, answer: asyncio.Future[Entity]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return  # the next rejected registration asks again
        finalized = {
            feature.name: feature.max_version_level
            for feature in getattr(answer.result(), "finalized_features", ())
        }
        self._beyond = unsupported(request.features, finalized)
        self._wake.set()

    def _handle_events(self, steps: list[LifecycleEvent]) -> None:
        for step in steps:
            _log.info(
                step.value,
                node_epoch=self.lifecycle.broker_epoch,
                state=self.lifecycle.state.name,
            )
            self._on_step(step)

    async def _until(self, when_ms: float) -> None:
        self._wake.clear()
        pause_s = None if when_ms == float("inf") else max(0.0, when_ms - self._now()) / 1000
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wake.wait()

    # --- events of the broker ---

    def observed(self, metadata_version: int, log_dirs: Sequence[UUID]) -> None:
        """See :meth:`BrokerLifecycleManager.observed`."""
        if self.lifecycle.observed(metadata_version, log_dirs, self._now()):
            _log.info("registers again", metadata_version=metadata_version)
            self._wake.set()

    def ready_to_unfence(self) -> None:
        """See :meth:`BrokerLifecycleManager.ready_to_unfence`."""
        self.lifecycle.ready_to_unfence(self._now())
        self._wake.set()

    def begin_controlled_shutdown(self) -> None:
        """See :meth:`BrokerLifecycleManager.begin_controlled_shutdown`."""
        self._handle_events(self.lifecycle.begin_controlled_shutdown(self._now()))
        self._wake.set()
