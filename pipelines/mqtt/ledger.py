"""What the bridge must remember to know a redelivery: kept in the same transactions as the data.

The ledger's topic is compacted. Its keys are the slots of two rings, of message ids and of QoS 2
packet ids that are done with; a slot is rewritten until it is full, then the next one is used, so
that compaction forgets the oldest and the topic never outgrows ``SLOTS + PACKET_SLOTS`` records.
Each transaction writes the slots that it changed. That of the message ids also holds the packet
ids that are open: received and not yet released.

Packet ids belong to one session of the MQTT broker. That a broker has lost it is told in one
answer only, that to the first CONNECT after the loss; so the ledger says beforehand that it is
connecting, and a bridge that finds this of its predecessor knows that the answer may have been
missed.

What a PUBLISH with a packet id means that the ledger knows, its digest being the same:

* open, and the broker has shown in this connection that it knows of it, or may still do so: a
  redelivery (MQTT 5, 4.3.3), whatever its DUP flag says. A broker that was restarted from a file
  repeats without the flag what was not sent yet when the file was written;
* open, but the broker did not repeat it before it answered SUBSCRIBE, so it has forgotten it: with
  DUP a redelivery that comes late, without DUP a new message under a used id;
* released: with DUP a redelivery, for the broker may not have read our PUBCOMP, and Mosquitto
  publishes such a message again (:mod:`fencepost.pipelines.mqtt.bridge` tells when); without DUP a
  new message. A broker that uses ids again at once could mean a new one in both cases. It gives
  itself away by its first reuse within a connection, and is then taken at its word.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgpack

from fencepost.pipelines.mqtt.message_ids import OwnId

SLOTS = 2_000
IDS_PER_SLOT = 50
"""At least (SLOTS − 1) × IDS_PER_SLOT = 99,950 ids are remembered, some 10 MB of memory. A slot is
written again with each transaction until it is full, so that a small one keeps the topic small."""

PACKET_SLOTS = 401
PACKETS_PER_SLOT = 50
"""At least 20,000 released packet ids are remembered: more than a broker has under way, and less
than a third of the 65,535 that it counts through before it uses one again."""

DIGEST_BYTES = 8

IDENTITY_BYTES = 16
"""Of a message id, within its MQTT topic: no two of 100,000 meet by chance."""

_JSON, _WHOLE = b"json", b"whole"
"""What keeps hashes apart from those of earlier versions, which left something out."""

_PACKETS = "packets"
"""First field of a slot of packet ids; that of a slot of message ids is its sequence."""

T = TypeVar("T")


def digest(
    topic: str,
    payload: bytes,
    properties: Sequence[tuple[str, str]] = (),
    attributes: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    """What tells two messages of one packet id apart.

    ``properties`` are MQTT 5's user properties, ``attributes`` its others that last.
    """
    told = msgpack.packb((topic, payload, properties, attributes), unicode_errors="surrogatepass")
    return hashlib.blake2b(told, digest_size=DIGEST_BYTES, person=_WHOLE).digest()


def former_digest(topic: str, payload: bytes, properties: Iterable[tuple[str, str]] = ()) -> bytes:
    """The digest of earlier versions, which ledgers may hold."""
    summed = hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=DIGEST_BYTES)
    for name, text in properties:
        summed.update(f"\0{name}\0{text}".encode("utf-8", "surrogatepass"))
    return summed.digest()


def identity(topic: str, text: str, *, is_json: bool = False) -> bytes:
    """What is remembered of a message id. Devices that each count from 1 have topics of their own.

    Of fixed length: remembering must not cost what a publisher likes. Ids of JSON are apart from
    plain ones, among which those of JSON stand that earlier versions have remembered.
    """
    told = f"{topic}\0{text}".encode("utf-8", "surrogatepass")
    person = _JSON if is_json else b""
    return hashlib.blake2b(told, digest_size=IDENTITY_BYTES, person=person).digest()


class LedgerError(ValueError):
    """The ledger's topic holds what no bridge has written."""


