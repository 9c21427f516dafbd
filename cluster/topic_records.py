"""The records of a topic's new partitions, most of which differ only in the partition index.

A request may create 10,000 partitions. Creating that many records takes 50 ms and encoding them 70
ms, in one turn of the event loop. Therefore partitions with the same replicas share one record, the
*form*, which is encoded once as a template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import overload
from uuid import UUID

from fencepost.cluster.record_codec import Template, encode
from fencepost.cluster.records import MetadataRecord, PartitionRecord


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
        self._topic_id, self._first, self._forms = topic_id, first, forms

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
        return replace(
            self._forms[index], topic_id=self._topic_id, partition_id=self._first + index
        )

    def encoded(self) -> list[bytes]:
        """Return the values of all records."""
        values, templates = [*map(encode, self.head)], dict[int, Template]()
        number = self._first
        for key, run in groupby(self._forms, id):
            form, *others = run
            template = templates.get(key)
            if template is None:
                template = templates[key] = Template(form)
            following = number + 1 + len(others)
            values += template.at(self._topic_id, range(number, following))
            number = following
        return values


def encode_all(records: Sequence[MetadataRecord]) -> list[bytes]:
    """Return the encoded values of records."""
    return records.encoded() if isinstance(records, TopicRecords) else [*map(encode, records)]


def without_partition_records(records: Sequence[MetadataRecord]) -> Iterable[MetadataRecord]:
    """Return ``records`` without the PartitionRecords of a :class:`TopicRecords`."""
    return records.head if isinstance(records, TopicRecords) else records
