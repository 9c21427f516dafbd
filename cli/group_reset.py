"""Resets of committed offsets: target offsets, undo files, and commits.

Model: ``kafka-consumer-groups.sh --reset-offsets``, whose files have lines
``topic,partition,offset``. Unlike that tool, this module uses the offset −1 for a partition without
a commit, and two more fields for the leader epoch and the metadata of a commit.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.output import counted
from fencepost.cli.printing import print_lines
from fencepost.client.queries.session import NO_EPOCH, OffsetAndMetadata, check
from fencepost.client.queries.times import TimeError, milliseconds
from fencepost.client.requests import EARLIEST, LATEST, NAMED, rows_of, topics
from fencepost.coordinator.config.durations import duration_ms
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.group_view import GroupView
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

NOTHING = OffsetAndMetadata(-1)
"""The position in a partition without a commit."""

COMMIT_PARTITIONS = 1_000
"""The maximum number of partitions in one OffsetCommit, far below a broker's limit."""

MAX_FILE_BYTES = 64 << 20
"""The maximum size of a file of offsets in bytes, enough for about a million lines."""

_DURATION = re.compile(
    r"P(?:(?P<days>\d+)D)?(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)S)?)?"
)


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """The target offsets of ``reset-offsets``: exactly one of the fields is set."""

    to_earliest: bool = False
    to_latest: bool = False
    to_current: bool = False
    to_offset: int | None = None
    to_datetime: str | None = None
    by_duration: str | None = None
    shift_by: int | None = None
    from_file: str | None = None

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in self.__slots__]
        if sum(value is not None and value is not False for value in values) != 1:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in self.__slots__)
            raise click.UsageError(f"give exactly one of {options}")


def active_group_refusal(active: GroupView) -> str:
    """Return why offsets of an ``active`` group must not be changed."""
    return (
        f"{active.group!r} is active ({active.state}, {counted(len(active.members), 'member')}): "
        "its offsets can only be changed while it has none"
    )


def select_partitions(
    session: ClusterSession, committed: Iterable[Partition], topics: Iterable[str], *, every: bool
) -> list[Partition]:
    """Return the partitions that ``--topic T[:0,1]`` or ``--all-topics`` name, sorted."""
    texts = list(topics)
    if every == bool(texts):
        raise click.UsageError("give either --topic or --all-topics")
    if every:
        places = sorted(committed)
        if not places:
            raise click.ClickException("the group does not exist, or has no committed offsets")
        return places
    partitions: set[Partition] = set()
    for text in texts:
        name, colon, indexes = text.partition(":")
        topic_partitions = session.topics([name])[0].partitions
        try:
            numbers = (
                [int(index) for index in indexes.split(",")] if colon else list(topic_partitions)
            )
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not TOPIC[:0,1,…]", param_hint="--topic") from (
                error
            )
        for index in numbers:
            if index not in topic_partitions:
                raise click.ClickException(f"{name} has no partition {index}")
        partitions.update((name, index) for index in numbers)
    return sorted(partitions)


def targets(
    session: ClusterSession,
    where: ResetTarget,
    partitions: list[Partition],
    committed: Mapping[Partition, OffsetAndMetadata],
    now: dt.datetime,
) -> dict[Partition, OffsetAndMetadata]:
    """Return the new offset of each partition, clamped to its log as Kafka's tool does."""
    if where.from_file is not None:
        return read_file(where.from_file)
    first, end = session.offsets(partitions, EARLIEST), session.offsets(partitions, LATEST)
    if where.to_current:
        return {tp: committed.get(tp, OffsetAndMetadata(end[tp])) for tp in partitions}
    if where.to_earliest:
        wanted = first
    elif where.to_latest:
        wanted = end
    elif where.to_offset is not None:
        wanted = dict.fromkeys(partitions, where.to_offset)
    elif where.shift_by is not None:
        missing = [tp for tp in partitions if tp not in committed]
        if missing:
            topic, index = missing[0]
            raise click.ClickException(f"{topic}:{index} has no committed offset to shift")
        wanted = {tp: committed[tp].offset + where.shift_by for tp in partitions}
    else:
        offsets = session.offsets(partitions, moment_ms(where, now))
        wanted = {tp: offset if offset >= 0 else end[tp] for tp, offset in offsets.items()}
    note_clamped_offsets(wanted, first, end)
    return {tp: OffsetAndMetadata(min(max(at, first[tp]), end[tp])) for tp, at in wanted.items()}


