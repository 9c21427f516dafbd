"""Responses and log lines for requests that are not served or whose handler has failed."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Answer, Context
from fencepost.coordinator.runtime.rate_limited_log import RateLimitedLog
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.api import KNOWN_APIS, api_name
from fencepost.protocol.errors import UnsupportedVersion, WireError

log = structlog.get_logger(__name__)


def refusal(
    context: Context, error: Exception, error_code: Callable[[DomainError], int]
) -> Answer | Work[Answer]:
    """Return the API's error response; None if it has none. Log an unexpected error."""
    refused = context.registry.handler(context.api_key).refused
    if isinstance(error, DomainError):
        return refused(context, error_code(without_traceback(error)), str(error))
    name = KNOWN_APIS[context.api_key].name
    log.error("handler failed", api=name, version=context.version, exc_info=error)
    # A local variable in the traceback may be a future that holds the error: a reference cycle.
    without_traceback(error)
    return refused(context, ErrorCode.unknown_server_error, None)


class UnservedRequests:
    """Logs requests of APIs or versions that are not served: their connections are just closed.

    ApiVersions is not logged: a client first tries its newest version, and gets a response.
    """

    def __init__(self) -> None:
        self._lines = RateLimitedLog("more requests of unknown APIs or versions")

    def reason(self, error: WireError, peer: str) -> str:
        """Return the reason for closing the connection of ``peer``; log a warning."""
        if not isinstance(error, UnsupportedVersion):
            return str(error)
        name = api_name(error.api_key) or f"API key {error.api_key}"
        lowest, highest = error.served or (None, None)
        if self._lines.may_log(monotonic_s() * 1000):
            log.warning(
                "request not served",
                api=name,
                version=error.version,
                lowest=lowest,
                highest=highest,
                client_id=error.client_id,
                peer=peer,
            )
        return f"{name} is not served at version {error.version}"
