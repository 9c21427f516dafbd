"""Flights over MQTT and from a loader, through PySpark Structured Streaming, exactly once."""
