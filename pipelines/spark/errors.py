"""What the source and the sink refuse, in words that say what to do about it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class SparkPipelineError(Exception):
    """Base of everything that the source and the sink raise on purpose."""


class OptionError(SparkPipelineError, ValueError):
    """An option is unknown, missing, malformed or contradicts another."""


class DataLossError(SparkPipelineError):
    """Records that the query has to read are gone (``failOnDataLoss``)."""


class ProgressError(SparkPipelineError):
    """The sink's progress and Spark's checkpoint do not belong together; nothing was written."""


class SharedTransactionError(SparkPipelineError):
    """Something would write into a shared transaction that must not: it is refused."""


class AccessError(SparkPipelineError):
    """A login is refused, or a right is missing: no repetition helps before that is mended."""


class BrokerError(SparkPipelineError):
    """The broker refused a request, or could not be reached in time."""


# --- how Spark tells them ---


def speaks_plainly(cls: type[T]) -> type[T]:
    """Have Spark begin with the sentence of what a class's methods raise on purpose.

    A worker of Spark's puts its traceback before an exception, and ends behind it. Only errors
    that are no sentence keep the traceback.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _plain(method))
    return cls


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                yield from method(*args, **kwargs)
            except SparkPipelineError:
                _hide_traceback()
                raise

        return generate

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except SparkPipelineError:
            _hide_traceback()
            raise

    return call


def _hide_traceback() -> None:
    """Ask PySpark's ``handle_worker_exception`` for the exception alone, in a worker."""
    if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
