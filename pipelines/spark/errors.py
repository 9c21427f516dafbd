"""Errors of the source and the sink, whose messages say what to do."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class SparkPipelineError(Exception):
    """The base class of all deliberate errors of the source and the sink."""


class OptionError(SparkPipelineError, ValueError):
    """An option is unknown, missing, malformed or contradicts another."""


class DataLossError(SparkPipelineError):
    """Records that the query must read are gone (``failOnDataLoss``)."""


class ProgressError(SparkPipelineError):
    """The sink's progress and Spark's checkpoint do not belong together; nothing was written."""


class SharedTransactionError(SparkPipelineError):
    """A write into a shared transaction would break exactly-once, and is refused."""


class AccessError(SparkPipelineError):
    """A login is refused, or a right is missing: no retry helps before that is fixed."""


class BrokerError(SparkPipelineError):
    """The broker refused a request, or could not be reached in time."""


# --- error messages in Spark ---


def plain_errors(cls: type[T]) -> type[T]:
    """Make Spark's error messages begin with the message of a :class:`SparkPipelineError`.

    Spark's worker puts its traceback before the exception's text, which comes last. Other errors
    keep the traceback.
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
    """Make PySpark's ``handle_worker_exception`` omit the traceback, in a worker."""
    if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER":
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
