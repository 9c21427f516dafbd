"""Request sequences at the group coordinator, in legal and illegal states."""

from __future__ import annotations

from typing import Any

from tests.oracle.tracer import Tracer
from tests.support.cluster import GROUP, Cluster
from tests.support.raw import Answer

PROTOCOLS = [{"name": "range", "metadata": b"\0\0\0\0\0\0\xff\xff\xff\xff"}]
OTHER = [{"name": "other", "metadata": b"x"}]

NOBODYS_ID = 1 << 40
"""A producer id that no producer has; a small id might belong to one."""

TIMEOUT_MS = 60_000
"""Session and rebalance timeout, long enough that a stall of the machine expires no member."""


def join(t: Tracer, version: int, group: str, member: str = "", **more: Any) -> Answer:
    body: dict[str, Any] = {
        "group_id": group,
        "member_id": member,
        "session_timeout": TIMEOUT_MS,
        "rebalance_timeout": TIMEOUT_MS,
        "protocol_type": "consumer",
        "protocols": PROTOCOLS,
        **more,
    }
    return t("join_group", version, **body)


def stable(t: Tracer, group: str, version: int = 5, **more: Any) -> Answer:
    """Join and sync one member; return its JoinGroup response."""
    joined = join(t, version, group, **more)
    if joined["error_code"] == "member_id_required":
        joined = join(t, version, group, joined["member_id"], **more)
    t(
        "sync_group",
        3,
        group_id=group,
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
        assignments=[{"member_id": joined["member_id"], "assignment": b"mine"}],
    )
    return joined


def ready(t: Tracer, *groups: str) -> None:
    for group in groups:
        t.cluster.coordinator(group, GROUP)


def every_join_version(t: Tracer) -> None:
    for version in range(10):
        group = f"join-v{version}"
        ready(t, group)
        joined = join(t, version, group)
        if version >= 4:
            joined = join(t, version, group, joined["member_id"])
        for sync in range(6):
            t(
                "sync_group",
                sync,
                group_id=group,
                generation_id=joined["generation_id"],
                member_id=joined["member_id"],
                protocol_type="consumer",
                protocol_name="range",
                assignments=[{"member_id": joined["member_id"], "assignment": b"a"}],
            )
        for beat in range(5):
            t(
                "heartbeat",
                beat,
                group_id=group,
                generation_id=joined["generation_id"],
                member_id=joined["member_id"],
            )
        # The leader's rejoin starts the next generation, and completes it if it is the only member.
        join(t, version, group, joined["member_id"])
        t(
            "leave_group",
            min(version, 5),
            group_id=group,
            member_id=joined["member_id"],
            members=[{"member_id": joined["member_id"], "group_instance_id": None}],
        )


def join_errors(t: Tracer) -> None:
    ready(t, "je", "je-static")
    join(t, 5, "")
    join(t, 5, "je", session_timeout=1)
    join(t, 5, "je", session_timeout=1_800_001)
    join(t, 5, "je", "no-such-member")
    join(t, 5, "je", protocols=[])
    join(t, 5, "je", protocol_type="")
    join(t, 5, "je", "no-such-member", group_instance_id="i")
    joined = stable(t, "je")
    join(t, 5, "je", protocols=OTHER)
    join(t, 5, "je", protocol_type="connect")
    join(t, 5, "je", "no-such-member")
    join(t, 5, "je", joined["member_id"], group_instance_id="unknown-instance")
    for version in (5, 7, 9):
        join(t, version, "je", joined["member_id"], protocols=OTHER)
    one = stable(t, "je-static", group_instance_id="i")
    join(t, 5, "je-static", "wrong-id", group_instance_id="i")
    join(t, 5, "je-static", one["member_id"], group_instance_id="j")
    two = join(t, 5, "je-static", group_instance_id="i")
    for member in (one, two):
        t(
            "heartbeat",
            3,
            group_id="je-static",
            generation_id=1,
            member_id=member["member_id"],
            group_instance_id="i",
        )
    for version in (5, 8, 9):
        join(t, version, "je-static", group_instance_id="i")


