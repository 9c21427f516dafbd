"""Request parameters, and pages of a list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fencepost.console.limits import MAX_PAGE

T = TypeVar("T")
Params = Mapping[str, str]


def number(params: Params, name: str, default: int, low: int = 0, high: int = 2**63 - 1) -> int:
    """Return an integer parameter. Raises ValueError unless it is between ``low`` and ``high``."""
    text = params.get(name) or str(default)
    try:
        value = int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is not a number") from error
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is not between {low} and {high}")
    return value


def is_on(params: Params, name: str) -> bool:
    """Return a boolean parameter."""
    return params.get(name, "").lower() in {"1", "true", "yes"}


def required(params: Params, name: str) -> str:
    """Return a mandatory parameter. Raises ValueError if it is missing."""
    if not params.get(name):
        raise ValueError(f"{name} is missing")
    return params[name]


def page(params: Params, rows: Sequence[T], name_of: Callable[[T], str]) -> dict[str, Any]:
    """Return ``limit`` rows from ``offset`` on, after dropping rows without ``q`` in their name."""
    query = params.get("q", "").casefold()
    if query:
        rows = [row for row in rows if query in name_of(row).casefold()]
    limit = number(params, "limit", 50, 1, MAX_PAGE)
    # The list may have shrunk since the page was chosen.
    offset = min(number(params, "offset", 0), max(0, (len(rows) - 1) // limit * limit))
    return {
        "rows": list(rows[offset : offset + limit]),
        "total": len(rows),
        "offset": offset,
        "limit": limit,
    }
