"""The options of the test suite, and the fixtures that all folders share."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import none

if TYPE_CHECKING:
    from tests.support.cluster import Cluster
    from tests.support.container import KafkaInContainer
    from tests.support.daemon import Daemon
    from tests.support.kafka import Kafka
    from tests.support.postgres import PostgresServer
    from tests.support.secured import Secured
    from tests.support.targets import Target
    from tests.support.zookeeper import ZooKeeper

for name, is_repeatable in (("repeatable", True), ("explore", False)):
    settings.register_profile(
        name,
        derandomize=is_repeatable,
        # How long an example takes depends on the load of the machine.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )

MOST_DESCRIPTORS = 400
"""The maximum number of open files at the end of a worker; all tests together need about 100."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        choices=("fencepost", "kafka", "container"),
        default="fencepost",
        help="the broker that tests/wire, tests/spark and tests/mqtt run against",
    )
    parser.addoption(
        "--stock",
        action="store_true",
        help="give tests/spark Spark's own Kafka connector as well, to compare with",
    )
    parser.addoption(
        "--rebalances",
        type=int,
        default=300,
        help="rebalances of the simulated fleet of consumers (tests/unit/groups/test_fleet.py)",
    )
    parser.addoption(
        "--turns", type=int, default=9, help="faults in turn in tests/crash/test_cluster_faults.py"
    )
    parser.addoption(
        "--layouts",
        default="few",
        help="few, all or as JPP/JJJ: whose brokers and controllers those are",
    )
    parser.addoption("--seed", type=int, help="the life that the test_lives.py lead")
    parser.addoption("--requests", type=int, help="how many requests that life sends")
    parser.addoption("--inputs", type=int, help="how much strangers send in tests/fuzz")
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        help="run one part of the test files: 2/3 is the second, fifth, ... of them by name",
    )
    parser.addoption("--results", type=Path, help="write the outcome of each test to this file")


def _part(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from scanning the objects of collected tests.

    These million objects live as long as the session, and a full collection scans them for 0.3 s.
    Full collections run while tests are collected, and whenever a test requests one.
    """
    gc.disable()
    try:
        _import_share(session)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def _import_share(session: pytest.Session) -> None:
    """Import one worker's share of the test modules, before it collects all of them.

    All workers collect the same files in the same order, so in a new clone each worker would
    compile each module. If the workers begin with different modules, most modules are compiled
    once.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    root = session.config.rootpath
    paths = [root / argument.partition("::")[0] for argument in session.config.args]
    files = [file for path in paths for file in [path, *sorted(path.rglob("test_*.py"))]]
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in [file for file in files if file.suffix == ".py"][number::count]:
        # Collection will import the module again, and report its error or skip it.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    _draw_nothing()


@settings(max_examples=1, database=None)
@given(none())
def _draw_nothing(_: None) -> None:
    """Let Hypothesis search the imported modules for constants, which it stores in files."""


@pytest.hookimpl(trylast=True)  # after -m has deselected its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the test files that do not belong to the part of ``--part``."""
    number, count = config.getoption("--part")
    files = sorted({item.path for item in items})
    chosen = set(files[number - 1 :: count])
    left_out = [item for item in items if item.path not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.path in chosen]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Accept a part without tests, because there may be more parts than files."""
    if (
        exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        and session.config.getoption("--part")[1] > 1
    ):
        session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores SIGINT, and so would its child processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Every run has the same examples, so that a test only breaks when the code changes.
    # --hypothesis-profile explore or --hypothesis-seed draws other examples.
    if not config.getoption("--hypothesis-profile", None):
        seeded = config.getoption("--hypothesis-seed", None) is not None
        settings.load_profile("explore" if seeded else "repeatable")
    if (path := config.getoption("--results")) and not hasattr(config, "workerinput"):
        from tests.support.results import Results

        config.pluginmanager.register(Results(path, config.getoption("--target")))
    # kafka-python loads its schemas by functions that are deprecated in Python 3.11.
    config.addinivalue_line(
        "filterwarnings", "ignore:(read_text|open_text) is deprecated:DeprecationWarning"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Download Apache Kafka's jars once, before the workers and outside any test's timeout."""
    # With --reruns a worker sends several small messages for each test. TCP would hold a message
    # back until the previous one is acknowledged, which takes 40 ms.
    connection = getattr(getattr(session.config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if os.environ.get("REQUIRE_ORACLE") != "1" or hasattr(session.config, "workerinput"):
        return
    from tests.support.kafka import OracleMissingError, jars

    with contextlib.suppress(OracleMissingError):  # reported by the fixtures that need the jars
        jars()


@pytest.fixture(scope="session", autouse=True)
def descriptors_stay_few() -> Iterator[None]:
    """Fail if the tests leak descriptors, because paho's select() supports none above 1,023."""
    yield
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) < MOST_DESCRIPTORS


@pytest.fixture(scope="module")
def refrozen() -> Iterator[None]:
    """Freeze the session's objects again after a module whose tests unfreeze all objects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fencepost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Yield one daemon for the whole session."""
    from tests.support.daemon import Daemon

    daemon = Daemon(tmp_path_factory.mktemp("fencepost")).start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Yield one Apache Kafka broker in one JVM for the whole session."""
    from tests.support.kafka import Kafka, served

    yield from served(Kafka(tmp_path_factory.mktemp("kafka")))


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeper]:
    """Yield one ZooKeeper for the whole session. Each cluster has its own chroot path."""
    from tests.support.kafka import served
    from tests.support.zookeeper import ZooKeeper

    yield from served(ZooKeeper(tmp_path_factory.mktemp("zookeeper")), "ZooKeeper")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield one PostgreSQL for the whole session."""
    from tests.support.kafka import required
    from tests.support.postgres import PostgresServer

    with required("PostgreSQL"):
        server = PostgresServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def container() -> Iterator[KafkaInContainer]:
    """Yield one Apache Kafka in a container for the whole session."""
    from tests.support.container import KafkaInContainer
    from tests.support.kafka import OracleMissingError, unavailable

    broker = KafkaInContainer()
    try:
        broker.start()
    except OracleMissingError as missing:
        broker.stop()
        unavailable(str(missing))
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """Return the broker that ``--target`` names."""
    broker: Target = request.getfixturevalue(request.config.getoption("--target"))
    return broker


@pytest.fixture(scope="session")
def bootstrap(target: Target) -> str:
    return target.bootstrap


@pytest.fixture(scope="session")
def secured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secured]:
    """Yield a broker of the kind that ``--target`` names, with listeners that authenticate."""
    from tests.support import secured
    from tests.support.kafka import required

    home = tmp_path_factory.mktemp("secured")
    target = request.config.getoption("--target")
    if target == "container":
        pytest.skip("the container's listener is open")
    broker = secured.SecuredKafka(home) if target == "kafka" else secured.SecuredFencepost(home)
    with required():
        broker.start()
    secured.add_users(broker)
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def java_tools() -> Path:
    """Return the folder of Apache Kafka's jars, for its command-line tools."""
    from tests.support.kafka import jars, required

    with required():
        return jars()


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    """Yield a raw connection to the target."""
    from tests.support.cluster import Cluster

    with Cluster(bootstrap) as connected:
        yield connected
