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


@handles(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, versions=(0, 0), permission="ALTER Cluster")
def run(ctx: Context) -> Steps[Entity]:
    """Refuse each user once, for the first reason."""
    make = ctx.respond
    refused: dict[str, tuple[ErrorCode, str]] = {}
    for one in ctx.body.deletions:
        refused.setdefault(one.name, _against(one.name, one.mechanism, is_deletion=True))
        yield
    for one in ctx.body.upsertions:
        refused.setdefault(one.name, _against(one.name, one.mechanism, is_deletion=False))
        yield
    results = []
    for name, (code, message) in refused.items():
        results.append(
            make.AlterUserScramCredentialsResult(user=name, error_code=code, error_message=message)
        )
        yield
    return make.AlterUserScramCredentialsResponse(results=tuple(results))


def _against(name: str, mechanism: int, *, is_deletion: bool) -> tuple[ErrorCode, str]:
    if not name:
        return ErrorCode.unacceptable_credential, "Username must not be empty"
    if mechanism not in SCRAM_MECHANISMS:
        return ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism"
    if is_deletion:
        return (
            ErrorCode.resource_not_found,
            "Attempt to delete a user credential that does not exist",
        )
    return ErrorCode.unsupported_sasl_mechanism, "this broker authenticates nobody"
