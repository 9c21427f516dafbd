"""A ``server.properties`` file written for Apache Kafka."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fencepost import Broker
from fencepost.coordinator.config import properties
from fencepost.coordinator.config.broker_config import BrokerConfig, load, take_data_directory
from fencepost.coordinator.config.broker_keys import BROKER_KEYS, REPLACED, SYNONYMS
from fencepost.coordinator.config.ignored_keys import IGNORED_KEYS
from fencepost.coordinator.config.key import ConfigError
from fencepost.coordinator.config.listener_config import ListenerConfig, SecurityProtocol
from fencepost.coordinator.config.listeners import (
    advertised_listeners,
    check_closed,
    client_listeners,
)
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until

STOCK = Path(__file__).with_name("server.properties")


class FileDaemon(Daemon):
    """A ``fencepost serve`` with a configuration file as its only argument."""

    def __init__(self, path: Path, *more: str) -> None:
        super().__init__(path.parent, {})
        self._asked = ["--config-file", str(path), *more]

    def launch(self, *, env=None):
        from tests.support.processes import Child

        self.child = Child([*self._command, *self._asked])
        return self.child


def test_stock_server_properties_starts_a_broker_and_logs_ignored_configs(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    text = STOCK.read_text().replace("/tmp/kraft-combined-logs", f"{tmp_path}/logs")
    for address in ("//:9092", "//localhost:9092", "//:9093", "//localhost:9093"):
        text = text.replace(address, "//127.0.0.1:0")
    path.write_text(text)
    daemon = FileDaemon(path)
    child = daemon.launch()
    daemon.wait_until_listening()
    said = child.tail()
    daemon.stop()
    assert (tmp_path / "logs" / "__cluster_metadata-0").is_dir()
    warned = re.findall(r'"key": "(\S+)", .*"event": "setting has no effect"', said)
    keys = set(load([], path))
    assert len(keys) == 24
    assert set(warned) == {
        key
        for key in keys
        if key in IGNORED_KEYS or (key in BROKER_KEYS and BROKER_KEYS[key].inert)
    }
    assert len(warned) == 5


def test_unknown_config_error_suggests_the_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text(f"log.dirs={tmp_path}/logs\nnum.partitons=3\n")
    child = FileDaemon(path).launch()
    assert child.wait(deadline_s=60) == 2
    assert "num.partitons: unknown configuration; did you mean num.partitions?" in child.tail()
    for key, near in (
        ("log.retention.hour", "log.retention.hours"),
        ("ssl.keystore.passwort", "ssl.keystore.password"),
        ("flush.message", "flush.messages"),
    ):
        with pytest.raises(ConfigError, match=f"did you mean {near}"):
            BrokerConfig({key: "1"})
    with pytest.raises(ConfigError, match=r"unknown configuration$"):
        BrokerConfig({"qqqq": "1"})


def test_broker_without_log_dirs_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text("")
    child = FileDaemon(path).launch()
    assert child.wait(deadline_s=60) == 2
    assert "log.dirs" in child.tail()


def test_data_directory_is_taken_from_log_dirs_before_log_dir() -> None:
    settings = {"log.dirs": " /a ", "log.dir": "/b", "num.partitions": "2"}
    assert take_data_directory(settings) == Path("/a")
    assert settings == {"num.partitions": "2"}
    assert take_data_directory({"log.dir": "/b"}) == Path("/b")
    assert take_data_directory({}) is None
    with pytest.raises(ConfigError, match="one data directory"):
        take_data_directory({"log.dirs": "/a,/b"})


def test_ignored_config_is_reported_but_its_value_is_not_stored() -> None:
    config = BrokerConfig({"sasl.kerberos.service.name": "whispered", "num.io.threads": 3})
    assert dict(config.without_effect()).keys() == {"sasl.kerberos.service.name", "num.io.threads"}
    assert "whispered" not in repr(vars(config))
    assert not IGNORED_KEYS.keys() & (BROKER_KEYS.keys() | REPLACED.keys() | SYNONYMS.keys())
    assert all(IGNORED_KEYS.values())


def test_broker_id_sets_node_id() -> None:
    assert BrokerConfig({"broker.id": "7"}).int("node.id") == 7


@pytest.mark.parametrize(
    ("listeners", "more", "addresses"),
    [
        ("PLAINTEXT://127.0.0.1:9092", {}, {"PLAINTEXT": ("127.0.0.1", 9092)}),
        ("plaintext://:1", {}, {"PLAINTEXT": ("0.0.0.0", 1)}),
        ("PLAINTEXT://[::1]:2", {}, {"PLAINTEXT": ("::1", 2)}),
        (
            "CONTROLLER://:3, IN://h:4",
            {"listener.security.protocol.map": "IN:plaintext"},
            {"IN": ("h", 4)},
        ),
        (
            "CONTROLLER://:3,SSL://h:4",
            {"listener.security.protocol.map": "SSL:PLAINTEXT"},
            {"SSL": ("h", 4)},
        ),
        ("", {}, {}),
        (
            "IN://:1,PLAINTEXT://h:2",
            {"listener.security.protocol.map": "IN:PLAINTEXT"},
            {"IN": ("0.0.0.0", 1), "PLAINTEXT": ("h", 2)},
        ),
    ],
)
def test_client_listeners_are_parsed_without_controller_listeners(
    listeners: str, more: dict[str, str], addresses: object
) -> None:
    settings = {"listeners": listeners, "controller.listener.names": "controller", **more}
    found = client_listeners(BrokerConfig(settings))
    assert {name: (listener.host, listener.port) for name, listener in found.items()} == addresses


def test_listener_has_its_security_protocol_and_sasl_mechanisms() -> None:
    protocols = "A:PLAINTEXT,B:ssl, C:SASL_PLAINTEXT"
    settings = {
        "listeners": "A://h:0,B://h:0,C://[fe80::1%eth0]:0,SASL_SSL://h:0",
        "listener.security.protocol.map": protocols,
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.c.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
    }
    found = client_listeners(BrokerConfig(settings))
    assert list(found.values()) == [
        ListenerConfig("A", "h", 0, SecurityProtocol.PLAINTEXT),
        ListenerConfig("B", "h", 0, SecurityProtocol.SSL),
        ListenerConfig(
            "C",
            "fe80::1%eth0",
            0,
            SecurityProtocol.SASL_PLAINTEXT,
            ("SCRAM-SHA-256", "SCRAM-SHA-512"),
        ),
        ListenerConfig("SASL_SSL", "h", 0, SecurityProtocol.SASL_SSL, ("PLAIN",)),
    ]
    assert [listener.is_tls for listener in found.values()] == [False, True, False, True]
    assert [listener.is_sasl for listener in found.values()] == [False, False, True, True]


@pytest.mark.parametrize(
    ("listeners", "reason"),
    [
        ("PLAINTEXT://127.0.0.1:1,SSL://[::1]:1", None),
        ("PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:0", None),
        ("PLAINTEXT://h:1,SSL://g:1", "Each listener must have a different port, listeners: "),
        ("PLAINTEXT://127.0.0.1:1,SSL://127.0.0.2:1", "one needs to be IPv4 and the other IPv6"),
        (
            "PLAINTEXT://127.0.0.1:1,SSL://[::1]:1,SASL_SSL://h:1",
            "one needs to be IPv4 and the other IPv6",
        ),
        ("PLAINTEXT://127.0.0.1:1,SSL://h:1", "unless exactly one listener has an IPv4 address"),
        (
            "PLAINTEXT://127.0.0.1:1,SSL://[::1]:1,SASL_SSL://127.0.0.2:1",
            "unless exactly one listener has an IPv4 address and the other IPv6",
        ),
    ],
)
def test_shared_listener_port_is_refused_except_for_one_ipv4_and_one_ipv6(
    listeners: str, reason: str | None
) -> None:
    config = BrokerConfig({"listeners": listeners, "sasl.enabled.mechanisms": "PLAIN"})
    if reason is None:
        assert len(client_listeners(config)) == 2
    else:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            client_listeners(config)


CLOSED = "does not authenticate clients"


@pytest.mark.parametrize(
    ("listener", "more", "is_refused"),
    [
        ("PLAINTEXT://127.0.0.1:1", {}, False),
        ("PLAINTEXT://127.255.1.2:1", {}, False),
        ("PLAINTEXT://[::1]:1", {}, False),
        ("PLAINTEXT://localhost:1", {}, False),
        ("PLAINTEXT://0.0.0.0:1", {}, True),
        ("PLAINTEXT://:1", {}, True),
        ("PLAINTEXT://[::]:1", {}, True),
        ("PLAINTEXT://192.0.2.1:1", {}, True),
        ("PLAINTEXT://broker.example:1", {}, True),
        ("PLAINTEXT://:1", {"fencepost.insecure": "true"}, False),
        ("SSL://:1", {}, True),
        ("SSL://:1", {"ssl.client.auth": "requested"}, True),
        ("SSL://:1", {"ssl.client.auth": "required"}, False),
        ("SSL://:1", {"listener.name.ssl.ssl.client.auth": "required"}, False),
        (
            "SSL://:1",
            {"ssl.client.auth": "required", "listener.name.ssl.ssl.client.auth": "none"},
            True,
        ),
        ("SASL_SSL://:1", {}, False),
        ("SASL_PLAINTEXT://:1", {}, False),
    ],
)
def test_unauthenticated_listener_is_allowed_only_on_loopback(
    listener: str, more: dict[str, str], is_refused: bool
) -> None:
    config = BrokerConfig({"listeners": listener, **more})
    listeners = client_listeners(config).values()
    if not is_refused:
        check_closed(config, listeners)
        return
    with pytest.raises(ConfigError, match=CLOSED) as refused:
        check_closed(config, listeners)
    assert all(word in str(refused.value) for word in ("--insecure", "127.0.0.1", "SASL_SSL"))


@pytest.mark.parametrize("say", ["--listen", "file"])
def test_daemon_with_an_unauthenticated_public_listener_needs_insecure(
    tmp_path: Path, say: str
) -> None:
    path = tmp_path / "server.properties"
    listeners = "" if say == "--listen" else "listeners=PLAINTEXT://0.0.0.0:0\n"
    path.write_text(f"log.dirs={tmp_path}/logs\n{listeners}")
    more = ["--listen", "0.0.0.0:0"] if say == "--listen" else []
    daemon = FileDaemon(path, *more)
    child = daemon.launch()
    assert child.wait(deadline_s=60) == 2
    assert CLOSED in child.tail()
    assert not (tmp_path / "logs").exists(), "refused before anything was made"
    daemon = FileDaemon(path, *more, "--insecure")
    daemon.launch()
    daemon.wait_until_listening()
    daemon.stop()


async def test_embedded_broker_with_an_unauthenticated_public_listener_needs_insecure(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=CLOSED):
        Broker(tmp_path, "0.0.0.0:0")
    async with Broker(tmp_path, "0.0.0.0:0", insecure=True) as broker:
        assert broker.address[0] == "0.0.0.0"
    settings = {"fencepost.insecure": True}
    with Broker.in_thread(tmp_path, "0.0.0.0:0", settings) as broker:
        assert broker.address[0] == "0.0.0.0"


@pytest.mark.parametrize(
    ("listeners", "reason"),
    [
        ("127.0.0.1:9092", "not NAME://HOST:PORT"),
        ("INSIDE://h:1", "No security protocol defined for listener INSIDE"),
        ("PLAINTEXT://h:1,plaintext://h:2", "Each listener must have a different name"),
        ("CONTROLLER://h:1", "only controllers' listeners"),
        ("PLAINTEXT://h", "HOST:PORT"),
        ("PLAINTEXT://h:65536", "HOST:PORT"),
    ],
)
def test_invalid_listeners_are_refused(listeners: str, reason: str) -> None:
    more = {
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "X:PLAINTEXT",
    }
    for key, read in (
        ("listeners", client_listeners),
        ("advertised.listeners", advertised_listeners),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
            read(BrokerConfig({key: listeners, **more}))
        assert refused.value.key == key
    with pytest.raises(ConfigError, match="nobody can connect"):
        advertised_listeners(BrokerConfig({"advertised.listeners": "PLAINTEXT://0.0.0.0:1"}))
    both = {"listeners": "PLAINTEXT://h:1", "advertised.listeners": "PLAINTEXT://h:1,X://h:2"}
    with pytest.raises(ConfigError, match=r"a subset .* Found PLAINTEXT,X\. The valid"):
        advertised_listeners(BrokerConfig({**both, **more}))
    with pytest.raises(ConfigError, match="NAME:PROTOCOL"):
        client_listeners(
            BrokerConfig({"listeners": "X://h:1", "listener.security.protocol.map": "X"})
        )
    with pytest.raises(ConfigError, match="Invalid security protocol `TLS` defined in listener"):
        client_listeners(
            BrokerConfig({"listeners": "X://h:1", "listener.security.protocol.map": "X:TLS"})
        )


def test_embedded_broker_accepts_typed_config_values(tmp_path: Path) -> None:
    settings = {
        "num.partitions": 2,
        "auto.create.topics.enable": True,
        "log.cleaner.min.cleanable.ratio": 0.25,
        "log.cleanup.policy": ["delete", "compact"],
        "listeners": "PLAINTEXT://127.0.0.1:0",
    }
    with (
        Broker.in_thread(tmp_path, config=settings) as broker,
        Cluster(broker.bootstrap) as cluster,
    ):
        cluster.call("metadata", 8, topics=[{"name": "t"}], allow_auto_topic_creation=True)
        until(lambda: cluster.leaders("t") == 2, "both partitions")
    with pytest.raises(ConfigError, match=r"num\.partitions: expected text, a number"):
        Broker(tmp_path, config={"num.partitions": None})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=b\nc:d\ne f\ng", {"a": "b", "c": "d", "e": "f", "g": ""}),
        ("  a  =  b c  \r\n\t# no\n!no\n\n", {"a": "b c  "}),
        ("a=1,\\\n   2,\\\r\n\t3\n", {"a": "1,2,3"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\n#2\nb=3", {"a": "1#2", "b": "3"}),
        ("a\\ b\\=c\\:=d\\te\\q", {"a b=c:": "d\teq"}),
        ("a=\\u00fc\\u20AC\\ud83d\\ude00", {"a": "ü€😀"}),
        ("a=1\na=2", {"a": "2"}),
        ("a = = b", {"a": "= b"}),
        ("a=\xfc", {"a": "ü"}),
        ("a=1\\", {"a": "1"}),
    ],
)
def test_java_properties_syntax_is_parsed(text: str, found: dict[str, str]) -> None:
    assert properties.parse(text.encode("latin-1")) == found


@pytest.mark.parametrize("text", ["a=\\u12", "a=\\u12G4", "a=\\u", "\\u-123=1"])
def test_malformed_unicode_escape_in_properties_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.properties"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load([], path)
