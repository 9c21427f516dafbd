"""Scenarios of real clients, which run against any broker whose bootstrap address is given."""
