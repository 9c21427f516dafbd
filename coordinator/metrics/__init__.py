"""What an operator sees of a running broker: metrics for Prometheus, and whether it is well."""
