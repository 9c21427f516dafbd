"""``fencepost topics``: list, create, describe, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fencepost.coordinator.cli.output import emit, key_values, shared_options, table_options

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session

CONFIG_SOURCES = {1: "topic", 2: "broker", 3: "cluster", 4: "file", 5: "default", 6: "logger"}


@click.group("topics")
def command() -> None:
    """List, create, describe and delete topics."""


@command.command("list")
@click.option("--internal", is_flag=True, help="Show the coordinators' own topics as well.")
@table_options
def list_topics(session: Session, form: str, *, internal: bool) -> None:
    """List the topics."""
    rows = [
        {
            "topic": topic.name,
            "partitions": len(topic.partitions),
            "replicas": max((len(row.replicas) for row in topic.partitions.values()), default=0),
            "topic_id": topic.topic_id,
            "internal": topic.is_internal,
        }
        for topic in session.topics()
        if internal or not topic.is_internal
    ]
    emit(rows, ["topic", "partitions", "replicas", "topic_id"], form)


@command.command("create")
@click.argument("topic")
@click.option("--partitions", "-p", default=-1, help="How many; the broker's default if not given.")
@click.option("--replication-factor", "-r", default=-1, help="The broker's default if not given.")
@click.option("--config", "pairs", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--validate-only", is_flag=True, help="Only say whether it would work.")
@shared_options
def create(
    session: Session,
    topic: str,
    partitions: int,
    replication_factor: int,
    pairs: tuple[str, ...],
    *,
    validate_only: bool,
) -> None:
    """Create TOPIC."""
    from fencepost.coordinator.cli.queries.session import check

    configs = key_values(pairs, "--config")
    answer = session.client.call(
        "CreateTopics",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            topics=[
                f.CreatableTopic(
                    name=topic,
                    num_partitions=partitions,
                    replication_factor=replication_factor,
                    configs=[f.CreatableTopicConfig(name=k, value=v) for k, v in configs],
                )
            ],
            timeout_ms=session.timeout_ms,
            validate_only=validate_only,
        ),
    )
    result = answer.topics[0]
    check(result.error_code, "CreateTopics", topic, result.error_message)
    count = getattr(result, "num_partitions", partitions)
    click.echo(f"{'would create' if validate_only else 'created'} {topic} ({count} partitions)")


@command.command("describe")
@click.argument("topics", nargs=-1, required=True)
@click.option("--configs", is_flag=True, help="Show the settings instead of the partitions.")
@table_options
def describe(session: Session, topics: tuple[str, ...], form: str, *, configs: bool) -> None:
    """Show each partition of TOPICS: leader, replicas, and its first, stable and last offset.

    LATEST is the offset after the last record, STABLE the one where a read_committed reader stops.
    """
    from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST

    if configs:
        rows = _settings(session, topics)
        emit(rows, ["topic", "key", "value", "source"], form)
        return
    infos = session.topics(topics)
    partitions = [(topic.name, index) for topic in infos for index in topic.partitions]
    first = session.offsets(partitions, EARLIEST)
    last = session.offsets(partitions, LATEST)
    stable = session.offsets(partitions, LATEST, committed=True)
    rows = [
        {
            "topic": topic.name,
            "partition": index,
            "leader": row.leader,
            "epoch": row.leader_epoch,
            "replicas": list(row.replicas),
            "isr": list(row.in_sync),
            "earliest": first[topic.name, index],
            "stable": stable[topic.name, index],
            "latest": last[topic.name, index],
        }
        for topic in infos
        for index, row in sorted(topic.partitions.items())
    ]
    columns = ["topic", "partition", "leader", "epoch", "replicas", "isr"]
    emit(rows, [*columns, "earliest", "stable", "latest"], form)


def _settings(session: Session, topics: tuple[str, ...]) -> list[dict[str, object]]:
    """The settings of ``topics`` and where each value comes from."""
    from fencepost.coordinator.cli.queries.session import check

    answer = session.client.call(
        "DescribeConfigs",
        check=False,
        entity=lambda f: f.message(
            resources=[
                f.DescribeConfigsResource(
                    resource_type=2, resource_name=topic, configuration_keys=None
                )
                for topic in topics
            ],
        ),
    )
    rows: list[dict[str, object]] = []
    for result in answer.results:
        check(result.error_code, "DescribeConfigs", result.resource_name, result.error_message)
        rows.extend(
            {
                "topic": result.resource_name,
                "key": entry.name,
                "value": entry.value,
                "source": CONFIG_SOURCES.get(entry.config_source, entry.config_source),
            }
            for entry in sorted(result.configs, key=lambda entry: str(entry.name))
        )
    return rows


@command.command("delete")
@click.argument("topics", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@shared_options
def delete(session: Session, topics: tuple[str, ...], *, yes: bool) -> None:
    """Delete TOPICS and everything in them."""
    from fencepost.coordinator.cli.queries.session import check

    if not yes:
        click.confirm(f"Delete {', '.join(topics)} for good?", abort=True)
    answer = session.client.call(
        "DeleteTopics",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            topics=[f.DeleteTopicState(name=topic, topic_id=None) for topic in topics],
            topic_names=topics,
            timeout_ms=session.timeout_ms,
        ),
    )
    for result in answer.responses:
        check(result.error_code, "DeleteTopics", result.name, result.error_message)
        click.echo(f"deleted {result.name}")
