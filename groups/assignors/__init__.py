"""Server-side assignors of the consumer protocol: assignment of partitions to members."""
