"""Request sequences for the group coordinator, in legal and illegal states."""

from __future__ import annotations

import uuid
from typing import Any

from tests.oracle.tracer import Tracer
from tests.support import requests
from tests.support.cluster import GROUP, Cluster
from tests.support.raw import Answer, fitted

OTHER = [requests.join_protocol("other", b"x")]

NOBODYS_ID = 1 << 40
"""A producer id that no producer has. A small id might belong to a producer."""


def join(t: Tracer, version: int, group: str, member: str = "", **more: Any) -> Answer:
    return t("join_group", version, **requests.join_group(group, member, **more))


def sync(
    t: Tracer, version: int, group: str, joined: Answer, given: bytes | None = None, **more: Any
) -> Answer:
    """Sync a joined member; with ``given``, it is the leader, and assigns partitions to itself."""
    member = joined["member_id"]
    plan = [] if given is None else [requests.sync_assignment(member, given)]
    body = requests.sync_group(group, joined["generation_id"], member, assignments=plan, **more)
    return t("sync_group", version, **body)


def heartbeat(t: Tracer, version: int, group: str, joined: Answer, **more: Any) -> Answer:
    who = joined["generation_id"], joined["member_id"]
    return t("heartbeat", version, **requests.heartbeat(group, *who, **more))


def commit(
    t: Tracer, version: int, group: str, generation: int = -1, member: str = "", **more: Any
) -> Answer:
    """Commit :data:`OFFSET`."""
    who = {"generation_id_or_member_epoch": generation, "member_id": member}
    return t("offset_commit", version, **requests.offset_commit(group, OFFSET, **who, **more))


def stable(t: Tracer, group: str, version: int = 5, **more: Any) -> Answer:
    """Join and sync one member; return its JoinGroup response."""
    joined = join(t, version, group, **more)
    if joined["error_code"] == "member_id_required":
        joined = join(t, version, group, joined["member_id"], **more)
    sync(t, 3, group, joined, b"mine")
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
        for lower in range(6):
            sync(t, lower, group, joined, b"a", **CONSUMER)
        for lower in range(5):
            heartbeat(t, lower, group, joined)
        # When the leader rejoins, the next generation starts, which is complete if there is no
        # other member.
        join(t, version, group, joined["member_id"])
        body = requests.leave_group(group, joined["member_id"])
        t("leave_group", min(version, 5), **body)


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
    static_member = stable(t, "je-static", group_instance_id="i")
    join(t, 5, "je-static", "wrong-id", group_instance_id="i")
    join(t, 5, "je-static", static_member["member_id"], group_instance_id="j")
    two = join(t, 5, "je-static", group_instance_id="i")
    for member in (static_member, two):
        heartbeat(t, 3, "je-static", {**member, "generation_id": 1}, group_instance_id="i")
    for version in (5, 8, 9):
        join(t, version, "je-static", group_instance_id="i")


def calls_of(t: Tracer, group: str, generation: int, member: str, instance: str | None) -> None:
    """Send each request that a member may send, with the given member id and generation."""
    joined = {"generation_id": generation, "member_id": member}
    static = {"group_instance_id": instance}
    heartbeat(t, 3, group, joined, **static)
    sync(t, 3, group, joined, **static)
    sync(t, 5, group, joined, **static, **CONSUMER)
    for version in (2, 5, 8, 9):
        commit(t, version, group, generation, member, **static)
    who = "nobody", (NOBODYS_ID, 0), group
    said = {"generation": generation, "member_id": member}
    body = requests.txn_offset_commit(*who, OFFSET, **said, **static)
    t("txn_offset_commit", 3, **body)


