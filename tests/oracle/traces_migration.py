"""Groups that change between the classic and the consumer protocol, with and without members."""

from __future__ import annotations

import struct
import uuid
from typing import Any

from fencepost.groups import records
from fencepost.groups.consumer_records import (
    AssignmentEpochValue,
    ConsumerKey,
    ConsumerMemberValue,
    CurrentAssignmentValue,
    GroupEpochValue,
    TargetAssignmentValue,
)
from fencepost.logcore.machine import Record
from tests.oracle import traces_groups
from tests.oracle.tracer import Tracer
from tests.oracle.traces_consumer import beat, commit, describe, enter, listed, of, topic
from tests.oracle.traces_groups import ready
from tests.support import requests
from tests.support.cluster import Cluster
from tests.support.raw import Answer
from tests.support.targets import SETTINGS


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def subscription(*names: str, version: int = 0, owned: dict[str, list[int]] | None = None) -> bytes:
    """Return the subscription that a classic consumer sends in JoinGroup."""
    out = struct.pack(">hi", version, len(names)) + b"".join(string(name) for name in names)
    out += struct.pack(">i", -1)
    if version >= 1:
        out += struct.pack(">i", len(owned or {}))
        for name, partitions in (owned or {}).items():
            out += string(name) + struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
    return out


def assignment(name: str, *partitions: int, user_data: bytes = b"") -> bytes:
    out = struct.pack(">hi", 0, 1) + string(name)
    out += struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
    return out + (struct.pack(">i", len(user_data)) + user_data if user_data else b"\xff" * 4)


def protocols(*names: str, **said: Any) -> list[dict[str, Any]]:
    return [requests.join_protocol("range", subscription(*names, **said))]


def join(t: Tracer, group: str, member: str, *names: str, version: int = 5, **more: Any) -> Answer:
    body = requests.join_group(group, member, **{"protocols": protocols(*names), **more})
    answer = t("join_group", version, **body)
    if answer["error_code"] == "member_id_required":
        return t("join_group", version, **{**body, "member_id": answer["member_id"]})
    return answer


def sync(t: Tracer, group: str, joined: Answer, given: bytes | None = None, **more: Any) -> Answer:
    return traces_groups.sync(t, 3, group, joined, given, **more)


def alive(t: Tracer, group: str, joined: Answer, **more: Any) -> Answer:
    who = joined["generation_id"], joined["member_id"]
    return t("heartbeat", 3, **{**requests.heartbeat(group, *who), **more})


def leave(t: Tracer, group: str, member: str, instance: str | None = None) -> None:
    who = requests.leaving_member(member, instance)
    t("leave_group", 5, **requests.leave_group(group, who))


def stable(t: Tracer, group: str, name: str, *partitions: int, **more: Any) -> Answer:
    """Join and sync a single classic member, and assign these partitions of one topic to it."""
    joined = join(t, group, "", name, **more)
    instance = {k: v for k, v in more.items() if k == "group_instance_id"}
    sync(t, group, joined, assignment(name, *partitions), **instance)
    return joined


# --- the log -------------------------------------------------------------------------------------


def logged(t: Tracer, group: str) -> None:
    """Record all of the group's records in order; consecutive records of a kind are sorted.

    Kafka writes such records in the order of a hash table.
    """
    shown: list[dict[str, Any]] = []
    for partition in range(int(SETTINGS["offsets.topic.num.partitions"])):
        for batch in t.cluster.read("__consumer_offsets", partition=partition):
            for key, value in zip(batch.keys, batch.values, strict=True):
                decoded = None if key is None else records.decode(Record(key, value))
                if decoded is not None and decoded[0].group_id == group:
                    shown.append(_shown(*decoded))
    runs: list[dict[str, Any]] = []
    for record in shown:
        kind = (record["kind"], record["is_tombstone"])
        if not runs or runs[-1]["kind"] != kind or record["kind"] == "GroupMetadataKey":
            runs.append({"kind": kind, "members": []})
        # A record is left out if it differs from the previous one only in its previous epoch.
        if record not in runs[-1]["members"][-1:]:
            runs[-1]["members"].append(record)
    for run in runs:
        t.note("record", run)


