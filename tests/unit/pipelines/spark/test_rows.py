"""The column types that a sink accepts, at every level of nesting."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from fencepost.pipelines.spark import errors
from fencepost.pipelines.spark.errors import (
    OptionError,
    SparkPipelineError,
    plain_errors,
)
from fencepost.pipelines.spark.options import sink_options
from fencepost.pipelines.spark.rows import check_schema

TEXT, BYTES, INT = StringType(), BinaryType(), IntegerType()


def header(*fields: tuple[str, DataType], nullable: bool = True) -> ArrayType:
    struct = StructType()
    for name, kind in fields:
        struct.add(name, kind, nullable)
    return ArrayType(struct, nullable)


def check(to: str | None = "t", **columns: DataType) -> None:
    told = {"kafka.bootstrap.servers": "h:1", "includeTimestamp": "true"}
    schema = StructType()
    for name, kind in columns.items():
        schema.add(name, kind)
    options = told if to is None else {**told, "topic": to}
    check_schema(schema, sink_options(options, streaming=False))


@pytest.mark.parametrize("nullable", [True, False])
def test_columns_of_supported_types_are_accepted(nullable: bool) -> None:
    for kind in (TEXT, BYTES):
        check(value=kind, key=kind, partition=INT, timestamp=TimestampType())
    for names in (("key", "value"), ("KEY", "Value")):
        kinds = header((names[0], TEXT), (names[1], BYTES), nullable=nullable)
        check(value=TEXT, headers=kinds)
    check(None, value=TEXT, topic=TEXT)
    check(value=TEXT, anything=MapType(INT, INT))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("value", INT),
        ("value", ArrayType(BYTES)),
        ("key", LongType()),
        ("topic", BYTES),
        ("partition", LongType()),
        ("partition", ShortType()),
        ("timestamp", TimestampNTZType()),
        ("headers", TEXT),
        ("headers", ArrayType(TEXT)),
        ("headers", MapType(TEXT, BYTES)),
        ("headers", StructType().add("key", TEXT).add("value", BYTES)),
        ("headers", ArrayType(header(("key", TEXT), ("value", BYTES)))),
        ("headers", header(("key", TEXT))),
        ("headers", header(("k", TEXT), ("v", BYTES))),
        ("headers", header(("value", BYTES), ("key", TEXT))),
        ("headers", header(("key", BYTES), ("value", BYTES))),
        ("headers", header(("key", TEXT), ("value", TEXT))),
        ("headers", header(("key", TEXT), ("value", BYTES), ("more", TEXT))),
    ],
)
def test_column_of_unsupported_type_is_refused_with_the_expected_type(
    name: str, kind: DataType
) -> None:
    with pytest.raises(OptionError) as refusal:
        check(**{"value": TEXT, name: kind})
    told = str(refusal.value)
    assert told.startswith(f"column {name} is {kind.simpleString()}, not ")
    if name == "headers":
        assert "array<struct<key:string,value:binary>>" in told


def test_traceback_is_hidden_only_in_a_worker_and_for_pipeline_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @plain_errors
    class Source:
        def fails(self, error: Exception) -> None:
            raise error

        def rows(self, error: Exception) -> Any:
            yield 1
            raise error

    def is_hidden(error: Exception) -> bool:
        for call in (Source().fails, lambda raised: list(Source().rows(raised))):
            with pytest.raises(type(error)):
                call(error)
        return bool(errors.os.environ.pop("SPARK_HIDE_TRACEBACK", ""))

    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "")
    assert not is_hidden(SparkPipelineError("in a driver"))
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    assert not is_hidden(KeyError("no sentence of ours"))
    assert is_hidden(OptionError("in a worker"))
