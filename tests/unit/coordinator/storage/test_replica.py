"""Fetches from and writes to a partition that the broker leads and other brokers replicate.

Apache Kafka's ``Partition`` and ``ReplicaManager`` specify the expected behaviour. Docstrings and
comments give the numbers of Kafka's issues.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from fencepost.cluster.errors import Errors
from fencepost.coordinator.config.broker_config import ConfigSource
from fencepost.logcore.errors import StorageError
from tests.support.batches import batch
from tests.support.cluster import EARLIEST, LATEST
from tests.support.faults import FaultyDisk
from tests.support.metadata_changes import delete_topic
from tests.support.raw import Answer
from tests.support.waits import until
from tests.unit.coordinator.storage.led import (
    EPOCHS,
    LAG_MS,
    Led,
    cluster_of_one,
    part_of,
    registration,
)

DYNAMIC = ConfigSource.DYNAMIC_BROKER
METRICS = {"fencepost.metrics.listen": "0", "fencepost.metrics.compat": "jmx,kafka-exporter"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Led]:
    with cluster_of_one(tmp_path_factory.mktemp("led")) as led_partition:
        yield led_partition


@pytest.fixture
def led(shared) -> Iterator[Led]:
    """Yield a new topic for each test, on a broker shared by all tests."""
    shared.renew()
    yield shared
    shared.forget()


def errors(part: Answer) -> str:
    return str(part["error_code"])


# --- high watermark and log end -------------------------------------------------------------------


def test_unreplicated_partition_commits_at_once_without_replica_state(led):
    led.image(replicas=(1,), isr=(1,))
    led.append(b"a")
    assert errors(part_of(led.begin_produce().receive())) == "none"
    assert (led.marks, led.replicas.replica(led.topic, 0)) == ((2, 2), None)
    assert errors(led.fetch(2, 0)) == "not_leader_or_follower"
    assert errors(led.fetch(2, 0, leader_epoch=0)) == "unknown_leader_epoch"


def test_consumers_read_to_the_high_watermark_and_followers_to_the_log_end(led):
    led.image()
    led.append(b"a", b"b")
    assert led.marks == (0, 2)
    assert led.read(0)["records"] in (b"", None)
    follower = led.fetch(2, 0)
    assert len(follower["records"])
    led.append(b"c")
    led.fetch(3, 3)
    assert led.marks == (0, 3)
    # The response has the high watermark before the fetch.
    assert led.fetch(2, 2)["high_watermark"] == 0
    assert led.marks == (2, 3)
    assert led.fetch(2, 3)["high_watermark"] == 2
    assert led.read(0)["high_watermark"] == 3


def test_new_leader_epoch_is_known_before_its_first_record(led):
    led.image(leader_epoch=4, partition_epoch=4)
    led.append(b"a")
    led.image(leader_epoch=6, partition_epoch=6)
    ends = [
        led.run(lambda at=at: led.partition.reader.offset_for_leader_epoch(at))
        for at in (4, 5, 6, 7)
    ]
    assert ends == [(4, 1), (4, 1), (6, 1), (-1, -1)]


def test_high_watermark_does_not_advance_below_min_insync_replicas(led):
    """KAFKA-15583: a leader whose ISR is below min.insync.replicas commits nothing."""
    led.configure("min.insync.replicas", "2")
    led.image(isr=(1,))
    led.append(b"a")
    assert led.marks == (0, 1)
    assert errors(part_of(led.begin_produce().receive())) == "not_enough_replicas"
    assert led.marks == (0, 1)
    led.reconfigure("min.insync.replicas", "1")
    assert led.marks == (1, 1)
    assert errors(part_of(led.begin_produce().receive())) == "none"


def test_batch_behind_a_refused_one_is_out_of_order(led):
    """An in-flight batch after a refused batch must wait until both are sent again."""
    first, second = (
        batch([b"v"], producer_id=7, producer_epoch=0, sequence=sequence) for sequence in (0, 1)
    )
    led.configure("min.insync.replicas", "2")
    led.image(isr=(1,))
    assert errors(part_of(led.begin_produce(data=first).receive())) == "not_enough_replicas"
    led.image(replicas=(1, 2), isr=(1, 2), partition_epoch=1)
    refused = part_of(led.begin_produce(data=second).receive())
    assert errors(refused) == "out_of_order_sequence_number"
    first, second = (
        batch([b"v"], producer_id=8, producer_epoch=0, sequence=sequence) for sequence in (0, 1)
    )
    led.image(replicas=(1, 2), isr=(1, 2), leader=2, leader_epoch=1, partition_epoch=2)
    assert errors(part_of(led.begin_produce(data=first).receive())) == "not_leader_or_follower"
    led.image(replicas=(1, 2), isr=(1, 2), leader_epoch=2, partition_epoch=3)
    refused = part_of(led.begin_produce(data=second).receive())
    assert errors(refused) == "out_of_order_sequence_number"


def test_min_insync_replicas_is_capped_at_the_replication_factor(led):
    led.configure("min.insync.replicas", "3")
    led.image(replicas=(1, 2), isr=(1, 2))
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")
    led.fetch(2, 1)
    assert errors(part_of(producer.receive())) == "none"
    led.image(replicas=(1, 2), isr=(1,), partition_epoch=1)
    assert errors(part_of(led.begin_produce().receive())) == "not_enough_replicas"


# --- acks -----------------------------------------------------------------------------------------


def test_acks_all_produce_is_answered_when_the_isr_has_the_records(led):
    led.image()
    first, second = led.begin_produce(b"1"), None
    until(lambda: led.marks[1] == 1, "the first append")
    second = led.begin_produce(b"2")
    until(lambda: led.marks[1] == 2, "the second append")
    led.fetch(2, 2)
    led.fetch(3, 1)
    assert part_of(first.receive())["base_offset"] == 0
    assert led.marks == (1, 2)
    led.fetch(3, 2)
    answer = part_of(second.receive())
    assert (errors(answer), answer["base_offset"]) == ("none", 1)


def test_acks_1_and_acks_0_do_not_wait_for_replicas(led):
    led.configure("min.insync.replicas", "3")
    led.image(isr=(1,))
    assert led.append(b"a") == 0
    led.connect().begin_produce(led.topic, [b"b"], acks=0)
    until(lambda: led.marks[1] == 2, "the append without an answer")


def test_acks_all_produce_times_out_and_its_records_stay(led):
    led.image()
    answer = part_of(led.begin_produce(timeout_ms=50).receive())
    assert (errors(answer), answer["base_offset"]) == ("request_timed_out", 0)
    assert led.marks == (0, 1)
    led.fetch(2, 1)
    led.fetch(3, 1)
    assert led.marks == (1, 1)


def test_isr_shrink_below_minimum_fails_waiting_produce_after_append(led):
    """The error is AFTER_APPEND only if the high watermark has passed the appended batch."""
    led.configure("min.insync.replicas", "2")
    led.image(replicas=(1, 2), isr=(1, 2))
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")

    def follow_and_leave() -> None:
        led.replicas.fetched(led.topic, 0, 2, EPOCHS[2], 1, 0, 1)
        led.apply(replicas=(1, 2), isr=(1,), partition_epoch=1)

    led.run(follow_and_leave)
    answer = part_of(producer.receive())
    assert (errors(answer), answer["base_offset"]) == ("not_enough_replicas_after_append", 0)
    waits = led.begin_produce(timeout_ms=50)
    assert errors(part_of(waits.receive())) == "not_enough_replicas"


def test_isr_shrink_completes_waiting_produce(led):
    """KAFKA-13091: the committed shrink advances the high watermark and completes acks=all."""
    led.image(replicas=(1, 2), isr=(1, 2))
    led.fetch(2, 0)
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")
    led.clock.advance(LAG_MS + 1)
    led.run(led.replicas.check_isr)
    assert led.answer().leaves == (2,)
    assert errors(part_of(producer.receive())) == "none"


def test_former_leader_returns_current_leader_and_its_endpoint(led):
    led.image()
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    answer = part_of(producer.receive())
    assert (errors(answer), answer["base_offset"]) == ("not_leader_or_follower", 0)
    assert answer["current_leader"] == {"leader_id": 2, "leader_epoch": 1}
    (node,) = answer["node_endpoints"]
    assert (node["node_id"], node["host"], node["port"], node["rack"]) == (2, "b2", 9002, "r2")
    refused = part_of(led.begin_produce().receive())
    assert (errors(refused), refused["base_offset"]) == ("not_leader_or_follower", -1)
    assert refused["current_leader"]["leader_id"] == 2


def test_reelected_leader_does_not_acknowledge_earlier_produce(led):
    led.image()
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")

    def away_and_back() -> None:
        led.apply(leader=2, leader_epoch=1, partition_epoch=1)
        led.apply(leader=1, leader_epoch=2, partition_epoch=2, isr=(1,))

    led.run(away_and_back)
    assert errors(part_of(producer.receive())) == "not_leader_or_follower"


def test_produce_keeps_waiting_if_leader_stays_in_a_new_epoch(led):
    led.image()
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")
    led.image(leader_epoch=1, partition_epoch=1, isr=(1, 2), replicas=(1, 2))
    assert led.marks == (0, 1)
    led.fetch(2, 1)
    assert errors(part_of(producer.receive())) == "none"


def test_waiting_produce_to_deleted_topic_is_unknown_topic_or_partition(led):
    led.image()
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 1, "the append")
    led.image(is_there=False)
    assert errors(part_of(producer.receive())) == "unknown_topic_or_partition"


def test_duplicate_batch_above_high_watermark_waits_for_commit(led):
    led.image(replicas=(1, 2), isr=(1, 2))
    data = batch([b"v"], producer_id=7, producer_epoch=0, sequence=0)
    first = led.begin_produce(data=data)
    until(lambda: led.marks[1] == 1, "the append")
    again = led.begin_produce(data=data)
    late = part_of(led.begin_produce(data=data, timeout_ms=50).receive())
    assert (errors(late), late["base_offset"]) == ("request_timed_out", 0)
    led.fetch(2, 1)
    answers = [part_of(client.receive()) for client in (first, again)]
    assert [(errors(answer), answer["base_offset"]) for answer in answers] == [("none", 0)] * 2
    assert led.marks == (1, 1)


def test_produce_response_waits_for_all_its_partitions(led):
    """The partition with one replica commits at once; the response waits for both partitions."""
    other = led.create(f"{led.topic}-alone")
    led.image(alone=other, replicas=(1, 2), isr=(1, 2))
    body = led.produce_request(b"x")
    records = body["topic_data"][0]["partition_data"]
    both = [*body["topic_data"], {"name": other, "partition_data": records}]
    client = led.connect()
    client.send("produce", 10, **body | {"topic_data": both})
    until(lambda: led.marks[1] == 1, "the append")
    led.fetch(2, 1)
    answer = client.receive()
    codes = {
        response["name"]: errors(response["partition_responses"][0])
        for response in answer["responses"]
    }
    assert codes == {led.topic: "none", other: "none"}


# --- fetch permissions ----------------------------------------------------------------------------


def test_follower_fetch_is_validated_in_kafkas_order(led):
    """KAFKA-14078: the epoch is compared before the response names the leader."""
    led.image(leader_epoch=5, partition_epoch=5)
    fenced = led.fetch(2, 0, leader_epoch=4)
    assert errors(fenced) == "fenced_leader_epoch"
    assert fenced["current_leader"] == {"leader_id": 1, "leader_epoch": 5}
    assert errors(led.fetch(2, 0, leader_epoch=6)) == "unknown_leader_epoch"
    assert errors(led.fetch(2, 0, leader_epoch=5)) == "none"
    # KAFKA-13837: broker 4 may be assigned in newer metadata that has not arrived yet.
    assert errors(led.fetch(4, 0, leader_epoch=5)) == "unknown_leader_epoch"
    assert errors(led.fetch(4, 0)) == "not_leader_or_follower"
    assert errors(led.fetch(2, 0, topic_id=uuid.uuid4())) == "unknown_topic_id"
    led.image(leader=2, leader_epoch=6, partition_epoch=6)
    assert errors(led.fetch(3, 0, leader_epoch=5)) == "fenced_leader_epoch"
    lost = led.fetch(3, 0, leader_epoch=6)
    assert errors(lost) == "not_leader_or_follower"
    assert lost["current_leader"] == {"leader_id": 2, "leader_epoch": 6}


def test_unexpected_exception_fails_only_its_partition_of_a_fetch(led):
    """If the fetch failed, a follower would get no records from any of the leader's partitions."""
    led.image(leader_epoch=5, partition_epoch=5)
    led.append()

    def odd(*_):
        raise KeyError("odd")

    fetched, led.replicas.fetched = led.replicas.fetched, odd
    row = led.fetch(2, 0, leader_epoch=5)
    assert (row["error_code"], row["records"]) == ("unknown_server_error", b"")
    led.replicas.fetched = fetched
    assert led.fetch(2, 0, leader_epoch=5)["error_code"] == "none"


