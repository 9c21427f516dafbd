"""A leader's requests to the controller: ISR changes, and log directories of replicas."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost.cluster.image import LOST
from fencepost.coordinator.metadata.kraft_metadata_cache import MEMBER_FEATURES
from fencepost.coordinator.replication.broker_registrar import unsupported
from fencepost.coordinator.replication.controller_channel import (
    RemoteControllerChannel,
)
from fencepost.coordinator.replication.controller_connection import NewestVersionRequest
from fencepost.coordinator.replication.directories import Directories
from fencepost.coordinator.replication.isr_changes import IsrChanges
from fencepost.logcore.errors import StorageError
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request
from fencepost.protocol.errors import UnsupportedVersion
from fencepost.protocol.messages import RequestFactory, response_factory
from fencepost.protocol.schema import Entity
from tests.support.local_controller import LocalControllerChannel
from tests.support.waits import until, until_true
from tests.unit.coordinator.replication.other_broker import OtherBroker, versions
from tests.unit.coordinator.storage.led import EPOCHS, Led, cluster_of_one

HERE = uuid.UUID(int=77)


class Controller:
    """A simulated controller that records requests and returns the responses of a test."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusals: list[Any] = []
        """Error codes or exceptions that replace the next responses."""
        self.part_errors: list[ErrorCode] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: Any) -> Any:
        self.asked.append(request)
        await self.may_answer.wait()
        make = response_factory(request.__api_key__, request.__version__)
        if self.refusals:
            refusal = self.refusals.pop(0)
            if isinstance(refusal, Exception):
                raise refusal
            return make.error(refusal)
        if hasattr(request, "directories"):
            return make.message(directories=tuple(self._place(make, request)))
        return make.message(topics=tuple(self._alter(make, request)))

    def _code(self) -> ErrorCode:
        return self.part_errors.pop(0) if self.part_errors else ErrorCode.none

    def _alter(self, make: Any, request: Any) -> Iterator[Any]:
        for topic in request.topics:
            yield make.TopicData(
                topic_id=topic.topic_id,
                partitions=tuple(
                    make.PartitionData(
                        partition_index=partition.partition_index,
                        error_code=self._code(),
                        leader_id=request.broker_id,
                        leader_epoch=partition.leader_epoch,
                        isr=tuple(member.broker_id for member in partition.new_isr_with_epochs),
                        partition_epoch=partition.partition_epoch + 1,
                    )
                    for partition in topic.partitions
                ),
            )

    def _place(self, make: Any, request: Any) -> Iterator[Any]:
        for directory in request.directories:
            topics = tuple(
                make.TopicData(
                    topic_id=topic.topic_id,
                    partitions=tuple(
                        make.PartitionData(
                            partition_index=partition.partition_index, error_code=self._code()
                        )
                        for partition in topic.partitions
                    ),
                )
                for topic in directory.topics
            )
            yield make.DirectoryData(id_=directory.id_, topics=topics)


class Asking:
    """A leader, its senders of ISR changes and directories, and their controller."""

    def __init__(self, led: Led) -> None:
        self.led = led

        def begin() -> None:
            self.controller = Controller()
            channel = LocalControllerChannel(self.controller)
            clock = led.broker.services.clock
            self.changes = IsrChanges(led.replicas, channel, clock)
            self.directories = Directories(led.replicas, channel, directory_id=HERE)

        led.run(begin)

    @property
    def asked(self) -> list[Any]:
        """Return the AlterPartition requests."""
        return [request for request in self.controller.asked if hasattr(request, "topics")]

    @property
    def placed(self) -> list[Any]:
        """Return the AssignReplicasToDirs requests."""
        return [request for request in self.controller.asked if hasattr(request, "directories")]

    def hold(self, *, held: bool) -> None:
        """Let the controller hold its responses back, or send them."""
        event = self.controller.may_answer
        self.led.run(event.clear if held else event.set)


