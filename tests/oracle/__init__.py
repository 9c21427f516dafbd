"""Apache Kafka as judge: its tools over our files, its answers beside ours."""
