"""SCRAM credentials: which changes are valid, and their records.

A change contains a salted password, the result of the iterated hash. Its record contains the stored
key and the server key, which are derived from the salted password and do not permit a login.

Source: ``ScramControlManager``; KIP-554.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from fencepost.cluster.controller.acls import ReasonAgainst
from fencepost.cluster.controller.errors import (
    DuplicateResourceError,
    PolicyViolationError,
    ResourceNotFoundError,
    UnacceptableCredentialError,
    UnsupportedSaslMechanismError,
)
from fencepost.cluster.controller.outcome import ControllerResult
from fencepost.cluster.controller.view import ControllerView
from fencepost.cluster.records import (
    MetadataRecord,
    RemoveUserScramCredentialRecord,
    UserScramCredentialRecord,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.steps import Steps
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass

MAX_ITERATIONS: Final = 16_384
"""The maximum number of iterations of a password hash: a client computes all of them at each
login."""

MAX_CREDENTIALS: Final = 20_000
"""The maximum number of credentials in the cluster; each takes about a kilobyte of memory."""

MAX_SALT_BYTES: Final = 1_024
"""The maximum size of a salt, which is sent to every client that begins a login as the user."""

MAX_SALTED_PASSWORD_BYTES: Final = 1_024
"""The maximum size of a salted password, which is hashed in one turn of the event loop. The
mechanisms produce 32 or 64 bytes."""


@dataclass(frozen=True, slots=True)
class ScramCredentialDeletion:
    """Delete a user's credential of a mechanism."""

    name: str
    mechanism: int
    """The number of ``ScramMechanism``."""


@dataclass(frozen=True, slots=True, repr=False)
class ScramCredentialUpsertion:
    """Create a user's credential of a mechanism, or replace it."""

    name: str
    mechanism: int
    iterations: int
    salt: bytes
    salted_password: bytes


ScramCredentialAlteration = ScramCredentialDeletion | ScramCredentialUpsertion

LeastIterations = Mapping[int, int]
"""The minimum number of iterations for each known mechanism, by the mechanism's number."""

DeriveKeys = Callable[[int, bytes], tuple[bytes, bytes]]
"""Returns the stored key and the server key of a mechanism's salted password."""


def check_credentials(
    view: ControllerView,
    alterations: Iterable[ScramCredentialAlteration],
    least_iterations: LeastIterations,
    reason_against: ReasonAgainst,
) -> Steps[tuple[dict[str, DomainError], list[ScramCredentialAlteration]]]:
    """Return the first error of each user, and the changes of all other users."""
    errors: dict[str, DomainError] = {}
    accepted: dict[str, ScramCredentialAlteration] = {}
    for alteration in alterations:
        if accepted.pop(alteration.name, None) is not None:
            errors[alteration.name] = DuplicateResourceError(
                "A user credential cannot be altered twice in the same request"
            )
        elif alteration.name not in errors:
            try:
                _check(view, alteration, least_iterations, reason_against)
            except DomainError as error:
                errors[alteration.name] = without_traceback(error)
            else:
                accepted[alteration.name] = alteration
        yield
    new = 0
    for alteration in accepted.values():
        new += isinstance(alteration, ScramCredentialUpsertion) and not _exists(view, alteration)
        yield
    if new > MAX_CREDENTIALS - len(view.image.scram):
        refused = [
            alteration.name
            for alteration in accepted.values()
            if isinstance(alteration, ScramCredentialUpsertion)
        ]
        for name in refused:
            errors[name] = _too_many()
            del accepted[name]
            yield
    return errors, [*accepted.values()]


def alter_credentials(
    view: ControllerView, alterations: Iterable[ScramCredentialAlteration], derive_keys: DeriveKeys
) -> ControllerResult[list[DomainError | None]]:
    """Make the checked changes; the answer has an error for each change that is now impossible."""
    errors: list[DomainError | None] = []
    records: list[MetadataRecord] = []
    room = MAX_CREDENTIALS - len(view.image.scram)
    for alteration in alterations:
        error: DomainError | None = None
        exists = _exists(view, alteration)
        if isinstance(alteration, ScramCredentialDeletion):
            if exists:
                room += 1
                records.append(
                    RemoveUserScramCredentialRecord(alteration.name, alteration.mechanism)
                )
            else:
                error = _not_found()
        elif exists or room > 0:
            room -= not exists
            records.append(_record(alteration, derive_keys))
        else:
            error = _too_many()
        errors.append(error)
    return ControllerResult(errors, tuple(records))


def add_credentials(
    view: ControllerView, added: Iterable[ScramCredentialUpsertion], derive_keys: DeriveKeys
) -> ControllerResult[list[str]]:
    """Create the credentials that do not exist; the answer lists their users.

    An existing credential stays: its password may have been changed since.
    """
    new = {
        (upsertion.name, upsertion.mechanism): upsertion
        for upsertion in added
        if not _exists(view, upsertion)
    }
    records = tuple(_record(upsertion, derive_keys) for upsertion in new.values())
    return ControllerResult([upsertion.name for upsertion in new.values()], records)


def _check(
    view: ControllerView,
    alteration: ScramCredentialAlteration,
    least_iterations: LeastIterations,
    reason_against: ReasonAgainst,
) -> None:
    if not alteration.name:
        raise UnacceptableCredentialError("Username must not be empty")
    least = least_iterations.get(alteration.mechanism)
    if least is None:
        raise UnsupportedSaslMechanismError("Unknown SCRAM mechanism")
    if isinstance(alteration, ScramCredentialDeletion):
        if not _exists(view, alteration):
            raise _not_found()
        return
    if alteration.iterations < least:
        raise UnacceptableCredentialError("Too few iterations")
    if alteration.iterations > MAX_ITERATIONS:
        raise UnacceptableCredentialError("Too many iterations")
    if len(alteration.salt) > MAX_SALT_BYTES:
        raise UnacceptableCredentialError("Too long a salt")
    if len(alteration.salted_password) > MAX_SALTED_PASSWORD_BYTES:
        raise UnacceptableCredentialError("Too long a salted password")
    record = UserScramCredentialRecord(alteration.name, alteration.mechanism, b"", b"", b"", 0)
    if reason := reason_against(record):
        raise UnacceptableCredentialError(reason)


def _exists(view: ControllerView, alteration: ScramCredentialAlteration) -> bool:
    return (alteration.name, alteration.mechanism) in view.image.scram


def _record(
    alteration: ScramCredentialUpsertion, derive_keys: DeriveKeys
) -> UserScramCredentialRecord:
    stored_key, server_key = derive_keys(alteration.mechanism, alteration.salted_password)
    return UserScramCredentialRecord(
        alteration.name,
        alteration.mechanism,
        alteration.salt,
        stored_key,
        server_key,
        alteration.iterations,
    )


def _not_found() -> DomainError:
    return ResourceNotFoundError("Attempt to delete a user credential that does not exist")


def _too_many() -> DomainError:
    return PolicyViolationError(
        f"the limit of {MAX_CREDENTIALS} credentials (MAX_CREDENTIALS) is reached"
    )
