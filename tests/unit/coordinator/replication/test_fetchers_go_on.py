"""Failures of a follower's work: after each failure, all partitions are still fetched."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from fencepost.cluster.follower import FetchState
from fencepost.coordinator.config.broker_config import ConfigSource
from fencepost.coordinator.replication import fetchers
from fencepost.logcore.fs import OsFileSystem
from fencepost.protocol.api import ApiKey
from tests.support.waits import until_true
from tests.unit.coordinator.replication.leading import TOPIC, Pair
from tests.unit.logcore.partition_driver import read_log
from tests.unit.logcore.test_replica import at


class OddDisk(OsFileSystem):
    """A disk whose operations fail on request for the files of the first partition."""

    def __init__(self) -> None:
        self.fails: dict[str, Exception] = {}
        """Method → the exception that its next call raises for the first partition."""

    def _fail(self, method: str, handle: int) -> None:
        if f"{TOPIC}-0/" in str(Path(f"/proc/self/fd/{handle}").resolve()):
            error = self.fails.pop(method, None)
            if error is not None:
                raise error

    def truncate(self, handle, size):
        self._fail("truncate", handle)
        super().truncate(handle, size)

    def read(self, handle, position, size):
        self._fail("read", handle)
        return super().read(handle, position, size)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Retry soon after a failure."""
    monkeypatch.setattr(fetchers, "AFTER_FAILURE_MS", 20)


@pytest.fixture
def disk():
    return OddDisk()


@pytest.fixture
async def pair(tmp_path, disk):
    brokers = Pair(tmp_path, 3, fs=disk)
    await brokers.start()
    yield brokers
    await brokers.stop()


def let_part(pair, *indexes):
    """Let the last batches of replicas and leader diverge."""
    for index in indexes:
        own = at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=4)
        pair.log(index).append_as_follower(own, 9)
        pair.led[index].append_as_follower(at(0, 2, leader_epoch=3) + at(2, 2, leader_epoch=5), 5)


async def all_equal(pair, *indexes):
    for index in indexes:
        log, led = pair.log(index), pair.led[index]
        await until_true(lambda a=log, b=led: read_log(a) == read_log(b), f"{index} is equal")


class Odd:
    """An image whose ``features`` raise an exception on request."""

    def __init__(self, image):
        self._image = image
        self.fails: Exception | asyncio.CancelledError | None = None
        self.when = lambda: True

    @property
    def features(self):
        if self.fails is not None and self.when():
            error, self.fails = self.fails, None
            raise error
        return self._image.features

    def __getattr__(self, name):
        return getattr(self._image, name)


async def test_fetcher_survives_cancellation_of_a_call_it_awaits(pair):
    pair.image = odd = Odd(pair.image)
    odd.fails = asyncio.CancelledError()
    pair.put(3)
    pair.follow()
    await pair.equal()
    assert odd.fails is None


async def test_ended_fetcher_is_replaced(pair):
    pair.put(3)
    pair.follow(range(2))
    await pair.equal()
    (fetcher,) = pair.fetchers._fetchers.values()
    fetcher.task.cancel()
    await until_true(fetcher.task.done, "it has ended")
    for index in range(2):
        pair.put(3, index)
        await pair.equal(index)


async def test_partition_whose_log_cannot_be_opened_is_retried(pair):
    log_of, failures = pair.fetchers._log_of, [ValueError("odd"), ValueError("odd again")]

    def open_log(local):
        if failures:
            raise failures.pop()
        return log_of(local)

    pair.fetchers._log_of = open_log
    pair.put(3)
    pair.follow()
    await pair.equal()
    assert not failures


async def test_failed_partition_is_not_retried_after_it_is_stopped(pair):
    asked = []

    def open_log(local):
        asked.append(local)
        raise ValueError("odd")

    pair.fetchers._log_of = open_log
    pair.follow()
    pair.fetchers.stop([(pair.topic_id, 0)])
    pair.follow([1])
    await until_true(lambda: len(asked) > 3, "tried again")
    assert [local.index for local in asked].count(0) == 1


async def test_truncation_is_retried_after_unexpected_exception(pair, disk):
    let_part(pair, 0, 1)
    disk.fails["truncate"] = ValueError("odd")
    pair.follow(range(2))
    await all_equal(pair, 0, 1)
    assert not disk.fails


async def test_disk_failure_in_truncation_does_not_stop_other_partitions(pair, disk):
    let_part(pair, 0, 1)

    def disk_fails(_, event):
        if event.kind == "log-truncated" and event.subject == f"{TOPIC}-0":
            disk.fails["read"] = OSError(errno.EIO, "the disk is gone")

    pair.fetchers._remember = disk_fails
    pair.follow(range(2))
    await all_equal(pair, 1)
    states = {fetcher.index: fetcher.state for fetcher in pair.fetchers}
    assert states == {0: FetchState.FAILED, 1: FetchState.FETCHING}
    assert pair.log(0).offline is not None


async def test_exception_for_one_partition_does_not_affect_rest_of_response(pair):
    let_part(pair, 0, 1, 2)
    failures = [ValueError("odd")]

    def remember(_, event):
        if event.subject == f"{TOPIC}-0" and failures:
            raise failures.pop()

    pair.fetchers._remember = remember
    pair.follow(range(3))
    await all_equal(pair, 0, 1, 2)
    assert not failures


def is_resetting(pair):
    return any(fetcher.state is FetchState.RESETTING for fetcher in pair.fetchers)


async def test_list_offsets_request_is_retried_after_unexpected_exception(pair):
    """A follower below the leader's log start offset requests this offset by ListOffsets."""
    pair.image = odd = Odd(pair.image)
    odd.fails, odd.when = ValueError("odd"), lambda: is_resetting(pair)
    pair.led[0].replica.restart_at(500)
    pair.led[0].append_as_follower(at(500, 3, leader_epoch=5), 5)
    pair.log().append_as_follower(at(0, 3, leader_epoch=4), 9)
    pair.follow()
    await pair.equal()
    assert odd.fails is None


async def test_partition_moved_during_list_offsets_request_is_still_replicated(pair):
    """The number of fetchers changes while a ListOffsets request is in flight."""
    pair.led[0].replica.restart_at(500)
    pair.led[0].append_as_follower(at(500, 3, leader_epoch=5), 5)
    pair.log().append_as_follower(at(0, 3, leader_epoch=4), 9)
    counts = [2, 3]

    def on_asked():
        if counts and pair.leader.bodies[-1].__api_key__ == ApiKey.LIST_OFFSETS:
            pair.storage.config.set_dynamic(
                ConfigSource.DYNAMIC_DEFAULT_BROKER, {"num.replica.fetchers": str(counts.pop())}
            )

    pair.leader.on_asked = on_asked
    pair.follow(range(3))
    await pair.equal()
    assert not counts
