"""A planted bug: a change to the product's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Line = tuple[Any, str, str]
"""A function or property, text that occurs once in its source, and the replacement."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug."""

    name: str
    lines: tuple[Line, ...]
