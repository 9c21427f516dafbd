"""``fencepost consume``: records of a topic to standard output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from fencepost.coordinator.cli.output import shared_options, utc

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session
    from fencepost.logcore.batch import LogRecord


@click.command("consume")
@click.argument("topic")
@click.option("--partition", "-p", "wanted", multiple=True, type=int, help="Repeatable; else all.")
@click.option(
    "--from",
    "begin",
    default="earliest",
    show_default=True,
    metavar="WHERE",
    help="earliest, latest, an offset, or a time as 2013-01-31T12:00:00+00:00.",
)
@click.option(
    "--isolation",
    type=click.Choice(["read_uncommitted", "read_committed"]),
    default="read_committed",
    show_default=True,
    help="read_committed hides aborted and open transactions.",
)
@click.option("--limit", "-n", type=click.IntRange(min=1), help="Stop after so many records.")
@click.option("--follow", "-f", is_flag=True, help="Go on at the end, until Ctrl-C.")
@click.option(
    "--format",
    "form",
    default="text",
    show_default=True,
    type=click.Choice(["text", "table", "json"]),
    help="The values, a line each with all fields, or JSON lines.",
)
@shared_options
def command(
    session: Session,
    topic: str,
    wanted: tuple[int, ...],
    begin: str,
    isolation: str,
    limit: int | None,
    form: str,
    *,
    follow: bool,
) -> None:
    """Print the records of TOPIC from --from to its end."""
    from fencepost.coordinator.cli.queries.reader import Reader

    reader = Reader(session, topic, committed=isolation == "read_committed")
    reader.seek(wanted, begin)
    if form == "table":
        click.echo(f"{'PARTITION':>9}  {'OFFSET':>10}  {'TIMESTAMP':<24}  KEY  VALUE")
    try:
        for count, (index, record) in enumerate(reader.records(follow=follow), 1):
            click.echo(_line(topic, index, record, form))
            if count == limit:
                break
    except KeyboardInterrupt:
        return


def _line(topic: str, index: int, record: LogRecord, form: str) -> str:
    if form == "text":
        return _text(record.value)
    stamp = utc(record.timestamp_ms)
    if form == "table":
        key, value = _text(record.key), _text(record.value)
        return f"{index:>9}  {record.offset:>10}  {stamp:<24}  {key}  {value}"
    return json.dumps(
        {
            "topic": topic,
            "partition": index,
            "offset": record.offset,
            "timestamp": stamp,
            "key": _plain(record.key),
            "value": _plain(record.value),
            "headers": [[name, _plain(value)] for name, value in record.headers],
        },
        ensure_ascii=False,
    )


def _plain(data: bytes | None) -> str | None:
    return None if data is None else data.decode("utf-8", "backslashreplace")


def _text(data: bytes | None) -> str:
    return "null" if data is None else data.decode("utf-8", "backslashreplace")
