"""Metric families: name, type, labels and help text, read from a table.

Source: the text format 0.0.4 of Prometheus and OpenMetrics 1.0.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from typing import Final

from fencepost.coordinator.runtime.histogram import Histogram
from fencepost.logcore.values import dataclass

MAX_LABEL_CHARACTERS: Final = 250
"""The maximum length of a label value. Every topic name fits, but a group id may be longer."""

Number = int | float
Sample = tuple[str, Number]
"""The encoded labels, without braces, and a value."""


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name."""

    name: str
    kind: str
    """``counter`` (its name ends with ``_total``), ``gauge``, ``histogram`` or ``untyped``."""
    labels: tuple[str, ...]
    help: str


Series = tuple[Family, Iterable[Sample | tuple[str, Histogram]]]
"""A family and its samples; a histogram stands for all of its samples."""


def read_families(table: str) -> dict[str, Family]:
    """Return the families of a table by name.

    In the table, a line has the name, the type and the labels of a family, and is followed by
    indented lines with the help text.
    """
    entries = (entry.splitlines() for entry in re.split(r"\n(?! )", table.strip()))
    families = {}
    for head, *text in entries:
        name, kind, *labels = head.split()
        families[name] = Family(name, kind, tuple(labels), " ".join(map(str.strip, text)))
    return families


_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def label(value: object) -> str:
    """Escape a label value; truncate a long value, with a checksum that keeps it unique."""
    text = str(value)
    if len(text) > MAX_LABEL_CHARACTERS:
        digest = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        text = f"{text[: MAX_LABEL_CHARACTERS - 9]}…{digest:08x}"
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.translate(_ESCAPES)


def labels(**values: object) -> str:
    """Return labels as written between the braces."""
    return ",".join(f'{name}="{label(value)}"' for name, value in values.items())
