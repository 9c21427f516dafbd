"""Request sequences for the transaction coordinator, and for partitions of transactions."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.oracle.tracer import Tracer
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import GROUP, TRANSACTION
from tests.support.raw import Answer
from tests.support.waits import until

Identity = tuple[int, int]


def init(
    t: Tracer,
    name: str | None,
    version: int = 4,
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    **more: Any,
) -> Answer:
    body = requests.init_producer_id(name, (producer_id, producer_epoch), **more)
    return t("init_producer_id", version, **body)


def claimed(t: Tracer, name: str) -> Identity:
    t.cluster.coordinator(name, TRANSACTION)
    answer = init(t, name)
    return answer["producer_id"], answer["producer_epoch"]


def add(t: Tracer, version: int, name: str, who: Identity, topics: Any) -> Answer:
    added = requests.added_partitions(name, who, *topics)
    return t("add_partitions_to_txn", version, **requests.add_partitions_to_txn(added))


def add_offsets(t: Tracer, version: int, name: str, who: Identity, group: str) -> None:
    t("add_offsets_to_txn", version, **requests.add_offsets_to_txn(name, who, group))


def end(t: Tracer, version: int, name: str, who: Identity, commit: bool) -> Answer:
    return t("end_txn", version, **requests.end_txn(name, who, committed=commit))


def produce(
    t: Tracer,
    version: int,
    topic: str,
    name: str | None,
    who: Identity,
    sequence: int,
    *,
    transactional: bool = True,
    partition: int = 0,
    acks: int = -1,
) -> Answer:
    data = batch(
        [b"v"],
        producer_id=who[0],
        producer_epoch=who[1],
        sequence=sequence,
        transactional=transactional,
    )
    row = requests.produce_topic(topic, data, partition=partition)
    return t("produce", version, **requests.produce(row, transactional_id=name, acks=acks))


def offsets(t: Tracer, version: int, name: str, who: Identity, *, member_id: str = "") -> Answer:
    """Commit one offset. The group and the topic have the name of the transactional id."""
    row = requests.offset_commit_topic(name, 0, committed_offset=5)
    body = requests.txn_offset_commit(name, who, name, row, member_id=member_id)
    return t("txn_offset_commit", version, **body)


def settle(t: Tracer, topic: str, partition: int = 0) -> None:
    """Wait for the markers; then record the log end offset and the contents."""
    until(
        lambda: t.cluster.lso(topic, partition) == t.cluster.offset(topic, partition),
        f"the end of every transaction in {topic}",
    )
    t.note(
        f"{topic}-{partition}",
        [
            (b.base_offset, b.attributes, b.producer_epoch, b.base_sequence)
            for b in t.cluster.read(topic, partition=partition, controls=True)
        ],
    )


def ended(t: Tracer, name: str) -> None:
    """Wait until the transaction of ``name`` is no longer in a Prepare state."""

    def state() -> bool:
        listed = t.cluster.call("list_transactions", 0)["transaction_states"]
        found = [x["transaction_state"] for x in listed if x["transactional_id"] == name]
        return not any(x.startswith("Prepare") for x in found)

    until(state, f"completion of {name}")


def initialising(t: Tracer) -> None:
    for version in range(6):
        init(t, None, version)
        name = f"init-v{version}"
        t.cluster.coordinator(name, TRANSACTION)
        init(t, name, version)
        init(t, name, version)
        init(t, "", version)
        for timeout_ms in (0, -1, 900_001, 900_000, 1):
            init(t, name, version, transaction_timeout=timeout_ms)
    for version in (3, 4, 5):
        name = f"init-bump-v{version}"
        pid, epoch = claimed(t, name)
        init(t, name, version, producer_id=pid)
        init(t, name, version, producer_epoch=epoch)
        init(t, name, version, producer_id=pid, producer_epoch=epoch)
        # A retry of the InitProducerId that bumped the epoch, with the former epoch.
        init(t, name, version, producer_id=pid, producer_epoch=epoch)
        init(t, name, version, producer_id=pid, producer_epoch=epoch + 5)
        init(t, name, version, producer_id=pid + 1000, producer_epoch=epoch)
        init(t, f"{name}-unknown", version, producer_id=pid, producer_epoch=epoch)


def claiming_an_open_transaction(t: Tracer) -> None:
    t.cluster.create_topic("claimed")
    for version in (0, 3, 4, 5):
        name = f"claim-v{version}"
        who = claimed(t, name)
        add(t, 3, name, who, [("claimed", [0])])
        produce(t, 9, "claimed", name, who, 0)
        init(t, name, version)
        settle(t, "claimed")
        for end_version in range(6):
            end(t, end_version, name, who, True)
            ended(t, name)
        produce(t, 9, "claimed", name, who, 1)
        produce(t, 12, "claimed", name, who, 1)
        for add_version in range(4):
            add(t, add_version, name, who, [("claimed", [0])])
    who = claimed(t, "claim-bump")
    add(t, 3, "claim-bump", who, [("claimed", [0])])
    init(t, "claim-bump", 4, producer_id=who[0], producer_epoch=who[1])
    settle(t, "claimed")


def claiming_with_an_identity(t: Tracer) -> None:
    """InitProducerId with ids and epochs near the current values, after different requests.

    See KIP-360 and KIP-890.
    """
    t.cluster.create_topic("continued", 5)
    histories: dict[str, str] = {
        "new": "",
        "claimed again": "c",
        "continued": "i",
        "ended by v4": "p4",
        "ended by v5": "p5",
        "continued, ended by v4": "ip4",
        "continued, ended by v5": "ip5",
        "ended by v5, then by v4": "p5p4",
        "ended by v5, claimed": "p5c",
        "taken over": "pc",
        "taken over by itself": "pi",
        "open": "ip",
    }
    for history, steps in histories.items():
        for shift in (1, 0, -1, -2):
            name = f"{history} {shift}"
            pid, epoch = claimed(t, name)
            for step in steps:
                answer: Answer = {}
                if step == "p":
                    own = shift + 2 if history == "open" else 4
                    produce(t, 12, "continued", name, (pid, epoch), 0, partition=own)
                elif step == "c":
                    answer = init(t, name)
                elif step == "i":
                    answer = init(t, name, producer_id=pid, producer_epoch=epoch)
                else:
                    answer = end(t, int(step), name, (pid, epoch), True)
                if answer.get("producer_id", -1) >= 0:
                    pid, epoch = answer["producer_id"], answer["producer_epoch"]
                ended(t, name)
            if epoch + shift >= 0:
                init(t, name, 5, producer_id=pid, producer_epoch=epoch + shift)
                ended(t, name)
                shown = t.quietly("describe_transactions", 0, transactional_ids=[name])
                state = shown["transaction_states"][0]
                t.note(name, [state["transaction_state"], state["producer_epoch"]])


def adding_partitions(t: Tracer) -> None:
    t.cluster.create_topic("added", 2)
    t.cluster.coordinator("added", GROUP)
    for version in range(4):
        name = f"add-v{version}"
        who = claimed(t, name)
        pid, epoch = who
        add(t, version, "", who, [("added", [0])])
        add(t, version, f"{name}-unknown", who, [("added", [0])])
        add(t, version, name, (pid + 1000, epoch), [("added", [0])])
        add(t, version, name, (pid, epoch + 1), [("added", [0])])
        add(t, version, name, (pid, epoch - 1), [("added", [0])])
        add(t, version, name, who, [("added", [0, 9]), ("no-such-topic", [0])])
        add(t, version, name, who, [("__consumer_offsets", [0]), ("added", [0])])
        add(t, version, name, who, [("__transaction_state", [0])])
        add(t, version, name, who, [])
        add(t, version, name, who, [("added", [0, 1])])
        add(t, version, name, who, [("added", [1])])
        t("describe_transactions", 0, transactional_ids=[name])
        end(t, 3, name, who, False)
        ended(t, name)
    for version in range(5):
        name = f"add-offsets-v{version}"
        pid, epoch = claimed(t, name)
        for given, group in (
            ((pid, epoch), ""),
            ((pid + 1000, epoch), "added"),
            ((pid, epoch + 1), "added"),
            ((pid, epoch), "added"),
            ((pid, epoch), "added"),
        ):
            add_offsets(t, version, name, given, group)
        add_offsets(t, version, f"{name}-unknown", (pid, epoch), "added")


def adding_as_a_broker_does(t: Tracer) -> None:
    t.cluster.create_topic("batched", 2)
    for version in (4, 5):
        one, two = claimed(t, f"batched-1-v{version}"), claimed(t, f"batched-2-v{version}")
        for verify in (True, False, True):
            added = [
                requests.added_partitions(name, who, ("batched", [0, 1]), verify_only=verify)
                for name, who in (
                    (f"batched-1-v{version}", one),
                    (f"batched-2-v{version}", (two[0], two[1] + 1)),
                    (f"batched-none-v{version}", two),
                )
            ]
            t("add_partitions_to_txn", version, **requests.add_partitions_to_txn(*added))


def ending_in_every_state(t: Tracer) -> None:
    """EndTxn v0–v5, for commit and abort, in each stable state; each request is also retried."""
    t.cluster.create_topic("ended", 6)
    for version in range(6):
        for first in (True, False):
            name = f"end-v{version}-{first}"
            who = claimed(t, name)
            pid, epoch = who
            end(t, version, "", who, first)
            end(t, version, f"{name}-unknown", who, first)
            end(t, version, name, (pid + 1000, epoch), first)
            end(t, version, name, (pid, epoch + 1), first)
            end(t, version, name, (pid, epoch - 1), first)
            # The state is Empty, because no partition was ever added.
            answer = end(t, version, name, who, first)
            if version == 5 and answer["error_code"] == "none":
                who = answer["producer_id"], answer["producer_epoch"]
            ended(t, name)
            add(t, 3, name, who, [("ended", [version])])
            produce(t, 9, "ended", name, who, 0, partition=version)
            for commit in (first, first, not first):
                end(t, version, name, who, commit)
                ended(t, name)
            settle(t, "ended", version)
            if version == 5:
                late = pid, who[1] + 1
                for commit in (first, not first):
                    end(t, version, name, late, commit)
                    ended(t, name)
                # The former request, repeated in the new state.
                end(t, 4, name, late, first)
                end(t, 4, name, (pid, who[1] + 2), first)
            else:
                end(t, 5, name, who, first)
                ended(t, name)
            answer = t.quietly("describe_transactions", 0, transactional_ids=[name])
            state = answer["transaction_states"][0]
            t.note(f"state of {name}", [state["transaction_state"], state["producer_epoch"]])


def producing_in_transactions(t: Tracer) -> None:
    t.cluster.create_topic("produced", 2)
    for version in (3, 7, 9, 10, 11, 12):
        name = f"produce-v{version}"
        who = claimed(t, name)
        pid, epoch = who
        # Without AddPartitionsToTxn: an error before version 12, an implicit add from then on.
        produce(t, version, "produced", name, (pid + 1000, epoch), 0, acks=2)
        produce(t, version, "produced", name, who, 0, acks=2)
        produce(t, version, "produced", None, who, 0, acks=2)
        produce(t, version, "produced", name, who, 0)
        add(t, 3, name, who, [("produced", [0, 1])])
        produce(t, version, "produced", name, who, 0, partition=1)
        produce(t, version, "produced", name, who, 0)
        produce(t, version, "produced", name, who, 0)
        produce(t, version, "produced", name, who, 5)
        produce(t, version, "produced", name, (pid + 1000, epoch), 0)
        produce(t, version, "produced", name, who, 1, transactional=False)
        produce(t, version, "produced", None, who, 1)
        produce(t, version, "produced", f"{name}-unknown", who, 1)
        # This request must be the last. When Apache Kafka refuses the verification, it keeps a
        # state with sequence 0, and refuses all other sequences until the next marker.
        produce(t, version, "produced", name, (pid, epoch + 1), 0)
        end(t, 4, name, who, version % 2 == 1)
        settle(t, "produced", 0)
        produce(t, version, "produced", name, who, 2)
        produce(t, version, "produced", None, who, 2, transactional=False)
        ended(t, name)
        answer = t.quietly("describe_transactions", 0, transactional_ids=[name])
        state = answer["transaction_states"][0]
        t.note(f"state of {name}", [state["transaction_state"], state["producer_epoch"]])
        end(t, 4, name, who, True)
        ended(t, name)
    settle(t, "produced", 1)


def a_batch_of_nobody(t: Tracer) -> None:
    t.cluster.create_topic("nobody-s")
    for version in (9, 12):
        name = f"nobody-v{version}"
        claimed(t, name)
        produce(t, version, "nobody-s", name, (-1, -1), -1)
        produce(t, version, "nobody-s", None, (-1, -1), -1)


def sequences(t: Tracer) -> None:
    t.cluster.create_topic("sequences", 3)
    who = t.cluster.init_producer()
    pid, epoch = who
    for sequence in (0, 1, 2, 2, 0, 4, 3, 4, 5, 6, 7, 1, 3, 7):
        produce(t, 9, "sequences", None, (pid, epoch), sequence, transactional=False)
    for given, sequence in ((epoch + 1, 1), (epoch + 1, 0), (epoch, 8), (epoch + 1, 1)):
        produce(t, 9, "sequences", None, (pid, given), sequence, transactional=False)
    produce(t, 9, "sequences", None, (pid + 7777, 3), 42, transactional=False, partition=1)
    for sequence in (2**31 - 1, 0, 1):
        produce(
            t, 9, "sequences", None, (pid + 8888, 0), sequence, transactional=False, partition=2
        )
    rows = requests.indexes_of("sequences", 0, 9)
    t("describe_producers", 0, **requests.describe_producers(rows))
    for name in ("no-such-topic", "no/such", ""):
        rows = requests.indexes_of(name, 0)
        t("describe_producers", 0, **requests.describe_producers(rows))


def a_first_batch_that_is_refused(t: Tracer) -> None:
    """Later batches are refused until the client has resent the refused first batch."""
    t.cluster.create_topic("overtaking", 4)
    for version, partition in ((9, 0), (11, 1)):
        name = f"overtaking-{version}"
        who = claimed(t, name)
        produce(t, version, "overtaking", name, who, 0, partition=partition)
        produce(t, version, "overtaking", name, who, 4, partition=partition)
        add(t, 3, name, who, [("overtaking", [partition])])
        for sequence in (4, 2, 0, 1, 2):
            produce(t, version, "overtaking", name, who, sequence, partition=partition)
        end(t, 4, name, who, True)
        ended(t, name)
        settle(t, "overtaking", partition)
    # A higher epoch must start at sequence 0, but an unknown producer may start at any sequence.
    name = "overtaking-epoch"
    who = claimed(t, name)
    produce(t, 9, "overtaking", name, who, 0, partition=2)
    who = claimed(t, name)
    add(t, 3, name, who, [("overtaking", [2, 3])])
    produce(t, 9, "overtaking", name, who, 5, partition=2)
    produce(t, 9, "overtaking", name, who, 7, partition=3)
    end(t, 4, name, who, True)
    ended(t, name)


def an_epoch_that_was_overtaken(t: Tracer) -> None:
    """The log fences an old epoch before the verification, in the transaction, and afterwards."""
    name = "overtaken"
    t.cluster.create_topic(name, 2)
    t.cluster.coordinator(name, GROUP)
    old = claimed(t, name)
    new = claimed(t, name)
    produce(t, 12, name, name, new, 0)
    offsets(t, 5, name, new)

    def late(who: Identity, sequence: int) -> None:
        for version in (7, 9, 11, 12):
            for partition in (0, 1):
                produce(t, version, name, name, who, sequence, partition=partition)
        for version in (3, 4, 5):
            offsets(t, version, name, who)
        for other in (f"{name}-unknown", None):
            produce(t, 12, name, other, who, sequence)

    late(old, 0)
    end(t, 5, name, new, True)
    settle(t, name)
    ended(t, name)
    late(old, 0)
    late(new, 1)
    # The test sends a marker whose epoch the coordinator does not know.
    newest = claimed(t, name)
    marker = requests.marker(
        (newest[0], newest[1] + 1),
        requests.indexes_of("__consumer_offsets", *range(4)),
        requests.indexes_of(name, 0, 1),
    )
    t("write_txn_markers", 1, **requests.write_txn_markers(marker))
    late(newest, 0)
    offsets(t, 5, name, newest, member_id="nobody")


def the_kip_890_producer(t: Tracer) -> None:
    t.cluster.create_topic("kip890", 2)
    t.cluster.coordinator("kip890", GROUP)
    name = "kip890"
    pid, epoch = claimed(t, name)

    for number in range(3):
        current = epoch + number
        produce(t, 12, "kip890", name, (pid, current), 1)
        produce(t, 12, "kip890", name, (pid, current), 0)
        offsets(t, 5, name, (pid, current))
        offsets(t, 5, name, (pid, current + 1))
        offsets(t, 4, name, (pid, current))
        offsets(t, 3, name, (pid, current - 1))
        asked = requests.offset_fetch_group("kip890", requests.offset_fetch_topic("kip890", 0))
        t("offset_fetch", 7, **requests.offset_fetch(asked, require_stable=True))
        end(t, 5, name, (pid, current), number != 1)
        settle(t, "kip890")
        ended(t, name)
        end(t, 5, name, (pid, current), number != 1)
        produce(t, 12, "kip890", name, (pid, current), 1)
        offsets(t, 5, name, (pid, current))
    t.note("committed", t.cluster.committed("kip890", "kip890", stable=True))


def what_a_committed_reader_is_told(t: Tracer) -> None:
    name = "aborted"
    t.cluster.create_topic(name, 2)
    pid, epoch = claimed(t, name)
    for partition in (0, 1):
        produce(t, 12, name, name, (pid, epoch), 0, partition=partition)
    latest = requests.list_offsets_topic(name, 0, timestamp=-3)
    for isolation in (0, 1):
        body = requests.list_offsets(latest, isolation_level=isolation)
        answer = t.quietly("list_offsets", 7, **body)
        t.note(f"the largest time, {isolation}", answer["topics"][0]["partitions"][0]["offset"])
    end(t, 5, name, (pid, epoch), False)
    for partition in (0, 1):
        settle(t, name, partition)
    row = requests.fetch_topic(name, 0, 1, partition_max_bytes=1)
    body = requests.fetch(row, min_bytes=0, max_bytes=1, isolation_level=1)
    answer = t.quietly("fetch", 12, **body)
    rows = answer["responses"][0]["partitions"]
    told = [
        [aborted["first_offset"] for aborted in row["aborted_transactions"] or ()] for row in rows
    ]
    t.note("aborted from where", told)


def offsets_in_transactions(t: Tracer) -> None:
    t.cluster.create_topic("txn-offsets")
    t.cluster.coordinator("txn-offsets", GROUP)
    name = "txn-offsets"
    who = claimed(t, name)
    mark = partial(requests.offset_commit_topic, committed_offset=5)
    base = requests.txn_offset_commit(name, who, "txn-offsets", mark("txn-offsets", 0))
    for version in range(5):
        t("txn_offset_commit", version, **base)
    add_offsets(t, 3, name, who, "txn-offsets")
    large = mark("txn-offsets", 0, committed_metadata="y" * 4097)
    for version in range(6):
        t("txn_offset_commit", version, **base)
        for changed in (
            {"producer_id": who[0] + 1000},
            {"producer_epoch": who[1] + 1},
            {"group_id": ""},
            {"transactional_id": "txn-offsets-unknown"},
            {"topics": [mark("no-such-topic", 0)]},
            {"topics": [mark("txn-offsets", 9), large]},
        ):
            t("txn_offset_commit", version, **{**base, **changed})
        if version >= 3:
            t("txn_offset_commit", version, **{**base, "generation_id": 5, "member_id": "m"})
            t("txn_offset_commit", version, **{**base, "group_instance_id": "i"})
    end(t, 3, name, who, True)
    ended(t, name)
    t.note("committed", t.cluster.committed("txn-offsets", "txn-offsets", stable=True))


def markers_by_hand(t: Tracer) -> None:
    t.cluster.create_topic("marked")
    name = "marked"
    claimed(t, name)
    who = claimed(t, name)
    produce(t, 12, "marked", name, who, 0)

    def mark(version: int, given: Identity, coordinator_epoch: int, topic: str, at: int) -> None:
        row = requests.marker(
            given,
            requests.indexes_of(topic, at),
            coordinator_epoch=coordinator_epoch,
            transaction_version=2,
        )
        t("write_txn_markers", version, **requests.write_txn_markers(row))

    for version in (1, 2):
        t("write_txn_markers", version, **requests.write_txn_markers(requests.marker(who)))
    mark(1, who, 0, "no-such-topic", 0)
    mark(1, who, 0, "marked", 9)
    mark(1, (who[0], who[1] - 1), 0, "marked", 0)
    mark(2, who, 0, "marked", 0)
    mark(1, who, 0, "marked", 0)
    mark(1, who, 0, "marked", 0)
    mark(2, who, 0, "marked", 0)
    mark(1, (-1, 0), 0, "marked", 0)
    mark(1, (who[0], -1), 0, "marked", 0)
    mark(1, (who[0] + 4444, 3), 5, "marked", 0)
    mark(1, (who[0] + 4444, 3), 4, "marked", 0)
    settle(t, "marked")
    # If the partition of the last marker does not exist, Apache Kafka never responds.
    markers = [
        requests.marker((who[0] + 4445, 0), requests.indexes_of("marked", index))
        for index in (9, 0, 0)
    ]
    t("write_txn_markers", 1, **requests.write_txn_markers(*markers))
    row = requests.indexes_of("marked", 0)
    t("describe_producers", 0, **requests.describe_producers(row))


def showing_transactions(t: Tracer) -> None:
    t.cluster.create_topic("shown")
    who = claimed(t, "shown-ongoing")
    add(t, 3, "shown-ongoing", who, [("shown", [0])])
    claimed(t, "shown-empty")
    t(
        "describe_transactions",
        0,
        transactional_ids=["shown-ongoing", "shown-none"],
    )
    for version in range(3):
        for states, producers in (([], []), (["Ongoing"], []), (["Nonsense"], []), ([], [who[0]])):
            body = requests.list_transactions(state_filters=states, producer_id_filters=producers)
            answer = t.quietly("list_transactions", version, **body)
            t.note(
                f"list_transactions v{version} {states} {bool(producers)}",
                [
                    answer["error_code"],
                    answer["unknown_state_filters"],
                    *sorted(
                        (x["transactional_id"], x["transaction_state"])
                        for x in answer["transaction_states"]
                        if x["transactional_id"].startswith("shown")
                    ),
                ],
            )
    for pattern in ("shown-.*", "shown", "(", ""):
        answer = t.quietly("list_transactions", 2, transactional_id_pattern=pattern)
        t.note(
            f"list_transactions of {pattern!r}",
            [
                answer["error_code"],
                *sorted(
                    x["transactional_id"]
                    for x in answer["transaction_states"]
                    if x["transactional_id"].startswith("shown")
                ),
            ],
        )


TRACES = [
    initialising,
    claiming_an_open_transaction,
    claiming_with_an_identity,
    adding_partitions,
    adding_as_a_broker_does,
    ending_in_every_state,
    producing_in_transactions,
    a_batch_of_nobody,
    sequences,
    a_first_batch_that_is_refused,
    an_epoch_that_was_overtaken,
    the_kip_890_producer,
    what_a_committed_reader_is_told,
    offsets_in_transactions,
    markers_by_hand,
    showing_transactions,
]
