"""Fencepost's data source for Spark, which looks for one in every package called ``pyspark_*``.

So ``format("fencepost")`` works wherever the distribution is installed, without registration.
"""

from fencepost.pipelines.spark.datasource import FencepostDataSource as DefaultSource

__all__ = ["DefaultSource"]
