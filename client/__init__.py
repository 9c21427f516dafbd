"""A client of the protocol, blocking or asynchronous: connections, routing, versions."""
