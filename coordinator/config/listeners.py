"""Addresses out of Kafka's ``listeners``: those for clients are served, all of them PLAINTEXT.

Each listener tells its clients its own address: services of a compose file and programs on the host
reach a broker by different names.

Source: ``SocketServerConfigs.listenerListToEndPoints``, ``KafkaConfig``.
"""

from __future__ import annotations

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError

LISTENERS, ADVERTISED = "listeners", "advertised.listeners"
PROTOCOLS = "listener.security.protocol.map"
SERVED = "PLAINTEXT"
_KNOWN = (SERVED, "SSL", "SASL_PLAINTEXT", "SASL_SSL")

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what a listener without a host asks for, as in Kafka
ANY_ADDRESS = frozenset({EVERYWHERE, "::"})


Address = tuple[str, int]
"""Host and port."""


def parse_address(text: str) -> Address:
    """(host, port) of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, found, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not found or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address of the form HOST:PORT")
    return host, int(port)


def listen_addresses(config: BrokerConfig) -> dict[str, Address]:
    """Where ``listeners`` says to listen, by name and in order; empty if it is not set.

    A missing host means everywhere. Raises ConfigError.
    """
    return _of_clients(config, LISTENERS)


def advertised_addresses(config: BrokerConfig) -> dict[str, Address]:
    """What ``advertised.listeners`` tells the clients of each listener to connect to.

    A listener that is not in it tells its own address. Raises ConfigError.
    """
    found = _of_clients(config, ADVERTISED)
    for host, _ in found.values():
        if host in ANY_ADDRESS:
            text = config.text(ADVERTISED)
            raise ConfigError(ADVERTISED, text, "nobody can connect to that address")
    return found


def _of_clients(config: BrokerConfig, key: str) -> dict[str, Address]:
    text = config.text(key)
    if not text:
        return {}
    of_controllers = {name.upper() for name in config.items("controller.listener.names")}
    protocols = {name: name for name in _KNOWN}
    protocols |= dict(_protocol(entry, config) for entry in config.items(PROTOCOLS))
    found: dict[str, Address] = {}
    for entry in map(str.strip, text.split(",")):
        name, is_named, address = entry.partition("://")
        if not is_named:
            raise ConfigError(key, text, f"{entry!r} is not NAME://HOST:PORT")
        if name.upper() in of_controllers:
            continue
        if name.upper() in found:
            raise ConfigError(key, text, f"there are two listeners {name}")
        protocol = protocols.get(name.upper())
        if protocol is None:
            raise ConfigError(key, text, f"{PROTOCOLS} has no protocol of listener {name}")
        if protocol != SERVED:
            raise ConfigError(key, text, f"only {SERVED} is served, and {name} is {protocol}")
        try:
            is_everywhere = address.startswith(":") and key == LISTENERS
            found[name.upper()] = parse_address(EVERYWHERE + address if is_everywhere else address)
        except ValueError as error:
            raise ConfigError(key, text, str(error)) from error
    if not found:
        raise ConfigError(key, text, "there are only controllers' listeners")
    if key == ADVERTISED and (unknown := found.keys() - (_of_clients(config, LISTENERS) or found)):
        raise ConfigError(key, text, f"{LISTENERS} has no {', '.join(sorted(unknown))}")
    return found


def _protocol(entry: str, config: BrokerConfig) -> tuple[str, str]:
    name, found, protocol = entry.partition(":")
    if not found:
        raise ConfigError(PROTOCOLS, config.get(PROTOCOLS), f"{entry!r} is not NAME:PROTOCOL")
    return name.strip().upper(), protocol.strip().upper()
