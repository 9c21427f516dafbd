"""A ``server.properties`` that was made for Apache Kafka."""

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
from fencepost.coordinator.config.listeners import advertised_addresses, listen_addresses
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.waits import until

STOCK = Path(__file__).with_name("server.properties")


class FileDaemon(Daemon):
    """A ``fencepost serve`` that is told nothing but a file."""

    def __init__(self, path: Path, *more: str) -> None:
        super().__init__(path.parent, {})
        self._asked = ["--config-file", str(path), *more]

    def launch(self, *, env=None):
        from tests.support.processes import Child

        self.child = Child([*self._command, *self._asked])
        return self.child


def test_the_stock_file_starts_a_broker_and_says_what_it_loses(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    text = STOCK.read_text().replace("/tmp/kraft-combined-logs", f"{tmp_path}/logs")
    path.write_text(
        text.replace("//:9092", "//127.0.0.1:0").replace("//localhost:9092", "//127.0.0.1:0")
    )
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
    assert len(warned) == 13


def test_a_key_is_told_with_the_nearest_one(tmp_path: Path) -> None:
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


def test_without_any_directory_it_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "server.properties"
    path.write_text("")
    child = FileDaemon(path).launch()
    assert child.wait(deadline_s=60) == 2
    assert "log.dirs" in child.tail()


def test_the_data_directory_of_a_file() -> None:
    settings = {"log.dirs": " /a ", "log.dir": "/b", "num.partitions": "2"}
    assert take_data_directory(settings) == Path("/a")
    assert settings == {"num.partitions": "2"}
    assert take_data_directory({"log.dir": "/b"}) == Path("/b")
    assert take_data_directory({}) is None
    with pytest.raises(ConfigError, match="one data directory"):
        take_data_directory({"log.dirs": "/a,/b"})


def test_what_is_ignored_is_told_and_kept_nowhere() -> None:
    config = BrokerConfig({"sasl.kerberos.service.name": "secret", "num.io.threads": 3})
    assert dict(config.without_effect()).keys() == {"sasl.kerberos.service.name", "num.io.threads"}
    assert "secret" not in repr(vars(config))
    assert not IGNORED_KEYS.keys() & (BROKER_KEYS.keys() | REPLACED.keys() | SYNONYMS.keys())
    assert all(IGNORED_KEYS.values())


def test_older_names() -> None:
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
def test_listeners(listeners: str, more: dict[str, str], addresses: object) -> None:
    settings = {"listeners": listeners, "controller.listener.names": "controller", **more}
    assert listen_addresses(BrokerConfig(settings)) == addresses


@pytest.mark.parametrize(
    ("listeners", "reason"),
    [
        ("127.0.0.1:9092", "not NAME://HOST:PORT"),
        ("SASL_SSL://h:1", "only PLAINTEXT is served"),
        ("INSIDE://h:1", "no protocol of listener INSIDE"),
        ("PLAINTEXT://h:1,PLAINTEXT://h:2", "two listeners"),
        ("CONTROLLER://h:1", "only controllers' listeners"),
        ("PLAINTEXT://h", "HOST:PORT"),
        ("PLAINTEXT://h:65536", "HOST:PORT"),
    ],
)
def test_listeners_that_are_not_served(listeners: str, reason: str) -> None:
    more = {
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "X:PLAINTEXT",
    }
    for key, read in (
        ("listeners", listen_addresses),
        ("advertised.listeners", advertised_addresses),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
            read(BrokerConfig({key: listeners, **more}))
        assert refused.value.key == key
    with pytest.raises(ConfigError, match="nobody can connect"):
        advertised_addresses(BrokerConfig({"advertised.listeners": "PLAINTEXT://0.0.0.0:1"}))
    both = {"listeners": "PLAINTEXT://h:1", "advertised.listeners": "PLAINTEXT://h:1,X://h:2"}
    with pytest.raises(ConfigError, match="listeners has no X"):
        advertised_addresses(BrokerConfig({**both, **more}))
    with pytest.raises(ConfigError, match="NAME:PROTOCOL"):
        listen_addresses(
            BrokerConfig({"listeners": "X://h:1", "listener.security.protocol.map": "X"})
        )


def test_an_embedded_broker_takes_settings_as_what_they_mean(tmp_path: Path) -> None:
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
def test_java_properties(text: str, found: dict[str, str]) -> None:
    assert properties.parse(text.encode("latin-1")) == found


@pytest.mark.parametrize("text", ["a=\\u12", "a=\\u12G4", "a=\\u", "\\u-123=1"])
def test_an_escape_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "server.properties"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load([], path)