@pytest.fixture
def asking(tmp_path) -> Iterator[Asking]:
    with cluster_of_one(tmp_path) as led:
        yield Asking(led)


def test_isr_change_request_has_broker_epochs_of_the_new_isr(asking):
    led = asking.led
    led.image(leader_epoch=3, partition_epoch=5, isr=(1,), directories=(HERE,))
    led.fetch(2, 0)
    until(lambda: not len(asking.changes), "the answer")
    (request,) = asking.asked
    assert (request.broker_id, request.broker_epoch) == (1, EPOCHS[1])
    (topic,) = request.topics
    (part,) = topic.partitions
    assert (topic.topic_id, part.partition_index) == (led.topic_id, 0)
    assert (part.leader_epoch, part.partition_epoch, part.leader_recovery_state) == (3, 5, 0)
    members = [(replica.broker_id, replica.broker_epoch) for replica in part.new_isr_with_epochs]
    assert members == [(1, EPOCHS[1]), (2, EPOCHS[2])]
    assert led.replicas.led(led.topic, 0).isr == (1, 2)
    led.append(b"a")
    assert led.marks == (0, 1)


def test_partition_has_one_pending_isr_change_at_a_time(asking):
    led = asking.led
    asking.hold(held=True)
    led.image(isr=(1,), directories=(HERE,))
    led.fetch(2, 0)
    until(lambda: len(asking.asked) == 1, "the first request")
    led.fetch(3, 0)  # a partition has one pending change at a time
    assert len(asking.asked) == 1
    asking.hold(held=False)
    until(lambda: not len(asking.changes), "the answer")
    led.fetch(3, 0)
    until(lambda: led.replicas.led(led.topic, 0).isr == (1, 2, 3), "the second change")
    assert len(asking.asked) == 2


@pytest.mark.parametrize(
    "failure",
    [ErrorCode.stale_broker_epoch, ErrorCode.unknown_server_error, ConnectionError("lost")],
)
def test_isr_change_is_sent_again_after_failed_request(asking, failure):
    led = asking.led
    asking.controller.refusals.append(failure)
    led.image(isr=(1,), directories=(HERE,))
    led.fetch(2, 0)
    until(lambda: len(asking.asked) == 1, "the first request")
    until(lambda: led.clock.advance(60) and len(asking.asked) == 2, "the second one")
    until(lambda: led.replicas.led(led.topic, 0).isr == (1, 2), "the answer")
    first, second = [request.topics for request in asking.asked]
    assert first == second


def test_isr_is_unchanged_if_controller_refuses_the_change(asking):
    led = asking.led
    asking.controller.part_errors.append(ErrorCode.ineligible_replica)
    led.image(isr=(1,), directories=(HERE,))
    led.fetch(2, 0)
    until(lambda: led.replicas.failed_isr_updates == 1, "the answer")
    assert led.replicas.led(led.topic, 0).isr == (1,)
    led.fetch(2, 0)
    until(lambda: led.replicas.led(led.topic, 0).isr == (1, 2), "the next try")


def test_replica_on_failed_disk_is_assigned_to_lost_directory(asking):
    led = asking.led
    led.image(directories=(HERE,))
    assert asking.placed == []
    asking.controller.part_errors.append(ErrorCode.not_controller)
    led.run(lambda: led.partition.marks.fail(StorageError("bad disk")))
    until(lambda: led.clock.advance(600) and not len(asking.directories), "the answer")
    assert len(asking.placed) == 2  # sent again after a retriable error
    for request in asking.placed:
        ((directory,),) = (request.directories,)
        assert (request.broker_epoch, directory.id_) == (EPOCHS[1], LOST)
        (topic,) = directory.topics
        assert [partition.partition_index for partition in topic.partitions] == [0]
    # The broker does not report the change back to the controller, which made it.
    led.image(leader=2, leader_epoch=1, partition_epoch=1, isr=(2, 3), directories=(LOST,))
    assert len(asking.placed) == 2
    assert led.following.log[-1] != ("follow", [(led.topic, 2)])


