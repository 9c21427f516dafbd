"""The controller machine: decisions on the cluster's state, and the records that follow."""
