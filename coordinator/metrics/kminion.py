"""KMinion's metric names, for Grafana's dashboards 14012 to 14014. Lags are in offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from typing import Final

from fencepost.coordinator.metrics.families import Series, labels, read_families
from fencepost.coordinator.metrics.snapshot import GroupRow
from fencepost.coordinator.metrics.view import MetricsView
from fencepost.logcore.values import dataclass

FAMILIES: Final = read_families("""
kminion_exporter_up gauge version
    Always 1.
kminion_kafka_cluster_info gauge broker_count cluster_id cluster_version controller_id
    Always 1.
kminion_kafka_broker_info gauge address broker_id is_controller port rack_id
    Always 1.
kminion_kafka_broker_log_dir_size_total_bytes gauge address broker_id port rack_id
    Bytes of all logs.
kminion_kafka_topic_log_dir_size_total_bytes gauge topic_name
    Bytes of a topic's logs.
kminion_kafka_topic_info gauge cleanup_policy partition_count replication_factor topic_name
    Always 1.
kminion_kafka_topic_partition_low_water_mark gauge partition_id topic_name
    The first offset that can be read.
kminion_kafka_topic_low_water_mark_sum gauge topic_name
    The sum over the partitions of a topic.
kminion_kafka_topic_partition_high_water_mark gauge partition_id topic_name
    The high watermark.
kminion_kafka_topic_high_water_mark_sum gauge topic_name
    The sum over the partitions of a topic.
kminion_kafka_consumer_group_info gauge coordinator_id group_id protocol protocol_type state
    1 for a stable group, else 0.
kminion_kafka_consumer_group_members gauge group_id
    Members.
kminion_kafka_consumer_group_empty_members gauge group_id
    Members without a partition.
kminion_kafka_consumer_group_topic_members gauge group_id topic_name
    Members with partitions of a topic.
kminion_kafka_consumer_group_topic_assigned_partitions gauge group_id topic_name
    Partitions of a topic that members have.
kminion_kafka_consumer_group_topic_offset_sum gauge group_id topic_name
    Committed offsets, summed over the partitions of a topic.
kminion_kafka_consumer_group_topic_partition_lag gauge group_id partition_id topic_name
    High watermark minus committed offset.
kminion_kafka_consumer_group_topic_lag gauge group_id topic_name
    The sum over the partitions of a topic whose lag is known.
kminion_kafka_consumer_group_offset_commits_total counter group_id
    Commits to a partition by a group.
