"""Apache Kafka 4.4, whose clusters a broker of Fencepost joins."""

from __future__ import annotations

from pathlib import Path

from tests.support.kafka import CACHE, ROOT, resolve

POM = ROOT / "tests" / "oracle" / "kafka44.pom.xml"
LIBS = CACHE / "kafka44"


def jars() -> Path:
    """Return the folder of the jars. OracleMissingError says what is missing."""
    resolve(
        POM, {LIBS: "-DincludeScope=runtime"}, CACHE / "kafka44.pom.xml", "kafka_2.13-4.4.*.jar"
    )
    return LIBS
