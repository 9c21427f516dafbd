"""Fetches of the metadata log, as an observer: one request at a time to the active controller.

Source: ``KafkaRaftClient.pollUnattached``, ``pollFollowerAsObserver``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final
from uuid import UUID

import structlog

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.observer import (
    FENCED_LEADER_EPOCH,
    NOT_LEADER_OR_FOLLOWER,
    UNKNOWN_LEADER_EPOCH,
    Address,
    FetchMetadata,
    FetchSnapshot,
    MetadataDivergedError,
    Observer,
)
from fencepost.coordinator.replication.controller_connection import (
    UNUSABLE_RESPONSES,
    ControllerConnection,
    NewestVersionRequest,
    error_name,
)
from fencepost.coordinator.replication.metadata_wire import (
    FIRST_FETCH_BY_ID,
    batches_reader,
    fetch_body,
    fetched,
    snapshot_body,
    snapshot_fetched,
)
from fencepost.coordinator.replication.quorum import QuorumConfig
from fencepost.logcore.errors import CorruptRecordError, LogError
from fencepost.protocol.api import ApiKey
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)


_ABOUT_LEADERS: Final = frozenset(
    {FENCED_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER, UNKNOWN_LEADER_EPOCH}
)
"""Errors that occur while the active controller is being found."""


DIVERGED_TIMES: Final = 3
"""Consecutive invalid responses after which a MetadataDivergedError stops the broker."""

MISUNDERSTOOD_TIMES: Final = 20
"""Consecutive invalid responses after which a starting broker gives up. There is no limit once the
broker has caught up, because its current metadata remains useful."""

UNLIMITED: Final = float("inf")


class MetadataFetcher:
    """Fetches the metadata of a cluster, and publishes committed images.

    ``publish`` gets each image, on the loop of :meth:`run`.
    """

    def __init__(
        self,
        quorum: QuorumConfig,
        *,
        node_id: int,
        cluster_id: str,
        directory_id: UUID,
        publish: Callable[[MetadataImage], None],
    ) -> None:
        self._quorum, self._publish = quorum, publish
        self._fetch = partial(
            fetch_body, node_id=node_id, cluster_id=cluster_id, directory_id=directory_id
        )
        self._snapshot = partial(snapshot_body, node_id=node_id, cluster_id=cluster_id)
        self.observer = Observer(
            quorum.bootstrap,
            batches_reader(quorum.listener),
            voters=quorum.voters,
            fetch_timeout_ms=quorum.fetch_timeout_ms,
            retry_backoff_ms=quorum.retry_backoff_ms,
            choose=random.randrange,
        )
        self._connection = ControllerConnection(f"raft-client-{node_id}", quorum.security)
        self._trouble: str | None = None
        self._silent_until_s = 0.0
        self._in_vain = 0
        """The number of consecutive invalid responses."""

    @property
    def controller(self) -> Address | None:
        """The active controller's address; any thread may read it."""
        return self.observer.leader

    async def run(self) -> None:
        """Run until cancelled. Raises MetadataDivergedError and CorruptRecordError."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                now_ms = loop.time() * 1000
                request = self.observer.next_request(now_ms)
                if isinstance(request, float):
                    await asyncio.sleep((request - now_ms) / 1000)
                    continue
                for image in await self._ask(request):
                    self._publish(image)
        finally:
            with suppress(Exception):
                await self._connection.close()

    async def _ask(self, request: FetchMetadata | FetchSnapshot) -> list[MetadataImage]:
        loop = asyncio.get_running_loop()
        is_fetch = isinstance(request, FetchMetadata)
        key = ApiKey.FETCH if is_fetch else ApiKey.FETCH_SNAPSHOT
        body = self._fetch if is_fetch else self._snapshot
        try:
            answer = await self._connection.ask(
                request.to,
                NewestVersionRequest(key, partial(body, request)),
                timeout_ms=self._quorum.request_timeout_ms,
            )
        except (WireError, OSError) as error:
            self._log_failure(request.to, str(error) or "no answer in time")
            self.observer.on_failure(loop.time() * 1000)
            return []
        now_ms = loop.time() * 1000
        try:
            images = self._apply_answer(request, answer, now_ms)
        except MetadataDivergedError as error:
            self._discard_response(request.to, error, now_ms, DIVERGED_TIMES)
        except (LogError, WireError, *UNUSABLE_RESPONSES) as error:
            limit = UNLIMITED if self.observer.is_caught_up else MISUNDERSTOOD_TIMES
            self._discard_response(request.to, error, now_ms, limit)
        else:
            return images
        await self._connection.close()  # its cached API versions may be the cause
        return []

    def _discard_response(
        self, address: Address, error: Exception, now_ms: float, limit: float
    ) -> None:
        """Discard an invalid response; raise the error if ``limit`` in a row were invalid."""
        self._in_vain += 1
        self._log_failure(address, str(error) or type(error).__name__)
        if self._in_vain >= limit:
            if isinstance(error, (MetadataDivergedError, LogError, WireError)):
                raise error
            raise CorruptRecordError(f"{type(error).__name__}: {error}") from error
        self.observer.on_unusable_response(now_ms)

    def _apply_answer(
        self, request: FetchMetadata | FetchSnapshot, answer: Entity, now_ms: float
    ) -> list[MetadataImage]:
        if isinstance(request, FetchMetadata):
            if answer.__version__ < FIRST_FETCH_BY_ID:
                raise UnsupportedVersion(ApiKey.FETCH, answer.__version__)
            result = fetched(answer)
            if not result.error:
                self._trouble = None
            elif result.error not in _ABOUT_LEADERS:
                self._log_failure(request.to, error_name(result.error))
            error, images = result.error, self.observer.on_fetched(result, now_ms)
        else:
            piece = snapshot_fetched(answer)
            error, images = piece.error, self.observer.on_snapshot_fetched(piece, now_ms)
        if not error:
            self._in_vain = 0
        return images

    def _log_failure(self, address: Address, cause: str) -> None:
        """Log the cause of a failure, at most once a second and never twice in succession."""
        now_s = asyncio.get_running_loop().time()
        if cause != self._trouble and now_s >= self._silent_until_s:
            self._trouble, self._silent_until_s = cause, now_s + 1
            address_text = f"{address[0]}:{address[1]}"
            _log.warning("metadata not fetched", controller=address_text, cause=cause)
