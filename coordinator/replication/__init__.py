"""A cluster broker's own connections, to controllers and to other brokers."""
