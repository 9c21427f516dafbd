"""Request sequences for share groups (KIP-932): members, offsets, sessions, record states."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tests.oracle.tracer import Tracer
from tests.oracle.traces_consumer import GROUP, enter, listed, topic
from tests.oracle.traces_groups import commit, join, ready, stable
from tests.support import requests
from tests.support.batches import batch
from tests.support.raw import Answer
from tests.support.share import (
    ACCEPT,
    FINAL,
    FULL,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    Member,
    initialize,
    parts_of,
)
from tests.support.waits import until

MEMBER = "11111111-2222-4333-8444-555555555555"
LONG_MS = 5_000
NOTHING = {"max_bytes": 0, "min_bytes": 0, "max_records": 0, "max_wait": 0}
"""The limits of a ShareFetch that only renews acquisition locks."""

Topics = Mapping[uuid.UUID, Mapping[int, Sequence[tuple[Any, ...]]]]


# --- members -------------------------------------------------------------------------------------


def beat(t: Tracer, group: str, member: str, epoch: int, **more: Any) -> Answer:
    body = requests.share_group_heartbeat(group, member, epoch, **more)
    return t("share_group_heartbeat", 1, **body)


def assigned(t: Tracer, group: str, member: str, epoch: int, partitions: int, *topics: str) -> int:
    """Heartbeat until the member has ``partitions``; record the last response, return its epoch."""
    answer: Answer = {}

    def is_assigned() -> bool:
        nonlocal answer, epoch
        body = requests.share_group_heartbeat(
            group, member, epoch, subscribed_topic_names=list(topics)
        )
        answer = t.quietly("share_group_heartbeat", 1, **body)
        epoch = answer["member_epoch"]
        rows = answer["assignment"]["topic_partitions"]
        return sum(len(row["partitions"]) for row in rows) == partitions

    until(is_assigned, f"{partitions} partitions of {member}")
    t.note(f"{member} is assigned", answer)
    return epoch


def describe(t: Tracer, *groups: str, **more: Any) -> None:
    t("share_group_describe", 1, **requests.share_group_describe(*groups, **more))


def members_of_share_groups(t: Tracer) -> None:
    ready(t, "sg")
    topic(t, "sg-a", 4)
    topic(t, "sg-b", 1)
    beat(t, "sg", "m1", 0, subscribed_topic_names=["sg-a"])
    describe(t, "sg")
    first = assigned(t, "sg", "m1", 2, 4, "sg-a")
    beat(t, "sg", "m1", first)
    beat(t, "sg", "m1", first, subscribed_topic_names=["sg-a"])
    # The previous member epoch is accepted once.
    beat(t, "sg", "m1", first - 1, subscribed_topic_names=["sg-a"])
    beat(t, "sg", "m1", first - 2)
    beat(t, "sg", "m1", first + 1)
    describe(t, "sg", "", "no-such-group")
    describe(t, "sg", include_authorized_operations=True)
    joined = beat(t, "sg", "m2", 0, subscribed_topic_names=["sg-a", "sg-none"], rack_id="r")
    second = assigned(t, "sg", "m2", joined["member_epoch"], 2, "sg-a", "sg-none")
    assigned(t, "sg", "m1", first, 2, "sg-a")
    describe(t, "sg")
    listed(t, "sg")
    listed(t, "sg", types_filter=["Share"], states_filter=["stable"])
    beat(t, "sg", "m2", second, subscribed_topic_names=["sg-b"])
    beat(t, "sg", "stranger", 3)
    beat(t, "sg", "stranger", -1)
    beat(t, "sg", "m2", -1)
    beat(t, "sg", "m2", -1)
    t("delete_groups", 2, groups_names=["sg"])
    beat(t, "sg", "m1", -1)
    describe(t, "sg")
    listed(t, "sg")
    t("delete_groups", 2, groups_names=["sg"])
    describe(t, "sg")


def refused_heartbeats(t: Tracer) -> None:
    ready(t, "sh", "sh-none", "")
    topic(t, "sh-a", 1)
    named = {"subscribed_topic_names": ["sh-a"]}
    said = []
    for group, member, epoch, more in (
        ("", "m", 0, named),
        ("sh", "", 0, named),
        ("sh", "m" * 36, 0, {}),
        ("sh", "m" * 37, 0, named),
        ("sh", "m", 0, {"subscribed_topic_names": []}),
        ("sh", "m", 0, {**named, "rack_id": ""}),
        ("sh", "m", -2, named),
        ("sh", "m", -3, {}),
        ("sh-none", "m", 1, {}),
        ("sh-none", "m", -1, {}),
    ):
        answer = beat(t, group, member, epoch, **more)
        said.append(answer["error_message"])
    beat(t, "sh", "m", 0, **named)
    said += [beat(t, "sh", "m", epoch)["error_message"] for epoch in (1, 9)]
    said += [beat(t, "sh", "other", epoch)["error_message"] for epoch in (-1, 2)]
    t.note("messages", said)


def groups_of_the_wrong_type(t: Tracer) -> None:
    ready(t, "st", "st-consumer", "st-classic", "st-empty", "st-none")
    topic(t, "st-a", 1)
    commit(t, 8, "st-empty")
    enter(t, "st-consumer", "m", "st-a")
    stable(t, "st-classic")
    beat(t, "st", "m", 0, subscribed_topic_names=["st-a"])
    enter(t, "st", "m", "st-a")
    join(t, 5, "st")
    commit(t, 8, "st")
    for version in (7, 8, 9):
        t("offset_fetch", version, **requests.offset_fetch("st"))
    t("offset_delete", 0, **requests.offset_delete("st", requests.offset_delete_topic("st-a", 0)))
    t("consumer_group_describe", 1, **requests.consumer_group_describe("st"))
    for version in (5, 6):
        t("describe_groups", version, groups=["st"])
    for group in ("st-consumer", "st-classic", "st-empty", "st-none"):
        if group != "st-none":
            beat(t, group, "m", 0, subscribed_topic_names=["st-a"])
        beat(t, group, "m", 1)
        describe(t, group)
        offsets_of(t, group, ("st-a", [0]))
        offsets_of(t, group, None)
        if group != "st-none":
            t(*ALTER, **requests.alter_share_group_offsets(group, "st-a", {0: 0}))
        t(*DELETE, **requests.delete_share_group_offsets(group, "st-a"))


# --- offsets -------------------------------------------------------------------------------------

ALTER = "alter_share_group_offsets", 0
DELETE = "delete_share_group_offsets", 0


def offsets_of(
    t: Tracer, group: str, *topics: tuple[str, Sequence[int]] | None, version: int = 1
) -> None:
    body = requests.describe_share_group_offsets(group, *topics)
    t("describe_share_group_offsets", version, **body)


def offsets_of_share_groups(t: Tracer) -> None:
    ready(t, "so", "so-none", "so-member")
    for name in ("so-a", "so-b"):
        topic(t, name, 2)
    t.cluster.produce("so-a", [b"a", b"b", b"c"])
    for version in (0, 1):
        offsets_of(t, "so-none", ("so-a", [0, 1]), version=version)
        offsets_of(t, "so-none", None, version=version)
    for at in ({0: 1}, {0: -5, 1: 1_000_000}, {0: 3, 1: 0}, {}):
        t(*ALTER, **requests.alter_share_group_offsets("so", "so-a", at))
        for version in (0, 1):
            offsets_of(t, "so", None, version=version)
    offsets_of(t, "so", ("so-a", [0]), ("so-b", [0]), ("so-none", [0]))
    t(*ALTER, **requests.alter_share_group_offsets("so", "no-such-topic", {0: 1}))
    t(*ALTER, **requests.alter_share_group_offsets("so", "so-a", {7: 1, 0: 2}))
    t(*ALTER, **requests.alter_share_group_offsets("", "so-a", {0: 2}))
    offsets_of(t, "so", None)
    describe(t, "so")
    t(*DELETE, **requests.delete_share_group_offsets("so", "so-a", "so-b", "no-such-topic"))
    t(*DELETE, **requests.delete_share_group_offsets("so", "so-a"))
    t(*DELETE, **requests.delete_share_group_offsets("so"))
    t(*DELETE, **requests.delete_share_group_offsets("so-none", "so-a"))
    offsets_of(t, "so", None)
    beat(t, "so-member", MEMBER, 0, subscribed_topic_names=["so-a"])
    assigned(t, "so-member", MEMBER, 2, 2, "so-a")
    offsets_of(t, "so-member", None)
    t(*ALTER, **requests.alter_share_group_offsets("so-member", "so-a", {0: 1}))
    t(*DELETE, **requests.delete_share_group_offsets("so-member", "so-a"))
    t("delete_groups", 2, groups_names=["so", "so-member", "so-none"])
    offsets_of(t, "so", None)


def configs_of_share_groups(t: Tracer) -> None:
    for key, values in (
        ("share.auto.offset.reset", ("earliest", "latest", "by_duration:P1D", "by_duration:-P1D")),
        ("share.auto.offset.reset", ("by_duration:x", "none", "")),
        ("share.isolation.level", ("read_committed", "READ_COMMITTED", "none")),
        ("share.record.lock.duration.ms", ("14999", "15000", "60000", "60001", "x")),
        ("share.delivery.count.limit", ("1", "2", "10", "11")),
        ("share.partition.max.record.locks", ("99", "100", "4000", "4001")),
        ("share.renew.acknowledge.enable", ("false", "true", "maybe")),
        ("share.session.timeout.ms", ("45000", "60000", "60001")),
        ("share.heartbeat.interval.ms", ("199", "15000", "15001")),
        ("share.assignment.interval.ms", ("-1", "15000", "15001")),
    ):
        for value in values:
            set_config(t, "sc", key, value)
    t("describe_configs", 4, **requests.describe_configs(requests.described_resource(GROUP, "sc")))


# --- sessions and records ------------------------------------------------------------------------


class Session(Member):
    """A share session whose responses are recorded."""

    def __init__(self, t: Tracer, group: str, member: str = MEMBER) -> None:
        super().__init__(t.cluster, group, member)
        self._t = t

    def fetch(self, topics: Topics, **fields: Any) -> Answer:
        answer = super().fetch(topics, **fields)
        self._t.note(f"share_fetch {self.epoch}", answer)
        return answer

    def quiet_fetch(self, topics: Topics, **fields: Any) -> Answer:
        return super().fetch(topics, **fields)

    def acknowledge(self, topics: Topics, **fields: Any) -> Answer:
        answer = super().acknowledge(topics, **fields)
        said = [
            part["error_message"] for topic in answer["responses"] for part in topic["partitions"]
        ]
        self._t.note(f"share_acknowledge {self.epoch}", [answer, said])
        return answer


def shared(t: Tracer, group: str, *counts: int, start_offset: int = 0) -> uuid.UUID:
    """Create a topic with one batch for each count, and initialize a group's state for it."""
    name = t.cluster.create_topic(f"{group}-records", 2)
    found = t.cluster.topic_id(name)
    ready(t, group)
    initialize(t.cluster, group, found, (0, 1), start_offset=start_offset)
    for count in counts:
        t.cluster.produce(name, [b"%d" % number for number in range(count)])
    return found


