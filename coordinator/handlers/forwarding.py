"""Requests that the active controller answers, where that is not in this process (KIP-590).

The client's request goes there in an Envelope as it came, with who sent it and from where; the
answer comes back as it is. Settings of this very broker are looked at here first: its loggers are
nobody else's, and whether it could live with a setting it alone knows.

Source: ``ForwardingManagerImpl``, ``RequestHandlerHelper.sendForwardedResponse``,
``ConfigAdminManager.preprocess``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from ipaddress import ip_address
from typing import Any, Final

import structlog
from kio.schema.default_principal_data.v0.data import DefaultPrincipalData
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.handlers import CloseConnection, Context, Run
from fencepost.coordinator.handlers.resources import ResourceType
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import Principal
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.codec import decode_response, encode_request
from fencepost.coordinator.wire.errors import UnsupportedVersion, WireError
from fencepost.coordinator.wire.messages import request_factory

_PRINCIPAL_VERSION: Final = struct.pack(">h", 0)
LENGTH_BYTES: Final = 4

_log = structlog.get_logger(__name__)
_write_principal = entity_writer(DefaultPrincipalData)

_CONFIGS: Final = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS})
_HERE: Final = frozenset({ResourceType.BROKER, ResourceType.BROKER_LOGGER})
"""Resources that only the broker that is asked knows all about."""


def forwarding(own: Run) -> Run:
    """The handler of an API whose answer comes from the active controller.

    ``own`` is how this process would answer as the controller.
    """

    def run(ctx: Context) -> Coroutine[Any, Any, Entity] | Work[Any]:
        if ctx.api_key in _CONFIGS:
            return _settings(ctx, own)
        return _forwarded(ctx, ctx.frame)

    return run


def _settings(ctx: Context, own: Run) -> Work[Any]:
    """Settings: those of this broker are tried out or set here, the others go on."""
    known: dict[tuple[int, str], Entity] = {}
    for kind in _HERE:
        rows = tuple(
            one
            for one in ctx.body.resources
            if one.resource_type == kind and (one.resource_name or kind == ResourceType.BROKER)
        )
        if rows:
            validate_only = kind == ResourceType.BROKER or ctx.body.validate_only
            body = replace(ctx.body, resources=rows, validate_only=validate_only)
            answer: Any = yield from own(replace(ctx, body=body))  # type: ignore[misc]
            for one in answer.responses:
                if kind == ResourceType.BROKER_LOGGER or _is_refused_here(one):
                    known[one.resource_type, one.resource_name] = one
    if not known:
        return _forwarded(ctx, ctx.frame)
    left = tuple(
        one for one in ctx.body.resources if (one.resource_type, one.resource_name) not in known
    )
    answers = tuple(known.values())
    if not left:
        return ctx.respond.message(responses=answers)
    return _rest(ctx, replace(ctx.body, resources=left), answers)


def _is_refused_here(answer: Entity) -> bool:
    """Whether a broker's settings do not go on to the controller.

    Of those of all brokers this one judges the values that it knows: what it can not change while
    it runs, another may be able to.
    """
    if answer.resource_name:
        return bool(answer.error_code)
    return bool(answer.error_code == ErrorCode.invalid_config)


async def _rest(ctx: Context, body: Entity, known: Sequence[Entity]) -> Entity:
    """Have the controller do what is left, and tell all of it."""
    chunks = encode_request(ctx.api_key, ctx.version, ctx.correlation_id, ctx.client_id, body)
    answer = await _forwarded(ctx, b"".join(chunks)[LENGTH_BYTES:])
    return replace(answer, responses=(*known, *answer.responses))


async def _forwarded(ctx: Context, frame: bytes) -> Entity:
    """The controller's answer to the request in ``frame``."""
    controller = ctx.broker.controller
    if controller is None:
        raise RuntimeError("there is no controller to forward to")
    try:
        answer = await controller.send(envelope(ctx, frame))
    except UnsupportedVersion:
        # Clients have to ask it themselves, and find it by the metadata.
        return refused(ctx, ErrorCode.not_controller, None)
    except (RequestTimedOutError, WireError) as error:
        code = (
            error_code(error)
            if isinstance(error, RequestTimedOutError)
            else ErrorCode.unknown_server_error
        )
        return refused(ctx, code, str(error))
    if answer.error_code == ErrorCode.unsupported_version:
        # The client has to hear which versions there are now.
        raise CloseConnection("the controller does not know this version")
    if answer.error_code:
        _log.warning("envelope refused", error=ErrorCode(answer.error_code).name.upper())
        return refused(ctx, ErrorCode.unknown_server_error, None)
    return decode_response(ctx.api_key, ctx.version, answer.response_data or b"")[1]


