"""Groups with live members and open transactions, before and after a broker is killed.

A scenario has two parts. The second part runs after the kill, either on the restarted Apache Kafka
or on Fencepost with the imported log. The members and producers continue with their former ids.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.oracle.tracer import Tracer
from tests.oracle.traces_consumer import beat, describe, enter, listed, of, topic
from tests.oracle.traces_groups import ready
from tests.oracle.traces_migration import (
    alive,
    assignment,
    join,
    leave,
    protocols,
    stable,
    subscription,
    sync,
)
from tests.oracle.traces_offsets import commit
from tests.oracle.traces_txn import add, end, init
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import READ_COMMITTED, TRANSACTION, Cluster
from tests.support.raw import Answer
from tests.support.waits import until

LONG_MS = 600_000
"""Timeout of sessions and transactions that must not expire during the move."""

SHORT_MS = 20_000
"""Timeout of sessions and transactions that must expire, but only after the first part."""

State = Any


@dataclass(frozen=True, slots=True)
class Move:
    """One scenario. ``before`` returns a state, which ``after`` gets after the kill."""

    before: Callable[[Tracer], State]
    after: Callable[[Tracer, State], None]
    groups: tuple[str, ...] = ()
    """The groups that are described right before and after the move."""
    is_short: bool = False
    """Whether the scenario waits for a member to expire, which needs a short session timeout."""

    @property
    def name(self) -> str:
        return self.after.__name__


def looked_at(t: Tracer, groups: tuple[str, ...]) -> None:
    """Record the responses of Describe, List and OffsetFetch for ``groups``."""
    ready(t, *groups)
    for group in groups:
        t("describe_groups", 6, groups=[group])
        describe(t, group)
        listed(t, group, states_filter=[], types_filter=[])
        t("offset_fetch", 7, group_id=group, topics=None)


def position(t: Tracer, group: str, member: str, epoch: int) -> Answer:
    """Fetch the committed offsets of a member of the consumer protocol."""
    topics = [{"name": f"{group}-a", "partition_indexes": [0]}]
    asked = {"group_id": group, "member_id": member, "member_epoch": epoch, "topics": topics}
    return t("offset_fetch", 9, groups=[asked], require_stable=True)


def held(joined: Answer) -> dict[str, Any]:
    """Return a classic member's id and generation, as its OffsetCommit requests name them."""
    return {
        "generation_id_or_member_epoch": joined["generation_id"],
        "member_id": joined["member_id"],
    }


def second(t: Tracer, group: str, first: Answer, name: str, *given: tuple[int, ...]) -> Answer:
    """Join a second classic member; the first member leads, and assigns partitions to both."""
    body: dict[str, Any] = {
        "group_id": group,
        "session_timeout": LONG_MS,
        "rebalance_timeout": LONG_MS,
        "protocol_type": "consumer",
        "protocols": protocols(name),
    }
    with Cluster(t.bootstrap) as other:
        member = other.call("join_group", 5, **body, member_id="")["member_id"]
        other.send("join_group", 5, **body, member_id=member)
        me = {"generation_id": first["generation_id"], "member_id": first["member_id"]}
        until(
            lambda: (
                t.quietly("heartbeat", 3, group_id=group, **me)["error_code"]
                == "rebalance_in_progress"
            ),
            "a rebalance",
        )
        if not given:
            return {**body, "member_id": member, "generation_id": -1}
        led = join(t, group, first["member_id"], name, **times(LONG_MS))
        followed = other.receive()
        plan = [
            {"member_id": member_id, "assignment": assignment(name, *partitions)}
            for member_id, partitions in zip((led["member_id"], member), given, strict=True)
        ]
        place = {"group_id": group, "generation_id": led["generation_id"]}
        t("sync_group", 3, **place, member_id=led["member_id"], assignments=plan)
        t.note("the second", other.call("sync_group", 3, **place, member_id=member))
        return followed


def times(timeout_ms: int) -> dict[str, int]:
    return {"session_timeout": timeout_ms, "rebalance_timeout": timeout_ms}


# --- classic groups ------------------------------------------------------------------------------


def two_classic_members(t: Tracer) -> State:
    ready(t, "v-two")
    topic(t, "v-two-a", 4)
    first = stable(t, "v-two", "v-two-a", 0, 1, 2, 3, **times(LONG_MS))
    other = second(t, "v-two", first, "v-two-a", (0, 1), (2, 3))
    first = {**first, "generation_id": other["generation_id"]}
    commit(t, "v-two", 7, ("v-two-a", 0, 5, "told"), **held(first))
    return first, other


