"""Scenarios that need an exact step of another broker, which the test simulates.

A simulated follower sends leaders of both kinds the same requests; a simulated leader serves
followers of both kinds at once. All connections to the controller, which is Apache Kafka's, go
through a proxy that can hold requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from kio.schema.errors import ErrorCode

from tests.support.batches import batch
from tests.support.cluster import EARLIEST, LATEST, Cluster, unique
from tests.support.kafka import CLUSTER_ID
from tests.support.played import PlayedFollower, PlayedLeader, Script
from tests.support.proxy import LosingProxy
from tests.support.raw import Answer
from tests.support.replica_cluster import (
    ReplicaCluster,
    begin_write,
    list_offset,
    write,
    written,
)
from tests.support.waits import until

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.usefixtures("java_tools"),
    pytest.mark.timeout(900),
]

JAVA, PYTHON = 1, 2
PLAYED_LEADER, EIGHT, NINE = 7, 8, 9
ALTER_PARTITION = 56
PATIENT_MS = 100_000


class Stage:
    """Real brokers of both kinds, and the brokers that the test simulates."""

    def __init__(
        self, cluster: ReplicaCluster, eight: PlayedFollower, nine: PlayedFollower
    ) -> None:
        self.cluster, self.eight, self.nine = cluster, eight, nine
        assert cluster.proxy is not None
        self.proxy: LosingProxy = cluster.proxy


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    # The history topic would have replicas on the simulated brokers, and changes of its own. With
    # the long timeout, brokers do not give up requests that the proxy holds.
    alone = {"fencepost.history.enable": "false", "controller.socket.timeout.ms": "240000"}
    with (
        ReplicaCluster(tmp_path_factory.mktemp("played"), "JP", alone, is_proxied=True) as cluster,
        PlayedFollower(cluster.quorum, EIGHT, CLUSTER_ID) as eight,
        PlayedFollower(cluster.quorum, NINE, CLUSTER_ID) as nine,
    ):
        yield Stage(cluster, eight, nine)


class Led:
    """A topic of one partition, its leader, and a connection to the leader."""

    def __init__(
        self, stage: Stage, leader: int, replicas: tuple[int, ...], **configs: str
    ) -> None:
        self.stage, self.leader = stage, leader
        self.name = unique("led")
        self.topic_id = stage.cluster.create(self.name, replicas, **configs)
        self.client: Cluster = stage.cluster.client(leader)
        self.epoch = 0

    def moved(self, leader: int, epoch: int) -> None:
        """Connect to the new leader, and use the new leader epoch from now on."""
        self.client.close()
        self.client = self.stage.cluster.client(leader)
        self.leader, self.epoch = leader, epoch

    def isr(self) -> frozenset[int]:
        """Return the ISR in the leader's metadata."""
        state = self.stage.cluster.state(self.name, witness=self.leader)
        assert state is not None
        return state.isr

    def has_isr(self, *expected: int) -> None:
        until(
            lambda: self.isr() == set(expected), f"the ISR {expected}", deadline_s=120, poll_s=0.1
        )

    def fetched(self, offset: int, by: PlayedFollower | None = None, **how: int) -> Answer:
        """Send a follower's Fetch request to the leader; return the partition's response."""
        follower = by or self.stage.nine
        return follower.fetch_replica(self.client, self.topic_id, offset, self.epoch, **how)

    def until_joined(self, offset: int, *expected: int, by: PlayedFollower | None = None) -> None:
        """Fetch at the log end until the ISR has exactly the ``expected`` brokers."""

        def probe() -> bool:
            part = self.fetched(offset, by, last_epoch=0)
            return part["error_code"] == "none" and self.isr() == set(expected)

        until(probe, f"the ISR {expected}", deadline_s=120, poll_s=0.1)

    def high_watermark(self) -> int:
        """Return the high watermark that a consumer sees."""
        return int(self.client.fetch(self.name)["high_watermark"])

    def proposes(self, offset: int) -> None:
        """Fetch at ``offset`` until the proxy holds the leader's AlterPartition for the ISR."""

        def probe() -> bool:
            part = self.fetched(offset, last_epoch=0)
            return part["error_code"] == "none" and self.stage.proxy.holding.is_set()

        until(probe, "the follower is proposed", deadline_s=120, poll_s=0.1)

    def commits(self, offset: int) -> None:
        """Fetch at ``offset`` until the high watermark reaches this offset."""

        def probe() -> bool:
            self.fetched(offset, last_epoch=0)
            return self.high_watermark() == offset

        until(probe, f"{offset} is committed")

    def end(self) -> int:
        """Return the log end offset of the leader."""
        asked = {"partition_index": 0, "timestamp": LATEST, "current_leader_epoch": -1}
        topics = [{"name": self.name, "partitions": [asked]}]
        answer = self.client.call("list_offsets", 7, replica_id=NINE, topics=topics)
        return int(answer["topics"][0]["partitions"][0]["offset"])

    def close(self) -> None:
        """Delete the topic, because its silent follower would leave the ISR in other scenarios."""
        self.client.close()
        self.stage.cluster.delete(self.name)


