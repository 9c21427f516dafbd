"""The daemon is killed at each durable step of a share group's workload, or a write fails.

In each run of the workload a member joins, the topic's state is initialized, and records are
written. The member accepts, rejects or releases some records, keeps the others acquired, and ends
its session. Another member then accepts the remaining records. The daemon is killed before one of
the durable steps and restarted, and the members continue as clients do: an unanswered request has
an unknown outcome.

A record whose accept or reject was answered with NONE must not be delivered again, a released
record keeps its delivery count, and every record reaches a final state.

The same must hold if a write to ``__share_group_state`` is torn or refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_every_step import (
    CrashingDaemon,
    counted,
    crash_at,
    cut_at,
    failing_at,
    is_off_line,
)
from tests.support import requests
from tests.support.batches import batch
from tests.support.cluster import GROUP, Cluster
from tests.support.raw import Answer, ConnectionLostError
from tests.support.share import (
    ACCEPT,
    FINAL,
    REJECT,
    RELEASE,
    Member,
    acquired,
    parts_of,
)
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]

GROUP_ID = "g"
RECORDS = 6
MOST_STEPS = 120
"""More than the number of steps of any run; the loop must end before."""
FEWEST_STEPS = 10
"""Fewer than the number of steps of a run: a member, its epochs and its assignment, the state and
its initialization, six batches, two outcomes, and the removal of the member.
"""
STATE = "__share_group_state"
MOST_WRITES = 30
"""More than the number of state writes in any run."""
FEWEST_WRITES = 5
"""Fewer than the number of state writes: the initialization, and four acknowledgements."""
KEPT = (0, 30, 61, -1, 1 << 20)
"""Bytes of a cut write that reach the disk: none, a part of the batch header, all of it, all but
one byte, and the whole write."""


class Life:
    """One run of the workload: its members, and the responses that they got."""

    def __init__(self, daemon: CrashingDaemon, topic: str, topic_id: uuid.UUID) -> None:
        self.daemon, self.topic, self.topic_id = daemon, topic, topic_id
        self.ended: set[int] = set()
        """Offsets whose accept or reject was answered with NONE."""
        self.released: dict[int, int] = {}
        """Offset → delivery count, for offsets whose release was answered with NONE."""
        self.tried: set[int] = set()
        """Offsets for which an accept or a reject was sent, with or without success."""
        self.counts: dict[int, int] = {}
        self.client: Cluster | None = None
        self.member: Member | None = None

    # --- requests ---

    def try_once(self, what: Callable[[Cluster], Any]) -> Any:
        """Send a request; return None for an unknown outcome, if the connection was lost."""
        try:
            if self.client is None:
                self.client = Cluster(self.daemon.bootstrap)
            return what(self.client)
        except (ConnectionLostError, OSError):
            self.close()
            return None

    def ask(self, api: str, version: int, **body: Any) -> Answer:
        """Send a request until it is answered."""
        found: Answer = until(
            lambda: self.try_once(lambda client: client.call(api, version, **body)), api
        )
        return found

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client = self.member = None

    # --- the life ---

    def live(self) -> None:
        name = str(uuid.uuid4())
        epoch = self.join(name)
        for number in range(RECORDS):
            self.produce(b"%d" % number)
        until(lambda: self.fetch() is not None, "a first response")
        self.acknowledge(0, ACCEPT)
        self.acknowledge(1, ACCEPT)
        self.acknowledge(2, RELEASE)
        self.acknowledge(3, REJECT)
        self.end_session()
        until(self.drain, "every record has ended")
        self.ask("share_group_heartbeat", 1, **requests.share_group_heartbeat(GROUP_ID, name, -1))
        assert epoch > 0
        assert self.tried == set(range(RECORDS)), "a record has ended by itself"
        assert self.ended, "nothing was accepted"
        self.close()

    def join(self, name: str) -> int:
        """Join, and send heartbeats until the topic is assigned."""
        epoch = 0

        def beaten() -> int:
            nonlocal epoch
            body = requests.share_group_heartbeat(
                GROUP_ID, name, epoch, subscribed_topic_names=[self.topic]
            )
            answer = self.ask("share_group_heartbeat", 1, **body)
            if answer["error_code"] != "none":
                epoch = 0
                return 0
            epoch = answer["member_epoch"]
            rows = (answer["assignment"] or {"topic_partitions": []})["topic_partitions"]
            return epoch if rows else 0

        return until(beaten, "the topic is assigned")

    def produce(self, value: bytes) -> None:
        parts = [{"index": 0, "records": batch([value])}]
        topics = [{"name": self.topic, "partition_data": parts}]

        def is_written() -> bool:
            answer = self.ask("produce", 9, acks=-1, timeout=10_000, topic_data=topics)
            code = answer["responses"][0]["partition_responses"][0]["error_code"]
            return bool(code == "none")

        until(is_written, "a record is written")

    def fetch(self) -> list[int] | None:
        """Fetch and check records; return their offsets, or None if there was no answer."""

        def sent(client: Cluster) -> Answer:
            if self.member is None:
                self.member = Member(client, GROUP_ID)
            return self.member.fetch({self.topic_id: {0: []}}, max_wait=200)

        answer = self.try_once(sent)
        if answer is None:
            return None
        part = parts_of(answer).get(0) if answer["error_code"] == "none" else None
        if part is None or part["error_code"] != "none":
            self.close()
            return None
        offsets: list[int] = []
        for first, last, count in acquired(part):
            for offset in range(first, last + 1):
                assert offset not in self.ended, f"{offset} comes again"
                assert count > self.released.get(offset, 0), f"{offset} has the count {count}"
                self.counts[offset] = count
                offsets.append(offset)
        return offsets

    def acknowledge(self, offset: int, kind: int) -> bool:
        """Acknowledge an offset; return whether the answer was NONE."""
        member = self.member
        if member is None or offset not in self.counts:
            return False
        if kind != RELEASE:
            self.tried.add(offset)
        row = (offset, offset, kind)
        answer = self.try_once(lambda _: member.acknowledge({self.topic_id: {0: [row]}}))
        if answer is None or answer["error_code"] != "none":
            return False
        if parts_of(answer)[0]["error_code"] != "none":
            return False
        if kind == RELEASE:
            self.released[offset] = self.counts[offset]
        else:
            self.ended.add(offset)
        return True

    def end_session(self) -> None:
        member = self.member
        if member is not None:
            member.epoch = FINAL
            self.try_once(lambda _: member.acknowledge({}))
        self.member = None

    def drain(self) -> bool:
        """Accept everything; return whether no record is left."""
        for offset in self.fetch() or ():
            self.acknowledge(offset, ACCEPT)
        body = requests.describe_share_group_offsets(GROUP_ID, (self.topic, [0]))
        (found,) = self.ask("describe_share_group_offsets", 1, **body)["groups"]
        (row,) = found["topics"][0]["partitions"]
        return bool(row["lag"] == 0 and row["start_offset"] >= 0)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CrashingDaemon]:
    daemon = CrashingDaemon(tmp_path / "data")
    daemon.start()
    yield daemon
    assert daemon.child is not None
    daemon.child.kill()


def prepare(daemon: CrashingDaemon) -> None:
    """Create the internal topics by one run of the workload before steps are counted."""
    with Cluster(daemon.bootstrap) as client:
        client.coordinator(GROUP_ID, GROUP)
        reset = {"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}
        resources = [{"resource_type": 32, "resource_name": GROUP_ID, "configs": [reset]}]
        answer = client.call("incremental_alter_configs", 1, resources=resources)
        assert answer["responses"][0]["error_code"] == "none", answer
    new_life(daemon, 0).live()


def new_life(daemon: CrashingDaemon, number: int) -> Life:
    with Cluster(daemon.bootstrap) as client:
        topic = client.create_topic(f"t{number}")
        return Life(daemon, topic, client.topic_id(topic))


def test_share_group_survives_a_kill_at_each_durable_step(daemon: CrashingDaemon) -> None:
    prepare(daemon)
    daemon.kill()
    daemon.start(env=crash_at(1))
    for step in range(1, MOST_STEPS):
        life = new_life(daemon, step)
        daemon.arm()
        with daemon.restarted_when(lambda: daemon.is_dead, env=crash_at(step + 1)) as starts:
            life.live()
            (steps,) = until(lambda: counted(daemon), "a daemon that lives")
        if not starts:
            assert step > steps >= FEWEST_STEPS
            return
    pytest.fail("a life never ran to its end")


@pytest.mark.parametrize("kept", KEPT)
def test_share_group_survives_a_cut_write_of_its_state(daemon: CrashingDaemon, kept: int) -> None:
    prepare(daemon)
    daemon.kill()
    daemon.start(env=cut_at(1, f"{STATE}-", kept))
    for number in range(1, MOST_WRITES):
        life = new_life(daemon, number)
        daemon.arm()
        env = cut_at(number + 1, f"{STATE}-", kept)
        with daemon.restarted_when(lambda: daemon.is_dead, env=env) as starts:
            life.live()
            (writes,) = until(lambda: counted(daemon), "a daemon that lives")
        if not starts:
            assert number > writes >= FEWEST_WRITES
            return
    pytest.fail("a life never ran to its end")


def test_share_group_survives_each_refused_write_of_its_state(daemon: CrashingDaemon) -> None:
    prepare(daemon)
    for number in range(1, MOST_WRITES):
        daemon.kill()
        daemon.start(env=failing_at(number, f"{STATE}-"))
        life = new_life(daemon, number)
        daemon.arm()
        with daemon.restarted_when(lambda: is_off_line(daemon, STATE)) as starts:
            life.live()
        assert len(starts) <= 1, "one append fails, and none after a restart"
        if not starts:
            assert number > FEWEST_WRITES
            return
    pytest.fail("the appends never come to an end")
