"""Positions in a topic as users write them: earliest, latest, an offset, a time, or a tail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from fencepost.client.queries.times import TimeError, milliseconds
from fencepost.client.requests import EARLIEST, LATEST
from fencepost.logcore.values import dataclass

FORMS = "earliest, latest, an offset, P=OFFSET,… by partition, -10 for the last ten, or a time"

_LAST = re.compile(r"-(\d{1,18})")
_OFFSET = re.compile(r"\d{1,18}")
_BY_PARTITION = re.compile(r"\d{1,9}=\d{1,18}(?:,\d{1,9}=\d{1,18})*")


@dataclass(frozen=True, slots=True)
class OffsetPosition:
    """A position in a topic, given by one of the fields.

    ``time`` is in ms since 1970, or :data:`EARLIEST` or :data:`LATEST`. ``offsets`` are by
    partition; other partitions are read whole. ``last`` counts from the end of each partition, and
    only records that the consumer can see.
    """

    time: int | None = None
    offset: int | None = None
    offsets: Mapping[int, int] = field(default_factory=dict)
    last: int | None = None

    def offset_of(self, index: int) -> int | None:
        """Return the offset in a partition; None if the position has no offset for it."""
        return self.offsets.get(index, self.offset)


BEGINNING, END = OffsetPosition(time=EARLIEST), OffsetPosition(time=LATEST)

PLACES = {"earliest": BEGINNING, "latest": END, "end": END}


def parse_position(text: str) -> OffsetPosition:
    """Parse a position; a number is an offset. Raises :class:`TimeError`."""
    text = text.strip()
    if text in PLACES:
        return PLACES[text]
    last = _LAST.fullmatch(text)
    if last is not None:
        return OffsetPosition(last=int(last[1]))
    if _OFFSET.fullmatch(text):
        return OffsetPosition(offset=int(text))
    if _BY_PARTITION.fullmatch(text):
        pairs = [pair.split("=") for pair in text.split(",")]
        return OffsetPosition(offsets={int(index): int(offset) for index, offset in pairs})
    try:
        return OffsetPosition(time=milliseconds(text))
    except TimeError as error:
        raise TimeError(f"{text!r} is not a position in a topic ({FORMS}); {error}") from error