def calls_of(t: Tracer, group: str, generation: int, member: str, instance: str | None) -> None:
    """Send every request of a member, with the given identity."""
    who = {
        "group_id": group,
        "generation_id": generation,
        "member_id": member,
        "group_instance_id": instance,
    }
    t("heartbeat", 3, **who)
    t("sync_group", 3, **who)
    t("sync_group", 5, **who, protocol_type="consumer", protocol_name="range")
    for version in (2, 5, 8, 9):
        t(
            "offset_commit",
            version,
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member,
            group_instance_id=instance,
            retention_time=-1,
            topics=[OFFSET],
        )
    t(
        "txn_offset_commit",
        3,
        **who,
        transactional_id="nobody",
        producer_id=NOBODYS_ID,
        producer_epoch=0,
        topics=[OFFSET],
    )


OFFSET = {
    "name": "groups",
    "partitions": [
        {
            "partition_index": 0,
            "committed_offset": 3,
            "committed_leader_epoch": -1,
            "committed_metadata": "m",
        }
    ],
}


def wrong_identities_in_every_state(t: Tracer) -> None:
    t.cluster.create_topic("groups")
    t.cluster.init_producer("nobody")
    ready(t, "missing", "empty", "completing", "stable", "")

    def all_kinds(group: str, generation: int, member: str) -> None:
        calls_of(t, group, generation, member, None)
        calls_of(t, group, generation, "stranger", None)
        calls_of(t, group, generation + 1, member, None)
        calls_of(t, group, generation, member, "no-such-instance")
        calls_of(t, group, -1, "", None)

    all_kinds("", 1, "x")
    all_kinds("missing", 1, "x")

    joined = stable(t, "empty")
    t("leave_group", 1, group_id="empty", member_id=joined["member_id"])
    all_kinds("empty", joined["generation_id"], joined["member_id"])

    joined = join(t, 3, "completing")
    t(
        "heartbeat",
        3,
        group_id="completing",
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
    )
    for version in (2, 5, 8, 9):
        t(
            "offset_commit",
            version,
            group_id="completing",
            generation_id_or_member_epoch=joined["generation_id"],
            member_id=joined["member_id"],
            retention_time=-1,
            topics=[OFFSET],
        )

    joined = stable(t, "stable")
    all_kinds("stable", joined["generation_id"], joined["member_id"])
    t(
        "sync_group",
        5,
        group_id="stable",
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
        protocol_type="connect",
        protocol_name="range",
    )
    t(
        "sync_group",
        5,
        group_id="stable",
        generation_id=joined["generation_id"],
        member_id=joined["member_id"],
        protocol_type="consumer",
        protocol_name="other",
    )


def a_rebalance_by_hand(t: Tracer) -> None:
    """Take two members on two connections through every phase of a rebalance."""
    ready(t, "two")
    first = stable(t, "two", 5)
    with Cluster(t.bootstrap) as other:
        body = {
            "group_id": "two",
            "session_timeout": TIMEOUT_MS,
            "rebalance_timeout": TIMEOUT_MS,
            "protocol_type": "consumer",
            "protocols": PROTOCOLS,
        }
        second = other.call("join_group", 5, **body)
        t.note("the second is given an id", second)
        other.send("join_group", 5, **body, member_id=second["member_id"])
        me = {"group_id": "two", "generation_id": 1, "member_id": first["member_id"]}
        while t.quietly("heartbeat", 3, **me)["error_code"] == "none":
            pass
        t("heartbeat", 3, **me)
        t("sync_group", 3, **me)
        t(
            "offset_commit",
            7,
            group_id="two",
            generation_id_or_member_epoch=1,
            member_id=first["member_id"],
            topics=[OFFSET],
        )
        t("describe_groups", 4, groups=["two"])
        again = join(t, 5, "two", first["member_id"])
        t.note("the second has joined", other.receive())
        t("heartbeat", 3, **{**me, "generation_id": 1})
        t("heartbeat", 3, **{**me, "generation_id": 2})
        t("describe_groups", 4, groups=["two"])
        other.send("sync_group", 3, group_id="two", generation_id=2, member_id=second["member_id"])
        t(
            "sync_group",
            3,
            group_id="two",
            generation_id=2,
            member_id=first["member_id"],
            assignments=[{"member_id": first["member_id"], "assignment": b"one"}],
        )
        # A member without an assignment from the leader gets an empty one.
        t.note("the second has synced", other.receive())
        t.note("leader", again["leader"] == first["member_id"])
        # A follower's unchanged rejoin does not start a rebalance.
        t.note(
            "an unchanged follower",
            other.call("join_group", 5, **body, member_id=second["member_id"]),
        )
        t("heartbeat", 3, **{**me, "generation_id": 2})


