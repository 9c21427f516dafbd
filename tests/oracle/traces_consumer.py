"""Request sequences for groups of the consumer protocol (KIP-848), in legal and illegal states."""

from __future__ import annotations

import uuid
from typing import Any

from tests.oracle.tracer import Tracer
from tests.oracle.traces_groups import ready
from tests.support import requests
from tests.support.raw import Answer
from tests.support.waits import until

GROUP = 32
"""The resource type of groups."""


def topic(t: Tracer, name: str, partitions: int = 4) -> str:
    """Create a topic and return its id."""
    t.cluster.create_topic(name, partitions)
    created = topic_id(t, name)
    # The coordinator learns of a topic later than the broker's Metadata.
    probe, member = f"probe-{name}", str(uuid.uuid4())
    ready(t, probe)
    body = requests.join_consumer_group(probe, member, name)

    def is_known() -> bool:
        told = t.quietly("consumer_group_heartbeat", 1, **body)
        return bool(told["assignment"]["topic_partitions"])

    until(is_known, f"{name} is known to the coordinator")
    left = requests.consumer_group_heartbeat(probe, member, -1)
    t.quietly("consumer_group_heartbeat", 1, **left)
    t.quietly("delete_groups", 2, groups_names=[probe])
    t.note(f"topic {name}", {"topic_id": created})
    return created


def topic_id(t: Tracer, name: str) -> str:
    found = t.quietly("metadata", 12, **requests.metadata(name))
    return str(found["topics"][0]["topic_id"])


def of(topic_id: str, *partitions: int) -> list[dict[str, Any]]:
    """Return owned partitions in the form of a heartbeat request."""
    return [{"topic_id": uuid.UUID(topic_id), "partitions": list(partitions)}]


def beat(t: Tracer, group: str, member: str, epoch: int, version: int = 1, **more: Any) -> Answer:
    body = requests.consumer_group_heartbeat(group, member, epoch, **more)
    return t("consumer_group_heartbeat", version, **body)


def enter(t: Tracer, group: str, member: str, *names: str, version: int = 1, **more: Any) -> Answer:
    body = requests.join_consumer_group(group, member, *names, **more)
    return t("consumer_group_heartbeat", version, **body)


def describe(t: Tracer, group: str, version: int = 1) -> None:
    t("consumer_group_describe", version, **requests.consumer_group_describe(group))


def listed(t: Tracer, group: str, version: int = 5, **filters: Any) -> None:
    """Record one group's row in ListGroups; other groups may change at any time."""
    answer = t.quietly("list_groups", version, **filters)
    mine = [found for found in answer["groups"] if found["group_id"] == group]
    t.note(f"list_groups v{version} {filters}", {**answer, "groups": mine})


def joining_and_leaving(t: Tracer) -> None:
    ready(t, "cg")
    known_id = topic(t, "cg-a")
    for version in (0, 1):
        group = f"cg-v{version}"
        ready(t, group)
        first = enter(t, group, "m1", "cg-a", version=version)
        describe(t, group, version)
        beat(t, group, "m1", first["member_epoch"], version)
        second = enter(t, group, "m2", "cg-a", version=version)
        describe(t, group, version)
        # The first member must revoke two partitions before the second member gets them.
        told = beat(t, group, "m1", first["member_epoch"], version)
        describe(t, group, version)
        beat(t, group, "m2", second["member_epoch"], version)
        kept = told["assignment"]["topic_partitions"][0]["partitions"]
        given = beat(
            t, group, "m1", told["member_epoch"], version, topic_partitions=of(known_id, *kept)
        )
        beat(t, group, "m2", second["member_epoch"], version)
        describe(t, group, version)
        beat(t, group, "m1", given["member_epoch"], version, subscribed_topic_names=[])
        describe(t, group, version)
        beat(t, group, "m1", -1, version)
        beat(t, group, "m2", -1, version)
        describe(t, group, version)
        listed(t, group, states_filter=["empty"], types_filter=["consumer"])
        t("delete_groups", 2, groups_names=[group])


