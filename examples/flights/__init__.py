"""Exactly-once delay events and carrier totals from every flight out of New York in 2013."""
