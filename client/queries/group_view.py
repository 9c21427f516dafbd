"""A common view of groups of both protocols: members, assignments, offsets and lags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from fencepost.client.queries.session import check
from fencepost.client.queries.share_offsets import SHARE, describe_share_group, start_offsets
from fencepost.client.queries.unknown import unknown_group
from fencepost.coordinator.metadata.names import is_progress
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.client.queries.lag import ConsumerLags
    from fencepost.client.queries.session import ClusterSession, OffsetAndMetadata
    from fencepost.client.requests import Partition

CONSUMER_GROUP_DESCRIBE = 69
CLASSIC, CONSUMER = "classic", "consumer"
KNOWN_TYPES = frozenset({"", CLASSIC, CONSUMER, SHARE})
"""Group types that can be described; a broker that reports no type only has classic groups."""
NO_LAG: Mapping[str, object] = {
    **dict.fromkeys(("lag", "held_back", "lag_uncommitted", "lag_is_exact", "lag_at_most")),
    "unknown": False,
}


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member. Only consumer groups have targets, and only classic groups have metadata."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    epoch: int | None
    assigned: tuple[Partition, ...]
    target: tuple[Partition, ...] | None = None
    rack_id: str | None = None
    metadata: bytes = b""
    topics: tuple[str, ...] = ()
    regex: str | None = None


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group; ``state`` is Kafka's name, *Dead* if the coordinator does not know the group."""

    group: str
    kind: str
    state: str
    assignor: str
    epoch: int | None
    members: tuple[MemberView, ...]

    @property
    def is_active(self) -> bool:
        """Whether members may commit offsets, so that another client must not."""
        return self.state not in {"Empty", "Dead"}


def describe_group(session: ClusterSession, group: str) -> GroupView:
    """Describe a group of any protocol; a group that does not exist is Dead."""
    if CONSUMER_GROUP_DESCRIBE in session.client.versions():
        row = session.client.call(
            "ConsumerGroupDescribe", to_group=group, group_ids=(group,)
        ).groups[0]
        if row.error_code == ErrorCode.none:
            return _server_assigned(group, CONSUMER, row)
        if row.error_code not in {
            ErrorCode.group_id_not_found,
            ErrorCode.unsupported_version,
        }:
            check(row.error_code, "ConsumerGroupDescribe", group)
    row = session.client.call("DescribeGroups", to_group=group, groups=(group,)).groups[0]
    if row.error_code != ErrorCode.group_id_not_found:
        check(row.error_code, "DescribeGroups", group, getattr(row, "error_message", None))
    if row.group_state == "Dead" and (share := describe_share_group(session, group)) is not None:
        return _server_assigned(group, SHARE, share)
    return _classic(group, row)


def existing(session: ClusterSession, group: str) -> GroupView:
    """Describe a group. Raises UnknownNameError if it has neither members nor offsets."""
    view = describe_group(session, group)
    if view.state == "Dead" and not session.committed(group):
        raise unknown_group(group, lambda: (str(row.group_id) for row in session.groups()))
    return view


def _named(assignment: Any) -> tuple[Partition, ...]:
    return tuple(
        (topic.topic_name, index)
        for topic in assignment.topic_partitions
        for index in topic.partitions
    )


def _server_assigned(group: str, kind: str, described: Any) -> GroupView:
    """Return a consumer or share group, whose coordinator assigns the partitions.

    Members of share groups have no instance id, regular expression or target.
    """
    members = tuple(
        MemberView(
            row.member_id,
            getattr(row, "instance_id", None),
            row.client_id,
            row.client_host.removeprefix("/"),
            row.member_epoch,
            _named(row.assignment),
            _named(row.target_assignment) if kind == CONSUMER else None,
            row.rack_id,
            topics=tuple(row.subscribed_topic_names),
            regex=getattr(row, "subscribed_topic_regex", None),
        )
        for row in described.members
    )
    return GroupView(
        group, kind, described.group_state, described.assignor_name, described.group_epoch, members
    )


