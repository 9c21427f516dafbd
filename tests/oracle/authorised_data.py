"""Requests of the matrix: topics, records and offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, INTERNAL, Body, Names, Request
from tests.support import requests
from tests.support.batches import batch

TOPIC_KINDS: Final = (HERE, ABSENT, INTERNAL)
PLAIN_KINDS: Final = (HERE, ABSENT)
FOLLOWER: Final = 1


def _produced(n: Names, topics: str, records: bytes, **fields: Any) -> Body:
    rows = [requests.produce_topic(n[slot], records, topic_id=n.id(slot)) for slot in topics]
    return requests.produce(*rows, **fields)


def _by(n: Names, slot: str, *, transactional: bool = False) -> bytes:
    producer_id, epoch = n.producer(slot)
    return batch(
        [b"v"],
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=0,
        transactional=transactional,
    )


def _fetch(n: Names, topics: str, **fields: Any) -> Body:
    rows = [requests.fetch_topic(n[slot], 0, topic_id=n.id(slot)) for slot in topics]
    return requests.fetch(*rows, **fields)


def _list_offsets(n: Names, topics: str) -> Body:
    return requests.list_offsets(*(requests.list_offsets_topic(n[slot], 0, 1) for slot in topics))


def _epochs(n: Names, topics: str) -> Body:
    rows = [requests.offset_for_leader_epoch_topic(n[slot], 0) for slot in topics]
    return requests.offset_for_leader_epoch(*rows)


def _metadata(*topics: Body, **fields: Any) -> Body:
    return requests.metadata(
        *topics,
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
        **fields,
    )


def _by_name(n: Names, topics: str) -> list[Body]:
    return [requests.named(n[slot]) for slot in topics]


def _by_id(n: Names, topics: str) -> list[Body]:
    return [requests.named(None, n.id(slot)) for slot in topics]


def _creation(n: Names, topics: str, **fields: Any) -> Body:
    rows = [requests.new_topic(n[slot], configs={"retention.ms": "77777"}) for slot in topics]
    return requests.create_topics(*rows, **fields)


def _growth(n: Names, topics: str, *, validate_only: bool) -> Body:
    rows = [requests.grown_topic(n[slot], 3) for slot in topics]
    return requests.create_partitions(*rows, validate_only=validate_only)


PRODUCE: Sequence[Request] = (
    Request(
        "produce",
        (3, 7, 9, 13),
        "write w",
        lambda n: _produced(n, "w", batch([b"v"])),
        kinds={"w": PLAIN_KINDS},
    ),
    Request(
        "produce",
        (9, 13),
        "write w, write v",
        lambda n: _produced(n, "wv", batch([b"v"])),
        "to two topics",
    ),
    Request(
        "produce",
        (9,),
        "write t",
        lambda n: _produced(n, "t", batch([b"v"])),
        "to the coordinators' topic",
        kinds={"t": (INTERNAL,)},
    ),
    Request(
        "produce",
        (9,),
        "write w",
        lambda n: _produced(n, "w", batch([b"v"]), acks=1),
        "acks=1",
    ),
    Request(
        "produce",
        (9, 13),
        "write w, write v",
        lambda n: _produced(n, "wv", batch([b"v"]), acks=0),
        "acks=0",
        kinds={"w": PLAIN_KINDS},
        is_silent=True,
    ),
    Request(
        "produce",
        (9, 13),
        "write x, write t",
        lambda n: _produced(
            n, "t", _by(n, "x", transactional=True), transactional_id=n["x"], acks=0
        ),
        "in a transaction, acks=0",
        is_fresh=True,
        is_silent=True,
    ),
    Request(
        "produce",
        (9, 11, 13),
        "write x, write t",
        lambda n: _produced(n, "t", _by(n, "x", transactional=True), transactional_id=n["x"]),
        "in a transaction",
        kinds={"t": PLAIN_KINDS, "x": PLAIN_KINDS},
        is_fresh=True,
    ),
    Request(
        "produce",
        (9,),
        "write x, write t",
        lambda n: _produced(n, "t", _by(n, "x", transactional=True)),
        "in a transaction of nobody",
        is_fresh=True,
        is_idle=True,
    ),
    Request(
        "produce",
        (9,),
        "write t",
        lambda n: _produced(n, "t", _by(n, "x"), transactional_id=n["x"]),
        "plain records under a transactional id",
        others="write x",
        is_fresh=True,
    ),
    Request(
        "produce",
        (9, 12),
        "write t",
        lambda n: _produced(n, "t", _by(n, "x")),
        "idempotent",
        kinds={"x": (HERE,)},
        is_fresh=True,
        others="idempotent_write cluster",
    ),
)

FETCH: Sequence[Request] = (
    Request(
        "fetch",
        (4, 12, 13, 18),
        "read t",
        lambda n: _fetch(n, "t"),
        kinds={"t": PLAIN_KINDS},
    ),
    Request(
        "fetch",
        (12, 17),
        "read t, read u",
        lambda n: _fetch(n, "tu"),
        "of two topics",
        kinds={"u": PLAIN_KINDS},
    ),
    Request(
        "fetch",
        (12,),
        "read t",
        lambda n: _fetch(n, "t", session_epoch=0),
        "in a session",
    ),
    Request(
        "fetch",
        (11, 14),
        "cluster_action cluster",
        lambda n: _fetch(n, "t", replica_id=FOLLOWER),
        "by a follower",
        kinds={"t": PLAIN_KINDS},
        others="read t",
    ),
    Request(
        "fetch",
        (17,),
        "cluster_action cluster",
        lambda n: _fetch(n, "t", replica_state={"replica_id": FOLLOWER, "replica_epoch": 0}),
        "by a follower with its epoch",
        others="read t",
    ),
)

OFFSETS: Sequence[Request] = (
    Request(
        "list_offsets",
        (1, 6, 11),
        "describe t",
        lambda n: _list_offsets(n, "t"),
        kinds={"t": PLAIN_KINDS},
    ),
    Request(
        "list_offsets",
        (7,),
        "describe t, describe u",
        lambda n: _list_offsets(n, "tu"),
        "of two topics",
        kinds={"u": PLAIN_KINDS},
    ),
    Request(
        "offset_for_leader_epoch",
        (2, 3, 4),
        "describe t",
        lambda n: _epochs(n, "t"),
        kinds={"t": PLAIN_KINDS},
        others="cluster_action cluster",
    ),
    Request(
        "offset_for_leader_epoch",
        (4,),
        "describe t, describe u",
        lambda n: _epochs(n, "tu"),
        "of two topics",
        kinds={"u": PLAIN_KINDS},
    ),
    Request(
        "describe_producers",
        (0,),
        "read t, read u",
        lambda n: requests.describe_producers(*(requests.indexes_of(n[slot], 0) for slot in "tu")),
        kinds={"t": PLAIN_KINDS, "u": PLAIN_KINDS},
    ),
    Request(
        "delete_records",
        (0, 1, 2),
        "delete t, delete u",
        lambda n: requests.delete_records(
            *(requests.delete_records_topic(n[slot], 0, offset=0) for slot in "tu")
        ),
        kinds={"u": PLAIN_KINDS},
    ),
)

METADATA: Sequence[Request] = (
    Request(
        "metadata",
        (4, 8, 10, 11, 13),
        "describe t",
        lambda n: _metadata(*_by_name(n, "t")),
        kinds={"t": TOPIC_KINDS},
        others="describe cluster, create cluster",
    ),
    Request(
        "metadata",
        (0, 1),
        "describe t",
        lambda n: _metadata(*_by_name(n, "t")),
        "of old clients",
        kinds={"t": (HERE, INTERNAL)},
    ),
    Request(
        "metadata",
        (8, 12),
        "describe t, describe u",
        lambda n: _metadata(*_by_name(n, "tu")),
        "of two topics",
        kinds={"u": PLAIN_KINDS},
    ),
    Request(
        "metadata",
        (1, 9, 12),
        "describe t, describe u",
        lambda _: _metadata(topics=None),
        "of all topics",
        others="describe cluster",
    ),
    Request(
        "metadata",
        (12, 13),
        "describe t, describe u",
        lambda n: _metadata(*_by_id(n, "tu")),
        "by id",
        kinds={"t": PLAIN_KINDS},
    ),
    Request(
        "metadata",
        (4, 12),
        "describe t, create t",
        lambda n: _metadata(*_by_name(n, "t"), allow_auto_topic_creation=True),
        "that creates topics",
        kinds={"t": PLAIN_KINDS},
        others="create cluster",
        is_fresh=True,
    ),
    Request(
        "metadata",
        (12,),
        "describe t, create t, describe u, create u",
        lambda n: _metadata(*_by_name(n, "tu"), allow_auto_topic_creation=True),
        "that creates two topics",
        kinds={"t": (ABSENT,), "u": (ABSENT,)},
        is_fresh=True,
    ),
    Request(
        "describe_topic_partitions",
        (0,),
        "describe t, describe u",
        lambda n: requests.describe_topic_partitions(n["t"], n["u"]),
        kinds={"t": PLAIN_KINDS, "u": PLAIN_KINDS},
        others="describe cluster",
    ),
    Request(
        "describe_topic_partitions",
        (0,),
        "describe t, describe u",
        lambda _: requests.describe_topic_partitions(),
        "of all topics",
    ),
)

CREATION: Sequence[Request] = (
    Request(
        "create_topics",
        (2, 4, 5, 7),
        "create t, describe_configs t",
        lambda n: _creation(n, "t"),
        kinds={"t": (ABSENT, HERE, INTERNAL)},
        others="create cluster",
        is_fresh=True,
    ),
    Request(
        "create_topics",
        (4, 7),
        "create t, create u, describe_configs u",
        lambda n: _creation(n, "tu", validate_only=True),
        "validate_only",
        kinds={"t": (ABSENT,), "u": (ABSENT, HERE)},
        others="create cluster",
        is_fresh=True,
    ),
    Request(
        "create_partitions",
        (0, 2, 3),
        "alter t, alter u",
        lambda n: _growth(n, "tu", validate_only=False),
        kinds={"u": PLAIN_KINDS},
        others="alter cluster",
        is_fresh=True,
    ),
    Request(
        "create_partitions",
        (3,),
        "alter t",
        lambda n: _growth(n, "t", validate_only=True),
        "validate_only",
        kinds={"t": PLAIN_KINDS},
    ),
)

DELETION: Sequence[Request] = (
    Request(
        "delete_topics",
        (1, 4, 6),
        "delete t",
        lambda n: requests.delete_topics(n["t"]),
        kinds={"t": PLAIN_KINDS},
        others="describe t, delete cluster",
        is_fresh=True,
    ),
    Request(
        "delete_topics",
        (6,),
        "delete t",
        lambda n: requests.delete_topics(*_by_id(n, "t")),
        "by id",
        kinds={"t": PLAIN_KINDS},
        others="describe t, delete cluster",
        is_fresh=True,
    ),
    Request(
        "delete_topics",
        (5,),
        "delete t, delete u",
        lambda n: requests.delete_topics(n["t"], n["u"]),
        "two of them",
        kinds={"u": PLAIN_KINDS},
        is_fresh=True,
    ),
)

REQUESTS: Sequence[Request] = (
    *PRODUCE,
    *FETCH,
    *OFFSETS,
    *METADATA,
    *CREATION,
    *DELETION,
)