def share_sessions(t: Tracer) -> None:
    found = shared(t, "ss", 2, 2)
    unknown = uuid.UUID(int=7)
    every = {found: {0: (), 1: ()}}
    session = Session(t, "ss")
    for fields in ({"group_id": None}, {"member_id": None}, {"member_id": ""}):
        session.fetch(every, **fields)
        session.acknowledge(every, **fields)
    session.epoch = FULL
    session.fetch({found: {0: [(0, 0, ACCEPT)]}})
    session.acknowledge({found: {0: [(0, 0, ACCEPT)]}})
    for epoch in (1, FINAL, -2):
        session.epoch = epoch
        session.fetch({})
        session.acknowledge({})
    session.epoch = FULL
    session.fetch({found: {9: ()}, unknown: {0: ()}}, max_wait=0)
    session.fetch({}, max_wait=0)
    session.fetch({found: {0: ()}}, forget={found: [9], unknown: [0]}, max_wait=LONG_MS)
    session.acknowledge({found: {0: [(0, 1, ACCEPT)], 9: [(0, 0, ACCEPT)]}, unknown: {0: []}})
    session.acknowledge({})
    session.acknowledge({found: {0: []}})
    session.acknowledge({found: {0: [], 1: []}})
    # A partition that is only named for an acknowledgement also joins the session. MaxWaitMs gives
    # the broker time to read the partition's state.
    session.fetch({found: {1: [(0, 0, ACCEPT)]}}, max_wait=500)
    session.fetch({found: {0: [(0, 0, ACCEPT)]}}, forget={found: [0]}, max_wait=0)
    session.epoch += 1
    session.fetch({})
    session.acknowledge({})
    session.epoch = FINAL
    session.acknowledge({found: {0: [(2, 2, ACCEPT)]}})
    session.fetch({})


