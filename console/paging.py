"""One page of a list, and what a request says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fencepost.console.limits import MAX_PAGE

T = TypeVar("T")
Params = Mapping[str, str]


def number(params: Params, name: str, default: int, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number of the request. ValueError outside of its bounds."""
    text = params.get(name) or str(default)
    try:
        found = int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is no number") from error
    if not low <= found <= high:
        raise ValueError(f"{name}={found} is not between {low} and {high}")
    return found


def is_on(params: Params, name: str) -> bool:
    """A switch of the request."""
    return params.get(name, "").lower() in {"1", "true", "yes"}


def required(params: Params, name: str) -> str:
    """A text of the request that must be there. ValueError else."""
    if not params.get(name):
        raise ValueError(f"{name} is missing")
    return params[name]


def page(params: Params, rows: Sequence[T], name_of: Callable[[T], str]) -> dict[str, Any]:
    """The rows that contain ``q`` in their name, from ``offset`` on, ``limit`` of them."""
    wanted = params.get("q", "").casefold()
    if wanted:
        rows = [row for row in rows if wanted in name_of(row).casefold()]
    limit = number(params, "limit", 50, 1, MAX_PAGE)
    # A list may have become shorter since the page was chosen.
    offset = min(number(params, "offset", 0), max(0, (len(rows) - 1) // limit * limit))
    return {
        "rows": list(rows[offset : offset + limit]),
        "total": len(rows),
        "offset": offset,
        "limit": limit,
    }