def _shown(key: Any, value: Any) -> dict[str, Any]:
    kind = getattr(key, "kind", None)
    shown = {
        "kind": type(key).__name__ if kind is None else kind.name,
        "is_tombstone": value is None,
    }
    if isinstance(key, ConsumerKey) and key.name:
        shown["member_id"] = key.name
    match value:
        case GroupEpochValue() | AssignmentEpochValue():
            shown["epoch"] = value.epoch
        case ConsumerMemberValue():
            shown["said"] = repr((value.instance_id, value.rack_id, value.client_id))
            shown["subscribed"] = repr((value.subscribed_topic_names, value.subscribed_topic_regex))
            shown["timeout"] = value.rebalance_timeout_ms
            shown["assignor"] = value.server_assignor
            shown["classic"] = repr(value.classic)
        case TargetAssignmentValue():
            shown["topics"] = [
                {"topic_id": str(uuid.UUID(bytes=topic_id)), "partitions": sorted(indexes)}
                for topic_id, indexes in value.partitions
            ]
        case CurrentAssignmentValue():
            # Leave out the previous epoch, which differs on purpose: a member may send it several
            # times (groups/README.md).
            shown["state"] = (value.member_epoch, value.state)
            shown["topics"] = [
                {
                    "topic_id": str(uuid.UUID(bytes=part.topic_id)),
                    "partitions": sorted(
                        zip(part.partitions, part.assignment_epochs or (), strict=False)
                    ),
                    "revoked": part in value.pending_revocation,
                }
                for part in (*value.assigned, *value.pending_revocation)
            ]
        case records.GroupMetadataValue():
            shown["generation"] = (value.generation_id, value.protocol_type, value.protocol_name)
            shown["leader"] = value.leader
            shown["members"] = [
                {
                    "member_id": member.member_id,
                    "said": repr((member.group_instance_id, member.client_id)),
                    "timeouts": (member.rebalance_timeout_ms, member.session_timeout_ms),
                    "bytes": (member.subscription, member.assignment),
                }
                for member in value.members
            ]
        case records.OffsetCommitValue():
            shown["offset"] = (value.offset, value.leader_epoch, value.metadata)
    return shown


# --- traces --------------------------------------------------------------------------------------


def empty_groups_change_their_kind(t: Tracer) -> None:
    ready(t, "me")
    topic(t, "me-a", 2)
    joined = stable(t, "me", "me-a", 0, 1)
    leave(t, "me", joined["member_id"])
    first = enter(t, "me", "m", "me-a")
    describe(t, "me")
    t("describe_groups", 5, groups=["me"])
    alive(t, "me", joined)
    logged(t, "me")
    beat(t, "me", "m", -1)
    beat(t, "me", "m", first["member_epoch"])
    join(t, "me", "somebody", "me-a")
    again = stable(t, "me", "me-a", 0, 1)
    describe(t, "me")
    t("describe_groups", 5, groups=["me"])
    listed(t, "me", states_filter=[], types_filter=["classic", "consumer"])
    leave(t, "me", again["member_id"])


def an_empty_group_that_nobody_could_join(t: Tracer) -> None:
    """Record the state of an empty consumer group after a refused JoinGroup."""
    ready(t, "mx")
    topic(t, "mx-a", 1)
    enter(t, "mx", "m", "mx-a")
    beat(t, "mx", "m", -1)
    join(t, "mx", "somebody", "mx-a")
    listed(t, "mx", states_filter=[], types_filter=["consumer"])
    described = t.quietly("consumer_group_describe", 1, group_ids=["mx"])
    t.note("is there", described["groups"][0]["error_code"])
    body = requests.join_consumer_group("mx", "m", "mx-a")
    t.note("epoch", t.quietly("consumer_group_heartbeat", 1, **body)["member_epoch"])


