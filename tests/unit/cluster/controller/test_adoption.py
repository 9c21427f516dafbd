"""Creation of topics whose partition directories already exist on this node's broker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from fencepost.cluster.controller.adoption import AdoptedTopic, local_partition
from fencepost.cluster.controller.errors import PolicyViolationError
from fencepost.cluster.image import TOPIC_RESOURCE, UNASSIGNED
from fencepost.cluster.records import ConfigRecord, PartitionRecord, TopicRecord
from tests.unit.cluster.controller.cluster_driver import SETTINGS, Cluster, directory

ADOPTED = AdoptedTopic("a.b", UUID(int=7), 2, {"retention.ms": "5"}, 12)


def test_adopted_topic_has_local_leader_in_the_requested_leader_epoch() -> None:
    cluster = Cluster([1], settings=replace(SETTINGS, node_id=1))
    cluster.do(cluster.controller.adopt_topic(ADOPTED))
    topic = cluster.image.topics["a.b"]
    assert topic.topic_id == UUID(int=7)
    assert topic.partitions == (local_partition(1, directory(1), 12),) * 2
    assert cluster.image.topic_configs("a.b") == {"retention.ms": "5"}


def test_adopted_topic_writes_topic_config_and_partition_records() -> None:
    records = Cluster([1]).controller.adopt_topic(ADOPTED).records
    node_id = SETTINGS.node_id
    assert tuple(records) == (
        TopicRecord("a.b", UUID(int=7)),
        ConfigRecord(TOPIC_RESOURCE, "a.b", "retention.ms", "5"),
        *(
            PartitionRecord(
                UUID(int=7),
                replicas=(node_id,),
                isr=(node_id,),
                removing_replicas=(),
                adding_replicas=(),
                partition_id=at,
                leader=node_id,
                leader_epoch=12,
                partition_epoch=12,
                directories=(UNASSIGNED,),
            )
            for at in range(2)
        ),
    )


@pytest.mark.parametrize("limit", ["max_topics", "max_partitions"])
def test_adopted_topic_above_topic_or_partition_limit_is_refused(limit: str) -> None:
    most = {"max_topics": 0, "max_partitions": 1}[limit]
    bound: dict[str, Any] = {limit: most}
    cluster = Cluster([1], settings=replace(SETTINGS, **bound))
    with pytest.raises(PolicyViolationError, match=f"{limit.replace('_', '.')}={most}"):
        cluster.controller.adopt_topic(ADOPTED)