def classic_members_come_back(t: Tracer, state: State) -> None:
    first, other = state
    for member in (first, other):
        alive(t, "v-two", member)
        sync(t, "v-two", member)
        commit(t, "v-two", 7, ("v-two-a", 1, 6, ""), **held(member))
    alive(t, "v-two", {**first, "generation_id": first["generation_id"] - 1})
    alive(t, "v-two", first, member_id="stranger")
    wrong = {**held(first), "generation_id_or_member_epoch": first["generation_id"] + 1}
    commit(t, "v-two", 7, ("v-two-a", 1, 7, ""), **wrong)
    commit(t, "v-two", 7, ("v-two-a", 1, 7, ""))
    leave(t, "v-two", other["member_id"])
    alive(t, "v-two", first)
    again = join(t, "v-two", first["member_id"], "v-two-a", **times(LONG_MS))
    sync(t, "v-two", again, assignment("v-two-a", 0, 1, 2, 3))
    looked_at(t, ("v-two",))


def a_static_member(t: Tracer) -> State:
    ready(t, "v-static")
    topic(t, "v-static-a", 2)
    return stable(t, "v-static", "v-static-a", 0, 1, group_instance_id="i", **times(LONG_MS))


def a_static_member_is_replaced(t: Tracer, first: State) -> None:
    alive(t, "v-static", first, group_instance_id="i")
    new = join(t, "v-static", "", "v-static-a", group_instance_id="i", **times(LONG_MS))
    alive(t, "v-static", first, group_instance_id="i")
    alive(t, "v-static", new, group_instance_id="i")
    sync(t, "v-static", new, group_instance_id="i")
    looked_at(t, ("v-static",))


def a_rebalance_under_way(t: Tracer) -> State:
    ready(t, "v-mid")
    topic(t, "v-mid-a", 2)
    first = stable(t, "v-mid", "v-mid-a", 0, 1, **times(LONG_MS))
    return first, second(t, "v-mid", first, "v-mid-a")


def a_join_phase_is_forgotten(t: Tracer, state: State) -> None:
    first, other = state
    looked_at(t, ("v-mid",))
    alive(t, "v-mid", first)
    sync(t, "v-mid", first)
    t("join_group", 5, **{k: v for k, v in other.items() if k != "generation_id"})
    commit(t, "v-mid", 7, ("v-mid-a", 0, 1, ""), **held(first))
    looked_at(t, ("v-mid",))


# --- consumer groups -----------------------------------------------------------------------------


class Consumer:
    """A member that sends its last epoch and assignment in each heartbeat."""

    def __init__(self, group: str, member: str, instance: str | None = None) -> None:
        self.group, self.member, self.instance = group, member, instance
        self.epoch = 0
        self.owned: list[dict[str, Any]] = []

    def enters(self, t: Tracer, *names: str, **more: Any) -> Answer:
        return self._heard(
            enter(t, self.group, self.member, *names, instance_id=self.instance, **more)
        )

    def beats(self, t: Tracer, **more: Any) -> Answer:
        body = {"instance_id": self.instance, "topic_partitions": self.owned, **more}
        return self._heard(beat(t, self.group, self.member, self.epoch, **body))

    def _heard(self, answer: Answer) -> Answer:
        self.epoch = answer["member_epoch"]
        if answer["assignment"] is not None:
            self.owned = [
                part
                for row in answer["assignment"]["topic_partitions"]
                for part in of(str(row["topic_id"]), *row["partitions"])
            ]
        return answer


def in_the_middle_of_a_revocation(t: Tracer) -> State:
    ready(t, "v-con")
    for name in ("v-con-a", "v-con-b"):
        topic(t, name, 4)
    first, other = Consumer("v-con", "m1"), Consumer("v-con", "m2")
    first.enters(t, "v-con-a")
    other.enters(t, "v-con-a")
    first.beats(t)
    who = {"generation_id_or_member_epoch": first.epoch, "member_id": "m1"}
    commit(t, "v-con", 9, ("v-con-a", 0, 5, "told"), **who)
    return first, other