def _error(client: Cluster) -> str:
    """Return the error of the next response; Apache Kafka never sends some of them."""
    try:
        return str(client.receive()["error_code"])
    except TimeoutError:
        return "no answer"


def asking_again_while_one_waits(t: Tracer) -> None:
    """A second JoinGroup or SyncGroup of one member replaces the waiting one."""
    ready(t, "twice")
    first = stable(t, "twice", 5)
    with Cluster(t.bootstrap, deadline_s=5) as old, Cluster(t.bootstrap) as new:
        body = {"group_id": "twice", "session_timeout": TIMEOUT_MS, "rebalance_timeout": TIMEOUT_MS}
        body |= {"protocol_type": "consumer", "protocols": PROTOCOLS}
        second = new.call("join_group", 5, **body)["member_id"]
        old.send("join_group", 5, **body, member_id=second)
        me = {"group_id": "twice", "member_id": first["member_id"]}
        while t.quietly("heartbeat", 3, **me, generation_id=1)["error_code"] == "none":
            pass
        new.send("join_group", 5, **body, member_id=second)
        t.note("the older JoinGroup", _error(old))
        join(t, 5, "twice", first["member_id"])
        t.note("the newer one", new.receive())
    with Cluster(t.bootstrap, deadline_s=5) as old, Cluster(t.bootstrap) as new:
        sync = {"group_id": "twice", "generation_id": 2}
        for client in (old, new):
            client.send("sync_group", 3, **sync, member_id=second)
            t("describe_groups", 4, groups=["twice"])
        t.note("the older SyncGroup", _error(old))
        t("sync_group", 3, **sync, member_id=first["member_id"], assignments=[])
        t.note("the newer one", new.receive())


def a_protocol_without_a_name(t: Tracer) -> None:
    nameless = [{"name": "", "metadata": b""}]
    for version in (3, 5, 6, 7, 9):
        group = f"nameless-v{version}"
        ready(t, group)
        joined = join(t, version, group, protocols=nameless)
        if version >= 4:
            joined = join(t, version, group, joined["member_id"], protocols=nameless)
        for name in ("", None):
            t(
                "sync_group",
                5,
                group_id=group,
                generation_id=joined["generation_id"],
                member_id=joined["member_id"],
                protocol_type="consumer",
                protocol_name=name,
            )


def leaving(t: Tracer) -> None:
    ready(t, "leave", "leave-missing")
    for version in range(6):
        t(
            "leave_group",
            version,
            group_id="leave-missing",
            member_id="m",
            members=[{"member_id": "m", "group_instance_id": None}],
        )
    t("leave_group", 3, group_id="", members=[])
    t("leave_group", 0, group_id="", member_id="")
    static = stable(t, "leave", group_instance_id="i")
    t(
        "leave_group",
        3,
        group_id="leave",
        members=[
            {"member_id": "wrong", "group_instance_id": "i"},
            {"member_id": "", "group_instance_id": "none"},
            {"member_id": "stranger", "group_instance_id": None},
            {"member_id": "", "group_instance_id": "i"},
            {"member_id": static["member_id"], "group_instance_id": None},
        ],
    )
    pending = join(t, 5, "leave")
    gone = [{"member_id": pending["member_id"], "group_instance_id": None}]
    t("leave_group", 3, group_id="leave", members=gone)
    t("leave_group", 3, group_id="leave", members=gone)
    join(t, 5, "leave", pending["member_id"])


def _commit_by_every_version(t: Tracer) -> None:
    for version in range(2, 10):
        t(
            "offset_commit",
            version,
            group_id="simple",
            generation_id_or_member_epoch=-1,
            retention_time=-1,
            topics=[
                {
                    "name": "offsets",
                    "partitions": [
                        {
                            "partition_index": index,
                            "committed_offset": version * 10 + index,
                            "committed_leader_epoch": 0,
                            "committed_metadata": text,
                        }
                        for index, text in ((0, "m"), (1, None), (7, "x"), (0, "y" * 4097))
                    ],
                },
                {"name": "no-such-topic", "partitions": [{"partition_index": 0}]},
            ],
        )


