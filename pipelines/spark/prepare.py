"""Prepares a DataFrame for tasks that write directly on a cluster: one task per partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkAttributeError

from fencepost.pipelines.spark.broker import ClusterConnection
from fencepost.pipelines.spark.errors import OptionError
from fencepost.pipelines.spark.options import security_of
from fencepost.pipelines.spark.partitioner import partitions_of
from fencepost.pipelines.spark.rows import PREPARED
from fencepost.pipelines.spark.task import attempts_of, takes_turns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def prepare(
    df: DataFrame,
    *,
    bootstrap: str,
    topic: str,
    writers: int | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Choose each row's partition of ``topic`` as Kafka's Java producer does, and shuffle by it.

    This must be the last step before ``writeStream`` or ``write``: the sink refuses rows that were
    moved afterwards. A row keeps a ``partition`` that is already set; rows without a key are
    distributed by their value. ``writers`` tasks write, at most one per partition (default: one per
    core). ``options`` are the sink's options, of which only the connection settings are used.

    Under a local master the tasks write directly in any case, in turns: ``df`` is returned
    unchanged unless ``writers`` is given. Raises :class:`OptionError` for settings under which
    Spark could write rows twice.
    """
    spark = df.sparkSession
    check_session(spark)
    if writers is None and takes_turns("auto", attempts_of(spark.sparkContext.master)):
        return df
    link = ClusterConnection(
        bootstrap,
        client_id="fencepost-spark-prepare",
        security=security_of({key.lower(): value for key, value in (options or {}).items()}),
    )
    try:
        count = len(link.partitions(topic))
    finally:
        link.close()
    tasks = max(1, min(writers or spark.sparkContext.defaultParallelism, count))
    placed = _placed(df, count)
    spread = placed.repartitionById(tasks, placed["partition"])
    return spread.withMetadata("partition", {PREPARED: {"topic": topic, "writers": tasks}})


def _placed(df: DataFrame, count: int) -> DataFrame:
    from pyspark.sql import functions as fn  # noqa: PLC0415 - Spark is there when a DataFrame is

    if "partition" in df.columns and not df.schema["partition"].nullable:
        return df
    unkeyed = fn.pmod(fn.xxhash64(df["value"]), fn.lit(count)).cast("int")
    chosen = unkeyed
    if "key" in df.columns:
        hashed = _hashed(count)(df["key"])
        chosen = fn.when(df["key"].isNull(), unkeyed).otherwise(hashed)
    if "partition" in df.columns:
        chosen = fn.coalesce(df["partition"], chosen)
    return df.withColumn("partition", chosen.cast("int"))


def _hashed(count: int) -> Any:
    # PySpark's annotations omit arrow_udf.
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined]  # noqa: PLC0415

    def target(keys: pa.Array) -> pa.Array:
        return pa.array(partitions_of(keys, count, 0))

    return arrow_udf(target, "int")


def check_session(spark: SparkSession) -> None:
    """Refuse settings under which two attempts of a task could write its rows.

    Raises :class:`OptionError`.
    """
    try:
        context = spark.sparkContext
    except PySparkAttributeError:
        raise OptionError(
            "prepare() reads settings of the cluster that Spark Connect does not show its clients:"
            " write without it, in mode=staged"
        ) from None
    conf = context.getConf()
    if conf.get("spark.speculation", "false").lower() == "true":
        raise OptionError(
            "spark.speculation runs tasks twice at a time: a shared transaction can't be written"
            " to under it. Switch it off, or write with mode=staged and without prepare()"
        )
    attempts = conf.get("spark.stage.maxConsecutiveAttempts", "4")
    if not attempts_of(context.master) and attempts != "1":
        raise OptionError(
            f"spark.stage.maxConsecutiveAttempts is {attempts}: a stage that runs again looks like"
            " the first time to its tasks. Set it to 1, or write with mode=staged"
        )
