"""The first records of a new cluster, and the registration of a standalone broker.

A standalone broker registers itself in its own metadata log. It leads all of its partitions, and
begins a new leader epoch of each partition whenever it starts: a power loss may have cut off
records of the previous epoch, and the new epoch lets consumers detect the loss. Every broker that
starts loads this module, so the module imports none of the controller's other modules.

Source: ``ActivationRecordsGenerator``, ``ClusterControlManager.registerBroker``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final
from uuid import UUID

from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import (
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    MetadataRecord,
    PartitionChangeRecord,
    RegisterBrokerRecord,
)
from fencepost.logcore.values import dataclass

METADATA_VERSION: Final = "metadata.version"
"""The feature for which every cluster has a finalized level."""
ELR_VERSION: Final = "eligible.leader.replicas.version"
MIN_INSYNC_REPLICAS: Final = "min.insync.replicas"
"""The topic setting for the number of in-sync replicas that acks=all requires."""

_ANY_TOPIC: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """The broker of the controller's own node, when it starts."""

    broker_id: int
    incarnation_id: UUID
    end_points: tuple[BrokerEndpoint, ...]
    features: Mapping[str, tuple[int, int]]
    """The lowest and highest supported level of each feature."""
    rack: str | None
    directory_id: UUID


def bootstrap(
    image: MetadataImage, levels: Mapping[str, int], min_insync_replicas: str
) -> Iterator[MetadataRecord]:
    """Yield the first records of a cluster; none if the cluster has a ``metadata.version``.

    If eligible leader replicas are enabled, one record sets ``min.insync.replicas`` for all
    brokers.
    """
    if METADATA_VERSION in image.features:
        return
    for name, level in sorted(levels.items()):
        if level:
            yield FeatureLevelRecord(name, level)
    if levels.get(ELR_VERSION):
        yield ConfigRecord(BROKER_RESOURCE, "", MIN_INSYNC_REPLICAS, min_insync_replicas)


def registration(broker: LocalBroker, offset: int) -> RegisterBrokerRecord:
    """Return the broker's registration for ``offset``; it is not fenced, as the logs are open."""
    return RegisterBrokerRecord(
        broker_id=broker.broker_id,
        incarnation_id=broker.incarnation_id,
        broker_epoch=offset,
        end_points=broker.end_points,
        features=tuple(BrokerFeature(name, *broker.features[name]) for name in broker.features),
        rack=broker.rack,
        fenced=False,
        log_dirs=(broker.directory_id,),
    )


def new_leader_epoch(broker_id: int) -> PartitionChangeRecord:
    """Return a record with which every partition of a standalone broker begins a leader epoch.

    The record's topic id and partition index are placeholders.
    """
    return PartitionChangeRecord(_ANY_TOPIC, 0, leader=broker_id)
