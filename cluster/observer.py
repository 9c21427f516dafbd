"""A broker's replica of the metadata log: where to fetch from, and which records are committed.

:class:`Observer` stores no log. It has an image of the committed records, and a short tail of
batches that are not committed yet. A starting broker fetches from offset 0 and receives a snapshot.
The caller sends the requests that :meth:`Observer.next_request` returns, one at a time, passes in
each answer, and publishes the returned images in order.

Source: ``KafkaRaftClient`` (``buildFetchRequest``, ``handleFetchResponse``,
``handleFetchSnapshotResponse``, ``maybeHandleCommonResponse``), ``FollowerState``,
``UnattachedState``, ``MetadataLoader``; KIP-595, KIP-630, KIP-1166.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Final, NamedTuple

from fencepost.cluster.image import MetadataImage
from fencepost.cluster.image_loader import ImageLoader
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.values import dataclass

FETCH_TIMEOUT_MS: Final = 2_000
"""``controller.quorum.fetch.timeout.ms``: without a successful answer in this time, the observer
asks another controller for the leader."""

RETRY_BACKOFF_MS: Final = 20
"""``controller.quorum.retry.backoff.ms``: the pause after a failed request."""

MAX_SNAPSHOT_BYTES: Final = 1 << 30
"""The maximum size of a fetched snapshot, which is assembled in memory."""

UNUSABLE_RESPONSE_BACKOFF_MS: Final = 100
"""The pause after an answer that could not be parsed or applied."""

MAX_VOTERS: Final = 1_000
"""The maximum number of controller addresses that an observer keeps."""

UNKNOWN: Final = -1

NOT_LEADER_OR_FOLLOWER: Final = 6
FENCED_LEADER_EPOCH: Final = 74
UNKNOWN_LEADER_EPOCH: Final = 75
INCONSISTENT_CLUSTER_ID: Final = 104

Address = tuple[str, int]
"""Host and port of a controller's listener."""


class MetadataDivergedError(Exception):
    """The controllers lost records that they had committed, or belong to another cluster.

    Applied records cannot be undone, so the broker must stop.
    """


class OffsetAndEpoch(NamedTuple):
    """The end of a log or a snapshot: the next offset, and the epoch of the record before it."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class MetadataBatch:
    """A batch of the metadata log as it was fetched."""

    base_offset: int
    last_offset: int
    epoch: int
    records: tuple[bytes, ...] = ()
    """The values of the batch's records; empty for a control batch."""
    voters: Mapping[int, Address] | None = None
    """The listeners of the controllers, from a control batch with a VotersRecord (KIP-853)."""


@dataclass(frozen=True, slots=True)
class FetchMetadata:
    """Fetch from the metadata log of the controller at ``to``."""

    to: Address
    offset: int
    last_fetched_epoch: int
    current_leader_epoch: int
    high_watermark: int
    """The observer's high watermark, -1 if unknown. The leader answers at once if the leader's high
    watermark is higher (KIP-1166)."""


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch a chunk of a snapshot from the controller at ``to``."""

    to: Address
    snapshot: OffsetAndEpoch
    position: int
    current_leader_epoch: int


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """The leader as an answer names it; -1 means unknown."""

    leader_id: int = UNKNOWN
    epoch: int = UNKNOWN
    endpoints: Mapping[int, Address] = field(default_factory=dict)
    """NodeEndpoints by controller id."""


@dataclass(frozen=True, slots=True)
class MetadataFetched:
    """The answer to :class:`FetchMetadata`: its only partition's fields, or the top-level error."""

    error: int = 0
    hint: LeaderHint = LeaderHint()
    high_watermark: int = UNKNOWN
    diverging: OffsetAndEpoch | None = None
    """The diverging epoch and its end in the leader's log; the two logs differ beyond that end."""
    snapshot: OffsetAndEpoch | None = None
    """The snapshot that must be fetched instead of records."""
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class SnapshotFetched:
    """The answer to :class:`FetchSnapshot`."""

    error: int = 0
    hint: LeaderHint = LeaderHint()
    size: int = 0
    """The size of the whole snapshot in bytes."""
    position: int = 0
    chunk: bytes = b""
    """A chunk that may begin and end in the middle of a batch."""


