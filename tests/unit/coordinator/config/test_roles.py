"""The roles that a configuration gives a node, and contradictory configurations."""

from __future__ import annotations

import pytest

from fencepost.coordinator.config.broker_config import BrokerConfig, ConfigError
from fencepost.coordinator.config.listeners import controller_listeners
from fencepost.coordinator.config.roles import roles_of
from fencepost.coordinator.replication.quorum import QuorumConfig, intervals_of

MEMBER = {
    "process.roles": "broker",
    "node.id": "101",
    "controller.quorum.bootstrap.servers": "a:1, b:2",
    "controller.listener.names": "CONTROLLER",
    "listeners": "PLAINTEXT://127.0.0.1:0",
}


def test_node_by_default_is_broker_and_controller_without_a_cluster() -> None:
    roles = roles_of(BrokerConfig({}))
    assert (roles.is_broker, roles.is_controller, roles.is_member) == (True, True, False)


def test_combined_node_registers_over_the_network_only_with_a_controller_listener() -> None:
    """Apache Kafka's own configuration file has such a listener."""
    config = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.bootstrap.servers": "localhost:9093",
        "controller.listener.names": "CONTROLLER",
        "listeners": "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093",
    }
    roles = roles_of(BrokerConfig(config))
    assert (roles.is_member, roles.registers) == (False, True)
    alone = roles_of(BrokerConfig({**config, "listeners": "PLAINTEXT://127.0.0.1:9092"}))
    assert (alone.is_member, alone.registers) == (False, False)
    with pytest.raises(ConfigError, match="must be the only one of its cluster"):
        roles_of(BrokerConfig({**config, "controller.quorum.bootstrap.servers": "a:1,b:1"}))


def test_broker_with_controller_quorum_bootstrap_servers_is_a_cluster_member() -> None:
    config = BrokerConfig(MEMBER)
    roles = roles_of(config)
    assert (roles.is_broker, roles.is_controller, roles.is_member) == (True, False, True)
    quorum = QuorumConfig.of(config, roles)
    assert list(quorum.bootstrap) == [("a", 1), ("b", 2)]
    assert (quorum.voters, quorum.listener) == ({}, "CONTROLLER")
    assert intervals_of(config).heartbeat_ms == 2_000


def test_quorum_voters_are_used_as_bootstrap_servers() -> None:
    config = BrokerConfig(
        {**MEMBER, "controller.quorum.bootstrap.servers": "", "controller.quorum.voters": "1@a:1"}
    )
    quorum = QuorumConfig.of(config, roles_of(config))
    assert (list(quorum.bootstrap), quorum.voters) == ([("a", 1)], {1: ("a", 1)})


def test_controller_node_listens_only_on_the_controller_listener() -> None:
    config = BrokerConfig(
        {
            "process.roles": "controller",
            "node.id": "3",
            "controller.quorum.voters": "3@127.0.0.1:9093",
            "controller.listener.names": "CONTROLLER",
            "listeners": "CONTROLLER://127.0.0.1:9093",
        }
    )
    roles = roles_of(config)
    assert (roles.is_broker, roles.is_controller) == (False, True)
    (listener,) = controller_listeners(config).values()
    assert (listener.name, listener.port, listener.protocol) == ("CONTROLLER", 9093, "PLAINTEXT")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"process.roles": ""}, "a broker, a controller, or both"),
        ({"process.roles": "broker,zookeeper"}, "String must be one of: broker, controller"),
        ({"controller.quorum.bootstrap.servers": ""}, "must contain the set of bootstrap"),
        ({"controller.quorum.bootstrap.servers": "a"}, "not an address of the form HOST:PORT"),
        ({"controller.quorum.voters": "a:1"}, "not a voter of the form ID@HOST:PORT"),
        ({"controller.quorum.voters": "101@a:1"}, "the node id 101 must not be included"),
        ({"control.plane.listener.name": "PLAINTEXT"}, "zookeeper.connect is not set"),
        ({"controller.listener.names": ""}, "at least one value with just the broker role"),
        ({"controller.listener.names": "PLAINTEXT,X"}, "must not contain a value appearing in"),
        ({"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT"}, "not found in listener.sec"),
        (
            {"listeners": "SSL://127.0.0.1:0", "process.roles": "broker"},
            "not found in listener.security.protocol.map",
        ),
        (
            {"process.roles": "broker,controller", "controller.quorum.voters": "1@a:1"},
            "the node id 101 must be included in the set",
        ),
        (
            {"process.roles": "broker,controller", "controller.quorum.voters": "1@a:1,101@b:1"},
            "a Fencepost controller must be the only one of its cluster",
        ),
        ({"process.roles": "controller"}, "only values appearing in 'listeners'"),
        (
            {
                "process.roles": "controller",
                "listeners": "CONTROLLER://127.0.0.1:1,PLAINTEXT://127.0.0.1:2",
            },
            "only contain listeners from controller.listener.names",
        ),
    ],
)
def test_contradictory_roles_are_refused_with_kafkas_error_messages(
    changed: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        roles_of(BrokerConfig({**MEMBER, **changed}))