def _fetch_by_every_version(t: Tracer) -> None:
    for version in range(1, 8):
        for group in ("simple", "nothing"):
            t(
                "offset_fetch",
                version,
                group_id=group,
                topics=[
                    {"name": "offsets", "partition_indexes": [0, 1, 5]},
                    {"name": "no-such-topic", "partition_indexes": [0]},
                ],
                require_stable=version >= 7,
            )
            if version >= 2:
                t("offset_fetch", version, group_id=group, topics=None)
            t("offset_fetch", version, group_id=group, topics=[])
    for version in (8, 9):
        t(
            "offset_fetch",
            version,
            groups=[
                {
                    "group_id": group,
                    "member_epoch": -1,
                    "member_id": None,
                    "topics": [{"name": "offsets", "partition_indexes": [0, 1, 5]}],
                }
                for group in ("simple", "nothing")
            ],
        )
        t("offset_fetch", version, groups=[{"group_id": "simple", "topics": None}])


def committing_and_fetching_offsets(t: Tracer) -> None:
    t.cluster.create_topic("offsets", 2)
    topic_id = t.cluster.topic_id("offsets")
    ready(t, "simple", "nothing")
    _commit_by_every_version(t)
    _fetch_by_every_version(t)
    t(
        "offset_commit",
        10,
        group_id="simple",
        generation_id_or_member_epoch=-1,
        topics=[
            {
                "topic_id": topic_id,
                "partitions": [{"partition_index": 0, "committed_offset": 77}],
            },
            {
                "topic_id": type(topic_id)(int=99),
                "partitions": [{"partition_index": 0, "committed_offset": 77}],
            },
        ],
    )
    t(
        "offset_fetch",
        10,
        groups=[
            {
                "group_id": "simple",
                "topics": [
                    {"topic_id": topic_id, "partition_indexes": [0, 1]},
                    {"topic_id": type(topic_id)(int=99), "partition_indexes": [0]},
                ],
            }
        ],
    )
    t(
        "offset_delete",
        0,
        group_id="simple",
        topics=[
            {"name": "offsets", "partitions": [{"partition_index": i} for i in (0, 9)]},
            {"name": "no-such-topic", "partitions": [{"partition_index": 0}]},
        ],
    )
    t("offset_delete", 0, group_id="nothing", topics=[])
    t("offset_delete", 0, group_id="", topics=[])
    t("offset_fetch", 5, group_id="simple", topics=None)


def describing_listing_deleting(t: Tracer) -> None:
    ready(t, "d-stable", "d-empty", "d-none")
    stable(t, "d-stable")
    joined = stable(t, "d-empty")
    t("leave_group", 1, group_id="d-empty", member_id=joined["member_id"])
    for version in range(7):
        t("describe_groups", version, groups=["d-stable", "d-empty", "d-none", ""])
    for version in range(3, 7):
        asked = {"groups": ["d-stable", "d-none"], "include_authorized_operations": True}
        t("describe_groups", version, **asked)
    for version in range(6):
        answer = t.quietly("list_groups", version)
        t.note(
            f"list_groups v{version}",
            sorted(
                (tuple(g.items()) for g in answer["groups"] if g["group_id"].startswith("d-")),
            ),
        )
    for states, types in ((["Stable"], []), (["empty"], []), (["Nonsense"], []), ([], ["Classic"])):
        answer = t.quietly("list_groups", 5, states_filter=states, types_filter=types)
        t.note(
            f"list_groups of {states} {types}",
            [
                answer["error_code"],
                *sorted(g["group_id"] for g in answer["groups"] if g["group_id"].startswith("d-")),
            ],
        )
    for version in range(3):
        t("delete_groups", version, groups_names=["d-stable", "d-none", ""])
    t("delete_groups", 2, groups_names=["d-empty"])
    t("delete_groups", 2, groups_names=["d-empty"])
    t("describe_groups", 5, groups=["d-empty"])


TRACES = [
    every_join_version,
    join_errors,
    wrong_identities_in_every_state,
    a_rebalance_by_hand,
    asking_again_while_one_waits,
    a_protocol_without_a_name,
    leaving,
    committing_and_fetching_offsets,
    describing_listing_deleting,
]
