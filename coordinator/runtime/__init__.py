"""What runs pure state machines on logs: shards, their timers, flushes, work in the background."""
