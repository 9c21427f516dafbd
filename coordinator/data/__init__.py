"""What clients write and read: partitions, appends, fetches that wait, retention, compaction."""
