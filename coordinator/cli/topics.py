"""``fencepost topics``: list, create, describe, alter, trim, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fencepost.coordinator.cli.changes import execute_option, show_only
from fencepost.coordinator.cli.output import (
    CommandGroup,
    counted,
    emit,
    key_values,
    shared_options,
    table_options,
    text_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.coordinator.cli.queries.session import Session
    from fencepost.coordinator.wire.client.cluster import TopicMetadata


@click.group("topics", cls=CommandGroup)
def command() -> None:
    """List, create, describe, grow, alter, trim and delete topics."""


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
    result = session.create_topic(
        topic,
        partitions,
        key_values(pairs, "--config"),
        replication_factor=replication_factor,
        validate_only=validate_only,
    )
    count = getattr(result, "num_partitions", partitions)
    done = "would create" if validate_only else "created"
    click.echo(f"{done} {topic} ({counted(count, 'partition')})")


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
        from fencepost.coordinator.cli.queries.settings import described

        settings = [
            {"topic": one.resource, "key": one.key, "value": one.value, "source": one.source}
            for one in described(session, [("topic", topic) for topic in dict.fromkeys(topics)])
        ]
        emit(settings, ["topic", "key", "value", "source"], form)
        return
    infos = session.topics(dict.fromkeys(topics))
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
    if form == "table":
        _show_heads(session, infos)
    columns = ["topic", "partition", "leader", "epoch", "replicas", "isr"]
    emit(rows, [*columns, "earliest", "stable", "latest"], form)


def _show_heads(session: Session, topics: Sequence[TopicMetadata]) -> None:
    """A line for each topic: its size, its id, and what it was given as its own settings."""
    from fencepost.coordinator.cli.queries.settings import described

    own: dict[str, list[str]] = {topic.name: [] for topic in topics}
    for one in described(session, [("topic", topic.name) for topic in topics]):
        if one.source == "topic":
            own[one.resource].append(f"{one.key}={one.value}")
    for topic in topics:
        what = [
            counted(len(topic.partitions), "partition"),
            f"id {topic.topic_id}",
            *own[topic.name],
        ]
        click.echo(f"{topic.name}: {text_of(', '.join(what))}")


@command.command("delete")
@click.argument("topics", nargs=-1, required=True)
@execute_option
@shared_options
def delete(session: Session, topics: tuple[str, ...], *, execute: bool) -> None:
    """Say what TOPICS hold, and with --execute delete them and everything in them."""
    from fencepost.coordinator.cli.queries.session import check
    from fencepost.coordinator.wire.client.requests import EARLIEST, LATEST

    infos = session.topics(dict.fromkeys(topics))
    if not execute:
        partitions = [(topic.name, index) for topic in infos for index in topic.partitions]
        first, end = session.offsets(partitions, EARLIEST), session.offsets(partitions, LATEST)
        for topic in infos:
            held = sum(
                end[topic.name, index] - first[topic.name, index] for index in topic.partitions
            )
            what = f"{counted(len(topic.partitions), 'partition')}, {counted(held, 'offset')}"
            click.echo(f"would delete {topic.name} ({what})")
        show_only()
        return
    answer = session.client.call(
        "DeleteTopics",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            topics=[f.DeleteTopicState(name=topic.name, topic_id=None) for topic in infos],
            topic_names=[topic.name for topic in infos],
            timeout_ms=session.timeout_ms,
        ),
    )
    for result in answer.responses:
        check(result.error_code, "DeleteTopics", result.name, result.error_message)
        click.echo(f"deleted {result.name}")


@command.command("add-partitions")
@click.argument("topic")
@click.option("--to", "count", required=True, type=click.IntRange(min=1), help="How many in all.")
@execute_option
@shared_options
def add_partitions(session: Session, topic: str, count: int, *, execute: bool) -> None:
    """Say whether TOPIC can have more partitions, and with --execute add them.

    They can't be taken away again, and keys may go to other partitions from then on.
    """
    from fencepost.coordinator.cli.queries.session import check

    (info,) = session.topics([topic])
    answer = session.client.call(
        "CreatePartitions",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            topics=[f.CreatePartitionsTopic(name=topic, count=count, assignments=None)],
            timeout=session.timeout_ms,
            validate_only=not execute,
        ),
    )
    (result,) = answer.results
    check(result.error_code, "CreatePartitions", topic, result.error_message)
    change = f"{topic} from {len(info.partitions)} to {counted(count, 'partition')}"
    click.echo(f"grew {change}" if execute else f"would grow {change}")
    if not execute:
        show_only()


@command.command("alter")
@click.argument("topic")
@click.option("--config", "pairs", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--unset", "keys", multiple=True, metavar="KEY", help="Back to what the broker says.")
@execute_option
@table_options
def alter(
    session: Session, topic: str, pairs: tuple[str, ...], keys: tuple[str, ...], **how: Any
) -> None:
    """Say what settings TOPIC would have, and with --execute give it them."""
    from fencepost.coordinator.cli.configs import change

    if not pairs and not keys:
        raise click.UsageError("give --config or --unset")
    session.topics([topic])
    change(session, ("topic", topic), dict(key_values(pairs, "--config")), keys, **how)


@command.command("trim")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC[:0,1]...")
@click.option("--to-offset", type=click.IntRange(min=0), help="Its first offset from then on.")
@click.option("--to-latest", is_flag=True, help="Everything that is there now goes.")
@click.option(
    "--to-datetime",
    metavar="TIME",
    help="What is older goes: 02:13, -2h, yesterday or ISO (UTC).",
)
@execute_option
@table_options
def trim(session: Session, topics: tuple[str, ...], form: str, *, execute: bool, **to: Any) -> None:
    """Say which records would go from the beginning of TOPICS, and with --execute delete them.

    Whoever reads from before goes on at the first offset that is left.
    """
    from fencepost.coordinator.cli import topic_trim

    rows = topic_trim.plan(session, topics, topic_trim.Where(**to))
    if execute:
        topic_trim.delete_records(session, rows)
    emit([row._asdict() for row in rows], topic_trim.Row._fields, form)
    if not execute:
        show_only()
