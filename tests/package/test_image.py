"""The container image: the Dockerfile builds it from local files, and it runs as with compose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fencepost.client.client import WireClient
from tests.support.container import engine_missing, python_image
from tests.support.daemon import ROOT
from tests.support.kafka import unavailable
from tests.support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IMAGE = "fencepost-tests/fencepost"
PORTS = (9092, 29092)
LOCKED = ("requirements.txt", "build-requirements.txt")
"""Requirement files with versions and hashes, which are installed from a package index."""


def run(*command: object, status: int = 0) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    if missing := engine_missing():
        unavailable(missing, "a container engine")
    context = tmp_path_factory.mktemp("image") / "context"
    # Leave out the caches of other tools, which may change while they are copied.
    hidden = (".git", ".venv", ".*cache", ".hypothesis", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, context, symlinks=True, ignore=shutil.ignore_patterns(*hidden))
    wheels = context / "build" / "wheelhouse"
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--require-hashes")
    for name in LOCKED:
        run(*pip, "--wheel-dir", wheels, "--requirement", ROOT / "packaging" / name)
    arguments = {
        "PYTHON": python_image(),
        "PIP_OPTIONS": "--no-index --find-links build/wheelhouse",
    }
    options = [word for pair in arguments.items() for word in ("--build-arg", "=".join(pair))]
    # The build needs no registry, and runs without a network.
    run("docker", "build", "--network", "none", *options, "--tag", IMAGE, context)
    return IMAGE


_COMPOSE_FILE = (ROOT / "packaging/compose.yaml").read_text()
COMPOSE = dict(re.findall(r'^ {6}(FENCEPOST_\w+): "?(.+?)"?$', _COMPOSE_FILE, re.MULTILINE))
"""The broker's environment in the compose file."""


@pytest.fixture
def container(image: str) -> Iterator[str]:
    settings = [word for pair in COMPOSE.items() for word in ("--env", "=".join(pair))]
    ports = [word for port in PORTS for word in ("--publish", f"127.0.0.1:0:{port}")]
    name = run("docker", "run", "--detach", *ports, *settings, image)
    yield name
    run("docker", "rm", "--force", "--volumes", name)


def inspected(name: str) -> dict[str, object]:
    (found,) = json.loads(run("docker", "inspect", name))
    assert isinstance(found, dict)
    return found


def test_image_serves_as_unprivileged_user_and_becomes_healthy(container: str) -> None:
    until(lambda: inspected(container)["State"]["Health"]["Status"] == "healthy", "healthy")  # type: ignore[index]
    assert run("docker", "exec", container, "id", "-u") == "1000"
    assert "listening 0.0.0.0:9092" in run("docker", "logs", container)
    told = []
    for port in PORTS:
        with WireClient(run("docker", "port", container, f"{port}/tcp")) as client:
            (broker,) = client.metadata(refresh=True).brokers.values()
        told.append(f"{broker.host}:{broker.port}")
    assert told == ["fencepost:9092", "localhost:29092"], "inside and outside have their own names"


def test_new_container_has_the_data_of_a_stopped_one(image: str, tmp_path: Path) -> None:
    volume = f"fencepost-tests-{tmp_path.name}"
    mount = ("--volume", f"{volume}:/var/lib/fencepost")
    first, second = (f"{volume}-{number}" for number in (1, 2))
    try:
        run("docker", "run", "--detach", "--name", first, *mount, image)
        until(lambda: "listening" in run("docker", "logs", first), "it serves")
        run("docker", "exec", first, "fencepost", "topics", "create", "kept")
        run("docker", "stop", "--time", "60", first)
        assert inspected(first)["State"]["ExitCode"] == 0  # type: ignore[index]
        run("docker", "rm", first)
        run("docker", "run", "--detach", "--name", second, *mount, image)
        until(lambda: "listening" in run("docker", "logs", second), "it serves")
        assert "kept" in run("docker", "exec", second, "fencepost", "topics", "list")
    finally:
        for name in (first, second):
            run("docker", "rm", "--force", "--volumes", name)
        run("docker", "volume", "rm", "--force", volume)


def test_image_contains_only_the_package(image: str) -> None:
    inside = "/opt/fencepost/lib/python*/site-packages"
    listed = run("docker", "run", "--rm", "--entrypoint", "sh", image, "-c", f"ls -d {inside}/*")
    names = {Path(line).name for line in listed.splitlines()}
    assert "fencepost" in names
    assert not names & {"tests", "bench", "examples", "pip", "pyspark", "aiokafka"}


def test_locked_versions_satisfy_the_package_requirements() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*asked["project"]["dependencies"], *asked["build-system"]["requires"]]
    locked = "".join((ROOT / "packaging" / name).read_text() for name in LOCKED)
    found = dict(re.findall(r"^([\w-]+)==(\S+)", locked, re.MULTILINE))
    assert len(found) == len(re.findall(r"^[^ #].* \\\n    --hash=sha256:", locked, re.MULTILINE))
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(
            found[canonicalize_name(requirement.name)], prereleases=True
        ), f"make lock: {requirement}"
