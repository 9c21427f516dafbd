"""Replicas of Apache Kafka and Fencepost as real processes, during failures and elections.

There are four brokers: two of Apache Kafka (J, and O of release 4.3) and two of Fencepost (P). A
*turn* gives three of the brokers the roles A, B and C. There are six turns, one for each assignment
of the two kinds to these roles. If a scenario needs one exact step of another broker, the test
simulates that broker (``test_mixed_replicas_played.py``).

The table lists known bugs of replication and their tests with both kinds of brokers;
``tests/unit/cluster/test_replication_bugs.py`` tests Fencepost alone. Tests of a "turn" are in this
module; "played" and "moves" stand for the modules whose names end in these words:

====================================  =========================================  ==================
scenario                              test                                       roles
====================================  =========================================  ==================
KIP-101, loss                         turn: ``kept``                             all six
KIP-101, divergence                   turn: ``split``, ``forced``                all six (A, B)
KIP-279, fast failovers               turn: ``thrice``                           all six (A, B)
KAFKA-7128, start of the epoch        played: the joining replicas               JP, PJ + played
KAFKA-14704, mark while diverging     played: diverging answer                   both follow
KAFKA-13141, diverging fetch          played: diverging fetch                    both lead
KAFKA-15510, empty answer             played: empty answer                       both follow
KAFKA-9491, far behind                played: far behind                         both follow, lead
a high watermark that goes back       turn: ``kept``; played: empty answer       all six
KAFKA-13091, shrink answers           played: says nothing; moves: frozen        JP, PJ
KAFKA-15583, below min ISR            turn: ``kept``; played: says nothing       all six
KIP-966, last replica standing        turn: ``kept``, ``last``                   all six
KAFKA-13916, fenced replica           played: fenced                             both lead
KIP-903, KAFKA-15221, incarnations    played: of yesterday                       both lead
KAFKA-14154, 12686, stale answers     played: after an election, lost answer     JP, PJ + played
KAFKA-14010, retry while unsent       played: lost answer                        both lead
pending expand counts                 played: pending addition                   both lead
KAFKA-13790, epochs and fetchers      played: care for the leader epoch          both follow
KAFKA-13837, 14078, early fetch       played: reassignment, not known yet        both lead, follow
KAFKA-15665, half a reassignment      played: reassignment                       both lead
KAFKA-13972, cancelled                moves: throttled                           JP, PJ
KAFKA-18723, late answer              played: later epoch                        both follow
====================================  =========================================  ==================

Two cases are only in the unit tests of Fencepost: a controller that is behind its brokers
(KAFKA-14154 needs three controllers), and a response with NOT_ENOUGH_REPLICAS_AFTER_APPEND.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from fencepost.logcore.batch import iter_headers, verify_crc
from tests.oracle import dumps
from tests.support.cluster import unique
from tests.support.pipeline import Clients
from tests.support.raw import Answer
from tests.support.replica_cluster import (
    ReplicaCluster,
    batches_in,
    cut_log,
    epochs_in,
    list_offset,
    write,
    write_high_watermark,
)
from tests.support.waits import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(900),
]

CODECS = "none", "gzip", "snappy", "lz4", "zstd"
LAYOUT = "JOPP"
TURNS = (1, 3, 4), (3, 1, 4), (3, 4, 1), (1, 2, 3), (1, 3, 2), (3, 1, 2)
"""The brokers of the roles A, B and C in each turn."""

UNCLEAN = {"unclean_leader_election_enable": "true"}
ROTATED = (1, 2, 3), (2, 3, 4), (3, 4, 1), (4, 1, 2)
LOAD, BIG = "load", "big"
"""Topics in which each broker initially leads one partition."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaCluster]:
    with ReplicaCluster(tmp_path_factory.mktemp("mixed"), LAYOUT) as cluster:
        cluster.create(LOAD, *ROTATED, min_insync_replicas="2", segment_bytes=str(1 << 20))
        yield cluster


def values(mixed: ReplicaCluster, node_id: int, name: str) -> list[bytes | None]:
    """Return the values that a consumer gets from this leader."""
    with mixed.client(node_id) as client:
        return client.values(name)