def test_fetch_with_former_broker_epoch_does_not_advance_high_watermark(led):
    """KIP-903, KAFKA-15221: a late fetch from before the broker registered again."""
    led.image(replicas=(1, 2), isr=(1, 2))
    led.append(b"a")
    assert errors(led.fetch(2, 1, broker_epoch=EPOCHS[2] - 1)) == "not_leader_or_follower"
    assert led.marks == (0, 1)
    assert errors(led.fetch(2, 1, broker_epoch=EPOCHS[2])) == "none"
    assert led.marks == (1, 1)


def test_follower_fetch_v12_without_broker_epoch_advances_high_watermark(led):
    led.image(replicas=(1, 2), isr=(1, 2))
    led.append(b"a")
    request = led.fetch_request(2, 1)
    state = request.pop("replica_state")
    asked = request.pop("topics")[0]["partitions"]
    answer = led.client.call(
        "fetch",
        12,
        replica_id=state["replica_id"],
        topics=[{"topic": led.topic, "partitions": asked}],
        **request,
    )
    assert errors(answer["responses"][0]["partitions"][0]) == "none"
    assert led.marks == (1, 1)


def test_diverging_follower_does_not_advance_high_watermark(led):
    """KAFKA-13141: a diverging fetch's offset does not show which records both logs have."""
    led.image(replicas=(1, 2), isr=(1, 2), leader_epoch=1, partition_epoch=1)
    led.append(b"a", b"b")
    led.image(replicas=(1, 2), isr=(1, 2), leader_epoch=3, partition_epoch=3)
    led.append(b"c")
    parted = led.fetch(2, 3, last_epoch=1)
    assert parted["diverging_epoch"] == {"epoch": 1, "end_offset": 2}
    assert not parted["records"]
    assert led.marks == (0, 3)
    between = led.fetch(2, 2, last_epoch=2)
    assert between["diverging_epoch"] == {"epoch": 1, "end_offset": 2}
    assert errors(led.fetch(2, 2, last_epoch=9)) == "offset_out_of_range"
    assert errors(led.fetch(2, 4)) == "offset_out_of_range"
    assert led.marks == (0, 3)
    led.fetch(2, 3, last_epoch=3)
    assert led.marks == (3, 3)


