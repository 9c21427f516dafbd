"""Start offsets of share groups (KIP-932): described, altered and deleted.

The coordinator computes the lag: it counts the records that no member has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.queries.session import check

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

SHARE_GROUP_DESCRIBE = 77
SHARE = "share"
"""The type of a share group."""


class StartOffset(NamedTuple):
    """One partition of a share group; a value that is not known is None."""

    offset: int | None
    lag: int | None
    error: str | None


def describe_share_group(session: ClusterSession, group: str) -> Any:
    """Return the row of a share group in a ShareGroupDescribe response; None if there is none."""
    if SHARE_GROUP_DESCRIBE not in session.client.versions():
        return None
    row = session.client.call("ShareGroupDescribe", to_group=group, group_ids=(group,)).groups[0]
    if row.error_code in {ErrorCode.group_id_not_found, ErrorCode.unsupported_version}:
        return None
    check(row.error_code, "ShareGroupDescribe", group, row.error_message)
    return row


def start_offsets(session: ClusterSession, group: str) -> dict[Partition, StartOffset]:
    """Return the partitions with state, sorted."""

    def build(make: Any) -> Any:
        row = make.DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None)
        return make.message(groups=[row])

    answer = session.client.call("DescribeShareGroupOffsets", to_group=group, entity=build)
    (group_row,) = answer.groups
    check(group_row.error_code, "DescribeShareGroupOffsets", group, group_row.error_message)
    rows = {
        (topic.topic_name, part.partition_index): _start_offset(part)
        for topic in group_row.topics
        for part in topic.partitions
    }
    return dict(sorted(rows.items()))


def _start_offset(part: Any) -> StartOffset:
    if part.error_code != ErrorCode.none:
        return StartOffset(None, None, part.error_code.name.upper())
    lag = getattr(part, "lag", -1)  # version 0 has none
    return StartOffset(
        None if part.start_offset < 0 else part.start_offset, None if lag < 0 else lag, None
    )


def alter(session: ClusterSession, group: str, offsets: Mapping[Partition, int]) -> None:
    """Set start offsets. Raises ApiError at the first refusal."""

    def build(make: Any) -> Any:
        rows: dict[str, list[Any]] = {}
        for (name, index), at in offsets.items():
            row = make.AlterShareGroupOffsetsRequestPartition
            rows.setdefault(name, []).append(row(partition_index=index, start_offset=at))
        topic = make.AlterShareGroupOffsetsRequestTopic
        entries = [
            topic(topic_name=name, partitions=partitions) for name, partitions in rows.items()
        ]
        return make.message(group_id=group, topics=entries)

    answer = session.client.call("AlterShareGroupOffsets", to_group=group, entity=build)
    check(answer.error_code, "AlterShareGroupOffsets", group, answer.error_message)
    for topic in answer.responses:
        for part in topic.partitions:
            place = f"{topic.topic_name}:{part.partition_index}"
            check(part.error_code, "AlterShareGroupOffsets", place, part.error_message)


def delete(session: ClusterSession, group: str, names: Iterable[str]) -> None:
    """Delete the state of whole topics. Raises ApiError at the first refusal."""

    def build(make: Any) -> Any:
        row = make.DeleteShareGroupOffsetsRequestTopic
        return make.message(group_id=group, topics=[row(topic_name=name) for name in names])

    answer = session.client.call("DeleteShareGroupOffsets", to_group=group, entity=build)
    check(answer.error_code, "DeleteShareGroupOffsets", group, answer.error_message)
    for topic in answer.responses:
        check(topic.error_code, "DeleteShareGroupOffsets", topic.topic_name, topic.error_message)
