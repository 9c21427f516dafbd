"""The user's side: what reads from and writes to a broker, Fencepost or Apache Kafka alike."""
