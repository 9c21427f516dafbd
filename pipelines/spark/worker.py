"""What a Python worker of Spark's is spared between two tasks.

PySpark's daemon collects garbage in full after every task that a reused worker has done
(``pyspark.daemon``). That walks through everything that is imported: some 70,000 objects and 50 ms
of processor time, in each of the three workers that a micro-batch passes through, where the work
itself takes less than 5 ms.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_modules_seen = 0


def settle() -> None:
    """Take what is imported by now out of garbage collection; for Spark's own workers alone.

    To be called at the end of a piece of work. Does nothing unless modules were imported since the
    call before, so that what later tasks leave behind is collected as ever.
    """
    global _modules_seen  # noqa: PLW0603 - like garbage collection, it belongs to the process
    if len(sys.modules) == _modules_seen:
        return
    _modules_seen = len(sys.modules)
    gc.collect()
    gc.freeze()


def settled(work: Callable[P, T]) -> Callable[P, T]:
    """Make a function call :func:`settle` when it has returned."""

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> T:
        result = work(*args, **kwargs)
        settle()
        return result

    return done
