"""The controller machine: what is asked of the cluster's state, and what becomes of it."""
