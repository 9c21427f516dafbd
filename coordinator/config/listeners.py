"""The listeners in Kafka's key ``listeners``: those for clients, and those for controllers.

Each listener has its own advertised address, because services of a compose file and programs on the
host reach a broker by different names.

Source: ``SocketServerConfigs.listenerListToEndPoints``, ``KafkaConfig``, ``CoreUtils``.
"""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol

LISTENERS, ADVERTISED = "listeners", "advertised.listeners"
PROTOCOLS = "listener.security.protocol.map"
BETWEEN_BROKERS = "inter.broker.listener.name"
CONTROL_PLANE = "control.plane.listener.name"
INSECURE = "fencepost.insecure"
CONTROLLER_LISTENERS = "controller.listener.names"

EVERYWHERE = "0.0.0.0"  # noqa: S104 - the meaning of a listener without a host, as in Kafka
ANY_ADDRESS = frozenset({EVERYWHERE, "::"})

_IPV6_SELF = bytes(15) + b"\x01"
_FORM = re.compile(r"(.*)://(\[?[0-9a-zA-Z\-%._:]*\]?:-?[0-9]+)")

Address = tuple[str, int]
"""Host and port."""


def parse_address(text: str) -> Address:
    """Return (host, port) of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not an address of the form HOST:PORT")
    return host, int(port)


def client_listeners(config: BrokerConfig) -> dict[str, ListenerConfig]:
    """Return the client listeners in ``listeners`` by name, in order; none if the key is unset.

    A missing host stands for all interfaces. Raises ConfigError.
    """
    listeners = _of_clients(config, LISTENERS)
    _check_ports(config, listeners.values())
    return listeners


def advertised_listeners(config: BrokerConfig) -> dict[str, ListenerConfig]:
    """Return the addresses of ``advertised.listeners``, by listener name.

    A listener without an entry in ``advertised.listeners`` advertises its own address. Raises
    ConfigError.
    """
    listeners = _of_clients(config, ADVERTISED)
    text = _text(config, ADVERTISED)
    if any(listener.host in ANY_ADDRESS for listener in listeners.values()):
        reason = "nobody can connect to the meta-address 0.0.0.0. Use a routable IP address"
        raise ConfigError(ADVERTISED, text, reason)
    valid = _of_clients(config, LISTENERS) or listeners
    if listeners.keys() - valid:
        raise ConfigError(
            ADVERTISED,
            text,
            f"{ADVERTISED} listener names must be equal to or a subset of the ones defined in"
            f" {LISTENERS}. Found {','.join(listeners)}. The valid options based on the current"
            f" configuration are {','.join(valid)}",
        )
    return listeners


def between_brokers(config: BrokerConfig) -> tuple[str, SecurityProtocol]:
    """Return name and protocol of the inter-broker listener. Raises ConfigError.

    If no name is configured, the value of ``security.inter.broker.protocol`` is the name.
    """
    name = config.text(BETWEEN_BROKERS)
    if name is None:
        protocol = SecurityProtocol(config.text("security.inter.broker.protocol") or "PLAINTEXT")
        return protocol.value, protocol
    return _named(config, BETWEEN_BROKERS, name)


def _named(config: BrokerConfig, key: str, name: str) -> tuple[str, SecurityProtocol]:
    protocols = _protocols(config)
    if name.upper() not in protocols:
        raise ConfigError(key, name, f"{PROTOCOLS} has no such listener")
    return name.upper(), protocols[name.upper()]


def control_plane(config: BrokerConfig) -> tuple[str, SecurityProtocol]:
    """Return name and protocol of the control plane listener (ZooKeeper). Raises ConfigError.

    It is the inter-broker listener unless ``control.plane.listener.name`` is set.
    """
    name = config.text(CONTROL_PLANE)
    if name is None:
        return between_brokers(config)
    protocol = _named(config, CONTROL_PLANE, name)
    if protocol[0] == between_brokers(config)[0]:
        reason = f"it should have a different value from {BETWEEN_BROKERS}"
        raise ConfigError(CONTROL_PLANE, name, reason)
    return protocol


def controller_listeners(config: BrokerConfig) -> dict[str, ListenerConfig]:
    """Return the controller listeners of ``listeners``, by name. Raises ConfigError."""
    return _listeners(config, LISTENERS, of_controllers=True)


def advertised_controllers(config: BrokerConfig) -> dict[str, ListenerConfig]:
    """Return the controller addresses of ``advertised.listeners``, by listener name (KIP-853).

    Raises ConfigError.
    """
    return _listeners(config, ADVERTISED, of_controllers=True)


def listener_names(config: BrokerConfig) -> list[str]:
    """Return the names in ``listeners``, including controller listeners. Raises ConfigError."""
    return [name for name, _ in _entries(LISTENERS, _text(config, LISTENERS))]


def protocols_of_listeners(config: BrokerConfig) -> dict[str, SecurityProtocol]:
    """Return the protocols of listeners by name. Raises ConfigError."""
    return _protocols(config)


def check_closed(config: BrokerConfig, listeners: Collection[ListenerConfig]) -> None:
    """Refuse listeners that other machines reach without authentication. Raises ConfigError.

    The setting ``fencepost.insecure`` permits them.
    """
    if config.bool(INSECURE):
        return
    for listener in listeners:
        if not _is_loopback(listener.host) and not _authenticates(config, listener):
            raise ConfigError(
                LISTENERS,
                f"{listener.name}://{listener.host}:{listener.port}",
                (
                    f"other machines can reach it, and {listener.protocol} does not authenticate"
                    " clients. Require logins (SASL_SSL) or client certificates (SSL with"
                    " ssl.client.auth=required), listen on 127.0.0.1 only, or allow every"
                    f" client everything with --insecure or {INSECURE}=true"
                ),
            )


def sends_plaintext_passwords(listener: ListenerConfig) -> bool:
    """Return whether clients send passwords unencrypted over the network."""
    return (
        "PLAIN" in listener.mechanisms and not listener.is_tls and not _is_loopback(listener.host)
    )


def _is_loopback(host: str) -> bool:
    version = _ip_version(host)
    if not version:
        return host.lower() == "localhost"
    return host.startswith("127.") if version == 4 else _packed(socket.AF_INET6, host) == _IPV6_SELF


def _authenticates(config: BrokerConfig, listener: ListenerConfig) -> bool:
    if listener.is_sasl:
        # An unsigned token proves nothing: a client can claim any name.
        key = "sasl.oauthbearer.jwks.endpoint.url"
        is_signed = config.on_listener(listener.name, key, "OAUTHBEARER") is not None
        return is_signed or "OAUTHBEARER" not in listener.mechanisms
    return listener.is_tls and client_auth(config, listener) == "required"


def client_auth(config: BrokerConfig, listener: ListenerConfig) -> str:
    """Return a listener's ``ssl.client.auth``; with SASL, a broker-wide setting is ignored.

    Source: ``ChannelBuilders``.
    """
    key = "ssl.client.auth"
    if listener.is_sasl and not config.is_set_on_listener(listener.name, key):
        return "none"
    return str(config.on_listener(listener.name, key))


def _text(config: BrokerConfig, key: str) -> str:
    """Return the value of a key that lists listeners, as text; empty if it is not set."""
    value = config.get(key)
    return ",".join(value) if isinstance(value, tuple) else ""


def _of_clients(config: BrokerConfig, key: str) -> dict[str, ListenerConfig]:
    listeners = _listeners(config, key, of_controllers=False)
    text = _text(config, key)
    if text and not listeners and "broker" in config.items("process.roles"):
        raise ConfigError(key, text, "there are only controllers' listeners")
    return listeners


def _of_controllers(config: BrokerConfig) -> set[str]:
    return {name.upper() for name in config.items(CONTROLLER_LISTENERS)}


def _listeners(
    config: BrokerConfig, key: str, *, of_controllers: bool
) -> dict[str, ListenerConfig]:
    """Return the controller listeners, or all other listeners, by name and in order."""
    text = _text(config, key)
    if not text:
        return {}
    names = _of_controllers(config)
    protocols = _protocols(config)
    listeners: dict[str, ListenerConfig] = {}
    for name, address in _entries(key, text):
        if (name in names) is not of_controllers:
            continue
        if name in listeners:
            reason = f"Each listener must have a different name, listeners: {text}"
            raise ConfigError(key, text, reason)
        protocol = protocols.get(name)
        if protocol is None:
            raise ConfigError(key, text, f"No security protocol defined for listener {name}")
        try:
            is_everywhere = address.startswith(":") and key == LISTENERS
            host, port = parse_address(EVERYWHERE + address if is_everywhere else address)
        except ValueError as error:
            raise ConfigError(key, text, str(error)) from error
        listeners[name] = _listener(config, name, host, port, protocol)
    return listeners


def _listener(
    config: BrokerConfig, name: str, host: str, port: int, protocol: SecurityProtocol
) -> ListenerConfig:
    listener = ListenerConfig(name, host, port, protocol)
    if not listener.is_sasl:
        return listener
    mechanisms = config.on_listener(name, "sasl.enabled.mechanisms")
    return replace(listener, mechanisms=mechanisms if isinstance(mechanisms, tuple) else ())


def _entries(key: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, address) of each entry. Raises ConfigError."""
    for entry in map(str.strip, text.split(",") if text else ()):
        parts = _FORM.fullmatch(entry)
        if parts is None:
            reason = f"Unable to parse {entry} to a broker endpoint: it is not NAME://HOST:PORT"
            raise ConfigError(key, text, reason)
        yield parts[1].upper(), parts[2]


