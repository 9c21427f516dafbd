"""Answers and log lines for requests that are not served or whose handler has failed."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Answer, Context
from fencepost.coordinator.runtime.few_lines import FewLines
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire.api import KNOWN_APIS
from fencepost.coordinator.wire.errors import UnsupportedVersion, WireError
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback

log = structlog.get_logger(__name__)


def refusal(
    context: Context, error: Exception, error_code: Callable[[DomainError], int]
) -> Answer | Work[Answer]:
    """Return the API's error response; None where it has none. An unexpected error is logged.

    The error's traceback is dropped: a future that a frame of it waited for may hold the error.
    """
    refused = context.registry.handler(context.api_key).refused
    if isinstance(error, DomainError):
        return refused(context, error_code(without_traceback(error)), str(error))
    name = KNOWN_APIS[context.api_key].name
    log.error("handler failed", api=name, version=context.version, exc_info=error)
    without_traceback(error)
    return refused(context, ErrorCode.unknown_server_error, None)


class UnservedRequests:
    """Logs requests of APIs or versions that are not served: clients only lose a connection.

    ApiVersions is left out: a client asks for its newest version first, and gets an answer.
    """

    def __init__(self) -> None:
        self._lines = FewLines("more requests of unknown APIs or versions")

    def reason(self, error: WireError, peer: str) -> str:
        """Return why the connection of ``peer`` is closed, and log a warning about its request."""
        if not isinstance(error, UnsupportedVersion):
            return str(error)
        name = api_name(error.api_key)
        lowest, highest = error.served or (None, None)
        if self._lines.may_tell(monotonic_s() * 1000):
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


def api_name(api_key: int) -> str:
    """Kafka's name of an API, also of one that is not served here; its key where there is none."""
    known = KNOWN_APIS.get(api_key)
    if known is not None:
        return known.name
    from kio.schema.index import api_key_map  # noqa: PLC0415 - only errors need it

    found = api_key_map.get(api_key)
    return f"API key {api_key}" if found is None else found.title().replace("_", "")
