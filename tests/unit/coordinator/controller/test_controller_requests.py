"""The responses of a controller's listener: registration, partitions, envelopes, the quorum."""

from __future__ import annotations

import uuid

import pytest

from fencepost.cluster.records import (
    BrokerRegistrationChangeRecord,
    ClearElrRecord,
    ConfigRecord,
    PartitionChangeRecord,
    RegisterBrokerRecord,
)
from fencepost.coordinator.handlers.controller_registry import controller_registry
from tests.support.cluster import unique
from tests.support.controllers import Pretender, anonymous
from tests.support.raw import Answer, RawClient
from tests.support.waits import until
from tests.unit.coordinator.controller.conftest import Enter, Node


def test_controller_serves_only_the_apis_of_a_controller(node: Node) -> None:
    with RawClient(node.bootstrap) as client:
        answer = client.call(
            "api_versions", 3, client_software_name="x", client_software_version="1"
        )
    served = {api["api_key"] for api in answer["api_keys"]}
    assert served == set(controller_registry().versions)
    # Apache Kafka 4.4's APIs, except delegation tokens and changes of the quorum.
    kafkas = {1, *range(17, 21), *range(29, 34), *range(36, 42), *range(43, 47), *range(49, 61),
              62, 63, 64, 67, 70, 73, 80, 81, 82, 94}  # fmt: skip
    assert kafkas - served == {38, 39, 40, 41, 80, 81, 82}
    assert served <= kafkas


def test_controller_does_not_check_cluster_and_node_ids_of_a_client(node: Node) -> None:
    software = {"client_software_name": "x", "client_software_version": "1"}
    with RawClient(node.bootstrap) as client:
        for meant, error in (
            ({"cluster_id": "another", "node_id": 99}, "none"),
            ({"node_id": 99}, "invalid_request"),
        ):
            answer = client.call("api_versions", 5, **software, **meant)
            assert answer["error_code"] == error


# --- joining ---


def test_registered_broker_is_unfenced_once_it_is_caught_up(enter: Enter) -> None:
    broker = enter(joins=False)
    end = broker.end()
    assert broker.register() == {"throttle_time": 0, "error_code": "none", "broker_epoch": end}
    behind = broker.heartbeat(end - 1)
    assert (behind["error_code"], behind["is_caught_up"], behind["is_fenced"]) == (
        "none", False, True,
    )  # fmt: skip
    waits = broker.heartbeat(end, want_fence=True)
    assert (waits["is_caught_up"], waits["is_fenced"]) == (True, True)
    ready = broker.heartbeat(end, cordoned_log_dirs=[])
    assert (ready["is_caught_up"], ready["is_fenced"], ready["should_shut_down"]) == (
        True, False, False,
    )  # fmt: skip
    registered, unfenced, cordoned = broker.records(end)
    assert isinstance(registered, RegisterBrokerRecord)
    assert (registered.broker_epoch, registered.log_dirs) == (end, (broker.directory_id,))
    assert unfenced == BrokerRegistrationChangeRecord(broker.broker_id, end, fenced=-1)
    assert cordoned == BrokerRegistrationChangeRecord(broker.broker_id, end, cordoned_log_dirs=())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"cluster_id": "another"}, "inconsistent_cluster_id"),
        ({"log_dirs": []}, "invalid_registration"),
        ({"log_dirs": [uuid.UUID(int=0)]}, "invalid_registration"),
        ({"log_dirs": [uuid.uuid4() for _ in range(101)]}, "invalid_registration"),
        ({"log_dirs": [uuid.uuid4() for _ in range(100)]}, "none"),
        ({"features": []}, "invalid_registration"),
        (
            {
                "features": [
                    {
                        "name": "metadata.version",
                        "min_supported_version": 7,
                        "max_supported_version": 29,
                    }
                ]
            },
            "unsupported_version",
        ),
        ({"is_migrating_zk_broker": True}, "broker_id_not_registered"),
    ],
)
def test_invalid_broker_registration_is_refused(
    enter: Enter, changes: dict[str, object], error: str
) -> None:
    broker = enter(joins=False)
    end = broker.end()
    assert broker.register(**changes)["error_code"] == error
    assert (broker.end() == end) == (error != "none")


