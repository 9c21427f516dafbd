"""``fencepost backup``: backups of a data directory, with verification."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.cli.log import check_directories, show_problems
from fencepost.cli.options import duration
from fencepost.cli.output import EXIT_REFUSED, ReportingGroup, emit, format_option, utc

if TYPE_CHECKING:
    from fencepost.tools.backup import BackupSummary

COLUMNS = ("directory", "node_id", "running", "created", "files", "size_bytes", "pause_ms")
_BACKUP = click.argument(
    "backup", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


def _only_directory(
    _ctx: click.Context, _param: click.Parameter, directories: tuple[Path, ...]
) -> Path:
    """Return the only directory; a second one must not silently replace the first."""
    if len(directories) > 1:
        raise click.BadParameter("a broker has one data directory, and so has its backup")
    return directories[0]


_DATA_DIR = click.option(
    "--data-dir",
    required=True,
    multiple=True,
    callback=_only_directory,
    type=click.Path(file_okay=False, path_type=Path),
    help="The broker's data directory.",
)


def _errors() -> tuple[type[Exception], ...]:
    from fencepost.logcore.checkpoints import CheckpointError
    from fencepost.tools.backup import BackupError

    return BackupError, CheckpointError


@click.group("backup", cls=ReportingGroup, errors=_errors)
def command() -> None:
    """Create, verify and restore backups of a data directory.

    A backup has all records, offsets, transactions, settings and users of one broker, and a
    manifest with sizes and digests. In a cluster of several brokers, rely on replication instead:
    backups of different brokers are of different instants.
    """


@command.command("create")
@click.argument("target", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@_DATA_DIR
@click.option(
    "--max-pause",
    default="2",
    show_default=True,
    metavar="SECONDS",
    callback=duration("s", 0.05, 30),
    help="The longest time for which a running broker may be suspended; also 500ms.",
)
@format_option
def create(target: Path, data_dir: Path, max_pause: float, form: str) -> None:
    """Copy a data directory to DIR, which must be new or empty, or hold an interrupted backup.

    The broker may run (on Linux, as root or the broker's user): it is suspended while its files are
    opened, and continues while they are copied. The backup is what kill -9 would have left at that
    moment. The other commands refuse an interrupted backup; repeat this command to replace it.
    """
    from fencepost.tools import backup

    _show(backup.create(data_dir, target, max_pause_s=max_pause), form)


@command.command("verify")
@_BACKUP
@format_option
def verify(backup: Path, form: str) -> None:
    """Check a backup: the manifest's sizes and digests, and the logs as `log verify` does.

    That includes the checksum of each batch, the order of offsets, the sequence numbers in producer
    snapshots against the log, and what a broker started on the backup would truncate. Exit status 1
    if something is wrong.
    """
    from fencepost.tools import backup as backups

    summary = backups.read_summary(backup)
    rows: list[dict[str, object]] = [
        {"file": None, "problem": text} for text in backups.differences(backup)
    ]
    problems, lines, _ = check_directories([backup / backups.DATA], ())
    if summary.running:
        # The indexes of active segments are left out: recovery rebuilds them.
        problems = [
            problem for problem in problems if not backups.is_left_out(str(problem["file"]))
        ]
    rows += problems
    if form == "json":
        emit([{**_row(summary), "problems": [*rows, *lines]}], (), form)
    else:
        _show(summary, form)
        show_problems(rows, lines)
    if rows or lines:
        raise click.exceptions.Exit(EXIT_REFUSED)


@command.command("restore")
@_BACKUP
@_DATA_DIR
@format_option
def restore(backup: Path, data_dir: Path, form: str) -> None:
    """Copy the backup in DIR to a data directory, which must be new or empty.

    The digests are checked on the way; the data directory appears when it is complete. Start one
    broker on it only, and none on the original: both have the same identity.
    """
    from fencepost.tools import backup as backups

    _show(backups.restore(backup, data_dir), form)


def _row(summary: BackupSummary) -> dict[str, object]:
    return {**asdict(summary), "created": utc(summary.created_ms)}


def _show(summary: BackupSummary, form: str) -> None:
    emit([_row(summary)], COLUMNS, form)