class Observer:
    """Follows the metadata log.

    ``bootstrap`` lists the configured controllers, which are asked while the leader is unknown.
    ``read_batches`` parses fetched bytes; it omits a batch that is cut off at the end, and raises
    CorruptRecordError for a damaged batch. ``choose(n)`` returns an index below ``n``, such as a
    random one.
    """

    def __init__(
        self,
        bootstrap: Sequence[Address],
        read_batches: Callable[[bytes], Iterable[MetadataBatch]],
        *,
        voters: Mapping[int, Address] | None = None,
        fetch_timeout_ms: int = FETCH_TIMEOUT_MS,
        retry_backoff_ms: int = RETRY_BACKOFF_MS,
        choose: Callable[[int], int] = lambda _count: 0,
    ) -> None:
        self._bootstrap = tuple(bootstrap)
        self._read_batches = read_batches
        self._fetch_timeout_ms, self._retry_backoff_ms = fetch_timeout_ms, retry_backoff_ms
        self._choose = choose
        self.epoch = 0
        """The quorum's epoch."""
        self._confirmed_epoch = 0
        """The last epoch in which a leader answered a request without an error."""
        self._unknown_epoch_since_ms: float | None = None
        """The time of the first UNKNOWN_LEADER_EPOCH answer for the current epoch."""
        self.leader_id = UNKNOWN
        self.voters: dict[int, Address] = dict(voters or {})
        """The controllers' listeners: from the configuration, from VotersRecords and from
        answers."""
        self._candidate: Address | None = None
        """The controller that is asked while the leader is unknown."""
        self._last_success_ms: float | None = None
        self._not_before_ms = 0.0
        self.log_end = OffsetAndEpoch(0, 0)
        """The end of the fetched log, whether committed or not."""
        self.high_watermark = UNKNOWN
        self._tail: list[MetadataBatch] = []
        """Fetched batches that are not known to be committed."""
        self._committed_end = OffsetAndEpoch(0, 0)
        self._snapshot: OffsetAndEpoch | None = None
        self._chunks: list[bytes] = []
        self._position = 0
        self._loader = ImageLoader()
        self.image = MetadataImage()
        """The newest committed image, which is not published before the broker has caught up."""
        self._catch_up_to = UNKNOWN
        """The offset that the image must reach before the first publication: the lowest high
        watermark that a leader has reported."""
        self._caught_up = False

    # --- the leader ---

    @property
    def leader(self) -> Address | None:
        """The active controller's listener, None while it is unknown."""
        return self.voters.get(self.leader_id) if self.leader_id != UNKNOWN else None

    def next_request(self, now_ms: float) -> FetchMetadata | FetchSnapshot | float:
        """Return the request to send now, or the time at which to call again."""
        if now_ms < self._not_before_ms:
            return self._not_before_ms
        if self._last_success_ms is None:
            self._last_success_ms = now_ms
        if now_ms - self._last_success_ms >= self._fetch_timeout_ms:
            # Another controller may know the leader; the silent one stays in the list.
            self._last_success_ms = now_ms
            self._forget_leader()
        to = self.leader or self._any_controller()
        if self._snapshot is not None:
            return FetchSnapshot(to, self._snapshot, self._position, self.epoch)
        return FetchMetadata(
            to, self.log_end.offset, self.log_end.epoch, self.epoch, self.high_watermark
        )

    def _forget_leader(self) -> None:
        self.leader_id = UNKNOWN
        self._candidate = None

    def _any_controller(self) -> Address:
        """Return a known controller, the same one until a request to it fails."""
        if self._candidate is None:
            controllers = self._bootstrap or tuple(self.voters.values())
            self._candidate = controllers[self._choose(len(controllers))]
        return self._candidate

    def on_failure(self, now_ms: float) -> None:
        """Handle a request without an answer: the connection failed, broke or timed out."""
        self._forget_leader()
        self._not_before_ms = now_ms + self._retry_backoff_ms

    def on_unusable_response(self, now_ms: float) -> None:
        """Handle an answer that could not be parsed or applied: fetch again from the image's end.

        The tail and the chunks of an incomplete snapshot are dropped.
        """
        self._tail.clear()
        self._snapshot, self._chunks, self._position = None, [], 0
        self._loader.forget(self.image)
        end = OffsetAndEpoch(self.image.offset + 1, max(self.image.epoch, 0))
        self.log_end = self._committed_end = end
        self.high_watermark = min(self.high_watermark, end.offset)
        self.on_failure(now_ms)
        self._not_before_ms = now_ms + UNUSABLE_RESPONSE_BACKOFF_MS

    def _note_unknown_epoch(self, now_ms: float) -> None:
        """Note that a controller does not know the current epoch.

        If the fetch timeout has passed since the first such answer, and no fetch has succeeded
        since, return to the last confirmed epoch.
        """
        if self._unknown_epoch_since_ms is None:
            self._unknown_epoch_since_ms = now_ms
        elif now_ms - self._unknown_epoch_since_ms >= self._fetch_timeout_ms:
            # No leader has answered in the current epoch, so none of its records was applied.
            self._unknown_epoch_since_ms, self.epoch = None, self._confirmed_epoch

    def _handle_leader_hint(self, error: int, hint: LeaderHint, now_ms: float) -> bool:
        """Take the leader and the epoch from an answer; return whether the leader sent it."""
        if error == INCONSISTENT_CLUSTER_ID:
            raise MetadataDivergedError("the controllers are those of another cluster")
        requested_epoch = self.epoch
        if hint.epoch > self.epoch:
            self.epoch, self.leader_id = hint.epoch, UNKNOWN
        if hint.epoch == self.epoch:
            if len(self.voters) + len(hint.endpoints) > MAX_VOTERS:
                self.voters.clear()
            self.voters |= hint.endpoints
            if hint.leader_id != UNKNOWN:
                self.leader_id = hint.leader_id
        if error == UNKNOWN_LEADER_EPOCH:
            self._note_unknown_epoch(now_ms)
        if not error:
            self._last_success_ms, self._unknown_epoch_since_ms = now_ms, None
            self._confirmed_epoch = requested_epoch
            return True
        if error in (FENCED_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER) and self.leader is not None:
            return False  # the leader is known, so it is asked without a backoff
        if error != FENCED_LEADER_EPOCH:
            # This controller lags, is shutting down or has failed: try another one.
            self._forget_leader()
        self._not_before_ms = now_ms + self._retry_backoff_ms
        return False

    # --- fetching ---

    def on_fetched(self, answer: MetadataFetched, now_ms: float) -> list[MetadataImage]:
        """Handle an answer; return the images to publish.

        Raises MetadataDivergedError, and CorruptRecordError for a record that cannot be decoded:
        the records after it cannot be applied either.
        """
        if not self._handle_leader_hint(answer.error, answer.hint, now_ms):
            return []
        if self._catch_up_to == UNKNOWN or 0 <= answer.high_watermark < self._catch_up_to:
            self._catch_up_to = answer.high_watermark
        if answer.diverging is not None:
            self._truncate(answer.diverging)
            return []
        if answer.snapshot is not None:
            if answer.snapshot.offset <= self.image.offset:
                raise CorruptRecordError(
                    f"the snapshot ends at offset {answer.snapshot.offset}, but offset"
                    f" {self.image.offset} is already applied"
                )
            self._snapshot, self._chunks, self._position = answer.snapshot, [], 0
            return []
        for batch in self._read_batches(answer.records):
            self._append(batch)
        if answer.high_watermark >= 0:
            committed = min(self.log_end.offset, answer.high_watermark)
            self.high_watermark = max(self.high_watermark, committed)
        return self._commit()

    def _append(self, batch: MetadataBatch) -> None:
        if batch.base_offset != self.log_end.offset:
            raise CorruptRecordError(
                f"a metadata batch begins at offset {batch.base_offset}; expected is"
                f" {self.log_end.offset}"
            )
        if not self.log_end.epoch <= batch.epoch <= self.epoch:
            raise CorruptRecordError(
                f"a metadata batch has epoch {batch.epoch}; the current epoch is {self.epoch}"
            )
        self._tail.append(batch)
        self.log_end = OffsetAndEpoch(batch.last_offset + 1, batch.epoch)

    def _truncate(self, diverging: OffsetAndEpoch) -> None:
        """Drop the tail's batches that the leader does not have."""
        while self._tail and (
            self._tail[-1].epoch > diverging.epoch or self._tail[-1].last_offset >= diverging.offset
        ):
            self._tail.pop()
        if self._tail:
            last = self._tail[-1]
            self.log_end = OffsetAndEpoch(last.last_offset + 1, last.epoch)
            return
        self.log_end = end = self._committed_end
        if end.offset > diverging.offset or end.epoch > diverging.epoch:
            raise MetadataDivergedError(
                f"the metadata log of the active controller ends at {diverging.offset} in epoch"
                f" {diverging.epoch}, and {end.offset} in epoch {end.epoch} was committed"
            )

    def on_snapshot_fetched(self, answer: SnapshotFetched, now_ms: float) -> list[MetadataImage]:
        """Handle a chunk of a snapshot; return the images to publish.

        Raises as ``on_fetched`` does.
        """
        if not self._handle_leader_hint(answer.error, answer.hint, now_ms):
            if answer.error not in (
                FENCED_LEADER_EPOCH,
                NOT_LEADER_OR_FOLLOWER,
                UNKNOWN_LEADER_EPOCH,
            ):
                self._snapshot = None  # deleted; the next fetch names the current snapshot
            return []
        if answer.size > MAX_SNAPSHOT_BYTES:
            raise CorruptRecordError(
                f"a snapshot of {answer.size} bytes; the limit is {MAX_SNAPSHOT_BYTES}"
            )
        if answer.position != self._position or self._snapshot is None:
            self._snapshot = None
            return []
        self._chunks.append(answer.chunk)
        self._position += len(answer.chunk)
        if self._position < answer.size:
            if not answer.chunk:
                raise CorruptRecordError("a part of a snapshot is empty")
            return []
        snapshot, content = self._snapshot, b"".join(self._chunks)
        self._snapshot, self._chunks = None, []
        return self._install(snapshot, content)

    def _install(self, snapshot: OffsetAndEpoch, content: bytes) -> list[MetadataImage]:
        """Replace the image and the tail by the snapshot."""
        self._loader.begin_snapshot()
        for batch in self._read_batches(content):
            self._update_voters(batch)
            self._loader.replay(batch.records, batch.last_offset, batch.epoch)
        self.image = self._loader.end_snapshot(*snapshot)
        self._tail.clear()
        self.log_end = self._committed_end = snapshot
        self.high_watermark = max(self.high_watermark, snapshot.offset)
        return self._publishable([self.image])

    # --- applying ---

    @property
    def is_caught_up(self) -> bool:
        """Whether an image has been published."""
        return self._caught_up

    @property
    def applied_offset(self) -> int:
        """The offset of the last record in the image; -1 if it is empty."""
        return self.image.offset

    def _commit(self) -> list[MetadataImage]:
        """Apply the batches below the high watermark; return an image for each batch."""
        images: list[MetadataImage] = []
        applied = 0
        for batch in self._tail:
            if batch.last_offset >= self.high_watermark:
                break
            self._update_voters(batch)
            self._loader.replay(batch.records, batch.last_offset, batch.epoch)
            if not self._loader.in_transaction:
                self.image = self._loader.publish()
                images.append(self.image)
            self._committed_end = OffsetAndEpoch(batch.last_offset + 1, batch.epoch)
            applied += 1
        del self._tail[:applied]
        return self._publishable(images)

    def _update_voters(self, batch: MetadataBatch) -> None:
        if batch.voters is not None:
            self.voters = dict(batch.voters)

    def _publishable(self, images: list[MetadataImage]) -> list[MetadataImage]:
        """Return the images to publish, none before the broker has caught up with the metadata."""
        if self._caught_up:
            return images
        has_caught_up = self._catch_up_to >= 0 and self.image.offset >= self._catch_up_to - 1
        if not has_caught_up or self.image.offset < 0:
            return []
        self._caught_up = True
        return [self.image]  # the first publication has no earlier image to compare with
