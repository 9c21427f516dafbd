"""Apache Kafka as oracle: its tools read our files, and its responses are compared with ours."""