def test_waiting_follower_fetch_is_completed_by_records_only(led):
    led.image()
    led.append(b"a")
    waiting = led.begin_fetch(2, 1, max_wait=20_000, min_bytes=1)
    until(lambda: led.marks[1] == 1 and led.waiting_fetches == 1, "the fetch waits")
    led.fetch(3, 1)
    assert led.marks == (1, 1)
    assert led.waiting_fetches == 1
    led.append(b"b")
    part = waiting.receive()["responses"][0]["partitions"][0]
    assert (errors(part), part["high_watermark"], len(part["records"]) > 0) == ("none", 1, True)


def test_waiting_consumer_fetch_is_completed_by_the_high_watermark(led):
    led.image(replicas=(1, 2), isr=(1, 2))
    led.append(b"a")
    waiting = led.begin_fetch(-1, 0, max_wait=20_000, min_bytes=1)
    until(lambda: led.waiting_fetches == 1, "the fetch waits")
    led.fetch(2, 1)
    part = waiting.receive()["responses"][0]["partitions"][0]
    assert (part["high_watermark"], len(part["records"]) > 0) == (1, True)


def test_waiting_fetches_are_completed_by_a_leader_change(led):
    led.image()
    follower = led.begin_fetch(2, 0, max_wait=20_000, min_bytes=1)
    client = led.begin_fetch(-1, 0, max_wait=20_000, min_bytes=1)
    until(lambda: led.waiting_fetches == 2, "the fetches wait")
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    part = follower.receive()["responses"][0]["partitions"][0]
    assert errors(part) == "not_leader_or_follower"
    # A client may read from any replica.
    assert errors(client.receive()["responses"][0]["partitions"][0]) == "none"


