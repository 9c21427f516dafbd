"""Stop a node whose metadata log fails.

Which of the latest changes are on disk is known only when the node starts again. A node that kept
running would act on changes that are in its memory, but were reported to clients as failed.

Source: ``ReplicaManager.handleLogDirFailure``, which halts the process if the directory of the
metadata log fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.runtime.background import call_later
from fencepost.logcore.errors import StorageError
from fencepost.logcore.tracebacks import without_traceback


def stop_on_failure(log: MetadataLog, stop: Callable[[Exception], None]) -> None:
    """Call ``stop`` soon after the metadata log has gone off line."""
    loop, marks = asyncio.get_running_loop(), log.partition.marks
    report = marks.on_offline

    def failed(error: StorageError) -> None:
        if report is not None:
            report(error)
        # In a later turn, so that requests that wait for the log get their responses first.
        call_later(loop, 0, "metadata log failed", partial(stop, without_traceback(error)))

    marks.on_offline = failed
