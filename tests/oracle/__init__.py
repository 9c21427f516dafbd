"""Comparisons with Apache Kafka, which reads Fencepost's files and gives the same responses."""
