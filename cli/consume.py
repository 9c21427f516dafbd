"""``fencepost consume``: prints the records of a topic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.output import counted, ended_by_sigterm, moment, shared_options, utc
from fencepost.cli.printing import is_terminal, print_lines, write_bytes
from fencepost.cli.record_format import (
    FIELDS,
    NAMED,
    NULL,
    Formatter,
    formatter,
    header,
    unescape,
)
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.cli.group_member import GroupConsumer
    from fencepost.client.queries.held_back import HeldBack
    from fencepost.client.queries.reader import Reader
    from fencepost.client.queries.session import ClusterSession, OffsetAndMetadata
    from fencepost.client.queries.where import OffsetPosition
    from fencepost.client.requests import Partition

HINT_AFTER_S = 2.0
"""The time in seconds after which an open transaction that holds back the consumer is reported."""

IDLE_S = 0.2
"""The interval at which a member without partitions checks its group."""


@click.command("consume")
@click.argument("topic")
@click.option(
    "--partition", "-p", "wanted", multiple=True, type=int, help="Only this partition; repeatable."
)
@click.option(
    "--from",
    "begin",
    default="earliest",
    show_default=True,
    metavar="WHERE",
    help="earliest, latest, an offset, P=OFFSET,… by partition, -10 for the last ten of each"
    " partition, or a time: 02:13, -10m, yesterday, 2026-01-31T12:00 (UTC), @MS.",
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="The same as --from -N.")
@click.option(
    "--until",
    default="end",
    metavar="WHERE",
    help="Stop before this offset, P=OFFSET,… or time; else at the current end.",
)
@click.option(
    "--isolation",
    type=click.Choice(["read_uncommitted", "read_committed"]),
    default="read_committed",
    show_default=True,
    help="read_committed hides aborted and open transactions.",
)
@click.option(
    "--group",
    "-g",
    help=("Read as a member of this group, from its committed offsets, and commit."),
)
@click.option("--key", "keys", multiple=True, help="Only records with this key; repeatable.")
@click.option(
    "--limit", "-n", type=click.IntRange(min=1), help="Stop after this number of records."
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more at the end, until Ctrl-C.")
@click.option(
    "--format",
    "form",
    default="text",
    show_default=True,
    metavar="|".join((*NAMED, "TEMPLATE")),
    help="The values, a line each with all fields, JSON lines, the values' bytes, or a template of"
    rf" {' '.join(f'%{letter}' for letter in FIELDS)} and \n \t \xNN.",
)
@click.option(
    "--null", default=NULL, show_default=True, help="The text for a missing key or value."
)
@click.option("--no-decode", is_flag=True, help="Do not decode the records of internal topics.")
@shared_options
def command(
    session: ClusterSession,
    topic: str,
    wanted: tuple[int, ...],
    group: str | None,
    form: str,
    null: str,
    *,
    no_decode: bool,
    **options: Any,
) -> None:
    r"""Print the records of TOPIC from --from to --until, or to its end.

    A template's fields are kcat's: %t topic, %p partition, %o offset, %k key, %s value, %h headers,
    %T timestamp in ms (%D: ISO 8601), %K and %S bytes of key and value (-1 for none). End it with
    \n to print each record on its own line. A tombstone is printed as <null>, and the text <null>
    as \<null>. The records of internal topics are decoded. On a terminal control characters are
    escaped; a pipe or a file gets them unchanged, except as table or json.

    Standard error reports records that an open transaction holds back, the commits of --group, and
    offsets or times that the topic does not have.
    """
    if group is not None and (wanted or options["tail"] is not None):
        raise click.UsageError("a group determines the partitions and where to begin")
    everything = {"begin": "earliest", "tail": None, "until": "end", "keys": ()}
    is_whole = group is None and not wanted and everything.items() <= options.items()
    begin, until = _parse_range(options.pop("begin"), options.pop("tail"), options.pop("until"))
    line = formatter(topic, form, null=null, decode=not no_decode, terminal=is_terminal())
    keys = frozenset(unescape(key, "--key").encode() for key in options.pop("keys"))
    limit = options.pop("limit")
    out = RecordPrinter(line, keys, limit)
    work = Consumption(session, topic, out, begin, until, **options)
    above = header(form)
    if above is not None:
        print_lines(above)
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
        if group is None:
            work.read(wanted)
        else:
            work.read_as_member(group)
        if is_whole and not out.count and not work.has_hinted:
            print_lines(f"{topic}: no records", err=True)


def _parse_range(begin: str, tail: int | None, until: str) -> tuple[OffsetPosition, OffsetPosition]:
    from fencepost.client.queries.times import TimeError
    from fencepost.client.queries.where import OffsetPosition, parse_position

    if tail is not None and begin != "earliest":
        raise click.UsageError("give either --from or --tail")
    positions = []
    for option, text in (("--from", begin), ("--until", until)):
        try:
            positions.append(parse_position(text))
        except TimeError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    if positions[1].last is not None:
        raise click.BadParameter("it must be an offset, a time or the end", param_hint="--until")
    return positions[0] if tail is None else OffsetPosition(last=tail), positions[1]


@dataclass(slots=True)
class RecordPrinter:
    """Prints records, up to the limit."""

    line: Formatter
    keys: frozenset[bytes]
    limit: int | None
    count: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.count >= self.limit

    def show(self, index: int, records: list[Any], position: int) -> int:
        """Print records up to the limit; return the next offset.

        This is ``position`` unless the limit is reached.
        """
        lines = []
        for record in records:
            if self.keys and record.key not in self.keys:
                continue
            lines.append(self.line(index, record))
            self.count += 1
            if self.is_full:
                position = record.offset + 1
                break
        if lines:
            write_bytes(b"".join(lines))
        return position


@dataclass(slots=True)
class Consumption:
    """One run of the command."""

    session: ClusterSession
    topic: str
    out: RecordPrinter
    begin: OffsetPosition
    until: OffsetPosition
    isolation: str
    follow: bool
    waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By partition: the last stable offset at which the consumer waits, and the start of the wait.
    """
    has_hinted: bool = False
    """Whether an open transaction has been reported."""

    def read(self, indexes: Collection[int]) -> None:
        """Read partitions without a group."""
        reader = self._reader(indexes)
        for index, records in reader.rounds():
            self.out.show(index, records, reader.positions[index])
            if self.out.is_full:
                return
            if not records:
                self._hint_late(reader, index)
        self._hint_at_end(reader)

    def read_as_member(self, group: str) -> None:
        """Read the assigned partitions from their committed offsets, and commit the progress."""
        from fencepost.cli.group_member import GroupConsumer

        member = GroupConsumer(self.session, group, self.topic)
        self.session.topics([self.topic])
        try:
            while not self._read_share(member):
                pass
        finally:
            member.leave()

    def _read_share(self, member: GroupConsumer) -> bool:
        """Read until the next rebalance, and return False; return True to end the command."""
        share = member.join()
        if not share:
            return self._is_idle(member)
        reader = self._reader(share, self.session.committed(member.group))
        committed = reader.positions
        for index, records in reader.rounds():
            if not member.is_settled():
                return False
            position = self.out.show(index, records, reader.positions[index])
            if reader.has_more and not self.out.is_full:
                continue
            if position != committed[index]:
                committed[index] = position
                if not member.commit({index: position}):
                    return False
                print_lines(
                    f"{member.group}: committed {self.topic}:{index} at {position}", err=True
                )
            if self.out.is_full:
                return True
            if not records:
                self._hint_late(reader, index)
        self._hint_at_end(reader)
        return True

    def _is_idle(self, member: GroupConsumer) -> bool:
        """Wait without partitions; return False to rejoin the group, True to end the command."""
        if not self.follow:
            print_lines(
                f"{member.group}: other members have all partitions of {self.topic}", err=True
            )
            return True
        while member.is_settled():
            time.sleep(IDLE_S)
        return False

    def _reader(
        self,
        indexes: Collection[int],
        committed: Mapping[Partition, OffsetAndMetadata] | None = None,
    ) -> Reader:
        from fencepost.client.queries.reader import Reader

        reader = Reader(self.session, self.topic, committed=self.isolation == "read_committed")
        reader.seek(indexes, self.begin, self.until, follow=self.follow)
        for place in reader.places:
            if committed and place in committed:
                reader.move(place[1], committed[place].offset)
        if reader.is_early and self.begin.time is not None and not committed:
            when = utc(self.begin.time)
            print_lines(f"{self.topic} has no record of {when} or later yet", err=True)
        for note in reader.notes:
            print_lines(note, err=True)
        return reader

    def _hint_late(self, reader: Reader, index: int) -> None:
        """Report, once, each transaction that holds back the consumer for :data:`HINT_AFTER_S`."""
        pin = reader.pins.get(index)
        now = time.monotonic()
        before = self.waiting.get(index)
        if pin is None:
            self.waiting.pop(index, None)
        elif before is None or before[0] != pin:
            self.waiting[index] = pin, now
        elif now - before[1] > HINT_AFTER_S:
            self.waiting[index] = pin, float("inf")
            self._hint([(self.topic, index)])

    def _hint_at_end(self, reader: Reader) -> None:
        from fencepost.client.queries.where import END

        if self.until is END and self.isolation == "read_committed":
            self._hint(reader.places)

    def _hint(self, places: list[Partition]) -> None:
        from fencepost.client.queries.held_back import held_back

        held = held_back(self.session, places)
        self.has_hinted = self.has_hinted or bool(held)
        for row in held:
            print_lines(_hint_text(row), err=True)
        if held:
            advice = "--isolation read_uncommitted shows them"
            print_lines(f"{advice}; `fencepost txns blame {self.topic}` shows more", err=True)


def _hint_text(row: HeldBack) -> str:
    topic, index = row.place
    count = f"{'' if row.is_exact else 'up to '}{counted(row.records, 'record')}"
    who = "an open transaction"
    if row.transaction is not None:
        who = f"the open transaction of {row.transaction.transactional_id}"
    if row.producer is not None:
        who += f" (producer {row.producer.producer_id})"
    since = f", open since {moment(row.since_ms)}" if row.since_ms is not None else ""
    return f"{topic}:{index}: {who}{since}, holds back {count} from offset {row.stable} on"
