"""The entries of a broker's event history."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

from fencepost.client.client import ApiError
from fencepost.client.queries.reader import Reader
from fencepost.client.queries.session import ClusterSession
from fencepost.client.queries.where import BEGINNING, OffsetPosition
from fencepost.coordinator.history.entries import (
    CLUSTER,
    REQUEST_SCOPES,
    Entry,
    decode_value,
    keys_of,
)
from fencepost.coordinator.history.repeats import Repeats
from fencepost.coordinator.metadata.names import CONTROLLER_SUBJECT, HISTORY_TOPIC

LOOK_AGAIN_S = 0.5
"""The interval, in seconds, between requests to a broker that has no event history yet."""


def entries_of(
    session: ClusterSession,
    begin: OffsetPosition = BEGINNING,
    *,
    subjects: Collection[tuple[str, str]] | None = None,
    follow: bool = False,
) -> Iterator[Entry]:
    """Yield the entries of the event history from ``begin``.

    With ``subjects``, which are pairs of a scope and a subject, yield only entries about these
    subjects. Without ``subjects``, omit recorded requests.

    In a cluster each broker writes to its own partition; without ``follow`` the entries are merged
    by time. Apache Kafka's brokers have no entries.
    """
    reader = Reader(session, HISTORY_TOPIC, committed=False)
    while True:
        try:
            (topic,) = session.topics([HISTORY_TOPIC])
            # A leader that has just been fenced is no longer among the brokers.
            alive = session.client.metadata().brokers
            led = [index for index, row in topic.partitions.items() if row.leader in alive]
            if not led:
                return
            reader.seek(led, begin=begin, follow=follow)
            break
        except ApiError as error:
            if error.code.name != "unknown_topic_or_partition":
                raise
            if not follow:
                return
            time.sleep(LOOK_AGAIN_S)
            begin = BEGINNING
    keys = None if subjects is None else {key for subject in subjects for key in keys_of(*subject)}
    entries: Iterable[Entry] = _of(reader, keys)
    if not follow and len(led) > 1:
        entries = sorted(entries, key=lambda entry: entry.at_ms)
    yield from filter(Repeats().is_new, entries)


def last_election(session: ClusterSession) -> Entry | None:
    """Return the last controller election on ZooKeeper; None if the event history has none."""
    entries = entries_of(session, subjects=[(CLUSTER, CONTROLLER_SUBJECT)])
    elections = [entry for entry in entries if entry.what == "controller-elected"]
    return max(elections, key=lambda election: int(election.detail["epoch"]), default=None)


def _of(reader: Reader, keys: Collection[bytes] | None) -> Iterator[Entry]:
    for _, record in reader.records():
        if record.value is not None and (keys is None or record.key in keys):
            entry = decode_value(record.value)
            if entry is not None and (keys is not None or entry.scope not in REQUEST_SCOPES):
                yield entry
