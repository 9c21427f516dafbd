"""A user's job, which uses Spark's format by name to copy WORDS to a topic of two partitions."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from fencepost.pipelines.spark.java import use_shim

BOOTSTRAP, SOURCE, SINK = sys.argv[1:]

use_shim()
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
told = {"kafka.bootstrap.servers": BOOTSTRAP}
rows = spark.read.format("fencepost").options(**told).option("subscribe", SOURCE).load()
written = rows.select("value").write.format("fencepost").mode("append")
written.options(**told).option("topic", SINK).save()
spark.stop()