class Ring(Generic[T]):
    """The last entries, by slots: a slot is begun when one is full, and the oldest forgotten."""

    def __init__(self, slots: int, per_slot: int) -> None:
        self.slots = slots
        self._per_slot = per_slot
        self.sequence = 0
        """Grows with every slot begun; the slot is its remainder by the number of slots."""
        self.entries: OrderedDict[int, list[T]] = OrderedDict({0: []})
        self._changed: int | None = None

    def add(self, entry: T) -> tuple[int, list[T]] | None:
        """Return the sequence and the entries of the slot that is forgotten for it, if one is."""
        forgotten = None
        if len(self.entries[self.sequence]) >= self._per_slot:
            forgotten = self.begin_slot()
        if self._changed is None:
            self._changed = self.sequence
        self.entries[self.sequence].append(entry)
        return forgotten

    def begin_slot(self) -> tuple[int, list[T]] | None:
        """Leave the present slot as it is, and return what is forgotten for the next one."""
        self.sequence += 1
        self.entries[self.sequence] = []
        return self.entries.popitem(last=False) if len(self.entries) > self.slots else None

    def take_changed(self) -> list[int]:
        """Return the sequences of the slots that have changed since the last call."""
        first, self._changed = self._changed, None
        return [] if first is None else [one for one in self.entries if one >= first]

    def restore(self, entries: dict[int, list[T]]) -> None:
        """Take over what :attr:`entries` of a predecessor were, of any number of slots."""
        if entries:
            self.sequence = max(entries)
            kept = sorted(one for one in entries if one > self.sequence - self.slots)
            self.entries = OrderedDict((one, entries[one]) for one in kept)


