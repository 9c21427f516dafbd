"""The systemd unit: its options and limits, and the broker in its sandbox."""

from __future__ import annotations

import ctypes.util
import errno
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fencepost.cli.serve import command as serve
from fencepost.coordinator.config.broker_keys import BROKER_KEYS
from fencepost.protocol.limits import MAX_REQUEST_BYTES, ConnectionLimits
from tests.support.cluster import TRANSACTION, Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.kafka import unavailable
from tests.support.targets import SETTINGS
from tests.support.unit_sandbox import read_unit
from tests.support.waits import DEADLINE_S

pytestmark = pytest.mark.slow

UNIT = ROOT / "packaging/fencepost.service"
DROP_IN = ROOT / "packaging/server-properties.conf"
"""With this drop-in, the unit reads a server.properties."""
MAX_EXPOSURE = 15
"""The maximum exposure in ``systemd-analyze security``, from 0 to 100; sockets alone cost 8."""

BUDGETS = (
    "fencepost.groups.max.bytes",
    "fencepost.offsets.max.bytes",
    "fencepost.transactional.ids.max.bytes",
)
BUFFERS = (
    "queued.max.request.bytes",
    "queued.max.response.bytes",
    "log.cleaner.dedupe.buffer.size",
)


@pytest.fixture
def unit() -> dict[str, list[str]]:
    return read_unit(UNIT)


@pytest.fixture(scope="module")
def analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        unavailable("no systemd-analyze on the PATH", "systemd")
    return str(found)


def exec_start(path: Path) -> list[str]:
    """Return the words of the last ``ExecStart=``; an empty one before it clears the unit's."""
    *reset, line = read_unit(path)["ExecStart"]
    assert reset in ([], [""])
    return shlex.split(line)


@pytest.mark.parametrize("path", [UNIT, DROP_IN], ids=lambda path: path.name)
def test_unit_starts_the_broker_with_options_that_exist(path: Path) -> None:
    program, name, *words = exec_start(path)
    assert (Path(program).name, name) == ("fencepost", "serve")
    known = {option for parameter in serve.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_unit_gives_the_broker_time_to_stop(unit: dict[str, list[str]]) -> None:
    assert unit["Type"] == ["notify"]
    assert int(unit["TimeoutStopSec"][0]) > ConnectionLimits().drain_timeout_ms / 1000


def test_memory_limit_exceeds_the_budgets_of_client_requests(
    unit: dict[str, list[str]],
) -> None:
    """The limit must cover the budgets and the allocator's overhead (docs/operating.md)."""
    budgets = sum(int(str(BROKER_KEYS[name].default)) for name in BUDGETS)
    buffers = sum(int(str(BROKER_KEYS[name].default)) for name in BUFFERS)
    (limit,) = unit["MemoryMax"]
    assert limit.endswith("G")
    most = budgets * 5 // 4 + buffers + 2 * MAX_REQUEST_BYTES
    assert most < int(limit[:-1]) << 30 < 2 * most


@pytest.mark.parametrize("drop_ins", [(), (DROP_IN,)], ids=["unit", "drop-in"])
def test_systemd_accepts_every_line_of_the_unit(
    analyze: str, tmp_path: Path, drop_ins: Sequence[Path]
) -> None:
    copy = tmp_path / UNIT.name
    (tmp_path / f"{UNIT.name}.d").mkdir()
    for source in (UNIT, *drop_ins):
        target = copy if source == UNIT else tmp_path / f"{UNIT.name}.d" / source.name
        text = source.read_text()
        target.write_text(text.replace("/opt/fencepost/bin/fencepost", "/bin/true"))
    told = subprocess.run([analyze, "verify", copy], capture_output=True, text=True, check=True)
    assert told.stdout + told.stderr == ""


def test_sandbox_exposure_is_below_the_threshold(analyze: str) -> None:
    told = subprocess.run(
        [analyze, "security", "--offline=yes", f"--threshold={MAX_EXPOSURE}", UNIT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout


@pytest.fixture
def sandboxed(analyze: str) -> tuple[str, ...]:
    """Return the command prefix that applies the system call filter of the unit."""
    if ctypes.util.find_library("seccomp") is None:
        unavailable("no libseccomp", "the kernel")
    return (sys.executable, "-m", "tests.support.unit_sandbox", str(UNIT))


def test_sandbox_refuses_forbidden_system_calls(sandboxed: tuple[str, ...]) -> None:
    """If the filter had no effect, the test of the broker in the sandbox would prove nothing."""
    code = (
        "import mmap, os\n"
        "def failure(call, *arguments):\n"
        "    try:\n"
        "        call(*arguments)\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "print(failure(os.nice, 1), failure(os.chown, '.', -1, -1),"
        " failure(mmap.mmap, -1, 4096, mmap.MAP_PRIVATE, mmap.PROT_WRITE | mmap.PROT_EXEC),"
        " failure(mmap.mmap, -1, 4096))"
    )
    told = subprocess.run(
        [*sandboxed, sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [str(errno.EPERM)] * 3 + ["None"]


SERVER_PROPERTIES = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:0
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:9093
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
num.network.threads=3
num.io.threads=8
log.dirs=/tmp/kraft-combined-logs
num.partitions=3
offsets.topic.replication.factor=1
"""
"""The keys of the file that Apache Kafka ships; only the listeners are changed, to loopback."""


def test_broker_starts_from_a_server_properties(sandboxed: tuple[str, ...], tmp_path: Path) -> None:
    """Run the command of the drop-in, with other directories in place of the unit's directories."""
    settings, data = tmp_path / "server.properties", tmp_path / "data"
    settings.write_text(SERVER_PROPERTIES)
    places = {"/etc/fencepost/server.properties": str(settings), "/var/lib/fencepost": str(data)}
    _, *words = [places.get(word, word) for word in exec_start(DROP_IN)]
    process = subprocess.Popen(
        [*sandboxed, sys.executable, "-m", "fencepost", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, _, address = process.stdout.readline().strip().partition(" ")
        assert word == "listening"
        with Cluster(address) as client:
            topic = client.create_topic("kept", 3)
            client.produce(topic, [b"one"])
        assert (data / f"{topic}-0").is_dir()
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_broker_works_in_the_sandbox(sandboxed: tuple[str, ...], tmp_path: Path) -> None:
    command = (*sandboxed, sys.executable, "-m", "fencepost", "serve")
    daemon = Daemon(tmp_path / "data", SETTINGS, command=command).start()
    try:
        with Cluster(daemon.bootstrap) as client:
            topic = client.create_topic("kept", 2)
            client.produce(topic, [b"one"])
            producer = client.init_producer("t")
            assert producer[0] >= 0
            client.coordinator("t", TRANSACTION)
        daemon.stop()
        daemon.start()
        with Cluster(daemon.bootstrap) as client:
            assert client.values(topic) == [b"one"]
    finally:
        daemon.kill()
