"""The audit log: denied accesses, and at level DEBUG also allowed ones.

A client that repeats denied requests could flood the log, so each principal has a rate limit; the
number of suppressed lines is logged before the next line. All text chosen by a client is truncated
and quoted.

Source: ``StandardAuthorizerData.logAuditMessage``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import structlog

from fencepost.cluster.acl import Operation, ResourceType, resource_text
from fencepost.coordinator.config import logs
from fencepost.coordinator.security.principal import ClientSession
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.values import dataclass

LINES_PER_S = 10
"""The maximum sustained rate of lines about one principal, per second."""

LINES_AT_ONCE = 100
"""The maximum burst of lines about one principal."""

MAX_PRINCIPALS = 1_000
"""The maximum number of principals whose rates are tracked. Beyond this number, the principal that
was denied longest ago starts over with a full burst."""

MAX_TEXT_CHARACTERS = 256
"""The maximum number of characters of a name in a line. Topic names have at most 249."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AuditedAccess:
    """An access that a client asked for."""

    session: ClientSession
    operation: Operation
    resource_type: ResourceType
    name: str
    request: str
    """Kafka's name for the API."""
    count: int
    """The number of times that the request names the resource."""


@dataclass(slots=True)
class _LogAllowance:
    left: float
    since: float
    left_out: int = 0


class Audit:
    """Writes the audit log. ``now`` returns monotonic time in seconds."""

    def __init__(self, now: Callable[[], float] = monotonic_s) -> None:
        self._now = now
        self._allowances: OrderedDict[str, _LogAllowance] = OrderedDict()

    @property
    def tells_allowed(self) -> bool:
        """Whether allowed accesses are logged."""
        return logs.level() in {"DEBUG", "TRACE"}

    def allowed(self, access: AuditedAccess, because: Callable[[], str]) -> None:
        """Log an allowed access."""
        _log.debug("access allowed", **_words(access), rule=_cut(because()))

    def denied(self, access: AuditedAccess, because: Callable[[], str]) -> None:
        """Log a denied access, unless the principal's rate limit is exhausted."""
        who = _cut(str(access.session.principal))
        allowance = self._allowance(who)
        if allowance.left < 1:
            allowance.left_out += 1
            return
        allowance.left -= 1
        if allowance.left_out:
            _log.info("denials were not logged", principal=who, lines=allowance.left_out)
            allowance.left_out = 0
        _log.info("access denied", **_words(access), rule=_cut(because()))

    def _allowance(self, principal: str) -> _LogAllowance:
        now, allowances = self._now(), self._allowances
        allowance = allowances.get(principal)
        if allowance is None:
            if len(allowances) >= MAX_PRINCIPALS:
                allowances.popitem(last=False)
            allowance = allowances[principal] = _LogAllowance(LINES_AT_ONCE, now)
        allowances.move_to_end(principal)
        allowance.left = min(LINES_AT_ONCE, allowance.left + (now - allowance.since) * LINES_PER_S)
        allowance.since = now
        return allowance


def _words(access: AuditedAccess) -> dict[str, object]:
    return {
        "principal": _cut(str(access.session.principal)),
        "operation": access.operation.name,
        "host": access.session.host,
        "resource": _cut(resource_text(access.resource_type, access.name)),
        "request": access.request,
        "resources": access.count,
    }


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS] + "…"
