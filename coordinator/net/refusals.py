"""What a client is told of a request whose handler has failed."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context
from fencepost.coordinator.wire.api import KNOWN_APIS
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.machine import DomainError

log = structlog.get_logger(__name__)


def refusal(
    context: Context, error: Exception, error_code: Callable[[DomainError], int]
) -> Entity | None:
    """The answer; None where the API has no error of its own. What nobody expected is logged."""
    if isinstance(error, DomainError):
        return context.respond.error(error_code(error), str(error))
    name = KNOWN_APIS[context.api_key].name
    log.error("handler failed", api=name, version=context.version, exc_info=error)
    return context.respond.error(ErrorCode.unknown_server_error)
