"""Apache Kafka 4.3: for upgrades to 4.4, and its own tests, which are not published for 4.4."""

from __future__ import annotations

from pathlib import Path

from tests.support.kafka import CACHE, ROOT, resolve

POM = ROOT / "tests" / "oracle" / "kafka43.pom.xml"
LIBS = CACHE / "kafka43"
TESTS = CACHE / "kafka43-tests"
"""The folder of the jars of Kafka's own tests and their runner, which brokers must not load."""


def jars() -> Path:
    """Return the folder of the jars without tests. OracleMissingError says what is missing."""
    folders = {LIBS: "-DincludeScope=runtime", TESTS: "-DexcludeScope=runtime"}
    resolve(POM, folders, CACHE / "kafka43.pom.xml", "kafka_2.13-4.3.*.jar")
    return LIBS
