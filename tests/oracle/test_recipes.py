"""The recipes for the command line print the same on Apache Kafka and on Fencepost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import ROOT
from tests.support.kafka import Kafka
from tests.support.pages import Page, Reader

pytestmark = pytest.mark.oracle


def test_documented_recipes_print_the_same_on_kafka(kafka: Kafka, tmp_path: Path) -> None:
    class KafkasReader(Reader):
        @contextlib.contextmanager
        def _broker(self) -> Iterator[None]:
            yield

        def _port(self, named: str) -> str:
            return kafka.bootstrap.rpartition(":")[2] if named == "9092" else super()._port(named)

    KafkasReader(tmp_path).read(Page(ROOT / "docs" / "recipes.md"))
