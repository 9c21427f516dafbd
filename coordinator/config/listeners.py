"""Addresses out of Kafka's ``listeners``: one listener for clients is served, and PLAINTEXT.

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


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, found, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not found or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address of the form HOST:PORT")
    return host, int(port)


def listen_address(config: BrokerConfig) -> tuple[str, int] | None:
    """Where ``listeners`` says to listen, None if it is not set; a missing host means everywhere.

    Raises ConfigError.
    """
    return _of_clients(config, LISTENERS)


def advertised_address(config: BrokerConfig) -> tuple[str, int] | None:
    """Where ``advertised.listeners`` tells clients to connect to, None if it is not set.

    Raises ConfigError.
    """
    found = _of_clients(config, ADVERTISED)
    if found is not None and found[0] in ANY_ADDRESS:
        raise ConfigError(ADVERTISED, config.text(ADVERTISED), "nobody can connect to that address")
    return found


def _of_clients(config: BrokerConfig, key: str) -> tuple[str, int] | None:
    text = config.text(key)
    if not text:
        return None
    of_controllers = {name.upper() for name in config.items("controller.listener.names")}
    protocols = {name: name for name in _KNOWN}
    protocols |= dict(_protocol(entry, config) for entry in config.items(PROTOCOLS))
    found: dict[str, tuple[str, int]] = {}
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
    if len(found) != 1:
        names = ", ".join(found) or "only controllers' listeners"
        raise ConfigError(key, text, f"one listener is served, and there are {names}")
    (address_,) = found.values()
    return address_


def _protocol(entry: str, config: BrokerConfig) -> tuple[str, str]:
    name, found, protocol = entry.partition(":")
    if not found:
        raise ConfigError(PROTOCOLS, config.get(PROTOCOLS), f"{entry!r} is not NAME:PROTOCOL")
    return name.strip().upper(), protocol.strip().upper()
