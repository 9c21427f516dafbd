"""A query's lag, with the metrics of Spark's own Kafka connector.

Python data sources cannot add metrics to a query's progress, but the progress has the offsets from
which the metrics follow.
"""

from __future__ import annotations

import json
from typing import Protocol

from fencepost.pipelines.spark.offsets import Offsets, from_json


class SourceProgress(Protocol):
    """One of the ``sources`` of a query's progress (PySpark's ``SourceProgress``)."""

    @property
    def endOffset(self) -> str:  # noqa: N802 - Spark's name
        """The end of the micro-batch, as JSON."""

    @property
    def latestOffset(self) -> str:  # noqa: N802 - Spark's name
        """The end of the topics when the micro-batch was planned, as JSON."""


def behind_latest(source: SourceProgress) -> dict[str, str]:
    """Return ``minOffsetsBehindLatest``, ``max…`` and ``avg…``; empty if unknown.

    Source: ``KafkaMicroBatchStream.metrics``.
    """
    end, latest = _offsets(source.endOffset), _offsets(source.latestOffset)
    if not end or not latest:
        return {}
    behind = [offset - end.get(part, 0) for part, offset in latest.items()]
    return {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": str(sum(behind) / len(behind)),
    }


def _offsets(text: str) -> Offsets:
    """Parse offsets from PySpark; missing offsets are the text ``None``."""
    try:
        return from_json(json.loads(text) or {})
    except ValueError:
        return {}
