"""Registers Fencepost's data source with Spark, as ``format("fencepost")``.

Spark imports every package called ``pyspark_*`` and uses its ``DefaultSource``, so an installed
distribution needs no registration in the program.
"""

from fencepost.pipelines.spark.datasource import FencepostDataSource as DefaultSource

__all__ = ["DefaultSource"]