@contextmanager
def led(stage: Stage, leader: int, *followers: int, **configs: str) -> Iterator[Led]:
    with closing(Led(stage, leader, (leader, *followers), **configs)) as topic:
        yield topic


@contextmanager
def asking(stage: Stage, leader: int, led: Led, *values: bytes) -> Iterator[Cluster]:
    """Within the block, a Produce request with these values and acks=all is in flight."""
    with stage.cluster.client(leader) as client:
        begin_write(client, led.name, *values, timeout_ms=PATIENT_MS)
        yield client


def acked(answer: Answer, offset: int) -> None:
    assert (answer["error_code"], answer["base_offset"]) == ("none", offset), answer


BY_BOTH = pytest.mark.parametrize("leader", [JAVA, PYTHON], ids=["Java", "Python"])
TEN = [b"%d" % number for number in range(10)]


@BY_BOTH
def test_diverging_fetch_does_not_advance_the_high_watermark(stage: Stage, leader: int) -> None:
    with led(stage, leader, NINE, min_insync_replicas="2") as topic:
        acked(write(topic.client, topic.name, *TEN, acks=1), 0)
        assert topic.fetched(0)["records"]
        part = topic.fetched(15, last_epoch=0)
        assert part["diverging_epoch"] == {"epoch": 0, "end_offset": 10}
        assert not part["records"]
        assert topic.high_watermark() == 0
        topic.commits(10)


@BY_BOTH
def test_silent_follower_leaves_the_isr(stage: Stage, leader: int) -> None:
    """The shrink completes waiting produce requests, unless the ISR is then below its minimum."""
    with (
        led(stage, leader, NINE) as one,
        led(stage, leader, NINE, min_insync_replicas="2") as two,
    ):
        for topic in (one, two):
            acked(write(topic.client, topic.name, *TEN, acks=1), 0)
        for topic in (one, two):
            topic.commits(10)
        with asking(stage, leader, one, b"10") as first, asking(stage, leader, two, b"10") as other:
            one.has_isr(leader)
            acked(written(first), 10)
            assert one.high_watermark() == 11
            two.has_isr(leader)
            acked(write(two.client, two.name, b"11", acks=1), 11)
            refused = write(two.client, two.name, b"refused")
            assert refused["error_code"] == "not_enough_replicas"
            assert two.high_watermark() == 10
            two.until_joined(12, leader, NINE)
            acked(written(other), 10)
            assert two.high_watermark() == 12


