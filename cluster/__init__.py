"""Metadata, replication and controller state machines. Pure: no clock, no socket, no file."""
