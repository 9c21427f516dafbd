"""Scenes of the matrix: rights that change while clients are connected, and unusual rules.

A scene runs on each broker separately, and yields the responses.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fencepost.cluster.acl import (
    CLUSTER_NAME,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from tests.oracle.authorisation import ME, STEM, rule
from tests.oracle.authorised_brokers import EVERY_RULE, LONG_MS, MARKER, USERS, Broker, Member
from tests.support.batches import batch
from tests.support.cluster import unique
from tests.support.raw import Answer, errors_in
from tests.support.waits import until

TOPIC, GROUP, TRANSACTION = (
    ResourceType.TOPIC,
    ResourceType.GROUP,
    ResourceType.TRANSACTIONAL_ID,
)
Told = tuple[str, Any]
FILTERS: Final = 60
HOSTS: Final = (
    "*",
    "127.0.0.1",
    "127.0.0.2",
    # There is no range such as 127.0.0.1/32: both brokers apply ranges, Apache Kafka since 4.4.
    "127.0.0.*",
    "localhost",
    "::1",
    "0.0.0.0",
)


def by(user: str, *rules: Acl) -> list[Acl]:
    """Return the rules with ``user`` as their principal."""
    return [replace(acl, principal=f"User:{user}") for acl in rules]


def denied(acl: Acl) -> Acl:
    return replace(acl, permission=Permission.DENY)


def _fetch(member: Member, topic: str, session: tuple[int, int], *, wait_ms: int = 0) -> Answer:
    part = {"current_leader_epoch": -1, "partition_max_bytes": 10_000, "log_start_offset": -1}
    named = [{"topic": topic, "partitions": [part]}] if session[1] < 1 else []
    return member.call(
        "fetch",
        12,
        replica_id=-1,
        max_wait=wait_ms,
        min_bytes=1,
        max_bytes=100_000,
        session_id=session[0],
        session_epoch=session[1],
        topics=named,
        forgotten_topics_data=[],
    )


def a_session_of_fetches(broker: Broker) -> Iterator[Told]:
    """After a right is removed, the next request fails, even in an existing fetch session."""
    topic = broker.admin.create_topic(unique(f"{STEM}session"))
    read = by("u1", rule("read", TOPIC, topic))
    broker.set_rules(read)
    with broker.connect("u1") as member:
        answer = _fetch(member, topic, (0, 0))
        session = answer["session_id"]
        yield "at first", errors_in(answer)
        broker.admin.produce(topic, [b"1"])
        for epoch, rules in enumerate((read, [], read, [*read, *map(denied, read)], read), 1):
            broker.set_rules(rules)
            answer = _fetch(member, topic, (session, epoch))
            yield f"with {len(rules)} rules", errors_in(answer)


def a_long_poll(broker: Broker) -> Iterator[Told]:
    """A Fetch in purgatory is authorized only when it arrives, not again when it completes."""
    topic = broker.admin.create_topic(unique(f"{STEM}poll"))
    broker.set_rules(by("u1", rule("read", TOPIC, topic)))
    with broker.connect("u1") as member, broker.connect("u1") as other:
        part = {"current_leader_epoch": -1, "partition_max_bytes": 10_000, "log_start_offset": -1}
        member.send(
            "fetch",
            12,
            replica_id=-1,
            max_wait=8000,
            min_bytes=1,
            max_bytes=100_000,
            session_epoch=-1,
            topics=[{"topic": topic, "partitions": [part]}],
            forgotten_topics_data=[],
        )
        yield "another one", errors_in(_fetch(other, topic, (0, -1)))
        broker.set_rules([])
        broker.admin.produce(topic, [b"late"])
        answer = member.receive()
        yield "the one that waited", [errors_in(answer), len(answer["responses"])]
        yield "the next one", errors_in(_fetch(member, topic, (0, -1)))


def a_member_of_a_group(broker: Broker) -> Iterator[Told]:
    """A member that loses its rights and gets them back is still a member."""
    group = unique(f"{STEM}members")
    read = by("u1", rule("read", GROUP, group))
    broker.set_rules(read)
    asked = {"group_id": group, "session_timeout": LONG_MS, "rebalance_timeout": LONG_MS}
    asked |= {"protocol_type": "consumer", "protocols": [{"name": "p", "metadata": b"m"}]}
    with broker.connect("u1") as member:
        found = member.call("join_group", 4, **asked)
        yield "a new member", errors_in(found)
        joined = member.call("join_group", 4, **asked, member_id=found["member_id"])
        yield "joined", errors_in(joined)
        mine = {"group_id": group, "member_id": found["member_id"]}
        mine["generation_id"] = joined["generation_id"]
        shared = [{"member_id": found["member_id"], "assignment": b"a"}]
        yield "assigned", errors_in(member.call("sync_group", 3, **mine, assignments=shared))
        for rules in ([], read, [*read, *map(denied, read)], read):
            broker.set_rules(rules)
            yield f"beats with {len(rules)} rules", errors_in(member.call("heartbeat", 3, **mine))
        broker.set_rules([])
        del mine["generation_id"]
        leave = {"group_id": group, "members": [{"member_id": found["member_id"]}]}
        yield "may not leave", errors_in(member.call("leave_group", 3, **leave))
        broker.set_rules(read)
        yield "leaves", errors_in(member.call("leave_group", 3, **leave))


def an_expression(broker: Broker) -> Iterator[Told]:
    """A regex matches only topics that the member may describe, even after the ACLs change."""
    stem = unique(f"{STEM}re")
    topics = [broker.admin.create_topic(f"{stem}-{number}") for number in range(3)]
    names = {str(broker.admin.topic_id(topic)): topic[-1] for topic in topics}
    asked: dict[str, Any] = {"group_id": stem, "member_id": "11111111-2222-4333-8444-555555555555"}
    asked |= {"subscribed_topic_regex": f"{stem}.*", "rebalance_timeout": 60_000}
    read = by("u1", rule("read", GROUP, stem))
    one, all_of_them = (
        by("u1", replace(rule("describe", TOPIC, name), pattern_type=PatternType.PREFIXED))
        for name in (topics[1], stem)
    )
    broker.set_rules([*read, *one])
    with broker.connect("u1") as member:
        epoch, has = 0, set[str]()

        def beats(wanted: set[str]) -> set[str] | None:
            nonlocal epoch, has
            owned = [
                {"topic_id": uuid.UUID(known), "partitions": [0]}
                for known, number in names.items()
                if number in has
            ]
            answer = member.call(
                "consumer_group_heartbeat",
                1,
                **asked,
                member_epoch=epoch,
                subscribed_topic_names=[],
                topic_partitions=owned,
            )
            assert answer["error_code"] == "none", answer
            epoch = answer["member_epoch"]
            if answer["assignment"] is not None:
                rows = answer["assignment"]["topic_partitions"]
                has = {names[row["topic_id"]] for row in rows}
            return has if has == wanted else None

        yield "one of them", sorted(until(lambda: beats({"1"}), "the one topic"))
        broker.set_rules([*read, *all_of_them])
        # Apache Kafka resolves the regex again after a metadata change, or after ten minutes.
        broker.admin.create_topic(f"{stem}-new")
        names[str(broker.admin.topic_id(f"{stem}-new"))] = "w"
        yield "all of them", sorted(until(lambda: beats({"0", "1", "2", "w"}), "all topics"))


def a_transaction(broker: Broker) -> Iterator[Told]:
    """To end a transaction, a producer needs a right on its id, but none on topics."""
    topic, name = broker.admin.create_topic(unique(f"{STEM}txn")), unique(f"{STEM}txn")
    broker.admin.coordinator(name, 1)
    whole = by("u1", rule("write", TRANSACTION, name), rule("write", TOPIC, topic))
    broker.set_rules(whole)
    with broker.connect("u1") as member:
        producer = member.init_producer(name)
        mine = {"transactional_id": name, "producer_id": producer[0], "producer_epoch": producer[1]}
        records = [
            batch(
                [b"v"],
                producer_id=producer[0],
                producer_epoch=producer[1],
                sequence=number,
                transactional=True,
            )
            for number in range(3)
        ]
        added = {
            f"v3_and_below_{key}": value
            for key, value in {**mine, "topics": [{"name": topic, "partitions": [0]}]}.items()
        }
        yield "add", errors_in(member.call("add_partitions_to_txn", 3, **added))
        sent = member.produce(topic, records[0], transactional_id=name)
        yield "write", sent["error_code"]
        broker.set_rules(whole[:1])
        sent = member.produce(topic, records[1], transactional_id=name)
        yield "without the topic", sent["error_code"]
        broker.set_rules(whole[1:])
        sent = member.produce(topic, records[1], transactional_id=name)
        yield "without the id", sent["error_code"]
        yield "no end", errors_in(member.call("end_txn", 3, **mine, committed=False))
        broker.set_rules(whole[:1])
        yield "an end", errors_in(member.call("end_txn", 3, **mine, committed=False))
        broker.admin.settle(topic)
        yield "left", broker.admin.values(topic, isolation=1)


def one_of_several_rules(broker: Broker) -> Iterator[Told]:
    """Deleting one rule of a resource leaves the others."""
    topic = broker.admin.create_topic(unique(f"{STEM}rules"))
    every = [
        *by("u1", rule("read", TOPIC, topic), rule("write", TOPIC, topic)),
        *by("u2", rule("read", TOPIC, topic), denied(rule("write", TOPIC, topic))),
        *by("*", rule("write", TOPIC, topic), denied(rule("read", TOPIC, topic))),
    ]
    with broker.connect("u1") as first, broker.connect("u2") as second:
        for left in (every, *(every[:n] + every[n + 1 :] for n in range(len(every)))):
            broker.set_rules(every)
            for gone in every:
                if gone not in left:
                    yield "gone", len(_taken(broker, gone))
            told = []
            for member in (first, second):
                told.append(errors_in(_fetch(member, topic, (0, -1))))
                told.append([member.produce(topic, [b"v"])["error_code"]])
            yield f"{len(left)} rules", told


def _taken(broker: Broker, gone: Acl) -> Sequence[Any]:
    answer = broker.admin.call(
        "delete_acls",
        3,
        filters=[
            {
                "resource_type_filter": gone.resource_type,
                "resource_name_filter": gone.resource_name,
                "pattern_type_filter": gone.pattern_type,
                "principal_filter": gone.principal,
                "host_filter": gone.host,
                "operation": gone.operation,
                "permission_type": gone.permission,
            }
        ],
    )
    broker.await_rules()
    found: Sequence[Any] = answer["filter_results"][0]["matching_acls"]
    return found


def a_rule_for_everybody(broker: Broker) -> Iterator[Told]:
    """A rule for all topics denies access to users without a rule, but not to super users."""
    topic = broker.admin.create_topic(unique(f"{STEM}all"))
    anything = rule("all", TOPIC, "*")
    with broker.connect("u1") as client, broker.connect("admin") as admin:
        for rules in (
            by("*", anything),
            by("u2", anything),
            by("*", denied(anything)),
            [*by("u1", rule("read", TOPIC, topic)), *by("*", denied(rule("read", TOPIC, "*")))],
            [*by("u1", rule("read", TOPIC, topic)), *by("*", denied(rule("describe", TOPIC, "*")))],
            [*by("*", anything), *by("u1", denied(rule("all", TOPIC, topic[:2])))],
            [
                *by("*", anything),
                *by(
                    "u1",
                    replace(denied(rule("all", TOPIC, "m")), pattern_type=PatternType.PREFIXED),
                ),
            ],
            by("admin", denied(anything)),
        ):
            broker.set_rules(rules)
            asked = {"topics": [{"name": topic}], "include_topic_authorized_operations": True}
            for who, member in (("u1", client), ("admin", admin)):
                answer = member.call("metadata", 8, **asked)["topics"][0]
                told = answer["error_code"], answer["topic_authorized_operations"]
                yield f"{who} sees", told
                yield f"{who} reads", errors_in(_fetch(member, topic, (0, -1)))


def addresses(broker: Broker, hosts: Sequence[str] = HOSTS) -> Iterator[Told]:
    """A rule's host is compared as text: it must be an address, not a host name or a network."""
    topic = broker.admin.create_topic(unique(f"{STEM}hosts"))
    with broker.connect("u1") as member:
        for host in hosts:
            allowed = replace(rule("read", TOPIC, topic), host=host)
            broker.set_rules(by("u1", allowed))
            yield f"from {host}", errors_in(_fetch(member, topic, (0, -1)))
            broker.set_rules(by("u1", rule("read", TOPIC, topic), denied(allowed)))
            yield f"but from {host}", errors_in(_fetch(member, topic, (0, -1)))