def test_waiting_follower_fetch_updates_last_fetch_time_once(led):
    """The read after the wait does not show that the follower is still alive."""
    led.image(replicas=(1, 2), isr=(1, 2))
    waiting = led.begin_fetch(2, 0, max_wait=20_000, min_bytes=1)
    until(lambda: led.waiting_fetches == 1, "the fetch waits")
    before = led.follower(2).last_fetch_ms
    led.clock.advance(10)
    led.append(b"a")
    waiting.receive()
    assert led.follower(2).last_fetch_ms == before


def test_follower_fetch_session_returns_only_changed_partitions(led):
    led.image(replicas=(1, 2), isr=(1, 2))
    client = led.connect()
    opened = client.call("fetch", 17, **led.fetch_request(2, 0, session_epoch=0))
    assert opened["session_id"] > 0
    led.append(b"a")
    nothing = {"topics": [], "session_id": opened["session_id"]}
    told = client.call("fetch", 17, **led.fetch_request(2, 0, session_epoch=1) | nothing)
    assert len(told["responses"][0]["partitions"][0]["records"])
    moved = led.fetch_request(2, 1, session_epoch=2) | {"session_id": opened["session_id"]}
    client.call("fetch", 17, **moved)
    assert led.marks == (1, 1)
    new = client.call("fetch", 17, **led.fetch_request(2, 1, session_epoch=3) | nothing)
    assert new["responses"][0]["partitions"][0]["high_watermark"] == 1
    same = client.call("fetch", 17, **led.fetch_request(2, 1, session_epoch=4) | nothing)
    assert same["responses"] == []


