"""The limit on producers that are remembered at once, over all partitions that share it.

Every producer id that writes costs memory until it expires, and clients may request any number of
ids: Apache Kafka's map grows without bound until ``producer.id.expiration.ms`` has passed
(KIP-936 and KIP-1044 describe brokers that ran out of memory). At the limit, this class evicts the
producer that has been idle for the longest time, as if it had expired. It never evicts a producer
with an open transaction, because the last stable offset and the effect of the end marker depend on
its state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fencepost.logcore.producer_snapshot import ProducerEntry

MAX_PRODUCER_IDS: Final = 100_000
"""``max.producer.ids``: the maximum number of remembered producers. A producer that writes to a
hundred partitions counts a hundred times. The default number of producers takes 190 MiB with five
cached batches each, and 95 MiB with one batch each."""

Producers = dict[int, ProducerEntry]
"""The producers of one partition by their id."""


class ProducerLimit:
    """Counts the producers of all partitions that share it, and orders them by idle time.

    It belongs to the partitions' thread. Only this class evicts an entry because of the limit.
    """

    def __init__(self, maximum: int = MAX_PRODUCER_IDS) -> None:
        self.maximum = maximum
        self.count = 0
        """Producers that are remembered now; above the maximum only if more of them have open
        transactions in logs that were read back."""
        self.forgotten = 0
        """Producers that were evicted because of the limit, since the start."""
        # Producers without an open transaction; the latest writer is the last.
        self._idle: OrderedDict[ProducerEntry, Producers] = OrderedDict()

    @property
    def has_room(self) -> bool:
        """Whether another producer can be added, perhaps by evicting one."""
        return self.count < self.maximum or bool(self._idle)

    def add(self, entry: ProducerEntry, producers: Producers) -> None:
        """Add a producer without an open transaction, and evict idle ones above the limit."""
        while self.count >= self.maximum and self._idle:
            idle, its_producers = self._idle.popitem(last=False)
            del its_producers[idle.producer_id]
            self.count -= 1
            self.forgotten += 1
        producers[entry.producer_id] = entry
        self._idle[entry] = producers
        self.count += 1

    def touch(self, entry: ProducerEntry, producers: Producers) -> None:
        """Move a producer to the end of the queue; during a transaction, take it out instead."""
        if entry.current_txn_first_offset is None:
            self._idle[entry] = producers
            self._idle.move_to_end(entry)
        else:
            self._idle.pop(entry, None)

    def remove(self, entry: ProducerEntry) -> None:
        """Stop counting a producer that its partition has dropped."""
        self._idle.pop(entry, None)
        self.count -= 1