def mapped_protocols(config: BrokerConfig) -> list[str]:
    """Return the entries of ``listener.security.protocol.map``; none if it is not set."""
    is_set = len(config.settings(PROTOCOLS)) > 1
    text = (config.text(PROTOCOLS) or "") if is_set else ""
    return list(filter(None, map(str.strip, text.split(","))))


def _protocols(config: BrokerConfig) -> dict[str, SecurityProtocol]:
    """Return the protocols of listeners by name.

    Without a map, controller listeners default to PLAINTEXT, unless a listener is named SSL,
    SASL_PLAINTEXT or SASL_SSL.
    """
    protocols = {protocol.value: protocol for protocol in SecurityProtocol}
    entries = mapped_protocols(config)
    if not entries:
        of_controllers = _of_controllers(config)
        if not any(
            name in protocols and name != SecurityProtocol.PLAINTEXT.value
            for name in (*of_controllers, *listener_names(config))
        ):
            return protocols | dict.fromkeys(of_controllers, SecurityProtocol.PLAINTEXT)
    for entry in entries:
        name, separator, protocol = (part.strip().upper() for part in entry.partition(":"))
        if not separator:
            raise ConfigError(PROTOCOLS, config.get(PROTOCOLS), f"{entry!r} is not NAME:PROTOCOL")
        try:
            protocols[name] = SecurityProtocol(protocol)
        except ValueError as error:
            reason = f"Invalid security protocol `{protocol}` defined in {PROTOCOLS}"
            raise ConfigError(PROTOCOLS, config.get(PROTOCOLS), reason) from error
    return protocols


