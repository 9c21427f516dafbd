"""Trimming of topics: the plan, and its DeleteRecords requests."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fencepost.cli import group_reset
from fencepost.client.queries.session import check
from fencepost.client.requests import EARLIEST, LATEST, rows_of
from fencepost.client.requests import topics as by_topic
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession


class TrimRow(NamedTuple):
    """One partition: its first offset before and after, its end, and the number of lost offsets."""

    topic: str
    partition: int
    first: int
    new_first: int
    end: int
    going: int


@dataclass(frozen=True, slots=True)
class TrimTarget:
    """The new first offset: exactly one of the fields is set."""

    to_offset: int | None = None
    to_latest: bool = False
    to_datetime: str | None = None

    def __post_init__(self) -> None:
        if (self.to_offset is not None) + self.to_latest + (self.to_datetime is not None) != 1:
            raise click.UsageError("give one of --to-offset, --to-latest and --to-datetime")


def plan(session: ClusterSession, topics: Sequence[str], where: TrimTarget) -> list[TrimRow]:
    """Plan the trim of ``topics``, each TOPIC or TOPIC:0,1. Raises ApiError, ClickException."""
    places = group_reset.select_partitions(session, (), topics, every=False)
    first, end = session.offsets(places, EARLIEST), session.offsets(places, LATEST)
    if where.to_offset is not None:
        wanted = dict.fromkeys(places, where.to_offset)
    elif where.to_latest:
        wanted = end
    else:
        target = group_reset.ResetTarget(to_datetime=where.to_datetime)
        offsets = session.offsets(places, group_reset.moment_ms(target, dt.datetime.now(dt.UTC)))
        wanted = {tp: offset if offset >= 0 else end[tp] for tp, offset in offsets.items()}
    group_reset.note_clamped_offsets(wanted, first, end)
    new = {tp: min(max(wanted[tp], first[tp]), end[tp]) for tp in places}
    return [TrimRow(*tp, first[tp], new[tp], end[tp], new[tp] - first[tp]) for tp in places]


def delete_records(session: ClusterSession, rows: Sequence[TrimRow]) -> None:
    """Delete the records before each row's new first offset. Raises ApiError at a refusal."""
    going = {(row.topic, row.partition): row for row in rows if row.going}
    for node, places in session.by_leader(going).items():

        def build(make: Any, places: Sequence[tuple[str, int]] = tuple(places)) -> Any:
            entries = (
                (
                    place,
                    make.DeleteRecordsPartition(
                        partition_index=place[1], offset=going[place].new_first
                    ),
                )
                for place in places
            )
            return make.message(
                topics=by_topic(make.DeleteRecordsTopic, entries), timeout_ms=session.timeout_ms
            )

        answer = session.client.call("DeleteRecords", to_node=node, check=False, entity=build)
        for (topic, index), row in rows_of(answer):
            check(row.error_code, "DeleteRecords", f"{topic}:{index}")
