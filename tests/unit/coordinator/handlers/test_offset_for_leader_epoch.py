"""OffsetForLeaderEpoch, through a socket and Kafka's own message schemas."""

from __future__ import annotations

from fencepost.coordinator.daemon.broker import Broker
from tests.support.cluster import EARLIEST, Cluster
from tests.unit.coordinator.handlers.asking import fetch_parts


def test_offset_for_leader_epoch_returns_end_offsets_after_a_restart(tmp_path):
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        client.create_topic("a")
        client.produce("a", [b"0", b"1"])
    with Broker.in_thread(tmp_path) as broker, Cluster(broker.bootstrap) as client:
        (topic,) = client.call("metadata", 9, topics=[{"name": "a"}])["topics"]
        assert topic["partitions"][0]["leader_epoch"] == 1

        def end_of(epoch: int, current: int = -1):
            parts = [{"partition": 0, "leader_epoch": epoch, "current_leader_epoch": current}]
            answer = client.call(
                "offset_for_leader_epoch", 4, topics=[{"topic": "a", "partitions": parts}]
            )
            part = answer["topics"][0]["partitions"][0]
            return part["error_code"], part["leader_epoch"], part["end_offset"]

        # The new epoch has no records yet, and begins at the log end offset.
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1) == ("none", 1, 2)
        client.produce("a", [b"2"])
        assert end_of(0) == ("none", 0, 2)
        assert end_of(1, 1) == ("none", 1, 3)
        assert end_of(2) == ("none", -1, -1)
        assert end_of(0, 0)[0] == "fenced_leader_epoch"
        assert end_of(0, 2)[0] == "unknown_leader_epoch"

        def fetch(offset: int, **epochs: int):
            answer = fetch_parts(client, [{"fetch_offset": offset, **epochs}], topic="a")
            return answer["responses"][0]["partitions"][0]

        assert fetch(0, current_leader_epoch=0)["error_code"] == "fenced_leader_epoch"
        assert fetch(0, current_leader_epoch=2)["error_code"] == "unknown_leader_epoch"
        assert fetch(3, last_fetched_epoch=1)["diverging_epoch"] == {"epoch": -1, "end_offset": -1}
        diverging = fetch(3, last_fetched_epoch=0)
        assert (diverging["diverging_epoch"], diverging["records"]) == (
            {"epoch": 0, "end_offset": 2}, b"",
        )  # fmt: skip
        assert fetch(2, last_fetched_epoch=5)["error_code"] == "offset_out_of_range"

        answer = client.call(
            "list_offsets", 4, replica_id=-1, topics=[{"name": "a", "partitions": [
                {"partition_index": 0, "timestamp": EARLIEST, "current_leader_epoch": 1}]}],
        )  # fmt: skip
        part = answer["topics"][0]["partitions"][0]
        assert (part["offset"], part["leader_epoch"]) == (0, 0)
