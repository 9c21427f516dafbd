"""Requests of the matrix: groups and transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, UNNAMED, Body, Names, Request
from tests.support import requests

KINDS: Final = (HERE, ABSENT)
TRANSACTION, SHARE = 1, 2


def _offsets(n: Names, topics: str) -> list[Body]:
    return [
        requests.offset_commit_topic(n[slot], 0, topic_id=n.id(slot), committed_offset=1)
        for slot in topics
    ]


def _committed(n: Names, topics: str) -> Body:
    return requests.offset_commit(n["g"], *_offsets(n, topics))


def _fetched(n: Names, groups: str, topics: str) -> Body:
    rows = [requests.offset_fetch_topic(n[slot], 0, topic_id=n.id(slot)) for slot in topics]
    return requests.offset_fetch(*(requests.offset_fetch_group(n[slot], *rows) for slot in groups))


def _joined(n: Names, member: str = "", **fields: Any) -> Body:
    return requests.join_group(n["g"], member, **fields)


MEMBER: Final = "11111111-2222-4333-8444-555555555555"


def _added(n: Names, topics: str, **fields: Any) -> Body:
    rows = [(n[slot], [0]) for slot in topics]
    return requests.add_partitions_to_txn(
        requests.added_partitions(n["x"], n.producer("x"), *rows, **fields)
    )


def _committed_in_transaction(n: Names, topics: str) -> Body:
    return requests.txn_offset_commit(n["x"], n.producer("x"), n["g"], *_offsets(n, topics))


COMMITS: Sequence[Request] = (
    Request(
        "offset_commit",
        (2, 8, 9, 10),
        "read g, read t",
        lambda n: _committed(n, "t"),
        kinds={"g": KINDS, "t": KINDS},
    ),
    Request(
        "offset_commit",
        (8, 10),
        "read g, read t, read u",
        lambda n: _committed(n, "tu"),
        "of two topics",
        kinds={"u": KINDS},
    ),
    Request(
        "offset_commit",
        (9,),
        "read g, read t",
        lambda n: _committed(n, "t"),
        "of a group of its own",
        is_fresh=True,
        kinds={"g": (ABSENT,)},
    ),
    Request(
        "offset_fetch",
        (1, 5, 7, 8, 9, 10),
        "describe g, describe t",
        lambda n: _fetched(n, "g", "t"),
        kinds={"g": KINDS, "t": KINDS},
    ),
    Request(
        "offset_fetch",
        (2, 7, 9, 10),
        "describe g, describe t, describe u",
        lambda n: requests.offset_fetch(n["g"]),
        "of all topics",
        kinds={"g": KINDS},
    ),
    Request(
        "offset_fetch",
        (8, 10),
        "describe g, describe h, describe t",
        lambda n: _fetched(n, "gh", "tu"),
        "of two groups",
        kinds={"h": KINDS, "u": (HERE,)},
    ),
    Request(
        "offset_delete",
        (0,),
        "delete g, read t, read u",
        lambda n: requests.offset_delete(
            n["g"], *(requests.offset_delete_topic(n[slot], 0) for slot in "tu")
        ),
        kinds={"g": KINDS, "u": KINDS},
        is_fresh=True,
    ),
)

MEMBERS: Sequence[Request] = (
    Request(
        "find_coordinator",
        (0, 3, 4, 6),
        "describe g",
        lambda n: requests.find_coordinator(n["g"]),
        kinds={"g": (*KINDS, UNNAMED)},
    ),
    Request(
        "find_coordinator",
        (4,),
        "describe g, describe h",
        lambda n: requests.find_coordinator(n["g"], n["h"]),
        "of two groups",
    ),
    Request(
        "find_coordinator",
        (1, 4, 6),
        "describe x",
        lambda n: requests.find_coordinator(n["x"], key_type=TRANSACTION),
        "of a transaction",
        kinds={"x": KINDS},
    ),
    Request(
        "find_coordinator",
        (6,),
        "cluster_action cluster",
        lambda n: requests.find_coordinator(f"{n['g']}:{n.id('t')}:0", key_type=SHARE),
        "of a share group",
        kinds={"g": (HERE,), "t": (HERE,)},
        others="describe g",
    ),
    Request(
        "join_group",
        (0, 2, 4, 9),
        "read g",
        _joined,
        kinds={"g": (HERE, ABSENT, UNNAMED)},
        is_fresh=True,
    ),
    Request(
        "join_group",
        (5, 9),
        "read g",
        lambda n: _joined(n, "nobody", group_instance_id="i"),
        "by nobody",
        kinds={"g": KINDS},
    ),
    Request(
        "sync_group",
        (0, 3, 5),
        "read g",
        lambda n: requests.sync_group(
            n["g"], 1, "nobody", protocol_type="consumer", protocol_name="p"
        ),
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "heartbeat",
        (0, 3, 4),
        "read g",
        lambda n: requests.heartbeat(n["g"], 1, "nobody"),
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "leave_group",
        (0, 2, 3, 5),
        "read g",
        lambda n: requests.leave_group(n["g"], "nobody"),
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "consumer_group_heartbeat",
        (0, 1),
        "read g, describe t, describe u",
        lambda n: requests.join_consumer_group(n["g"], MEMBER, n["t"], n["u"]),
        kinds={"g": (ABSENT, HERE), "u": KINDS},
        is_fresh=True,
    ),
    Request(
        "consumer_group_heartbeat",
        (1,),
        "read g",
        lambda n: requests.consumer_group_heartbeat(n["g"], MEMBER, 7),
        "without topics",
        kinds={"g": KINDS},
    ),
    Request(
        "consumer_group_heartbeat",
        (1,),
        "read k, describe t",
        lambda n: requests.join_consumer_group(n["k"], n.member, n["t"], member_epoch=77),
        "of a member with a wrong epoch",
    ),
    Request(
        "share_group_heartbeat",
        (1,),
        "read g, describe t, describe u",
        lambda n: requests.join_share_group(n["g"], MEMBER, n["t"], n["u"]),
        kinds={"g": (ABSENT, HERE), "u": KINDS},
        is_fresh=True,
    ),
    Request(
        "share_group_heartbeat",
        (1,),
        "read g",
        lambda n: requests.share_group_heartbeat(n["g"], MEMBER, 7),
        "without topics",
        kinds={"g": KINDS},
    ),
)

GROUPS: Sequence[Request] = (
    Request(
        "describe_groups",
        (0, 3, 5, 6),
        "describe g, describe h",
        lambda n: requests.describe_groups(n["g"], n["h"], include_authorized_operations=True),
        kinds={"g": (*KINDS, UNNAMED)},
    ),
    Request(
        "describe_groups",
        (5,),
        "describe c",
        lambda n: requests.describe_groups(n["c"], include_authorized_operations=True),
        "with a member",
    ),
    Request(
        "consumer_group_describe",
        (0, 1),
        "describe k, describe t, describe u",
        lambda n: requests.consumer_group_describe(n["k"], include_authorized_operations=True),
        kinds={"k": KINDS},
    ),
    Request(
        "consumer_group_describe",
        (1,),
        "describe k, describe g, describe t, describe u",
        lambda n: requests.consumer_group_describe(
            n["g"], n["k"], include_authorized_operations=True
        ),
        "of a classic group as well",
        kinds={"g": KINDS},
    ),
    Request(
        "share_group_describe",
        (1,),
        "describe g, describe h",
        lambda n: requests.share_group_describe(n["g"], n["h"]),
        kinds={"g": KINDS},
    ),
    Request(
        "describe_share_group_offsets",
        (0, 1),
        "describe g, describe t, describe u",
        lambda n: requests.describe_share_group_offsets(n["g"], (n["t"], [0]), (n["u"], [0])),
        kinds={"g": KINDS, "u": KINDS},
    ),
    Request(
        "alter_share_group_offsets",
        (0,),
        "read g, read t",
        lambda n: requests.alter_share_group_offsets(n["g"], n["t"], {0: 0}),
        kinds={"g": (ABSENT,), "t": KINDS},
        is_fresh=True,
    ),
    Request(
        "delete_share_group_offsets",
        (0,),
        "delete g",
        lambda n: requests.delete_share_group_offsets(n["g"], n["t"]),
        kinds={"g": KINDS, "t": (HERE,)},
    ),
    Request(
        "list_groups",
        (0, 3, 4, 5),
        "describe g, describe k",
        lambda _: requests.list_groups(),
        others="describe cluster",
    ),
    Request(
        "delete_groups",
        (0, 1, 2, 3),
        "delete g, delete h",
        lambda n: requests.delete_groups(n["g"], n["h"]),
        kinds={"h": KINDS},
        is_fresh=True,
    ),
    Request(
        "delete_groups",
        (3,),
        "delete c",
        lambda n: requests.delete_groups(n["c"]),
        "with a member",
    ),
)

TRANSACTIONS: Sequence[Request] = (
    Request(
        "init_producer_id",
        (0, 2, 4, 5),
        "write x",
        lambda n: requests.init_producer_id(n["x"]),
        kinds={"x": (*KINDS, UNNAMED)},
        is_fresh=True,
    ),
    Request(
        "init_producer_id",
        (4, 5),
        "write x",
        lambda n: requests.init_producer_id(n["x"], n.producer("x")),
        "again",
        kinds={"x": KINDS},
        is_fresh=True,
    ),
    Request(
        "init_producer_id",
        (0, 4, 5),
        "idempotent_write cluster",
        lambda _: requests.init_producer_id(),
        "without transactions",
        kinds={"t": (HERE, ABSENT)},
        others="write t, read t",
    ),
    Request(
        "add_partitions_to_txn",
        (0, 3),
        "write x, write t, write u",
        lambda n: _added(n, "tu"),
        kinds={"u": KINDS},
        is_fresh=True,
    ),
    Request(
        "add_partitions_to_txn",
        (3,),
        "write x, write t",
        lambda n: _added(n, "t"),
        "of nobody's transaction",
        kinds={"x": (ABSENT,), "t": KINDS},
    ),
    Request(
        "add_partitions_to_txn",
        (3,),
        "write x, write v",
        lambda n: _added(n, "tv"),
        "of an internal topic",
        kinds={"t": ("internal",)},
        others="write t",
    ),
    Request(
        "add_partitions_to_txn",
        (4, 5),
        "cluster_action cluster",
        lambda n: _added(n, "t", verify_only=True),
        "by a broker that verifies",
        kinds={"x": (HERE, ABSENT), "t": (HERE,)},
        others="write x",
    ),
    Request(
        "add_partitions_to_txn",
        (4, 5),
        "cluster_action cluster",
        lambda n: _added(n, "t", verify_only=False),
        "by a broker",
        kinds={"x": (HERE, ABSENT), "t": (HERE,)},
        others="write x",
        is_fresh=True,
    ),
    Request(
        "add_offsets_to_txn",
        (0, 3, 4),
        "write x, read g",
        lambda n: requests.add_offsets_to_txn(n["x"], n.producer("x"), n["g"]),
        kinds={"x": KINDS, "g": KINDS},
        is_fresh=True,
    ),
    Request(
        "txn_offset_commit",
        (0, 3, 4, 5, 6),
        "write x, read g, read t, read u",
        lambda n: _committed_in_transaction(n, "tu"),
        kinds={"u": KINDS},
        is_fresh=True,
    ),
    Request(
        "txn_offset_commit",
        (3, 5, 6),
        "write x, read g, read t",
        lambda n: _committed_in_transaction(n, "t"),
        "of one topic",
        kinds={"g": KINDS, "x": KINDS},
        is_fresh=True,
    ),
    Request(
        "end_txn",
        (0, 3, 5),
        "write x",
        lambda n: requests.end_txn(n["x"], n.producer("x")),
        kinds={"x": KINDS},
        is_fresh=True,
    ),
    Request(
        "write_txn_markers",
        (1, 2),
        "alter cluster",
        lambda n: requests.write_txn_markers(
            requests.marker(n.producer("x"), requests.indexes_of(n["t"], 0))
        ),
        kinds={"x": (HERE,), "t": KINDS},
        others="cluster_action cluster",
        is_fresh=True,
    ),
    Request(
        "describe_transactions",
        (0,),
        "describe x, describe v, describe w, describe y",
        lambda n: requests.describe_transactions(n["x"], n["y"]),
        kinds={"y": KINDS},
    ),
    Request(
        "list_transactions",
        (0, 1, 2),
        "describe x, describe y",
        lambda _: requests.list_transactions(),
    ),
)

REQUESTS: Sequence[Request] = (*COMMITS, *MEMBERS, *GROUPS, *TRANSACTIONS)