def test_registration_by_another_incarnation_of_a_live_broker_is_refused(enter: Enter) -> None:
    broker = enter()
    other = enter(joins=False, broker_id=broker.broker_id)
    assert other.register()["error_code"] == "duplicate_broker_registration"
    assert broker.register()["broker_epoch"] == broker.broker_epoch
    assert broker.heartbeat(broker_epoch=broker.broker_epoch + 1)["error_code"] == (
        "stale_broker_epoch"
    )


# --- partitions ---


def two(enter: Enter) -> tuple[Pretender, Pretender]:
    return enter(), enter()


def test_alter_partition_updates_the_isr_or_returns_the_error(enter: Enter) -> None:
    leader, follower = two(enter)
    topic_id = leader.topic(unique("t"), (leader.broker_id, follower.broker_id))
    me, other = ((broker.broker_id, broker.broker_epoch) for broker in (leader, follower))
    assert leader.alter_partition(topic_id, 0, 0, [me]) == {
        "partition_index": 0,
        "error_code": "none",
        "leader_id": leader.broker_id,
        "leader_epoch": 0,
        "isr": [leader.broker_id],
        "leader_recovery_state": 0,
        "partition_epoch": 1,
    }

    def error(*arguments: object, sender: Pretender = leader, **changes: object) -> str:
        answer = sender.alter_partition(*arguments, **changes)  # type: ignore[arg-type]
        return str(answer["error_code"])

    assert error(topic_id, 0, 0, [me]) == "invalid_update_version"
    assert error(topic_id, 1, 1, [me]) == "not_controller"
    assert error(topic_id, 0, 1, [other], sender=follower) == "invalid_request"
    assert error(topic_id, 0, 1, [me, (follower.broker_id, 0)]) == "ineligible_replica"
    assert error(topic_id, 0, 1, [me, other], index=1) == "unknown_topic_or_partition"
    assert error(uuid.uuid4(), 0, 1, [me]) == "unknown_topic_id"
    assert error(topic_id, 0, 1, [me], broker_epoch=0) == "stale_broker_epoch"
    assert error(topic_id, 0, 1, [me, other]) == "none"


def test_alter_partition_version_2_without_broker_epochs_updates_the_isr(enter: Enter) -> None:
    leader, follower = two(enter)
    topic_id = leader.topic(unique("t"), (leader.broker_id, follower.broker_id))
    answer = leader.controller.call(
        "alter_partition",
        2,
        broker_id=leader.broker_id,
        broker_epoch=leader.broker_epoch,
        topics=[
            {
                "topic_id": topic_id,
                "partitions": [{"partition_index": 0, "new_isr": [leader.broker_id]}],
            }
        ],
    )
    assert answer["topics"][0]["partitions"][0]["isr"] == [leader.broker_id]


def test_reassignment_completes_with_a_new_leader_once_the_target_is_in_sync(enter: Enter) -> None:
    leader, target = two(enter)
    name = unique("t")
    topic_id = leader.topic(name, (leader.broker_id,))

    def move(replicas: list[int] | None) -> str:
        answer = leader.controller.call(
            "alter_partition_reassignments",
            1,
            timeout=10_000,
            topics=[{"name": name, "partitions": [{"partition_index": 0, "replicas": replicas}]}],
        )
        return str(answer["responses"][0]["partitions"][0]["error_code"])

    def under_way() -> list[object]:
        answer = leader.controller.call("list_partition_reassignments", 0, topics=None)
        return [topic["partitions"] for topic in answer["topics"] if topic["name"] == name]

    assert move(None) == "no_reassignment_in_progress"
    assert move([1]) == "invalid_replica_assignment"
    assert move([target.broker_id]) == "none"
    assert under_way() == [[
        {
            "partition_index": 0,
            "replicas": [target.broker_id, leader.broker_id],
            "adding_replicas": [target.broker_id],
            "removing_replicas": [leader.broker_id],
        }
    ]]  # fmt: skip
    end = leader.end()
    both = [(broker.broker_id, broker.broker_epoch) for broker in (leader, target)]
    assert leader.alter_partition(topic_id, 0, 1, both)["error_code"] == "new_leader_elected"
    (change,) = leader.records(end)
    assert isinstance(change, PartitionChangeRecord)
    assert (change.leader, change.isr, change.replicas) == (
        target.broker_id, (target.broker_id,), (target.broker_id,),
    )  # fmt: skip
    assert under_way() == []


