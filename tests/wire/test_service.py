"""The daemon under a service manager: readiness, reload, watchdog and health checks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost.client.client import WireClient
from fencepost.tools.ports import hold_port
from tests.support.cluster import Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.processes import Child

WATCHDOG_S = 0.6


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening


def told(manager: socket.socket) -> dict[str, str]:
    pairs = (line.partition("=") for line in manager.recv(4096).decode().splitlines())
    return {key: value for key, _, value in pairs}


def told_of(manager: socket.socket, key: str) -> dict[str, str]:
    while key not in (message := told(manager)):
        pass
    return message


def hear_all(manager: socket.socket, for_s: float) -> None:
    """Read all notifications; raise TimeoutError if none arrives within ``for_s`` seconds."""
    manager.settimeout(for_s)
    while True:
        told(manager)


def fencepost(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *words],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def setting(daemon: Daemon, name: str) -> str:
    wanted = {"resource_type": 4, "resource_name": "1", "configuration_keys": [name]}
    with Cluster(daemon.bootstrap) as cluster:
        (found,) = cluster.call("describe_configs", 4, resources=[wanted])["results"]
    (row,) = found["configs"]
    value: str = row["value"]
    return value


def test_service_manager_is_notified_of_start_reload_and_stop(
    tmp_path: Path, manager: socket.socket
) -> None:
    env = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
    }
    daemon = Daemon(tmp_path / "data", env=env)
    daemon.start()
    assert told(manager) == {"READY": "1", "STATUS": f"listening {daemon.bootstrap}"}
    for _ in range(4):
        assert told(manager) == {"WATCHDOG": "1"}
    assert daemon.child is not None
    os.kill(daemon.child.pid, signal.SIGHUP)
    assert told_of(manager, "RELOADING")["MONOTONIC_USEC"].isdecimal()
    told_of(manager, "READY")
    daemon.stop()
    told_of(manager, "STOPPING")


def test_stopped_process_sends_no_watchdog_notification(
    tmp_path: Path, manager: socket.socket
) -> None:
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
    daemon = Daemon(tmp_path / "data", env=env)
    daemon.start()
    told_of(manager, "WATCHDOG")
    assert daemon.child is not None
    os.kill(daemon.child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        hear_all(manager, 0.5)
    os.kill(daemon.child.pid, signal.SIGCONT)
    manager.settimeout(30)
    told_of(manager, "WATCHDOG")
    daemon.stop()


def test_missing_notify_socket_and_foreign_watchdog_are_ignored(tmp_path: Path) -> None:
    env = {"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    daemon = Daemon(tmp_path / "data", env=env)
    daemon.start()
    daemon.stop()


def test_sighup_does_not_reread_settings_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "broker.toml"
    os.mkfifo(pipe)
    daemon = Daemon(tmp_path / "data", {}, env={"FENCEPOST_CONFIG_FILE": str(pipe)})
    child = daemon.launch()
    pipe.write_text('"log.retention.ms" = 1000\n')
    daemon.wait_until_listening()
    os.kill(child.pid, signal.SIGHUP)
    child.wait_for_line("read only once.*settings not read again", deadline_s=30)
    assert setting(daemon, "log.retention.ms") == "1000"
    daemon.stop()


def test_sighup_during_shutdown_does_not_reread_settings(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data", {})
    child = daemon.start().child
    assert child is not None
    os.kill(child.pid, signal.SIGTERM)
    child.wait_for_line("broker stops", deadline_s=30)
    while child.returncode is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(child.pid, signal.SIGHUP)
            child.wait(0.002)
    assert child.wait(30) == 0
    assert "failed" not in child.tail()
    assert "read again" not in child.tail()


def test_sighup_applies_dynamic_settings_and_refuses_invalid_ones(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text('"log.retention.ms" = 1000\n"num.partitions" = 2\n')
    daemon = Daemon(tmp_path / "data", {}, env={"FENCEPOST_CONFIG_FILE": str(file)})
    daemon.start()
    assert daemon.child is not None

    def reloaded(text: str, expected: str) -> dict[str, object]:
        assert daemon.child is not None
        seen = len(daemon.child.lines)
        file.write_text(text)
        os.kill(daemon.child.pid, signal.SIGHUP)
        match = daemon.child.wait_for_line(
            rf'^(\{{.*"{expected}".*\}})$', deadline_s=30, since=seen
        )
        line: dict[str, object] = json.loads(match.group(1))
        return line

    def retention() -> str:
        return setting(daemon, "log.retention.ms")

    assert retention() == "1000"
    line = reloaded('"log.retention.ms" = 2000\n"num.partitions" = 3\n', "settings read again")
    assert (line["changed"], line["at_next_start"]) == (
        "['log.retention.ms']",
        "['num.partitions']",
    )
    assert retention() == "2000"
    for wrong in ("nonsense", '"log.retention.ms" = "soon"', '"no.such.key" = 1'):
        line = reloaded(wrong, "settings not read again")
        assert line["level"] == "error"
        assert retention() == "2000"
    line = reloaded("", "settings read again")
    assert retention() != "2000"
    daemon.stop()


def test_environment_variables_are_settings(tmp_path: Path) -> None:
    env = {
        "FENCEPOST_SET_NUM_PARTITIONS": "3",
        "FENCEPOST_LOG_LEVEL": "error",
        "FENCEPOST_LOG_FORMAT": "text",
    }
    daemon = Daemon(tmp_path / "data", {}, env=env)
    daemon.start()
    assert setting(daemon, "num.partitions") == "3"
    daemon.stop()
    assert daemon.child is not None
    assert [line for line in daemon.child.lines if "listening" not in line] == []


def test_unknown_setting_in_the_environment_is_named(tmp_path: Path) -> None:
    words = ("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    done = fencepost(*words, env={"FENCEPOST_SET_NUM_PARTITION": "3"})
    assert done.returncode == 2
    assert "num.partition" in done.stderr


def test_health_exit_status_is_0_for_a_live_and_3_for_a_stopped_broker(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "data")
    daemon.start()
    done = fencepost("health", "--bootstrap", daemon.bootstrap)
    assert (done.returncode, done.stdout[:16]) == (0, "healthy: cluster")
    daemon.stop()
    done = fencepost("health", "--bootstrap", daemon.bootstrap, "--timeout", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_each_listener_returns_its_own_advertised_address(tmp_path: Path) -> None:
    held = [hold_port() for _ in range(3)]
    ports = [port.getsockname()[1] for port in held]
    settings = {
        "listeners": f"INSIDE://127.0.0.1:{ports[0]},OUTSIDE://127.0.0.1:{ports[1]},"
        f"PLAINTEXT://127.0.0.1:{ports[2]}",
        "advertised.listeners": f"INSIDE://fencepost:9092,OUTSIDE://localhost:{ports[1]}",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT,OUTSIDE:PLAINTEXT",
    }
    pairs = [word for pair in settings.items() for word in ("--config", "=".join(pair))]
    data = str(tmp_path / "data")
    child = Child(
        [sys.executable, "-m", "fencepost", "serve", "--data-dir", data, *pairs], cwd=ROOT
    )
    child.wait_for_line(f"^listening 127.0.0.1:{ports[0]}$", deadline_s=60)
    told = [("fencepost", 9092), ("localhost", ports[1]), ("127.0.0.1", ports[2])]
    for port, address in zip(ports, told, strict=True):
        with WireClient(f"127.0.0.1:{port}") as client:
            brokers = client.metadata(refresh=True).brokers
        assert [(broker.host, broker.port) for broker in brokers.values()] == [address]
    for port in ports[1:]:
        with Cluster(f"127.0.0.1:{port}") as cluster:
            cluster.coordinator("group", 0)
    assert child.terminate(deadline_s=30) == 0
    for port in held:
        port.close()