def up_with_a_live_member(t: Tracer) -> None:
    ready(t, "mu")
    topic_id = topic(t, "mu-a", 2)
    classic = stable(t, "mu", "mu-a", 0, 1)
    first = enter(t, "mu", "m", "mu-a")
    describe(t, "mu")
    t("describe_groups", 5, groups=["mu"])
    alive(t, "mu", classic)
    sync(t, "mu", classic)
    beat(t, "mu", "m", first["member_epoch"])
    # The member owns nothing now, so it gets its target assignment; the other member's partitions
    # are free.
    again = join(t, "mu", classic["member_id"], "mu-a")
    alive(t, "mu", again)
    sync(t, "mu", again)
    sync(t, "mu", again, protocol_type="consumer", protocol_name="range")
    describe(t, "mu")
    beat(t, "mu", "m", first["member_epoch"])
    describe(t, "mu")
    alive(t, "mu", again)
    alive(t, "mu", again, generation_id=again["generation_id"] + 1)
    alive(t, "mu", again, member_id="m")
    alive(t, "mu", again, member_id="stranger")
    alive(t, "mu", again, group_instance_id="nobody")
    sync(t, "mu", again, group_instance_id="nobody")
    sync(t, "mu", {**again, "generation_id": 0})
    sync(t, "mu", {**again, "member_id": "m"})
    other = {"protocol_type": "consumer", "protocol_name": "other"}
    traces_groups.sync(t, 5, "mu", again, **other)
    listed(t, "mu", states_filter=[], types_filter=[])
    leave(t, "mu", "stranger")
    leave(t, "mu", again["member_id"])
    describe(t, "mu")
    told = beat(t, "mu", "m", first["member_epoch"], topic_partitions=of(topic_id, 0))
    beat(t, "mu", "m", told["member_epoch"])
    logged(t, "mu")


def up_in_the_middle_of_a_rebalance(t: Tracer) -> None:
    ready(t, "mm")
    topic(t, "mm-a", 2)
    topic(t, "mm-b", 2)
    classic = join(t, "mm", "", "mm-a")
    first = enter(t, "mm", "m", "mm-b")
    sync(t, "mm", classic, assignment("mm-a", 0, 1))
    alive(t, "mm", classic)
    again = join(t, "mm", classic["member_id"], "mm-a")
    sync(t, "mm", again)
    beat(t, "mm", "m", first["member_epoch"])
    describe(t, "mm")
    logged(t, "mm")


def up_with_offsets_and_no_record(t: Tracer) -> None:
    """A group that only has offsets; its first generation has no assignment yet."""
    ready(t, "mo")
    topic(t, "mo-a", 2)
    topic(t, "mo-b", 2)
    row = requests.offset_commit_topic("mo-a", 0, committed_offset=5)
    t("offset_commit", 8, **requests.offset_commit("mo", row))
    classic = join(t, "mo", "", "mo-a")
    enter(t, "mo", "m", "mo-b")
    sync(t, "mo", classic)
    alive(t, "mo", classic)
    describe(t, "mo")
    logged(t, "mo")
    beat(t, "mo", "m", -1)
    leave(t, "mo", classic["member_id"])


def joins_that_wait_while_the_group_changes(t: Tracer) -> None:
    """A waiting JoinGroup without a member id gets the id that its member has in the new group."""
    ready(t, "mj")
    topic(t, "mj-a", 2)
    classic = stable(t, "mj", "mj-a", 0, 1)
    body = requests.join_group("mj", protocols=protocols("mj-a"))
    with Cluster(t.bootstrap) as one, Cluster(t.bootstrap) as two, Cluster(t.bootstrap) as three:
        one.send("join_group", 3, **body)
        two.send("join_group", 5, **body, group_instance_id="i")
        while len(members_of(t, "mj")) < 3:
            pass
        three.send("join_group", 5, **body, group_instance_id="i")
        t.note("a static one, replaced", two.receive())
        enter(t, "mj", "m", "mj-a")
        t.note("a dynamic one", one.receive())
        t.note("a static one", three.receive())
    alive(t, "mj", classic)


def members_of(t: Tracer, group: str) -> list[Any]:
    found = t.quietly("describe_groups", 5, groups=[group])
    return list(found["groups"][0]["members"])


