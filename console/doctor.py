"""The view of the rules of exactly-once that clients break."""

from __future__ import annotations

from typing import Any

from fencepost.client.queries.doctor import Subject, diagnosed_from, finding_row
from fencepost.client.queries.session import ClusterSession
from fencepost.console.history import HistoryCache
from fencepost.console.paging import Params


def doctor_view(session: ClusterSession, params: Params, history: HistoryCache) -> dict[str, Any]:
    """Return the findings in the newest history entries, which the console keeps in memory."""
    del params
    history.read_on(session)
    diagnosis = diagnosed_from(session, history.newest(), Subject())
    return {
        "observes": diagnosis.observes,
        "dropped": diagnosis.dropped,
        "findings": [finding_row(finding) for finding in diagnosis.findings],
    }