def _check_ports(config: BrokerConfig, listeners: Collection[ListenerConfig]) -> None:
    """Refuse a shared port, except between one IPv4 and one IPv6 listener.

    Raises ConfigError.
    """
    text = _text(config, LISTENERS)
    by_port: defaultdict[int, list[int]] = defaultdict(list)
    for listener in listeners:
        if listener.port:
            by_port[listener.port].append(_ip_version(listener.host))
    for port, versions in by_port.items():
        names = versions.count(0)
        of_ip = sorted(version for version in versions if version)
        if len(versions) == 1 or versions in ([4, 6], [6, 4]):
            continue
        if names > 1:
            reason = f"Each listener must have a different port, listeners: {text}"
        elif len(of_ip) == 2:
            reason = (
                "If you have two listeners on the same port then one needs to be IPv4 and the"
                f" other IPv6, listeners: {text}, port: {port}"
            )
        else:
            reason = (
                "Each listener must have a different port unless exactly one listener has an IPv4"
                f" address and the other IPv6 address, listeners: {text}, port: {port}"
            )
        raise ConfigError(LISTENERS, text, reason)


def _ip_version(host: str) -> int:
    """Return the version of an IP address, 4 or 6; 0 for a host name."""
    if _packed(socket.AF_INET, host) is not None:
        return 4
    return 0 if _packed(socket.AF_INET6, host) is None else 6


def _packed(family: socket.AddressFamily, host: str) -> bytes | None:
    try:
        return socket.inet_pton(family, host.partition("%")[0])
    except OSError:
        return None
