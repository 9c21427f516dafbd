"""A broker as a process, as an object and in a thread."""
