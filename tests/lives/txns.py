"""Requests of producers, and of administrators of transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.lives.draw import Draw, Identity, Later, Request
from tests.lives.groups import with_ids
from tests.lives.knowledge import Knowledge, Slot
from tests.support import requests
from tests.support.batches import NOW_MS, batch
from tests.support.requests import Body

Who = Callable[[Knowledge], Identity]

FIRST_OF_V2 = {"produce": 12, "txn_offset_commit": 5, "end_txn": 5}
"""API → first version that only clients with transaction version 2 send."""


def version_of(d: Draw, api: str, level: int | None) -> int:
    """Draw a version of ``api`` that a client with transaction version ``level`` sends."""
    least, most = d.versions(api)
    if level is None:
        return d.rng.randint(least, most)
    first = FIRST_OF_V2[api]
    return d.rng.randint(first, most) if level == 2 else d.rng.randint(least, first - 1)


def _pid(who: Who) -> Later:
    return lambda k: who(k)[0]


def _later(who: Who) -> tuple[Later, Later]:
    """Return the producer id and the epoch, both resolved when the request is sent."""
    return _pid(who), lambda k: who(k)[1]


def init_producer_id(d: Draw, about: Slot | None) -> Request:
    """Draw an InitProducerId for a transactional id, or without one for an idempotent producer."""
    who = d.identity(about) if about is not None and d.chance(0.3) else lambda _: (-1, -1)
    timeouts = [60_000] if d.calm else [60_000, 60_000, 1_000, 300]
    return Request(
        "init_producer_id",
        d.version("init_producer_id"),
        requests.init_producer_id(
            None if about is None else about[0],
            _later(who),
            transaction_timeout=d.pick(timeouts) if d.chance(0.96) else d.pick([0, -1, 10**9]),
        ),
        about,
    )


def add_partitions(d: Draw, about: Slot) -> Request:
    who = d.identity(about)
    topics = d.some(lambda: (d.topic(), [d.partition() for _ in range(d.pick([1, 1, 2]))]))

    def added_partitions(slot: Slot, identity: Who) -> Body:
        return requests.added_partitions(
            slot[0], _later(identity), *topics, verify_only=d.chance(0.4)
        )

    others = [d.slot(d.txn_id()) for _ in range(d.pick([0, 0, 0, 1]))]
    version = d.version("add_partitions_to_txn", high=3 if d.chance(0.7) else 5)
    body = requests.add_partitions_to_txn(
        added_partitions(about, who), *(added_partitions(slot, d.identity(slot)) for slot in others)
    )
    return Request("add_partitions_to_txn", version, body, about)


def add_offsets(d: Draw, about: Slot, group: str) -> Request:
    body = requests.add_offsets_to_txn(about[0], _later(d.identity(about)), group)
    return Request("add_offsets_to_txn", d.version("add_offsets_to_txn"), body, about)


def txn_offset_commit(d: Draw, about: Slot, group: str, level: int | None = None) -> Request:
    who, member = d.identity(about), d.slot(group)
    as_member = d.chance(0.4)
    generation: Any = -1
    if as_member:
        generation = d.pick([d.generation(member), d.member_epoch(member)])
    return Request(
        "txn_offset_commit",
        version_of(d, "txn_offset_commit", level),
        requests.txn_offset_commit(
            about[0],
            _later(who),
            group,
            generation=generation,
            member_id=d.member_id(member, 0.9) if as_member else "",
            group_instance_id=d.instance(member) if as_member else None,
            topics=with_ids(d),
        ),
        about,
    )


def end_txn(d: Draw, about: Slot, level: int | None = None) -> Request:
    who = d.identity(about, 0.88)
    return Request(
        "end_txn",
        version_of(d, "end_txn", level),
        requests.end_txn(about[0], _later(who), committed=d.chance(0.6)),
        about,
    )


def _records(d: Draw, who: Who | None, about: Slot, at: tuple[str, int], number: int) -> Later:
    """Draw a batch, with the producer id, epoch and sequence of ``who`` if it is given."""
    count = d.rng.randint(1, 3)
    values: list[bytes | None] = [b"%d.%d" % (number, n) for n in range(count)]
    if d.chance(0.03):
        values[0] = None
    key = d.pick([None, b"", b"key", b"k%d" % d.rng.randrange(3)])
    off = d.rng.choices((0, -1, 1, 7, 2**31 - 1 - 10), (90, 4, 3, 2, 1))[0]
    transactional = about[0] != "" and d.chance(0.97)
    timestamp = NOW_MS if d.chance(0.97) else d.pick([0, NOW_MS + 10**7, -1])
    spoilt = 0 if d.calm and who is not None else 8
    spoil = d.rng.choices(
        ("", "crc", "cut", "twice", "none"), (970, spoilt, spoilt, spoilt, 0 if d.calm else 6)
    )[0]
    attributes = 0x20 if d.chance(0.005) else 0

    def make(k: Knowledge) -> bytes | None:
        if spoil == "none":
            return None
        if who is None:
            data = batch(values, key=key, timestamp_ms=timestamp, attributes=attributes)
        else:
            pid, epoch = who(k)
            expected = k.producers[about].sequences.get(at, 0)
            data = batch(
                values,
                producer_id=pid,
                producer_epoch=epoch,
                sequence=max(0, min(expected + off, 2**31 - 1)),
                transactional=transactional,
                key=key,
                timestamp_ms=timestamp,
                attributes=attributes,
            )
        if spoil == "crc":
            return data[:-1] + bytes([data[-1] ^ 1])
        if spoil == "cut":
            return data[:-3]
        return data + data if spoil == "twice" else data

    return make


def produce(
    d: Draw, about: Slot | None, number: int, level: int | None = None, *, plain: bool = False
) -> Request:
    """Draw a Produce request: transactional, idempotent (``about`` has no name), or ``plain``."""
    slot = about or ("", 0)
    who = None if plain else d.writer(slot)
    # In Apache Kafka, coordinators' topics stay in the transaction even if Produce is refused.
    name = d.topic() if plain or not slot[0] else d.readable()
    indexes = sorted({d.partition() for _ in range(d.rng.choices((1, 2), (8, 2))[0])})
    transactional_id: str | None = slot[0] if not plain and slot[0] else None
    if d.chance(0.03):
        transactional_id = d.pick([None, d.txn_id()])
    return Request(
        "produce",
        version_of(d, "produce", level),
        requests.produce(
            transactional_id=transactional_id,
            acks=d.rng.choices((-1, 1, 0, 2, -2), (85, 10, 0 if d.calm else 2, 1, 1))[0],
            timeout=d.pick([10_000, 1_000, 0] if not d.calm else [10_000]),
            topic_data=[
                requests.produce_topic(
                    name,
                    {index: _records(d, who, slot, (name, index), number) for index in indexes},
                    topic_id=d.topic_id(name),
                )
            ],
        ),
        slot,
        notes={"topic": name, "plain": plain},
    )


OFFSETS_PARTITIONS = 4
"""Number of partitions of ``__consumer_offsets`` on the tests' brokers."""


