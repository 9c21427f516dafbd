"""``fencepost topics``: list, create, describe, alter, trim, reassign, elect, delete, history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.history_view import history_options, show
from fencepost.cli.output import (
    EXIT_REFUSED,
    CommandGroup,
    counted,
    emit,
    key_values,
    shared_options,
    table_options,
)
from fencepost.cli.printing import print_lines
from fencepost.coordinator.config.key import nearest
from fencepost.coordinator.history.entries import PARTITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.client.cluster import TopicMetadata
    from fencepost.client.queries.session import ClusterSession


@click.group("topics", cls=CommandGroup)
def command() -> None:
    """List, create, describe, grow, alter, trim, move and delete topics."""


@command.command("list")
@click.option("--internal", is_flag=True, help="Show the coordinators' own topics as well.")
@table_options
def list_topics(session: ClusterSession, form: str, *, internal: bool) -> None:
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
    empty = "no topics" if internal else "no topics; --internal shows the coordinators' own"
    emit(rows, ["topic", "partitions", "replicas", "topic_id"], form, empty)


@command.command("create")
@click.argument("topic")
@click.option(
    "--partitions", "-p", default=-1, help="The number of partitions; else the broker's default."
)
@click.option(
    "--replication-factor",
    "-r",
    default=-1,
    help="The number of replicas; else the broker's default.",
)
@click.option("--config", "pairs", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@click.option(
    "--validate-only", is_flag=True, help="Only check whether the topic could be created."
)
@shared_options
def create(
    session: ClusterSession,
    topic: str,
    partitions: int,
    replication_factor: int,
    pairs: tuple[str, ...],
    *,
    validate_only: bool,
) -> None:
    """Create TOPIC."""
    from fencepost.client.client import ApiError
    from fencepost.coordinator.config.topic_keys import TOPIC_KEYS

    configs = key_values(pairs, "--config")
    try:
        result = session.create_topic(
            topic,
            partitions,
            configs,
            replication_factor=replication_factor,
            validate_only=validate_only,
        )
    except ApiError as error:
        unknown = next((key for key, _ in configs if key not in TOPIC_KEYS), None)
        if error.code.name != "invalid_config" or unknown is None:
            raise
        close = nearest(unknown, TOPIC_KEYS)
        raise click.ClickException(f"topics have no setting {unknown!r}{close}") from error
    count = getattr(result, "num_partitions", partitions)
    done = "would create" if validate_only else "created"
    print_lines(f"{done} {topic} ({counted(count, 'partition')})")


@command.command("describe")
@click.argument("topics", nargs=-1, required=True)
@click.option("--configs", is_flag=True, help="Show the settings instead of the partitions.")
@table_options
def describe(session: ClusterSession, topics: tuple[str, ...], form: str, *, configs: bool) -> None:
    """Show each partition of TOPICS: leader, replicas, and its first, stable and last offset.

    LATEST is the offset after the last record, STABLE the one where a read_committed reader stops.
    ELR are the eligible leader replicas: outside the ISR, with every committed record, and
    allowed to lead if the ISR is empty. OFFLINE replicas are on brokers that are down. Offsets are
    empty if the leader does not answer.
    """
    from fencepost.client.queries.replicas import states_and_offsets

    if configs:
        from fencepost.client.queries.settings import describe_configs

        session.topics(dict.fromkeys(topics))
        settings = [
            {
                "topic": config.resource,
                "key": config.key,
                "value": config.value,
                "source": config.source,
            }
            for config in describe_configs(
                session, [("topic", topic) for topic in dict.fromkeys(topics)]
            )
        ]
        emit(settings, ["topic", "key", "value", "source"], form)
        return
    states, offsets = states_and_offsets(session, dict.fromkeys(topics))
    rows = []
    for state in states:
        bounds = offsets.get((state.topic, state.partition))
        rows.append(
            {
                **state._asdict(),
                "earliest": bounds and bounds.first,
                "stable": bounds and bounds.stable,
                "latest": bounds and bounds.end,
            }
        )
    if form == "table":
        _show_heads(session, session.topics(dict.fromkeys(topics)))
    columns = ["topic", "partition", "leader", "epoch", "replicas", "isr", "elr", "offline"]
    emit(rows, [*columns, "earliest", "stable", "latest"], form)


def _show_heads(session: ClusterSession, topics: Sequence[TopicMetadata]) -> None:
    """Print a line for each topic: its size, its id, and its own settings."""
    from fencepost.client.queries.settings import describe_configs

    overrides: dict[str, list[str]] = {topic.name: [] for topic in topics}
    for config in describe_configs(session, [("topic", topic.name) for topic in topics]):
        if config.source == "topic":
            overrides[config.resource].append(f"{config.key}={config.value}")
    for topic in topics:
        what = [
            counted(len(topic.partitions), "partition"),
            f"id {topic.topic_id}",
            *overrides[topic.name],
        ]
        print_lines(f"{topic.name}: {', '.join(what)}")


@command.command("delete")
@click.argument("topics", nargs=-1, required=True)
@execute_option
@shared_options
def delete(session: ClusterSession, topics: tuple[str, ...], *, execute: bool) -> None:
    """Show what TOPICS hold; with --execute, delete them and all their records."""
    from fencepost.client.queries.session import check
    from fencepost.client.requests import EARLIEST, LATEST

    infos = session.topics(dict.fromkeys(topics))
    if not execute:
        partitions = [(topic.name, index) for topic in infos for index in topic.partitions]
        first, end = session.offsets(partitions, EARLIEST), session.offsets(partitions, LATEST)
        for topic in infos:
            held = sum(
                end[topic.name, index] - first[topic.name, index] for index in topic.partitions
            )
            what = f"{counted(len(topic.partitions), 'partition')}, {counted(held, 'offset')}"
            print_lines(f"would delete {topic.name} ({what})")
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
        print_lines(f"deleted {result.name}")


@command.command("add-partitions")
@click.argument("topic")
@click.option(
    "--to", "count", required=True, type=click.IntRange(min=1), help="The new number of partitions."
)
@execute_option
@shared_options
def add_partitions(session: ClusterSession, topic: str, count: int, *, execute: bool) -> None:
    """Check whether TOPIC can have more partitions; with --execute, add them.

    Partitions cannot be removed again, and new records of a key may go to another partition.
    """
    from fencepost.client.queries.session import check

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
    print_lines(f"grew {change}" if execute else f"would grow {change}")
    if not execute:
        show_only()


@command.command("alter")
@click.argument("topic")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--config", "pairs", multiple=True, metavar="KEY=VALUE", help="Same as an argument KEY=VALUE."
)
@click.option("--unset", "keys", multiple=True, metavar="KEY", help="Return to the broker's value.")
@execute_option
@table_options
def alter(
    session: ClusterSession,
    topic: str,
    settings: tuple[str, ...],
    pairs: tuple[str, ...],
    keys: tuple[str, ...],
    **how: Any,
) -> None:
    """Show which settings TOPIC would have; with --execute, change them.

    Times may be durations: `fencepost topics alter orders retention.ms=7d`.
    """
    from fencepost.cli.configs import change

    changes = key_values((*settings, *pairs), "KEY=VALUE")
    if not changes and not keys:
        raise click.UsageError("give KEY=VALUE or --unset KEY")
    if len(dict(changes)) < len(changes):
        raise click.UsageError("a setting is named twice")
    session.topics([topic])
    change(session, ("topic", topic), dict(changes), keys, **how)


@command.command("trim")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC[:0,1]...")
@click.option("--to-offset", type=click.IntRange(min=0), help="The new first offset.")
@click.option("--to-latest", is_flag=True, help="Delete all current records.")
@click.option(
    "--to-datetime",
    metavar="TIME",
    help="Delete older records: 02:13, -2h, yesterday or ISO (UTC).",
)
@execute_option
@table_options
def trim(
    session: ClusterSession, topics: tuple[str, ...], form: str, *, execute: bool, **to: Any
) -> None:
    """Show how many records would go from the start of TOPICS; with --execute, delete them.

    A consumer with an earlier offset continues at the new first offset.
    """
    from fencepost.cli import topic_trim

    rows = topic_trim.plan(session, topics, topic_trim.TrimTarget(**to))
    if execute:
        topic_trim.delete_records(session, rows)
    emit([row._asdict() for row in rows], topic_trim.TrimRow._fields, form, "no partitions")
    if not execute:
        show_only()


@command.command("reassign")
@click.argument("topics", nargs=-1, metavar="TOPIC[:0,1]...")
@click.option("--all", "every", is_flag=True, help="All topics but the brokers' own histories.")
@click.option("--to-brokers", metavar="1,2,3", help="Spread the replicas over these brokers.")
@click.option(
    "--replication-factor",
    "-r",
    type=click.IntRange(min=1),
    help="The number of replicas of each partition.",
)
@click.option(
    "--file", "plan_file", type=click.File(), metavar="FILE", help="Read the plan from this file."
)
@click.option(
    "--write", type=click.File("w", lazy=True), metavar="FILE", help="Write the plan to this file."
)
@click.option(
    "--write-current",
    type=click.File("w", lazy=True),
    metavar="FILE",
    help="Write the current replicas to this file, as a plan.",
)
@click.option(
    "--throttle",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Limit the moves to so many bytes per second on each broker.",
)
@click.option(
    "--verify", is_flag=True, help="Show the progress; with --execute, also remove throttles."
)
@click.option("--cancel", is_flag=True, help="Return to the replicas from before the move.")
@execute_option
@table_options
def reassign(
    session: ClusterSession, topics: tuple[str, ...], form: str, *, execute: bool, **how: Any
) -> None:
    """Show which replicas of TOPICS would move to other brokers; with --execute, move them.

    The plan is computed from --to-brokers and --replication-factor, which leaves well-placed
    replicas where they are, or read from --file in the JSON format of kafka-reassign-partitions.
    For moves under way, --throttle alone changes the rate, --verify shows the progress and --cancel
    undoes them; these apply to all topics unless TOPICS are given.
    """
    from fencepost.cli import topic_moves

    rows = topic_moves.run(session, topics, topic_moves.MoveOptions(**how), execute=execute)
    emit(rows, topic_moves.COLUMNS, form, "no partition moves")
    if not execute and not how["verify"]:
        show_only()
    if any(row["result"] not in topic_moves.GOOD for row in rows):
        raise click.exceptions.Exit(EXIT_REFUSED)


@command.command("elect")
@click.argument("topics", nargs=-1, metavar="TOPIC[:0,1]...")
@click.option("--all", "every", is_flag=True, help="The partitions of all topics.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["preferred", "unclean"]),
    default="preferred",
    show_default=True,
    help="preferred elects the first replica, unclean any live one if there is no leader.",
)
@execute_option
@table_options
def elect(
    session: ClusterSession,
    topics: tuple[str, ...],
    form: str,
    kind: str,
    *,
    every: bool,
    execute: bool,
) -> None:
    """Show which partitions would get another leader; with --execute, elect it.

    An unclean election may lose records: the new leader may lack committed ones.
    """
    from fencepost.cli import topic_elections

    rows = topic_elections.plan(session, topics, kind, every=every)
    if execute:
        topic_elections.elect(session, rows, kind)
    emit(rows, topic_elections.COLUMNS, form, "no partition needs another leader")
    if not execute:
        show_only()
    elif any(row["result"] not in topic_elections.GOOD for row in rows):
        raise click.exceptions.Exit(EXIT_REFUSED)


@command.command("history")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC[:0,1]...")
@history_options
def history(session: ClusterSession, topics: tuple[str, ...], **options: Any) -> None:
    """Show what happened to the replicas of TOPICS, and why.

    The entries are elected leaders, replicas that left or joined the ISR, truncated logs and moved
    replicas. A partition with a single replica has no entries.
    """
    from fencepost.cli import group_reset

    places = group_reset.select_partitions(session, (), topics, every=False)
    show(session, PARTITION, *(f"{topic}-{index}" for topic, index in places), **options)
