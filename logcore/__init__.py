"""Bytes and files of a log: record batches, segments, indexes, recovery, producer state."""

if not __name__.startswith("fencepost."):
    raise ImportError("this package is fencepost.logcore: import it by that name")
