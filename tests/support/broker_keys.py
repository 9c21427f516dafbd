"""The configuration keys of Apache Kafka's brokers, read from ``broker_keys_*.tsv``.

``tests/oracle`` compares these files with Kafka's own definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VERSIONS = ("3.9", "4.3", "4.4")


@dataclass(frozen=True)
class KafkaKey:
    """One configuration key of a release of Apache Kafka."""

    name: str
    type: str
    default: str | None
    """None if the key has no default value."""
    is_dynamic: bool

    @classmethod
    def read(cls, line: str) -> KafkaKey:
        """Parse a row of ``BrokerKeys.java`` without its first column, the kind of key."""
        name, kind, default, is_dynamic = line.split("\t")[:4]
        return cls(name, kind, None if default == "-" else default[1:-1], is_dynamic == "true")


def path_of(version: str) -> Path:
    """Return the path of a version's file, which has name, type, default and scope of each key."""
    return Path(__file__).with_name(f"broker_keys_{version.replace('.', '')}.tsv")


def keys_of(version: str) -> dict[str, KafkaKey]:
    """Return all keys of a version, by name."""
    lines = path_of(version).read_text().splitlines()
    return {key.name: key for key in map(KafkaKey.read, lines)}


def file_of_defaults(version: str, home: Path) -> str:
    """Return a ``server.properties`` with the default of every key that has one.

    The keys that are required or depend on the machine (listeners, directory, roles and node id)
    get values that suit a test.
    """
    settings = {key.name: key.default for key in keys_of(version).values()}
    settings |= {
        "broker.id": "1",
        "controller.listener.names": None,
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dir": str(home / "logs"),
        "log.dirs": None,
        "node.id": "1",
        "process.roles": "broker,controller",
    }
    lines = (f"{key}={value}\n" for key, value in settings.items() if value is not None)
    return "".join(lines).replace("\\", "\\\\")
