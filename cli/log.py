"""``fencepost log``: commands on the files of a stopped broker."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.decoding import decoder_of_directory
from fencepost.cli.output import (
    EXIT_REFUSED,
    CommandGroup,
    emit,
    format_option,
    key_values,
)
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.logcore.config import LogConfig
    from fencepost.logcore.fs import FileSystem
    from fencepost.tools.transfer import CopiedPartition

_PARTITION = re.compile(r"[a-zA-Z0-9._-]+-[0-9]+")
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
_DATA_DIR = click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The broker's data directory; the broker must not be running.",
)
_CONFIG = click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting as for `serve`; may be repeated.",
)
_MOVED = (
    "topic",
    "partition",
    "topic_id",
    "log_start_offset",
    "log_end_offset",
    "last_stable_offset",
    "leader_epoch",
    "cut_bytes",
)
_LOG_LINE_COLUMNS = (
    "level",
    "event",
    "partition",
    "offset",
    "next_offset",
    "log_end_offset",
    "records",
    "bytes",
    "acknowledged_offsets_lost",
    "cause",
    "kept",
)


@click.group("log", cls=CommandGroup)
def command() -> None:
    """Verify, repair, import and export partition directories.

    These commands work on the files of a stopped broker. They refuse to open the files of a running
    broker.
    """


@command.command("import")
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=_DIRECTORY)
@_DATA_DIR
@click.option(
    "--topic", "topics", multiple=True, help="Only directories of this topic; may be repeated."
)
@click.option(
    "--topic-config",
    "topic_pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the new topics; may be repeated.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="The partitions of each topic, if some have no directory.",
)
@click.option("--accept-damage", is_flag=True, help="Leave out torn and damaged batches.")
@_CONFIG
@format_option
def import_(
    directories: tuple[Path, ...],
    data_dir: Path,
    topics: tuple[str, ...],
    topic_pairs: tuple[str, ...],
    partitions: int | None,
    pairs: tuple[str, ...],
    form: str,
    *,
    accept_damage: bool,
) -> None:
    """Copy partition directories DIR (…/TOPIC-0 …/TOPIC-1) into this broker, as new topics.

    The directories come from a stopped or killed Apache Kafka or Fencepost; every batch is checked.
    Name all partitions of a topic in one command; --topic selects one of several topics.
    Directories of __consumer_offsets, __transaction_state and __share_group_state bring their
    groups and transactions; this broker must have none of its own.
    """
    from fencepost.tools.transfer import import_directories

    configs = dict(key_values(topic_pairs, "--topic-config"))
    with _open_broker(data_dir, pairs) as broker:
        moved = import_directories(
            broker.storage,
            directories,
            configs,
            topics=topics,
            partitions=partitions,
            accept_damage=accept_damage,
        )
    _show_moved(moved, form)


@command.command("export")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@_DATA_DIR
@click.option(
    "--to", "target", required=True, type=_DIRECTORY, help="The log directory of Apache Kafka."
)
@click.option("--replace", is_flag=True, help="Replace the records that the topics have there.")
@execute_option
@_CONFIG
@format_option
def export(
    topics: tuple[str, ...],
    data_dir: Path,
    target: Path,
    pairs: tuple[str, ...],
    form: str,
    *,
    replace: bool,
    execute: bool,
) -> None:
    """Copy TOPICS into the log directory of a stopped Apache Kafka.

    First create the topics in Apache Kafka with the same number of partitions, and stop it. Records
    are copied with their offsets, transactions and producers, without the offsets of groups.
    --replace needs --execute as well if records would be lost.
    """
    from fencepost.tools.transfer import export_topic, replaced_by

    moved: list[CopiedPartition] = []
    with _open_broker(data_dir, pairs) as broker:
        asks = topics if replace and not execute else ()
        lost = [
            partition for topic in asks for partition in replaced_by(broker.storage, topic, target)
        ]
        if lost:
            rows = [{"directory": str(path), "log_bytes": size} for path, size in lost]
            emit(rows, ("directory", "log_bytes"), form)
            show_only()
            return
        for topic in topics:
            moved += export_topic(broker.storage, topic, target, replace=replace)
    _show_moved(moved, form)
    _warn_of_producer_ids(moved, target)


def _warn_of_producer_ids(moved: Sequence[CopiedPartition], target: Path) -> None:
    """Warn if Apache Kafka may allocate producer ids that the exported records already have."""
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.tools.kafka_metadata import METADATA_DIRECTORY, next_producer_id

    highest = max((partition.highest_producer_id for partition in moved), default=-1)
    if highest < 0:
        return
    following = next_producer_id(OsFileSystem(), str(target))
    if following is None:
        reason = f"{target / METADATA_DIRECTORY} does not show which ids Kafka has allocated"
    elif following <= highest:
        reason = f"Kafka's next block of ids begins at {following}"
    else:
        return
    print_lines(
        f"warning: the records carry producer ids up to {highest}; {reason}. A new idempotent"
        " producer that is given one of these may have its first batches taken for repetitions or"
        " gaps, until producer.id.expiration.ms has passed since the last record of that id.",
        err=True,
    )


@command.command("verify")
@click.argument("directories", nargs=-1, required=True, metavar="DIR...", type=_DIRECTORY)
@_CONFIG
@format_option
def verify(directories: tuple[Path, ...], pairs: tuple[str, ...], form: str) -> None:
    """Check partition directories, or whole data directories; exit 1 if something is wrong.

    The checks cover checksums, the order of offsets, indexes against their log, transaction indexes
    and snapshots against a replay, leader epochs and checkpoints. After an unclean shutdown the
    report also says what the next start will truncate. Nothing is changed.
    """
    problems, lines, summary = check_directories(directories, pairs)
    if form == "json":
        emit([*problems, *lines], (), form)
    else:
        emit(summary, ("directory", "problems"), form)
        show_problems(problems, lines)
    if problems or lines:
        raise click.exceptions.Exit(EXIT_REFUSED)


def check_directories(
    directories: Sequence[Path], pairs: Sequence[str]
) -> tuple[list[dict[str, object]], list[dict[str, object]], list[dict[str, object]]]:
    """Check directories; return the problems, the log lines of the next start, and summary rows.

    Each directory has one summary row.
    """
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.logcore.verify import verify_data_directory, verify_partition

    fs = OsFileSystem()
    problems: list[dict[str, object]] = []
    lines: list[dict[str, object]] = []
    summary: list[dict[str, object]] = []
    for directory in _partitions_of(directories):
        if _PARTITION.fullmatch(directory.name):
            decoder = decoder_of_directory(directory.name)
            rows = list(verify_partition(fs, str(directory), decoder=decoder))
        else:
            rows = list(verify_data_directory(fs, str(directory)))
            lines += _recovery_log_lines(fs, directory, pairs)
        problems += rows
        summary.append({"directory": str(directory), "problems": len(rows)})
    return problems, lines, summary


def show_problems(
    problems: Sequence[Mapping[str, object]], lines: Sequence[Mapping[str, object]]
) -> None:
    """Print a table of problems and a table of the next start's log lines, unless empty."""
    if problems:
        emit(problems, ("file", "problem", "position", "offset"), "table")
    if lines:
        print_lines("the next start will say:")
        emit(lines, _LOG_LINE_COLUMNS, "table")


