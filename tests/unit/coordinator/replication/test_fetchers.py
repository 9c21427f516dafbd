"""A follower on a real connection to its leader: the requests, and their effect on the log."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from fencepost.cluster.follower import FetchState
from fencepost.coordinator.config.broker_config import (
    BrokerConfig,
    ConfigSource,
    check_topic_configs,
)
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.replication.fetch_wire import fetch_version, list_offsets_version
from fencepost.logcore.checkpoints import (
    HIGH_WATERMARK_CHECKPOINT,
    LOG_START_CHECKPOINT,
    RECOVERY_POINT_CHECKPOINT,
    read_offsets,
)
from fencepost.logcore.fs import OsFileSystem
from fencepost.logcore.machine import Event
from tests.support.stalls import watched_loop
from tests.support.waits import until_true
from tests.unit.coordinator.replication.leading import FOLLOWER, TOPIC, Pair
from tests.unit.logcore.partition_driver import T0, read_log
from tests.unit.logcore.test_replica import at


@pytest.fixture
async def pair(tmp_path: Path):
    brokers = Pair(tmp_path, 3)
    await brokers.start()
    yield brokers
    await brokers.stop()


async def test_follower_replicates_the_leaders_log(pair):
    pair.put(3)
    pair.follow()
    await pair.equal()
    pair.put(2)
    pair.put(4)
    await pair.equal()
    assert read_log(pair.log()) == read_log(pair.led[0])
    assert pair.log().traffic.replicated_in == pair.led[0].traffic.bytes_in
    (machine,) = pair.fetchers
    assert machine.is_in_sync
    assert pair.fetchers.max_lag == 0


async def test_follower_fetch_request_has_replica_epoch_and_offsets(pair):
    pair.put(3)
    pair.follow()
    await pair.equal()
    # Let the follower fetch past the first records, so that it sends a second request.
    await until_true(lambda: len(pair.leader.asked_of()) > 1, "the second request")
    body = pair.leader.bodies[0]
    assert pair.leader.asked[0] == (1, 18, "broker-2-fetcher-0")
    assert (body.replica_state.replica_id, body.replica_state.replica_epoch) == (FOLLOWER, 77)
    assert (body.max_wait.total_seconds(), body.min_bytes, body.max_bytes) == (0.5, 1, 10_485_760)
    assert (body.session_id, body.session_epoch, body.isolation_level) == (0, 0, 0)
    assert (body.cluster_id, body.rack_id) == (None, "")
    asked = pair.leader.asked_of()
    assert asked[0].partition_max_bytes == 1_048_576
    rows = [
        (fetch.fetch_offset, fetch.last_fetched_epoch, fetch.log_start_offset) for fetch in asked
    ]
    assert rows[:2] == [(0, -1, 0), (3, 5, 0)]
    assert {fetch.current_leader_epoch for fetch in asked} == {5}


def test_fetch_and_list_offsets_versions_follow_metadata_version():
    levels = [7, 8, 9, 10, 18, 19, 20, 21, 26, 27, 30]
    assert [fetch_version(level) for level in levels] == [
        13,
        13,
        14,
        15,
        15,
        16,
        16,
        17,
        17,
        18,
        18,
    ]
    assert [list_offsets_version(level) for level in (7, 8, 9, 20, 21, 24, 25, 28, 29)] == [
        *(7, 7, 8, 8, 9, 9, 10, 10, 11)
    ]


async def test_partitions_are_replicated_despite_a_small_response_limit(tmp_path):
    brokers = Pair(tmp_path, 5, config={"replica.fetch.max.bytes": "200"})
    await brokers.start()
    for index in range(5):
        for _ in range(10):
            brokers.put(3, index, size=50)
    brokers.follow(range(5))
    for index in range(5):
        await brokers.equal(index)
        assert read_log(brokers.log(index)) == read_log(brokers.led[index])
    await brokers.stop()


# --- diverging logs ---


async def test_follower_truncates_tail_of_an_epoch_unknown_to_the_leader(pair):
    """KIP-101, second scenario: the logs have the same offsets, but different epochs."""
    log = pair.log()
    log.append_as_follower(at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=4), 9)
    log.replica.move_high_watermark(2)
    pair.led[0].append_as_follower(at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=5), 5)
    pair.follow()
    await pair.equal()
    await until_true(lambda: read_log(log) == read_log(pair.led[0]), "the logs are equal")
    (cause,) = [event for event in pair.causes if event.kind == "log-truncated"]
    assert cause.detail["offset"] == 2
    assert "below_high_watermark" not in cause.detail


async def test_follower_truncates_to_largest_common_epoch_after_fast_failovers(pair):
    """KIP-279: the logs have records of different epochs after the largest common epoch."""
    log = pair.log()
    own = at(0, 3, leader_epoch=1) + at(3, 3, leader_epoch=2) + at(6, 1, leader_epoch=4)
    log.append_as_follower(own, 9)
    theirs = at(0, 3, leader_epoch=1) + at(3, 2, leader_epoch=3) + at(5, 4, leader_epoch=5)
    pair.led[0].append_as_follower(theirs, 9)
    pair.follow()
    await until_true(lambda: read_log(log) == read_log(pair.led[0]), "the logs are equal")
    assert log._epochs.entries == [(1, 0), (3, 3), (5, 5)]


async def test_truncation_lowers_recovery_point_and_high_watermark_checkpoints(pair):
    log = pair.log()
    for offset in range(10):
        log.append_as_follower(at(offset, leader_epoch=4), 9)
    log.replica.move_high_watermark(8)
    log.flushes.run(T0)
    pair.storage.logs.checkpoint()
    pair.led[0].append_as_follower(at(0, 4, leader_epoch=4) + at(4, leader_epoch=5), 5)
    pair.follow()
    await until_true(lambda: read_log(log)[-1:] == read_log(pair.led[0])[-1:], "cut and fetched")
    directory = str(pair.directory / "follower")
    for name in (RECOVERY_POINT_CHECKPOINT, HIGH_WATERMARK_CHECKPOINT):
        assert read_offsets(OsFileSystem(), directory, name)[TOPIC, 0] == 4, name
    (cause,) = [event for event in pair.causes if event.kind == "log-truncated"]
    assert cause.detail["below_high_watermark"] == 8


async def test_follower_below_leaders_log_start_restarts_at_it(pair):
    """KAFKA-9491."""
    led, log = pair.led[0], pair.log()
    log.append_as_follower(at(0, 3, leader_epoch=4), 9)
    led.replica.restart_at(500)
    led.append_as_follower(at(500, 3, leader_epoch=5), 5)
    pair.follow()
    await pair.equal()
    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (500, 503, 503)
    assert read_log(log) == read_log(led)
    directory = str(pair.directory / "follower")
    assert (TOPIC, 0) not in (read_offsets(OsFileSystem(), directory, LOG_START_CHECKPOINT) or {})


async def test_follower_truncates_to_log_end_of_uncleanly_elected_leader(pair):
    """The fetch is out of range, and the follower truncates to the leader's log end offset."""
    led, log = pair.led[0], pair.log()
    log.append_as_follower(at(0, 3, leader_epoch=4) + at(3, 4, leader_epoch=6), 9)
    led.append_as_follower(at(0, 3, leader_epoch=4), 5)
    pair.follow()
    await pair.equal()
    await until_true(lambda: read_log(log) == read_log(led), "the logs are equal")


