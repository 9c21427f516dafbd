"""Sockets: accepting, reading requests, writing responses, within limits of memory and number."""