def test_follower_offset_inside_a_batch_counts_as_batch_start(led):
    """A follower that was truncated within a batch fetches the whole batch again."""
    led.image(replicas=(1, 2), isr=(1, 2))
    led.append(b"a", b"b")
    led.append(b"c", b"x" * 5_000)
    led.fetch(2, 1)
    assert (led.marks, led.follower(2).log_end_offset) == ((0, 4), 0)
    led.fetch(2, 3)
    assert led.marks == (2, 4)
    led.fetch(2, 4)
    assert led.marks == (4, 4)


# --- the ISR --------------------------------------------------------------------------------------


def test_replica_joins_isr_when_it_reaches_the_high_watermark(led):
    led.image(replicas=(1, 2), isr=(1,))
    led.append(b"a", b"b")
    assert led.marks == (2, 2)
    led.fetch(2, 1)
    assert led.changes == []
    led.fetch(2, 2)
    change = led.changes[0]
    assert (change.joins, change.new_isr) == ((2,), ((1, EPOCHS[1]), (2, EPOCHS[2])))
    # KIP-497: the new member counts from now on.
    led.append(b"c")
    assert led.marks == (2, 3)
    led.answer()
    assert led.marks == (2, 3)
    led.fetch(2, 3)
    assert led.marks == (3, 3)
    assert led.replicas.isr_expands == 1


def test_refused_isr_change_restores_the_committed_isr(led):
    """INELIGIBLE_REPLICA restores the committed ISR."""
    led.image(replicas=(1, 2), isr=(1,))
    led.fetch(2, 0)
    led.append(b"a")
    assert led.marks == (0, 1)
    led.answer(int(Errors.INELIGIBLE_REPLICA))
    led.clock.advance(LAG_MS + 1)
    led.append(b"b")
    assert led.marks == (2, 2)
    assert led.replicas.failed_isr_updates == 1


@pytest.mark.parametrize(("behind_ms", "leaves"), [(LAG_MS, ()), (LAG_MS + 1, (2,))])
def test_replica_leaves_isr_after_replica_lag_time(led, behind_ms, leaves):
    led.image(replicas=(1, 2), isr=(1, 2))
    led.fetch(2, 0)
    led.append(b"a")
    led.clock.advance(behind_ms)
    led.run(led.replicas.check_isr)
    assert tuple(broker_id for change in led.changes for broker_id in change.leaves) == leaves


def test_caught_up_follower_stays_in_isr_without_fetching(led):
    led.image(replicas=(1, 2), isr=(1, 2))
    led.append(b"a")
    led.fetch(2, 1)
    led.clock.advance(100 * LAG_MS)
    led.run(led.replicas.check_isr)
    assert led.changes == []


def test_fenced_follower_does_not_join_the_isr(led):
    fenced = {1: registration(1), 2: registration(2, fenced=True)}
    led.image(replicas=(1, 2), isr=(1,), brokers=fenced)
    led.fetch(2, 0)
    assert led.changes == []
    led.image(replicas=(1, 2), isr=(1,))
    led.fetch(2, 0)
    assert led.changes[0].joins == (2,)


# --- images ---------------------------------------------------------------------------------------


def test_fetcher_restarts_on_new_leader_epoch_but_not_partition_epoch(led):
    """KAFKA-13790: a new leader epoch restarts a fetcher, a new partition epoch does not."""
    led.image(leader=2, leader_epoch=3, partition_epoch=7)
    assert led.following.log[-1] == ("follow", [(led.topic, 2)])
    so_far = len(led.following.log)
    led.image(leader=2, leader_epoch=3, partition_epoch=8, isr=(1, 2))
    led.image(leader=1, leader_epoch=2, partition_epoch=6)
    assert len(led.following.log) == so_far or led.following.log[so_far:] == [("stop", 1)]
    assert errors(led.fetch(3, 0, leader_epoch=3)) == "not_leader_or_follower"
    led.image(leader=3, leader_epoch=4, partition_epoch=9)
    assert led.following.log[-1] == ("follow", [(led.topic, 3)])
    led.image(leader=-1, leader_epoch=5, partition_epoch=10)
    assert led.following.log[-1] == ("stop", 1)


