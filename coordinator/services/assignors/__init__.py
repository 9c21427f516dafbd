"""Custom server-side assignors, run in separate processes."""