async def test_follower_adopts_log_start_offset_of_the_leader(pair):
    pair.put(3)
    pair.put(3)
    pair.follow()
    await pair.equal()
    pair.led[0].cleanup.delete_records_before(4)
    await until_true(lambda: pair.log().log_start_offset == 4, "log start")


async def test_follower_without_epoch_cache_truncates_to_high_watermark(pair):
    log = pair.log()
    log.append_as_follower(at(0, 3, leader_epoch=5) + at(3, 3, leader_epoch=5), 9)
    log.replica.move_high_watermark(3)
    log._epochs.clear()
    pair.led[0].append_as_follower(at(0, 3, leader_epoch=5) + at(3, leader_epoch=5), 5)
    pair.follow()
    await pair.equal()
    assert read_log(log) == read_log(pair.led[0])


# --- failures ---


async def test_partition_error_delays_only_that_partition(pair):
    pair.leader.errors[pair.topic_id, 1] = 6
    for index in range(3):
        pair.put(3, index)
    pair.follow(range(3))
    await pair.equal(0)
    await pair.equal(2)
    assert pair.log(1).log_end_offset == 0
    del pair.leader.errors[pair.topic_id, 1]
    await pair.equal(1)


async def test_log_failure_before_truncation_does_not_stop_other_partitions(pair):
    log = pair.log(0)
    log.append_as_follower(at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=4), 9)
    pair.led[0].append_as_follower(at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=5), 5)

    def disk_fails(_: object, cause: Event) -> None:
        pair.causes.append(cause)
        if cause.kind == "log-truncated":
            log.marks.fail(OSError(errno.EIO, "the disk is gone"))

    pair.fetchers._remember = disk_fails
    pair.put(3, 1)
    pair.follow(range(2))
    await until_true(lambda: log.offline is not None, "off line")
    pair.put(3, 1)
    await pair.equal(1)
    states = {fetcher.index: fetcher.state for fetcher in pair.fetchers}
    assert states == {0: FetchState.FAILED, 1: FetchState.FETCHING}
    assert [cause.kind for cause in pair.causes] == ["log-truncated", "follower-failed"]


