"""Spark looks into every package called ``pyspark_*`` for a data source; this is Fencepost's.

So ``format("fencepost")`` works wherever the distribution is installed, with nothing to register.
"""

from fencepost.pipelines.spark.datasource import FencepostDataSource as DefaultSource

__all__ = ["DefaultSource"]
