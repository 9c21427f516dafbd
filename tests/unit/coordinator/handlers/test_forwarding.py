"""Forwarding to the active controller: the client's frames and the responses pass unchanged.

The controller is another broker, which receives the contents of each Envelope.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from fencepost.client.channel import ConnectionLostError
from fencepost.client.client import AsyncWireClient
from fencepost.client.cluster import error_codes
from fencepost.coordinator.config.listener_config import ListenerConfig
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.handlers import Registry
from fencepost.coordinator.server.server import Server
from fencepost.protocol.api import FORWARDED, KNOWN_APIS, ApiKey
from fencepost.protocol.codec import encode_request
from fencepost.protocol.errors import UnsupportedVersion
from fencepost.protocol.messages import request_factory, response_factory
from fencepost.protocol.schema import Entity
from tests.support.local_controller import LocalControllerChannel
from tests.support.waits import until_true

ANONYMOUS = b"\x00\x00" + b"\x05User" + b"\x0aANONYMOUS" + b"\x00" + b"\x00"


class Setting:
    """A broker that forwards requests, its client, and the controller."""

    def __init__(self, client: AsyncWireClient, broker: Broker, controller: Broker) -> None:
        self.client, self.broker, self.controller = client, broker, controller
        self.envelopes: list[Entity] = []
        self.asked_directly: list[Entity] = []
        self.fails: Callable[[], Entity] | None = None

    async def handle(self, envelope: Entity) -> Entity:
        """Answer a request as the controller."""
        if envelope.__api_key__ == ApiKey.ENVELOPE:
            self.envelopes.append(envelope)
            if self.fails is not None:
                return self.fails()
        if envelope.__api_key__ != ApiKey.ENVELOPE:
            self.asked_directly.append(envelope)
            return response_factory(envelope.__api_key__, envelope.__version__).message(topics=())
        data = await exchanged(self.controller.address, envelope.request_data)
        return response_factory(ApiKey.ENVELOPE, 0).message(error_code=0, response_data=data)

    def refuse(self, code: ErrorCode) -> None:
        """Answer every Envelope with an error."""
        self.fails = lambda: response_factory(ApiKey.ENVELOPE, 0).message(error_code=code)

    def give_up(self) -> None:
        """Let every Envelope time out, as without a controller."""

        def fail() -> Entity:
            raise RequestTimedOutError("no controller has taken the request in time")

        self.fails = fail

    def take_none(self) -> None:
        """Act as a controller of Apache Kafka 3.9 on ZooKeeper, which has no Envelope API."""

        def fail() -> Entity:
            raise UnsupportedVersion(ApiKey.ENVELOPE, 0)

        self.fails = fail


async def exchanged(address: tuple[str, int], frame: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(struct.pack(">i", len(frame)) + frame)
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    answer = await reader.readexactly(size)
    writer.close()
    return answer


@asynccontextmanager
async def forwarding(tmp_path: Any, *unknown: ApiKey) -> AsyncIterator[Setting]:
    versions = dict.fromkeys(FORWARDED - set(unknown), (0, 5))
    async with Broker(tmp_path / "a") as broker, Broker(tmp_path / "b") as controller:
        services = broker.services
        server = Server(
            services, registry=Registry(forwards=lambda: versions), error_code=error_code
        )
        host, port = await server.start(ListenerConfig())
        async with AsyncWireClient(f"{host}:{port}", client_id="me") as client:
            setting = Setting(client, broker, controller)
            services.controller = LocalControllerChannel(setting.handle)
            yield setting
        await server.stop()


def test_forwarded_request_reaches_the_controller_byte_for_byte(tmp_path) -> None:
    async def run() -> None:
        async with forwarding(tmp_path) as setting:
            topic = {"name": "t", "num_partitions": 3, "replication_factor": -1}
            answer = await setting.client.call(
                "CreateTopics",
                5,
                entity=lambda make: make.message(
                    topics=[make.CreatableTopic(**topic)], timeout_ms=1000
                ),
            )
            assert [(row.name, row.error_code) for row in answer.topics] == [("t", 0)]
            assert "t" in setting.controller.services.metadata.topics
            assert "t" not in setting.broker.services.metadata.topics
            (envelope,) = setting.envelopes
            make = request_factory(ApiKey.CREATE_TOPICS, 5)
            body = make.message(topics=[make.CreatableTopic(**topic)], timeout_ms=1000)
            correlation_id = struct.unpack_from(">hhi", envelope.request_data)[2]
            sent = encode_request(ApiKey.CREATE_TOPICS, 5, correlation_id, "me", body)
            assert envelope.request_data == b"".join(sent)[4:]
            assert envelope.request_principal == ANONYMOUS
            assert envelope.client_host_address == b"\x7f\x00\x00\x01"

    asyncio.run(run())


def test_api_versions_of_forwarded_apis_are_limited_to_those_of_the_controller(tmp_path) -> None:
    async def run() -> None:
        async with forwarding(tmp_path, ApiKey.UPDATE_FEATURES) as setting:
            versions = await setting.client.versions()
            assert versions[ApiKey.CREATE_TOPICS] == (2, 5)
            assert ApiKey.UPDATE_FEATURES not in versions
            assert versions[ApiKey.METADATA] == (0, 13)

    asyncio.run(run())


def test_incremental_alter_configs_is_validated_locally_before_forwarding(tmp_path) -> None:
    """The broker changes its own loggers, refuses invalid settings and forwards other changes."""

    async def run() -> None:
        async with forwarding(tmp_path) as setting:
            await setting.client.call(
                "CreateTopics",
                5,
                entity=lambda make: make.message(
                    topics=[make.CreatableTopic(name="t", num_partitions=1, replication_factor=1)]
                ),
            )
            setting.envelopes.clear()
            rows = [
                (8, "1", "root", "INFO"),
                (4, "1", "log.segment.bytes", "1"),
                (4, "1", "log.retention.ms", "77"),
                (2, "t", "retention.ms", "99"),
                (4, "", "message.max.bytes", "-5"),
                (4, "", "log.retention.ms", "55"),
                (4, "", "node.id", "7"),
                (4, "", "no.such.key", "7"),
            ]

            def body(make: Any, *which: int) -> Entity:
                return make.message(
                    resources=[
                        make.AlterConfigsResource(
                            resource_type=rows[i][0],
                            resource_name=rows[i][1],
                            configs=[make.AlterableConfig(name=rows[i][2], value=rows[i][3])],
                        )
                        for i in which
                    ]
                )

            async def alter(*which: int) -> dict[tuple[int, str], int]:
                answer = await setting.client.call(
                    "IncrementalAlterConfigs", 1, entity=lambda make: body(make, *which)
                )
                return {(r.resource_type, r.resource_name): r.error_code for r in answer.responses}

            assert await alter(0, 1) == {(8, "1"): 0, (4, "1"): ErrorCode.invalid_request}
            assert setting.envelopes == []
            assert await alter(0, 2, 3) == {(8, "1"): 0, (4, "1"): 0, (2, "t"): 0}
            assert len(setting.envelopes) == 1
            metadata = setting.controller.services.metadata
            assert metadata.settings("1") == {"log.retention.ms": "77"}
            # Only the broker checks the cluster-wide defaults; Apache Kafka's controllers do not.
            assert await alter(4) == {(4, ""): ErrorCode.invalid_request}
            assert await alter(6) == {(4, ""): ErrorCode.invalid_request}
            assert await alter(7) == {(4, ""): ErrorCode.invalid_config}
            assert len(setting.envelopes) == 1
            assert await alter(5) == {(4, ""): 0}
            assert metadata.settings("") == {"log.retention.ms": "55"}
            assert setting.broker.services.metadata.settings("1") == {}

    asyncio.run(run())


def test_connection_closes_if_the_controller_does_not_support_the_version(tmp_path) -> None:
    async def run() -> None:
        async with forwarding(tmp_path) as setting:
            setting.refuse(ErrorCode.unsupported_version)
            body = request_factory(ApiKey.UNREGISTER_BROKER, 0).message(broker_id=5)
            with pytest.raises(ConnectionLostError):
                await setting.client.request(ApiKey.UNREGISTER_BROKER, 0, body)

    asyncio.run(run())


def test_auto_topic_creation_is_sent_directly_if_envelope_is_unsupported(
    tmp_path,
) -> None:
    async def run() -> None:
        async with forwarding(tmp_path) as setting:
            setting.take_none()
            asked = request_factory(ApiKey.METADATA, 9)
            body = asked.message(topics=[asked.MetadataRequestTopic(name="t")])
            await setting.client.request(ApiKey.METADATA, 9, body)
            await until_true(lambda: setting.asked_directly, "the broker has asked by itself")
            assert [topic.name for topic in setting.asked_directly[0].topics] == ["t"]

    asyncio.run(run())


@pytest.mark.parametrize("api", sorted(FORWARDED), ids=lambda api: ApiKey(api).name.lower())
def test_forwarded_request_without_a_controller_response_fails_for_all_items(
    api: int, tmp_path
) -> None:
    """Every version has the error at the top level, if it has this field, and for each item."""
    low, high = KNOWN_APIS[api].min_version, KNOWN_APIS[api].max_version

    async def run() -> None:
        async with forwarding(tmp_path) as setting:

            async def check(version: int, expected: ErrorCode) -> None:
                answer = await setting.client.call(
                    api, version, entity=ASKED[api], check=False, timeout_ms=5_000
                )
                expected_rows = ROWS[api]
                if api == ApiKey.DELETE_TOPICS and version >= 6:
                    expected_rows = [["t", CODE], [TOPIC_ID, CODE]]
                assert REFUSED[api](answer) == _with_code(expected_rows, int(expected)), version
                if hasattr(answer, "error_code"):
                    assert answer.error_code == expected
                assert set(error_codes(answer)) == {expected}, "no row has another error"

            for version in range(low, high + 1):
                setting.give_up()
                await check(version, ErrorCode.request_timed_out)
                setting.take_none()
                await check(version, ErrorCode.not_controller)
                setting.refuse(ErrorCode.principal_deserialization_failure)
                await check(version, ErrorCode.unknown_server_error)

    asyncio.run(run())


CODE = object()
"""Stands for the error code in an expected row."""


def _with_code(rows: Any, code: int) -> Any:
    if rows is CODE:
        return code
    return [_with_code(row, code) for row in rows] if isinstance(rows, list) else rows


def _creation(make: Any, name: str) -> Entity:
    fields = {"resource_type": 2, "resource_name": name, "principal": "User:a", "host": "*"}
    return make.AclCreation(**fields, operation=3, permission_type=3)


def _asked_resources(make: Any) -> Entity:
    asked = ((2, "t"), (32, "g"))
    return make.message(
        resources=[
            make.AlterConfigsResource(resource_type=kind, resource_name=name)
            for kind, name in asked
        ]
    )


def _quota_entry(make: Any, *named: tuple[str, str | None]) -> Entity:
    entity = [make.EntityData(entity_type=kind, entity_name=name) for kind, name in named]
    return make.EntryData(entity=entity, ops=[])


TOPIC_ID = uuid.UUID(int=7)

ASKED: dict[int, Callable[[Any], Entity]] = {
    ApiKey.CREATE_TOPICS: lambda make: make.message(
        topics=[
            make.CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            for name in ("t", "u")
        ]
    ),
    ApiKey.DELETE_TOPICS: lambda make: make.message(
        topic_names=["t", "u"],
        topics=[
            make.DeleteTopicState(name="t", topic_id=None),
            make.DeleteTopicState(name=None, topic_id=TOPIC_ID),
        ],
    ),
    ApiKey.CREATE_ACLS: lambda make: make.message(
        creations=[_creation(make, "t"), _creation(make, "u")]
    ),
    ApiKey.DELETE_ACLS: lambda make: make.message(
        filters=[make.DeleteAclsFilter(resource_type_filter=1, operation=1, permission_type=1)] * 2
    ),
    ApiKey.ALTER_CONFIGS: _asked_resources,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _asked_resources,
    ApiKey.CREATE_PARTITIONS: lambda make: make.message(
        topics=[make.CreatePartitionsTopic(name=name, count=2) for name in ("t", "u")]
    ),
    ApiKey.ELECT_LEADERS: lambda make: make.message(
        topic_partitions=[
            make.TopicPartitions(topic="t", partitions=[0, 2]),
            make.TopicPartitions(topic="u", partitions=[1]),
        ]
    ),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: lambda make: make.message(
        topics=[
            make.ReassignableTopic(
                name="t",
                partitions=[
                    make.ReassignablePartition(partition_index=index, replicas=[1])
                    for index in (0, 2)
                ],
            )
        ]
    ),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: lambda make: make.message(
        topics=[make.ListPartitionReassignmentsTopics(name="t", partition_indexes=[0, 2])]
    ),
    ApiKey.ALTER_CLIENT_QUOTAS: lambda make: make.message(
        entries=[
            _quota_entry(make, ("user", "a"), ("client-id", "c")),
            _quota_entry(make, ("user", None)),
        ]
    ),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: lambda make: make.message(
        deletions=[make.ScramCredentialDeletion(name=name, mechanism=1) for name in ("a", "b")],
        upsertions=[
            make.ScramCredentialUpsertion(
                name=name, mechanism=1, iterations=4096, salt=b"s", salted_password=b"p"
            )
            for name in ("b", "c")
        ],
    ),
    ApiKey.DESCRIBE_QUORUM: lambda make: make.message(),
    ApiKey.UPDATE_FEATURES: lambda make: make.message(
        feature_updates=[make.FeatureUpdateKey(feature="f", max_version_level=1)]
    ),
    ApiKey.UNREGISTER_BROKER: lambda make: make.message(broker_id=1),
    ApiKey.UNREGISTER_CONTROLLER: lambda make: make.message(controller_id=1),
}
"""API → request, with several items if the API has items."""


def _resource_rows(answer: Any) -> list[Any]:
    return [
        [response.resource_type, response.resource_name, response.error_code]
        for response in answer.responses
    ]


REFUSED: dict[int, Callable[[Any], list[Any]]] = {
    ApiKey.CREATE_TOPICS: lambda answer: [
        [topic.name, topic.error_code] for topic in answer.topics
    ],
    ApiKey.DELETE_TOPICS: lambda answer: [
        [getattr(response, "topic_id", None) or response.name, response.error_code]
        for response in answer.responses
    ],
    ApiKey.CREATE_ACLS: lambda answer: [result.error_code for result in answer.results],
    ApiKey.DELETE_ACLS: lambda answer: [
        filter_result.error_code for filter_result in answer.filter_results
    ],
    ApiKey.ALTER_CONFIGS: _resource_rows,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _resource_rows,
    ApiKey.CREATE_PARTITIONS: lambda answer: [
        [result.name, result.error_code] for result in answer.results
    ],
    ApiKey.ELECT_LEADERS: lambda answer: [
        [
            topic.topic,
            [
                [partition.partition_id, partition.error_code]
                for partition in topic.partition_result
            ],
        ]
        for topic in answer.replica_election_results
    ],
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: lambda answer: [
        [
            topic.name,
            [[partition.partition_index, partition.error_code] for partition in topic.partitions],
        ]
        for topic in answer.responses
    ],
    ApiKey.LIST_PARTITION_REASSIGNMENTS: lambda answer: [
        [
            topic.name,
            [
                [partition.partition_index, len(partition.replicas)]
                for partition in topic.partitions
            ],
        ]
        for topic in answer.topics
    ],
    ApiKey.ALTER_CLIENT_QUOTAS: lambda answer: [
        [[[part.entity_type, part.entity_name] for part in entry.entity], entry.error_code]
        for entry in answer.entries
    ],
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: lambda answer: [
        [result.user, result.error_code] for result in answer.results
    ],
    ApiKey.DESCRIBE_QUORUM: lambda answer: list(answer.topics),
    ApiKey.UPDATE_FEATURES: lambda answer: list(getattr(answer, "results", ())),
    ApiKey.UNREGISTER_BROKER: lambda _answer: [],
    ApiKey.UNREGISTER_CONTROLLER: lambda _answer: [],
}
"""API → function that returns the rows of a response."""

_RESOURCES = [[2, "t", CODE], [32, "g", CODE]]

ROWS: dict[int, list[Any]] = {
    ApiKey.CREATE_TOPICS: [["t", CODE], ["u", CODE]],
    ApiKey.DELETE_TOPICS: [["t", CODE], ["u", CODE]],
    ApiKey.CREATE_ACLS: [CODE, CODE],
    ApiKey.DELETE_ACLS: [CODE, CODE],
    ApiKey.ALTER_CONFIGS: _RESOURCES,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _RESOURCES,
    ApiKey.CREATE_PARTITIONS: [["t", CODE], ["u", CODE]],
    ApiKey.ELECT_LEADERS: [["t", [[0, CODE], [2, CODE]]], ["u", [[1, CODE]]]],
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: [["t", [[0, CODE], [2, CODE]]]],
    ApiKey.LIST_PARTITION_REASSIGNMENTS: [["t", [[0, 0], [2, 0]]]],
    ApiKey.ALTER_CLIENT_QUOTAS: [
        [[["user", "a"], ["client-id", "c"]], CODE],
        [[["user", None]], CODE],
    ],
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: [["a", CODE], ["b", CODE], ["c", CODE]],
    ApiKey.DESCRIBE_QUORUM: [],
    ApiKey.UPDATE_FEATURES: [],
    ApiKey.UNREGISTER_BROKER: [],
    ApiKey.UNREGISTER_CONTROLLER: [],
}
"""API → expected rows, one for each item; ``CODE`` stands for the error code."""
