"""The roles of a node, and checks that its configuration does not contradict them.

Source: ``KafkaConfig.validateValues``, ``QuorumConfig.parseVoterConnections``, KIP-853.
"""

from __future__ import annotations

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import SecurityProtocol
from fencepost.coordinator.config.listeners import (
    CONTROL_PLANE,
    CONTROLLER_LISTENERS,
    LISTENERS,
    PROTOCOLS,
    Address,
    listener_names,
    parse_address,
    protocols_of_listeners,
)
from fencepost.logcore.values import dataclass

ROLES = "process.roles"
ZOOKEEPER = "zookeeper.connect"
BROKER, CONTROLLER = "broker", "controller"
BOOTSTRAP, VOTERS = "controller.quorum.bootstrap.servers", "controller.quorum.voters"


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of a node, and how it reaches its controllers."""

    is_broker: bool
    is_controller: bool
    bootstrap: tuple[Address, ...] = ()
    """Addresses of controllers, as configured."""
    voters: tuple[tuple[int, Address], ...] = ()
    """(id, address) of the voters of a static quorum."""
    controller_listener: str = ""
    """The first of ``controller.listener.names``, used to connect to controllers; empty if none."""
    controller_protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    """The security protocol of ``controller_listener``."""
    elects: bool = False
    """Whether the brokers elect the controller among themselves, on ZooKeeper."""
    decides_for_others: bool = False
    """Whether the node is also the controller of other brokers: it has a controller listener."""

    @property
    def is_member(self) -> bool:
        """Whether the node is a broker whose controllers are other nodes."""
        return self.is_broker and not self.is_controller

    @property
    def registers(self) -> bool:
        """Whether the node is a broker that registers with a controller over the network."""
        return self.is_member or (self.is_broker and self.decides_for_others)


def roles_of(config: BrokerConfig) -> Roles:
    """Return the roles that the configuration gives this node. Raises ConfigError."""
    roles = config.items(ROLES)
    if config.text(ZOOKEEPER):
        if set(roles) != {BROKER, CONTROLLER}:
            reason = f"a node has no roles where {ZOOKEEPER} is set: every broker is a candidate"
            raise ConfigError(ROLES, config.get(ROLES), reason)
        return Roles(is_broker=True, is_controller=False, elects=True)
    if config.text(CONTROL_PLANE):
        reason = f"it is for brokers on ZooKeeper, and {ZOOKEEPER} is not set"
        raise ConfigError(CONTROL_PLANE, config.text(CONTROL_PLANE), reason)
    if not roles:
        raise ConfigError(ROLES, "", "a node is a broker, a controller, or both")
    voters = _voters(config)
    bootstrap = _bootstrap(config) or tuple(address for _, address in voters)
    names = [name.upper() for name in config.items(CONTROLLER_LISTENERS)]
    protocols = protocols_of_listeners(config)
    result = Roles(
        BROKER in roles,
        CONTROLLER in roles,
        bootstrap,
        voters,
        names[0] if names else "",
        protocols.get(names[0], SecurityProtocol.PLAINTEXT)
        if names
        else SecurityProtocol.PLAINTEXT,
        decides_for_others=CONTROLLER in roles
        and any(name in names for name in listener_names(config)),
    )
    if result.is_controller:
        _check_controller(config, result, names)
    else:
        _check_member(config, result, names, protocols)
    return result


def _check_member(
    config: BrokerConfig,
    roles: Roles,
    names: list[str],
    protocols: dict[str, SecurityProtocol],
) -> None:
    """Check the settings of a broker whose controllers are other nodes. Raises ConfigError."""
    if not roles.bootstrap:
        raise ConfigError(
            ROLES,
            config.get(ROLES),
            f"either {BOOTSTRAP} must contain the set of bootstrap controllers or {VOTERS} must"
            " contain a parseable set of controllers",
        )
    node_id = config.int("node.id")
    if any(voter == node_id for voter, _ in roles.voters):
        raise ConfigError(
            ROLES,
            config.get(ROLES),
            f"with just the 'broker' role, the node id {node_id} must not be included in the set"
            f" of voters {VOTERS}",
        )
    if not names:
        reason = "it must contain at least one value with just the broker role"
        raise ConfigError(CONTROLLER_LISTENERS, "", reason)
    for name in names:
        if name in listener_names(config):
            raise ConfigError(
                CONTROLLER_LISTENERS,
                name,
                f"it must not contain a value appearing in '{LISTENERS}' with just the broker role",
            )
        if name not in protocols:
            raise ConfigError(
                CONTROLLER_LISTENERS,
                name,
                f"not found in {PROTOCOLS} (an explicit security mapping for each controller"
                f" listener is required if {PROTOCOLS} is non-empty, or if there are security"
                " protocols other than PLAINTEXT in use)",
            )


def _check_controller(config: BrokerConfig, roles: Roles, names: list[str]) -> None:
    """Check the settings of a controller, the only one of its cluster. Raises ConfigError."""
    node_id = config.int("node.id")
    ids = {voter for voter, _ in roles.voters}
    if ids and node_id not in ids:
        raise ConfigError(
            ROLES,
            config.get(ROLES),
            f"with the 'controller' role, the node id {node_id} must be included in the set of"
            f" voters {VOTERS}",
        )
    if len(ids) > 1:
        raise ConfigError(
            VOTERS,
            config.get(VOTERS),
            (
                "a Fencepost controller must be the only one of its cluster; with several"
                f" controllers of Apache Kafka, set {ROLES}=broker on this node"
            ),
        )
    if not roles.is_broker:
        _check_controllers_listeners(config, names)
    if roles.decides_for_others and len(set(roles.bootstrap)) > 1:
        raise ConfigError(
            BOOTSTRAP,
            config.get(BOOTSTRAP),
            "a Fencepost controller must be the only one of its cluster, with one address",
        )


def _check_controllers_listeners(config: BrokerConfig, names: list[str]) -> None:
    """Check the listeners of a node that is only a controller. Raises ConfigError."""
    present = listener_names(config)
    if not names or any(name not in present for name in names):
        raise ConfigError(
            CONTROLLER_LISTENERS,
            config.get(CONTROLLER_LISTENERS),
            f"it must contain at least one value, and only values appearing in '{LISTENERS}', with"
            " just the controller role",
        )
    if any(name not in names for name in present):
        raise ConfigError(
            LISTENERS,
            config.get(LISTENERS),
            f"it must only contain listeners from {CONTROLLER_LISTENERS} with just the controller"
            " role",
        )


def _voters(config: BrokerConfig) -> tuple[tuple[int, Address], ...]:
    try:
        return tuple(_voter(text) for text in config.items(VOTERS))
    except ValueError as error:
        raise ConfigError(VOTERS, config.get(VOTERS), str(error)) from error


def _voter(text: str) -> tuple[int, Address]:
    voter, at, address = text.partition("@")
    if not at or not voter.isdecimal():
        raise ValueError(f"{text!r} is not a voter of the form ID@HOST:PORT")
    return int(voter), parse_address(address)


def _bootstrap(config: BrokerConfig) -> tuple[Address, ...]:
    try:
        return tuple(parse_address(text) for text in config.items(BOOTSTRAP))
    except ValueError as error:
        raise ConfigError(BOOTSTRAP, config.get(BOOTSTRAP), str(error)) from error
