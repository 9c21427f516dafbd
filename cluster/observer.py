"""A broker's view of the metadata log: whom to ask next, and what of the answers is committed.

The machine holds no log. What is committed is in its image, what is not yet waits in a short tail;
a broker that starts anew begins at offset 0 and is given a snapshot. Whoever drives it sends
:meth:`Observer.next_request`, one at a time, hands the answer in, and publishes the images that
come out, in their order.

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
"""``controller.quorum.fetch.timeout.ms``: so long without a good answer, and somebody else is
asked who leads."""

RETRY_BACKOFF_MS: Final = 20
"""``controller.quorum.retry.backoff.ms``: between two requests of which the first failed."""

MAX_SNAPSHOT_BYTES: Final = 1 << 30
"""A snapshot that says to be larger is not taken: it is gathered in memory."""

NONSENSE_BACKOFF_MS: Final = 100
"""The same after an answer that made no sense."""

MAX_VOTERS: Final = 1_000
"""Controllers whose addresses are remembered."""

UNKNOWN: Final = -1

NOT_LEADER_OR_FOLLOWER: Final = 6
FENCED_LEADER_EPOCH: Final = 74
UNKNOWN_LEADER_EPOCH: Final = 75
INCONSISTENT_CLUSTER_ID: Final = 104

Address = tuple[str, int]
"""Host and port of a controller's listener."""


class MetadataDivergedError(Exception):
    """The controllers have lost what they had committed, or are those of another cluster.

    Nothing that has been applied can be taken back, so the broker must not go on.
    """


class OffsetAndEpoch(NamedTuple):
    """The end of a log, or of a part of it: the next offset, and the epoch of the record before."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class MetadataBatch:
    """A batch of the metadata log as it was fetched."""

    base_offset: int
    last_offset: int
    epoch: int
    records: tuple[bytes, ...] = ()
    """Values of its records; a batch of control records has none."""
    voters: Mapping[int, Address] | None = None
    """Of a control batch with a VotersRecord: where the controllers listen (KIP-853)."""


@dataclass(frozen=True, slots=True)
class FetchMetadata:
    """Fetch from the metadata log at ``to``."""

    to: Address
    offset: int
    last_fetched_epoch: int
    current_leader_epoch: int
    high_watermark: int
    """What is known of it, -1 for nothing: the answer comes at once if it has moved (KIP-1166)."""


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch a piece of a snapshot at ``to``."""

    to: Address
    snapshot: OffsetAndEpoch
    position: int
    current_leader_epoch: int


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """What an answer says of the leader: ids of -1 say nothing."""

    leader_id: int = UNKNOWN
    epoch: int = UNKNOWN
    endpoints: Mapping[int, Address] = field(default_factory=dict)
    """NodeEndpoints, by id."""


@dataclass(frozen=True, slots=True)
class MetadataFetched:
    """The answer to :class:`FetchMetadata`: of its only partition, or the top level's error."""

    error: int = 0
    hint: LeaderHint = LeaderHint()
    high_watermark: int = UNKNOWN
    diverging: OffsetAndEpoch | None = None
    """Where the leader's log of that epoch ends: behind it nothing is common."""
    snapshot: OffsetAndEpoch | None = None
    """To be had instead of records."""
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class SnapshotFetched:
    """The answer to :class:`FetchSnapshot`."""

    error: int = 0
    hint: LeaderHint = LeaderHint()
    size: int = 0
    """Of the whole snapshot."""
    position: int = 0
    piece: bytes = b""
    """Cut anywhere."""