def heartbeat_errors(t: Tracer) -> None:
    ready(t, "ce", "ce-none")
    topic(t, "ce-a", 2)
    for version in (0, 1):
        beat(t, "", "m", 0, version)
        beat(t, "ce", "", 5, version)
        beat(t, "ce", "m", -3, version)
        beat(t, "ce", "m", 0, version)
        beat(t, "ce", "m", 0, version, rebalance_timeout=requests.SESSION_MS)
        beat(t, "ce", "m", 0, version, rebalance_timeout=requests.SESSION_MS, topic_partitions=[])
        beat(t, "ce", "m", -2, version)
        enter(t, "ce", "m", "ce-a", version=version, instance_id="")
        enter(t, "ce", "m", "ce-a", version=version, rack_id="")
        enter(t, "ce", "m", "ce-a", version=version, server_assignor="nobody-has-it")
        enter(t, "ce", "m", "ce-a", version=version, topic_partitions=of(str(uuid.uuid4()), 0))
        beat(t, "ce-none", "m", 1, version)
        beat(t, "ce-none", "m", -1, version)
        beat(t, "ce-none", "m", -2, version, instance_id="i")
    enter(t, "ce", "", "ce-a")
    enter(t, "ce", "", "ce-a", version=0)
    joined = enter(t, "ce", "m", "ce-a")
    epoch = joined["member_epoch"]
    beat(t, "ce", "stranger", epoch)
    beat(t, "ce", "stranger", -1)
    beat(t, "ce", "stranger", epoch, instance_id="nobody")
    beat(t, "ce", "stranger", -1, instance_id="nobody")
    beat(t, "ce", "stranger", -2, instance_id="nobody")
    beat(t, "ce", "m", epoch + 1)
    beat(t, "ce", "m", epoch - 1)
    enter(t, "ce", "m", "ce-a")
    beat(t, "ce", "m", epoch, subscribed_topic_regex="(")
    describe(t, "ce")
    t("delete_groups", 2, groups_names=["ce", "ce-none"])
    t("describe_groups", 5, groups=["ce"])
    t("describe_groups", 6, groups=["ce"])
    describe(t, "ce-none")
    describe(t, "")


def what_refusals_say(t: Tracer) -> None:
    """Compare error messages, which users see in Kafka's tools; other traces omit messages."""
    ready(t, "cw", "cw-classic")
    topic(t, "cw-a", 2)
    enter(t, "cw", "m", "cw-a")
    join = {
        "rebalance_timeout": requests.SESSION_MS,
        "subscribed_topic_names": ["x"],
        "topic_partitions": [],
    }
    for group, member, epoch, more in (
        ("", "m", 1, {}),
        (" \t", "m", 1, {}),
        ("cw", "", 0, join),
        ("cw", " ", 1, {}),
        ("cw", "m", 1, {"instance_id": " "}),
        ("cw", "m", 1, {"rack_id": ""}),
        ("cw", "m", 0, {}),
        ("cw", "m", 0, {**join, "topic_partitions": None}),
        ("cw", "m", 0, {**join, "subscribed_topic_names": None}),
        ("cw", "m", -2, {}),
        ("cw", "m", -3, {}),
        ("cw", "m", 0, {**join, "server_assignor": "nobody-has-it"}),
        ("cw", "stranger", 5, {}),
        ("cw", "stranger", -1, {}),
        ("cw-none", "m", -1, {}),
    ):
        body = requests.consumer_group_heartbeat(group, member, epoch, **more)
        said = t.quietly("consumer_group_heartbeat", 1, **body)
        t.note(f"{group!r} {member!r} {epoch} {more}", said["error_message"])
    for group in ("grp", "cw"):
        (found,) = t.quietly("describe_groups", 6, **requests.describe_groups(group))["groups"]
        t.note(f"describe_groups {group}", found["error_message"])
    asked = requests.consumer_group_describe("grp")
    for found in t.quietly("consumer_group_describe", 1, **asked)["groups"]:
        t.note("consumer_group_describe grp", found["error_message"])
    beat(t, "cw", "m", -1)


def targets_that_change_while_a_member_revokes(t: Tracer) -> None:
    ready(t, "targets")
    known_id = topic(t, "targets-a", 6)
    epoch = enter(t, "targets", "m", "targets-a")["member_epoch"]
    enter(t, "targets", "n", "targets-a")
    told = beat(t, "targets", "m", epoch)
    enter(t, "targets", "o", "targets-a")

    def kept(answer: Answer) -> list[dict[str, Any]]:
        topics = answer["assignment"]["topic_partitions"]
        return of(known_id, *(index for part in topics for index in part["partitions"]))

    # The member has revoked partitions, and revokes more in two of its next heartbeats.
    again = beat(t, "targets", "m", epoch, topic_partitions=kept(told))
    describe(t, "targets")
    beat(t, "targets", "m", again["member_epoch"])
    beat(t, "targets", "m", epoch)
    beat(t, "targets", "m", epoch, topic_partitions=kept(again))
    enter(t, "targets", "p", "targets-a")
    last = beat(t, "targets", "m", again["member_epoch"], topic_partitions=kept(again))
    describe(t, "targets")
    if last["assignment"] is not None:
        beat(t, "targets", "m", last["member_epoch"], topic_partitions=kept(last))
    describe(t, "targets")
    for member in ("m", "n", "o", "p"):
        beat(t, "targets", member, -1)