class Ledger:
    """Packet ids and message ids of one connection. ``snapshot`` gives the records to write."""

    def __init__(self, slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT) -> None:
        self._id_ring: Ring[str | bytes] = Ring(slots, ids_per_slot)
        self._ids: set[str | bytes] = set()
        """Identities, and plain ids from a version that did not tell topics apart."""
        self._packet_ring: Ring[tuple[int, bytes]] = Ring(PACKET_SLOTS, PACKETS_PER_SLOT)
        self._released: dict[int, tuple[bytes, int]] = {}
        """Released packet ids: digest, and the sequence of their slot."""
        self._floor = 0
        """Slots of packet ids before this sequence are of a session that is lost."""
        self.open: dict[int, bytes] = {}
        """Packet ids of QoS 2: received and written, PUBREL not yet seen."""
        self.is_connecting = False
        """A CONNECT may have been answered, and nobody has acted on the answer."""
        self.reuses_ids = False
        """The broker uses packet ids again at once."""
        self._seen: set[int] = set()
        """Open packet ids that the broker has named in this connection."""
        self._released_here: set[int] = set()
        self._is_settled = False

    def __len__(self) -> int:
        return len(self._ids)

    def knows(self, topic: str, own: OwnId, *, dup: bool = False) -> bool:
        """Whether a message of this id has been written. ``dup``: the broker says it may have.

        An id that an earlier version remembered counts as well, though it stands for several.
        """
        if identity(topic, own.text, is_json=own.is_json) in self._ids:
            return True
        former = own.former if own.is_json else own.text
        if former is None:
            return False
        return identity(topic, former) in self._ids or (dup and former in self._ids)

    def add_id(self, topic: str, own: OwnId) -> None:
        """Remember it; the oldest slot is forgotten when the ring is full."""
        known = identity(topic, own.text, is_json=own.is_json)
        if forgotten := self._id_ring.add(known):
            self._ids.difference_update(forgotten[1])
        self._ids.add(known)

    @property
    def has_packets(self) -> bool:
        """Whether there is any packet id that a lost session would take along."""
        return bool(self.open or self._released)

    def is_redelivery(self, packet_id: int, mark: bytes, *, dup: bool) -> bool:
        """Whether this QoS 2 packet is one that was received before; see the module's docstring.

        The digest guards against a broker that lost its memory and uses the id for another message.
        """
        if self.open.get(packet_id) == mark:
            return dup or not self._is_settled or packet_id in self._seen
        return dup and self.was_released(packet_id, mark)

    def was_released(self, packet_id: int, mark: bytes) -> bool:
        """Whether its PUBREL has come, and its id is not known to have been used again since."""
        if self.reuses_ids or packet_id in self.open:
            return False
        return self._released.get(packet_id, (b"", 0))[0] == mark

    def receive(self, packet_id: int, mark: bytes, *, dup: bool = False) -> None:
        """Remember a QoS 2 packet."""
        if not dup and packet_id in self._released_here:
            self.reuses_ids = True
        self.open[packet_id] = mark
        self._seen.add(packet_id)

    def release(self, packet_id: int) -> None:
        """Give a packet id up: it may come again with another message from now on."""
        mark = self.open.pop(packet_id, None)
        self._seen.discard(packet_id)
        if mark is None:
            return
        if forgotten := self._packet_ring.add((packet_id, mark)):
            sequence, packets = forgotten
            for old, _ in packets:
                if old in self._released and self._released[old][1] == sequence:
                    del self._released[old]
                    self._released_here.discard(old)
        self._released[packet_id] = mark, self._packet_ring.sequence
        self._released_here.add(packet_id)

    def settle(self) -> int:
        """The broker has repeated what it had under way. Return how many packets it forgot."""
        self._is_settled = True
        return len(self.open.keys() - self._seen)

    def new_session(self) -> None:
        """Forget all packet ids: the broker begins anew. Message ids outlive sessions."""
        for known in (self.open, self._released, self._seen, self._released_here):
            known.clear()
        self._packet_ring.begin_slot()
        self._floor = self._packet_ring.sequence
        self.is_connecting = self.reuses_ids = False

    def snapshot(self, *, whole: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the records (key, value) of what has changed since the last snapshot, or of all.

        The open packet ids are always among them.
        """
        ids, packets = self._id_ring, self._packet_ring
        changed = ids.take_changed(), packets.take_changed()
        if whole:
            changed = list(ids.entries), list(packets.entries)
        state = (self.open, self.is_connecting, self.reuses_ids, self._floor)
        records = [
            (b"p%d" % (one % packets.slots), [_PACKETS, one, packets.entries[one]])
            for one in changed[1]
        ]
        records += [
            (b"%d" % (one % ids.slots), [one, ids.entries[one], *state])
            for one in changed[0] or [ids.sequence]
        ]
        return [(key, msgpack.packb(fields)) for key, fields in records]

    @classmethod
    def restore(
        cls, values: list[bytes], slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT
    ) -> Ledger:
        """Rebuild it from the values of its topic, in their order. Raises LedgerError.

        Records of four fields are of bridges that did not remember released packet ids.
        """
        ledger = cls(slots, ids_per_slot)
        ids: dict[int, list[str | bytes]] = {}
        packets: dict[int, list[tuple[int, bytes]]] = {}
        last = -1
        try:
            for value in values:
                first, *rest = msgpack.unpackb(value, strict_map_key=False)
                if first == _PACKETS:
                    sequence, entries = rest
                    packets[int(sequence)] = [(int(mid), bytes(mark)) for mid, mark in entries]
                    continue
                ids[int(first)] = list(rest[0])
                last = max(last, int(first))
                if first == last:
                    ledger._take_state(*rest[1:])
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise LedgerError(f"not a ledger: {error}") from error
        ledger._id_ring.restore(ids)
        ledger._ids = {one for entries in ledger._id_ring.entries.values() for one in entries}
        # A session that began without any packet has a slot that was never written.
        packets.setdefault(ledger._floor, [])
        ledger._packet_ring.restore(packets)
        for sequence, released in ledger._packet_ring.entries.items():
            if sequence >= ledger._floor:
                ledger._released.update((mid, (mark, sequence)) for mid, mark in released)
        return ledger

    def _take_state(
        self, packets: Any, connecting: Any, reuses_ids: Any = False, floor: Any = 0
    ) -> None:
        self.open = {int(mid): bytes(mark) for mid, mark in packets.items()}
        self.is_connecting, self.reuses_ids = bool(connecting), bool(reuses_ids)
        self._floor = int(floor)
