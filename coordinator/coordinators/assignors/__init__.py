"""Assignors that other people wrote, in processes of their own."""