def _classic(group: str, described: Any) -> GroupView:
    members = tuple(
        MemberView(
            row.member_id,
            getattr(row, "group_instance_id", None),
            row.client_id,
            row.client_host.removeprefix("/"),
            None,
            _assigned(row.member_assignment),
            metadata=row.member_metadata,
        )
        for row in described.members
    )
    return GroupView(group, CLASSIC, described.group_state, described.protocol_data, None, members)


def _assigned(assignment: bytes) -> tuple[Partition, ...]:
    """Return the partitions of a ``ConsumerProtocolAssignment``; () for another format."""
    from fencepost.groups.assignors.client.protocol import decode_assignment
    from fencepost.logcore.errors import CorruptRecordError

    try:
        return decode_assignment(assignment)[0]
    except CorruptRecordError:
        return ()


def member_rows(view: GroupView) -> list[dict[str, object]]:
    """Return one row per member."""
    return [
        {
            "group": view.group,
            "member": member.member_id,
            "instance": member.instance_id,
            "client": member.client_id,
            "host": member.host,
            "epoch": member.epoch,
            "count": len(member.assigned),
            "assigned": texts(member.assigned),
            "target": None if member.target is None else texts(member.target),
            "type": view.kind,
        }
        for member in view.members
    ]


def texts(partitions: Iterable[Partition]) -> list[str]:
    """Return partitions as ``topic:index``, sorted."""
    return [f"{topic}:{index}" for topic, index in sorted(partitions)]


def offset_rows(session: ClusterSession, groups: Iterable[GroupView]) -> list[dict[str, object]]:
    """Return one row for each partition that a group has committed an offset for, or owns.

    Lags are in records, as in :class:`fencepost.client.queries.lag.Lag`: ``lag`` for a
    read_committed consumer, ``held_back`` behind open transactions, ``lag_uncommitted`` for a
    read_uncommitted consumer.

    Without a committed offset the lag depends on the members' ``auto.offset.reset``, which no
    broker knows. ``lag`` is then 0 if the partition has no readable records; otherwise it is None,
    and ``unknown`` is true. ``lag_at_most`` is the lag from the log start. The lag of a
    partition without a leader is unknown as well; ``error`` is Kafka's name of the error. An offset
    committed for a deleted topic has no lag, and neither has the ``progress`` of a Spark query,
    which is stored as an offset: ``lag`` is None, and ``unknown`` is false. ``committed`` of a
    share group is the start offset, and its coordinator computes the lag. Raises ApiError.
    """
    from fencepost.client.queries.lag import ConsumerLags

    described: list[tuple[GroupView, dict[Partition, OffsetAndMetadata], dict[Partition, str]]] = []
    of_shares: list[dict[str, object]] = []
    for group in groups:
        if group.kind == SHARE:
            of_shares += _share_rows(session, group)
            continue
        committed = session.committed(group.group)
        owners = {tp: member.member_id for member in group.members for tp in member.assigned}
        described.append((group, committed, owners))
    lags = ConsumerLags(
        session, (tp for _, committed, owners in described for tp in (*committed, *owners))
    )
    rows: list[dict[str, object]] = []
    for group, committed, owners in described:
        for tp in sorted(committed.keys() | owners.keys()):
            bounds, failed = lags.bounds.get(tp), lags.failed.get(tp)
            at = committed.get(tp)
            offset = None if at is None else at.offset
            has_lag = at is None or not is_progress(group.group, at.metadata)
            rows.append(
                {
                    "group": group.group,
                    "topic": tp[0],
                    "partition": tp[1],
                    "committed": offset,
                    "first": bounds and bounds.first,
                    "stable": bounds and bounds.stable,
                    "end": bounds and bounds.end,
                    **(_lag(lags, tp, offset) if has_lag else NO_LAG),
                    "progress": not has_lag,
                    "member": owners.get(tp),
                    "state": group.state,
                    "error": failed and failed.name.upper(),
                }
            )
    return rows + of_shares


