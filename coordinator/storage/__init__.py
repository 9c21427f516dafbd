"""The data plane: partitions, appends, fetches, sessions, retention, compaction."""
