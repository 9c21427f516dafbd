"""The kinds of share-partition events in the event history."""

from __future__ import annotations

from enum import StrEnum


class EventKind(StrEnum):
    """The kinds of events; the subject of each event is the group id."""

    SHARE_PARTITION_LOADED = "share-partition-loaded"
    SHARE_PARTITION_FAILED = "share-partition-failed"
    SHARE_PARTITION_FENCED = "share-partition-fenced"
    SHARE_RECORDS_RETURNED = "share-records-returned"
    """Records became available again, for the cause in the event."""
    SHARE_RECORDS_GIVEN_UP = "share-records-given-up"
    """Records were archived, or are sent to the dead-letter queue."""
    SHARE_STATE_NOT_WRITTEN = "share-state-not-written"
    """The share coordinator did not take a new state: the records stay with their owners."""
    SHARE_RECORDS_DEAD_LETTERED = "share-records-dead-lettered"
    """Records are in the dead-letter queue."""
    SHARE_DEAD_LETTER_FAILED = "share-dead-letter-failed"
    """Records were archived without the dead-letter queue, for the reason in the event."""
    SHARE_START_OFFSET_MOVED = "share-start-offset-moved"
    """The log start offset passed the start offset."""
