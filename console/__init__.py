"""The web console: a process of its own, which is a client of any Kafka broker."""
