"""``fencepost cluster``: brokers, controllers, features and health; creation of a cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.cluster_promote import promote, stand_alone
from fencepost.cli.features import COLUMNS as FEATURE_COLUMNS
from fencepost.cli.history_view import history_options, show
from fencepost.cli.options import duration
from fencepost.cli.output import (
    EXIT_REFUSED,
    CommandGroup,
    counted,
    emit,
    shared_options,
    table_options,
    text_of,
    utc,
)
from fencepost.cli.printing import print_json, print_lines
from fencepost.coordinator.history.entries import CLUSTER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencepost.client.queries.moves import Move
    from fencepost.client.queries.replicas import (
        BrokerDescription,
        PartitionDescription,
        QuorumDescription,
    )
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

BROKER_COLUMNS = ("broker", "host", "port", "rack", "controller", "apis")
STATE_COLUMNS = (
    *("broker", "host", "port", "rack", "state", "controller"),
    *("leads", "preferred", "replicas", "in_sync", "metadata_lag"),
)
PROBLEM_COLUMNS = (
    *("topic", "partition", "leader", "epoch", "replicas", "isr", "elr", "offline", "problem"),
)
RESTART_COLUMNS = ("topic", "partition", "leader", "replicas", "isr", "min_isr", "problem")
CHECK_PAUSE_S = 0.5
"""Pause between two checks of `check-restart --wait`."""
MIN_ISR = "min.insync.replicas"
API_COLUMNS = ("broker", "key", "api", "lowest", "highest")
METADATA_VERSION = "metadata.version"
_LEVELS = "7=3.3 8=3.4 11=3.5 14=3.6 19=3.7 20=3.8 21=3.9 25=4.0 27=4.1 29=4.2 30=4.3 33=4.4"
RELEASES = {int(level): release for level, release in (pair.split("=") for pair in _LEVELS.split())}
"""Kafka's releases by the last metadata.version that each introduced (``MetadataVersion``)."""


@click.group("cluster", cls=CommandGroup)
def command() -> None:
    """Show the state of a cluster, or turn a standalone broker into a cluster."""


command.add_command(promote)
command.add_command(stand_alone)


@command.command("info")
@click.option("--apis", "with_apis", is_flag=True, help="Show the versions of each API as well.")
@table_options
def info(session: ClusterSession, form: str, *, with_apis: bool) -> None:
    """Show a cluster's id, its brokers, the active controller, and its features.

    CONTROLLER marks the broker whose process is the active controller, if any. VERSION is the
    Apache Kafka release of the cluster's metadata.version, if the cluster reports it.
    """
    from fencepost.client.queries import replicas
    from fencepost.client.queries.features import feature_levels

    cluster = session.client.metadata(refresh=True)
    controller = replicas.active_controller(session, replicas.quorum(session))
    versions = {node: session.client.versions(to_node=node) for node in sorted(cluster.brokers)}
    features = feature_levels(session)
    brokers = [
        {
            "broker": node,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "controller": node == controller,
            "apis": len(versions[node]),
        }
        for node, broker in sorted(cluster.brokers.items())
    ]
    apis = _apis(versions) if with_apis else []
    version = _release({str(row["feature"]): row["finalized"] for row in features})
    if form == "json":
        fields: dict[str, object] = {
            "cluster_id": cluster.cluster_id,
            "controller": controller,
            "version": version,
            "brokers": brokers,
            "features": features,
        }
        print_json(fields | ({"apis": apis} if with_apis else {}))
        return
    head = f"cluster {text_of(cluster.cluster_id)}, {counted(len(brokers), 'broker')}"
    head += f", controller {'unknown' if controller is None else controller}"
    print_lines(head + ("" if version is None else f", version {version}"))
    emit(brokers, BROKER_COLUMNS, form)
    print_lines()
    emit(features, FEATURE_COLUMNS, form)
    if with_apis:
        print_lines()
        emit(apis, API_COLUMNS, form)