def acknowledgements(t: Tracer) -> None:
    found = shared(t, "sk", 5, 5)
    session = Session(t, "sk")
    session.fetch({found: {0: ()}}, max_wait=LONG_MS)
    for batches in (
        [(1, 0, ACCEPT)],
        [(0, 1)],
        [(0, 2, ACCEPT, ACCEPT)],
        [(0, 0, 5)],
        [(0, 0, -1)],
        [(0, 0, RENEW)],
        [(3, 4, ACCEPT), (2, 2, ACCEPT)],
        [(0, 99, ACCEPT)],
        [(99, 99, ACCEPT)],
        [(-1, -1, ACCEPT)],
        [(0, 1, ACCEPT), (1, 2, ACCEPT)],
        [(0, 0, ACCEPT), (2, 2, GAP)],
        [(0, 0, ACCEPT)],
        [(2, 2, ACCEPT)],
        [(1, 1, REJECT), (3, 4, RELEASE, GAP)],
        [(3, 3, ACCEPT)],
    ):
        session.acknowledge({found: {0: batches}})
    session.acknowledge({found: {0: [(5, 5, ACCEPT)]}}, version=1)
    session.acknowledge({found: {0: [(6, 6, RENEW)]}}, version=1)
    session.fetch({}, max_wait=LONG_MS)
    session.fetch({found: {0: [(3, 3, ACCEPT), (6, 6, ACCEPT)]}}, max_wait=0, version=1)
    session.acknowledge({found: {0: [(7, 7, RENEW), (8, 8, ACCEPT)]}}, is_renew_ack=True)
    session.fetch({found: {0: [(7, 7, RENEW)]}}, is_renew_ack=True)
    session.fetch({found: {0: [(7, 7, RENEW)]}}, is_renew_ack=True, **NOTHING)
    set_config(t, "sk", "share.renew.acknowledge.enable", "false")
    session.acknowledge({found: {0: [(7, 7, RENEW)]}}, is_renew_ack=True)
    offsets_of(t, "sk", ("sk-records", [0]))
    session.epoch = FINAL
    session.acknowledge({found: {0: [(7, 7, REJECT)]}})


