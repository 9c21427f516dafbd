"""Runs of Apache Kafka's tools for share groups on either broker."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from tests.oracle.desk import Desk
from tests.oracle.tool_scenes import (
    CONFIGS,
    CONSOLE_SHARE_CONSUMER,
    DUMP_LOG,
    GROUPS,
    PACKAGE,
    SHARE_CONSUMER_PERFORMANCE,
    SHARE_GROUPS,
    Scene,
    filled,
)
from tests.support import requests
from tests.support.raw import Answer
from tests.support.share import ACCEPT, FINAL, FULL, REJECT, RELEASE, Member, parts_of
from tests.support.waits import until

VERIFIABLE_SHARE_CONSUMER = PACKAGE + "VerifiableShareConsumer"
PERIOD_MS = "20000"
"""A consumer must get all records within this time."""


class SharingMember:
    """A member of a share group, by raw heartbeats."""

    def __init__(self, desk: Desk, group: str, topic: str, partitions: int) -> None:
        self._desk, self._group = desk, group
        self._id = f"member of {group}"
        joining = requests.join_share_group(group, self._id, topic)
        desk.cluster.coordinator(group, 0)
        self._epoch = self._beat(joining)["member_epoch"]

        def is_assigned() -> bool:
            body = requests.share_group_heartbeat(
                group, self._id, self._epoch, subscribed_topic_names=[topic]
            )
            answer = self._beat(body)
            self._epoch = answer["member_epoch"]
            rows = answer["assignment"]["topic_partitions"]
            return sum(len(row["partitions"]) for row in rows) == partitions

        until(is_assigned, f"the assignment in {group}")

    def _beat(self, body: dict[str, Any]) -> Answer:
        answer = self._desk.cluster.call("share_group_heartbeat", 1, **body)
        assert answer["error_code"] == "none", answer
        return answer

    def leave(self) -> None:
        self._beat(requests.share_group_heartbeat(self._group, self._id, -1))


def share_groups(desk: Desk) -> None:
    topic = filled(desk, "shared")
    tool = partial(desk.run, SHARE_GROUPS)
    tool("--list")
    tool("--describe", "--all-groups")
    descriptions = [
        ("--offsets",),
        ("--offsets", "--verbose"),
        ("--members",),
        ("--members", "--verbose"),
        ("--state",),
        ("--state", "--verbose"),
        (),
    ]
    for what in descriptions[::2]:
        tool("--describe", "--group", "nowhere", *what)
    tool("--reset-offsets", "--group", "nowhere", "--topic", topic, "--to-earliest", "--dry-run")
    tool("--delete-offsets", "--group", "nowhere", "--topic", topic)
    tool("--delete", "--group", "nowhere")
    member = SharingMember(desk, "members", topic, 2)
    tool("--list")
    tool("--list", "--state")
    tool("--list", "--state", "stable")
    tool("--list", "--state", "other")
    desk.run(GROUPS, "--list", only="Share")
    desk.run(GROUPS, "--list", "--share")
    for what in descriptions:
        tool("--describe", "--group", "members", *what)
    tool("--describe", "--all-groups")
    reset = ("--reset-offsets", "--group", "members", "--topic", topic)
    tool(*reset, "--to-earliest", "--execute")
    tool("--delete-offsets", "--group", "members", "--topic", topic)
    tool("--delete", "--group", "members")
    member.leave()
    for what in descriptions:
        tool("--describe", "--group", "members", *what)
    for to in (
        ("--to-earliest",),
        ("--to-latest",),
        ("--to-current",),
        ("--to-offset", "3"),
        ("--to-offset", "99"),
        ("--to-datetime", "2000-01-01T00:00:00.000"),
    ):
        tool(*reset, *to, "--dry-run")
    tool(*reset, "--to-offset", "1", "--export", "--dry-run")
    tool(*reset, "--to-offset", "1", "--execute")
    tool("--describe", "--group", "members")
    plan = desk.file("offsets.csv", f"{topic},0,2\n{topic},1,4\n")
    tool("--reset-offsets", "--group", "members", "--from-file", plan, "--execute")
    tool("--reset-offsets", "--group", "members", "--all-topics", "--to-latest", "--dry-run")
    tool("--reset-offsets", "--group", "members", "--topic", f"{topic}:1", "--to-earliest")
    tool("--reset-offsets", "--group", "members", "--topic", "nowhere", "--to-earliest")
    tool("--reset-offsets", "--group", "new", "--topic", topic, "--to-earliest", "--execute")
    tool("--describe", "--group", "members")
    tool("--describe", "--group", "new", "--state", "--verbose")
    tool("--delete-offsets", "--group", "members", "--topic", topic)
    tool("--delete-offsets", "--group", "members", "--topic", topic)
    tool("--delete-offsets", "--group", "members", "--topic", "nowhere")
    tool("--describe", "--group", "members")
    for group in ("members", "members"):
        tool("--delete", "--group", group)
    tool("--delete", "--group", "new", "--group", "nowhere")
    tool("--list")


def share_consumers(desk: Desk) -> None:
    topic = filled(desk, "shared-out")
    whole = ("--topic", topic, "--timeout-ms", PERIOD_MS)
    groups = [f"sharing-{how}" for how in ("accept", "release", "reject", "fast")]
    for group in groups:
        change = ("--alter", "--entity-type", "groups", "--entity-name", group)
        desk.run(CONFIGS, *change, "--add-config", "share.auto.offset.reset=earliest")
    printed = [
        word
        for name in ("offset", "partition", "delivery", "key")
        for word in ("--formatter-property", f"print.{name}=true")
    ]
    console = partial(desk.run, CONSOLE_SHARE_CONSUMER)
    console(*whole, "--group", "sharing-accept", "--max-messages", "10", *printed)
    console(*whole, "--group", "sharing-release", "--max-messages", "10", "--release")
    console(*whole, "--group", "sharing-reject", "--max-messages", "10", *printed, "--reject")
    console("--topic", topic, "--group", "sharing-empty", "--timeout-ms", "500", "--release")
    performance = partial(desk.run, SHARE_CONSUMER_PERFORMANCE, "--topic", topic, figures=False)
    performance("--group", "sharing-fast", "--num-records", "10", "--timeout", PERIOD_MS)
    verifiable = partial(desk.run, VERIFIABLE_SHARE_CONSUMER, "--topic", topic)
    for mode in ("auto", "sync", "async"):
        verifiable(
            *("--group-id", f"sure-{mode}", "--max-messages", "10", "--verbose"),
            *("--offset-reset-strategy", "earliest", "--acknowledgement-mode", mode),
            only="record_data",
        )
    for group in groups[:3]:
        desk.run(SHARE_GROUPS, "--describe", "--group", group)


CHOSEN = re.compile(r"^.*(?=keySize)|sequence: -?\d+ |(?<=metadataHash\":)-?[1-9]\d+")
"""The position of a record, the number in its batch, and the hash of topic ids."""


def share_logs(desk: Desk) -> None:
    """Dump the records of a share group and of its share state."""
    topic, group = filled(desk, "shared-logs", 1), "dumped"
    SharingMember(desk, group, topic, 1).leave()
    reset = ("--reset-offsets", "--group", group, "--topic", topic, "--to-offset", "1")
    desk.run(SHARE_GROUPS, *reset, "--execute")
    acknowledge(desk, group, topic)
    desk.run(SHARE_GROUPS, "--delete-offsets", "--group", group, "--topic", topic)
    for internal, decoder in (
        ("__consumer_offsets", "--offsets-decoder"),
        ("__share_group_state", "--share-group-state-decoder"),
    ):
        lines = []
        for folder in sorted(desk.data_dir.glob(f"{internal}-*")):
            log = folder / f"{0:020}.log"
            desk.run(DUMP_LOG, "--files", str(log), decoder, where="", only=group)
            lines += [CHOSEN.sub("", line) for line in desk.said.pop()[2]]
        desk.said.append((f"DumpLogSegments {decoder}", 0, sorted(lines)))


def acknowledge(desk: Desk, group: str, topic: str) -> None:
    """Acquire records 1 to 4; accept, release and reject them in three requests."""
    topic_id = desk.cluster.topic_id(topic)
    member = Member(desk.cluster, group)
    acquired: list[int] = []

    def fetched() -> bool:
        answer = member.fetch({topic_id: {0: []}} if member.epoch == FULL else {})
        for part in parts_of(answer).values():
            for offsets in part["acquired_records"]:
                acquired.extend(range(offsets["first_offset"], offsets["last_offset"] + 1))
        return acquired == [1, 2, 3, 4]

    until(fetched, f"records of {topic}")
    for batches in [(2, 2, ACCEPT), (3, 3, RELEASE)], [(4, 4, REJECT)], [(1, 1, ACCEPT)]:
        answer = member.acknowledge({topic_id: {0: batches}})
        assert parts_of(answer)[0]["error_code"] == "none", answer
    member.epoch = FINAL
    member.fetch({})


SCENES: list[Scene] = [share_groups, share_consumers, share_logs]