def test_fenced_or_former_broker_epoch_is_not_proposed_for_the_isr(stage: Stage) -> None:
    """One test has both kinds of leader, because it waits until the former session expires."""
    nine, proxy, cluster = stage.nine, stage.proxy, stage.cluster
    with led(stage, JAVA, NINE) as first, led(stage, PYTHON, NINE) as second:
        both = first, second
        for topic in both:
            acked(write(topic.client, topic.name, *TEN, acks=1), 0)
            topic.commits(10)
        former = nine.broker_epoch
        nine.be_fenced()
        for topic in both:
            until(lambda topic=topic: NINE not in cluster.brokers(topic.leader), "it is fenced")
            topic.has_isr(topic.leader)
        proxy.hold(ALTER_PARTITION)
        for topic in both:
            acked(write(topic.client, topic.name, b"10"), 10)
            for _ in range(3):
                assert topic.fetched(11, last_epoch=0)["error_code"] == "none"
                assert topic.isr() == {topic.leader}
        nine.become_unfenced()
        for topic in both:
            until(lambda topic=topic: NINE in cluster.brokers(topic.leader), "it is back")
            for _ in range(3):
                part = topic.fetched(11, last_epoch=0, broker_epoch=former)
                assert part["error_code"] == "not_leader_or_follower"
        assert not proxy.holding.is_set(), "nobody was proposed"
        for topic in both:
            proxy.hold(ALTER_PARTITION)
            topic.proposes(11)
            proxy.release()
            topic.until_joined(11, topic.leader, NINE)


@BY_BOTH
def test_pending_isr_addition_holds_the_high_watermark_until_refused(
    stage: Stage, leader: int
) -> None:
    nine, proxy, cluster = stage.nine, stage.proxy, stage.cluster
    with led(stage, leader, NINE) as topic:
        acked(write(topic.client, topic.name, *TEN, acks=1), 0)
        topic.has_isr(leader)
        proxy.hold(ALTER_PARTITION)
        topic.proposes(10)
        with asking(stage, leader, topic, b"10") as waiting:
            until(lambda: topic.end() == 11, "it is appended")
            assert topic.high_watermark() == 10
            nine.be_fenced()
            until(lambda: NINE not in cluster.brokers(leader), "it is fenced")
            assert topic.high_watermark() == 10, "nobody has refused it yet"
            proxy.release()

            def is_refused() -> bool:
                # Apache Kafka checks the high watermark again only at the next append.
                assert write(topic.client, topic.name, b"nudge", acks=1)["error_code"] == "none"
                return topic.high_watermark() > 10

            until(is_refused, "the addition is refused", poll_s=0.1)
            acked(written(waiting), 10)
        assert topic.isr() == {leader}
        nine.become_unfenced(is_new=False)
        topic.until_joined(topic.end(), leader, NINE)


@BY_BOTH
def test_lost_alter_partition_response_is_requested_again(stage: Stage, leader: int) -> None:
    proxy = stage.proxy
    with led(stage, leader, NINE) as topic:
        acked(write(topic.client, topic.name, *TEN, acks=1), 0)
        topic.has_isr(leader)
        proxy.lose(ALTER_PARTITION)
        topic.until_joined(10, leader, NINE)
        until(lambda: proxy.lost == {ALTER_PARTITION}, "the answer is lost")
        with asking(stage, leader, topic, b"10") as waiting:
            until(lambda: topic.end() == 11, "it is appended")
            topic.commits(11)
            acked(written(waiting), 10)
        # The next ISR change is accepted, so no change is pending.
        acked(write(topic.client, topic.name, b"11"), 11)
        topic.has_isr(leader)


@BY_BOTH
def test_isr_change_that_arrives_after_an_election_is_ignored(stage: Stage, leader: int) -> None:
    cluster, proxy, other = stage.cluster, stage.proxy, 3 - leader
    with led(stage, leader, other, NINE) as topic:
        proxy.hold(ALTER_PARTITION)
        acked(write(topic.client, topic.name, *TEN, acks=1), 0)
        assert proxy.holding.wait(60), "the leader drops who says nothing"
        cluster.reassign(topic.name, (other, leader, NINE))
        cluster.prefer(topic.name)
        cluster.settled(topic.name, leader=other, is_readable=False)
        assert proxy.holding.is_set(), "the change is still on its way"
        proxy.release()
        acked(cluster.write(other, topic.name, b"10"), 10)
        cluster.settled(topic.name, leader=other, isr={leader, other})
        cluster.reassign(topic.name, (leader, other, NINE))
        cluster.prefer(topic.name)
        cluster.settled(topic.name, leader=leader, isr={leader, other})
        acked(cluster.write(leader, topic.name, b"11"), 11)
        assert topic.client.values(topic.name) == [*TEN, b"10", b"11"]