def test_new_leader_hides_latest_offset_until_high_watermark_catches_up(led):
    """The high watermark of a new leader may be lower than that of the former leader."""
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    led.run(lambda: led.partition.append_as_follower(batch([b"a", b"b"]), 1))
    assert led.marks == (0, 2)
    led.image(leader=1, leader_epoch=2, partition_epoch=2, isr=(1, 2), replicas=(1, 2))
    assert led.following.log[-1] == ("stop", 1)
    assert led.marks == (0, 2)
    assert errors(led.list_offset(LATEST)) == "offset_not_available"
    assert errors(led.list_offset(LATEST, version=4)) == "leader_not_available"
    assert errors(led.list_offset(0)) == "offset_not_available"
    assert led.list_offset(EARLIEST)["offset"] == 0
    assert led.list_offset(LATEST, replica=2)["offset"] == 2
    led.fetch(2, 1)
    assert errors(led.list_offset(LATEST)) == "offset_not_available"
    led.fetch(2, 2)
    latest = led.list_offset(LATEST)
    assert (latest["offset"], latest["leader_epoch"]) == (2, 2)


def test_high_watermark_follows_added_and_removed_replicas(led):
    led.image(replicas=(1,), isr=(1,), partition_epoch=-1)
    led.append(b"a")
    led.image(replicas=(1, 2), isr=(1,))
    assert led.marks == (1, 1)
    led.append(b"b")
    assert led.marks == (2, 2)
    led.fetch(2, 2)
    led.answer()
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 3, "the append")
    assert led.marks == (2, 3)
    led.image(replicas=(1,), isr=(1,), partition_epoch=5, leader_epoch=1)
    assert led.marks == (3, 3)
    assert errors(part_of(producer.receive())) == "none"
    assert led.replicas.replica(led.topic, 0) is None
    assert led.list_offset(LATEST)["leader_epoch"] == 1


def test_partition_reassigned_to_other_brokers_is_not_served(led):
    led.image()
    led.append(b"a")
    led.image(replicas=(2, 3), isr=(2, 3), leader=2, leader_epoch=1, partition_epoch=1)
    gone = led.read(0)
    assert errors(gone) == "not_leader_or_follower"
    assert gone["current_leader"] == {"leader_id": 2, "leader_epoch": 1}
    assert errors(part_of(led.begin_produce().receive())) == "not_leader_or_follower"
    assert led.run(lambda: led.broker.services.logs.find_open((led.topic, 0))) is None
    until(lambda: not any(led.directory.glob(f"{led.topic}-0")), "the directory is renamed")


def test_fetch_with_old_id_of_recreated_topic_is_unknown_topic_id(led):
    """KAFKA-14190: records of the old topic id are not served under the new one."""
    led.image()
    led.append(b"a")
    old = led.topic_id
    led.run(lambda: delete_topic(led.broker.services.metadata, led.topic))
    led.create(led.topic)
    led.recreate()
    led.image()
    assert errors(led.fetch(2, 0, topic_id=old)) == "unknown_topic_id"
    assert errors(led.fetch(2, 0)) == "none"
    assert led.marks == (0, 0)


def test_failed_log_is_reported_offline_and_refuses_requests(led):
    led.image()
    led.append(b"a")
    producer = led.begin_produce()
    until(lambda: led.marks[1] == 2, "the append")
    led.run(lambda: led.partition.marks.fail(StorageError("bad disk")))
    assert errors(part_of(producer.receive())) == "kafka_storage_error"
    assert errors(led.fetch(2, 0)) == "kafka_storage_error"
    assert errors(part_of(led.begin_produce().receive())) == "kafka_storage_error"
    assert [(local.topic, local.index) for local in led.offline] == [(led.topic, 0)]


# --- reading from followers -----------------------------------------------------------------------