def a_revocation_is_finished_under_a_new_subscription(t: Tracer, state: State) -> None:
    # The first heartbeat changes the subscription, so that both brokers raise the group epoch.
    first, other = copy.deepcopy(state)
    other.beats(t, rebalance_timeout=LONG_MS, subscribed_topic_names=["v-con-a", "v-con-b"])
    position(t, "v-con", "m1", first.epoch)
    beat(t, "v-con", "m1", first.epoch + 5)
    for _ in range(3):
        for consumer in (first, other):
            consumer.beats(t)
            describe(t, "v-con")
    position(t, "v-con", "m1", first.epoch)
    beat(t, "v-con", "stranger", 3)
    # A fenced member joins again under the same id.
    beat(t, "v-con", "m2", other.epoch + 5)
    other.owned = []
    other.enters(t, "v-con-a")
    for _ in range(2):
        for consumer in (first, other):
            consumer.beats(t)
    beat(t, "v-con", "m2", -1)
    describe(t, "v-con")


def two_consumers(t: Tracer) -> State:
    ready(t, "v-same")
    topic(t, "v-same-a", 4)
    first, other = Consumer("v-same", "m1"), Consumer("v-same", "m2")
    first.enters(t, "v-same-a")
    other.enters(t, "v-same-a")
    for consumer in (first, first, other):
        consumer.beats(t)
    return first, other


def consumers_go_on_with_what_they_have(t: Tracer, state: State) -> None:
    first, other = copy.deepcopy(state)
    for _ in range(2):
        for consumer in (first, other):
            consumer.beats(t)
            position(t, "v-same", consumer.member, consumer.epoch)
    describe(t, "v-same")
    who = {"generation_id_or_member_epoch": other.epoch, "member_id": "m2"}
    commit(t, "v-same", 9, ("v-same-a", 3, 5, "told"), **who)


def one_that_left_for_a_while(t: Tracer) -> State:
    ready(t, "v-away")
    topic(t, "v-away-a", 2)
    first, stays = Consumer("v-away", "m1", "i"), Consumer("v-away", "m2", "j")
    first.enters(t, "v-away-a")
    stays.enters(t, "v-away-a")
    for consumer in (first, first, stays):
        consumer.beats(t)
    beat(t, "v-away", "m1", -2, instance_id="i")
    return stays


def a_static_consumer_takes_its_place_again(t: Tracer, state: State) -> None:
    stays = copy.deepcopy(state)
    back = Consumer("v-away", "m3", "i")
    back.enters(t, "v-away-a")
    beat(t, "v-away", "m1", back.epoch, instance_id="i")
    for consumer in (back, stays, back):
        consumer.beats(t)
    describe(t, "v-away")


def one_with_an_expression(t: Tracer) -> State:
    ready(t, "v-rx")
    topic(t, "v-rx-a", 2)
    who = {"rebalance_timeout": LONG_MS, "topic_partitions": []}
    answer = t.quietly(
        "consumer_group_heartbeat",
        1,
        group_id="v-rx",
        member_id="m1",
        member_epoch=0,
        subscribed_topic_regex="v-rx-.*",
        subscribed_topic_names=None,
        **who,
    )
    epoch = answer["member_epoch"]

    def assigned() -> Any:
        nonlocal epoch
        told = t.quietly(
            "consumer_group_heartbeat",
            1,
            group_id="v-rx",
            member_id="m1",
            member_epoch=epoch,
            rebalance_timeout=-1,
            topic_partitions=None,
        )
        epoch = told["member_epoch"]
        return told["assignment"] and told["assignment"]["topic_partitions"]

    until(assigned, "partitions by expression")
    return epoch


def an_expression_still_holds(t: Tracer, state: State) -> None:
    consumer = Consumer("v-rx", "m1")
    consumer.epoch = state
    consumer.beats(t, topic_partitions=None)
    consumer.beats(t)
    position(t, "v-rx", "m1", consumer.epoch)
    describe(t, "v-rx")


def members_of_both_kinds(t: Tracer) -> State:
    ready(t, "v-mix")
    topic(t, "v-mix-a", 2)
    consumer = Consumer("v-mix", "m")
    consumer.enters(t, "v-mix-a")
    joined = join(t, "v-mix", "", "v-mix-a", **times(LONG_MS))
    sync(t, "v-mix", joined)
    for _ in range(2):
        consumer.beats(t)
    return consumer, again(t, joined)


def again(t: Tracer, joined: Answer) -> Answer:
    """Rejoin the classic member, so that it gets the partitions that other members gave up."""
    owned = {"version": 1, "owned": {}}
    place = join(
        *(t, "v-mix", joined["member_id"], "v-mix-a"),
        **times(LONG_MS),
        protocols=[{"name": "range", "metadata": subscription("v-mix-a", **owned)}],
    )
    sync(t, "v-mix", place)
    return place