def test_leader_election_returns_not_needed_or_preferred_not_available(enter: Enter) -> None:
    first, second = two(enter)
    name = unique("t")
    first.topic(name, (first.broker_id, second.broker_id))

    def elect(kind: int) -> str:
        answer = first.controller.call(
            "elect_leaders",
            2,
            election_type=kind,
            timeout=10_000,
            topic_partitions=[{"topic": name, "partitions": [0]}],
        )
        return str(answer["replica_election_results"][0]["partition_result"][0]["error_code"])

    assert elect(0) == elect(1) == "election_not_needed"
    first.heartbeat(want_fence=True)
    assert elect(0) == "preferred_leader_not_available"


def test_controlled_shutdown_moves_leaders_before_the_broker_may_stop(enter: Enter) -> None:
    leader, other = two(enter)
    leader.topic(unique("t"), (leader.broker_id, other.broker_id))
    end = leader.end()
    assert not leader.heartbeat(want_shut_down=True)["should_shut_down"]
    shutdown, moved = leader.records(end)
    assert isinstance(shutdown, BrokerRegistrationChangeRecord)
    assert shutdown.in_controlled_shutdown == 1
    assert isinstance(moved, PartitionChangeRecord)
    assert (moved.isr, moved.leader) == ((other.broker_id,), other.broker_id)


def test_assign_replicas_to_dirs_of_unknown_partitions_returns_errors(enter: Enter) -> None:
    broker = enter()
    topic_id = broker.topic(unique("t"), (broker.broker_id,))
    asked = [(topic_id, 0), (topic_id, 1), (uuid.uuid4(), 0)]
    answer = broker.controller.call(
        "assign_replicas_to_dirs",
        0,
        broker_id=broker.broker_id,
        broker_epoch=broker.broker_epoch,
        directories=[
            {
                "id_": broker.directory_id,
                "topics": [
                    {"topic_id": asked_id, "partitions": [{"partition_index": index}]}
                    for asked_id, index in asked
                ],
            }
        ],
    )
    codes = [topic["partitions"][0]["error_code"] for topic in answer["directories"][0]["topics"]]
    assert codes == ["none", "unknown_topic_or_partition", "unknown_topic_id"]


def test_producer_id_blocks_are_consecutive_and_need_the_broker_epoch(enter: Enter) -> None:
    one, other = two(enter)

    def block(broker: Pretender, **changes: int) -> dict[str, object]:
        fields = {"broker_id": broker.broker_id, "broker_epoch": broker.broker_epoch, **changes}
        return broker.controller.call("allocate_producer_ids", 0, **fields)

    first = block(one)
    assert (first["error_code"], first["producer_id_len"]) == ("none", 1000)
    assert block(other)["producer_id_start"] == first["producer_id_start"] + 1000  # type: ignore[operator]
    assert block(one, broker_epoch=0)["error_code"] == "stale_broker_epoch"


def test_unregistered_broker_gets_stale_broker_epoch(enter: Enter) -> None:
    gone, stays = two(enter)
    for error in ("none", "broker_id_not_registered"):
        answer = stays.controller.call("unregister_broker", 0, broker_id=gone.broker_id)
        assert answer["error_code"] == error
    assert gone.heartbeat()["error_code"] == "stale_broker_epoch"


# --- envelopes ---