def static_consumers(t: Tracer) -> None:
    ready(t, "cs")
    topic(t, "cs-a", 2)
    entered = enter(t, "cs", "a", "cs-a", instance_id="i")
    enter(t, "cs", "b", "cs-a", instance_id="i")
    beat(t, "cs", "b", entered["member_epoch"], instance_id="i")
    beat(t, "cs", "a", entered["member_epoch"], instance_id="i")
    beat(t, "cs", "a", entered["member_epoch"], instance_id="j")
    beat(t, "cs", "b", -2, instance_id="i")
    for version in (0, 1):
        for epoch in (-2, -1):
            beat(t, "cs", "", epoch, version, instance_id="i")
            beat(t, "cs", "", epoch, version, instance_id="unknown")
    beat(t, "cs", "a", -2, instance_id="i")
    describe(t, "cs")
    two = enter(t, "cs", "b", "cs-a", instance_id="i")
    describe(t, "cs")
    beat(t, "cs", "a", entered["member_epoch"], instance_id="i")
    beat(t, "cs", "a", -1, instance_id="i")
    beat(t, "cs", "b", two["member_epoch"], instance_id="i")
    enter(t, "cs", "b", "cs-a", instance_id="i")
    three = enter(t, "cs", "c", "cs-a", instance_id="k")
    beat(t, "cs", "c", -2, instance_id="k")
    enter(t, "cs", "d", "cs-a", instance_id="k")
    describe(t, "cs")
    beat(t, "cs", "d", -1, instance_id="k")
    beat(t, "cs", "c", three["member_epoch"], instance_id="k")
    # An administrator may remove any member with LeaveGroup.
    for member, instance in (("x", "i"), ("", "i"), ("", "nobody"), ("zz", None)):
        gone = requests.leaving_member(member, instance)
        t("leave_group", 5, **requests.leave_group("cs", gone))
    describe(t, "cs")


def consumers_that_change_their_instance_id(t: Tracer) -> None:
    ready(t, "ci")
    topic(t, "ci-a", 2)
    topic(t, "ci-b", 1)
    entered = enter(t, "ci", "a", "ci-a")
    enter(t, "ci", "a", "ci-a", instance_id="i")
    beat(t, "ci", "a", entered["member_epoch"], instance_id="i")
    enter(t, "ci", "a", "ci-a", instance_id="j")
    enter(t, "ci", "b", "ci-b", instance_id="j")
    beat(t, "ci", "a", entered["member_epoch"], instance_id="j")
    describe(t, "ci")
    beat(t, "ci", "a", -2, instance_id="j")
    commit(t, "ci", "a", -2, name="ci-a")
    commit(t, "ci", "a", -1, name="ci-a")
    commit(t, "ci", "a", entered["member_epoch"], name="ci-a")
    fetch(t, "ci", "a", -2)
    two = enter(t, "ci", "c", "ci-a", instance_id="j")
    describe(t, "ci")
    beat(t, "ci", "c", -1, instance_id="j")
    beat(t, "ci", "c", two["member_epoch"], instance_id="j")
    again = requests.join_consumer_group("ci", "b", instance_id="i")
    t.note("the first instance id", t.quietly("consumer_group_heartbeat", 1, **again)["error_code"])


def topics_that_change(t: Tracer) -> None:
    ready(t, "ct")
    topic(t, "ct-a", 1)
    joined = enter(t, "ct", "m", "ct-a", "ct-later")
    epoch = joined["member_epoch"]
    beat(t, "ct", "m", epoch)
    topic(t, "ct-later", 1)

    def after(wanted: int) -> None:
        """Send heartbeats until the member learns of the change; record the last response."""

        def told() -> bool:
            nonlocal epoch
            body = requests.consumer_group_heartbeat("ct", "m", epoch)
            answer = t.quietly("consumer_group_heartbeat", 1, **body)
            epoch = answer["member_epoch"]
            if answer["assignment"] is None:
                return False
            t.note("told", answer)
            parts = answer["assignment"]["topic_partitions"]
            return sum(len(part["partitions"]) for part in parts) == wanted

        until(told, f"{wanted} partitions")

    after(2)
    grown = requests.create_partitions(requests.grown_topic("ct-a", 3))
    t.quietly("create_partitions", 3, **grown)
    after(4)
    describe(t, "ct")
    t.quietly("delete_topics", 6, **requests.delete_topics("ct-later"))

    def is_gone() -> bool:
        (found,) = t.quietly("metadata", 12, **requests.metadata("ct-later"))["topics"]
        return bool(found["error_code"] != "none")

    until(is_gone, "the topic is gone")
    after(3)
    describe(t, "ct")