def note_clamped_offsets(
    offsets: Mapping[Partition, int], first: Mapping[Partition, int], end: Mapping[Partition, int]
) -> None:
    """Print a note for each wanted offset outside the log, with the offset taken instead."""
    for (topic, index), at in sorted(offsets.items()):
        bounds = first[topic, index], end[topic, index]
        taken = min(max(at, bounds[0]), bounds[1])
        if taken != at:
            held = f"{topic}:{index} has {bounds[0]} to {bounds[1]}"
            print_lines(f"note: {held}, so {taken} is taken for {at}", err=True)


def moment_ms(where: ResetTarget, now: dt.datetime) -> int:
    """Return the time of ``--to-datetime`` or ``--by-duration``, in ms since 1970."""
    if where.by_duration is None:
        try:
            return milliseconds(where.to_datetime or "", now)
        except TimeError as error:
            raise click.BadParameter(str(error), param_hint="--to-datetime") from error
    spent_ms = duration_ms(where.by_duration)
    match = _DURATION.fullmatch(where.by_duration)
    if spent_ms is None and (match is None or not any(match.groups())):
        reason = "it must be a duration such as 1d2h30m or P1DT2H30M15S"
        raise click.BadParameter(reason, param_hint="--by-duration")
    parts = {name: int(value or 0) for name, value in (match.groupdict() if match else {}).items()}
    try:
        ago = dt.timedelta(**parts, milliseconds=spent_ms or 0)
        # A negative timestamp has a special meaning in ListOffsets.
        return max(0, int((now - ago).timestamp() * 1000))
    except OverflowError as error:
        raise click.BadParameter("that is too long", param_hint="--by-duration") from error


def read_file(name: str) -> dict[Partition, OffsetAndMetadata]:
    """Read ``topic,partition,offset[,leader epoch,metadata]``; an error names the bad line."""
    path = Path(name)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise click.ClickException(f"{name} is longer than {MAX_FILE_BYTES} bytes")
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        # A client's metadata may hold line ends, which quotes protect.
        reader = csv.reader(io.StringIO(text, newline=""))
        rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise click.ClickException(f"{name}: {error}") from error
    offsets: dict[Partition, OffsetAndMetadata] = {}
    for number, row in rows:
        try:
            topic, index, offset, *rest = row
            leader_epoch, metadata = rest or (NO_EPOCH, "")
            place = topic, int(index)
            position = OffsetAndMetadata(int(offset), int(leader_epoch), metadata)
        except ValueError as error:
            form = "topic,partition,offset or topic,partition,offset,leader epoch,metadata"
            raise click.ClickException(f"{name}:{number}: {form}") from error
        is_negative = place[1] < 0 or position.offset < -1 or position.leader_epoch < NO_EPOCH
        if is_negative or place in offsets:
            raise click.ClickException(
                f"{name}:{number}: the offset is negative, or the partition is repeated"
            )
        offsets[place] = position
    return offsets


