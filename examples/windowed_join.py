"""Two streams joined by time on Spark: each flight with the weather of its hour and airport.

Both sides have watermarks, so that Spark can drop a reading once no flight can need it. The query
is stopped half-way and restarted from its checkpoint; every flight comes out once.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from examples.broker import create_topics, fresh, produce, read_topic, run
from examples.flights.data import fetch, flights
from fencepost.pipelines.spark import java

CACHE = Path(".cache/flights")
UNTIL = "2013-01-16"
BATCH = 2_000
DEADLINE_S = 240
FLIGHT = "id int, origin string, time timestamp"
READING = "origin string, time timestamp, temp double, visib double"

Record = tuple[bytes, bytes, int | None]


def inputs() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the flights and the readings of half a month, in order of time."""
    fetch(CACHE)
    ours = [
        {"id": number, "origin": row["origin"], "time": row["time_hour"]}
        for number, row in enumerate(flights(CACHE))
        if row["time_hour"] < UNTIL
    ]
    with (CACHE / "weather.csv").open(encoding="utf-8", newline="") as file:
        readings = [
            {
                "origin": row["origin"],
                "time": row["time_hour"],
                "temp": float(row["temp"]),
                "visib": float(row["visib"]),
            }
            for row in csv.DictReader(file)
            if row["time_hour"] < UNTIL
        ]
    return sorted(ours, key=_time), sorted(readings, key=_time)


def _time(record: dict[str, Any]) -> str:
    return str(record["time"])


def _records(rows: list[dict[str, Any]]) -> list[Record]:
    return [(row["origin"].encode(), json.dumps(row).encode(), None) for row in rows]


def stream(spark: SparkSession, bootstrap: str, topic: str, schema: str) -> DataFrame:
    """Return a topic of JSON records as columns, with a watermark on their event time."""
    raw = (
        spark.readStream.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", BATCH)
        .load()
    )
    columns = raw.select(fn.from_json(raw["value"].cast("string"), schema).alias("r")).select("r.*")
    return columns.withWatermark("time", "2 days")


def start(
    spark: SparkSession, bootstrap: str, topics: tuple[str, str, str], checkpoint: str
) -> StreamingQuery:
    """Join and write, exactly once."""
    left = stream(spark, bootstrap, topics[0], FLIGHT).alias("f")
    right = stream(spark, bootstrap, topics[1], READING).alias("w")
    joined = left.join(
        right,
        fn.expr("f.origin = w.origin AND f.time >= w.time AND f.time < w.time + INTERVAL 1 HOUR"),
    )
    return (
        joined.select(
            fn.col("f.id").cast("string").alias("key"),
            fn.to_json(fn.struct("f.id", "w.temp", "w.visib")).alias("value"),
        )
        .writeStream.format("fencepost")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", topics[2])
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )


def join(bootstrap: str, topics: tuple[str, str, str]) -> None:
    """Run the query, stop it half-way, and run it to the end. Raises the query's error."""
    java.launch()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory(prefix="fencepost-join-") as checkpoint:
        first = start(spark, bootstrap, topics, checkpoint)
        deadline = time.monotonic() + DEADLINE_S
        while first.isActive and not first.recentProgress and time.monotonic() < deadline:
            time.sleep(0.1)
        first.stop()
        print(f"stopped after {len(first.recentProgress)} micro-batches, started again")
        second = start(spark, bootstrap, topics, checkpoint)
        if not second.awaitTermination(DEADLINE_S):
            raise TimeoutError(f"the query was not done within {DEADLINE_S} s")
    spark.stop()


async def example(bootstrap: str) -> str | None:
    """Load both streams, join, compare with the truth from the files."""
    ours, readings = inputs()
    topics = fresh("flights"), fresh("weather"), fresh("flights-weather")
    await create_topics(bootstrap, *((topic, 2) for topic in topics))
    await produce(bootstrap, topics[0], _records(ours))
    await produce(bootstrap, topics[1], _records(readings))
    await asyncio.to_thread(join, bootstrap, topics)
    known = {(row["origin"], row["time"]): row for row in readings}
    truth = {
        row["id"]: {"id": row["id"], "temp": reading["temp"], "visib": reading["visib"]}
        for row in ours
        if (reading := known.get((row["origin"], row["time"]))) is not None
    }
    found = [json.loads(record.value) for record in await read_topic(bootstrap, topics[2])]
    print(f"{len(ours)} flights, {len(readings)} readings, {len(found)} pairs")
    if len(found) != len({row["id"] for row in found}):
        return "flights were doubled"
    return None if {row["id"]: row for row in found} == truth else "pairs are missing or wrong"


if __name__ == "__main__":
    sys.exit(run(__doc__, example))
