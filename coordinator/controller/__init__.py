"""The controller role: the active controller of a quorum of one, and what brokers fetch from it."""