def commit(
    t: Tracer,
    group: str,
    member: str,
    epoch: int,
    version: int = 9,
    *,
    name: str = "co-a",
    partition: int = 0,
) -> Answer:
    row = requests.offset_commit_topic(name, partition, committed_offset=1, committed_metadata=None)
    who = {"generation_id_or_member_epoch": epoch, "member_id": member}
    return t("offset_commit", version, **requests.offset_commit(group, row, **who))


def fetch(t: Tracer, group: str, member: str | None, epoch: int, version: int = 9) -> Answer:
    asked = requests.offset_fetch_group(
        group, requests.offset_fetch_topic("co-a", 0), member_id=member, member_epoch=epoch
    )
    return t("offset_fetch", version, **requests.offset_fetch(asked, require_stable=True))


def offsets_of_consumers(t: Tracer) -> None:
    ready(t, "co", "co-none")
    gone = requests.offset_delete("co", requests.offset_delete_topic("co-a", 0))
    known_id = topic(t, "co-a", 2)
    commit(t, "co-none", "m", 1)
    commit(t, "co-none", "m", 1, 8)
    first = enter(t, "co", "m", "co-a")
    epoch = first["member_epoch"]
    for version in (2, 8, 9):
        commit(t, "co", "m", epoch, version)
    commit(t, "co", "stranger", epoch)
    commit(t, "co", "", -1)
    commit(t, "co", "m", -1)
    commit(t, "co", "m", epoch + 1)
    fetch(t, "co", "m", epoch)
    fetch(t, "co", "m", epoch + 1)
    fetch(t, "co", "m", epoch - 1)
    fetch(t, "co", "m", -1)
    fetch(t, "co", "stranger", epoch)
    fetch(t, "co", None, -1)
    fetch(t, "co", "", -1)
    fetch(t, "co", None, epoch)
    enter(t, "co", "n", "co-a")
    # A member that must revoke a partition may still commit its offset, even at its old epoch.
    told = beat(t, "co", "m", epoch)
    for partition in (0, 1):
        commit(t, "co", "m", epoch, partition=partition)
    kept = told["assignment"]["topic_partitions"][0]["partitions"]
    moved = beat(t, "co", "m", epoch, topic_partitions=of(known_id, *kept))
    for partition in (0, 1):
        commit(t, "co", "m", epoch, partition=partition)
        commit(t, "co", "m", moved["member_epoch"], partition=partition)
    t("offset_delete", 0, **gone)
    beat(t, "co", "m", -1)
    beat(t, "co", "n", -1)
    commit(t, "co", "m", epoch)
    commit(t, "co", "", -1)
    t("offset_delete", 0, **gone)
    listed(t, "co", states_filter=["Empty"], types_filter=["Consumer"])
    listed(t, "co", 4, states_filter=["Empty"])
    t("delete_groups", 2, groups_names=["co"])


def settings_of_groups(t: Tracer) -> None:
    ready(t, "cset")
    names = [
        "consumer.session.timeout.ms",
        "consumer.heartbeat.interval.ms",
        "consumer.assignment.interval.ms",
    ]

    def shown() -> None:
        row = requests.described_resource(GROUP, "cset", *names)
        t("describe_configs", 4, **requests.describe_configs(row))

    shown()
    for name, value in (
        (names[0], "50000"),
        (names[0], "44999"),
        (names[0], "60001"),
        (names[1], "1000"),
        (names[1], "15001"),
        (names[1], "199"),
        (names[2], "15001"),
        (names[2], "x"),
        ("no.such.key", "1"),
    ):
        row = requests.altered_resource(GROUP, "cset", requests.config_op(name, value))
        t("incremental_alter_configs", 1, **requests.incremental_alter_configs(row))
    shown()


TRACES = [
    joining_and_leaving,
    heartbeat_errors,
    what_refusals_say,
    targets_that_change_while_a_member_revokes,
    static_consumers,
    consumers_that_change_their_instance_id,
    topics_that_change,
    offsets_of_consumers,
    settings_of_groups,
]
