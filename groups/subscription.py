"""The one thing the coordinator reads in a consumer's metadata: the topics it subscribes to."""

from __future__ import annotations

from groups.wire_format import FieldReader
from logcore.errors import CorruptRecordError


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics of a consumer's JoinGroup metadata, or None if it can't be read.

    Every version of the subscription begins with version (int16) and topics, and only that much is
    read, so that versions of the future do no harm. Source: ``ConsumerProtocolSubscription`` v0.
    """
    reader = FieldReader(metadata)
    try:
        if reader.int16() < 0:
            return None
        return frozenset(reader.string() for _ in range(reader.count()))
    except CorruptRecordError:
        return None
