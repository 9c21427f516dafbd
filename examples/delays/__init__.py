"""Flights in over MQTT and a loader, through PySpark Structured Streaming, out exactly once."""