def members_of_both_kinds_come_back(t: Tracer, state: State) -> None:
    consumer, classic = copy.deepcopy(state)
    alive(t, "v-mix", classic)
    sync(t, "v-mix", classic)
    consumer.beats(t)
    classic = again(t, classic)
    alive(t, "v-mix", classic)
    describe(t, "v-mix")
    commit(t, "v-mix", 7, ("v-mix-a", 0, 3, ""), **held(classic))
    # When the last member of the consumer protocol leaves, the group becomes classic.
    beat(t, "v-mix", "m", -1)
    t("describe_groups", 6, groups=["v-mix"])
    alive(t, "v-mix", classic)


# --- transactions --------------------------------------------------------------------------------

Ids = tuple[int, int]


def sent(
    t: Tracer, name: str, who: Ids, sequence: int, value: bytes, where: int = 0, version: int = 12
) -> Answer:
    data = batch(
        [value],
        producer_id=who[0],
        producer_epoch=who[1],
        sequence=sequence,
        transactional=True,
    )
    return t(
        "produce",
        version,
        transactional_id=name,
        acks=-1,
        timeout=5000,
        topic_data=[{"name": "v-txn", "partition_data": [{"index": where, "records": data}]}],
    )


def offsets(t: Tracer, version: int, name: str, who: Ids, group: str, offset: int) -> Answer:
    return t(
        "txn_offset_commit",
        version,
        transactional_id=name,
        group_id=group,
        producer_id=who[0],
        producer_epoch=who[1],
        generation_id=-1,
        topics=[
            {
                "name": "v-txn",
                "partitions": [{"partition_index": 0, "committed_offset": offset}],
            }
        ],
    )


def shown(t: Tracer, *partitions: int, is_open: bool = False) -> None:
    """Record the partitions' committed records, last stable offsets and open producers.

    Unless a transaction is open, first wait until the last transaction has ended, because Apache
    Kafka writes the markers after its response.
    """
    for partition in partitions:
        where = {"partition": partition}
        if not is_open:
            until(functools.partial(_is_settled, t, partition), f"an end in {partition}")
        t.note("stable", t.cluster.lso("v-txn", partition))
        t.note("end", t.cluster.offset("v-txn", partition))
        t.note("values", t.cluster.values("v-txn", isolation=READ_COMMITTED, **where))
        t(
            "describe_producers",
            0,
            topics=[{"name": "v-txn", "partition_indexes": [partition]}],
        )


def _is_settled(t: Tracer, partition: int) -> bool:
    return t.cluster.lso("v-txn", partition) == t.cluster.offset("v-txn", partition)


def claimed(t: Tracer, name: str, timeout_ms: int = LONG_MS) -> Ids:
    t.cluster.coordinator(name, TRANSACTION)
    answer = init(t, name, transaction_timeout=timeout_ms)
    return answer["producer_id"], answer["producer_epoch"]


def open_transactions(t: Tracer) -> State:
    """Open transactions of TV1 and TV2: their producers end some, and one times out."""
    t.cluster.create_topic("v-txn", 4)
    ready(t, "v-exact")
    old, new = claimed(t, "v-old"), claimed(t, "v-new")
    # Each producer runs an earlier transaction, so that epochs and sequences do not start at zero.
    sent(t, "v-new", new, 0, b"former", 1)
    ended = end(t, 5, "v-new", new, commit=True)
    new = ended["producer_id"], ended["producer_epoch"]
    add(t, 3, "v-old", old, [("v-txn", [0])])
    sent(t, "v-old", old, 0, b"former", 0, 11)
    end(t, 4, "v-old", old, commit=False)
    for partition in (0, 2):
        add(t, 3, "v-old", old, [("v-txn", [partition])])
    sent(t, "v-old", old, 1, b"old 1", 0, 11)
    sent(t, "v-new", new, 0, b"new 1", 1)
    offsets(t, 5, "v-new", new, "v-exact", 7)
    slow = claimed(t, "v-slow", SHORT_MS)
    sent(t, "v-slow", slow, 0, b"never seen", 3)
    for name in ("v-old", "v-new", "v-slow"):
        t("describe_transactions", 0, transactional_ids=[name])
    shown(t, 0, 1, 2, 3, is_open=True)
    return old, new, slow


