"""What a bug on purpose is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.swarm import Options

Line = tuple[Any, str, str]
"""A function or property, a piece of its source that is there once, and what is to stand there."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug."""

    name: str
    lines: tuple[Line, ...]
    needs: Callable[[Options], bool] = lambda _options: True
    """Histories in which it can show at all; the others are not played in a search for it."""