def set_config(t: Tracer, group: str, key: str, value: str) -> None:
    change = requests.config_op(key, value)
    body = requests.incremental_alter_configs(requests.altered_resource(GROUP, group, change))
    t("incremental_alter_configs", 1, **body)


def poisonous_records(t: Tracer) -> None:
    """Release a batch until its records reach the delivery limit."""
    found = shared(t, "sp", 10)
    session = Session(t, "sp")
    session.fetch({found: {0: ()}}, max_wait=LONG_MS)
    last = 9
    for _ in range(40):
        session.acknowledge({found: {0: [(0, last, RELEASE)]}})
        answer = session.fetch({}, max_wait=300)
        rows = [
            row
            for topic in answer["responses"]
            for part in topic["partitions"]
            for row in part["acquired_records"]
        ]
        if not rows:
            break
        last = rows[-1]["last_offset"]
        first = rows[0]["first_offset"]
        if first:
            break
    offsets_of(t, "sp", ("sp-records", [0]))


def both_acquire_modes(t: Tracer) -> None:
    found = shared(t, "sm", 50, 50, 3)
    batched, limited = Session(t, "sm"), Session(t, "sm", MEMBER.replace("1", "6"))
    batched.fetch({found: {0: ()}}, max_wait=LONG_MS, max_records=5)
    batched.fetch({}, max_wait=LONG_MS, max_records=60, batch_size=10)
    batched.acknowledge({found: {0: [(0, 49, RELEASE)]}})
    limited.fetch({found: {0: ()}}, max_wait=LONG_MS, max_records=5, share_acquire_mode=1)
    limited.fetch({}, max_wait=LONG_MS, max_records=7, share_acquire_mode=1)
    limited.fetch({}, max_wait=LONG_MS, max_records=0, share_acquire_mode=1)
    limited.fetch({}, max_wait=LONG_MS, max_bytes=0)
    limited.fetch({}, max_wait=LONG_MS, max_bytes=1)
    limited.fetch({}, max_wait=100, max_records=500, share_acquire_mode=1)


def isolation_of_share_groups(t: Tracer) -> None:
    for group, level in (("si-un", "read_uncommitted"), ("si-co", "read_committed")):
        found = shared(t, group)
        name = f"{group}-records"
        set_config(t, group, "share.isolation.level", level)
        transactional_id = f"{group}-tx"
        for committed, count in ((True, 3), (False, 4), (True, 2), (None, 1)):
            producer_id, epoch = t.cluster.init_producer(transactional_id)
            data = batch(
                [b"x"] * count,
                producer_id=producer_id,
                producer_epoch=epoch,
                sequence=0,
                transactional=True,
            )
            sent = t.cluster.produce(name, data, version=12, transactional_id=transactional_id)
            assert sent["error_code"] == "none"
            if committed is not None:
                ended = requests.end_txn(
                    transactional_id, (producer_id, epoch), committed=committed
                )
                t.quietly("end_txn", 4, **ended)
                t.cluster.settle(name)
        session = Session(t, group)
        answer = session.quiet_fetch({found: {0: ()}}, max_wait=LONG_MS)
        (part,) = answer["responses"][0]["partitions"]
        t.note(f"acquired by {level}", part["acquired_records"])
        session.acknowledge({found: {0: [(0, 2, ACCEPT), (3, 3, GAP)]}})
        offsets_of(t, group, (name, [0]))


