"""The metadata of topics, features and settings, and the log of their changes."""
