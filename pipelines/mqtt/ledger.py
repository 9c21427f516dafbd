"""What the bridge must remember to know a redelivery: kept in the same transactions as the data.

Each transaction writes one record to the ledger's compacted topic. Its key is a slot of a ring;
its value holds the message ids seen since the slot was begun and the packet ids of QoS 2 that are
received and not yet released. A slot is rewritten until it is full, then the next one is used, so
that compaction forgets the oldest ids and the ledger never outgrows ``SLOTS`` records.

Packet ids belong to one session of the MQTT broker. That a broker has lost it is told in one
answer only, that to the first CONNECT after the loss; so the ledger says beforehand that it is
connecting, and a bridge that finds this of its predecessor knows that the answer may have been
missed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgpack

from pipelines.mqtt.routes import MAX_ID_BYTES

SLOTS = 200
IDS_PER_SLOT = 500
"""At least (SLOTS − 1) × IDS_PER_SLOT = 99,500 ids are remembered, some 4 MB of memory."""

DIGEST_BYTES = 8


def digest(topic: str, payload: bytes) -> bytes:
    """What tells two messages of one packet id apart."""
    return hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=DIGEST_BYTES).digest()


def bounded(message_id: str) -> str:
    """Return the id itself, or its hash if it is long: remembering must not cost what it likes."""
    data = message_id.encode("utf-8", "surrogatepass")
    return message_id if len(data) <= MAX_ID_BYTES else hashlib.sha256(data).hexdigest()


class LedgerError(ValueError):
    """The ledger's topic holds what no bridge has written."""


class Ledger:
    """Packet ids and message ids. ``snapshot`` after a change gives the record to write."""

    def __init__(self, slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT) -> None:
        self._slots = slots
        self._ids_per_slot = ids_per_slot
        self._sequence = 0
        """Grows with every slot begun; the slot is its remainder by the number of slots."""
        self._ring: OrderedDict[int, list[str]] = OrderedDict({0: []})
        self._ids: set[str] = set()
        self.open: dict[int, bytes] = {}
        """Packet ids of QoS 2: received and written, PUBREL not yet seen."""
        self.is_connecting = False
        """A CONNECT may have been answered, and nobody has acted on the answer."""

    def __len__(self) -> int:
        return len(self._ids)

    def knows(self, message_id: str) -> bool:
        """Whether a message of this id has been written."""
        return bounded(message_id) in self._ids

    def add_id(self, message_id: str) -> None:
        """Remember it; the oldest slot is forgotten when the ring is full."""
        message_id = bounded(message_id)
        current = self._ring[self._sequence]
        if len(current) >= self._ids_per_slot:
            self._sequence += 1
            current = self._ring[self._sequence] = []
            if len(self._ring) > self._slots:
                _, forgotten = self._ring.popitem(last=False)
                self._ids.difference_update(forgotten)
        current.append(message_id)
        self._ids.add(message_id)

    def is_redelivery(self, packet_id: int, mark: bytes) -> bool:
        """Whether this QoS 2 packet was received before and not released since.

        The digest guards against a broker that lost its memory and uses the id for another message.
        """
        return self.open.get(packet_id) == mark

    def receive(self, packet_id: int, mark: bytes) -> None:
        """Remember a QoS 2 packet."""
        self.open[packet_id] = mark

    def release(self, packet_id: int) -> None:
        """Forget it: its id may now come again with another message."""
        self.open.pop(packet_id, None)

    def new_session(self) -> None:
        """Forget all packet ids: the broker begins anew. Message ids outlive sessions."""
        self.open.clear()
        self.is_connecting = False

    def snapshot(self, first: int) -> list[tuple[bytes, bytes]]:
        """Return the records (key, value) of all slots from sequence ``first`` on."""
        oldest = next(iter(self._ring))
        return [
            (
                b"%d" % (sequence % self._slots),
                msgpack.packb([sequence, self._ring[sequence], self.open, self.is_connecting]),
            )
            for sequence in range(max(first, oldest), self._sequence + 1)
        ]

    @property
    def sequence(self) -> int:
        """The slot that is being filled."""
        return self._sequence

    @classmethod
    def restore(
        cls, values: list[bytes], slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT
    ) -> Ledger:
        """Rebuild it from the values of its topic, in their order. Raises LedgerError."""
        ledger = cls(slots, ids_per_slot)
        latest: dict[int, list[Any]] = {}
        last = -1
        try:
            for value in values:
                sequence, ids, packets, connecting = msgpack.unpackb(value, strict_map_key=False)
                latest[int(sequence)] = list(ids)
                last = max(last, int(sequence))
                if sequence == last:
                    ledger.open = {int(mid): bytes(mark) for mid, mark in packets.items()}
                    ledger.is_connecting = bool(connecting)
        except (ValueError, TypeError, AttributeError) as error:
            raise LedgerError(f"not a ledger: {error}") from error
        if latest:
            kept = sorted(sequence for sequence in latest if sequence > last - slots)
            ledger._ring = OrderedDict((sequence, latest[sequence]) for sequence in kept)
            ledger._ids = {one for ids in ledger._ring.values() for one in ids}
            ledger._sequence = last
        return ledger
