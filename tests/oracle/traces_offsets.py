"""Offsets of groups of every kind and state: all versions, both sides of limits, deletion."""

from __future__ import annotations

import uuid
from typing import Any

from tests.oracle.tracer import Tracer
from tests.oracle.traces_consumer import beat, enter, topic, topic_id
from tests.oracle.traces_groups import ready
from tests.oracle.traces_migration import join, leave, sync
from tests.oracle.traces_migration import stable as consuming
from tests.oracle.traces_txn import Identity
from tests.support import requests
from tests.support.raw import Answer
from tests.support.waits import until

METADATA_LIMIT = 4096
"""``offset.metadata.max.bytes``, which counts UTF-16 units."""

AT_THE_LIMIT = ("m" * METADATA_LIMIT, "ü" * METADATA_LIMIT, "😀" * (METADATA_LIMIT // 2))


def commit(t: Tracer, group: str, version: int, *offsets: Any, **more: Any) -> Answer:
    """Commit a list of (topic, partition, offset, metadata); versions from 10 on use topic ids."""
    topics = [
        requests.offset_commit_topic(
            name,
            partition,
            topic_id=_id(t, name, version >= 10),
            committed_offset=offset,
            committed_metadata=text,
        )
        for name, partition, offset, text in offsets
    ]
    body = requests.offset_commit(group, *topics, **{"retention_time": -1, **more})
    return t("offset_commit", version, **body)


def fetched(t: Tracer, group: str, version: int, name: str | None = None, **more: Any) -> Answer:
    """Fetch the offsets of one topic or of all topics, in the form of each version."""
    topics = []
    if name is not None:
        topic_id = _id(t, name, version >= 10)
        topics = [requests.offset_fetch_topic(name, 0, 1, topic_id=topic_id)]
    asked = requests.offset_fetch_group(group, *topics, **more)
    return t("offset_fetch", version, **requests.offset_fetch(asked, require_stable=True))


def deleted(t: Tracer, group: str, *places: tuple[str, int]) -> None:
    topics: dict[str, list[int]] = {}
    for name, index in places:
        topics.setdefault(name, []).append(index)
    rows = [requests.offset_delete_topic(name, *parts) for name, parts in topics.items()]
    t("offset_delete", 0, **requests.offset_delete(group, *rows))


def _id(t: Tracer, name: str, is_needed: bool) -> uuid.UUID:
    return uuid.UUID(topic_id(t, name)) if is_needed else uuid.UUID(int=0)


def _in_transaction(t: Tracer, name: str) -> Identity:
    """Begin a transaction that commits offsets of the group of its transactional id."""
    answer = t.quietly("init_producer_id", 3, **requests.init_producer_id(name))
    who = answer["producer_id"], answer["producer_epoch"]
    t.quietly("add_offsets_to_txn", 3, **requests.add_offsets_to_txn(name, who, name))
    return who


def metadata_at_its_limit(t: Tracer) -> None:
    t.cluster.create_topic("of-limit", 2)
    ready(t, "of-limit")
    for version in range(2, 11):
        for number, text in enumerate(AT_THE_LIMIT):
            commit(t, "of-limit", version, ("of-limit", 0, number, text))
            commit(t, "of-limit", version, ("of-limit", 1, number, text + "x"))
            fetched(t, "of-limit", min(version, 10), "of-limit")
    t.cluster.init_producer("of-limit")
    who = _in_transaction(t, "of-limit")
    for version in range(6):
        for text in AT_THE_LIMIT:
            for more in ("", "x"):
                row = requests.offset_commit_topic(
                    "of-limit", 0, committed_offset=9, committed_metadata=text + more
                )
                body = requests.txn_offset_commit("of-limit", who, "of-limit", row)
                t("txn_offset_commit", version, **body)
    t("end_txn", 3, **requests.end_txn("of-limit", who))
    t.quietly("delete_groups", 2, groups_names=["of-limit"])


def many_groups_in_one_request(t: Tracer) -> None:
    t.cluster.create_topic("of-many", 2)
    ready(t, "of-one", "of-two", "of-none")
    for group in ("of-one", "of-two"):
        commit(t, group, 9, ("of-many", 0, 5, group), ("of-many", 1, 6, ""))
    for version in (8, 9, 10):
        topic_id = _id(t, "of-many", version >= 10)
        whole = [
            requests.offset_fetch_topic("of-many", *wanted, topic_id=topic_id)
            for wanted in ([0], [1, 7], [])  # a topic that is named twice is once in the response
        ]
        for stable in (False, True):
            for topics in (None, [], whole[:1], whole):
                groups = [
                    requests.offset_fetch_group(name, topics=topics)
                    for name in ("of-two", "of-none", "of-one", "")
                ]
                body = requests.offset_fetch(*groups, require_stable=stable)
                t("offset_fetch", version, **body)
        t("offset_fetch", version, **requests.offset_fetch())


def topics_that_do_not_exist_beside_one_that_does(t: Tracer) -> None:
    t.cluster.create_topic("of-known", 1)
    ready(t, "of-order")
    commit(t, "of-order", 9, ("of-known", 0, 5, ""))
    known, unknown = _id(t, "of-known", True), [uuid.UUID(int=number) for number in (7, 8)]
    for ids in ([unknown[0], known, unknown[1]], [*unknown, known], [known, *unknown]):
        topics = [requests.offset_fetch_topic(None, 0, topic_id=asked_id) for asked_id in ids]
        asked = requests.offset_fetch_group("of-order", *topics)
        answer = t("offset_fetch", 10, **requests.offset_fetch(asked))
        found = [topic["topic_id"] for topic in answer["groups"][0]["topics"]]
        t.note("order", [str(found_id) == str(known) for found_id in found])


def transactional_offsets_of_consumers(t: Tracer) -> None:
    """TxnOffsetCommit with and without a member, in a group that has members of both protocols."""
    topic(t, "of-txn", 2)
    ready(t, "of-txn")
    name = "of-txn"
    epoch = enter(t, name, "m", name)["member_epoch"]
    classic = join(t, name, "", name)
    t.cluster.init_producer(name)
    who = _in_transaction(t, name)
    row = requests.offset_commit_topic(name, 0, committed_offset=9)
    known, other = classic["member_id"], classic["generation_id"]
    for version in range(5):
        for generation, member, instance in (
            (-1, "", None),
            (-1, "", "i"),
            (-1, "m", None),
            (-1, known, None),
            (epoch, "m", None),
            (epoch, "m", "i"),
            (epoch, "", None),
            (epoch - 1, "m", None),
            (epoch + 9, "m", None),
            (other, known, None),
            (other + 9, known, None),
            (epoch, "stranger", None),
        ):
            said = {"generation": generation, "member_id": member, "group_instance_id": instance}
            body = requests.txn_offset_commit(name, who, name, row, **said)
            t("txn_offset_commit", version, **body)
    t("end_txn", 3, **requests.end_txn(name, who))
    beat(t, name, "m", -1)
    leave(t, name, known)


def classic_groups_in_every_state(t: Tracer) -> None:
    """Commit, fetch and delete offsets in simple, completing, stable, empty and deleted groups."""
    for name in ("of-a", "of-b"):
        t.cluster.create_topic(name, 2)
    ready(t, "of-classic", "of-completing", "of-gone")
    offsets = ("of-a", 0, 3, "a"), ("of-b", 1, 4, "b")

    def look(group: str, **who: Any) -> None:
        for version in (2, 5, 8, 9, 10):
            commit(t, group, version, *offsets)
            if who:
                commit(t, group, version, *offsets, **who)
        for version in range(1, 11):
            fetched(t, group, version, "of-a")
            if version >= 2:
                fetched(t, group, version)
        deleted(t, group, ("of-a", 0), ("of-b", 1), ("of-b", 0), ("of-b", 9), ("of-unknown", 0))
        fetched(t, group, 5)

    look("of-classic")
    joined = consuming(t, "of-classic", "of-a", 0, 1)
    who = {"generation_id_or_member_epoch": joined["generation_id"]}
    who["member_id"] = joined["member_id"]
    look("of-classic", **who)
    leave(t, "of-classic", joined["member_id"])
    look("of-classic", **who)
    t("delete_groups", 2, groups_names=["of-classic"])
    fetched(t, "of-classic", 5)
    deleted(t, "of-classic", ("of-a", 0))
    half = join(t, "of-completing", "", "of-a")
    who = {"generation_id_or_member_epoch": half["generation_id"], "member_id": half["member_id"]}
    look("of-completing", **who)
    t("delete_groups", 2, groups_names=["of-completing"])
    sync(t, "of-completing", half)
    leave(t, "of-completing", half["member_id"])
    t("delete_groups", 2, groups_names=["of-completing", "of-gone"])


def consumer_groups_in_every_state(t: Tracer) -> None:
    for name in ("oc-a", "oc-b"):
        topic(t, name, 2)
    ready(t, "oc")
    offsets = ("oc-a", 0, 3, "a"), ("oc-b", 1, 4, "b")
    epoch = enter(t, "oc", "m", "oc-a")["member_epoch"]

    def look(member_epoch: int) -> None:
        who = {"member_id": "m", "generation_id_or_member_epoch": member_epoch}
        for version in (2, 8, 9, 10):
            commit(t, "oc", version, *offsets)
            commit(t, "oc", version, *offsets, **who)
        for version in range(1, 11):
            fetched(t, "oc", version, "oc-a")
        for version in (9, 10):
            for asked in (member_epoch, member_epoch - 1, member_epoch + 1):
                fetched(t, "oc", version, "oc-b", member_id="m", member_epoch=asked)
        deleted(t, "oc", ("oc-a", 0), ("oc-b", 1), ("oc-b", 0), ("oc-unknown", 0))
        fetched(t, "oc", 5)

    look(epoch)
    t("delete_groups", 2, groups_names=["oc"])
    beat(t, "oc", "m", -1)
    look(epoch)
    t("delete_groups", 2, groups_names=["oc"])
    fetched(t, "oc", 5)
    deleted(t, "oc", ("oc-a", 0))


def _said(owned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an assignment in the form of the owned partitions in a heartbeat."""
    return [{**part, "topic_id": uuid.UUID(str(part["topic_id"]))} for part in owned]


def topics_that_match_an_expression(t: Tracer) -> None:
    """Record a member's assignment, without epochs, while matching topics are created and deleted.

    Apache Kafka resolves the regex in the background, and refreshes it every ten seconds.
    """
    ready(t, "rx")
    topic(t, "rx-one", 2)
    topic(t, "other-rx", 1)
    epoch = 0
    owned: list[dict[str, Any]] = []
    body: dict[str, Any] = {"rebalance_timeout": 60_000, "topic_partitions": []}
    body |= {"subscribed_topic_regex": "rx-.*", "subscribed_topic_names": None}

    def settled(wanted: dict[str, int], what: str) -> None:
        def look() -> bool:
            nonlocal epoch, owned, body
            said = requests.consumer_group_heartbeat("rx", "m", epoch, **body)
            answer = t.quietly("consumer_group_heartbeat", 1, **said)
            epoch, body = answer["member_epoch"], {}
            if answer["assignment"] is not None:
                owned = answer["assignment"]["topic_partitions"]
                body = {"topic_partitions": _said(owned)}
            found = {str(part["topic_id"]): len(part["partitions"]) for part in owned}
            return found == wanted

        until(look, what, deadline_s=45, poll_s=0.1)
        t.note(what, sorted(wanted.values()))

    one = topic_id(t, "rx-one")
    settled({one: 2}, "the topic that matches")
    two = topic(t, "rx-two", 3)
    settled({one: 2, two: 3}, "another one appears")
    t.quietly("delete_topics", 6, **requests.delete_topics("rx-one"))
    settled({two: 3}, "one disappears")
    body = {"subscribed_topic_regex": "other-.*"}
    settled({topic_id(t, "other-rx"): 1}, "another expression")
    body = {"subscribed_topic_regex": "", "subscribed_topic_names": ["rx-two"]}
    settled({two: 3}, "a name in its place")
    body = {"subscribed_topic_regex": "nothing-.*", "subscribed_topic_names": []}
    settled({}, "an expression that matches nothing")
    for wrong in ("[", "(", "a{2,1}", "*", "(?<x", "\\"):
        beat(t, "rx", "m", epoch, subscribed_topic_regex=wrong)
    beat(t, "rx", "m", -1)


TRACES = [
    metadata_at_its_limit,
    many_groups_in_one_request,
    topics_that_do_not_exist_beside_one_that_does,
    transactional_offsets_of_consumers,
    classic_groups_in_every_state,
    consumer_groups_in_every_state,
    topics_that_match_an_expression,
]
