"""Scenarios of real clients; each judges any broker by its bootstrap address."""
