"""Restarting a query that failed: the sink stops whenever it can't be sure, and begins anew safely.

Spark itself restarts nothing: a driver that is to run for long needs a loop around the query. A
restart under the same checkpoint either runs the failed batch again or finds that it was committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

FATAL = ("OptionError", "ProgressError", "DataLossError", "AccessError")
"""Names of our errors that no restart cures; Spark hands them over as text."""

MAX_RESTARTS = 10
"""Failures in a row without a committed batch between them, after which it gives up."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses before a restart double from the first to the last of these."""

_log = logging.getLogger(__name__)


def run_supervised(
    start: Callable[[], StreamingQuery],
    *,
    max_restarts: int = MAX_RESTARTS,
    first_pause_s: float = FIRST_PAUSE_S,
    max_pause_s: float = MAX_PAUSE_S,
) -> StreamingQuery:
    """Run the query that ``start`` starts, and start it again when it fails.

    Returns the last run once it was stopped or has ended (``availableNow``). Raises
    ``StreamingQueryException`` for an error that a restart cannot cure, or after ``max_restarts``
    failures in a row in which no batch was committed.
    """
    failures = 0
    pause_s = first_pause_s
    while True:
        query = start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if query.recentProgress:
                failures, pause_s = 0, first_pause_s
            failures += 1
            if failures > max_restarts or is_fatal(error):
                raise
            _log.warning("query %s failed, restart %d: %s", query.id, failures, first_line(error))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max_pause_s)
        else:
            return query


def is_fatal(error: BaseException) -> bool:
    """Whether one of our errors that no restart cures is behind a failed query."""
    text = str(error)
    return any(f"fencepost.pipelines.spark.errors.{name}" in text for name in FATAL)


def first_line(error: BaseException) -> str:
    """The cause, without the stack traces of two languages."""
    text = str(error)
    ours = [line for line in text.splitlines() if line.startswith("fencepost.pipelines.spark.")]
    return ours[0] if ours else text.split("\n", 1)[0]