def no_way_up(t: Tracer) -> None:
    ready(t, "mn-type", "mn-data", "mn-garbage", "mn-foreign")
    topic(t, "mn-a", 2)
    connect = join(t, "mn-type", "", "mn-a", protocol_type="connect")
    sync(t, "mn-type", connect, b"x")
    enter(t, "mn-type", "m", "mn-a")
    custom = join(t, "mn-data", "", "mn-a")
    sync(t, "mn-data", custom, assignment("mn-a", 0, user_data=b"mine"))
    enter(t, "mn-data", "m", "mn-a")
    garbage = join(t, "mn-garbage", "", "mn-a")
    sync(t, "mn-garbage", garbage, b"\0")
    enter(t, "mn-garbage", "m", "mn-a")
    alive(t, "mn-garbage", garbage)
    foreign = join(t, "mn-foreign", "", "mn-a", protocols=[requests.join_protocol("x", b"y")])
    sync(t, "mn-foreign", foreign, assignment("mn-a", 0))
    enter(t, "mn-foreign", "m", "mn-a")
    listed(t, "mm", states_filter=[], types_filter=[])


def classic_members_of_a_consumer_group(t: Tracer) -> None:
    ready(t, "mc")
    topic_id = topic(t, "mc-a", 4)
    first = enter(t, "mc", "m", "mc-a")
    join(t, "mc", "", "mc-a", protocol_type="connect")
    join(t, "mc", "", "mc-a", protocols=[])
    join(t, "mc", "m", "mc-a", group_instance_id="unknown")
    join(t, "mc", "", "mc-a", session_timeout=1)
    for version in range(10):
        joined = join(t, "mc", "", "mc-a", version=version)
        sync(t, "mc", joined)
        alive(t, "mc", joined)
        leave(t, "mc", joined["member_id"])
    describe(t, "mc")
    told = beat(t, "mc", "m", first["member_epoch"])
    joined = join(t, "mc", "", "mc-a")
    sync(t, "mc", joined)
    join(t, "mc", "", "mc-a", protocols=[requests.join_protocol("other", subscription("mc-a"))])
    told = beat(t, "mc", "m", told["member_epoch"])
    told = beat(t, "mc", "m", told["member_epoch"], topic_partitions=of(topic_id, 0, 1))
    alive(t, "mc", joined)
    # A cooperative member sends its owned partitions, and keeps them when it gets others.
    owned = {"version": 1, "owned": {"mc-a": [2]}}
    again = join(t, "mc", joined["member_id"], "mc-a", protocols=protocols("mc-a", **owned))
    sync(t, "mc", again)
    describe(t, "mc")
    for version in (2, 8, 9):
        for generation in (again["generation_id"], again["generation_id"] - 1, -1):
            said = {"name": "mc-a", "partition": 2}
            commit(t, "mc", again["member_id"], generation, version, **said)
    logged(t, "mc")


def classic_members_that_commit_late(t: Tracer) -> None:
    """Send commits with the generation of the current assignment, and with an earlier one."""
    ready(t, "ml")
    topic(t, "ml-a", 2)
    topic(t, "ml-b", 1)
    classic = stable(t, "ml", "ml-a", 0)
    enter(t, "ml", "m", "ml-b")
    says = {"protocols": protocols("ml-a", version=1, owned={"ml-a": [0]})}
    sync(t, "ml", join(t, "ml", classic["member_id"], **says))
    for partition in (0, 1):
        for epoch in (classic["generation_id"], classic["generation_id"] - 1, -1):
            for version in (8, 9):
                said = {"name": "ml-a", "partition": partition}
                commit(t, "ml", classic["member_id"], epoch, version, **said)


