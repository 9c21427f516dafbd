"""Scenarios of real clients, which run against any broker by its bootstrap address."""
