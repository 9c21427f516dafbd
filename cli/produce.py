"""``fencepost produce``: writes the lines of standard input to a topic."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from fencepost.cli.output import (
    EXIT_PARTIAL,
    EXIT_REFUSED,
    counted,
    ended_by_sigterm,
    shared_options,
)
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.cli.record_input import JsonLines, TextLines
    from fencepost.client.partitioner import Headers, Line
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.record_writer import RecordWriter

MAX_REPORTED_LINES = 20
"""The maximum number of lines whose errors are printed; the errors of further lines are only
counted."""


@click.command("produce")
@click.argument("topic")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="A line is a value, or a JSON object as `consume --format json` prints it.",
)
@click.option("--key", help="The key of every record.")
@click.option(
    "--key-separator",
    metavar="TEXT",
    help=r"The separator of key and value in a line; \t is a tab.",
)
@click.option("--null", metavar="TEXT", help="The text that makes a tombstone, or means no key.")
@click.option("--partition", type=int, help="The partition; else by key, else at random.")
@click.option(
    "--header",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header for every record; repeatable.",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@click.option("--transactional-id", help="Write everything as one transaction of this id.")
@shared_options
def command(
    session: ClusterSession,
    topic: str,
    form: str,
    key: str | None,
    key_separator: str | None,
    null: str | None,
    partition: int | None,
    pairs: tuple[str, ...],
    compression: str,
    transactional_id: str | None,
) -> None:
    """Write each line of standard input to TOPIC as one record, as soon as it arrives.

    An empty value with a key is a tombstone, unless --null names another text. JSON lines have
    key, value (null: a tombstone), headers, partition and timestamp; key_base64, value_base64 and
    headers_base64 hold bytes; a value that is not a string is written as JSON.

    With --transactional-id, read_committed readers see either all lines or none. Without it, a line
    that cannot be written is reported by its number, the others are written, and the exit status
    is 4.
    """
    from fencepost.client.record_writer import RecordWriter

    headers = tuple(
        (name, value.encode()) for name, _, value in (pair.partition("=") for pair in pairs)
    )
    means = _line_parser(form, key, key_separator, null, headers)
    indexes = list(session.topics([topic])[0].partitions)
    if partition is not None and partition not in indexes:
        raise click.ClickException(f"{topic} has no partition {partition}")
    writer = RecordWriter(session, topic, compression, transactional_id)
    overhead = sum(len(name.encode()) + len(value) + 10 for name, value in headers)
    overhead += len((key or "").encode())
    run = ProduceRun(
        writer, means, topic, indexes, partition, is_whole=transactional_id is not None
    )
    with ended_by_sigterm():
        try:
            run.write_all(overhead)
            writer.end(commit=True)
        except BaseException as error:
            writer.end(commit=False)
            if isinstance(error, KeyboardInterrupt) and transactional_id is None:
                run.print_written()
            raise
    run.report()


def _line_parser(
    form: str, key: str | None, separator: str | None, null: str | None, headers: Headers
) -> TextLines | JsonLines:
    """Return the parser of lines. Raises click.UsageError for contradicting options."""
    from fencepost.cli.record_format import unescape
    from fencepost.cli.record_input import JsonLines, TextLines

    given = {"--key": key, "--key-separator": separator, "--null": null}
    if form == "json":
        for option, value in given.items():
            if value is not None:
                raise click.UsageError(
                    f"{option} applies to text lines: a JSON line has its own field"
                )
        return JsonLines(headers)
    if key is not None and separator is not None:
        raise click.UsageError("give either --key or --key-separator")
    if separator == "":
        raise click.UsageError("--key-separator must not be empty")
    key, separator, null = (
        None if text is None else unescape(text, option) for option, text in given.items()
    )
    key_bytes, separator_bytes, null_bytes = (
        None if text is None else text.encode() for text in (key, separator, null)
    )
    return TextLines(separator_bytes, key_bytes, null_bytes, headers)


class ProduceRun:
    """Writes the lines of standard input, and counts the refused ones."""

    def __init__(
        self,
        writer: RecordWriter,
        means: TextLines | JsonLines,
        topic: str,
        indexes: list[int],
        partition: int | None,
        *,
        is_whole: bool,
    ) -> None:
        self._writer = writer
        self._means = means
        self._topic = topic
        self._indexes = indexes
        self._partition = partition
        self._is_whole = is_whole
        self._refused = 0

    def write_all(self, overhead: int) -> None:
        """Write all lines; stop at an error that does not concern single records."""
        from fencepost.cli.record_input import chunks
        from fencepost.client.partitioner import placed
        from fencepost.protocol.errors import WireError

        for chunk in chunks(sys.stdin.buffer, overhead):
            lines = [line for number, raw in chunk if (line := self._read(number, raw)) is not None]
            try:
                self._writer.write(placed(lines, self._partition, self._indexes))
            except WireError as error:
                if self._is_whole or not self._writer.written:
                    raise
                print_lines(
                    f"Error: records from line {chunk[0][0]} on may not be written: {error}",
                    err=True,
                )
                self._refused += 1
                return
            finally:
                for number, why in self._writer.refused:
                    self._refuse_line(number, why)
                self._writer.refused.clear()

    def _read(self, number: int, raw: bytes) -> Line | None:
        from fencepost.cli.record_input import BadLineError

        try:
            line = self._means.record(number, raw)
            if line.partition is not None and self._partition is None:
                self._check_partition(line.partition)
        except BadLineError as error:
            if self._is_whole:
                raise click.ClickException(f"line {number} {error}: nothing is written") from error
            self._refuse_line(number, str(error))
            return None
        return line

    def _check_partition(self, index: int) -> None:
        from fencepost.cli.record_input import BadLineError

        if index not in self._indexes:
            raise BadLineError(f"names partition {index}, which {self._topic} does not have")

    def _refuse_line(self, number: int, why: str) -> None:
        self._refused += 1
        if self._refused <= MAX_REPORTED_LINES:
            print_lines(f"line {number} {why}", err=True)

    def print_written(self) -> None:
        """Print how many records were written."""
        print_lines(f"{counted(self._writer.written, 'record')} acknowledged", err=True)

    def report(self) -> None:
        """Print the result; the exit status says whether all lines were written."""
        if self._refused > MAX_REPORTED_LINES:
            print_lines(f"and {counted(self._refused - MAX_REPORTED_LINES, 'line')} more", err=True)
        self.print_written()
        if self._refused:
            raise click.exceptions.Exit(EXIT_PARTIAL if self._writer.written else EXIT_REFUSED)
