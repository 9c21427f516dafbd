"""A planted bug: code to replace, and the histories in which the bug can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.swarm import Options

Line = tuple[Any, str, str]
"""A function or property, text that occurs once in its source, and the replacement."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One planted bug."""

    name: str
    lines: tuple[Line, ...]
    needs: Callable[[Options], bool] = lambda _options: True
    """Selects the histories in which the bug can show; a search plays no others."""
