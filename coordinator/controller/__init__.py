"""The controller role: the active controller of a quorum of one, and its log for brokers."""
