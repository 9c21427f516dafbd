"""The runtime of pure state machines on logs: shards, timers, flushes, background work."""