def letters(broker: Broker) -> Iterator[Told]:
    """Names are compared exactly; a prefix may be a single letter."""
    topic = broker.admin.create_topic(unique(f"{STEM}letters"))
    with broker.connect("u1") as member:
        for name, pattern in (
            (topic, "literal"),
            (topic.upper(), "literal"),
            (topic[:1], "prefixed"),
            (topic[:1].upper(), "prefixed"),
            (topic[:-1], "prefixed"),
            (f"{topic}x", "prefixed"),
            ("*", "prefixed"),
            ("*", "literal"),
            ("m*", "literal"),
        ):
            read = replace(rule("read", TOPIC, name), pattern_type=PatternType[pattern.upper()])
            broker.set_rules(by("u1", read))
            yield f"{pattern} {name == topic}", errors_in(_fetch(member, topic, (0, -1)))
            for principal in ("User:U1", "user:u1", "User:u1 ", "Group:u1", "User:u", "User:*"):
                broker.set_rules([replace(read, principal=principal)])
                yield principal, errors_in(_fetch(member, topic, (0, -1)))


def filters(broker: Broker) -> Iterator[Told]:
    """Create random rules, then describe and delete rules by random filters."""
    draw = random.Random(7)
    names = ("m-a", "m-ab", "m-", "*", "kafka-cluster")
    rules = [
        Acl(
            kind,
            pattern,
            draw.choice(names) if kind is not ResourceType.CLUSTER else CLUSTER_NAME,
            draw.choice(("User:a", "User:b", "User:*", "Group:a")),
            draw.choice(("*", "127.0.0.1", "10.0.0.1")),
            draw.choice(list(Operation)[2:]),
            draw.choice((Permission.ALLOW, Permission.DENY)),
        )
        for kind in list(ResourceType)[2:]
        for pattern in (PatternType.LITERAL, PatternType.PREFIXED)
        for _ in range(10)
    ]
    broker.set_rules(rules)
    for api in ("describe_acls", "delete_acls"):
        for _ in range(FILTERS):
            wanted = {
                "resource_type_filter": draw.choice((1, 1, 2, 3, 4, 5, 6, 7)),
                "resource_name_filter": draw.choice((None, None, "m-abc", *names)),
                "pattern_type_filter": draw.choice((1, 2, 2, 3, 4)),
                "principal_filter": draw.choice((None, None, "User:a", "User:*")),
                "host_filter": draw.choice((None, None, "*", "10.0.0.1")),
                "operation": draw.choice((1, 1, 1, *range(2, 16))),
                "permission_type": draw.choice((1, 1, 2, 3)),
            }
            if api == "delete_acls":
                found = broker.admin.call(api, 3, filters=[wanted])["filter_results"][0]
                broker.await_rules()
                told = found["error_code"], _plainly(found["matching_acls"])
            else:
                found = broker.admin.call(api, 3, **wanted)
                rows = [{**row, **acl} for row in found["resources"] for acl in row.get("acls", ())]
                told = found["error_code"], _plainly(rows)
            yield f"{api} {wanted}", told
    left = broker.admin.call("describe_acls", 3, **EVERY_RULE)["resources"]
    yield "left", _plainly([{**row, **acl} for row in left for acl in row["acls"]])


