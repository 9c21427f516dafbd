"""Import three libraries without their unused dependencies; must be imported first.

kio registers test strategies with hypothesis if it is installed, and structlog.dev prepares
coloured tracebacks with rich. Together these imports take ten megabytes of memory, more than a
third of the daemon's startup time, and half of a command's startup time. This module imports kio
and structlog while hypothesis and rich look absent. crc32c reads its own version and loads an
unused command line; this module imports crc32c with stand-ins for both. Afterwards every module can
be imported as usual.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Make modules that are not loaded look as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's marker for an absent module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _stand_in(name: str, **attributes: object) -> Iterator[None]:
    """Replace the module ``name`` by one with only these ``attributes``, unless it is loaded."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(attributes)
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _unfrozen() -> Iterator[None]:
    """Restore the real ``datetime.datetime``, from which kio derives a class.

    freezegun replaces it by a class whose metaclass prevents such a derivation.
    """
    now = dt.datetime
    dt.datetime = next(  # type: ignore[misc, assignment]
        base for base in now.__mro__ if base.__module__ == "datetime"
    )
    try:
        yield
    finally:
        dt.datetime = now  # type: ignore[misc]


with _absent("hypothesis", "rich"), _unfrozen():
    import kio.static.primitive
    import structlog
with _stand_in("importlib.metadata", version=str), _stand_in("crc32c._cli", main=None):
    import crc32c

__all__ = ["crc32c", "kio", "structlog"]
