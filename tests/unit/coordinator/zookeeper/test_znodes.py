"""Znode contents, byte by byte, as Apache Kafka 3.9 writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.image import BROKER_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.records import BrokerEndpoint
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotOurFormatError
from fencepost.coordinator.zookeeper.znodes import BrokerZnode, PartitionStateZnode, TopicZnode

TOPIC_ID = UUID(bytes=bytes(range(16)))
BROKER = BrokerZnode(
    1005, (BrokerEndpoint("IN", "::1", 9092, 0), BrokerEndpoint("OUT", "example", 9093, 3)), "a"
)
TOPIC = TopicZnode(TOPIC_ID, {0: (1, 2, 3), 1: (2, 3)}, {0: (3,)}, {0: (1,)})
STATE = PartitionStateZnode(
    leader=-1, isr=(2,), leader_epoch=7, controller_epoch=3, leader_recovery_state=1
)

WRITTEN = [
    (znodes.cluster_id_data("abc"), '{"version":"1","id":"abc"}'),
    (
        znodes.controller_data(1, 17),
        '{"version":2,"brokerid":1,"timestamp":"17","kraftControllerEpoch":-1}',
    ),
    (
        znodes.broker_data(BROKER, 17),
        (
            '{"version":5,"host":"::1","port":9092,"jmx_port":-1,"timestamp":"17",'
            '"endpoints":["IN://[::1]:9092","OUT://example:9093"],"rack":"a",'
            '"listener_security_protocol_map":{"IN":"PLAINTEXT","OUT":"SASL_SSL"},"features":{}}'
        ),
    ),
    (
        znodes.topic_data(TOPIC),
        (
            '{"removing_replicas":{"0":[1]},"partitions":{"0":[1,2,3],"1":[2,3]},'
            '"topic_id":"AAECAwQFBgcICQoLDA0ODw","adding_replicas":{"0":[3]},"version":3}'
        ),
    ),
    (
        znodes.state_data(STATE),
        (
            '{"controller_epoch":3,"leader":-1,"version":1,"leader_epoch":7,"isr":[2],'
            '"leader_recovery_state":1}'
        ),
    ),
    (
        znodes.config_data({"retention.ms": "1", "cleanup.policy": "compact"}),
        '{"version":1,"config":{"cleanup.policy":"compact","retention.ms":"1"}}',
    ),
    (
        znodes.config_change_data(BROKER_RESOURCE, ""),
        '{"version":2,"entity_path":"brokers/<default>"}',
    ),
    (
        znodes.producer_ids_data(1, 1000, 1000),
        '{"version":1,"broker":1,"block_start":"1000","block_end":"1999"}',
    ),
]


@pytest.mark.parametrize(("data", "text"), WRITTEN)
def test_znode_content_equals_that_of_kafka(data: bytes, text: str):
    assert data.decode() == text


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (znodes.cluster_id_of(WRITTEN[0][0]), "abc"),
        (znodes.controller_of(WRITTEN[1][0]), 1),
        (znodes.broker_of(1005, WRITTEN[2][0]), BROKER),
        (znodes.topic_of("t", WRITTEN[3][0]), TOPIC),
        (znodes.state_of("/s", WRITTEN[4][0]), STATE),
        (
            znodes.config_of("/c", WRITTEN[5][0]),
            {"retention.ms": "1", "cleanup.policy": "compact"},
        ),
        (znodes.config_change_of("/c", WRITTEN[6][0]), "brokers/<default>"),
        (znodes.resource_of("brokers/<default>"), (BROKER_RESOURCE, "")),
        (znodes.next_producer_id_of(WRITTEN[7][0]), 2000),
        # Formats of older Kafka releases and of other software.
        (znodes.controller_of(b'{"version":1,"brokerid":4,"timestamp":"1"}'), 4),
        (
            znodes.broker_of(1, b'{"version":2,"endpoints":["PLAINTEXT://h:9092"]}'),
            BrokerZnode(1, (BrokerEndpoint("PLAINTEXT", "h", 9092, 0),), None),
        ),
        (
            znodes.broker_of(1, znodes.broker_data(replace(BROKER, takes_envelopes=True), 1)),
            replace(BROKER, broker_id=1, takes_envelopes=True),
        ),
        (
            znodes.topic_of("t", b'{"version":1,"partitions":{"0":[1]}}'),
            TopicZnode(None, {0: (1,)}, {}, {}),
        ),
        (
            znodes.state_of(
                "/s", b'{"leader":1,"isr":[1],"leader_epoch":0,"controller_epoch":1,"version":1}'
            ),
            PartitionStateZnode(1, (1,), 0, 1),
        ),
        (znodes.config_of("/c", b""), {}),
        (znodes.resource_of("users/x"), None),
        (znodes.resource_of("topics/t"), (TOPIC_RESOURCE, "t")),
        (
            znodes.config_change_of(
                "/c", b'{"version":1,"entity_type":"clients","entity_name":"c"}'
            ),
            "clients/c",
        ),
        (znodes.next_producer_id_of(b""), 0),
        (
            znodes.partitions_of("/i", b'{"version":1,"partitions":[{"topic":"t","partition":3}]}'),
            [("t", 3)],
        ),
        (
            znodes.reassignments_of(znodes.reassignments_data({("t", 3): (2, 1), ("u", 0): (1,)})),
            {("t", 3): (2, 1), ("u", 0): (1,)},
        ),
        (znodes.log_dir_event_of("/l", b'{"version":1,"broker":5,"event":1}'), 5),
    ],
)
def test_znode_of_any_release_is_read(found: object, value: object):
    assert found == value


def _reads(read: Callable[..., Any], *before: Any) -> Callable[[bytes], Any]:
    return lambda data: read(*before, data)


READERS = [
    znodes.cluster_id_of,
    znodes.controller_of,
    _reads(znodes.broker_of, 1),
    _reads(znodes.topic_of, "t"),
    _reads(znodes.state_of, "/s"),
    _reads(znodes.config_change_of, "/c"),
    znodes.next_producer_id_of,
    _reads(znodes.partitions_of, "/i"),
    znodes.reassignments_of,
    _reads(znodes.log_dir_event_of, "/l"),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "data",
    [b"no JSON", b"[]", b"{}", b'{"partitions":3,"endpoints":3}', b"[" * 100_000],
    ids=["text", "list", "empty", "numbers", "deep"],
)
def test_malformed_znode_is_refused(read: Callable[[bytes], Any], data: bytes):
    with pytest.raises(NotOurFormatError):
        read(data)


@pytest.mark.parametrize("number", ["1e999", "2147483648", "1.5", '"x"', "null"])
def test_znode_number_outside_int32_is_refused(number: str):
    with pytest.raises(NotOurFormatError):
        znodes.topic_of("t", b'{"version":1,"partitions":{"0":[%s]}}' % number.encode())
    state = b'{"leader":%s,"isr":[1],"leader_epoch":0,"controller_epoch":1}' % number.encode()
    with pytest.raises(NotOurFormatError):
        znodes.state_of("/s", state)


def test_topic_znode_with_partition_gaps_is_refused():
    with pytest.raises(NotOurFormatError, match="gaps"):
        znodes.topic_of("t", b'{"version":1,"partitions":{"0":[1],"2":[1]}}')


def test_topic_id_is_encoded_as_in_kafka():
    assert znodes.id_from_text(znodes.id_to_text(TOPIC_ID)) == TOPIC_ID
    assert json.loads(znodes.topic_data(TopicZnode(None, {0: (1,)}, {}, {})))["topic_id"] == ""