def test_envelope_is_unwrapped_and_its_request_served(enter: Enter) -> None:
    broker = enter()
    name = unique("t")
    topics = [{"name": name, "num_partitions": 2, "replication_factor": 1}]
    for outcome in ("none", "topic_already_exists"):
        error, inside = broker.envelope("create_topics", 7, timeout=10_000, topics=topics)
        assert error == "none"
        assert inside is not None
        assert inside["topics"][0]["error_code"] == outcome


def test_forwarded_create_topics_counts_toward_the_mutation_quota_of_its_user(
    enter: Enter, node: Node
) -> None:
    broker = enter()

    def limit(rate: float | None) -> None:
        entity = [{"entity_type": "user", "entity_name": "alice"}]
        op = {"key": "controller_mutation_rate", "value": rate or 0, "remove": rate is None}
        entries = [{"entity": entity, "ops": [op]}]
        answer = broker.controller.call(
            "alter_client_quotas", 1, entries=entries, validate_only=False
        )
        assert answer["entries"][0]["error_code"] == "none"
        until(lambda: node.ask(lambda its: its.quotas.limits_clients) is bool(rate), "the quota")

    def create(user: str, version: int = 7) -> Answer:
        topics = [{"name": unique("t"), "num_partitions": 100, "replication_factor": 1}]
        _, inside = broker.envelope(
            "create_topics", version, principal=anonymous(user), timeout=10_000, topics=topics
        )
        assert inside is not None
        return {"wait": inside["throttle_time"], "error": inside["topics"][0]["error_code"]}

    limit(1.0)
    try:
        first, second = create("alice"), create("alice")
        assert first == {"wait": 0, "error": "none"}
        assert second["error"] == "throttling_quota_exceeded"
        assert second["wait"] > 60_000  # ms, for 100 mutations minus the burst, at 1 per second
        # An old client waits only after the response, and the broker's connection is not muted.
        old = create("alice", 5)
        assert old["error"] == "none"
        assert old["wait"] > second["wait"]
        assert create("bob") == {"wait": 0, "error": "none"}
    finally:
        limit(None)


def test_envelope_with_invalid_contents_is_refused(enter: Enter) -> None:
    broker = enter()
    topics = [{"name": "x"}]
    bare = anonymous()[2:]
    assert broker.envelope("create_topics", 7, principal=bare, topics=topics) == (
        "principal_deserialization_failure", None,
    )  # fmt: skip
    assert broker.envelope("create_topics", 7, principal=b"\0\0\xff", topics=topics)[0] == (
        "principal_deserialization_failure"
    )
    assert (
        broker.envelope("create_topics", 7, host=b"\1\2\3", topics=topics)[0] == "invalid_request"
    )
    assert broker.envelope("create_topics", 7, data=b"\0\x13")[0] == "invalid_request"
    assert broker.envelope("create_topics", 7, data=b"\0\x13\0\x63\0\0\0\1\xff\xff")[0] == (
        "unsupported_version"
    )
    # An Envelope must contain a client's forwarded request; brokers send heartbeats directly.
    assert broker.envelope("broker_heartbeat", 2, cordoned_log_dirs=None)[0] == "invalid_request"


# --- the quorum ---


def test_vote_and_registration_requests_of_other_controllers_are_refused(enter: Enter) -> None:
    broker = enter(joins=False)
    part = {"partition_index": 0}
    topics = [{"topic_name": "__cluster_metadata", "partitions": [part]}]
    for api, version in (("vote", 2), ("begin_quorum_epoch", 1), ("end_quorum_epoch", 1)):
        answer = broker.controller.call(api, version, cluster_id=broker.cluster_id, topics=topics)
        told = answer["topics"][0]["partitions"][0]
        assert (told["error_code"], told["leader_id"], told["leader_epoch"]) == (
            "inconsistent_voter_set", 3000, broker.quorum_epoch,
        )  # fmt: skip
        assert not told.get("vote_granted")
        other = broker.controller.call(api, version, cluster_id="another", topics=topics)
        assert other["error_code"] == "inconsistent_cluster_id"
        none = broker.controller.call(api, version, cluster_id=None, topics=[])
        assert none["error_code"] == "invalid_request"
    stranger = broker.controller.call("controller_registration", 0, controller_id=7)
    assert stranger["error_code"] == "invalid_request"
    own = broker.controller.call("controller_registration", 0, controller_id=3000)
    assert own["error_code"] == "none"


