"""A controller's requests may arrive late, or before the broker has seen its own registration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import MetadataImage
from fencepost.cluster.image_records import partition_record
from fencepost.cluster.records import (
    BrokerEndpoint,
    MetadataRecord,
    PartitionRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.coordinator.zookeeper import requests, znodes
from fencepost.coordinator.zookeeper.loading import broker_record
from fencepost.coordinator.zookeeper.request_batch import ControllerIdentity, requests_after
from fencepost.coordinator.zookeeper.requests import ControllerRequestApplier
from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity
from tests.support.controller_requests import apply_leader_and_isr, apply_update_metadata

TOPIC_ID, EPOCH = UUID(int=7 << 64), 41


def _after(image: MetadataImage, records: Sequence[MetadataRecord]) -> MetadataImage:
    delta = MetadataDelta(image)
    for record in records:
        delta.replay(record)
    return delta.apply(image.offset + 1, 1)


def _requests(before: MetadataImage, after: MetadataImage) -> dict[int, Entity]:
    """Return the requests to broker 1, by API key."""
    controller = ControllerIdentity(1, 1, "PLAINTEXT")
    return {
        request.__api_key__: request
        for broker, request in requests_after(before, after, controller)
        if broker == 1
    }


BROKER = broker_record(
    znodes.BrokerZnode(1, (BrokerEndpoint("PLAINTEXT", "h", 1, 0),), None, takes_envelopes=True),
    EPOCH,
)
BEFORE = _after(
    MetadataImage(),
    [
        BROKER,
        TopicRecord("t", TOPIC_ID),
        PartitionRecord(
            topic_id=TOPIC_ID,
            partition_id=0,
            replicas=(1,),
            isr=(1,),
            removing_replicas=(),
            adding_replicas=(),
            leader=1,
            leader_epoch=0,
            partition_epoch=0,
        ),
    ],
)


def test_late_leader_and_isr_does_not_restore_a_deleted_topic() -> None:
    broker = ControllerRequestApplier(1, lambda: None)
    made = _requests(MetadataImage(), BEFORE)
    gone = _requests(BEFORE, _after(BEFORE, [RemoveTopicRecord(TOPIC_ID)]))
    image = MetadataImage()
    for request in (made[ApiKey.UPDATE_METADATA], gone[ApiKey.UPDATE_METADATA]):
        image = _after(image, apply_update_metadata(broker, image, request, EPOCH))
        assert ("t" in image.topics) == (request is made[ApiKey.UPDATE_METADATA])
    late = made[ApiKey.LEADER_AND_ISR]
    assert apply_leader_and_isr(broker, image, late) == (
        [],
        {TOPIC_ID: {0: requests.UNKNOWN_TOPIC_ID}},
    )
    image = _after(image, apply_update_metadata(broker, image, made[ApiKey.UPDATE_METADATA], EPOCH))
    assert not image.topics


def test_first_request_of_a_later_controller_calls_on_failover() -> None:
    """The former controller may have resigned before it reported a deletion."""
    failovers: list[int] = []
    broker = ControllerRequestApplier(1, lambda: failovers.append(broker.controller_epoch))
    request = _requests(MetadataImage(), BEFORE)[ApiKey.UPDATE_METADATA]
    for epoch in (3, 3, 4, 3, 4, 6):
        broker.refuses(replace(request, controller_epoch=epoch), EPOCH, 0.0)
    assert failovers == [3, 4]


def test_new_topic_has_all_partitions_before_a_request_names_them() -> None:
    """With fewer partitions, a coordinator would look for keys in other partitions."""
    broker = ControllerRequestApplier(1, lambda: None)
    request = _requests(MetadataImage(), BEFORE)[ApiKey.LEADER_AND_ISR]
    topic = request.topic_states[0]
    records, _ = broker.leader_and_isr(MetadataImage(), topic, topic.partition_states, 3)
    partitions = _after(MetadataImage(), records).topics["t"].partitions
    assert [partition.leader for partition in partitions] == [1, -1, -1]


def test_update_metadata_corrects_replicas_of_a_torn_read() -> None:
    """A starting broker may read the replicas before a reassignment ends, and the rest after it."""
    broker = ControllerRequestApplier(2, lambda: None)
    read = BEFORE.topics["t"].partitions[0]
    torn = _after(BEFORE, [partition_record(TOPIC_ID, 0, replace(read, replicas=(1, 3)))])
    request = _requests(MetadataImage(), BEFORE)[ApiKey.UPDATE_METADATA]
    topic = request.topic_states[0]
    records = broker.update_metadata(torn, topic, topic.partition_states)
    assert _after(torn, records).topics["t"].partitions[0].replicas == (1,)
    assert broker.update_metadata(BEFORE, topic, topic.partition_states) == []


def test_update_metadata_sets_own_broker_epoch_before_registration_is_seen() -> None:
    """With broker epoch -1, the controller would refuse the broker's ISR changes."""
    told_early = _requests(MetadataImage(), BEFORE)[ApiKey.UPDATE_METADATA]
    records = apply_update_metadata(
        ControllerRequestApplier(1, lambda: None), MetadataImage(), told_early, -1
    )
    assert _after(MetadataImage(), records).brokers[1].epoch == EPOCH
