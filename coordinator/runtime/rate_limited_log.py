"""Rate limit for log lines that clients can cause: a few per second, then only their number."""

from __future__ import annotations

import structlog

LINES_PER_SECOND = 10
"""The maximum number of log lines per second about one kind of event."""

_log = structlog.get_logger(__name__)


class RateLimitedLog:
    """Decides whether the next line may be logged. ``more`` is the message about omitted lines."""

    def __init__(self, more: str) -> None:
        self._more = more
        self._since_ms = -1_000_000.0
        self._count = 0

    def may_log(self, now_ms: float) -> bool:
        """Return whether a line may be logged now; ``now_ms`` is monotonic."""
        if now_ms - self._since_ms >= 1_000:
            if self._count > LINES_PER_SECOND:
                _log.warning(self._more, count=self._count - LINES_PER_SECOND)
            self._since_ms, self._count = now_ms, 0
        self._count += 1
        return self._count <= LINES_PER_SECOND
