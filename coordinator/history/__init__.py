"""The history: a record of decisions and their causes, for people to read."""
