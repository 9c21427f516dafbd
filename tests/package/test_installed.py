"""The installation is a single package, and works beside all other packages and files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

import paho.mqtt.publish
import pytest

from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.mosquitto import Mosquitto
from tests.support.pages import LARGE, Page, Reader, pages
from tests.support.processes import Child
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.test_tidy import PARTS
from tests.wire.test_consumer_protocol import member, owned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs"
NO_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
ENVIRONMENT = {**os.environ, "PYTHONPATH": ""}
SHIPPED = ("py", "py.typed", ".css", ".html", ".js", ".svg")
"""Suffixes of installed files: modules, and the console's page."""

RUN_S = 300.0
"""The time limit of one of the user's programs."""

HOSTILE = "raise ImportError('another package of this name')\n"
LIKE_OURS = {"wheel": HOSTILE, "sdist": ""}
"""Distribution → the contents of other packages that have the names of Fencepost's folders."""

slowly = pytest.mark.parametrize("user", ["wheel"], indirect=True)
"""Slow tests use only the wheel, because the sdist installs the same files."""


def run(
    *command: object, cwd: Path, env: Mapping[str, str] = ENVIRONMENT, status: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def distribution(folder: Path, name: str, files: Mapping[str, str], entry_points: str = "") -> Path:
    """Write a wheel of another project, whose packages are named like Fencepost's folders."""
    info = f"{name}-1.0.dist-info"
    kept = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = f"{info}/RECORD"
    kept[record] = "".join(f"{path},,\n" for path in (*kept, record))
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in kept.items():
            archive.writestr(inside, text)
    return path


class Built:
    """A copy of this checkout, with the wheel and the sdist that are built from it."""

    def __init__(self, home: Path) -> None:
        self.source = home / "source"
        shutil.copytree(ROOT, self.source, symlinks=True, ignore=NO_SOURCE)
        for part in PARTS:  # remains of an earlier build
            shutil.copytree(self.source / part, self.source / "build" / "lib" / part)
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        # The environment of the tests may have an older setuptools, and must not be changed.
        tools = home / "tools"
        run(sys.executable, "-m", "pip", "install", "--target", tools, *wanted, cwd=home)
        self.env = {**ENVIRONMENT, "PYTHONPATH": str(tools)}
        self._third_party = home / "third-party"
        self._third_party.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.suffix != ".pth" and "fencepost" not in entry.name:
                (self._third_party / entry.name).symlink_to(entry)
        self.dists = {kind: self._build(kind, home / "dist") for kind in ("sdist", "wheel")}

    def _build(self, kind: str, place: Path) -> Path:
        code = f"from setuptools import build_meta as b; b.build_{kind}({str(place)!r})"
        before = set(place.glob("*"))
        run(sys.executable, "-c", code, cwd=self.source, env=self.env)
        (made,) = set(place.glob("*")) - before
        return made

    def environment(self, home: Path) -> Path:
        """Create a virtual environment and return its Python.

        Required third-party packages come from the environment that runs the tests.
        """
        run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
        (packages(home) / "third-party.pth").write_text(f"{self._third_party}\n")
        return home / "bin" / "python"

    def pip(self, python: Path, *arguments: object) -> None:
        run(sys.executable, "-m", "pip", "--python", python, *arguments, cwd=ROOT, env=self.env)

    def install(self, python: Path, *what: object) -> None:
        self.pip(python, "install", "--no-index", "--no-deps", "--no-build-isolation", *what)


def packages(home: Path) -> Path:
    (found,) = home.glob("lib/python*/site-packages")
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("built"))


class User:
    """A user's environment: Fencepost, packages named like its folders, a folder ``groups``."""

    def __init__(self, built: Built, kind: str, home: Path) -> None:
        self.home = home
        self.packages = home / "venv"
        text = LIKE_OURS[kind]
        others = [distribution(home, name, {f"{name}/__init__.py": text}) for name in PARTS]
        plugin = distribution(
            home,
            "backwards",
            {"backwards.py": (PROGRAMS / "assignor.py").read_text()},
            "[fencepost.assignors]\nbackwards = backwards:Backwards\n",
        )
        self.python = built.environment(self.packages)
        built.install(self.python, built.dists[kind], *others, plugin)
        self.here = home / "project"
        shutil.copytree(PROGRAMS, self.here)
        (self.here / "groups").mkdir()
        (self.here / "groups" / "__init__.py").write_text('OWNER = "the user"\n')

    def serve(self, *command: object, **settings: str) -> Daemon:
        return Daemon(
            self.home / "data",
            {**SETTINGS, **{key.replace("_", "."): value for key, value in settings.items()}},
            command=[*map(str, command), "serve"],
            env=ENVIRONMENT,
            cwd=self.here,
        ).start()

    def run(self, *command: object, bootstrap: str = "") -> str:
        """Run a command from the user's folder, as the user would."""
        env = {**ENVIRONMENT, "FENCEPOST_BOOTSTRAP": bootstrap}
        return run(*command, cwd=self.here, env=env).stdout