def test_follower_serves_consumers_up_to_its_high_watermark(led):
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    records = batch([b"a", b"b"])
    led.run(lambda: led.partition.append_as_follower(records, 1))
    led.run(lambda: led.partition.replica.move_high_watermark(1))
    part = led.read(0, leader_epoch=1)
    assert (errors(part), part["high_watermark"]) == ("none", 1)
    assert errors(led.read(2)) == "none"
    assert errors(led.read(3)) == "offset_out_of_range"
    assert errors(led.read(0, leader_epoch=0)) == "fenced_leader_epoch"
    # Clients without rack support read from leaders only, except for debugging consumers.
    old = led.client.fetch(led.topic, version=10)
    assert errors(old) == "not_leader_or_follower"
    assert errors(led.fetch(-2, 0)) == "none"
    assert errors(led.list_offset(LATEST)) == "not_leader_or_follower"
    assert led.list_offset(LATEST, replica=-2)["offset"] == 2


def test_preferred_read_replica_is_unset_without_a_replica_selector(led):
    led.image()
    led.append(b"a")
    led.fetch(2, 1)
    assert led.read(0, rack_id="r2")["preferred_read_replica"] == -1


def test_rack_aware_selector_prefers_in_sync_replica_of_the_rack(tmp_path):
    selector = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
    with cluster_of_one(tmp_path, {"replica.selector.class": selector}) as led:
        led.image(isr=(1, 2))
        led.append(b"a")
        led.append(b"b")
        led.fetch(2, 1)
        led.fetch(3, 2)
        led.changes.clear()

        def told(offset: int, rack: str, **how: object) -> tuple[int, int]:
            part = led.read(offset, rack_id=rack, max_wait=20_000, **how)
            return part["preferred_read_replica"], len(part["records"] or b"")

        assert told(1, "r2") == (2, 0)
        assert led.read(2, rack_id="r2")["preferred_read_replica"] == -1  # broker 2's log ends at 1
        assert led.read(0, rack_id="r3")["preferred_read_replica"] == -1  # not in sync
        assert led.read(0, rack_id="r1")["preferred_read_replica"] == -1
        assert led.read(0, rack_id="")["preferred_read_replica"] == -1
        near = {broker_id: registration(broker_id, rack="r2") for broker_id in (1, 2, 3)}
        led.image(isr=(1, 2), partition_epoch=1, brokers=near)
        assert led.read(0, rack_id="r2")["preferred_read_replica"] == -1  # as is the leader
        hidden = {**near, 1: registration(1), 2: registration(2, listener="OTHER", rack="r2")}
        led.image(isr=(1, 2), partition_epoch=2, brokers=hidden)
        assert led.read(0, rack_id="r2")["preferred_read_replica"] == -1  # without listener


def test_throttled_replica_outside_isr_waits_for_quota(led):
    """KIP-73: fetches of in-sync replicas are never throttled; fetches of other replicas are."""
    led.configure("leader.replication.throttled.replicas", "0:1")
    led.image(isr=(1, 2))
    led.append(b"x" * 1000)
    broker = "leader.replication.throttled.rate"
    led.run(lambda: led.broker.config.set_dynamic(DYNAMIC, {broker: "10"}))
    assert len(led.fetch(3, 0)["records"])
    behind = led.fetch(3, 0)
    assert (errors(behind), behind["records"] or b"") == ("none", b"")
    waiting = led.begin_fetch(3, 0, max_wait=20_000, min_bytes=1)
    until(lambda: led.waiting_fetches == 1, "what is held back is not worth an answer")
    waiting.close()
    until(lambda: led.waiting_fetches == 0, "it has gone")
    assert len(led.fetch(2, 0)["records"])
    led.run(lambda: led.broker.config.set_dynamic(DYNAMIC, {}))
    assert len(led.fetch(3, 0)["records"])


# --- other requests -------------------------------------------------------------------------------


def delete(led: Led, offset: int, timeout_ms: int = 20_000):
    client = led.connect()
    parts = [{"partition_index": 0, "offset": offset}]
    topics = [{"name": led.topic, "partitions": parts}]
    client.send("delete_records", 2, topics=topics, timeout=timeout_ms)
    return lambda: client.receive()["topics"][0]["partitions"][0]


def test_delete_records_waits_for_all_live_replicas(led):
    led.image()
    led.append(b"a", b"b")
    led.fetch(2, 2)
    led.fetch(3, 2)
    answer = delete(led, 1)
    until(lambda: led.read(1)["log_start_offset"] == 1, "the leader's own log")
    late = delete(led, 1, timeout_ms=50)()
    assert (errors(late), late["low_watermark"]) == ("request_timed_out", 0)
    led.fetch(2, 2, log_start=1)
    led.fetch(3, 2, log_start=2)
    part = answer()
    assert (errors(part), part["low_watermark"]) == ("none", 1)