@BY_BOTH
def test_follower_joins_the_isr_only_at_the_start_of_the_leader_epoch(
    stage: Stage, leader: int
) -> None:
    """A new leader does not know which records before its epoch's start were committed."""
    cluster, other, proxy = stage.cluster, 3 - leader, stage.proxy
    with led(stage, other, leader, NINE, min_insync_replicas="3") as before:
        name = before.name
        acked(write(before.client, name, *TEN, acks=1), 0)
        before.commits(10)
        acked(write(before.client, name, *(b"x" for _ in range(90)), acks=1), 10)
        before.has_isr(other, leader)
        cluster.reassign(name, (leader, other, NINE))
        cluster.prefer(name)
        state = cluster.settled(name, leader=leader, isr={leader, other}, is_readable=False)
        before.moved(leader, state.epoch)
        assert before.high_watermark() == 10
        assert list_offset(before.client, name) == {"error": "offset_not_available"}
        proxy.hold(ALTER_PARTITION)
        for offset in (10, 85, 99):
            assert before.fetched(offset, last_epoch=0)["error_code"] == "none"
        assert not proxy.holding.is_set(), "all below 100 may be committed"
        before.proposes(100)
        proxy.release()
        cluster.settled(name, leader=leader, isr={leader, other, NINE})
        before.commits(100)
        assert list_offset(before.client, name) == {"offset": 100}


@BY_BOTH
def test_reassignment_completes_when_all_targets_are_in_sync(stage: Stage, leader: int) -> None:
    cluster, eight = stage.cluster, stage.eight
    with led(stage, leader) as topic:
        acked(write(topic.client, topic.name, *TEN), 0)
        directory = cluster.directory(leader, topic.name)
        assert directory.is_dir()
        assert topic.fetched(0, eight)["error_code"] == "unknown_leader_epoch", "it is no replica"
        cluster.reassign(topic.name, (EIGHT, NINE))
        topic.until_joined(10, leader, EIGHT, by=eight)
        state = cluster.settled(topic.name, leader=leader)
        assert state.replicas == (EIGHT, NINE, leader), "one of the target is not in"
        end = topic.end()

        def is_over() -> bool:
            part = topic.fetched(end, last_epoch=0)
            return part["error_code"] != "none"

        until(is_over, "the leader has resigned", deadline_s=120)
        state = cluster.settled(topic.name, replicas=(EIGHT, NINE))
        assert state.leader in {EIGHT, NINE}
        assert state.isr == {EIGHT, NINE}
        until(lambda: not directory.exists(), "who is not in the target has deleted all")


# --- followers of a played leader ---