@pytest.fixture(scope="session", params=LIKE_OURS)
def user(
    built: Built, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> User:
    return User(built, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def daemon(user: User) -> Iterator[Daemon]:
    """Yield a daemon that uses the user's assignor."""
    started = user.serve(
        user.python, "-m", "fencepost", group_consumer_assignors="uniform,range,backwards"
    )
    yield started
    started.stop()


def test_wheel_and_sdist_contain_one_package_without_links(built: Built) -> None:
    with tarfile.open(built.dists["sdist"]) as archive:
        members = [entry for entry in archive.getmembers() if not entry.isdir()]
        assert all(entry.isreg() for entry in members)
        sdist = {str(PurePosixPath(*PurePosixPath(entry.name).parts[1:])) for entry in members}
    with zipfile.ZipFile(built.dists["wheel"]) as archive:
        wheel = set(archive.namelist())
    tops = {name.partition("/")[0] for name in wheel}
    (info,) = {name for name in tops if name.endswith(".dist-info")}
    assert tops == {"fencepost", "pyspark_fencepost", info}
    ours = {name for name in wheel if not name.startswith(info)}
    kept = {
        *ROOT.glob("fencepost/*.*"),
        *ROOT.glob("pyspark_fencepost/*.*"),
        *(path for part in PARTS for path in (ROOT / part).rglob("*.py")),
        *ROOT.glob("console/static/*"),
    }
    wanted = {
        str(path if path.parts[0].endswith("fencepost") else Path("fencepost", path))
        for path in (file.relative_to(ROOT) for file in kept)
    }
    assert wanted == ours
    assert "fencepost/py.typed" in ours
    assert {name for name in sdist if name.endswith(SHIPPED)} == ours


def test_uninstalled_package_leaves_no_files(built: Built, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    python = built.environment(home)
    before = set(home.rglob("*"))
    for kind, dist in built.dists.items():
        built.install(python, dist)
        run(python, "-m", "fencepost", "topics", "--help", cwd=tmp_path)
        assert (home / "bin" / "fencepost").exists()
        built.pip(python, "uninstall", "--yes", "fencepost")
        assert set(home.rglob("*")) == before, kind


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_install_is_the_same_package(built: Built, tmp_path: Path, mode: str) -> None:
    python = built.environment(tmp_path / "venv")
    told = ("--config-settings", f"editable_mode={mode}")
    built.install(python, *told, "--editable", built.source)
    printed = run(python, PROGRAMS / "in_process.py", cwd=tmp_path).stdout.split()
    assert printed
    assert all(Path(line).is_relative_to(built.source) for line in printed)
    for name in PARTS:
        run(python, "-c", f"import {name}", cwd=tmp_path, status=1)
    search = "import pkgutil; print({name for _, name, _ in pkgutil.iter_modules()})"
    is_found = "'pyspark_fencepost'" in run(python, "-c", search, cwd=tmp_path).stdout
    assert is_found == (mode == "strict")


def test_installed_brokers_run_in_a_user_process(user: User) -> None:
    printed = user.run(user.python, "in_process.py").split()
    assert printed
    assert all(Path(line).is_relative_to(packages(user.packages)) for line in printed)


def test_installed_daemon_serves_a_pipeline(user: User) -> None:
    command = user.packages / "bin" / "fencepost"
    with ExitStack() as stack:
        served = user.serve(command)
        stack.callback(served.stop)
        for step in ("fill", "copy", "verify"):
            user.run(user.python, "words.py", step, bootstrap=served.bootstrap)
        listed = json.loads(
            user.run(command, "groups", "list", "--format", "json", bootstrap=served.bootstrap)
        )
        assert [row["group"] for row in listed] == ["shouters"]
        read = user.run(command, "consume", "loud", "--format", "json", bootstrap=served.bootstrap)
        assert read.count("!") == 60


def test_installed_custom_assignor_is_used(user: User, daemon: Daemon) -> None:
    with Cluster(daemon.bootstrap) as cluster, ExitStack() as stack:
        topic = cluster.create_topic("shared-out", 6)
        members = [
            stack.enter_context(
                member(daemon.bootstrap, "backward", topic, group_remote_assignor="backwards")
            )
            for _ in range(2)
        ]
        until(lambda: owned(*members) == [3, 3], "what the user's assignor makes of it")


@slowly
def test_spark_finds_the_format_by_its_name(user: User, daemon: Daemon) -> None:
    with Cluster(daemon.bootstrap) as cluster:
        source, sink = cluster.create_topic("spark-in"), cluster.create_topic("spark-out")
        cluster.produce(source, [b"one", b"two"])
        user.run(user.python, "spark_copy.py", daemon.bootstrap, source, sink)
        assert cluster.values(sink, isolation=READ_COMMITTED) == [b"one", b"two"]


@slowly
def test_installed_crash_sweep_passes_for_a_user_pipeline(user: User) -> None:
    words = f"{user.python} words.py"
    told = user.run(
        *(user.packages / "bin" / "fencepost", "crash-sweep", "--format", "json"),
        *("--points", "4", "--directory", user.home / "sweep"),
        *(word for pair in SETTINGS.items() for word in ("--config", "=".join(pair))),
        *("--setup", f"{words} fill", "--verify", f"{words} verify", "--"),
        *words.split(),
        "copy",
    )
    verdict = json.loads(told)
    assert verdict["points"] == 4
    assert verdict["failures"] == verdict["skipped"] == 0


def test_installed_mqtt_bridge_writes_messages(user: User, daemon: Daemon) -> None:
    bridge = (str(user.python), "-m", "fencepost.pipelines.mqtt")
    assert "--route" in user.run(*bridge, "--help")
    broker = Mosquitto(user.home / "mosquitto").start()
    try:
        with Cluster(daemon.bootstrap) as cluster:
            topic = cluster.create_topic("readings")
            child = Child(
                [
                    *(*bridge, "--mqtt", f"127.0.0.1:{broker.port}", "--client-id", "bridge"),
                    *("--bootstrap", daemon.bootstrap, "--route", f"a/#={topic}"),
                ],
                env=ENVIRONMENT,
                cwd=user.here,
            )
            try:
                child.wait_for_line("bridge at work", deadline_s=60)
                paho.mqtt.publish.single("a/b", b"21.5", 1, hostname="127.0.0.1", port=broker.port)
                until(lambda: cluster.values(topic) == [b"21.5"], "what was published")
                assert child.terminate() == 0
            finally:
                child.kill()
    finally:
        broker.kill()


@slowly
def test_type_checker_uses_the_installed_types(user: User) -> None:
    checked = user.here / "typed.py"
    checked.write_text(
        "from fencepost import Broker\nfrom fencepost.pipelines import ExactlyOnce\n"
    )
    command = (sys.executable, "-m", "mypy", "--strict", "--python-executable", user.python)
    user.run(*command, checked)
    checked.write_text(checked.read_text() + "Broker(data_dir=1)\nExactlyOnce(2)\n")
    told = run(*command, checked, cwd=user.here, status=1).stdout
    assert 'Argument "data_dir" to "Broker" has incompatible type "int"' in told
    assert 'to "ExactlyOnce" has incompatible type "int"' in told


def test_readme_commands_run_in_a_clean_environment(built: Built, tmp_path: Path) -> None:
    """Run the unchanged lines, but let `pip install` install the wheel instead of the clone."""
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", home, cwd=tmp_path)
    page = Page(ROOT / "README.md")
    assert any(block.runs and "pip install" in block.text for block in page.blocks)
    Reader(tmp_path / "reader", bin_dir=home / "bin", clone=str(built.dists["wheel"])).read(page)


OF_LARGE = [
    path for path in pages() if any(b.words.get("needs") in LARGE for b in Page(path).blocks)
]


@pytest.mark.parametrize("path", OF_LARGE, ids=lambda path: path.name)
def test_code_blocks_with_large_requirements_run(path: Path, tmp_path: Path) -> None:
    Reader(tmp_path, everything=True).read(Page(path))
