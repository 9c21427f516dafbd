"""``fencepost dump-log``: prints the files of a data directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

import click

from fencepost.cli.decoding import decoder_of_file, plain
from fencepost.cli.output import EXIT_REFUSED, emit, format_option
from fencepost.cli.printing import print_json_array, print_lines

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
"""Table columns by kind of row; a kind that is missing here shows all fields."""

TABLE_ROWS = 1_000
"""The maximum number of rows in one table. Further rows follow in new tables, because a file may
have millions of rows."""

TABLE_CHARACTERS = 1 << 20
"""The number of characters at which a table ends; the row that reaches it is the table's last."""


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

    fs = OsFileSystem()
    dumps: list[tuple[Path, Iterator[dict[str, object]]]] = []
    wrong = 0
    for path in files:
        directory, decoder = str(path.absolute().parent), decoder_of_file(path)
        try:
            rows = dump_file(
                fs, directory, path.name, verify=verify, records=records, decoder=decoder
            )
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        dumps.append((path, rows))

    def rows_of(path: Path, rows: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
        nonlocal wrong
        try:
            for row in rows:
                wrong += is_problem(row)
                yield {"file": str(path), **{name: plain(value) for name, value in row.items()}}
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error

    if form == "json":
        print_json_array(chain.from_iterable(rows_of(*dump) for dump in dumps))
    else:
        for path, rows in dumps:
            _show(path, rows_of(path, rows))
    if wrong:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _show(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Print the rows of one file, with a new table for each run of one kind."""
    print_lines(f"{path}:")
    for kind, group in runs(rows):
        columns = COLUMNS.get(kind) or [name for name in group[0] if name not in {"file", "kind"}]
        used = [name for name in columns if any(name in row for row in group)]
        emit(group, used, "table")


def runs(rows: Iterable[dict[str, object]]) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Yield runs of rows of one kind, each at most as long as a table."""
    for kind, run in groupby(rows, key=lambda row: str(row["kind"])):
        current: list[dict[str, object]] = []
        room = TABLE_CHARACTERS
        for row in run:
            current.append(row)
            room -= sum(len(value) for value in row.values() if isinstance(value, str))
            if room <= 0 or len(current) == TABLE_ROWS:
                yield kind, current
                current, room = [], TABLE_CHARACTERS
        if current:
            yield kind, current
