"""The transaction that holds back a partition's last stable offset, and the groups behind it.

The protocol does not report where a producer runs. But a transaction that commits a group's offsets
includes the group's partition of ``__consumer_offsets``, and while these offsets are pending,
OffsetFetch with RequireStable returns UNSTABLE_OFFSET_COMMIT for the group. The members of this
group, with their client ids and hosts, are the clients that hold the transaction open.

A group counts as waiting if its committed offset is below the high watermark. It also counts if it
has no committed offset but one of its members owns the partition, as a member that has received no
records has nothing to commit.

ListGroups also names groups that the principal may not describe. They are reported as hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode

from fencepost.client.queries.group_view import KNOWN_TYPES, describe_group
from fencepost.client.queries.open_transactions import (
    Producer,
    Transaction,
    producers,
    transactions_of,
    why_hanging,
)
from fencepost.client.requests import EARLIEST, LATEST
from fencepost.client.router import ApiError
from fencepost.coordinator.metadata.names import is_progress
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession, OffsetAndMetadata
    from fencepost.client.requests import Partition

OFFSETS_TOPIC = "__consumer_offsets"

Positions = dict[str, dict["Partition", "OffsetAndMetadata"]]
"""The committed offsets of every group that the principal may describe."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A group that reads the partition and has not committed up to the partition's end."""

    group: str
    committed: int | None
    lag: int | None
    """The number of offsets from the committed offset to the high watermark; None without a commit.
    """
    stuck: bool
    """Whether the group has read all stable records, so that a read_committed member waits."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A partition's offsets, the transaction that holds back the LSO, and the waiting groups."""

    topic: str
    partition: int
    stable: int
    end: int
    pin: Producer | None
    transaction: Transaction | None
    hanging: str | None
    """Why no coordinator will end the transaction; None if one will."""
    open_count: int
    clients: tuple[str, ...]
    """CLIENT_ID@HOST of the members of the groups whose offsets the transaction commits."""
    waiting: tuple[Waiting, ...]
    hidden_groups: tuple[str, ...]
    """Groups that the principal may not describe: they may wait, or hold the transaction."""


def blame(session: ClusterSession, partitions: list[Partition]) -> list[Blame]:
    """Examine each partition.

    If a transaction holds back the last stable offset of a partition, ask all brokers for
    transactions and groups.
    """
    stable = session.offsets(partitions, LATEST, committed=True)
    ends = session.offsets(partitions, LATEST)
    pinned = [place for place in partitions if stable[place] < ends[place]]
    open_here: dict[Partition, list[Producer]] = {place: [] for place in partitions}
    for row in producers(session, pinned):
        if row.is_open:
            open_here[row.place].append(row)
    pins = {
        place: min(rows, key=lambda row: row.start_offset)
        for place, rows in open_here.items()
        if rows
    }
    transactions = transactions_of(session, (pin.producer_id for pin in pins.values()))
    positions, hidden = _positions(session) if pins else ({}, ())
    owners = _owners(session, positions) if pins else {}
    first = session.offsets(list(pins), EARLIEST)
    clients = {
        producer_id: _members(
            session,
            {index for topic, index in transaction.partitions if topic == OFFSETS_TOPIC},
            positions,
        )
        for producer_id, transaction in transactions.items()
    }
    blames = []
    for place in partitions:
        pin = pins.get(place)
        transaction = transactions.get(pin.producer_id) if pin is not None else None
        blames.append(
            Blame(
                topic=place[0],
                partition=place[1],
                stable=stable[place],
                end=ends[place],
                pin=pin,
                transaction=transaction,
                hanging=why_hanging(pin, transaction) if pin is not None else None,
                open_count=len(open_here[place]),
                clients=clients.get(pin.producer_id, ()) if pin is not None else (),
                waiting=()
                if pin is None
                else (
                    *_waiting(place, stable[place], ends[place], positions),
                    *(
                        Waiting(group, None, None, stuck=first[place] >= stable[place])
                        for group in owners.get(place, ())
                        if place not in positions.get(group, {})
                    ),
                ),
                hidden_groups=() if pin is None else hidden,
            )
        )
    return blames


def clients_of(
    session: ClusterSession, producer_ids: Iterable[int]
) -> tuple[dict[int, tuple[str, ...]], tuple[str, ...]]:
    """Return CLIENT_ID@HOST of the members of groups with pending offsets, by producer id.

    The second value has the hidden groups, as in :class:`Blame`. The leaders of
    ``__consumer_offsets`` are asked, because they also report a transaction that no coordinator
    knows.
    """
    topics, ids = session.client.metadata().topics, set(producer_ids)
    if OFFSETS_TOPIC not in topics or not ids:
        return {}, ()
    places = [(OFFSETS_TOPIC, index) for index in topics[OFFSETS_TOPIC].partitions]
    held: dict[int, set[int]] = defaultdict(set)
    for row in producers(session, places):
        if row.is_open and row.producer_id in ids:
            held[row.producer_id].add(row.partition)
    positions, hidden = _positions(session) if held else ({}, ())
    return {
        producer_id: _members(session, indexes, positions) for producer_id, indexes in held.items()
    }, hidden


def _owners(session: ClusterSession, positions: Positions) -> dict[Partition, list[str]]:
    """Return, by partition, the groups with a member that owns the partition."""
    owners: dict[Partition, list[str]] = defaultdict(list)
    for row in session.groups():
        # Older brokers report neither state nor type.
        state, kind = getattr(row, "group_state", ""), getattr(row, "group_type", "")
        if row.group_id not in positions:
            continue
        if kind.lower() in KNOWN_TYPES and state not in {"Empty", "Dead"}:
            owned = {
                tp
                for member in describe_group(session, row.group_id).members
                for tp in member.assigned
            }
            for place in owned:
                owners[place].append(str(row.group_id))
    return owners


def _positions(session: ClusterSession) -> tuple[Positions, tuple[str, ...]]:
    """Return the groups' committed offsets, and the groups that the principal may not describe."""
    positions: Positions = {}
    hidden = []
    for row in session.groups():
        try:
            positions[row.group_id] = session.committed(row.group_id)
        except ApiError as error:
            if error.code is not ErrorCode.group_authorization_failed:
                raise
            hidden.append(str(row.group_id))
    return positions, tuple(sorted(hidden))


def _waiting(place: Partition, stable: int, end: int, positions: Positions) -> tuple[Waiting, ...]:
    return tuple(
        Waiting(group, row.offset, end - row.offset, row.offset >= stable)
        for group, rows in positions.items()
        if (row := rows.get(place)) is not None
        and stable < end
        and row.offset < end
        and not is_progress(group, row.metadata)
    )


def _members(session: ClusterSession, indexes: set[int], positions: Positions) -> tuple[str, ...]:
    """Return the members of groups with pending offsets in these ``__consumer_offsets`` partitions.

    Each is CLIENT_ID@HOST.
    """
    from fencepost.coordinator.runtime.key_partition import partition_for

    topics = session.client.metadata().topics
    if OFFSETS_TOPIC not in topics:
        return ()
    count = len(topics[OFFSETS_TOPIC].partitions)
    clients: set[str] = set()
    for group, committed in positions.items():
        if partition_for(group, count) not in indexes:
            continue
        members = describe_group(session, group).members
        places = set(committed)
        for member in members:
            places.update(member.assigned)
        if session.has_pending_offsets(group, sorted(places)):
            clients.update(f"{member.client_id}@{member.host}" for member in members)
    return tuple(sorted(clients))
