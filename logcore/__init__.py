"""Bytes and files of a log: record batches, segments, indexes, recovery, producer state."""
