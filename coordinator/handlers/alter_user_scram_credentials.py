"""AlterUserScramCredentials (51): give users passwords, or take them away.

The password comes hashed by the client; what is kept of it can not log in. Open connections go on
until they log in again.

Source: ``ScramControlManager.alterCredentials``; KIP-554.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.answers import each_row, result_of
from fencepost.coordinator.handlers.deciding import batched
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.users import (
    MAX_CREDENTIALS,
    MAX_ITERATIONS,
    MAX_SALT_BYTES,
    MECHANISM_BY_NUMBER,
    Credential,
    Key,
    Users,
)
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.scram import MIN_ITERATIONS
from fencepost.coordinator.wire.steps import Steps

WRITTEN_TOGETHER: Final = 200
"""Users that are written before others get their turn."""

Refusal = tuple[ErrorCode, str]

_TWICE = (
    ErrorCode.duplicate_resource,
    "A user credential cannot be altered twice in the same request",
)
_NO_ROOM = (
    ErrorCode.policy_violation,
    f"there may be {MAX_CREDENTIALS} credentials (MAX_CREDENTIALS)",
)
_NOT_THERE = (
    ErrorCode.resource_not_found,
    "Attempt to delete a user credential that does not exist",
)


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
    names = dict.fromkeys(one.name for one in (*body.deletions, *body.upsertions))
    results = yield from each_row(names, row)
    return ctx.respond.AlterUserScramCredentialsResponse(results=results)


@handles(
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    versions=(0, 0),
    permission="ALTER Cluster",
    refused=refused,
)
def run(ctx: Context) -> Work[Entity]:
    """Change what can be changed; each user has one result, for the first thing that is wrong."""
    ctx.require_on_cluster(Operation.ALTER)
    users = ctx.broker.users
    failed: dict[str, Refusal] = {}
    changes: dict[str, Any] = {}
    for one in (*ctx.body.deletions, *ctx.body.upsertions):
        if one.name in changes:
            failed[one.name] = _TWICE
            del changes[one.name]
        elif one.name not in failed:
            if wrong := _against(one, users):
                failed[one.name] = wrong
            else:
                changes[one.name] = one
        yield None
    yield from _change(users, changes, failed)
    return (yield from _response(ctx, lambda name: failed.get(name) or (ErrorCode.none, None)))


def _change(users: Users, changes: dict[str, Any], failed: dict[str, Refusal]) -> Work[None]:
    """Write them, many at a time; what does not fit is refused."""
    put = {name: one for name, one in changes.items() if hasattr(one, "iterations")}
    new = 0
    for name, one in put.items():
        new += users.credential(name, MECHANISM_BY_NUMBER[int(one.mechanism)]) is None
        yield None
    if new > users.room:
        for name in put:
            failed[name] = _NO_ROOM
            del changes[name]
            yield None
    for some in batched([*changes.items()], WRITTEN_TOGETHER):
        wanted: dict[Key, Credential | None] = {}
        for name, one in some:
            mechanism = MECHANISM_BY_NUMBER[int(one.mechanism)]
            wanted[name, mechanism.number] = (
                Credential.of(mechanism, one.salt, one.iterations, one.salted_password)
                if name in put
                else None
            )
            yield None
        holds = users.change(wanted)
        error = None if holds is None else (yield from result_of(holds))
        if error is not None:
            failed |= {name: (error_code(error), str(error)) for name, _ in some}


def _against(one: Any, users: Users) -> Refusal | None:
    """What is wrong with a deletion or an upsertion."""
    if not one.name:
        return ErrorCode.unacceptable_credential, "Username must not be empty"
    mechanism = MECHANISM_BY_NUMBER.get(int(one.mechanism))
    if mechanism is None:
        return ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism"
    iterations = getattr(one, "iterations", None)
    if iterations is None:
        return _NOT_THERE if users.credential(one.name, mechanism) is None else None
    if iterations < MIN_ITERATIONS:
        return ErrorCode.unacceptable_credential, "Too few iterations"
    if iterations > MAX_ITERATIONS:
        return ErrorCode.unacceptable_credential, "Too many iterations"
    if len(one.salt) > MAX_SALT_BYTES:
        return ErrorCode.unacceptable_credential, "Too long a salt"
    if reason := users.reason_against(one.name):
        return ErrorCode.unacceptable_credential, reason
    return None
