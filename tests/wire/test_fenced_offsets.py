"""A refused TxnOffsetCommit does not disturb the other groups of the same coordinator shard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.stubborn_client import StubbornClient
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.own_broker import own_broker
from tests.support.raw import Answer, errors_in
from tests.support.targets import Target

TRIES = 5
NO_GENERATION = -1


@pytest.fixture(scope="module")
def bootstrap(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield a broker without partition verification, whose groups are all in one shard."""
    settings = {
        "offsets.topic.num.partitions": "1",
        "transaction.partition.verification.enable": "false",
    }
    with own_broker(request, tmp_path_factory.mktemp("fenced"), settings) as broker:
        yield broker.bootstrap


@pytest.fixture(params=[1, 2], ids=["tv1", "tv2"])
def client(bootstrap: str, request: pytest.FixtureRequest) -> Iterator[StubbornClient]:
    made = StubbornClient(bootstrap, unique("fenced"), version=request.param)
    yield made
    made.close()


class Member:
    """The only member of another classic group in the same shard."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._group = unique("other")
        cluster.coordinator(self._group, GROUP)
        joined = cluster.call(
            "join_group",
            3,
            group_id=self._group,
            session_timeout=30_000,
            rebalance_timeout=30_000,
            member_id="",
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        self._place = {
            "group_id": self._group,
            "generation_id": joined["generation_id"],
            "member_id": joined["member_id"],
        }
        synced = cluster.call("sync_group", 3, assignments=[], **self._place)
        assert (joined["error_code"], synced["error_code"]) == ("none", "none")

    def beats(self) -> bool:
        return self._cluster.call("heartbeat", 3, **self._place)["error_code"] == "none"


def commit_offset(cluster: Cluster, client: StubbornClient, group: str, topic: str) -> list[str]:
    """Send one TxnOffsetCommit; return the errors of its response."""
    answer: Answer = cluster.call(
        "txn_offset_commit",
        5 if client.version == 2 else 3,
        transactional_id=client.name,
        group_id=group,
        producer_id=client.producer_id,
        producer_epoch=client.epoch,
        generation_id=NO_GENERATION,
        member_id="",
        topics=[
            {
                "name": topic,
                "partitions": [
                    {
                        "partition_index": 0,
                        "committed_offset": 99,
                        "committed_leader_epoch": -1,
                        "committed_metadata": "",
                    }
                ],
            }
        ],
    )
    return errors_in(answer)


def test_fenced_offset_commit_does_not_disturb_other_groups(
    bootstrap: str, cluster: Cluster, client: StubbornClient
) -> None:
    topic, group = cluster.create_topic(unique("fenced")), unique("group")
    client.claim()
    client.send_offset(group, topic, 7)
    other = Member(cluster)
    successor = StubbornClient(bootstrap, client.name, version=client.version)
    successor.claim()
    successor.send_offset(group, topic, 8)
    for _ in range(TRIES):
        assert commit_offset(cluster, client, group, topic) == ["invalid_producer_epoch"]
        assert other.beats()
    successor.end(commit=True)
    successor.close()
    assert cluster.committed(group, topic, stable=True) == 8
    assert other.beats()


@pytest.mark.parametrize(("has_id", "has_epoch"), [(False, True), (True, False), (False, False)])
def test_txn_offset_commit_without_producer_id_or_epoch_is_refused(
    cluster: Cluster, target: Target, client: StubbornClient, has_id: bool, has_epoch: bool
) -> None:
    """Apache Kafka accepts offsets without a producer id, and fails if there is no epoch."""
    if target.name != "fencepost":
        pytest.skip("where nothing is verified, another answer of ours")
    topic, group = cluster.create_topic(unique("nobody")), unique("group")
    client.claim()
    client.producer_id = client.producer_id if has_id else -1
    client.epoch = client.epoch if has_epoch else -1
    answer = commit_offset(cluster, client, group, topic)
    assert answer == ["invalid_producer_epoch" if has_id else "invalid_producer_id_mapping"]
    assert cluster.committed(group, topic, stable=True) == -1


def test_producer_fenced_by_a_marker_does_not_disturb_other_groups(
    cluster: Cluster, client: StubbornClient
) -> None:
    topic, group = cluster.create_topic(unique("fenced")), unique("group")
    client.claim()
    client.send_offset(group, topic, 7)
    other = Member(cluster)
    marker = {
        "producer_id": client.producer_id,
        "producer_epoch": client.epoch + 1,
        "transaction_result": False,
        "topics": [{"name": "__consumer_offsets", "partition_indexes": [0]}],
        "coordinator_epoch": 0,
        "transaction_version": 0,
    }
    marked = cluster.call("write_txn_markers", 2, markers=[marker])
    assert set(errors_in(marked)) == {"none"}
    for _ in range(TRIES):
        assert commit_offset(cluster, client, group, topic) == ["invalid_producer_epoch"]
        assert other.beats()
    assert cluster.committed(group, topic, stable=True) == -1