async def test_fenced_follower_fetches_again_after_leader_epoch_update(pair):
    pair.led[0].replica.lead(6)
    pair.put(3)
    pair.follow()
    machine = next(iter(pair.fetchers))
    await until_true(lambda: machine.state is FetchState.FAILED, "fenced")
    asked = len(pair.leader.bodies)
    pair.follow(leader_epoch=6, partition_epoch=11)
    await pair.equal()
    assert len(pair.leader.bodies) > asked
    assert [cause.kind for cause in pair.causes] == ["follower-fenced"]


async def test_follower_reconnects_after_leader_closes_the_connection(pair):
    pair.put(3)
    pair.follow()
    await pair.equal()
    for _ in range(3):
        pair.leader.hang_up()
        pair.put(1)
        await pair.equal()
    assert pair.leader.connections >= 2


async def test_follower_is_delayed_until_the_leaders_address_is_known(pair):
    image, pair.image = pair.image, type(pair.image)()
    pair.put(3)
    pair.follow()
    machine = next(iter(pair.fetchers))
    await until_true(lambda: machine.state is FetchState.DELAYED, "nobody is there")
    pair.image = image
    await pair.equal()


async def test_corrupt_fetch_response_is_fetched_again(pair):
    damaged = 0

    def tamper(data: bytes) -> bytes:
        nonlocal damaged
        if not data or damaged == 3:
            return data
        damaged += 1
        return data[:-1] + bytes([data[-1] ^ 1])

    pair.leader.tamper = tamper
    pair.put(3)
    pair.follow()
    await pair.equal()
    assert damaged == 3
    assert read_log(pair.log()) == read_log(pair.led[0])


async def test_batches_of_a_later_leader_epoch_are_not_appended(pair):
    """KAFKA-18723."""
    later = at(0, leader_epoch=6)
    pair.leader.tamper = lambda data: data and later
    pair.put(1)
    pair.follow()
    await until_true(lambda: len(pair.leader.asked_of()) > 2, "asked again")
    assert pair.log().log_end_offset == 0
    pair.leader.tamper = lambda data: data
    await pair.equal()


async def test_fetcher_continues_after_unexpected_exception(pair):
    """The failed round is reported, and the next round fetches all partitions again."""
    image, failures = pair.image, iter([True])

    class Odd:
        configs = image.configs
        brokers = image.brokers
        topic_configs = image.topic_configs

        @property
        def features(self):
            if next(failures, False):
                raise KeyError("odd")
            return image.features

    pair.image = Odd()
    pair.put(3)
    pair.follow()
    await pair.equal()


class FullDisk(OsFileSystem):
    """A disk without free space while ``is_full`` is set."""

    is_full = False

    def write(self, handle, buffers, position):
        if self.is_full and sum(map(len, buffers)) > 100:
            raise OSError(errno.ENOSPC, "no room")
        return super().write(handle, buffers, position)


async def test_follower_is_delayed_while_its_disk_is_full(tmp_path):
    disk = FullDisk()
    brokers = Pair(tmp_path, fs=disk)
    await brokers.start()
    brokers.put(3, size=100)
    brokers.follow()
    await brokers.equal()
    disk.is_full = True
    brokers.put(3, size=100)
    machine = next(iter(brokers.fetchers))
    await until_true(lambda: machine.state is FetchState.DELAYED, "no room")
    assert brokers.log().offline is None
    disk.is_full = False
    await brokers.equal()
    await brokers.stop()


class BrokenDisk(OsFileSystem):
    """A disk that fails for one partition."""

    broken = ""

    def write(self, handle, buffers, position):
        path = Path(f"/proc/self/fd/{handle}").resolve()
        if self.broken and path.parent.name == self.broken:
            raise OSError(errno.EIO, "broken")
        return super().write(handle, buffers, position)


async def test_disk_failure_takes_only_its_own_partition_offline(tmp_path):
    disk = BrokenDisk()
    brokers = Pair(tmp_path, 2, fs=disk)
    await brokers.start()
    brokers.follow(range(2))
    brokers.put(1, 0)
    brokers.put(1, 1)
    await brokers.equal(0)
    await brokers.equal(1)
    disk.broken = f"{TOPIC}-0"
    brokers.put(1, 0)
    brokers.put(1, 1)
    await brokers.equal(1)
    await until_true(lambda: brokers.log(0).offline is not None, "off line")
    states = {machine.index: machine.state for machine in brokers.fetchers}
    assert states == {0: FetchState.FAILED, 1: FetchState.FETCHING}
    await brokers.stop()


# --- begin and end ---


