"""Helpers of the configuration APIs: authorization, and changes of one resource at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.cluster.controller.configs import OpType
from fencepost.coordinator.config import client_metrics
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    ClusterAuthorizationError,
    GroupAuthorizationError,
    InvalidRequestError,
    TopicAuthorizationError,
)
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.answers import each_row, forced
from fencepost.coordinator.handlers.certificate_check import check_certificates
from fencepost.coordinator.handlers.resources import ConfigResourceType as Kind
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.machine import DomainError
from fencepost.protocol import Entity
from fencepost.protocol.steps import Steps

_OF_A_BROKER = {Kind.BROKER, Kind.BROKER_LOGGER}
_OF_THE_CLUSTER = {*_OF_A_BROKER, Kind.CLIENT_METRICS}

Apply = Callable[[Any], None]
"""Changes one resource of the request; raises a DomainError to refuse the change."""


def check_right(ctx: Context, operation: Operation, kind: int, name: str) -> None:
    """Check that the client may perform an operation on a resource's settings.

    Raises TopicAuthorizationError, GroupAuthorizationError, ClusterAuthorizationError.
    """
    if kind == Kind.TOPIC and not ctx.may(operation, ResourceType.TOPIC, name):
        raise TopicAuthorizationError("Topic authorization failed.")
    if kind == Kind.GROUP and not ctx.may(operation, ResourceType.GROUP, name):
        raise GroupAuthorizationError("Group authorization failed.")
    if kind in _OF_THE_CLUSTER:
        ctx.require_on_cluster(operation)


def permit(ctx: Context, resource: Any) -> Callable[[], None]:
    """Return a check that the client may change a resource of the request."""
    kind, name = resource.resource_type, resource.resource_name
    if kind in _OF_A_BROKER:
        return partial(_check_broker_right, ctx)
    return partial(check_right, ctx, Operation.ALTER_CONFIGS, kind, name)


def _check_broker_right(ctx: Context) -> None:
    # The broker checks this right, not the controller, and Kafka's brokers send no message with
    # their own refusals (ConfigAdminManager.preprocess, ApiError.fromThrowable).
    if not ctx.may_on_cluster(Operation.ALTER_CONFIGS):
        raise ClusterAuthorizationError


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each resource for the same reason."""
    responses = yield from each_row(
        ctx.body.resources, lambda resource: _row(ctx, resource, code, message)
    )
    return ctx.respond.message(responses=responses)


def _row(ctx: Context, resource: Any, code: int, message: str | None) -> Entity:
    return ctx.respond.AlterConfigsResourceResponse(
        error_code=code,
        error_message=message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


def each_resource(ctx: Context, apply: Apply) -> Work[tuple[Entity, ...]]:
    """Change each resource of the request; refuse one that is named twice."""
    return forced(ctx, _changed(ctx, apply))


def _changed(ctx: Context, apply: Apply) -> Work[tuple[Entity, ...]]:
    named: Counter[tuple[int, str]] = Counter()
    for resource in ctx.body.resources:
        named[resource.resource_type, resource.resource_name] += 1
        yield None
    answers = []
    for resource in ctx.body.resources:
        code, message = ErrorCode.none, None
        try:
            if named[resource.resource_type, resource.resource_name] > 1:
                raise InvalidRequestError("Each resource must appear at most once.")
            yield from check_certificates(ctx, resource)
            yield from _check_expressions(ctx, resource)
            apply(resource)
        except DomainError as error:
            code, message = error_code(error), str(error) or None
        answers.append(_row(ctx, resource, code, message))
        yield None
    return tuple(answers)


def _check_expressions(ctx: Context, resource: Any) -> Work[None]:
    """Check the new expressions of a client metrics subscription.

    Checking long expressions takes several turns of the event loop, so the check is separate from
    the code that stores settings. Raises the errors of :func:`client_metrics.check_expressions`.
    """
    if resource.resource_type != Kind.CLIENT_METRICS:
        return
    if not ctx.may_on_cluster(Operation.ALTER_CONFIGS, audited=False):
        return  # the change will be refused for the missing permission
    added = {
        config.name: config.value
        for config in resource.configs
        if config.name == client_metrics.MATCH
        and config.value is not None
        and getattr(config, "config_operation", OpType.SET) in {OpType.SET, OpType.APPEND}
    }
    yield from client_metrics.check_expressions(added)
