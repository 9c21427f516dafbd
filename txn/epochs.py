"""Who is this producer? Every rule about producer ids and epochs, as functions without state.

An *identity* is a producer id with an epoch. Clients use epochs 0 to :data:`LAST_CLIENT_EPOCH`;
:data:`FENCE_EPOCH` is the coordinator's own, so that it can always fence once more.

Sources: ``TransactionMetadata`` and ``TransactionCoordinator``; KIP-360 (continue after an error),
KIP-890 part 2 (an epoch for each transaction, called TV2 here).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from fencepost.logcore.machine import InvariantViolation

NO_EPOCH = -1
"""The epoch of an id that was never initialised, and "none given"."""

LAST_CLIENT_EPOCH = 32_766
"""The highest epoch a client may hold; whoever holds it gets a new producer id next."""

FENCE_EPOCH = 32_767
"""The highest int16: reached only inside the coordinator."""


class Identity(NamedTuple):
    """A producer id and its epoch."""

    producer_id: int
    epoch: int


class Relation(Enum):
    """How the identity of an EndTxn request stands to the stored one."""

    CURRENT = auto()
    """It is the stored one."""
    RETRY = auto()
    """It is the one before the bump of the transaction's end (TV2 only)."""
    FENCED = auto()
    """The same producer id with an epoch that is neither."""
    OTHER_ID = auto()
    """Another producer id."""


class Claim(Enum):
    """What an InitProducerId request may have when no transaction is open."""

    BUMP = auto()
    """The next epoch of the producer id."""
    ROTATE = auto()
    """A new producer id at epoch 0, since the epochs are used up."""
    REPEAT = auto()
    """The stored identity again: the answer of an earlier, equal request was lost."""
    FENCED = auto()
    """Nothing: somebody else has claimed the transactional id."""


def is_exhausted(epoch: int) -> bool:
    """Whether a client at ``epoch`` needs a new producer id to go on."""
    return epoch >= LAST_CLIENT_EPOCH


def bump(epoch: int) -> int:
    """Return the next epoch; beyond int16 there is none, and asking is our own bug."""
    if not NO_EPOCH <= epoch < FENCE_EPOCH:
        raise InvariantViolation(f"epoch {epoch} cannot be bumped")
    return epoch + 1


def bump_to_fence(epoch: int) -> int:
    """Return the next epoch, or the highest one again.

    At the highest epoch nobody is left to be fenced, since no client ever holds it; staying there
    keeps the abort possible, where an overflow would make it impossible for ever (KAFKA-19367).
    """
    return min(bump(epoch) if epoch < FENCE_EPOCH else epoch, FENCE_EPOCH)


def is_retry_over_overflow(request: Identity, stored: Identity, previous_id: int) -> bool:
    """Whether ``request`` was sent with the last epoch of the producer id before ``stored``."""
    return (
        request.producer_id == previous_id
        and request.epoch == LAST_CLIENT_EPOCH
        and stored.epoch == 0
        and previous_id != stored.producer_id
    )


def relate_tv1(request: Identity, stored: Identity) -> Relation:
    """Compare under TV1, where the epoch outlives transactions and no retry can be told apart."""
    if request.producer_id != stored.producer_id:
        return Relation.OTHER_ID
    return Relation.CURRENT if request.epoch == stored.epoch else Relation.FENCED


def relate_tv2(request: Identity, stored: Identity, previous_id: int) -> Relation:
    """Compare under TV2, where the end of a transaction bumps the epoch."""
    if is_retry_over_overflow(request, stored, previous_id):
        return Relation.RETRY
    if request.producer_id != stored.producer_id:
        return Relation.OTHER_ID
    if request.epoch == stored.epoch:
        return Relation.CURRENT
    return Relation.RETRY if request.epoch + 1 == stored.epoch else Relation.FENCED


def may_continue(request: Identity, stored: Identity, previous_id: int) -> bool:
    """Whether the producer id of a continuing InitProducerId (KIP-360) can be its owner's.

    Either it is the stored one, or nothing was stored yet, or it is the one before a rotation whose
    answer was lost.
    """
    return (
        stored.epoch == NO_EPOCH
        or request.producer_id == stored.producer_id
        or (request.producer_id == previous_id and is_exhausted(request.epoch))
    )


def claim(given: Identity | None, stored: Identity, last: Identity | None) -> Claim:
    """Decide what a claim gets while no transaction is open.

    ``given`` is the identity of a continuing producer, already found good by ``may_continue``.
    ``last`` is the identity to whose holder ``stored`` was the answer, where that is known.

    The order matters: an exhausted epoch rotates only for its holder or for a newcomer. A request
    that repeats one already answered must not bump again, or it would fence its own sender.
    """
    if given is None or stored.epoch == NO_EPOCH or given == stored:
        return Claim.ROTATE if is_exhausted(stored.epoch) else Claim.BUMP
    return Claim.REPEAT if given == last else Claim.FENCED