async def test_stopped_partition_is_not_fetched_and_idle_connection_is_closed(pair):
    before = asyncio.all_tasks()
    pair.follow(range(3))
    pair.put(1)
    await pair.equal()
    pair.fetchers.stop([(pair.topic_id, 0), (pair.topic_id, 2)])
    pair.put(1)
    pair.put(1, 1)
    await pair.equal(1)
    assert pair.log().log_end_offset == 1
    assert len(pair.leader.open) == 1
    pair.fetchers.stop([(pair.topic_id, 1), (pair.topic_id, 1)])
    await until_true(lambda: not pair.leader.open, "hung up")
    await until_true(lambda: asyncio.all_tasks() <= before, "no task is left")
    pair.follow()
    await pair.equal()


async def test_fetch_state_survives_partition_epoch_but_not_leader_epoch_change(pair):
    pair.put(2)
    pair.follow()
    await pair.equal()
    first = next(iter(pair.fetchers))
    pair.follow(partition_epoch=11)
    assert next(iter(pair.fetchers)) is first
    pair.led[0].replica.lead(7)
    pair.put(2)
    pair.follow(leader_epoch=7, partition_epoch=12)
    assert next(iter(pair.fetchers)) is not first
    await pair.equal()
    assert pair.log()._epochs.entries == [(5, 0), (7, 2)]


async def test_num_replica_fetchers_sets_number_of_connections_to_a_leader(pair):
    pair.follow(range(3))
    await until_true(lambda: pair.leader.connections == 1, "one connection")
    pair.storage.config.set_dynamic(
        ConfigSource.DYNAMIC_DEFAULT_BROKER, {"num.replica.fetchers": "2"}
    )
    for index in range(3):
        pair.put(2, index)
        await pair.equal(index)
    await until_true(lambda: len(pair.leader.open) == 2, "two connections")
    names = {request.client_id for request in pair.leader.asked}
    assert names == {"broker-2-fetcher-0", "broker-2-fetcher-1"}


async def test_fetch_offset_never_exceeds_flushed_offset_with_flush_per_message(tmp_path):
    brokers = Pair(tmp_path, config={"log.flush.interval.messages": "1"})
    on_disk: list[int] = []
    brokers.leader.on_asked = lambda: on_disk.append(brokers.log().recovery_point)
    await brokers.start()
    brokers.follow()
    for _ in range(5):
        brokers.put(2)
        await brokers.equal()
    await until_true(
        lambda: brokers.leader.asked_of()[-1].fetch_offset == 10, "the leader hears of it"
    )
    asked = [part.fetch_offset for part in brokers.leader.asked_of()]
    assert all(offset <= point for offset, point in zip(asked, on_disk, strict=True))
    await brokers.stop()


# --- throttles ---


async def test_throttled_replica_waits_while_replication_quota_is_exceeded(tmp_path):
    throttled = {"follower.replication.throttled.replicas": f"0:{FOLLOWER},1:9"}
    rate = "follower.replication.throttled.rate"
    brokers = Pair(tmp_path, 2, topic_config=throttled, config={"replica.fetch.max.bytes": "500"})
    brokers.storage.config.set_dynamic(ConfigSource.DYNAMIC_DEFAULT_BROKER, {rate: "1"})
    await brokers.start()
    for index in range(2):
        for _ in range(10):
            brokers.put(3, index, size=100)
    brokers.follow(range(2))
    await brokers.equal(1)
    assert 0 < brokers.log(0).log_end_offset < 30, "one answer, and then it waits"
    assert brokers.fetchers.quota.is_exceeded
    brokers.storage.config.set_dynamic(ConfigSource.DYNAMIC_DEFAULT_BROKER, {rate: str(10**9)})
    await brokers.equal(0)
    await brokers.stop()


def test_throttled_replicas_must_be_partition_broker_pairs_or_wildcard():
    config = BrokerConfig()
    for text in ("*", "0:1", "0:1, 12:3", ""):
        check_topic_configs(config, {"leader.replication.throttled.replicas": text})
    for text in ("0", "0:x", "*,0:1", "1-2:3"):
        with pytest.raises(ConfigError, match="must be the literal"):
            check_topic_configs(config, {"follower.replication.throttled.replicas": text})


# --- speed ---


@pytest.mark.slow
async def test_event_loop_stays_responsive_while_many_small_batches_are_fetched(tmp_path):
    """The follower fetches 60,000 batches: small batches are the most expensive."""
    brokers = Pair(tmp_path, 3)
    await brokers.start()
    for index in range(3):
        for offset in range(0, 20_000, 2_000):
            data = b"".join(at(offset + n, leader_epoch=5) for n in range(2_000))
            brokers.led[index].append_as_follower(data, 5)
        brokers.led[index].marks.move_high_watermark(20_000)
    with watched_loop() as watch:
        brokers.follow(range(3))
        for index in range(3):
            await brokers.equal(index)
    watch.check()
    await brokers.stop()