def test_delete_records_does_not_wait_for_fenced_replica(led):
    led.image()
    led.append(b"a")
    led.fetch(2, 1)
    led.fetch(3, 1)
    answer = delete(led, -1)
    until(lambda: led.read(1)["log_start_offset"] == 1, "the leader's own log")
    led.fetch(2, 1, log_start=1)
    down = {1: registration(1), 2: registration(2), 3: registration(3, fenced=True)}
    led.image(brokers=down)
    part = answer()
    assert (errors(part), part["low_watermark"]) == ("none", 1)


def test_delete_records_above_high_watermark_is_out_of_range(led):
    led.image()
    led.append(b"a")
    assert errors(delete(led, 1)()) == "offset_out_of_range"
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    assert errors(delete(led, 0)()) == "not_leader_or_follower"


def test_waiting_delete_records_fails_on_leadership_loss(led):
    led.image()
    led.append(b"a")
    led.fetch(2, 1)
    led.fetch(3, 1)
    answer = delete(led, 1)
    until(lambda: led.read(1)["log_start_offset"] == 1, "the leader's own log")
    led.image(leader=2, leader_epoch=1, partition_epoch=1)
    assert errors(answer()) == "not_leader_or_follower"


def test_offset_for_leader_epoch_is_answered_only_by_the_leader(led):
    led.image(leader_epoch=2, partition_epoch=2)
    led.append(b"a")

    def ended(epoch: int, current: int = -1) -> tuple[str, int, int]:
        part = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
        topics = [{"topic": led.topic, "partitions": [part]}]
        answer = led.client.call("offset_for_leader_epoch", 4, replica_id=2, topics=topics)
        told = answer["topics"][0]["partitions"][0]
        return told["error_code"], told["leader_epoch"], told["end_offset"]

    # Epochs up to the log end offset: a follower needs uncommitted epochs too.
    assert ended(2, 2) == ("none", 2, 1)
    assert ended(9, 2) == ("none", -1, -1)
    assert ended(2, 1)[0] == "fenced_leader_epoch"
    assert ended(2, 3)[0] == "unknown_leader_epoch"
    led.image(leader=2, leader_epoch=3, partition_epoch=3)
    assert ended(2, 3)[0] == "not_leader_or_follower"


def test_unflushed_records_are_replicated_but_not_committed(tmp_path):
    """With flush.messages, the leader itself counts only flushed records as replicated."""
    disk = FaultyDisk()
    with cluster_of_one(tmp_path, {"log.flush.interval.messages": "1"}, disk) as led:
        led.image(replicas=(1, 2), isr=(1, 2))
        disk.gate.clear()
        producer = led.begin_produce()
        until(lambda: led.marks[1] == 1, "the append")
        assert len(led.fetch(2, 0)["records"])
        led.fetch(2, 1)
        assert led.marks == (0, 1)
        disk.gate.set()
        assert errors(part_of(producer.receive())) == "none"
        assert led.marks == (1, 1)


# --- events ---------------------------------------------------------------------------------------


def test_metrics_count_under_replicated_under_min_isr_and_leaderless(tmp_path):
    with cluster_of_one(tmp_path, METRICS) as led:
        led.configure("min.insync.replicas", "2")
        led.image(isr=(1,), partition_epoch=1)
        gauges = led.scraped()
        assert gauges["partitioncount"] == gauges["leadercount"] == 1
        assert gauges["underreplicatedpartitions"] == gauges["underminisrpartitioncount"] == 1
        assert gauges["partitions_under_replicated"] == gauges["partitions_under_min_isr"] == 1
        assert gauges["partitions_leaderless"] == 0
        assert gauges["atminisrpartitioncount"] == gauges["reassigningpartitions"] == 0
        led.fetch(2, 0)
        led.answer()
        gauges = led.scraped()
        assert gauges["isrexpands_total"] == gauges["atminisrpartitioncount"] == 1
        assert gauges["underminisrpartitioncount"] == 0
        assert (gauges["in_sync_replica"], gauges["under_replicated_partition"]) == (1, 1)
        led.image(leader=2, leader_epoch=1, partition_epoch=9)
        led.following.max_lag = 7
        gauges = led.scraped()
        assert (gauges["leadercount"], gauges["maxlag"]) == (0, 7)
        led.image(leader=-1, leader_epoch=2, partition_epoch=10)
        assert led.scraped()["partitions_leaderless"] == 1
