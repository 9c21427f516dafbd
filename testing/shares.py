"""The in-flight records of share groups, as brokers have them, and waits for their states.

The leader of a partition has the states of its records while a member has a share session. After
the last session only the share coordinator has the states, as they were last written. The next
leader reads them from the share coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from fencepost.client.queries.share_records import is_about_record
from fencepost.testing.views import ShareRecords

if TYPE_CHECKING:
    from fencepost.coordinator.daemon.broker import Broker
    from fencepost.coordinator.history.entries import Entry
    from fencepost.testing.views import Partition

OPEN = frozenset({"AVAILABLE", "ACQUIRED", "ARCHIVING"})
"""The states of records whose delivery has not ended."""

GIVEN_UP = "share-records-given-up"
"""The event in the history of records that were archived."""


class PartitionStates(NamedTuple):
    """The states of a share partition's records."""

    topic_id: str
    """In hexadecimal digits, as the history has it."""
    start_offset: int
    """The delivery of every record below it has ended."""
    records: tuple[ShareRecords, ...]
    is_led: bool
    """Whether these are the states in a leader's memory; a share coordinator's may be older."""

    def holding(self, offset: int) -> ShareRecords | None:
        """Return the in-flight records around an offset."""
        return next(
            (record for record in self.records if record.first <= offset <= record.last), None
        )


States = dict["Partition", PartitionStates]
"""The states of a group, by topic and partition."""


async def states_of(broker: Broker, group: str) -> States:
    """Return the states that one broker has: as leader, or as share coordinator."""
    services, topics = broker.services, broker.storage.metadata.image.topics_by_id
    states: States = {}
    for shard in services.share_coordinator.shards:
        for key, (start_offset, ranges) in shard.machine.states_of(group).items():
            topic = topics.get(UUID(bytes=key.topic_id))
            if topic is not None:
                place = topic.name, key.partition
                states[place] = _states(place, key.topic_id, start_offset, ranges, is_led=False)
    if services.has_shares:
        for served in services.shares:
            share, key = served.share, served.share.key
            if key.group_id == group and share.state.value == "active":
                place = served.log.topic, key.partition
                states[place] = _states(
                    place, key.topic_id, share.start_offset, share.in_flight(), is_led=True
                )
    return states


def _states(
    place: Partition, topic_id: bytes, start_offset: int, ranges: Iterable[Any], *, is_led: bool
) -> PartitionStates:
    records = (
        ShareRecords(
            *place,
            span.first,
            span.last,
            span.state.name,
            span.delivery_count,
            span.member_id,
            span.deadline_ms,
            span.is_in_transition,
        )
        for span in ranges
    )
    return PartitionStates(topic_id.hex(), start_offset, tuple(records), is_led)


def merged(all_states: Iterable[States]) -> States:
    """Return the states of several brokers: a leader's are newer than a share coordinator's."""
    result: States = {}
    for states in all_states:
        for place, state in states.items():
            if state.is_led or place not in result:
                result[place] = state
    return result


def in_order(states: States) -> list[ShareRecords]:
    """Return all in-flight records, by topic, partition and offset."""
    return [record for _, state in sorted(states.items()) for record in state.records]


class ShareWait:
    """The condition of a wait: on one record, or on all records of a group."""

    def __init__(
        self,
        group: str,
        record: tuple[str, int, int] | None,
        until: str | None,
        delivery_count: int | None,
    ) -> None:
        if record is None and (until, delivery_count) != (None, None):
            raise ValueError("until and delivery_count are conditions of a record: name it")
        self._group, self._record = group, record
        self._until, self._delivery_count = until, delivery_count

    def is_over(self, states: States, history: Callable[[], Iterable[Entry]]) -> bool:
        """Return whether the condition holds; ``history`` returns the events of the group."""
        if self._record is None:
            return bool(states) and not _open(states)
        topic, partition, offset = self._record
        current = states.get((topic, partition))
        if current is None:
            return False
        records = current.holding(offset)
        if records is not None:
            return not records.is_pending and self._holds(records.state, records.delivery_count)
        if offset >= current.start_offset:
            return False
        for entry in history():
            detail = entry.detail
            if (
                entry.what == GIVEN_UP
                and (detail.get("topic_id"), detail.get("partition"))
                == (current.topic_id, partition)
                and is_about_record(entry.what, detail, offset)
            ):
                return self._holds("ARCHIVED", detail.get("delivery_count"))
        return self._holds("ACKNOWLEDGED", None)

    def _holds(self, state: str, delivery_count: int | None) -> bool:
        expected_state, least = self._until, self._delivery_count
        if expected_state is None and least is None:
            return state not in OPEN
        if expected_state is not None and state != expected_state:
            return False
        return least is None or (delivery_count is not None and delivery_count >= least)

    def describe(self, states: States, others: Callable[[], str]) -> str:
        """Describe the condition, and the states; ``others`` hints at the names of groups."""
        condition = self._condition_text()
        if not states:
            return f"{condition}: no record of it was fetched{others()}"
        if self._record is None:
            return f"{condition}: {_records_text(_open(states))}"
        topic, partition, offset = self._record
        current = states.get((topic, partition))
        if current is None:
            there = ", ".join(f"{topic}:{index}" for topic, index in sorted(states))
            return f"{condition}: the group has no state of {topic}:{partition}, but of {there}"
        records = current.holding(offset)
        if records is not None:
            return f"{condition}: {_records_text([records])}"
        if offset < current.start_offset:
            return f"{condition}: its delivery has ended (start offset {current.start_offset})"
        return f"{condition}: it was not fetched"

    def _condition_text(self) -> str:
        if self._record is None:
            return f"nothing in flight in share group {self._group}"
        topic, partition, offset = self._record
        until = self._until or ("" if self._delivery_count else "ended")
        count = f"delivered {self._delivery_count} times" if self._delivery_count else ""
        return (
            f"{topic}:{partition}:{offset} {' and '.join(filter(None, (until, count)))}"
            f" in share group {self._group}"
        )


def _open(states: States) -> list[ShareRecords]:
    return [record for record in in_order(states) if record.state in OPEN or record.is_pending]


def _records_text(records: Iterable[ShareRecords]) -> str:
    return ", ".join(
        f"{record.topic}:{record.partition}:{record.first}"
        f"{f'-{record.last}' if record.last > record.first else ''} is {record.state}"
        f"{f' by {record.member}' if record.member else ''}, delivery {record.delivery_count}"
        for record in records
    )