""")

VERSION: Final = "v4.3"
"""The release of Apache Kafka that this broker behaves like."""


def series(view: MetricsView) -> Iterator[Series]:
    """Yield all families."""
    yield FAMILIES["kminion_exporter_up"], [(labels(version="fencepost"), 1)]
    yield from _of_cluster(view)
    yield from _of_topics(view)
    yield from _of_groups(view)


def _of_cluster(view: MetricsView) -> Iterator[Series]:
    services, node_id = view.services, view.services.node_id
    host, port = services.advertised()
    controller = view.controller
    cluster = labels(
        broker_count=view.brokers[0],
        cluster_id=services.cluster_id,
        cluster_version=VERSION,
        controller_id=-1 if controller is None else controller,
    )
    yield FAMILIES["kminion_kafka_cluster_info"], [(cluster, 1)]
    who = {"address": host, "broker_id": node_id, "port": port, "rack_id": services.rack or ""}
    yield (
        FAMILIES["kminion_kafka_broker_info"],
        [(labels(**who, is_controller=str(controller == node_id).lower()), 1)],
    )
    size = sum(row.size for row in view.snapshot.partitions.values())
    yield FAMILIES["kminion_kafka_broker_log_dir_size_total_bytes"], [(labels(**who), size)]


def _of_topics(view: MetricsView) -> Iterator[Series]:
    snapshot, config = view.snapshot, view.services.config
    configs_of = view.services.metadata.topic_configs
    policy = ",".join(config.items("log.cleanup.policy"))
    names = [(topic, labels(topic_name=topic.topic.name)) for topic in snapshot.topics]
    yield (
        FAMILIES["kminion_kafka_topic_info"],
        (
            (
                labels(
                    cleanup_policy=configs_of(topic.topic.name).get("cleanup.policy", policy),
                    partition_count=len(topic.topic.partitions),
                    replication_factor=_replication(view, topic.topic.name),
                    topic_name=topic.topic.name,
                ),
                1,
            )
            for topic in snapshot.topics
        ),
    )
    yield (
        FAMILIES["kminion_kafka_topic_log_dir_size_total_bytes"],
        ((written, sum(row.size for row in topic.rows)) for topic, written in names),
    )
    for name, value in (("low", "start"), ("high", "high")):
        yield (
            FAMILIES[f"kminion_kafka_topic_partition_{name}_water_mark"],
            (
                (f'partition_id="{row.index}",{written}', getattr(row, value))
                for topic, written in names
                for row in topic.rows
                if row.is_here
            ),
        )
        yield (
            FAMILIES[f"kminion_kafka_topic_{name}_water_mark_sum"],
            (
                (written, sum(getattr(row, value) for row in topic.rows))
                for topic, written in names
                if all(row.is_here for row in topic.rows)
            ),
        )


def _replication(view: MetricsView, topic: str) -> int:
    first = view.services.replicas.registration(topic, 0)
    return 1 if first is None else len(first.replicas)


@dataclass(slots=True)
class _Assigned:
    """Counts for one group: members without partitions; by topic, members and partitions."""

    empty: int = 0
    members: Counter[str] = field(default_factory=Counter)
    partitions: Counter[str] = field(default_factory=Counter)


def _assigned(row: GroupRow) -> _Assigned:
    group = _Assigned()
    for owned in row.assigned:
        counts = Counter(topic for topic, _ in owned)
        group.empty += not counts
        group.members.update(counts.keys())
        group.partitions.update(counts)
    return group


def _of_groups(view: MetricsView) -> Iterator[Series]:
    snapshot, node_id = view.snapshot, view.services.node_id
    groups = snapshot.groups
    names = [labels(group_id=group.group_id) for group in groups]
    yield (
        FAMILIES["kminion_kafka_consumer_group_info"],
        (
            (
                labels(
                    coordinator_id=node_id,
                    group_id=group.group_id,
                    protocol=group.protocol,
                    protocol_type=group.protocol_type,
                    state=group.state,
                ),
                int(group.state == "Stable"),
            )
            for group in groups
        ),
    )
    yield (
        FAMILIES["kminion_kafka_consumer_group_members"],
        ((written, group.members) for group, written in zip(groups, names, strict=True)),
    )
    assigned: dict[str, _Assigned] = {}

    def empty(row: GroupRow) -> int:
        assigned[row.group_id] = group = _assigned(row)
        return group.empty

    yield (
        FAMILIES["kminion_kafka_consumer_group_empty_members"],
        ((written, empty(group)) for group, written in zip(groups, names, strict=True)),
    )
    for name, value in (("members", "members"), ("assigned_partitions", "partitions")):
        yield (
            FAMILIES[f"kminion_kafka_consumer_group_topic_{name}"],
            (
                (f"{written},{labels(topic_name=topic)}", count)
                for group, written in zip(groups, names, strict=True)
                for topic, count in getattr(assigned[group.group_id], value).items()
            ),
        )
    yield (
        FAMILIES["kminion_kafka_consumer_group_topic_partition_lag"],
        (
            (
                labels(group_id=row.group, partition_id=row.at.index, topic_name=row.at.topic),
                row.offsets,
            )
            for row in snapshot.lags()
        ),
    )
    for at, name in enumerate(("offset_sum", "lag")):
        yield (
            FAMILIES[f"kminion_kafka_consumer_group_topic_{name}"],
            (
                (f"{written},{labels(topic_name=topic)}", total)
                for group, written in zip(groups, names, strict=True)
                for topic, sums in group.sums.items()
                if (total := sums[at]) is not None
            ),
        )
    yield (
        FAMILIES["kminion_kafka_consumer_group_offset_commits_total"],
        ((written, group.commits) for group, written in zip(groups, names, strict=True)),
    )