def _problem_rows(
    partitions: Sequence[PartitionDescription],
    min_isr: Mapping[str, int],
    moving: Mapping[Partition, Move] | None,
) -> list[dict[str, Any]]:
    """Return a row for each partition that has problems; ``moving`` has the reassignments."""
    from fencepost.client.queries import replicas

    rows = []
    for partition in partitions:
        move = (moving or {}).get((partition.topic, partition.partition))
        wrong = replicas.problems(
            partition, min_isr.get(partition.topic, 1), () if move is None else move.adding
        )
        if wrong:
            rows.append(
                {
                    **partition._asdict(),
                    "min_isr": min_isr.get(partition.topic),
                    "problems": wrong,
                }
            )
    return rows


@command.command("describe")
@table_options
def describe(session: ClusterSession, form: str) -> None:
    """Show brokers, controllers, and partitions that are offline or under-replicated.

    STATE is `up`, or `fenced` for a registered broker without a session. CONTROLLER is `active`,
    `voter` or empty; the history says when and why a controller on ZooKeeper was elected. LEADS
    counts partitions the broker leads, PREFERRED those it should lead, IN_SYNC its replicas
    that are in the ISR, METADATA_LAG the records of the metadata log it has not read.
    """
    from fencepost.client.queries import replicas

    broker_rows, quorum = replicas.brokers(session), replicas.quorum(session)
    partitions = replicas.partition_states(session)
    min_isr = _min_isr(session, list(dict.fromkeys(partition.topic for partition in partitions)))
    controller = replicas.active_controller(session, quorum)
    election = None if quorum is not None else _election(session, controller)
    brokers = [_broker_row(row, quorum, partitions) for row in broker_rows]
    if replicas.is_elected_of_brokers(session):
        for broker_row in brokers:
            broker_row["controller"] = "active" if broker_row["broker"] == controller else None
    moving = _reassigning(session)
    problems = _problem_rows(partitions, min_isr, moving)
    health = {
        "partitions": len(partitions),
        "offline": sum("offline" in row["problems"] for row in problems),
        "under_min_isr": sum("under min ISR" in row["problems"] for row in problems),
        "under_replicated": sum("under replicated" in row["problems"] for row in problems),
        "not_led_by_preferred": sum(
            partition.leader != partition.preferred for partition in partitions
        ),
        "reassigning": None if moving is None else len(moving),
    }
    cluster_id = session.client.metadata().cluster_id
    if form == "json":
        fields: dict[str, object] = {
            "cluster_id": cluster_id,
            "controller": controller,
            "controller_epoch": quorum.epoch if quorum is not None else election and election.epoch,
            "controller_since": election and election.since,
            "controller_cause": election and election.cause,
            "metadata_offset": None if quorum is None else quorum.high_watermark,
            "brokers": brokers,
            "health": health,
            "problems": problems,
        }
        print_json(fields)
        return
    head = f"cluster {text_of(cluster_id)}, {counted(len(brokers), 'broker')}"
    if quorum is not None:
        head += f", controller {quorum.controller} in epoch {quorum.epoch}"
        head += f", metadata at offset {quorum.high_watermark}"
    elif election is not None:
        head += f", controller {controller} in epoch {election.epoch} since {election.since}"
        head += f": {election.cause}"
    print_lines(head)
    emit(brokers, STATE_COLUMNS, form)
    counts = [
        f"{count} {name.replace('_', ' ').replace('isr', 'ISR')}"
        for name, count in health.items()
        if name != "partitions" and count is not None
    ]
    print_lines("", f"{counted(len(partitions), 'partition')}: {', '.join(counts)}")
    if problems:
        shown = [{**row, "problem": ", ".join(row["problems"])} for row in problems]
        emit(shown, PROBLEM_COLUMNS, form)