def write_txn_markers(d: Draw, about: Slot | None = None) -> Request:
    """Draw a WriteTxnMarkers of an administrator, for the producer of ``about`` or for any."""

    def topic() -> Body:
        if d.chance(0.4):
            return requests.indexes_of("__consumer_offsets", *range(OFFSETS_PARTITIONS))
        return requests.indexes_of(d.topic(), d.partition())

    def marker() -> Body:
        return requests.marker(
            _later(d.writer(about or d.slot(d.txn_id()), 0.5)),
            transaction_result=d.chance(0.5),
            topics=d.some(topic),
            # An epoch above the coordinator's epoch fences the coordinator until it is restarted.
            coordinator_epoch=d.rng.choices((0, -1, 1, 5), (980, 15, 4, 1))[0],
            transaction_version=d.pick([0, 1, 2, 2, 3]),
        )

    body = requests.write_txn_markers(*d.some(marker))
    return Request("write_txn_markers", d.version("write_txn_markers"), body)


def describe_transactions(d: Draw) -> Request:
    return Request("describe_transactions", 0, requests.describe_transactions(*d.some(d.txn_id)))


def list_transactions(d: Draw) -> Request:
    states = ["Ongoing", "Empty", "CompleteCommit", "PrepareAbort", "nonsense", ""]
    slot = d.slot(d.txn_id())
    return Request(
        "list_transactions",
        d.version("list_transactions"),
        requests.list_transactions(
            state_filters=[] if d.chance(0.5) else d.some(lambda: d.pick(states)),
            producer_id_filters=[] if d.chance(0.7) else [_pid(d.identity(slot))],
            duration_filter=-1 if d.chance(0.8) or d.calm else d.pick([0, 1, 1_000, 10**12]),
            transactional_id_pattern=None
            if d.chance(0.7)
            else d.pick(["", ".*", f"{d.pools.stem}t[01]", "(", "a{2,1}", d.odd()]),
        ),
    )


def describe_producers(d: Draw) -> Request:
    topics = d.some(lambda: requests.indexes_of(d.readable(), d.partition()))
    return Request("describe_producers", 0, requests.describe_producers(*topics))
