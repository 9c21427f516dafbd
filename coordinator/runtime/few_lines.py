"""Lines of the log that strangers could make many of: a few in a second, then their number."""

from __future__ import annotations

import structlog

LINES_PER_SECOND = 10
"""Lines about one kind of event in one second."""

_log = structlog.get_logger(__name__)


class FewLines:
    """Says whether the next line may be written. ``more`` is what is told of those left out."""

    def __init__(self, more: str) -> None:
        self._more = more
        self._since_ms = -1_000_000.0
        self._count = 0

    def may_tell(self, now_ms: float) -> bool:
        """Ask for one line; ``now_ms`` never goes back."""
        if now_ms - self._since_ms >= 1_000:
            if self._count > LINES_PER_SECOND:
                _log.warning(self._more, count=self._count - LINES_PER_SECOND)
            self._since_ms, self._count = now_ms, 0
        self._count += 1
        return self._count <= LINES_PER_SECOND
