"""A broker of Fencepost in a cluster of three Apache Kafka controllers; the active one fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.oracle.test_joining import brokers, created, leaders
from tests.support import kafka43
from tests.support.cluster import Cluster
from tests.support.failover import PARTITIONS, PATIENCE, SOURCE, Group, Writer
from tests.support.kafka import Kafka, Libs, jars, quorum_of_three
from tests.support.member import Member
from tests.support.pipeline import Clients
from tests.support.waits import until

OURS, LATE = 101, 102
QUORUM = {"metadata.log.max.record.bytes.between.snapshots": "2000"}


class Voters:
    """Controllers that are no brokers, and the settings with which a broker finds them."""

    def __init__(self, directory: Path, *, is_dynamic: bool, libs: Libs) -> None:
        self.nodes = quorum_of_three(
            directory, QUORUM, is_broker=False, is_dynamic=is_dynamic, libs=libs
        )
        addresses = ",".join(node.controller for node in self.nodes)
        voters = ",".join(f"{node.node_id}@{node.controller}" for node in self.nodes)
        self.addresses = addresses if is_dynamic else ""
        self.told = {} if is_dynamic else {"controller.quorum.voters": voters}

    def member(self, home: Path, node_id: int) -> Member:
        return Member(home, self.addresses, node_id=node_id, settings=self.told)

    def active(self, *, but: Kafka | None = None) -> Kafka | None:
        """Return the controller whose own DescribeQuorum names it as the leader, or None."""
        for node in self.nodes:
            if node is not but:
                with Cluster(node.controller) as client:
                    answer = client.call(
                        "describe_quorum",
                        2,
                        topics=[
                            {
                                "topic_name": "__cluster_metadata",
                                "partitions": [{"partition_index": 0}],
                            }
                        ],
                    )
                part = answer["topics"][0]["partitions"][0]
                if part["error_code"] == "none" and part["leader_id"] == node.node_id:
                    return node
        return None

    def stop(self) -> None:
        for node in self.nodes:
            if node.child is not None:
                node.stop()


@contextmanager
def without(voters: Voters, way: str) -> Iterator[None]:
    """Stop or kill the active controller; restart it once another controller is active."""
    gone = until(voters.active, "an active controller")
    assert gone.child is not None
    if way == "kill":
        gone.kill()
    else:
        os.kill(gone.child.pid, signal.SIGSTOP)
    try:
        until(lambda: voters.active(but=gone), f"another controller after a {way}")
        yield
    finally:
        if way == "freeze":
            os.kill(gone.child.pid, signal.SIGCONT)
    if way == "kill":
        gone.launch()
        gone.wait()


@pytest.mark.parametrize(
    ("kind", "libs", "protocol", "ways"),
    [
        pytest.param("dynamic", jars, "consumer", ("kill", "freeze"), id="dynamic-4.4"),
        pytest.param("static", kafka43.jars, "classic", ("kill",), id="static-4.3"),
    ],
)
def test_broker_serves_while_the_active_controller_fails(
    tmp_path: Path, kind: str, libs: Libs, protocol: str, ways: tuple[str, ...]
) -> None:
    """No record is lost or duplicated, the broker stays registered, and requests succeed."""
    voters = Voters(tmp_path, is_dynamic=kind == "dynamic", libs=libs)
    member, late = (voters.member(tmp_path / str(node_id), node_id) for node_id in (OURS, LATE))
    try:
        member.start()
        created(member.bootstrap, SOURCE, [[OURS]] * PARTITIONS)
        until(lambda: set(leaders(member.bootstrap, SOURCE).values()) == {OURS}, "the leaders")
        clients = Clients(member.bootstrap, PATIENCE)
        writer, group = Writer(member.bootstrap), Group(clients, protocol)
        for thread in (writer, *group.members):
            thread.start()
        until(lambda: len(group.committed) == PARTITIONS, "the group is at work")
        for way in ways:
            with without(voters, way):
                writer.goes_on(f"producing after a {way}")
                until(lambda way=way: _made(member, way), f"a topic after a {way}")
                assert brokers(member)[OURS] is False
        late.start()
        for name in (*ways, SOURCE):
            assert set(leaders(late.bootstrap, name).values()) == {OURS}
        snapshots = [path for node in voters.nodes for path in node.data_dir.rglob("0*.checkpoint")]
        assert any(not snapshot.name.startswith("0" * 20) for snapshot in snapshots)
        writer.stopping.set()
        writer.join(90)
        until(lambda: group.seen == set(range(writer.sent)), "the group has read all")
        for reader in group.members:
            reader.stopping.set()
            reader.join(90)
        assert writer.refused == []
        found = [int(message.value()) for message in clients.messages(SOURCE, PARTITIONS)]
        assert sorted(found) == list(range(writer.sent))
        assert member.child is not None
        said = [line for line in member.child.lines if "has registered the broker" in line]
        assert len(said) == 1, "it is the same broker to every controller"
        for broker in (late, member):
            broker.stop()
    finally:
        for broker in (member, late):
            if broker.child is not None:
                broker.kill()
        voters.stop()


def _made(member: Member, name: str) -> bool:
    """Send CreateTopics to the active controller; return whether the topic exists."""
    topic = {
        "name": name,
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [{"partition_index": 0, "broker_ids": [OURS]}],
    }
    with Cluster(member.bootstrap, deadline_s=90) as client:
        answer = client.call("create_topics", 5, timeout=5_000, topics=[topic])
    if answer["topics"][0]["error_code"] not in ("none", "topic_already_exists"):
        return False
    return leaders(member.bootstrap, name) == {0: OURS}
