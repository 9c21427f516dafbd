"""AlterUserScramCredentials (51): set or remove the SCRAM credentials of users.

The client sends the salted password. The controller stores keys derived from it, which do not
suffice to log in. Open connections remain authenticated until they reauthenticate.

Source: ``ScramControlManager.alterCredentials``; KIP-554.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.machine import Controller
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.scram import (
    ScramCredentialAlteration,
    ScramCredentialDeletion,
    ScramCredentialUpsertion,
)
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import code_and_message, each_row
from fencepost.coordinator.handlers.controller_decisions import decided_by_item
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.users import MECHANISM_BY_NUMBER, derive_keys
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.scram import MIN_ITERATIONS
from fencepost.protocol.steps import Steps

LEAST_ITERATIONS: Final = dict.fromkeys(MECHANISM_BY_NUMBER, MIN_ITERATIONS)


def refused(ctx: Context, code: int, message: str | None) -> Steps[Entity]:
    """Refuse each user for the same reason."""
    return _response(ctx, lambda _name: (code, message))


def _response(ctx: Context, outcome: Callable[[str], tuple[int, str | None]]) -> Steps[Entity]:
    def row(name: str) -> Entity:
        code, message = outcome(name)
        return ctx.respond.AlterUserScramCredentialsResult(
            user=name, error_code=code, error_message=message
        )

    body = ctx.body
    names = dict.fromkeys(alteration.name for alteration in (*body.deletions, *body.upsertions))
    results = yield from each_row(names, row)
    return ctx.respond.AlterUserScramCredentialsResponse(results=results)


@handles(
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    versions=(0, 0),
    permission="ALTER Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Apply the valid changes; respond with one result per user: the user's first error, if any."""
    ctx.require_on_cluster(Operation.ALTER)
    alterations: list[ScramCredentialAlteration] = []
    for deletion in ctx.body.deletions:
        alterations.append(ScramCredentialDeletion(deletion.name, int(deletion.mechanism)))
        yield None
    for upsertion in ctx.body.upsertions:
        alterations.append(_upsertion(upsertion))
        yield None
    failed, accepted = yield from ctx.controller.current_machine().check_credentials(
        alterations, LEAST_ITERATIONS, ctx.metadata.reason_against
    )
    errors = yield from decided_by_item(
        ctx, accepted, _alter, lambda alteration: len(alteration.name)
    )
    for alteration, error in zip(accepted, errors, strict=True):
        if error is not None:
            failed[alteration.name] = error
        yield None
    return (yield from _response(ctx, lambda name: code_and_message(failed.get(name))))


def _upsertion(upsertion: Any) -> ScramCredentialUpsertion:
    return ScramCredentialUpsertion(
        upsertion.name,
        int(upsertion.mechanism),
        upsertion.iterations,
        upsertion.salt,
        upsertion.salted_password,
    )


def _alter(
    batch: Sequence[ScramCredentialAlteration], controller: Controller
) -> ControllerResult[list[DomainError | None]]:
    return controller.alter_credentials(batch, derive_keys)
