"""Recorded responses of the admin APIs in each kind of cluster."""