def test_readable_replica_in_lost_directory_is_assigned_to_own_directory(asking):
    led = asking.led
    led.image(leader=2, directories=(LOST,), isr=(2,))
    until(lambda: not len(asking.directories), "the answer")
    (request,) = asking.placed
    assert [directory.id_ for directory in request.directories] == [HERE]


async def controller_that_says(number: int, when: asyncio.Event | None = None) -> OtherBroker:
    """Start a controller that answers DescribeCluster with id ``number``, once ``when`` is set."""

    async def answer(request: Request) -> Entity:
        if request.api_key == ApiKey.API_VERSIONS:
            return versions(request, DESCRIBE_CLUSTER=(0, 0))
        if when is not None:
            await when.wait()
        return response_factory(request.api_key, request.api_version).message(
            cluster_id="c", controller_id=number, brokers=()
        )

    controller = OtherBroker(answer)
    await controller.start()
    return controller


async def test_requests_to_frozen_controller_move_to_the_new_controller() -> None:
    """The frozen controller keeps its connection open, and the request timeout is 30 s."""
    frozen = await controller_that_says(1, asyncio.Event())
    other = await controller_that_says(2)
    known = [("127.0.0.1", frozen.port)]
    channel = RemoteControllerChannel(lambda: known[-1], client_id="c")
    request = NewestVersionRequest(ApiKey.DESCRIBE_CLUSTER, lambda make: make.message())
    answers = [channel.send(request) for _ in range(2)]
    await until_true(lambda: len(frozen.asked) == 2, "the request is under way")
    known.append(("127.0.0.1", other.port))
    async with asyncio.timeout(20):
        assert [(await answer).controller_id for answer in answers] == [2, 2]
    await channel.close()
    await frozen.stop()
    await other.stop()


async def test_request_that_the_controller_does_not_support_is_not_sent() -> None:
    """``takes`` overrides the advertised APIs; the next controller may support the API."""
    controllers = [await controller_that_says(number) for number in (1, 2)]
    known = [controllers[0].port]
    channel = RemoteControllerChannel(
        lambda: ("127.0.0.1", known[-1]),
        client_id="c",
        takes=lambda key: key != ApiKey.DESCRIBE_CLUSTER or len(known) == 2,
    )
    request = NewestVersionRequest(ApiKey.DESCRIBE_CLUSTER, lambda make: make.message())
    with pytest.raises(UnsupportedVersion):
        await channel.send(request)
    assert not controllers[0].asked
    known.append(controllers[1].port)
    assert (await channel.send(request)).controller_id == 2
    await channel.close()
    for controller in controllers:
        await controller.stop()


@pytest.mark.parametrize(
    ("finalized", "problems"),
    [
        ({"metadata.version": 33, "share.version": 2, "of.tomorrow": 0}, []),
        (
            {"metadata.version": 34},
            ["metadata.version is at level 34, and this broker supports 7 to 33"],
        ),
        ({"of.tomorrow": 1}, ["of.tomorrow is at level 1, and this broker supports 0 to 0"]),
    ],
)
def test_unsupported_names_finalized_levels_out_of_the_brokers_range(
    finalized: dict[str, int], problems: list[str]
) -> None:
    assert unsupported(MEMBER_FEATURES, finalized) == problems


async def test_request_that_cannot_be_built_does_not_block_the_next_one() -> None:
    """The previous and the next request get responses."""
    controller = await controller_that_says(7)
    channel = RemoteControllerChannel(lambda: ("127.0.0.1", controller.port), client_id="c")
    failures: list[Exception] = [KeyError("odd")]

    def build(make: RequestFactory) -> Entity:
        if failures:
            raise failures.pop()
        return make.message()

    request = NewestVersionRequest(ApiKey.DESCRIBE_CLUSTER, build)
    odd, next_one = channel.send(request), channel.send(request)
    with pytest.raises(KeyError):
        await odd
    assert (await next_one).controller_id == 7
    await channel.close()
    await controller.stop()
