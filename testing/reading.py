"""Reading a topic from its beginning, again and again, without reading anything twice."""

from __future__ import annotations

from fencepost.coordinator.cli.queries.reader import visible
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST
from fencepost.testing.views import Record


class TopicReader:
    """What has been ``found`` in a topic, or one partition of it, so far."""

    def __init__(
        self, session: Session, topic: str, partition: int | None, *, committed: bool
    ) -> None:
        known = session.topics([topic])[0].partitions
        if partition is not None and partition not in known:
            raise ValueError(f"{topic} has no partition {partition}, but {len(known)}")
        indexes = sorted(known) if partition is None else [partition]
        self.found: list[Record] = []
        self._session = session
        self._committed = committed
        self._positions = session.offsets([(topic, index) for index in indexes], EARLIEST)

    def read_on(self) -> None:
        """Read from where it stopped up to what is the end now, for this isolation level."""
        ends = self._session.offsets(self._positions, LATEST, committed=self._committed)
        for (topic, index), position in self._positions.items():
            while position < ends[topic, index]:
                row = self._session.fetch(topic, index, position, committed=self._committed)
                aborted = sorted(
                    (one.first_offset, one.producer_id) for one in row.aborted_transactions or ()
                )
                records, went_to = visible(row.records or b"", position, aborted)
                self.found += (Record(topic, index, *record) for record in records)
                if went_to == position:
                    break  # retention took it meanwhile, or a topic was made anew
                position = went_to  # noqa: PLW2901 - the place to go on from
            self._positions[topic, index] = position

    def told(self) -> str:
        """How far it got, for an error."""
        last = "".join(f"; {one}" for one in self.found[-3:])
        return f"there were {len(self.found)}{last}"
