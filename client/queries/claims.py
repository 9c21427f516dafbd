"""The clients that were given producer ids and epochs, from the broker's event history.

DescribeProducers identifies a producer by its id only. A coordinator can map a producer id to a
transactional id until that expires; no Kafka API returns the client's id and host. Fencepost
records transactional id, client id and host whenever it gives out a producer epoch, so that it can
name the owner of a transaction that no coordinator knows. Apache Kafka keeps no such history.
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
    """The client that was given an epoch of a producer id, and when."""

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
    """Return the claims of each producer id that the event history still has, oldest first."""
    ids = frozenset(producer_ids)
    claims: dict[int, list[ProducerEpochClaim]] = defaultdict(list)
    for entry in entries_of(session) if ids else ():
        if entry.scope != TRANSACTION or entry.what not in CLAIMS:
            continue
        producer_id, epoch = entry.detail.get("producer_id"), entry.detail.get("producer_epoch")
        if producer_id in ids and isinstance(epoch, int):
            claims[producer_id].append(
                ProducerEpochClaim(
                    entry.subject, epoch, entry.at_ms, entry.client_id, entry.client_host
                )
            )
    return claims


def holder(claims: Sequence[ProducerEpochClaim], epoch: int) -> ProducerEpochClaim | None:
    """Return the latest claim up to ``epoch``, or None.

    The epoch may be higher than the claim's, as the end of a transaction may bump it.
    """
    return next((claim for claim in reversed(claims) if claim.epoch <= epoch), None)
