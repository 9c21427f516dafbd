"""A client of the protocol, blocking or not: connections, routing, versions."""
