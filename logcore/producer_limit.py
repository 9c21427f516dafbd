"""How many producers are remembered at once, over all partitions that share a limit.

Every batch of a new producer id costs memory that only time gives back, and ids are free to ask
for: Apache Kafka's map grows without bound until ``producer.id.expiration.ms`` has passed (KIP-936
and KIP-1044 describe brokers that ran out of memory). Here the producer that has been idle for
longest is forgotten early, as if it had expired. One with an open transaction never is: the last
stable offset, and what its marker will mean, hang on it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fencepost.logcore.producer_snapshot import ProducerEntry

MAX_PRODUCER_IDS: Final = 100_000
"""``max.producer.ids``: producers remembered, counted once for each partition they write to. With
full windows that is 190 MiB, with one batch each 95; a producer of a hundred partitions counts a
hundred times."""

Producers = dict[int, ProducerEntry]
"""The producers of one partition by their id."""


class ProducerLimit:
    """Counts the producers of all partitions it is given to, and knows who is idle for longest.

    One thread, that of the partitions. Nobody but this class removes an entry for want of room.
    """

    def __init__(self, maximum: int = MAX_PRODUCER_IDS) -> None:
        self.maximum = maximum
        self.count = 0
        """Producers that are remembered now; above the maximum only if that many have transactions
        open in logs that were read back."""
        self.forgotten = 0
        """Producers that were forgotten for want of room, since the start."""
        # Without an open transaction, the one that wrote last at the end.
        self._idle: OrderedDict[ProducerEntry, Producers] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Whether one more can be taken, perhaps in the place of another."""
        return self.count < self.maximum or bool(self._idle)

    def add(self, entry: ProducerEntry, producers: Producers) -> None:
        """Remember one more, without a transaction, and forget whoever that is too many."""
        while self.count >= self.maximum and self._idle:
            idle, its_producers = self._idle.popitem(last=False)
            del its_producers[idle.producer_id]
            self.count -= 1
            self.forgotten += 1
        producers[entry.producer_id] = entry
        self._idle[entry] = producers
        self.count += 1

    def wrote(self, entry: ProducerEntry, producers: Producers) -> None:
        """Move one to the end of the queue, or out of it while its transaction is open."""
        if entry.current_txn_first_offset is None:
            self._idle[entry] = producers
            self._idle.move_to_end(entry)
        else:
            self._idle.pop(entry, None)

    def remove(self, entry: ProducerEntry) -> None:
        """Stop counting one that its partition has forgotten by itself."""
        self._idle.pop(entry, None)
        self.count -= 1