def start_offsets_of_share_groups(t: Tracer) -> None:
    for policy in ("earliest", "latest", "by_duration:PT1S", "by_duration:P36500D"):
        group = f"sf-{policy.replace(':', '-')}"
        found = shared(t, group, 3, start_offset=-1)
        set_config(t, group, "share.auto.offset.reset", policy)
        session = Session(t, group)
        session.fetch({found: {0: ()}}, max_wait=300)
        t.cluster.produce(f"{group}-records", [b"later"])
        session.fetch({}, max_wait=LONG_MS)
        offsets_of(t, group, (f"{group}-records", [0, 1]))


LIVES = 8
STEPS = 60
FINAL_OUTCOMES = (ACCEPT, ACCEPT, REJECT, GAP)
OUTCOMES = (*FINAL_OUTCOMES, RELEASE, RELEASE, RELEASE, RELEASE)


class SharingClient(Session):
    """A member that acknowledges ranges of acquired offsets, and sometimes of other offsets."""

    def __init__(self, t: Tracer, group: str, number: int, rng: random.Random) -> None:
        super().__init__(t, group, MEMBER.replace("1", str(number)))
        self._rng = rng
        self._held: set[int] = set()

    def step(self, topic_id: uuid.UUID) -> None:
        rng = self._rng
        if self.epoch and rng.random() < 0.5:
            self.acknowledge({topic_id: {0: self._drawn(OUTCOMES)}})
            return
        # Whether a fetch can acquire the records that it releases depends on when they are written.
        batches = self._drawn(FINAL_OUTCOMES) if self.epoch and rng.random() < 0.5 else []
        asked = {topic_id: {0: batches}} if batches or not self.epoch else {}
        answer = self.fetch(
            asked,
            max_wait=0,
            max_records=rng.choice((1, 2, 5, 20, 500)),
            batch_size=rng.choice((1, 5, 500)),
            share_acquire_mode=rng.randrange(2),
        )
        for part in parts_of(answer).values():
            for acquired in part["acquired_records"]:
                self._held.update(range(acquired["first_offset"], acquired["last_offset"] + 1))

    def _drawn(self, outcomes: Sequence[int]) -> list[tuple[int, ...]]:
        """Draw up to three ranges of offsets in order; types are per range or per offset."""
        rng = self._rng
        batches: list[tuple[int, ...]] = []
        for first in sorted(rng.sample(sorted(self._held), min(rng.randrange(4), len(self._held)))):
            if batches and first <= batches[-1][1]:
                continue
            last = first
            while last + 1 in self._held and rng.random() < 0.8:
                last += 1
            if rng.random() < 0.05:
                last += 1
            count = 1 if rng.random() < 0.6 else last - first + 1
            batches.append((first, last, *(rng.choice(outcomes) for _ in range(count))))
        self._held -= {at for first, last, *_ in batches for at in range(first, last + 1)}
        return batches


def random_shares(t: Tracer) -> None:
    """Run random fetches and acknowledgements of three members, and write records in between."""
    for life in range(LIVES):
        rng = random.Random(life)
        group = f"sr-{life}"
        found = shared(t, group, 5)
        clients = [SharingClient(t, group, number, rng) for number in (6, 7, 8)]
        # While this fetch waits, Apache Kafka reads the state.
        clients[0].fetch({found: {0: ()}}, max_wait=LONG_MS, max_records=1, share_acquire_mode=1)
        for _ in range(STEPS):
            if rng.random() < 0.15:
                t.cluster.produce(f"{group}-records", [b"x"] * rng.randint(1, 12))
            rng.choice(clients).step(found)
        offsets_of(t, group, (f"{group}-records", [0]))


TRACES = [
    members_of_share_groups,
    refused_heartbeats,
    groups_of_the_wrong_type,
    offsets_of_share_groups,
    configs_of_share_groups,
    share_sessions,
    acknowledgements,
    poisonous_records,
    both_acquire_modes,
    isolation_of_share_groups,
    start_offsets_of_share_groups,
    random_shares,
]
