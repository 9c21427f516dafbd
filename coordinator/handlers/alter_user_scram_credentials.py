"""AlterUserScramCredentials (51): give users passwords, or take them away.

Nobody can authenticate with one here, so none is kept: UNSUPPORTED_SASL_MECHANISM.

Source: ``ScramControlManager.alterCredentials``; KIP-554.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps

SCRAM_MECHANISMS: Final = frozenset({1, 2})
"""SCRAM-SHA-256 and SCRAM-SHA-512, by their numbers in ``ScramMechanism``."""

MIN_ITERATIONS, MAX_ITERATIONS = 4_096, 16_384
"""How often the password of a user has been hashed, at least and at most."""

_KEPT_NONE = ErrorCode.unsupported_sasl_mechanism, "this broker authenticates nobody"
_TWICE = (
    ErrorCode.duplicate_resource,
    "A user credential cannot be altered twice in the same request",
)


@handles(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, versions=(0, 0), permission="ALTER Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each user once: for the first thing that is wrong, or because none is kept."""
    make = ctx.respond
    refused: dict[str, tuple[ErrorCode, str]] = {}
    for one in ctx.body.deletions:
        refused.setdefault(one.name, _against_deletion(one.name, one.mechanism))
        yield
    for one in ctx.body.upsertions:
        if one.name not in refused:
            refused[one.name] = _against_upsertion(one.name, one.mechanism, one.iterations)
        elif refused[one.name] is _KEPT_NONE:
            refused[one.name] = _TWICE
        yield
    results = []
    for name, (code, message) in refused.items():
        results.append(
            make.AlterUserScramCredentialsResult(user=name, error_code=code, error_message=message)
        )
        yield
    return make.AlterUserScramCredentialsResponse(results=tuple(results))


def _against_deletion(name: str, mechanism: int) -> tuple[ErrorCode, str]:
    return _against(name, mechanism) or (
        ErrorCode.resource_not_found,
        "Attempt to delete a user credential that does not exist",
    )


def _against_upsertion(name: str, mechanism: int, iterations: int) -> tuple[ErrorCode, str]:
    if wrong := _against(name, mechanism):
        return wrong
    if iterations < MIN_ITERATIONS:
        return ErrorCode.unacceptable_credential, "Too few iterations"
    if iterations > MAX_ITERATIONS:
        return ErrorCode.unacceptable_credential, "Too many iterations"
    return _KEPT_NONE


def _against(name: str, mechanism: int) -> tuple[ErrorCode, str] | None:
    if not name:
        return ErrorCode.unacceptable_credential, "Username must not be empty"
    if mechanism not in SCRAM_MECHANISMS:
        return ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism"
    return None
