"""Imported first: keeps what daemon and commands never use out of their start and their memory.

Two libraries load others for conveniences that neither has a use for, if they are installed: kio
registers test strategies with hypothesis, structlog.dev prepares coloured tracebacks with rich.
Together that is more than a third of the daemon's start, half of a command's, and ten megabytes.
Both are imported here while those look absent; afterwards everything can be imported as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Make modules that are not loaded look as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python itself spells it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


with _absent("hypothesis", "rich"):
    import kio.static.primitive
    import structlog

__all__ = ["kio", "structlog"]
