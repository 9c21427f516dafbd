"""No request within the limits blocks the event loop, not even the largest one of each API.

The broker runs in a thread of this process, where its loop is watched. The client takes hardly any
processor time: it encodes requests in advance, and only counts the bytes of responses.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fencepost import Broker
from fencepost.coordinator.daemon.collector import Collector
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.daemon.warm_up import warm_up
from fencepost.coordinator.handlers import Registry
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import encode_request
from fencepost.protocol.limits import MAX_REQUEST_OBJECTS
from fencepost.protocol.messages import RequestFactory, request_factory
from tests.support.stalls import LoopWatch, watched_loop

TOPICS = 3_900
WIDE = 2_000
"""Number of partitions of one topic."""
FEW = 2_000
"""How many entries a request has; the response must take many turns of the event loop."""
MOST = MAX_REQUEST_OBJECTS - 10
HALF = MOST // 2
MOST_ASKED = 3
"""The maximum number of attempts for a request if one turn of the loop seems too long."""

Make = RequestFactory


class LikeTheDaemon(Broker):
    """A broker that collects garbage as the daemon does; the collection also blocks the loop."""

    async def start(self) -> None:
        await super().start()
        self._collector = Collector(asyncio.get_running_loop())
        self._collector.start()

    async def stop(self) -> None:
        self._collector.stop()
        await super().stop()


class Client:
    """Sends encoded frames, and reads responses without decoding them."""

    def __init__(self, broker: BrokerThread) -> None:
        self._socket = socket.create_connection(broker.address, timeout=300)

    def ask(self, frame: bytes) -> int:
        """Send a request; return the size of its response in bytes."""
        self._socket.sendall(frame)
        size = int.from_bytes(self._take(4), "big")
        self._take(size)
        return size

    def _take(self, size: int) -> bytes:
        taken = bytearray(size)
        view = memoryview(taken)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionError("the broker has closed the connection")
            view = view[count:]
        return bytes(taken[:4])


def framed(api: ApiKey, version: int, **fields: Any) -> bytes:
    body = request_factory(api, version).message(**fields)
    return b"".join(encode_request(api, version, 1, "test", body))


@dataclass
class Case:
    api: ApiKey
    version: int
    fields: Callable[[Make], dict[str, Any]]

    def frame(self) -> bytes:
        return framed(
            self.api, self.version, **self.fields(request_factory(self.api, self.version))
        )


def name(index: int) -> str:
    return f"topic-{index}"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    """Yield a broker with thousands of unused topics and partitions."""
    with Broker.in_thread(tmp_path_factory.mktemp("crowded")) as broker:
        client = Client(broker)
        assert client.ask(create([(name(index), 1) for index in range(TOPICS)])) > TOPICS
        client.ask(create([("wide", WIDE)]))
        for kind in (0, 1):
            client.ask(coordinator(kind))
        yield broker


def create(topics: list[tuple[str, int]], **fields: Any) -> bytes:
    make = request_factory(ApiKey.CREATE_TOPICS, 4)
    return framed(
        ApiKey.CREATE_TOPICS,
        4,
        topics=[
            make.CreatableTopic(name=topic, num_partitions=count, replication_factor=1)
            for topic, count in topics
        ],
        timeout_ms=60_000,
        **fields,
    )


def coordinator(kind: int) -> bytes:
    return framed(ApiKey.FIND_COORDINATOR, 6, key_type=kind, coordinator_keys=["g"])


def fetch(make: Make, topics: list[tuple[str, range]], **fields: Any) -> dict[str, Any]:
    def partition(index: int) -> Any:
        return make.FetchPartition(
            partition=index,
            current_leader_epoch=-1,
            fetch_offset=0,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=1 << 20,
        )

    return {
        "replica_id": -1,
        "max_wait_ms": 0,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "session_epoch": -1,
        "rack_id": "",
        "topics": [
            make.FetchTopic(topic=topic, partitions=[partition(index) for index in indexes])
            for topic, indexes in topics
        ],
        **fields,
    }


def list_offsets(make: Make, topics: list[tuple[str, range]], timestamp: int) -> dict[str, Any]:
    return {
        "replica_id": -1,
        "topics": [
            make.ListOffsetsTopic(
                name=topic,
                partitions=[
                    make.ListOffsetsPartition(
                        partition_index=index, current_leader_epoch=-1, timestamp=timestamp
                    )
                    for index in indexes
                ],
            )
            for topic, indexes in topics
        ],
    }


def leader_epochs(make: Make, topics: list[tuple[str, range]]) -> dict[str, Any]:
    return {
        "replica_id": -1,
        "topics": [
            make.OffsetForLeaderTopic(
                topic=topic,
                partitions=[
                    make.OffsetForLeaderPartition(
                        partition=index, current_leader_epoch=-1, leader_epoch=0
                    )
                    for index in indexes
                ],
            )
            for topic, indexes in topics
        ],
    }


def delete_records(make: Make, topics: list[tuple[str, range]]) -> dict[str, Any]:
    return {
        "timeout_ms": 60_000,
        "topics": [
            make.DeleteRecordsTopic(
                name=topic,
                partitions=[
                    make.DeleteRecordsPartition(partition_index=index, offset=-1)
                    for index in indexes
                ],
            )
            for topic, indexes in topics
        ],
    }


def settings(make: Make, names: list[str], **operation: int) -> dict[str, Any]:
    resource, entry = make.AlterConfigsResource, make.AlterableConfig
    return {
        "validate_only": False,
        "resources": [
            resource(
                resource_type=TOPIC,
                resource_name=topic,
                configs=[entry(name="retention.ms", value="7200000", **operation)],
            )
            for topic in names
        ],
    }


def creation(make: Make, names: list[str], *, assignments: int = 0) -> dict[str, Any]:
    return {
        "timeout_ms": 60_000,
        "topics": [
            make.CreatableTopic(
                name=topic,
                num_partitions=-1 if assignments else 1,
                replication_factor=-1 if assignments else 1,
                assignments=[
                    make.CreatableReplicaAssignment(partition_index=index, broker_ids=[1])
                    for index in range(assignments)
                ],
            )
            for topic in names
        ],
    }


def growth(make: Make, names: list[str], count: int, assignments: int | None) -> dict[str, Any]:
    return {
        "timeout_ms": 60_000,
        "topics": [
            make.CreatePartitionsTopic(
                name=topic,
                count=count,
                assignments=None
                if assignments is None
                else [make.CreatePartitionsAssignment(broker_ids=[1])] * assignments,
            )
            for topic in names
        ],
    }


KNOWN = [name(index) for index in range(TOPICS)]
ALL = [("wide", range(WIDE)), *((topic, range(1)) for topic in KNOWN)]
UNKNOWN = [f"unknown-{index}" for index in range(MOST)]
NOWHERE = [("nowhere", range(MOST - 1))]
TOPIC, BROKER = 2, 4


def marked(make: Any, topics: Iterable[tuple[str, Iterable[int]]]) -> dict[str, Any]:
    """Return one marker for all partitions of ``topics``."""
    return {
        "markers": [
            make.WritableTxnMarker(
                producer_id=1,
                producer_epoch=0,
                transaction_result=True,
                coordinator_epoch=0,
                topics=[
                    make.WritableTxnMarkerTopic(name=name, partition_indexes=list(indexes))
                    for name, indexes in topics
                ],
            )
        ]
    }


CASES = {
    "fetch of partitions never used": Case(ApiKey.FETCH, 12, lambda make: fetch(make, ALL)),
    "fetch of everything, waiting": Case(
        ApiKey.FETCH, 12, lambda make: fetch(make, ALL, max_wait_ms=10)
    ),
    "fetch of unknown topics": Case(
        ApiKey.FETCH, 12, lambda make: fetch(make, [(topic, range(1)) for topic in UNKNOWN[:HALF]])
    ),
    "fetch session": Case(ApiKey.FETCH, 12, lambda make: fetch(make, NOWHERE, session_epoch=0)),
    "latest offsets": Case(ApiKey.LIST_OFFSETS, 7, lambda make: list_offsets(make, ALL, -1)),
    "earliest offsets": Case(ApiKey.LIST_OFFSETS, 7, lambda make: list_offsets(make, ALL, -2)),
    "offsets by time": Case(ApiKey.LIST_OFFSETS, 7, lambda make: list_offsets(make, ALL, 5)),
    "offsets of unknown partitions": Case(
        ApiKey.LIST_OFFSETS, 7, lambda make: list_offsets(make, NOWHERE, -1)
    ),
    "metadata of everything": Case(ApiKey.METADATA, 12, lambda make: {"topics": None}),
    "metadata by name": Case(
        ApiKey.METADATA,
        12,
        lambda make: {
            "topics": [make.MetadataRequestTopic(name=topic) for topic in UNKNOWN],
            "allow_auto_topic_creation": False,
        },
    ),
    "metadata that creates topics": Case(
        ApiKey.METADATA,
        12,
        lambda make: {
            "topics": [make.MetadataRequestTopic(name=topic) for topic in UNKNOWN[:FEW]],
            "allow_auto_topic_creation": True,
        },
    ),
    "creation of topics": Case(ApiKey.CREATE_TOPICS, 7, lambda make: creation(make, UNKNOWN)),
    "creation by assignment": Case(
        ApiKey.CREATE_TOPICS, 7, lambda make: creation(make, ["one"], assignments=HALF)
    ),
    "growth of unknown topics": Case(
        ApiKey.CREATE_PARTITIONS, 2, lambda make: growth(make, UNKNOWN, 5, None)
    ),
    "growth of all topics": Case(
        ApiKey.CREATE_PARTITIONS, 2, lambda make: growth(make, KNOWN, 2, None)
    ),
    "growth by assignment": Case(
        ApiKey.CREATE_PARTITIONS, 2, lambda make: growth(make, ["wide"], WIDE + HALF, HALF)
    ),
    "deletion of unknown topics": Case(
        ApiKey.DELETE_TOPICS,
        6,
        lambda make: {
            "topics": [make.DeleteTopicState(name=topic) for topic in UNKNOWN],
            "timeout_ms": 60_000,
        },
    ),
    "deletion of records": Case(ApiKey.DELETE_RECORDS, 2, lambda make: delete_records(make, ALL)),
    "deletion of unknown records": Case(
        ApiKey.DELETE_RECORDS, 2, lambda make: delete_records(make, NOWHERE)
    ),
    "ends of epochs": Case(
        ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, lambda make: leader_epochs(make, ALL)
    ),
    "ends of unknown epochs": Case(
        ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, lambda make: leader_epochs(make, NOWHERE)
    ),
    "settings of many topics": Case(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        lambda make: {
            "resources": [
                make.DescribeConfigsResource(
                    resource_type=TOPIC, resource_name=topic, configuration_keys=None
                )
                for topic in KNOWN[:FEW]
            ],
            "include_synonyms": True,
            "include_documentation": True,
        },
    ),
    "settings of one broker again and again": Case(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        lambda make: {
            "resources": [
                make.DescribeConfigsResource(
                    resource_type=BROKER, resource_name="1", configuration_keys=None
                )
            ]
            * MOST,
        },
    ),
    "new settings": Case(ApiKey.ALTER_CONFIGS, 1, lambda make: settings(make, KNOWN)),
    "changed settings": Case(
        ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, lambda make: settings(make, KNOWN, config_operation=0)
    ),
    "producers of unknown partitions": Case(
        ApiKey.DESCRIBE_PRODUCERS,
        0,
        lambda make: {
            "topics": [make.TopicRequest(name="nowhere", partition_indexes=list(range(MOST - 1)))]
        },
    ),
    "producers of all partitions": Case(
        ApiKey.DESCRIBE_PRODUCERS,
        0,
        lambda make: {
            "topics": [
                make.TopicRequest(name=topic, partition_indexes=list(many)) for topic, many in ALL
            ]
        },
    ),
    "topics in pages": Case(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        0,
        lambda make: {
            "topics": [make.TopicRequest(name=topic) for topic in UNKNOWN],
            "response_partition_limit": 2_000,
        },
    ),
    "unknown transactions": Case(
        ApiKey.DESCRIBE_TRANSACTIONS, 0, lambda make: {"transactional_ids": UNKNOWN}
    ),
    "coordinators": Case(
        ApiKey.FIND_COORDINATOR,
        6,
        lambda make: {"key_type": 0, "coordinator_keys": UNKNOWN},
    ),
    "unknown groups": Case(ApiKey.DESCRIBE_GROUPS, 6, lambda make: {"groups": UNKNOWN}),
    "unknown groups of consumers": Case(
        ApiKey.CONSUMER_GROUP_DESCRIBE, 1, lambda make: {"group_ids": UNKNOWN}
    ),
    "deletion of unknown groups": Case(
        ApiKey.DELETE_GROUPS, 2, lambda make: {"groups_names": UNKNOWN}
    ),
    "offsets of unknown groups": Case(
        ApiKey.OFFSET_FETCH,
        9,
        lambda make: {
            "groups": [
                make.OffsetFetchRequestGroup(group_id=group, topics=None) for group in UNKNOWN
            ],
            "require_stable": False,
        },
    ),
    "offsets of all partitions": Case(
        ApiKey.OFFSET_FETCH,
        7,
        lambda make: {
            "group_id": "g",
            "topics": [
                make.OffsetFetchRequestTopic(name=topic, partition_indexes=(0,))
                for topic in UNKNOWN[:HALF]
            ],
            "require_stable": False,
        },
    ),
    "offsets of one topic": Case(
        ApiKey.OFFSET_FETCH,
        7,
        lambda make: {
            "group_id": "g",
            "topics": [
                make.OffsetFetchRequestTopic(name="t", partition_indexes=tuple(range(MOST)))
            ],
            "require_stable": False,
        },
    ),
    "markers of unknown partitions": Case(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        lambda make: marked(make, [("nowhere", range(MOST - 2))]),
    ),
    "markers of all partitions": Case(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        lambda make: marked(make, ALL),
    ),
    "partitions for a transaction": Case(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        lambda make: {
            "v3_and_below_transactional_id": "t",
            "v3_and_below_producer_id": 1,
            "v3_and_below_producer_epoch": 0,
            "v3_and_below_topics": [
                make.AddPartitionsToTxnTopic(name="nowhere", partitions=list(range(MOST - 1)))
            ],
        },
    ),
    "unknown features": Case(
        ApiKey.UPDATE_FEATURES,
        1,
        lambda make: {
            "timeout_ms": 60_000,
            "feature_updates": [
                make.FeatureUpdateKey(feature=feature, max_version_level=1, upgrade_type=1)
                for feature in UNKNOWN[:HALF]
            ],
        },
    ),
    "a feature again and again": Case(
        ApiKey.UPDATE_FEATURES,
        1,
        lambda make: {
            "timeout_ms": 60_000,
            "feature_updates": [
                make.FeatureUpdateKey(feature="group.version", max_version_level=1, upgrade_type=1)
            ]
            * HALF,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_largest_request_does_not_block_the_event_loop(case: Case, crowded: BrokerThread) -> None:
    check_largest(case, crowded)


def check_largest(case: Case, broker: BrokerThread) -> None:
    """Send the request, and check the longest turn of the loop.

    The hypervisor can take the processor away for tens of milliseconds, which count as processor
    time of this process. So a request that seems to take too long is repeated. If the response has
    the same size, the work was the same, and every repetition includes the cost of the request
    itself.
    """
    frame = case.frame()
    client = Client(broker)
    seen: list[tuple[int, LoopWatch]] = []
    while len(seen) < MOST_ASKED and (not seen or not seen[-1][1].is_short):
        with watched_loop() as watch:
            size = client.ask(frame)
            # The response may arrive before the end of the turn that wrote it. The response to the
            # next request cannot.
            client.ask(framed(ApiKey.API_VERSIONS, 0))
        print(f"{len(frame):,} → {size:,} bytes", watch.cpu, watch.wall)
        seen.append((size, watch))
    min(
        (watch for size, watch in seen if size == seen[0][0]),
        key=lambda watch: watch.cpu.judged_ms,
    ).check()


def asked_for(topic: str) -> bytes:
    """Return a Metadata request that creates a coordinators' topic, as when it is first needed."""
    make = request_factory(ApiKey.METADATA, 12)
    topics = (make.MetadataRequestTopic(name=topic),)
    return framed(ApiKey.METADATA, 12, topics=topics, allow_auto_topic_creation=True)


MANY_SHARDS = {
    "offsets.topic.num.partitions": "200",
    "transaction.state.log.num.partitions": "200",
}
FIRST = {
    "group": coordinator(0),
    "transaction": coordinator(1),
    "metadata of groups": asked_for("__consumer_offsets"),
    "metadata of transactions": asked_for("__transaction_state"),
    "offsets of a transaction": framed(
        ApiKey.ADD_OFFSETS_TO_TXN,
        4,
        transactional_id="t",
        producer_id=1,
        producer_epoch=0,
        group_id="g",
    ),
}


@pytest.mark.parametrize("frame", FIRST.values(), ids=FIRST.keys())
def test_first_find_coordinator_does_not_block_the_event_loop(frame: bytes, tmp_path: Path) -> None:
    asyncio.run(warm_up(Registry()))  # as the daemon does before it serves
    with Broker.in_thread(tmp_path, config=MANY_SHARDS) as broker:
        client = Client(broker)
        with watched_loop() as watch:
            client.ask(frame)
            client.ask(framed(ApiKey.API_VERSIONS, 0))
    watch.check()
