"""``fencepost history export``: sends the history's entries to webhooks or OpenTelemetry.

The command is a member of a consumer group. It commits an entry's offset after the receiver has
accepted the entry, so each one is delivered at least once; a receiver that must not act twice
compares ids.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from fencepost.cli.history_sink import DeliveryError, Exported, Sink
from fencepost.cli.output import ended_by_sigterm, shared_options
from fencepost.cli.printing import print_json, print_lines
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.cli.group_member import GroupConsumer
    from fencepost.client.queries.reader import Reader
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.queries.where import OffsetPosition
    from fencepost.coordinator.history.entries import Entry
    from fencepost.logcore.batch import LogRecord

FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
"""The pauses between attempts double from the first to the second value."""

COMMIT_INTERVAL_S: Final = 1.0
IDLE_S: Final = 0.5
"""The pause before the next check if the topic is missing or the member has no partitions."""

PARTITIONS_INTERVAL_S: Final = 30.0
"""The interval of checks for new partitions: each new broker of a cluster adds one."""

LOOK_BACK: Final = 1_000
"""The number of entries before a committed offset that are read again, because a rebalance may have
begun in one of them."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The entries to deliver; recorded requests only if a scope or a kind names them."""

    scopes: frozenset[str]
    kinds: frozenset[str]

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is selected."""
        from fencepost.coordinator.history.entries import REQUEST_SCOPES

        if self.kinds and entry.what not in self.kinds:
            return False
        if self.scopes:
            return entry.scope in self.scopes
        return bool(self.kinds) or entry.scope not in REQUEST_SCOPES


@click.command("schema")
def schema_command() -> None:
    """Print the JSON schema of the entries in the topic __fencepost_history."""
    from fencepost.cli.history_schema import schema

    print_json(schema())


@click.command("export")
@click.option("--webhook", metavar="URL", help="Send each entry in a POST request, as JSON.")
@click.option(
    "--otlp",
    metavar="URL",
    help="Send logs and spans to this OTLP/HTTP endpoint, as http://127.0.0.1:4318.",
)
@click.option(
    "--kinds", multiple=True, metavar="KIND,…", help="Only entries of these kinds; repeatable."
)
@click.option(
    "--scopes",
    multiple=True,
    metavar="SCOPE,…",
    help="Only entries of these scopes: group, transaction, partition, cluster, client,"
    " group-request, transaction-request; by default all, but recorded requests only with --kinds.",
)
@click.option(
    "--group", "-g", help="The consumer group; by default history-webhook or history-otlp."
)
@click.option(
    "--from",
    "begin",
    default="earliest",
    show_default=True,
    metavar="WHERE",
    help="Where a group without committed offsets begins: earliest, latest, or a time.",
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new entries, until Ctrl-C.")
@click.option(
    "--secret-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the key by which webhooks are signed (HMAC-SHA256).",
)
@click.option(
    "--retry-for",
    type=click.FloatRange(min=0),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Repeat a failed delivery for this long, then exit with status 1.",
)
@shared_options
def export(
    session: ClusterSession,
    webhook: str | None,
    otlp: str | None,
    kinds: tuple[str, ...],
    scopes: tuple[str, ...],
    group: str | None,
    begin: str,
    secret_file: Path | None,
    retry_for: float,
    *,
    follow: bool,
) -> None:
    """Send the history's entries to a webhook, or as logs and spans to OpenTelemetry.

    The command reads as a member of a consumer group, and commits an offset once the receiver has
    accepted the entry: each one is delivered at least once, also after kill -9. Failed deliveries
    are repeated with growing pauses for --retry-for; the entry is not skipped.

    Webhooks follow the Standard Webhooks specification: webhook-id is the same in each attempt,
    webhook-signature needs --secret-file. OpenTelemetry needs the extra `otel`; spans are made of
    ended transactions (commits need fencepost.history.commits) and of rebalances.
    """
    if (webhook is None) == (otlp is None):
        raise click.UsageError("give either --webhook or --otlp")
    if secret_file is not None and webhook is None:
        raise click.UsageError("--secret-file needs --webhook")
    selection = _selection(scopes, kinds)
    where = _begin(begin)
    cluster_id = session.client.metadata(refresh=True).cluster_id or ""
    if webhook is not None:
        from fencepost.cli.history_webhook import WebhookSink

        sink: Sink = WebhookSink(webhook, cluster_id, secret_file)
        name = "history-webhook"
    else:
        from fencepost.cli.history_otlp import OtlpSink

        sink, name = OtlpSink(str(otlp), cluster_id), "history-otlp"
    work = Export(session, group or name, sink, selection, where, retry_for, follow=follow)
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        work.run()
    print_lines(f"{work.group}: {work.delivered} entries delivered", err=True)


def _selection(scopes: Sequence[str], kinds: Sequence[str]) -> Selection:
    from fencepost.cli.history_schema import KINDS

    kinds_and_scopes = (list(KINDS), [kind for kinds in KINDS.values() for kind in kinds])
    return Selection(
        _names("--scopes", scopes, kinds_and_scopes[0]),
        _names("--kinds", kinds, kinds_and_scopes[1]),
    )


def _names(option: str, given: Sequence[str], allowed: Sequence[str]) -> frozenset[str]:
    from fencepost.coordinator.config.key import nearest

    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            hint = nearest(name, allowed)
            raise click.BadParameter(f"{name!r} is not known{hint}", param_hint=option)
    return frozenset(names)


def _begin(text: str) -> OffsetPosition:
    from fencepost.client.queries.times import TimeError, milliseconds
    from fencepost.client.queries.where import PLACES, OffsetPosition

    try:
        return PLACES.get(text) or OffsetPosition(time=milliseconds(text))
    except TimeError as error:
        raise click.BadParameter(str(error), param_hint="--from") from error


class Export:
    """One run of the command."""

    def __init__(
        self,
        session: ClusterSession,
        group: str,
        sink: Sink,
        selection: Selection,
        begin: OffsetPosition,
        retry_for_s: float,
        *,
        follow: bool,
    ) -> None:
        self.group = group
        self.delivered = 0
        """Entries that the receiver has accepted in this run."""
        self._session, self._sink, self._selection = session, sink, selection
        self._begin, self._retry_for_s, self._follow = begin, retry_for_s, follow

    def run(self) -> None:
        """Deliver entries up to the present end, or without end if the command follows.

        Raises click.ClickException if the receiver accepts none for the time limit.
        """
        from fencepost.cli.group_member import GroupConsumer
        from fencepost.coordinator.metadata.names import HISTORY_TOPIC

        if not self._wait_for_topic(HISTORY_TOPIC):
            print_lines(f"{self.group}: the cluster has no history yet", err=True)
            return
        member = GroupConsumer(self._session, self.group, HISTORY_TOPIC)
        try:
            while not self._read_share(member, HISTORY_TOPIC):
                pass
        finally:
            member.leave()

    def _wait_for_topic(self, topic: str) -> bool:
        while topic not in self._session.client.metadata(refresh=True).topics:
            if not self._follow:
                return False
            time.sleep(IDLE_S)
        return True

    def _read_share(self, member: GroupConsumer, topic: str) -> bool:
        """Read until the next rebalance, and return False; return True to end the command."""
        share = member.join()
        if not share:
            if not self._follow:
                print_lines(f"{self.group}: other members have all partitions", err=True)
                return True
            while member.is_settled():
                time.sleep(IDLE_S)
            return False
        self._sink.reset()
        reader, committed = self._reader(topic, share)
        checked_s, count = time.monotonic(), len(self._session.topics([topic])[0].partitions)
        for index, records in reader.rounds():
            if not member.is_settled():
                return False
            if self._follow and time.monotonic() - checked_s > PARTITIONS_INTERVAL_S:
                checked_s = time.monotonic()
                if len(self._session.topics([topic])[0].partitions) != count:
                    return False  # rejoining assigns the new partitions, too
            delivery = Delivery(self, member, index, committed.get(index, 0))
            if not delivery.deliver(records, reader.positions[index]):
                return False
        return True

    def _reader(self, topic: str, share: Sequence[int]) -> tuple[Reader, dict[int, int]]:
        """Return a reader, and the committed offset of each partition.

        Entries before the committed offset are delivered already.
        """
        from fencepost.client.queries.reader import Reader

        reader = Reader(self._session, topic, committed=False)
        reader.seek(share, self._begin, follow=self._follow)
        offsets = self._session.committed(self.group)
        committed = {
            index: offsets[topic, index].offset
            for index in share
            if (topic, index) in offsets and offsets[topic, index].offset >= 0
        }
        for index, offset in committed.items():
            reader.move(index, max(0, offset - LOOK_BACK))
        return reader, committed

    def attempt(self, send: Callable[[], None], is_settled: Callable[[], bool]) -> bool:
        """Call ``send`` until it succeeds; return False if the member must rejoin its group.

        Raises click.ClickException after the time limit, and for an error that is final.
        """
        deadline_s, pause_s = time.monotonic() + self._retry_for_s, FIRST_PAUSE_S
        while True:
            try:
                send()
            except DeliveryError as error:
                until_s = time.monotonic() + (
                    pause_s if error.pause_s is None else min(error.pause_s, MAX_PAUSE_S)
                )
                if error.is_final:
                    raise click.ClickException(f"{error}; the entry stays undelivered") from error
                if until_s > deadline_s:
                    limit = f"--retry-for is {self._retry_for_s:g} s"
                    raise click.ClickException(
                        f"{error}; gave up ({limit}), and the next run begins with this entry"
                    ) from error
                print_lines(f"{self.group}: {error}; trying again", err=True)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                while time.monotonic() < until_s:
                    time.sleep(min(IDLE_S, max(0.0, until_s - time.monotonic())))
                    if not is_settled():
                        return False
                continue
            return True

    @property
    def sink(self) -> Sink:
        """The receiver."""
        return self._sink

    def selected(self, entry: Entry) -> bool:
        """Return whether an entry is delivered."""
        return self._selection.has(entry)


class Delivery:
    """Delivers the records of one partition, and commits the offsets."""

    def __init__(self, work: Export, member: GroupConsumer, index: int, committed: int) -> None:
        self._work, self._member = work, member
        self._index, self._committed = index, committed
        self._commit_due_s = time.monotonic() + COMMIT_INTERVAL_S

    def deliver(self, records: Sequence[LogRecord], position: int) -> bool:
        """Deliver records, and commit ``position``; return False if the member must rejoin."""
        work = self._work
        for batch in _batches(self._new(records), work.sink.max_batch):
            if not self._member.is_settled():
                return False
            if not work.attempt(work.sink.prepare(batch), self._member.is_settled):
                return False
            work.delivered += len(batch)
            if time.monotonic() >= self._commit_due_s:
                self._commit_due_s = time.monotonic() + COMMIT_INTERVAL_S
                if not self._member.commit({self._index: batch[-1].offset + 1}):
                    return False
        is_new = bool(records) and position > self._committed
        return not is_new or self._member.commit({self._index: position})

    def _new(self, records: Sequence[LogRecord]) -> Iterator[Exported]:
        from fencepost.coordinator.history.entries import decode_value

        for record in records:
            try:
                entry = None if record.value is None else decode_value(record.value)
            except ValueError as error:  # on Apache Kafka, clients can write to the topic
                print_lines(f"skipped offset {record.offset} of {self._index}: {error}", err=True)
                continue
            if entry is None or not self._work.selected(entry):
                continue
            exported = Exported(self._index, record.offset, entry)
            if record.offset < self._committed:
                self._work.sink.observe(exported)
            else:
                yield exported


def _batches(entries: Iterator[Exported], size: int) -> Iterator[list[Exported]]:
    batch: list[Exported] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