def classic_members_that_say_what_they_own(t: Tracer) -> None:
    """Send JoinGroup with owned partitions, with the members' ids and an unknown member id."""
    ready(t, "mw", "mw-up")
    topic_id = topic(t, "mw-a", 2)
    first = enter(t, "mw", "m", "mw-a")
    says = {"protocols": protocols("mw-a", version=1, owned={"mw-a": [1]})}
    joined = join(t, "mw", "", **says)
    beat(t, "mw", "m", first["member_epoch"])
    told = beat(t, "mw", "m", first["member_epoch"], topic_partitions=of(topic_id, 0))
    alive(t, "mw", joined)
    joined = join(t, "mw", joined["member_id"], **says)
    sync(t, "mw", joined)
    describe(t, "mw")
    beat(t, "mw", "m", told["member_epoch"])
    # The classic group assigns the id, and the member uses it in the consumer group.
    stable(t, "mw-up", "mw-a", 0, 1)
    given = t("join_group", 5, **requests.join_group("mw-up", **says))
    enter(t, "mw-up", "m", "mw-a")
    t("join_group", 5, **requests.join_group("mw-up", given["member_id"], **says))
    stranger = requests.join_group("mw-up", "stranger", **says)
    t.note("a stranger", t.quietly("join_group", 5, **stranger)["error_code"])


def down_when_the_last_one_leaves(t: Tracer) -> None:
    ready(t, "md")
    topic_id = topic(t, "md-a", 2)
    first = enter(t, "md", "m", "md-a")
    joined = join(t, "md", "", "md-a")
    sync(t, "md", joined)
    told = beat(t, "md", "m", first["member_epoch"])
    beat(t, "md", "m", told["member_epoch"], topic_partitions=of(topic_id, 0))
    alive(t, "md", joined)
    joined = join(t, "md", joined["member_id"], "md-a")
    sync(t, "md", joined)
    beat(t, "md", "m", -1)
    describe(t, "md")
    t("describe_groups", 5, groups=["md"])
    alive(t, "md", joined)
    alive(t, "md", joined, generation_id=joined["generation_id"] + 1)
    sync(t, "md", joined)
    again = join(t, "md", joined["member_id"], "md-a")
    t("describe_groups", 5, groups=["md"])
    sync(t, "md", again, assignment("md-a", 0, 1))
    t("describe_groups", 5, groups=["md"])
    logged(t, "md")
    # Upgrade the group again.
    enter(t, "md", "n", "md-a")
    describe(t, "md")
    logged(t, "md")


def static_members_change_their_protocol(t: Tracer) -> None:
    ready(t, "ms", "ms-two")
    topic(t, "ms-a", 2)
    classic = stable(t, "ms", "ms-a", 0, 1, group_instance_id="i")
    up = enter(t, "ms", "m", "ms-a", instance_id="i")
    describe(t, "ms")
    alive(t, "ms", classic, group_instance_id="i")
    beat(t, "ms", "m", up["member_epoch"], instance_id="i")
    logged(t, "ms")
    down = join(t, "ms", "", "ms-a", group_instance_id="i")
    beat(t, "ms", "m", up["member_epoch"], instance_id="i")
    describe(t, "ms")
    t("describe_groups", 5, groups=["ms"])
    alive(t, "ms", down, group_instance_id="i")
    sync(t, "ms", down, group_instance_id="i")
    logged(t, "ms")
    # The group has a second member, with another subscription.
    topic(t, "ms-b", 2)
    enter(t, "ms-two", "m", "ms-a", instance_id="i")
    other = join(t, "ms-two", "", "ms-a")
    sync(t, "ms-two", other)
    down = join(t, "ms-two", "", "ms-b", group_instance_id="i")
    t("describe_groups", 5, groups=["ms-two"])
    describe(t, "ms-two")
    alive(t, "ms-two", down, group_instance_id="i")
    alive(t, "ms-two", other)
    logged(t, "ms-two")


TRACES = [
    empty_groups_change_their_kind,
    an_empty_group_that_nobody_could_join,
    up_with_a_live_member,
    up_in_the_middle_of_a_rebalance,
    joins_that_wait_while_the_group_changes,
    up_with_offsets_and_no_record,
    no_way_up,
    classic_members_of_a_consumer_group,
    classic_members_that_commit_late,
    classic_members_that_say_what_they_own,
    down_when_the_last_one_leaves,
    static_members_change_their_protocol,
]
