"""Queries of the commands and the console to any Kafka broker; nothing here prints."""
