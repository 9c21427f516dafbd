"""Replays metadata records, in order, into images that may be published.

The records of a metadata transaction take effect together: until the transaction ends, and after an
abort, the image is the one from before the transaction. Partitions in the same state share one
registration object, because a cluster may have thousands of such partitions.

Source: ``MetadataBatchLoader``, ``MetadataLoader``; KIP-866 (transactions).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Final
from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.cluster.record_codec import (
    BODY,
    BODY_AFTER_TOPIC_ID,
    KIND,
    OF_ONE_PARTITION,
    PARTITION,
    PARTITION_KIND,
    TOPIC_ID,
    SimilarPartitionRecords,
    Template,
    decode,
)
from fencepost.cluster.records import (
    AbortTransactionRecord,
    BeginTransactionRecord,
    EndTransactionRecord,
    MetadataRecord,
    PartitionChangeRecord,
    RemoveTopicRecord,
)
from fencepost.logcore.errors import CorruptRecordError

_MAX_SHARED: Final = 10_000
"""The maximum size of the cache of registrations; a larger cache is cleared."""


class ImageLoader:
    """Builds images from committed records.

    Raises CorruptRecordError for a record that cannot be decoded or applied. After this error, the
    records replayed since the last :meth:`publish` are unusable: call :meth:`forget`, or stop.
    """

    def __init__(self, image: MetadataImage | None = None) -> None:
        self._delta = MetadataDelta(MetadataImage() if image is None else image)
        self._before: MetadataImage | None = None
        """The image from before an open metadata transaction."""
        self._offset, self._epoch = self._delta.image.offset, self._delta.image.epoch
        self._shared: dict[
            tuple[int, bytes], tuple[PartitionRegistration | None, PartitionRegistration]
        ] = {}
        """A cache of the registrations that result from records. The key is the ``id()`` of the
        registration before the record (None for a new partition), and the record's content. The
        first element of the value keeps that registration alive, so that no other object gets its
        ``id()``; the second is the result."""
        self.removed: set[UUID] = set()
        """Topics for which a RemoveTopicRecord was replayed."""

    @property
    def in_transaction(self) -> bool:
        """Whether a metadata transaction is open."""
        return self._before is not None

    def replay(
        self,
        values: Iterable[bytes | SimilarPartitionRecords],
        last_offset: int,
        epoch: int,
        records: Iterable[MetadataRecord | None] = repeat(None),
    ) -> None:
        """Replay encoded records up to ``last_offset``.

        ``records`` has the decoded record of each value, or None if it was not decoded before.
        """
        body = kind = b""
        partitions: dict[int, PartitionRegistration] = {}
        shared: PartitionRegistration | None = None
        then: PartitionRegistration | None = None
        for value, record in zip(values, records, strict=False):
            if isinstance(value, SimilarPartitionRecords):
                self._replay_similar(value)
                then = None
                continue
            index = int.from_bytes(value[PARTITION])
            if (
                then is not None
                and value[BODY] == body
                and value[KIND] == kind
                and (kind == PARTITION_KIND or partitions.get(index) is shared)
            ):
                # The same content as in the previous record, for another partition.
                partitions[index] = then
                continue
            kind = value[KIND]
            if kind not in OF_ONE_PARTITION:
                then = None
                self._replay_one(decode(value) if record is None else record)
                continue
            body = value[BODY]
            partitions = self._delta.partitions_at(value[TOPIC_ID])
            shared = None if kind == PARTITION_KIND else partitions.get(index)
            then = self._shared.get((id(shared), value[BODY_AFTER_TOPIC_ID]), (None, None))[1]
            if then is None:
                self._delta.replay(decode(value) if record is None else record)
                then = partitions[index]
                self._shared[id(shared), value[BODY_AFTER_TOPIC_ID]] = shared, then
            else:
                partitions[index] = then
        self._offset, self._epoch = last_offset, epoch

    def _replay_similar(self, similar: SimilarPartitionRecords) -> None:
        """Replay records with the same content without decoding each of them.

        A broker replays thousands of such records when it starts.
        """
        is_new, at = similar.kind == PARTITION_KIND, self._delta.partitions_at
        topic_id = b""
        partitions: dict[int, PartitionRegistration] = {}
        shared: PartitionRegistration | None = None
        then: PartitionRegistration | None = None
        for index, of_topic in similar.places:
            if of_topic != topic_id:
                topic_id, partitions = of_topic, at(of_topic)
            was = None if is_new else partitions.get(index)
            if then is None or was is not shared:
                shared = was
                then = self._shared.get((id(shared), similar.body), (None, None))[1]
                if then is None:
                    self._delta.replay(decode(similar.value_at(index, of_topic)))
                    then = partitions[index]
                    self._shared[id(shared), similar.body] = shared, then
            partitions[index] = then

    def add_partitions(
        self, topic_id: UUID, first: int, registrations: Iterable[PartitionRegistration]
    ) -> None:
        """See :meth:`MetadataDelta.add_partitions`."""
        self._delta.add_partitions(topic_id, first, registrations)

    def change_all(self, change: PartitionChangeRecord, replicas: tuple[int, ...]) -> list[bytes]:
        """Replay ``change`` for each partition that has exactly these replicas.

        Returns the values of the corresponding records. No other record may have been replayed
        since the last :meth:`publish`.
        """
        template, values = Template(change), list[bytes]()
        for topic_id, indexes in self._delta.change_all(change, replicas):
            values += template.at(topic_id, indexes)
        return values

    def _replay_one(self, record: MetadataRecord) -> None:
        if isinstance(record, BeginTransactionRecord):
            if self._before is not None:
                raise CorruptRecordError("a metadata transaction begins inside of another one")
            self._before = self._apply()
        elif isinstance(record, (EndTransactionRecord, AbortTransactionRecord)):
            if self._before is None:
                raise CorruptRecordError("the end of a metadata transaction that never began")
            if isinstance(record, AbortTransactionRecord):
                self._delta = MetadataDelta(self._before)
            self._before = None
        else:
            self._delta.replay(record)
            if isinstance(record, RemoveTopicRecord):
                self.removed.add(record.topic_id)

    def skip_control_batch(self, offset: int, epoch: int) -> None:
        """Advance past the records of a control batch, which do not affect the image."""
        self._offset, self._epoch = offset, epoch

    def publish(self) -> MetadataImage:
        """Return the image of all replayed records, or the one from before an open transaction."""
        return self._apply() if self._before is None else self._before

    def forget(self, image: MetadataImage) -> None:
        """Continue from ``image``, and drop all replayed records."""
        self._delta = MetadataDelta(image)
        self._before = None
        self._offset, self._epoch = image.offset, image.epoch

    def begin_snapshot(self) -> None:
        """Replace the image by the records up to :meth:`end_snapshot`; ignore their offsets."""
        self._delta = MetadataDelta(self._apply())
        self._delta.begin_snapshot()
        self._before = None

    def end_snapshot(self, end_offset: int, epoch: int) -> MetadataImage:
        """Return the image of a snapshot that ends before ``end_offset``."""
        self._offset, self._epoch = end_offset - 1, epoch
        return self._apply()

    def _apply(self) -> MetadataImage:
        """Return the image of all replayed records, in a transaction or not."""
        image = self._delta.apply(self._offset, self._epoch)
        self._delta = MetadataDelta(image)
        if len(self._shared) > _MAX_SHARED:
            self._shared.clear()
        return image
