"""What AlterConfigs and IncrementalAlterConfigs share: resource by resource, each at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.answers import forced
from fencepost.coordinator.handlers.certificate_check import check_certificates
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire import Entity
from fencepost.logcore.machine import DomainError

Apply = Callable[[Any], None]
"""Changes one resource of the request; raises a DomainError to refuse."""


def each_resource(ctx: Context, apply: Apply) -> Work[tuple[Entity, ...]]:
    """Change each resource by itself; one that is named twice is refused."""
    return forced(ctx, _changed(ctx, apply))


def _changed(ctx: Context, apply: Apply) -> Work[tuple[Entity, ...]]:
    named: Counter[tuple[int, str]] = Counter()
    for one in ctx.body.resources:
        named[one.resource_type, one.resource_name] += 1
        yield None
    answers = []
    for one in ctx.body.resources:
        code, message = ErrorCode.none, None
        try:
            if named[one.resource_type, one.resource_name] > 1:
                raise InvalidRequestError("Each resource must appear at most once.")
            yield from check_certificates(ctx, one)
            with ctx.broker.metadata.unforced():
                apply(one)
        except DomainError as error:
            code, message = error_code(error), str(error)
        answers.append(
            ctx.respond.AlterConfigsResourceResponse(
                error_code=code,
                error_message=message,
                resource_type=one.resource_type,
                resource_name=one.resource_name,
            )
        )
        yield None
    return tuple(answers)
