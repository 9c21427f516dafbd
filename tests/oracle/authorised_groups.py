"""Requests of the matrix: groups and transactions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tests.oracle.authorisation import ABSENT, HERE, UNNAMED, Body, Names, Request

KINDS: Final = (HERE, ABSENT)
GROUP, TRANSACTION, SHARE = 0, 1, 2


def _committed(n: Names, topics: str, group: str = "g") -> Body:
    rows = [
        {
            "name": n[one],
            "topic_id": n.id(one),
            "partitions": [
                {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}
            ],
        }
        for one in topics
    ]
    return {"group_id": n[group], "generation_id_or_member_epoch": -1, "topics": rows}


def _fetched(n: Names, groups: str, topics: str | None) -> Body:
    rows = None
    if topics is not None:
        rows = [{"name": n[one], "topic_id": n.id(one), "partition_indexes": [0]} for one in topics]
    return {
        "group_id": n[groups[0]],
        "topics": rows,
        "groups": [{"group_id": n[one], "topics": rows, "member_epoch": -1} for one in groups],
    }


def _found(n: Names, slots: str, kind: int) -> Body:
    names = [n[one] for one in slots]
    return {"key": names[0], "key_type": kind, "coordinator_keys": names}


def _joined(n: Names, **how: Any) -> Body:
    return {
        "group_id": n["g"],
        "session_timeout": 60_000,
        "rebalance_timeout": 60_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "p", "metadata": b"m"}],
        **how,
    }


def _beat(n: Names, topics: str, group: str = "g", **how: Any) -> Body:
    return {
        "group_id": n[group],
        "member_id": "11111111-2222-4333-8444-555555555555",
        "member_epoch": 0,
        "rebalance_timeout": 60_000,
        "subscribed_topic_names": [n[one] for one in topics],
        "topic_partitions": [],
        **how,
    }


def _in_transaction(n: Names, **more: Any) -> Body:
    producer_id, epoch = n.producer("x")
    return {
        "transactional_id": n["x"],
        "producer_id": producer_id,
        "producer_epoch": epoch,
        **more,
    }


def _added(n: Names, topics: str) -> Body:
    producer_id, epoch = n.producer("x")
    rows = [{"name": n[one], "partitions": [0]} for one in topics]
    return {
        "v3_and_below_transactional_id": n["x"],
        "v3_and_below_producer_id": producer_id,
        "v3_and_below_producer_epoch": epoch,
        "v3_and_below_topics": rows,
    }


def _added_by_a_broker(n: Names, *, verify_only: bool) -> Body:
    row = {
        **_in_transaction(n),
        "verify_only": verify_only,
        "topics": [{"name": n["t"], "partitions": [0]}],
    }
    return {"transactions": [row]}


def _committed_in_transaction(n: Names, topics: str) -> Body:
    rows = [
        {"name": n[one], "partitions": [{"partition_index": 0, "committed_offset": 1}]}
        for one in topics
    ]
    return {**_in_transaction(n), "group_id": n["g"], "generation_id": -1, "topics": rows}


def _marked(n: Names) -> Body:
    producer_id, epoch = n.producer("x")
    marker = {
        "producer_id": producer_id,
        "producer_epoch": epoch,
        "transaction_result": False,
        "topics": [{"name": n["t"], "partition_indexes": [0]}],
        "coordinator_epoch": 0,
    }
    return {"markers": [marker]}


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
        lambda n: _fetched(n, "g", None),
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
        lambda n: {
            "group_id": n["g"],
            "topics": [{"name": n[one], "partitions": [{"partition_index": 0}]} for one in "tu"],
        },
        kinds={"g": KINDS, "u": KINDS},
        is_fresh=True,
    ),
)

MEMBERS: Sequence[Request] = (
    Request(
        "find_coordinator",
        (0, 3, 4, 6),
        "describe g",
        lambda n: _found(n, "g", GROUP),
        kinds={"g": (*KINDS, UNNAMED)},
    ),
    Request(
        "find_coordinator",
        (4,),
        "describe g, describe h",
        lambda n: _found(n, "gh", GROUP),
        "of two groups",
    ),
    Request(
        "find_coordinator",
        (1, 4, 6),
        "describe x",
        lambda n: _found(n, "x", TRANSACTION),
        "of a transaction",
        kinds={"x": KINDS},
    ),
    Request(
        "find_coordinator",
        (6,),
        "cluster_action cluster",
        lambda n: {
            **_found(n, "g", SHARE),
            "coordinator_keys": [f"{n['g']}:{n.id('t')}:0"],
        },
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
        lambda n: _joined(n, member_id="nobody", group_instance_id="i"),
        "by nobody",
        kinds={"g": KINDS},
    ),
    Request(
        "sync_group",
        (0, 3, 5),
        "read g",
        lambda n: {
            "group_id": n["g"],
            "generation_id": 1,
            "member_id": "nobody",
            "protocol_type": "consumer",
            "protocol_name": "p",
        },
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "heartbeat",
        (0, 3, 4),
        "read g",
        lambda n: {"group_id": n["g"], "generation_id": 1, "member_id": "nobody"},
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "leave_group",
        (0, 2, 3, 5),
        "read g",
        lambda n: {
            "group_id": n["g"],
            "member_id": "nobody",
            "members": [{"member_id": "nobody"}],
        },
        kinds={"g": (HERE, ABSENT, UNNAMED)},
    ),
    Request(
        "consumer_group_heartbeat",
        (0, 1),
        "read g, describe t, describe u",
        lambda n: _beat(n, "tu"),
        kinds={"g": (ABSENT, HERE), "u": KINDS},
        is_fresh=True,
    ),
    Request(
        "consumer_group_heartbeat",
        (1,),
        "read g",
        lambda n: _beat(n, "", subscribed_topic_names=None, member_epoch=7),
        "without topics",
        kinds={"g": KINDS},
    ),
    Request(
        "consumer_group_heartbeat",
        (1,),
        "read k, describe t",
        lambda n: {**_beat(n, "t", "k"), "member_id": n.member, "member_epoch": 77},
        "of a member with a wrong epoch",
    ),
)

GROUPS: Sequence[Request] = (
    Request(
        "describe_groups",
        (0, 3, 5, 6),
        "describe g, describe h",
        lambda n: {
            "groups": [n["g"], n["h"]],
            "include_authorized_operations": True,
        },
        kinds={"g": (*KINDS, UNNAMED)},
    ),
    Request(
        "describe_groups",
        (5,),
        "describe c",
        lambda n: {"groups": [n["c"]], "include_authorized_operations": True},
        "with a member",
    ),
    Request(
        "consumer_group_describe",
        (0, 1),
        "describe k, describe t, describe u",
        lambda n: {"group_ids": [n["k"]], "include_authorized_operations": True},
        kinds={"k": KINDS},
    ),
    Request(
        "consumer_group_describe",
        (1,),
        "describe k, describe g, describe t, describe u",
        lambda n: {"group_ids": [n["g"], n["k"]], "include_authorized_operations": True},
        "of a classic group as well",
        kinds={"g": KINDS},
    ),
    Request(
        "list_groups",
        (0, 3, 4, 5),
        "describe g, describe k",
        lambda _: {},
        others="describe cluster",
    ),
    Request(
        "delete_groups",
        (0, 1, 2),
        "delete g, delete h",
        lambda n: {"groups_names": [n["g"], n["h"]]},
        kinds={"h": KINDS},
        is_fresh=True,
    ),
    Request(
        "delete_groups",
        (2,),
        "delete c",
        lambda n: {"groups_names": [n["c"]]},
        "with a member",
    ),
)

TRANSACTIONS: Sequence[Request] = (
    Request(
        "init_producer_id",
        (0, 2, 4, 5),
        "write x",
        lambda n: {
            "transactional_id": n["x"],
            "transaction_timeout": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        },
        kinds={"x": (*KINDS, UNNAMED)},
        is_fresh=True,
    ),
    Request(
        "init_producer_id",
        (4, 5),
        "write x",
        lambda n: {**_in_transaction(n), "transaction_timeout": 60_000},
        "again",
        kinds={"x": KINDS},
        is_fresh=True,
    ),
    Request(
        "init_producer_id",
        (0, 4, 5),
        "idempotent_write cluster",
        lambda _: {
            "transactional_id": None,
            "transaction_timeout": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        },
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
        lambda n: _added_by_a_broker(n, verify_only=True),
        "by a broker that verifies",
        kinds={"x": (HERE, ABSENT), "t": (HERE,)},
        others="write x",
    ),
    Request(
        "add_partitions_to_txn",
        (4, 5),
        "cluster_action cluster",
        lambda n: _added_by_a_broker(n, verify_only=False),
        "by a broker",
        kinds={"x": (HERE, ABSENT), "t": (HERE,)},
        others="write x",
        is_fresh=True,
    ),
    Request(
        "add_offsets_to_txn",
        (0, 3, 4),
        "write x, read g",
        lambda n: _in_transaction(n, group_id=n["g"]),
        kinds={"x": KINDS, "g": KINDS},
        is_fresh=True,
    ),
    Request(
        "txn_offset_commit",
        (0, 3, 4, 5),
        "write x, read g, read t, read u",
        lambda n: _committed_in_transaction(n, "tu"),
        kinds={"u": KINDS},
        is_fresh=True,
    ),
    Request(
        "txn_offset_commit",
        (3, 5),
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
        lambda n: _in_transaction(n, committed=True),
        kinds={"x": KINDS},
        is_fresh=True,
    ),
    Request(
        "write_txn_markers",
        (1, 2),
        "alter cluster",
        _marked,
        kinds={"x": (HERE,), "t": KINDS},
        others="cluster_action cluster",
        is_fresh=True,
    ),
    Request(
        "describe_transactions",
        (0,),
        "describe x, describe v, describe w, describe y",
        lambda n: {"transactional_ids": [n["x"], n["y"]]},
        kinds={"y": KINDS},
    ),
    Request(
        "list_transactions",
        (0, 1, 2),
        "describe x, describe y",
        lambda _: {"duration_filter": -1},
    ),
)

REQUESTS: Sequence[Request] = (*COMMITS, *MEMBERS, *GROUPS, *TRANSACTIONS)