def _recovery_log_lines(
    fs: FileSystem, directory: Path, pairs: Sequence[str]
) -> list[dict[str, object]]:
    """Return the log lines about recovery of a broker started on an in-memory overlay.

    Return an empty list for a directory that was shut down cleanly, or is not Fencepost's.
    """
    from structlog.testing import capture_logs

    from fencepost.coordinator.config.logs import configure_quietly
    from fencepost.coordinator.metadata.names import METADATA_TOPIC
    from fencepost.coordinator.storage.log_manager import WHAT_A_START_DID
    from fencepost.logcore.checkpoints import CLEAN_SHUTDOWN, META_PROPERTIES, CheckpointError
    from fencepost.logcore.checkpoints import read_meta_properties as read_meta
    from fencepost.logcore.clock import SystemClock
    from fencepost.logcore.overlay import OverlayFileSystem

    names = fs.list_directory(str(directory)) or ()
    if CLEAN_SHUTDOWN in names or not {META_PROPERTIES, f"{METADATA_TOPIC}-0"} <= set(names):
        return []
    rows: list[dict[str, object]] = []
    configure_quietly()
    with capture_logs() as lines:
        try:
            meta = read_meta(fs, str(directory))
            node_option = [] if meta is None else [f"node.id={meta.node_id}"]
            with _open_broker(
                directory, [*node_option, *pairs], OverlayFileSystem(fs, SystemClock())
            ):
                pass
        except (CheckpointError, click.ClickException) as error:
            rows = [{"level": "error", "event": "start refused", "cause": str(error)}]
    recovery = [line for line in lines if line["event"] in WHAT_A_START_DID]
    rows = [{"level": line.pop("log_level"), **line} for line in recovery] + rows
    return [{"kind": "start", **row} for row in rows]