def open_transactions_end(t: Tracer, state: State) -> None:
    old, new, slow = state
    for name in ("v-old", "v-new"):
        t.cluster.coordinator(name, TRANSACTION)
        t("describe_transactions", 0, transactional_ids=[name])
    shown(t, 0, 1, is_open=True)
    asked = [{"name": "v-txn", "partition_indexes": [0]}]
    t("offset_fetch", 7, group_id="v-exact", require_stable=True, topics=asked)
    # A duplicate batch, a batch after a gap, and a batch with a former epoch.
    sent(t, "v-new", new, 0, b"new 1", 1)
    sent(t, "v-new", new, 5, b"gap", 1)
    sent(t, "v-new", (new[0], new[1] - 1), 1, b"late", 1)
    sent(t, "v-new", new, 1, b"new 2", 1)
    sent(t, "v-new", new, 0, b"new 3", 2)
    offsets(t, 5, "v-new", new, "v-exact", 8)
    ended = end(t, 5, "v-new", new, commit=True)
    end(t, 5, "v-new", new, commit=True)
    t("offset_fetch", 7, group_id="v-exact", require_stable=True, topics=asked)
    new = ended["producer_id"], ended["producer_epoch"]
    shown(t, 1)
    sent(t, "v-old", old, 2, b"old 2", 0, 11)
    end(t, 4, "v-old", old, commit=True)
    shown(t, 0, 2)
    # The next batch in sequence is accepted.
    sent(t, "v-new", new, 0, b"new 4", 1)
    end(t, 5, "v-new", new, commit=False)
    shown(t, 1, 3)
    t("describe_transactions", 0, transactional_ids=["v-slow"])
    sent(t, "v-slow", slow, 1, b"too late", 3)
    end(t, 5, "v-slow", slow, commit=True)
    again = claimed(t, "v-slow", LONG_MS)
    sent(t, "v-slow", again, 0, b"seen", 3)
    end(t, 5, "v-slow", again, commit=True)
    shown(t, 3)


# --- members and producers that never return -----------------------------------------------------


def silent_members(t: Tracer) -> State:
    ready(t, "v-dead", "v-half")
    topic(t, "v-dead-a", 2)
    stable(t, "v-dead", "v-dead-a", 0, 1, **times(SHORT_MS))
    first, other = Consumer("v-half", "m1"), Consumer("v-half", "m2")
    first.enters(t, "v-dead-a")
    other.enters(t, "v-dead-a")
    for consumer in (first, first, other):
        consumer.beats(t)
    return first


def silent_members_are_removed(t: Tracer, state: State) -> None:
    consumer = copy.deepcopy(state)
    consumer.beats(t)

    def goes_on() -> None:
        asked = requests.consumer_group_heartbeat(
            "v-half", "m1", consumer.epoch, topic_partitions=consumer.owned
        )
        consumer._heard(t.quietly("consumer_group_heartbeat", 1, **asked))

    def alone() -> bool:
        goes_on()
        (found,) = t.quietly("consumer_group_describe", 1, group_ids=["v-half"])["groups"]
        return len(found["members"]) == 1 and found["assignment_epoch"] == consumer.epoch

    def empty() -> bool:
        goes_on()
        (found,) = t.quietly("describe_groups", 5, groups=["v-dead"])["groups"]
        return found["group_state"] == "Empty"

    until(alone, "the silent consumer is removed", poll_s=0.2)
    until(empty, "the silent classic member is removed", poll_s=0.2)
    consumer.beats(t)
    looked_at(t, ("v-half", "v-dead"))
    beat(t, "v-half", "m2", 3)
    beat(t, "v-half", "m1", -1)
    stable(t, "v-dead", "v-dead-a", 0, 1)
    looked_at(t, ("v-dead",))


MOVES = (
    Move(two_classic_members, classic_members_come_back, ("v-two",)),
    Move(a_static_member, a_static_member_is_replaced, ("v-static",)),
    # No log contains a group's join phase, so its description before the move is not compared.
    Move(a_rebalance_under_way, a_join_phase_is_forgotten),
    Move(
        in_the_middle_of_a_revocation,
        a_revocation_is_finished_under_a_new_subscription,
        ("v-con",),
    ),
    Move(two_consumers, consumers_go_on_with_what_they_have, ("v-same",)),
    Move(one_that_left_for_a_while, a_static_consumer_takes_its_place_again, ("v-away",)),
    Move(one_with_an_expression, an_expression_still_holds, ("v-rx",)),
    Move(members_of_both_kinds, members_of_both_kinds_come_back, ("v-mix",)),
    Move(silent_members, silent_members_are_removed, ("v-dead", "v-half"), is_short=True),
    # This scenario is the last, because its timeout begins with its first record.
    Move(open_transactions, open_transactions_end),
)
