"""``fencepost dump-log``: what is in the files of a data directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.coordinator.cli.output import EXIT_REFUSED, emit, format_option

if TYPE_CHECKING:
    from fencepost.logcore.batch import LogRecord

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
@click.option("--verify", is_flag=True, help="Check sums, orders, and indexes against their log.")
@click.option("--records", is_flag=True, help="Open the batches of a log.")
@format_option
def command(files: tuple[Path, ...], form: str, *, verify: bool, records: bool) -> None:
    """Show logs, indexes, snapshots and checkpoints; exit 1 if something in them is wrong.

    Records of __consumer_offsets, __transaction_state and __cluster_metadata are shown in clear.
    """
    from fencepost.logcore.dump import dump_file, is_problem
    from fencepost.logcore.fs import OsFileSystem

    fs, wrong = OsFileSystem(), False
    everything: list[dict[str, object]] = []
    for path in files:
        directory = path.absolute().parent
        try:
            rows = [
                {"file": str(path), **{name: _plain(value) for name, value in row.items()}}
                for row in dump_file(
                    fs,
                    str(directory),
                    path.name,
                    verify=verify,
                    records=records,
                    decoder=decoder_of(directory.name),
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
    click.echo(f"{path}:")
    for kind, run in groupby(rows, key=lambda row: str(row["kind"])):
        some = list(run)
        columns = COLUMNS.get(kind) or [name for name in some[0] if name not in {"file", "kind"}]
        used = [name for name in columns if any(name in row for row in some)]
        emit(some, used, "table")


def decoder_of(
    directory: str,
) -> Callable[[LogRecord], Mapping[str, object] | None] | None:
    """Find who can read the records of a partition, by the name of its directory."""
    return {
        "__consumer_offsets": _decode_group,
        "__transaction_state": _decode_txn,
        "__cluster_metadata": _decode_metadata,
    }.get(directory.split(".", 1)[0].rpartition("-")[0])


def _decode_group(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.groups.records import decode
    from fencepost.logcore.machine import Record

    found = decode(Record(record.key or b"", record.value))
    if found is None:
        return None
    key, value = found
    row = _key_of_group(key)
    row["tombstone" if value is None else "value"] = True if value is None else _fields(value)
    return row


def _key_of_group(key: object) -> dict[str, object]:
    from fencepost.groups.consumer_records import PER_GROUP, ConsumerKey
    from fencepost.groups.consumer_records import ConsumerRecordType as Kind

    match key:
        case ConsumerKey(Kind.REGULAR_EXPRESSION, group_id, regex):
            return {"type": "RegularExpression", "group_id": group_id, "regex": regex}
        case ConsumerKey(kind, group_id) if kind in PER_GROUP:
            return {"type": "ConsumerGroup", "kind": kind, "group_id": group_id}
        case ConsumerKey(kind, group_id, member_id):
            told = {"type": "ConsumerMember", "kind": kind, "group_id": group_id}
            return {**told, "member_id": member_id}
    return {"type": type(key).__name__.removesuffix("Key"), **_fields(key)}


def _decode_txn(record: LogRecord) -> Mapping[str, object] | None:
    from fencepost.logcore.machine import Record
    from fencepost.txn.records import decode

    found = decode(Record(record.key or b"", record.value))
    if found is None:
        return None
    row: dict[str, object] = {"transactional_id": found.transactional_id}
    if found.txn is None:
        row["tombstone"] = True
    else:
        row["value"] = _fields(found.txn) | {"state": found.txn.state.name}
    return row


def _decode_metadata(record: LogRecord) -> Mapping[str, object] | None:
    """Ours has a key in each record; Apache Kafka's has none, and is its own tools' to read."""
    from fencepost.coordinator.metadata.records import MetadataError, decode
    from fencepost.logcore.errors import InvalidRecordError
    from fencepost.logcore.machine import Record

    if record.key is None:
        return None
    try:
        kind, name, value = decode(Record(record.key, record.value))
    except MetadataError as error:
        raise InvalidRecordError(str(error)) from error
    row: dict[str, object] = {"type": kind, "name": name}
    row["tombstone" if value is None else "value"] = True if value is None else value
    return row


def _fields(value: object) -> dict[str, object]:
    """The fields of a dataclass instance by name."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        named: dict[str, object] = value._asdict()
        return named
    if not dataclasses.is_dataclass(value):
        return {"value": value}
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def _plain(value: object) -> object:
    """A value as JSON knows it; bytes are text where they can be, hexadecimal digits where not."""
    if isinstance(value, bytes):
        text = value.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else f"0x{value.hex()}"
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(_fields(value))
    return value
