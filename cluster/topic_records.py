"""The records of a topic's new partitions, most of which differ only in the partition index.

A request may create 10,000 partitions. Creating that many records takes 50 ms and encoding them 70
ms, in one turn of the event loop. Therefore partitions with the same replicas share one record, the
*form*, which is encoded once as a template. With many brokers, most partitions have a form of their
own, so they can also be encoded in steps, before the decision (:meth:`TopicRecords.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import overload
from uuid import UUID

from fencepost.cluster.image import PartitionRegistration
from fencepost.cluster.record_codec import Template, encode
from fencepost.cluster.records import MetadataRecord, PartitionRecord
from fencepost.logcore.steps import Steps, finish


class TopicRecords(Sequence[MetadataRecord]):
    """The records in ``head``, and after them one PartitionRecord for each of ``forms``.

    A form is a PartitionRecord whose topic id and index are placeholders. Partitions with the same
    replicas share one form. The first partition has the index ``first``.
    """

    def __init__(
        self,
        head: Sequence[MetadataRecord],
        topic_id: UUID,
        first: int,
        forms: Sequence[PartitionRecord],
    ) -> None:
        self.head = tuple(head)
        self.topic_id, self.first, self._forms = topic_id, first, forms
        self.values: list[bytes] = []
        """The values of the partitions' records, once they are prepared."""
        self.registrations: list[PartitionRegistration] = []
        """The partitions as the image will have them, once they are prepared."""

    def __len__(self) -> int:
        return len(self.head) + len(self._forms)

    @overload
    def __getitem__(self, at: int) -> MetadataRecord: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[MetadataRecord]: ...

    def __getitem__(self, at: int | slice) -> MetadataRecord | Sequence[MetadataRecord]:
        if isinstance(at, slice):
            return tuple(self)[at]
        at = range(len(self))[at]
        count = len(self.head)
        return self.head[at] if at < count else self._partition(at - count)

    def __iter__(self) -> Iterator[MetadataRecord]:
        yield from self.head
        yield from map(self._partition, range(len(self._forms)))

    def _partition(self, index: int) -> PartitionRecord:
        return replace(self._forms[index], topic_id=self.topic_id, partition_id=self.first + index)

    def prepare(self) -> Steps[None]:
        """Encode the partitions' records, and build their registrations."""
        shared: dict[int, tuple[Template, PartitionRegistration]] = {}
        values, registrations = list[bytes](), list[PartitionRegistration]()
        number = self.first
        for key, run in groupby(self._forms, id):
            form, *similar = run
            if key not in shared:
                shared[key] = Template(form), PartitionRegistration.of(form)
            template, registration = shared[key]
            following = number + 1 + len(similar)
            values += template.at(self.topic_id, range(number, following))
            registrations += [registration] * (following - number)
            number = following
            yield
        self.values, self.registrations = values, registrations

    @property
    def is_prepared(self) -> bool:
        """Whether :meth:`prepare` has run to its end."""
        return len(self.values) == len(self._forms)

    def with_head(self, head: Sequence[MetadataRecord]) -> TopicRecords:
        """Return the records in ``head``, followed by the records of these partitions."""
        records = TopicRecords(head, self.topic_id, self.first, self._forms)
        records.values, records.registrations = self.values, self.registrations
        return records

    def encoded(self) -> list[bytes]:
        """Return the values of all records."""
        if not self.is_prepared:
            finish(self.prepare())
        return [*map(encode, self.head), *self.values]


def encode_all(records: Sequence[MetadataRecord]) -> list[bytes]:
    """Return the encoded values of records."""
    return records.encoded() if isinstance(records, TopicRecords) else [*map(encode, records)]


def without_partition_records(records: Sequence[MetadataRecord]) -> Iterable[MetadataRecord]:
    """Return ``records`` without the PartitionRecords of a :class:`TopicRecords`."""
    return records.head if isinstance(records, TopicRecords) else records
