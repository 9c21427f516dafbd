"""``fencepost produce``: standard input to a topic, a record a line."""

from __future__ import annotations

import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from fencepost.coordinator.cli.output import shared_options

if TYPE_CHECKING:
    from fencepost.coordinator.cli.queries.session import Session

BATCH_LINES = 2_000
"""Lines that are sent together."""

MAX_LINE_BYTES = 1_000_000
"""A longer line is refused: with its header it would not fit Kafka's default max.message.bytes."""


@click.command("produce")
@click.argument("topic")
@click.option(
    "--key-separator", metavar="TEXT", help="What stands between key and value of a line."
)
@click.option("--partition", type=int, help="Write there; else by key, else round robin.")
@click.option("--header", "pairs", multiple=True, metavar="NAME=VALUE", help="For every record.")
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@click.option("--transactional-id", help="Write everything as one transaction of this id.")
@shared_options
def command(
    session: Session,
    topic: str,
    key_separator: str | None,
    partition: int | None,
    pairs: tuple[str, ...],
    compression: str,
    transactional_id: str | None,
) -> None:
    """Write each line of standard input to TOPIC as one record; an empty value is a tombstone.

    With --transactional-id either all lines become visible to read_committed readers, or none.
    """
    headers = tuple(
        (name, value.encode()) for name, _, value in (pair.partition("=") for pair in pairs)
    )
    indexes = list(session.topics([topic])[0].partitions)
    if partition is not None and partition not in indexes:
        raise click.ClickException(f"{topic} has no partition {partition}")
    writer = Writer(session, topic, compression, transactional_id)
    separator = key_separator.encode() if key_separator is not None else None
    lines = _lines(sys.stdin.buffer, separator)
    turns = itertools.cycle(indexes)
    try:
        while chunk := list(itertools.islice(lines, BATCH_LINES)):
            writer.write(_place(chunk, partition, len(indexes), turns), headers)
        writer.end(commit=True)
    except BaseException:
        writer.end(commit=False)
        raise
    click.echo(f"{writer.records} records acknowledged", err=True)


def _lines(file: BinaryIO, separator: bytes | None) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Split each line into key and value."""
    for number, raw in enumerate(file, 1):
        line = raw.rstrip(b"\r\n")
        if len(line) > MAX_LINE_BYTES:
            raise click.ClickException(f"line {number} has more than {MAX_LINE_BYTES} bytes")
        if separator is None:
            yield None, line
            continue
        key, found, value = line.partition(separator)
        if not found:
            raise click.ClickException(f"line {number} has no {separator.decode()!r}")
        yield key, value or None


def _place(
    lines: Iterable[tuple[bytes | None, bytes | None]],
    partition: int | None,
    partitions: int,
    turns: Iterator[int],
) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    """Choose the partition of each line."""
    from fencepost.coordinator.cli.partitioner import partition_for

    placed: dict[int, list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
    unkeyed = next(turns)
    for key, value in lines:
        if partition is not None:
            target = partition
        else:
            target = unkeyed if key is None else partition_for(key, partitions)
        placed[target].append((key, value))
    return placed


class Writer:
    """Sends batches with an idempotent producer, which is transactional if it has an id."""

    def __init__(
        self, session: Session, topic: str, compression: str, transactional_id: str | None
    ) -> None:
        from fencepost.logcore.compression import Codec

        self.records = 0
        self._session = session
        self._topic = topic
        self._codec = Codec[compression.upper()]
        self._transactional_id = transactional_id
        self._sequences: dict[int, int] = defaultdict(int)
        self._added: set[int] = set()
        answer = self._coordinate(
            "InitProducerId", 2, transactional_id=transactional_id, transaction_timeout_ms=60_000
        )
        self._claim = {
            "transactional_id": transactional_id,
            "producer_id": answer.producer_id,
            "producer_epoch": answer.producer_epoch,
        }

    def _coordinate(self, api: str, version: int, **fields: Any) -> Any:
        """Ask the transaction's coordinator; what clients of transaction version 1 send.

        The client repeats CONCURRENT_TRANSACTIONS until the last transaction has ended.
        """
        return self._session.client.call(
            api, version, to_transaction=self._transactional_id, **fields
        )

    def write(
        self,
        placed: dict[int, list[tuple[bytes | None, bytes | None]]],
        headers: tuple[tuple[str, bytes | None], ...],
    ) -> None:
        """Send one batch per partition and wait until all are acknowledged."""
        from fencepost.logcore.batch import LogRecord, encode_batch

        if self._transactional_id is not None:
            self._add(set(placed) - self._added)
        now_ms = int(time.time() * 1000)
        for index, lines in placed.items():
            records = [
                LogRecord(at, now_ms, key, value, headers) for at, (key, value) in enumerate(lines)
            ]
            batch = encode_batch(
                records,
                base_offset=0,
                codec=self._codec,
                producer_id=self._claim["producer_id"],
                producer_epoch=self._claim["producer_epoch"],
                base_sequence=self._sequences[index],
                transactional=self._transactional_id is not None,
            )
            self._send(index, batch)
            self._sequences[index] += len(records)
            self.records += len(records)

    def _send(self, index: int, batch: bytes) -> None:
        from fencepost.coordinator.cli.queries.session import check
        from fencepost.coordinator.wire.client.requests import produce

        # From version 12 on a transactional Produce adds its partition by itself, from 13 on
        # topics have ids; this writer adds partitions first, as older clients do.
        answer = self._session.client.call(
            "Produce",
            9,
            to_leader=(self._topic, index),
            entity=partial(
                produce,
                batches={(self._topic, index): batch},
                timeout_ms=self._session.timeout_ms,
                transactional_id=self._transactional_id,
            ),
        )
        row = answer.responses[0].partition_responses[0]
        check(
            row.error_code, "Produce", f"{self._topic}-{index}", getattr(row, "error_message", None)
        )

    def _add(self, indexes: set[int]) -> None:
        """Make ``indexes`` part of the transaction before the first batch goes there."""
        from fencepost.coordinator.cli.queries.session import check
        from fencepost.coordinator.wire.client.requests import add_partitions, added

        if not indexes:
            return
        places = [(self._topic, index) for index in indexes]
        answer = self._coordinate(
            "AddPartitionsToTxn",
            2,
            entity=partial(add_partitions, partitions=places, **self._claim),
        )
        for code in added(answer):
            check(code, "AddPartitionsToTxn", self._topic)
        self._added |= indexes

    def end(self, *, commit: bool) -> None:
        """Commit or abort the transaction, if there is one."""
        if self._transactional_id is None or not self._added:
            return
        self._added.clear()
        self._coordinate("EndTxn", 3, **self._claim, committed=commit)