def assert_equal(mixed: ReplicaCluster, name: str, index: int = 0) -> None:
    """Check that all replicas have the same valid bytes above the largest log start offset."""
    state = mixed.settled(name, index)
    assert state.isr == set(state.replicas), state

    def probe() -> bool:
        logs = [mixed.directory(replica, name, index) for replica in state.replicas]
        return len({whole(log) for log in logs}) == 1

    try:
        until(probe, f"replicas of {name}-{index} are equal", poll_s=0.1)
    except TimeoutError:
        seen = {
            broker_id: [header for header, _ in mixed.batches(broker_id, name, index)]
            for broker_id in state.isr
        }
        raise AssertionError(seen) from None


def whole(directory: Path) -> bytes:
    """Return the bytes of a log; AssertionError for a corrupt batch."""
    data = b"".join(batch for _, batch in batches_in(directory))
    for position, header in iter_headers(data):
        verify_crc(data, position, header)
    return data


def acked(answer: Answer, offset: int) -> None:
    assert (answer["error_code"], answer["base_offset"]) == ("none", offset), answer


def test_replicas_of_every_batch_kind_are_identical(mixed: ReplicaCluster) -> None:
    """Batches of each codec, idempotent and transactional batches, and one larger than a fetch."""
    noise = random.Random(7)
    common = {"bootstrap.servers": mixed.bootstrap, "linger.ms": 20, "acks": "all"}
    for codec in CODECS:
        producer = Producer(
            {**common, "compression.type": codec, "enable.idempotence": codec != "gzip"}
        )
        for number in range(1_200 if codec == "none" else 120):
            value = noise.randbytes(2_000) + bytes(500)
            producer.produce(LOAD, value, b"k%d" % (number % 7), partition=number % len(ROTATED))
        assert producer.flush(120) == 0
    producer = Clients(mixed.bootstrap).producer(unique("txn"))
    for number in range(6):
        producer.begin_transaction()
        for index in range(len(ROTATED)):
            producer.produce(LOAD, b"%d" % number, partition=index)
        producer.flush(60)
        end = producer.abort_transaction if number % 2 else producer.commit_transaction
        end(60)
    mixed.create(BIG, *ROTATED, max_message_bytes=str(4 << 20))
    for index, (leader, *_) in enumerate(ROTATED):
        acked(mixed.write(leader, BIG, noise.randbytes(3 << 20), index=index), 0)
        acked(mixed.write(leader, BIG, b"small", index=index), 1)
    for name in (LOAD, BIG):
        for index in range(len(ROTATED)):
            assert_equal(mixed, name, index)


# --- a turn of data losses and elections ---


