"""Metadata, replication and controller state machines, without clock, socket or file."""
