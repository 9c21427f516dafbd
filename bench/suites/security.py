"""The cost of TLS and logins: the data path over TLS, and new connections."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.brokers import FENCEPOST, JAVA_OPTIONS, KAFKA, cpu_seconds
from bench.clients import VALUE, create_topic, delete_topics, drain, fill
from bench.suite import DEFAULTS, Figures, Pair, Suite
from bench.suites.data import CONSUMED, CPU_CONSUMED, CPU_PRODUCED, PRODUCED
from fencepost.client.client import WireClient
from fencepost.client.security import Security
from fencepost.tools.ports import hold_port
from tests.support.certificates import Authority, trusting
from tests.support.daemon import Daemon
from tests.support.secured import LISTENERS, USERS, SecuredKafka, add_users, listener_settings

RECORDS = 200_000
HANDSHAKES, LOGINS = 300, 200
WARM_UPS = 4
"""Unmeasured runs of the data path that warm a broker up."""

CLEAR: Mapping[str, str] = {}


class SecuredDaemon(Daemon):
    """A daemon with the listeners of :class:`SecuredKafka`."""

    def __init__(self, home: Path, settings: Mapping[str, str]) -> None:
        self.authority = Authority(home / "certificates")
        self.listeners = {}
        for name in ("PLAINTEXT", *LISTENERS):
            held = hold_port()
            weakref.finalize(self, held.close)
            self.listeners[name] = f"127.0.0.1:{held.getsockname()[1]}"
        told = listener_settings(self.authority, self.listeners)
        super().__init__(home / "data", {**settings, **told})


class WarmKafka(SecuredKafka):
    """Apache Kafka with the heap of its own start script."""

    def __init__(self, home: Path, settings: Mapping[str, str]) -> None:
        super().__init__(home, settings)
        self._java_options = JAVA_OPTIONS


SIDES: Mapping[str, Callable[[Path, Mapping[str, str]], SecuredDaemon | WarmKafka]] = {
    FENCEPOST: SecuredDaemon,
    KAFKA: WarmKafka,
}


def measured(home: Path) -> Iterator[tuple[str, Figures]]:
    """Measure each broker alone, with the same clients, after runs that do not count."""
    for side, make in SIDES.items():
        (home / side).mkdir()
        broker = make(home / side, DEFAULTS)
        broker.start()
        try:
            add_users(broker)
            for _ in range(WARM_UPS):
                _data(broker)
                delete_topics(broker.bootstrap)
            yield side, _data(broker) | _connections(broker)
        finally:
            broker.kill()


def _data(broker: SecuredDaemon | WarmKafka) -> Figures:
    trusted = {"ssl.ca.location": str(broker.authority.truststore)}
    login = {
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": USERS["alice"],
    }
    figures: Figures = {}
    for what, listener, settings in (
        ("without TLS", "", CLEAR),
        ("with TLS", "TLS", {"security.protocol": "ssl", **trusted}),
        ("with TLS and SCRAM", "SAFE", {"security.protocol": "sasl_ssl", **trusted, **login}),
    ):
        bootstrap = broker.listeners[listener] if listener else broker.bootstrap
        topic = create_topic(broker.bootstrap, 1)
        megabytes = RECORDS * len(VALUE) / 1e6
        begin = cpu_seconds(broker)
        written = fill(bootstrap, topic, RECORDS, settings)
        middle = cpu_seconds(broker)
        read = drain(bootstrap, topic, 1, RECORDS, settings)
        end = cpu_seconds(broker)
        figures |= {
            f"{what}, {PRODUCED}": megabytes / written,
            f"{what}, {CONSUMED}": megabytes / read,
            f"{what}, {CPU_PRODUCED}": (middle - begin) / megabytes * 1e6,
            f"{what}, {CPU_CONSUMED}": (end - middle) / megabytes * 1e6,
        }
    return figures


def _connections(broker: SecuredDaemon | WarmKafka) -> Figures:
    """Measure connections one after the other; the times include the client's own work."""
    context = trusting(broker.authority)
    host, port = broker.listeners["TLS"].rsplit(":", 1)
    processor, begin = cpu_seconds(broker), time.perf_counter()
    for _ in range(HANDSHAKES):
        with socket.create_connection((host, int(port)), 20) as client:
            context.wrap_socket(client, server_hostname="localhost").close()
    handshakes, spent = time.perf_counter() - begin, cpu_seconds(broker) - processor
    security = Security.of(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": "alice",
            "sasl.password": USERS["alice"],
        }
    )
    begin = time.perf_counter()
    for _ in range(LOGINS):
        with WireClient(broker.listeners["LOGIN"], security=security) as client:
            client.versions()
    logins = time.perf_counter() - begin
    return {
        "rate of TLS handshakes (handshakes/s)": HANDSHAKES / handshakes,
        "CPU time of the broker per TLS handshake (ms)": spent / HANDSHAKES * 1e3,
        "rate of logins with SCRAM-SHA-512 (logins/s)": LOGINS / logins,
    }


SECURITY = Suite(
    "security",
    f"librdkafka with acks=all, {RECORDS:,} records of 1 KiB, with and without encryption; "
    "connections that a Python client opens one after the other.",
    (Pair("security", measured),),
)
