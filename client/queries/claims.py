"""Claims of producer ids, from the broker's own history.

The protocol identifies a producer by its id only: the transactional id is known as long as a
coordinator has it, client and host never. Fencepost records every claim, so that it can name the
owner of a transaction that no coordinator knows. Apache Kafka keeps no such history.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fencepost.client.queries.entries import entries_of
from fencepost.client.queries.session import ClusterSession
from fencepost.coordinator.history.entries import TRANSACTION
from fencepost.logcore.values import dataclass
from fencepost.txn.events import EventKind

CLAIMS = frozenset(
    {EventKind.EPOCH_BUMPED, EventKind.PRODUCER_ID_ROTATED, EventKind.TRANSACTION_KEPT}
)
"""Events that give a producer id and epoch to a client."""


@dataclass(frozen=True, slots=True)
class ProducerEpochClaim:
    """A client's claim of an epoch of a producer id, and its time."""

    transactional_id: str
    epoch: int
    at_ms: int
    client_id: str | None
    client_host: str | None

    @property
    def client(self) -> str | None:
        """CLIENT_ID@HOST, as members of groups are named; None if neither is known."""
        if self.client_id is None and self.client_host is None:
            return None
        return f"{self.client_id or ''}@{self.client_host or ''}"


def claims_of(
    session: ClusterSession, producer_ids: Iterable[int]
) -> Mapping[int, Sequence[ProducerEpochClaim]]:
    """Return the claims of each of ``producer_ids`` that the history still has, oldest first."""
    wanted = frozenset(producer_ids)
    found: dict[int, list[ProducerEpochClaim]] = defaultdict(list)
    for entry in entries_of(session) if wanted else ():
        if entry.scope != TRANSACTION or entry.what not in CLAIMS:
            continue
        producer_id, epoch = entry.detail.get("producer_id"), entry.detail.get("producer_epoch")
        if producer_id in wanted and isinstance(epoch, int):
            found[producer_id].append(
                ProducerEpochClaim(
                    entry.subject, epoch, entry.at_ms, entry.client_id, entry.client_host
                )
            )
    return found


def holder(claims: Sequence[ProducerEpochClaim], epoch: int) -> ProducerEpochClaim | None:
    """Return the claim in force at ``epoch``, which the end of a transaction may have bumped."""
    return next((claim for claim in reversed(claims) if claim.epoch <= epoch), None)
