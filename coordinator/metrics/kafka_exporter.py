"""kafka_exporter's metric names, for Grafana's dashboard 7589. Lags are in offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fencepost.cluster.image import PartitionRegistration
from fencepost.coordinator.metrics.families import Series, label, labels, read_families
from fencepost.coordinator.metrics.view import MetricsView

FAMILIES: Final = read_families("""
kafka_brokers gauge
    Brokers of the cluster.
kafka_broker_info gauge id address
    Always 1.
kafka_topic_partitions gauge topic
    Partitions of a topic.
kafka_topic_partition_current_offset gauge topic partition
    The high watermark.
kafka_topic_partition_oldest_offset gauge topic partition
    The first offset that can be read.
kafka_topic_partition_leader gauge topic partition
    The node that leads.
kafka_topic_partition_replicas gauge topic partition
    Replicas.
kafka_topic_partition_in_sync_replica gauge topic partition
    Replicas in sync.
kafka_topic_partition_leader_is_preferred gauge topic partition
    1 if the preferred replica leads.
kafka_topic_partition_under_replicated_partition gauge topic partition
    1 if replicas are missing.
kafka_consumergroup_current_offset gauge consumergroup topic partition
    The committed offset.
kafka_consumergroup_lag gauge consumergroup topic partition
    High watermark minus committed offset.
kafka_consumergroup_current_offset_sum gauge consumergroup topic
    The sum over the partitions of a topic.
kafka_consumergroup_lag_sum gauge consumergroup topic
    The sum over the partitions of a topic whose lag is known.
kafka_consumergroup_members gauge consumergroup
    Members.
""")


def series(view: MetricsView) -> Iterator[Series]:
    """Yield all families."""
    snapshot, node_id = view.snapshot, view.services.node_id
    host, port = view.services.advertised()
    rows = snapshot.partitions.values()
    yield FAMILIES["kafka_brokers"], [("", view.brokers[0])]
    yield FAMILIES["kafka_broker_info"], [(labels(id=node_id, address=f"{host}:{port}"), 1)]
    yield (
        FAMILIES["kafka_topic_partitions"],
        ((topic.written, len(topic.topic.partitions)) for topic in snapshot.topics),
    )
    for name, value in (("current_offset", "high"), ("oldest_offset", "start")):
        family = FAMILIES[f"kafka_topic_partition_{name}"]
        yield family, ((row.written, getattr(row, value)) for row in snapshot.hosted())
    alone = node_id, 1, 1, 1, 0
    find = view.services.replicas.registration
    values = [(row.written, _of(find(row.topic, row.index), alone)) for row in rows]
    for at, name in enumerate(
        (
            "leader",
            "replicas",
            "in_sync_replica",
            "leader_is_preferred",
            "under_replicated_partition",
        )
    ):
        family = FAMILIES[f"kafka_topic_partition_{name}"]
        yield family, [(written, numbers[at]) for written, numbers in values]
    for at, (name, value, rows_of) in enumerate(
        (("current_offset", "committed", snapshot.offsets), ("lag", "offsets", snapshot.lags))
    ):
        yield (
            FAMILIES[f"kafka_consumergroup_{name}"],
            ((f"consumer{row.written}", getattr(row, value)) for row in rows_of()),
        )
        yield (
            FAMILIES[f"kafka_consumergroup_{name}_sum"],
            (
                (labels(consumergroup=group.group_id, topic=topic), total)
                for group in snapshot.groups
                for topic, sums in group.sums.items()
                if (total := sums[at]) is not None
            ),
        )
    yield (
        FAMILIES["kafka_consumergroup_members"],
        ((f'consumergroup="{label(group.group_id)}"', group.members) for group in snapshot.groups),
    )


def _of(registration: PartitionRegistration | None, alone: tuple[int, ...]) -> tuple[int, ...]:
    """Return leader id, replica count, ISR size, and two flags.

    The flags, 0 or 1, tell whether the preferred replica leads, and whether the ISR lacks replicas.
    """
    if registration is None:
        return alone
    replicas, in_sync = len(registration.replicas), len(registration.isr)
    preferred, missing = registration.leader == registration.replicas[0], in_sync < replicas
    return registration.leader, replicas, in_sync, int(preferred), int(missing)
