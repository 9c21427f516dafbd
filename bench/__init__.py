"""Measurements of Fencepost beside Apache Kafka, taken in one run with the same clients."""
