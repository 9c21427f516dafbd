"""Comparisons with Apache Kafka: it reads Fencepost's files, and its responses must be the same."""
