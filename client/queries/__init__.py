"""Queries of the command line to brokers, Fencepost or Apache Kafka, without any printing."""
