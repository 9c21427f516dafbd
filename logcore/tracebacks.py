"""Errors that outlive the code that raised them, without the memory of its frames.

A traceback holds every frame from ``except`` to ``raise``, and with them the request, the
decompressed records and the unfinished response. So an error that is stored, passed to a future or
sent to a client drops its traceback first; a rule of ``tests/test_tidy.py`` finds the places.
"""

from __future__ import annotations

from traceback import format_tb
from typing import TypeVar

from fencepost.logcore.machine import DomainError

E = TypeVar("E", bound=BaseException)


def without_traceback(error: E) -> E:
    """Drop the tracebacks of ``error`` and of its causes, and return it.

    ``__context__``, the error handled at that moment, is dropped as well. An error that may be a
    bug gets a note with its place in the code.
    """
    cause: BaseException | None = error
    ids: set[int] = set()
    while cause is not None and id(cause) not in ids:
        ids.add(id(cause))
        if cause.__traceback__ is not None and isinstance(cause, Exception):
            _add_traceback_note(cause)
        cause.__traceback__ = cause.__context__ = None
        cause = cause.__cause__
    return error


def _add_traceback_note(error: Exception) -> None:
    if not isinstance(error, DomainError) and not hasattr(error, "__notes__"):
        error.add_note("".join(["Raised at:\n", *format_tb(error.__traceback__)]).rstrip())