class Observer:
    """Follows the metadata log.

    ``bootstrap`` is asked where no leader is known: the controllers of the configuration.
    ``read_batches`` parses fetched bytes; it leaves out what is cut off at their end, and raises
    CorruptRecordError for what is broken. ``choose`` picks one of so many, any at all.
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
        """The quorum's."""
        self._proven_epoch = 0
        """The last one that a leader was asked in, and has answered."""
        self._doubted_since_ms: float | None = None
        """Since when nobody knows the epoch that somebody has told of."""
        self.leader_id = UNKNOWN
        self.voters: dict[int, Address] = dict(voters or {})
        """Where controllers listen: of the configuration, of VotersRecords and of answers."""
        self._asked: Address | None = None
        """Whom the last request went to, while no leader is known."""
        self._last_good_ms: float | None = None
        self._not_before_ms = 0.0
        self.log_end = OffsetAndEpoch(0, 0)
        """Of all that was fetched, committed or not."""
        self.high_watermark = UNKNOWN
        self._tail: list[MetadataBatch] = []
        """Fetched and not known to be committed."""
        self._committed_end = OffsetAndEpoch(0, 0)
        self._snapshot: OffsetAndEpoch | None = None
        self._pieces: list[bytes] = []
        self._position = 0
        self._loader = ImageLoader()
        self.image = MetadataImage()
        """The newest committed one. It may be ahead of the last published one in the beginning."""
        self._catch_up_to = UNKNOWN
        """The first high watermark that a leader told; nothing is published below it."""
        self._caught_up = False

    # --- who leads ---

    @property
    def leader(self) -> Address | None:
        """Where the active controller listens, None while that is not known."""
        return self.voters.get(self.leader_id) if self.leader_id != UNKNOWN else None

    def next_request(self, now_ms: float) -> FetchMetadata | FetchSnapshot | float:
        """What to send now, or the time before which nothing is to be sent."""
        if now_ms < self._not_before_ms:
            return self._not_before_ms
        if self._last_good_ms is None:
            self._last_good_ms = now_ms
        if now_ms - self._last_good_ms >= self._fetch_timeout_ms:
            # Somebody else may know more; the one who does not answer keeps its place in the list.
            self._last_good_ms = now_ms
            self._forget_leader()
        to = self.leader or self._somebody()
        if self._snapshot is not None:
            return FetchSnapshot(to, self._snapshot, self._position, self.epoch)
        return FetchMetadata(
            to, self.log_end.offset, self.log_end.epoch, self.epoch, self.high_watermark
        )

    def _forget_leader(self) -> None:
        self.leader_id = UNKNOWN
        self._asked = None

    def _somebody(self) -> Address:
        """One of the controllers that are known, the same until it has failed."""
        if self._asked is None:
            known = self._bootstrap or tuple(self.voters.values())
            self._asked = known[self._choose(len(known))]
        return self._asked

    def on_failure(self, now_ms: float) -> None:
        """No answer: the connection is lost, could not be made, or was silent for too long."""
        self._forget_leader()
        self._not_before_ms = now_ms + self._retry_backoff_ms

    def on_nonsense(self, now_ms: float) -> None:
        """An answer was not understood, or can not be: go on from what holds, a little later.

        Whatever was fetched and is not in the image is fetched again.
        """
        self._tail.clear()
        self._snapshot, self._pieces, self._position = None, [], 0
        self._loader.forget(self.image)
        end = OffsetAndEpoch(self.image.offset + 1, max(self.image.epoch, 0))
        self.log_end = self._committed_end = end
        self.high_watermark = min(self.high_watermark, end.offset)
        self.on_failure(now_ms)
        self._not_before_ms = now_ms + NONSENSE_BACKOFF_MS

    def _doubt(self, now_ms: float) -> None:
        """Nobody answers in the epoch that was told of; in time it is taken for an error.

        No leader has answered in it, so nothing of it was applied.
        """
        if self._doubted_since_ms is None:
            self._doubted_since_ms = now_ms
        elif now_ms - self._doubted_since_ms >= self._fetch_timeout_ms:
            self._doubted_since_ms, self.epoch = None, self._proven_epoch

    def _heed(self, error: int, hint: LeaderHint, now_ms: float) -> bool:
        """Take what an answer says of leaders; whether it is an answer of the leader."""
        if error == INCONSISTENT_CLUSTER_ID:
            raise MetadataDivergedError("the controllers are those of another cluster")
        asked_in = self.epoch
        if hint.epoch > self.epoch:
            self.epoch, self.leader_id = hint.epoch, UNKNOWN
        if hint.epoch == self.epoch:
            if len(self.voters) + len(hint.endpoints) > MAX_VOTERS:
                self.voters.clear()
            self.voters |= hint.endpoints
            if hint.leader_id != UNKNOWN:
                self.leader_id = hint.leader_id
        if error == UNKNOWN_LEADER_EPOCH:
            self._doubt(now_ms)
        if not error:
            self._last_good_ms, self._doubted_since_ms = now_ms, None
            self._proven_epoch = asked_in
            return True
        if error in (FENCED_LEADER_EPOCH, NOT_LEADER_OR_FOLLOWER) and self.leader is not None:
            return False  # the leader is asked at once: there is nothing to wait for
        if error != FENCED_LEADER_EPOCH:
            # Whoever is behind, or shutting down, or in trouble, is no good source: try another.
            self._forget_leader()
        self._not_before_ms = now_ms + self._retry_backoff_ms
        return False

    # --- fetching ---

    def on_fetched(self, answer: MetadataFetched, now_ms: float) -> list[MetadataImage]:
        """Take an answer; the images to be published.

        Raises MetadataDivergedError, and CorruptRecordError for what is not understood: who does
        not know a record can not apply what comes behind it.
        """
        if not self._heed(answer.error, answer.hint, now_ms):
            return []
        if self._catch_up_to == UNKNOWN or 0 <= answer.high_watermark < self._catch_up_to:
            self._catch_up_to = answer.high_watermark
        if answer.diverging is not None:
            self._truncate(answer.diverging)
            return []
        if answer.snapshot is not None:
            if answer.snapshot.offset <= self.image.offset:
                raise CorruptRecordError(
                    f"a snapshot that ends at {answer.snapshot.offset}, where {self.image.offset}"
                    " is applied"
                )
            self._snapshot, self._pieces, self._position = answer.snapshot, [], 0
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
                f"a batch of metadata at {batch.base_offset}, where {self.log_end.offset} is next"
            )
        if not self.log_end.epoch <= batch.epoch <= self.epoch:
            raise CorruptRecordError(
                f"a batch of metadata of epoch {batch.epoch}, where {self.epoch} is now"
            )
        self._tail.append(batch)
        self.log_end = OffsetAndEpoch(batch.last_offset + 1, batch.epoch)

    def _truncate(self, diverging: OffsetAndEpoch) -> None:
        """Drop what the leader does not have."""
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
        """Take a piece of a snapshot; the images to be published. Raises as ``on_fetched`` does."""
        if not self._heed(answer.error, answer.hint, now_ms):
            if answer.error not in (
                FENCED_LEADER_EPOCH,
                NOT_LEADER_OR_FOLLOWER,
                UNKNOWN_LEADER_EPOCH,
            ):
                self._snapshot = None  # it is gone; a fetch tells which one there is
            return []
        if answer.size > MAX_SNAPSHOT_BYTES:
            raise CorruptRecordError(
                f"a snapshot of {answer.size} bytes; the limit is {MAX_SNAPSHOT_BYTES}"
            )
        if answer.position != self._position or self._snapshot is None:
            self._snapshot = None
            return []
        self._pieces.append(answer.piece)
        self._position += len(answer.piece)
        if self._position < answer.size:
            if not answer.piece:
                raise CorruptRecordError("a piece of a snapshot without a byte")
            return []
        snapshot, content = self._snapshot, b"".join(self._pieces)
        self._snapshot, self._pieces = None, []
        return self._install(snapshot, content)

    def _install(self, snapshot: OffsetAndEpoch, content: bytes) -> list[MetadataImage]:
        """Put the snapshot in the place of all that was there."""
        self._loader.begin_snapshot()
        for batch in self._read_batches(content):
            self._take_voters(batch)
            self._loader.replay(batch.records, batch.last_offset, batch.epoch)
        self.image = self._loader.end_snapshot(*snapshot)
        self._tail.clear()
        self.log_end = self._committed_end = snapshot
        self.high_watermark = max(self.high_watermark, snapshot.offset)
        return self._published([self.image])

    # --- applying ---

    @property
    def is_caught_up(self) -> bool:
        """Whether an image has gone out."""
        return self._caught_up

    @property
    def applied_offset(self) -> int:
        """The last record that the image holds; -1 for none."""
        return self.image.offset

    def _commit(self) -> list[MetadataImage]:
        """Apply what has come below the high watermark: an image per batch."""
        images: list[MetadataImage] = []
        applied = 0
        for batch in self._tail:
            if batch.last_offset >= self.high_watermark:
                break
            self._take_voters(batch)
            self._loader.replay(batch.records, batch.last_offset, batch.epoch)
            if not self._loader.in_transaction:
                self.image = self._loader.publish()
                images.append(self.image)
            self._committed_end = OffsetAndEpoch(batch.last_offset + 1, batch.epoch)
            applied += 1
        del self._tail[:applied]
        return self._published(images)

    def _take_voters(self, batch: MetadataBatch) -> None:
        if batch.voters is not None:
            self.voters = dict(batch.voters)

    def _published(self, images: list[MetadataImage]) -> list[MetadataImage]:
        """What of it goes out: nothing until all is there that was committed when we came.

        The first to go out is the newest one: there is nobody yet who knows a former.
        """
        if self._caught_up:
            return images
        is_there = self._catch_up_to >= 0 and self.image.offset >= self._catch_up_to - 1
        if not is_there or self.image.offset < 0:
            return []
        self._caught_up = True
        return [self.image]