class Followed:
    """A topic with a simulated leader and two real followers, one of each kind."""

    def __init__(self, stage: Stage, leader: PlayedLeader, *more: int) -> None:
        self.cluster, self.leader = stage.cluster, leader
        self.name = unique("followed")
        replicas = (PLAYED_LEADER, JAVA, PYTHON, *more)
        self.topic_id = stage.cluster.create(self.name, replicas)
        self.script: Script = leader.add_topic(self.name, self.topic_id)

    def append(self, begin: int, end: int, size: int = 3) -> None:
        """Append the records ``begin`` to ``end`` in batches of ``size`` records each."""
        with self.leader.lock:
            while begin < end:
                values = [b"%d" % at for at in range(begin, min(begin + size, end))]
                begin = self.script.append_batch(begin, batch(values))

    def copied(self, end: int) -> None:
        """Wait until both followers fetch at the offset ``end``."""
        for node_id in (JAVA, PYTHON):
            what = f"{node_id} has all below {end}"
            until(lambda node_id=node_id: self.script.end_of(node_id) == end, what, deadline_s=120)

    def high_watermark(self, follower: int, offset: int = 0) -> int:
        """Return the high watermark that a follower returns to a consumer's Fetch."""
        with self.cluster.client(follower) as client:
            return int(client.fetch(self.name, offset=offset, version=12)["high_watermark"])

    def shown(self, high_watermark: int, offset: int = 0) -> None:
        """Wait until both followers show this high watermark."""
        for node_id in (JAVA, PYTHON):
            until(
                lambda node_id=node_id: self.high_watermark(node_id, offset) == high_watermark,
                f"{node_id} shows all below {high_watermark}",
                deadline_s=120,
            )

    def answer_once(self, *answers: Answer) -> dict[int, int]:
        """Queue these responses for both followers; return the current number of their fetches."""
        with self.leader.lock:
            before = {node_id: len(self.script.asked[node_id]) for node_id in (JAVA, PYTHON)}
            for node_id in before:
                self.script.once[node_id] = [dict(answer) for answer in answers]
        return before

    def after(self, before: dict[int, int], count: int) -> dict[int, Answer]:
        """Wait for fetch number ``before`` + ``count`` of each follower; return these fetches."""
        for node_id, seen in before.items():
            until(
                lambda node_id=node_id, seen=seen: len(self.script.asked[node_id]) > seen + count,
                f"the next fetch of {node_id}",
                deadline_s=120,
            )
        return {
            node_id: self.script.asked[node_id][seen + count] for node_id, seen in before.items()
        }


@pytest.fixture(autouse=True)
def each_begins_alike(stage: Stage) -> Iterator[None]:
    """After each test, release the held requests, and unfence the simulated broker."""
    yield
    stage.proxy.release()
    stage.proxy.lose()
    if stage.nine.is_silent:
        stage.nine.become_unfenced()


@pytest.fixture(scope="module")
def played(stage: Stage) -> Iterator[PlayedLeader]:
    with PlayedLeader(stage.cluster.quorum, PLAYED_LEADER, CLUSTER_ID) as leader:
        yield leader


@pytest.fixture
def followed(stage: Stage, played: PlayedLeader) -> Iterator[Followed]:
    """Yield a topic of 20 records, of which 10 are committed; both followers have copied all."""
    topic = Followed(stage, played)
    with played.lock:
        topic.script.high_watermark = 10
    topic.append(0, 20)
    topic.copied(20)
    topic.shown(10)
    yield topic
    stage.cluster.delete(topic.name)


def test_empty_fetch_response_keeps_last_epoch_and_updates_high_watermark(
    followed: Followed,
) -> None:
    script = followed.script
    for asked in followed.after(followed.answer_once(), 2).values():
        assert (asked["fetch_offset"], asked["last_fetched_epoch"]) == (20, 0)
    script.high_watermark = 7  # like a newly elected leader with an older high watermark
    followed.shown(7)
    script.high_watermark = 30
    followed.shown(20)


def test_diverging_fetch_response_does_not_update_the_high_watermark(followed: Followed) -> None:
    gate = threading.Event()
    told = {"diverging_epoch": {"epoch": 0, "end_offset": 12}, "high_watermark": 15}
    before = followed.answer_once(told, {"gate": gate})
    try:
        for asked in followed.after(before, 1).values():
            assert (asked["fetch_offset"], asked["last_fetched_epoch"]) == (12, 0)
        assert [followed.high_watermark(node_id) for node_id in (JAVA, PYTHON)] == [10, 10]
    finally:
        gate.set()
    followed.script.high_watermark = 15
    followed.copied(20)
    followed.shown(15)