@pytest.mark.parametrize(
    "roles", TURNS, ids=["".join(LAYOUT[role - 1] for role in roles) for roles in TURNS]
)
def test_replicas_converge_after_lost_tails_and_unclean_elections(
    mixed: ReplicaCluster, roles: tuple[int, int, int]
) -> None:
    """C and B stop, A is killed; B restarts and leads; A restarts with a shorter log; then C."""
    a, b, c = roles
    names = kept, split, thrice, last, forced = [
        unique(stem) for stem in ("kept", "split", "thrice", "last", "forced")
    ]
    mixed.create(kept, roles, min_insync_replicas="2")
    mixed.create(split, (a, b), **UNCLEAN)
    mixed.create(thrice, (b, a), **UNCLEAN)
    mixed.create(last, roles)
    mixed.create(forced, (a, b))
    acked(mixed.write(a, kept, b"m1"), 0)
    acked(mixed.write(a, kept, b"m2"), 1)
    for name in (split, forced):
        acked(mixed.write(a, name, b"m1"), 0)
    ten = [b"%d" % number for number in range(10)]
    acked(mixed.write(b, thrice, *ten), 0)
    mixed.stop_all(c, b)
    for name in names:
        mixed.settled(name, leader=a, isr={a})
    with mixed.client(a) as client:
        # The ISR is below its minimum size, so the high watermark does not advance.
        acked(write(client, kept, b"m3", acks=1), 2)
        assert write(client, kept, b"refused")["error_code"] == "not_enough_replicas"
        assert list_offset(client, kept) == {"offset": 2}
        for name in (split, forced):
            acked(write(client, name, b"only A has it", acks=1), 1)
        acked(write(client, thrice, b"only A has it"), 10)
        acked(write(client, last, b"committed by A alone"), 0)
    mixed.kill(a)
    cut_log(mixed.directory(a, kept), 1)
    write_high_watermark(mixed.node(b).data_dir, kept, 1)

    mixed.start_all(b)
    mixed.settled(kept, leader=b, isr={b}, is_readable=False)
    for name in (split, thrice):
        mixed.settled(name, leader=b, isr={b})
    for name in (last, forced):
        mixed.settled(name, leader=-1)  # only A has the acknowledged records
    mixed.prefer(forced, is_unclean=True)
    mixed.settled(forced, leader=b, isr={b})
    with mixed.client(b) as client:
        # B has m2, but must not expose it before two replicas have it and it is committed.
        assert list_offset(client, kept) == {"error": "offset_not_available"}
        assert client.fetch(kept)["high_watermark"] == 1
        assert client.fetch(kept, offset=2)["error_code"] == "none"
        for name in (split, forced):
            acked(write(client, name, b"m2"), 1)
        acked(write(client, thrice, b"a", b"b", b"c"), 10)

    mixed.start_all(a, c)
    mixed.settled(kept, leader=b, isr=set(roles))
    for name in (split, thrice, forced):
        mixed.settled(name, leader=b, isr={a, b})
    mixed.settled(last, leader=a, isr=set(roles))
    until(lambda: values(mixed, b, kept) == [b"m1", b"m2"], "both are committed")
    acked(mixed.write(b, kept, b"m4"), 2)
    for name in (kept, split, forced):
        mixed.prefer(name)
        mixed.settled(name, leader=a)
    acked(mixed.write(a, kept, b"m5"), 3)
    assert values(mixed, a, kept) == [b"m1", b"m2", b"m4", b"m5"]
    assert values(mixed, a, split) == values(mixed, a, forced) == [b"m1", b"m2"]
    assert values(mixed, b, thrice) == [*ten, b"a", b"b", b"c"]
    assert values(mixed, a, last) == [b"committed by A alone"]
    for name in names:
        assert_equal(mixed, name)


# --- files on the disks ---


def test_dump_log_segments_prints_the_same_for_all_replicas(mixed: ReplicaCluster) -> None:
    """All brokers have stopped; logs, transaction indexes, snapshots and epochs are compared."""
    for name in (LOAD, BIG):
        for index in range(len(ROTATED)):
            mixed.settled(name, index, isr=set(ROTATED[index]))
    mixed.stop_all(*mixed.ids)
    replicas: dict[str, list[Path]] = {}
    for node in mixed.nodes:
        for path in node.data_dir.glob("[!_]*-[0-9]*"):
            replicas.setdefault(path.name, []).append(path)
    paths = [
        file for name in replicas for replica in replicas[name] for file in what_is_read(replica)
    ]
    rows = dumps.by_kafka(paths)
    kinds = set()
    for name, directories in replicas.items():
        told = []
        for directory in directories:
            said = [row for file in what_is_read(directory) for row in rows[str(file)]]
            said.sort(key=lambda row: row["id"] if row["kind"] == "producer" else -1)
            kinds |= {row["kind"] for row in said}
            # Where a replica rolls a segment depends on the size of its fetches.
            told.append([{k: v for k, v in row.items() if k != "position"} for row in said])
        assert len(directories) > 1, name
        for printed in told:
            pairs = itertools.zip_longest(told[0], printed)
            differences = [pair for pair in pairs if pair[0] != pair[1]]
            assert not differences, (name, differences[:5])
        end = max(row["last"] for row in told[0] if row["kind"] == "batch") + 1
        epochs = [epochs_in(directory, end) for directory in directories]
        assert epochs[0]
        assert all(entries == epochs[0] for entries in epochs), (name, epochs)
    assert kinds == {"batch", "record", "producer", "txn-index"}


def what_is_read(directory: Path) -> list[Path]:
    """Return the segments, transaction indexes and newest producer snapshot of a log."""
    logs = sorted(directory.glob("*.log"))
    aborted = sorted(directory.glob("*.txnindex"))
    return [*logs, *aborted, max(directory.glob("*.snapshot"))]