@command.command("unregister")
@click.argument("broker", type=click.IntRange(min=0), metavar="BROKER")
@execute_option
@shared_options
def unregister(session: ClusterSession, broker: int, *, execute: bool) -> None:
    """Show whether BROKER can be removed from the cluster; with --execute, remove it.

    The broker must have stopped, and have no replicas except of __fencepost_history, which keeps
    the broker's history.
    """
    from fencepost.client.queries import replicas
    from fencepost.coordinator.metadata.names import HISTORY_TOPIC

    brokers_by_id = {broker.broker: broker for broker in replicas.brokers(session)}
    if broker not in brokers_by_id:
        have = ", ".join(str(broker_id) for broker_id in sorted(brokers_by_id))
        raise click.ClickException(f"there is no broker {broker}; the brokers are {have}")
    if brokers_by_id[broker].fenced is False:
        raise click.ClickException(f"broker {broker} is up: stop it first")
    held = sum(
        broker in partition.replicas and partition.topic != HISTORY_TOPIC
        for partition in replicas.partition_states(session)
    )
    if held:
        raise click.ClickException(
            f"broker {broker} has {counted(held, 'replica')}: move them first, with"
            " `fencepost topics reassign`"
        )
    if not execute:
        print_lines(f"broker {broker} would be removed")
        show_only()
        return
    replicas.unregister(session, broker)
    print_lines(f"broker {broker} is removed")


@command.command("check-restart")
@click.argument("broker", type=click.IntRange(min=0), metavar="BROKER")
@click.option(
    "--wait",
    metavar="SECONDS",
    callback=duration("s", 0),
    help="Repeat the check until it passes, for at most this time; also 90s, 10m.",
)
@table_options
def check_restart(session: ClusterSession, form: str, broker: int, wait: float | None) -> None:
    """Check whether every partition stays available if BROKER is restarted now.

    Exit status 1 if not. While BROKER is down, each partition must have a leader and an ISR of at
    least min.insync.replicas, and the controllers must have a majority. Partitions with a replica
    on no other broker are never available during the restart. __fencepost_history is not checked:
    its entries wait in memory.
    """
    from fencepost.client.queries import replicas
    from fencepost.coordinator.metadata.names import INTERNAL_TOPICS

    end = time.monotonic() + (wait or 0)
    while True:
        partitions = replicas.partition_states(session)
        rows = _restart_problems(session, broker, partitions)
        if not rows or time.monotonic() >= end:
            break
        time.sleep(CHECK_PAUSE_S)
    led = [partition for partition in partitions if partition.leader == broker]
    coordinators = sum(partition.topic in INTERNAL_TOPICS for partition in led)
    if form == "json":
        fields = {"broker": broker, "can_restart": not rows, "leads": len(led)}
        print_json({**fields, "coordinators": coordinators, "problems": rows})
    elif rows:
        print_lines(f"broker {broker} cannot be restarted without loss of availability")
        emit(rows, RESTART_COLUMNS, form)
    else:
        moves = f"{counted(len(led), 'partition')} that it leads"
        print_lines(
            f"broker {broker} can be restarted: {moves} can move, {coordinators} of a coordinator"
        )
    if rows:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _restart_problems(
    session: ClusterSession, broker: int, partitions: Sequence[PartitionDescription]
) -> list[dict[str, object]]:
    """Return the reasons against a restart of ``broker``, with the partitions concerned."""
    from fencepost.client.queries import replicas
    from fencepost.coordinator.metadata.names import HISTORY_TOPIC

    broker_rows, quorum = replicas.brokers(session), replicas.quorum(session)
    if broker not in {row.broker for row in broker_rows}:
        have = ", ".join(str(row.broker) for row in broker_rows)
        raise click.ClickException(f"there is no broker {broker}; the brokers are {have}")
    down = frozenset(row.broker for row in broker_rows if row.fenced)
    problems: list[dict[str, object]] = []
    if broker in down:
        problems.append({"problem": f"broker {broker} is down or fenced"})
    if quorum is None and not replicas.is_elected_of_brokers(session):
        problems.append({"problem": "this user may not describe the controllers"})
    elif quorum is not None and (why := replicas.quorum_without(quorum, broker)) is not None:
        problems.append({"problem": why})
    min_isr = _min_isr(session, list(dict.fromkeys(partition.topic for partition in partitions)))
    for partition in partitions:
        if partition.topic == HISTORY_TOPIC:
            continue
        wrong = replicas.restart_problem(partition, broker, min_isr.get(partition.topic, 1), down)
        if wrong is not None:
            problems.append(
                {**partition._asdict(), "min_isr": min_isr.get(partition.topic), "problem": wrong}
            )
    return problems