def test_batch_of_a_later_leader_epoch_is_not_appended(followed: Followed) -> None:
    """A fetch response after an election contains a batch of the later leader epoch."""
    late = bytearray(batch([b"late"]))
    late[0:8], late[12:16] = (20).to_bytes(8, "big"), (1).to_bytes(4, "big")
    gate = threading.Event()
    before = followed.answer_once({"records": bytes(late)}, {"gate": gate})
    for asked in followed.after(before, 1).values():
        assert (asked["fetch_offset"], asked["last_fetched_epoch"]) == (20, 0)
    gate.set()
    followed.append(20, 23)
    followed.copied(23)
    for node_id in (JAVA, PYTHON):
        found = followed.cluster.batches(node_id, followed.name)
        assert [header.leader_epoch for header, _ in found] == [0] * 8


def test_follower_retries_after_unknown_leader_epoch(followed: Followed) -> None:
    refused = {"error_code": ErrorCode.unknown_leader_epoch}
    for asked in followed.after(followed.answer_once(refused), 1).values():
        assert (asked["fetch_offset"], asked["last_fetched_epoch"]) == (20, 0)
    followed.append(20, 23)
    followed.copied(23)


def test_follower_out_of_range_restarts_at_the_leaders_start_offset(
    stage: Stage, followed: Followed
) -> None:
    script, cluster = followed.script, stage.cluster
    with followed.leader.lock:
        script.batches.clear()
        script.log_start = script.earliest = script.high_watermark = 500
        script.latest = 600
    before = followed.answer_once({"error_code": ErrorCode.offset_out_of_range})
    for asked in followed.after(before, 1).values():
        assert (asked["fetch_offset"], asked["log_start_offset"]) == (500, 500)
    assert script.questions == {node_id: [LATEST, EARLIEST] for node_id in (JAVA, PYTHON)}
    followed.shown(500, 500)
    followed.append(500, 503)
    followed.copied(503)
    for leader, other in ((JAVA, PYTHON), (PYTHON, JAVA)):
        cluster.reassign(followed.name, (leader, other, PLAYED_LEADER))
        cluster.prefer(followed.name)
        cluster.settled(followed.name, leader=leader)
        with cluster.client(leader) as client:
            assert list_offset(client, followed.name, at=EARLIEST) == {"offset": 500}
            part = client.fetch(followed.name, offset=500)
            assert part["error_code"] == "none", part


def test_fetcher_restarts_only_on_a_new_leader_epoch(stage: Stage, played: PlayedLeader) -> None:
    followed = Followed(stage, played, EIGHT)
    followed.append(0, 20)
    followed.copied(20)
    before = followed.answer_once()
    isr = [(PLAYED_LEADER, played.broker_epoch), (JAVA, -1), (PYTHON, -1)]
    altered = played.alter_partition(followed.topic_id, 0, 0, isr)
    assert altered["error_code"] == "none", altered
    stage.cluster.settled(followed.name, isr={PLAYED_LEADER, JAVA, PYTHON})
    for asked in followed.after(before, 3).values():
        assert (asked["fetch_offset"], asked["current_leader_epoch"]) == (20, 0)
    # The removal of a replica raises the leader epoch, although the leader does not change.
    stage.cluster.reassign(followed.name, (PLAYED_LEADER, JAVA, PYTHON))
    state = stage.cluster.settled(
        followed.name, leader=PLAYED_LEADER, replicas=(PLAYED_LEADER, JAVA, PYTHON)
    )
    assert state.epoch == 1
    with played.lock:
        followed.script.epoch = 1
    followed.append(20, 23)
    followed.copied(23)
    for node_id in (JAVA, PYTHON):
        asked = followed.script.asked[node_id][-1]
        assert (asked["current_leader_epoch"], asked["last_fetched_epoch"]) == (1, 1)
    # Truncate into the older epoch, below the start of the later epoch.
    told = {"diverging_epoch": {"epoch": 0, "end_offset": 15}}
    for asked in followed.after(followed.answer_once(told), 1).values():
        assert (asked["fetch_offset"], asked["last_fetched_epoch"]) == (15, 0)
    stage.cluster.delete(followed.name)