def write_undo(
    name: str, partitions: Iterable[Partition], before: Mapping[Partition, OffsetAndMetadata]
) -> None:
    """Write the committed offsets to a new file; an existing file is never overwritten."""
    try:
        with Path(name).open("x", encoding="utf-8", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            for place in sorted(partitions):
                offset, *rest = before.get(place, NOTHING)
                # Without leader epoch and metadata, Kafka's tool can read the line.
                writer.writerow((*place, offset, *(rest if rest != [NO_EPOCH, ""] else ())))
            size = out.tell()
        if size > MAX_FILE_BYTES:
            Path(name).unlink()
            raise click.ClickException(
                f"the undo file would be longer than {MAX_FILE_BYTES} bytes: name fewer topics"
            )
    except OSError as error:
        raise click.ClickException(f"the undo file cannot be written: {error}") from error


def undo_name(group: str, now: dt.datetime) -> str:
    """Return the default name of the undo file."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", group)[:100]
    return f"undo-{safe}-{now:%Y%m%dT%H%M%SZ}.csv"


def commit(
    session: ClusterSession,
    group: str,
    offsets: Mapping[Partition, OffsetAndMetadata],
    **claim: Any,
) -> None:
    """Commit ``offsets``, and delete those that are :data:`NOTHING`.

    Raises ApiError at the first refusal. ``claim`` identifies a committing member: its id and
    generation, as fields of OffsetCommit.
    """
    places = sorted(tp for tp, position in offsets.items() if position.offset >= 0)
    for start in range(0, len(places), COMMIT_PARTITIONS):
        part = {tp: offsets[tp] for tp in places[start : start + COMMIT_PARTITIONS]}
        answer = session.client.call(
            "OffsetCommit",
            at_most=NAMED["OffsetCommit"],
            to_group=group,
            entity=partial(_commit_request, group=group, offsets=part, **claim),
        )
        for (topic, index), row in rows_of(answer):
            check(row.error_code, "OffsetCommit", f"{topic}:{index}")
    delete(session, group, [tp for tp, position in offsets.items() if position.offset < 0])


def set_start_offsets(
    session: ClusterSession,
    group: str,
    offsets: Mapping[Partition, OffsetAndMetadata],
    before: Iterable[Partition],
) -> None:
    """Set the start offsets of a share group, and delete the state of topics.

    ``before`` are the partitions with state. Raises click.ClickException if :data:`NOTHING` is not
    meant for all of a topic's partitions, and ApiError at the first refusal.
    """
    from fencepost.client.queries import share_offsets

    gone = {tp for tp, position in offsets.items() if position.offset < 0}
    names = {topic for topic, _ in gone}
    kept = [tp for tp in before if tp[0] in names and tp not in gone]
    if kept:
        raise click.ClickException(
            f"a share group's state is deleted for whole topics: name all of {kept[0][0]}"
        )
    positions = {tp: position.offset for tp, position in offsets.items() if position.offset >= 0}
    if positions:
        share_offsets.alter(session, group, positions)
    if names:
        share_offsets.delete(session, group, sorted(names))


def _commit_request(
    make: Any, group: str, offsets: Mapping[Partition, OffsetAndMetadata], **claim: Any
) -> Any:
    rows = (
        (
            place,
            make.OffsetCommitRequestPartition(
                partition_index=place[1],
                committed_offset=position.offset,
                committed_leader_epoch=position.leader_epoch,
                committed_metadata=position.metadata,
            ),
        )
        for place, position in offsets.items()
    )
    entries = topics(make.OffsetCommitRequestTopic, rows)
    return make.message(group_id=group, topics=entries, **claim)


def delete(session: ClusterSession, group: str, partitions: Iterable[Partition]) -> None:
    """Delete committed offsets. Raises ApiError at the first refusal."""
    places = sorted(partitions)
    if not places:
        return

    def build(make: Any) -> Any:
        row = make.OffsetDeleteRequestPartition
        rows = ((place, row(partition_index=place[1])) for place in places)
        return make.message(group_id=group, topics=topics(make.OffsetDeleteRequestTopic, rows))

    answer = session.client.call("OffsetDelete", to_group=group, entity=build)
    check(answer.error_code, "OffsetDelete", group)
    for (topic, index), row in rows_of(answer):
        check(row.error_code, "OffsetDelete", f"{topic}:{index}")
