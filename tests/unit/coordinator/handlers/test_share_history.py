"""The history of one record of a share group, as ``fencepost groups history`` shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fencepost.coordinator.daemon.broker import Broker
from fencepost.testing.clock import TestClock
from tests.support import requests
from tests.support.cluster import Cluster
from tests.support.share import (
    FINAL,
    GAP,
    REJECT,
    RELEASE,
    Member,
    acquired,
    parts_of,
)
from tests.support.waits import until
from tests.unit.coordinator.handlers.test_share_fetch import SHARE_CONFIG
from tests.wire.test_cli_groups import rows, run

LIMIT = "group.share.delivery.count.limit"
CONFIG = {
    **SHARE_CONFIG,
    LIMIT: "2",
    "group.share.min.delivery.count.limit": "2",
    "fencepost.history.enable": "true",
}


class Queue:
    """A share group ``g`` with three records, and a member that has acquired them."""

    def __init__(self, broker: Any, client: Cluster, clock: TestClock) -> None:
        self.broker, self.client, self.clock = broker, client, clock
        self.topic_id = client.topic_id(client.create_topic("queue"))
        # This request creates the group, which no member joins.
        alter = requests.alter_share_group_offsets("g", "queue", {0: 0})

        def is_altered() -> bool:
            client.call("find_coordinator", 6, key_type=0, coordinator_keys=["g"])
            answer = client.call("alter_share_group_offsets", 0, **alter)
            return bool(answer["error_code"] == "none")

        until(is_altered, "the group exists")
        client.produce("queue", [b"a", b"b", b"c"])
        self.member = Member(client, "g")
        assert acquired(self.fetch(self.member)) == [(0, 2, 1)]

    def fetch(self, member: Member) -> Any:
        return parts_of(member.fetch({self.topic_id: {0: []}}))[0]

    def acknowledge(self, *batches: Any) -> None:
        answer = self.member.acknowledge({self.topic_id: {0: batches}})
        assert parts_of(answer)[0]["error_code"] == "none"

    def told(self, offset: int, what: str) -> dict[str, Any]:
        """Wait for history entries about a record, and return the last entry."""
        where = ("--topic", "queue", "--partition", "0", "--offset", str(offset))

        def found() -> list[dict[str, Any]]:
            listed: Any = rows(run(self.broker.bootstrap, "history", "g", *where))
            return [row for row in listed if row["what"] == what]

        return until(found, f"{what} of {offset}")[-1]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    clock = TestClock()
    with (
        Broker.in_thread(tmp_path, config=CONFIG, clock=clock) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        yield Queue(broker, client, clock)


def test_history_of_a_released_record_names_its_owner(queue: Queue) -> None:
    queue.acknowledge((1, 1, RELEASE))
    told = queue.told(1, "share-records-returned")
    assert (told["why"], told["who"]) == ("released by its owner", queue.member.member)
    assert (told["client"], told["host"]) == ("raw", "127.0.0.1")
    assert told["change"] == "queue:0 1, delivery 1"
    where = ("history", "g", "--topic", "queue", "--partition", "0", "--offset", "0")
    (other,) = rows(run(queue.broker.bootstrap, *where))
    assert other["what"] == "share-partition-loaded"


def test_history_of_an_expired_lock_names_its_owner(queue: Queue) -> None:
    queue.clock.advance(seconds=31)
    told = queue.told(2, "share-records-returned")
    assert (told["why"], told["who"]) == ("acquisition lock expired", queue.member.member)
    assert (told["client"], told["trigger"]) == ("raw", "timer share-lock")
    assert told["change"] == "queue:0 0-2, delivery 1"


def test_history_lists_rejected_records_and_gaps_as_given_up(queue: Queue) -> None:
    queue.acknowledge((0, 0, REJECT), (1, 1, GAP))
    assert queue.told(0, "share-records-given-up")["why"] == "rejected by its owner"
    assert queue.told(1, "share-records-given-up")["why"] == "no record at the offset"


def test_history_of_the_last_delivery_names_the_delivery_limit(queue: Queue) -> None:
    queue.acknowledge((0, 2, RELEASE))
    assert acquired(queue.fetch(queue.member)) == [(0, 2, 2)]
    queue.acknowledge((0, 2, RELEASE))
    told = queue.told(0, "share-records-given-up")
    assert told["why"] == "released by its owner, delivery limit 2"
    assert told["detail"]["delivery_count"] == 2


def test_history_distinguishes_closed_session_and_closed_connection(queue: Queue) -> None:
    queue.member.epoch = FINAL
    queue.member.acknowledge({queue.topic_id: {0: []}})
    told = queue.told(0, "share-records-returned")
    assert told["why"] == "share session closed by its owner"
    with Cluster(queue.broker.bootstrap) as lost:
        assert acquired(queue.fetch(Member(lost, "g", "lost"))) == [(0, 2, 2)]
    told = queue.told(0, "share-records-given-up")
    assert told["why"] == "its owner's connection closed, delivery limit 2"
    assert told["who"] == "lost"


def test_restarted_broker_delivers_acquired_records_again(tmp_path: Path) -> None:
    # The connection outlives the broker, because closing it would release the records.
    with (
        ExitStack() as connections,
        Broker.in_thread(tmp_path, config=CONFIG, clock=TestClock()) as broker,
    ):
        client = connections.enter_context(Cluster(broker.bootstrap))
        Queue(broker, client, TestClock())
    with (
        Broker.in_thread(tmp_path, config=CONFIG, clock=TestClock()) as broker,
        Cluster(broker.bootstrap) as client,
    ):
        topic_id = client.topic_id("queue")
        again = Member(client, "g")
        assert acquired(parts_of(again.fetch({topic_id: {0: []}}))[0]) == [(0, 2, 1)]
        where = ("--topic", "queue", "--partition", "0", "--offset", "1")

        def told() -> Any:
            found = rows(run(broker.bootstrap, "history", "g", *where))
            return found if len(found) == 3 else None

        found = until(told, "the second load")
        assert [row["what"] for row in found] == [
            "share-partition-loaded",
            "share-partition-fenced",
            "share-partition-loaded",
        ]
        assert found[1]["why"] == "the broker stops"
        assert found[1]["change"] == "queue:0, 3 acquired"


def test_history_filter_by_offset_without_topic_is_refused(queue: Queue) -> None:
    refused = run(queue.broker.bootstrap, "history", "g", "--offset", "1", status=2)
    assert "--partition and --offset need --topic" in refused.output
