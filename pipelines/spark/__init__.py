"""Spark source and exactly-once sink for any broker that speaks the Kafka protocol.

The package ``pyspark_fencepost`` registers ``format("fencepost")``. Programs call these modules
themselves: ``prepare`` (partitions a DataFrame for direct writes), ``supervise`` (restarts a failed
query), ``java`` (a JVM where none is installed), ``foreach`` (the sink for ``foreachBatch``).
"""
