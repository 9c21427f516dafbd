"""The controller's state machine: decisions on the metadata, and the resulting records."""