def envelope(ctx: Context, frame: bytes) -> Entity:
    """An Envelope with a client's request."""
    session = ctx.connection.session
    return request_factory(ApiKey.ENVELOPE, 0).message(
        request_data=frame,
        request_principal=principal_data(session.principal),
        client_host_address=ip_address(ctx.peer_host.partition("%")[0]).packed,
    )


def principal_data(principal: Principal) -> bytes:
    """A principal as ``DefaultKafkaPrincipalBuilder`` writes it: with its version before it."""
    buffer = BytesIO()
    _write_principal(
        buffer,
        DefaultPrincipalData(type_=principal.kind, name=principal.name, token_authenticated=False),
    )
    return _PRINCIPAL_VERSION + buffer.getvalue()


# --- what a client is told where there is no answer ---


def refused(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    """The answer in which everything that was asked for has failed in the same way."""
    whole = ctx.respond.error(code, message)
    return _EACH[ctx.api_key](ctx, code, message) if whole is None else whole


def _named(rows: str, structure: str) -> Callable[[Context, ErrorCode, str | None], Entity]:
    """For topics that are asked for by name."""

    def refuse(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
        build = getattr(ctx.respond, structure)
        asked = [one.name for one in ctx.body.topics]
        told = [build(name=name, error_code=code, error_message=message) for name in asked]
        return ctx.respond.message(**{rows: told})

    return refuse


def _deleted(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    asked = [(one.name, one.topic_id) for one in getattr(ctx.body, "topics", ())]
    asked += [(name, None) for name in getattr(ctx.body, "topic_names", ())]
    build = ctx.respond.DeletableTopicResult
    return ctx.respond.message(
        responses=[
            build(name=name, topic_id=topic_id, error_code=code, error_message=message)
            for name, topic_id in asked
        ]
    )


def _counted(
    asked: str, rows: str, structure: str
) -> Callable[[Context, ErrorCode, str | None], Entity]:
    """For what is answered in the order in which it was asked for."""

    def refuse(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
        one = getattr(ctx.respond, structure)(error_code=code, error_message=message)
        return ctx.respond.message(**{rows: [one] * len(getattr(ctx.body, asked))})

    return refuse


def _resources(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    build = ctx.respond.AlterConfigsResourceResponse
    return ctx.respond.message(
        responses=[
            build(
                error_code=code,
                error_message=message,
                resource_type=one.resource_type,
                resource_name=one.resource_name,
            )
            for one in ctx.body.resources
        ]
    )


def _quotas(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    make = ctx.respond
    return make.message(
        entries=[
            make.EntryData(
                error_code=code,
                error_message=message,
                entity=[
                    make.EntityData(entity_type=part.entity_type, entity_name=part.entity_name)
                    for part in one.entity
                ],
            )
            for one in ctx.body.entries
        ]
    )


def _credentials(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    build = ctx.respond.AlterUserScramCredentialsResult
    users = dict.fromkeys(one.name for one in (*ctx.body.deletions, *ctx.body.upsertions))
    return ctx.respond.message(
        results=[build(user=user, error_code=code, error_message=message) for user in users]
    )


def _elections(ctx: Context, code: ErrorCode, message: str | None) -> Entity:
    make = ctx.respond
    return make.message(
        replica_election_results=[
            make.ReplicaElectionResult(
                topic=one.topic,
                partition_result=[
                    make.PartitionResult(partition_id=index, error_code=code, error_message=message)
                    for index in one.partitions
                ],
            )
            for one in ctx.body.topic_partitions or ()
        ]
    )


_EACH: Final[Mapping[int, Callable[[Context, ErrorCode, str | None], Entity]]] = {
    ApiKey.CREATE_TOPICS: _named("topics", "CreatableTopicResult"),
    ApiKey.CREATE_PARTITIONS: _named("results", "CreatePartitionsTopicResult"),
    ApiKey.DELETE_TOPICS: _deleted,
    ApiKey.CREATE_ACLS: _counted("creations", "results", "AclCreationResult"),
    ApiKey.DELETE_ACLS: _counted("filters", "filter_results", "DeleteAclsFilterResult"),
    ApiKey.ALTER_CONFIGS: _resources,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _resources,
    ApiKey.ALTER_CLIENT_QUOTAS: _quotas,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _credentials,
    ApiKey.ELECT_LEADERS: _elections,
}
"""Those that have no error of their own, in some version."""