def test_describe_cluster_on_the_controller_returns_the_controllers(
    enter: Enter, node: Node
) -> None:
    broker = enter(joins=False)
    answer = broker.controller.call("describe_cluster", 2, endpoint_type=2)
    host, port = node.bootstrap.split(":")
    assert (answer["error_code"], answer["cluster_id"], answer["controller_id"]) == (
        "none", broker.cluster_id, 3000,
    )  # fmt: skip
    (controller,) = answer["brokers"]
    assert (controller["broker_id"], controller["host"], controller["port"]) == (
        3000, host, int(port),
    )  # fmt: skip
    brokers = broker.controller.call("describe_cluster", 2, endpoint_type=1)
    assert brokers["error_code"] == "mismatched_endpoint_type"


def test_describe_quorum_returns_voters_and_observers(enter: Enter) -> None:
    broker = enter()
    end = broker.end()
    broker.part(end, broker.quorum_epoch)
    answer = broker.controller.call(
        "describe_quorum",
        2,
        topics=[{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}],
    )
    part = answer["topics"][0]["partitions"][0]
    assert (part["leader_id"], part["leader_epoch"], part["high_watermark"]) == (
        3000, broker.quorum_epoch, end,
    )  # fmt: skip
    assert [voter["replica_id"] for voter in part["current_voters"]] == [3000]
    (observer,) = [row for row in part["observers"] if row["replica_id"] == broker.broker_id]
    assert observer["log_end_offset"] == end
    assert observer["last_caught_up_timestamp"] == observer["last_fetch_timestamp"] > 0


def test_controller_warm_up_succeeds_without_client_apis(node: Node) -> None:
    node.thread.call(node.broker.warm_up)


# --- settings ---


def test_controller_validates_and_stores_configs_of_brokers_and_topics(enter: Enter) -> None:
    broker = enter()

    def alter(kind: int, name: str, key: str, value: str) -> str:
        error, inside = broker.envelope(
            "incremental_alter_configs",
            1,
            resources=[
                {
                    "resource_type": kind,
                    "resource_name": name,
                    "configs": [{"name": key, "config_operation": 0, "value": value}],
                }
            ],
        )
        assert error == "none"
        assert inside is not None
        return str(inside["responses"][0]["error_code"])

    end = broker.end()
    own = str(broker.broker_id)
    assert alter(4, own, "log.cleaner.delete.retention.ms", "7") == "none"
    assert broker.records(end) == [ConfigRecord(4, own, "log.cleaner.delete.retention.ms", "7")]
    assert alter(4, "99", "log.cleaner.delete.retention.ms", "7") == "invalid_request"
    # With eligible leader replicas all brokers share one min.insync.replicas.
    assert alter(4, own, "min.insync.replicas", "2") == "invalid_config"
    name = unique("t")
    broker.topic(name, (broker.broker_id,))
    end = broker.end()
    assert alter(2, name, "min.insync.replicas", "2") == "none"
    assert broker.records(end) == [
        ConfigRecord(2, name, "min.insync.replicas", "2"), ClearElrRecord(name)
    ]  # fmt: skip


def test_feature_update_to_an_unsupported_level_is_refused(enter: Enter) -> None:
    broker = enter()

    def update(name: str, level: int, kind: int) -> str:
        error, inside = broker.envelope(
            "update_features",
            2,
            feature_updates=[{"feature": name, "max_version_level": level, "upgrade_type": kind}],
        )
        assert error == "none"
        assert inside is not None
        return str(inside["error_code"])

    assert update("transaction.version", 1, 2) == "none"
    assert update("transaction.version", 2, 1) == "none"
    assert update("transaction.version", 3, 1) == "invalid_update_version"
    assert update("metadata.version", 29, 3) == "invalid_update_version"
