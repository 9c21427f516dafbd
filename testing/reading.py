"""Incremental reading of a topic from its log start offset; no record is read twice."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.client.client import ApiError
from fencepost.client.cluster import TopicMetadata
from fencepost.client.queries.reader import visible_chunks
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.unknown import UnknownNameError, unknown_topic
from fencepost.client.requests import EARLIEST, LATEST, Partition
from fencepost.testing.views import Record


def describe(session: ClusterSession, topic: str) -> TopicMetadata:
    """Describe a topic. Raises UnknownNameError, with the nearest name, if it does not exist."""
    try:
        return session.topics([topic])[0]
    except UnknownNameError:
        raise no_topic(session, topic) from None


def no_topic(session: ClusterSession, topic: str) -> UnknownNameError:
    """Return the error for a topic that does not exist."""
    there = [name for name, row in session.client.metadata().topics.items() if not row.is_internal]
    error = unknown_topic(topic, there)
    # On a shared broker, `name` prefixes names with the test's name.
    similar = next((name for name in reversed(there) if name.endswith(f"-{topic}")), None)
    if similar is not None:
        error.args = (f"there is no topic {topic!r}; did you mean name({topic!r}), {similar}?",)
    return error


class TopicReader:
    """A reader of a topic or of one partition; ``found`` has the records read so far."""

    def __init__(self, topic: str, partition: int | None, *, committed: bool) -> None:
        self.found: list[Record] = []
        self._topic, self._partition, self._committed = topic, partition, committed
        self._topic_id: object = None
        self._positions: dict[Partition, int] = {}
        self._missing = ""

    def read_on(self, session: ClusterSession) -> None:
        """Read from the last position to the high watermark; if ``committed``, to the LSO.

        Raises ApiError, also for a missing topic, and ValueError for a missing partition.
        """
        try:
            description = describe(session, self._topic)
        except UnknownNameError as error:
            self._missing = str(error)
            raise
        self._missing = ""
        if self._partition is not None and self._partition not in description.partitions:
            count = len(description.partitions)
            raise ValueError(f"{self._topic} has no partition {self._partition}, but {count}")
        if description.topic_id != self._topic_id:  # the topic was recreated
            self._topic_id = description.topic_id
            self.found.clear()
            self._positions.clear()
        indexes = sorted(description.partitions) if self._partition is None else [self._partition]
        added = [
            (self._topic, index) for index in indexes if (self._topic, index) not in self._positions
        ]
        self._positions |= session.offsets(added, EARLIEST) if added else {}
        ends = session.offsets(self._positions, LATEST, committed=self._committed)
        for place in self._positions:
            while self._positions[place] < ends[place] and self._fetch(session, place):
                pass

    def _fetch(self, session: ClusterSession, place: Partition) -> bool:
        """Read on in one partition; return False if there is no progress."""
        position = self._positions[place]
        try:
            row = session.fetch(*place, position, committed=self._committed)
        except ApiError as error:
            if error.code is not ErrorCode.offset_out_of_range:
                raise
            self._positions |= session.offsets([place], EARLIEST)  # deleted by retention meanwhile
            return self._positions[place] > position
        aborted = sorted(
            (aborted.first_offset, aborted.producer_id)
            for aborted in row.aborted_transactions or ()
        )
        for records, behind in visible_chunks(row.records or b"", position, aborted):
            self.found += (Record(place[0], place[1], *record[:5]) for record in records)
            self._positions[place] = behind
        return self._positions[place] > position

    def progress(self) -> str:
        """Return the reader's progress as a text, for an error."""
        last = "".join(f"; {text}" for text in self.found[-3:])
        return self._missing or f"there were {len(self.found)}{last}"
