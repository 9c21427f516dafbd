"""The entries of a broker's history."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fencepost.coordinator.cli.queries.reader import Reader
from fencepost.coordinator.cli.queries.session import Session
from fencepost.coordinator.cli.queries.where import BEGINNING, Where
from fencepost.coordinator.history.entries import Entry, decode_value
from fencepost.coordinator.metadata.names import HISTORY_TOPIC
from fencepost.coordinator.wire.client.client import ApiError

LOOK_AGAIN_S = 0.5
"""How often a broker that has no history yet is asked again."""


def entries_of(
    session: Session, begin: Where = BEGINNING, *, key: bytes | None = None, follow: bool = False
) -> Iterator[Entry]:
    """The entries of one subject, or of all, from ``begin`` on. None at all on Apache Kafka."""
    reader = Reader(session, HISTORY_TOPIC, committed=False)
    while True:
        try:
            reader.seek(begin=begin, follow=follow)
            break
        except ApiError as error:
            if error.code.name != "unknown_topic_or_partition":
                raise
            if not follow:
                return
            time.sleep(LOOK_AGAIN_S)
            begin = BEGINNING
    for _, record in reader.records():
        if record.value is not None and key in {None, record.key}:
            entry = decode_value(record.value)
            if entry is not None:
                yield entry