CONSUMER = {"protocol_type": "consumer", "protocol_name": "range"}
OFFSET = requests.offset_commit_topic("groups", 0, committed_offset=3, committed_metadata="m")


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
    t("leave_group", 1, **requests.leave_group("empty", joined["member_id"]))
    all_kinds("empty", joined["generation_id"], joined["member_id"])

    joined = join(t, 3, "completing")
    heartbeat(t, 3, "completing", joined)
    for version in (2, 5, 8, 9):
        commit(t, version, "completing", joined["generation_id"], joined["member_id"])

    joined = stable(t, "stable")
    all_kinds("stable", joined["generation_id"], joined["member_id"])
    sync(t, 5, "stable", joined, protocol_type="connect", protocol_name="range")
    sync(t, 5, "stable", joined, protocol_type="consumer", protocol_name="other")


def a_rebalance_by_hand(t: Tracer) -> None:
    """Take two members, each on its own connection, through every phase of a rebalance."""
    ready(t, "two")
    first = stable(t, "two", 5)
    with Cluster(t.bootstrap) as other:
        second = other.ask("join_group", 5, requests.join_group("two"))
        t.note("the second is given an id", second)
        body = fitted("join_group", 5, requests.join_group("two", second["member_id"]))
        other.send("join_group", 5, **body)
        me = {**first, "generation_id": 1}
        mine = requests.heartbeat("two", 1, first["member_id"])
        while t.quietly("heartbeat", 3, **mine)["error_code"] == "none":
            pass
        heartbeat(t, 3, "two", me)
        sync(t, 3, "two", me)
        commit(t, 7, "two", 1, first["member_id"])
        t("describe_groups", 4, groups=["two"])
        again = join(t, 5, "two", first["member_id"])
        t.note("the second has joined", other.receive())
        heartbeat(t, 3, "two", me)
        heartbeat(t, 3, "two", {**me, "generation_id": 2})
        t("describe_groups", 4, groups=["two"])
        other.send("sync_group", 3, **requests.sync_group("two", 2, second["member_id"]))
        sync(t, 3, "two", {**me, "generation_id": 2}, b"one")
        # A member to which the leader assigns nothing gets an empty assignment.
        t.note("the second has synced", other.receive())
        t.note("leader", again["leader"] == first["member_id"])
        # If a follower rejoins without a change, no rebalance starts.
        t.note("an unchanged follower", other.call("join_group", 5, **body))
        heartbeat(t, 3, "two", {**me, "generation_id": 2})


def _error(client: Cluster) -> str:
    """Return the error of the next response. Apache Kafka never sends some of the responses."""
    try:
        return str(client.receive()["error_code"])
    except TimeoutError:
        return "no answer"


def asking_again_while_one_waits(t: Tracer) -> None:
    """A second JoinGroup or SyncGroup of a member replaces the first request, which waits."""
    ready(t, "twice")
    first = stable(t, "twice", 5)
    with Cluster(t.bootstrap, deadline_s=5) as old, Cluster(t.bootstrap) as new:
        second = new.ask("join_group", 5, requests.join_group("twice"))["member_id"]
        body = fitted("join_group", 5, requests.join_group("twice", second))
        old.send("join_group", 5, **body)
        mine = requests.heartbeat("twice", 1, first["member_id"])
        while t.quietly("heartbeat", 3, **mine)["error_code"] == "none":
            pass
        new.send("join_group", 5, **body)
        t.note("the older JoinGroup", _error(old))
        join(t, 5, "twice", first["member_id"])
        t.note("the newer one", new.receive())
    with Cluster(t.bootstrap, deadline_s=5) as old, Cluster(t.bootstrap) as new:
        for client in (old, new):
            client.send("sync_group", 3, **requests.sync_group("twice", 2, second))
            t("describe_groups", 4, groups=["twice"])
        t.note("the older SyncGroup", _error(old))
        sync(t, 3, "twice", {**first, "generation_id": 2})
        t.note("the newer one", new.receive())


def a_protocol_without_a_name(t: Tracer) -> None:
    nameless = [requests.join_protocol("", b"")]
    for version in (3, 5, 6, 7, 9):
        group = f"nameless-v{version}"
        ready(t, group)
        joined = join(t, version, group, protocols=nameless)
        if version >= 4:
            joined = join(t, version, group, joined["member_id"], protocols=nameless)
        for name in ("", None):
            sync(t, 5, group, joined, protocol_type="consumer", protocol_name=name)


