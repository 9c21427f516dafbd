"""Settings: which there are, what they mean here, and what holds now."""
