"""Parameters of which ``make test`` uses a part, and ``make slow`` the rest."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

EVERY = 4


def only(values: Iterable[object], *quick: object) -> list[object]:
    """Return ``values`` as parameters, all but ``quick`` marked as slow."""
    return [
        pytest.param(value, marks=[] if value in quick else [pytest.mark.slow]) for value in values
    ]


def seeds(count: int) -> list[object]:
    """Return the seeds below ``count`` as parameters, all but every fourth one marked as slow."""
    return only(range(count), *range(0, count, EVERY))