def leaving(t: Tracer) -> None:
    ready(t, "leave", "leave-missing")
    for version in range(6):
        t("leave_group", version, **requests.leave_group("leave-missing", "m"))
    t("leave_group", 3, **requests.leave_group(""))
    t("leave_group", 0, **requests.leave_group("", ""))
    static = stable(t, "leave", group_instance_id="i")
    members = (
        requests.leaving_member("wrong", "i"),
        requests.leaving_member("", "none"),
        requests.leaving_member("stranger"),
        requests.leaving_member("", "i"),
        requests.leaving_member(static["member_id"]),
    )
    t("leave_group", 3, **requests.leave_group("leave", *members))
    pending = join(t, 5, "leave")
    gone = requests.leave_group("leave", pending["member_id"])
    t("leave_group", 3, **gone)
    t("leave_group", 3, **gone)
    join(t, 5, "leave", pending["member_id"])


def _commit_by_every_version(t: Tracer) -> None:
    for version in range(2, 10):
        rows = [
            {
                "partition_index": index,
                "committed_offset": version * 10 + index,
                "committed_metadata": text,
            }
            for index, text in ((0, "m"), (1, None), (7, "x"), (0, "y" * 4097))
        ]
        known = requests.offset_commit_topic("offsets", *rows, committed_leader_epoch=0)
        unknown = requests.offset_commit_topic("no-such-topic", 0)
        body = requests.offset_commit("simple", known, unknown, retention_time=-1)
        t("offset_commit", version, **body)


def _fetch_by_every_version(t: Tracer) -> None:
    known = requests.offset_fetch_topic("offsets", 0, 1, 5)
    unknown = requests.offset_fetch_topic("no-such-topic", 0)
    asked = requests.offset_fetch_group
    for version in range(1, 8):
        for group in ("simple", "nothing"):
            stable = {"require_stable": version >= 7}
            body = requests.offset_fetch(asked(group, known, unknown), **stable)
            t("offset_fetch", version, **body)
            if version >= 2:
                t("offset_fetch", version, **requests.offset_fetch(group))
            t("offset_fetch", version, **requests.offset_fetch(asked(group, topics=[])))
    for version in (8, 9):
        groups = [asked(group, known) for group in ("simple", "nothing")]
        t("offset_fetch", version, **requests.offset_fetch(*groups))
        t("offset_fetch", version, **requests.offset_fetch("simple"))


def committing_and_fetching_offsets(t: Tracer) -> None:
    t.cluster.create_topic("offsets", 2)
    topic_id = t.cluster.topic_id("offsets")
    ready(t, "simple", "nothing")
    _commit_by_every_version(t)
    _fetch_by_every_version(t)
    ids = topic_id, uuid.UUID(int=99)
    rows = [
        requests.offset_commit_topic(None, 0, topic_id=asked_id, committed_offset=77)
        for asked_id in ids
    ]
    t("offset_commit", 10, **requests.offset_commit("simple", *rows))
    by_id = requests.offset_fetch_group(
        "simple",
        requests.offset_fetch_topic(None, 0, 1, topic_id=ids[0]),
        requests.offset_fetch_topic(None, 0, topic_id=ids[1]),
    )
    t("offset_fetch", 10, **requests.offset_fetch(by_id))
    gone = (
        requests.offset_delete_topic("offsets", 0, 9),
        requests.offset_delete_topic("no-such-topic", 0),
    )
    t("offset_delete", 0, **requests.offset_delete("simple", *gone))
    t("offset_delete", 0, **requests.offset_delete("nothing"))
    t("offset_delete", 0, **requests.offset_delete(""))
    t("offset_fetch", 5, **requests.offset_fetch("simple"))


def describing_listing_deleting(t: Tracer) -> None:
    ready(t, "d-stable", "d-empty", "d-none")
    stable(t, "d-stable")
    joined = stable(t, "d-empty")
    t("leave_group", 1, **requests.leave_group("d-empty", joined["member_id"]))
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
