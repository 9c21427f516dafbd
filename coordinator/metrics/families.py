"""What a metric is: its name, its type, what it says, its labels; and the table they are read from.

Source: the text format 0.0.4 of Prometheus and OpenMetrics 1.0.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Final

from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.logcore.values import dataclass

MAX_LABEL_CHARACTERS: Final = 250
"""Of the value of a label: a topic's name fits, and a group's may be as long as it likes."""

Number = int | float
Sample = tuple[str, Number]
"""The labels as they are written, without braces, and a value."""


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name."""

    name: str
    kind: str
    """``counter`` (its name ends with ``_total``), ``gauge``, ``histogram`` or ``untyped``."""
    labels: tuple[str, ...]
    help: str


Series = tuple[Family, Iterable[Sample | tuple[str, Histogram]]]
"""A family and all its samples; a histogram's are whole."""


def read_families(table: str) -> Mapping[str, Family]:
    """The families of a table by name: each has a line with name, type and labels, and its text."""
    entries = (entry.splitlines() for entry in re.split(r"\n(?! )", table.strip()))
    found = {}
    for head, *text in entries:
        name, kind, *labels = head.split()
        found[name] = Family(name, kind, tuple(labels), " ".join(map(str.strip, text)))
    return found


_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def label(value: object) -> str:
    """The value of a label as it is written: short, valid, and still its own."""
    text = str(value)
    if len(text) > MAX_LABEL_CHARACTERS:
        digest = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        text = f"{text[: MAX_LABEL_CHARACTERS - 9]}…{digest:08x}"
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.translate(_ESCAPES)


def labels(**values: object) -> str:
    """Labels as they are written between the braces."""
    return ",".join(f'{name}="{label(value)}"' for name, value in values.items())
