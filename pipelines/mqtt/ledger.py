"""The state by which the bridge recognises redeliveries, kept in the transactions of the data.

The ledger's topic is compacted. It holds two rings of slots, one of message ids and one of released
QoS 2 packet ids; a record's key is the number of its slot. A slot is rewritten until it is full,
then the next one is used. As slot numbers repeat, compaction drops the oldest slot, and the topic
keeps at most ``SLOTS + PACKET_SLOTS`` records. Each transaction writes the slots that it changed. A
slot of message ids also holds the open packet ids: received and not yet released.

Packet ids belong to one session of the MQTT broker. Only the answer to the first CONNECT after the
loss of a session reports that loss. So the bridge records in the ledger that it is connecting, and
a bridge that finds such a record of its predecessor knows that the predecessor may have missed the
answer.

A PUBLISH whose packet id and digest the ledger knows is judged by the state of the id:

* open, and the broker has repeated it in this connection, or may still do so: a redelivery (MQTT 5,
  4.3.3), whether DUP is set or not. A broker that was restarted from a file repeats, without the
  flag, messages that it had not yet sent when the file was written;
* open, but the broker has answered SUBSCRIBE without repeating the packet, and so has forgotten it:
  with DUP a late redelivery, without DUP a new message under a reused id;
* released: without DUP a new message; with DUP a redelivery, as the broker may not have read our
  PUBCOMP, and Mosquitto publishes such a message again (:mod:`fencepost.pipelines.mqtt.bridge`
  says when). A broker may also reuse a released id at once, with or without DUP. The first reuse
  without DUP within a connection proves this; from then on every message with a released
  id is a new one.
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
"""The ring holds at least (SLOTS − 1) × IDS_PER_SLOT = 99,950 ids, some 10 MB of memory. A slot is
rewritten by each transaction until it is full, so small slots keep the topic small."""

PACKET_SLOTS = 401
PACKETS_PER_SLOT = 50
"""The ring holds at least 20,000 released packet ids: more than a broker has in flight, and less
than a third of the 65,535 that it counts through before it reuses one."""

DIGEST_BYTES = 8

IDENTITY_BYTES = 16
"""The number of bytes in the hash of an MQTT topic and a message id. With 100,000 ids, two hashes
are not equal by chance."""

_JSON, _WHOLE = b"json", b"whole"
"""BLAKE2b's ``person``: hashes differ from those of earlier versions, which covered less."""

_PACKETS = "packets"
"""The first field of a slot of packet ids; a slot of message ids begins with its sequence."""

T = TypeVar("T")


def digest(
    topic: str,
    payload: bytes,
    properties: Sequence[tuple[str, str]] = (),
    attributes: Sequence[tuple[str, bytes]] = (),
) -> bytes:
    """Return a digest that differs between two messages with the same packet id.

    ``properties`` are MQTT 5's user properties, ``attributes`` its other lasting properties.
    """
    packed = msgpack.packb((topic, payload, properties, attributes), unicode_errors="surrogatepass")
    return hashlib.blake2b(packed, digest_size=DIGEST_BYTES, person=_WHOLE).digest()


