"""Measurements of Fencepost and Apache Kafka, taken in one run with the same clients."""
