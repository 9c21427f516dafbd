"""Forwarding of requests to an active controller in another process (KIP-590).

The broker sends a client's request unchanged in an Envelope, with the client's principal and
address, and passes the controller's response on. If no response arrives, the client gets the API's
error response. Changes of this broker's settings are validated by this broker first, because
controllers do not know which values a broker accepts. Changes of this broker's logger levels are
made without forwarding.

Source: ``ForwardingManagerImpl``, ``RequestHandlerHelper.sendForwardedResponse``,
``ConfigAdminManager.preprocess``.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from io import BytesIO
from ipaddress import ip_address
from types import GeneratorType
from typing import Any, Final

import structlog
from kio.schema.default_principal_data.v0.data import DefaultPrincipalData
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.handlers import CloseConnection, Context, Handler, Run
from fencepost.coordinator.handlers.resources import ConfigResourceType
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import Principal
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import request_factory

_PRINCIPAL_VERSION: Final = struct.pack(">h", 0)
LENGTH_BYTES: Final = 4

_log = structlog.get_logger(__name__)
_write_principal = entity_writer(DefaultPrincipalData)

_CONFIGS: Final = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS})
_HERE: Final = frozenset({ConfigResourceType.BROKER, ConfigResourceType.BROKER_LOGGER})
"""The resources whose configs only the receiving broker can check."""


def forwarding(handler: Handler) -> Run:
    """Return the function that forwards requests in place of a handler."""

    def run(ctx: Context) -> Work[Any]:
        if ctx.api_key in _CONFIGS:
            return _configs(ctx, handler)
        return _forwarded(ctx, handler, ctx.frame)

    return run


def _configs(ctx: Context, handler: Handler) -> Work[Any]:
    """Validate broker configs and set logger levels on this broker; forward all other changes.

    Valid changes of broker configs are forwarded, too.

    Source: ``ConfigAdminManager.preprocess``.
    """
    known_settings: dict[tuple[int, str], Entity] = {}
    for kind in _HERE:
        rows = tuple(
            resource
            for resource in ctx.body.resources
            if resource.resource_type == kind
            and (resource.resource_name or kind == ConfigResourceType.BROKER)
        )
        if rows:
            validate_only = kind == ConfigResourceType.BROKER or ctx.body.validate_only
            body = replace(ctx.body, resources=rows, validate_only=validate_only)
            answer: Any = yield from handler.run(replace(ctx, body=body))  # type: ignore[misc]
            for response in answer.responses:
                if kind == ConfigResourceType.BROKER_LOGGER or response.error_code:
                    known_settings[response.resource_type, response.resource_name] = response
    if not known_settings:
        return (yield from _forwarded(ctx, handler, ctx.frame))
    left = tuple(
        resource
        for resource in ctx.body.resources
        if (resource.resource_type, resource.resource_name) not in known_settings
    )
    if not left:
        return ctx.respond.message(responses=tuple(known_settings.values()))
    rest = replace(ctx, body=replace(ctx.body, resources=left))
    chunks = encode_request(ctx.api_key, ctx.version, ctx.correlation_id, ctx.client_id, rest.body)
    answer = yield from _forwarded(rest, handler, b"".join(chunks)[LENGTH_BYTES:])
    return replace(answer, responses=(*known_settings.values(), *answer.responses))


def _forwarded(ctx: Context, handler: Handler, frame: bytes) -> Work[Any]:
    """Return the controller's response to the request in ``frame``, or the API's error response."""
    controller = ctx.broker.controller
    if controller is None:
        raise RuntimeError("there is no controller to forward to")
    sent = controller.send(envelope(ctx, frame))
    if not sent.done():
        yield sent
    try:
        answer = sent.result()
    except UnsupportedVersion as error:
        without_traceback(error)
        # Clients must send the request to the controller, which they find in the metadata.
        code, message = ErrorCode.not_controller, None
    except RequestTimedOutError as error:
        code, message = error_code(without_traceback(error)), str(error)
    except WireError as error:
        code, message = ErrorCode.unknown_server_error, str(without_traceback(error))
    else:
        if answer.error_code == ErrorCode.none:
            return decode_response(ctx.api_key, ctx.version, answer.response_data or b"")[1]
        if answer.error_code == ErrorCode.unsupported_version:
            # The client must reconnect to learn the currently supported versions.
            raise CloseConnection("the controller does not support this version")
        _log.warning("envelope refused", error=ErrorCode(answer.error_code).name.upper())
        code, message = ErrorCode.unknown_server_error, None
    refused = handler.refused(ctx, code, message)
    return (yield from refused) if isinstance(refused, GeneratorType) else refused


def envelope(ctx: Context, frame: bytes) -> Entity:
    """Build an Envelope that contains a client's request."""
    session = ctx.connection.session
    return request_factory(ApiKey.ENVELOPE, 0).message(
        request_data=frame,
        request_principal=principal_data(session.principal),
        client_host_address=ip_address(ctx.peer_host.partition("%")[0]).packed,
    )


def principal_data(principal: Principal) -> bytes:
    """Serialize a principal as ``DefaultKafkaPrincipalBuilder`` does, with its version prefix."""
    buffer = BytesIO()
    _write_principal(
        buffer,
        DefaultPrincipalData(type_=principal.kind, name=principal.name, token_authenticated=False),
    )
    return _PRINCIPAL_VERSION + buffer.getvalue()
