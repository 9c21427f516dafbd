"""Spark source and exactly-once sink for any broker that speaks the Kafka protocol.

``format("fencepost")`` is registered by the package ``pyspark_fencepost``. What a program calls
itself stands in the modules: ``prepare`` (partitions a DataFrame for direct writes), ``supervise``
(restarts a failed query), ``java`` (a JVM where none is installed), ``foreach`` (the sink for
``foreachBatch``).
"""
