"""The rules for producer ids and epochs, as functions without state.

An *identity* is a producer id with an epoch. Clients use epochs 0 to :data:`LAST_CLIENT_EPOCH`;
:data:`FENCE_EPOCH` is reserved, so that the coordinator can always fence once more.

Sources: ``TransactionMetadata`` and ``TransactionCoordinator``; KIP-360 (continue after an error),
KIP-890 part 2 (an epoch for each transaction, called TV2 here).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from fencepost.logcore.machine import InvariantViolation

NO_EPOCH = -1
"""The epoch of an id that was never initialised, and of a request without an identity."""

LAST_CLIENT_EPOCH = 32_766
"""The highest epoch of a client, after which the client gets a new producer id."""

FENCE_EPOCH = 32_767
"""The highest int16. Only the coordinator uses it, in its records and in markers."""


class ProducerIdentity(NamedTuple):
    """A producer id and its epoch."""

    producer_id: int
    epoch: int


class EpochRelation(Enum):
    """How the identity in an EndTxn request relates to the stored identity."""

    CURRENT = auto()
    """The stored identity."""
    RETRY = auto()
    """The identity from before the bump at the transaction's end (TV2 only)."""
    FENCED = auto()
    """The same producer id with any other epoch."""
    OTHER_ID = auto()
    """Another producer id."""


class EpochClaim(Enum):
    """The result of an InitProducerId request while no transaction is open."""

    BUMP = auto()
    """The next epoch of the producer id."""
    ROTATE = auto()
    """A new producer id at epoch 0, because the epochs are exhausted."""
    REPEAT = auto()
    """The stored identity again: the answer to an earlier, equal request was lost."""
    FENCED = auto()
    """No identity: another producer owns the transactional id now."""


def is_exhausted(epoch: int) -> bool:
    """Whether a client at ``epoch`` needs a new producer id to continue."""
    return epoch >= LAST_CLIENT_EPOCH


def bump(epoch: int) -> int:
    """Return the next epoch. Raises InvariantViolation if it exceeds int16."""
    if not NO_EPOCH <= epoch < FENCE_EPOCH:
        raise InvariantViolation(f"epoch {epoch} cannot be bumped")
    return epoch + 1


def bump_to_fence(epoch: int) -> int:
    """Return the next epoch; return :data:`FENCE_EPOCH` unchanged.

    No client ever gets that epoch, so a transaction that has it needs no further fence. An error
    because of an overflow would prevent the abort of the transaction for ever (KAFKA-19367).
    """
    return min(bump(epoch) if epoch < FENCE_EPOCH else epoch, FENCE_EPOCH)


def is_retry_across_rotation(
    request: ProducerIdentity, stored: ProducerIdentity, previous_id: int
) -> bool:
    """Whether ``request`` has the last epoch of the producer id that ``stored`` replaced."""
    return (
        request.producer_id == previous_id
        and request.epoch == LAST_CLIENT_EPOCH
        and stored.epoch == 0
        and previous_id != stored.producer_id
    )


def relate_tv1(request: ProducerIdentity, stored: ProducerIdentity) -> EpochRelation:
    """Compare identities under TV1, where a retry and the next transaction have the same epoch."""
    if request.producer_id != stored.producer_id:
        return EpochRelation.OTHER_ID
    return EpochRelation.CURRENT if request.epoch == stored.epoch else EpochRelation.FENCED


def relate_tv2(
    request: ProducerIdentity, stored: ProducerIdentity, previous_id: int
) -> EpochRelation:
    """Compare identities under TV2, where the end of a transaction bumps the epoch."""
    if is_retry_across_rotation(request, stored, previous_id):
        return EpochRelation.RETRY
    if request.producer_id != stored.producer_id:
        return EpochRelation.OTHER_ID
    if request.epoch == stored.epoch:
        return EpochRelation.CURRENT
    return EpochRelation.RETRY if request.epoch + 1 == stored.epoch else EpochRelation.FENCED


def may_continue(request: ProducerIdentity, stored: ProducerIdentity, previous_id: int) -> bool:
    """Whether an InitProducerId with a producer id (KIP-360) may come from the current producer.

    The request's producer id must be the stored one or, if the answer with a rotated id was lost,
    the previous one. A new transactional id accepts any producer id.
    """
    return (
        stored.epoch == NO_EPOCH
        or request.producer_id == stored.producer_id
        or (request.producer_id == previous_id and is_exhausted(request.epoch))
    )


def claim(
    claimed: ProducerIdentity | None, stored: ProducerIdentity, last: ProducerIdentity | None
) -> EpochClaim:
    """Choose the identity that an InitProducerId gets while no transaction is open.

    ``claimed`` is the identity in the request (KIP-360), which ``may_continue`` has accepted, or
    None. ``last`` is the identity that ``stored`` replaced, if known.
    """
    if claimed is None or stored.epoch == NO_EPOCH or claimed == stored:
        return EpochClaim.ROTATE if is_exhausted(stored.epoch) else EpochClaim.BUMP
    # A retry must not bump the epoch again: its sender would be fenced.
    return EpochClaim.REPEAT if claimed == last else EpochClaim.FENCED
