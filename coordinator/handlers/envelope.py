"""Envelope (58): a broker forwards a client's request to the controller (KIP-590).

The forwarded request runs with the client's permissions, under the principal that the broker has
sent; the response goes back in the envelope.

Source: ``EnvelopeUtils.handleEnvelopeRequest``, ``DefaultKafkaPrincipalBuilder.deserialize``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from ipaddress import ip_address
from types import GeneratorType
from typing import Any, Final

import structlog
from kio.schema.default_principal_data.v0.data import DefaultPrincipalData
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.errors import NotControllerError
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles, with_wait
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import ClientSession, Principal, plain_host
from fencepost.logcore.machine import DomainError
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.api import FORWARDED
from fencepost.protocol.codec import (
    Request,
    decode_request_in_steps,
    encode_response_in_steps,
)
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion
from fencepost.protocol.messages import response_factory

_log = structlog.get_logger(__name__)
_read_principal = entity_reader(DefaultPrincipalData)

PRINCIPAL_VERSION: Final = b"\0\0"
"""The version prefix of a serialized principal; the only version is 0."""

_LENGTH_BYTES: Final = 4


@dataclass(slots=True)
class _EnvelopeClient:
    """The client of a forwarded request, as the forwarding broker describes it."""

    session: ClientSession
    client_software: tuple[str, str] | None = None
    peer_port: int = 0


@handles(ApiKey.ENVELOPE, versions=(0, 0), permission="CLUSTER_ACTION Cluster")
def run(ctx: Context) -> Work[Entity]:
    """Execute the forwarded request and return its response."""
    ctx.require_on_cluster(Operation.CLUSTER_ACTION)
    body = ctx.body
    try:
        host = plain_host(str(ip_address(body.client_host_address)))
    except ValueError:
        return _refused(ctx, ErrorCode.invalid_request)
    principal = _principal(body.request_principal)
    if principal is None:
        return _refused(ctx, ErrorCode.principal_deserialization_failure)
    try:
        request = yield from decode_request_in_steps(
            memoryview(body.request_data), ctx.registry.versions
        )
    except UnsupportedVersion:
        return _refused(ctx, ErrorCode.unsupported_version)
    except MalformedRequest:
        return _refused(ctx, ErrorCode.invalid_request)
    if request.api_key not in FORWARDED:
        return _refused(ctx, ErrorCode.invalid_request)
    listener = ctx.connection.session.listener
    throttle = (
        None
        if ctx.throttle is None
        else ctx.throttle.for_envelope(principal.name, request.client_id)
    )
    inner = replace(
        ctx,
        api_key=request.api_key,
        version=request.api_version,
        correlation_id=request.correlation_id,
        client_id=request.client_id,
        body=request.body,
        respond=response_factory(request.api_key, request.api_version),
        peer_host=host,
        connection=_EnvelopeClient(ClientSession(host, listener, principal)),
        size_bytes=len(body.request_data),
        throttle=throttle,
    )
    try:
        answer = yield from _answered(inner)
    except NotControllerError:
        return _refused(ctx, ErrorCode.not_controller)
    if throttle is not None and answer is not None:
        answer, _ = with_wait(answer, throttle.decided(None, is_answered=False))
    return (yield from _wrapped(ctx, request, answer))


def _wrapped(ctx: Context, request: Request, answer: Entity | None) -> Work[Entity]:
    if answer is None:
        return _refused(ctx, ErrorCode.unknown_server_error)
    encoded = encode_response_in_steps(
        request.api_key, request.api_version, request.correlation_id, answer
    )
    chunks = encoded if isinstance(encoded, list) else (yield from encoded)
    data = b"".join(bytes(chunk) for chunk in chunks)[_LENGTH_BYTES:]  # type: ignore[arg-type]
    return ctx.respond.message(error_code=ErrorCode.none, response_data=data)


def _principal(data: bytes | None) -> Principal | None:
    """Deserialize the client's principal; None if that fails."""
    if data is None or not data.startswith(PRINCIPAL_VERSION):
        return None
    try:
        principal: Any = _read_principal(data, len(PRINCIPAL_VERSION))[0]
    except Exception:  # noqa: BLE001 - the reader may raise any error
        return None
    return Principal(principal.type_, principal.name)


def _answered(ctx: Context) -> Work[Entity | None]:
    """Return the response to the forwarded request, or the API's error response if it fails."""
    handler = ctx.registry.handler(ctx.api_key)
    try:
        return (yield from _result(handler.run(ctx)))
    except NotControllerError:
        raise  # the broker retries with the new controller
    except DomainError as error:
        code, message = error_code(without_traceback(error)), str(error)
    except asyncio.CancelledError:
        raise
    except Exception:  # noqa: BLE001 - a handler's failure affects only its request
        _log.exception("request in an envelope failed", api_key=ctx.api_key)
        code, message = ErrorCode.unknown_server_error, None
    return (yield from _result(handler.refused(ctx, code, message)))


def _result(result: Any) -> Work[Entity | None]:
    """Return the final response of a handler that is a generator or awaitable."""
    while True:
        if isinstance(result, GeneratorType):
            result = yield from result
        elif hasattr(type(result), "__await__"):
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            spawn(_settled(result, done), "a request in an envelope")
            yield done
            try:
                result = done.result()
            finally:
                del done  # a stored exception would keep this frame alive
        else:
            answer: Entity | None = result
            return answer


async def _settled(coming: Awaitable[Any], done: asyncio.Future[Any]) -> None:
    try:
        result = await coming
    except Exception as error:  # noqa: BLE001 - the waiting caller gets it
        if not done.done():
            done.set_exception(without_traceback(error))
    else:
        if not done.done():
            done.set_result(result)


def _refused(ctx: Context, code: ErrorCode) -> Entity:
    return ctx.respond.message(error_code=code, response_data=None)