def _partitions_of(directories: Sequence[Path]) -> Iterator[Path]:
    """Yield each directory, followed by its partitions if it is a data directory.

    Raises click.ClickException for a directory that a broker uses.
    """
    for directory in (directory.absolute() for directory in directories):
        _refuse_if_in_use(directory)
        yield directory
        if not _PARTITION.fullmatch(directory.name):
            yield from sorted(
                path for path in directory.iterdir() if _PARTITION.fullmatch(path.name)
            )


def _refuse_if_in_use(directory: Path) -> None:
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.tools.transfer import TransferError, refuse_if_in_use

    is_partition = _PARTITION.fullmatch(directory.name)
    try:
        refuse_if_in_use(OsFileSystem(), directory.parent if is_partition else directory)
    except (TransferError, OSError) as error:
        raise click.ClickException(str(error)) from error


@command.command("reset-producer-ids")
@_DATA_DIR
@execute_option
@_CONFIG
@format_option
def reset_producer_ids(data_dir: Path, pairs: tuple[str, ...], form: str, *, execute: bool) -> None:
    """Show the next producer id after those in the logs; with --execute, continue from it.

    For a broker that runs out of producer ids because an imported topic contains an id that a
    client made up: ids above the limit of an import are ignored.
    """
    from fencepost.tools.decisions import decide
    from fencepost.tools.figures import plan_producer_ids

    with _open_broker(data_dir, pairs) as broker:
        plan = plan_producer_ids(broker.storage)
        if execute:
            decide(broker.storage, lambda controller: controller.reset_producer_ids(plan.following))
    row = {**plan._asdict(), "executed": execute}
    emit([row], list(row), form)
    if not execute:
        show_only()


@command.command("rebuild-index")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@execute_option
@_CONFIG
@format_option
def rebuild_index(directory: Path, pairs: tuple[str, ...], form: str, *, execute: bool) -> None:
    """Show which indexes, snapshots and epochs of DIR are wrong; with --execute, rebuild them."""
    from fencepost.logcore.clock import SystemClock
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.logcore.repair import rebuild_indexes, stale_indexes

    path, fs = _partition_directory(directory), OsFileSystem()
    with _refusals():
        stale = stale_indexes(fs, str(path))
        if execute:
            rebuild_indexes(fs, str(path), _log_config(pairs), SystemClock())
    emit(stale, ("file", "problem", "position", "offset"), form)
    if form == "table":
        print_lines(f"{'rebuilt' if execute else 'would rebuild'} the indexes of {path}")
    if not execute:
        show_only()


