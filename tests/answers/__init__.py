"""Recorded answers of the admin APIs in each kind of cluster."""
