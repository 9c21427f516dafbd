"""Monitoring of a running broker: metrics for Prometheus, health and readiness."""