@command.command("truncate")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--to-offset", required=True, type=click.IntRange(min=0), help="The new log end.")
@execute_option
@click.option(
    "--undo-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory for copies of the files; else beside the data directory.",
)
@_CONFIG
@format_option
def truncate(
    directory: Path,
    to_offset: int,
    undo_dir: Path | None,
    pairs: tuple[str, ...],
    form: str,
    *,
    execute: bool,
) -> None:
    """Show what is lost if the log in DIR is truncated before the batch that holds an offset.

    With --execute, truncate it and keep copies of the files.
    """
    from fencepost.logcore.clock import SystemClock
    from fencepost.logcore.fs import OsFileSystem
    from fencepost.logcore.repair import plan_truncation
    from fencepost.logcore.repair import truncate as cut_log

    path, fs = _partition_directory(directory), OsFileSystem()
    undo = _undo_directory(path) if undo_dir is None else undo_dir.absolute()
    with _refusals():
        if not execute:
            cut = plan_truncation(fs, str(path), to_offset)
        else:
            if undo.exists():
                raise click.ClickException(f"{undo} already exists")
            config = _log_config(pairs)
            cut = cut_log(fs, str(path), to_offset, str(undo), config, SystemClock())
    row = {
        "directory": str(path),
        "log_end_offset": cut.log_end_offset,
        "new_log_end_offset": cut.first_offset,
        "batches": cut.batches,
        "records": cut.records,
        "log_bytes": cut.log_bytes,
        "undo": str(undo) if execute else None,
    }
    emit([row], list(row), form)
    if not execute:
        show_only()


def _undo_directory(path: Path) -> Path:
    """Return a free path beside the data directory; inside it, a broker would load the copies."""
    root = path.parent.with_name(f"{path.parent.name}.undo")
    return next(
        candidate
        for candidate in (root / f"{path.name}.{number}" for number in itertools.count(1))
        if not candidate.exists()
    )


def _partition_directory(directory: Path) -> Path:
    path = directory.absolute()
    if not _PARTITION.fullmatch(path.name):
        raise click.ClickException(f"{path} is not named like a partition, TOPIC-INDEX")
    _refuse_if_in_use(path)
    return path


def _log_config(pairs: Sequence[str]) -> LogConfig:
    from fencepost.coordinator.config.broker_config import BrokerConfig, load, log_config

    with _refusals():
        return log_config(BrokerConfig(load(pairs, None)), {})


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    from fencepost.logcore.checkpoints import CheckpointError
    from fencepost.logcore.machine import DomainError

    try:
        yield
    except (DomainError, CheckpointError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _show_moved(moved: Sequence[CopiedPartition], form: str) -> None:
    from fencepost.logcore.checkpoints import uuid_to_text

    rows = [
        {name: getattr(partition, name) for name in _MOVED}
        | {"topic_id": uuid_to_text(partition.topic_id)}
        for partition in moved
    ]
    emit(rows, _MOVED, form)


@contextlib.contextmanager
def _open_broker(
    data_dir: Path, pairs: Sequence[str], fs: FileSystem | None = None
) -> Iterator[Broker]:
    """Open a broker's data directory without serving it; errors become exit status 1."""
    import asyncio

    from fencepost.coordinator.config.broker_config import load
    from fencepost.coordinator.config.logs import configure_quietly
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.daemon.errors import BrokerError
    from fencepost.coordinator.daemon.process import raise_file_limit
    from fencepost.coordinator.metadata.errors import MetadataError
    from fencepost.logcore.machine import DomainError
    from fencepost.tools.transfer import TransferError

    configure_quietly()
    raise_file_limit()
    try:
        broker = Broker(data_dir, config=load(pairs, None), fs=fs)
        try:
            broker.open()
            yield broker
        finally:
            asyncio.run(broker.stop())
    except (BrokerError, DomainError, MetadataError, OSError, TransferError) as error:
        raise click.ClickException(str(error)) from error
