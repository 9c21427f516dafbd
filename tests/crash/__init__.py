"""The real daemon, killed at every step; what was acknowledged must be there afterwards."""
