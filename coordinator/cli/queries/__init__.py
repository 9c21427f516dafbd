"""What the command line asks brokers, Fencepost or Apache Kafka, without printing it."""
