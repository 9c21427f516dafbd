"""``fencepost dump-log``: what is in the files of a data directory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import click

from fencepost.coordinator.cli.decoding import decoder_of_file, plain
from fencepost.coordinator.cli.output import EXIT_REFUSED, emit, format_option
from fencepost.coordinator.cli.printing import say

COLUMNS = {
    "batch": (
        "position",
        "base_offset",
        "last_offset",
        "records",
        "size",
        "magic",
        "codec",
        "max_timestamp_ms",
        "leader_epoch",
        "producer_id",
        "producer_epoch",
        "base_sequence",
        "transactional",
        "control",
        "delete_horizon_ms",
    ),
    "record": ("offset", "timestamp_ms", "key", "value", "headers", "control", "decoded"),
    "problem": ("problem", "position", "offset"),
}
"""Columns of a table, by the kind of its rows; a kind that is not listed shows everything."""


@click.command("dump-log")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--verify", is_flag=True, help="Check checksums, the order of offsets, and indexes.")
@click.option("--records", is_flag=True, help="Show the records of each batch.")
@format_option
def command(files: tuple[Path, ...], form: str, *, verify: bool, records: bool) -> None:
    """Show logs, indexes, snapshots and checkpoints; exit 1 if something in them is wrong.

    Records of internal topics are shown in clear.
    """
    from fencepost.logcore.dump import dump_file, is_problem
    from fencepost.logcore.fs import OsFileSystem

    fs, wrong = OsFileSystem(), False
    everything: list[dict[str, object]] = []
    for path in files:
        directory = path.absolute().parent
        try:
            rows = [
                {"file": str(path), **{name: plain(value) for name, value in row.items()}}
                for row in dump_file(
                    fs,
                    str(directory),
                    path.name,
                    verify=verify,
                    records=records,
                    decoder=decoder_of_file(path),
                )
            ]
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        wrong |= any(is_problem(row) for row in rows)
        if form == "json":
            everything += rows
        else:
            _show(path, rows)
    if form == "json":
        emit(everything, (), form)
    if wrong:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _show(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Print the rows of one file, a table for each run of one kind."""
    say(f"{path}:")
    for kind, run in groupby(rows, key=lambda row: str(row["kind"])):
        some = list(run)
        columns = COLUMNS.get(kind) or [name for name in some[0] if name not in {"file", "kind"}]
        used = [name for name in columns if any(name in row for row in some)]
        emit(some, used, "table")
