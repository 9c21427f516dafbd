"""Sockets: accept connections, read requests and write responses within limits."""