def _share_rows(session: ClusterSession, group: GroupView) -> list[dict[str, object]]:
    """Return the rows of a share group; members share its partitions, so none owns any.

    The lag of a partition without a start offset is unknown.
    """
    from fencepost.client.queries.lag import ConsumerLags

    starts = start_offsets(session, group.group)
    lags = ConsumerLags(session, (tp for tp, start in starts.items() if start.lag is None))
    rows: list[dict[str, object]] = []
    for (topic, index), start in starts.items():
        behind = lags.from_start((topic, index)) if start.lag is None else None
        rows.append(
            {
                "group": group.group,
                "topic": topic,
                "partition": index,
                "committed": start.offset,
                **dict.fromkeys(("first", "stable", "end", "member")),
                **NO_LAG,
                "lag": start.lag,
                "lag_at_most": start.lag if behind is None else behind.uncommitted,
                "unknown": start.lag is None,
                "progress": False,
                "state": group.state,
                "error": start.error,
            }
        )
    return rows


def _lag(lags: ConsumerLags, partition: Partition, committed: int | None) -> dict[str, object]:
    """Return the columns of :func:`offset_rows` about the lag."""
    has_committed = committed is not None
    lag = lags.of(partition, committed) if has_committed else lags.from_start(partition)
    if lag is None:
        return {**NO_LAG, "unknown": not has_committed or partition in lags.failed}
    is_known = has_committed or not lag.readable
    return {
        "lag": lag.readable if is_known else None,
        "held_back": lag.held_back,
        "lag_uncommitted": lag.uncommitted if has_committed or not lag.uncommitted else None,
        "lag_is_exact": lag.is_exact if is_known else None,
        "lag_at_most": lag.readable,
        "unknown": not is_known,
    }


def summary_rows(session: ClusterSession, groups: Sequence[GroupView]) -> list[dict[str, object]]:
    """Return one row per group: its state and the totals of its lags. Raises ApiError.

    ``failed`` counts partitions without a leader, which ``unknown`` includes.
    """
    offsets: dict[object, list[Mapping[str, object]]] = defaultdict(list)
    for row in offset_rows(session, groups):
        offsets[row["group"]].append(row)
    return [
        {
            "group": group.group,
            "state": group.state,
            "type": group.kind,
            "assignor": group.assignor,
            "members": len(group.members),
            **totals(offsets[group.group]),
            "failed": sum(row["error"] is not None for row in offsets[group.group]),
        }
        for group in groups
    ]


def totals(rows: Iterable[Mapping[str, object]]) -> dict[str, int | None]:
    """Return the sums of the lags in ``rows``, which come from :func:`offset_rows`.

    A sum is None if a part of it is not known. ``unknown`` counts the partitions of unknown lag,
    ``lag_known`` is the sum over the others. ``progress`` is true for the group of a Spark query,
    which has no lag.
    """
    rows = list(rows)

    def summed(name: str, rows: Iterable[Mapping[str, object]]) -> int | None:
        values = [row[name] for row in rows]
        integers = [value for value in values if isinstance(value, int)]
        return sum(integers) if len(integers) == len(values) else None

    keeps_progress = bool(rows) and all(row["progress"] for row in rows)
    # An offset committed for a deleted topic has no lag.
    there = [row for row in rows if row["unknown"] or row["lag"] is not None]
    return {
        "partitions": len(rows),
        "progress": keeps_progress,
        "unknown": sum(bool(row["unknown"]) for row in rows),
        "lag_known": summed("lag", [row for row in there if not row["unknown"]]),
        **{
            name: None if keeps_progress else summed(name, there)
            for name in ("lag", "lag_at_most", "lag_uncommitted")
        },
        "held_back": summed("held_back", [row for row in there if row["held_back"] is not None]),
    }