def former_digest(topic: str, payload: bytes, properties: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the digest that earlier versions computed; a ledger may hold such digests."""
    summed = hashlib.blake2b(topic.encode() + b"\0" + payload, digest_size=DIGEST_BYTES)
    for name, text in properties:
        summed.update(f"\0{name}\0{text}".encode("utf-8", "surrogatepass"))
    return summed.digest()


def identity(topic: str, text: str, *, is_json: bool = False) -> bytes:
    """Return the stored form of a message id; the id is unique only within its MQTT topic.

    The form has a fixed length, because a publisher's ids may be long. The forms of JSON ids and
    plain ids differ, but earlier versions stored JSON ids in the form of plain ones.
    """
    encoded = f"{topic}\0{text}".encode("utf-8", "surrogatepass")
    person = _JSON if is_json else b""
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, person=person).digest()


class LedgerError(ValueError):
    """The ledger's topic holds records that no bridge has written."""


class Ring(Generic[T]):
    """The last entries, in slots. When the newest slot is full, a new one replaces the oldest."""

    def __init__(self, slots: int, per_slot: int) -> None:
        self.slots = slots
        self._per_slot = per_slot
        self.sequence = 0
        """The number of the newest slot, counted from 0; its key is this modulo ``slots``."""
        self.entries: OrderedDict[int, list[T]] = OrderedDict({0: []})
        self._changed: int | None = None

    def add(self, entry: T) -> tuple[int, list[T]] | None:
        """Add an entry; return the sequence and entries of the slot dropped for it, if any."""
        forgotten = None
        if len(self.entries[self.sequence]) >= self._per_slot:
            forgotten = self.begin_slot()
        if self._changed is None:
            self._changed = self.sequence
        self.entries[self.sequence].append(entry)
        return forgotten

    def begin_slot(self) -> tuple[int, list[T]] | None:
        """Begin the next slot; return the one dropped for it, if any."""
        self.sequence += 1
        self.entries[self.sequence] = []
        return self.entries.popitem(last=False) if len(self.entries) > self.slots else None

    def take_changed(self) -> list[int]:
        """Return the sequences of the slots changed since the last call."""
        first, self._changed = self._changed, None
        return [] if first is None else [entry for entry in self.entries if entry >= first]

    def restore(self, entries: dict[int, list[T]]) -> None:
        """Take over a predecessor's :attr:`entries`, of any number of slots."""
        if entries:
            self.sequence = max(entries)
            kept = sorted(entry for entry in entries if entry > self.sequence - self.slots)
            self.entries = OrderedDict((key, entries[key]) for key in kept)


class Ledger:
    """Packet ids and message ids of one connection. ``snapshot`` returns the records to write."""

    def __init__(self, slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT) -> None:
        self._id_ring: Ring[str | bytes] = Ring(slots, ids_per_slot)
        self._ids: set[str | bytes] = set()
        """Stored forms of ids, and plain ids that an earlier version stored without topics."""
        self._packet_ring: Ring[tuple[int, bytes]] = Ring(PACKET_SLOTS, PACKETS_PER_SLOT)
        self._released: dict[int, tuple[bytes, int]] = {}
        """Released packet ids, with their digest and the sequence of their slot."""
        self._floor = 0
        """Slots of packet ids before this sequence belong to a lost session."""
        self.open: dict[int, bytes] = {}
        """QoS 2 packet ids with digests: received and written, but PUBREL has not arrived."""
        self.is_connecting = False
        """Set before a CONNECT; cleared when the bridge has acted on the answer."""
        self.reuses_ids = False
        """Whether the broker reuses packet ids at once."""
        self._seen: set[int] = set()
        """Keys of :attr:`open` that have arrived in this connection."""
        self._released_here: set[int] = set()
        self._is_settled = False

    def __len__(self) -> int:
        return len(self._ids)

    def knows(self, topic: str, message_id: OwnId, *, dup: bool = False) -> bool:
        """Return whether a message with this id is written. ``dup`` is the broker's DUP flag.

        An id that an earlier version stored counts as well, though it stands for several ids.
        """
        if identity(topic, message_id.text, is_json=message_id.is_json) in self._ids:
            return True
        former = message_id.former if message_id.is_json else message_id.text
        if former is None:
            return False
        return identity(topic, former) in self._ids or (dup and former in self._ids)

    def add_id(self, topic: str, message_id: OwnId) -> None:
        """Store a message id; a full ring drops its oldest slot."""
        stored = identity(topic, message_id.text, is_json=message_id.is_json)
        if forgotten := self._id_ring.add(stored):
            self._ids.difference_update(forgotten[1])
        self._ids.add(stored)

    @property
    def has_packets(self) -> bool:
        """Whether there are packet ids, which the loss of the session would invalidate."""
        return bool(self.open or self._released)

    def is_redelivery(self, packet_id: int, mark: bytes, *, dup: bool) -> bool:
        """Return whether this QoS 2 packet is a redelivery; see the module's docstring.

        The digest guards against a broker that lost its state and reuses the id.
        """
        if self.open.get(packet_id) == mark:
            return dup or not self._is_settled or packet_id in self._seen
        return dup and self.was_released(packet_id, mark)

    def was_released(self, packet_id: int, mark: bytes) -> bool:
        """Return whether the packet id was released and, as far as known, not reused since."""
        if self.reuses_ids or packet_id in self.open:
            return False
        return self._released.get(packet_id, (b"", 0))[0] == mark

    def receive(self, packet_id: int, mark: bytes, *, dup: bool = False) -> None:
        """Store a QoS 2 packet as open."""
        if not dup and packet_id in self._released_here:
            self.reuses_ids = True
        self.open[packet_id] = mark
        self._seen.add(packet_id)

    def release(self, packet_id: int) -> None:
        """Release a packet id: it may carry another message from now on."""
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
        """Note that the broker has repeated its packets in flight; return how many it forgot."""
        self._is_settled = True
        return len(self.open.keys() - self._seen)

    def new_session(self) -> None:
        """Forget all packet ids, for the broker's new session. Message ids outlive sessions."""
        for packet_ids in (self.open, self._released, self._seen, self._released_here):
            packet_ids.clear()
        self._packet_ring.begin_slot()
        self._floor = self._packet_ring.sequence
        self.is_connecting = self.reuses_ids = False

    def snapshot(self, *, whole: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the records (key, value) that changed since the last snapshot, or all of them.

        The record with the open packet ids is always included.
        """
        ids, packets = self._id_ring, self._packet_ring
        changed = ids.take_changed(), packets.take_changed()
        if whole:
            changed = list(ids.entries), list(packets.entries)
        state = (self.open, self.is_connecting, self.reuses_ids, self._floor)
        records = [
            (
                b"p%d" % (message_id % packets.slots),
                [_PACKETS, message_id, packets.entries[message_id]],
            )
            for message_id in changed[1]
        ]
        records += [
            (b"%d" % (sequence % ids.slots), [sequence, ids.entries[sequence], *state])
            for sequence in changed[0] or [ids.sequence]
        ]
        return [(key, msgpack.packb(fields)) for key, fields in records]

    @classmethod
    def restore(
        cls, values: list[bytes], slots: int = SLOTS, ids_per_slot: int = IDS_PER_SLOT
    ) -> Ledger:
        """Rebuild the ledger from the values of its topic, in order. Raises LedgerError.

        Records with four fields are from bridges that did not store released packet ids.
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
        ledger._ids = {entry for entries in ledger._id_ring.entries.values() for entry in entries}
        # If a session began without any packet, its slot was never written.
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
