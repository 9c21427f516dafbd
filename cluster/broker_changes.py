"""The changes of brokers, features and topics between two images, as events.

A separate controller process has no topic for an event history, and Apache Kafka's controller keeps
no such history, so brokers record the changes that they see in the metadata. Several brokers record
the same event; ``coordinator.history.repeats`` drops the repetitions.
"""

from __future__ import annotations

from collections.abc import Iterator

from fencepost.cluster.image import BrokerRegistration, MetadataImage, changed_topics
from fencepost.logcore.machine import Event


def cluster_changes(old: MetadataImage, new: MetadataImage) -> Iterator[Event]:
    """Yield the changes between two images, with the event names of the controller."""
    if old.brokers is not new.brokers:
        for broker_id in sorted(old.brokers.keys() | new.brokers.keys()):
            before, after = old.brokers.get(broker_id), new.brokers.get(broker_id)
            if before is not after:
                yield from _of_broker(f"broker {broker_id}", before, after)
    if old.features != new.features:
        for name in sorted(old.features.keys() | new.features.keys()):
            levels = old.features.get(name, 0), new.features.get(name, 0)
            if levels[0] != levels[1]:
                yield Event("feature-finalized", name, {"from": levels[0], "to": levels[1]})
    for topic_id in changed_topics(old, new):
        if topic_id in old.topics_by_id and topic_id not in new.topics_by_id:
            name = old.topics_by_id[topic_id].name
            yield Event("topic-deleted", f"topic {name}", {"topic_id": str(topic_id)})


def _of_broker(
    subject: str, before: BrokerRegistration | None, after: BrokerRegistration | None
) -> Iterator[Event]:
    if after is None:
        if before is not None:
            yield Event("broker-unregistered", subject, {"broker_epoch": before.epoch})
        return
    epoch = {"broker_epoch": after.epoch}
    was_fenced, was_leaving = True, False
    if before is not None and before.epoch == after.epoch:
        was_fenced, was_leaving = before.fenced, before.in_controlled_shutdown
    else:
        yield Event(
            "broker-registered", subject, {**epoch, "incarnation_id": str(after.incarnation_id)}
        )
    if after.in_controlled_shutdown and not was_leaving:
        yield Event("broker-in-controlled-shutdown", subject, epoch)
    if after.fenced and not was_fenced:
        leaves = after.in_controlled_shutdown
        cause = "it has shut down" if leaves else "its session with the controller has ended"
        yield Event("broker-fenced", subject, {**epoch, "cause": cause})
    elif was_fenced and not after.fenced:
        yield Event("broker-unfenced", subject, {**epoch, "cause": "it has caught up"})
