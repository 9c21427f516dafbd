"""Brokers of either kind that receive client telemetry."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.kafka import Kafka, OracleMissingError, jars, run_to_end

RECEIVER = Path(__file__).with_name("TelemetryReceiver.java")


ENABLED = {"fencepost.client.telemetry.enable": "true"}
"""The settings with which Fencepost serves client telemetry."""


def with_receiver(home: Path, settings: Mapping[str, str]) -> Kafka:
    """Return Apache Kafka with a plugin that makes it serve client telemetry.

    Raises OracleMissingError.
    """
    if shutil.which("javac") is None:
        raise OracleMissingError("`javac` is not on the PATH")
    found, libs = jars(), home / "libs"
    libs.mkdir()
    for jar in found.glob("*.jar"):
        (libs / jar.name).symlink_to(jar)
    command = ("javac", "-d", str(home / "classes"), "-cp", f"{found}/*", str(RECEIVER))
    run_to_end(command, deadline_s=120)
    with zipfile.ZipFile(libs / "receiver.jar", "w") as jar_file:
        for path in (home / "classes").glob("*.class"):
            jar_file.write(path, path.name)
    return Kafka(home, {**settings, "metric.reporters": RECEIVER.stem}, libs=lambda: libs)
