"""Restarts failed queries: the sink stops whenever the outcome is uncertain, and restarts safely.

Spark itself restarts nothing: a long-running driver needs a loop around the query. A restart with
the same checkpoint either repeats the failed batch or finds that it was committed.
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
"""Names of our errors that a restart cannot fix; Spark reports them as text."""

MAX_RESTARTS = 10
"""The number of consecutive failures, without a committed batch in between, after which the
supervisor gives up."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Pauses before a restart, which double from the first to the last."""

_log = logging.getLogger(__name__)


def run_supervised(
    start: Callable[[], StreamingQuery],
    *,
    max_restarts: int = MAX_RESTARTS,
    first_pause_s: float = FIRST_PAUSE_S,
    max_pause_s: float = MAX_PAUSE_S,
) -> StreamingQuery:
    """Run the query that ``start`` starts, and restart it when it fails.

    Return the last run once it was stopped or has ended (``availableNow``). Raises
    ``StreamingQueryException`` for an error that a restart cannot fix, or after ``max_restarts``
    consecutive failures without a committed batch.
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
    """Return whether a query failed because of one of our errors that a restart cannot fix."""
    text = str(error)
    return any(f"fencepost.pipelines.spark.errors.{name}" in text for name in FATAL)


def first_line(error: BaseException) -> str:
    """Return the cause, without the stack traces of two languages."""
    text = str(error)
    ours = [line for line in text.splitlines() if line.startswith("fencepost.pipelines.spark.")]
    return ours[0] if ours else text.split("\n", 1)[0]