@command.command("history")
@history_options
def history(session: ClusterSession, **options: Any) -> None:
    """Show changes of the cluster, and why: brokers, levels of features, deleted topics.

    For a controller that the brokers elect on ZooKeeper: its broker, its epoch, and the cause of
    the election. `fencepost topics history` shows the changes of partitions.
    """
    show(session, CLUSTER, **options)


class _Election(NamedTuple):
    epoch: int
    since: str
    cause: str


def _election(session: ClusterSession, controller: int | None) -> _Election | None:
    """Return the last election in the history; None if it did not elect ``controller``."""
    from fencepost.client.queries import replicas
    from fencepost.client.queries.entries import last_election

    last = last_election(session) if replicas.is_elected_of_brokers(session) else None
    if last is None or last.detail["controller"] != controller:
        return None
    return _Election(int(last.detail["epoch"]), utc(last.at_ms), str(last.detail["cause"]))


def _broker_row(
    broker: BrokerDescription,
    quorum: QuorumDescription | None,
    partitions: Sequence[PartitionDescription],
) -> dict[str, object]:
    node = broker.broker
    return {
        "broker": node,
        "host": broker.host,
        "port": broker.port,
        "rack": broker.rack,
        "state": "fenced" if broker.fenced else "up",
        "controller": _controller_role(node, quorum),
        "leads": sum(partition.leader == node for partition in partitions),
        "preferred": sum(partition.preferred == node for partition in partitions),
        "replicas": sum(node in partition.replicas for partition in partitions),
        "in_sync": sum(node in partition.isr for partition in partitions),
        "metadata_lag": _metadata_lag(node, quorum),
    }


def _controller_role(node: int, quorum: QuorumDescription | None) -> str | None:
    if quorum is None or node not in quorum.voters:
        return None
    return "active" if node == quorum.controller else "voter"


def _metadata_lag(node: int, quorum: QuorumDescription | None) -> int | None:
    """Return the number of records that a node has not read; None if it is not known."""
    if quorum is None or quorum.log_ends.get(node, -1) < 0:
        return None
    return max(0, quorum.high_watermark - quorum.log_ends[node])


def _min_isr(session: ClusterSession, topics: list[str]) -> dict[str, int]:
    from fencepost.client.queries.settings import describe_configs
    from fencepost.coordinator.metadata.names import HISTORY_TOPIC

    # The broker reports no settings of the history's topic.
    resources = [("topic", name) for name in topics if name != HISTORY_TOPIC]
    entries = describe_configs(session, resources, [MIN_ISR]) if resources else []
    return {entry.resource: int(entry.value) for entry in entries if entry.value is not None}


def _reassigning(session: ClusterSession) -> dict[Partition, Move] | None:
    """Return the reassignments in progress; None if this user or broker cannot list them."""
    from fencepost.client.queries.moves import ongoing
    from fencepost.protocol.errors import WireError

    try:
        return ongoing(session)
    except WireError:
        return None


def _release(features: dict[str, object]) -> str | None:
    """Return the first release that knows the cluster's metadata.version; None if there is none."""
    level = features.get(METADATA_VERSION)
    if not isinstance(level, int) or level < 1:
        return None
    newest = max(RELEASES)
    if level > newest:
        return f"after {RELEASES[newest]}"
    return next(release for last, release in sorted(RELEASES.items()) if level <= last)


def _apis(versions: dict[int, dict[int, tuple[int, int]]]) -> list[dict[str, object]]:
    from fencepost.protocol.api import api_name

    return [
        {
            "broker": node,
            "key": key,
            "api": api_name(key) or "Unknown",
            "lowest": low,
            "highest": high,
        }
        for node, ranges in versions.items()
        for key, (low, high) in sorted(ranges.items())
    ]