def _plainly(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sorted rules, without the markers that :meth:`Broker.await_rules` adds."""
    keys = ("resource_type", "resource_name", "pattern_type", "principal", "host")
    return sorted(
        repr([row[key] for key in (*keys, "operation", "permission_type")])
        for row in rows
        if row["resource_name"] != MARKER
    )


def some_topic(broker: Broker) -> Iterator[Told]:
    """An idempotent producer without transactions needs Write on at least one topic."""
    draw = random.Random(11)
    rules: dict[str, list[Acl]] = {}
    for number in range(USERS):
        rules[f"u{number}"] = by(
            f"u{number}",
            *(
                Acl(
                    draw.choice((TOPIC, TOPIC, TOPIC, GROUP)),
                    draw.choice((PatternType.LITERAL, PatternType.PREFIXED)),
                    draw.choice(("a", "ab", "abc", "b", "*")),
                    ME,
                    draw.choice(("*", "*", "*", "127.0.0.1", "127.0.0.2")),
                    draw.choice((Operation.WRITE, Operation.WRITE, Operation.ALL, Operation.READ)),
                    draw.choice((Permission.ALLOW, Permission.DENY)),
                )
                for _ in range(draw.randint(1, 5))
            ),
        )
    broker.set_rules(acl for some in rules.values() for acl in some)
    asked = {"transaction_timeout": 1000, "producer_id": -1, "producer_epoch": -1}
    for user, some in rules.items():
        answer = broker.of(user).call("init_producer_id", 4, transactional_id=None, **asked)
        yield f"{some}", answer["error_code"]


SCENES: Sequence[Callable[[Broker], Iterator[Told]]] = (
    a_session_of_fetches,
    a_long_poll,
    a_member_of_a_group,
    an_expression,
    a_transaction,
    one_of_several_rules,
    a_rule_for_everybody,
    addresses,
    letters,
    filters,
    some_topic,
)
